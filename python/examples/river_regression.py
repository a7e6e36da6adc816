"""A regressor with the methods of the package river, where examples are dicts that come one at a time, and a second
regressor, which also forgets examples.

The readings of a sensor drift, so the regression uses exactly the window of the newest 500 readings: each new reading
is learned, and the oldest is forgotten. `OnlineRidge` has `learn_one` and `predict_one` itself; river's tools need an
object of river's class `Regressor`.
"""

import random
from collections import deque

from cmab_kernels import OnlineRidge

try:
    from river.base import Regressor
except ImportError:
    Regressor = object


class Ridge(Regressor):
    """Ridge regression on the features of the first example; a feature that is missing later is 0."""

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha
        self.model = OnlineRidge(alpha)

    def learn_one(self, x: dict[str, float], y: float) -> None:
        self.model.learn_one(x, y)

    def forget_one(self, x: dict[str, float], y: float) -> None:
        self.model.forget([[x.get(name, 0.0) for name in self.model.feature_names_in_]], [y])

    def predict_one(self, x: dict[str, float]) -> float:
        """Return 0.0 before the first example."""
        return self.model.predict_one(x)


def readings(number: int) -> list[tuple[dict[str, float], float]]:
    """Temperatures and humidities with the values of a gauge whose zero drifts by 3 in the middle of the stream."""
    random.seed(0)
    stream = []
    for i in range(number):
        x = {"temperature": random.gauss(20, 5), "humidity": random.gauss(50, 10)}
        drift = 3 * min(max((i - 1500) / 200, 0), 1)
        stream.append((x, 0.5 * x["temperature"] - 0.1 * x["humidity"] + drift + random.gauss(0, 0.1)))
    return stream


def main() -> None:
    everything, window = Ridge(), Ridge()
    held: deque[tuple[dict[str, float], float]] = deque()
    errors: dict[str, list[float]] = {"everything": [], "the newest 500": []}
    for x, y in readings(3000):
        for name, model in zip(errors, (everything, window), strict=True):
            errors[name].append(abs(model.predict_one(x) - y))
            model.learn_one(x, y)
        held.append((x, y))
        if len(held) > 500:
            window.forget_one(*held.popleft())
    for name, each in errors.items():
        before, after = sum(each[500:1500]) / 1000, sum(each[2200:]) / 800
        print(f"learned from {name}: mean error {before:.2f} before the drift, {after:.2f} after it")
    assert window.model.n_samples_seen_ == 500
    assert sum(errors["the newest 500"][2200:]) < 0.2 * sum(errors["everything"][2200:])


if __name__ == "__main__":
    main()

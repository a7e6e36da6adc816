"""`python -m bench.online_regression`: the time for one example of a stream, which is predicted and then learned, by
`OnlineRidge` and by its peers.

Peers that compute the same result agree with it to 1e-9 before anything is timed. Peers with gradient descent compute
something else: their error is shown with ours. All methods are timed in turn. river and scikit-learn are measured if
they are installed.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from cmab_kernels import OnlineRidge

ALPHA, WARM, CALLS, ROUNDS = 1.0, 500, 50, 30
Learner = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function from examples X (N, D) and y (N,) to the predictions at X before they were learned."""


def of_estimator(model: Any, fitted: str) -> Learner:
    """A learner made from a scikit-learn estimator, which has the attribute `fitted` when it has learned something."""

    def learn(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        guess = model.predict(x) if hasattr(model, fitted) else np.zeros(len(x))
        model.partial_fit(x, y)
        return guess

    return learn


def ridge(fit_intercept: bool) -> Learner:
    return of_estimator(OnlineRidge(ALPHA, fit_intercept=fit_intercept), "n_features_in_")


def one_by_one() -> Learner:
    """`OnlineRidge` with its methods for one example, which take dicts, as in river."""
    return of_dicts(OnlineRidge(ALPHA))


def recursive_least_squares(width: int) -> Learner:
    """Ridge regression without an intercept, by the inverse of its system, which is updated for each example."""
    inverse, weight = np.eye(width) / ALPHA, np.zeros(width)

    def one(x: np.ndarray, y: float) -> float:
        guess, along = x @ weight, inverse @ x
        gain = along / (1 + x @ along)
        weight[:] += gain * (y - guess)
        inverse[:] -= np.outer(gain, along)
        return float(guess)

    return lambda x, y: np.array([one(*each) for each in zip(x, y, strict=True)])


def sums_in_numpy(width: int) -> Learner:
    """Ridge regression without an intercept, by its sums and a solve after each call: without weights, forgetting,
    checks, or a guard of its digits."""
    gram, moment = ALPHA * np.eye(width), np.zeros(width)

    def learn(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        guess: np.ndarray = x @ np.linalg.solve(gram, moment)
        gram[:] += x.T @ x
        moment[:] += x.T @ y
        return guess

    return learn


def stochastic_gradient_of_sklearn() -> Learner:
    from sklearn.linear_model import SGDRegressor

    return of_estimator(SGDRegressor(learning_rate="constant", eta0=0.01), "coef_")


def of_river(name: str) -> Learner:
    from river import linear_model

    return of_dicts(getattr(linear_model, name)())


def of_dicts(model: Any) -> Learner:
    def one(x: np.ndarray, y: float) -> float:
        features = dict(enumerate(x.tolist()))
        guess = model.predict_one(features)
        model.learn_one(features, y)
        return float(guess)

    return lambda x, y: np.array([one(*each) for each in zip(x, y, strict=True)])


def learners(width: int) -> Iterator[tuple[str, Learner]]:
    yield "OnlineRidge, without an intercept", ridge(False)
    yield "OnlineRidge", ridge(True)
    yield "OnlineRidge, predict_one and learn_one", one_by_one()
    yield "recursive least squares in NumPy", recursive_least_squares(width)
    yield "sums and a solve in NumPy", sums_in_numpy(width)
    if importlib.util.find_spec("sklearn"):
        yield "scikit-learn, SGDRegressor.partial_fit", stochastic_gradient_of_sklearn()
    if importlib.util.find_spec("river"):
        yield "river, BayesianLinearRegression", of_river("BayesianLinearRegression")
        yield "river, LinearRegression (gradient descent)", of_river("LinearRegression")


def measured(width: int, block: int) -> Iterator[tuple[str, float, list[float]]]:
    """Name, root mean squared error after 500 examples, and quartiles of microseconds per example, with the minimum
    before them."""
    random = np.random.default_rng(0)
    x = random.normal(size=(WARM + block * CALLS * ROUNDS, width))
    y = x @ random.normal(size=width) + 0.1 * random.normal(size=len(x))
    made = dict(learners(width))
    guesses = {name: [learn(x[i : i + 1], y[i : i + 1]) for i in range(WARM)] for name, learn in made.items()}
    exact = np.concatenate(guesses["recursive least squares in NumPy"])
    for name in ("OnlineRidge, without an intercept", "sums and a solve in NumPy"):
        assert np.allclose(np.concatenate(guesses[name]), exact, rtol=1e-9, atol=1e-9)
    taken: dict[str, list[float]] = {name: [] for name in made}
    errors: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(ROUNDS):
        start = WARM + turn * block * CALLS
        calls = [slice(start + i * block, start + (i + 1) * block) for i in range(CALLS)]
        for name, learn in made.items():
            begin = time.perf_counter()
            found = [learn(x[rows], y[rows]) for rows in calls]
            taken[name].append((time.perf_counter() - begin) * 1e6 / (block * CALLS))
            errors[name] += [float(np.square(guess - y[rows]).mean()) for guess, rows in zip(found, calls, strict=True)]
    for name, times in taken.items():
        yield name, statistics.mean(errors[name]) ** 0.5, [min(times), *statistics.quantiles(times)]


def main() -> None:
    torch.set_num_threads(1)
    print("| features | examples in a call | learner | us an example: least | quartiles | error (0.1 is the noise) |")
    print("|---|---|---|---|---|---|")
    for width, block in ((5, 1), (8, 1), (32, 1), (8, 40), (8, 100)):
        for name, error, (least, low, middle, high) in measured(width, block):
            print(f"| {width} | {block} | {name} | {least:.2f} | {low:.2f}, {middle:.2f}, {high:.2f} | {error:.3f} |")


if __name__ == "__main__":
    main()

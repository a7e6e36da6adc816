"""`reduce_states`: states that workers read and merge in a tree equal the state of a single reader."""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import cmab_kernels as ck
from cmab_kernels import nn
from cmab_kernels.distributed import reduce_states

PARTS = [slice(0, 30), slice(30, 31), slice(31, 55), slice(55, 80), slice(80, 100)]


def _data(rows: int = 100) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 4))
    return x, x @ np.arange(4.0) + random.normal(size=rows)


def _regression(rows: slice, **parameters: Any) -> ck.OnlineRidge:
    x, y = _data()
    return ck.OnlineRidge(0.1, **parameters).fit(x[rows], y[rows])


def _sums(rows: slice) -> ck.RidgeState:
    x, y = (torch.from_numpy(each[rows]) for each in _data())
    return ck.ridge_state(x[None, None], y[None, None, :, None])


def _stack() -> nn.CMABStack:
    torch.manual_seed(0)
    return nn.CMABStack(dim=4, num_latents=3, num_heads=2, depth=2).double()


def _points(rows: int = 100) -> torch.Tensor:
    return torch.from_numpy(_data(rows)[0])


@pytest.fixture(params=["threads", "processes", "dask"], scope="module")
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "threads":
        with ThreadPoolExecutor(3) as pool:
            yield pool
    elif request.param == "processes":
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            yield pool
    else:
        if importlib.util.find_spec("distributed") is None:
            pytest.skip("the package dask[distributed] is not installed")
        from distributed import Client

        with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
            yield cluster


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("forgetting", [1.0, 0.9])
def test_a_regression_equals_one_fit(client: Any, parts: int, forgetting: float) -> None:
    """The partitions keep their order, because a forgetting factor depends on it."""
    model = reduce_states(client, functools.partial(_regression, forgetting=forgetting), PARTS[:parts])
    right = _regression(slice(0, PARTS[parts - 1].stop), forgetting=forgetting)
    np.testing.assert_allclose(model.coef_, right.coef_, rtol=1e-11)
    assert model.n_samples_seen_ == right.n_samples_seen_


def test_sums_equal_those_of_all_keys(client: Any) -> None:
    torch.testing.assert_close(reduce_states(client, _sums, PARTS), _sums(slice(0, 100)), rtol=1e-12, atol=1e-12)


def test_a_stack_reads_partitions(client: Any) -> None:
    stack, points = _stack(), _points()
    state = reduce_states(client, stack.encode, [points[rows] for rows in PARTS])
    latents = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(stack.retrieve(latents, state), stack(points[None], latents), rtol=1e-12, atol=1e-12)
    assert not state.out.requires_grad


class Counted(Executor):
    """An executor that runs tasks at once, and records the bytes of the states that each merge takes."""

    def __init__(self) -> None:
        self.tasks: list[str] = []
        self.sent: set[int] = set()

    def submit(self, function: Any, /, *arguments: Any, **_: Any) -> Future:
        self.tasks.append(function.__name__)
        if function.__name__ == "_union":
            self.sent |= {len(pickle.dumps(state)) for state in arguments}
        future: Future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


def test_what_a_merge_sends_does_not_depend_on_the_rows() -> None:
    def sent(rows: int) -> set[int]:
        x, y = _data(rows)
        parts = np.array_split(np.arange(rows), 4)
        client, stack = Counted(), _stack()
        reduce_states(client, lambda part: ck.OnlineRidge().fit(x[part], y[part]), parts)
        reduce_states(client, lambda part: stack.encode(torch.from_numpy(x[part])), parts)
        return client.sent

    few, many = sent(100), sent(100_000)
    assert few == many and len(few) == 2 and max(few) < 10_000


class Remote:
    """A substitute for a future of Dask, which is not a future of Python: only a worker reads it."""

    def __init__(self, value: Any) -> None:
        self.value, self.read = value, False

    def result(self) -> Any:
        self.read = True
        return self.value

    def cancel(self) -> None: ...


class Workers:
    """A substitute for a client of Dask: a worker replaces futures among its arguments by their values."""

    def __init__(self) -> None:
        self.futures: list[Remote] = []

    def submit(self, function: Any, *arguments: Any) -> Remote:
        values = [each.value if isinstance(each, Remote) else each for each in arguments]
        self.futures.append(Remote(function(*values)))
        return self.futures[-1]


def test_states_stay_on_the_workers() -> None:
    """The caller fetches only the last state, and a partition may be a future."""
    client = Workers()
    merged = reduce_states(client, _regression, [Remote(PARTS[0]), *PARTS[1:]])
    assert merged.n_samples_seen_ == 100 and [future.read for future in client.futures] == [False] * 8 + [True]


def test_merges_form_a_tree() -> None:
    """5 partitions take 2 merges, then 1, then 1. The states of partitions do not change."""
    x, y = _data()
    states = [ck.OnlineRidge().fit(x[rows], y[rows]) for rows in PARTS]
    client = Counted()
    merged = reduce_states(client, lambda part: states[part], range(5))
    assert client.tasks == ["_state_of"] * 5 + ["_union"] * 4
    assert merged.n_samples_seen_ == 100 and [each.n_samples_seen_ for each in states] == [30, 1, 24, 25, 20]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, _sums, PARTS), r"^client: got None, expected an object with a method submit"),
        ((Counted(), None, PARTS), r"^function: got None, expected a function"),
        ((Counted(), _sums, []), r"^partitions: got none, expected at least one"),
        ((Counted(), _data, [10]), r"^function: got a tuple from it, expected a function that returns"),
        (
            (Counted(), lambda part: _sums(slice(0, 5)) if part else _regression(slice(0, 5)), range(2)),
            r"^other: got a RidgeState",
        ),
        (
            (Counted(), lambda part: _regression(slice(0, 5), fit_intercept=bool(part)), range(2)),
            r"^other: got fit_intercept True",
        ),
    ],
)
def test_what_does_not_fit_is_named(arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        reduce_states(*arguments)


def test_an_error_of_a_partition_ends_the_rest() -> None:
    """Tasks that have not begun are cancelled."""
    begun: list[int] = []

    def read(part: int) -> ck.RidgeState:
        begun.append(part)
        if part:
            time.sleep(0.001)
        raise OSError("no such file")

    with ThreadPoolExecutor(1) as client, pytest.raises(OSError, match=r"^no such file"):
        reduce_states(client, read, range(1000))
    assert len(begun) < 1000

"""The measurements of the demos and the benchmarks: peak memory, and calls that are timed in turn."""

from __future__ import annotations

import pytest

from cmab_kernels.measure import interleave, peak_memory, readable, seconds

from .memory_tasks import MIB, failing, planted

TOLERANCE = MIB // 2

HELD = [(0, 4, 0, 1), (3, 4, 0, 1), (100, 4, 0, 1), (8, 2 * MIB, 0, 1), (8, 4, 32, 1), (2, 4, 0, 64)]


@pytest.mark.parametrize(("size", "result", "leftover", "warm_up"), HELD)
def test_memory_probe_sees_what_was_held(size: int, result: int, leftover: int, warm_up: int) -> None:
    """Peak memory counts only the task: neither freed memory of the preparation nor an earlier task; results are
    counted separately."""
    peak = peak_memory(planted, size * MIB, result, leftover * MIB, warm_up=(warm_up * MIB,))
    assert peak.results == result and abs(peak.extra - size * MIB - result) < TOLERANCE


@pytest.mark.parametrize(("kind", "error"), [("hangs", TimeoutError), ("dies", RuntimeError), ("raises", RuntimeError)])
def test_memory_probe_says_what_went_wrong(kind: str, error: type[Exception]) -> None:
    with pytest.raises(
        error, match={"hangs": "not done after", "dies": "exit code 3", "raises": "ValueError: what went wrong"}[kind]
    ):
        peak_memory(failing, kind, warm_up=("nothing",), limit=2.0 if kind == "hangs" else 60.0)


def test_calls_take_turns_and_take_turns_in_going_first() -> None:
    order: list[str] = []
    samples = interleave({name: lambda name=name: order.append(name) for name in "abc"}, rounds=3)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert {name: len(times) for name, times in samples.items()} == {"a": 3, "b": 3, "c": 3}
    order.clear()
    interleave({name: lambda name=name: order.append(name) for name in "ab"}, rounds=2, repeats={"b": 2})
    assert "".join(order) == "abb" + "bba"


def test_a_sample_is_the_mean_of_its_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter((10.0, 10.5))
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    assert seconds(lambda: None, repeats=5) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("value", "text"), [(2.5, "2.5 s"), (0.01234, "12.3 ms"), (3.456e-6, "3.46 us"), (1e-8, "0.01 us")]
)
def test_readable(value: float, text: str) -> None:
    assert readable(value) == text

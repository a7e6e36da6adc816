"""A call of `OnlineRidge`, `StateWindow` or `StateTree` that is interrupted before any of its lines changes all or
nothing."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import cmab_kernels as ck

FILES = ("cmab_kernels/window.py", "cmab_kernels/online/single.py", "cmab_kernels/online/estimator.py")
QUERY = torch.randn(2, 3, 4)


def interrupted_before(line: int, call: Callable[[], object]) -> bool:
    """Raise `KeyboardInterrupt` before the line of this number that a call executes; return whether there is one."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if event == "line" and frame.f_code.co_filename.endswith(FILES):
            seen += 1
            if seen == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def every_line(make: Callable[[], Any], call: Callable[[Any], object], same: Callable[[Any, Any], bool]) -> int:
    """Interrupt a call before each of its lines; the object must then be as before the call or as after it, now and
    after the call is made again. Return the number of lines."""
    before, after = make(), make()
    call(after)
    line = 0
    while True:
        line += 1
        held = make()
        if not interrupted_before(line, lambda held=held: call(held)):  # type: ignore[misc]  # bound at once
            return line - 1
        assert same(held, before) or same(held, after), f"line {line}"


def states(count: int) -> list[ck.AttentionState]:
    torch.manual_seed(3)
    return [ck.attention_state(QUERY, *torch.randn(2, 1, 2, 5, 4)) for _ in range(count)]


def same_window(a: Any, b: Any) -> bool:
    return len(a) == len(b) and (not len(a) or torch.allclose(a.state.out, b.state.out, atol=1e-6))


def same_tree(a: ck.StateTree, b: ck.StateTree) -> bool:
    return set(a) == set(b) and same_window(a, b) and all((key in a) == (key in b) for key in (0, 1, 2, 3, None))


@pytest.mark.parametrize("held", [1, 3, 4])
def test_window(held: int) -> None:
    def made() -> ck.StateWindow:
        window: ck.StateWindow = ck.StateWindow(3)
        for state in states(held):
            window.push(state)
        return window

    new = states(6)[-1]
    assert every_line(made, lambda window: window.push(new), same_window) > 5
    assert every_line(made, lambda window: window.pop(), same_window) > 3


@pytest.mark.parametrize("key", [0, 3, None])
def test_tree(key: Any) -> None:
    def made() -> ck.StateTree:
        tree: ck.StateTree = ck.StateTree()
        for place, state in zip((0, 1, 2, 3, None), states(5), strict=True):
            tree.put(place, state)
        return tree

    new = states(6)[-1]
    assert every_line(made, lambda tree: tree.put(key, new), same_tree) > 10
    assert every_line(made, lambda tree: tree.put("new", new), same_tree) > 10
    assert every_line(made, lambda tree: tree.discard(key), same_tree) > 10


@pytest.mark.parametrize("learned", [0, 3, 127])
def test_online_ridge(learned: int) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(140, 3)), random.normal(size=140)
    model = ck.OnlineRidge(0.1)
    for row, target in zip(x[:learned], y, strict=False):
        model.learn_one(row, target)
        model.predict_one(row)

    def made() -> ck.OnlineRidge:
        copied = copy.copy(model)
        copied._waiting = copy.deepcopy(model._waiting)
        return copied

    def same(a: ck.OnlineRidge, b: ck.OnlineRidge) -> bool:
        for each in (a, b):
            for row, target in zip(x[130:133], y[130:133], strict=True):
                each.learn_one(row, target)
        one = a.predict_one(x[135])
        assert one == pytest.approx(a.predict(x[135:136])[0], rel=1e-9)
        return one == pytest.approx(b.predict_one(x[135]), rel=1e-9)

    def compared(a: ck.OnlineRidge, b: ck.OnlineRidge) -> bool:
        return same(copy.deepcopy(a), copy.deepcopy(b))

    assert every_line(made, lambda model: model.learn_one(x[139], y[139]), compared) > 10


def test_an_example_that_raises_is_not_learned() -> None:
    model = ck.OnlineRidge(0.1)
    for row in np.eye(3):
        model.learn_one(row, 1.0)
        model.predict_one(row)
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        model.learn_one(np.array([1e200, 0.0, 0.0]), 1.0)
    assert model.n_samples_seen_ == 3


def test_threads_predict() -> None:
    """More threads than cores, which change between any two instructions."""
    random = np.random.default_rng(0)
    x, model = random.normal(size=(8, 5)), ck.OnlineRidge(0.1)
    for row in random.normal(size=(50, 5)):
        model.learn_one(row, row.sum())
    right = [model.predict_one(row) for row in x]
    wrong: list[int] = []
    interval = sys.getswitchinterval()

    def predict(i: int) -> None:
        wrong.extend(i for _ in range(3000) if model.predict_one(x[i]) != right[i])

    threads = [threading.Thread(target=predict, args=(i,)) for i in range(8)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong

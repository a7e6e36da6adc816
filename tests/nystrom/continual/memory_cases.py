"""Checks of the memory to which a step writes, for the kernels of GPUs that run here on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from .step_cases import Step, Tokens, part, same, start, tokens

Capture = Callable[[], AbstractContextManager[object]]
"""A context in which steps believe that a CUDA graph captures them."""


def check_in_place_is_out_of_place(
    step: Step, capture: Capture, landmarks: int | None, retroactive: bool, chunk: int
) -> None:
    """A captured step writes to the tensors that it is given, a step of a shared state to new memory, and any other
    step to the spare memory.

    All give the same bits.
    """
    window = 7
    stream = tokens(1, 2, window + 1 + 3 * chunk, 6, 9, size=5.0)

    def run(one: Callable[[Any, Tokens], tuple[Tensor, Any]]) -> list[Any]:
        _, state = step(start(part(stream, 0, window), landmarks), part(stream, window, window + 1), retroactive)
        outs = []
        for at in range(window + 1, stream[0].shape[2], chunk):
            out, state = one(state, part(stream, at, at + chunk))
            outs.append(out)
        return [*outs, state]

    def captured(state: Any, new: Tokens) -> tuple[Tensor, Any]:
        addresses = [t.data_ptr() for t in state if isinstance(t, Tensor)]
        with capture():
            out, after = step(state, new, retroactive)
        assert after is state and addresses == [t.data_ptr() for t in state if isinstance(t, Tensor)]
        return out, after

    def shared(state: Any, new: Tokens) -> tuple[Tensor, Any]:
        held = list(state)
        before = [t.clone() if isinstance(t, Tensor) else t for t in state]
        out, after = step(state, new, retroactive)
        shared_with = {t.data_ptr() for t in held if isinstance(t, Tensor) and t.numel()} - {state.scale.data_ptr()}
        assert not shared_with & {t.data_ptr() for t in after if isinstance(t, Tensor)}
        tensors = [(a, b) for a, b in zip(held, before, strict=True) if isinstance(a, Tensor) and a.dim()]
        assert all(a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8)) for a, b in tensors)
        return out, after

    ordinary = run(lambda state, new: step(state, new, retroactive))
    assert all(map(same, run(captured), ordinary)) and all(map(same, run(shared), ordinary))


def check_a_sole_owner_goes_on_in_its_own_memory(step: Step) -> None:
    """A stream that nothing else holds reuses its memory; a state from which others were made keeps its value."""
    stream = tokens(1, 1, 22, 2, 2)
    state = start(part(stream, 0, 6), 2)
    ring, sums, spare = state.keys.data_ptr(), state.sums.data_ptr(), state.spare.data_ptr()
    _, state = step(state, part(stream, 6, 7), False)
    assert (state.keys.data_ptr(), state.sums.data_ptr(), state.spare.data_ptr()) == (ring, spare, sums)
    first, one = step(state, part(stream, 7, 8), False)
    second, _ = step(one, part(stream, 8, 10), False)
    again, other = step(state, part(stream, 7, 8), False)
    assert torch.equal(again, first) and other.keys.data_ptr() != one.keys.data_ptr()
    assert torch.equal(step(other, part(stream, 8, 10), False)[0], second)
    assert one.keys.shape[2] == 7 and step(one, part(stream, 8, 12), False)[1].keys.shape[2] == 10
    assert step(one, part(stream, 8, 22), False)[1].keys.shape[2] == 12, "two windows at most"


def check_a_capture_keeps_the_kind_of_output(step: Step, capture: Capture) -> None:
    stream = tokens(1, 1, 8, 2, 2)
    state = start(part(stream, 0, 5), None)
    with capture(), pytest.raises(RuntimeError, match=r"^output: got 'retroactive'"):
        step(state, part(stream, 5, 6), True)
    _, state = step(state, part(stream, 5, 6), True)
    with capture(), pytest.raises(RuntimeError, match=r"^output: got 'single'"):
        step(state, part(stream, 6, 7), False)

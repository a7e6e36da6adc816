"""A step never writes to memory that other code can still read, whatever holds it, in every grad mode, with every
torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels import nn

N, BATCH = 6, 3


def _tokens(count: int, batch: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(batch, 2, count, 4) for _ in range(3))
    return query, key, value


def _step(state: Any, tokens: tuple[Tensor, ...], retroactive: bool = False) -> Any:
    step = ck.continual_nystrom_step if isinstance(state, ck.ContinualNystromState) else ck.continual_attention_step
    return step(state, *tokens, output="retroactive" if retroactive else "single")


def _stream(kind: str) -> Any:
    """Return a state that has taken some steps, as a stream does, and that nobody else holds."""
    first = _tokens(N)
    state: Any = (
        ck.continual_attention_init(*first) if kind != "nystrom" else ck.continual_nystrom_init(*first, num_landmarks=3)
    )
    for _ in range(3):
        _, state = _step(state, _tokens(1), kind == "retroactive")
    return state


def _fields(state: Any) -> list[Tensor]:
    return [field for field in state if isinstance(field, Tensor) and field.dim() and field.numel()]


def _changed(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return type(state)(*(change(f) if isinstance(f, Tensor) and f.dim() else f for f in state))


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(some, others, strict=True))


HOLDS: dict[str, Callable[[Any], list[Any]]] = {
    "the tensors": _fields,
    "a tensor of each": lambda state: [f[:1] for f in _fields(state)],
    "detached": lambda state: [f.detach() for f in _fields(state)],
    "data": lambda state: [f.data for f in _fields(state)],
    "numpy": lambda state: [f.numpy() for f in _fields(state)],
    "a part in numpy": lambda state: [f.numpy()[1:] for f in _fields(state)],
    "a memoryview": lambda state: [memoryview(f.numpy()) for f in _fields(state)],
    "bytes": lambda state: [f.view(torch.uint8) for f in _fields(state)],
    "strided": lambda state: [f.as_strided((2,), (1,)) for f in _fields(state)],
    "dlpack": lambda state: [torch.from_dlpack(f) for f in _fields(state)],
    "a capsule": lambda state: [torch.utils.dlpack.to_dlpack(f) for f in _fields(state)],
    "from numpy": lambda state: [torch.from_numpy(f.numpy()) for f in _fields(state)],
    "a storage": lambda state: [f.untyped_storage() for f in _fields(state)],
    "a new tensor of the storage": lambda state: [torch.empty(0).set_(f.untyped_storage()) for f in _fields(state)],
    "a parameter": lambda state: [torch.nn.Parameter(f.detach(), requires_grad=False) for f in _fields(state)],
}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def _read(held: list[Any]) -> list[Any]:
    def one(each: Any) -> Any:
        if type(each).__name__ == "PyCapsule":
            return None  # its memory is read when it is opened, at the end
        if isinstance(each, torch.UntypedStorage):
            return bytes(each)
        return each.tobytes() if not isinstance(each, Tensor) else bytes(each.contiguous().view(torch.uint8).numpy())

    return [one(each) for each in held]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", HOLDS)
@pytest.mark.parametrize("kind", ["single", "retroactive", "nystrom"])
def test_what_is_held_stays(kind: str, how: str, mode: str) -> None:
    with MODES[mode]():
        state = _stream(kind)
        held = HOLDS[how](state)
        before, right = _read(held), [f.clone() for f in _fields(state)]
        for _ in range(2 * N):
            _, state = _step(state, _tokens(1), kind == "retroactive")
        if how == "a capsule":
            assert _equal([torch.from_dlpack(capsule) for capsule in held], right)
        assert _read(held) == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["single", "retroactive", "nystrom"])
def test_a_stream_that_nobody_holds_stays_in_its_memory(kind: str, mode: str) -> None:
    """A stream that nobody holds stays in its memory. Without this, the other tests would pass if every step copied."""
    with MODES[mode]():
        state = _stream(kind)
        places = {f.data_ptr() for f in state[:5]}
        for _ in range(2 * N):
            _, state = _step(state, _tokens(1), kind == "retroactive")
        assert {f.data_ptr() for f in state[:5]} == places


FOREIGN: dict[str, Callable[[Any], Any]] = {
    "a slice": lambda state: _changed(state, lambda f: f[:1]),
    "unbound from a stack": lambda state: _changed(state, lambda f: torch.stack([f, f]).unbind()[0][:1]),
    "the same NumPy arrays": lambda state: _changed(state, lambda f: torch.from_numpy(f.numpy())[:1]),
    "whole NumPy arrays": lambda state: _changed(state, lambda f: torch.from_numpy(f.numpy())),
    "a copy": lambda state: _changed(copy.deepcopy(state), lambda f: f[:1]),
    "expanded": lambda state: _changed(state, lambda f: f[:1].expand_as(f)),
    "views": lambda state: _changed(state, lambda f: f[:]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", FOREIGN)
@pytest.mark.parametrize("kind", ["single", "retroactive", "nystrom"])
def test_states_made_by_hand_of_one_memory(kind: str, how: str, mode: str) -> None:
    """The kept state, and every other state that uses its memory, continue as if each were alone."""
    with MODES[mode]():
        kept = _stream(kind)
        before = [f.clone() for f in _fields(kept)]
        made = [FOREIGN[how](kept) for _ in range(3)]
        batch = made[0].keys.shape[0]
        stream = [_tokens(1) for _ in range(9)]
        outs = []
        for state in (*made, made[0]):  # the first state once more, after it has been stepped
            given = state
            for tokens in stream:
                out, given = _step(given, tuple(t[:batch] for t in tokens), kind == "retroactive")
            outs.append(out)
        assert _equal(_fields(kept), before)
        assert all(torch.equal(out, outs[0]) for out in outs)
        if how != "expanded":
            for tokens in stream:
                out, kept = _step(kept, tokens, kind == "retroactive")
            torch.testing.assert_close(outs[0], out[:batch], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["single", "retroactive", "nystrom"])
@pytest.mark.parametrize("leaf", [True, False])
def test_what_autograd_saved_stays(kind: str, leaf: bool) -> None:
    state, head = _stream(kind), torch.nn.Linear(4, 1)
    right = state.values.sum((0, 1, 2))
    loss = head(state.values if leaf else state.values.view(-1, 4)).sum()
    for _ in range(3):
        with torch.no_grad():
            _, state = _step(state, _tokens(1), kind == "retroactive")
    loss.backward()
    torch.testing.assert_close(head.weight.grad[0], right)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("output", ["single", "retroactive"])
@pytest.mark.parametrize("landmarks", [None, 3])
def test_a_slice_of_the_state_of_a_module(landmarks: int | None, output: str, mode: str) -> None:
    sizes: dict[str, Any] = {"sequence_len": N, "output": output, "batch_first": True}
    attention: Any = nn.ContinualAttention(8, 2, **sizes)
    if landmarks:
        attention = nn.ContinualNystromAttention(8, 2, num_landmarks=landmarks, **sizes)
    with MODES[mode]():
        attention.eval().forward_steps(torch.randn(BATCH, N + 3, 8))
        held = [f[:1] for f in _fields(attention.get_state())]
        before = [f.clone() for f in held]
        for _ in range(N + 3):
            attention.forward_step(torch.randn(BATCH, 8))
        assert _equal(held, before)


def _sum(queue: Any, state: Any) -> None:
    queue.put([float(field.double().nan_to_num().sum()) for field in _fields(state)])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_state_may_be_an_argument_of_a_process(method: str) -> None:
    """The state is sent as bytes, because copies in shared memory would be freed before the process could open them."""
    state, context = _stream("retroactive"), torch.multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=_sum, args=(queue, state))
    process.start()
    assert queue.get(timeout=300) == [float(field.double().nan_to_num().sum()) for field in _fields(state)]
    process.join()


def test_a_state_from_numpy_before_its_first_step() -> None:
    """The empty sums of the state have strides of 0, as empty arrays of NumPy have."""
    first = _tokens(N)
    state = ck.continual_attention_init(*first)
    copied = _changed(state, lambda f: torch.from_numpy(f.numpy().copy()))
    new = _tokens(1)
    assert torch.equal(_step(copied, new).out, _step(state, new).out)


@pytest.mark.parametrize("field", ["keys", "sums", "scale"])
def test_a_field_that_is_swapped_is_refused_or_read(field: str) -> None:
    """torch raises an error for swapping a tensor whose memory the ownership table watches; a step reads any other
    tensor as it is."""
    window, token = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 1, 4)
    state, given = (ck.continual_nystrom_init(window, window, window, num_landmarks=4) for _ in range(2))
    other = 1.5 * getattr(state, field)
    given = given._replace(**{field: other.clone()})
    if field == "scale":
        torch.utils.swap_tensors(state.scale, other)
    else:
        with pytest.raises(RuntimeError, match="Cannot swap t1 because it has weakref"):
            torch.utils.swap_tensors(getattr(state, field), other)
        return
    found, expected = (ck.continual_nystrom_step(each, token, token, token)[0] for each in (state, given))
    assert torch.equal(found, expected)

"""The Triton kernels of the continual steps, compiled for GPUs that this machine need not have: these tests read the
machine code."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from cmab_kernels.nystrom.continual import triton as kernels
from cmab_kernels.nystrom.continual.gradient.function import Setting
from cmab_kernels.testing.cubin import SHARED_LIMIT, Launch, as_if_on, compiled, record
from tests.machine_code import wrong

from .step_cases import part, start, tokens

pytestmark = pytest.mark.thorough

SHARED = min(SHARED_LIMIT.values())
"""The shared memory that every GPU from compute capability 8.0 on has, in bytes."""

ORDINARY = [
    (torch.float32, 16, False, 90),
    (torch.bfloat16, None, False, 90),
    (torch.bfloat16, None, True, 90),
    (torch.float32, 16, True, 120),
]
"""dtype, landmarks (None: exact attention), retroactive, compute capability."""

_SPILLED = {
    (torch.float32, 16, False): (0, 0.015, 0.015, 0, 0, 0),
    (torch.float32, 64, False): (0.04, 0.015, 0.015, 0.025, 0.025, 0),
    (torch.float32, 64, True): (0.03, 0.01, 0.01, 0.025, 0.02, 0.01),
    (torch.float32, 256, False): (0.02, 0.015, 0.015, 0.02, 0.01, 0.02),
    (torch.float32, 256, True): (0.05, 0.025, 0.025, 0.03, 0, 0.03),
    (torch.bfloat16, 16, False): (0, 0.01, 0.01, 0, 0, 0),
    (torch.bfloat16, 64, False): (0.04, 0.015, 0.015, 0.025, 0.025, 0.01),
    (torch.bfloat16, 64, True): (0.03, 0.01, 0.01, 0.025, 0.02, 0.01),
    (torch.bfloat16, 256, False): (0.02, 0.02, 0.02, 0.025, 0.015, 0.02),
    (torch.bfloat16, 256, True): (0.05, 0.025, 0.025, 0.03, 0, 0.025),
    (torch.float64, 16, True): (0.01, 0, 0, 0, 0, 0),
    (torch.float64, 64, False): (0.01, 0, 0, 0, 0, 0.01),
    (torch.float64, 64, True): (0.015, 0, 0, 0, 0, 0.01),
    (torch.float64, 256, False): (0.025, 0, 0, 0.01, 0, 0),
    (torch.float64, 256, True): (0.02, 0, 0, 0.01, 0, 0),
    (torch.float64, None, False): (0.01, 0, 0, 0, 0, 0),
}
SPILLING = {
    (*case, card): share
    for case, shares in _SPILLED.items()
    for card, share in zip(SHARED_LIMIT, shares, strict=True)
    if share
}
"""The steps known to spill, and the largest share of their instructions that may access local memory, by capability.

The inverse of 64 landmarks or more takes all registers, so values that are kept from token to token are spilled around
it, once per segment.
"""

RECORDED_SPILLING = {(torch.float32, 16, True, 120): 0.015}
"""The same for recorded steps: ptxas spills a few values to fit a second block of 8 warps."""

EVERY = list(
    itertools.product([torch.float32, torch.bfloat16, torch.float64], [16, 64, 256, None], [False, True], SHARED_LIMIT)
)


def _launch(
    dtype: torch.dtype, landmarks: int | None, retroactive: bool, shape: tuple[int, ...] = (1, 2, 256, 64, 64, 1)
) -> Launch:
    batch, heads, window, width, value_width, count = shape
    stream = tokens(batch, heads, window + count, width, value_width, dtype)
    step = kernels.continual_attention_step if landmarks is None else kernels.continual_nystrom_step
    state = start(part(stream, 0, window), landmarks)
    (launched,) = record(lambda: step(state, *part(stream, window, window + count), retroactive))
    return launched


class _Operations(TorchDispatchMode):
    """The names of the torch operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("landmarks, retroactive", [(16, False), (16, True), (None, False), (None, True)])
@pytest.mark.parametrize("count, held", [(1, False), (80, False), (1, True)])
def test_a_step_is_one_launch(landmarks: int | None, retroactive: bool, count: int, held: bool) -> None:
    """Tokens may have any strides; apart from the launch, torch only allocates memory.

    `held`: other code may read the state's memory.
    """
    stream = tokens(2, 3, 64 + count, 64, 64)
    step = kernels.continual_attention_step if landmarks is None else kernels.continual_nystrom_step
    state, new = start(part(stream, 0, 64), landmarks), part(stream, 64, 64 + count)
    assert not any(token.is_contiguous() for token in new)
    others = list(state) if held else []
    with _Operations() as operations:
        assert len(record(lambda: step(state, *new, retroactive))) == 1
    # The scale, on the CPU.
    assert operations.called - {"new_empty", "empty_like", "empty"} == {"_local_scalar_dense"}, others


def _check(launched: Launch, capability: int, folder: Path, spilling: float | None = None) -> list[str]:
    name = launched.kernel.__name__
    found = wrong([launched], capability, folder, lambda *_: False, {name: spilling} if spilling else None)
    shared = compiled(launched, capability, folder).shared
    return (
        found if shared <= SHARED else [*found, f"{name}: {shared} bytes of shared memory, and some GPUs have {SHARED}"]
    )


@pytest.mark.parametrize("dtype, landmarks, retroactive, capability", ORDINARY)
def test_compiled(
    dtype: torch.dtype, landmarks: int | None, retroactive: bool, capability: int, tmp_path: Path
) -> None:
    with as_if_on(capability):
        launched = _launch(dtype, landmarks, retroactive)
    assert _check(launched, capability, tmp_path) == []


@pytest.mark.nightly
@pytest.mark.parametrize("dtype, landmarks, retroactive, capability", EVERY)
def test_compiled_everywhere(
    dtype: torch.dtype, landmarks: int | None, retroactive: bool, capability: int, tmp_path: Path
) -> None:
    with as_if_on(capability):
        launched = _launch(dtype, landmarks, retroactive)
    assert _check(launched, capability, tmp_path, SPILLING.get((dtype, landmarks, retroactive, capability))) == []


def _gradient(dtype: torch.dtype, landmarks: int | None, retroactive: bool) -> list[Launch]:
    """Return the launches of a recorded step of two tokens and of its gradient."""
    batch, heads, window, width, count = 1, 2, 256, 64, 2
    stream = tokens(batch, heads, window + count, width, width, dtype)
    state: Any = start(part(stream, 0, window), landmarks)
    new = part(stream, window, window + count)
    wide = state.sums.dtype
    step = Setting(count, window, window + 1, 0.125, retroactive)
    name = "attention" if landmarks is None else "nystrom"

    def both() -> None:
        recorded = getattr(kernels, f"continual_{name}_recorded_step")
        ((_, after), history), sums = recorded(state, *new, retroactive), None
        marks: Any = None
        if landmarks is not None:
            marks, sums = (state.sums, *state[5:8], history), torch.zeros_like(state.sums)
        single = None if retroactive else new[0].contiguous()
        dout = None if retroactive else torch.zeros(batch, heads, count, width, dtype=dtype)
        rings = (torch.zeros_like(ring, dtype=wide) for ring in after[1:3])
        kernels.step_backward(step, single, after.keys, after.values, marks, state.position, dout, *rings, sums)

    return record(both)


@pytest.mark.parametrize(
    "dtype, landmarks, retroactive, capability", [case for case in ORDINARY if case[1:3] != (None, True)]
)
def test_a_gradient_is_one_launch(
    dtype: torch.dtype, landmarks: int | None, retroactive: bool, capability: int, tmp_path: Path
) -> None:
    with as_if_on(capability):
        step, gradient = _gradient(dtype, landmarks, retroactive)
    assert gradient.kernel.__name__ == "_step_backward"
    spilled = RECORDED_SPILLING.get((dtype, landmarks, retroactive, capability))
    assert _check(step, capability, tmp_path, spilled) + _check(gradient, capability, tmp_path) == []


@pytest.mark.nightly
@pytest.mark.parametrize("dtype, landmarks, retroactive, capability", EVERY)
def test_gradients_compiled_everywhere(
    dtype: torch.dtype, landmarks: int | None, retroactive: bool, capability: int, tmp_path: Path
) -> None:
    if landmarks is None and retroactive:
        return  # the definition runs
    with as_if_on(capability):
        _, gradient = _gradient(dtype, landmarks, retroactive)
    assert _check(gradient, capability, tmp_path) == []


def test_one_kernel_for_all_shapes() -> None:
    """Batches, heads, windows, and numbers of tokens and landmarks change no constant; widths and numbers of landmarks
    are padded to powers of two."""
    shapes = [(2, 3, 20, 40, 40, 1), (1, 1, 31, 33, 64, 17), (3, 16, 24, 64, 33, 2)]
    for landmarks in ((12, 9, 16), (None, None, None)):
        found = [_launch(torch.float32, number, False, shape) for number, shape in zip(landmarks, shapes, strict=True)]
        keys = {str(one.kernel.source(*one.args, **one.options)[0].hash()) for one in found}
        assert len(keys) == 1


# ---- each check reports a planted fault


def test_spills_are_seen(tmp_path: Path) -> None:
    launched = _launch(torch.float64, None, True)
    launched.options.update(num_warps=1)
    assert any("spilled" in fault for fault in _check(launched, 90, tmp_path))

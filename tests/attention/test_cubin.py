"""Every Triton kernel of latent cross-attention, compiled for GPUs that this machine need not have: these tests read
the machine code."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton.language as tl

from cmab_kernels.attention import triton as kernels
from cmab_kernels.attention.contract import Attention, AttentionBackward
from cmab_kernels.attention.triton import launch as launches
from cmab_kernels.attention.triton.launch import Tiles
from cmab_kernels.runtime.tiles import FILE, read, using
from cmab_kernels.runtime.triton_launch import Kernel, kernel
from cmab_kernels.testing.cubin import SHARED_LIMIT, Launch, as_if_on, compiled, faults, narrow_offsets, record
from tests.machine_code import by_matrix_units, wrong

pytestmark = pytest.mark.thorough

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
WITH_PRODUCTS = ("_forward", "_backward", "_backward_keys", "_backward_in_parts")
ORDINARY = [
    ("bf16", 16, 90),
    ("bf16", 128, 90),
    ("bf16", 64, 100),
    ("fp32", 64, 100),
    ("fp16", 64, 80),
    ("fp32", 16, 90),
    ("fp32", 64, 90),
    ("fp64", 16, 90),
]
SPILLING = {
    ("bf16", 64, 80): {"_backward_keys": 0.035},
    ("bf16", 128, 80): {"_backward": 0.12},
    ("fp16", 8, 100): {"_backward_keys": 0.02},
    ("fp16", 16, 100): {"_backward_keys": 0.015},
    ("fp16", 128, 100): {"_backward_keys": 0.01},
    **{(name, 256, capability): {"_sum_runs": 0.01} for name in ("bf16", "fp16") for capability in (90, 100)},
    ("tf32", 64, 80): {"_backward_keys": 0.01},
    **{("fp64", width, 100): {"_forward": 0.04, "_backward": 0.06} for width in (8, 16)},
    ("fp64", 16, 80): {"_sum_runs": 0.01},
    ("fp64", 128, 100): {"_forward": 0.25},
    ("fp64", 256, 80): {"_forward": 0.02, "_backward": 0.25},
    ("fp64", 256, 90): {"_forward": 0.025, "_backward": 0.42},
    ("fp64", 256, 100): {"_forward": 0.01, "_backward": 0.45},
}
"""Kernels known to spill, and the largest share of their instructions that may access local memory.

Without matrix units for float64 on sm_100, a thread holds whole rows and columns. Gradients of float64 heads of 256
columns do not fit in shared memory everywhere. No tile was found that avoids these spills.
"""
NIGHTLY = [case for case in itertools.product(DTYPES, (8, 16, 32, 64, 128, 256), (80, 90, 100)) if case not in ORDINARY]


@pytest.fixture(autouse=True)
def _built_in_tiles() -> Iterator[None]:
    """Tiles that have not been measured must not spill. Tiles that were tuned on a GPU may spill, because there the
    time counts."""
    with using({}):
        yield


def _launches(
    dtype: torch.dtype,
    width: int,
    latents: int = 128,
    mask: bool = False,
    state: bool = False,
    biased: bool = False,
) -> list[Launch]:
    """Record the launches of a forward and a backward pass over several runs of keys, on request with a mask, an
    incoming state and a bias."""
    q, k, v = (torch.empty(1, 4, n, width, dtype=dtype) for n in (latents, 5003, 5003))
    out, lse = (
        torch.empty(1, 4, latents, width, dtype=torch.promote_types(dtype, torch.float32)),
        torch.empty(1, 4, latents).double(),
    )
    ignore = torch.zeros(1, 5003, dtype=torch.bool) if mask else None
    before = (out, lse) if state else (None, None)
    bias = torch.empty(1, 4, 5003, dtype=out.dtype) if biased else None
    needs = (True, True, True, biased)

    def call() -> tuple[Tensor, ...]:
        results = kernels.attention_forward(Attention(q, k, v, ignore, None, *before, bias, 1.0))
        return (
            *results,
            *kernels.attention_backward(AttentionBackward(out, lse, q, k, v, ignore, None, out, lse, bias, 1.0, needs)),
        )

    return record(call)


def _matrix(name: str, width: int, capability: int, folder: Path) -> None:
    """Check the launches for one block of queries and for several.

    Wide float32 heads are not split into bfloat16 parts, because the parts would not fit in registers.
    """
    with as_if_on(capability):
        found = {
            launch.kernel.__name__: launch
            for latents in (300, 128)
            for launch in _launches(DTYPES[name], width, latents)
        }
    in_parts = name == "fp32" and width <= 64
    backward = {"_backward_in_parts"} if in_parts else {"_backward_keys", "_backward"}
    assert set(found) == {"_forward", "_merge", "_row_terms", "_sum_runs"} | backward
    assert (
        wrong(
            found.values(),
            capability,
            folder,
            partial(by_matrix_units, WITH_PRODUCTS),
            SPILLING.get((name, width, capability)),
        )
        == []
    )


@pytest.mark.parametrize("name, width, capability", ORDINARY)
def test_compiled(name: str, width: int, capability: int, tmp_path: Path) -> None:
    _matrix(name, width, capability, tmp_path)


@pytest.mark.parametrize("name, width", list(itertools.product(("bf16", "fp32"), (16, 64))))
def test_tuned_tiles_are_sound(name: str, width: int, tmp_path: Path) -> None:
    """Kernels with tuned tiles may spill, but they have no other fault."""
    with as_if_on(90), using(read(FILE)):
        found = [launch for latents in (300, 128) for launch in _launches(DTYPES[name], width, latents)]
    found_wrong = wrong(found, 90, tmp_path, partial(by_matrix_units, WITH_PRODUCTS))
    assert [fault for fault in found_wrong if "spilled" not in fault] == []


@pytest.mark.nightly
@pytest.mark.parametrize("name, width, capability", NIGHTLY)
def test_compiled_everywhere(name: str, width: int, capability: int, tmp_path: Path) -> None:
    _matrix(name, width, capability, tmp_path)


@pytest.mark.parametrize(
    "width, capability",
    [
        pytest.param(width, capability, marks=() if (width, capability) == (64, 80) else pytest.mark.nightly)
        for width, capability in itertools.product((8, 16, 32, 64, 128, 256), (80, 90, 100))
    ],
)
def test_compiled_with_tf32(width: int, capability: int, tmp_path: Path) -> None:
    with mock.patch.object(launches, "allows_tf32", lambda: True), as_if_on(capability):
        found = [launch for latents in (300, 128) for launch in _launches(torch.float32, width, latents)]
    assert (
        wrong(
            found,
            capability,
            tmp_path,
            partial(by_matrix_units, WITH_PRODUCTS),
            SPILLING.get(("tf32", width, capability)),
        )
        == []
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_compiled_with_mask_and_state(dtype: torch.dtype, tmp_path: Path) -> None:
    """Triton's own assertion fails for a mask of bytes next to a float64 product,
    so the kernel must keep them apart."""
    assert (
        wrong(_launches(dtype, 16, mask=True, state=True), 90, tmp_path, partial(by_matrix_units, WITH_PRODUCTS)) == []
    )


@pytest.mark.parametrize("latents", [300, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_compiled_with_a_bias(dtype: torch.dtype, latents: int, tmp_path: Path) -> None:
    """One kernel spills a few registers: the sums for the gradient of the bias come on top of a full block."""
    spilling = {"_backward": 0.01} if (dtype, latents) == (torch.bfloat16, 128) else None
    found = _launches(dtype, 16, latents, mask=True, biased=True)
    assert wrong(found, 90, tmp_path, partial(by_matrix_units, WITH_PRODUCTS), spilling) == []


@pytest.mark.nightly
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("width, capability", list(itertools.product((8, 16, 32, 64), SHARED_LIMIT)))
def test_float32_gradients_spill_nowhere(width: int, capability: int, mask: bool, tmp_path: Path) -> None:
    """The check is valid for any card, also for few queries, whose blocks are small."""
    with as_if_on(capability):
        found = [launch for latents in (128, 16) for launch in _launches(torch.float32, width, latents, mask)]
    gradients = [launch for launch in found if launch.kernel.__name__ == "_backward_in_parts"]
    assert wrong(gradients, capability, tmp_path, partial(by_matrix_units, WITH_PRODUCTS)) == []


def _shared_memory(name: str, width: int, capability: int, folder: Path) -> list[str]:
    """Tiles must fit in the shared memory of a card that has little, with one large block and with a small block of
    several queries."""
    with as_if_on(capability):
        found = [launch for latents in (300, 128, 16) for launch in _launches(DTYPES[name], width, latents)]
    figures = [compiled(launch, capability, folder) for launch in found if launch.kernel.__name__ in WITH_PRODUCTS]
    return [f"{one}: {fault}" for one in figures for fault in faults(one, False) if "shared memory" in fault]


@pytest.mark.parametrize("name, width", [("bf16", 128), pytest.param("fp64", 256, marks=pytest.mark.nightly)])
def test_wide_heads_fit_in_little_shared_memory(name: str, width: int, tmp_path: Path) -> None:
    assert _shared_memory(name, width, 86, tmp_path) == []
    with mock.patch.object(
        launches, "_WITH_LITTLE_SHARED_MEMORY", {kernel: {} for kernel in launches._WITH_LITTLE_SHARED_MEMORY}
    ):
        assert _shared_memory(name, width, 86, tmp_path) != [], "and the tiles of other cards do not"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name, width, capability", list(itertools.product(DTYPES, (16, 32, 64, 128, 256), (86, 89, 120)))
)
def test_little_shared_memory_is_enough(name: str, width: int, capability: int, tmp_path: Path) -> None:
    assert _shared_memory(name, width, capability, tmp_path) == []


def test_one_multiply_add_a_score(tmp_path: Path) -> None:
    """One multiply-add applies the scale and the maximum to a score; scores have no other multiplication.

    The other products are three per row and tile for the maximum, those of the rescaling, and some per row at the end.
    """
    launch = _launches(torch.bfloat16, 16)[0]
    figures = compiled(launch, 90, tmp_path)
    scores = 2 * 128 * 64 // 128  # for each thread, in the loop and in the tail
    assert scores <= figures.count("MUFU.EX2") <= 1.1 * scores
    assert figures.count("FFMA") <= 1.15 * scores and figures.count("FMUL") <= 0.95 * scores
    split = compiled(launch._replace(options=launch.options | {"enable_fp_fusion": False}), 90, tmp_path)
    assert split.count("FMUL") > 1.5 * scores, "and it would be seen"


def test_hopper_and_blackwell_instructions(tmp_path: Path) -> None:
    launch = _launches(torch.bfloat16, 64)[0]
    hopper, blackwell = (compiled(launch, capability, tmp_path) for capability in (90, 100))
    assert hopper.count("HGMMA") and blackwell.count("UTC")
    assert "F" not in hopper.instructions, "the line that names the function"


# ---- each check reports a planted fault


def test_spills_are_seen(tmp_path: Path) -> None:
    with mock.patch.object(launches, "_FORWARD", {"half": {128: Tiles(128, 64, 4, 2)}}):
        (fault,) = faults(compiled(_launches(torch.bfloat16, 128)[0], 90, tmp_path), True)
    assert "spilled" in fault


def test_declared_spills_are_held_to(tmp_path: Path) -> None:
    """A kernel that is known to spill may spill no more than declared. A kernel that spills nothing must not be
    declared."""
    sound = _launches(torch.bfloat16, 128)[0]
    with mock.patch.object(launches, "_FORWARD", {"half": {128: Tiles(128, 64, 4, 2)}}):
        spilled = _launches(torch.bfloat16, 128)[0]
    figures = compiled(spilled, 90, tmp_path)
    share = figures.local / figures.instructions.total()

    def found(launch: Launch, bound: float) -> list[str]:
        return wrong([launch], 90, tmp_path, partial(by_matrix_units, WITH_PRODUCTS), {"_forward": bound})

    assert found(spilled, share) == [] and "spilled" in found(spilled, 0.9 * share)[0]
    assert found(sound, share) == ["_forward is declared to spill, and does not"]


def test_too_much_shared_memory_is_seen(tmp_path: Path) -> None:
    with mock.patch.object(launches, "_FORWARD", {"half": {128: Tiles(128, 64, 8, 6)}}):
        launch = _launches(torch.bfloat16, 128)[0]
    assert any("shared memory" in fault for fault in faults(compiled(launch, 80, tmp_path), True))


def test_too_much_tensor_memory_is_seen(tmp_path: Path) -> None:
    """Triton compiles a kernel that needs too much tensor memory, and fails only at its launch; the check finds the
    kernel before."""
    with mock.patch.object(launches, "_AMPERE_IN_PARTS", {64: Tiles(128, 128, 8, 2)}), as_if_on(80):
        launch = _launches(torch.float32, 64)[0]
    assert any("columns of tensor memory" in fault for fault in faults(compiled(launch, 100, tmp_path), True))


def test_missing_matrix_instructions_are_seen(tmp_path: Path) -> None:
    with mock.patch.object(launches, "forward_products", lambda dtype, width: launches.Products(dtype, "ieee")):
        assert faults(compiled(_launches(torch.float32, 16)[0], 90, tmp_path), True) == ["no matrix instruction"]


@kernel()
def _narrow(pointer, stride: tl.int32, ROWS: tl.constexpr):
    tl.store(pointer + tl.arange(0, ROWS) * stride, 0.0)


@kernel()
def _narrow_then_wide(pointer, stride: tl.int32, ROWS: tl.constexpr):
    tl.store(pointer + (tl.arange(0, ROWS) * stride).to(tl.int64), 0.0)


@kernel()
def _wide(pointer, stride: tl.int32, ROWS: tl.constexpr):
    tl.store(pointer + tl.arange(0, ROWS).to(tl.int64) * stride, 0.0)


@pytest.mark.parametrize("narrow, sound", [(_narrow, False), (_narrow_then_wide, False), (_wide, True)])
def test_narrow_offsets_are_seen(narrow: Kernel, sound: bool, tmp_path: Path) -> None:
    """Triton passes a stride of 2^30 in 32 bits, and multiples of it overflow; the check finds a kernel with such a
    multiplication."""
    (launch,) = record(lambda: narrow(1, torch.empty(1), 2**30, ROWS=64))
    assert (narrow_offsets(compiled(launch, 90, tmp_path).ttir) == []) == sound


def test_strides_beyond_32_bits_reach_the_kernel(tmp_path: Path) -> None:
    """Strides beyond 32 bits are passed as 64 bits. Tensors are on the meta device, and need no memory."""
    with torch.device("meta"):
        q, k = torch.empty(1, 1, 4, 8), torch.empty(0).as_strided((1, 1, 3, 8), (2**34, 2**33, 2**32, 1))
        (launch,) = record(lambda: kernels.attention_forward(Attention(q, k, k, scale=1.0)))
    assert launch.options["strides"][1] == (2**34, 2**33, 2**32, 1)

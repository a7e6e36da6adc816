"""Every Triton kernel of Intention compiled for GPUs that this machine need not have:
these tests read the machine code."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton.language as tl

from cmab_kernels.intention import triton as kernels
from cmab_kernels.intention.contract import ApplyRows, Gram, GramBackward, PrefixRidge, PrefixRidgeBackward
from cmab_kernels.intention.triton import launch, sums
from cmab_kernels.runtime.tiles import FILE, read, using
from cmab_kernels.runtime.triton_launch import Products
from cmab_kernels.testing.cubin import Launch, as_if_on, compiled, faults, record
from tests.machine_code import wrong

pytestmark = pytest.mark.thorough

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
WITH_PRODUCTS = ("_gram", "_gram_backward", "_apply")
ORDINARY = [("bf16", 64, 90), ("fp32", 64, 90), ("fp64", 32, 90), ("bf16", 128, 80), ("fp32", 16, 100)]
SPILLING = {
    **{(name, 1, 80): {"_gram": 0.035} for name in ("bf16", "fp16")},
    **{(name, 1, capability): {"_gram": 0.02} for name in ("bf16", "fp16") for capability in (90, 100)},
    **{(name, 256, 90): {"_gram_backward": 0.04} for name in ("bf16", "fp16")},
    ("tf32", 128, 80): {"_apply": 0.015},
    ("fp64", 3, 90): {"_gram": 0.04},
    ("fp64", 1, 100): {"_gram": 0.11},
    ("fp64", 32, 100): {"_gram": 0.16},
    ("fp64", 64, 90): {"_gram_backward": 0.01},
}
"""Kernels known to spill, and the largest share of their instructions that may access local memory.

Float64 on sm_100: Triton 3.6 uses no matrix units. Width 1: two warps, as for all narrow sums, load its numbers one by
one; four warps would not spill, but would issue a fifth more instructions (half types) or a seventh (float64). At width
256, tiles of 64 rows instead of 128 would not spill, but would issue up to a third more for each. For the rest, ptxas
spills a few values to fit one more block.
"""
WEIGHTED = {(name, 128, 90): {"_gram_backward": 0.015} for name in ("bf16", "fp16")}
"""The same shares with a mask and weights."""
EXACT = {("fp32", 64, 90): {"_gram": 0.015}}
"""The same shares for sums in float64."""
OF_PREFIXES = {("fp32", 256, 80): {"_add_planes": 0.015}}
"""The same shares for the sums over all prefixes."""
NIGHTLY = [case for case in itertools.product(DTYPES, (1, 16, 32, 64, 128, 256), (80, 90, 100)) if case not in ORDINARY]


def _launches(
    dtype: torch.dtype,
    width: int,
    capability: int,
    value_width: int | None = None,
    masked: bool = False,
    exact: bool = False,
    packed: bool = False,
) -> list[Launch]:
    """Record the launches of both sums, their gradients, and rows times a solution, on request with a mask and weights,
    or of packed sets.

    There are several runs of keys; the last is short.
    """
    value_width = value_width or width
    k, v = (torch.empty(1, 4, 5003, n, dtype=dtype) for n in (width, value_width))
    weights = torch.empty(1, 4, 5003, dtype=torch.promote_types(dtype, torch.float32)) if masked else None
    mask = torch.zeros(1, 5003, dtype=torch.bool) if masked else None
    dgram, dmoment = (torch.zeros(1, 4, width, n).double() for n in (width, value_width))
    offsets = torch.tensor([0, 5003]) if packed else None

    def call() -> None:
        kernels.gram(Gram(k, v, weights, mask, offsets, (True, True), exact))
        kernels.gram_backward(GramBackward(dgram, dmoment, k, v, weights, mask, offsets, (True, True, True), exact))
        kernels.apply_rows(ApplyRows(k, dmoment))

    with as_if_on(capability):
        return record(call)


@pytest.fixture(autouse=True)
def _built_in_tiles() -> Iterator[None]:
    """Tiles that nobody has measured must not spill. Tiles that were tuned on a GPU may spill, because there the time
    counts."""
    with using({}):
        yield


def _check(found: list[Launch], capability: int, folder: Path, spilling: dict[str, float] | None = None) -> list[str]:
    return wrong(found, capability, folder, _by_matrix_units, spilling)


def _by_matrix_units(launched: Launch, capability: int) -> bool:
    in_float64 = capability == 100 and launched.options.get("OPERAND") == tl.float64
    return launched.kernel.__name__ in WITH_PRODUCTS and not in_float64


@pytest.mark.parametrize("name, width, capability", ORDINARY)
def test_compiled(name: str, width: int, capability: int, tmp_path: Path) -> None:
    found = _launches(DTYPES[name], width, capability)
    assert {one.kernel.__name__ for one in found} == {"_gram", "_add_runs", "_gram_backward", "_apply"}
    assert _check(found, capability, tmp_path) == []


@pytest.mark.parametrize("name, width, capability", ORDINARY)
def test_compiled_packed(name: str, width: int, capability: int, tmp_path: Path) -> None:
    found = _launches(DTYPES[name], width, capability, packed=True)
    assert {one.kernel.__name__ for one in found} == {"_gram", "_gram_backward", "_apply"}
    assert _check(found, capability, tmp_path) == []


@pytest.mark.parametrize("width, value_width", [(33, 7), (64, 1)])
def test_narrow_values_lose_no_descriptor(width: int, value_width: int, tmp_path: Path) -> None:
    """Tiles of wide keys and of narrow values have different layouts."""
    found = _launches(torch.float32, width, 90, value_width)
    assert _check([one for one in found if one.kernel.__name__ == "_gram"], 90, tmp_path) == []


@pytest.mark.parametrize(
    "name, width, value_width", [("bf16", 64, 64), ("bf16", 16, 16), ("fp32", 16, 16), ("fp32", 33, 7), ("fp32", 64, 1)]
)
def test_tuned_tiles_are_sound(name: str, width: int, value_width: int, tmp_path: Path) -> None:
    """Kernels with tuned tiles may spill or use smaller matrix instructions, but they have no other fault."""
    with using(read(FILE)):
        found = _launches(DTYPES[name], width, 90, value_width)
    assert [fault for fault in _check(found, 90, tmp_path) if "spilled" not in fault] == []


@pytest.mark.nightly
@pytest.mark.parametrize("name, width, capability", NIGHTLY)
def test_compiled_everywhere(name: str, width: int, capability: int, tmp_path: Path) -> None:
    spilling = SPILLING.get((name, width, capability))
    assert _check(_launches(DTYPES[name], width, capability), capability, tmp_path, spilling) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name, width, capability", list(itertools.product(DTYPES, (16, 64, 128), (80, 90, 100))))
def test_compiled_with_mask_and_weights(name: str, width: int, capability: int, tmp_path: Path) -> None:
    spilling = WEIGHTED.get((name, width, capability))
    assert _check(_launches(DTYPES[name], width, capability, masked=True), capability, tmp_path, spilling) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name, width, capability", list(itertools.product(("bf16", "fp32"), (16, 64), (80, 90))))
def test_compiled_exact(name: str, width: int, capability: int, tmp_path: Path) -> None:
    spilling = EXACT.get((name, width, capability))
    assert (
        _check(_launches(DTYPES[name], width, capability, masked=True, exact=True), capability, tmp_path, spilling)
        == []
    )


@pytest.mark.nightly
@pytest.mark.parametrize("width, capability", list(itertools.product((16, 64, 128), (80, 90, 100))))
def test_compiled_with_tf32(width: int, capability: int, tmp_path: Path) -> None:
    with mock.patch.object(launch, "allows_tf32", lambda: True):
        assert (
            _check(
                _launches(torch.float32, width, capability),
                capability,
                tmp_path,
                SPILLING.get(("tf32", width, capability)),
            )
            == []
        )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name, width, value_width", [("bf16", 64, 1), ("fp32", 64, 1), ("fp32", 100, 7), ("fp64", 3, 65)]
)
def test_compiled_uneven(name: str, width: int, value_width: int, tmp_path: Path) -> None:
    assert _check(_launches(DTYPES[name], width, 90, value_width), 90, tmp_path, SPILLING.get((name, width, 90))) == []


PREFIXES = {"_prefix_sums", "_send_sums_back", "_add_planes", "_scan_matrices"}


def _prefixes(dtype: torch.dtype, width: int, capability: int, masked: bool) -> list[Launch]:
    """Record the launches of the sums over all prefixes and of their gradients,
    in several runs with a state: each kernel once."""
    key = torch.empty(2, 4, 3000, width, dtype=dtype, device="meta")
    weights = (
        torch.empty(2, 4, 3000, dtype=torch.promote_types(dtype, torch.float32), device="meta") if masked else None
    )
    mask = torch.zeros(2, 3000, dtype=torch.bool, device="meta") if masked else None
    state = torch.empty(2, 4, width, width, dtype=torch.float64, device="meta")

    def call() -> None:
        sums_ = kernels.prefix_ridge(PrefixRidge(key, key, weights, mask, state, state, 1))
        kernels.prefix_ridge_backward(PrefixRidgeBackward(*sums_, key, key, weights, mask, 1, (True,) * 5))

    with as_if_on(capability):
        found = record(call)
    once = {str((one.kernel.__name__, [t is None for t in one.args], one.options.get("TOTAL"))): one for one in found}
    return [one for one in once.values() if one.kernel.__name__ in PREFIXES]


@pytest.mark.parametrize("name, width, capability, masked", [("fp32", 64, 90, True)])
def test_compiled_prefixes(name: str, width: int, capability: int, masked: bool, tmp_path: Path) -> None:
    found = _prefixes(DTYPES[name], width, capability, masked)
    assert {one.kernel.__name__ for one in found} == PREFIXES
    assert _check(found, capability, tmp_path) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name, width, capability", list(itertools.product(("bf16", "fp32", "fp64"), (1, 16, 64, 256), (80, 90, 100, 120)))
)
def test_compiled_prefixes_everywhere(name: str, width: int, capability: int, tmp_path: Path) -> None:
    spilling = OF_PREFIXES.get((name, width, capability))
    assert _check(_prefixes(DTYPES[name], width, capability, width < 256), capability, tmp_path, spilling) == []


def test_float64_behind_a_mask_compiles(tmp_path: Path) -> None:
    """Triton's own assertion fails on a float64 product of converted or masked operands:
    the kernel must keep these apart."""
    assert _check(_launches(torch.float32, 16, 90, masked=True, exact=True), 90, tmp_path) == []


def test_both_sums_in_one_pass() -> None:
    """Both sums take one launch for up to 64 columns on Hopper, or 32 on other GPUs and in float64; otherwise two."""
    for dtype, width, capability, passes in (
        (torch.float32, 64, 90, 1),
        (torch.float32, 65, 90, 2),
        (torch.float32, 64, 80, 2),
        (torch.float64, 64, 90, 2),
    ):
        found = [one for one in _launches(dtype, width, capability) if one.kernel.__name__ == "_gram"]
        assert len(found) == passes


def test_hopper_instructions(tmp_path: Path) -> None:
    found = {one.kernel.__name__: one for one in _launches(torch.bfloat16, 64, 90)}
    assert all(compiled(found[name], 90, tmp_path).count("HGMMA") for name in WITH_PRODUCTS)


# ---- each check refuses a planted fault


def test_spills_are_seen(tmp_path: Path) -> None:
    with mock.patch.dict(launch._GRAM, {"bf16x6": {64: (32, 16, 4, 3)}}):
        found = _check(_launches(torch.float32, 64, 90)[:1], 90, tmp_path)
    assert len(found) == 1 and "spilled" in found[0]


def test_too_much_shared_memory_is_seen(tmp_path: Path) -> None:
    with mock.patch.dict(launch._GRAM, {"half": {64: (256, 16, 8, 4)}}):
        found = _check(_launches(torch.bfloat16, 64, 90)[:1], 90, tmp_path)
    assert any("shared memory" in fault for fault in found)


def test_missing_matrix_instructions_are_seen(tmp_path: Path) -> None:
    with (
        mock.patch.object(sums, "gram_products", lambda *_: Products(torch.float32, "ieee")),
        mock.patch.dict(launch._GRAM, {"ieee": {16: (32, 16, 2, 1)}}),
    ):
        (launched,) = (one for one in _launches(torch.float32, 16, 90) if one.kernel.__name__ == "_gram")
    figures = compiled(launched, 90, tmp_path)
    assert faults(figures._replace(matrix=figures.count("HMMA", "HGMMA")), True) == ["no matrix instruction"]


def test_strides_beyond_32_bits_reach_the_kernel() -> None:
    """Strides beyond 32 bits are passed as 64 bits. Tensors are on the meta device, and need no memory."""
    with torch.device("meta"):
        k = torch.empty(0).as_strided((1, 1, 3, 8), (2**34, 2**33, 2**32, 1))
        (one,) = record(lambda: kernels.gram(Gram(k, k, None, None, None, (True, True), False)))
    assert one.options["strides"][0] == (2**34, 2**33, 2**32, 1)

"""How many programs the Triton kernels are compiled to, whatever the shapes and strides; counted where they are launched, without a GPU."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton

from cmab_kernels import attention_state
from cmab_kernels.attention import kernels as attention
from cmab_kernels.intention import kernels as intention
from cmab_kernels.nystrom import kernels as nystrom
from cmab_kernels.triton_common import alignment

from .gpu_machine.driver import Launched, stub

MOST = 4
"""The most programs of a kernel for one dtype, width and block size, and the same optional arguments."""
SIZES = (1, 2, 3, 16, 17, 64, 100, 128, 129, 300, 1024, 5003, 65536, 10**6)
BLOCKS = ("BLOCK_L", "BLOCK_N", "TILE_D", "TILE_E", "EXACT_N", "SIZE", "num_warps", "num_stages")


@pytest.fixture
def programs() -> Iterator[list[tuple[str, tuple[Any, ...], str]]]:
    """The programs that are compiled in a test, as (kernel, block sizes, everything that tells it from others); none is really compiled."""
    compiled = []

    def keep(source: Any, target: Any, options: dict[str, Any]) -> Any:
        names = source.fn.arg_names
        constants = {names[at]: value for (at, *_), value in source.constants.items()} | options
        compiled.append((source.name, tuple(constants.get(name) for name in BLOCKS), f"{source.signature} {constants} {source.attrs}"))
        return SimpleNamespace(run=lambda *_: None, function=0, packed_metadata=None)

    with stub(90), mock.patch.object(triton, "compile", keep):
        yield compiled


def _some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of this shape without memory: contiguous, or with the strides of a view of a larger one, perhaps beyond 32 bits."""
    kind = random.randrange(4)
    if kind == 0:
        return torch.empty(shape, dtype=dtype, device="meta")
    if kind == 1:
        return torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device="meta").mT
    strides = [random.choice((0, 1, 7, 16, 96, 2**20, 2**33)) for _ in shape[:-1]]
    return torch.empty(0, dtype=dtype, device="meta").as_strided(shape, (*strides, random.choice((1, 1, 3))))


def _attention(dtype: torch.dtype, packed: bool) -> None:
    B, H, L, N = (random.choice(SIZES[:most]) for most in (5, 5, 11, len(SIZES)))
    q, out, lse = _some(B, H, L, 16, dtype=dtype), _some(B, H, L, 16), torch.empty(B, H, L, dtype=torch.float64, device="meta")
    k, v = (_some(1 if packed else B, H, N, 16, dtype=dtype) for _ in "kv")
    offsets = torch.empty(B + 1, dtype=torch.int32, device="meta") if packed else None
    attention.attention_forward(q, k, v, None, offsets, out, lse, 0.25)
    attention.attention_forward(q, k, v, None, offsets, None, None, 0.25)
    attention.attention_backward(out, lse, q, k, v, None, offsets, out.contiguous(), lse, 0.25, (True, True, True))


def _intention(dtype: torch.dtype, weighted: bool) -> None:
    B, H, N = (random.choice(SIZES[:most]) for most in (5, 5, len(SIZES)))
    k, v = (_some(B, H, N, 16, dtype=dtype) for _ in "kv")
    weights = torch.empty(B, H, N, device="meta") if weighted else None
    gram, moment = intention.gram(k, v, weights, None, (True, True), True)
    intention.gram_backward(gram, moment, k, v, weights, None, (True, True, True), True)
    intention.apply_rows(k, moment)


def _nystrom(dtype: torch.dtype, absent: bool) -> None:
    M = random.choice(SIZES)
    q, k, v, square = (_some(M, 16, 16, dtype=dtype) for _ in range(4))
    gone = torch.empty(M, 16, dtype=torch.bool, device="meta") if absent else None
    nystrom.iterative_pinv_backward(nystrom.iterative_pinv(square, 6), square, 6)
    nystrom.landmark_values(q, k, v, gone, 0.25, 6)
    nystrom.landmark_values_backward(v, q, k, v, gone, 0.25, 6)


@pytest.mark.parametrize("option", [False, True])
@pytest.mark.parametrize(
    "call, dtype",
    [(_attention, torch.float32), (_attention, torch.bfloat16), (_intention, torch.float32), (_nystrom, torch.float32)],
)
def test_few_programs(
    call: Callable[[torch.dtype, bool], None], dtype: torch.dtype, option: bool, programs: list[tuple[str, tuple[Any, ...], str]]
) -> None:
    random.seed(0)
    for _ in range(500):
        call(dtype, option)
    found = defaultdict(set)
    for kernel, blocks, program in programs:
        found[kernel, blocks, "state_lse" in program and "'state_lse': 'constexpr'" not in program].add(program)
    assert len({kernel for kernel, *_ in found}) >= 4, "the kernels were launched"
    assert {key: different for key, different in found.items() if len(different) > MOST} == {}


def test_one_program_is_loaded_and_launched_for_all_shapes() -> None:
    """Really compiled, through Triton's launcher and the driver's library, with lengths and strides that Triton would specialise."""
    launched: list[Launched] = []
    with stub(80, launched.append):
        for batch, keys in [(1, 1), (2, 16), (3, 7), (16, 1000)]:
            q, k = torch.randn(batch, 1, 16, 16), torch.randn(batch, 1, keys, 16)
            attention_state(q, k, k, impl="triton")
    assert len(launched) == 4 and len({one.ptx for one in launched}) == 1
    assert [one.grid for one in launched] == [(batch, 1, 1) for batch in (1, 2, 3, 16)]


def test_what_is_known_of_addresses() -> None:
    rows = torch.empty(2, 3, 40, 32)
    assert alignment(rows, rows[..., :6], rows.bfloat16()) == (4, 2, 8)
    assert alignment(rows[:, :, 1:], rows[..., 4:20]) == (4, 4), "views whose rows start at multiples of 16 bytes"
    assert alignment(rows, rows[..., 1:17]) == alignment(rows, rows.mT) == (0, 0)
    assert alignment(rows[:, :, :1].mT.mT, rows[..., :1]) == (4, 1), "strides of an extent of 1 do not matter"

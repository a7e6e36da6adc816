"""The number of programs into which the Triton kernels are compiled,
for any shapes and strides, counted without a GPU."""

from __future__ import annotations

import importlib
import itertools
import os
import pkgutil
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
import triton.language as tl

import cmab_kernels
from cmab_kernels import attention_state, continual_attention_init, continual_nystrom_init, use_impl
from cmab_kernels.attention import triton as attention
from cmab_kernels.attention.contract import Attention, AttentionBackward
from cmab_kernels.attention.prefix import triton as prefix
from cmab_kernels.attention.prefix.contract import PrefixAttention, PrefixAttentionBackward
from cmab_kernels.attention.projected import triton as projected
from cmab_kernels.attention.projected.contract import ProjectedAttention, ProjectedAttentionBackward
from cmab_kernels.intention import triton as intention
from cmab_kernels.intention.contract import ApplyRows, GramBackward, PrefixRidge, PrefixRidgeBackward, RidgeUpdate
from cmab_kernels.intention.solve import triton as solve
from cmab_kernels.intention.solve.contract import RegularisedSolve
from cmab_kernels.layers import triton as layers
from cmab_kernels.layers.contract import (
    AttentionLayer,
    AttentionLayerBackward,
    FeedForwardLayer,
    FeedForwardLayerBackward,
)
from cmab_kernels.nystrom import triton as nystrom
from cmab_kernels.nystrom.continual import triton as continual
from cmab_kernels.nystrom.continual.gradient.function import Setting
from cmab_kernels.nystrom.contract import LandmarkValues, LandmarkValuesBackward, Pinv, PinvBackward
from cmab_kernels.runtime.triton_launch import Kernel, alignment, kernel
from gpu_machine.driver import Launched, stub

MOST = 4
"""The largest number of programs of a kernel for one dtype, width and block size; and the largest number of block
sizes."""
LEVELS = 2
"""The largest number of programs with the same optional arguments and results: with assumed alignment, or without."""
SIZES = (1, 2, 3, 16, 17, 64, 100, 128, 129, 300, 1024, 5003, 65536, 10**6)
BLOCKS = (
    "BLOCK_L",
    "BLOCK_N",
    "CHUNK",
    "MOST",
    "ROWS",
    "TILE_D",
    "TILE_E",
    "EXACT_N",
    "SIZE",
    "COLUMNS",
    "PIECE",
    "BLOCK_R",
    "TILE",
    "num_warps",
    "num_stages",
)


class Program(NamedTuple):
    """A compiled program: the kernel's name, its block sizes,
    its arguments that are None, and all other distinctions."""

    kernel: str
    blocks: tuple[Any, ...]
    absent: tuple[str, ...]
    everything: str


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    """The programs that a test compiles, by `Kernel` or by Triton's own launch; none is really compiled."""
    compiled = []

    def keep(source: Any, target: Any, options: dict[str, Any]) -> Any:
        names = source.fn.arg_names
        constants = {names[at]: value for (at, *_), value in source.constants.items()}
        absent = tuple(name for name, value in constants.items() if value is None)
        blocks = tuple((constants | options).get(name) for name in BLOCKS)
        compiled.append(
            Program(source.name, blocks, absent, f"{source.signature} {constants} {options} {source.attrs}")
        )
        run = mock.Mock(global_scratch_size=0)
        return SimpleNamespace(run=run, function=0, packed_metadata=None, launch_metadata=lambda *_: None)

    with stub(90), mock.patch.object(triton, "compile", keep), mock.patch.object(triton.compiler, "compile", keep):
        yield compiled


def _too_many(programs: list[Program]) -> dict[Any, set[Any]]:
    """The counts that are too high, by the kernel and the common part of its programs."""
    levels, variants, blocks = defaultdict(set), defaultdict(set), defaultdict(set)
    for program in programs:
        levels[program.kernel, program.blocks, program.absent].add(program.everything)
        variants[program.kernel, program.blocks].add(program.everything)
        blocks[program.kernel].add(program.blocks)
    counted = [(levels, LEVELS), (variants, MOST), (blocks, MOST)]
    return {key: different for found, most in counted for key, different in found.items() if len(different) > most}


# ---- calls of random shapes and strides


def _some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of this shape without memory: contiguous,
    or with the strides of a larger tensor's view, perhaps of 64 bits."""
    kind = random.randrange(4)
    if kind == 0:
        return torch.empty(shape, dtype=dtype, device="meta")
    if kind == 1:
        return torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device="meta").mT
    strides = [random.choice((0, 1, 7, 16, 96, 2**20, 2**33)) for _ in shape[:-1]]
    return torch.empty(0, dtype=dtype, device="meta").as_strided(shape, (*strides, random.choice((1, 1, 3))))


def _attention(dtype: torch.dtype, given: str = "") -> None:
    B, H, L, N = (random.choice(SIZES[:most]) for most in (5, 5, 11, len(SIZES)))
    q, out, lse = _some(B, H, L, 16, dtype=dtype), _some(B, H, L, 16), _some(B, H, L, dtype=torch.float64)
    k, v = (_some(1 if given == "offsets" else B, H, N, 16, dtype=dtype) for _ in "kv")
    offsets = torch.empty(B + 1, dtype=torch.int32, device="meta") if given == "offsets" else None
    mask = _some(B, N, dtype=torch.bool) if given == "mask" else None
    state = (out, lse) if given == "state" else (None, None)
    attention.attention_forward(Attention(q, k, v, mask, offsets, *state, scale=0.25))
    attention.attention_backward(
        AttentionBackward(
            out, lse, q, k, v, mask, offsets, out.contiguous(), lse.contiguous(), None, 0.25, (True, True, True, False)
        )
    )
    if given == "state":
        attention.attention_removal(Attention(q, k, v, mask, None, *state, scale=0.25))


def _prefix(dtype: torch.dtype, every: tuple[int, int], given: str = "") -> None:
    B, H, L, N = (random.choice(SIZES[:most]) for most in (5, 5, 11, len(SIZES)))
    q, k, v = (_some(B, H, n, 16, dtype=dtype) for n in (L, N, N))
    mask = _some(B, N, dtype=torch.bool) if given == "mask" else None
    state = (_some(B, H, L, 16), _some(B, H, L, dtype=torch.float64)) if given == "state" else (None, None)
    chunk = random.randint(*every)
    bias, decay = (
        (_some(B, H, N), _some(B, H, -(-N // chunk), dtype=torch.float64)) if given == "decay" else (None,) * 2
    )
    out, lse = prefix.prefix_forward(PrefixAttention(q, k, v, mask, *state, bias, decay, chunk, 0.25))
    arguments = (out, lse, q, k, v, mask, *state, out, lse, bias, decay, chunk, 0.25, (True,) * 7)
    prefix.prefix_backward(PrefixAttentionBackward(*arguments))


def _ridge_prefixes(every: tuple[int, int], given: str) -> None:
    B, H, N = (random.choice(SIZES[:most]) for most in (5, 5, len(SIZES)))
    key, value = (_some(B, H, N, n) for n in (16, 8))
    weights = _some(B, H, N) if given == "weights" else None
    mask = _some(B, N, dtype=torch.bool) if given == "mask" else None
    chunk = min(random.randint(*every), N)
    sums = intention.prefix_ridge(PrefixRidge(key, value, weights, mask, None, None, chunk))
    intention.prefix_ridge_backward(PrefixRidgeBackward(*sums, key, value, weights, mask, chunk, (True,) * 5))


def _projected(dtype: torch.dtype, given: str = "") -> None:
    """The number of heads is a width of the projections; kernels are compiled for each, as for each width of a
    layer."""
    K, H, (B, L, N) = 2, 3, (random.choice(SIZES[:most]) for most in (5, 11, len(SIZES)))
    sums = torch.promote_types(dtype, torch.float32)
    q, out, lse = _some(K, B, H, L, 16, dtype=sums), _some(K, B, H, L, 16), _some(K, B, H, L, dtype=torch.float64)
    x = _some(1 if given == "offsets" else B, N, 24, dtype=dtype)
    weight, bias = torch.empty(K, H * 32, 24, device="meta"), torch.empty(K, H * 32, device="meta")
    offsets = torch.empty(B + 1, dtype=torch.int32, device="meta") if given == "offsets" else None
    mask = _some(B, N, dtype=torch.bool) if given == "mask" else None
    state = (out, lse) if given == "state" else (None, None)
    rest = (q, x, weight, bias, mask, offsets)
    projected.projected_attention_forward(ProjectedAttention(*rest, *state, 0.25, 1e-3))
    projected.projected_attention_backward(
        ProjectedAttentionBackward(out, lse, *rest, out, lse, 0.25, 1e-3, (True,) * 4)
    )


def _layers(dtype: torch.dtype, mask: bool) -> None:
    B, L, N = (random.choice(SIZES[:most]) for most in (5, 11, 11))
    x, context, dy = (_some(*shape, dtype=dtype) for shape in ((B, L, 24), (B, N, 32), (B, L, 24)))
    row, other = torch.empty(24, dtype=dtype, device="meta"), torch.empty(32, dtype=dtype, device="meta")
    query, key, out, square = (_some(m, n, dtype=dtype) for m, n in ((32, 24), (32, 32), (24, 32), (64, 24)))
    ignore = _some(B, N, dtype=torch.bool) if mask else None
    tensors = x, context, ignore, row, row, other, other, query, other, key, other, key, other, out, row
    settings = 2, 0.25, 1e-5, 1e-5, "input"
    _, *kept = layers.attention_layer(AttentionLayer(*tensors, *settings, True))
    layers.attention_layer_backward(AttentionLayerBackward(dy, *tensors, *kept, *settings, (True,) * 14))
    rows, expand_bias = (t.reshape(-1, 24) for t in (x, dy)), torch.empty(64, dtype=dtype, device="meta")
    x, dy = rows
    network = (row, row, square, expand_bias, out, row, 1e-5, "geglu", "input")
    layers.feed_forward_layer(FeedForwardLayer(x, *network))
    layers.feed_forward_layer_backward(FeedForwardLayerBackward(dy, x, *network, (True,) * 7))


def _intention(given: str = "") -> None:
    B, H, N = (random.choice(SIZES[:most]) for most in (5, 5, len(SIZES)))
    k, v = (_some(B, H, N, 16) for _ in "kv")
    weights = _some(B, H, N) if given == "weights" else None
    mask = _some(B, N, dtype=torch.bool) if given == "mask" else None
    gram, moment, count = intention.ridge_update(RidgeUpdate(k, v, weights, mask, None, None, None, None))
    intention.ridge_update(RidgeUpdate(k, v, weights, mask, None, gram, moment, count))
    intention.gram_backward(GramBackward(gram, moment, k, v, weights, mask, None, (True, True, True), True))
    intention.apply_rows(ApplyRows(k, moment))


def _solve(dtype: torch.dtype) -> None:
    M, D = random.choice(SIZES), random.randint(17, 32)
    solve.regularised_solve(
        RegularisedSolve(
            _some(M, D, D, dtype=dtype), _some(M, D, random.choice(SIZES), dtype=dtype), _some(M, 1, dtype=dtype)[:, 0]
        )
    )


def _nystrom(landmarks: tuple[int, int], given: str = "") -> None:
    M, m = random.choice(SIZES), random.randint(*landmarks)
    q, k, v, square = (_some(M, m, width) for width in (16, 16, 16, m))
    absent = torch.empty(M, m, dtype=torch.bool, device="meta") if given == "absent" else None
    nystrom.iterative_pinv_backward(PinvBackward(nystrom.iterative_pinv(Pinv(square, 2)), square, 2))
    nystrom.landmark_values(LandmarkValues(q, k, v, absent, 0.25, 2))
    nystrom.landmark_values_backward(LandmarkValuesBackward(v, q, k, v, absent, 0.25, 2))


def _nystrom_step(dtype: torch.dtype, landmarks: tuple[int, int], fixed: bool, retroactive: bool) -> None:
    B, H, n, m = (
        random.choice(SIZES[:5]),
        random.choice(SIZES[:5]),
        random.randint(300, 10**6),
        random.randint(*landmarks),
    )
    window, given = (
        torch.empty(B, H, n, 16, dtype=dtype, device="meta"),
        torch.empty(H, m, 16, dtype=dtype, device="meta"),
    )
    chosen = {"landmarks": (given, given)} if fixed else {"num_landmarks": m}
    with use_impl("reference"):
        state = continual_nystrom_init(window, window, window, **chosen)
    for t in random.sample(SIZES, 3):
        tokens = _some(B, H, t, 16, dtype=dtype)
        _, state = continual.continual_nystrom_step(state, tokens, tokens, tokens, retroactive)


def _attention_step(dtype: torch.dtype, retroactive: bool) -> None:
    B, H, n = (random.choice(SIZES[:most]) for most in (5, 5, len(SIZES)))
    window = torch.empty(B, H, n, 16, dtype=dtype, device="meta")
    state = continual_attention_init(window, window, window)
    for t in random.sample(SIZES, 3):
        tokens = _some(B, H, t, 16, dtype=dtype)
        _, state = continual.continual_attention_step(state, tokens, tokens, tokens, retroactive)


def _step_gradient(dtype: torch.dtype, landmarks: tuple[int, int] | None, given: str) -> None:
    """`given`: the gradients of outputs, of the rings after the step, or of both."""
    (B, H, n), t = (random.choice(SIZES[:5]) for _ in range(3)), random.choice(SIZES[:5])
    m, wide = random.randint(*landmarks) if landmarks else 0, torch.float32

    def plain(rows: int, columns: int = 16, dtype: torch.dtype = wide) -> Tensor:
        return torch.empty(B, H, rows, columns, dtype=dtype, device="meta")

    shapes = ((m, 21), (m, 16), (m, 16), (m, m), (t * m, 19))
    tensors = tuple(plain(*shape) for shape in shapes) if landmarks else None
    query, ring = plain(t, dtype=dtype) if "outputs" in given else None, plain(n + t, dtype=dtype)
    rings = (plain(n + t),) * 2 if "rings" in given else (None, None)
    step = Setting(t, n, n + t, 0.25, False)
    position = torch.empty(B, H, dtype=torch.int64, device="meta")
    dsums = plain(m, 21) if landmarks else None
    continual.step_backward(step, query, ring, ring, tensors, position, query, *rings, dsums)


def _calls() -> dict[str, tuple[int, Callable[[], None]]]:
    """The calls by name, each with how often it is made."""
    calls: dict[str, tuple[int, Callable[[], None]]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for given in ("", "mask", "offsets", "state"):
            calls[f"attention {name} {given}"] = 500, partial(_attention, dtype, given)
            calls[f"projected {name} {given}"] = 100, partial(_projected, dtype, given)
        for mask in (False, True):
            calls[f"layers {name} mask {mask}"] = 40, partial(_layers, dtype, mask)
        for each, landmarks in itertools.product(("outputs", "rings", "outputs, rings"), (None, (3, 16), (65, 128))):
            calls[f"step gradient {name} {each} {landmarks}"] = 30, partial(_step_gradient, dtype, landmarks, each)
        for retroactive in (False, True):
            how = "retroactive" if retroactive else "single"
            calls[f"attention step {name} {how}"] = 60, partial(_attention_step, dtype, retroactive)
            for fixed, landmarks in ((True, (3, 16)), (False, (33, 64)), (False, (65, 128))):
                calls[f"nystrom step {name} {how} {fixed} {landmarks}"] = (
                    30,
                    partial(_nystrom_step, dtype, landmarks, fixed, retroactive),
                )
        for given, every in itertools.product(("", "mask", "state", "decay"), ((1, 2), (3, 15), (16, 10**6))):
            calls[f"prefixes {name} {given} {every}"] = 200, partial(_prefix, dtype, every, given)
    for given in ("", "weights", "mask"):
        calls[f"intention {given}"] = 500, partial(_intention, given)
        for every in ((1, 15), (16, 10**6)):
            calls[f"ridge prefixes {given} {every}"] = 200, partial(_ridge_prefixes, every, given)
    for dtype in (torch.float32, torch.float64):
        calls[f"solve {dtype}"] = 500, partial(_solve, dtype)
    for given in ("", "absent"):
        calls[f"nystrom {given}"] = 500, partial(_nystrom, (2, 16), given)
        calls[f"nystrom large {given}"] = 20, partial(_nystrom, (65, 256), given)
    return calls


CALLS = _calls()


@pytest.mark.parametrize("share", [0.1, pytest.param(1.0, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", CALLS)
def test_few_programs(name: str, share: float, programs: list[Program]) -> None:
    """A tenth of the calls already has most combinations of shapes and strides."""
    random.seed(0)
    times, call = CALLS[name]
    for _ in range(max(int(share * times), 10)):
        call()
    assert programs, "kernels were launched"
    assert _too_many(programs) == {}


def test_every_kernel_is_counted(programs: list[Program]) -> None:
    random.seed(0)
    for _, call in CALLS.values():
        for _ in range(3):
            call()
    modules = [m.name for m in pkgutil.walk_packages(cmab_kernels.__path__, "cmab_kernels.") if ".triton." in m.name]
    there = {
        name
        for module in modules
        for name, found in vars(importlib.import_module(module)).items()
        if isinstance(found, Kernel)
    }
    assert len(there) > 15 and {program.kernel for program in programs} == there


# ---- planted faults: uses of N, the number of keys, in each kernel


@triton.jit
def _guessed(x, N):
    """N, with the type that Triton gives it because of its value."""


@kernel("x")
def _constant(x, N: tl.constexpr):
    """N as a constant."""


@kernel("x")
def _third_level(x, ALIGN: tl.constexpr):
    """One alignment more than allowed."""


@kernel("x")
def _block(x, BLOCK_N: tl.constexpr):
    """A block as large as N."""


FAULTS = {
    "a guessed type": lambda x, N: _guessed[(1,)](x, N),
    "a constant": lambda x, N: _constant(1, x, N=N),
    "a third level of alignment": lambda x, N: _third_level(1, x, ALIGN=min(N, 3)),
    "a block": lambda x, N: _block(1, x, BLOCK_N=triton.next_power_of_2(N)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, programs: list[Program]) -> None:
    for N in SIZES:
        FAULTS[fault](torch.empty(1, device="meta"), N)
    assert _too_many(programs)


# ---- launches, and alignment


def test_one_program_is_loaded_and_launched_for_all_shapes() -> None:
    """Really compiled, through Triton's launch code and the driver's library, with lengths and strides for which Triton
    would specialise."""
    launched: list[Launched] = []
    with stub(80, launched.append):
        for batch, keys in [(1, 1), (2, 16), (3, 7), (16, 1000)]:
            q, k = torch.randn(batch, 1, 16, 16), torch.randn(batch, 1, keys, 16)
            attention_state(q, k, k, impl="triton")
    assert len(launched) == 4 and len({one.ptx for one in launched}) == 1
    assert [one.grid for one in launched] == [(batch, 1, 1) for batch in (1, 2, 3, 16)]


def test_equal_constants_are_compiled_once(programs: list[Program]) -> None:
    """Lengths with the same block are one program, which is not looked up again."""
    key = torch.empty(2, 1, 3, 16, device="meta")
    for queries in range(1, 17):
        attention.attention_forward(Attention(torch.empty(2, 1, queries, 16, device="meta"), key, key, scale=0.25))
    assert len(programs) == 1


def test_what_is_known_of_addresses() -> None:
    rows = torch.empty(2, 3, 40, 32)
    assert alignment(rows, rows[..., :6], rows.bfloat16()) == (4, 2, 8)
    assert alignment(rows[:, :, 1:], rows[..., 4:20]) == (4, 4), "views whose rows start at multiples of 16 bytes"
    assert alignment(rows, rows[..., 1:17]) == alignment(rows, rows.mT) == (0, 0)
    assert alignment(rows[:, :, :1].mT.mT, rows[..., :1]) == (4, 1), "strides of an extent of 1 do not matter"

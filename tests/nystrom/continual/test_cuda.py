"""The CUDA C++ kernels of the continual steps, compiled for the CPU (tests/emulated_cuda.py), compared with the
definition.

These tests say nothing about a real GPU: its timing, its streams, or its graphs. A capture is emulated: the launch
function is told that there is one.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cmab_kernels.nystrom.continual.state import ContinualNystromState, next_state
from cmab_kernels.nystrom.reference import iterative_pinv_reference
from cmab_kernels.testing import STREAMS, row_error
from tests import emulated_cuda

from .memory_cases import (
    check_a_capture_keeps_the_kind_of_output,
    check_a_sole_owner_goes_on_in_its_own_memory,
    check_in_place_is_out_of_place,
)
from .step_cases import (
    FADING,
    Tokens,
    check_log_scales,
    check_the_largest_of_huge_logits_leaves,
    check_values_that_fade,
    compare,
)
from .step_cases import defined as _defined
from .step_cases import errors as _errors
from .step_cases import part as _part
from .step_cases import same as _same
from .step_cases import start as _start
from .step_cases import tokens as _tokens
from .step_cases import wide as _wide
from .test_suite import StepSuite

if emulated_cuda.COMPILER is None:
    pytest.skip("no C++ compiler to build the emulated kernels with", allow_module_level=True)
cuda_step = pytest.importorskip("cmab_kernels.nystrom.continual.cuda", exc_type=ImportError)

Emulated = emulated_cuda.EmulatedCuda
pytestmark = pytest.mark.thorough
BUILT = cuda_step.CUDA


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated_cuda.shared(tmp_path_factory)


class Player:
    """The module that launch functions call: the emulated kernels, and a flag that says whether a graph is being
    captured."""

    def __init__(self, library: Path) -> None:
        self.kernels = Emulated(library)
        self.captures = False

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self.captures = True
        yield
        self.captures = False


@pytest.fixture(autouse=True)
def played(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Player]:
    """Let launch functions call the emulated kernels; fill all memory that they allocate with NaN."""
    player = Player(library)
    monkeypatch.setattr(cuda_step, "CUDA", player.kernels)
    monkeypatch.setattr(cuda_step, "launch", emulated_cuda.launch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: player.captures)
    yield player


def _step(state: Any, tokens: Tokens, retroactive: bool = False) -> tuple[Tensor, Any]:
    name = "continual_nystrom_step" if isinstance(state, ContinualNystromState) else "continual_attention_step"
    return getattr(cuda_step, name)(state, *tokens, retroactive)


def _compare(*given: Any, **options: Any) -> None:
    compare(_step, *given, **options)


SHAPES = {  # batch, heads, window, landmarks, D, E
    "ragged": (1, 2, 14, 4, 8, 8),
    "odd": (2, 1, 13, 5, 7, 3),
    "one of everything": (1, 1, 1, 1, 1, 1),
    "one landmark": (1, 2, 9, 1, 5, 2),
    "as many as tokens": (1, 1, 6, 6, 17, 33),
    "two rows a thread": (1, 1, 40, 17, 16, 65),
    "most landmarks": (1, 1, 70, 64, 16, 8),
    "tiles of the window": (1, 1, 600, 8, 3, 300),
}
CHUNKS = [1, 1, 3, 1, 7, 2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("retroactive", [False, True])
def test_nystrom(shape: str, dtype: torch.dtype, retroactive: bool) -> None:
    batch, heads, window, landmarks, width, value_width = SHAPES[shape]
    stream = _tokens(batch, heads, window + sum(CHUNKS), width, value_width, dtype)
    _compare(stream, window, landmarks, CHUNKS, retroactive)
    _compare(stream, window, landmarks, CHUNKS[2:3], retroactive, fixed=True)


@pytest.mark.parametrize("shape", ["ragged", "odd", "one of everything", "tiles of the window"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("retroactive", [False, True])
def test_exact(shape: str, dtype: torch.dtype, retroactive: bool) -> None:
    batch, heads, window, _, width, value_width = SHAPES[shape]
    stream = _tokens(batch, heads, window + sum(CHUNKS[:4]), width, value_width, dtype)
    _compare(stream, window, None, CHUNKS[:4], retroactive)


@pytest.mark.parametrize("retroactive", [False, True])
def test_exact_rows_in_tiles(retroactive: bool) -> None:
    _compare(_tokens(1, 1, 308, 2, 2), 300, None, [1, 7], retroactive)


@pytest.mark.parametrize("law", STREAMS)
@pytest.mark.parametrize("landmarks, fixed", [(5, False), (5, True), (None, False)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_laws(law: str, landmarks: int | None, fixed: bool, dtype: torch.dtype) -> None:
    """All outputs of 700 steps are right; plain subtraction is wrong, or NaN, after a few dozen steps."""
    window, length = 23, 700
    query, key, value = _tokens(1, 2, window + length, 4, 3, dtype, size=2.0)
    query = 2.0 * torch.nn.functional.normalize(query.double(), dim=-1).to(dtype)
    key = key * STREAMS[law](window + length)[:, None].to(dtype)
    _compare((query, key, value), window, landmarks, [length], False, fixed)


@pytest.mark.parametrize("landmarks, fixed", [(5, False), (5, True), (None, False)])
@pytest.mark.parametrize("retroactive", [False, True])
@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_huge_logits(landmarks: int | None, fixed: bool, retroactive: bool, order: str, dtype: torch.dtype) -> None:
    """Logits from 2^20 to 2^60 enter the window in any order, are its largest for a while, and leave it."""
    window, suite = 23, StepSuite()
    tokens = tuple(suite.huge_inputs(dtype, order, {"N": 3 * window}).values())
    query, key, value = tokens
    stream: Tokens = (query, key, value)
    ours, right = (
        _start(part, landmarks, fixed) for part in (_part(stream, 0, window), _wide(_part(stream, 0, window)))
    )
    for at in range(window, 3 * window):
        out, ours = _step(ours, _part(stream, at, at + 1), retroactive)
        wanted, right = _defined(right, _wide(_part(stream, at, at + 1)), retroactive)
        (error,) = _errors(wanted, out)
        assert (error <= 64 * torch.finfo(dtype).eps).all(), (at, float(error.max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_largest_of_huge_logits_leaves(dtype: torch.dtype) -> None:
    check_the_largest_of_huge_logits_leaves(lambda state, token: _step(state, token)[1], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("law", FADING)
def test_values_that_fade(law: str, dtype: torch.dtype) -> None:
    check_values_that_fade(lambda state, token: _step(state, token)[1], law, dtype)


def test_log_scales() -> None:
    check_log_scales(lambda state, token: _step(state, token)[1])


# ---- bits


KINDS = [(5, False), (5, True), (None, False), (None, True)]
kinds = pytest.mark.parametrize("landmarks, retroactive", KINDS)


@kinds
def test_chunks_do_not_matter(landmarks: int | None, retroactive: bool) -> None:
    window, length = 17, 45
    stream = _tokens(2, 2, window + length, 6, 9, size=5.0)
    results = []
    for chunks in ([1] * 45, [45], [2, 1, 30, 12], [44, 1]):
        state, at, outs = _start(_part(stream, 0, window), landmarks), window, []
        for chunk in chunks:
            out, state = _step(state, _part(stream, at, at + chunk), retroactive)
            at += chunk
            outs.append(out)
        results.append((outs[-1] if retroactive else torch.cat(outs, dim=2), state))
    assert all(_same(out, results[0][0]) and _same(state, results[0][1]) for out, state in results)


@kinds
def test_any_order_and_alone(landmarks: int | None, retroactive: bool, played: Player) -> None:
    stream = _tokens(2, 3, 60, 6, 9, size=5.0)
    whole = _step(_start(_part(stream, 0, 33), landmarks), _part(stream, 33, 60), retroactive)
    for played.kernels.seed in range(1, 5):
        again = _step(_start(_part(stream, 0, 33), landmarks), _part(stream, 33, 60), retroactive)
        assert all(map(_same, again, whole))
    batch = _start(_part(stream, 0, 33), landmarks)
    for b, h in ((0, 2), (1, 0)):

        def one(t: Any, b: int = b, h: int = h) -> Any:
            return t[b : b + 1, h : h + 1].contiguous() if isinstance(t, Tensor) and t.dim() else t

        out, _ = _step(type(batch)(*map(one, batch)), tuple(map(one, _part(stream, 33, 60))), retroactive)
        assert torch.equal(out, one(whole[0]))


@kinds
@pytest.mark.parametrize("chunk", [1, 4, 40])
def test_in_place_is_out_of_place(landmarks: int | None, retroactive: bool, chunk: int, played: Player) -> None:
    check_in_place_is_out_of_place(_step, played.capture, landmarks, retroactive, chunk)


def test_a_sole_owner_goes_on_in_its_own_memory() -> None:
    check_a_sole_owner_goes_on_in_its_own_memory(_step)


class Recorder:
    """Kernels during the capture of a graph: a call is recorded, and runs when it is replayed."""

    def __init__(self, kernels: Emulated) -> None:
        self.kernels = kernels
        self.replays: list[Callable[[], None]] = []

    def nystrom_step(self, **arguments: Any) -> None:
        self.replays.append(lambda: self.kernels.nystrom_step(**arguments))

    def attention_step(self, **arguments: Any) -> None:
        self.replays.append(lambda: self.kernels.attention_step(**arguments))


@kinds
def test_a_captured_step_streams_on(
    landmarks: int | None, retroactive: bool, played: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One captured call is replayed with new tokens in the same memory; then the captured state is stepped eagerly."""
    stream = _tokens(1, 2, 80, 4, 4)
    token = tuple(t.clone() for t in _part(stream, 20, 21))
    (_, state), (_, eager) = (_step(_start(_part(stream, 0, 20), landmarks), token, retroactive) for _ in range(2))
    recorder = Recorder(played.kernels)
    with monkeypatch.context() as context:
        context.setattr(cuda_step, "CUDA", recorder)
        with played.capture():
            out, same = _step(state, token, retroactive)
    assert same is state and len(recorder.replays) == 1
    for at in range(21, 80):
        wanted, eager = _step(eager, _part(stream, at, at + 1), retroactive)
        if at < 60:
            for held, new in zip(token, _part(stream, at, at + 1), strict=True):
                held.copy_(new)
            recorder.replays[0]()
        else:
            out, state = _step(state, _part(stream, at, at + 1), retroactive)
        assert torch.equal(out, wanted)
    assert _same(state, eager)


def test_a_capture_cannot_change_the_kind_of_output(played: Player) -> None:
    check_a_capture_keeps_the_kind_of_output(_step, played.capture)


def test_single_outputs_keep_no_rows() -> None:
    stream = _tokens(1, 1, 16, 4, 4)
    state = _start(_part(stream, 0, 10), None)
    for at, retroactive in enumerate((False, True, True, False, True), start=10):
        out, state = _step(state, _part(stream, at, at + 1), retroactive)
        assert state.sums.shape == state.spare.shape == (1, 1, 10 * retroactive, 4 + 5)
        window = _wide(_part(stream, at - 9, at + 1))
        wanted = torch.nn.functional.scaled_dot_product_attention(*window)
        assert torch.allclose(out.double(), wanted if retroactive else wanted[:, :, -1:], atol=1e-5)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns first": lambda t: t.mT.contiguous().mT,
    "step 2": lambda t: t.repeat_interleave(2, -1).repeat_interleave(2, -2)[..., ::2, ::2],
    "expanded": lambda t: t[:1, :1].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@kinds
def test_layouts(layout: str, landmarks: int | None, retroactive: bool) -> None:
    stream = _tokens(2, 2, 16, 5, 3)
    query, key, value = map(LAYOUTS[layout], _part(stream, 11, 16))
    strange = _step(_start(_part(stream, 0, 11), landmarks), (query, key, value), retroactive)
    plain = _step(
        _start(_part(stream, 0, 11), landmarks), tuple(t.contiguous() for t in (query, key, value)), retroactive
    )
    assert all(map(_same, strange, plain))


def test_tokens_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are 2^31 elements apart, in memory that is reserved and never accessed."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    stream = _tokens(1, 1, 13, 4, 4, torch.float16)
    far = torch.empty(2**32 + 8, dtype=torch.float16).as_strided((1, 1, 3, 4), (1, 1, 2**31, 1))
    far.copy_(stream[1][:, :, 10:])
    window = _part(stream, 0, 10)
    wanted, _ = _step(_start(window, 3), (stream[0][:, :, 10:], stream[1][:, :, 10:], stream[2][:, :, 10:]))
    assert torch.equal(_step(_start(window, 3), (stream[0][:, :, 10:], far, stream[2][:, :, 10:]))[0], wanted)


@pytest.mark.parametrize("batch, heads", [(0, 2), (2, 0), (300, 2)])
def test_batches(batch: int, heads: int) -> None:
    _compare(_tokens(batch, heads, 16, 3, 4, torch.float64), 8, 2, [8], False)


# ---- hard numbers


@pytest.mark.parametrize(
    "part, poison",
    [(0, math.nan), (1, math.nan), (2, math.nan), (0, math.inf), (1, -math.inf), (2, math.inf), (1, 1.7e308)],
)
@pytest.mark.parametrize("landmarks, fixed", [(5, False), (5, True), (None, False)])
@pytest.mark.parametrize("retroactive", [False, True])
def test_recovery(part: int, poison: float, landmarks: int | None, fixed: bool, retroactive: bool) -> None:
    """Rows may be NaN while the window or a landmark has a token with a NaN or with NaN logits; afterwards they are
    right."""
    window, at_fault = 15, 22
    stream = _tokens(1, 2, 4 * window, 4, 4, torch.float64, size=20.0)
    dirty = tuple(t.clone() for t in stream)
    dirty[part][0, 1, at_fault] = poison * torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    in_landmarks = landmarks is not None and not fixed and part < 2
    gone = at_fault + window * (2 if in_landmarks else 1) + (window // 5 if in_landmarks else 0)
    ours, right = (_start(_part(stream, 0, window), landmarks, fixed) for _ in range(2))
    seen = False
    for at in range(window, 4 * window):
        out, ours = _step(ours, _part(dirty, at, at + 1), retroactive)
        wanted, right = _defined(right, _part(stream, at, at + 1), retroactive)
        (error,) = _errors(wanted, out)
        assert (error[:, 0] < 1e-12).all(), "the other head"
        assert at_fault <= at < gone or (error < 1e-12).all(), at
        seen |= not (error < 1e-3).all()
    assert seen, "such a token does something"


@pytest.mark.parametrize("landmarks", [3, None])
def test_values_that_outweigh_the_rest(landmarks: int | None) -> None:
    """When a value of 1e6 leaves the window, its rounding error must be removed too.

    The row sum phi does not change, so the guard has to check values.
    """
    window, spike = 20, 30
    stream = _tokens(1, 2, 70, 4, 5)
    stream[2][:, :, spike] = 1e6
    ours, right = _start(_part(stream, 0, window), landmarks), _start(_wide(_part(stream, 0, window)), landmarks)
    for at in range(window, 70):
        out, ours = _step(ours, _part(stream, at, at + 1), True)
        wanted, right = _defined(right, _wide(_part(stream, at, at + 1)), True)
        (error,) = _errors(wanted, out)
        assert at < spike + window or (error < 1e-4).all(), (at, float(error.max()))


@pytest.mark.parametrize("landmarks", [3, None])
def test_weights_that_outweigh_the_rest(landmarks: int | None) -> None:
    """When a token of weight exp(20) and value 0 leaves, the row sum has lost its digits, and only its own guard can
    detect that."""
    window, spike = 6, 9
    _, key, value = _tokens(1, 1, 20, 1, 5)
    key[:, :, spike], value[:, :, spike] = 20.0, 0.0
    _compare((torch.ones(1, 1, 20, 1), key, value), window, landmarks, [1] * 14, True, fixed=True)


@pytest.mark.parametrize("size", [1e4, 1e18, 1e38])
def test_logits_of_any_size(size: float) -> None:
    """Logits are plus or minus `size`, so that one key has all the weight or equal keys share it.

    Sums of tokens and logits may overflow float32.
    """
    window = 8
    key = torch.where(torch.rand(1, 1, 200, 1) < 0.5, -size, size)
    query, value = torch.ones(1, 1, 200, 1), torch.randn(1, 1, 200, 3)
    for stream in ((query, key, value), (key, key, value)):
        for landmarks, retroactive in KINDS:
            ours = _start(_part(stream, 0, window), landmarks and 3, scale=1.0)
            right = _start(_part(stream, 0, window), landmarks and 3, scale=1.0)
            for at in range(window, 200):
                out, ours = _step(ours, _part(stream, at, at + 1), retroactive)
                wanted, right = _defined(right, _part(stream, at, at + 1), retroactive)
                assert out.isfinite().all() and (row_error(out, wanted) < 1e-4).all()


def test_falling_logits_make_every_row_anew() -> None:
    """The worst case of the guard: each token that leaves had almost all the weight,
    so every row is recomputed at every step."""
    window, length = 9, 60
    query, key, value = (
        torch.ones(1, 1, length, 1),
        -3.0 * torch.arange(length).view(1, 1, -1, 1),
        torch.randn(1, 1, length, 4),
    )
    for landmarks in (3, None):
        _compare((query, key, value), window, landmarks, [1] * (length - window), True)


@pytest.mark.parametrize("landmarks, window", [(3, 6), (None, 1100)])
def test_rows_are_made_anew_on_schedule(landmarks: int | None, window: int) -> None:
    """An error in sums that the guard cannot detect is gone after 1,024 steps, and not before."""
    *asked, value = _tokens(1, 1, window + 1040, 1, 1, torch.float64, size=0.1)
    stream = (*asked, 1 + 0.1 * value)
    _, start = _step(_start(_part(stream, 0, window), landmarks, fixed=True), _part(stream, window, window + 1), True)
    wrong = start._replace(sums=start.sums + torch.tensor([1e-3, 0.0, 0.0, 0.0, 0.0, 0.0]))

    def difference(steps: int) -> float:
        tokens = _part(stream, window + 1, window + 1 + steps)
        return float((_step(wrong, tokens, True)[1].sums - _step(start, tokens, True)[1].sums).abs().max())

    assert difference(4) > 1e-4 and difference(1030) < 1e-12


# ---- errors, and the built extension


def test_reasons() -> None:
    value = torch.zeros(1, 1, 1, 8)
    assert "needs a GPU" in str(cuda_step.unsupported(value, value, value))
    meta = torch.zeros(1, 1, 1, 513, device="meta")
    assert "needs a GPU" in str(cuda_step.unsupported(meta, meta, meta))
    there = {"device": torch.device("cuda"), "dtype": torch.float32}
    few, many, wide = (SimpleNamespace(shape=(1, 1, *extents), **there) for extents in ((4, 8), (65, 8), (4, 513)))
    assert "at most 64 landmarks, and the state has 65" in str(cuda_step.unsupported(few, few, few, many))
    assert "at most 512 wide, and value is 513" in str(cuda_step.unsupported(few, few, wide, few))


@kinds
def test_the_extension_takes_tensors_on_a_gpu_alone(
    landmarks: int | None, retroactive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built extension has all functions of the emulated one, and raises an error for tensors on the CPU before it
    launches anything."""
    monkeypatch.setattr(cuda_step, "CUDA", BUILT)
    tokens = _tokens(1, 1, 5, 2, 2)
    with pytest.raises(ValueError, match="is on another device"):
        _step(_start(tokens, landmarks and 2), tokens, retroactive)


def test_a_wrong_call_ends_in_an_error(played: Player) -> None:
    """A wrong call raises an exception that names the argument, before a kernel reads or writes anything."""
    tokens = query, key, value = _tokens(1, 2, 5, 4, 3)
    state = _start(tokens, 2)
    after = next_state(state, 5, False)
    right = {
        "state": state,
        "after": after,
        "query": query,
        "key": key,
        "value": value,
        "retroactive": False,
        "out": value.clone(),
        "stream": 0,
    }
    played.kernels.nystrom_step(**right)
    for name, wrong, error in (
        ("query", query.double(), "`key` is float32, not float64"),
        ("value", value[:, :1], "`value` has 1 in dimension 1"),
        ("key", key[0], "`key` is not a dense tensor of 4 dimensions"),
        ("out", value[:, :, 1:], "`out` is not contiguous"),
        ("out", value[:, :, 1:].contiguous(), "`out` has a wrong number of rows"),
        ("out", None, "`out` is a NoneType, not a torch.Tensor"),
        ("state", tuple(state), "`state` does not belong to this kind of step"),
        ("state", state._replace(sums=state.sums[..., :-1].contiguous()), "`after.sums` has 8 in dimension 3"),
        ("after", after._replace(inverse=after.inverse.double()), "`state.inverse` is float64, not float32"),
        ("state", state._replace(scale=torch.tensor(1.0)), "`state.scale` is not a float64 number"),
        ("after", after._replace(position=torch.zeros(1, 2)), "`state.position` is float32, not int64"),
        ("retroactive", 1, "`retroactive` is not a bool"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(error)):
            played.kernels.nystrom_step(**right | {name: wrong})
    for unknown in (right | {"more": 1}, {name: right[name] for name in right if name != "value"}):
        with pytest.raises(TypeError):
            played.kernels.nystrom_step(**unknown)


@pytest.mark.nightly
def test_under_sanitizers() -> None:
    """Tests of this file run again under sanitizers:
    an access out of bounds or undefined behaviour ends the process."""
    emulated_cuda.run_under_sanitizers(
        __file__, "(test_nystrom and dtype1) or (test_exact and dtype1) or place or recovery or layouts or batches"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("order", [1, 16, 33, 64])
@pytest.mark.parametrize("exponent", [-100, 0, 80])
def test_the_pseudo_inverse_of_tiny_and_huge_matrices(
    played: Player, order: int, exponent: int, dtype: torch.dtype
) -> None:
    """The product of a matrix's norms overflows or underflows, but its inverse is still in range."""
    matrix = (
        (4 * torch.eye(order, dtype=torch.float64) + torch.rand(order, order, dtype=torch.float64))
        .softmax(-1)
        .to(dtype)
    )
    inverse = torch.empty_like(matrix)
    played.kernels.iterative_pinv(matrix=2.0**exponent * matrix, inverse=inverse, iterations=8)
    right = iterative_pinv_reference(matrix.double(), 8)
    error = (2.0**exponent * inverse.double() - right).norm() / right.norm()
    assert error < 200 * torch.finfo(dtype).eps

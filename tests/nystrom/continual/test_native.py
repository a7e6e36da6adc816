"""The continual steps in C++, compared with recomputation in float64: every instruction set, type and layout, and
states as values."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cmab_kernels.nystrom.continual import continual_attention_init, continual_nystrom_init
from cmab_kernels.nystrom.continual.reference import (
    attention_step_reference,
    nystrom_step_reference,
    row_means,
    row_sums,
    window_of,
)
from cmab_kernels.nystrom.continual.state import ContinualNystromState
from cmab_kernels.nystrom.reference import logits
from cmab_kernels.runtime.dtypes import state_dtype

native = pytest.importorskip(
    "cmab_kernels.nystrom.continual.native", reason="the extension was not built", exc_type=ImportError
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KINDS = ["continual", "fixed", "exact"]
# (n, m, D, E)
SIZES = [(8, 3, 5, 7), (64, 16, 64, 64), (7, 7, 3, 17), (33, 1, 65, 1), (1, 1, 1, 3), (40, 17, 16, 65), (100, 9, 8, 33)]


pytestmark = pytest.mark.usefixtures("threads", "no_gradients")


Tokens = tuple[Tensor, Tensor, Tensor]


def _tokens(
    batch: int, heads: int, count: int, width: int, value_width: int, dtype: torch.dtype = torch.float32
) -> Tokens:
    q, k, v = (torch.randn(batch, heads, count, w, dtype=torch.float64).to(dtype) for w in (width, width, value_width))
    return q, k, v


def _some(tokens: Tokens, first: int, end: int) -> Tokens:
    q, k, v = (t[:, :, first:end] for t in tokens)
    return q, k, v


def _start(kind: str, tokens: Tokens, n: int, m: int, scale: float | None = None) -> Any:
    first = _some(tokens, 0, n)
    if kind == "exact":
        return continual_attention_init(*first, scale=scale)
    if kind == "continual":
        return continual_nystrom_init(*first, num_landmarks=m, scale=scale)
    _, heads, _, width = first[1].shape
    landmarks = tuple(torch.randn(heads, m, width).to(first[1]) for _ in range(2))
    return continual_nystrom_init(*first, landmarks=landmarks, scale=scale)


def _step(state: Any, tokens: Tokens, retroactive: bool = False) -> tuple[Tensor, Any]:
    step = (
        native.continual_nystrom_step if isinstance(state, ContinualNystromState) else native.continual_attention_step
    )
    result = step(state, *tokens, retroactive)
    assert result is not None
    return result


def _run(state: Any, tokens: Tokens, chunks: list[int], retroactive: bool = False) -> tuple[list[Tensor], Any]:
    outs, taken = [], 0
    for chunk in chunks:
        out, state = _step(state, _some(tokens, taken, taken + chunk), retroactive)
        outs.append(out)
        taken += chunk
    return outs, state


def _window(state: Any) -> list[Tensor]:
    return [window_of(ring, state.position, state.window) for ring in state[:3]]


def _what_counts(state: Any) -> list[Tensor]:
    """Return all meaningful tensors of a state: the window in order of time, and all others except the spare memory."""
    return [
        *_window(state),
        *(
            t
            for name, t in state._asdict().items()
            if isinstance(t, Tensor) and name not in (*state._fields[:3], "spare")
        ),
    ]


def _same(a: Any, b: Any) -> bool:
    pairs = zip(_what_counts(a), _what_counts(b), strict=True)
    return all(torch.equal(x, y) for x, y in pairs) and [f for f in a if isinstance(f, int)] == [
        f for f in b if isinstance(f, int)
    ]


# ---- accuracy


class Run(NamedTuple):
    """The errors of a stream by native code, and of the definition in the stream's own precision."""

    error: Tensor  # (steps,), the largest error of a step's rows, in units of the sizes of the terms
    own: Tensor
    score: float  # the largest logit


def _as(state: Any, dtype: torch.dtype) -> Any:
    return type(state)(*(t.to(dtype) if isinstance(t, Tensor) and t.dim() == 4 else t for t in state))


def _sizes(state: Any, queries: Tensor) -> Tensor:
    """Return the sums of absolute terms of the outputs, (B, H, rows, E)."""
    _, keys, values = _window(state)
    if not isinstance(state, ContinualNystromState):
        return values.abs().amax(-2, keepdim=True)
    sums = row_sums(state.landmark_queries, keys, values.abs(), state.scale)
    near = logits(queries, state.landmark_keys, state.scale).softmax(-1)
    return near @ state.inverse.abs() @ row_means(sums)


def _compare(kind: str, tokens: Tokens, n: int, m: int, retroactive: bool, scale: float | None = None) -> Run:
    """Step native code and two definitions token by token from the same first window."""
    by_definition = attention_step_reference if kind == "exact" else nystrom_step_reference
    state = _start(kind, tokens, n, m, scale)
    dtype = state.keys.dtype
    right, same = _as(state, torch.float64), state
    errors, owns, score = [], [], 0.0
    for i in range(n, tokens[1].shape[2]):
        new = _some(tokens, i, i + 1)
        out, state = _step(state, new, retroactive)
        wide, right = by_definition(right, *(t.double() for t in new), retroactive)
        own, same = by_definition(same, *new, retroactive)
        assert (
            out.dtype == dtype and out.is_contiguous() and out.shape == wide.shape and (state.position == i + 1).all()
        )
        queries = _window(right)[0] if retroactive else new[0].double()
        sizes = _sizes(right, queries) + 1e-300
        errors.append(((out.double() - wide).abs() / sizes).max())
        owns.append(((own.double() - wide).abs() / sizes).max())
        far = right.landmark_queries if kind != "exact" else queries
        score = max(score, float(logits(far, right.keys, right.scale).abs().max()))
    assert all(torch.equal(a, b) for a, b in zip(_window(state), _window(same), strict=True))
    return Run(torch.stack(errors), torch.stack(owns), score)


def _allowed(run: Run, dtype: torch.dtype) -> float:
    """Return the error that promise P2 allows.

    Torch's own error is the largest of the stream, since in a single row it may be small by chance.
    """
    if dtype == torch.float64:
        return max(1e-12, 4 * 2.0**-52 * run.score)
    eps, own = torch.finfo(state_dtype(dtype)).eps, float(run.own.max())
    if dtype == torch.float32:
        return max(3 * own, 32 * eps, 4 * eps * run.score)
    return 2 * own + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n, m, width, value_width", SIZES)
def test_every_step(isa: str, kind: str, dtype: torch.dtype, n: int, m: int, width: int, value_width: int) -> None:
    tokens = _tokens(1, 2, n + 24, width, value_width, dtype)
    for retroactive in (False, True):
        run = _compare(kind, tokens, n, m, retroactive)
        assert run.error.max() <= _allowed(run, dtype)


# Numbers that are added to the logit of each key, through a column in which queries are 1; the scale is 1.
LOGITS: dict[str, Callable[[int], Tensor]] = {
    "N(0, 1)": lambda count: torch.randn(count),
    "N(0, 10^2)": lambda count: 10 * torch.randn(count),
    "a spike of 20": lambda count: torch.randn(count) + 20 * (torch.arange(count) % 50 == 49),
    "a spike of 40": lambda count: torch.randn(count) + 40 * (torch.arange(count) % 90 == 89),
    "falling": lambda count: -0.5 * torch.arange(count, dtype=torch.float32),
    "rising": lambda count: 3.0 * torch.arange(count, dtype=torch.float32),
    "of 1e4": lambda count: 1e4 * torch.randn(count).sign() + torch.randn(count),
    "all equal": lambda count: torch.full((count,), 0.75),
}


def _with_logits(law: Tensor, width: int, value_width: int, dtype: torch.dtype) -> Tokens:
    q, k, v = _tokens(1, 2, len(law), width, value_width, torch.float64)
    q[..., 0], k[..., 0] = 1.0, law
    q[..., 1:] *= 0.1
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("law", LOGITS)
def test_laws_of_logits(kind: str, law: str, dtype: torch.dtype) -> None:
    tokens = _with_logits(LOGITS[law](200), 4, 3, dtype)
    for retroactive in (False, True) if kind == "exact" else (False,):
        run = _compare(kind, tokens, 30, 4, retroactive, scale=1.0)
        assert run.error.isfinite().all() and run.error.max() <= _allowed(run, dtype)


@pytest.mark.parametrize("size", [3e37, 3e38, 1e200])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retroactive", [False, True])
def test_logits_up_to_the_largest_number(isa: str, kind: str, retroactive: bool, size: float) -> None:
    """Logits and their differences overflow, and so do the products in their sums; only the largest logit of a query
    counts."""
    dtype = torch.float64 if size > 1e100 else torch.float32
    q, k, v = _tokens(1, 1, 120, 2, 3, dtype)
    q, k = q.sign() * size**0.5, k.sign() * size**0.5
    k[..., 70, :] *= 0.5
    run = _compare(kind, (q, k, v), 20, 3, retroactive, scale=1.0)
    assert run.error.isfinite().all() and run.error.max() <= 2.0
    if kind == "exact":
        assert run.error.max() <= 1e-6


def test_products_that_cancel_beyond_the_largest_number() -> None:
    """Each product is infinite in float32, but their sum is 1."""
    q, k, v = _tokens(1, 1, 40, 3, 2)
    q[:] = torch.tensor([1e25, 1e25, 1.0])
    k[..., 0], k[..., 1] = 1e25, -1e25
    run = _compare("exact", (q, k, v), 10, 1, True, scale=1.0)
    assert run.error.max() < 1e-6
    state = _start("exact", (q, k, v), 10, 1, scale=1.0)
    outs, _ = _run(state, _some((q, k, v), 10, 40), [1] * 30)
    scores = k[..., 2].double()
    for i, out in enumerate(outs):
        weights = scores[0, 0, i + 1 : i + 11].softmax(0)
        assert torch.allclose(out.double()[0, 0, 0], weights @ v[0, 0, i + 1 : i + 11].double(), atol=1e-5)


@pytest.mark.parametrize("kind", ["continual", "fixed", "exact"])
def test_values_that_dwarf_the_rest(kind: str) -> None:
    """After a token with a huge value has left, the outputs are as accurate as if it had never been there."""
    q, k, v = _tokens(1, 1, 260, 4, 5)
    v[..., 90, :] *= 1e6
    v[..., 150, 2] = 1e8
    state, right = _start(kind, (q, k, v), 40, 5), None
    by_definition = attention_step_reference if kind == "exact" else nystrom_step_reference
    right = _as(state, torch.float64)
    for i in range(40, 260):
        new = _some((q, k, v), i, i + 1)
        out, state = _step(state, new, kind == "exact")
        wide, right = by_definition(right, *(t.double() for t in new), kind == "exact")
        sizes = _sizes(right, new[0].double()).amax(-2, keepdim=True)
        assert ((out.double() - wide).abs() <= 2e-5 * sizes).all(), i


# ---- the same bits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retroactive", [False, True])
@pytest.mark.parametrize("n, m", [(10, 3), (64, 16), (1, 1)])
def test_chunks_change_no_bit(isa: str, kind: str, retroactive: bool, n: int, m: int) -> None:
    tokens = _tokens(2, 2, n + 150, 17, 9)
    state, rest = _start(kind, tokens, n, m), _some(tokens, n, n + 150)
    right, end = _run(state, rest, [1] * 150, retroactive)
    for chunks in ([150], [75, 75], [2] * 75, [7] * 21 + [3], [1, 100, 49], [64, 64, 22]):
        outs, other = _run(state, rest, chunks, retroactive)
        assert _same(end, other)
        assert torch.equal(outs[-1], right[-1]) if retroactive else torch.equal(torch.cat(outs, 2), torch.cat(right, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_neighbours_change_no_bit(isa: str, kind: str, threads: Callable[[int], None]) -> None:
    tokens = _tokens(5, 13, 64 + 40, 64, 64)
    state, rest = _start(kind, tokens, 64, 16), _some(tokens, 64, 104)
    chunks, retroactive = [1, 5, 34], kind == "exact"
    outs, end = _run(state, rest, chunks, retroactive)
    threads(2)
    again, other = _run(state, rest, chunks, retroactive)
    assert _same(end, other) and all(torch.equal(a, b) for a, b in zip(outs, again, strict=True))
    threads(1)
    alone = type(state)(*(t[3:4, 7:8].contiguous() if isinstance(t, Tensor) and t.dim() else t for t in state))
    few, _ = _run(alone, tuple(t[3:4, 7:8] for t in rest), chunks, retroactive)
    assert all(torch.equal(a[3:4, 7:8], b) for a, b in zip(outs, few, strict=True))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns outside": lambda t: t.transpose(-1, 2).contiguous().transpose(-1, 2),
    "step 2": lambda t: torch.stack([t, torch.full_like(t, math.nan)], -1).flatten(-2)[..., ::2],
    "rows of step 2": lambda t: torch.stack([t, torch.full_like(t, math.nan)], 3).flatten(2, 3)[:, :, ::2],
    "offset 1": lambda t: torch.cat([t.new_full((1,), math.nan), t.flatten()])[1:].view(t.shape),
    "offset 3": lambda t: torch.cat([t.new_full((3,), math.nan), t.flatten()])[3:].view(t.shape),
    "batch inside": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_layouts_of_tokens_change_no_bit(layout: str, dtype: torch.dtype) -> None:
    tokens = _tokens(2, 3, 40, 8, 16, dtype)
    state, rest = _start("continual", tokens, 20, 4), _some(tokens, 20, 40)
    out, end = _step(state, rest)
    moved, other = _step(state, tuple(LAYOUTS[layout](t) for t in rest))
    assert torch.equal(out, moved) and _same(end, other)


def test_expanded_tokens() -> None:
    tokens = _tokens(2, 3, 20, 8, 16)
    state = _start("fixed", tokens, 20, 4)
    one = tuple(torch.randn(1, 1, 1, w).expand(2, 3, 4, w) for w in (8, 8, 16))
    out, end = _step(state, one)
    dense, other = _step(state, tuple(t.contiguous() for t in one))
    assert torch.equal(out, dense) and _same(end, other)


# ---- states are values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retroactive", [False, True])
def test_an_older_state_stays(kind: str, retroactive: bool) -> None:
    """A state is stepped twice, then kept while the stream continues, and stepped again: it gives the same bits each
    time."""
    tokens = _tokens(1, 2, 60, 6, 5)
    rest = _some(tokens, 12, 60)
    _, old = _run(_start(kind, tokens, 10, 3), _some(tokens, 10, 12), [1, 1], retroactive)
    frozen = copy.deepcopy(old)
    right, _ = _run(copy.deepcopy(old), rest, [1] * 48, retroactive)
    for chunks in ([1] * 48, [5] * 9 + [3], [1] * 48):
        outs, _ = _run(old, rest, chunks, retroactive)
        assert _same(old, frozen)
        assert torch.equal(outs[-1], right[-1]) if retroactive else torch.equal(torch.cat(outs, 2), torch.cat(right, 2))


def test_states_that_share_a_ring() -> None:
    tokens = _tokens(1, 1, 40, 4, 3)
    rest = _some(tokens, 10, 40)
    right, _ = _run(_start("continual", tokens, 10, 3), rest, [1] * 30)
    state = _start("continual", tokens, 10, 3)
    other = state._replace(position=state.position)  # another tuple with the same tensors
    first, _ = _run(state, rest, [1] * 30)
    second, _ = _run(other, rest, [1] * 30)
    assert torch.equal(torch.cat(first, 2), torch.cat(right, 2)) and torch.equal(
        torch.cat(second, 2), torch.cat(right, 2)
    )


@pytest.mark.parametrize("field", ["queries", "keys", "values", "sums", "spare"])
def test_a_reference_to_one_tensor_is_enough_to_keep_it(field: str) -> None:
    tokens = _tokens(1, 2, 40, 4, 3)
    state = _start("continual", tokens, 10, 3)
    kept = getattr(state, field)
    before = kept.clone()
    assert not native._C.is_sole_owner(state)
    for i in range(10, 40):
        _, state = _step(state, _some(tokens, i, i + 1))
    assert kept.eq(before).logical_or(before.isnan()).all()


def test_a_tensor_of_a_graph_is_not_written() -> None:
    tokens = _tokens(1, 1, 40, 4, 3)
    state = _start("continual", tokens, 10, 3)
    assert native._C.is_sole_owner(state)
    state.keys.requires_grad_()
    assert not native._C.is_sole_owner(state)
    memory = state.keys.detach()
    before = memory.clone()
    for i in range(10, 25):
        _, state = _step(state, _some(tokens, i, i + 1))
    assert torch.equal(memory, before) and not state.keys.requires_grad


def test_a_stream_alone_writes_where_nobody_looks() -> None:
    """A stream that nothing else holds reuses its memory: its ring grows once, for blocks of up to a window.

    Larger blocks get a new ring.
    """
    tokens = _tokens(1, 1, 400, 4, 3)
    state = _start("fixed", tokens, 40, 3)

    def places(chunk: int) -> set[int]:
        nonlocal state
        found = set()
        for first in range(0, 400, chunk):
            _, state = _step(state, _some(tokens, first, first + chunk))
            found |= {t.data_ptr() for t in state[:5]}
        return found

    assert len(places(1)) == 5
    _, state = _step(state, _some(tokens, 0, 40))
    assert state.keys.shape[2] == 80 and len(places(40)) == len(places(20)) == 5
    _, state = _step(state, _some(tokens, 0, 100))
    assert state.keys.shape[2] == 80 and (state.position == 40 + 3 * 400 + 140).all()


def test_two_threads_step_one_state() -> None:
    """Two threads step one state at the same time, without Python's lock, and both get the right bits."""
    tokens = _tokens(8, 16, 64 + 8, 64, 64)
    state, rest = _start("fixed", tokens, 64, 16), _some(tokens, 64, 72)
    right, _ = _step(copy.deepcopy(state), rest)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            for out, end in pool.map(lambda _: _step(state, rest), range(2)):
                assert torch.equal(out, right) and (end.position == 72).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", [0, 1, 13])
def test_saved_and_restored(kind: str, moment: int) -> None:
    tokens = _tokens(1, 2, 80, 5, 4)
    _, state = _run(_start(kind, tokens, 12, 5), _some(tokens, 12, 12 + moment), [1] * moment, retroactive=True)
    file = io.BytesIO()
    torch.save(tuple(state), file)
    file.seek(0)
    restored = type(state)(*torch.load(file, weights_only=True))
    rest = _some(tokens, 12 + moment, 80)
    outs, end = _run(state, rest, [1] * rest[0].shape[2], retroactive=True)
    again, other = _run(restored, rest, [1] * rest[0].shape[2], retroactive=True)
    assert all(torch.equal(a, b) for a, b in zip(outs, again, strict=True)) and _same(end, other)


# ---- the guard


VALUES, WEIGHT, SIZE = slice(0, 3), slice(3, 4), slice(6, 7)


@pytest.mark.parametrize(
    "part, factor, steps",
    [
        (WEIGHT, math.nan, 1),
        (WEIGHT, 0.4, 1),
        (WEIGHT, -1.0, 1),
        (SIZE, math.nan, 1),
        (SIZE, math.inf, 1),
        (SIZE, 0.4, 1),
        (SIZE, -1.0, 1),
        (VALUES, 1.001, 1024),
        (WEIGHT, 1.001, 1024),
    ],
)
def test_sums_that_went_wrong_are_made_afresh(part: slice, factor: float, steps: int) -> None:
    """Wrong sums are recomputed: at once if they are NaN or too small, and on schedule if the guard cannot detect the
    error."""
    tokens = _tokens(1, 1, 1200, 4, 3)
    state = _start("fixed", tokens, 16, 5)
    state.sums[..., 2:4, part].mul_(factor)
    if part != VALUES:  # then the values are also wrong
        state.sums[..., 2:4, VALUES].mul_(1.01)
    _, state = _step(state, _some(tokens, 16, 16 + steps))
    _, keys, values = (t.double() for t in _window(state))
    right = row_sums(state.landmark_queries.double(), keys, values, state.scale)
    means = state.sums[..., :3] / state.sums[..., 3:4]
    assert torch.allclose(means.double(), right[..., :3] / right[..., 3:4], atol=1e-6)

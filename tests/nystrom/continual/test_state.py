"""Promise P4: a stream equals its window, for any chunks, with gradients; and states are values."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cmab_kernels as ck
from cmab_kernels.nystrom import costs
from cmab_kernels.nystrom.continual.reference import row_means
from cmab_kernels.testing import STREAMS, oracles
from cmab_kernels.testing.oracles import segment_means

from .streams import last, step_of, stepped, window_at

WINDOWS = [(1, 1), (7, 7), (16, 1), (16, 4), (17, 5), (64, 16)]
OUTPUTS = ["single", "retroactive"]


def _stream(
    length: int, dtype: torch.dtype = torch.float64, width: int = 6, value_width: int = 5
) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 3, length, w).to(dtype) for w in (width, width, value_width))


def _start(
    stream: tuple[Tensor, ...], window: int, number: int, fixed: bool, **options: Any
) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the state after the first window, and the tokens that follow."""
    first, rest = zip(*(t.split([window, t.shape[2] - window], dim=2) for t in stream), strict=True)
    if not fixed:
        return ck.continual_nystrom_init(*first, number, **options), rest
    landmarks = tuple(torch.randn(3, number, t.shape[-1]).to(t.dtype) for t in first[:2])
    return ck.continual_nystrom_init(*first, landmarks=landmarks, **options), rest


def _of_kind(kind: str) -> tuple[Any, tuple[Tensor, ...]]:
    stream = _stream(20)
    if kind != "exact":
        return _start(stream, 7, 3, kind == "fixed")
    first, rest = zip(*(t.split([7, 13], dim=2) for t in stream), strict=True)
    return ck.continual_attention_init(*first), rest


def _landmarks(state: ck.ContinualNystromState) -> tuple[Tensor, Tensor]:
    return state.landmark_queries, state.landmark_keys


def _window_rows(state: Any) -> list[Tensor]:
    end = int(state.position.unique())
    rows = torch.arange(end - state.window, end) % state.keys.shape[2]
    return [ring[:, :, rows] for ring in state[:3]]


def _same(a: Any, b: Any) -> bool:
    """Compare two states, except spare memory and free rows of the rings, whose contents have no meaning."""
    fields = [name for name in a._fields[3:] if name != "spare"]
    pairs = [
        *zip(_window_rows(a), _window_rows(b), strict=True),
        *((getattr(a, name), getattr(b, name)) for name in fields),
    ]
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


# ---- a stream equals its window


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("window, number", WINDOWS)
def test_every_step_equals_its_window(impl: str, window: int, number: int, fixed: bool, output: str) -> None:
    """Each output equals Nyström attention over its window with the stream's landmarks.

    After every n tokens these are the window's own segment means.
    """
    stream = _stream(3 * window + 5)
    state, rest = _start(stream, window, number, fixed)
    for taken, out, now in stepped(state, rest, output=output, impl=impl):
        tokens = window_at(stream, window + taken, window)
        wanted = oracles.nystrom_attention(*tokens, _landmarks(now))
        torch.testing.assert_close(
            out, wanted if output == "retroactive" else wanted[:, :, -1:], rtol=1e-10, atol=1e-11
        )
        assert all(torch.equal(ring, t) for ring, t in zip(_window_rows(now), tokens, strict=True))
        if not fixed and taken % window == 0:
            for ours, t in zip(_landmarks(now), tokens, strict=False):
                torch.testing.assert_close(ours, segment_means(t, number), rtol=1e-13, atol=1e-14)
    assert (now.position == stream[0].shape[2]).all()


@pytest.mark.parametrize("window, number", [(12, 3), (13, 5)])
def test_a_landmark_is_replaced_when_its_segment_is_full(impl: str, window: int, number: int) -> None:
    """When a segment is full, the mean of its tokens replaces the oldest landmark;
    landmarks do not change at any other step."""
    stream = _stream(2 * window)
    state, rest = _start(stream, window, number, fixed=False)
    size, longer = divmod(window, number)
    ends = [j * size + min(j, longer) for j in range(1, number + 1)]
    before = _landmarks(state)
    for taken, _, stepped_state in stepped(state, rest, impl=impl):
        after = _landmarks(stepped_state)
        if taken not in ends:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            continue
        newest = taken - ([0, *ends])[ends.index(taken)]
        for old, now, t in zip(before, after, stream, strict=False):
            assert torch.equal(old[:, :, 1:], now[:, :, :-1])
            torch.testing.assert_close(
                now[:, :, -1], t[:, :, window + taken - newest : window + taken].mean(2), rtol=1e-13, atol=1e-14
            )
        before = after


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("window", [1, 7, 16])
def test_exact_attention_equals_its_window(impl: str, window: int, output: str) -> None:
    stream = _stream(3 * window + 5)
    first, rest = zip(*(t.split([window, t.shape[2] - window], dim=2) for t in stream), strict=True)
    for taken, out, _ in stepped(ck.continual_attention_init(*first, scale=0.3), rest, output=output, impl=impl):
        wanted = scaled_dot_product_attention(*window_at(stream, window + taken, window), scale=0.3)
        torch.testing.assert_close(
            out, wanted if output == "retroactive" else wanted[:, :, -1:], rtol=1e-12, atol=1e-13
        )


def test_single_and_retroactive_steps_of_exact_attention_mix(impl: str) -> None:
    stream = _stream(40)
    first, rest = zip(*(t.split([9, 31], dim=2) for t in stream), strict=True)
    state = ck.continual_attention_init(*first)
    for i, parts in enumerate(zip(*(t.split(1, dim=2) for t in rest), strict=True)):
        output = OUTPUTS[(i // 3) % 2]
        out, state = ck.continual_attention_step(state, *parts, output=output, impl=impl)
        wanted = scaled_dot_product_attention(*window_at(stream, 10 + i, 9))
        torch.testing.assert_close(
            out, wanted if output == "retroactive" else wanted[:, :, -1:], rtol=1e-12, atol=1e-13
        )


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("chunk", [2, 3, 7, 40, 41])
def test_any_chunking(impl: str, chunk: int, fixed: bool) -> None:
    """Any chunking gives the same outputs, also chunks that are longer than the window."""
    stream = _stream(11 + 41)
    state, rest = _start(stream, 11, 4, fixed)
    one_by_one = [(out, new) for _, out, new in stepped(state, rest, impl=impl)]
    outs, states = zip(*((out, new) for _, out, new in stepped(state, rest, chunk, impl=impl)), strict=True)
    torch.testing.assert_close(torch.cat(outs, 2), torch.cat([out for out, _ in one_by_one], 2), rtol=1e-12, atol=1e-13)
    last = one_by_one[-1][1]
    assert torch.equal(states[-1].position, last.position)
    torch.testing.assert_close(_landmarks(states[-1]), _landmarks(last), rtol=1e-13, atol=1e-14)
    retroactive = [out for _, out, _ in stepped(state, rest, chunk, impl=impl, output="retroactive")][-1]
    torch.testing.assert_close(retroactive[:, :, -1:], outs[-1][:, :, -1:], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("law", STREAMS)
@pytest.mark.parametrize("fixed", [True, False])
def test_steps_survive_large_logits(impl: str, fixed: bool, law: str) -> None:
    """Outputs stay right where raw exponentials overflow, and where plain subtraction leaves only noise.

    The error of a weighted mean is measured relative to the weighted mean of absolute values. Relative to the mean
    itself, which may be near 0 if values cancel, it has no bound.
    """
    length, window = 400, 32
    q, k, v = _stream(length, torch.float32)
    q, k = torch.nn.functional.normalize(q, dim=-1) * 6**0.5, k * STREAMS[law](length)[:, None]
    state, rest = _start((q, k, v), window, 5, fixed)
    for taken, out, now in stepped(state, rest, impl=impl):
        tokens = [t.double() for t in window_at((q, k, v), window + taken, window)]
        average = row_means(now.sums.double())
        scores = 6**-0.5 * now.landmark_queries.double() @ tokens[1].mT
        weights = scores.softmax(-1)
        error = (average - weights @ tokens[2]).norm(dim=-1) / (weights @ tokens[2].abs()).norm(dim=-1)
        assert out.isfinite().all() and error.max() < (8 + scores.abs().max()) * 1.2e-7


def test_gradients_through_a_stream() -> None:
    """Gradients with respect to all tokens of the window and to fixed landmarks are those of the whole window at once,
    for any chunks."""
    stream = tuple(t.requires_grad_() for t in _stream(20))
    landmarks = tuple(torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inputs = (*stream, *landmarks)
    wanted = torch.autograd.grad(oracles.nystrom_attention(*window_at(stream, 20, 9), landmarks).pow(2).sum(), inputs)
    for chunk in (1, 4, 11):
        state = ck.continual_nystrom_init(*(t[:, :, :9] for t in stream), landmarks=landmarks)
        out, _ = last(state, tuple(t[:, :, 9:] for t in stream), chunk, output="retroactive")
        for ours, right in zip(torch.autograd.grad(out.pow(2).sum(), inputs), wanted, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-10)


def test_gradients_through_continual_landmarks() -> None:
    stream = tuple(t.requires_grad_() for t in _stream(27))
    tokens = window_at(stream, 27, 9)
    wanted = torch.autograd.grad(
        oracles.nystrom_attention(*tokens, (segment_means(tokens[0], 4), segment_means(tokens[1], 4))).pow(2).sum(),
        stream,
    )
    state = ck.continual_nystrom_init(*(t[:, :, :9] for t in stream), 4)
    out, _ = last(state, tuple(t[:, :, 9:] for t in stream), output="retroactive")  # 18 tokens: two whole windows
    for ours, right in zip(torch.autograd.grad(out.pow(2).sum(), stream), wanted, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-10)


def test_a_graph_survives_later_steps_without_one(impl: str) -> None:
    """Later steps that record no gradient do not overwrite what an earlier step saved for its backward pass."""
    stream = _stream(30)
    state, rest = _start(stream, 9, 3, fixed=False)
    token = [t[:, :, :1].clone().requires_grad_() for t in rest]
    out, state = ck.continual_nystrom_step(state, *token)
    first = torch.autograd.grad(out.sum(), token, retain_graph=True)
    with torch.no_grad():
        last(state, tuple(t[:, :, 1:] for t in rest), impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out.sum(), token), strict=True))


# ---- states are values


@pytest.mark.parametrize("kind", ["continual", "fixed", "exact", "exact retroactive"])
def test_an_older_state_is_as_good_as_it_was(impl: str, kind: str) -> None:
    """A state keeps its value when it is stepped twice, when the stream continues from it, and when only one of its
    tensors is held."""
    stream = _stream(60)
    state, rest = _start(stream, 10, 3, kind == "fixed")
    output = "retroactive" if kind == "exact retroactive" else "single"
    if kind.startswith("exact"):
        state = ck.continual_attention_init(*(t[:, :, :10] for t in stream))
    _, state = last(state, tuple(t[:, :, :3] for t in rest), output=output, impl=impl)
    frozen = copy.deepcopy(state)
    rest = tuple(t[:, :, 3:] for t in rest)
    outs = []
    for _ in range(2):
        outs.append([out for _, out, _ in stepped(state, rest, output=output, impl=impl)])
        assert _same(state, frozen)
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    kept = state.keys, state.sums
    copies = [tensor.clone() for tensor in kept]
    _, state = last(state, rest, output=output, impl=impl)
    assert all(torch.equal(tensor, copied) for tensor, copied in zip(kept, copies, strict=True))


@pytest.mark.parametrize("kind", ["continual", "fixed", "exact"])
def test_a_state_that_was_sent_is_nobody_elses(impl: str, kind: str) -> None:
    """torch moves the tensors that are put into a queue to shared memory; neither side may see the other side's
    steps."""
    stream = _stream(40)
    held, rest = _start(stream, 10, 3, kind == "fixed")
    if kind == "exact":
        held = ck.continual_attention_init(*(t[:, :, :10] for t in stream))
    frozen, queue = copy.deepcopy(held), torch.multiprocessing.SimpleQueue()
    queue.put(held)
    received = [queue.get()]
    assert _same(received[0], frozen)
    last(received.pop(), rest, impl=impl)
    assert _same(held, frozen) and not any(t.is_shared() for t in held if isinstance(t, Tensor))


@pytest.mark.parametrize("shared", [True, False], ids=["(H, m, D)", "(B, H, m, D)"])
def test_given_landmarks_may_be_written_to(shared: bool) -> None:
    """An optimizer changes learned landmarks in this way: the stream keeps the landmarks with which it began."""
    tokens = torch.randn(1, 2, 20, 6)
    first, rest = tokens.split([16, 4], dim=2)
    landmarks = torch.randn(2, *(1,) * (not shared), 2, 3, 6).unbind()
    state = ck.continual_nystrom_init(first, first, first, landmarks=landmarks)
    frozen = copy.deepcopy(state)
    for part in landmarks:
        part.mul_(2)
    assert _same(state, frozen)
    assert torch.equal(*(ck.continual_nystrom_step(each, rest, rest, rest).out for each in (state, frozen)))


@pytest.mark.usefixtures("native")
def test_a_state_that_nobody_shares_is_not_copied() -> None:
    """A step takes constant time: one ring serves the whole stream, and two tensors of sums take turns."""
    stream = _stream(80)
    state, rest = _start(stream, 10, 3, fixed=False)
    addresses = set()
    for parts in zip(*(t.split(1, dim=2) for t in rest), strict=True):
        out, state = ck.continual_nystrom_step(state, *parts)
        addresses.add(
            (*(ring.data_ptr() for ring in state[:3]), frozenset((state.sums.data_ptr(), state.spare.data_ptr())))
        )
    assert out.isfinite().all() and len(addresses) <= 2  # the memory that `init` was given, and the stream's own


@pytest.mark.parametrize("kind", ["continual", "fixed", "exact"])
@pytest.mark.parametrize("moment", [0, 1, 5, 13])
def test_saved_and_restored(impl: str, kind: str, moment: int) -> None:
    """A stream that is saved and restored at any step continues with the same bits."""
    stream = _stream(50, torch.float32)
    state, rest = _start(stream, 9, 4, kind == "fixed")
    if kind == "exact":
        state = ck.continual_attention_init(*(t[:, :, :9] for t in stream))
    if moment:
        _, state = last(state, tuple(t[:, :, :moment] for t in rest), impl=impl)
    file = io.BytesIO()
    torch.save(dict(state._asdict()), file)
    file.seek(0)
    restored = type(state)(**torch.load(file, weights_only=True))
    after = tuple(t[:, :, moment:] for t in rest)
    for (_, out, new), (_, again, renewed) in zip(
        stepped(state, after, impl=impl), stepped(restored, after, impl=impl), strict=True
    ):
        assert torch.equal(out, again) and _same(new, renewed)


def test_size_is_the_formula_of_the_documentation() -> None:
    window, number, width, value_width = 13, 4, 6, 5
    state, rest = _start(_stream(40), window, number, fixed=False)
    _, state = last(state, rest)
    elements = sum(t.numel() for t in state[:8]) // 6
    assert (
        elements
        == (window + 1) * (2 * width + value_width) + 2 * number * (value_width + 5) + 2 * number * width + number**2
    )
    assert elements == costs.state_elements(window, number, width, value_width)
    exact = ck.continual_attention_init(*_stream(window))
    for output, retroactive in (("single", False), ("retroactive", True)):
        _, after = ck.continual_attention_step(exact, *_stream(1), output=output)
        assert sum(t.numel() for t in after[:5]) // 6 == costs.attention_state_elements(
            window, width, value_width, retroactive
        )


def test_move_state() -> None:
    state, _ = _start(_stream(12), 9, 4, fixed=False)
    assert _same(ck.move_state(state, "cpu"), state)
    there = ck.move_state(state, "meta")
    assert there.position.shape == (2, 3) and there.keys.is_meta and not there.scale.is_meta


@pytest.mark.parametrize("kind", ["nystrom", "attention"])
def test_the_default_device_does_not_matter(impl: str, kind: str) -> None:
    """A state's scale stays in the host's memory, and its other tensors are where the tokens are."""
    first, token = torch.randn(1, 2, 10, 4).split([9, 1], dim=2)
    start, step = getattr(ck, f"continual_{kind}_init"), getattr(ck, f"continual_{kind}_step")
    counts = (3,) if kind == "nystrom" else ()
    with torch.device("meta"):
        out, after = step(start(first, first, first, *counts), token, token, token, output="retroactive", impl=impl)
    assert not any(t.is_meta for t in (out, *after) if isinstance(t, Tensor))
    assert torch.equal(
        out, step(start(first, first, first, *counts), token, token, token, output="retroactive", impl=impl).out
    )


@pytest.mark.parametrize("kind", ["continual", "exact"])
def test_blocks_of_tokens_leave_no_more_than_two_windows(impl: str, kind: str) -> None:
    """The ring never has more than two windows, for blocks of any size, and the window equals that of a stream token by
    token."""
    stream = _stream(200)
    state, rest = _start(stream, 10, 3, fixed=False)
    if kind == "exact":
        state = ck.continual_attention_init(*(t[:, :, :10] for t in stream))
    for sizes in ([1, 1], [4, 1, 10, 1], [97, 3, 1, 60, 1]):
        new = state
        for parts in zip(*(t[:, :, : sum(sizes)].split(sizes, dim=2) for t in rest), strict=True):
            out, new = (ck.continual_attention_step if kind == "exact" else ck.continual_nystrom_step)(
                new, *parts, impl=impl
            )
        assert new.keys.shape[2] <= 20
        wanted, one_by_one = last(state, tuple(t[:, :, : sum(sizes)] for t in rest), impl=impl)
        torch.testing.assert_close(out[:, :, -1:], wanted, rtol=1e-12, atol=1e-13)
        assert all(torch.equal(a, b) for a, b in zip(_window_rows(new), _window_rows(one_by_one), strict=True))


# ---- streams joined by hand


def _joined(*states: Any) -> Any:
    """Return the streams of several states as one batch, by `torch.cat` of all fields with a batch."""
    fields = zip(*states, strict=True)
    return type(states[0])._make(torch.cat(f) if isinstance(f[0], Tensor) and f[0].dim() else f[0] for f in fields)


def _two_streams(kind: str) -> tuple[list[Any], tuple[Tensor, ...]]:
    """Return the states of two batches of streams that have had 7 and 16 tokens, where one ring is longer, and the
    tokens that follow."""
    fixed = (torch.randn(3, 3, 6, dtype=torch.float64), torch.randn(3, 3, 6, dtype=torch.float64))
    options: Any = {"exact": {}, "continual": {"num_landmarks": 3}, "fixed": {"landmarks": fixed}}[kind]
    start = ck.continual_attention_init if kind == "exact" else ck.continual_nystrom_init
    states = [start(*_stream(7), **options) for _ in range(2)]
    for part in zip(*(t.split(1, dim=2) for t in _stream(9)), strict=True):
        states[1] = step_of(states[1])(states[1], *part).state
    return states, tuple(torch.cat([t, t.flip(0)]) for t in _stream(30))


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("chunk", [1, 2, 11])
@pytest.mark.parametrize("kind", ["exact", "continual", "fixed"])
def test_streams_joined_by_hand(impl: str, kind: str, chunk: int, output: str) -> None:
    """Each stream of a batch continues from its own position: it replaces its landmarks when its own segments end."""
    parts, rest = _two_streams(kind)
    alone = [
        torch.cat(
            [out for _, out, _ in stepped(part, tuple(t[rows] for t in rest), chunk, output=output, impl=impl)], 2
        )
        for part, rows in zip(parts, (slice(0, 2), slice(2, 4)), strict=True)
    ]
    steps = [
        (out, new, copy.deepcopy(new))
        for _, out, new in stepped(_joined(*parts), rest, chunk, output=output, impl=impl)
    ]
    torch.testing.assert_close(torch.cat([out for out, _, _ in steps], 2), torch.cat(alone), rtol=1e-12, atol=1e-13)
    assert steps[-1][1].position.unique().tolist() == [37, 46]
    # Landmarks stay.
    assert all(torch.equal(a, b) for _, new, then in steps for a, b in zip(new[5:-3], then[5:-3], strict=True))


@pytest.mark.parametrize("kind", ["exact", "continual", "fixed"])
def test_files_joined_by_hand(kind: str) -> None:
    parts, rest = _two_streams(kind)
    first, second = map(ck.state_to_tensors, parts)
    joined = {name: torch.cat([t, second[name]]) if t.dim() else t for name, t in first.items()}
    loaded = ck.state_from_tensors(type(parts[0]), joined)
    assert torch.equal(step_of(loaded)(loaded, *rest).out, step_of(loaded)(_joined(*parts), *rest).out)


def test_a_file_whose_streams_share_a_position() -> None:
    """Files of older versions have one number."""
    state, _ = _start(_stream(17), 17, 5, fixed=False)
    tensors = {**ck.state_to_tensors(state), "position": torch.tensor(17)}
    assert _same(ck.state_from_tensors(type(state), tensors), state)


# ---- as tensors alone


@pytest.mark.parametrize("kind", ["continual", "fixed", "exact", "retroactive"])
@pytest.mark.parametrize("tokens", [1, 30])
def test_tensors_alone(kind: str, tokens: int) -> None:
    """A state from a file of safetensors continues with the same bits, whatever the capacity of its rings was."""
    safetensors = pytest.importorskip("safetensors.torch", reason="the package safetensors is not installed")
    stream = _stream(100)
    if kind in ("continual", "fixed"):
        state, rest = _start(stream, 17, 5, kind == "fixed")
    else:
        first, rest = zip(*(t.split([17, 83], dim=2) for t in stream), strict=True)
        state = ck.continual_attention_init(*first)
    output = "retroactive" if kind == "retroactive" else "single"
    step = ck.continual_nystrom_step if isinstance(state, ck.ContinualNystromState) else ck.continual_attention_step
    state = step(state, *(t[:, :, :tokens] for t in rest), output=output).state
    loaded = ck.state_from_tensors(type(state), safetensors.load(safetensors.save(ck.state_to_tensors(state))))
    assert _same(state, loaded) and type(loaded) is type(state)
    rest = tuple(t[:, :, tokens : tokens + 40] for t in rest)
    assert torch.equal(step(state, *rest, output=output).out, step(loaded, *rest, output=output).out)


SPOILT: dict[str, tuple[type[Exception], Any]] = {
    "keys": (ValueError, lambda t: t[:, :, 1:]),
    "values": (ValueError, lambda t: t * torch.nan),
    "sums": (ValueError, lambda t: t[:, :, :, 1:]),
    "inverse": (TypeError, lambda t: t.float()),
    "scale": (TypeError, lambda t: 0.5),
    "scale elsewhere": (ValueError, lambda t: t.to("meta")),
    "queries": (TypeError, lambda t: t.float()),
    "keys of another dtype": (TypeError, lambda t: t.float()),
    "keys that are sparse": (TypeError, lambda t: t.to_sparse()),
    "keys without heads": (ValueError, lambda t: t[0]),
    "queries of other heads": (ValueError, lambda t: t[:, :1]),
    "values of another batch": (ValueError, lambda t: torch.cat([t, t])),
    "queries elsewhere": (ValueError, lambda t: t.to("meta")),
    "sums elsewhere": (ValueError, lambda t: t.to("meta")),
    "position elsewhere": (ValueError, lambda t: t.to("meta")),
    "values in eight bits": (TypeError, lambda t: t.to(torch.float8_e4m3fn)),
    "inverse in eight bits": (TypeError, lambda t: t.to(torch.float8_e5m2)),
    "landmark_queries of whole numbers": (TypeError, lambda t: t.long()),
    "sums of nothing": (ValueError, lambda t: t * 0),
    "window": (ValueError, lambda t: t[None]),
    "window elsewhere": (ValueError, lambda t: t.to("meta")),
    "window that is sparse": (ValueError, lambda t: t.to_sparse()),
    "position": (ValueError, lambda t: t - 1000),
    "position of one batch": (ValueError, lambda t: t[:1]),
    "position of another dtype": (ValueError, lambda t: t.int()),
    "fixed": (ValueError, lambda t: 1),
    "fixed to 7": (ValueError, lambda t: t * 0 + 7),
    "pinv_iterations without end": (ValueError, lambda t: t * 0 + 2**40),
    "landmark_keys": (ValueError, None),
}


@pytest.mark.parametrize("case", [*SPOILT, "spare"])
def test_spoilt_tensors_are_refused(case: str) -> None:
    state, _ = _start(_stream(17), 17, 5, fixed=False)
    name = case.split(" ")[0]
    tensors: dict[str, Any] = ck.state_to_tensors(state)
    assert _same(ck.state_from_tensors(ck.ContinualNystromState, tensors), state)
    error, change = SPOILT.get(case, (ValueError, lambda _: state.spare))
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors.get(name))
    with pytest.raises(error, match=rf"^tensors\.?\[?'?{name}"):
        ck.state_from_tensors(ck.ContinualNystromState, tensors)


BAD_CALLS: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "a device of no name": (TypeError, "^device: got None", lambda state: ck.move_state(state, None)),
    "an unknown device": (ValueError, "^device: got 'foo'", lambda state: ck.move_state(state, "foo")),
    "a tuple to move": (TypeError, "^state: got a tuple", lambda _: ck.move_state((1, 2), "cpu")),
    "nothing to take apart": (TypeError, "^state: got None", lambda _: ck.state_to_tensors(None)),
    "half a state": (
        ValueError,
        r"^state\.keys: got None",
        lambda state: ck.state_to_tensors(state._replace(keys=None)),
    ),
    "a name of a kind": (
        TypeError,
        "^kind: got 'x'",
        lambda state: ck.state_from_tensors("x", ck.state_to_tensors(state)),
    ),
    "another kind": (
        TypeError,
        "^kind: got .*RidgeState",
        lambda state: ck.state_from_tensors(ck.RidgeState, ck.state_to_tensors(state)),
    ),
    "no tensors": (TypeError, "^tensors: got None", lambda state: ck.state_from_tensors(type(state), None)),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_what_is_no_state_is_named(case: str) -> None:
    error, message, call = BAD_CALLS[case]
    state, _ = _start(_stream(17), 17, 5, fixed=False)
    with pytest.raises(error, match=rf"^{message}"):
        call(state)


# ---- tokens and callers of other kinds


class Marked(torch.Tensor):
    """A subclass that changes nothing."""


MADE = {
    "a parameter": torch.nn.Parameter,
    "a frozen parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "a subclass": lambda t: t.as_subclass(Marked),
}


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("kind", ["exact", "continual", "fixed"])
@pytest.mark.parametrize("name", MADE)
def test_a_token_may_be_a_parameter(impl: str, name: str, kind: str, position: int) -> None:
    """A parameter as token steps the stream with the same bits. Native code itself supports only plain tensors."""
    step = ck.continual_attention_step if kind == "exact" else ck.continual_nystrom_step
    state, tokens = _of_kind(kind)
    given = [*tokens]
    given[position] = MADE[name](given[position].clone())
    with torch.set_grad_enabled(name == "a frozen parameter"):
        wanted, after = step(state, *tokens, impl=impl)
        out, new = step(state, *given, impl=impl)
    assert torch.equal(out, wanted) and not out.requires_grad
    assert _same(new, after)


@pytest.mark.parametrize("field", ["queries", "sums", "scale"])
@pytest.mark.parametrize("kind", ["exact", "continual"])
def test_a_state_may_hold_a_parameter(impl: str, kind: str, field: str) -> None:
    """No step writes to it."""
    state, tokens = _of_kind(kind)
    wanted, _ = last(state, tokens, impl=impl)
    frozen = torch.nn.Parameter(getattr(state, field).clone(), requires_grad=False)
    before = frozen.clone()
    out, _ = last(state._replace(**{field: frozen}), tokens, impl=impl)
    assert torch.equal(out, wanted) and torch.equal(frozen, before)


@pytest.mark.parametrize("with_gaps", [False, True])
@pytest.mark.parametrize("kind", ["exact", "continual"])
def test_a_state_may_be_lazily_negated(impl: str, kind: str, with_gaps: bool) -> None:
    """The memory of a lazily negated field holds the negatives of its values."""
    state, tokens = _of_kind(kind)
    wanted, _ = last(state, tokens, impl=impl)
    for name, part in state._asdict().items():
        if not isinstance(part, Tensor):
            continue
        gaps = with_gaps and part.is_floating_point()
        given = torch.complex(torch.zeros_like(part), -part).conj().imag if gaps else torch._neg_view(-part)
        assert given.is_neg() and (name == "spare" or torch.equal(given, part))
        out, _ = last(state._replace(**{name: given}), tokens, impl=impl)
        torch.testing.assert_close(out, wanted, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("kind", ["exact", "continual"])
def test_steps_one_after_the_other_are_traced(impl: str, kind: str, output: str) -> None:
    """The second step takes the state of the first, and the trace is valid at any position."""
    state, tokens = _of_kind(kind)
    first, second, third = (tuple(t[:, :, i : i + 2] for t in tokens) for i in (0, 2, 4))

    def two(*given: Tensor) -> tuple[Tensor, ...]:
        outs = stepped(state, given, chunk=1, output=output, impl=impl)
        return tuple(out for _, out, _ in outs)

    with torch.no_grad():
        traced = torch.jit.trace(two, first)
        for given in (first, second, third):
            assert all(torch.equal(a, b) for a, b in zip(traced(*given), two(*given), strict=True))

"""Continual steps on a GPU: rows of long streams compared with the definition, captured steps, launches."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.runtime.dtypes import state_dtype
from cmab_kernels.testing import STREAMS, bound
from cmab_kernels.testing.suite import DTYPES
from cmab_kernels.testing.suite.gpu import no_waiting, side_stream

from . import DEVICE, impls
from .test_launches import launches

Tokens = tuple[Tensor, ...]
CHUNKS = (1, 1, 1, 5, 1, 90, 1, 1, 17, 1)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("impl", impls("nystrom.continual")),
    pytest.mark.usefixtures("no_gradients"),
]


class Stream(NamedTuple):
    """The parameters of a stream; `kind` is the kind of its landmarks, or "exact" for attention without landmarks."""

    dtype: torch.dtype
    kind: str = "continual"
    output: str = "single"
    law: str = "normal"
    window: int = 64
    landmarks: int = 16
    width: int = 64
    value_width: int = 64

    def tokens(self, length: int) -> Tokens:
        """Return random queries of norm 2, keys whose size follows `law`, and values. `law` determines the size of the
        logits."""
        query, key, value = (torch.randn(2, 3, length, n) for n in (self.width, self.width, self.value_width))
        if self.law != "normal":
            query, key = 2 * torch.nn.functional.normalize(query, dim=-1), 2 * key * STREAMS[self.law](length)[:, None]
        return tuple(t.to(DEVICE, self.dtype) for t in (query, key, value))

    def start(self, tokens: Tokens) -> Any:
        """Return the state after the first window."""
        window = tuple(t[:, :, : self.window] for t in tokens)
        if self.kind == "exact":
            return ck.continual_attention_init(*window)
        if self.kind == "continual":
            return ck.continual_nystrom_init(*window, self.landmarks)
        near, far = (t[:, :, : self.landmarks].to(state_dtype(t.dtype)) for t in window[:2])
        return ck.continual_nystrom_init(*window, landmarks=(near, far))

    def step(self, state: Any, tokens: Tokens, impl: str) -> tuple[Tensor, Any]:
        step = ck.continual_attention_step if self.kind == "exact" else ck.continual_nystrom_step
        return step(state, *tokens, output=self.output, impl=impl)


def _at(tokens: Tokens, first: int, end: int) -> Tokens:
    return tuple(t[:, :, first:end] for t in tokens)


SHAPES = ((1, 1, 1, 1), (13, 5, 7, 3), (40, 1, 3, 17), (64, 64, 65, 256))
KINDS = ("continual", "fixed", "exact")
OUTPUTS = ("single", "retroactive")
WIDE = (torch.float64, torch.float32)
STREAMED = [
    *(Stream(*chosen) for chosen in itertools.product(DTYPES, KINDS, OUTPUTS)),
    *(
        Stream(dtype, kind, "single", law, 50, 7, 4)
        for dtype, kind, law in itertools.product(WIDE, KINDS, list(STREAMS)[1:])
    ),
    *(Stream(dtype, "continual", "retroactive", "normal", *shape) for dtype, shape in itertools.product(WIDE, SHAPES)),
    *(Stream(torch.float32, "exact", output, window=600, width=17, value_width=300) for output in OUTPUTS),
]
BEHAVED = [Stream(torch.float32, kind, output) for kind, output in itertools.product(("continual", "exact"), OUTPUTS)]
behaved = pytest.mark.parametrize("stream", BEHAVED, ids=lambda stream: f"{stream.kind}-{stream.output}")


@pytest.mark.parametrize("stream", STREAMED, ids=lambda stream: "-".join(map(str, stream)).removeprefix("torch."))
def test_every_row(stream: Stream, impl: str) -> None:
    """Each row is within the bounds of P2.

    Torch's own error is that of its worst row, since the error of a single row may be small by chance.
    """
    tokens = stream.tokens(stream.window + sum(CHUNKS))
    score = float((tokens[0].double() @ tokens[1].double().mT).abs().max()) * stream.width**-0.5
    ours, own = (stream.start(tokens) for _ in range(2))
    right = stream.start(tuple(t.double() for t in tokens))
    at, errors, owns = stream.window, [], []
    for chunk in CHUNKS:
        part = _at(tokens, at, at + chunk)
        out, ours = stream.step(ours, part, impl)
        theirs, own = stream.step(own, part, "reference")
        wanted, right = stream.step(right, tuple(t.double() for t in part), "reference")
        size = wanted.norm(dim=-1)
        size = size.maximum(0.05 * size.amax(-1, keepdim=True)).clamp(min=1e-300)
        for found, result in ((errors, out), (owns, theirs)):
            found.append(((result.double() - wanted).norm(dim=-1) / size).amax())
        at += chunk
    assert torch.stack(errors).amax() <= bound(out.dtype, score, torch.stack(owns).amax())


@behaved
def test_a_captured_step_streams_on(stream: Stream, impl: str, replays: int = 1000, after: int = 100) -> None:
    """Each replay takes the next token, and eager steps continue from there, with the bits of a stream without a
    capture."""
    first = stream.window + 1
    tokens = stream.tokens(first + replays + after)
    token = tuple(t.clone() for t in _at(tokens, first - 1, first))
    _, state = stream.step(stream.start(tokens), token, impl)
    _, eager = stream.step(stream.start(tokens), token, impl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, same = stream.step(state, token, impl)
    assert same is state
    for at in range(first, first + replays + after):
        now = _at(tokens, at, at + 1)
        wanted, eager = stream.step(eager, now, impl)
        if at < first + replays:
            for held, new in zip(token, now, strict=True):
                held.copy_(new)
            graph.replay()
        else:
            out, state = stream.step(state, now, impl)
        assert torch.equal(out, wanted), at


@behaved
def test_a_side_stream(stream: Stream, impl: str) -> None:
    tokens = stream.tokens(stream.window + 50)
    state, other = (stream.start(tokens) for _ in range(2))
    part = _at(tokens, stream.window, stream.window + 50)
    wanted, _ = stream.step(state, part, impl)
    with side_stream():
        out, _ = stream.step(other, part, impl)
    assert torch.equal(out, wanted)


@behaved
@pytest.mark.parametrize("chunk, shared", [(1, False), (80, False), (1, True)])
def test_one_launch_a_step(stream: Stream, impl: str, chunk: int, shared: bool) -> None:
    """Twelve steps are twelve launches.

    Some steps replace a landmark, and with `shared`, some copy the window of a state that is still held.
    """
    tokens = stream.tokens(stream.window + 13 * chunk)
    first, *parts = (_at(tokens, at, at + chunk) for at in range(stream.window, tokens[0].shape[2], chunk))
    _, state = stream.step(stream.start(tokens), first, impl)

    def twelve() -> None:
        nonlocal state
        held = []
        for part in parts:
            if shared:
                held.append(list(state))
            _, state = stream.step(state, part, impl)

    assert launches(twelve) == 12


@behaved
def test_nothing_is_waited_for(stream: Stream, impl: str) -> None:
    tokens = stream.tokens(stream.window + 2)
    _, state = stream.step(stream.start(tokens), _at(tokens, stream.window, stream.window + 1), impl)
    with no_waiting():
        stream.step(state, _at(tokens, stream.window + 1, stream.window + 2), impl)


def test_66_000_heads(impl: str) -> None:
    """The bits of the last head are the same as when it is alone."""
    tokens = tuple(torch.randn(66_000, 1, 9, 4, device=DEVICE) for _ in range(3))
    last = tuple(t[-1:] for t in tokens)
    outs = []
    for part in (tokens, last):
        state = ck.continual_attention_init(*_at(part, 0, 8))
        outs.append(ck.continual_attention_step(state, *_at(part, 8, 9), impl=impl).out[-1:])
    assert torch.equal(*outs)

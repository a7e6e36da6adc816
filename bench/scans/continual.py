"""Streams: after a first window, tokens come one by one or in blocks. Figures are per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels import (
    continual_attention_init,
    continual_attention_step,
    continual_nystrom_init,
    continual_nystrom_step,
)

from ..devices import generator, lacking_memory, normal
from ..floors import Work, step_work
from .attention import SDPA, exact, naive_attention
from .case import (
    CONTINUAL_INFERENCE,
    DTYPES,
    EAGER,
    Case,
    Results,
    declared,
    drawn,
    dtype_name,
    kernels,
    refusing,
    wide,
)
from .eager import ITERATIONS, EagerBlocks, EagerExact, EagerExactBlocks, EagerNystrom, EagerRetroactive

BAND = "eager torch, by a band"
EXPLICIT = "softmax(QK')V"
EXACT = "cmab_kernels.continual_attention_step"

Call = Callable[[], Results]


class Streams(tuple[Tensor, ...]):
    """Tokens, the first window and the other tokens, with the streams that continue over them. Each stream has its own
    position, in a cycle.

    In this module, tokens are queries, keys and values, each (1, H, n + t, D).
    """

    calls: dict[str, Call]


class Stepped:
    """A state that nothing else holds, so that it is stepped in place."""

    def __init__(self, step: Any, state: Any, **options: Any) -> None:
        self.advance, self.state = partial(step, **options) if options else step, state

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, self.state = self.advance(self.state, query, key, value)
        return out


def all_steps(step: Callable[..., Tensor], tokens: Sequence[Sequence[Tensor]]) -> Call:
    @torch.no_grad()
    def call() -> Results:
        return [step(*token) for token in tokens]

    return call


def stream_case(
    tokens: Callable[[int], Sequence[Tensor]],
    starts: Mapping[str, Callable[[Streams, int], Call]],
    refusal: Callable[[str], str | None],
    **declared: Any,
) -> Case:
    """A case whose implementations continue streams. `starts` maps a name to a function that takes tokens and a seed,
    and returns a call that continues all streams."""

    def inputs(seed: int) -> Streams:
        made = Streams(tokens(seed))
        made.calls = {name: start(made, seed) for name, start in starts.items() if refusal(name) is None}
        return made

    implementations = {name: partial(continued, name) for name in starts}
    return Case(inputs=inputs, implementations=implementations, refusal=refusal, smaller={"calls": 1}, **declared)


def continued(name: str, inputs: Streams) -> Results:
    return inputs.calls[name]()


class Shape(NamedTuple):
    """This number of calls of a step, with a token or a block of tokens each; outputs belong to the new tokens, or to
    the whole window."""

    window: int
    width: int
    heads: int
    block: int
    calls: int
    retroactive: bool
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        return self.block * self.calls

    @property
    def output(self) -> str:
        return "retroactive" if self.retroactive else "single"

    @property
    def sizes(self) -> dict[str, int | str]:
        return {"output": self.output, "H": self.heads, "n": self.window, "D": self.width, "t": self.block}

    @property
    def suffix(self) -> str:
        return f"-blocks-of-{self.block}" if self.block > 1 else ""

    def made(self, seed: int) -> list[Tensor]:
        """Queries, keys and values."""
        return drawn(
            seed, *3 * [(1, self.heads, self.window + self.tokens, self.width)], backward=False, dtype=self.dtype
        )[:3]

    def first(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        return [part[:, :, : self.window] for part in tokens]

    def after(self, tokens: Sequence[Tensor], block: int) -> list[tuple[Tensor, ...]]:
        """The tokens after the first window, in blocks with their own memory, as a projection makes them."""
        blocks = (part[:, :, self.window :].split(block, dim=2) for part in tokens)
        return [tuple(part.contiguous() for part in block) for block in zip(*blocks, strict=True)]

    def options(self, name: str) -> dict[str, Any]:
        """Options for one of our implementations: "auto" takes the kernel directly, and a kernel that is named is
        checked once more."""
        output = {"output": "retroactive"} if self.retroactive else {}
        return output | ({"impl": name} if name == "reference" else {})

    def widened(self, step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A step of a peer; sums in half precision would be wrong after a few tokens."""
        if self.dtype == wide(self.dtype):
            return step
        return lambda *token: step(*(part.to(wide(self.dtype)) for part in token)).to(self.dtype)

    def windows(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """Exact attention in float64, one block of tokens after the other, for all queries of the window or for the
        newest query."""
        if self.retroactive:
            ends = range(self.window + 1, self.window + self.tokens + 1)
            return [exact(*(part[:, :, end - self.window : end] for part in tokens))[0] for end in ends]
        query, key, value = tokens
        return list(banded(query[:, :, self.window :], key, value, self.window).split(self.block, dim=2))

    def refusal(self, scan: str) -> Callable[[str], str | None]:
        return refusing(scan, *3 * [(1, self.heads, 1, self.width)], dtype=self.dtype)


def banded(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """(1, H, t, E) in float64: for each of the last t tokens, the attention over the `window` newest tokens that end
    with it."""
    places = torch.arange(key.shape[2], device=key.device)
    age = places[-query.shape[2] :, None] - places
    outside = (age < 0) | (age >= window)
    heads = zip(*(part[0].double() for part in (query, key, value)), strict=True)
    return torch.stack(
        [(q @ k.T * q.shape[-1] ** -0.5).masked_fill(outside, -torch.inf).softmax(-1) @ v for q, k, v in heads]
    )[None]


# ---- Nyström attention -----------------------------------------------------------------------------------------------


def _fewest(tokens: Tensor) -> Tensor:
    """(H, t, D) of (1, H, t, D), or (t, D) of a single head: the dimensions for which eager torch is fastest."""
    return tokens[0, 0] if tokens.shape[1] == 1 else tokens[0]


class NystromStreams:
    """The streams of Nyström attention of one shape: ours, and eager torch's.

    Landmarks are fixed, or change with the window.
    """

    scan = "continual_nystrom_step"

    def __init__(self, shape: Shape, landmarks: int, fixed: bool) -> None:
        self.shape, self.landmarks, self.fixed = shape, landmarks, fixed
        self.kind = "fixed" if fixed else "continual"

    @property
    def name(self) -> str:
        s = self.shape
        output = "-retroactive" if s.retroactive else ""
        sizes = f"{dtype_name(s.dtype)}-{s.heads}x{s.width}-n{s.window}-m{self.landmarks}"
        return f"nystrom-step-{self.kind}{output}-{sizes}{s.suffix}"

    @property
    def work(self) -> Work:
        s = self.shape
        return step_work(f"{self.kind} {s.output}", s.heads, s.window, self.landmarks, s.width, dtype_name(s.dtype))

    @property
    def sizes(self) -> dict[str, int | str]:
        return {**self.shape.sizes, "m": self.landmarks, "landmarks": self.kind}

    def given(self, seed: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Fixed landmarks (H, m, D)."""
        random, shape = generator(seed + 1000), (self.shape.heads, self.landmarks, self.shape.width)
        made = (normal(random, *shape).to(self.shape.dtype).to(like.dtype) for _ in range(2))
        return (next(made), next(made)) if self.fixed else None

    def ours(self, name: str, tokens: Sequence[Tensor], seed: int) -> Call:
        given = self.given(seed, tokens[1])
        state = continual_nystrom_init(*self.shape.first(tokens), None if given else self.landmarks, landmarks=given)
        step = Stepped(continual_nystrom_step, state, **self.shape.options(name)).step
        return all_steps(step, self.shape.after(tokens, self.shape.block))

    def eager(self, tokens: Sequence[Tensor], seed: int) -> Call:
        """The call of the eager stream, one token at a time; the outputs of a block are concatenated."""
        call = all_steps(self.shape.widened(self._eager(tokens, seed).step), self._tokens(tokens, 1))
        block = self.shape.block
        return call if block == 1 else lambda: [torch.cat(list(outs), dim=-2) for outs in _batched(call(), block)]

    def by_band(self, tokens: Sequence[Tensor], seed: int) -> Call:
        first, given = [part[0] for part in self.shape.first(tokens)], self.given(seed, tokens[1])
        assert given is not None
        stream = EagerBlocks(*first, self.shape.width**-0.5, given, ITERATIONS, self.shape.block)
        return all_steps(self.shape.widened(stream.step), self._tokens(tokens, self.shape.block))

    def _tokens(self, tokens: Sequence[Tensor], block: int) -> list[tuple[Tensor, ...]]:
        return [tuple(map(_fewest, token)) for token in self.shape.after(tokens, block)]

    def _eager(self, tokens: Sequence[Tensor], seed: int) -> EagerNystrom:
        first = [part[0].to(wide(part.dtype)) for part in self.shape.first(tokens)]
        stream = EagerRetroactive if self.shape.retroactive else EagerNystrom
        return stream(*first, self.shape.width**-0.5, self.landmarks, self.given(seed, first[0]), ITERATIONS)

    def exactly(self, tokens: Sequence[Tensor]) -> Results:
        """The eager stream in float64, in blocks; it equals the definition to 1e-12."""
        s, stream = self.shape, self._eager([part.double() for part in tokens], seed=0)
        outs = [stream.step(*(_fewest(part.double()) for part in token)) for token in s.after(tokens, 1)]
        if s.retroactive:
            return [out.reshape(1, s.heads, s.window, s.width) for out in outs]
        rows = torch.stack([out.reshape(s.heads, s.width) for out in outs], dim=1)
        return rows[None].split(s.block, dim=2)


def _batched(items: Results, size: int) -> list[Results]:
    return [items[i : i + size] for i in range(0, len(items), size)]


@declared()
def step(
    window: int = 64,
    width: int = 64,
    heads: int = 1,
    block: int = 1,
    calls: int = 64,
    retroactive: bool = False,
    landmarks: int = 16,
    fixed: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Case:
    shape = Shape(window, width, heads, block, calls, retroactive, dtype)
    streams = NystromStreams(shape, landmarks, fixed)
    ours = {name: partial(streams.ours, name) for name in kernels(streams.scan)}
    starts = ours | {EAGER: streams.eager} | ({BAND: streams.by_band} if block > 1 and fixed else {})

    def oracle(i: Streams) -> Mapping[str, Results]:
        exactly = streams.exactly(i)
        fewest = [_fewest(out) for out in exactly]
        return dict.fromkeys(ours, exactly) | {EAGER: fewest, BAND: fewest}

    return stream_case(
        shape.made,
        starts,
        shape.refusal(streams.scan),
        scan=streams.scan,
        name=streams.name,
        sizes=streams.sizes,
        oracle=oracle,
        baselines=(EAGER, BAND),
        work=streams.work,
        steps=dict.fromkeys(starts, shape.tokens),
    )


@declared(threads=None)
def beside_full(window: int, fixed: bool = True, calls: int = 64) -> Case:
    """A step of 16 heads of 12 with 4 landmarks, compared with full attention of the window for every token.

    The definition is left out, because it reads the window for every token and is not faster than full attention.
    """
    shape = Shape(window, 12, 16, 1, calls, False, torch.float32)
    streams, usable = NystromStreams(shape, 4, fixed), shape.refusal("continual_nystrom_step")

    def exact_stream(tokens: Streams, seed: int) -> Call:
        stream = Stepped(continual_attention_step, continual_attention_init(*shape.first(tokens)))
        return all_steps(stream.step, shape.after(tokens, 1))

    def whole(attend: Callable[..., Tensor], tokens: Streams, seed: int) -> Call:
        last = [part[:, :, -window:].contiguous() for part in tokens]
        return lambda: (attend(*last),)

    def oracle(i: Streams) -> Mapping[str, Results]:
        (full,) = exact(*(part[:, :, -window:] for part in i))
        return dict.fromkeys(ours, streams.exactly(i)) | {EXACT: shape.windows(i), SDPA: (full,), EXPLICIT: (full,)}

    ours = {name: partial(streams.ours, name) for name in kernels(streams.scan, definition=False)}
    peers = {SDPA: partial(whole, F.scaled_dot_product_attention), EXPLICIT: partial(whole, naive_attention)}
    return stream_case(
        shape.made,
        ours | {EXACT: exact_stream} | peers,
        lambda name: usable(name) or lacking_memory(16 * shape.heads * window**2 if name == EXPLICIT else 2**30),
        scan=streams.scan,
        name=f"{streams.name}-beside-full",
        sizes=streams.sizes,
        oracle=oracle,
        baselines=(SDPA, EXPLICIT),
        others=(EXACT, SDPA, EXPLICIT),
        work=streams.work,
        steps=dict.fromkeys((*ours, EXACT), shape.tokens)
        | dict.fromkeys(peers, 1),  # full attention is computed once per call
    )


# ---- exact attention -------------------------------------------------------------------------------------------------


class ContinualInference(Stepped):
    """The step of the package's modules, without their projections."""

    def __init__(self, first: Sequence[Tensor], retroactive: bool) -> None:
        from continual.multihead_attention import retroactive_mha, single_output_mha

        module = retroactive_mha if retroactive else single_output_mha
        heads, window, width = first[0].shape[1:]
        self.advance = module._scaled_dot_product_attention_step
        like = {"dtype": first[0].dtype, "device": first[0].device}
        self.state = module._scaled_dot_product_attention_default_state(1, window, heads * width, heads, **like)
        for token in zip(*(part[0].unbind(1) for part in first), strict=True):
            self.step(*token)


@declared()
def exact_step(
    window: int = 120,
    width: int = 12,
    heads: int = 16,
    block: int = 1,
    calls: int = 64,
    retroactive: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A step of exact attention: the newest output, or retroactive outputs, where all outputs of the window are
    recomputed."""
    scan, shape = "continual_attention_step", Shape(window, width, heads, block, calls, retroactive, dtype)

    def by_ours(name: str, tokens: Streams, seed: int) -> Call:
        state = continual_attention_init(*shape.first(tokens))
        stream = Stepped(continual_attention_step, state, **shape.options(name))
        return all_steps(stream.step, shape.after(tokens, block))

    def eager(tokens: Streams, seed: int) -> Call:
        first = shape.first(tokens)[1:]
        stream = EagerExact(*first) if block == 1 else EagerExactBlocks(*first, block)
        return all_steps(stream.step, shape.after(tokens, block))

    def package(tokens: Streams, seed: int) -> Call:
        stream = ContinualInference([part.to(wide(part.dtype)) for part in shape.first(tokens)], retroactive)
        return all_steps(
            shape.widened(stream.step), [[part[0, :, 0] for part in token] for token in shape.after(tokens, block)]
        )

    def oracle(i: Streams) -> Mapping[str, Results]:
        """Attention over the window of each token: for all queries of the window, or for the newest query."""
        found = shape.windows(i)
        return dict.fromkeys((*ours, EAGER), found) | {CONTINUAL_INFERENCE: [out[0] for out in found]}

    ours = {name: partial(by_ours, name) for name in kernels(scan)}
    starts = ours | ({} if retroactive else {EAGER: eager}) | ({CONTINUAL_INFERENCE: package} if block == 1 else {})
    return stream_case(
        shape.made,
        starts,
        shape.refusal(scan),
        scan=scan,
        name=f"exact-step-{shape.output}-{dtype_name(dtype)}-{heads}x{width}-n{window}{shape.suffix}",
        sizes=shape.sizes,
        oracle=oracle,
        baselines=(EAGER, CONTINUAL_INFERENCE),
        work=step_work(shape.output, heads, window, 1, width, dtype_name(dtype)),
        steps=dict.fromkeys(starts, shape.tokens),
    )


# ---- what is measured ------------------------------------------------------------------------------------------------

WINDOWS = (64, 256, 1024, 4096)


def cases() -> Iterator[Case]:
    yield from (step(window, quick=True) for window in WINDOWS)
    yield from (step(window, fixed=False, calls=max(64, window // 16), quick=window == 64) for window in WINDOWS)
    yield from (step(block=block, calls=8, quick=block == 64) for block in (8, 64))
    yield from (step(fixed=False, block=block, calls=8) for block in (8, 64))
    yield from (step(window, retroactive=True) for window in (64, 256, 1024))
    yield from (step(landmarks=landmarks) for landmarks in (4, 8, 32))
    yield from (step(width=width) for width in (16, 128))
    yield from (step(heads=heads, calls=calls) for heads, calls in ((16, 64), (256, 32)))
    yield step(heads=1024, calls=16)
    yield from (step(heads=1024, calls=16, threads=2, fixed=fixed, quick=fixed) for fixed in (True, False))
    yield from (step(dtype=dtype) for dtype in DTYPES)
    yield from (beside_full(window, quick=window < 4096) for window in (120, 1024, 4096))
    yield from (beside_full(window, fixed=False, calls=window // 4) for window in (120, 1024, 4096))

    yield from (exact_step(window, quick=window == 120) for window in (120, 256, 1024, 4096))
    yield from (exact_step(window, retroactive=True, calls=16) for window in (120, 256, 512))
    yield from (exact_step(block=block, calls=8) for block in (8, 64))
    yield from (exact_step(width=width) for width in (32, 64))
    yield from (exact_step(heads=heads) for heads in (1, 128))
    yield from (exact_step(dtype=dtype) for dtype in DTYPES)
    yield exact_step(heads=128, threads=2)

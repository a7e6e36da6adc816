"""Family B: what is measured, beside whom, and what is right. Figures of streams are of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels import continual_attention_init, continual_attention_step, continual_nystrom_init, continual_nystrom_step

from .attention import SDPA, exact, naive_attention
from .harness import Case, lacking_memory
from .nystrom_eager import EagerBlocks, EagerExact, EagerNystrom
from .nystrom_layer import CONTINUAL_INFERENCE, EAGER, ITERATIONS, NystromLayer, Pinv, normal, refused

BAND = "eager torch, by a band"
EXPLICIT = "softmax(QK')V"
EXACT = "native, exact"

Step = Callable[[Any, Any, Any], Tensor]
"""Of a token's query, key and value."""


class Tokens(NamedTuple):
    """(1, H, n + t, D) each: the first window, and what comes after it."""

    query: Tensor
    key: Tensor
    value: Tensor


class Streams(Tokens):
    """Tokens with the streams that go on over them, each at its own pace, again and again over the tokens after the window."""

    calls: dict[str, Callable[[], Sequence[Tensor]]]


def _run(name: str, inputs: Streams) -> Sequence[Tensor]:
    return inputs.calls[name]()


class Ours:
    """A state that nobody else holds, so that it is stepped in place."""

    def __init__(self, step: Any, state: Any, **options: Any) -> None:
        self.advance, self.state = partial(step, **options) if options else step, state

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, self.state = self.advance(self.state, query, key, value)
        return out


def _all_steps(step: Step, tokens: Sequence[tuple[Tensor, ...]]) -> Callable[[], Sequence[Tensor]]:
    @torch.no_grad()
    def call() -> Sequence[Tensor]:
        return [step(*token) for token in tokens]

    return call


@dataclass(frozen=True)
class NystromStep:
    """Tokens that come one by one, or in blocks, after a window. Landmarks are fixed, or follow the window."""

    window: int = 64
    landmarks: int = 16
    width: int = 64
    heads: int = 1
    fixed: bool = True
    block: int = 1
    calls: int = 256
    """Steps or blocks of a call."""
    dtype: torch.dtype = torch.float32
    threads: int | None = 1
    quick: bool = False

    def __str__(self) -> str:
        kind = "fixed" if self.fixed else "continual"
        block = f"-blocks-of-{self.block}" if self.block > 1 else ""
        return f"nystrom-step-{kind}-float32-{self.heads}x{self.width}-n{self.window}-m{self.landmarks}{block}"

    @property
    def baselines(self) -> tuple[str, ...]:
        return (EAGER, BAND)

    @property
    def tokens(self) -> int:
        return self.block * self.calls

    @property
    def names(self) -> tuple[str, ...]:
        return ("native", "reference", EAGER, *((BAND,) if self.block > 1 and self.fixed else ()))

    @property
    def steps(self) -> Mapping[str, int]:
        return dict.fromkeys(self.names, self.tokens)

    @property
    def implementations(self) -> Mapping[str, Callable[[Streams], Sequence[Tensor]]]:
        return {name: partial(_run, name) for name in self.names}

    def given(self, seed: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Fixed landmarks (H, m, D)."""
        random = torch.Generator().manual_seed(seed + 1000)
        made = (normal(random, self.heads, self.landmarks, self.width).to(like.dtype) for _ in range(2))
        return (next(made), next(made)) if self.fixed else None

    def start(self, tokens: Tokens, seed: int) -> Any:
        """The state after the first window."""
        first = (part[:, :, : self.window] for part in tokens)
        given = self.given(seed, tokens.key)
        return continual_nystrom_init(*first, None if given else self.landmarks, landmarks=given)

    def inputs(self, seed: int) -> Streams:
        random = torch.Generator().manual_seed(seed)
        shape = (1, self.heads, self.window + self.tokens, self.width)
        streams = Streams(*(normal(random, *shape) for _ in range(3)))
        streams.calls = {name: self._call(name, streams, seed) for name in self.names}
        return streams

    def _call(self, name: str, tokens: Tokens, seed: int) -> Callable[[], Sequence[Tensor]]:
        if name in ("native", "reference"):
            options = {} if name == "native" else {"impl": name}  # auto takes native; by name it is checked once more
            return _all_steps(Ours(continual_nystrom_step, self.start(tokens, seed), **options).step, self._after(tokens, self.block))
        stream, block = (self._by_band(tokens, seed), self.block) if name == BAND else (self._eager(tokens, seed), 1)
        call = _all_steps(stream.step, [tuple(map(_fewest, token)) for token in self._after(tokens, block)])
        return call if block == self.block else lambda: [torch.cat(list(outs), dim=-2) for outs in _batched(call(), self.block)]

    def _eager(self, tokens: Tokens, seed: int) -> EagerNystrom:
        first = (part[0, :, : self.window] for part in tokens)
        return EagerNystrom(*first, self.width**-0.5, self.landmarks, self.given(seed, tokens.key), ITERATIONS)

    def _by_band(self, tokens: Tokens, seed: int) -> EagerBlocks:
        first, given = (part[0, :, : self.window] for part in tokens), self.given(seed, tokens.key)
        assert given is not None
        return EagerBlocks(*first, self.width**-0.5, given, ITERATIONS, self.block)

    def _after(self, tokens: Tokens, block: int) -> list[tuple[Tensor, ...]]:
        """What comes after the first window, in blocks, each in memory of its own, as a projection makes it."""
        blocks = (part[:, :, self.window :].split(block, dim=2) for part in tokens)
        return [tuple(part.contiguous() for part in block) for block in zip(*blocks, strict=True)]

    def oracle(self, inputs: Streams) -> Mapping[str, Sequence[Tensor]]:
        ours = self._exactly(inputs)
        theirs = [_fewest(out) for out in ours]
        return {name: ours if name in ("native", "reference") else theirs for name in self.names}

    def _exactly(self, inputs: Streams) -> Sequence[Tensor]:
        """The eager stream in float64, which is the definition to 1e-12, in blocks."""
        stream = self._eager(Tokens(*(part.double() for part in inputs)), seed=0)
        outs = [stream.step(*(_fewest(part.double()) for part in token)) for token in self._after(inputs, 1)]
        rows = torch.stack([out.reshape(self.heads, self.width) for out in outs], dim=1)
        return rows[None].split(self.block, dim=2)

    def small(self) -> NystromStep:
        return replace(self, calls=1)

    def refusal(self, implementation: str) -> str | None:
        return refused("continual_nystrom_step", implementation, *3 * [torch.empty(1, self.heads, 1, self.width)])


def banded(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """(1, H, t, E) in float64: the attention of each of the last t tokens over the `window` newest that end with it."""
    age = torch.arange(query.shape[2])[:, None] + key.shape[2] - query.shape[2] - torch.arange(key.shape[2])
    outside = (age < 0) | (age >= window)
    heads = zip(*(part[0].double() for part in (query, key, value)), strict=True)
    return torch.stack([(q @ k.T * q.shape[-1] ** -0.5).masked_fill(outside, -torch.inf).softmax(-1) @ v for q, k, v in heads])[None]


def _fewest(tokens: Tensor) -> Tensor:
    """(H, t, D) of (1, H, t, D), or (t, D) of a single head: with the dimensions that eager torch is fastest with."""
    return tokens[0, 0] if tokens.shape[1] == 1 else tokens[0]


def _batched(items: Sequence[Tensor], size: int) -> list[Sequence[Tensor]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


@dataclass(frozen=True)
class BesideFull(NystromStep):
    """A step beside what it saves: attention of the whole window, computed again for every token."""

    landmarks: int = 4
    width: int = 12
    heads: int = 16
    threads: int | None = None

    def __str__(self) -> str:
        return super().__str__() + "-beside-full"

    @property
    def baselines(self) -> tuple[str, ...]:
        return (SDPA, EXPLICIT)

    @property
    def names(self) -> tuple[str, ...]:
        return ("native", "reference", EXACT, SDPA, EXPLICIT)

    @property
    def steps(self) -> Mapping[str, int]:
        """Full attention is computed once a call."""
        return {name: 1 if name in (SDPA, EXPLICIT) else self.tokens for name in self.names}

    def _call(self, name: str, tokens: Tokens, seed: int) -> Callable[[], Sequence[Tensor]]:
        if name in ("native", "reference"):
            return super()._call(name, tokens, seed)
        if name == EXACT:
            state = continual_attention_init(*(part[:, :, : self.window] for part in tokens))
            return _all_steps(Ours(continual_attention_step, state).step, self._after(tokens, 1))
        last = [part[:, :, -self.window :].contiguous() for part in tokens]
        attend = F.scaled_dot_product_attention if name == SDPA else naive_attention
        return lambda: (attend(*last),)

    def oracle(self, inputs: Streams) -> Mapping[str, Sequence[Tensor]]:
        ours = self._exactly(inputs)
        rows = banded(inputs.query[:, :, self.window :], inputs.key, inputs.value, self.window).split(1, dim=2)
        (full,) = exact(*(part[:, :, -self.window :] for part in inputs))
        return {"native": ours, "reference": ours, EXACT: rows, SDPA: (full,), EXPLICIT: (full,)}

    def refusal(self, implementation: str) -> str | None:
        scores = 4 * self.heads * self.window**2
        return super().refusal(implementation) or lacking_memory(4 * scores if implementation == EXPLICIT else 2**30)


@dataclass(frozen=True)
class ExactStep:
    """Exact attention continued: the newest output, or retroactive ones, those of the whole window anew."""

    window: int = 120
    width: int = 12
    heads: int = 16
    retroactive: bool = False
    tokens: int = 120
    dtype: torch.dtype = torch.float32
    threads: int | None = 1
    quick: bool = False
    baselines: tuple[str, ...] = (EAGER, CONTINUAL_INFERENCE)

    def __str__(self) -> str:
        output = "retroactive" if self.retroactive else "single"
        return f"exact-step-{output}-float32-{self.heads}x{self.width}-n{self.window}"

    @property
    def names(self) -> tuple[str, ...]:
        return ("native", "reference", *(() if self.retroactive else (EAGER,)), CONTINUAL_INFERENCE)

    @property
    def steps(self) -> Mapping[str, int]:
        return dict.fromkeys(self.names, self.tokens)

    @property
    def implementations(self) -> Mapping[str, Callable[[Streams], Sequence[Tensor]]]:
        return {name: partial(_run, name) for name in self.names}

    def inputs(self, seed: int) -> Streams:
        random = torch.Generator().manual_seed(seed)
        shape = (1, self.heads, self.window + self.tokens, self.width)
        streams = Streams(*(normal(random, *shape) for _ in range(3)))
        streams.calls = {name: self._call(name, streams) for name in self.names if self.refusal(name) is None}
        return streams

    def _call(self, name: str, tokens: Tokens) -> Callable[[], Sequence[Tensor]]:
        first = [part[:, :, : self.window] for part in tokens]
        after = list(zip(*(part[:, :, self.window :].split(1, dim=2) for part in tokens), strict=True))
        if name in ("native", "reference"):
            options = {"impl": "reference"} if name == "reference" else {}
            options |= {"output": "retroactive"} if self.retroactive else {}
            return _all_steps(Ours(continual_attention_step, continual_attention_init(*first), **options).step, after)
        if name == EAGER:
            return _all_steps(EagerExact(*first[1:]).step, after)
        stream = ContinualInference(first, self.retroactive)
        return _all_steps(stream.step, [tuple(part[0, :, 0] for part in token) for token in after])

    def oracle(self, inputs: Streams) -> Mapping[str, Sequence[Tensor]]:
        """Attention over each token's window: of all its queries, or of the newest."""
        if self.retroactive:
            ends = range(self.window + 1, self.window + self.tokens + 1)
            ours = [exact(*(part[:, :, end - self.window : end] for part in inputs))[0] for end in ends]
        else:
            ours = list(banded(inputs.query[:, :, self.window :], inputs.key, inputs.value, self.window).split(1, dim=2))
        return {name: [out[0] for out in ours] if name == CONTINUAL_INFERENCE else ours for name in self.names}

    def small(self) -> ExactStep:
        return replace(self, tokens=1)

    def refusal(self, implementation: str) -> str | None:
        return refused("continual_attention_step", implementation, *3 * [torch.empty(1, self.heads, 1, self.width)])


class ContinualInference:
    """The step of the package's modules, without their projections."""

    def __init__(self, first: Sequence[Tensor], retroactive: bool) -> None:
        from continual.multihead_attention import retroactive_mha, single_output_mha

        module = retroactive_mha if retroactive else single_output_mha
        heads, window, width = first[0].shape[1:]
        self.advance = module._scaled_dot_product_attention_step
        self.state = module._scaled_dot_product_attention_default_state(1, window, heads * width, heads)
        for token in zip(*(part[0].unbind(1) for part in first), strict=True):
            self.step(*token)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, self.state = self.advance(self.state, query, key, value)
        return out


CASES: list[Case] = [
    NystromStep(quick=True),
    NystromStep(fixed=False, quick=True),
    NystromStep(block=64, calls=8, quick=True),
    NystromStep(fixed=False, block=64, calls=8),
    NystromStep(heads=1024, calls=16, threads=2, quick=True),
    NystromStep(heads=1024, calls=16, threads=2, fixed=False),
    Pinv(quick=True),
    *(Pinv(number, batch) for number, batch in ((16, 1024), (64, 1), (64, 16))),
    *(
        BesideFull(n, fixed=fixed, calls=calls, quick=fixed and n < 4096)
        for n, calls in ((120, 120), (1024, 256), (4096, 1024))  # an update of continual landmarks every n / 4 tokens
        for fixed in (True, False)
    ),
    ExactStep(),
    ExactStep(1024, tokens=64),
    ExactStep(retroactive=True),
    *(NystromLayer(length, quick=length == 4096) for length in (1024, 4096, 16_384)),
    *(NystromLayer(length, backward=True) for length in (1024, 4096)),
]

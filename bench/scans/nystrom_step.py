"""Family B's steps: tokens that come one by one, or in blocks, after a window. Figures are of one token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels import continual_attention_init, continual_attention_step, continual_nystrom_init, continual_nystrom_step

from ..floors import Work, step_work
from ..harness import generator, lacking_memory, normal
from .attention import SDPA, exact, naive_attention
from .nystrom_eager import ITERATIONS, EagerBlocks, EagerExact, EagerExactBlocks, EagerNystrom, EagerRetroactive
from .operators import CONTINUAL_INFERENCE, EAGER, Implementation, OperatorCase, kernels, refused, sample, wide

BAND = "eager torch, by a band"
EXPLICIT = "softmax(QK')V"
EXACT = "cmab_kernels.continual_attention_step"

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


def all_steps(step: Callable[..., Tensor], tokens: Sequence[Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
    @torch.no_grad()
    def call() -> Sequence[Tensor]:
        return [step(*token) for token in tokens]

    return call


@dataclass(frozen=True)
class StepCase(OperatorCase):
    """So many calls of a step, of a token or of a block of tokens each; outputs are of the new tokens, or of the whole window."""

    window: int = 64
    width: int = 64
    heads: int = 1
    block: int = 1
    calls: int = 64
    retroactive: bool = False

    @property
    def tokens(self) -> int:
        return self.block * self.calls

    @property
    def sizes(self) -> Mapping[str, int | str]:
        output = "retroactive" if self.retroactive else "single"
        return {"output": output, "H": self.heads, "n": self.window, "D": self.width, "t": self.block}

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]: ...

    @property
    def steps(self) -> Mapping[str, int]:
        return dict.fromkeys(self.names, self.tokens)

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        return {name: partial(_run, name) for name in self.names}

    def inputs(self, seed: int) -> Streams:
        random = generator(seed)
        shape = (1, self.heads, self.window + self.tokens, self.width)
        streams = Streams(*(normal(random, *shape).to(self.dtype) for _ in range(3)))
        streams.calls = {name: self._call(name, streams, seed) for name in self.names if self.refusal(name) is None}
        return streams

    @abstractmethod
    def _call(self, name: str, tokens: Tokens, seed: int) -> Callable[[], Sequence[Tensor]]: ...

    def _options(self, name: str) -> dict[str, Any]:
        """Of one of ours: auto takes the kernel; by name it is checked once more."""
        output = {"output": "retroactive"} if self.retroactive else {}
        return output | ({"impl": name} if name == "reference" else {})

    def _first(self, tokens: Tokens) -> list[Tensor]:
        return [part[:, :, : self.window] for part in tokens]

    def _after(self, tokens: Tokens, block: int) -> list[tuple[Tensor, ...]]:
        """What comes after the first window, in blocks, each in memory of its own, as a projection makes it."""
        blocks = (part[:, :, self.window :].split(block, dim=2) for part in tokens)
        return [tuple(part.contiguous() for part in block) for block in zip(*blocks, strict=True)]

    def _widened(self, step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A peer's step: sums in half precision would be wrong after a few tokens."""
        if self.dtype == wide(self.dtype):
            return step
        return lambda *token: step(*(part.to(wide(self.dtype)) for part in token)).to(self.dtype)

    def small(self) -> StepCase:
        return replace(self, calls=1)

    def refusal(self, implementation: str) -> str | None:
        return refused(self.scan, implementation, *3 * [sample(1, self.heads, 1, self.width, dtype=self.dtype)])


@dataclass(frozen=True)
class NystromStep(StepCase):
    """Landmarks are fixed, or follow the window."""

    landmarks: int = 16
    fixed: bool = True

    scan = "continual_nystrom_step"
    baselines = (EAGER, BAND)

    def __str__(self) -> str:
        kind = "fixed" if self.fixed else "continual"
        output = "-retroactive" if self.retroactive else ""
        block = f"-blocks-of-{self.block}" if self.block > 1 else ""
        size = f"{self.heads}x{self.width}-n{self.window}-m{self.landmarks}"
        return f"nystrom-step-{kind}{output}-{self._dtype}-{size}{block}{self._threads}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {**super().sizes, "m": self.landmarks, "landmarks": "fixed" if self.fixed else "continual"}

    @property
    def work(self) -> Work:
        scheme = f"{'fixed' if self.fixed else 'continual'} {'retroactive' if self.retroactive else 'single'}"
        return step_work(scheme, self.heads, self.window, self.landmarks, self.width, self._dtype)

    @property
    def names(self) -> tuple[str, ...]:
        return (*kernels(self.scan), EAGER, *((BAND,) if self.block > 1 and self.fixed else ()))

    def given(self, seed: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Fixed landmarks (H, m, D)."""
        random = generator(seed + 1000)
        made = (normal(random, self.heads, self.landmarks, self.width).to(self.dtype).to(like.dtype) for _ in range(2))
        return (next(made), next(made)) if self.fixed else None

    def start(self, tokens: Tokens, seed: int) -> Any:
        """The state after the first window."""
        given = self.given(seed, tokens.key)
        return continual_nystrom_init(*self._first(tokens), None if given else self.landmarks, landmarks=given)

    def _call(self, name: str, tokens: Tokens, seed: int) -> Callable[[], Sequence[Tensor]]:
        if name in kernels(self.scan):
            stream = Ours(continual_nystrom_step, self.start(tokens, seed), **self._options(name))
            return all_steps(stream.step, self._after(tokens, self.block))
        eager, block = (self._by_band(tokens, seed), self.block) if name == BAND else (self._eager(tokens, seed), 1)
        call = all_steps(self._widened(eager.step), [tuple(map(_fewest, token)) for token in self._after(tokens, block)])
        return call if block == self.block else lambda: [torch.cat(list(outs), dim=-2) for outs in _batched(call(), self.block)]

    def _eager(self, tokens: Tokens, seed: int) -> EagerNystrom:
        first = [part[0].to(wide(part.dtype)) for part in self._first(tokens)]
        stream = EagerRetroactive if self.retroactive else EagerNystrom
        return stream(*first, self.width**-0.5, self.landmarks, self.given(seed, first[0]), ITERATIONS)

    def _by_band(self, tokens: Tokens, seed: int) -> EagerBlocks:
        first, given = [part[0] for part in self._first(tokens)], self.given(seed, tokens.key)
        assert given is not None
        return EagerBlocks(*first, self.width**-0.5, given, ITERATIONS, self.block)

    def oracle(self, inputs: Streams) -> Mapping[str, Sequence[Tensor]]:
        ours = self._exactly(inputs)
        theirs = [_fewest(out) for out in ours]
        return {name: ours if name in kernels(self.scan) else theirs for name in self.names}

    def _exactly(self, inputs: Streams) -> Sequence[Tensor]:
        """The eager stream in float64, which is the definition to 1e-12, in blocks."""
        stream = self._eager(Tokens(*(part.double() for part in inputs)), seed=0)
        outs = [stream.step(*(_fewest(part.double()) for part in token)) for token in self._after(inputs, 1)]
        if self.retroactive:
            return [out.reshape(1, self.heads, self.window, self.width) for out in outs]
        rows = torch.stack([out.reshape(self.heads, self.width) for out in outs], dim=1)
        return rows[None].split(self.block, dim=2)


def banded(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """(1, H, t, E) in float64: the attention of each of the last t tokens over the `window` newest that end with it."""
    places = torch.arange(key.shape[2], device=key.device)
    age = places[-query.shape[2] :, None] - places
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
    threads: int | None = field(default=None, kw_only=True)

    baselines = (SDPA, EXPLICIT)
    others = (EXACT, SDPA, EXPLICIT)

    def __str__(self) -> str:
        return super().__str__() + "-beside-full"

    @property
    def names(self) -> tuple[str, ...]:
        """The definition reads the window for every token, and is no faster than what a step is beside."""
        return (*(name for name in kernels(self.scan) if name != "reference"), EXACT, SDPA, EXPLICIT)

    @property
    def steps(self) -> Mapping[str, int]:
        """Full attention is computed once a call."""
        return {name: 1 if name in (SDPA, EXPLICIT) else self.tokens for name in self.names}

    def _call(self, name: str, tokens: Tokens, seed: int) -> Callable[[], Sequence[Tensor]]:
        if name in kernels(self.scan):
            return super()._call(name, tokens, seed)
        if name == EXACT:
            state = continual_attention_init(*self._first(tokens))
            return all_steps(Ours(continual_attention_step, state).step, self._after(tokens, 1))
        last = [part[:, :, -self.window :].contiguous() for part in tokens]
        attend = F.scaled_dot_product_attention if name == SDPA else naive_attention
        return lambda: (attend(*last),)

    def oracle(self, inputs: Streams) -> Mapping[str, Sequence[Tensor]]:
        ours = self._exactly(inputs)
        rows = banded(inputs.query[:, :, self.window :], inputs.key, inputs.value, self.window).split(1, dim=2)
        (full,) = exact(*(part[:, :, -self.window :] for part in inputs))
        return dict.fromkeys(self.names, ours) | {EXACT: rows, SDPA: (full,), EXPLICIT: (full,)}

    def refusal(self, implementation: str) -> str | None:
        scores = 4 * self.heads * self.window**2
        return super().refusal(implementation) or lacking_memory(4 * scores if implementation == EXPLICIT else 2**30)


@dataclass(frozen=True)
class ExactStep(StepCase):
    """Exact attention continued: the newest output, or retroactive ones, those of the whole window anew."""

    window: int = 120
    width: int = 12
    heads: int = 16

    scan = "continual_attention_step"
    baselines = (EAGER, CONTINUAL_INFERENCE)

    def __str__(self) -> str:
        output = "retroactive" if self.retroactive else "single"
        block = f"-blocks-of-{self.block}" if self.block > 1 else ""
        return f"exact-step-{output}-{self._dtype}-{self.heads}x{self.width}-n{self.window}{block}{self._threads}"

    @property
    def work(self) -> Work:
        return step_work("retroactive" if self.retroactive else "single", self.heads, self.window, 1, self.width, self._dtype)

    @property
    def names(self) -> tuple[str, ...]:
        eager = () if self.retroactive else (EAGER,)
        return (*kernels(self.scan), *eager, *((CONTINUAL_INFERENCE,) if self.block == 1 else ()))

    def _call(self, name: str, tokens: Tokens, seed: int) -> Callable[[], Sequence[Tensor]]:
        first, after = self._first(tokens), self._after(tokens, self.block)
        if name in kernels(self.scan):
            return all_steps(Ours(continual_attention_step, continual_attention_init(*first), **self._options(name)).step, after)
        if name == EAGER:
            eager = EagerExact(*first[1:]) if self.block == 1 else EagerExactBlocks(*first[1:], self.block)
            return all_steps(eager.step, after)
        stream = ContinualInference([part.to(wide(part.dtype)) for part in first], self.retroactive)
        return all_steps(self._widened(stream.step), [[part[0, :, 0] for part in token] for token in after])

    def oracle(self, inputs: Streams) -> Mapping[str, Sequence[Tensor]]:
        """Attention over each token's window: of all its queries, or of the newest."""
        if self.retroactive:
            ends = range(self.window + 1, self.window + self.tokens + 1)
            ours = [exact(*(part[:, :, end - self.window : end] for part in inputs))[0] for end in ends]
        else:
            ours = list(banded(inputs.query[:, :, self.window :], inputs.key, inputs.value, self.window).split(self.block, dim=2))
        return {name: [out[0] for out in ours] if name == CONTINUAL_INFERENCE else ours for name in self.names}


class ContinualInference:
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

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, self.state = self.advance(self.state, query, key, value)
        return out

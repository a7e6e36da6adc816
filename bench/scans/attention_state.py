"""Family A, the mergeable state: a stream of keys, keys taken out again, states of parts merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels import AttentionState, attention_state, merge_states, remove_from_state

from ..floors import BYTES, Work, attention_work
from ..harness import Case, device, generator, normal
from .attention import SDPA, Attention
from .operators import EAGER, Implementation, OperatorCase, kernels


class StateInputs(NamedTuple):
    """All keys and values, those that come or go last, and what was kept of earlier ones."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


def attended(query: Tensor, key: Tensor, value: Tensor) -> AttentionState:
    """By the formula, in float64, head by head, as the scores are stored."""
    heads = []
    for q, k, v in zip(*(part.double().unbind(1) for part in (query, key, value)), strict=True):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        heads.append((scores.softmax(-1) @ v, scores.logsumexp(-1)))
    return AttentionState(*(torch.stack(parts, dim=1) for parts in zip(*heads, strict=True)))


def eager_update(i: StateInputs, new: int, removes: bool = False) -> Sequence[Tensor]:
    """As one writes it in torch: the new keys' scores are merged into the sum, or taken out of it."""
    scores, lse = (i.query @ i.key[:, :, -new:].mT).double() * i.query.shape[-1] ** -0.5, i.lse.unsqueeze(-1)
    part = scores if new == 1 else scores.logsumexp(-1, keepdim=True)
    merged = lse + torch.log1p(-(part - lse).exp()) if removes else torch.logaddexp(lse, part)
    added = (scores - merged).exp().to(i.out.dtype) @ i.value[:, :, -new:].to(i.out.dtype)
    kept = i.out * (lse - merged).exp().to(i.out.dtype)
    return (kept - added if removes else kept + added), merged.squeeze(-1)


def _run(impl: str, removes: bool, new: int, i: StateInputs) -> Sequence[Tensor]:
    state, key, value = AttentionState(i.out, i.lse), i.key[:, :, -new:], i.value[:, :, -new:]
    if removes:
        return tuple(remove_from_state(state, i.query, key, value, impl=impl).state)
    return tuple(attention_state(i.query, key, value, state=state, impl=impl))


@dataclass(frozen=True)
class Update(OperatorCase):
    """`new` keys after `keys` of which only the state was kept, or taken out of the state of them all."""

    heads: int = 4
    width: int = 16
    keys: int = 100_000
    new: int = 1
    latents: int = 128
    removes: bool = False
    threads: int | None = field(default=None, kw_only=True)

    baselines = (EAGER,)
    others = (SDPA,)  # begins anew with all keys, which the state saves

    def __str__(self) -> str:
        what = "removal" if self.removes else "update"
        count = "one-key" if self.new == 1 else f"{self.new}-keys"
        shape = f"{self._dtype}-{self.heads}x{self.width}-L{self.latents}"
        return f"{what}-{shape}-{count}-{'of' if self.removes else 'after'}-{self.keys}{self._threads}"

    @property
    def scan(self) -> str:
        return "remove_from_state" if self.removes else "attention_state"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {"H": self.heads, "L": self.latents, "N": self.keys, "t": self.new, "D": self.width}

    @property
    def work(self) -> Work:
        pairs = self.heads * self.new
        return attention_work(self.latents * pairs, pairs, self.width, self.width, self._dtype, device=device())

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        return {
            **{name: partial(_run, name, self.removes, self.new) for name in kernels(self.scan)},
            EAGER: lambda i: eager_update(i, self.new, self.removes),
            SDPA: lambda i: (F.scaled_dot_product_attention(i.query, *(part[:, :, self._rest()] for part in (i.key, i.value))),),
        }

    def _rest(self) -> slice:
        """The keys that the result is of."""
        return slice(0, self.keys) if self.removes else slice(None)

    def inputs(self, seed: int) -> StateInputs:
        query, key, value, _ = Attention(self.heads, self.width, self.keys + self.new, latents=self.latents, dtype=self.dtype).inputs(seed)
        kept = slice(None) if self.removes else slice(0, self.keys)
        return StateInputs(query, key, value, *attention_state(query, key[:, :, kept], value[:, :, kept]))

    def oracle(self, inputs: StateInputs) -> Mapping[str, Sequence[Tensor]]:
        state = attended(inputs.query, *(part[:, :, self._rest()] for part in (inputs.key, inputs.value)))
        return {name: (state.out,) if name == SDPA else tuple(state) for name in self.implementations}

    def small(self) -> Update:
        return replace(self, keys=min(self.keys, 4096), new=min(self.new, 64))

    def refusal(self, implementation: str) -> str | None:
        return Attention(self.heads, self.width, dtype=self.dtype).refusal(implementation)


class MergeInputs(NamedTuple):
    """(P, B, H, L, E) and (P, B, H, L): as many states one after the other."""

    outs: Tensor
    lses: Tensor


@dataclass(frozen=True)
class Merge(OperatorCase):
    """States of parts, as processes or moments leave them, into the state of the whole."""

    parts: int = 2
    heads: int = 4
    width: int = 16
    latents: int = 128
    batch: int = 1
    threads: int | None = field(default=None, kw_only=True)

    scan = "merge_states"
    baselines = (EAGER,)

    def __str__(self) -> str:
        return f"merge-{self.parts}-states-float32-B{self.batch}-{self.heads}x{self.width}-L{self.latents}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {"B": self.batch, "H": self.heads, "L": self.latents, "D": self.width, "states": self.parts}

    @property
    def work(self) -> Work:
        """Each state is read, one is written: out in float32 and lse in float64."""
        rows = self.batch * self.heads * self.latents
        return Work(bytes=(self.parts + 1) * rows * (self.width * BYTES["float32"] + BYTES["float64"]))

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        """One formula in torch on every device: it has no kernel of its own."""
        return {
            "cmab_kernels.merge_states": lambda i: tuple(merge_states(*map(AttentionState, i.outs, i.lses))),
            EAGER: _eager_merge,
        }

    def inputs(self, seed: int) -> MergeInputs:
        random = generator(seed)
        shape = (self.parts, self.batch, self.heads, self.latents)
        return MergeInputs(normal(random, *shape, self.width), 10 * normal(random, *shape).double())

    def oracle(self, inputs: MergeInputs) -> Mapping[str, Sequence[Tensor]]:
        """Weights of parts that sum to 1."""
        weights = inputs.lses.softmax(0).unsqueeze(-1)
        return dict.fromkeys(self.implementations, ((weights * inputs.outs.double()).sum(0), inputs.lses.logsumexp(0)))

    def small(self) -> Merge:
        return replace(self, batch=1)

    def refusal(self, implementation: str) -> str | None:
        return None


def _eager_merge(inputs: MergeInputs) -> Sequence[Tensor]:
    """As one writes it, one state after the other."""
    out, lse = inputs.outs[0], inputs.lses[0]
    for other_out, other_lse in zip(inputs.outs[1:], inputs.lses[1:], strict=True):
        merged = torch.logaddexp(lse, other_lse)
        share, other_share = ((part - merged).exp().unsqueeze(-1) for part in (lse, other_lse))
        out, lse = (out * share + other_out * other_share).to(out.dtype), merged
    return out, lse


CASES: list[Case] = [
    *(Update(keys=keys, quick=keys == 100_000) for keys in (1000, 10_000, 100_000, 1_000_000)),
    *(Update(new=new, quick=new == 1000) for new in (10, 100, 1000, 10_000)),
    *(Update(latents=latents) for latents in (8, 32, 512)),
    *(Update(heads=heads) for heads in (1, 8)),
    Update(width=64),
    *(Update(dtype=dtype, new=1000) for dtype in (torch.float64, torch.bfloat16)),
    Update(threads=1, new=1000),
    *(Update(new=new, removes=True, quick=new == 1000) for new in (1, 10, 100, 1000)),
    *(Update(keys=keys, new=100, removes=True) for keys in (1000, 10_000, 1_000_000)),
    *(Merge(parts, quick=parts == 2) for parts in (2, 8, 32)),
    *(Merge(batch=batch) for batch in (16, 256)),
]

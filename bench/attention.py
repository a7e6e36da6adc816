"""Family A: what is measured, beside whom, and what is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cmab_kernels
from cmab_kernels import AttentionState, attention_state, latent_attention
from cmab_kernels.nn import MultiheadAttention

from .harness import Case, lacking_memory

SDPA = "scaled_dot_product_attention"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def naive_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula as one writes it down: the scores are stored, and so are their exponentials."""
    return torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, dim=-1) @ value


ATTENTION: dict[str, Attend] = {
    "native": lambda q, k, v: latent_attention(q, k, v, impl="native"),
    "reference": lambda q, k, v: latent_attention(q, k, v, impl="reference"),
    SDPA: F.scaled_dot_product_attention,
    "naive": naive_attention,
}


def exact(query: Tensor, key: Tensor, value: Tensor, dout: Tensor | None = None) -> tuple[Tensor, ...]:
    """Attention, and its gradients for `dout`, in float64 by autograd: head by head, as the scores are stored."""
    heads = [
        _exact_head(*(None if t is None else t[:, head].detach().double() for t in (query, key, value, dout)))
        for head in range(query.shape[1])
    ]
    return tuple(torch.stack(results, dim=1) for results in zip(*heads, strict=True))


def _exact_head(query: Tensor, key: Tensor, value: Tensor, dout: Tensor | None) -> tuple[Tensor, ...]:
    few = max(1, 2**26 // max(1, key.shape[0] * key.shape[1]))  # queries at a time: 512 MiB of scores
    if dout is None:
        return (torch.cat([naive_attention(part, key, value) for part in query.split(few, dim=1)], dim=1),)
    outs, inputs = [], [t.requires_grad_() for t in (query, key, value)]
    for part, gradient in zip(query.split(few, dim=1), dout.split(few, dim=1), strict=True):
        out = naive_attention(part, key, value)
        out.backward(gradient)
        outs.append(out.detach())
    return torch.cat(outs, dim=1), *(t.grad for t in inputs)


class AttentionInputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor
    """Gradient of the output; empty without a backward."""


@dataclass(frozen=True)
class Attention:
    """Attention of `latents` queries over `keys` given keys and values, all of one width."""

    heads: int
    width: int
    keys: int = 100_000
    batch: int = 1
    latents: int = 128
    dtype: torch.dtype = torch.float32
    backward: bool = False
    transposed: bool = False
    """Laid out (B, N, H, D), as projections leave it, and not (B, H, N, D)."""
    quick: bool = False
    baselines: tuple[str, ...] = (SDPA,)
    threads: int | None = None

    def __str__(self) -> str:
        direction = "forward+backward" if self.backward else "forward"
        layout = "-transposed" if self.transposed else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{direction}-{dtype}-B{self.batch}-{self.heads}x{self.width}-L{self.latents}-N{self.keys}{layout}"

    @property
    def implementations(self) -> Mapping[str, Callable[[AttentionInputs], Sequence[Tensor]]]:
        direction = _forward_and_backward if self.backward else _forward
        return {name: direction(attend) for name, attend in ATTENTION.items() if self._fits(name)}

    def _fits(self, name: str) -> bool:
        """What stores the scores is left out where they alone take gigabytes."""
        return name not in ("naive", "reference") or self._scores() <= 2**28

    def _scores(self) -> int:
        return self.batch * self.heads * self.latents * self.keys

    def inputs(self, seed: int) -> AttentionInputs:
        random = torch.Generator().manual_seed(seed)

        def normal(length: int) -> Tensor:
            shape = (length, self.heads) if self.transposed else (self.heads, length)
            made = torch.randn(self.batch, *shape, self.width, generator=random).to(self.dtype).requires_grad_(self.backward)
            return made.transpose(1, 2) if self.transposed else made

        query, key, value = normal(self.latents), normal(self.keys), normal(self.keys)
        dout = torch.randn(query.shape if self.backward else 0, generator=random).to(self.dtype)
        return AttentionInputs(query, key, value, dout)

    def oracle(self, inputs: AttentionInputs) -> Mapping[str, Sequence[Tensor]]:
        return dict.fromkeys(self.implementations, exact(*inputs[:3], inputs.dout if self.backward else None))

    def small(self) -> Attention:
        return replace(self, keys=min(self.keys, 4096), batch=min(self.batch, 4))

    def refusal(self, implementation: str) -> str | None:
        sample = torch.empty(1, self.heads, 1, self.width, dtype=self.dtype)
        reasons = {row.impl: row.reason for row in cmab_kernels.explain("latent_attention", *3 * [sample]) if not row.usable}
        stored = 16 * self._scores() if implementation in ("naive", "reference") else 0
        return reasons.get(implementation) or lacking_memory(stored + 3 * 2**30)


def _forward(attend: Attend) -> Callable[[AttentionInputs], Sequence[Tensor]]:
    return lambda inputs: (attend(*inputs[:3]),)


def _forward_and_backward(attend: Attend) -> Callable[[AttentionInputs], Sequence[Tensor]]:
    def run(inputs: AttentionInputs) -> Sequence[Tensor]:
        out = attend(*inputs[:3])
        return out.detach(), *torch.autograd.grad(out, inputs[:3], inputs.dout)

    return run


class UpdateInputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Update:
    """One more key, after `keys` of which only the state was kept."""

    heads: int = 4
    width: int = 16
    keys: int = 100_000
    latents: int = 128
    dtype: torch.dtype = torch.float32
    quick: bool = True
    baselines: tuple[str, ...] = ("eager torch",)
    threads: int | None = None

    def __str__(self) -> str:
        return f"update-float32-{self.heads}x{self.width}-L{self.latents}-one-key-after-{self.keys}"

    @property
    def implementations(self) -> Mapping[str, Callable[[UpdateInputs], Sequence[Tensor]]]:
        return {
            "native": _update_by("native"),
            "reference": _update_by("reference"),
            "eager torch": eager_update,
            SDPA: lambda i: (F.scaled_dot_product_attention(i.query, i.key, i.value),),
        }

    def inputs(self, seed: int) -> UpdateInputs:
        query, key, value, _ = Attention(self.heads, self.width, self.keys + 1, latents=self.latents).inputs(seed)
        scores = query.double() @ key[:, :, :-1].double().mT * self.width**-0.5
        out = torch.softmax(scores, dim=-1) @ value[:, :, :-1].double()
        return UpdateInputs(query, key, value, out.float(), scores.logsumexp(-1))

    def oracle(self, inputs: UpdateInputs) -> Mapping[str, Sequence[Tensor]]:
        return dict.fromkeys(self.implementations, exact(*inputs[:3]))

    def small(self) -> Update:
        return replace(self, keys=4096)

    def refusal(self, implementation: str) -> str | None:
        return Attention(self.heads, self.width).refusal(implementation)


def _update_by(impl: str) -> Callable[[UpdateInputs], Sequence[Tensor]]:
    def update(i: UpdateInputs) -> Sequence[Tensor]:
        return (attention_state(i.query, i.key[:, :, -1:], i.value[:, :, -1:], state=AttentionState(i.out, i.lse), impl=impl).out,)

    return update


def eager_update(i: UpdateInputs) -> Sequence[Tensor]:
    """The update as one writes it in torch: merge the new key's score into the sum."""
    score = (i.query @ i.key[:, :, -1:].mT).double() * i.query.shape[-1] ** -0.5
    lse = torch.logaddexp(i.lse.unsqueeze(-1), score)
    return (i.out * (i.lse.unsqueeze(-1) - lse).exp().float() + (score - lse).exp().float() @ i.value[:, :, -1:],)


class ModuleInputs(NamedTuple):
    latents: Tensor
    context: Tensor


@dataclass(frozen=True)
class Module:
    """The whole of nn.MultiheadAttention, projections and all, of `latents` over a context."""

    heads: int = 4
    width: int = 64
    keys: int = 100_000
    latents: int = 128
    dtype: torch.dtype = torch.float32
    quick: bool = True
    baselines: tuple[str, ...] = ("nn.MultiheadAttention",)
    threads: int | None = None

    def __str__(self) -> str:
        return f"module-float32-{self.heads}-heads-C{self.width}-L{self.latents}-N{self.keys}"

    @property
    def implementations(self) -> Mapping[str, Callable[[ModuleInputs], Sequence[Tensor]]]:
        return {"cmab_kernels.nn.MultiheadAttention": self._run_ours, "nn.MultiheadAttention": self._run_torch}

    @cached_property
    def _theirs(self) -> nn.MultiheadAttention:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.MultiheadAttention(self.width, self.heads, batch_first=True)

    @cached_property
    def _ours(self) -> MultiheadAttention:
        ours = MultiheadAttention(self.width, self.heads, batch_first=True)
        ours.load_state_dict(self._theirs.state_dict())
        return ours

    def _run_torch(self, inputs: ModuleInputs) -> Sequence[Tensor]:
        return _attend_without_gradient(self._theirs, inputs)

    def _run_ours(self, inputs: ModuleInputs) -> Sequence[Tensor]:
        return _attend_without_gradient(self._ours, inputs)

    def inputs(self, seed: int) -> ModuleInputs:
        random = torch.Generator().manual_seed(seed)
        latents, context = (torch.randn(1, length, self.width, generator=random) for length in (self.latents, self.keys))
        return ModuleInputs(latents, context)

    def oracle(self, inputs: ModuleInputs) -> Mapping[str, Sequence[Tensor]]:
        """The definition, with the parameters of the module."""
        module = deepcopy(self._theirs).double()
        parts = zip(module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), (inputs.latents, *2 * [inputs.context]), strict=True)
        heads = [F.linear(x.double(), w, b).unflatten(-1, (self.heads, -1)).transpose(1, 2).detach() for w, b, x in parts]
        (out,) = exact(*heads)
        return dict.fromkeys(self.implementations, (module.out_proj(out.transpose(1, 2).flatten(-2)).detach(),))

    def small(self) -> Module:
        return replace(self, keys=4096)

    def refusal(self, implementation: str) -> str | None:
        return lacking_memory(20 * self.width * self.keys)


@torch.no_grad()
def _attend_without_gradient(module: nn.Module, inputs: ModuleInputs) -> Sequence[Tensor]:
    return (module(inputs.latents, inputs.context, inputs.context, need_weights=False)[0],)


WIDTHS = ((8, 8), (4, 16), (1, 64))
"""(heads, width) of the model width 64."""

CASES: list[Case] = [
    *(Attention(heads, width, quick=True) for heads, width in WIDTHS),
    *(Attention(heads, width, transposed=True, quick=width == 16) for heads, width in WIDTHS),
    *(Attention(heads, width, dtype=torch.bfloat16, quick=width > 8) for heads, width in WIDTHS),
    Attention(4, 16, dtype=torch.bfloat16, transposed=True),
    *(Attention(heads, width, backward=True, quick=True) for heads, width in WIDTHS),
    Attention(4, 16, backward=True, transposed=True),
    *(Attention(heads, width, backward=True, dtype=torch.bfloat16) for heads, width in WIDTHS),
    Attention(4, 16, keys=197, batch=100, backward=True, quick=True),
    Attention(4, 16, keys=197, batch=100, backward=True, transposed=True),
    Attention(4, 16, keys=197, batch=100),
    Attention(4, 16, keys=1_000_000, quick=True),
    Attention(4, 16, keys=1_000_000, dtype=torch.bfloat16),
    Attention(4, 16, keys=1_000_000, backward=True, quick=True),
    Update(),
    Module(),
]

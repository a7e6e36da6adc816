"""Family A, attention of few queries over many keys: what is measured, beside whom, and what is right."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cmab_kernels import latent_attention

from ..floors import Work, attention_work
from ..harness import COMPILED, Case, device, generator, lacking_memory, normal
from .operators import Implementation, OperatorCase, direction, kernels, passes, refused, sample

SDPA = "scaled_dot_product_attention"
NAIVE = "naive"
FLEX = "flex_attention" + COMPILED
NAIVE_COMPILED = NAIVE + COMPILED
FLASH = "flash-attention"
BACKENDS = {"cpu": ("MATH",), "cuda": ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")}
"""Of torch's attention, by name; on a CPU it takes its flash kernel by itself."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def naive_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula as one writes it down: the scores are stored, and so are their exponentials."""
    return torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, dim=-1) @ value


def by_backend(name: str) -> Attend:
    """torch's attention, held to one of `SDPBackend`."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, name)):
            return F.scaled_dot_product_attention(query, key, value)

    return attend


@cache
def _compiled(name: str) -> Attend:
    """Compiled in this process: a worker of its own would outlive the process that memory is measured in."""
    from torch._inductor import config
    from torch.nn.attention.flex_attention import flex_attention

    config.compile_threads = 1
    return torch.compile(flex_attention if name == FLEX else naive_attention, dynamic=False)


def flash_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from flash_attn import flash_attn_func

    return flash_attn_func(*(part.transpose(1, 2) for part in (query, key, value))).transpose(1, 2)


ATTENTION: dict[str, Attend] = {
    **{name: partial(latent_attention, impl=name) for name in ("native", "triton", "reference")},
    SDPA: F.scaled_dot_product_attention,
    NAIVE: naive_attention,
    **{f"{SDPA}, {name.removesuffix('_ATTENTION').lower()}": by_backend(name) for name in BACKENDS["cuda"]},
    FLEX: lambda q, k, v: _compiled(FLEX)(q, k, v),
    NAIVE_COMPILED: lambda q, k, v: _compiled(NAIVE_COMPILED)(q, k, v),
    FLASH: flash_attention,
}


def _names(every_peer: bool) -> list[str]:
    """Those for the device that is measured."""
    backends = [f"{SDPA}, {name.removesuffix('_ATTENTION').lower()}" for name in BACKENDS[device()]]
    others = [*backends, NAIVE_COMPILED, FLEX, *([FLASH] if device() == "cuda" else [])] if every_peer else []
    return [*kernels("latent_attention"), SDPA, NAIVE, *others]


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
class Attention(OperatorCase):
    """Attention of `latents` queries over `keys` given keys and values, all of one width."""

    heads: int = 4
    width: int = 16
    keys: int = 100_000
    batch: int = 1
    latents: int = 128
    backward: bool = False
    transposed: bool = False
    """Laid out (B, N, H, D), as projections leave it, and not (B, H, N, D)."""
    every_peer: bool = False
    """Those too that take seconds to compile."""
    baselines: tuple[str, ...] = (SDPA,)
    threads: int | None = field(default=None, kw_only=True)

    scan = "latent_attention"
    counted: ClassVar[Mapping[str, str]] = {FLEX: SDPA, NAIVE_COMPILED: NAIVE}
    """What is compiled -> what does the same products."""

    def __str__(self) -> str:
        way = "forward+backward" if self.backward else "forward"
        layout = "-transposed" if self.transposed else ""
        return f"{way}-{self._dtype}-B{self.batch}-{self.heads}x{self.width}-L{self.latents}-N{self.keys}{layout}{self._threads}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        sizes = {"B": self.batch, "H": self.heads, "L": self.latents, "N": self.keys, "D": self.width}
        return {"pass": direction(self.backward), **sizes, "layout": "(B, N, H, D)" if self.transposed else "(B, H, N, D)"}

    @property
    def work(self) -> Work:
        forward, backward = (
            attention_work(self._scores(), self._scores() // self.latents, self.width, self.width, self._dtype, pass_, device())
            for pass_ in (False, True)
        )
        return forward + backward if self.backward else forward

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        return {name: passes(ATTENTION[name], 3, self.backward) for name in _names(self.every_peer) if self._fits(name)}

    def _fits(self, name: str) -> bool:
        """What stores the scores is left out where they alone take gigabytes."""
        return not _stores_scores(name) or self._scores() <= 2**28

    def _scores(self) -> int:
        return self.batch * self.heads * self.latents * self.keys

    def inputs(self, seed: int) -> AttentionInputs:
        random = generator(seed)

        def rows(length: int) -> Tensor:
            shape = (length, self.heads) if self.transposed else (self.heads, length)
            made = normal(random, self.batch, *shape, self.width).to(self.dtype).requires_grad_(self.backward)
            return made.transpose(1, 2) if self.transposed else made

        query, key, value = rows(self.latents), rows(self.keys), rows(self.keys)
        dout = normal(random, *(query.shape if self.backward else (0,))).to(self.dtype)
        return AttentionInputs(query, key, value, dout)

    def oracle(self, inputs: AttentionInputs) -> Mapping[str, Sequence[Tensor]]:
        return dict.fromkeys(self.implementations, exact(*inputs[:3], inputs.dout if self.backward else None))

    def small(self) -> Attention:
        return replace(self, keys=min(self.keys, 4096), batch=min(self.batch, 4))

    def refusal(self, implementation: str) -> str | None:
        if implementation == FLASH and importlib.util.find_spec("flash_attn") is None:
            return "not installed: pip install flash-attn"
        if implementation == FLEX and self.backward and device() == "cpu":
            return "torch has no backward of it on a CPU"
        if implementation == FLEX and self.dtype == torch.float64:
            return "torch has no float64 of it"
        stored = 16 * self._scores() if _stores_scores(implementation) else 0
        rows = sample(1, self.heads, 1, self.width, dtype=self.dtype)
        return refused("latent_attention", implementation, *3 * [rows]) or lacking_memory(stored + 3 * 2**30)


def _stores_scores(name: str) -> bool:
    return name in (NAIVE, NAIVE_COMPILED, "reference", f"{SDPA}, math")


WIDTHS = ((8, 8), (4, 16), (1, 64))
"""(heads, width) of the model width 64."""
NUMBERS = (1000, 10_000, 100_000, 1_000_000)

CASES: list[Case] = [
    *(Attention(keys=keys, quick=True, every_peer=keys == 100_000) for keys in NUMBERS),
    *(Attention(keys=keys, backward=True, quick=keys == 100_000, every_peer=keys == 100_000) for keys in NUMBERS),
    *(Attention(heads, width, backward=backward, quick=True) for heads, width in WIDTHS if heads != 4 for backward in (False, True)),
    *(Attention(heads, width, transposed=True) for heads, width in WIDTHS),
    *(Attention(heads, width, dtype=torch.bfloat16, quick=True) for heads, width in WIDTHS if heads != 8),
    Attention(8, 8, dtype=torch.bfloat16),
    *(Attention(heads, width, backward=True, dtype=torch.bfloat16) for heads, width in WIDTHS),
    *(Attention(dtype=dtype) for dtype in (torch.float64, torch.float16)),
    *(Attention(heads=heads) for heads in (1, 2, 8)),
    *(Attention(width=width) for width in (8, 32, 64, 128)),
    *(Attention(latents=latents, backward=backward) for latents in (8, 32, 512) for backward in (False, True)),
    *(Attention(threads=1, backward=backward) for backward in (False, True)),
    *(Attention(keys=197, batch=batch, backward=True, quick=batch == 100) for batch in (1, 10, 100)),
    *(Attention(keys=197, batch=batch) for batch in (1, 10, 100)),
    Attention(keys=197, batch=100, backward=True, transposed=True),
    Attention(keys=1_000_000, dtype=torch.bfloat16),
    Attention(backward=True, transposed=True),
    Attention(dtype=torch.bfloat16, transposed=True),
]

"""Family C as a layer: Intention and sigma-Intention beside their peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels import intention, sigma_intention

from ..floors import Work, attention_work, ridge_work, rows_work, solve_work
from ..harness import device, generator, lacking_memory, normal
from .attention import SDPA
from .intention_peers import ALPHA, inverse_of, regression, regularised, sigma
from .operators import EAGER, Implementation, OperatorCase, direction, kernels, passes, refused, sample

CHUNKED = "torch, in chunks"


class LayerInputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor
    """Gradient of the output; empty without a backward."""


def chunked(inputs: LayerInputs) -> Sequence[Tensor]:
    return regression(*inputs)


@dataclass(frozen=True)
class Layer(OperatorCase):
    """As many queries as keys. Short ones stand beside attention, which computes something else; long ones beside torch's best form."""

    length: int
    heads: int = 1
    width: int = 64
    batch: int = 1
    backward: bool = False

    scan = "intention"
    others = (SDPA,)

    def __str__(self) -> str:
        way = "forward+backward" if self.backward else "forward"
        batch = f"-B{self.batch}" if self.batch > 1 else ""
        return f"intention-{way}-{self._dtype}-{self.heads}x{self.width}-N{self.length}{batch}{self._threads}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {"pass": direction(self.backward), "B": self.batch, "H": self.heads, "N": self.length, "D": self.width}

    @property
    def work(self) -> Work:
        return regression_work(self.batch * self.heads, self.length, self.width, self._dtype, self.backward)

    @property
    def _beside_attention(self) -> bool:
        return self.length <= 16_384

    @property
    def baselines(self) -> tuple[str, ...]:
        return (SDPA,) if self._beside_attention else (CHUNKED,)

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        run = partial(passes, operands=3, backward=self.backward)
        attention = {SDPA: run(F.scaled_dot_product_attention)} if self._beside_attention else {}
        ours = {name: run(partial(intention, alpha=ALPHA, impl=name)) for name in self._kernels}
        return {**ours, CHUNKED: chunked, **attention}

    @property
    def _kernels(self) -> tuple[str, ...]:
        """The definition copies what it reads: without it where copies take gigabytes."""
        return tuple(name for name in kernels("intention") if name != "reference" or self.length < 1_000_000)

    def inputs(self, seed: int) -> LayerInputs:
        random = generator(seed)
        shape = (self.batch, self.heads, self.length, self.width)
        query, key, value = (normal(random, *shape).to(self.dtype).requires_grad_(self.backward) for _ in range(3))
        return LayerInputs(query, key, value, normal(random, *(shape if self.backward else (0,))).to(self.dtype))

    def oracle(self, inputs: LayerInputs) -> Mapping[str, Sequence[Tensor]]:
        """By an inverse in float64, and autograd; of long ones, where that takes gigabytes, torch's form in float64."""
        if not self._beside_attention:
            return dict.fromkeys(self.implementations, chunked(LayerInputs(*(part.detach().double() for part in inputs))))
        solved = exactly(lambda q, k, v: q @ (_inverse(k) @ (k.mT @ v)), inputs)
        attended = exactly(F.scaled_dot_product_attention, inputs)
        return {name: attended if name == SDPA else solved for name in self.implementations}

    def small(self) -> Layer:
        return replace(self, length=256)

    def refusal(self, implementation: str) -> str | None:
        held = 4 * self.batch * self.heads * self.length * self.width * (24 if self.backward else 12)  # in float64 too
        key = sample(1, self.heads, 1, self.width, dtype=self.dtype)
        return refused("intention", implementation, key, key, key) or lacking_memory(held + 2**30)


def exactly(layer: Callable[..., Tensor], inputs: LayerInputs) -> Sequence[Tensor]:
    """A layer in float64; where the inputs require it, with its gradients."""
    backward = inputs.query.requires_grad
    *operands, dout = (part.detach().double().requires_grad_(part.requires_grad) for part in inputs)
    out = layer(*operands)
    return (out.detach(), *torch.autograd.grad(out, operands, dout)) if backward else (out,)


def _inverse(key: Tensor) -> Tensor:
    return inverse_of(regularised(key.mT @ key))


def regression_work(heads: int, length: int, width: int, dtype: str, backward: bool) -> Work:
    """Sums, solution, rows, of as many queries as keys; backward the gradients of each, by the same factor and a product of solutions."""
    rows = heads * length
    forward = ridge_work(rows, width, width, dtype) + solve_work(heads, width, width, dtype) + rows_work(rows, width, width, dtype)
    if not backward:
        return forward
    again = Work(0.0, heads * 4 * width**3, 0.0, dtype)
    return forward + again + ridge_work(rows, width, width, dtype, backward=True) + rows_work(rows, width, width, dtype, backward=True)


@dataclass(frozen=True)
class SigmaLayer(OperatorCase):
    """Some queries, through the inverse of a ridge regression, over many keys: attention then, on logits of the usual size."""

    length: int = 10_000
    queries: int = 128
    heads: int = 1
    width: int = 64
    batch: int = 1
    backward: bool = False

    scan = "sigma_intention"
    baselines = (EAGER,)
    others = (SDPA,)

    def __str__(self) -> str:
        way = "forward+backward" if self.backward else "forward"
        return f"sigma-intention-{way}-{self._dtype}-B{self.batch}-{self.heads}x{self.width}-L{self.queries}-N{self.length}{self._threads}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        sizes = {"B": self.batch, "H": self.heads, "L": self.queries, "N": self.length, "D": self.width}
        return {"pass": direction(self.backward), **sizes}

    @property
    def _scale(self) -> float:
        """K'K is about N I, which queries are divided by."""
        return self.length * self.width**-0.5

    @property
    def work(self) -> Work:
        """Attention, and the sums K'K with a solution for each query. Backward of the latter alone: as of queries times a solution."""
        heads = self.batch * self.heads
        scores = heads * self.queries * self.length
        attend = partial(attention_work, scores, heads * self.length, self.width, self.width, self._dtype, device=device())
        inverse = ridge_work(heads * self.length, self.width, 0, self._dtype) + solve_work(heads, self.width, self.queries, self._dtype)
        forward = attend() + replace(inverse, bytes=0.0)  # the keys are counted with attention
        return forward + attend(backward=True) if self.backward else forward

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        run = partial(passes, operands=3, backward=self.backward)
        known = (name for name in kernels(self.scan) if name != "reference" or self.length < 100_000)  # it stores the scores
        ours = {name: run(partial(sigma_intention, alpha=ALPHA, scale=self._scale, impl=name)) for name in known}
        return {**ours, EAGER: run(partial(sigma, scale=self._scale)), SDPA: run(F.scaled_dot_product_attention)}

    def inputs(self, seed: int) -> LayerInputs:
        random = generator(seed)
        lengths = (self.queries, self.length, self.length)
        parts = [normal(random, self.batch, self.heads, length, self.width).to(self.dtype) for length in lengths]
        dout = normal(random, *(parts[0].shape if self.backward else (0,))).to(self.dtype)
        return LayerInputs(*(part.requires_grad_(self.backward) for part in parts), dout)

    def oracle(self, inputs: LayerInputs) -> Mapping[str, Sequence[Tensor]]:
        """By an inverse in float64, and autograd."""
        attended = exactly(F.scaled_dot_product_attention, inputs)
        solved = exactly(lambda q, k, v: (self._scale * (q @ _inverse(k)) @ k.mT).softmax(-1) @ v, inputs)
        return {name: attended if name == SDPA else solved for name in self.implementations}

    def small(self) -> SigmaLayer:
        return replace(self, length=256)

    def refusal(self, implementation: str) -> str | None:
        scores = self.batch * self.heads * self.queries * self.length
        key = sample(1, self.heads, 1, self.width, dtype=self.dtype)
        return refused(self.scan, implementation, key, key, key) or lacking_memory(40 * scores + 2**30)

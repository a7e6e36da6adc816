"""Family B over whole windows: Nyström attention and its pseudo-inverse beside their peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels import iterative_pinv, nystrom_attention

from ..floors import Work, attention_work, nystrom_work, pinv_work
from ..harness import generator, lacking_memory, normal
from .attention import SDPA, exact
from .nystrom_eager import ITERATIONS, eager_attention, eager_pinv
from .operators import EAGER, PACKAGE, Implementation, OperatorCase, direction, identity, kernels, passes, refused, sample, wide


class LayerInputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    together: Tensor
    """The three as the package takes them: (B, N, 3 H D)."""
    dout: Tensor
    """Gradient of the output; empty without a backward."""


@dataclass(frozen=True)
class NystromLayer(OperatorCase):
    """As many queries as keys, beside attention, which computes something else, and beside the package, whose heads share their norms."""

    length: int = 4096
    heads: int = 4
    width: int = 64
    landmarks: int = 64
    batch: int = 1
    backward: bool = False
    threads: int | None = field(default=None, kw_only=True)

    scan = "nystrom_attention"
    baselines = (PACKAGE, EAGER)
    others = (SDPA,)

    def __str__(self) -> str:
        way = "forward+backward" if self.backward else "forward"
        batch = f"-B{self.batch}" if self.batch > 1 else ""
        return f"nystrom-{way}-{self._dtype}-{self.heads}x{self.width}-N{self.length}-m{self.landmarks}{batch}{self._threads}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        sizes = {"B": self.batch, "H": self.heads, "N": self.length, "D": self.width, "m": self.landmarks}
        return {"pass": direction(self.backward), **sizes}

    @property
    def work(self) -> Work:
        """Backward, that of both attentions: of the landmarks to all keys, and of all queries to the landmarks."""
        heads, sizes = self.batch * self.heads, (self.width, self.width)
        forward = nystrom_work(heads, self.length, self.landmarks, *sizes, ITERATIONS, self._dtype)
        half = attention_work(heads * self.length * self.landmarks, heads * self.length, *sizes, self._dtype, backward=True)
        return forward + half + half if self.backward else forward

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        ours = {name: self._by(partial(nystrom_attention, num_landmarks=self.landmarks, impl=name)) for name in kernels(self.scan)}
        short = self.length <= (4096 if self.backward else 16_384)
        attention = {SDPA: self._by(F.scaled_dot_product_attention)} if short else {}
        package = {PACKAGE: self._packaged} if self.dtype == wide(self.dtype) else {}  # half precision does not resolve its pseudo-inverse
        return {**ours, EAGER: self._by(partial(eager_attention, number=self.landmarks)), **package, **attention}

    def _by(self, attend: Callable[..., Tensor]) -> Implementation:
        run = passes(attend, 3, self.backward)
        return lambda inputs: run((*inputs[:3], inputs.dout))

    def _packaged(self, inputs: LayerInputs) -> Sequence[Tensor]:
        dout = inputs.dout.transpose(1, 2).flatten(-2) if self.backward else inputs.dout
        return passes(self._module, 1, self.backward)((inputs.together, dout))

    @cached_property
    def _module(self) -> Callable[[Tensor], Tensor]:
        """The package's, with nothing before and after its attention."""
        from nystrom_attention import NystromAttention

        module = NystromAttention(self.heads * self.width, self.width, self.heads, self.landmarks, ITERATIONS, residual=False)
        for name in ("to_qkv", "to_out"):
            delattr(module, name)
            setattr(module, name, _unchanged)
        return module.forward  # torch's counter of FLOPs cannot follow modules under autograd.grad

    def inputs(self, seed: int) -> LayerInputs:
        random = generator(seed)
        shape = (self.batch, self.heads, self.length, self.width)
        parts = [normal(random, *shape).to(self.dtype) for _ in range(3)]
        return self._prepared(parts, normal(random, *(shape if self.backward else (0,))).to(self.dtype))

    def _prepared(self, parts: Sequence[Tensor], dout: Tensor) -> LayerInputs:
        together = torch.cat([part.transpose(1, 2).flatten(-2) for part in parts], dim=-1)
        return LayerInputs(*(part.requires_grad_(self.backward) for part in (*parts, together)), dout)

    def oracle(self, inputs: LayerInputs) -> Mapping[str, Sequence[Tensor]]:
        """The definition in float64; for attention and for the package their own."""
        doubles = self._prepared([part.detach().double() for part in inputs[:3]], inputs.dout.double())
        results = dict.fromkeys(self.implementations, self.implementations["reference"](doubles))
        if SDPA in results:
            results[SDPA] = exact(*inputs[:3], inputs.dout if self.backward else None)
        if PACKAGE in results:
            results[PACKAGE] = () if self.refusal(PACKAGE) else self._packaged(doubles)
        return results

    def small(self) -> NystromLayer:
        return replace(self, length=4 * self.landmarks)

    def refusal(self, implementation: str) -> str | None:
        near = sample(self.heads, self.landmarks, self.width, dtype=self.dtype)
        rows = self.batch * self.heads * self.length
        return refused(self.scan, implementation, near) or lacking_memory(8 * rows * (8 * self.width + 12 * self.landmarks) + 2**30)


def _unchanged(tokens: Tensor) -> Tensor:
    return tokens


@dataclass(frozen=True)
class Pinv(OperatorCase):
    """The iterated pseudo-inverse of softmaxes over random landmarks."""

    landmarks: int = 16
    batch: int = 1
    backward: bool = False

    scan = "iterative_pinv"

    def __str__(self) -> str:
        way = "+backward" if self.backward else ""
        return f"iterative-pinv{way}-{self._dtype}-m{self.landmarks}-B{self.batch}{self._threads}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {"pass": direction(self.backward), "B": self.batch, "m": self.landmarks}

    @property
    def work(self) -> Work | None:
        """Forward alone: what a backward must recompute is a choice."""
        return None if self.backward else pinv_work(self.batch, self.landmarks, ITERATIONS, self._dtype)

    @property
    def baselines(self) -> tuple[str, ...]:
        return (EAGER, PACKAGE)

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        run = partial(passes, operands=1, backward=self.backward)
        ours = {name: run(partial(iterative_pinv, iterations=ITERATIONS, impl=name)) for name in kernels(self.scan)}
        return {**ours, EAGER: run(self._eager), PACKAGE: run(_packaged_pinv)}

    def _eager(self, matrix: Tensor) -> Tensor:
        return eager_pinv(matrix[0], ITERATIONS)[None] if self.batch == 1 else eager_pinv(matrix, ITERATIONS)

    def inputs(self, seed: int) -> tuple[Tensor, ...]:
        """Matrices; with a backward the gradient of their inverses, and rows of different sums: equal ones have no greatest to go to."""
        random = generator(seed)
        matrix = (2 * normal(random, self.batch, self.landmarks, self.landmarks)).softmax(-1).to(self.dtype)
        if not self.backward:
            return (matrix,)
        dinverse = normal(random, *matrix.shape).to(self.dtype)
        sums = torch.linspace(0.5, 1, self.batch * self.landmarks, device=matrix.device).view(self.batch, self.landmarks, 1)
        return (matrix * sums).requires_grad_(), dinverse

    def oracle(self, inputs: Sequence[Tensor]) -> Mapping[str, Sequence[Tensor]]:
        """Each with its own norms, or all with the largest."""
        doubles = tuple(part.detach().double().requires_grad_(part.requires_grad) for part in inputs)
        return {name: passes(partial(iterated, together=name == PACKAGE), 1, self.backward)(doubles) for name in self.implementations}

    def small(self) -> Pinv:
        return self

    def refusal(self, implementation: str) -> str | None:
        return refused(self.scan, implementation, sample(1, self.landmarks, self.landmarks, dtype=self.dtype))


def _packaged_pinv(matrix: Tensor) -> Tensor:
    from nystrom_attention.nystrom_attention import moore_penrose_iter_pinv

    return moore_penrose_iter_pinv(matrix, ITERATIONS).reshape(matrix.shape)


def iterated(matrix: Tensor, together: bool = False) -> Tensor:
    """Razavi's iteration, multiplied out; `together` from the norms of all matrices at once."""
    one, size = identity(matrix), matrix.abs()
    columns, rows = (size.sum(dim).amax(-1) for dim in (-2, -1))
    norms = (columns.max() * rows.max()).expand_as(rows) if together else columns * rows
    z = matrix.mT / norms[..., None, None]
    for _ in range(ITERATIONS):
        az = matrix @ z
        z = z @ (13 * one - 15 * az + 7 * az @ az - az @ az @ az) / 4
    return z

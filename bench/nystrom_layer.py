"""Family B over whole windows: Nyström attention and its pseudo-inverse beside their peers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import cmab_kernels
from cmab_kernels import iterative_pinv, nystrom_attention

from .attention import SDPA, exact
from .nystrom_eager import eager_pinv

ITERATIONS = 6

EAGER = "eager torch"
PACKAGE = "nystrom-attention 0.0.14"
CONTINUAL_INFERENCE = "continual-inference 1.2.4"
MODULES = {PACKAGE: "nystrom_attention", CONTINUAL_INFERENCE: "continual"}
"""Package -> what it is imported as."""


def normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random)


def refused(operator: str, implementation: str, *tensors: Tensor) -> str | None:
    """Why one of ours cannot run such tensors, or a package is not there."""
    if implementation in MODULES and importlib.util.find_spec(MODULES[implementation]) is None:
        return f"not installed: pip install {implementation.split(' ')[0]}"
    return {row.impl: row.reason for row in cmab_kernels.explain(operator, *tensors) if not row.usable}.get(implementation.split(",")[0])


class LayerInputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    together: Tensor
    """The three as the package takes them: (1, N, 3 H D)."""
    dout: Tensor
    """Gradient of the output; empty without a backward."""


@dataclass(frozen=True)
class NystromLayer:
    """As many queries as keys, beside attention, which computes something else, and beside the package, whose heads share their norms."""

    length: int = 4096
    heads: int = 4
    width: int = 64
    landmarks: int = 64
    backward: bool = False
    dtype: torch.dtype = torch.float32
    threads: int | None = None
    quick: bool = False
    baselines: tuple[str, ...] = (PACKAGE,)

    def __str__(self) -> str:
        direction = "forward+backward" if self.backward else "forward"
        return f"nystrom-{direction}-float32-{self.heads}x{self.width}-N{self.length}-m{self.landmarks}"

    @property
    def implementations(self) -> Mapping[str, Callable[[LayerInputs], Sequence[Tensor]]]:
        ours = {name: self._by(partial(nystrom_attention, num_landmarks=self.landmarks, impl=name)) for name in ("native", "reference")}
        return {**ours, SDPA: self._by(F.scaled_dot_product_attention), PACKAGE: self._packaged}

    def _by(self, attend: Callable[..., Tensor]) -> Callable[[LayerInputs], Sequence[Tensor]]:
        return lambda inputs: self._with_gradients(attend(*inputs[:3]), inputs[:3], inputs.dout)

    def _packaged(self, inputs: LayerInputs) -> Sequence[Tensor]:
        dout = inputs.dout.transpose(1, 2).flatten(-2) if self.backward else inputs.dout
        return self._with_gradients(self._module(inputs.together), (inputs.together,), dout)

    def _with_gradients(self, out: Tensor, inputs: Sequence[Tensor], dout: Tensor) -> Sequence[Tensor]:
        return (out.detach(), *torch.autograd.grad(out, inputs, dout)) if self.backward else (out,)

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
        random = torch.Generator().manual_seed(seed)
        parts = [normal(random, 1, self.heads, self.length, self.width) for _ in range(3)]
        return self._prepared(parts, normal(random, *(parts[0].shape if self.backward else (0,))))

    def _prepared(self, parts: Sequence[Tensor], dout: Tensor) -> LayerInputs:
        together = torch.cat([part.transpose(1, 2).flatten(-2) for part in parts], dim=-1)
        return LayerInputs(*(part.requires_grad_(self.backward) for part in (*parts, together)), dout)

    def oracle(self, inputs: LayerInputs) -> Mapping[str, Sequence[Tensor]]:
        doubles = self._prepared([part.detach().double() for part in inputs[:3]], inputs.dout.double())
        ours = self.implementations["reference"](doubles)
        results = {"native": ours, "reference": ours, SDPA: exact(*inputs[:3], inputs.dout if self.backward else None)}
        return results | ({} if self.refusal(PACKAGE) else {PACKAGE: self._packaged(doubles)})

    def small(self) -> NystromLayer:
        return replace(self, length=4 * self.landmarks)

    def refusal(self, implementation: str) -> str | None:
        return refused("nystrom_attention", implementation, torch.empty(self.heads, self.landmarks, self.width))


def _unchanged(tokens: Tensor) -> Tensor:
    return tokens


class Matrices(NamedTuple):
    matrix: Tensor


@dataclass(frozen=True)
class Pinv:
    """The iterated pseudo-inverse of softmaxes over random landmarks."""

    landmarks: int = 16
    batch: int = 1
    dtype: torch.dtype = torch.float32
    threads: int | None = 1
    quick: bool = False

    def __str__(self) -> str:
        return f"iterative-pinv-float32-m{self.landmarks}-B{self.batch}"

    @property
    def baselines(self) -> tuple[str, ...]:
        return (EAGER, PACKAGE)

    @property
    def implementations(self) -> Mapping[str, Callable[[Matrices], Sequence[Tensor]]]:
        return {
            "native": lambda i: (iterative_pinv(i.matrix, ITERATIONS, impl="native"),),
            "reference": lambda i: (iterative_pinv(i.matrix, ITERATIONS, impl="reference"),),
            EAGER: lambda i: (eager_pinv(i.matrix[0], ITERATIONS)[None] if self.batch == 1 else eager_pinv(i.matrix, ITERATIONS),),
            PACKAGE: self._package,
        }

    @staticmethod
    def _package(inputs: Matrices) -> Sequence[Tensor]:
        from nystrom_attention.nystrom_attention import moore_penrose_iter_pinv

        return (moore_penrose_iter_pinv(inputs.matrix, ITERATIONS).reshape(inputs.matrix.shape),)

    def inputs(self, seed: int) -> Matrices:
        random = torch.Generator().manual_seed(seed)
        return Matrices((2 * normal(random, self.batch, self.landmarks, self.landmarks)).softmax(-1))

    def oracle(self, inputs: Matrices) -> Mapping[str, Sequence[Tensor]]:
        """Each with its own norms, or all with the largest."""
        matrix = inputs.matrix.double()
        own = matrix.abs().sum(-2).amax(-1) * matrix.abs().sum(-1).amax(-1)
        return {name: (iterated(matrix, own.max() if name == PACKAGE else own),) for name in self.implementations}

    def small(self) -> Pinv:
        return self

    def refusal(self, implementation: str) -> str | None:
        return refused("iterative_pinv", implementation, torch.empty(1, self.landmarks, self.landmarks))


def iterated(matrix: Tensor, norms: Tensor) -> Tensor:
    """Razavi's iteration, multiplied out."""
    one = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    z = matrix.mT / norms[..., None, None]
    for _ in range(ITERATIONS):
        az = matrix @ z
        z = z @ (13 * one - 15 * az + 7 * az @ az - az @ az @ az) / 4
    return z

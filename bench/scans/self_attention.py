"""Modules with the weights of `torch.nn.MultiheadAttention`, projections and all, over tokens that attend to themselves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..floors import Work
from ..harness import device, generator, lacking_memory, normal
from .attention import exact
from .operators import EAGER, Implementation, OperatorCase, direction, missing

THEIRS = "nn.MultiheadAttention"

Exact = Callable[..., Sequence[Tensor]]
"""Heads of queries, keys and values in float64, and the gradient of the output or None -> the output, and the gradients of all three."""


class Tokens(NamedTuple):
    tokens: Tensor
    dout: Tensor
    """Gradient of the output; empty without a backward."""


@dataclass(frozen=True)
class SelfAttention(OperatorCase):
    """A module beside torch's own, which computes something else, and beside peers that compute the same."""

    length: int = 1024
    heads: int = 4
    features: int = 256
    batch: int = 1
    backward: bool = False

    others = (THEIRS,)
    longest: ClassVar[int] = 4096
    """Of tokens that exact attention is measured with."""

    def __str__(self) -> str:
        way = "forward+backward" if self.backward else "forward"
        name = self.scan.removeprefix("nn.")
        return f"{name}-{way}-{self._dtype}-B{self.batch}-{self.heads}-heads-C{self.features}-N{self.length}{self._threads}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {"pass": direction(self.backward), "B": self.batch, "H": self.heads, "N": self.length, "C": self.features}

    @property
    def work(self) -> Work | None:
        """The projections, and what is between them; backward each projection's two products more."""
        if self.backward:
            return None
        rows, weights = self.batch * self.length, 4 * self.features**2
        moved = (2 * rows * self.features + weights) * self.dtype.itemsize
        return replace(self._attention_work, bytes=0.0) + Work(0.0, 2 * rows * weights, moved, self._dtype)

    @property
    @abstractmethod
    def _attention_work(self) -> Work: ...

    @property
    def baselines(self) -> tuple[str, ...]:
        return (THEIRS,) if self.length <= self.longest else (EAGER,)

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        theirs = {THEIRS: self._by_theirs} if self.length <= self.longest else {}
        return {f"cmab_kernels.{self.scan}": self._by_ours, **self._peers, **theirs}

    @property
    @abstractmethod
    def _peers(self) -> Mapping[str, Implementation]: ...

    @abstractmethod
    def _module(self) -> nn.Module:
        """Ours, with any weights."""

    @abstractmethod
    def _exactly(self) -> Mapping[str, Exact]:
        """What each implementation but torch's computes between its projections."""

    @cached_property
    def weights(self) -> nn.MultiheadAttention:
        """Without biases but zero, which is how torch starts them."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.MultiheadAttention(self.features, self.heads, batch_first=True, device=device(), dtype=self.dtype)

    @cached_property
    def _ours(self) -> nn.Module:
        module = self._module()
        module.load_state_dict(self.weights.state_dict(), strict=False)
        return module

    def _by_ours(self, inputs: Tokens) -> Sequence[Tensor]:
        return self._run(inputs, lambda x: self._ours.forward(x, x, x, need_weights=False)[0], self._ours)

    def _by_theirs(self, inputs: Tokens) -> Sequence[Tensor]:
        return self._run(inputs, lambda x: self.weights.forward(x, x, x, need_weights=False)[0], self.weights)

    def _around(self, attend: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        """A function of heads (B, H, N, D), between the projections."""

        def whole(tokens: Tensor) -> Tensor:
            heads = self._heads(F.linear(tokens, self.weights.in_proj_weight, self.weights.in_proj_bias))
            return F.linear(_joined(attend(*heads)), self.weights.out_proj.weight, self.weights.out_proj.bias)

        return whole

    def _heads(self, packed: Tensor) -> Sequence[Tensor]:
        return packed.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    def _run(self, inputs: Tokens, attend: Callable[[Tensor], Tensor], module: nn.Module) -> Sequence[Tensor]:
        """The output and, with a backward, the gradients of the tokens and of what projects them."""
        with torch.set_grad_enabled(self.backward):
            out = attend(inputs.tokens)
        if not self.backward:
            return (out,)
        leaves = (inputs.tokens, module.in_proj_weight, module.out_proj.weight)
        return out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)

    def inputs(self, seed: int) -> Tokens:
        random = generator(seed)
        shape = (self.batch, self.length, self.features)
        tokens = normal(random, *shape).to(self.dtype).requires_grad_(self.backward)
        return Tokens(tokens, normal(random, *(shape if self.backward else (0,))).to(self.dtype))

    def oracle(self, inputs: Tokens) -> Mapping[str, Sequence[Tensor]]:
        expected = {**self._exactly(), THEIRS: exact}
        found = {attend: self._projected(inputs, attend) for attend in {expected[name] for name in self.implementations}}
        return {name: found[expected[name]] for name in self.implementations}

    def _projected(self, inputs: Tokens, attend: Exact) -> Sequence[Tensor]:
        """Around what is between them, the projections in float64 and, with a backward, their gradients."""
        tokens, enter, leave = (
            part.detach().double().requires_grad_(self.backward)
            for part in (inputs.tokens, self.weights.in_proj_weight, self.weights.out_proj.weight)
        )
        with torch.set_grad_enabled(self.backward):
            heads = self._heads(F.linear(tokens, enter))
        given = [head.detach() for head in heads]
        if not self.backward:
            (out,) = attend(*given, None)
            return (F.linear(_joined(out), leave),)
        dout = inputs.dout.double()
        out, *dheads = attend(*given, (dout @ leave.detach()).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        grads = torch.autograd.grad(heads, (tokens, enter), dheads)
        return F.linear(_joined(out), leave).detach(), *grads, dout.flatten(0, 1).mT @ _joined(out).flatten(0, 1)

    def small(self) -> SelfAttention:
        return replace(self, length=256)

    def refusal(self, implementation: str) -> str | None:
        return missing(implementation) or lacking_memory(100 * self.batch * self.length * self.features)


def _joined(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(-2)

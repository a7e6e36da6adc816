"""Family B as modules: in the place of torch's attention over whole windows, and of continual-inference's over streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cmab_kernels.nn import ContinualAttention, ContinualNystromAttention, NystromAttention
from cmab_kernels.nystrom.reference import segment_means

from ..floors import Work, nystrom_work, step_work
from ..harness import device, generator, normal
from .nystrom_eager import ITERATIONS, EagerNystrom, eager_attention
from .nystrom_layer import iterated
from .nystrom_step import StepCase, all_steps, banded
from .operators import CONTINUAL_INFERENCE, EAGER, PACKAGE, Implementation, missing
from .self_attention import Exact, SelfAttention

OURS = "cmab_kernels.nn.ContinualNystromAttention"
OURS_EXACT = "cmab_kernels.nn.ContinualAttention"


# ---- whole windows ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NystromModule(SelfAttention):
    """Beside the package's module too, whose heads share their norms."""

    landmarks: int = 64

    scan = "nn.NystromAttention"

    def __str__(self) -> str:
        return f"{super().__str__()}-m{self.landmarks}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {**super().sizes, "m": self.landmarks}

    @property
    def _attention_work(self) -> Work:
        width = self.features // self.heads
        return nystrom_work(self.batch * self.heads, self.length, self.landmarks, width, width, ITERATIONS, self._dtype)

    def _module(self) -> nn.Module:
        like: dict[str, Any] = {"device": device(), "dtype": self.dtype}
        return NystromAttention(self.features, self.heads, batch_first=True, num_landmarks=self.landmarks, **like)

    @property
    def _peers(self) -> Mapping[str, Implementation]:
        eager = self._around(partial(eager_attention, number=self.landmarks))
        return {
            EAGER: lambda inputs: self._run(inputs, eager, self.weights),
            PACKAGE: lambda inputs: self._run(inputs, self._package, self.weights),
        }

    @cached_property
    def _package(self) -> Callable[[Tensor], Tensor]:
        from nystrom_attention import NystromAttention

        width = self.features // self.heads
        module = NystromAttention(self.features, width, self.heads, self.landmarks, ITERATIONS, residual=False)
        for name, weight in (("to_qkv", self.weights.in_proj_weight), ("to_out", self.weights.out_proj.weight)):
            delattr(module, name)
            setattr(module, name, partial(_projected, weight=weight))
        return module.forward  # torch's counter of FLOPs cannot follow modules under autograd.grad

    def _exactly(self) -> Mapping[str, Exact]:
        ours = partial(_definition, landmarks=self.landmarks)
        names = (f"cmab_kernels.{self.scan}", EAGER)
        return dict.fromkeys(names, ours) | {PACKAGE: partial(_definition, landmarks=self.landmarks, together=True)}

    def small(self) -> NystromModule:
        return replace(self, length=4 * self.landmarks)


def _projected(tokens: Tensor, weight: Tensor) -> Tensor:
    return F.linear(tokens, weight)


def _definition(query: Tensor, key: Tensor, value: Tensor, dout: Tensor | None, landmarks: int, together: bool = False) -> Sequence[Tensor]:
    """With its gradients by autograd; the pseudo-inverse multiplied out."""
    operands = [part.requires_grad_(dout is not None) for part in (query, key, value)]
    query, key, value = operands
    scale = key.shape[-1] ** -0.5
    near, far = (segment_means(part, landmarks) for part in (query, key))
    inverse = iterated((scale * near @ far.mT).softmax(-1).flatten(0, 1), together).unflatten(0, key.shape[:2])
    out = (scale * query @ far.mT).softmax(-1) @ (inverse @ ((scale * near @ key.mT).softmax(-1) @ value))
    return (out,) if dout is None else (out.detach(), *torch.autograd.grad(out, operands, dout))


# ---- streams ---------------------------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """(B, n + t, C): the first window, and what comes after it."""

    tokens: Tensor


class RowStreams(Rows):
    calls: dict[str, Callable[[], Sequence[Tensor]]]


@dataclass(frozen=True)
class NystromModuleStep(StepCase):
    """Projections and all. Landmarks follow the window. Beside modules of exact attention, which compute something else."""

    heads: int = 4
    batch: int = 1
    landmarks: int = 16

    scan = "nn.ContinualNystromAttention"
    baselines = (CONTINUAL_INFERENCE,)
    others = (OURS_EXACT, CONTINUAL_INFERENCE)
    scheme = "continual single"

    def __str__(self) -> str:
        marks = f"-m{self.landmarks}" if OURS in self.names else ""
        size = f"{self.heads}-heads-C{self.features}-n{self.window}"
        return f"{self.scan.removeprefix('nn.')}-step-{self._dtype}-B{self.batch}-{size}{marks}{self._threads}"

    @property
    def features(self) -> int:
        return self.heads * self.width

    @property
    def sizes(self) -> Mapping[str, int | str]:
        marks = {"m": self.landmarks} if OURS in self.names else {}
        return {"B": self.batch, "H": self.heads, "n": self.window, "D": self.width, **marks}

    @property
    def work(self) -> Work:
        """The weights stay in a cache."""
        projections = Work(0.0, 2 * self.batch * 4 * self.features**2, 0.0, self._dtype)
        return step_work(self.scheme, self.batch * self.heads, self.window, self.landmarks, self.width, self._dtype) + projections

    @property
    def names(self) -> tuple[str, ...]:
        return (OURS, OURS_EXACT, EAGER, CONTINUAL_INFERENCE)

    @cached_property
    def weights(self) -> nn.MultiheadAttention:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.MultiheadAttention(self.features, self.heads, batch_first=True, device=device(), dtype=self.dtype)

    def inputs(self, seed: int) -> RowStreams:
        made = normal(generator(seed), self.batch, self.window + self.calls, self.features).to(self.dtype)
        streams = RowStreams(made)
        streams.calls = {name: self._stream(name, made) for name in self.names if self.refusal(name) is None}
        return streams

    @torch.no_grad()
    def _stream(self, name: str, tokens: Tensor) -> Callable[[], Sequence[Tensor]]:
        after = [(token.contiguous(),) for token in tokens[:, self.window :].unbind(1)]
        if name == EAGER:
            return all_steps(self._eager(tokens, self.weights.in_proj_weight, self.weights.out_proj.weight), after)
        module = self._module(name)
        module.load_state_dict(self.weights.state_dict(), strict=False)
        module.forward_steps(tokens[:, : self.window])
        return all_steps(module.forward_step, after)

    def _module(self, name: str) -> Any:
        like: dict[str, Any] = {"batch_first": True, "device": device(), "dtype": self.dtype, "sequence_len": self.window}
        if name == OURS:
            return ContinualNystromAttention(self.features, self.heads, num_landmarks=self.landmarks, **like)
        if name == OURS_EXACT:
            return ContinualAttention(self.features, self.heads, **like)
        from continual import SingleOutputMultiheadAttention

        return SingleOutputMultiheadAttention(self.features, self.heads, forward_returns_attn_mask=False, **like)

    def _eager(self, tokens: Tensor, enter: Tensor, leave: Tensor) -> Callable[[Tensor], Tensor]:
        """Each stream of each head a matrix of its own; one alone has no dimension for it, as torch is faster then."""
        shape = (-1, 1, self.width) if self.batch * self.heads > 1 else (1, self.width)
        first = self._heads(F.linear(tokens[:, : self.window], enter))
        stream = EagerNystrom(*first, self.width**-0.5, self.landmarks, None, ITERATIONS)

        def step(token: Tensor) -> Tensor:
            query, key, value = F.linear(token, enter).view(self.batch, 3, -1, 1, self.width).unbind(1)
            out = stream.step(*(part.reshape(shape) for part in (query, key, value)))
            return F.linear(out.view(self.batch, -1), leave)

        return step

    def _heads(self, packed: Tensor) -> list[Tensor]:
        """(B H, t, D) of (B, t, 3 C)."""
        parts = packed.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return [part.flatten(0, 1) for part in parts]

    @torch.no_grad()
    def oracle(self, inputs: RowStreams) -> Mapping[str, Sequence[Tensor]]:
        """With the projections in float64, the eager stream, which is the definition, and attention over each token's window."""
        tokens, enter, leave = (part.double() for part in (inputs.tokens, self.weights.in_proj_weight, self.weights.out_proj.weight))
        query, key, value = (part[None] for part in self._heads(F.linear(tokens, enter)))
        rows = banded(query[:, :, self.window :], key, value, self.window)
        rows = rows[0].unflatten(0, (self.batch, self.heads)).transpose(1, 2).flatten(-2)
        exact: Sequence[Tensor] = F.linear(rows, leave).unbind(1)
        results = dict.fromkeys(self.names, exact)
        if OURS in self.names:
            step = self._eager(tokens, enter, leave)
            results |= dict.fromkeys((OURS, EAGER), tuple(step(token) for token in tokens[:, self.window :].unbind(1)))
        return results

    def refusal(self, implementation: str) -> str | None:
        return missing(implementation)


@dataclass(frozen=True)
class ExactModuleStep(NystromModuleStep):
    """Exact attention, as the package has it."""

    scan = "nn.ContinualAttention"
    others = ()
    scheme = "single"

    @property
    def names(self) -> tuple[str, ...]:
        return (OURS_EXACT, CONTINUAL_INFERENCE)

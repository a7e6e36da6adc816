"""Family B's streams, from their first window to a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cmab_kernels import continual_attention_init, continual_nystrom_init
from cmab_kernels.nystrom.reference import segment_means

from ..floors import Work, attention_work, pinv_work
from ..harness import device, generator, normal
from .nystrom_eager import ITERATIONS, eager_rings, eager_start
from .nystrom_layer import iterated
from .operators import EAGER, Implementation, OperatorCase, moved, wide


@dataclass(frozen=True)
class ExactStart(OperatorCase):
    """Exact attention keeps the window, in rings with a row to spare."""

    window: int = 64
    width: int = 64
    heads: int = 16

    scan = "continual_attention_init"
    baselines = (EAGER,)

    def __str__(self) -> str:
        return f"exact-start-{self._dtype}-{self.heads}x{self.width}-n{self.window}{self._threads}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {"H": self.heads, "n": self.window, "D": self.width}

    @property
    def work(self) -> Work | None:
        """Queries, keys and values are read and written."""
        return moved(self._bytes, self._dtype)

    @property
    def _bytes(self) -> int:
        return 6 * self.heads * self.window * self.width * self.dtype.itemsize

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        return {
            f"cmab_kernels.{self.scan}": lambda inputs: continual_attention_init(*inputs)[:3],
            EAGER: lambda inputs: eager_rings(*inputs),
        }

    def inputs(self, seed: int) -> tuple[Tensor, ...]:
        random = generator(seed)
        return tuple(normal(random, 1, self.heads, self.window, self.width).to(self.dtype) for _ in range(3))

    def oracle(self, inputs: Sequence[Tensor]) -> Mapping[str, Sequence[Tensor]]:
        return dict.fromkeys(self.implementations, _with_a_row(inputs))

    def small(self) -> ExactStart:
        return replace(self, window=64)

    def refusal(self, implementation: str) -> str | None:
        return None


def _with_a_row(tokens: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat([part, torch.zeros_like(part[:, :, :1])], dim=2).double() for part in tokens]


@dataclass(frozen=True)
class NystromStart(ExactStart):
    """Landmarks, their sums over the window, and the pseudo-inverse between them too."""

    landmarks: int = 16
    fixed: bool = False

    scan = "continual_nystrom_init"

    def __str__(self) -> str:
        kind = "fixed" if self.fixed else "continual"
        return f"nystrom-start-{kind}-{self._dtype}-{self.heads}x{self.width}-n{self.window}-m{self.landmarks}{self._threads}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {**super().sizes, "m": self.landmarks, "landmarks": "fixed" if self.fixed else "continual"}

    @property
    def work(self) -> Work:
        pairs = self.heads * self.window
        sums = attention_work(pairs * self.landmarks, pairs, self.width, self.width, self._dtype, device=device())
        inverse = pinv_work(self.heads, self.landmarks, ITERATIONS, self._dtype)
        return replace(sums + inverse, bytes=self._bytes)

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        return {f"cmab_kernels.{self.scan}": self._by_ours, EAGER: self._eager}

    def _landmarks(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Fixed ones."""
        random = generator(1000)
        made = (normal(random, 1, self.heads, self.landmarks, self.width).to(wide(like.dtype)) for _ in range(2))
        return (next(made), next(made)) if self.fixed else None

    def inputs(self, seed: int) -> tuple[Tensor, ...]:
        """The window, and landmarks where they are given. Each segment has a level of its own: of pure noise all landmarks would be alike,
        and have no inverse that float32 resolves."""
        random = generator(seed + 1000)
        segments = torch.arange(self.window, device=device()) * self.landmarks // self.window
        tokens = [
            part + normal(random, 1, self.heads, self.landmarks, self.width)[:, :, segments].to(self.dtype) for part in super().inputs(seed)
        ]
        return *tokens, *(self._landmarks(tokens[0]) or ())

    def _by_ours(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        given = tuple(inputs[3:]) or None
        state = continual_nystrom_init(*inputs[:3], None if given else self.landmarks, landmarks=given)
        return *state[:3], state.sums, state.inverse

    def _eager(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        rings, sums, inverse = eager_start(*inputs[:3], self.landmarks, tuple(inputs[3:]) or None)
        return *rings, sums, inverse

    def oracle(self, inputs: Sequence[Tensor]) -> Mapping[str, Sequence[Tensor]]:
        """Sums of exponentials as they are; ours less their greatest, which stands behind them, and phi once more as its peak."""
        query, key, value = (part.double() for part in inputs[:3])
        near, far = (part.double() for part in inputs[3:]) if self.fixed else (segment_means(part, self.landmarks) for part in (query, key))
        scores = torch.einsum("...md,...nd->...mn", near, key) * self.width**-0.5
        inverse = iterated((torch.einsum("...md,...nd->...mn", near, far) * self.width**-0.5).softmax(-1))
        top, phi = scores.amax(-1, keepdim=True), scores.logsumexp(-1, keepdim=True)
        means = scores.softmax(-1) @ value
        ours = torch.cat([means * (phi - top).exp(), (phi - top).exp(), top, (phi - top).exp()], dim=-1)
        theirs = torch.cat([means * phi.exp(), phi.exp()], dim=-1)
        rings = _with_a_row(inputs[:3])
        return {name: (*rings, theirs if name == EAGER else ours, inverse) for name in self.implementations}

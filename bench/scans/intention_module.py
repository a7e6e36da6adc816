"""Family C as a module, in the place of torch's attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from cmab_kernels.nn import MultiheadIntention

from ..floors import Work
from ..harness import device
from .intention_layer import regression_work
from .intention_peers import ALPHA, cholesky_solve, regression, regularised
from .operators import EAGER, Implementation
from .self_attention import Exact, SelfAttention


@dataclass(frozen=True)
class IntentionModule(SelfAttention):
    """Its penalty is exp(0) = 1, as it starts."""

    scan = "nn.MultiheadIntention"

    @property
    def _attention_work(self) -> Work:
        width = self.features // self.heads
        return regression_work(self.batch * self.heads, self.length, width, self._dtype, backward=False)

    def _module(self) -> MultiheadIntention:
        return MultiheadIntention(self.features, self.heads, batch_first=True, device=device(), dtype=self.dtype)

    @property
    def _peers(self) -> Mapping[str, Implementation]:
        return {EAGER: lambda inputs: self._run(inputs, self._around(_eagerly), self.weights)}

    def _exactly(self) -> Mapping[str, Exact]:
        return dict.fromkeys((f"cmab_kernels.{self.scan}", EAGER), _scaled_regression)


def _eagerly(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query @ ((1 + ALPHA) * cholesky_solve(regularised(key.mT @ key), key.mT @ value))


def _scaled_regression(query: Tensor, key: Tensor, value: Tensor, dout: Tensor | None) -> Sequence[Tensor]:
    """(1 + alpha) times Intention."""
    gain = 1 + ALPHA
    if dout is None:
        return [gain * part for part in regression(query, key, value, query.new_empty(0))]
    out, *gradients = regression(query, key, value, gain * dout)
    return [gain * out, *gradients]

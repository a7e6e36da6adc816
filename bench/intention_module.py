"""Family C as a module, in the place of torch's attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from cmab_kernels.nn import MultiheadIntention

from .floors import Work
from .harness import device
from .intention_layer import regression_work
from .intention_peers import ALPHA, cholesky_solve, regression, regularised
from .operators import EAGER, Implementation
from .self_attention import Exact, SelfAttention, Tokens


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
        return {EAGER: self._eager}

    def _eager(self, inputs: Tokens) -> Sequence[Tensor]:
        def attend(tokens: Tensor) -> Tensor:
            packed = F.linear(tokens, self.weights.in_proj_weight, self.weights.in_proj_bias)
            query, key, value = packed.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
            out = query @ ((1 + ALPHA) * cholesky_solve(regularised(key.mT @ key), key.mT @ value))
            return F.linear(out.transpose(1, 2).flatten(-2), self.weights.out_proj.weight, self.weights.out_proj.bias)

        return self._run(inputs, attend, self.weights)

    def _exactly(self) -> Mapping[str, Exact]:
        return dict.fromkeys((f"cmab_kernels.{self.scan}", EAGER), _scaled_regression)


def _scaled_regression(query: Tensor, key: Tensor, value: Tensor, dout: Tensor | None) -> Sequence[Tensor]:
    """(1 + alpha) times Intention."""
    gain = 1 + ALPHA
    if dout is None:
        return [gain * part for part in regression(query, key, value, query.new_empty(0))]
    out, *gradients = regression(query, key, value, gain * dout)
    return [gain * out, *gradients]

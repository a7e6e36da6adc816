"""The common part of all regressors."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from cmab_kernels.nn.inputs import check_features
from cmab_kernels.runtime.checks import mismatch, refuse_not_finite

from ..precision import weight_of
from ..pretrained import Pretrained


class Regressor(Pretrained):
    """Base class of models that answer queries (B, M, dim_key) from keys (B, N, dim_key) and values (B, N, dim_value).

    All tensors have the model's dtype. A wrong shape raises a `ValueError`. A wrong dtype, or an argument that is not a
    tensor, raises a `TypeError`. On a CPU, a NaN or an infinity raises a `ValueError`. On a GPU values are not checked,
    because the program would have to wait. There, a NaN reaches the answers of its batch element.
    """

    dim_key: int
    dim_value: int

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the answers (B, M, dim_out)."""
        weight = weight_of(self)
        check_features("key", key, "(B, N, dim_key)", (3,), self.dim_key, weight)
        check_features("query", query, "(B, M, dim_key)", (3,), self.dim_key, weight)
        check_features("value", value, "(B, N, dim_value)", (3,), self.dim_value, weight)
        for name, given, extents in (("query", query, 1), ("value", value, 2)):
            if given.shape[:extents] != key.shape[:extents]:
                allowed = f"a shape that begins with {tuple(key.shape[:extents])}, as key has shape {tuple(key.shape)}"
                raise ValueError(mismatch(name, f"shape {tuple(given.shape)}", allowed))
        refuse_not_finite(query=query, key=key, value=value)
        return self._answer(query, key, value)

    @abstractmethod
    def _answer(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the result of `forward` for tensors of the right shapes."""

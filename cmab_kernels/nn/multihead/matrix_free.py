"""Attentions that form the matrix of weights only on request, with the interface of `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from ...runtime.checks import as_flag, kind_of, mismatch
from ..constructors import extending
from ..inputs import bool_mask
from ..parts import computed
from .projections import MultiheadProjections

NO_DROPOUT = {"dropout": "0, as dropout acts on attention weights, which are never formed here"}


class MatrixFreeAttention(MultiheadProjections):
    """Base class of attentions whose output is a linear map of the values, and that do not form the L x N matrix of
    this map.

    A mask can hide padding from all queries. It cannot hide different keys from different queries.
    """

    why_no_masks: ClassVar[str]
    """The reason, in error messages, why a mask cannot hide different keys from different queries."""

    @extending(MultiheadProjections)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # torch.nn.TransformerEncoderLayer reads this attribute to decide whether to run fused attention in place of
        # `forward`.
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (out, weights), with torch's arguments and shapes. The docstring of the class describes the weights.
        `need_weights=None` means the attribute of that name: True as in torch, unless `replace_modules` was given
        another value.

        An `attn_mask` or `is_causal` raises a `ValueError`. A `key_padding_mask` may also be a float mask of 0 and
        -inf, which torch's transformer layers pass on. Other numbers raise a `ValueError`. On a GPU the numbers are not
        read, and other numbers make every result NaN.
        """
        self = computed(self)
        need_weights = self._asks_for_weights(need_weights)
        average_attn_weights = as_flag("average_attn_weights", average_attn_weights)
        self._refuse_masks("attn_mask", attn_mask, is_causal)
        key_padding_mask, key = bool_mask(key_padding_mask, key)
        self._check(key_padding_mask, query=query, key=key, value=value)
        q, (k, v, mask) = self._project_query(query, key_padding_mask), self._project_pair(key, value, key_padding_mask)
        out = self._output(self._attend(q, k, v, mask), query)
        if not need_weights:
            return out, None
        return out, self._shown(self._weights(q, k, mask), query, average_attn_weights)

    def _refuse_masks(self, name: str, mask: Tensor | None, is_causal: bool) -> None:
        """Raise if the caller gives a mask that hides different keys from different queries."""
        if mask is not None:
            raise ValueError(mismatch(name, kind_of(mask), f"None; {self.why_no_masks}"))
        if as_flag("is_causal", is_causal):
            raise ValueError(mismatch("is_causal", is_causal, f"False; {self.why_no_masks}"))

    def _project_query(self, query: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Return the heads (B, H, L, D) of the query."""
        return self._project(0, query)

    @abstractmethod
    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the result (B, H, L, E) for query, key, value (B, H, *, *) and mask (B, N)."""

    @abstractmethod
    def _weights(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """Return the matrix (B, H, L, N) whose product with the values is the result of `_attend`."""

"""The contracts of the operators: their arguments, in the order of the schema."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Gram(NamedTuple):
    """The arguments of `cmab::gram`, whose results are K'WK and K'WV in float64.

    A part whose number in `parts` is 0 is empty. (They are ints because `torch.jit.trace` takes no list of bools.)
    Products are formed in float64 if `exact`, else in the dtype of sums. With `cu_seqlens` the rows have batch 1, and
    there are sums of each packed set.
    """

    key: Tensor
    value: Tensor
    weights: Tensor | None = None
    key_padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    parts: tuple[int, int] = (True, True)
    exact: bool = False
    impl: str = "auto"


class RidgeUpdate(NamedTuple):
    """The arguments of `cmab::ridge_update`, whose results are the sums and the number of keys,
    plus the incoming ones."""

    key: Tensor
    value: Tensor
    weights: Tensor | None = None
    key_padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    gram: Tensor | None = None
    moment: Tensor | None = None
    count: Tensor | None = None  # type: ignore[assignment]  # hides tuple.count
    impl: str = "auto"


class GramBackward(NamedTuple):
    """The arguments of `cmab::gram_backward`, whose results are the gradients of key, value and weights."""

    dgram: Tensor
    dmoment: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor | None
    key_padding_mask: Tensor | None
    cu_seqlens: Tensor | None
    needs: tuple[bool, bool, bool]
    exact: bool
    impl: str = "auto"


class PrefixRidge(NamedTuple):
    """The arguments of `cmab::prefix_ridge`, whose results are K'WK and K'WV over all prefixes,
    plus the incoming sums."""

    key: Tensor
    value: Tensor
    weights: Tensor | None = None
    key_padding_mask: Tensor | None = None
    gram: Tensor | None = None
    moment: Tensor | None = None
    every: int = 1
    impl: str = "auto"


class PrefixRidgeBackward(NamedTuple):
    """The arguments of `cmab::prefix_ridge_backward`, whose results are the gradients of key, value, weights, gram and
    moment."""

    dgram: Tensor
    dmoment: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor | None
    key_padding_mask: Tensor | None
    every: int
    needs: tuple[bool, bool, bool, bool, bool]
    impl: str = "auto"


class ApplyRows(NamedTuple):
    """The arguments of `cmab::apply_rows`, whose result is query @ weight in the dtype of query."""

    query: Tensor
    weight: Tensor
    impl: str = "auto"

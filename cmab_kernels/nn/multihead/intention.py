"""Intention with the constructor, the weights and the forward of `torch.nn.MultiheadAttention`, and as a stream."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ...intention import (
    RidgeState,
    check_ridge,
    intention,
    regularised_solve,
    remove_ridge,
    ridge_state,
    sigma_intention,
    solve_ridge,
)
from ...runtime.checks import as_float, mismatch
from ...runtime.dtypes import state_dtype
from ..constructors import extending
from ..inputs import bool_mask
from ..parts import computed
from ..stream import RidgeStream, follow_weights, refuse_to_record, with_own_streams
from .matrix_free import NO_DROPOUT, MatrixFreeAttention
from .projections import no_extra_keys


class LearnedRidge(MatrixFreeAttention):
    """Base class of both modules of Intention: it adds the penalty `alpha`, learned or fixed, and the factor
    `scale`."""

    lacks = NO_DROPOUT | no_extra_keys("extra keys are for queries that no other key matches")
    why_no_masks = (
        "all queries use one regression on all keys, and a query with other keys would need its own regression"
    )
    fixed_alpha: float | None
    scale: float
    log_alpha: torch.nn.Parameter
    """The logarithm of the penalty of each head, (H,), or None with a fixed alpha."""

    @extending(MatrixFreeAttention)
    def __init__(self, *args: Any, alpha: float | None = None, scale: float = 1.0, **kwargs: Any) -> None:
        if alpha is not None and not (isinstance(alpha, Real) and 0 <= as_float("alpha", alpha) < math.inf):
            raise ValueError(mismatch("alpha", repr(alpha), "None, to learn it, or a finite number >= 0"))
        if not (isinstance(scale, Real) and math.isfinite(as_float("scale", scale))):
            raise ValueError(mismatch("scale", repr(scale), "a finite number"))
        super().__init__(*args, **kwargs)
        self.fixed_alpha = alpha
        self.scale = scale
        self._start(self._like)

    def _start(self, like: Tensor) -> None:
        """Make the parameters and streams that torch's module lacks, with the device and dtype of the weight `like`."""
        zeros = torch.zeros(self.num_heads, device=like.device, dtype=like.dtype)
        self.register_parameter("log_alpha", torch.nn.Parameter(zeros) if self.fixed_alpha is None else None)

    def adopt(self, module: torch.nn.MultiheadAttention) -> None:
        super().adopt(module)
        self._start(self._like)

    def _apply(self, fn: Callable, recurse: bool = True) -> LearnedRidge:
        """Cast or move the module, and restore the values of `log_alpha`.

        `to_empty` gives memory without values, and a `state_dict` of torch's module has no
        `log_alpha`. If the module comes from the meta device, `log_alpha` starts at 0. Otherwise it
        keeps its values, also if a model contains the module twice and this method therefore runs
        twice.
        """
        before = self._parameters.get("log_alpha")
        values = None if before is None else before.detach()
        super()._apply(fn, recurse)
        if values is not None:
            after = self.log_alpha.data  # `.data`, so that autograd counts no change: a graph may hold this memory
            after.copy_(torch.zeros_like(after) if values.is_meta else values)
        return self

    @property
    def alpha(self) -> Tensor:
        """The penalty of each head, (H,) float64: exp(log_alpha), which is differentiable, or the fixed number."""
        if self.fixed_alpha is None:
            return self.log_alpha.double().exp()
        return torch.full((self.num_heads,), self.fixed_alpha, dtype=torch.float64, device=self._like.device)

    def _scaled(self, heads: Tensor, alpha: Tensor) -> Tensor:
        """Return heads (B, H, L, *) times scale (1 + alpha), in their dtype."""
        gain = (self.scale * (1 + alpha)).to(state_dtype(heads.dtype))
        return (heads * gain[:, None, None]).to(heads.dtype)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        name = prefix + "log_alpha"
        if name in missing_keys and not self.log_alpha.is_meta:
            missing_keys.remove(name)  # torch's module has no log_alpha, so ours stays unchanged


class MultiheadIntention(LearnedRidge):
    """Regularised least squares in place of attention.

    It takes O(L + N) time. It can also run as an exact stream with a state that does not grow with the number of keys.

    In each head, with alpha = exp(log_alpha) and a = sigmoid(log_alpha) = alpha / (1 + alpha),

        out = scale Q [(1 - a) K'K + a I]^-1 K'V = scale (1 + alpha) Q (K'K + alpha I)^-1 K'V

    a = 0 gives least squares, and a = 1 gives linear attention. (In the text of the paper, a multiplies I, as here. The
    paper's appendix 9 swaps a and 1 - a.) `log_alpha` (H,) is learned and starts at 0, where a = 1/2. It should stay
    small: as alpha approaches the largest number of the dtype (log_alpha 11 in float16, 88 in float32), results lose
    digits and then overflow.

    Args:
        embed_dim, num_heads, bias, kdim, vdim, batch_first, device, dtype: as torch's.
        dropout, add_bias_kv, add_zero_attn: only torch's defaults. Other values raise a `ValueError`, because these
            options act on attention weights.
        alpha: None to learn it, or a fixed number >= 0 for all heads in the same formula. A module with a fixed alpha
            has no `log_alpha`.
        scale: the factor in the formula. The paper uses sqrt(D) / 2, with D = embed_dim / num_heads. The paper derives
            this factor from a variance of D / (D - N - 1), which exists only for D > N + 1. So it suits heads that are
            much wider than the number of keys.

    Parameters have torch's names. So a `state_dict` of `torch.nn.MultiheadAttention` loads unchanged, and does not
    change `log_alpha` (it is 0 in a module that `to_empty` has moved from the meta device).
    `forward` is torch's, without `attn_mask` and `is_causal`. With `need_weights=True` (torch's default!) the returned
    weights are the matrix of the linear map from values to results, scale (1 + alpha) Q (K'K + alpha I)^-1 K'. No other
    L x N matrix is ever formed. These weights may be negative, do not sum to 1, and are 0 for masked keys. With a fixed
    alpha of 0 a result is NaN where the regression has no solution.

    `update`, `remove` and `predict` compute the same result for a stream. Its state consists of the sums K'K and K'V in
    float64; only `predict` uses alpha. The methods take a state, and `update` and `remove` return the next state.
    Without a state they use the module's own stream, `stream.state` (see `RidgeStream`). The module's own stream holds
    no autograd graph, so advancing the stream with a gradient raises a `RuntimeError`. A state is valid only with the
    weights that made it. A wrong shape, dtype or device raises a `ValueError` or `TypeError` that names the argument,
    and every state stays unchanged.

    Source: Exploring the Space of Key-Value-Query Models with Intention (Garnelo and Czarnecki), sections 2 and 3.

    >>> theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    >>> ours = cmab_kernels.nn.MultiheadIntention(16, 2, batch_first=True)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> query, points = torch.randn(1, 4, 16), torch.randn(1, 100, 16)
    >>> with torch.no_grad():
    ...     whole = ours(query, points, points, need_weights=False)[0]
    ...     for chunk in points.split(30, dim=1):
    ...         state = ours.update(chunk)
    ...     torch.allclose(ours.predict(query), whole, atol=1e-5)
    True
    """

    def _start(self, like: Tensor) -> None:
        super()._start(like)
        self.stream = RidgeStream(self.num_heads, self.head_dim, self.head_dim, device=like.device, dtype=like.dtype)
        self.register_load_state_dict_post_hook(follow_weights)

    __copy__ = with_own_streams

    def update(
        self,
        key: Tensor,
        value: Tensor | None = None,
        *,
        state: RidgeState | None = None,
        key_padding_mask: Tensor | None = None,
        decay: float | Tensor | None = None,
    ) -> RidgeState:
        """Return the state with these keys and values added, in time O(new keys).

        With `batch_first`, `key` is (B, N, kdim) and `value` (B, N, vdim); otherwise N comes before B. A `value` of
        None means that the values are the keys. With `state` None the update advances the module's
        own stream. `decay` reduces the weight of the earlier keys, as in
        `cmab_kernels.ridge_state`.
        """
        if state is None:
            refuse_to_record("update", "update(..., state=state)")
        before = self.stream.held if state is None else state
        updated = ridge_state(state=before, decay=decay, **self._pairs(key, value, key_padding_mask))
        if state is None:
            self.stream.state = updated
        return updated

    def remove(
        self,
        key: Tensor,
        value: Tensor | None = None,
        *,
        state: RidgeState | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> RidgeState:
        """Return the state without these keys and values, in time O(removed keys). The state must contain them.

        With `state` None the removal changes the module's own stream. A `RuntimeError` is raised if that stream has
        seen no key.
        """
        if state is None:
            refuse_to_record("remove", "remove(..., state=state)")
        left = remove_ridge(self.stream.started(state), **self._pairs(key, value, key_padding_mask))
        if state is None:
            self.stream.state = left
        return left

    def predict(self, query: Tensor, state: RidgeState | None = None) -> Tensor:
        """Return the output of `forward` for the query, over all keys of `state` or of the module's own stream.

        The output has the shape of the query. It is differentiable in the query, the query and output projections,
        alpha and the state. A `RuntimeError` is raised if the stream has seen no key.
        """
        self = computed(self)
        held = self.stream.started(state)
        self._check(None, query=query)
        q, alpha = self._project(0, query), self.alpha
        check_ridge(held, (q.shape[0], *self.stream.shape), q.device)
        dtype = state_dtype(q.dtype)
        weight = self._scaled(solve_ridge(held, alpha).weight, alpha)
        return self._output((q.to(dtype) @ weight.to(dtype)).to(q.dtype), query)

    def init_state(self, batch: int) -> RidgeState:
        """Return the state of no keys, to start a stream that the caller keeps.

        gram and moment are (batch, H, D, D), and count is (batch, H).
        """
        return self.stream.init_state(batch)

    def _pairs(self, key: Tensor, value: Tensor | None, key_padding_mask: Tensor | None) -> dict[str, Any]:
        """Return the projected keys and values and the mask, as keyword arguments of the operators on states."""
        self = computed(self)
        value = key if value is None else value
        key_padding_mask, key = bool_mask(key_padding_mask, key)
        self._check(key_padding_mask, key=key, value=value)
        return dict(
            zip(("key", "value", "key_padding_mask"), self._project_pair(key, value, key_padding_mask), strict=True)
        )

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        alpha = self.alpha
        return self._scaled(intention(query, key, value, alpha, key_padding_mask=mask), alpha)

    def _weights(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        alpha = self.alpha
        return self._scaled(_linear_map(query, key, mask, alpha), alpha)


class MultiheadSigmaIntention(LearnedRidge):
    """Attention whose logits are the weights of Intention, in place of scaled dot products.

        out = softmax(scale Q [(1 - a) K'K + a I]^-1 K') V        a = sigmoid(log_alpha), in each head

    Constructor, parameters and `forward` are those of `MultiheadIntention`. Each softmax runs over all keys, so there
    is no stream. No L x N matrix is formed, except with `need_weights=True` (torch's default!), which returns the
    softmax.

    >>> module = cmab_kernels.nn.MultiheadSigmaIntention(16, 2, batch_first=True)
    >>> query, points = torch.randn(1, 4, 16), torch.randn(1, 100, 16)
    >>> out, weights = module(query, points, points)
    >>> out.shape, torch.allclose(weights.sum(-1), torch.ones(1, 4))
    (torch.Size([1, 4, 16]), True)
    """

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        alpha = self.alpha
        return sigma_intention(self._scaled(query, alpha), key, value, alpha, key_padding_mask=mask)

    def _weights(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        alpha = self.alpha
        scores = _linear_map(self._scaled(query, alpha), key, mask, alpha)
        if mask is None:
            return scores.softmax(-1)
        absent = mask[:, None, None]
        return scores.masked_fill(absent, -torch.inf).softmax(-1).masked_fill(absent, 0.0)


def _linear_map(query: Tensor, key: Tensor, mask: Tensor | None, alpha: Tensor) -> Tensor:
    """Return the matrix Q (K'K + alpha I)^-1 K' (B, H, L, N), with 0 at masked keys."""
    *leading, length, width = key.shape
    if 0 < length < width:  # the operator then solves the smaller dual system, which can be regular at alpha = 0
        one = torch.eye(length, dtype=key.dtype, device=key.device).expand(*leading, -1, -1)
        return intention(query, key, one, alpha, key_padding_mask=mask)
    key = key if mask is None else key.masked_fill(mask[:, None, :, None], 0.0)
    gram = ridge_state(key, key[..., :1]).gram
    dtype = state_dtype(query.dtype)
    solved = regularised_solve(gram, query.mT.double(), alpha).weight.mT
    return (solved.to(dtype) @ key.mT.to(dtype)).to(query.dtype)

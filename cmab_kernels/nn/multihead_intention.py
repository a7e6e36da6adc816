"""Intention with the constructor, the weights and the forward of `torch.nn.MultiheadAttention`, and as a stream."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..checks import wrong
from ..dtypes import state_dtype
from ..intention import RidgeState, intention, regularised_solve, remove_ridge, ridge_state, sigma_intention, solve_ridge
from ..intention.state import check_ridge
from .layers import bool_mask
from .matrix_free import NO_DROPOUT, MatrixFreeAttention
from .projections import extending, no_extra_keys
from .stream import RidgeStream


class LearnedRidge(MatrixFreeAttention):
    """Base class of the two kinds of Intention: it has the penalty `alpha` and the factor `scale`."""

    lacks = NO_DROPOUT | no_extra_keys("extra keys are for attention that finds nothing to attend to")
    why_no_masks = "all queries are answered from one regression on all keys; with keys of its own each would need its own regression"
    log_alpha: torch.nn.Parameter
    """The logarithm of the penalty of each head, (H,), or None with a fixed alpha."""

    @extending(MatrixFreeAttention)
    def __init__(self, *args: Any, alpha: float | None = None, scale: float = 1.0, **kwargs: Any) -> None:
        if alpha is not None and not 0 <= alpha < math.inf:
            raise ValueError(wrong("alpha", f"is {alpha}", "None, to learn it, or a finite number >= 0 is needed"))
        if not math.isfinite(scale):
            raise ValueError(wrong("scale", f"is {scale}", "a finite number is needed"))
        super().__init__(*args, **kwargs)
        self.fixed_alpha = alpha
        self.scale = scale
        self._start(self.out_proj.weight)

    def _start(self, like: Tensor) -> None:
        """Make what torch's module does not have, with the device and dtype of the weight `like`."""
        zeros = torch.zeros(self.num_heads, device=like.device, dtype=like.dtype)
        self.register_parameter("log_alpha", torch.nn.Parameter(zeros) if self.fixed_alpha is None else None)

    def adopt(self, module: torch.nn.MultiheadAttention) -> None:
        super().adopt(module)
        self._start(module.out_proj.weight)

    @property
    def alpha(self) -> Tensor:
        """The penalty of each head, (H,) float64: exp(log_alpha), through which its gradient flows, or the fixed number."""
        if self.fixed_alpha is None:
            return self.log_alpha.double().exp()
        return torch.full((self.num_heads,), self.fixed_alpha, dtype=torch.float64, device=self.out_proj.weight.device)

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
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        name = prefix + "log_alpha"
        if name in missing_keys and not self.log_alpha.is_meta:
            missing_keys.remove(name)  # torch's module has none; alpha stays what it is


class MultiheadIntention(LearnedRidge):
    """Regularised least squares where `torch.nn.MultiheadAttention` attends: constant in the number of keys, and an exact stream.

    In each head, with alpha = exp(log_alpha) and a = sigmoid(log_alpha) = alpha / (1 + alpha),

        out = scale Q [(1 - a) K'K + a I]^-1 K'V = scale (1 + alpha) Q (K'K + alpha I)^-1 K'V

    a = 0 is least squares, a = 1 linear attention. (The paper's text has a at I, as here; its appendix 9 prints the two roles the other
    way round.) `log_alpha` (H,) is learned and starts at 0, a = 1/2. It is meant to stay small: where alpha nears the range of the
    dtype (log_alpha 11 in float16, 88 in float32), results lose digits and then overflow.

    Args:
        embed_dim, num_heads, bias, kdim, vdim, batch_first, device, dtype: as torch's.
        dropout, add_bias_kv, add_zero_attn: torch's defaults; anything else is a `ValueError`, as they act on attention weights.
        alpha: None to learn it, or a fixed number >= 0 for all heads, in the same formula; there is no `log_alpha` then.
        scale: a factor. The paper's is sqrt(D) / 2, D = embed_dim / num_heads. Its argument is that of a variance D / (D - N - 1), which
            exists for D > N + 1: it is for heads much wider than there are keys.

    Parameters have torch's names, so a `state_dict` of `torch.nn.MultiheadAttention` loads as it is, with `log_alpha` unchanged.
    `forward` is torch's, without `attn_mask` and `is_causal`. With `need_weights=True` (torch's default!) the weights are those of the
    linear map from values to results, scale (1 + alpha) Q (K'K + alpha I)^-1 K', of size L x N, which nothing else here is; they may be
    negative and do not sum to 1. A masked key's is 0. A result is NaN where the regression has no solution, at a fixed alpha of 0.

    `update`, `remove` and `predict` do the same in a stream: the sums K'K and K'V are all that is kept of the keys, in float64, and
    alpha enters only when a query is answered. They take a state, and `update` and `remove` return the next; without one they use the
    module's own, `stream.state` (see `RidgeStream`), which holds no graph and refuses to be advanced with a gradient. A state belongs to
    the weights that made it. A wrong shape, dtype or device is a `ValueError` or `TypeError` that names the argument, and leaves every
    state as it was.

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

    def update(
        self, key: Tensor, value: Tensor | None = None, *, state: RidgeState | None = None, key_padding_mask: Tensor | None = None
    ) -> RidgeState:
        """Return the state with these keys and values added, in time O(new keys). A `value` of None is the key.

        Key (B, N, kdim) and value (B, N, vdim), or as `batch_first` says. `state` None continues the module's own stream.
        """
        updated = ridge_state(state=self.stream.held if state is None else state, **self._pairs(key, value, key_padding_mask))
        if state is None:
            self.stream.state = updated
        return updated

    def remove(
        self, key: Tensor, value: Tensor | None = None, *, state: RidgeState | None = None, key_padding_mask: Tensor | None = None
    ) -> RidgeState:
        """Return the state without these keys and values, which must be part of it, in time O(removed keys).

        `state` None takes them out of the module's own stream: a `RuntimeError` if that has seen nothing.
        """
        left = remove_ridge(self.stream.started(state), **self._pairs(key, value, key_padding_mask))
        if state is None:
            self.stream.state = left
        return left

    def predict(self, query: Tensor, state: RidgeState | None = None) -> Tensor:
        """Return the output of `forward` for the query, in its shape, over all that `state`, or the module's own stream, has seen.

        Differentiable in the query, the weights of the query and output, alpha and the state. `RuntimeError` if nothing was seen.
        """
        held = self.stream.started(state)
        self._check(None, query=query)
        q, alpha = self._project(0, query), self.alpha
        check_ridge(held, (q.shape[0], *self.stream.shape), q.device)
        dtype = state_dtype(q.dtype)
        weight = self._scaled(solve_ridge(held, alpha).weight, alpha)
        return self._output((q.to(dtype) @ weight.to(dtype)).to(q.dtype), query)

    def init_state(self, batch: int) -> RidgeState:
        """Return the state of no keys, to start a stream that the caller keeps: gram and moment (batch, H, D, D), count (batch, H)."""
        return self.stream.init_state(batch)

    def _pairs(self, key: Tensor, value: Tensor | None, key_padding_mask: Tensor | None) -> dict[str, Any]:
        """Return the heads of keys and values and the mask, as arguments of the operators on states."""
        value = key if value is None else value
        key_padding_mask = bool_mask(key_padding_mask)
        self._check(key_padding_mask, key=key, value=value)
        return dict(zip(("key", "value", "key_padding_mask"), self._project_pair(key, value, key_padding_mask), strict=True))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        alpha = self.alpha
        return self._scaled(intention(query, key, value, alpha, key_padding_mask=mask), alpha)

    def _weights(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        alpha = self.alpha
        return self._scaled(_linear_map(query, key, mask, alpha), alpha)


class MultiheadSigmaIntention(LearnedRidge):
    """Attention whose scores are Intention's weights, where `torch.nn.MultiheadAttention` has those of dot products.

        out = softmax(scale Q [(1 - a) K'K + a I]^-1 K') V        a = sigmoid(log_alpha), in each head

    Constructor, parameters and `forward` as in `MultiheadIntention`. The softmax needs every key again for every query, so there is no
    stream; but nothing of size L x N is formed, except with `need_weights=True` (torch's default!), which returns the softmax.

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
    if 0 < length < width:  # the dual is small, and has a solution at alpha = 0
        one = torch.eye(length, dtype=key.dtype, device=key.device).expand(*leading, -1, -1)
        return intention(query, key, one, alpha, key_padding_mask=mask)
    key = key if mask is None else key.masked_fill(mask[:, None, :, None], 0.0)
    gram = ridge_state(key, key[..., :1]).gram
    dtype = state_dtype(query.dtype)
    solved = regularised_solve(gram, query.mT.double(), alpha).weight.mT
    return (solved.to(dtype) @ key.mT.to(dtype)).to(query.dtype)

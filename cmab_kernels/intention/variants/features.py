"""Features whose inner products are a Gaussian kernel: linear estimators on these features are kernel machines."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.checks import (
    check_count,
    check_floats,
    check_mask,
    check_number,
    check_operands,
    mismatch,
    nan_if_refused,
    refuse_negative,
)
from ...runtime.operator import Call, Gradients, Operator
from .inputs import check_query, check_rows, expand_to
from .inverse_root import inverse_root, products


def kernel_features(
    query: Tensor, key: Tensor, gamma: float | Tensor, *, key_padding_mask: Tensor | None = None
) -> Tensor:
    """phi_K(Q) = k(Q, K) k(K, K)^-1/2 with the Gaussian kernel k(x, y) = exp(-gamma |x - y|^2).

    phi_K(Q) phi_K(K)' = k(Q, K): a linear estimator on these features is a kernel machine. `ridge(phi_K(K), value,
    alpha, intercept=False)` evaluated at phi_K(Q) is kernel ridge regression.

    Args:
        query: (B, H, M, D). float64, float32, bfloat16 or float16; the computation is in float64.
        key: (B, H, N, D), the reference points of the kernel, in the same dtype.
        gamma: >= 0, a number or a tensor that broadcasts to (B, H).
        key_padding_mask: (B, N) bool, True = ignore: the feature of that key is 0.

    Returns:
        (B, H, M, N) in the dtype of query. k(K, K)^-1/2 is the square root of the pseudo-inverse: directions whose
        eigenvalue is 0 up to rounding (a point given twice) are dropped. Differentiable in query, key and gamma; to
        second order where no two eigenvalues of k(K, K) are equal.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it.

    Source: Exploring the Space of Key-Value-Query Models with Intention (Garnelo and Czarnecki). The paper prints the
    kernel without the minus sign, but exp(gamma |x - y|^2) is indefinite and has no real root.

    >>> q, k = torch.randn(1, 1, 3, 2, dtype=torch.float64), torch.randn(1, 1, 5, 2, dtype=torch.float64)
    >>> phi = cmab_kernels.intention.variants.kernel_features
    >>> torch.allclose(phi(q, k, 0.5) @ phi(k, k, 0.5).mT, torch.exp(-0.5 * torch.cdist(q, k) ** 2))
    True
    """
    check_operands(query=query, key=key)
    check_rows(key, None, key_padding_mask)
    batch, heads, _, width = key.shape
    rate = _rate(gamma, key)
    points, present = key.double(), None
    if key_padding_mask is not None:
        present = ~key_padding_mask[:, None, None, :]
        points = points.masked_fill(key_padding_mask[:, None, :, None], 0.0)
    own, cross = _gaussian(points, points, rate), _gaussian(check_query(query, batch, heads, width), points, rate)
    if present is not None:
        own, cross = own * present * present.mT, cross * present
    return products(cross, inverse_root(own)).to(query.dtype)


def nystrom_features(
    query: Tensor, key: Tensor, num_landmarks: int, gamma: float | Tensor, *, key_padding_mask: Tensor | None = None
) -> Tensor:
    """phi_L(Q) = k(Q, L) k(L, L)^-1/2, where the landmarks L are m = `num_landmarks` of the keys.

    The landmarks are evenly spaced among the keys that are not masked. phi_L(X) phi_L(Y)' = k(X, L) k(L, L)^-1 k(L, Y)
    is the Nyström approximation of the kernel. It takes an m x m root and m features, instead of N. For landmarks of
    your own choice, for example means of clusters, call `kernel_features(query, landmarks, gamma)`.

    Args:
        num_landmarks: 1 <= m <= N. If fewer than m keys are unmasked, all unmasked keys are landmarks and the other
            features are 0.
        query, key, gamma, key_padding_mask: as in `kernel_features`.

    Returns:
        (B, H, M, m) in the dtype of query. Differentiable like `kernel_features`.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it.

    Source: Williams and Seeger, Using the Nyström method to speed up kernel machines.

    >>> key = torch.linspace(-1, 1, 200, dtype=torch.float64)[None, None, :, None]
    >>> phi = cmab_kernels.intention.variants.nystrom_features(key, key, 12, gamma=1.0)
    >>> exact = torch.exp(-torch.cdist(key, key) ** 2)
    >>> phi.shape, bool((phi @ phi.mT - exact).abs().max() < 1e-6)
    (torch.Size([1, 1, 200, 12]), True)
    """
    check_operands(query=query, key=key)
    check_rows(key, None, key_padding_mask)
    if check_count("num_landmarks", num_landmarks) > key.shape[2]:
        raise ValueError(mismatch("num_landmarks", num_landmarks, f"an int from 1 to N = {key.shape[2]}"))
    index, absent = _evenly_spaced(key, num_landmarks, key_padding_mask)
    landmarks = key.gather(2, index[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[-1]))
    return kernel_features(query, landmarks, gamma, key_padding_mask=absent)


def _evenly_spaced(key: Tensor, count: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The indices (B, m) of `count` evenly spaced unmasked keys, and a mask (B, m), True where no such key is left."""
    check_mask(mask, key)
    batch, _, length, _ = key.shape
    mask = torch.zeros(batch, length, dtype=torch.bool, device=key.device) if mask is None else mask
    present_first = mask.to(torch.int8).argsort(dim=-1, stable=True)
    present = (~mask).sum(-1, keepdim=True)
    taken = present.clamp(max=count)
    position = torch.arange(count, device=key.device).expand(batch, -1)
    spread = position * (present - 1) // (taken - 1).clamp(min=1)
    absent = position >= taken
    return present_first.gather(-1, torch.where(absent, 0, spread)), absent


def _rate(gamma: float | Tensor, key: Tensor) -> Tensor:
    """gamma as (B, H, 1, 1) float64; raise unless it is >= 0 and broadcasts."""
    if not isinstance(gamma, Tensor):
        check_number("gamma", gamma)
        if not 0 <= gamma < math.inf:
            raise ValueError(mismatch("gamma", gamma, "a finite number >= 0"))
        gamma = torch.tensor(float(gamma), dtype=torch.float64, device=key.device)
    check_floats("gamma", gamma)
    refuse_negative("gamma", gamma)
    return expand_to("gamma", nan_if_refused(gamma), key.shape[:2], key.device)[..., None, None]


def _gaussian(rows: Tensor, columns: Tensor, gamma: Tensor) -> Tensor:
    """exp(-gamma |x - y|^2), (B, H, M, N)."""
    return (-gamma * _squared_distances_op(SquaredDistances(rows, columns))).exp()


class SquaredDistances(NamedTuple):
    """The arguments of `cmab::squared_distances`, whose result is |x - y|^2, exactly 0 where x and y coincide."""

    rows: Tensor
    columns: Tensor


def _kernel(inputs: SquaredDistances) -> Tensor:
    """Sums of squared differences. |x|^2 + |y|^2 - 2 x.y would lose all digits of near points if one point is far
    away."""
    return torch.cdist(*inputs, compute_mode="donot_use_mm_for_euclid_dist").square()


def _operations(inputs: Any) -> int:
    return 3 * math.prod(inputs.rows) * int(inputs.columns[-2])


def _backward(call: Call[SquaredDistances], dout: Tensor) -> Gradients:
    rows, columns = call.inputs
    pulls = _pulls if torch.is_grad_enabled() else _pulls_at_once
    return {"rows": pulls(2 * dout, rows, columns), "columns": pulls(2 * dout.mT, columns, rows)}


def _pulls(weights: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """sum_j w_ij (x_i - y_j), (B, H, M, D), differentiable to any order.

    The sum is formed one coordinate at a time, so that no array (B, H, M, N, D) is needed.
    """
    pairs = zip(rows.unbind(-1), columns.unbind(-1), strict=True)
    return torch.stack([(weights * (row.unsqueeze(-1) - column.unsqueeze(-2))).sum(-1) for row, column in pairs], -1)


def _pulls_at_once(weights: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`_pulls` without a derivative, but several times as fast.

    This is the gradient of distances. It divides by the values of the distances, so these are given
    as 1.
    """
    return torch.ops.aten._cdist_backward(
        weights.contiguous(), rows.contiguous(), columns.contiguous(), 2.0, torch.ones_like(weights)
    )


_squared_distances_op = Operator(
    _kernel,
    "squared_distances",
    SquaredDistances,
    ("distances",),
    shapes=lambda inputs: inputs.rows.new_empty(*inputs.rows.shape[:-1], inputs.columns.shape[-2]),
    operations=_operations,
    backward=_backward,
)

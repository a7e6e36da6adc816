"""Oracles: dense versions of the operators' formulas, written independently of the kernels; call them with float64
inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.reference import attention_reference, ignored_keys, visible

# ---- latent cross-attention


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of latent cross-attention by its definition, computed in float64 from the given values."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key_bias = None if key_bias is None else key_bias.double()
    return attention_reference(query.double(), key.double(), value.double(), mask, cu_seqlens, scale, key_bias)


def attention_terms(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of the absolute values of the terms of attention's gradients (dquery, dkey, dvalue). Rounding
    errors scale with them.

    If terms cancel, a gradient can be smaller than its rounding error. For example, dquery is exactly 0 if all keys are
    equal.
    """
    scale = query.shape[-1] ** -0.5
    with torch.no_grad():
        weight = (scale * query @ key.mT - lse[..., None]).exp()
        slope = scale * weight * (dout.abs() @ value.abs().mT + (dout * out).abs().sum(-1, keepdim=True))
        return slope @ key.abs(), slope.mT @ query.abs(), weight.mT @ dout.abs()


def norm_terms(terms: Tensor, rows: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of absolute values, as `attention_terms` does, for the gradients of rows, weight and bias of a
    layer norm.

    `terms` are those sums for the normed rows."""
    if weight is None:
        return terms, terms.sum((0, 1)), terms.sum((0, 1))
    with torch.no_grad():
        centred = rows - rows.mean(-1, keepdim=True)
        factor = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
        sizes, scaled = (centred * factor).abs(), terms * weight.abs()
        through = factor * (scaled + scaled.mean(-1, keepdim=True) + sizes * (scaled * sizes).mean(-1, keepdim=True))
        return through, (terms * sizes).sum((0, 1)), terms.sum((0, 1))


def share_of_terms(dtype: torch.dtype) -> float:
    """Return a fraction, at most a twentieth. The error of a gradient whose terms cancel is taken
    relative to this fraction of the terms' size.

    It is smaller for half types. Their kernels add the terms in float32, where each is rounded to 32 eps of float32 at
    most.
    """
    return min(0.05, 32 * torch.finfo(torch.float32).eps / torch.finfo(dtype).eps)


def largest_score(query: Tensor, key: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> float:
    """Return the largest absolute logit |q' k| / sqrt(D) of unmasked keys. The error of a rounded logit is up to eps
    times this number."""
    if key.numel() == 0 or query.numel() == 0:
        return 0.0
    seen = visible(key.detach(), ignored_keys(key, mask, cu_seqlens), torch.float64)
    return float((query.detach().double() @ seen.mT).abs().max()) * query.shape[-1] ** -0.5


# ---- intention


def _hidden(rows: Tensor, mask: Tensor | None) -> Tensor:
    return rows if mask is None else rows.masked_fill(mask[:, None, :, None], 0.0)


def _system(key: Tensor, alpha: Tensor | float, weights: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return K'WK + alpha I and K'W."""
    key = _hidden(key, mask)
    weighted = (
        key
        if weights is None
        else _hidden((weights if weights.dim() == 3 else weights[:, None])[..., None] * key, mask)
    )
    penalty = torch.as_tensor(alpha, dtype=key.dtype, device=key.device).expand(key.shape[:2])
    return weighted.mT @ key + penalty[..., None, None] * torch.eye(
        key.shape[-1], dtype=key.dtype, device=key.device
    ), weighted.mT


def intention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | float,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return Q (K'WK + alpha I)^-1 K'WV by a Cholesky factorisation, in the dtype of the inputs, differentiable by
    autograd."""
    system, weighted = _system(key, alpha, weights, mask)
    return query @ torch.cholesky_solve(weighted @ _hidden(value, mask), torch.linalg.cholesky(system))


def sigma_intention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | float,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return softmax(Q (K'WK + alpha I)^-1 K') V, in the dtype of the inputs, differentiable by autograd."""
    system, _ = _system(key, alpha, weights, mask)
    scores = query @ torch.cholesky_solve(_hidden(key, mask).mT, torch.linalg.cholesky(system))
    if mask is not None:
        scores = scores.masked_fill(mask[:, None, None], -torch.inf)
    return scores.softmax(-1) @ _hidden(value, mask)


def intention_in_torch(query: Tensor, key: Tensor, value: Tensor, alpha: float) -> Tensor:
    """Return intention as a user would write it in torch: products in the dtype of the inputs, the system in at least
    float32.

    A result is NaN if rounding makes the system not positive definite.
    """
    system = (key.mT @ key).to(torch.promote_types(key.dtype, torch.float32))
    system = system + alpha * torch.eye(key.shape[-1], dtype=system.dtype, device=system.device)
    factor, failure = torch.linalg.cholesky_ex(system)
    weight = torch.cholesky_solve((key.mT @ value).to(system.dtype), factor).masked_fill(
        failure[..., None, None] > 0, torch.nan
    )
    return query @ weight.to(query.dtype)


# ---- Nyström attention


def segment_means(tokens: Tensor, segments: int, mask: Tensor | None = None) -> Tensor:
    """Return the landmarks (B, H, m, D) of `tokens` (B, H, N, D): the mean of each of m segments, or 0 if all its
    tokens are masked."""
    size, longer = divmod(tokens.shape[2], segments)
    start, found = 0, []
    for j in range(segments):
        end = start + size + (j < longer)
        hidden = torch.zeros(tokens.shape[:3:2], dtype=torch.bool, device=tokens.device) if mask is None else mask
        present = ~hidden[:, start:end]
        kept = torch.where(present[:, None, :, None], tokens[:, :, start:end], 0)
        found.append(kept.sum(2) / present.sum(1).clamp(min=1)[:, None, None])
        start = end
    return torch.stack(found, dim=2).to(tokens.dtype)


def iterative_pinv(matrix: Tensor, iterations: int) -> Tensor:
    """Return the pseudo-inverse of each matrix (..., m, m) after this number of iterations, in a loop; 0 for a matrix
    of zeros."""
    if matrix.dim() > 2:
        return torch.stack([iterative_pinv(part, iterations) for part in matrix]) if matrix.shape[0] else matrix
    if not matrix.any():
        return torch.zeros_like(matrix.mT)
    z = matrix.mT / (matrix.abs().sum(0).max() * matrix.abs().sum(1).max())
    one = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        z = 0.25 * z @ (13 * one - matrix @ z @ (15 * one - matrix @ z @ (7 * one - matrix @ z)))
    return z


def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    landmarks: tuple[Tensor, Tensor],
    iterations: int = 6,
    scale: float | None = None,
) -> Tensor:
    """Return Nyström attention: the product of three softmaxes, a pseudo-inverse (exact for 0 iterations) and the
    values."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    near, far = landmarks
    gamma = (scale * near @ far.mT).softmax(-1)
    inverse = iterative_pinv(gamma, iterations) if iterations else torch.linalg.pinv(gamma)
    return (scale * query @ far.mT).softmax(-1) @ (inverse @ ((scale * near @ key.mT).softmax(-1) @ value))

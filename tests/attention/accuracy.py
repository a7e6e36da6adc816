"""Errors row by row, and the bounds that reliability promise P2 sets them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cmab_kernels.attention.reference import attention_reference, ignored_keys, visible

LAWS: dict[str, Callable[..., Tensor]] = {
    "normal": lambda *shape: torch.randn(*shape),
    "ten times": lambda *shape: 10 * torch.randn(*shape),
    "one outlier": lambda *shape: _with_outlier(torch.randn(*shape)),
    "all equal": lambda *shape: torch.full(shape, 0.75),
}


def _with_outlier(tensor: Tensor) -> Tensor:
    if tensor.numel():
        tensor.view(-1)[tensor.numel() // 2] = 1e3
    return tensor


def row_error(result: Tensor, oracle: Tensor) -> Tensor:
    """||result - oracle|| / ||oracle|| of each row; an exact zero must be met exactly."""
    difference = (result.double() - oracle.double()).norm(dim=-1)
    size = oracle.double().norm(dim=-1)
    exact = torch.where(difference == 0, 0.0, difference + math.inf)  # a NaN stays one, and passes no bound
    return torch.where(size > 0, difference / size, exact)


def oracle(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None, scale: float | None = None
):
    """(out, lse) by the definition, in float64, of the values that the kernels were given."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attention_reference(query.double(), key.double(), value.double(), mask, cu_seqlens, scale)


def largest_score(query: Tensor, key: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> float:
    """max abs(S), which no rounding of the logits can do better than eps of."""
    if key.numel() == 0 or query.numel() == 0:
        return 0.0
    seen = visible(key.detach(), ignored_keys(key, mask, cu_seqlens), torch.float64)
    return float((query.detach().double() @ seen.mT).abs().max()) * query.shape[-1] ** -0.5


def bound(dtype: torch.dtype, score: float, torch_error: Tensor | float, factor: float = 1.0) -> Tensor:
    """P2: float64 1e-12; float32 three times torch's own error, 32 eps or 4 eps max abs(S); half precision twice torch's own error."""
    own = torch.as_tensor(torch_error, dtype=torch.float64)
    if dtype in (torch.bfloat16, torch.float16):
        return factor * (2 * own).clamp(min=torch.finfo(dtype).eps)
    eps = torch.finfo(dtype).eps
    floor = max(1e-12 if dtype == torch.float64 else 32 * eps, 4 * eps * score)
    return factor * (3 * own).clamp(min=floor)


def gradient_terms(dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the gradients' rows would be if nothing cancelled: the size that rounding errors go by. (All keys equal: dQ is exactly 0.)"""
    scale = query.shape[-1] ** -0.5
    with torch.no_grad():
        weight = (scale * query @ key.mT - lse[..., None]).exp()
        slope = scale * weight * (dout.abs() @ value.abs().mT + (dout * out).abs().sum(-1, keepdim=True))
        return slope @ key.abs(), slope.mT @ query.abs(), weight.mT @ dout.abs()

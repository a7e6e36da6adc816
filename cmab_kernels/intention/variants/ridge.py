"""Ridge regression: w = (X'WX + alpha I)^-1 X'Wy."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.checks import as_flag
from ..api import ridge_state, solve_ridge
from ..solve import regularised_solve
from .inputs import check_rows, solver_of
from .models import LinearRegression
from .moments import class_moments


def ridge(
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    *,
    intercept: bool = True,
    weights: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    impl: str = "auto",
) -> LinearRegression:
    """The minimum of sum_i w_i |y_i - x_i' W - b|^2 + alpha |W|^2, with no penalty on the intercept b.

    Args:
        key: (B, H, N, D). float64, float32, bfloat16 or float16; sums and solution are float64.
        value: (B, H, N, E), the targets.
        alpha: >= 0: a number, or a tensor that broadcasts to (B, H).
        intercept: False fixes b = 0, as in `cmab_kernels.intention`. The form without intercept streams (`ridge_state`,
            `solve_ridge`).
        weights, key_padding_mask, impl: as in `cmab_kernels.intention`.

    Returns:
        LinearRegression with `predict(query)`, differentiable in key, value, alpha and weights. If there are no rows,
        or all rows have weight 0, and alpha > 0, the predictions are 0.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it.

    Source: Exploring the Space of Key-Value-Query Models with Intention (Garnelo and Czarnecki). The weighted form in
    the paper, y_m = Z y for Z = W^1/2, has an error: with X_m = Z X the targets are Z y too, so that X'y becomes
    X'Z^2 y = X'Wy.

    >>> x = torch.linspace(0, 1, 20, dtype=torch.float64)[None, None, :, None]
    >>> line = cmab_kernels.intention.variants.ridge(x, 3 * x + 2, alpha=1e-10)
    >>> f"{line.coefficients.item():.4f} {line.intercept.item():.4f}"
    '3.0000 2.0000'
    """
    check_rows(key, weights, key_padding_mask, value=value)
    if not as_flag("intercept", intercept):
        state = ridge_state(key, value, weights=weights, key_padding_mask=key_padding_mask, impl=impl)
        weight, info = solve_ridge(state, alpha, impl=solver_of(impl))
        return LinearRegression(weight, torch.zeros_like(weight[..., 0]), torch.zeros_like(weight[..., 0, :]), info)
    width = key.shape[-1]
    one_class = torch.zeros(key.shape[:3], dtype=torch.int64, device=key.device)
    rows = torch.cat([key, value], -1)
    moments = class_moments(
        rows, one_class, 1, pooled=True, weights=weights, key_padding_mask=key_padding_mask, impl=impl
    )
    scatter, mean = (
        moments.scatter.squeeze(2),
        moments.mean.masked_fill((moments.weight == 0).unsqueeze(-1), 0.0).squeeze(2),
    )
    weight, info = regularised_solve(
        scatter[..., :width, :width], scatter[..., :width, width:], alpha, impl=solver_of(impl)
    )
    return LinearRegression(weight, mean[..., :width], mean[..., width:], info)

"""Least squares under linear equalities and inequalities."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.checks import check_operands, kind_of, mismatch
from ..api import ridge_state
from ..solve import regularised_solve
from .active_set import INFEASIBLE, SOUND, active_set, solve_active
from .inputs import check_query, check_rows, expand_to, solver_of

Constraints = tuple[Tensor, Tensor]

ATTAINED = 1e-8
"""A solution is flagged if it violates an optimality condition by more than this, relative to the terms of the
condition."""


class ConstrainedRegression(NamedTuple):
    """The constrained minimum for each column of values, with its multipliers.

    Constraints are in the order of the P equalities, then the Q inequalities.
    """

    weight: Tensor
    """(B, H, D, E) float64; NaN where info is 1, 3 or 4."""
    multipliers: Tensor
    """(B, H, P + Q, E) float64: the gradient of half the sum of squares at `weight` is -(normals @ multipliers). The
    multipliers of inequalities are >= 0."""
    active: Tensor
    """(B, H, P + Q, E) bool: the constraints that hold with equality and determine the minimum."""
    info: Tensor
    """(B, H, E) int32: 0 sound; 1 not positive definite; 2 ill-conditioned; 3 infeasible: no point satisfies all
    constraints; 4 the search was given up."""

    def predict(self, query: Tensor) -> Tensor:
        """Predictions (B, H, M, E) at query (B, H, M, D), in its dtype."""
        batch, heads, width, _ = self.weight.shape
        return (check_query(query, batch, heads, width) @ self.weight).to(query.dtype)


def constrained(
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor = 0.0,
    *,
    equal: Constraints | None = None,
    at_most: Constraints | None = None,
    weights: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    impl: str = "auto",
) -> ConstrainedRegression:
    """The minimum of sum_i w_i |y_i - x_i' W|^2 + alpha |W|^2 subject to C'W = c and A'W <= b.

    Args:
        key: (B, H, N, D). float64, float32, bfloat16 or float16; sums and solution are float64.
        value: (B, H, N, E): E problems with the same keys.
        alpha: >= 0: a number, or a tensor that broadcasts to (B, H). Keys of rank below D need alpha > 0 (`info` 1 or
            2).
        equal: (C, c). C broadcasts to (B, H, D, P), with one column per constraint; c broadcasts to (B, H, P, E), with
            one row per constraint.
        at_most: (A, b), likewise with Q constraints; an infinite bound is no constraint.
        weights, key_padding_mask, impl: as in `cmab_kernels.intention`.

    Returns:
        ConstrainedRegression. Differentiable in key, value, alpha, weights and the constraints, through the optimality
        conditions of the final active set. `vmap` and the compiler cannot trace the search, because it depends on the
        data. Use B and H for batches.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it.

    Source: Exploring the Space of Key-Value-Query Models with Intention (Garnelo and Czarnecki). The paper makes a
    single correction by all violated constraints, w - Z N (N'Z N)^-1 (N'w - n) with Z = (K'K + alpha I)^-1. The
    corrected point may be infeasible, or not minimal: one of these constraints may have to leave again, and others may
    become violated. Here an active-set method selects the constraints of that formula.

    >>> key = torch.eye(3, dtype=torch.float64)[None, None]
    >>> value = torch.tensor([0.8, -1.0, 0.6], dtype=torch.float64)[None, None, :, None]
    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> sums_to_one = (torch.ones(3, 1, dtype=torch.float64), one)
    >>> not_negative = (-torch.eye(3, dtype=torch.float64), 0 * one.expand(3, 1))
    >>> nearest = cmab_kernels.intention.variants.constrained(key, value, equal=sums_to_one, at_most=not_negative)
    >>> torch.allclose(nearest.weight.flatten(), torch.tensor([0.6, 0.0, 0.4], dtype=torch.float64))
    True
    """
    check_rows(key, weights, key_padding_mask, value=value)
    state = ridge_state(key, value, weights=weights, key_padding_mask=key_padding_mask, impl=impl)
    columns = value.shape[-1]
    normals, bounds, equalities = _stacked(equal, at_most, state.moment)
    solution, info = regularised_solve(state.gram, torch.cat([state.moment, normals], -1), alpha, impl=solver_of(impl))
    free, turned = solution.split([columns, normals.shape[-1]], -1)  # w0 = Z K'V and Z N
    size = normals.mT.abs() @ free.abs() + bounds.abs()
    active, problem = _search(normals.mT @ turned, normals.mT @ free - bounds, size, equalities, impl)
    weight, multipliers, doubt = _held(free, turned, normals, bounds, active, impl)
    missed = _missed(normals.mT @ weight - bounds, size, multipliers, equalities)
    info = torch.maximum(info.unsqueeze(-1), doubt)
    # A constraint with a NaN bound is never active, so the weight alone would not show the NaN.
    undefined = (weight.isnan() | bounds.isnan().any(-2, keepdim=True)).any(-2)
    info = info.masked_fill(missed & (info == 0), 2).masked_fill(undefined, 1)
    info = torch.where((info != 1) & (problem != SOUND), problem, info)
    unsolved = ((info != 0) & (info != 2)).unsqueeze(-2)
    return ConstrainedRegression(
        weight.masked_fill(unsolved, torch.nan), multipliers.masked_fill(unsolved, torch.nan), active, info
    )


def _stacked(equal: Constraints | None, at_most: Constraints | None, moment: Tensor) -> tuple[Tensor, Tensor, int]:
    """The normals (B, H, D, R) and bounds (B, H, R, E) of all constraints in float64, and the number of equalities."""
    (normals, bounds), (others, limits) = _pair("equal", equal, moment), _pair("at_most", at_most, moment)
    return torch.cat([normals, others], -1), torch.cat([bounds, limits], -2), normals.shape[-1]


def _pair(name: str, pair: Constraints | None, moment: Tensor) -> Constraints:
    batch, heads, width, columns = moment.shape
    if pair is None:
        return moment.new_zeros(batch, heads, width, 0), moment.new_zeros(batch, heads, 0, columns)
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(mismatch(name, kind_of(pair), "a pair of tensors (normals, bounds)"))
    normals, bounds = pair
    check_operands(**{f"{name}[0]": normals, f"{name}[1]": bounds})
    if normals.dim() < 2:
        raise ValueError(mismatch(f"{name}[0]", f"shape {tuple(normals.shape)}", f"(..., D, P) with D = {width}"))
    rows = normals.shape[-1]
    shapes = (batch, heads, width, rows), (batch, heads, rows, columns)
    normals, bounds = (expand_to(f"{name}[{i}]", t, shapes[i], moment.device) for i, t in enumerate(pair))
    return normals, bounds


def _search(products: Tensor, excess: Tensor, size: Tensor, equalities: int, impl: str) -> tuple[Tensor, Tensor]:
    """The active set (B, H, R, E) and the `info` of the search (B, H, E). Problems that are not finite are skipped."""
    batch, heads, rows, columns = excess.shape
    if rows == 0:
        return torch.zeros_like(excess, dtype=torch.bool), excess.new_zeros(batch, heads, columns, dtype=torch.int32)
    is_equality = torch.arange(rows, device=excess.device).unsqueeze(-1) < equalities
    never_met = (excess == torch.inf) | (is_equality & excess.isinf())
    skipped = (never_met | excess.isnan()).any(-2, keepdim=True) | ~products.isfinite().all(-1).all(-1)[..., None, None]
    one = torch.eye(rows, dtype=products.dtype, device=products.device)
    symmetric = ((products + products.mT) / 2).unsqueeze(2)
    flat = torch.where(skipped.mT.unsqueeze(-1), one, symmetric).flatten(0, 2)
    excess, size = (t.masked_fill(skipped, 0.0).mT.flatten(0, 2) for t in (excess, size))
    active, info = active_set(flat, excess, size, equalities, impl)
    info = info.view(batch, heads, columns).masked_fill(never_met.any(-2), INFEASIBLE)
    return active.view(batch, heads, columns, rows).mT, info


def _held(
    free: Tensor, turned: Tensor, normals: Tensor, bounds: Tensor, active: Tensor, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The minimum (B, H, D, E) with the active constraints as equalities, its multipliers (B, H, R, E), and `info`.

    `info` (B, H, E) belongs to the systems for the multipliers. One step of iterative refinement makes the constraints
    hold up to rounding. The derivative does not include this step.
    """
    products = normals.mT @ turned
    multipliers, info = _settled(products, normals.mT @ free - bounds, active, impl)
    weight = free - turned @ multipliers
    with torch.no_grad():
        remainder, _ = _settled(products, normals.mT @ weight - bounds, active, impl)
    return weight - turned.detach() @ remainder, multipliers + remainder, info


def _settled(products: Tensor, excess: Tensor, active: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    """The multipliers (B, H, R, E) that reduce the excess of active constraints to 0, and their `info` (B, H, E)."""
    batch, heads, rows, columns = active.shape
    if rows == 0:
        return excess, excess.new_zeros(batch, heads, columns, dtype=torch.int32)
    systems = products.unsqueeze(2).expand(*active.mT.shape, rows)
    weight, info = solve_active(systems, excess.mT.unsqueeze(-1), active.mT, impl)
    return weight.squeeze(-1).mT, info


def _missed(excess: Tensor, size: Tensor, multipliers: Tensor, equalities: int) -> Tensor:
    """True where a constraint, or the sign of a multiplier, is violated by more than `ATTAINED`, (B, H, E) bool."""
    is_equality = torch.arange(excess.shape[-2], device=excess.device).unsqueeze(-1) < equalities
    violated = torch.where(is_equality, excess.abs(), excess) > ATTAINED * size
    pulling = ~is_equality & (-multipliers > ATTAINED * multipliers.abs().sum(-2, keepdim=True))
    return (violated | pulling).any(-2)

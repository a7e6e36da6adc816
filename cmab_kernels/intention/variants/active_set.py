"""A dual active-set method for a batch of strictly convex quadratic programmes. It finds the active constraints."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..solve import RidgeSolution
from .models import scaled_solve

VIOLATED = 1e-12
"""A constraint counts as violated if its excess is more than this fraction of the terms of the excess."""
DEPENDENT = 1e-12
"""A normal counts as linearly dependent on the active normals if some linear combination of them all has a squared norm
below this. The absolute values of the coefficients of the combination sum to 1."""
NEGLIGIBLE = 1e-10
"""A multiplier counts as constant if it falls by less than this while that of the entering constraint rises by 1."""

SOUND, INFEASIBLE, UNFINISHED = 0, 3, 4


class _Systems(NamedTuple):
    """The systems of S programmes with R constraints each, scaled so that `products` (S, R, R) has 1 on its
    diagonal."""

    products: Tensor
    excess: Tensor
    size: Tensor

    def of(self, which: Tensor) -> _Systems:
        return _Systems(*(part[which] for part in self))


class _Progress(NamedTuple):
    """The progress of the S programmes. `pending` (S,) is the index of the constraint being added; -1 means none."""

    multipliers: Tensor
    active: Tensor
    pending: Tensor
    info: Tensor

    def of(self, which: Tensor) -> _Progress:
        return _Progress(*(part[which] for part in self))

    def put(self, which: Tensor, new: _Progress) -> None:
        for part, values in zip(self, new, strict=True):
            part[which] = values


@torch.no_grad()
def active_set(products: Tensor, excess: Tensor, size: Tensor, equalities: int, impl: str) -> tuple[Tensor, Tensor]:
    """The active set (S, R) bool of each programme, and its info (S,) int32: 0 solved, 3 infeasible, 4 given up.

    The programme is min w'Gw / 2 - m'w with N'w = n for the first `equalities` constraints and N'w <= n for the others.
    The arguments are products = N'G^-1N (S, R, R), excess = N'w0 - n (S, R) at the unconstrained minimum w0, and size
    (S, R), the magnitude of the terms of the excess.

    This is the method of Goldfarb and Idnani (A numerically stable dual method for solving strictly convex quadratic
    programs), in terms of the multipliers alone: since w = w0 - G^-1 N lambda, the excess at w is
    excess - products lambda. The most violated constraint enters: its multiplier rises until the constraint holds. If
    the multiplier of another constraint reaches 0 first, that constraint leaves, and the multiplier
    rises further. Each entry makes the dual objective larger, so that no active set recurs. If the
    new normal depends on the active normals and no active constraint can leave, no point satisfies
    all constraints.
    """
    scale = torch.where((diagonal := products.diagonal(dim1=-2, dim2=-1)) > 0, diagonal, 1.0).rsqrt()
    systems = _Systems(scale.unsqueeze(-1) * products * scale.unsqueeze(-2), scale * excess, scale * size)
    equality = torch.arange(excess.shape[1], device=excess.device) < equalities
    progress = _Progress(
        torch.zeros_like(excess),
        torch.zeros_like(excess, dtype=torch.bool),
        torch.full_like(excess[:, 0], -1, dtype=torch.int64),
        torch.zeros_like(excess[:, 0], dtype=torch.int32),
    )
    unsolved = torch.arange(excess.shape[0], device=excess.device)
    here = progress.of(unsolved)
    for _ in range(100 + 20 * excess.shape[1]):
        entering = _entering(systems, here, equality)
        going_on = (entering >= 0) & (here.info == SOUND)
        if not going_on.all():
            progress.put(unsolved, here)
            systems, here = systems.of(going_on), here.of(going_on)
            unsolved, entering = unsolved[going_on], entering[going_on]
        if unsolved.numel() == 0:
            break
        here = _step(systems, here, entering, equality, impl)
    else:
        progress.put(unsolved, here._replace(info=torch.where(here.info == SOUND, UNFINISHED, here.info)))
    return progress.active, progress.info


def solve_active(products: Tensor, rhs: Tensor, active: Tensor, impl: str) -> RidgeSolution:
    """Solve products (..., R, R), restricted to the rows and columns in the active set (..., R), for rhs (..., R, E); 0
    elsewhere.

    The active rows and columns are gathered first, because there are at most as many active constraints as variables.
    """
    count = max(1, int(active.sum(-1).max())) if active.numel() else 1
    order = active.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :count]
    there = active.gather(-1, order)
    rows = products.gather(-2, order.unsqueeze(-1).expand(*order.shape, products.shape[-1]))
    square = rows.gather(-1, order.unsqueeze(-2).expand(*order.shape, count))
    one = torch.eye(count, dtype=products.dtype, device=products.device)
    matrix = torch.where(there.unsqueeze(-1) & there.unsqueeze(-2), square, one)
    index = order.unsqueeze(-1).expand(*order.shape, rhs.shape[-1])
    weight, info = scaled_solve(matrix, rhs.gather(-2, index).masked_fill(~there.unsqueeze(-1), 0.0), impl)
    return RidgeSolution(torch.zeros_like(rhs).scatter(-2, index, weight), info)


def _entering(systems: _Systems, here: _Progress, equality: Tensor) -> Tensor:
    """The index of the constraint to add, (S,): the pending or else the most violated one; -1 if there is none."""
    excess = systems.excess - (systems.products @ here.multipliers.unsqueeze(-1)).squeeze(-1)
    violation = torch.where(equality, excess.abs(), excess)
    terms = systems.size + here.multipliers.abs().sum(-1, keepdim=True)  # after scaling no product exceeds 1
    violated = (violation > VIOLATED * terms) & ~here.active
    worst = torch.where(violated.any(-1), violation.masked_fill(~violated, -torch.inf).argmax(-1), -1)
    return torch.where(here.pending >= 0, here.pending, worst)


def _step(systems: _Systems, here: _Progress, entering: Tensor, equality: Tensor, impl: str) -> _Progress:
    """Raise the entering multiplier until its constraint holds or another constraint leaves; return the new
    progress."""
    row = torch.arange(entering.numel(), device=entering.device)
    active, column = here.active, systems.products[row, :, entering]
    own = here.multipliers[row, entering]
    given = torch.stack([column, systems.excess - column * own.unsqueeze(-1)], -1)
    response, settled = solve_active(systems.products, given, active, impl).weight.unbind(-1)
    multipliers = torch.where(active, settled, here.multipliers)  # a fresh solve does not accumulate rounding errors

    excess = systems.excess[row, entering] - (systems.products[row, entering] * multipliers).sum(-1)
    sign = torch.where(equality[entering] & (excess < 0), -1.0, 1.0).to(column.dtype)
    slope = column[row, entering] - (column * response).sum(-1)
    independent = slope > DEPENDENT * (1 + response.abs().sum(-1)).square()
    full = torch.where(independent, (sign * excess).clamp(min=0.0) / slope, torch.inf)
    falling = sign.unsqueeze(-1) * response
    may_leave = active & ~equality & (falling > NEGLIGIBLE)
    until, leaving = torch.where(may_leave, multipliers.clamp(min=0.0) / falling, torch.inf).min(-1)

    length = torch.minimum(full, until)
    impossible = length.isinf()
    length = length.masked_fill(impossible, 0.0)
    multipliers = multipliers - length.unsqueeze(-1) * falling
    multipliers[row, entering] = own + length * sign
    enters = (full <= until) & ~impossible
    leaves = ~enters & ~impossible
    active, multipliers = active.clone(), multipliers.clone()
    active[row[enters], entering[enters]] = True
    active[row[leaves], leaving[leaves]] = False
    multipliers[row[leaves], leaving[leaves]] = 0.0
    info = torch.where(impossible, INFEASIBLE, here.info).int()
    return _Progress(multipliers, active, torch.where(leaves, entering, -1), info)

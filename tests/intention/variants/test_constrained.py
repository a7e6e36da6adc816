"""Constrained least squares: the conditions of optimality, against scipy,
on degenerate and infeasible problems, and the gradient."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from cmab_kernels.intention import variants
from cmab_kernels.intention.variants import ConstrainedRegression, constrained

ALPHA = 1e-2


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _conditions(
    key: Tensor, value: Tensor, normals: Tensor, bounds: Tensor, equalities: int, fit: ConstrainedRegression
) -> Tensor:
    """Return the largest violation of the conditions of optimality for each problem,
    relative to the terms of each condition, (B, H, E)."""
    gram, moment = key.mT @ key + ALPHA * torch.eye(key.shape[-1], dtype=torch.float64), key.mT @ value
    w, multipliers = fit.weight, fit.multipliers
    slack = normals.mT @ w - bounds
    terms = normals.mT.abs() @ w.abs() + bounds.abs()
    gradient = (gram @ w - moment + normals @ multipliers).abs() / (
        gram.abs() @ w.abs() + normals.abs() @ multipliers.abs() + 1
    )
    feasible = torch.cat([slack[:, :, :equalities].abs(), slack[:, :, equalities:].clamp(min=0.0)], 2) / (terms + 1)
    inequality = multipliers[:, :, equalities:]
    signs = (-inequality).clamp(min=0.0)
    complementary = (slack[:, :, equalities:] * inequality).abs() / (
        (terms[:, :, equalities:] + 1) * (inequality.abs() + 1)
    )
    return torch.cat([gradient, feasible, signs, complementary], 2).amax(2)


SIZES = [
    (5, 0, 8, 20),
    (5, 2, 8, 20),
    (10, 3, 20, 30),
    (8, 0, 40, 20),
    (3, 0, 10, 10),
    (1, 0, 3, 4),
    (6, 6, 3, 9),
    (6, 2, 0, 9),
    (30, 0, 30, 40),
]


@pytest.mark.parametrize("width, equalities, inequalities, rows", SIZES)
@pytest.mark.parametrize("feasible", [True, False])
def test_optimality(impl: str, width: int, equalities: int, inequalities: int, rows: int, feasible: bool) -> None:
    """More than 4,000 random problems meet the conditions of optimality.

    Feasible ones have corners where more constraints meet than there are dimensions.
    """
    key, value = _randn(60, 2, rows, width), _randn(60, 2, rows, 3)
    normals = _randn(60, 2, width, equalities + inequalities)
    inside, room = normals.mT @ _randn(60, 2, width, 3), torch.rand(60, 2, inequalities, 3, dtype=torch.float64)
    bounds = inside if feasible else 0.5 * _randn(*inside.shape)
    if feasible:
        bounds[:, :, equalities:] += room * (room > 0.3)
    equal, at_most = normals.split([equalities, inequalities], -1), bounds.split([equalities, inequalities], -2)
    fit = constrained(key, value, ALPHA, equal=(equal[0], at_most[0]), at_most=(equal[1], at_most[1]), impl=impl)
    solved = fit.info == 0
    assert (fit.info == 3)[~solved].all() and (solved.all() or not feasible)
    assert (_conditions(key, value, normals, bounds, equalities, fit)[solved] < 1e-8).all()
    held = ((normals.mT @ fit.weight - bounds).abs() / (normals.mT.abs() @ fit.weight.abs() + bounds.abs()))[
        fit.active & solved.unsqueeze(2)
    ]
    assert held.numel() == 0 or held.max() < 1e-12, "refined to rounding"
    assert fit.weight.isnan().all(2).eq(~solved).all() and fit.weight.isnan().any(2).eq(~solved).all()
    for b, e in [(b, e) for b in range(8) for e in range(3)]:  # a linear program decides which problems are infeasible
        args = {"A_ub": normals[b, 1, :, equalities:].T, "b_ub": bounds[b, 1, equalities:, e]}
        args |= {"A_eq": normals[b, 1, :, :equalities].T, "b_eq": bounds[b, 1, :equalities, e]} if equalities else {}
        args = {name: a for name, a in args.items() if len(a)}
        assert scipy.optimize.linprog(np.zeros(width), bounds=(None, None), **args).success == bool(solved[b, 1, e])


def test_one_shot_is_not_enough() -> None:
    """The paper's single correction violates constraints or misses the minimum; the same check must report it."""
    key, value, normals = _randn(300, 1, 20, 5), _randn(300, 1, 20, 1), _randn(300, 1, 5, 8)
    bounds = normals.mT @ _randn(300, 1, 5, 1)
    inverse = torch.linalg.inv(key.mT @ key + ALPHA * torch.eye(5, dtype=torch.float64))
    w = inverse @ key.mT @ value
    multipliers = torch.zeros_like(bounds)
    for b in range(300):
        violated = (normals[b, 0].mT @ w[b, 0] > bounds[b, 0]).flatten()
        n = normals[b, 0][:, violated]
        step = torch.linalg.lstsq(n.mT @ inverse[b, 0] @ n, n.mT @ w[b, 0] - bounds[b, 0][violated]).solution
        w[b, 0] -= inverse[b, 0] @ n @ step
        multipliers[b, 0, violated] = step
    info = torch.zeros(300, 1, 1, dtype=torch.int32)
    once = ConstrainedRegression(w, multipliers, multipliers != 0, info)
    assert (_conditions(key, value, normals, bounds, 0, once) > 1e-8).double().mean() > 0.2


def test_nonnegative(impl: str) -> None:
    key, value = _randn(4, 2, 30, 6), _randn(4, 2, 30, 2)
    fit = constrained(
        key, value, at_most=(-torch.eye(6, dtype=torch.float64), torch.zeros(6, 1, dtype=torch.float64)), impl=impl
    )
    for b, h, e in np.ndindex(4, 2, 2):
        wanted, _ = scipy.optimize.nnls(key[b, h].numpy(), value[b, h, :, e].numpy())
        np.testing.assert_allclose(fit.weight[b, h, :, e], wanted, atol=1e-10)


def test_box_with_open_sides(impl: str) -> None:
    key, value = _randn(5, 1, 30, 6), _randn(5, 1, 30, 1)
    upper = torch.tensor([0.1, torch.inf, 0.0, 0.2, torch.inf, 0.05], dtype=torch.float64)
    lower = torch.tensor([-0.1, 0.0, -torch.inf, 0.1, -torch.inf, 0.05], dtype=torch.float64)
    one = torch.eye(6, dtype=torch.float64)
    fit = constrained(key, value, at_most=(torch.cat([one, -one], -1), torch.cat([upper, -lower])[:, None]), impl=impl)
    assert fit.info.eq(0).all()
    for b in range(5):
        at_equal = np.where(lower == upper, 1e-13, 0.0)  # scipy wants room between the bounds
        wanted = scipy.optimize.lsq_linear(
            key[b, 0], value[b, 0, :, 0], (lower - at_equal, upper + at_equal), tol=1e-14
        ).x
        np.testing.assert_allclose(fit.weight[b, 0, :, 0], wanted, atol=1e-7)


def test_general_against_slsqp(impl: str) -> None:
    key, value, normals = _randn(6, 1, 20, 5), _randn(6, 1, 20, 1), _randn(6, 1, 5, 7)
    bounds = normals.mT @ _randn(6, 1, 5, 1)
    bounds[:, :, 2:] += torch.rand(6, 1, 5, 1, dtype=torch.float64)
    fit = constrained(
        key, value, equal=(normals[..., :2], bounds[:, :, :2]), at_most=(normals[..., 2:], bounds[:, :, 2:]), impl=impl
    )
    for b in range(6):
        x, y, n, c = (t[b, 0].numpy() for t in (key, value[..., 0], normals, bounds[..., 0]))
        constraints = [
            {"type": "eq", "fun": lambda w, n=n, c=c: c[:2] - n[:, :2].T @ w},
            {"type": "ineq", "fun": lambda w, n=n, c=c: c[2:] - n[:, 2:].T @ w},
        ]
        objective = {
            "fun": lambda w, x=x, y=y: ((y - x @ w) ** 2).sum(),
            "jac": lambda w, x=x, y=y: -2 * x.T @ (y - x @ w),
        }
        found = scipy.optimize.minimize(
            **objective, x0=np.zeros(5), constraints=constraints, options={"ftol": 1e-12, "maxiter": 500}
        )
        np.testing.assert_allclose(fit.weight[b, 0, :, 0], found.x, atol=1e-5)


def test_degenerate_problems(impl: str) -> None:
    """Each constraint is given three times, once as a multiple. One constraint has no effect, and equalities are
    repeated."""
    key, value, normals = _randn(40, 1, 20, 4), _randn(40, 1, 20, 2), _randn(40, 1, 4, 3)
    bounds = normals.mT @ _randn(40, 1, 4, 2)
    plain = constrained(
        key, value, equal=(normals[..., :1], bounds[:, :, :1]), at_most=(normals[..., 1:], bounds[:, :, 1:]), impl=impl
    )
    thrice = torch.cat(
        [normals[..., 1:], 5 * normals[..., 1:], normals[..., 1:], torch.zeros(40, 1, 4, 1, dtype=torch.float64)], -1
    )
    limits = torch.cat(
        [bounds[:, :, 1:], 5 * bounds[:, :, 1:], bounds[:, :, 1:], torch.zeros(40, 1, 1, 2, dtype=torch.float64)], -2
    )
    twice = (
        torch.cat([normals[..., :1], -2 * normals[..., :1]], -1),
        torch.cat([bounds[:, :, :1], -2 * bounds[:, :, :1]], -2),
    )
    fit = constrained(key, value, equal=twice, at_most=(thrice, limits), impl=impl)
    assert fit.info.eq(0).all()
    torch.testing.assert_close(fit.weight, plain.weight, rtol=1e-9, atol=1e-9)
    assert not fit.active[:, :, -1].any()


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_units_of_a_constraint_do_not_matter(impl: str, scale: float) -> None:
    key, value, normals = _randn(30, 1, 20, 4), _randn(30, 1, 20, 1), _randn(30, 1, 4, 6)
    bounds = normals.mT @ _randn(30, 1, 4, 1)
    plain = constrained(key, value, at_most=(normals, bounds), impl=impl)
    fit = constrained(key, value, at_most=(scale * normals, scale * bounds), impl=impl)
    assert fit.info.eq(0).all() and torch.equal(fit.active, plain.active)
    torch.testing.assert_close(fit.weight, plain.weight, rtol=1e-9, atol=1e-10)


def test_info(impl: str) -> None:
    """Infeasible or contradictory constraints, an impossible bound and a singular system are reported. Other problems
    stay right."""
    key, value = _randn(5, 1, 20, 2), _randn(5, 1, 20, 1)
    key[3, ..., 1] = 0.0
    normals = torch.tensor([[1.0, -1.0], [0.0, 0.0]], dtype=torch.float64).expand(5, 1, 2, 2)
    bounds = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [-torch.inf, 1.0], [1.0, 1.0], [0.1, 0.1]], dtype=torch.float64)[
        :, None, :, None
    ]
    fit = constrained(key, value, at_most=(normals, bounds), impl=impl)
    assert fit.info.flatten().tolist() == [0, 3, 3, 1, 0]
    alone = constrained(key[4:], value[4:], at_most=(normals[4:], bounds[4:]), impl=impl)
    assert torch.equal(alone.weight, fit.weight[4:]) and fit.weight[[1, 2, 3]].isnan().all()
    contradiction = torch.ones(2, 2, dtype=torch.float64), torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    assert constrained(key, value, 0.1, equal=contradiction, impl=impl).info.eq(3).all()


@pytest.mark.parametrize("kind", ["equal", "at_most"])
def test_a_bound_that_is_nan_is_reported(impl: str, kind: str) -> None:
    """Comparisons with a NaN are false, so its constraint enters no active set. Other problems stay right."""
    key, value, normals = _randn(2, 1, 9, 2), _randn(2, 1, 9, 2), _randn(2, 2)
    bounds = _randn(2, 1, 2, 2)
    right = constrained(key, value, 0.1, **{kind: (normals, bounds)}, impl=impl)
    bounds[1, 0, 0, 1] = torch.nan
    fit = constrained(key, value, 0.1, **{kind: (normals, bounds)}, impl=impl)
    assert fit.info[1, 0, 1] == 1 and fit.weight[1, 0, :, 1].isnan().all()
    fit.weight[1, 0, :, 1], fit.info[1, 0, 1] = right.weight[1, 0, :, 1], right.info[1, 0, 1]
    assert torch.equal(fit.weight, right.weight) and torch.equal(fit.info, right.info)


def test_without_constraints_it_is_ridge(impl: str) -> None:
    key, value = _randn(2, 3, 20, 4), _randn(2, 3, 20, 2)
    fit = constrained(key, value, 0.3, impl=impl)
    wanted = variants.ridge(key, value, 0.3, intercept=False, impl=impl)
    torch.testing.assert_close(fit.weight, wanted.coefficients)
    torch.testing.assert_close(fit.predict(key), wanted.predict(key))
    assert fit.multipliers.shape == (2, 3, 0, 2) and fit.info.shape == (2, 3, 2)
    empty = constrained(key[:0], value[:0], at_most=(_randn(4, 3), _randn(3, 1)), impl=impl)
    assert empty.weight.shape == (0, 3, 4, 2)
    none = constrained(
        key[:, :, :0], value[:, :, :0], 1.0, equal=(torch.ones(4, 1).double(), torch.ones(1, 1).double()), impl=impl
    )
    torch.testing.assert_close(none.weight, torch.full((2, 3, 4, 2), 0.25, dtype=torch.float64))


def test_gradient(impl: str) -> None:
    key, value, normals, weights = (
        _randn(1, 1, 6, 3),
        _randn(1, 1, 6, 2),
        _randn(3, 5),
        torch.rand(1, 6, dtype=torch.float64),
    )
    alpha = torch.tensor(0.3, dtype=torch.float64)
    bounds = normals.mT @ _randn(3, 1) + 0.1
    inputs = [t.requires_grad_() for t in (key, value, alpha, normals, bounds, weights)]

    def solve(k: Tensor, v: Tensor, a: Tensor, n: Tensor, c: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        fit = constrained(k, v, a, equal=(n[:, :1], c[:1]), at_most=(n[:, 1:], c[1:]), weights=w, impl=impl)
        assert fit.active.sum() > 3
        return fit.weight, fit.multipliers

    assert torch.autograd.gradcheck(solve, inputs)
    assert torch.autograd.gradgradcheck(lambda *args: solve(*args)[0], inputs, fast_mode=True)

"""The batched regularised solves under the suite that every operator inherits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.runtime import checks
from cmab_kernels.testing import LAWS, Measured, OperatorSuite

Results = tuple[Tensor, ...]


def _solution(gram: Tensor, rhs: Tensor, alpha: Tensor) -> Tensor:
    """Return (A + alpha I)^-1 B, where only the lower triangle of A is read."""
    full = gram.tril() + gram.tril(-1).mT
    return torch.cholesky_solve(
        rhs,
        torch.linalg.cholesky(
            full + alpha[..., None, None] * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        ),
    )


class SolveSuite(OperatorSuite):
    """Well-conditioned systems. Promise P6 is about bad matrices: see test_promises.py of Intention, and
    test_native.py."""

    extents = {"B": 5, "H": 2, "D": 16, "E": 3}
    small = {"B": 2, "H": 1, "D": 3, "E": 1}
    outputs = ("weight",)
    dtypes = (torch.float64, torch.float32)
    laws = ("normal",)
    impls = ("reference", "native")
    repeatable = ("native",)
    gradient_tolerance = 1e-8
    layout_tolerance = {torch.float64: 1e-11, torch.float32: 1e-4}
    empty = "B"

    def make(self, name: str, shape: tuple[int, ...], law: str) -> Tensor:
        if name == "alpha":
            return torch.rand(shape) + 0.2
        if name != "gram":
            return LAWS[law](*shape)
        keys = LAWS[law](*shape[:-1], shape[-1] + 4)
        return keys @ keys.mT / shape[-1] + torch.eye(shape[-1])

    def torch_errors(self, error: Tensor) -> Tensor:
        return error.amax(-1, keepdim=True)

    def row_sizes(self, found: Measured) -> Tensor:
        size = found.right.norm(dim=-1)
        return size.maximum(size.amax(-1, keepdim=True)) if size.dim() else size

    def bad_arguments(self) -> list[str]:
        """Return no errors, because test_errors.py of Intention has all of them."""
        return []


class TestRegularisedSolve(SolveSuite):
    """`regularised_solve` with right-hand sides and a penalty for each system."""

    operator = "regularised_solve"
    arguments = {"gram": "BDD", "rhs": "BDE", "alpha": "B"}
    differentiable = ("rhs", "alpha")
    shapes = tuple({"D": width} for width in (1, 16, 33, 70))
    on_gpu = {
        "shapes": tuple({"B": 300, "D": width, "E": columns} for width in (1, 16, 33, 64, 128) for columns in (16, 5))
    }
    many = {"B": 66_000, "D": 2, "E": 1}

    def call(self, impl: str, **inputs: Tensor) -> Results:
        return (ck.regularised_solve(**inputs, impl=impl).weight,)

    def oracle(self, gram: Tensor, rhs: Tensor, alpha: Tensor) -> Results:
        return (_solution(gram, rhs, alpha),)


class TestThroughTheMatrix(TestRegularisedSolve):
    """`regularised_solve` with gradients to the matrix, of which only the symmetric part has a meaning."""

    differentiable = None
    shapes = ({},)
    many = None
    compilers = ("eager", "aot_eager")
    test_a_lazy_negation_is_seen = None  # a symmetrised matrix is no longer lazy

    def call(self, impl: str, gram: Tensor, rhs: Tensor, alpha: Tensor) -> Results:
        return (ck.regularised_solve((gram + gram.mT) / 2, rhs, alpha, impl=impl).weight,)

    def oracle(self, gram: Tensor, rhs: Tensor, alpha: Tensor) -> Results:
        return (_solution((gram + gram.mT) / 2, rhs, alpha),)


class TestRegularisedInverse(SolveSuite):
    """`regularised_inverse` with a penalty for each system."""

    operator = "regularised_inverse"
    arguments = {"gram": "BDD", "alpha": "B"}
    outputs = ("inverse",)

    def call(self, impl: str, gram: Tensor, alpha: Tensor) -> Results:
        return (ck.regularised_inverse((gram + gram.mT) / 2, alpha, impl=impl),)

    def oracle(self, gram: Tensor, alpha: Tensor) -> Results:
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
        return (_solution((gram + gram.mT) / 2, eye, alpha),)


class TestSolveRidge(SolveSuite):
    """`solve_ridge` for a state of float64 sums."""

    operator = "solve_ridge"
    arguments = {"gram": "BHDD", "moment": "BHDE", "alpha": "BH"}
    dtypes = (torch.float64,)
    empty = "BH"

    def call(self, impl: str, gram: Tensor, moment: Tensor, alpha: Tensor) -> Results:
        gram, moment = gram.double(), moment.double()
        state = ck.RidgeState((gram + gram.mT) / 2, moment, torch.full(gram.shape[:2], 20, device=gram.device))
        return (ck.solve_ridge(state, alpha, impl=impl).weight,)

    def oracle(self, gram: Tensor, moment: Tensor, alpha: Tensor) -> Results:
        return (_solution((gram + gram.mT) / 2, moment, alpha),)


# ---- checks of solves alone


def _positive_definite(width: int) -> Tensor:
    matrix = torch.randn(2, width, width).double()
    return matrix @ matrix.mT + torch.eye(width)


def test_the_gradient_of_a_matrix_belongs_to_both_triangles(impl: str) -> None:
    """The gradient of A is -(Z X' + X Z') / 2 with Z = (A + alpha I)^-1 dX,
    though the upper triangle is not read and may be NaN."""
    gram, rhs, slope = (
        _positive_definite(5),
        torch.randn(2, 5, 3).double().requires_grad_(),
        torch.randn(2, 5, 3).double(),
    )
    unread = gram.masked_fill(torch.ones(5, 5).triu(1).bool(), torch.nan).requires_grad_()
    solution = ck.regularised_solve(unread, rhs, 0.3, impl=impl).weight
    (found,) = torch.autograd.grad(solution, unread, slope)
    z = torch.cholesky_solve(slope, torch.linalg.cholesky(gram + 0.3 * torch.eye(5, dtype=gram.dtype)))
    torch.testing.assert_close(found, -(z @ solution.mT + solution @ z.mT) / 2, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [1, 7, 40, 90])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_negative_penalty_that_is_not_read_is_told_by_info(
    impl: str, order: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a negative alpha is not read, as on a GPU, its system is NaN with info 1, and the others keep their bits."""
    gram, rhs = _positive_definite(order).to(dtype)[:1].expand(5, -1, -1), torch.randn(5, order, 3).to(dtype)
    alpha = torch.tensor([0.5, -0.25, 0.0, -1e-30, torch.nan], dtype=dtype)
    right = ck.regularised_solve(gram, rhs, alpha.clamp(min=0.0).nan_to_num(1.0), impl=impl).weight
    monkeypatch.setattr(checks, "is_read", lambda tensor: False)
    weight, info = ck.regularised_solve(gram, rhs, alpha, impl=impl)
    bad = torch.tensor([False, True, False, True, True])
    assert torch.equal(info, bad.int()) and weight[bad].isnan().all()
    assert torch.equal(weight[~bad], right[~bad])

"""Measure the errors of every operator, the accuracy of solves, and the size of states, for `python -m tests.numbers`.

It writes bench/results/numbers.json, from which `python -m bench.report.numbers` makes a section of docs/numerics.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.runtime import backends
from cmab_kernels.testing import Measured, OperatorSuite, poisoned_memory

from .declarations import declarations
from .record import write

ROWS, DRAWS = 2000, 12
"""The number of result rows after which no more inputs are drawn, and the most draws."""


def spread(errors: Tensor) -> list[float]:
    """Return the median, the 99.9th percentile and the largest of the errors, and their number."""
    ordered = errors.double().sort().values
    median, most = (float(ordered[int(rank * (len(ordered) - 1))]) for rank in (0.5, 0.999))
    return [float(f"{figure:.2g}") for figure in (median, most, float(ordered[-1]))] + [len(ordered)]


# ---- operators


def errors_of(suite: type[OperatorSuite], dtype: torch.dtype, law: str) -> dict[str, list[float]]:
    """Return the spread of the errors of rows, of results and of gradients,
    relative to the row as in the suite's bounds."""
    found: dict[str, list[Tensor]] = {"results": [], "gradients": []}

    def keep(_: OperatorSuite, measured: Measured) -> None:
        if measured.name == "lse" or not measured.right.numel():
            return
        ours, right = (t.double() if t.dim() else t.double()[None] for t in (measured.ours, measured.right))
        size = suite().row_sizes(measured._replace(right=right)).clamp(min=1e-300)
        found["gradients" if measured.is_gradient else "results"].append(((ours - right).norm(dim=-1) / size).flatten())

    tests = type(suite.__name__, (suite,), {"check_rows": keep})()
    torch.manual_seed(0)
    for draw in range(DRAWS):
        inputs = tests.inputs(dtype, law, tests.shapes[draw % len(tests.shapes)])
        tests.check_accuracy(_impl(suite.operator), dtype, law, inputs)
        if sum(map(len, found["results"])) >= ROWS:
            break
    return {kind: spread(torch.cat(errors)) for kind, errors in found.items() if errors}


def _impl(operator: str) -> str:
    return "native" if backends.imported(backends.OPERATORS[operator], "native") else "reference"


def operators() -> dict[str, Any]:
    """Return operator -> dtype -> distribution -> the spread of errors, for the declaration of each operator with most
    dtypes and distributions."""
    widest: dict[str, type[OperatorSuite]] = {}
    for suite in sorted(declarations(), key=lambda suite: -len(suite.dtypes) * len(suite.laws)):
        widest.setdefault(suite.operator, suite)
    return {
        operator: {
            str(dtype).removeprefix("torch."): {law: errors_of(suite, dtype, law) for law in suite.laws}
            for dtype in suite.dtypes
        }
        for operator, suite in sorted(widest.items())
    }


# ---- solves


def solve_errors(dtype: torch.dtype, exponent: float, number: int = 500, width: int = 16) -> dict[str, Any]:
    """Return the spread of the relative error of solutions at a condition number of 10^exponent,
    and the share that `info` flags."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(number, width, width, dtype=torch.float64))[0]
    gram = (basis * torch.logspace(0, -exponent, width, dtype=torch.float64)) @ basis.mT
    gram = ((gram + gram.mT) / 2).to(dtype)
    rhs = (gram.double() @ torch.randn(number, width, 1, dtype=torch.float64)).to(dtype)
    weight, info = ck.regularised_solve(gram, rhs, 0.0)
    right = torch.linalg.solve(gram.double(), rhs.double()) if dtype != torch.float64 else _refined(gram, rhs)
    error = (weight.double() - right).norm(dim=(1, 2)) / right.norm(dim=(1, 2))
    return {"error": spread(error.nan_to_num(1.0)), "flagged": float((info != 0).double().mean())}


def _refined(gram: Tensor, rhs: Tensor) -> Tensor:
    """Return the solution in 50 digits, rounded to float64."""
    import mpmath

    mpmath.mp.dps = 50
    solved = [
        mpmath.lu_solve(mpmath.matrix(a.tolist()), mpmath.matrix(b.tolist())) for a, b in zip(gram, rhs, strict=True)
    ]
    return torch.tensor([[[float(entry)] for entry in each] for each in solved], dtype=torch.float64)


def solves() -> dict[str, Any]:
    """Return dtype -> exponent of the condition number -> errors of solutions."""
    exponents = {torch.float32: range(1, 9), torch.float64: range(1, 17)}
    return {
        str(dtype).removeprefix("torch."): {
            str(each): solve_errors(dtype, each, 500 if dtype == torch.float32 else 60) for each in several
        }
        for dtype, several in exponents.items()
    }


# ---- states


SIZES = {"H": 4, "L": 128, "D": 16, "E": 16, "n": 1024, "m": 16}
"""The lengths for which states are measured."""


def states() -> dict[str, int]:
    """Return the bytes of each kind of state for one batch element, in float32."""
    h, latents, d, e, n, m = SIZES.values()
    query, key, value = (torch.zeros(1, h, rows, width) for rows, width in ((latents, d), (n, d), (n, e)))
    exact = ck.continual_attention_init(key, key, value)
    retroactive = ck.continual_attention_step(
        exact, key[:, :, :1], key[:, :, :1], value[:, :, :1], output="retroactive"
    ).state
    held: dict[str, Any] = {
        "AttentionState": ck.attention_state(query, key, value),
        "RidgeState": ck.ridge_state(key, value),
        "ContinualNystromState": ck.continual_nystrom_init(key, key, value, num_landmarks=m),
        "ContinualAttentionState": exact,
        "ContinualAttentionState, retroactive": retroactive,
    }
    return {name: sum(t.nbytes for t in state if isinstance(t, Tensor) and t.dim()) for name, state in held.items()}


def main() -> None:
    torch.set_num_threads(1)
    with poisoned_memory():
        figures = {"solves": solves(), "states": {"sizes": SIZES, "bytes": states()}, "operators": operators()}
    print(write("numbers", figures))


if __name__ == "__main__":
    main()

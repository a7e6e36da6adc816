"""The figures of the numerics page are measured: the record is complete, sizes agree with the formulas, and errors have
not grown."""

from __future__ import annotations

import pytest
import torch

from cmab_kernels.runtime import backends
from cmab_kernels.testing import OperatorSuite

from . import numbers, record
from .declarations import declarations

pytest.importorskip("cmab_kernels.attention.native", reason="the extension was not built", exc_type=ImportError)


def test_states_have_the_size_of_their_formulas() -> None:
    h, latents, d, e, n, m = numbers.SIZES.values()
    ring, sums = 4 * (n + 1) * (2 * d + e), 4 * (2 * m * (e + 5) + 2 * m * d + m * m)
    formulas = {
        "AttentionState": latents * (4 * e + 8),
        "RidgeState": 8 * d * (d + e) + 8,
        "ContinualNystromState": ring + sums + 8,
        "ContinualAttentionState": ring + 8,
        "ContinualAttentionState, retroactive": ring + 2 * 4 * n * (e + 5) + 8,
    }
    assert (
        numbers.states()
        == {name: h * size for name, size in formulas.items()}
        == record.read("numbers")["states"]["bytes"]
    )


def test_every_operator_is_in_the_record() -> None:
    """Every operator with every dtype and law that its declarations have, and the solves of both dtypes."""
    kept = record.read("numbers")
    assert set(kept["operators"]) == set(backends.OPERATORS)
    for operator, dtypes in kept["operators"].items():
        declared = max(
            (suite for suite in declarations() if suite.operator == operator),
            key=lambda suite: len(suite.dtypes) * len(suite.laws),
        )
        assert set(dtypes) == {str(dtype).removeprefix("torch.") for dtype in declared.dtypes}
        assert all(set(laws) == set(declared.laws) for laws in dtypes.values())
    assert set(kept["solves"]) == {"float32", "float64"} and {"processor", "versions", "commit", "when"} <= set(kept)


def _faulty(suite: type[OperatorSuite]) -> type[OperatorSuite]:
    """Return the declaration of an operator with ten times the error in float32."""

    def call(self: OperatorSuite, impl: str, **inputs: torch.Tensor) -> list[torch.Tensor]:
        return [result * (1 + 1e-5) for result in suite.call(self, impl, **inputs)]

    return type("Faulty", (suite,), {"call": call})


@pytest.mark.parametrize("operator", ["latent_attention", "intention", "regularised_solve"])
def test_errors_are_as_they_were(operator: str) -> None:
    """A new measurement of the median float32 error is within four times the record, on any machine; a fault is
    found."""
    suite = next(suite for suite in declarations() if suite.operator == operator and torch.float32 in suite.dtypes)
    kept = record.read("numbers")["operators"][operator]["float32"]["normal"]["results"][0]
    assert numbers.errors_of(suite, torch.float32, "normal")["results"][0] < 4 * kept
    assert numbers.errors_of(_faulty(suite), torch.float32, "normal")["results"][0] > 4 * kept


def test_digits_of_solves() -> None:
    """A condition number of 1e3 costs float32 three digits and not five; at 1e8 no digit is left."""
    found = [numbers.solve_errors(torch.float32, exponent, 100) for exponent in (3, 8)]
    assert found[0]["error"][2] < 1e-4 and found[0]["flagged"] == 0.0
    assert found[1]["error"][0] > 1e-2 and found[1]["flagged"] == 1.0

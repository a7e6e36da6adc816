"""A NaN is never the largest score: every choice of the models and tasks."""

from __future__ import annotations

import math
import re
from pathlib import Path

import cmab_models
import pytest
import torch
from cmab_models import FewShot
from cmab_models.choices import classes_of, largest


def test_the_largest_of_scores_that_are_no_numbers() -> None:
    nan, inf = math.nan, math.inf
    scores = torch.tensor([[nan, 1, 2], [3, nan, -inf], [-inf, -inf, nan], [nan, nan, nan], [0, inf, nan]])
    assert largest(scores)[[0, 1, 3, 4]].tolist() == [2, 0, -1, 1]
    assert largest(torch.zeros(0, 3)).shape == (0,)


@pytest.mark.parametrize("estimator", ["lssvm", "scatter", "kernel"])
def test_an_example_without_a_class_is_refused(estimator: str) -> None:
    model, examples, classes = (
        FewShot(4, 3, estimator, dim=8),
        torch.randn(2, 6, 4),
        torch.eye(3).repeat(2, 1).repeat(2, 1, 1),
    )
    assert classes_of(classes).tolist() == 2 * [2 * [0, 1, 2]]
    assert model(examples, examples, classes).isfinite().all()
    classes[1, 2, 0] = math.nan
    with pytest.raises(ValueError, match="got a NaN"):
        model(examples, examples, classes)


def test_no_choice_takes_a_nan() -> None:
    """`argmax` takes a NaN for the largest score: `largest` chooses among scores;
    these calls choose among counts or classes."""
    counts = {"choices.py", "events.py", "scoring.py"}
    root = Path(cmab_models.__file__).parent
    assert {path.name for path in root.rglob("*.py") if re.search(r"\.arg(max|min)\(", path.read_text())} == counts

"""Classes and heads without a model are never chosen; labels are -1 if there is no choice."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor

from cmab_kernels.intention import variants
from cmab_kernels.intention.variants.models import most_likely

CLASSIFIERS = {
    "lda": variants.lda,
    "scatter": variants.pooled_class_scatter,
    "lssvm": lambda *args, **options: variants.lssvm(*args, 0.1, **options),
    "qda": variants.qda,
}


def _rows(count: int = 40) -> tuple[Tensor, Tensor]:
    labels = torch.arange(count)[None] % 3
    return torch.randn(1, 1, count, 2) + 4 * labels[:, None, :, None], labels


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_class_of_one_row(first: int) -> None:
    """A class of one row has a singular covariance. The model distinguishes the other classes as it would without this
    class."""
    rows, labels = _rows()
    alone = rows.new_full((1, 1, 1, 2), 9.0)
    others = [c for c in range(3) if c != first]
    kept = labels[0] != first
    key = torch.cat([rows[:, :, kept], alone], 2)
    classes = torch.cat([labels[:, kept], torch.tensor([[first]])], 1)
    model = variants.qda(key, classes, 3)
    with pytest.warns(
        RuntimeWarning, match=r"^info: some classes have 1, as they have no model; these are never chosen"
    ):
        found = model.predict(key)
    assert model.info[0, 0, first] == 1
    right = variants.qda(rows[:, :, kept], (labels[:, kept] == others[1]).long(), 2).predict(key)
    assert torch.equal(found, torch.tensor(others)[right])


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_head_without_a_model(name: str) -> None:
    """A constant feature, or rows of NaN: no class has a score there, and other heads are as they would be alone."""
    key, labels = _rows()
    for bad in (torch.full_like(key, math.nan), torch.zeros_like(key)):
        if name == "lssvm" and not bad.isnan().any():
            continue  # its penalty makes every system positive definite
        both = torch.cat([bad, key], 1)
        model = CLASSIFIERS[name](both, labels, 3)
        with pytest.warns(RuntimeWarning, match=r"^info: some (heads|classes) have 1, as they have no model"):
            found = model.predict(both)
        assert found[0, 0].eq(-1).all() and torch.equal(found[:, 1:], CLASSIFIERS[name](key, labels, 3).predict(key))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_query_that_is_no_number_has_no_class(name: str) -> None:
    key, labels = _rows()
    model = CLASSIFIERS[name](key, labels, 3)
    query = key.clone()
    query[0, 0, 4, 1] = math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, right = model.predict(query), model.predict(key)
    assert found[0, 0, 4] == -1 and right.ge(0).all()
    right[0, 0, 4] = -1
    assert torch.equal(found, right)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_class_without_members_is_never_chosen(name: str) -> None:
    """A class without members is never chosen, even far away, where the mean score of a least-squares machine exceeds
    the -1 of a class without members."""
    key, labels = _rows()
    labels = torch.where(labels == 2, 3, labels)
    far = torch.cat([100 * torch.randn(1, 1, 200, 2), key], 2)
    model = CLASSIFIERS[name](key, labels, 4)
    assert not model.predict(far).eq(2).any()


def test_no_warning_where_values_are_not_read() -> None:
    key, labels = _rows()
    model = variants.qda(torch.zeros_like(key), labels, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.func.vmap(lambda query: model.predict(query))(torch.stack([key, key]))
        assert found.eq(-1).all() and model._replace(info=model.info.to("meta")).predict(key).eq(-1).all()


def test_the_largest_score() -> None:
    nan, inf = math.nan, math.inf
    scores = torch.tensor(
        [[nan, 1, 2], [3, nan, -inf], [nan, -inf, nan], [-inf, -inf, -inf], [nan, nan, nan], [0, inf, nan]]
    )
    assert most_likely(scores).tolist() == [2, 0, -1, -1, -1, 1]

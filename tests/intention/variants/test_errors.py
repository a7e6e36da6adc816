"""Bad input raises an error that names the argument, the given value and the allowed values."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch

from cmab_kernels.intention import variants as v

K, V, Y = torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 2), torch.arange(9).expand(2, 9) % 3
N, C = torch.randn(4, 5), torch.randn(5, 2)
MOMENTS = v.class_moments(K, Y, 3, impl="reference")
POOLED = v.class_moments(K, Y, 3, pooled=True, impl="reference")
MODEL = v.ridge(K, V, 0.1, impl="reference")

BAD: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "key of three dimensions": (ValueError, r"^key: got shape \(3, 9, 4\)", lambda: v.lda(K[0], Y, 3)),
    "integer key": (TypeError, r"^key: got torch.int64", lambda: v.qda(K.long(), Y, 3)),
    "value too short": (ValueError, r"^value: got shape \(2, 3, 8, 2\)", lambda: v.ridge(K, V[:, :, 1:], 0.1)),
    "value of another dtype": (TypeError, r"^value: got torch.float64", lambda: v.ridge(K, V.double(), 0.1)),
    "negative alpha": (ValueError, r"^alpha: got -1", lambda: v.ridge(K, V, -1)),
    "negative weight": (ValueError, r"^weights: got a negative", lambda: v.lda(K, Y, 3, weights=-torch.ones(2, 9))),
    "weights too long": (ValueError, r"^weights: got shape \(2, 8\)", lambda: v.lda(K, Y, 3, weights=torch.ones(2, 8))),
    "additive mask": (
        TypeError,
        r"^key_padding_mask: got torch.float32",
        lambda: v.lda(K, Y, 3, key_padding_mask=torch.ones(2, 9)),
    ),
    "floating labels": (TypeError, r"^labels: got torch.float32.*int64", lambda: v.lda(K, Y.float(), 3)),
    "a list of labels": (TypeError, r"^labels: got a list", lambda: v.lda(K, Y.tolist(), 3)),
    "labels too short": (ValueError, r"^labels: got shape \(2, 8\).*\(2, 9\) or", lambda: v.lda(K, Y[:, 1:], 3)),
    "labels elsewhere": (ValueError, r"^labels: got device meta", lambda: v.lda(K, Y.to("meta"), 3)),
    "a negative label": (ValueError, r"^labels: got a negative", lambda: v.lda(K, Y - 1, 3)),
    "a label beyond": (
        ValueError,
        r"^num_classes - 1 - labels \(num_classes = 2\): got a negative",
        lambda: v.lda(K, Y, 2),
    ),
    "no classes": (ValueError, r"^num_classes: got 0", lambda: v.lda(K, Y, 0)),
    "a text of classes": (ValueError, r"^num_classes: got '3'.*an int", lambda: v.lda(K, Y, "3")),
    "classes that are None": (ValueError, r"^num_classes: got None", lambda: v.qda(K, Y, None)),
    "classes of floats": (ValueError, r"^num_classes: got 3.0", lambda: v.lda(K, Y, 3.0)),
    "shrinkage that is text": (TypeError, r"^shrinkage: got a str", lambda: v.lda(K, Y, 3, shrinkage="a")),
    "shrinkage of 2": (ValueError, r"^shrinkage: got 2", lambda: v.lda(K, Y, 3, shrinkage=2)),
    "shrinkage tensor of 2": (
        ValueError,
        r"^1 - shrinkage: got a negative",
        lambda: v.lda(K, Y, 3, shrinkage=torch.tensor(2.0)),
    ),
    "regularisation of -1": (ValueError, r"^regularisation: got -1", lambda: v.qda(K, Y, 3, regularisation=-1)),
    "two priors": (ValueError, r"^priors: got shape \(2,\).*\(2, 3, 3\)", lambda: v.lda(K, Y, 3, priors=[0.5, 0.5])),
    "priors that are text": (TypeError, r"^priors: got 'ab'", lambda: v.lda(K, Y, 3, priors="ab")),
    "ragged priors": (ValueError, r"^priors: got \[\[1\]", lambda: v.lda(K, Y, 3, priors=[[1], [1, 2]])),
    "a negative prior": (ValueError, r"^priors: got a negative", lambda: v.lda(K, Y, 3, priors=[0.5, -0.5, 1.0])),
    "pooled moments": (
        ValueError,
        r"^moments.scatter: got shape \(2, 3, 1, 4, 4\).*\(2, 3, 3, 4, 4\)",
        lambda: v.solve_qda(POOLED),
    ),
    "not moments": (TypeError, r"^moments: got a tuple", lambda: v.solve_lda(tuple(MOMENTS))),
    "float32 moments": (
        TypeError,
        r"^moments.mean: got torch.float32",
        lambda: v.solve_lda(MOMENTS._replace(mean=MOMENTS.mean.float())),
    ),
    "moments of two kinds": (ValueError, r"^states\[1\].scatter: got shape", lambda: v.merge_moments(MOMENTS, POOLED)),
    "a pooled state": (ValueError, r"^state.scatter: got shape", lambda: v.class_moments(K, Y, 3, state=POOLED)),
    "moments of other classes": (
        ValueError,
        r"^state.weight: got shape",
        lambda: v.class_moments(K, Y, 4, state=MOMENTS),
    ),
    "query of another width": (
        ValueError,
        r"^query: got shape \(2, 3, 9, 2\).*\(2, 3, M, 4\)",
        lambda: MODEL.predict(V),
    ),
    "query that is a list": (TypeError, r"^query: got a list", lambda: MODEL.predict(K.tolist())),
    "negative gamma": (ValueError, r"^gamma: got -1", lambda: v.kernel_features(K, K, -1)),
    "gamma that is text": (TypeError, r"^gamma: got a str", lambda: v.kernel_features(K, K, "a")),
    "gammas of another shape": (
        ValueError,
        r"^gamma: got shape \(4,\)",
        lambda: v.kernel_features(K, K, torch.ones(4)),
    ),
    "features of another width": (ValueError, r"^query: got shape", lambda: v.kernel_features(V, K, 1)),
    "too many landmarks": (ValueError, r"^num_landmarks: got 10.*N = 9", lambda: v.nystrom_features(K, K, 10, 1)),
    "landmarks that are text": (ValueError, r"^num_landmarks: got 'a'", lambda: v.nystrom_features(K, K, "a", 1)),
    "landmarks of floats": (ValueError, r"^num_landmarks: got 2.0", lambda: v.nystrom_features(K, K, 2.0, 1)),
    "normals of another width": (
        ValueError,
        r"^equal\[0\]: got shape \(5, 5\)",
        lambda: v.constrained(K, V, equal=(N.new_ones(5, 5), C)),
    ),
    "bounds too few": (
        ValueError,
        r"^at_most\[1\]: got shape \(4, 2\).*\(2, 3, 5, 2\)",
        lambda: v.constrained(K, V, at_most=(N, C[1:])),
    ),
    "normals alone": (TypeError, r"^equal: got a Tensor.*pair", lambda: v.constrained(K, V, equal=N)),
    "a vector of normals": (
        ValueError,
        r"^equal\[0\]: got shape \(4,\)",
        lambda: v.constrained(K, V, equal=(N[:, 0], C[:1])),
    ),
    "unknown impl": (ValueError, r"^impl: got 'fast'", lambda: v.lda(K, Y, 3, impl="fast")),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    error, message, call = BAD[case]
    with pytest.raises(error, match=message):
        call()


def test_a_fraction_is_a_number() -> None:
    half = Fraction(1, 2)
    assert torch.equal(v.lda(K, Y, 3, shrinkage=half)[0], v.lda(K, Y, 3, shrinkage=0.5)[0])  # type: ignore[arg-type]  # not a float
    assert torch.equal(v.qda(K, Y, 3, regularisation=half)[0], v.qda(K, Y, 3, regularisation=0.5)[0])  # type: ignore[arg-type]  # not a float

"""Bad input raises an error that names the argument, what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
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
    "key of three dimensions": (ValueError, r"`key` has shape \(3, 9, 4\)", lambda: v.lda(K[0], Y, 3)),
    "integer key": (TypeError, r"`key` is torch.int64", lambda: v.qda(K.long(), Y, 3)),
    "value too short": (ValueError, r"`value` has shape \(2, 3, 8, 2\)", lambda: v.ridge(K, V[:, :, 1:], 0.1)),
    "value of another dtype": (TypeError, r"`value` is torch.float64", lambda: v.ridge(K, V.double(), 0.1)),
    "negative alpha": (ValueError, r"`alpha` is -1", lambda: v.ridge(K, V, -1)),
    "negative weight": (ValueError, r"`weights` has a negative", lambda: v.lda(K, Y, 3, weights=-torch.ones(2, 9))),
    "weights too long": (ValueError, r"`weights` has shape \(2, 8\)", lambda: v.lda(K, Y, 3, weights=torch.ones(2, 8))),
    "additive mask": (TypeError, r"`key_padding_mask` is torch.float32", lambda: v.lda(K, Y, 3, key_padding_mask=torch.ones(2, 9))),
    "floating labels": (TypeError, r"`labels` is torch.float32.*int64", lambda: v.lda(K, Y.float(), 3)),
    "a list of labels": (TypeError, r"`labels` is a list", lambda: v.lda(K, Y.tolist(), 3)),
    "labels too short": (ValueError, r"`labels` has shape \(2, 8\).*\(2, 9\) or", lambda: v.lda(K, Y[:, 1:], 3)),
    "labels elsewhere": (ValueError, r"`labels` is on meta", lambda: v.lda(K, Y.to("meta"), 3)),
    "a negative label": (ValueError, r"`labels` has a negative", lambda: v.lda(K, Y - 1, 3)),
    "a label beyond": (ValueError, r"`num_classes - 1 - labels, with num_classes = 2,` has a negative", lambda: v.lda(K, Y, 2)),
    "no classes": (ValueError, r"`num_classes` is 0", lambda: v.lda(K, Y, 0)),
    "a text of classes": (ValueError, r"`num_classes` is '3'.*an int", lambda: v.lda(K, Y, "3")),
    "classes that are None": (ValueError, r"`num_classes` is None", lambda: v.qda(K, Y, None)),
    "classes of floats": (ValueError, r"`num_classes` is 3.0", lambda: v.lda(K, Y, 3.0)),
    "shrinkage that is text": (TypeError, r"`shrinkage` is a str", lambda: v.lda(K, Y, 3, shrinkage="a")),
    "shrinkage of 2": (ValueError, r"`shrinkage` is 2", lambda: v.lda(K, Y, 3, shrinkage=2)),
    "shrinkage tensor of 2": (ValueError, r"`1 - shrinkage` has a negative", lambda: v.lda(K, Y, 3, shrinkage=torch.tensor(2.0))),
    "regularisation of -1": (ValueError, r"`regularisation` is -1", lambda: v.qda(K, Y, 3, regularisation=-1)),
    "two priors": (ValueError, r"`priors` has shape \(2,\).*\(2, 3, 3\)", lambda: v.lda(K, Y, 3, priors=[0.5, 0.5])),
    "priors that are text": (TypeError, r"`priors` is 'ab'", lambda: v.lda(K, Y, 3, priors="ab")),
    "ragged priors": (ValueError, r"`priors` is \[\[1\]", lambda: v.lda(K, Y, 3, priors=[[1], [1, 2]])),
    "a negative prior": (ValueError, r"`priors` has a negative", lambda: v.lda(K, Y, 3, priors=[0.5, -0.5, 1.0])),
    "pooled moments": (ValueError, r"`moments.scatter` has shape \(2, 3, 1, 4, 4\).*\(2, 3, 3, 4, 4\)", lambda: v.solve_qda(POOLED)),
    "not moments": (TypeError, r"`moments` is a tuple", lambda: v.solve_lda(tuple(MOMENTS))),
    "float32 moments": (
        TypeError,
        r"`moments.mean` is torch.float32",
        lambda: v.solve_lda(MOMENTS._replace(mean=MOMENTS.mean.float())),
    ),
    "moments of two kinds": (ValueError, r"`states\[1\].scatter` has shape", lambda: v.merge_moments(MOMENTS, POOLED)),
    "a pooled state": (ValueError, r"`state.scatter` has shape", lambda: v.class_moments(K, Y, 3, state=POOLED)),
    "moments of other classes": (ValueError, r"`state.weight` has shape", lambda: v.class_moments(K, Y, 4, state=MOMENTS)),
    "query of another width": (ValueError, r"`query` has shape \(2, 3, 9, 2\).*\(2, 3, M, 4\)", lambda: MODEL.predict(V)),
    "query that is a list": (TypeError, r"`query` is a list", lambda: MODEL.predict(K.tolist())),
    "negative gamma": (ValueError, r"`gamma` is -1", lambda: v.kernel_features(K, K, -1)),
    "gamma that is text": (TypeError, r"`gamma` is a str", lambda: v.kernel_features(K, K, "a")),
    "gammas of another shape": (ValueError, r"`gamma` has shape \(4,\)", lambda: v.kernel_features(K, K, torch.ones(4))),
    "features of another width": (ValueError, r"`query` has shape", lambda: v.kernel_features(V, K, 1)),
    "too many landmarks": (ValueError, r"`num_landmarks` is 10.*N = 9", lambda: v.nystrom_features(K, K, 10, 1)),
    "landmarks that are text": (ValueError, r"`num_landmarks` is 'a'", lambda: v.nystrom_features(K, K, "a", 1)),
    "landmarks of floats": (ValueError, r"`num_landmarks` is 2.0", lambda: v.nystrom_features(K, K, 2.0, 1)),
    "normals of another width": (ValueError, r"`equal\[0\]` has shape \(5, 5\)", lambda: v.constrained(K, V, equal=(N.new_ones(5, 5), C))),
    "bounds too few": (ValueError, r"`at_most\[1\]` has shape \(4, 2\).*\(2, 3, 5, 2\)", lambda: v.constrained(K, V, at_most=(N, C[1:]))),
    "normals alone": (TypeError, r"`equal` is a Tensor.*pair", lambda: v.constrained(K, V, equal=N)),
    "a vector of normals": (ValueError, r"`equal\[0\]` has shape \(4,\)", lambda: v.constrained(K, V, equal=(N[:, 0], C[:1]))),
    "unknown impl": (ValueError, r"`impl` is 'fast'", lambda: v.lda(K, Y, 3, impl="fast")),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    error, message, call = BAD[case]
    with pytest.raises(error, match=message):
        call()

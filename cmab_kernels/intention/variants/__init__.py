"""Closed-form estimators built on the operators of Intention: all are w = Sigma^-1 X'y and differ in Sigma and y.

| file | estimator |
|---|---|
| `ridge` | ridge regression; kernel ridge regression with kernel features |
| `lssvm` | the least-squares support vector machine |
| `lda` | linear discriminant analysis; the pooled class scatter |
| `qda` | quadratic discriminant analysis |
| `features` | kernel and Nyström features, which turn all of these into kernel machines |
| `constrained` | least squares under equalities and inequalities |

Classifiers depend on the rows only through `ClassMoments`, which can be streamed: `class_moments`, `merge_moments`,
then `solve_...`.
"""

from .constrained import ConstrainedRegression, constrained
from .features import kernel_features, nystrom_features
from .lda import lda, pooled_class_scatter, solve_lda, solve_pooled_class_scatter
from .lssvm import lssvm, solve_lssvm
from .models import LinearClassifier, LinearRegression, QuadraticClassifier
from .moments import ClassMoments, class_moments, merge_moments
from .qda import qda, solve_qda
from .ridge import ridge

__all__ = [
    "ClassMoments",
    "ConstrainedRegression",
    "LinearClassifier",
    "LinearRegression",
    "QuadraticClassifier",
    "class_moments",
    "constrained",
    "kernel_features",
    "lda",
    "lssvm",
    "merge_moments",
    "nystrom_features",
    "pooled_class_scatter",
    "qda",
    "ridge",
    "solve_lda",
    "solve_lssvm",
    "solve_pooled_class_scatter",
    "solve_qda",
]

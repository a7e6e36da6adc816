"""The least-squares support vector machine: ridge regression on labels of -1 and 1."""

from __future__ import annotations

from torch import Tensor

from ..solve import regularised_solve
from .inputs import divided, solver_of
from .models import LinearClassifier
from .moments import ClassMoments, check_moments, class_moments, parted


def lssvm(
    key: Tensor,
    labels: Tensor,
    num_classes: int,
    alpha: float | Tensor,
    *,
    weights: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    impl: str = "auto",
) -> LinearClassifier:
    """For each class c the minimum of sum_i w_i (y_ic - x_i' w_c - b_c)^2 + alpha |w_c|^2, where y_ic is 1 in the class
    and -1 outside.

    Args:
        key, labels, num_classes, weights, key_padding_mask, impl: as in `class_moments`.
        alpha: >= 0, a penalty on w but not on b: a number, or a tensor that broadcasts to (B, H). The literature's
            gamma is 1 / alpha.

    Returns:
        LinearClassifier, one column per class; with two classes, one column is the negative of the other. A class
        without members scores -1 everywhere, and is never predicted: the mean score of the other classes is larger.
        Differentiable in key, alpha and weights, even where all weights of a class are 0.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it.

    Source: Suykens and Vandewalle, Least squares support vector machine classifiers; as a form of Intention, Garnelo
    and Czarnecki.

    >>> key = torch.tensor([[-2.0, 0.0], [-1.0, 0.5], [1.0, -0.5], [2.0, 0.0]])[None, None]
    >>> machine = cmab_kernels.intention.variants.lssvm(key, torch.tensor([[0, 0, 1, 1]]), 2, alpha=0.1)
    >>> machine.predict(torch.tensor([[[[-3.0, 1.0], [0.5, 0.0]]]])).tolist()
    [[[0, 1]]]
    """
    moments = class_moments(
        key, labels, num_classes, pooled=True, weights=weights, key_padding_mask=key_padding_mask, impl=impl
    )
    return solve_lssvm(moments, alpha, impl=impl)


def solve_lssvm(moments: ClassMoments, alpha: float | Tensor, *, impl: str = "auto") -> LinearClassifier:
    """`lssvm` of the rows that these moments summarise.

    With d_c = m_c - m, where m is the mean of all rows, and the total scatter T = sum_c S_c + n_c d_c d_c', the machine
    is w_c = (T + alpha I)^-1 2 n_c d_c, and its score at m is 2 n_c / n - 1. A class of weight 0 has a point b_c in
    place of its mean. It adds M_c (see `parted`) to the sums n_c d_c, and M_c d_c' + d_c M_c' to T. These terms are 0,
    but have gradients.

    >>> moments = cmab_kernels.intention.variants.class_moments(torch.randn(1, 1, 9, 2), torch.arange(9)[None] % 3, 3)
    >>> cmab_kernels.intention.variants.solve_lssvm(moments, alpha=0.1).coefficients.shape
    torch.Size([1, 1, 2, 3])
    """
    check_moments(moments)
    share = divided(moments.weight, moments.weight.sum(-1, keepdim=True))
    base, rest = parted(moments)
    centre = (share.unsqueeze(-2) @ base).squeeze(-2) + divided(rest.sum(2), moments.weight.sum(-1, keepdim=True))
    away = base - centre.unsqueeze(2)
    sums = (moments.weight.unsqueeze(-1) * away + rest).mT
    total = moments.scatter.sum(2) + sums @ away + away.mT @ rest
    weight, info = regularised_solve(total, 2 * sums, alpha, impl=solver_of(impl))
    return LinearClassifier(weight, centre, 2 * share - 1, info)

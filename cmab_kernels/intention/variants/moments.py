"""The moments of labelled rows, which determine every closed-form classifier. Merging them costs O(C D^2).

The moments of class c are its weight n_c = sum w_i, mean m_c and scatter S_c = sum w_i (x_i - m_c)(x_i - m_c)'. Sets a
and b merge by

    n = n_a + n_b    m = m_a + (n_b / n) delta    S = S_a + S_b + (n_a n_b / n) delta delta'    with delta = m_b - m_a

(Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances). Means are
subtracted before products are formed, so that rows far from the origin lose accuracy only by their own rounding.

A class of weight 0 has no mean, and its scatter has no gradient in its weights: both depend on how the weights leave 0.
Let the fixed point b be the unweighted mean of its rows. Its sums around b are smooth: M = sum w_i (x_i - b) and
S = sum w_i (x_i - b)(x_i - b)'. The mean of the class is represented as b + M, which is b with the gradient of M.
`parted` separates b and M. Results formed from b and M are exact, with gradients of any order, as soon as the class, or
all classes together, have a weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.checks import as_flag, check_dense, mismatch, not_a_state, not_a_tensor
from ...runtime.tracing import is_differentiated
from ..api import ridge_state
from ..reference import rows_of
from .inputs import check_labels, check_rows, divided, without_strays

ROWS = 4096
"""The number of rows that are converted to float64 at a time."""


class ClassMoments(NamedTuple):
    """The weight, mean and scatter of each class, in float64 for rows of any dtype."""

    weight: Tensor
    """(B, H, C): the number of rows, or the sum of their weights."""
    mean: Tensor
    """(B, H, C, D): 0 for a class without rows, and the unweighted mean for a class whose rows all have weight 0."""
    scatter: Tensor
    """(B, H, C, D, D), or the sum over the classes (B, H, 1, D, D) if `pooled`."""


def class_moments(
    key: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    pooled: bool = False,
    state: ClassMoments | None = None,
    weights: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    impl: str = "auto",
) -> ClassMoments:
    """Weight, mean and scatter of each class of rows, merged into `state` if one is given.

    Args:
        key: (B, H, N, D), any strides; N may be 0. float64, float32, bfloat16 or float16.
        labels: (B, N) or (B, H, N) int64 from 0 to num_classes - 1; labels of masked keys are ignored. Any other label
            is a `ValueError`. On a GPU labels are not read: there any other label makes the moments of its head NaN.
        pooled: True keeps only the sum of the scatters, which takes one pass for any number of
            classes. Only `qda` needs the separate scatters.
        state: the moments of earlier rows, with the same `pooled`. `state` is not changed.
        weights, key_padding_mask, impl: as in `cmab_kernels.intention`; a weight of 2 counts as two rows.

    Returns:
        ClassMoments in float64. Memory beside the inputs does not grow with N, unless gradients are needed (for key,
        weights, state). The scatter of a class of total weight 0 has one-sided derivatives in its weights, but no
        gradient, because a single weight that grows leaves the scatter 0. The returned gradient, (x_i - b)(x_i - b)',
        is right if all weights grow at the same rate. Here b is the unweighted mean of the rows of
        the class; with several chunks, or blocks of `ROWS` rows, b is the unweighted mean in the
        first of them that has rows of the class.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it.

    >>> key, labels = torch.randn(1, 2, 100, 4), torch.randint(3, (1, 100))
    >>> variants = cmab_kernels.intention.variants
    >>> whole = variants.class_moments(key, labels, 3)
    >>> part = variants.class_moments(key[:, :, :60], labels[:, :60], 3)
    >>> part = variants.class_moments(key[:, :, 60:], labels[:, 60:], 3, state=part)
    >>> all(torch.allclose(a, b) for a, b in zip(whole, part))
    True
    """
    checked, pooled = check_rows(key, weights, key_padding_mask), as_flag("pooled", pooled)
    labels = check_labels(labels, num_classes, key, key_padding_mask)
    if state is not None:
        batch, heads, _, width = key.shape
        check_moments(state, (batch, heads, num_classes, width), 1 if pooled else num_classes, key.device, "state")
    mask = key.new_zeros(key.shape[0], key.shape[2], dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    blocks = zip(key.split(ROWS, 2), labels.split(ROWS, 2), checked.split(ROWS, 2), mask.split(ROWS, 1), strict=True)
    for rows, classes, weight, absent in blocks:
        new = _block_moments(rows, classes, None if weights is None else weight, absent, num_classes, pooled, impl)
        state = new if state is None else _merge(state, new)
    assert state is not None  # split gives one empty block for N = 0
    return state


def merge_moments(first: ClassMoments, *others: ClassMoments) -> ClassMoments:
    """The moments of the union of disjoint sets of rows; associative and commutative up to rounding, differentiable.

    Every state must have the shapes and device of the first (`ValueError`) and be float64 (`TypeError`).

    >>> rows, labels = torch.randn(1, 1, 6, 2), torch.tensor([[0, 0, 1, 1, 0, 1]])
    >>> variants = cmab_kernels.intention.variants
    >>> halves = [variants.class_moments(rows[:, :, s], labels[:, s], 2) for s in (slice(0, 3), slice(3, 6))]
    >>> torch.allclose(variants.merge_moments(*halves).mean, variants.class_moments(rows, labels, 2).mean)
    True
    """
    check_moments(first, name="states[0]")
    merged = first if others else ClassMoments(*(part.clone() for part in first))
    for position, state in enumerate(others, start=1):
        check_moments(state, first.mean.shape, first.scatter.shape[2], first.mean.device, f"states[{position}]")
        merged = _merge(merged, state)
    return merged


def check_moments(
    state: ClassMoments,
    shape: tuple[int, ...] | None = None,
    scatters: int | None = None,
    device: torch.device | None = None,
    name: str = "moments",
) -> None:
    """Raise unless `state` is a `ClassMoments` with a mean of `shape` (B, H, C, D) and with
    `scatters` scatters. None allows any."""
    if not isinstance(state, ClassMoments):
        raise TypeError(not_a_state(name, state, ClassMoments))
    for part, tensor in state._asdict().items():
        if not isinstance(tensor, Tensor):
            raise TypeError(not_a_tensor(f"{name}.{part}", tensor))
        check_dense(f"{name}.{part}", tensor)
    if state.mean.dim() != 4:
        raise ValueError(mismatch(f"{name}.mean", f"shape {tuple(state.mean.shape)}", "(B, H, C, D)"))
    batch, heads, classes, width = state.mean.shape if shape is None else shape
    if scatters is None:
        scatters = 1 if state.scatter.shape[2:3] == (1,) else classes
    wanted = {
        "weight": (batch, heads, classes),
        "mean": (batch, heads, classes, width),
        "scatter": (batch, heads, scatters, width, width),
    }
    for part, extents in wanted.items():
        tensor = getattr(state, part)
        if tensor.shape != extents:
            raise ValueError(mismatch(f"{name}.{part}", f"shape {tuple(tensor.shape)}", extents))
        if tensor.dtype != torch.float64:
            raise TypeError(mismatch(f"{name}.{part}", tensor.dtype, "torch.float64"))
        if tensor.device != (device or state.mean.device):
            raise ValueError(
                mismatch(
                    f"{name}.{part}",
                    f"device {tensor.device}",
                    f"{device or state.mean.device}, the device of the other arguments",
                )
            )


def parted(moments: ClassMoments) -> tuple[Tensor, Tensor]:
    """The point b (B, H, C, D) around which each scatter is formed, and M = sum w_i (x_i - b).

    The value of M is 0. M has a gradient where the weight of the class is 0.
    """
    absent = (moments.weight == 0).unsqueeze(-1)
    fixed = moments.mean.detach()
    return torch.where(absent, fixed, moments.mean), (moments.mean - fixed).masked_fill(~absent, 0.0)


def _block_moments(
    rows: Tensor, labels: Tensor, weights: Tensor | None, mask: Tensor, classes: int, pooled: bool, impl: str
) -> ClassMoments:
    """The moments of a block of rows.

    The class sums are a `ridge_state` with one-hot labels as keys; the scatters are Gram matrices of centred rows.
    """
    rows = rows_of(rows, mask, torch.float64)
    given = rows.new_ones(()).expand(rows.shape[:3]) if weights is None else weights.double()
    labels, given = without_strays(labels.masked_fill(mask[:, None], 0), given.masked_fill(mask[:, None], 0.0), classes)
    member = (labels.unsqueeze(-1) == torch.arange(classes, device=rows.device)).double()
    sums = ridge_state(member, rows, weights=given, impl=impl)
    weight = sums.gram.diagonal(dim1=-2, dim2=-1)
    mean = base = divided(sums.moment, weight.unsqueeze(-1))
    if weights is not None:
        absent = (weight == 0).unsqueeze(-1)
        fixed = _unweighted_mean(rows, member, mask, impl)
        base = torch.where(absent, fixed, mean)
        mean = torch.where(absent, fixed + (sums.moment - weight.unsqueeze(-1) * fixed), mean)
    centred = rows - base.gather(2, labels.unsqueeze(-1).expand(rows.shape))
    return ClassMoments(
        weight, mean, _pooled(centred, given, impl) if pooled else _scatters(centred, member, given, impl)
    )


def _unweighted_mean(rows: Tensor, member: Tensor, mask: Tensor, impl: str) -> Tensor:
    """The unweighted mean of the unmasked rows of each class, (B, H, C, D), without gradients; 0 where it has none."""
    sums = ridge_state(member, rows.detach(), key_padding_mask=mask, impl=impl)
    return divided(sums.moment, sums.gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-1))


def _pooled(centred: Tensor, weights: Tensor, impl: str) -> Tensor:
    return ridge_state(centred, centred[..., :1], weights=weights, impl=impl).gram.unsqueeze(2)


def _scatters(centred: Tensor, member: Tensor, weights: Tensor, impl: str) -> Tensor:
    """The scatter of each class, computed as one head per class: heads share rows (stride 0) and differ in weights."""
    heads = centred.shape[:2]
    rows = centred.flatten(0, 1).unsqueeze(1).expand(-1, member.shape[-1], -1, -1)
    own = (weights.unsqueeze(-1) * member).flatten(0, 1).mT
    return ridge_state(rows, rows[..., :1], weights=own, impl=impl).gram.unflatten(0, heads)


def _merge(first: ClassMoments, second: ClassMoments) -> ClassMoments:
    weight = first.weight + second.weight
    # This includes a first set without rows, whose point is 0.
    moved = (first.weight == 0) & ((second.weight != 0) | (first.mean == 0).all(-1))
    if is_differentiated(*first, *second):
        return _merge_smoothly(first, second, weight, moved)
    share = divided(second.weight, weight).masked_fill(moved, 1.0)
    delta = second.mean - first.mean
    between = (first.weight * share)[..., None, None] * _outer(delta, delta)
    return _joined(first, second, weight, first.mean + share.unsqueeze(-1) * delta, between)


def _merge_smoothly(first: ClassMoments, second: ClassMoments, weight: Tensor, moved: Tensor) -> ClassMoments:
    """The union, with the gradients of classes of weight 0.

    With d = b_b - b_a, and with a and b exchanged where `moved`, for example where only b has a weight:

    m = b_a + (n_b d + M_b) / n        S = S_a + S_b + (n_a / n) (n_b d d' + M_b d' + d M_b') - M_b M_b' / n

    If both have weight 0, the union has weight 0, too. Its sums are then the sums around b_a, including M_a. They
    follow from these formulas without the divisions.
    """
    empty, (base, rest), (other, other_rest) = weight == 0, parted(first), parted(second)
    n_a, n_b = torch.where(moved, second.weight, first.weight), torch.where(moved, first.weight, second.weight)
    moved = moved.unsqueeze(-1)
    base, delta = torch.where(moved, other, base), torch.where(moved, base - other, other - base)
    rest, other_rest = torch.where(moved, other_rest, rest), torch.where(moved, rest, other_rest)
    kept, inverse = divided(n_a, weight).masked_fill(empty, 1.0), divided(torch.ones_like(weight), weight)
    sums = n_b.unsqueeze(-1) * delta + other_rest
    between = kept[..., None, None] * (_outer(sums, delta) + _outer(delta, other_rest))
    between = between - inverse.masked_fill(empty, 0.0)[..., None, None] * _outer(other_rest, other_rest)
    return _joined(first, second, weight, base + rest + inverse.unsqueeze(-1) * sums, between)


def _joined(first: ClassMoments, second: ClassMoments, weight: Tensor, mean: Tensor, between: Tensor) -> ClassMoments:
    if first.scatter.shape[2] != between.shape[2]:
        between = between.sum(2, keepdim=True)
    return ClassMoments(weight, mean, first.scatter + second.scatter + between)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left.unsqueeze(-1) * right.unsqueeze(-2)

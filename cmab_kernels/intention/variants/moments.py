"""The moments of labelled rows, which determine every closed-form classifier, and how they are merged, in O(C D^2).

They are, for each class c, its weight n_c = sum w_i, mean m_c and scatter S_c = sum w_i (x_i - m_c)(x_i - m_c)'. Two sets a and b merge by

    n = n_a + n_b    m = m_a + (n_b / n) delta    S = S_a + S_b + (n_a n_b / n) delta delta'    with delta = m_b - m_a

(Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances). Means are subtracted before
products are formed, so that rows far from the origin lose accuracy only by their own rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...checks import kind_of, wrong
from ..api import ridge_state
from ..reference import rows_of
from .inputs import check_labels, check_rows, divided, without_strays

ROWS = 4096
"""The number of rows that are converted to float64 at a time."""


class ClassMoments(NamedTuple):
    """The weight, mean and scatter of each class, float64 whatever the dtype of the rows."""

    weight: Tensor
    """(B, H, C): the number of rows, or the sum of their weights."""
    mean: Tensor
    """(B, H, C, D), 0 for a class without members."""
    scatter: Tensor
    """(B, H, C, D, D), or their sum over the classes (B, H, 1, D, D) if `pooled`."""


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
        labels: (B, N) or (B, H, N) int64 from 0 to num_classes - 1; labels of masked keys are ignored. Another number is a `ValueError`; on
            a GPU, where labels are not read, it makes the moments of its head NaN.
        pooled: True keeps only the sum of the scatters, which takes one pass whatever the number of classes; all but `qda` need no more.
        state: the moments of earlier rows, with the same `pooled`. It is not changed.
        weights, key_padding_mask, impl: as in `cmab_kernels.intention`; a weight of 2 counts as two rows.

    Returns:
        ClassMoments in float64. Memory beside the inputs does not grow with N, unless gradients are needed (for key, weights, state).

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
    weights = check_rows(key, weights, key_padding_mask)
    labels = check_labels(labels, num_classes, key, key_padding_mask)
    if state is not None:
        batch, heads, _, width = key.shape
        check_moments(state, (batch, heads, num_classes, width), 1 if pooled else num_classes, key.device, "state")
    mask = key.new_zeros(key.shape[0], key.shape[2], dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    blocks = zip(key.split(ROWS, 2), labels.split(ROWS, 2), weights.split(ROWS, 2), mask.split(ROWS, 1), strict=True)
    for rows, classes, weight, absent in blocks:
        new = _block_moments(rows, classes, weight, absent, num_classes, pooled, impl)
        state = new if state is None else _merge(state, new)
    assert state is not None  # split gives one empty block for N = 0
    return state


def merge_moments(first: ClassMoments, *others: ClassMoments) -> ClassMoments:
    """The moments of the union of disjoint sets of rows. Associative and commutative up to rounding, differentiable.

    Every state has the shapes and device of the first (`ValueError`) and is float64 (`TypeError`).

    >>> rows, labels = torch.randn(1, 1, 6, 2), torch.tensor([[0, 0, 1, 1, 0, 1]])
    >>> variants = cmab_kernels.intention.variants
    >>> halves = [variants.class_moments(rows[:, :, s], labels[:, s], 2) for s in (slice(0, 3), slice(3, 6))]
    >>> torch.allclose(variants.merge_moments(*halves).mean, variants.class_moments(rows, labels, 2).mean)
    True
    """
    check_moments(first, name="states[0]")
    merged = first
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
    """Raise unless `state` is a `ClassMoments` whose mean has `shape` (B, H, C, D) and `scatters` scatters; None accepts any."""
    if not isinstance(state, ClassMoments):
        raise TypeError(wrong(name, f"is {kind_of(state)}", "a ClassMoments(weight, mean, scatter) is needed"))
    if state.mean.dim() != 4:
        raise ValueError(wrong(f"{name}.mean", f"has shape {tuple(state.mean.shape)}", "(B, H, C, D) is needed"))
    batch, heads, classes, width = state.mean.shape if shape is None else shape
    if scatters is None:
        scatters = 1 if state.scatter.shape[2:3] == (1,) else classes
    wanted = {"weight": (batch, heads, classes), "mean": (batch, heads, classes, width), "scatter": (batch, heads, scatters, width, width)}
    for part, extents in wanted.items():
        tensor = getattr(state, part)
        if tensor.shape != extents:
            raise ValueError(wrong(f"{name}.{part}", f"has shape {tuple(tensor.shape)}", f"{extents} is needed"))
        if tensor.dtype != torch.float64:
            raise TypeError(wrong(f"{name}.{part}", f"is {tensor.dtype}", "torch.float64 is needed"))
        if tensor.device != (device or state.mean.device):
            raise ValueError(wrong(f"{name}.{part}", f"is on {tensor.device}", f"the other arguments are on {device or state.mean.device}"))


def _block_moments(rows: Tensor, labels: Tensor, weights: Tensor, mask: Tensor, classes: int, pooled: bool, impl: str) -> ClassMoments:
    """The moments of a block of rows: class sums by `ridge_state` with one-hot labels as keys, scatters as Grams of centred rows."""
    rows = rows_of(rows, mask, torch.float64)
    weights = weights.double().masked_fill(mask[:, None], 0.0)
    labels, weights = without_strays(labels.masked_fill(mask[:, None], 0), weights, classes)
    member = (labels.unsqueeze(-1) == torch.arange(classes, device=rows.device)).double()
    sums = ridge_state(member, rows, weights=weights, impl=impl)
    weight = sums.gram.diagonal(dim1=-2, dim2=-1)
    mean = divided(sums.moment, weight.unsqueeze(-1))
    centred = rows - mean.gather(2, labels.unsqueeze(-1).expand(rows.shape))
    return ClassMoments(weight, mean, _pooled(centred, weights, impl) if pooled else _scatters(centred, member, weights, impl))


def _pooled(centred: Tensor, weights: Tensor, impl: str) -> Tensor:
    return ridge_state(centred, centred[..., :1], weights=weights, impl=impl).gram.unsqueeze(2)


def _scatters(centred: Tensor, member: Tensor, weights: Tensor, impl: str) -> Tensor:
    """The scatter of each class, computed as one head per class that share the rows (stride 0) and differ in their weights."""
    heads = centred.shape[:2]
    rows = centred.flatten(0, 1).unsqueeze(1).expand(-1, member.shape[-1], -1, -1)
    own = (weights.unsqueeze(-1) * member).flatten(0, 1).mT
    return ridge_state(rows, rows[..., :1], weights=own, impl=impl).gram.unflatten(0, heads)


def _merge(first: ClassMoments, second: ClassMoments) -> ClassMoments:
    weight = first.weight + second.weight
    share = divided(second.weight, weight)
    delta = second.mean - first.mean
    between = (first.weight * share)[..., None, None] * (delta.unsqueeze(-1) * delta.unsqueeze(-2))
    if first.scatter.shape[2] != between.shape[2]:
        between = between.sum(2, keepdim=True)
    return ClassMoments(weight, first.mean + share.unsqueeze(-1) * delta, first.scatter + second.scatter + between)

"""Checks of the estimators' arguments, beyond those of `cmab_kernels.runtime.checks`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...runtime.backends import impl_for
from ...runtime.checks import (
    as_float,
    check_count,
    check_dense,
    check_floats,
    check_key_value,
    check_mask,
    check_number,
    check_operands,
    has_shape,
    mismatch,
    nan_if_refused,
    not_a_tensor,
    refuse_negative,
    weights_of_heads,
)


def check_rows(key: Tensor, weights: Tensor | None, mask: Tensor | None, **others: Tensor) -> Tensor:
    """Raise unless key is (B, H, N, D) and the others fit key; return the weights as (B, H, N), all 1 for None."""
    check_operands(key=key, **others)
    check_key_value(key, others.get("value", key))
    check_mask(mask, key)
    weights = weights_of_heads(weights, key)
    return key.new_ones((), dtype=torch.float64).expand(key.shape[:3]) if weights is None else weights


def check_labels(labels: Tensor, num_classes: int, key: Tensor, mask: Tensor | None) -> Tensor:
    """`labels` as (B, H, N). Raise if type, shape or device is wrong, or an unmasked label is outside the classes."""
    check_count("num_classes", num_classes)
    if not isinstance(labels, Tensor):
        raise TypeError(not_a_tensor("labels", labels, "a torch.Tensor of int64"))
    check_dense("labels", labels)
    if labels.dtype != torch.int64:
        raise TypeError(mismatch("labels", labels.dtype, "a torch.Tensor of int64"))
    batch, heads, length, _ = key.shape
    if not has_shape(labels, (batch, length), (batch, heads, length)):
        allowed = (
            f"(B, N) = {(batch, length)} or (B, H, N) = {(batch, heads, length)}, as key has shape {tuple(key.shape)}"
        )
        raise ValueError(mismatch("labels", f"shape {tuple(labels.shape)}", allowed))
    if labels.device != key.device:
        raise ValueError(mismatch("labels", f"device {labels.device}", f"{key.device}, the device of key"))
    labels = (labels if labels.dim() == 3 else labels.unsqueeze(1)).expand(batch, heads, length)
    counting = labels if mask is None else labels.masked_fill(mask[:, None], 0)
    refuse_negative("labels", counting)
    refuse_negative(f"num_classes - 1 - labels (num_classes = {num_classes})", num_classes - 1 - counting)
    return labels


def without_strays(labels: Tensor, weights: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """On a GPU, replace labels outside the classes by 0, and their weights by NaN. On the CPU, change nothing.

    Labels on a GPU are not read, so that `check_labels` cannot raise there.
    """
    if not labels.is_cuda:
        return labels, weights
    stray = (labels < 0) | (labels >= num_classes)
    return labels.masked_fill(stray, 0), weights.masked_fill(stray, torch.nan)


def fraction_of(name: str, given: float | Tensor, like: Tensor) -> Tensor:
    """A number in [0, 1], or a tensor of such numbers that broadcasts to (B, H), as float64 (B, H, 1, 1).

    `like` is any (B, H, ...) tensor.
    """
    if not isinstance(given, Tensor):
        check_number(name, given)
        if not 0 <= given <= 1:
            raise ValueError(mismatch(name, given, "a number from 0 to 1"))
        given = torch.full((), as_float(name, given), dtype=torch.float64, device=like.device)
    check_floats(name, given)
    refuse_negative(name, given)
    refuse_negative(f"1 - {name}", 1 - given)
    given = nan_if_refused(given, largest=1.0)
    return expand_to(name, given, like.shape[:2], like.device)[..., None, None]


def priors_of(given: Tensor | Sequence[float] | None, weight: Tensor) -> Tensor:
    """Class probabilities (B, H, C): the given ones, or shares of `weight` (B, H, C). 0 for a class without members."""
    if given is None:
        priors = weight
    else:
        priors = expand_to("priors", _as_tensor("priors", given, weight.device), weight.shape, weight.device)
        refuse_negative("priors", priors)
        priors = nan_if_refused(priors).masked_fill(weight == 0, 0.0)
    return divided(priors, priors.sum(-1, keepdim=True))


def _as_tensor(name: str, given: Tensor | Sequence[float], device: torch.device) -> Tensor:
    if isinstance(given, Tensor):
        return given
    try:
        return torch.tensor(given, dtype=torch.float64, device=device)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(mismatch(name, repr(given), "numbers, or a floating tensor")) from error


def expand_to(name: str, given: Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
    """`given` in float64, expanded to `shape`. Raise unless it broadcasts, is floating and is on `device`."""
    check_floats(name, given)
    if given.device != device:
        raise ValueError(mismatch(name, f"device {given.device}", f"{device}, the device of the other arguments"))
    aligned = zip(reversed(given.shape), reversed(shape), strict=False)
    if given.dim() > len(shape) or any(has not in (1, wanted) for has, wanted in aligned):
        raise ValueError(mismatch(name, f"shape {tuple(given.shape)}", f"a shape that broadcasts to {tuple(shape)}"))
    return given.double().expand(tuple(shape))


def check_query(query: Tensor, batch: int, heads: int, width: int) -> Tensor:
    """`query` in float64; raise unless it is (B, H, M, D)."""
    check_operands(query=query)
    if query.dim() != 4 or (*query.shape[:2], query.shape[-1]) != (batch, heads, width):
        raise ValueError(
            mismatch("query", f"shape {tuple(query.shape)}", f"(B, H, M, D) = ({batch}, {heads}, M, {width})")
        )
    return query.double()


def divided(total: Tensor, by: Tensor) -> Tensor:
    """total / by; where `by` is 0, the result is total, to avoid 0 / 0."""
    return total / by.masked_fill(by == 0, 1.0)


def solver_of(impl: str) -> str:
    """The `impl` that an estimator passes to its solves: the same if solves have it, else "auto"."""
    return impl_for(impl, "intention", "intention.solve")

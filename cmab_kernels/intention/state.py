"""The sums over keys and values that determine a ridge regression; merging and subtracting them costs O(D^2 + D E)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.checks import check_dense, check_extents, device_of, mismatch, not_a_state, not_a_tensor


class RidgeState(NamedTuple):
    """The sums G = K'WK and C = K'WV over the keys seen so far, which determine every ridge regression on them.

    Both are float64 for keys of any dtype. In float64 the product of two float32 numbers is exact,
    so that a million updates, or a removal, lose no accuracy of the keys. `_asdict()` returns a
    plain dict of tensors; `RidgeState(**d)` restores the state.
    """

    gram: Tensor
    """(B, H, D, D) float64, symmetric."""
    moment: Tensor
    """(B, H, D, E) float64."""
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which a state does not need
    """(B, H) int64: the number of keys seen, not counting masked ones."""


def empty_ridge(
    batch: int, heads: int, width: int, value_width: int, *, device: torch.device | str | None = None
) -> RidgeState:
    """The state without keys, the identity of `merge_ridge`, for keys of `width` D and values of `value_width` E.

    Extents must be ints (`TypeError` otherwise) of at least 0 (`ValueError`).

    >>> state = cmab_kernels.empty_ridge(1, 2, 8, 3)
    >>> state.moment.shape, int(state.count.sum())
    (torch.Size([1, 2, 8, 3]), 0)
    """
    check_extents(batch=batch, heads=heads, width=width, value_width=value_width)
    device = None if device is None else device_of(device)
    return RidgeState(
        torch.zeros(batch, heads, width, width, dtype=torch.float64, device=device),
        torch.zeros(batch, heads, width, value_width, dtype=torch.float64, device=device),
        torch.zeros(batch, heads, dtype=torch.int64, device=device),
    )


def merge_ridge(first: RidgeState, *others: RidgeState) -> RidgeState:
    """The state of the union of disjoint sets of keys, by adding sums.

    The merge is differentiable, and associative and commutative up to rounding. Every state must have the shapes and
    device of the first (`ValueError`) and the dtypes of a `RidgeState` (`TypeError`).

    >>> key, value = torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 3)
    >>> halves = [cmab_kernels.ridge_state(key[:, :, s], value[:, :, s]) for s in (slice(0, 5), slice(5, 10))]
    >>> torch.allclose(cmab_kernels.merge_ridge(*halves).gram, cmab_kernels.ridge_state(key, value).gram)
    True
    """
    check_ridge(first, name="states[0]")
    for position, state in enumerate(others, start=1):
        check_ridge(state, first.moment.shape, first.gram.device, f"states[{position}]")
    if not others:
        return RidgeState(*(part.clone() for part in first))
    states = (first, *others)
    return RidgeState(*(sum(parts[1:], start=parts[0]) for parts in zip(*states, strict=True)))


def decayed_ridge(state: RidgeState, decay: float | Tensor) -> RidgeState:
    """The state with the weight of all its keys, and so both sums, multiplied by `decay`, which was
    checked before. `count` remains the number of keys."""
    factor = decay[..., None, None] if isinstance(decay, Tensor) else decay
    return RidgeState(state.gram * factor, state.moment * factor, state.count)


def subtract_ridge(state: RidgeState, part: RidgeState) -> RidgeState:
    """`state` without `part`, the state of a subset of its keys; heads left with no key have sums of exactly 0."""
    count = state.count - part.count
    nothing = (count == 0)[..., None, None]
    gram, moment = (
        (whole - gone).masked_fill(nothing, 0.0) for whole, gone in zip(tuple(state)[:2], tuple(part)[:2], strict=True)
    )
    return RidgeState(gram, moment, count)


def count_keys(
    key: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None, before: Tensor | None
) -> Tensor:
    """Return the number of unmasked keys in key (B, H, N, D), plus the number `before` (None means
    0). The result is (B, H) int64, or (S, H) for packed sets."""
    batch, heads, length, _ = key.shape
    if key_padding_mask is not None or cu_seqlens is not None:
        if cu_seqlens is None:
            assert key_padding_mask is not None
            present = (~key_padding_mask).sum(-1, keepdim=True)
        elif key_padding_mask is None:
            present = cu_seqlens.long().diff().unsqueeze(1)
        else:
            seen = torch.nn.functional.pad((~key_padding_mask[0]).cumsum(0), (1, 0))
            present = seen[cu_seqlens.long().clamp(0, length)].diff().unsqueeze(1)
        return present.expand(-1, heads).clone() if before is None else before + present
    if before is None:
        return torch.full((batch, heads), length, dtype=torch.int64, device=key.device)
    return before + length


def in_chunks(
    key: Tensor, value: Tensor, weights: Tensor | None, key_padding_mask: Tensor | None, every: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys, values and weights as sets of `every` keys: (B H T, 1, every, *), and a mask (B H T, every).

    Zeros fill up the last chunk; they add nothing to a sum.
    """
    batch, heads, length, _ = key.shape
    chunks = -(-length // every)

    def cut(rows: Tensor) -> Tensor:
        if length % every:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, chunks * every - length))
        return rows.unflatten(2, (chunks, every)).flatten(0, 2).unsqueeze(1)

    masks = (
        None
        if key_padding_mask is None
        else cut(key_padding_mask[:, None, :, None].expand(batch, heads, length, 1))[:, 0, :, 0]
    )
    return cut(key), cut(value), None if weights is None else cut(weights.unsqueeze(-1)).squeeze(-1), masks


def unlikely_ridge(prefix: str, entries: Mapping[str, Tensor]) -> str:
    """Return why loaded parts of ridge states cannot come from any keys, or "" if they can."""
    gram, count = entries["gram"], entries["count"]
    for name in ("gram", "moment"):
        if not entries[name].isfinite().all():
            return mismatch(prefix + name, "a NaN or an infinity", "finite numbers")
        if entries[name][count == 0].any():
            return mismatch(prefix + name, f"numbers other than 0 where {prefix}count is 0", "0, the sums of no keys")
    if (count < 0).any():
        return mismatch(f"{prefix}count", "a negative element", "numbers >= 0")
    rounding = 1e-9 * gram.abs().amax((-2, -1), keepdim=True)
    if ((gram - gram.mT).abs() > rounding).any():
        return mismatch(f"{prefix}gram", "a matrix that is not symmetric", "a sum of products k'k")
    return ""  # after removals, rounding may make a gram indefinite; `solve_ridge` reports that in `info`


def check_ridge(
    state: RidgeState, shape: Sequence[int] | None = None, device: torch.device | None = None, name: str = "state"
) -> None:
    """Raise unless `state` is a `RidgeState` on `device` whose moment has `shape` (B, H, D, E).

    None accepts any shape or device on which all parts agree.
    """
    if not isinstance(state, RidgeState):
        raise TypeError(not_a_state(name, state, RidgeState))
    for part, tensor in (("gram", state.gram), ("moment", state.moment), ("count", state.count)):
        if not isinstance(tensor, Tensor):
            raise TypeError(not_a_tensor(f"{name}.{part}", tensor))
        check_dense(f"{name}.{part}", tensor)
    if state.moment.dim() != 4:
        raise ValueError(mismatch(f"{name}.moment", f"shape {tuple(state.moment.shape)}", "(B, H, D, E)"))
    batch, heads, width, value_width = state.moment.shape if shape is None else shape
    device = state.gram.device if device is None else device
    wanted = {
        "gram": (state.gram, (batch, heads, width, width), torch.float64),
        "moment": (state.moment, (batch, heads, width, value_width), torch.float64),
        "count": (state.count, (batch, heads), torch.int64),
    }
    for part, (tensor, extents, dtype) in wanted.items():
        if tensor.shape != extents:
            raise ValueError(mismatch(f"{name}.{part}", f"shape {tuple(tensor.shape)}", extents))
        if tensor.dtype != dtype:
            raise TypeError(mismatch(f"{name}.{part}", tensor.dtype, dtype))
        if tensor.device != device:
            raise ValueError(
                mismatch(f"{name}.{part}", f"device {tensor.device}", f"{device}, the device of the other arguments")
            )

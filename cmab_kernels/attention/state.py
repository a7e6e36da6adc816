"""The attention state of a set of keys. Merging and subtracting states costs O(L E), for any number
of keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.backends import imported
from ..runtime.checks import check_dense, check_extents, device_of, is_read, mismatch, not_a_state, not_a_tensor
from ..runtime.dtypes import state_dtype

SURE_ROUNDING = 2.0**-5
"""A removal leaves a share of a row's mass. The share is trusted if the rounding errors of the
logits are at most this fraction of it."""
FAR_BELOW = 2.0**-10
"""If the removed keys' lse is below the row's lse by more than this fraction of its magnitude,
these keys had no weight, for any rounding of the logits."""


class AttentionState(NamedTuple):
    """The state of latent cross-attention over the keys seen so far.

    `_asdict()` returns a plain dict of tensors; `AttentionState(**d)` restores the state.
    """

    out: Tensor
    """(B, H, L, E), float32, or float64 for float64 inputs: the attention output."""
    lse: Tensor
    """(B, H, L), float64: natural log of the sum of exponentials. It is -inf where no key was seen; `out` is ignored
    there. No set of keys gives +inf, or NaN in a row whose `out` holds numbers. Such states raise an error where values
    are read; elsewhere their rows give NaN."""


class Removal(NamedTuple):
    """A state from which keys were removed, and a mask of the rows that can be trusted."""

    state: AttentionState
    reliable: Tensor
    """(B, H, L) bool: False where half or more of the digits are lost because too much of a row's mass was removed, or
    where rounding of the logits leaves no correct digit."""


def empty_state(
    batch: int,
    heads: int,
    latents: int,
    width: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> AttentionState:
    """The state without keys, the identity of `merge_states`.

    `out` is 0, of shape (batch, heads, latents, width); `lse` is -inf, of shape (batch, heads, latents). `dtype` must
    be float32 or float64, and extents must be ints (`TypeError` otherwise) of at least 0 (`ValueError`).

    >>> state = cmab_kernels.empty_state(1, 2, 3, 4)
    >>> state.out.shape, float(state.lse.max())
    (torch.Size([1, 2, 3, 4]), -inf)
    """
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float64):
        raise TypeError(mismatch("dtype", dtype, "torch.float32 or torch.float64, the dtypes of states"))
    check_extents(batch=batch, heads=heads, latents=latents, width=width)
    device = None if device is None else device_of(device)
    return AttentionState(
        torch.zeros(batch, heads, latents, width, dtype=dtype, device=device),
        torch.full((batch, heads, latents), -math.inf, dtype=torch.float64, device=device),
    )


def merged(first: AttentionState, *others: AttentionState) -> AttentionState:
    """The state of the union of disjoint key sets: lse = log sum_i exp(lse_i), out = sum_i exp(lse_i - lse) out_i.

    Weights are float64. Empty states have weight 0; the merge of empty states is empty. An lse of +inf or NaN makes its
    row NaN.
    """
    states = [counted(state) for state in (first, *others)]
    lse = torch.stack([state.lse for state in states])
    top = lse.detach().amax(0)
    top = top.masked_fill(top == -math.inf, 0.0)
    weight = (lse - top).exp()
    total = weight.sum(0)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    share = (weight / total).unsqueeze(-1)
    out = (share * torch.stack([state.out for state in states])).sum(0)
    return AttentionState(out.to(first.out.dtype), (top + total.log()).masked_fill(empty, -math.inf))


def counted(state: AttentionState) -> AttentionState:
    """The state with `out` set to 0 where no key was seen: `out` may hold NaN there, and 0 times
    NaN is NaN."""
    return AttentionState(state.out.masked_fill((state.lse == -math.inf).unsqueeze(-1), 0.0), state.lse)


def decayed(state: AttentionState, decay: float | Tensor) -> AttentionState:
    """The state with the weight of all its keys multiplied by `decay`, which was checked before.
    This adds log(decay) to every logit, and so to lse."""
    return AttentionState(state.out, state.lse + (decay.log() if isinstance(decay, Tensor) else math.log(decay)))


def share_gradient(part: AttentionState, whole: AttentionState, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
    """The float64 gradient for a part of a merged state, given the gradient (dout, dlse) of the whole.

    The part acts like one key with the share p = exp(part.lse - whole.lse) of the mass. Its gradient is p dout for
    `out`, and p (dlse + sum_e dout_e (part.out_e - whole.out_e)) for `lse`. Both are 0 where the part has seen no key.
    """
    empty = part.lse == -math.inf
    share = (part.lse - whole.lse.masked_fill(whole.lse == -math.inf, 0.0)).exp()
    dout = dout.double()
    slope = (dout * (counted(part).out.double() - whole.out.double())).sum(-1) + dlse
    return (share.unsqueeze(-1) * dout).masked_fill(empty.unsqueeze(-1), 0.0), (share * slope).masked_fill(empty, 0.0)


def subtract_state(state: AttentionState, part: AttentionState) -> Removal:
    """`state` without `part`, the state of a subset of its keys.

    With a = `state` and b = `part`, lse = a.lse + log1p(-exp(b.lse - a.lse)) and
    out = exp(a.lse - lse) a.out - exp(b.lse - lse) b.out. Where `part` has the fraction f of the mass, errors grow by
    1 / (1 - f): rows with 1 - f < sqrt(eps) are not reliable, and rows with 1 - f = 0 are empty. Logits may have been
    rounded in another way when the keys were added. Rows where this difference could explain much
    of 1 - f are not reliable either. Rows where the lse of `part` is so small that `part` had no
    weight are an exception.
    """
    if state.out.shape != part.out.shape:  # unequal shapes would broadcast
        raise ValueError(
            mismatch("state.out", f"shape {tuple(state.out.shape)}", f"{tuple(part.out.shape)}, the shape of part.out")
        )
    state, part = counted(state), counted(part)
    nothing_there, nothing_removed = state.lse == -math.inf, part.lse == -math.inf
    whole = state.lse.masked_fill(state.lse == math.inf, math.nan)
    gap = part.lse - whole.masked_fill(nothing_there, 0.0)
    share = gap.clamp(max=0.0).exp()
    left = 1.0 - share
    gone = nothing_there | (left <= 0)
    log_left = torch.log1p(-share.masked_fill(gone, 0.0))
    lse = (whole + log_left).masked_fill(gone, -math.inf)
    growth = (-log_left).exp().unsqueeze(-1)
    out = growth * state.out.double() - growth * share.masked_fill(gone, 0.0).unsqueeze(-1) * part.out.double()
    out = out.masked_fill(gone.unsqueeze(-1), 0.0).to(state.out.dtype)
    eps, size = torch.finfo(state.out.dtype).eps, state.lse.abs()
    sure = (eps * size <= SURE_ROUNDING * left) | (gap < -FAR_BELOW * size)
    kept = nothing_removed & ~left.isnan()
    return Removal(AttentionState(out, lse), kept | (sure & (left >= eps**0.5) & ~nothing_there))


def check_parts(state: AttentionState, name: str) -> None:
    """Raise unless `state` is an `AttentionState` of dense tensors."""
    if not isinstance(state, AttentionState):
        raise TypeError(not_a_state(name, state, AttentionState))
    for part, tensor in (("out", state.out), ("lse", state.lse)):
        if not isinstance(tensor, Tensor):
            raise TypeError(not_a_tensor(f"{name}.{part}", tensor))
        check_dense(f"{name}.{part}", tensor)


def check_mergeable(state: AttentionState, name: str, like: AttentionState | None = None) -> None:
    """Raise unless `state` is consistent and can be merged with `like`. Without `like`, any shapes
    are allowed."""
    check_parts(state, name)
    if like is None:
        if state.out.dim() == 0:
            raise ValueError(mismatch(f"{name}.out", "shape ()", "(B, H, L, E)"))
        if state.out.dtype != state_dtype(state.out.dtype):
            raise TypeError(
                mismatch(f"{name}.out", state.out.dtype, "float32 or float64; states are never half precision")
            )
        like = state
    check_fit(state, like.out.shape, like.out.dtype, like.out.device, name)


def check_state(
    state: AttentionState, shape: Sequence[int], dtype: torch.dtype, device: torch.device, name: str = "state"
) -> None:
    """Raise unless `out` has this shape (B, H, L, E), dtype and device, and `lse` fits `out`."""
    check_parts(state, name)
    check_fit(state, shape, dtype, device, name)


def check_fit(state: AttentionState, shape: Sequence[int], dtype: torch.dtype, device: torch.device, name: str) -> None:
    """`check_state` for a state that has passed `check_parts`."""
    for part, tensor, wanted, wanted_dtype in (
        ("out", state.out, shape, dtype),
        ("lse", state.lse, shape[:-1], torch.float64),
    ):
        if tensor.shape != wanted:
            raise ValueError(mismatch(f"{name}.{part}", f"shape {tuple(tensor.shape)}", tuple(wanted)))
        if tensor.dtype != wanted_dtype:
            raise TypeError(mismatch(f"{name}.{part}", tensor.dtype, wanted_dtype))
        if tensor.device != device:
            raise ValueError(
                mismatch(f"{name}.{part}", f"device {tensor.device}", f"{device}, the device of the other arguments")
            )
    refuse_wrong_sums(state, name)


def unlikely_attention(prefix: str, entries: Mapping[str, Tensor]) -> str:
    """Return why loaded parts of attention states cannot come from any keys, or "" if they can."""
    out, lse = entries["out"], entries["lse"]
    if (lse.isnan() | (lse == math.inf)).any():
        return mismatch(f"{prefix}lse", "a NaN or +inf", "finite numbers, or -inf where no key was seen")
    if not out[lse != -math.inf].isfinite().all():
        return mismatch(f"{prefix}out", "a NaN or an infinity", "finite numbers where a key was seen")
    return ""


@functools.cache
def _not_below_infinity() -> Callable[[Tensor], bool | None]:
    """The native check of lse, which takes a microsecond. It returns None for layouts that it cannot read.

    Where the native code is not built, the check always returns None.
    """
    native = imported("attention", "native")
    return native.is_not_below_infinity if native else lambda lse: None


def refuse_wrong_sums(state: AttentionState, name: str) -> None:
    """Raise `ValueError` if lse is +inf, or NaN in a row whose `out` holds numbers: no set of keys gives such a state.

    Values are read only on the CPU and outside traces. A row that is NaN throughout is accepted: keys that hold NaN
    give such a row. It stays NaN, and does not affect the other rows of its batch.
    """
    lse = state.lse
    if not is_read(lse):
        return
    found = _not_below_infinity()(lse)
    if found is None:
        found = lse.numel() > 0 and not lse.detach().max().item() < math.inf
    if found and ((lse == math.inf) | (lse.isnan() & ~state.out.isnan().all(-1))).any():
        given = f"+inf, or a NaN where {name}.out holds numbers"
        raise ValueError(mismatch(f"{name}.lse", given, "a number, or -inf where no key was seen"))

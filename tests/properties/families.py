"""The families of mergeable states, so that one property or one machine is written once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import oracles

from .drawn import Rows


class Family(NamedTuple):
    """The operations of a kind of state on rows of keys and values."""

    of: Callable[..., Any]
    """(rows, impl, state=None) -> the state of the rows, on top of `state`."""
    empty: Callable[[Rows], Any]
    """The state of no rows."""
    merge: Callable[..., Any]
    remove: Callable[..., tuple[Any, Tensor]]
    """(state, rows, impl) -> the state that is left, and where it is reliable."""
    right: Callable[[Rows], tuple[Tensor, ...]]
    """The state by its definition, in float64."""
    allowed: Callable[[Rows], tuple[float, ...]]
    """The error allowed for each field of the state."""


def _attention_allowed(rows: Rows) -> tuple[float, float]:
    eps = torch.finfo(torch.promote_types(rows.query.dtype, torch.float32)).eps
    return rows.tolerance, 8 * eps * (rows.score + 4)


def _ridge_of(rows: Rows, impl: str, state: Any = None) -> ck.RidgeState:
    return ck.ridge_state(rows.key, rows.value, state=state, impl=impl)


def _ridge_removed(state: ck.RidgeState, rows: Rows, impl: str) -> tuple[ck.RidgeState, Tensor]:
    left = ck.remove_ridge(state, rows.key, rows.value, impl=impl)
    return left, torch.ones_like(left.count, dtype=torch.bool)


def _ridge_right(rows: Rows) -> tuple[Tensor, ...]:
    key, value = rows.key.double(), rows.value.double()
    return key.mT @ key, key.mT @ value, torch.full(key.shape[:2], key.shape[2])


def _ridge_allowed(rows: Rows) -> tuple[float, float, float]:
    """Return 1e-14 of the sums of absolute products: products of float32 are exact in float64."""
    key, value = rows.key.double().abs(), rows.value.double().abs()
    return (*(1e-14 * float((key.mT @ other).sum()) for other in (key, value)), 0.0)


ATTENTION = Family(
    of=lambda rows, impl, state=None: ck.attention_state(*rows, state=state, impl=impl),
    empty=lambda rows: ck.empty_state(
        *rows.query.shape[:3], rows.value.shape[3], dtype=torch.promote_types(rows.query.dtype, torch.float32)
    ),
    merge=ck.merge_states,
    remove=lambda state, rows, impl: tuple(ck.remove_from_state(state, *rows, impl=impl)),
    right=lambda rows: oracles.attention(*(t.double() for t in rows)),
    allowed=_attention_allowed,
)
RIDGE = Family(
    of=_ridge_of,
    empty=lambda rows: ck.empty_ridge(*rows.key.shape[:2], rows.key.shape[3], rows.value.shape[3]),
    merge=ck.merge_ridge,
    remove=_ridge_removed,
    right=_ridge_right,
    allowed=_ridge_allowed,
)
FAMILIES = {"attention": ATTENTION, "ridge": RIDGE}


def far(state: Any, right: Any, allowed: tuple[float, ...], grown: float = 1.0) -> str:
    """Return the field of a state that differs from another state by more than `grown` times the allowance, and by how
    much; "" if there is none."""
    for name, ours, wanted, most in zip(state._fields, state, right, allowed, strict=True):
        same = ours.double() == wanted.double()  # infinities too
        difference = (ours.double() - wanted.double()).masked_fill(same, 0.0).abs()
        if not bool((difference <= grown * most).all()):
            return f"{name} is {float(difference.max()):.1e} off, and {grown * most:.1e} is allowed"
    return ""


def part(rows: Rows, kept: Any) -> Rows:
    """Return the rows with some of their keys: a slice or a list of indices."""
    return rows._replace(key=rows.key[:, :, kept], value=rows.value[:, :, kept])


def together(*several: Rows) -> Rows:
    """Return the rows with the keys of all."""
    return Rows(
        several[0].query, *(torch.cat([getattr(each, name) for each in several], 2) for name in ("key", "value"))
    )

"""The continual steps as operators: which of definition, kernel and dispatcher a step takes, shapes and operation counts.

A `torch.library` operator returns new tensors, so it copies the window. It is for compilers and counters that watch; where nobody
watches, a step calls its kernel, which uses the state's memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...backends import kernel
from ...checks import refuse_not_finite
from ...flops import flop_formula
from ...tracing import is_differentiated, is_plain
from ..costs import executed_attention_operations, executed_operations
from .reference import attention_step_reference, nystrom_step_reference
from .state import ContinualAttentionState, ContinualNystromState, own_memory

LIB = torch.library.Library("cmab", "FRAGMENT")
_RINGS = "Tensor queries, Tensor keys, Tensor values, Tensor sums"
_LANDMARKS = "Tensor landmark_queries, Tensor landmark_keys, Tensor inverse"
_COUNTS = "Tensor scale, Tensor? clock, SymInt position, SymInt window"
_TOKENS = "Tensor query, Tensor key, Tensor value, bool retroactive, str impl"
LIB.define(
    f"continual_nystrom_step({_RINGS}, {_LANDMARKS}, {_COUNTS}, int iterations, int fixed, {_TOKENS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIB.define(f"continual_attention_step({_RINGS}, {_COUNTS}, {_TOKENS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")


def run_step(name: str, impl: str, state: Any, query: Tensor, key: Tensor, value: Tensor, retroactive: bool) -> Any:
    """(out, state) by the kernel of an implementation, which returns None and writes nothing for tokens that are not finite."""
    result = kernel("nystrom.continual", impl, name)(state, query, key, value, retroactive)
    if result is None:
        refuse_not_finite(query=query, key=key, value=value)
        raise RuntimeError(f"{impl} refused a step of {name} that passes every check")
    return result


def _clock(state: Any, like: Tensor) -> Tensor:
    """The position if it is a tensor; an empty tensor if it is an int, which the caller knows."""
    return state.position if isinstance(state.position, Tensor) else like.new_empty(0, dtype=torch.int64)


def _copies(*tensors: Tensor) -> Iterator[Tensor]:
    """Clones of the tensors, which nothing but the new state holds."""
    return (tensor.clone() for tensor in tensors)


def _nystrom_body(*args: Any) -> tuple[Tensor, ...]:
    *fields, scale, clock, position, window, iterations, fixed, query, key, value, retroactive, impl = args
    queries, keys, values, sums, *landmarks = fields
    counts = (scale, position if clock is None else clock.clone(), window, iterations, fixed)
    state = ContinualNystromState._make([*_copies(queries, keys, values, sums), torch.empty_like(sums), *_copies(*landmarks), *counts])
    out, new = run_step("continual_nystrom_step", impl, state, query, key, value, retroactive)
    return out, *new[:4], *new[5:8], _clock(new, out)


def _attention_body(*args: Any) -> tuple[Tensor, ...]:
    *fields, scale, clock, position, window, query, key, value, retroactive, impl = args
    queries, keys, values, sums = fields
    counts = (scale, position if clock is None else clock.clone(), window)
    state = ContinualAttentionState._make([*_copies(queries, keys, values, sums), torch.empty_like(sums), *counts])
    out, new = run_step("continual_attention_step", impl, state, query, key, value, retroactive)
    return out, *new[:4], _clock(new, out)


LIB.impl("continual_nystrom_step", _nystrom_body, "CompositeExplicitAutograd")
LIB.impl("continual_attention_step", _attention_body, "CompositeExplicitAutograd")


# ---- shapes


def _grown(ring: Tensor, window: int, tokens: int) -> Tensor:
    """A ring as large as a step leaves it: with room for the new tokens beside the window."""
    batch, heads, capacity, width = ring.shape
    return ring.new_empty(batch, heads, capacity if capacity >= window + tokens else window + min(tokens, window), width)


def _out(value: Tensor, window: int, retroactive: bool) -> Tensor:
    batch, heads, tokens, width = value.shape
    return value.new_empty(batch, heads, window if retroactive else tokens, width)


def _empty_clock(clock: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0 if clock is None else clock.shape, dtype=torch.int64)


@torch.library.register_fake("cmab::continual_nystrom_step", lib=LIB)
def _(
    queries: Tensor, keys: Tensor, values: Tensor, sums: Tensor, lq: Tensor, lk: Tensor, inverse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    _, clock, _, window, _, _, query, _, value, retroactive, _ = rest
    rings = [_grown(ring, window, query.shape[2]) for ring in (queries, keys, values)]
    small = [t.new_empty(t.shape) for t in (sums, lq, lk, inverse)]
    return _out(value, window, retroactive), *rings, *small, _empty_clock(clock, query)


@torch.library.register_fake("cmab::continual_attention_step", lib=LIB)
def _(queries: Tensor, keys: Tensor, values: Tensor, sums: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, clock, _, window, query, _, value, retroactive, _ = rest
    rings = [_grown(ring, window, query.shape[2]) for ring in (queries, keys, values)]
    batch, heads, _, width = sums.shape
    new_sums = sums.new_empty(batch, heads, window if retroactive else 0, width)
    return _out(value, window, retroactive), *rings, new_sums, _empty_clock(clock, query)


# ---- operations


@flop_formula(torch.ops.cmab.continual_nystrom_step)
def _nystrom_flops(queries: Any, keys: Any, values: Any, sums: Any, *rest: Any, **_: Any) -> int:
    """Count the operations, without those of rows that the guard recomputes, as these depend on the values."""
    *_head, position, window, iterations, fixed, query, _key, _value, retroactive, _impl = rest
    batch, heads, _, width = keys
    one = executed_operations(window, sums[2], width, values[-1], position, query[2], iterations, bool(fixed), retroactive)
    return batch * heads * one


@flop_formula(torch.ops.cmab.continual_attention_step)
def _attention_flops(queries: Any, keys: Any, values: Any, sums: Any, *rest: Any, **_: Any) -> int:
    """Count the operations; a first retroactive step computes all rows."""
    *_head, window, query, _key, value, retroactive, _impl = rest
    batch, heads, tokens, width = query
    first = retroactive and sums[2] == 0
    return batch * heads * executed_attention_operations(window, width, value[-1], tokens, retroactive, first)


# ---- as the api calls them


class StepOperator:
    """A step as the api calls it: (state, query, key, value, retroactive, impl) gives (out, state).

    "reference" runs the definition, which autograd differentiates and which can be transformed. Any other runs its kernel: directly where
    nobody watches, else through torch's dispatcher.
    """

    def __init__(self, name: str, reference: Callable[..., Any], dispatched: Callable[..., Any]) -> None:
        self.name, self._reference, self._dispatched = name, reference, dispatched

    def __call__(self, state: Any, query: Tensor, key: Tensor, value: Tensor, retroactive: bool, impl: str) -> Any:
        if impl == "reference":
            refuse_not_finite(query=query, key=key, value=value)
            return self._reference(state, query, key, value, retroactive)
        if not _is_plain(state, query, key, value):
            return self._dispatched(state, query, key, value, retroactive, impl)
        return run_step(self.name, impl, own_memory(state), query, key, value, retroactive)


# The tensors of a state are looked at in functions that return before it is stepped: a reference left over would make the step copy.


def is_differentiated_step(state: Any, *tokens: Tensor) -> bool:
    """Whether a step records a gradient or is transformed."""
    return is_differentiated(*tokens, *(field for field in state if isinstance(field, Tensor)))


def _is_plain(state: Any, *tokens: Tensor) -> bool:
    return is_plain(*tokens, *(field for field in state if isinstance(field, Tensor)))


def _place(state: Any) -> tuple[Tensor | None, int]:
    """The position as the operators take it: a tensor, or an int."""
    return (state.position, state.window) if isinstance(state.position, Tensor) else (None, state.position)


def _dispatched_nystrom(state: Any, query: Tensor, key: Tensor, value: Tensor, retroactive: bool, impl: str) -> Any:
    clock, position = _place(state)
    counts = (state.scale, clock, position, state.window, state.pinv_iterations, state.fixed)
    fields = (*state[:4], *state[5:8], *counts, query, key, value, retroactive, impl)
    out, queries, keys, values, sums, *landmarks, clock_after = torch.ops.cmab.continual_nystrom_step(*fields)
    place = position + query.shape[2] if clock is None else clock_after
    spare = torch.empty_like(sums)
    return out, ContinualNystromState._make([queries, keys, values, sums, spare, *landmarks, state.scale, place, *state[10:]])


def _dispatched_attention(state: Any, query: Tensor, key: Tensor, value: Tensor, retroactive: bool, impl: str) -> Any:
    clock, position = _place(state)
    fields = (*state[:4], state.scale, clock, position, state.window, query, key, value, retroactive, impl)
    out, queries, keys, values, sums, clock_after = torch.ops.cmab.continual_attention_step(*fields)
    place = position + query.shape[2] if clock is None else clock_after
    return out, ContinualAttentionState(queries, keys, values, sums, torch.empty_like(sums), state.scale, place, state.window)


nystrom_step_op = StepOperator("continual_nystrom_step", nystrom_step_reference, _dispatched_nystrom)
attention_step_op = StepOperator("continual_attention_step", attention_step_reference, _dispatched_attention)

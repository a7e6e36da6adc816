"""The continual steps as `torch.library` operators: contracts, dispatch, shapes of the results, and operation counts.

A `torch.library` operator must return new tensors, so it copies the window. A step goes through the operator only under
torch.compile, tracing or a dispatch mode, or with tensor subclasses. Otherwise the step calls the kernel directly,
which reuses the state's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ...runtime.backends import kernel
from ...runtime.checks import autocasts, refuse_not_finite
from ...runtime.flops import flop_formula
from ...runtime.operator import LIB, schema_of
from ...runtime.tracing import exports_to_onnx, has_memory, is_differentiated, may_bypass_dispatcher
from ..costs import executed_attention_operations, mean_operations
from .contract import AttentionStep, NystromStep
from .reference import attention_step_reference, kept_where, nystrom_step_reference
from .state import ContinualAttentionState, ContinualNystromState, own_memory, remembered, with_sums


def run_step(
    name: str, impl: str, state: Any, query: Tensor, key: Tensor, value: Tensor, retroactive: bool, *mask: Tensor
) -> Any:
    """Run an implementation's kernel and return (out, state). Raise if the kernel returns None, as it does for tokens
    that are not finite."""
    if impl == "native":  # native code takes plain Tensors only
        state, query, key, value = _plain_state(state), _plain(query), _plain(key), _plain(value)
    result = kernel("nystrom.continual", impl, name)(state, query, key, value, retroactive, *mask)
    if result is None:
        refuse_not_finite(query=query, key=key, value=value)
        raise RuntimeError(
            f'{name}: {impl!r} refused a step that passes every check; report this as a bug, and take impl="reference"'
        )
    return result


def _plain(token: Tensor) -> Tensor:
    """Return a Parameter, or a subclass that the dispatcher has passed on, as a plain Tensor."""
    return token if type(token) is Tensor else token.detach()


def _plain_state(state: Any) -> Any:
    """Return the state with clones in place of Parameters. A step may write to tensors that only its state holds, so it
    must not get aliases."""
    if torch.nn.Parameter not in map(type, state):
        return state
    return type(state)._make(field.detach().clone() if type(field) is torch.nn.Parameter else field for field in state)


def _copies(*tensors: Tensor) -> Iterator[Tensor]:
    return (tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors)


def _nystrom_state(step: NystromStep) -> ContinualNystromState:
    """Return the state of a step, in new memory."""
    landmarks = _copies(step.landmark_queries, step.landmark_keys, step.inverse)
    counts = (step.scale, *_copies(step.position), step.window, step.iterations, step.fixed)
    return ContinualNystromState._make(
        [*_copies(*_rings(step)), step.sums.new_empty(step.sums.shape), *landmarks, *counts]
    )


def _nystrom_results(result: tuple[Tensor, ContinualNystromState]) -> tuple[Tensor, ...]:
    out, new = result
    return out, *_rings(new), new.landmark_queries, new.landmark_keys, new.inverse, new.position


def _attention_state(step: AttentionStep) -> ContinualAttentionState:
    """Return the state of a step, in new memory."""
    counts = (step.scale, *_copies(step.position), step.window)
    return ContinualAttentionState._make([*_copies(*_rings(step)), step.sums.new_empty(step.sums.shape), *counts])


def _attention_results(result: tuple[Tensor, ContinualAttentionState]) -> tuple[Tensor, ...]:
    out, new = result
    return out, *_rings(new), new.position


# ---- shapes


def _grown_rings(step: NystromStep | AttentionStep) -> Iterator[Tensor]:
    """Return uninitialised rings with the capacity that they have after a step of this number of tokens."""
    window, tokens = step.window, step.query.shape[2]
    for ring in (step.queries, step.keys, step.values):
        batch, heads, capacity, width = ring.shape
        yield ring.new_empty(
            batch, heads, capacity if capacity >= window + tokens else window + min(tokens, window), width
        )


def _out(step: NystromStep | AttentionStep) -> Tensor:
    batch, heads, tokens, width = step.value.shape
    return step.value.new_empty(batch, heads, step.window if step.retroactive else tokens, width)


def _nystrom_shapes(step: NystromStep) -> tuple[Tensor, ...]:
    kept = (step.sums, step.landmark_queries, step.landmark_keys, step.inverse, step.position)
    return _out(step), *_grown_rings(step), *(t.new_empty(t.shape) for t in kept)


def _attention_shapes(step: AttentionStep) -> tuple[Tensor, ...]:
    batch, heads, _, width = step.sums.shape
    sums = step.sums.new_empty(batch, heads, step.window if step.retroactive else 0, width)
    return _out(step), *_grown_rings(step), sums, step.position.new_empty(step.position.shape)


# ---- operations, for contracts of shapes


def _nystrom_operations(step: Any) -> int:
    """Count the operations of a step, as a mean over positions, without the rows that are recomputed because of the
    data."""
    batch, heads, _, width = step.keys
    landmarks, value_width, tokens = step.sums[2], step.values[-1], step.query[2]
    one = mean_operations(
        step.window, landmarks, width, value_width, tokens, step.iterations, bool(step.fixed), step.retroactive
    )
    return round(batch * heads * one)


def _attention_operations(step: Any) -> int:
    """Count the operations. The first retroactive step computes the sums of all rows."""
    batch, heads, tokens, width = step.query
    first = step.retroactive and step.sums[2] == 0
    return (
        batch
        * heads
        * executed_attention_operations(step.window, width, step.value[-1], tokens, step.retroactive, first)
    )


def _define(
    name: str,
    contract: type,
    results: str,
    state_of: Callable[[Any], Any],
    results_of: Callable[[Any], tuple[Tensor, ...]],
    reference: Callable[..., Any],
    shapes: Callable,
    operations: Callable,
) -> None:
    """Define `cmab::name`, whose arguments are the fields of `contract`, by functions of the contract."""

    def run(*args: Any) -> tuple[Tensor, ...]:
        step = contract(*args)
        state = remembered(state_of(step))
        return results_of(run_step(name, step.impl, state, step.query, step.key, step.value, step.retroactive))

    def recorded(*args: Any) -> tuple[Tensor, ...]:
        if exports_to_onnx():
            step = contract(*args)
            return results_of(reference(state_of(step), step.query, step.key, step.value, step.retroactive))
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    LIB.define(schema_of(name, contract, results.split()))
    LIB.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cmab::{name}", lambda *args: shapes(contract(*args)), lib=LIB)
    operator = getattr(torch.ops.cmab, name)
    LIB.impl(name, recorded, "Autograd")
    flop_formula(operator)(lambda *args, **_: operations(contract(*args)))


_NEW = "out new_queries new_keys new_values new_sums"
_LANDMARKS = "new_landmark_queries new_landmark_keys new_inverse"
_define(
    "continual_nystrom_step",
    NystromStep,
    f"{_NEW} {_LANDMARKS} new_position",
    _nystrom_state,
    _nystrom_results,
    nystrom_step_reference,
    _nystrom_shapes,
    _nystrom_operations,
)
_define(
    "continual_attention_step",
    AttentionStep,
    f"{_NEW} new_position",
    _attention_state,
    _attention_results,
    attention_step_reference,
    _attention_shapes,
    _attention_operations,
)


# ---- as the api calls them

Form = tuple[Any, ...]
"""Everything that determines whether a step is allowed and how it runs: everything but the numbers in its tensors."""

MOST_FORMS = 1000
"""The largest number of forms that are remembered. The steps of one model have few forms."""

_TENSORS: dict[type, int] = {ContinualNystromState: 10, ContinualAttentionState: 7}
"""Kind of state -> the number of its fields that are tensors. The tensors come first; ints follow."""

TYPES: dict[type, list[type]] = {
    ContinualNystromState: [*[Tensor] * 10, int, int, int, *[Tensor] * 3],
    ContinualAttentionState: [*[Tensor] * 7, int, *[Tensor] * 3],
}
"""Kind of state -> the types of its fields, then those of query, key and value."""

_shape, _dtype, _device, _requires_grad = map(attrgetter, ("shape", "dtype", "device", "requires_grad"))


def form_of(impl: str, retroactive: bool, state: Any, *tokens: Any) -> Form | None:
    """Return the form of a step. If one step of a form is allowed, all steps of that form are allowed and run in the
    same way.

    The form is None if only the path with checks can decide: under autocast, and for subclasses of Tensor, lazy
    negations, and fields that are not contiguous.
    """
    kind = type(state)
    if [*map(type, state), *map(type, tokens)] != TYPES.get(kind):
        return None
    fields = state[: _TENSORS[kind]]
    tensors = (*fields, *tokens)
    try:
        if (
            not all(map(Tensor.is_contiguous, fields))
            or any(map(Tensor.is_neg, tensors))
            or not all(map(has_memory, tokens))
        ):
            return None
        if autocasts(fields[0].device):
            return None
        return (
            impl,
            retroactive,
            *state[_TENSORS[kind] :],
            *map(_shape, tensors),
            *map(_dtype, tensors),
            *map(_device, tensors),
        )
    except RuntimeError:  # a sparse tensor has no strides, and a nested tensor has no shape
        return None


def carries_gradient(state: Any, *tokens: Any) -> bool:
    """Whether a tensor requires a gradient. Also True if an argument is not a state or not a tensor, because the path
    with checks then raises an error."""
    try:
        fields = state[: _TENSORS[type(state)] - 1]  # the last tensor is the position, which never requires a gradient
        return any(map(_requires_grad, (*fields, *tokens)))
    except (AttributeError, KeyError):
        return True


class StepOperator:
    """A step as the api calls it: (state, query, key, value, retroactive, impl) -> (out, state).

    "reference" runs the definition, which supports autograd and transforms. Any other `impl` runs its kernel. The call
    goes through torch's dispatcher if a compiler, a tracer or a dispatch mode must see it, and directly otherwise.
    """

    def __init__(self, name: str, reference: Callable[..., Any], dispatched: Callable[..., Any]) -> None:
        self.name, self._reference, self._dispatched = name, reference, dispatched
        self._ready: dict[Form, Callable[..., Any]] = {}

    def ready(self, form: Form | None) -> Callable[..., Any] | None:
        """Return the kernel's function that has run a step of this form, for (state, query, key, value, retroactive);
        None if there is none."""
        try:
            return self._ready.get(form) if form else None
        except (
            TypeError
        ):  # for a wrong type, such as a list as `impl`, the path with checks raises an error that names the argument
            return None

    def remember(self, form: Form | None, impl: str) -> None:
        """Remember that steps of this form pass all checks and run `impl`."""
        if len(self._ready) == MOST_FORMS:
            self._ready.clear()
        if form and impl not in ("reference", "native"):  # native code has a fast path of its own
            self._ready[form] = kernel("nystrom.continual", impl, self.name)

    def __call__(self, state: Any, query: Tensor, key: Tensor, value: Tensor, retroactive: bool, impl: str) -> Any:
        if impl == "reference":
            refuse_not_finite(query=query, key=key, value=value)
            return self._reference(state, query, key, value, retroactive)
        if not _may_bypass_dispatcher(state, query, key, value):
            return self._dispatched(state, query, key, value, retroactive, impl)
        return run_step(self.name, impl, own_memory(state), query, key, value, retroactive)

    def masked(
        self, state: Any, query: Tensor, key: Tensor, value: Tensor, retroactive: bool, impl: str, absent: Tensor
    ) -> Any:
        """Do the same as `__call__`, if the rows of the batch that are `absent` (B,) have no token."""
        state = with_sums(state) if retroactive else state
        # Absent tokens may hold NaN.
        query, key, value = (token.masked_fill(absent[:, None, None, None], 0.0) for token in (query, key, value))
        if impl == "native" and _may_bypass_dispatcher(state, absent, query, key, value):
            mask, name = _plain(absent).contiguous(), self.name.replace("_step", "_masked_step")
            return run_step(name, impl, own_memory(state), query, key, value, retroactive, mask)
        outs = []
        # A step of several tokens could overwrite the window's oldest row.
        for one in zip(query.split(1, 2), key.split(1, 2), value.split(1, 2), strict=True):
            out, state = kept_where(absent, state, *self(state, *one, retroactive, impl))
            state = state if impl == "reference" else remembered(state)
            outs.append(out)
        return outs[-1] if retroactive else torch.cat(outs, 2), state


# Separate functions read the state's tensors and return before the step. A remaining local variable would be one more
# reference to a tensor, and the step would copy the window.


def is_differentiated_step(state: Any, *tokens: Tensor) -> bool:
    """Whether a step records a gradient or runs under a transform of `torch.func`."""
    return is_differentiated(*tokens, *[field for field in state if isinstance(field, Tensor)])


def _may_bypass_dispatcher(state: Any, *tokens: Tensor) -> bool:
    return may_bypass_dispatcher(*tokens, *[field for field in state if isinstance(field, Tensor)])


def _rings(state: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of the window that every state and every step have, by name, because the compiler of torch 2.6
    cannot trace a slice of a NamedTuple."""
    return state.queries, state.keys, state.values, state.sums


def _dispatched_nystrom(state: Any, query: Tensor, key: Tensor, value: Tensor, retroactive: bool, impl: str) -> Any:
    landmarks, counts = (
        (state.landmark_queries, state.landmark_keys, state.inverse),
        (state.window, state.pinv_iterations, state.fixed),
    )
    step = NystromStep(
        *_rings(state), *landmarks, state.scale, state.position, *counts, query, key, value, retroactive, impl
    )
    out, queries, keys, values, sums, near, far, inverse, position = torch.ops.cmab.continual_nystrom_step(*step)
    spare = torch.empty_like(sums)
    return out, ContinualNystromState(
        queries, keys, values, sums, spare, near, far, inverse, state.scale, position, *counts
    )


def _dispatched_attention(state: Any, query: Tensor, key: Tensor, value: Tensor, retroactive: bool, impl: str) -> Any:
    step = AttentionStep(
        *_rings(state), state.scale, state.position, state.window, query, key, value, retroactive, impl
    )
    out, queries, keys, values, sums, position = torch.ops.cmab.continual_attention_step(*step)
    return out, ContinualAttentionState(
        queries, keys, values, sums, torch.empty_like(sums), state.scale, position, state.window
    )


nystrom_step_op = StepOperator("continual_nystrom_step", nystrom_step_reference, _dispatched_nystrom)
attention_step_op = StepOperator("continual_attention_step", attention_step_reference, _dispatched_attention)

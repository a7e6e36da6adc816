"""An operator: its contract, which tells torch everything about it, and the choice between definition, kernel and
dispatcher.

The contract of an operator is a NamedTuple of its arguments. Its tensors come first. The last of
them may be a tuple of any number of tensors. Numbers follow, and then, if the operator belongs to a
set, the name of the implementation, `impl`. The schema, the fake implementation, the vmap rule and
the gradient name the fields they use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NewType, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from .autograd import differentiable, gradient_of_formula
from .backends import kernel
from .checks import as_they_are, mismatch
from .flops import flop_formula
from .tracing import (
    exports_to_onnx,
    has_tangent,
    is_differentiated,
    is_profiled,
    may_bypass_dispatcher,
    records_no_function,
    under_transform,
)
from .vmap import Rule, flat, mapped_rule, nested

LIB = torch.library.Library("cmab", "FRAGMENT")

Inputs = TypeVar("Inputs", bound=tuple)
"""The contract of an operator: a NamedTuple of its arguments."""

Extent = NewType("Extent", int)
"""An int of a contract that a compiler may trace as a symbol."""

Gradients = dict[str, Any]
"""Argument -> its gradient, or the gradients of a tuple of tensors. Arguments without a gradient may be absent."""

GRADIENTS = ("gradients[]",)
"""The `results` of an operator whose result is a list of tensors."""

_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    int: "int",
    Extent: "SymInt",
    bool: "bool",
    str: "str",
}
"""Type of a field -> its type in a schema. A tuple of n bools is bool[n], and one of any number is bool[]; likewise for
ints and tensors."""


def schema_of(name: str, contract: type, results: Sequence[str]) -> str:
    """Return the schema of the operator `name`: its arguments are the fields of `contract`."""
    arguments = ", ".join(f"{_schema_type(kind)} {field}" for field, kind in get_type_hints(contract).items())
    single = "Tensor[]" if results == GRADIENTS else "Tensor"
    returned = single if len(results) == 1 else f"({', '.join(f'Tensor {result}' for result in results)})"
    return f"{name}({arguments}) -> {returned}"


def _schema_type(kind: Any) -> str:
    items = get_args(kind) if kind not in _TYPES else ()
    count = "" if Ellipsis in items else len(items)
    return f"{_TYPES[items[0]]}[{count}]" if items else _TYPES[kind]


class Call(Generic[Inputs]):
    """A call of an operator, as its backward pass sees it.

    `inputs` are the arguments; tensors that were not kept are None. `kept` are the results that were kept.
    """

    def __init__(self, inputs: Inputs, kept: tuple[Tensor, ...], wanted: dict[str, Any]) -> None:
        self.inputs, self.kept, self._wanted = inputs, kept, wanted

    def needs(self, *arguments: str) -> Any:
        """Return whether the gradients of these arguments are needed; for a tuple of tensors, a tuple."""
        return tuple([self._wanted[argument] for argument in arguments])


def _accept(inputs: Any) -> None:
    """The default `check` of an `Operator`: accept all values."""


_OPERATORS: dict[str, Operator[Any]] = {}
"""Name -> operator. The passes of an autograd Function look up their operator here, because the compiler of torch 2.6
reads neither methods nor objects from the cells of a function."""


def _may_bypass_dispatcher(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a call may bypass the dispatcher. Profiles show only calls that go through the dispatcher."""
    return may_bypass_dispatcher(*tensors) and not is_profiled()


class Operator(Generic[Inputs]):
    """An operator, `cmab::name`. A call takes the contract.

    Most operators belong to a set. If `impl` is "reference", the definition in PyTorch runs, which autograd
    differentiates and tracers record. Any other implementation runs its kernel: through the autograd Function if an
    input requires a gradient or a transform is on, directly if `may_bypass_dispatcher`, and otherwise through torch's
    dispatcher. `torch.export` and `torch.jit.trace` always go through the dispatcher: `torch.export` would drop the
    gradient of an autograd Function, and `torch.jit.trace` cannot save one.
    """

    def __init__(
        self,
        kernels: str | Callable[[Inputs], Any],
        name: str,
        contract: type[Inputs],
        results: tuple[str, ...],
        *,
        shapes: Callable[[Inputs], Any],
        operations: Callable[[Inputs], int],
        backward: Callable[..., Gradients],
        keeps: Iterable[str] | None = None,
        constant: Iterable[str] = (),
        vmap: Rule | None = None,
        reference: Callable[[Inputs], Any] | None = None,
        check: Callable[[Inputs], None] = _accept,
        function: str | None = None,
    ) -> None:
        """Define the operator.

        Args:
            kernels: the set whose implementations have the kernel; or the kernel itself, if there is only one.
            name: the name of the operator in torch.
            contract: the NamedTuple of its arguments.
            results: the names of its results, which are tensors; or `GRADIENTS` for a list of them.
            shapes: return uninitialised results for arguments whose values must not be read.
            operations: return the FLOPs, for a contract that has shapes in place of tensors.
            backward: return the gradients of the arguments, by name, for a `Call` and the gradients of the results.
            keeps: the arguments and results that the backward pass needs; None for all arguments and no result. A
                tuple of tensors is always kept.
            constant: the results that have no gradient.
            vmap: how a mapped dimension is handled; None if all tensors have a batch into which it can be folded.
            reference: the definition. It is None for an operator with one kernel, and for a backward operator, because
                autograd needs only the definition of the forward operator.
            check: raise for values that are not allowed. The check runs in every call, also inside a compiled graph.
            function: the name of the kernel's function in the modules of the implementations; None for `name`.
        """
        kinds = get_type_hints(contract)
        self.name, self._kernels, self._function, self._contract = name, kernels, function or name, contract
        self._fields = tuple(kinds)
        types = [_schema_type(kind) for kind in kinds.values()]
        self._tensors = sum(kind.startswith("Tensor") for kind in types)
        self._has_list, self._numbers = "Tensor[]" in types, len(types) - self._tensors
        self._reference, self._check, self._gradients = reference, check, backward
        self._definition = reference if isinstance(kernels, str) else kernels
        kept = set(self._fields if keeps is None else keeps)
        self._dropped = [i for i in range(self._tensors - self._has_list) if self._fields[i] not in kept]
        self._kept_results = [i for i, result in enumerate(results) if result in kept]
        self._constant = [i for i, result in enumerate(results) if result in set(constant)]
        with_gradient = [i for i in range(len(results)) if i not in self._constant]
        self._listed = results == GRADIENTS
        self._only = with_gradient[0] if len(with_gradient) == 1 and not self._listed else None

        LIB.define(schema_of(name, contract, results))
        self._overload = getattr(torch.ops.cmab, name).default
        _OPERATORS[name] = self
        self._differentiable = differentiable(
            lambda *args: _OPERATORS[name]._computed(*args),
            lambda *args: _OPERATORS[name]._save(*args),
            lambda *args: _OPERATORS[name]._backward(*args),
        )
        LIB.impl(name, self._dispatched, "CompositeExplicitAutograd")
        LIB.impl(name, self._recorded, "Autograd")
        torch.library.register_fake(f"cmab::{name}", lambda *args: shapes(contract(*args)), lib=LIB)
        torch.library.register_vmap(
            f"cmab::{name}", mapped_rule(self._overload, contract, self._tensors, vmap), lib=LIB
        )
        flop_formula(getattr(torch.ops.cmab, name))(lambda *args, **_: operations(contract(*args)))

    def __call__(self, inputs: Inputs) -> Any:
        args = (*inputs,)  # the compiler of torch 2.6 cannot slice a NamedTuple
        if self._reference is not None and args[-1] == "reference":
            return self._by_definition(inputs)
        tensors = args[: self._tensors]
        if self._has_list:
            tensors = (*tensors[:-1], *tensors[-1])
        if is_differentiated(*tensors) and not records_no_function():
            return self._differentiable(*tensors, *args[self._tensors :])
        return self._by_kernel(inputs) if _may_bypass_dispatcher(tensors) else self._overload(*args)

    def unseen(self, inputs: Inputs) -> Any:
        """Run the kernel. The caller has found that the call has no gradient and may bypass the dispatcher.

        A stack of blocks has hundreds of parameters. A second look at each would take 50 us.
        """
        return self._overload(*inputs) if is_profiled() else self._by_kernel(inputs)

    def _args(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments, given those of the autograd Function, which takes the items of a tuple of tensors."""
        if not self._has_list:
            return leaves
        first, last = self._tensors - 1, len(leaves) - self._numbers
        return *leaves[:first], leaves[first:last], *leaves[last:]

    def _computed(self, *leaves: Any) -> Any:
        """Return the results without a gradient."""
        args = self._args(leaves)
        bypasses = _may_bypass_dispatcher(leaves[: len(leaves) - self._numbers])
        results = self._by_kernel(self._contract(*args)) if bypasses else self._overload(*args)
        return tuple(results) if self._listed else results

    def _dispatched(self, *args: Any) -> Any:
        results = self._by_kernel(self._contract(*args))
        return list(results) if self._listed else results

    def _by_kernel(self, inputs: Inputs) -> Any:
        self._check(inputs)
        run = kernel(self._kernels, inputs[-1], self._function) if isinstance(self._kernels, str) else self._kernels
        return run(inputs)

    def _recorded(self, *args: Any) -> Any:
        """Run a call that did not come from `__call__`, but from a recorded program. It has its gradient too.

        The transforms of `torch.func` and forward mode cannot differentiate such a program. They raise an error,
        because otherwise the gradient would be 0.

        While `torch.onnx.export` translates the program, the call becomes its definition, whose operators ONNX has.
        """
        if exports_to_onnx() and self._definition is not None:
            return self._definition(self._contract(*args))
        tensors = [tensor for tensor in flat(args[: self._tensors]) if tensor is not None]
        differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if (differentiated and under_transform()) or has_tangent(*tensors):
            got = "a call of a recorded program under a transform of torch.func or in forward mode"
            raise RuntimeError(mismatch(self.name, got, "a call of the module itself, or gradients by autograd"))
        if differentiated:
            results = self._differentiable(*flat(args[: self._tensors]), *args[self._tensors :])
            return list(results) if self._listed else results
        with torch._C._AutoDispatchBelowAutograd():
            return self._overload(*args)

    def _by_definition(self, inputs: Inputs) -> Any:
        assert self._reference is not None
        self._check(inputs)
        with as_they_are(inputs[0].device):
            return self._reference(inputs)

    # ---- gradients

    def _save(self, ctx: Any, leaves: Any, output: Any) -> None:
        results = (output,) if isinstance(output, Tensor) else output
        count = len(leaves) - self._numbers
        ctx.settings = leaves[count:]
        if self._constant:
            ctx.mark_non_differentiable(*[results[i] for i in self._constant])
        if self._only is not None:
            ctx.set_materialize_grads(False)  # otherwise backward would allocate zeros for all constant results
        tensors = [*leaves[:count]]
        for i in self._dropped:
            tensors[i] = None
        ctx.save_for_backward(*tensors, *[results[i] for i in self._kept_results])

    def _backward(self, ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if self._only is not None and grads[self._only] is None:
            return (None,) * len(ctx.needs_input_grad)
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad
        count = len(needs) - self._numbers
        wanted = dict(zip(self._fields, self._args(needs), strict=True))
        call = Call(self._contract(*self._args((*saved[:count], *ctx.settings))), saved[count:], wanted)
        gradients = self._gradients(call, *grads)
        found = [gradients.get(field) for field in self._fields]
        if self._has_list:
            found = flat(found)
        return tuple([grad if need else None for grad, need in zip(found, needs, strict=True)])


def gradient_shapes(*arguments: str) -> Callable[[Any], tuple[Tensor, ...]]:
    """Return the `shapes` of a backward operator whose results are the gradients of these arguments, in one list.

    A gradient that is not in the field `needs` of the contract is an empty vector.
    """

    def shapes(inputs: Any) -> tuple[Tensor, ...]:
        tensors = flat([getattr(inputs, argument) for argument in arguments])
        like = next(tensor for tensor in tensors if tensor is not None)
        return tuple(
            like.new_empty(0) if tensor is None or not need else tensor.new_empty(tensor.shape)
            for tensor, need in zip(tensors, inputs.needs, strict=True)
        )

    return shapes


def derivatives_of(formula: Callable[[Any], Sequence[Tensor]], *arguments: str) -> Callable[..., Gradients]:
    """Return the `backward` of a backward operator: autograd through `formula`, which computes all results from the
    contract.

    `arguments` are the fields in which `formula` is differentiable, tensors or tuples of tensors. Results that are not
    in the field `needs` of the contract, if it has one, are left out. Derivatives of any order are supported.
    """

    def backward(call: Call[Any], *directions: Tensor) -> Gradients:
        needs = getattr(call.inputs, "needs", (True,) * len(directions))

        def needed(results: Iterable[Tensor]) -> list[Tensor]:
            return [result for result, need in zip(results, needs, strict=True) if need]

        def of_tensors(*tensors: Tensor | None) -> list[Tensor]:
            given = dict(zip(arguments, nested(tensors, like=fields), strict=True))
            return needed(formula(call.inputs._replace(**given)))

        fields = [getattr(call.inputs, argument) for argument in arguments]
        gradients = gradient_of_formula(of_tensors, flat(fields), needed(directions))
        return dict(zip(arguments, nested(gradients, like=fields), strict=True))

    return backward

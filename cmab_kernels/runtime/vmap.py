"""The vmap rules of operators: a mapped dimension is folded into the batch, or the operator is called once per
element."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rule(NamedTuple):
    """How an operator handles a mapped dimension."""

    batched: Collection[str] | None = None
    """The arguments (B, ...) into whose batch the dimension can be folded; None for all tensors."""
    loops: Callable[[Any], bool] = lambda inputs: False
    """Whether the operator must be called once per element, given its contract. It is also called once per element if
    an argument that is not in `batched` is mapped."""


def flat(values: Sequence[Any]) -> list[Any]:
    """Return the values, with the items of a tuple or list in its place."""
    return [item for value in values for item in (value if isinstance(value, (tuple, list)) else (value,))]


def nested(items: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Undo `flat`: group the items into tuples where `like` has tuples, of the same lengths."""
    left = iter(items)
    return [tuple(islice(left, len(value))) if isinstance(value, (tuple, list)) else next(left) for value in like]


def mapped_rule(operator: Callable, contract: type, tensors: int, rule: Rule | None) -> Callable:
    """Return the vmap rule of `operator`, whose arguments are the fields of `contract` and begin with this number of
    tensors. The last of these may be a tuple of tensors; such an operator is always called once per element.

    A result that was not requested is an empty vector, and is not mapped.
    """
    fields = contract._fields  # type: ignore[attr-defined]  # of a NamedTuple
    batched, loops = rule or Rule()
    foldable = [i for i in range(tensors) if batched is None or fields[i] in batched]

    def of_elements(info: Any, in_dims: Any, *args: Any) -> Any:
        size, dims = info.batch_size, in_dims[:tensors]
        if size == 0:
            return _of_nothing(of_elements, info, in_dims, args)
        has_list = isinstance(args[tensors - 1], list)
        alone = (
            has_list
            or loops(contract(*args))
            or any(dim is not None and i not in foldable for i, dim in enumerate(dims))
        )
        results = _looped(operator, size, in_dims, args) if alone else _folded(operator, size, dims, args, foldable)
        results_dims = tuple(None if _is_absent(result) else 0 for result in results)
        return (results, results_dims) if len(results) > 1 else (results[0], results_dims[0])

    return of_elements


def _folded(
    operator: Callable, size: int, dims: Sequence[int | None], args: Sequence[Any], foldable: Sequence[int]
) -> tuple[Tensor, ...]:
    folded = list(args)
    for i in foldable:
        folded[i] = fold(args[i], dims[i], size)
    return tuple(
        result if _is_absent(result) else result.unflatten(0, (size, -1)) for result in _results(operator, folded)
    )


def _looped(operator: Callable, size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Tensor, ...]:
    leaves = [*zip(flat(args), flat(in_dims), strict=True)]
    calls = [[a if dim is None else a.select(dim, i) for a, dim in leaves] for i in range(size)]
    elements = [_results(operator, nested(call, like=args)) for call in calls]
    return tuple(parts[0] if _is_absent(parts[0]) else torch.stack(parts) for parts in zip(*elements, strict=True))


def fold(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Fold the mapped dimension `dim` of vmap into the batch: a tensor (B, ...) becomes (size * B, ...). None for `dim`
    means not mapped: the tensor is expanded."""
    if tensor is None:
        return None
    mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return mapped.flatten(0, 1)


def _results(operator: Callable, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the results of a call as a tuple, even if there is only one."""
    results = operator(*args)
    return (results,) if isinstance(results, Tensor) else results


def _is_absent(result: Tensor) -> bool:
    """Whether a result is an empty vector, because it was not requested."""
    return result.dim() == 1 and result.numel() == 0


def _of_nothing(rule: Callable, info: Any, in_dims: Any, args: Sequence[Any]) -> Any:
    """Apply a rule to a mapped dimension of size 0. The results get their shapes from a call on one element without
    values."""
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    leaves = [_without_values(arg, dim) for arg, dim in zip(flat(args), flat(in_dims), strict=True)]
    results, dims = rule(info._replace(batch_size=1), in_dims, *nested(leaves, like=args))
    if isinstance(results, Tensor):
        return _nothing_of(results, dims, device), dims
    return tuple(_nothing_of(result, dim, device) for result, dim in zip(results, dims, strict=True)), dims


def _without_values(arg: Any, dim: int | None) -> Any:
    """Return a tensor as a meta tensor with one element in the mapped dimension, and any other argument unchanged."""
    if not isinstance(arg, Tensor):
        return arg
    shape = list(arg.shape)
    if dim is not None:
        shape[dim] = 1
    return arg.new_empty(shape, device="meta")


def _nothing_of(result: Tensor, dim: int | None, device: torch.device) -> Tensor:
    """Return an empty result on the device, given the result for one element. Dimension 0 gets size 0 if the result is
    mapped."""
    return result.new_empty(result.shape if dim is None else (0, *result.shape[1:]), device=device)

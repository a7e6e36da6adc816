"""Checks of arguments that all operators share, and the wording of the error messages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from .dtypes import FLOATING, state_dtype
from .tracing import has_values, is_traced_by_jit, is_transformed

_autocasts_anywhere = torch._C._is_any_autocast_enabled
"""Whether autocast is enabled for any device. This is asked first, because naming the type of a device takes three
times as long."""

MOST_ITERATIONS = 2**28
"""The largest number of iterations of a pseudo-inverse; kernels count iterations in 32 bits."""

LARGEST = 2**63 - 1
"""The largest size that torch can count."""

_EXTENTS = (Integral, torch.SymInt, Tensor)
"""The types of an extent. In a traced call an extent is a symbol or a tensor."""


def mismatch(argument: str, got: object, expected: object) -> str:
    """Return an error message with an argument, its value, and the expected value: «key: got shape (2, 3), expected (B,
    H, N, D)». A hint follows after a semicolon."""
    return f"{argument}: got {got}, expected {expected}"


def kind_of(value: object) -> str:
    """Return the kind of a value, for a message: «a list», «an int», «None»."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def not_a_tensor(name: str, given: object, expected: str = "a torch.Tensor") -> str:
    """Return the message for an argument that should be a tensor. It says how to make a tensor of an array or a
    list."""
    hint = (
        f"; torch.as_tensor({name}) makes one"
        if isinstance(given, (list, tuple)) or hasattr(given, "__array__")
        else ""
    )
    return mismatch(name, kind_of(given), expected + hint)


def not_a_state(name: str, given: object, kind: Any) -> str:
    """Return the message for an argument that should be a state of `kind`, a NamedTuple. It says how to make one from
    its parts or from a list of states."""
    made, hint = kind.__name__, ""
    if isinstance(given, (list, tuple)) and any(isinstance(part, kind) for part in given):
        hint = "; pass each state as an argument of its own (* unpacks a list)"
    elif isinstance(given, (list, tuple)) and len(given) == len(kind._fields):
        hint = f"; {made}(*{name}) makes one"
    elif isinstance(given, dict):
        hint = f"; {made}(**{name}) makes one"
    article = "an" if made[0] in "aeiouAEIO" else "a"
    return mismatch(name, kind_of(given), f"{article} {made}({', '.join(kind._fields)}){hint}")


def check_operands(**operands: Tensor) -> None:
    """Raise an error unless all arguments are tensors on one device with one floating dtype.

    Dtypes may differ under autocast, which casts all tensors unless the first is float64."""
    first_name, device, dtype = "", None, None
    for name, tensor in operands.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(not_a_tensor(name, tensor))
        if device is None:
            first_name, device, dtype = name, tensor.device, tensor.dtype
        if tensor.dtype not in FLOATING or not is_dense(tensor):
            check_floats(name, tensor)  # raises
        if tensor.device != device:
            raise ValueError(
                mismatch(name, f"device {tensor.device}", f"{device}, the device of {first_name}; move them together")
            )
        if tensor.dtype != dtype and (dtype == torch.float64 or not autocasts(device)):
            raise TypeError(mismatch(name, tensor.dtype, f"{dtype} as {first_name} has; cast them alike"))


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is neither sparse nor nested nor distributed. Only then can its shape and values be read in the
    usual way."""
    return tensor.layout is torch.strided and not tensor.is_nested and not is_distributed(tensor)


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a `torch.distributed.tensor.DTensor`, whose shape is that of all ranks together.

    Compilers cannot trace the module of a class. Torch's own error follows there.
    """
    if type(tensor) is Tensor or torch.compiler.is_compiling():
        return False
    return type(tensor).__module__.startswith("torch.distributed.")


LOCAL = "a tensor of this rank; heads and sets are independent, so shard along these and pass its to_local()"


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise if a tensor is sparse, nested or distributed."""
    if is_dense(tensor):
        return
    if is_distributed(tensor):
        raise TypeError(mismatch(name, "a DTensor", LOCAL))
    raise TypeError(mismatch(name, "a nested tensor" if tensor.is_nested else tensor.layout, "a dense tensor"))


def check_floats(name: str, tensor: Tensor) -> None:
    """Raise unless a tensor is dense and of a floating dtype that operators take."""
    check_dense(name, tensor)
    if tensor.dtype not in FLOATING:
        raise TypeError(mismatch(name, tensor.dtype, "float64, float32, bfloat16 or float16"))


def check_key_value(key: Tensor, value: Tensor) -> None:
    """Raise unless key is (B, H, N, D) and value (B, H, N, E), with D, E >= 1."""
    keys, values = key.shape, value.shape
    if len(keys) != 4 or keys[3] == 0:
        raise ValueError(mismatch("key", f"shape {tuple(keys)}", "(B, H, N, D) with D >= 1"))
    if len(values) != 4 or values[0] != keys[0] or values[1] != keys[1] or values[2] != keys[2] or values[3] == 0:
        allowed = f"(B, H, N, E) = ({', '.join(map(str, keys[:3]))}, E) with E >= 1, as key has shape {tuple(keys)}"
        if len(values) == 4 and values[3] and (values[0], values[2], values[1]) == (keys[0], keys[1], keys[2]):
            allowed += "; key or value seems to be (B, N, H, D), so pass its .transpose(1, 2)"
        raise ValueError(mismatch("value", f"shape {tuple(values)}", allowed))


def over_batch(query: Tensor, key: Tensor, batch: int, groups: int = 1, hint: str = "") -> Tensor:
    """Return `query` (B, H, L, D) unchanged, or (H, L, D) expanded over the batch; raise if it does not fit the key.

    The query has `groups` times the heads of the key. `hint` is the end of the message for a wrong
    number of heads."""
    given, keys = query.shape, key.shape
    heads = groups * keys[1]
    if len(given) == 4 and given[0] == batch and given[1] == heads and given[3] == keys[3]:
        return query
    if len(given) not in (3, 4):
        raise ValueError(
            mismatch("query", f"shape {tuple(query.shape)}", "(B, H, L, D), or (H, L, D) shared over the batch")
        )
    shape = (batch, heads, given[-2], keys[-1])
    if len(given) == 4 and given[1] != heads:
        _check_layout(query, key)
    if given != shape[4 - len(given) :]:
        fitting = f"({batch}, {shape[1]}, L, {shape[3]})"
        allowed = f"(B, H, L, D) = {fitting}, or without B, as key has shape {tuple(key.shape)}"
        allowed += hint if given[-3] != heads else ""
        raise ValueError(mismatch("query", f"shape {tuple(query.shape)}", allowed))
    return query.expand(shape)


def _check_layout(query: Tensor, key: Tensor) -> None:
    """For a query and a key (B, H, ., D) with different heads, raise if one or both seem to have the heads in another
    dimension."""
    given, keys = query.shape, key.shape
    swapped = [name for name, fits in (("key", given[1] == keys[2]), ("query", given[2] == keys[1])) if fits]
    if len(swapped) != 1 and given[2] == keys[2]:
        swapped = ["key and query"]
    if len(swapped) == 1 and given[3] == keys[3]:
        name = swapped[0].split()[0]
        shape, other = (given, ("key", keys)) if name == "query" else (keys, ("query", given))
        allowed = f"(B, H, {'L' if name == 'query' else 'N'}, D), as {other[0]} has shape {tuple(other[1])}"
        seems = (
            f"{swapped[0]} seem{'s' if ' ' not in swapped[0] else ''} to have the heads in the third dimension, "
            "so pass .transpose(1, 2)"
        )
        raise ValueError(mismatch(name, f"shape {tuple(shape)}", f"{allowed}; {seems}"))


def check_mask(
    mask: Tensor | None, key: Tensor, shape: tuple[int, ...] | None = None, name: str = "key_padding_mask"
) -> None:
    """Raise unless the mask, called `name`, is None, or a bool tensor on the key's device of `shape`, by default the
    (B, N) of a key (B, H, N, D)."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(not_a_tensor(name, mask, "a torch.Tensor of bool with True = ignore"))
    check_dense(name, mask)
    if mask.dtype != torch.bool:
        raise TypeError(mismatch(name, mask.dtype, "torch.bool with True = ignore"))
    wanted = (key.shape[0], key.shape[2]) if shape is None else tuple(shape)
    if mask.shape != wanted:
        allowed = f"(B, N) = {wanted}, as key has shape {tuple(key.shape)}" if shape is None else f"{wanted}"
        raise ValueError(mismatch(name, f"shape {tuple(mask.shape)}", allowed))
    if mask.device != key.device:
        raise ValueError(mismatch(name, f"device {mask.device}", f"{key.device}, the device of key"))


def check_offsets_shape(cu_seqlens: Tensor, keys: Tensor, name: str) -> int:
    """The number of packed sets. Raise if `cu_seqlens`, or the batch of the argument called `name`, does not fit."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(not_a_tensor("cu_seqlens", cu_seqlens, "a torch.Tensor of int32 or int64"))
    check_dense("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(mismatch("cu_seqlens", cu_seqlens.dtype, "torch.int32 or torch.int64"))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(mismatch("cu_seqlens", f"shape {tuple(cu_seqlens.shape)}", "(S + 1,), the offsets of S sets"))
    if cu_seqlens.device != keys.device:
        raise ValueError(mismatch("cu_seqlens", f"device {cu_seqlens.device}", f"{keys.device}, the device of {name}"))
    if keys.shape[0] != 1:
        raise ValueError(
            mismatch(name, f"batch {keys.shape[0]}", "batch 1, as cu_seqlens packs all sets into one row of keys")
        )
    return cu_seqlens.shape[0] - 1


def check_offsets(cu_seqlens: Tensor | None, length: int) -> None:
    """Raise unless the offsets of packed sets rise from 0 to at most the number of keys. None: there are none.

    Offsets on a GPU are not checked, because the host would have to wait for them.
    """
    if cu_seqlens is None or not is_read(cu_seqlens):
        return
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] > length or any(a > b for a, b in itertools.pairwise(offsets)):
        shown = offsets if len(offsets) <= 8 else [*offsets[:4], "...", *offsets[-3:]]
        allowed = f"offsets that rise from 0 to at most N = {length} and never fall"
        raise ValueError(mismatch("cu_seqlens", shown, allowed))


def refused_offsets(cu_seqlens: Tensor, length: int) -> Tensor:
    """True unless offsets rise from 0 to at most `length`, as a tensor on the device of the offsets."""
    return (cu_seqlens[0] != 0) | (cu_seqlens[-1] > length) | (cu_seqlens.diff() < 0).any()


def fixed(scale: float) -> float:
    """Return the factor of the scores as a float. Raise an error for a value that is not a number, and for a tensor
    that is differentiated or mapped, because a float would lose the derivative or the mapping."""
    if not isinstance(scale, (int, float)):
        _check_constant(scale)
    return as_float("scale", scale)


def as_float(name: str, number: float) -> float:
    """Return a number as a float; raise for an array, and for an int that no float can hold."""
    try:
        return float(number)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(mismatch(name, kind_of(number), "a number")) from None
    except OverflowError:
        raise ValueError(
            mismatch(name, "an int beyond the range of floats", "a number that a float can hold")
        ) from None


def _check_constant(scale: Any) -> None:
    """Raise unless a scale may be a number. A tensor must hold one real number, and must be neither differentiated nor
    mapped."""
    single = hasattr(scale, "__float__")
    if isinstance(scale, Tensor):
        if scale.requires_grad:
            raise TypeError(
                mismatch(
                    "scale",
                    "a tensor that requires a gradient",
                    "a number; multiply the query by a scale that is learned",
                )
            )
        if is_transformed(scale):
            given = "a tensor under a transform of torch.func or in forward mode"
            raise TypeError(
                mismatch("scale", given, "a number; multiply the query by a scale that is learned or mapped")
            )
        single = not (scale.is_nested or scale.is_complex() or scale.is_meta) and scale.numel() == 1
    if not single:
        raise TypeError(mismatch("scale", kind_of(scale), "a number"))


def check_number(name: str, given: object) -> None:
    """Raise unless the value that was given in place of a tensor is a real number."""
    if not isinstance(given, Real):
        raise TypeError(mismatch(name, kind_of(given), "a number or a floating tensor"))


def check_choice(name: str, given: object, choices: Collection[str]) -> None:
    """Raise unless an option is one of the names. Only a str is compared, because an array would compare each
    element."""
    if not isinstance(given, str) or given not in choices:
        got = kind_of(given) if hasattr(given, "__array__") else repr(given)
        raise ValueError(mismatch(name, got, f"one of {', '.join(choices)}"))


def as_flag(name: str, given: object) -> bool:
    """Return an option as a bool; raise an error for a value that is neither true nor false, such as an array.

    Python calls each string or list that is not empty true, "no" among them. So a value needs a truth of its own.
    """
    if isinstance(given, bool):
        return given
    try:
        if hasattr(type(given), "__bool__"):
            return bool(given)
    except (ValueError, RuntimeError, TypeError):
        pass
    raise TypeError(mismatch(name, kind_of(given), "True or False"))


def check_broadcast(name: str, tensor: Tensor, shape: Sequence[int], device: torch.device) -> None:
    """Raise unless a tensor broadcasts to `shape` and is on `device`; a number () may be on another device."""
    if tensor.device != device and (tensor.dim() > 0 or tensor.is_meta):
        raise ValueError(mismatch(name, f"device {tensor.device}", f"{device}, the device of the other arguments"))
    above = len(shape) - tensor.dim()
    # `in (1, wanted)` would fail: the compiler of torch 2.6 cannot search a tuple that holds a
    # symbolic size.
    if above < 0 or any(
        given != 1 and given != wanted for given, wanted in zip(tensor.shape, shape[above:], strict=True)
    ):
        raise ValueError(
            mismatch(name, f"shape {tuple(tensor.shape)}", f"a number, or a tensor that broadcasts to {tuple(shape)}")
        )


def as_decay(decay: float | Tensor, shape: Sequence[int], device: torch.device) -> float | Tensor:
    """Return a decay as a float, or as a float64 tensor on `device`. Raise unless it is a number in (0, 1], or a tensor
    of such numbers that broadcasts to `shape`. If values are not read, elements outside (0, 1] become NaN."""
    if not isinstance(decay, Tensor):
        check_number("decay", decay)
        if not 0 < decay <= 1:
            raise ValueError(mismatch("decay", decay, "a number in (0, 1]"))
        return float(decay)
    check_floats("decay", decay)
    check_broadcast("decay", decay, shape, device)
    refused = ~((decay > 0) & (decay <= 1))
    if not is_read(decay):
        return decay.to(device, torch.float64).masked_fill(refused.to(device), math.nan)
    if refused.any():
        raise ValueError(mismatch("decay", "an element outside (0, 1]", "numbers in (0, 1]"))
    return decay.to(device, torch.float64)


def check_count(name: str, count: int, least: int = 1) -> int:
    """Return a count in a module as an int; raise an error unless it is an int (also of NumPy) from `least` to the
    largest number to which torch can count."""
    if isinstance(count, bool) or not isinstance(count, Integral) or count < least:
        raise ValueError(mismatch(name, repr(count), f"an int >= {least}"))
    if count > LARGEST:
        raise ValueError(mismatch(name, repr(count), f"an int from {least} to 2**63 - 1"))
    return int(count)


def is_count(given: object, most: int) -> bool:
    """Whether a value is an int (also of NumPy) from 1 to `most`."""
    return isinstance(given, Integral) and not isinstance(given, bool) and 1 <= int(given) <= most


def check_extents(**extents: Any) -> None:
    """Raise unless each is an int >= 0."""
    for name, extent in extents.items():
        if (
            isinstance(extent, bool)
            or not isinstance(extent, _EXTENTS)
            or (isinstance(extent, Tensor) and not is_traced_by_jit())
        ):
            raise TypeError(
                mismatch(name, kind_of(extent) if isinstance(extent, Tensor) else repr(extent), "an int >= 0")
            )
        if extent < 0:
            raise ValueError(mismatch(name, extent, "an int >= 0"))
        if isinstance(extent, Integral) and int(extent) > LARGEST:
            raise ValueError(mismatch(name, extent, "an int from 0 to 2**63 - 1"))


def device_of(device: torch.device | str | int) -> torch.device:
    """Return the device that is given or named; raise an error unless the name is a device that torch knows."""
    if isinstance(device, torch.device):
        return device
    if isinstance(device, bool) or not isinstance(device, (str, int)):
        raise TypeError(mismatch("device", kind_of(device), "a torch.device or the name of one"))
    try:
        return torch.device(device)
    except (RuntimeError, ValueError) as error:
        raise ValueError(mismatch("device", repr(device), "a torch.device or the name of one")) from error


def check_heads(name: str, width: int, num_heads: int) -> tuple[int, int]:
    """Return the width of a module's features, called `name`, and the number of heads, as ints; raise unless the number
    divides the width."""
    width, num_heads = check_count(name, width), check_count("num_heads", num_heads)
    if width % num_heads:
        raise ValueError(mismatch("num_heads", num_heads, f"a divisor of {name} = {width}"))
    return width, num_heads


def check_every(every: int) -> int:
    """Return the number of keys from one prefix to the next as an int; raise unless it is an int (also of NumPy) >=
    1."""
    if isinstance(every, bool) or not isinstance(every, Integral):
        raise TypeError(mismatch("every", kind_of(every), "an int >= 1"))
    if every < 1:
        raise ValueError(mismatch("every", every, "an int >= 1"))
    return int(every)


def has_shape(tensor: Tensor, *shapes: tuple[int, ...]) -> bool:
    """Whether a tensor has one of the shapes. `in` would not work: the compiler of torch 2.6 does not find a number in
    a tuple that holds a symbol for it."""
    return any(tensor.shape == shape for shape in shapes)


def weights_of_heads(weights: Tensor | None, key: Tensor) -> Tensor | None:
    """Return weights (B, N) or (B, H, N) of the keys as (B, H, N) in `state_dtype`; None stays None. Raise if they do
    not fit."""
    if weights is None:
        return None
    if not isinstance(weights, Tensor):
        raise TypeError(not_a_tensor("weights", weights, "a floating torch.Tensor"))
    check_floats("weights", weights)
    batch, heads, length, _ = key.shape
    if not has_shape(weights, (batch, length), (batch, heads, length)):
        allowed = (
            f"(B, N) = {(batch, length)} or (B, H, N) = {(batch, heads, length)}, as key has shape {tuple(key.shape)}"
        )
        raise ValueError(mismatch("weights", f"shape {tuple(weights.shape)}", allowed))
    if weights.device != key.device:
        raise ValueError(mismatch("weights", f"device {weights.device}", f"{key.device}, the device of key"))
    if weights.dtype == torch.float64 != state_dtype(key.dtype):
        _check_range(weights)
    weights = nan_if_refused(weights.to(state_dtype(key.dtype)))
    return weights if weights.dim() == 3 else weights.unsqueeze(1).expand(batch, heads, length)


def _check_range(weights: Tensor) -> None:
    """Raise if float64 weights of keys in another dtype become infinite or all 0 in float32. A weight that is small
    compared with others may become 0."""
    if not is_read(weights) or not weights.numel():
        return
    largest, single = weights.amax().item(), torch.finfo(torch.float32)
    if single.max < largest < math.inf or 0 < largest < single.tiny:
        allowed = (
            f"{single.tiny:.1e} to {single.max:.1e}, because float32 keys have float32 weights; scale the weights, "
            "or pass float64 keys"
        )
        raise ValueError(mismatch("weights", f"{largest:.1e} as the largest", allowed))


def is_read(tensor: Tensor) -> bool:
    """Whether the values of a tensor are checked: only on the CPU, and if there are values (`tracing.has_values`). On a
    GPU, the host would have to wait."""
    return tensor.device.type == "cpu" and has_values(tensor)


def refuse_negative(name: str, tensor: Tensor, absent: Tensor | None = None) -> None:
    """Raise `ValueError` if an element of a tensor on the CPU is below 0, unless it is `absent`.

    On a GPU nothing is launched. There, `nan_if_refused`, or the `info` of a solve, reports a value that is not
    allowed.
    """
    if not is_read(tensor) or not tensor.numel():
        return
    if tensor.is_contiguous():
        least = tensor.min()
    else:
        for dim, stride in enumerate(tensor.stride()):
            tensor = tensor if stride else tensor.narrow(dim, 0, 1)  # an expanded dimension repeats the same numbers
        least = (
            tensor.amin()
        )  # this takes twice the time of `min`, but `min` would copy a tensor that is not contiguous
    if least.item() >= 0:
        return
    refused = tensor < 0  # all False if the minimum is NaN and no other element is negative
    if (refused if absent is None else refused & ~absent).any():
        raise ValueError(mismatch(name, "a negative element", "numbers >= 0"))


def nan_if_refused(tensor: Tensor, largest: float = math.inf) -> Tensor:
    """Return a GPU tensor with NaN for elements that raise an error on the CPU: elements below 0 or above `largest`.
    Return a CPU tensor unchanged."""
    if not tensor.is_cuda:
        return tensor
    refused = tensor < 0 if largest == math.inf else (tensor < 0) | (tensor > largest)
    return tensor.masked_fill(refused, math.nan)


def refuse_not_finite(**tensors: Tensor) -> None:
    """Raise `ValueError` if a tensor on the CPU holds a NaN or an infinity. Tensors on a GPU are not checked, because
    the host would wait."""
    for name, tensor in tensors.items():
        if is_read(tensor) and not _all_finite(tensor):
            raise ValueError(mismatch(name, "a NaN or an infinity", "finite numbers"))


def _all_finite(tensor: Tensor) -> bool:
    """Whether every element is finite. The minimum and maximum, which propagate NaNs, take a fifteenth of the time of
    `isfinite`."""
    return not tensor.numel() or all(math.isfinite(extreme) for extreme in tensor.detach().aminmax())


def autocasts(device: torch.device) -> bool:
    """Whether autocast is enabled for a device; always False for meta tensors."""
    if not _autocasts_anywhere():
        return False
    kind = device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors cast to the dtype of autocast; unchanged if autocast is off or the first tensor is float64."""
    device = tensors[0].device
    if not autocasts(device) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device.type)) for tensor in tensors)


def as_they_are(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that disables autocast, so that operations keep the dtypes of their inputs."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()

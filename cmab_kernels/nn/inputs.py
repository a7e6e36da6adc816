"""Features and masks that callers pass to modules: their layout, and checks with errors that name the wrong
argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.checks import autocasts, check_dense, kind_of, mismatch
from ..runtime.tracing import has_values, is_differentiated, is_recorded

NO_ATTENTION_MASK = "the operator has key padding masks, but no attention mask"
ADDITIVE = "the key padding mask is a float mask that may be added to logits, with numbers besides 0 and -inf"
DROPOUT = "dropout is on"
"""Reasons why torch's own code runs. `why_torch` of several modules returns them."""


def split_heads(features: Tensor, heads: int) -> Tensor:
    """Return features (..., N, H D) as heads (..., H, N, D), a view."""
    return features.unflatten(-1, (heads, -1)).transpose(-3, -2)


def join_heads(features: Tensor) -> Tensor:
    """Return heads (..., H, L, D) as features (..., L, H D)."""
    return features.transpose(-3, -2).flatten(-2)


def check_features(
    name: str, features: Tensor, allowed: str, dims: tuple[int, ...], width: int, weight: Tensor
) -> None:
    """Raise unless `features` fits a module.

    `features` must have a number of dimensions in `dims`, `width` columns, and the dtype and device
    of the module's `weight`. `allowed` is the layout for the error message.
    """
    if not isinstance(features, Tensor):
        raise TypeError(mismatch(name, kind_of(features), _tensor_for(features)))
    if features.is_nested:
        raise ValueError(mismatch(name, "a nested tensor", "a dense tensor; pad it, and pass a mask"))
    check_dense(name, features)
    if features.dim() not in dims or features.dim() == 0 or features.shape[-1] != width:
        allowed = f"{allowed}, with {width} columns{_likely_layout(features.shape, width)}"
        raise ValueError(mismatch(name, f"shape {tuple(features.shape)}", allowed))
    if features.device != weight.device:
        remedy = (
            "load its weights, or name its class in accelerate's preload_module_classes"
            if weight.is_meta
            else "move them together"
        )
        raise ValueError(
            mismatch(name, f"device {features.device}", f"{weight.device}, the device of the module; {remedy}")
        )
    if features.dtype != weight.dtype:
        double = torch.float64 in (features.dtype, weight.dtype)  # autocast does not cast float64
        if double or not (features.is_floating_point() and autocasts(features.device)):
            remedy = "cast them alike" + ("" if double else ", or use autocast")
            raise TypeError(mismatch(name, features.dtype, f"{weight.dtype} as the module has; {remedy}"))


def _tensor_for(given: Any) -> str:
    """For an argument that is not a tensor, return a text which says that a tensor is expected, and how to make one."""
    array, numbers = type(given).__module__ == "numpy", isinstance(given, (list, tuple))
    return "a torch.Tensor" + (
        "; torch.from_numpy makes one" if array else "; torch.tensor makes one" if numbers else ""
    )


def _likely_layout(shape: tuple[int, ...], width: int) -> str:
    """Return the likely cause of a wrong shape, or "" if none is known."""
    if len(shape) > 1 and shape[-2] == width:
        return "; it seems to be transposed"
    if len(shape) > 2 and shape[-2] * shape[-1] == width:
        return "; the module splits heads itself, flatten(-2) joins these"
    return ""


def check_floating(module: nn.Module, /, **features: Any) -> None:
    """Raise unless these are floating tensors that torch's own code may read with the weights of `module`.

    torch's code finds all other errors. Sparse tensors raise an error. Autocast does not cast float64, so under
    autocast either both features and weights must be float64, or neither.
    """
    for name, each in features.items():
        if not isinstance(each, Tensor):
            raise TypeError(mismatch(name, kind_of(each), _tensor_for(each)))
        if not each.is_floating_point():
            raise TypeError(mismatch(name, each.dtype, "a floating torch.Tensor"))
        if not each.is_nested:
            check_dense(name, each)
        if autocasts(each.device):
            dtypes = [weight.dtype for weight in module.parameters() if weight.is_floating_point()]
            dtype = dtypes[0] if dtypes else each.dtype
            if each.dtype != dtype and torch.float64 in (each.dtype, dtype):
                raise TypeError(mismatch(name, each.dtype, f"{dtype} as the module has; cast them alike"))


def bool_mask(
    key_padding_mask: Tensor | None, key: Tensor, name: str = "key_padding_mask"
) -> tuple[Tensor | None, Tensor]:
    """Return the mask, called `name`, as a bool mask, and the key.

    torch adds a float mask to the logits. Here it becomes a bool mask that is True where the float mask is -inf.
    `torch.nn.TransformerEncoderLayer` converts bool masks to such float masks. A number other than 0 and -inf raises a
    `ValueError`, or a `RuntimeError` in a compiled call. On a GPU, and under a transform or trace, the values are not
    read. Such a number then makes the whole key NaN, and therefore every result. On the meta device there are no values
    to check.
    """
    if not isinstance(key_padding_mask, Tensor) or not key_padding_mask.is_floating_point():
        return key_padding_mask, key
    ignore = key_padding_mask == -torch.inf
    sound = (ignore | (key_padding_mask == 0)).all()
    if key_padding_mask.is_meta:
        return ignore, key
    message = mismatch(name, "a float mask with values other than 0 and -inf", "a bool mask, or only 0 and -inf")
    if torch.compiler.is_compiling() and not key_padding_mask.is_cuda:
        torch._assert_async(sound, message)
        return ignore, key
    # A failed assertion on the device would end its CUDA context.
    if key_padding_mask.is_cuda or not has_values(key_padding_mask):
        return ignore, key.masked_fill(~sound, torch.nan)
    if not sound:
        raise ValueError(message)
    return ignore, key


def is_additive(mask: Tensor | None) -> bool:
    """Return whether a float mask must be added to logits: it has values other than 0 and -inf, or
    needs a gradient.

    The values are not read on a GPU, where the program would have to wait for them, and not under a
    compiler. In these cases the result is False, and `bool_mask` checks the values. A transform or
    trace must not depend on the numbers, so there the result is True.
    """
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        return False
    if mask.requires_grad:
        return True
    if mask.is_cuda or mask.is_meta or torch.compiler.is_compiling():
        return False
    return not has_values(mask) or not bool(((mask == 0) | (mask == -torch.inf)).all())


def for_part(features: Tensor) -> Tensor:
    """Return features for the call of a submodule. Detach them if they require a gradient but no
    graph is recorded.

    With grad mode off, a parameter or a view of a leaf still requires a gradient. torch's `FlopCounterMode`, which puts
    hooks on all submodules, then fails. A recorded program must not contain this detachment, because the program may be
    differentiated.
    """
    return features if is_differentiated(features) or is_recorded() or not features.requires_grad else features.detach()


def hide_padding(features: Tensor, ignore: Tensor | None) -> Tensor:
    """Return features (..., C), with 0 where `ignore` (...) is True if a gradient may be taken.

    The operators do not read ignored keys, so the gradient of these keys is 0. But the gradient of a projection's
    weight is the product of that gradient and the projection's input, and 0 times a NaN in the padding is NaN.
    """
    return (
        features if ignore is None or not torch.is_grad_enabled() else features.masked_fill(ignore.unsqueeze(-1), 0.0)
    )

"""Stacked blocks in one call: the public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...runtime.backends import choose
from ...runtime.checks import (
    as_autocast,
    as_flag,
    as_float,
    check_count,
    check_mask,
    check_operands,
    kind_of,
    mismatch,
)
from ...runtime.dtypes import state_dtype
from ..api import check_residual
from .contract import BlockStack
from .reference import OF_BLOCK
from .schema import block_stack as stacked

_FORWARD = ("C", "C", "GC", "G", "CF", "C")
_ATTENTION = ("C", "C", "CC", "CC", "CC", "CC", "C")
_HALF = ("C", "C", *_ATTENTION, *_FORWARD, *_ATTENTION, *_FORWARD)
_SHAPES = ("MC", *_HALF, *_HALF)
"""The dimensions of the parameters of a block, with G = 2 F."""


def block_stack(
    x: Tensor,
    inputs: Tensor | None,
    parameters: Sequence[Tensor],
    *,
    num_heads: int,
    attended: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    eps: float = 1e-5,
    residual: str = "input",
    all_blocks: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Latents x after a stack of Constant Memory Attention Blocks that read the same inputs, in one call.

    `cmab_kernels.nn.CMABStack` holds the parameters of such a stack, and has its streams.

    Args:
        x: (B, L, C). float64, float32, bfloat16 or float16, as all other tensors.
        inputs: (B, N, C); N may be 0. None: `attended` is read.
        parameters: the 57 parameters of each block in turn: the block latents (M, C), then two halves. A half has
            cross-attention (norm and context norm: weight and bias; query, key and value: weight; output: weight and
            bias), feed-forward (norm, expand and contract: weight and bias), self-attention (as cross-attention,
            without the context norm) and feed-forward. All blocks have the same M and the same hidden width F.
        num_heads: H, a divisor of C.
        attended: (K B, H, M, C / H), in float64 for float64 latents, else in float32: the results
            of the first cross-attentions before their output projections, as in the state of a
            `CMABStack`. Allowed only without inputs.
        key_padding_mask: (B, N) bool, True = ignore.
        eps: the eps of all norms, > 0.
        residual: as in `cmab_kernels.attention_layer`, for all layers.
        all_blocks: whether the result is (K, B, L, C), the latents after each block.
        impl: "auto", "reference" or "native".

    Returns:
        (B, L, C) in the dtype of x. Under autocast, the stack computes in the dtype of autocast. Differentiable to any
        order in all tensors.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or value; the message names it.
        RuntimeError: `impl` cannot run here.

    Source: Memory Efficient Neural Processes via Constant Memory Attention Block (Feng et al., ICML 2024), section 4.
    """
    if not isinstance(parameters, (tuple, list)) or not parameters or len(parameters) % OF_BLOCK:
        got = f"{len(parameters)} tensors" if isinstance(parameters, (tuple, list)) else kind_of(parameters)
        raise ValueError(mismatch("parameters", got, f"a tuple or list of {OF_BLOCK} tensors for each block"))
    named = {f"parameters[{i}]": parameter for i, parameter in enumerate(parameters)}
    check_operands(x=x, **({} if inputs is None else {"inputs": inputs}), **named)
    if x.dim() != 3 or x.shape[-1] == 0:
        raise ValueError(mismatch("x", f"shape {tuple(x.shape)}", "(B, L, C) with C >= 1"))
    (batch, _, width), blocks = x.shape, len(parameters) // OF_BLOCK
    num_heads = check_count("num_heads", num_heads)
    if width % num_heads:
        raise ValueError(mismatch("num_heads", num_heads, f"a divisor of {width}, the columns of x"))
    sizes = {"C": width, "M": _size(parameters[0], 0), "F": _size(parameters[14], 1), "G": 2 * _size(parameters[14], 1)}
    for i, parameter in enumerate(parameters):
        shape = tuple(sizes[letter] for letter in _SHAPES[i % OF_BLOCK])
        if parameter.shape != shape:
            raise ValueError(mismatch(f"parameters[{i}]", f"shape {tuple(parameter.shape)}", shape))
    if (inputs is None) == (attended is None):
        got = "None without inputs" if attended is None else "a tensor together with inputs"
        raise ValueError(mismatch("attended", got, "either inputs or attended"))
    if inputs is not None:
        if inputs.dim() != 3 or (inputs.shape[0], inputs.shape[2]) != (batch, width):
            allowed = f"(B, N, C) with B = {batch} and C = {width}, as x has shape {tuple(x.shape)}"
            raise ValueError(mismatch("inputs", f"shape {tuple(inputs.shape)}", allowed))
        check_mask(key_padding_mask, inputs, inputs.shape[:2])
    elif key_padding_mask is not None:
        raise ValueError(mismatch("key_padding_mask", "a mask", "None without inputs"))
    eps = as_float("eps", eps)
    if not eps > 0:
        raise ValueError(mismatch("eps", eps, "a number > 0"))
    check_residual(residual)
    rows = () if inputs is None else (inputs,)
    x, *cast = as_autocast(x, *rows, *parameters)
    if attended is not None:
        _check_attended(attended, x, (blocks * batch, num_heads, sizes["M"], width // num_heads))
    impl = choose("layers.stack", impl, x, x.unflatten(-1, (num_heads, -1)))
    read: list[Any] = [x, cast.pop(0) if rows else None, key_padding_mask, attended, None]
    given: list[Any] = [*read, tuple(cast), num_heads, eps, residual, as_flag("all_blocks", all_blocks), False, impl]
    return stacked(BlockStack(*given))


def _size(tensor: Tensor, dim: int) -> int:
    """A size of a matrix, or 0 if the tensor is not a matrix. The check of its shape then raises an
    error."""
    return tensor.shape[dim] if tensor.dim() == 2 else 0


def _check_attended(attended: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    check_operands(attended=attended)
    wanted = state_dtype(x.dtype)
    if attended.dtype != wanted or attended.device != x.device or attended.shape != shape:
        got = f"{attended.dtype} on {attended.device} of shape {tuple(attended.shape)}"
        raise ValueError(mismatch("attended", got, f"{wanted} on {x.device} of shape {shape}"))

"""Stacked blocks, their reading of inputs and their gradients as `torch.library` operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.dtypes import state_dtype
from ...runtime.operator import GRADIENTS, Call, Gradients, Operator, derivatives_of, gradient_shapes
from ...runtime.tracing import has_memory, is_differentiated, is_recorded
from ..schema import gradients_of
from .contract import BlockStack, BlockStackBackward, BlockStackRead, kept_bytes
from .reference import OF_BLOCK, OF_READING, block_stack_read_reference, block_stack_reference

_OF_BACKWARD = ("x", "inputs", "state_out", "parameters")
"""The arguments whose gradients the backward operator computes."""


# ---- shapes


def _state_shapes(given: BlockStack | BlockStackRead, like: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """The state (out, lse) after inputs of this batch size and dtype."""
    block, width = given.parameters[0].shape
    shape = (blocks * like.shape[0], given.num_heads, block)
    out = like.new_empty((*shape, width // given.num_heads), dtype=state_dtype(like.dtype))
    return out, like.new_empty(shape, dtype=torch.float64)


def _shapes(given: BlockStack) -> tuple[Tensor, ...]:
    x, blocks = given.x, len(given.parameters) // OF_BLOCK
    out, lse = _state_shapes(given, x, blocks)
    state = (out.new_empty(0), lse.new_empty(0)) if given.inputs is None else (out, lse)
    y = x.new_empty((blocks, *x.shape) if given.all_blocks else x.shape)
    return y, *state, x.new_empty(kept_bytes(given, blocks) // 8 if given.keep else 0, dtype=torch.float64)


# ---- FLOPs, for contracts of shapes: two per multiply-add, as for the layers


def _reading_products(given: Any, blocks: int) -> tuple[int, int]:
    """The multiplications of the projections before the first cross-attentions, and the number of rows of scores times
    keys."""
    (batch, rows, width), (block, _) = given.inputs, given.parameters[0]
    return blocks * width * width * (block + 2 * batch * rows), blocks * batch * block * rows


def _products(given: Any) -> tuple[int, int]:
    """The same numbers for whole blocks."""
    blocks = len(given.parameters) // OF_BLOCK
    (batch, latents, width), (block, _), (_, inner) = given.x, given.parameters[0], given.parameters[14]
    own, other = batch * block, batch * latents
    projections = blocks * (width * width * (7 * own + 6 * other) + 6 * width * inner * (own + other))
    scores = blocks * (own * block + other * block + other * latents)
    if given.inputs is None:
        return projections, scores
    reading, read = _reading_products(given, blocks)
    return projections + reading, scores + read


def _operations(given: Any) -> int:
    projections, scores = _products(given)
    return 2 * (projections + 2 * scores * given.x[-1])


def _read_operations(given: Any) -> int:
    projections, scores = _reading_products(given, len(given.parameters) // OF_READING)
    return 2 * (projections + 2 * scores * given.inputs[-1])


def _backward_operations(given: Any) -> int:
    """FLOPs of the products for all gradients: a training step needs nearly all, and the kernel makes nearly all."""
    projections, scores = _products(given)
    return 2 * (2 * projections + 5 * scores * given.x[-1])


# ---- gradients


def _definition(given: BlockStack) -> tuple[Tensor, ...]:
    arguments: list[Any]
    *arguments, _keep, _impl = given
    return *block_stack_reference(*arguments), given.x.new_empty(0, dtype=torch.float64)


def _read_definition(given: BlockStackRead) -> tuple[Tensor, Tensor]:
    arguments: list[Any]
    *arguments, _impl = given
    return block_stack_read_reference(*arguments)


def _again(given: BlockStackBackward) -> Tensor:
    """y of the definition."""
    arguments = {name: getattr(given, name) for name in BlockStack._fields if hasattr(given, name)}
    return _definition(BlockStack(**arguments, state_lse=None))[0]


_by_definition = derivatives_of(
    lambda given: _definition(given)[:1], "x", "inputs", "state_out", "state_lse", "parameters"
)


def _backward(call: Call[BlockStack], dy: Tensor, *_: Any) -> Gradients:
    """The gradients. The definition gives them in two cases: for inputs that follow a state, which no kernel
    differentiates, and under `is_grads_batched`, which has no rule for operators that return a list."""
    given = call.inputs
    follows = given.inputs is not None and given.state_out is not None
    if follows or not (torch.compiler.is_compiling() or has_memory(dy)):
        return _by_definition(call, dy)
    # A program that was recorded without a gradient keeps nothing, and computes the stack again.
    out, lse, kept = call.kept if given.keep else block_stack_op(given._replace(keep=True))[1:]
    x, inputs, mask, state_out, _lse, parameters, num_heads, eps, residual, all_blocks, _keep, impl = given
    *needs, of_parameters = call.needs(*_OF_BACKWARD)
    if inputs is None:  # the norm of the block latents is then used only for the residual
        unread = range(3 if residual == "normed" else 1, OF_READING)
        of_parameters = [need and i % OF_BLOCK not in unread for i, need in enumerate(of_parameters)]
    settings: list[Any] = [num_heads, eps, residual, all_blocks, (*needs, *of_parameters), impl]
    tensors: list[Any] = [dy, x, inputs, mask, state_out, out, lse, kept, parameters]
    dx, dinputs, dstate, *grads = _backward_op(BlockStackBackward(*tensors, *settings))
    of_each = [grad if need else None for grad, need in zip(grads, of_parameters, strict=True)]
    return {"x": dx, "inputs": dinputs, "state_out": dstate, "parameters": of_each}


block_stack_op = Operator(
    "layers.stack",
    "block_stack",
    BlockStack,
    ("y", "out", "lse", "kept"),
    shapes=_shapes,
    operations=_operations,
    backward=_backward,
    keeps=(*BlockStack._fields, "out", "lse", "kept"),
    constant=("out", "lse", "kept"),
    reference=_definition,
)
block_stack_read_op = Operator(
    "layers.stack",
    "block_stack_read",
    BlockStackRead,
    ("out", "lse"),
    shapes=lambda given: _state_shapes(given, given.inputs, len(given.parameters) // OF_READING),
    operations=_read_operations,
    backward=derivatives_of(_read_definition, "inputs", "state_out", "state_lse", "parameters"),
    reference=_read_definition,
)
_backward_op = Operator(
    "layers.stack",
    "block_stack_backward",
    BlockStackBackward,
    GRADIENTS,
    shapes=gradient_shapes(*_OF_BACKWARD),
    operations=_backward_operations,
    backward=derivatives_of(gradients_of(_again, *_OF_BACKWARD), "dy", *_OF_BACKWARD),
)


def block_stack(inputs: BlockStack) -> Tensor:
    """The latents of stacked blocks. Tensors for the backward pass are kept if there is one, or if
    a recorded program may have one."""
    keep = is_differentiated(inputs.x, inputs.inputs, inputs.state_out, *inputs.parameters) or is_recorded()
    # The compiler of torch 2.6 does not support `_replace`. So it calls the operator from Python,
    # which is needed here: compiled, the autograd Function of two hundred tensors gives wrong
    # numbers.
    result: Tensor = block_stack_op(inputs._replace(keep=keep))[0]
    return result

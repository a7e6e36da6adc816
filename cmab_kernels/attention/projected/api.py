"""Latent cross-attention over inputs that the operator itself projects to keys and values: the public functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.backends import choose
from ...runtime.checks import (
    as_autocast,
    as_float,
    as_they_are,
    check_mask,
    check_offsets_shape,
    check_operands,
    fixed,
    is_read,
    kind_of,
    mismatch,
)
from ...runtime.dtypes import default_scale, state_dtype
from ...runtime.tracing import needs_definition, under_transform
from ..schema import state_gradient
from ..state import AttentionState, check_state
from .contract import ProjectedAttention, ProjectedAttentionBackward
from .schema import projected_attention_op, projected_backward_op

Norm = tuple[Tensor, Tensor, float]


def projected_attention_state(
    query: Tensor,
    inputs: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
    *,
    context_norm: Norm | None = None,
    state: AttentionState | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> AttentionState:
    """The attention state of keys and values that are projections of `inputs`, and that are never stored in full.

    The result is `attention_state(query, key, value, ...)` with the key `heads(F.linear(x, key_weight, key_bias))` and
    the value `heads(F.linear(x, value_weight, value_bias))`, where x is `inputs`, or
    `F.layer_norm(inputs, (C,), *context_norm)`. Keys and values are computed in float32 (float64 for float64 inputs; on
    a GPU, values of bfloat16 inputs in bfloat16) for one chunk of rows at a time. A chunk has a few
    hundred rows on a CPU. On a GPU its keys and values take 32 MiB. The backward pass computes them
    again. Memory therefore does not grow with N, apart from the gradient of the inputs if it is
    needed. K stacked blocks, each with its own queries, projections and norm, share one pass over
    the inputs.

    Args:
        query: (B, H, L, D), or (H, L, D) shared over the batch. float64, float32, bfloat16 or float16. Stacked: (K, B,
            H, L, D) or (K, H, L, D).
        inputs: (B, N, C), any strides; N may be 0.
        key_weight: (H D, C) as in `torch.nn.Linear`. Stacked: (K, H D, C). A weight with three dimensions makes a
            stacked call.
        value_weight: (H E, C). Stacked: (K, H E, C).
        key_bias: (H D,), or None. Stacked: (K, H D).
        value_bias: (H E,), or None. Stacked: (K, H E).
        context_norm: (weight (C,), bias (C,), eps) of a LayerNorm of each row of the inputs; None: no norm. Stacked:
            weight and bias (K, C).
        state: the state of other inputs, to merge with the new state: out (B, H, L, E) in float32 (float64 for float64
            inputs), lse (B, H, L) in float64. Stacked: both have a leading K. `state` is not changed.
        key_padding_mask: (B, N) bool, True = ignore. The values of ignored rows have no effect, not even NaN.
        cu_seqlens: (S + 1,) offsets of S sets packed into the rows of inputs of batch 1, as in `latent_attention`:
            inputs may have more rows, which belong to no set.
        scale: factor of the scores; None means D ** -0.5.
        impl: "auto", "reference", "native" or "triton".

    Returns:
        The state: out (B, H, L, E), lse (B, H, L); stacked: out (K, B, H, L, E), lse (K, B, H, L). Differentiable to
        any order in query, inputs, weights, biases, norm and state.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it.
        RuntimeError: `impl` cannot run here.

    Source: Memory Efficient Neural Processes via Constant Memory Attention Block (Feng et al., ICML 2024), section 4.

    >>> latents, points = torch.randn(4, 16, 8), torch.randn(2, 1000, 32)
    >>> key_weight, value_weight = torch.randn(2, 32, 32) / 6
    >>> state = cmab_kernels.projected_attention_state(latents, points, key_weight, value_weight)
    >>> weights = key_weight, value_weight
    >>> key, value = ((points @ weight.T).unflatten(-1, (4, 8)).transpose(1, 2) for weight in weights)
    >>> torch.allclose(state.out, cmab_kernels.latent_attention(latents, key, value), atol=1e-4)
    True
    """
    given = {"query": query, "inputs": inputs, "key_weight": key_weight, "value_weight": value_weight}
    given.update(
        {name: bias for name, bias in (("key_bias", key_bias), ("value_bias", value_bias)) if bias is not None}
    )
    given.update({} if context_norm is None else _norm_tensors(context_norm))
    check_operands(**given)
    stacked = key_weight.dim() == 3
    shape = _check_shapes(given, stacked)
    batch = inputs.shape[0] if cu_seqlens is None else check_offsets_shape(cu_seqlens, inputs, "inputs")
    query = _over_batch(query, batch, stacked)
    check_mask(key_padding_mask, inputs, inputs.shape[:2])
    if cu_seqlens is not None:
        key_padding_mask = _or_beyond(key_padding_mask, cu_seqlens, inputs)
    given = dict(zip(given, as_autocast(query, *list(given.values())[1:]), strict=True))
    sums = state_dtype(given["inputs"].dtype)
    if state is not None:
        state = _check_incoming(state, (*query.shape[:-1], shape.value_width), sums, inputs.device, stacked)
    with as_they_are(inputs.device):
        weight, bias = _folded({name: t if stacked else t.unsqueeze(0) for name, t in given.items()}, sums)
    eps = None if context_norm is None else as_float("context_norm[2]", context_norm[2])
    chosen = choose("attention.projected", impl, *list(given.values())[:4])
    scale = default_scale(shape.key_width) if scale is None else fixed(scale)
    query, rows, (out, lse) = given["query"].to(sums), given["inputs"], state or (None, None)
    call = ProjectedAttention(query, rows, weight, bias, key_padding_mask, cu_seqlens, out, lse, scale, eps, chosen)
    merged = projected_attention_op(call)
    return AttentionState(*(merged if stacked else (part.squeeze(0) for part in merged)))


Chunks = Callable[[], Iterable[Tensor]]
AfterChunk = Callable[[int, AttentionState], None]


def attention_state_of_chunks(
    query: Tensor,
    chunks: Chunks,
    key_weight: Tensor,
    value_weight: Tensor,
    *,
    context_norm: Norm,
    state: AttentionState | None,
    after: AfterChunk,
) -> AttentionState:
    """`projected_attention_state` of K stacked blocks over chunks of inputs (B, n, C), one chunk after the other.

    `chunks()` starts an iteration over tensors that fit the query (K, H, L, D). The backward pass calls `chunks()`
    again, and sums the gradients of the query, weights, norm and state over the chunks. The final
    state suffices to compute the part of each chunk. The inputs themselves get no gradient. `after`
    is called with the number of chunks read so far and the state after them. Forward mode and the
    transforms of `torch.func` instead differentiate the call of each chunk. They also differentiate
    the inputs of the call, and keep them.
    """
    given = {"query": query, "key_weight": key_weight, "value_weight": value_weight, **_norm_tensors(context_norm)}
    given = dict(zip(given, as_autocast(*given.values()), strict=True))
    dtype = given["query"].dtype
    with as_they_are(query.device):
        weight, bias = _folded(given, state_dtype(dtype))
    call = _OverChunks(
        chunks,
        after,
        (key_weight.detach(), value_weight.detach()),
        dtype,
        default_scale(query.shape[-1]),
        float(context_norm[2]),
    )
    operands = given["query"].to(weight.dtype), weight, bias
    if (
        under_transform() or needs_definition()
    ):  # torch.func cannot differentiate a Function that reads its inputs twice
        return call.state_and_count(*operands, state)[0]
    return AttentionState(*_OverChunksFunction.apply(call, *operands, *(state or (None, None))))


NO_CHUNK = mismatch("chunks", "no chunk", "at least one, or a state")


class _OverChunks(NamedTuple):
    """The arguments of a pass over chunks besides the differentiated tensors; inputs are converted to `dtype`."""

    chunks: Chunks
    after: AfterChunk
    weights: tuple[Tensor, Tensor]
    dtype: torch.dtype
    scale: float
    eps: float

    def read(self, query: Tensor) -> Iterator[tuple[Tensor, Tensor, str]]:
        """For each chunk, yield the query expanded over its batch, the chunk, and the implementation to run."""
        for chunk in self.chunks():
            inputs = chunk.to(self.dtype)
            yield (
                _over_batch(query, chunk.shape[0], True),
                inputs,
                choose("attention.projected", "auto", query, inputs, *self.weights),
            )

    def state_and_count(
        self, query: Tensor, weight: Tensor, bias: Tensor, state: AttentionState | None
    ) -> tuple[AttentionState, int]:
        """Return the state of all chunks, merged with `state`, and the number of chunks."""
        count = 0
        for stacked, inputs, chosen in self.read(query):
            out, lse = state or (None, None)
            given = ProjectedAttention(
                stacked, inputs, weight, bias, None, None, out, lse, self.scale, self.eps, chosen
            )
            state = AttentionState(*projected_attention_op(given))
            count += 1
            self.after(count, state)
        if state is None:
            raise ValueError(NO_CHUNK)
        return state, count


class _OverChunksFunction(torch.autograd.Function):
    """The state of all chunks, and gradients by a second pass over them."""

    @staticmethod
    def forward(
        ctx: Any, call: _OverChunks, query: Tensor, weight: Tensor, bias: Tensor, state_out: Any, state_lse: Any
    ) -> Any:
        ctx.call = call
        before = None if state_out is None else AttentionState(state_out, state_lse)
        state, ctx.count = call.state_and_count(query, weight, bias, before)
        if ctx.count == 0:
            state = AttentionState(*(part.clone() for part in state))
        ctx.save_for_backward(query, weight, bias, state_out, state_lse, *state)
        return tuple(state)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of gradients through chunks are not supported: read all inputs in one call for these"
            )
        call, (query, weight, bias, state_out, state_lse, out, lse) = ctx.call, ctx.saved_tensors
        needs = (ctx.needs_input_grad[1], False, *ctx.needs_input_grad[2:4])
        sums = [torch.zeros_like(t, dtype=torch.float64) for t in (query, weight, bias)]
        count = 0
        for stacked, inputs, chosen in call.read(query) if any(needs) else ():
            count += 1
            given = (
                dout,
                dlse,
                stacked,
                inputs,
                weight,
                bias,
                None,
                None,
                out,
                lse,
                call.scale,
                call.eps,
                needs,
                chosen,
            )
            dquery, _, dweight, dbias = projected_backward_op(ProjectedAttentionBackward(*given))
            parts = (dquery.sum(1) if needs[0] else dquery, dweight, dbias)  # not in place: parts may be batched
            sums = [
                total + part if part.shape == total.shape else total for total, part in zip(sums, parts, strict=True)
            ]
        if any(needs) and count != ctx.count:
            raise RuntimeError(
                mismatch("chunks", f"{count} chunks in the second reading", f"{ctx.count}, as in the first reading")
            )
        grads = [t.to(query.dtype) if need else None for t, need in zip(sums, (needs[0], *needs[2:]), strict=True)]
        dstate = (
            state_gradient(dout, dlse, state_out, state_lse, out, lse)
            if any(ctx.needs_input_grad[4:])
            else (None, None)
        )
        return None, *grads, *dstate


class _Shape(NamedTuple):
    """The widths that follow from the shapes of the weights."""

    key_width: int
    value_width: int


def _norm_tensors(context_norm: Norm) -> dict[str, Tensor]:
    """The tensors of the norm, by their names in error messages. Raise unless the norm is (weight, bias, eps)."""
    if not isinstance(context_norm, (tuple, list)) or len(context_norm) != 3:
        raise TypeError(mismatch("context_norm", kind_of(context_norm), "(weight, bias, eps)"))
    weight, bias, eps = context_norm
    if not isinstance(eps, (float, int)) or not eps > 0:
        raise ValueError(mismatch("context_norm[2]", repr(eps), "a number > 0 for eps"))
    return {"context_norm[0]": weight, "context_norm[1]": bias}


def _check_shapes(given: dict[str, Tensor], stacked: bool) -> _Shape:
    """The widths of a key and of a value. Raise unless all shapes fit the query, the inputs and each other."""
    query, inputs, value_weight = (given[name] for name in ("query", "inputs", "value_weight"))
    lead = "K, " if stacked else ""
    if inputs.dim() != 3 or inputs.shape[2] == 0:
        raise ValueError(mismatch("inputs", f"shape {tuple(inputs.shape)}", "(B, N, C) with C >= 1"))
    if query.dim() not in (3 + stacked, 4 + stacked) or 0 in (query.shape[-3], query.shape[-1]):
        allowed = f"({lead}B, H, L, D), or ({lead}H, L, D) shared over the batch, with H, D >= 1"
        raise ValueError(mismatch("query", f"shape {tuple(query.shape)}", allowed))
    heads, width, columns = query.shape[-3], query.shape[-1], inputs.shape[2]
    blocks = query.shape[:1] if stacked else ()
    if blocks == (0,):
        raise ValueError(
            mismatch("query", f"shape {tuple(query.shape)}", "(K, B, H, L, D) or (K, H, L, D) with K >= 1")
        )
    rows = value_weight.shape[-2] if value_weight.dim() > 1 else 0
    if rows == 0 or rows % heads:
        allowed = f"({lead}H E, C), with H = {heads} heads and E >= 1"
        raise ValueError(mismatch("value_weight", f"shape {tuple(value_weight.shape)}", allowed))
    wanted = {
        "key_weight": (*blocks, heads * width, columns),
        "value_weight": (*blocks, rows, columns),
        "key_bias": (*blocks, heads * width),
        "value_bias": (*blocks, rows),
        "context_norm[0]": (*blocks, columns),
        "context_norm[1]": (*blocks, columns),
    }
    for name, tensor in given.items():
        if name in wanted and tensor.shape != wanted[name]:
            fitting = f"query {tuple(query.shape)} and inputs {tuple(inputs.shape)}"
            raise ValueError(mismatch(name, f"shape {tuple(tensor.shape)}", f"{wanted[name]}, with {fitting}"))
    return _Shape(width, rows // heads)


def _over_batch(query: Tensor, batch: int, stacked: bool) -> Tensor:
    """The query as (K, B, H, L, D), expanded over the batch. Raise if the query has a different batch."""
    given = query if stacked else query.unsqueeze(0)
    if given.dim() == 4:
        given = given.unsqueeze(1).expand(-1, batch, -1, -1, -1)
    elif given.shape[1] != batch:
        raise ValueError(mismatch("query", f"shape {tuple(query.shape)}", f"batch {batch} as inputs have, or no batch"))
    return given


def _or_beyond(mask: Tensor | None, cu_seqlens: Tensor, inputs: Tensor) -> Tensor | None:
    """The mask, and True for the rows beyond the last packed set: their projections must not reach a gradient."""
    rows = inputs.shape[1]
    if is_read(cu_seqlens) and int(cu_seqlens[-1]) >= rows:
        return mask
    beyond = (torch.arange(rows, device=inputs.device) >= cu_seqlens[-1]).unsqueeze(0)
    return beyond if mask is None else mask | beyond


def _check_incoming(
    state: AttentionState, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, stacked: bool
) -> AttentionState:
    """The incoming state with a leading K. Raise unless it has this shape (K, B, H, L, E), without K if not stacked."""
    check_state(state, shape if stacked else shape[1:], dtype, device)
    return state if stacked else AttentionState(*(part.unsqueeze(0) for part in state))


def _folded(given: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight (K, H D + H E, C) and bias (K, H D + H E) of keys and values in `dtype`, with the norm folded in."""
    weights = [given["key_weight"], given["value_weight"]]
    weight = torch.cat(weights, 1).to(dtype)
    biases = [given.get(name) for name in ("key_bias", "value_bias")]
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat(
            [w.new_zeros(w.shape[:2]) if b is None else b for w, b in zip(weights, biases, strict=True)], 1
        ).to(dtype)
    if "context_norm[0]" in given:
        scale, shift = (given[f"context_norm[{i}]"].to(dtype).unsqueeze(1) for i in range(2))
        shifted = (weight * shift).sum(-1)
        bias = shifted if bias is None else bias + shifted
        weight = weight * scale
    return weight, weight.new_zeros(weight.shape[:2]) if bias is None else bias

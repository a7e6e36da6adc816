# mypy: disable-error-code="no-untyped-def"
"""The state (out, lse) of each run of the inputs, which are projected on the way, and the merge of the states."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....runtime.tiles import chosen_once
from ....runtime.triton_launch import Kernel, alignment, allows_tf32, kernel, mask_bytes, on_device
from ....runtime.triton_products import product_of_wide
from ....runtime.triton_rows import kept_keys, load_tile, tile_at
from ...triton.forward import LOG2_E, absorb, merge_runs, state_of, state_strides, store_state, units
from ...triton.runs import checked_offsets, cut_keys, locate
from ..contract import ProjectedAttention
from .launch import apart, chunks, forward_constants, joined, queries_at_once, row_strides
from .tiles import columns_of_chunk, head_bias, projected, row_norms


@triton.jit
def _queries(
    query,
    strides,
    batch,
    head,
    block,
    chunk,
    sign,
    L,
    D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    D_PAD: tl.constexpr,
    ALIGN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """A chunk of the columns of a block of queries."""
    column = chunk * D_PAD
    inside = (block * BLOCK_L + tl.arange(0, BLOCK_L) < L) & (column < D)
    tile = load_tile(tile_at(query, strides, batch, head, block * BLOCK_L, BLOCK_L, D_PAD, ALIGN, column), inside, D, column)
    return (tile * tl.full([1, 1], sign, tile.dtype)).to(OPERAND)


@triton.jit
def _absorb_rows(
    peak,
    total,
    acc,
    queries,
    query,
    inputs,
    weight,
    bias,
    biases,
    mask,
    strides,
    at,
    rows,
    start,
    last,
    units,
    eps,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
    NORMED: tl.constexpr,
    LARGE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Project one tile of rows, and absorb its keys and values. Other chunks of the keys only add to the scores."""
    BLOCK_L: tl.constexpr = queries.shape[0]
    D_PAD: tl.constexpr = queries.shape[1]
    E_PAD: tl.constexpr = acc.shape[1]
    query_strides, input_strides, mask_strides, _, _ = strides
    block, head, heads, chunk = at
    batch, store, first, L, sign = rows
    log2_scale, coarse = units
    keep = kept_keys(mask, mask_strides, store, start, last, BLOCK_N, RAGGED)
    mean, factor = row_norms(inputs, input_strides, store, start, keep, eps, C, BLOCK_N, COLUMNS, ALIGN[1], NORMED, peak.dtype)
    given = (inputs, input_strides, weight, store, start, mean, factor, block, head, heads)
    others = None
    if CHUNKS > 1:
        others = tl.zeros([BLOCK_L, BLOCK_N], peak.dtype)
        for ahead in range(1, CHUNKS):
            other = (chunk + ahead) % CHUNKS
            keys = projected(*given, other, keep, C, D, E, D_PAD, E_PAD, COLUMNS, ALIGN[1], NORMED, OPERAND, PRECISION, False)[0]
            keys += head_bias(bias, block, head, heads, other, D, E, D_PAD, E_PAD)[0][None, :]
            tile = _queries(query, query_strides, batch, block * heads + head, first, other, sign, L, D, BLOCK_L, D_PAD, ALIGN[0], OPERAND)
            others += product_of_wide(tile, tl.trans(keys), OPERAND, PRECISION)
    keys, values = projected(*given, chunk, keep, C, D, E, D_PAD, E_PAD, COLUMNS, ALIGN[1], NORMED, OPERAND, PRECISION)
    keys += biases[0][None, :]
    values += biases[1][None, :]
    return absorb(peak, total, acc, queries, keys, values, keep, log2_scale, coarse, LARGE, 1.0, OPERAND, PRECISION, others)


@kernel("query", "inputs", "weight", "bias", "mask", "state_out", "state_lse")
def _projected_forward(
    query,
    inputs,
    weight,
    bias,
    mask,
    offsets,
    state_out,
    state_lse,
    out,
    lse,
    strides: tl.int64,
    sizes: tl.int32,
    cut: tl.int32,
    scale: tl.float64,
    coarse: tl.float64,
    sign: tl.float32,
    eps: tl.float64,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
    NORMED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the state of one run of rows for one block of queries of one head, like `_forward` for given keys.

    If the values have several chunks, a program weighs one chunk. It still needs all chunks of the keys.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    D_PAD: tl.constexpr = columns_of_chunk(D)
    E_PAD: tl.constexpr = columns_of_chunk(E)
    CHUNKS: tl.constexpr = max(triton.cdiv(D, D_PAD), triton.cdiv(E, E_PAD))
    VALUE_CHUNKS: tl.constexpr = triton.cdiv(E, E_PAD)
    B, K, H, L, N = sizes
    query_strides, _, _, out_strides, lse_strides = strides
    blocks = tl.cdiv(L, BLOCK_L)
    chunk = tl.program_id(0) % VALUE_CHUNKS
    block = tl.program_id(0) // VALUE_CHUNKS % blocks
    slot_head = tl.program_id(0) // VALUE_CHUNKS // blocks
    head = slot_head % (K * H)
    batch, first, last = locate(slot_head // (K * H), offsets, B, N, cut)
    queries = _queries(query, query_strides, batch, head, block, chunk, sign, L, D, BLOCK_L, D_PAD, ALIGN[0], OPERAND)
    at = (head // H, head % H, H, chunk)
    rows = (batch, batch if offsets is None else 0, block, L, sign)
    biases = head_bias(bias, head // H, head % H, H, chunk, D, E, D_PAD, E_PAD)

    LARGE: tl.constexpr = 2.0**57 if DTYPE == tl.float64 else 2.0**28  # noqa: SIM300  not a comparison
    scale_ = tl.full([1], scale, tl.float64)
    log2_scale = (scale_ * LOG2_E).to(DTYPE)
    coarse_ = tl.full([1], coarse, DTYPE)
    units = (log2_scale, coarse_)
    peak = tl.full([BLOCK_L], float("-inf"), DTYPE)
    total = tl.zeros([BLOCK_L], DTYPE)
    acc = tl.zeros([BLOCK_L, E_PAD], DTYPE)
    whole = first + (last - first) // BLOCK_N * BLOCK_N
    for start in range(first, whole, BLOCK_N):
        peak, total, acc = _absorb_rows(
            peak,
            total,
            acc,
            queries,
            query,
            inputs,
            weight,
            bias,
            biases,
            mask,
            strides,
            at,
            rows,
            start,
            last,
            units,
            eps,
            C,
            D,
            E,
            CHUNKS,
            BLOCK_N,
            COLUMNS,
            ALIGN,
            NORMED,
            LARGE,
            OPERAND,
            PRECISION,
            False,
        )
    for start in tl.range(whole, last, BLOCK_N, num_stages=1):
        peak, total, acc = _absorb_rows(
            peak,
            total,
            acc,
            queries,
            query,
            inputs,
            weight,
            bias,
            biases,
            mask,
            strides,
            at,
            rows,
            start,
            last,
            units,
            eps,
            C,
            D,
            E,
            CHUNKS,
            BLOCK_N,
            COLUMNS,
            ALIGN,
            NORMED,
            LARGE,
            OPERAND,
            PRECISION,
            True,
        )
    acc, logarithm = state_of(peak, total, acc, scale_, log2_scale, coarse_, LARGE, 1.0, OPERAND)
    place = (out_strides, lse_strides, slot_head, batch, head, block, L)
    store_state(out, lse, acc, logarithm, state_out, state_lse, *place, E, chunk * E_PAD)


def projected_attention_forward(given: ProjectedAttention) -> tuple[Tensor, Tensor]:
    """Return (out, lse): the attention of the queries over these inputs,
    merged with the incoming state if there is one."""
    query, inputs, weight, bias, key_padding_mask, cu_seqlens, state_out, state_lse, scale, eps, _ = given
    (K, B, H, L, D), (_, N, C) = query.shape, inputs.shape
    E = weight.shape[1] // H - D
    queries, before_out, before_lse = joined(query), joined(state_out), joined(state_lse)
    mask = mask_bytes(key_padding_mask)
    cut = cut_keys(B, queries_at_once(K * H, L), N, cu_seqlens is not None)
    at_once = cut.runs == 1 and cu_seqlens is None
    forward, block = _chosen(inputs.dtype, query.device, C, D, E, min(L, 256), eps is not None, alignment(queries, inputs), allows_tf32())
    strides = state_strides(before_out, before_lse)
    with on_device(query):
        offsets = checked_offsets(cu_seqlens, N)
        out = query.new_empty(cut.slots, K * H, L, E)
        lse = query.new_empty(cut.slots, K * H, L, dtype=torch.float64)
        forward(
            cut.slots * K * H * -(-L // block) * chunks(E),
            queries,
            inputs,
            weight.contiguous(),
            bias.contiguous(),
            mask,
            offsets,
            before_out if at_once else None,
            before_lse if at_once else None,
            out,
            lse,
            (queries.stride(), row_strides(inputs), (0, 0) if mask is None else mask.stride(), *strides),
            (B, K, H, L, N),
            (cut.runs, cut.most_runs),
            *units(scale),
            eps or 0.0,
        )
        if not at_once:
            out, lse = merge_runs(out, lse, before_out, before_lse, offsets, (B, K * H, L, N), (cut.runs, cut.most_runs))
    return apart(out, K), apart(lse, K)


@chosen_once
def _chosen(
    dtype: torch.dtype, device: torch.device, C: int, D: int, E: int, queries: int, normed: bool, align: tuple[int, ...], tf32: bool
) -> tuple[Kernel, int]:
    """`_projected_forward` for such inputs, and the number of queries in a block;
    `tf32` says whether torch allows it."""
    constants = forward_constants(dtype, device, C, D, E, queries)
    return _projected_forward.given(ALIGN=align, NORMED=normed, **constants), constants["BLOCK_L"]

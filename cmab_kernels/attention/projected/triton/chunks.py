"""Attention over projected inputs, chunk by chunk: rows are projected to memory that stays in the GPU's cache, and the
kernels of `attention` read them from there.

The heads of all K stacked blocks are heads of one call, so that a chunk of the inputs is read from memory once. Each
chunk continues the state of those before. Sets of a batch are cut by the number of their rows alone, and small sets
share a chunk, so that a set has the same bits alone and among others. Packed sets are cut wherever a chunk ends.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ....runtime.triton_launch import on_device
from ...contract import Attention, AttentionBackward
from ...triton import attention_backward, attention_forward
from ...triton.runs import checked_offsets
from ..contract import ProjectedAttention, ProjectedAttentionBackward
from .launch import aligned, apart, dtypes_of, joined
from .projections import Rows, Shares, matrix_gradient, project, project_rows_back, rows_of
from .shares import added

CHUNK_BYTES = 2**25
"""The most memory of the keys and values of a chunk, with their gradients in the backward pass: a part of the L2 cache
of an H100, which has 50 MB. Twice as much was 5 % faster there, and half as much took 1.2 times as long."""

STEP = 128
"""Chunks are multiples of so many rows, which are multiples of every tile."""


Chunk = tuple[slice, Tensor | None]
"""Rows that are projected together, and the offsets of packed sets among them."""


def cut(given: ProjectedAttention | ProjectedAttentionBackward, copies: int) -> Iterator[tuple[slice, Iterator[Chunk]]]:
    """Groups of sets and the chunks of each; `copies` is 2 if the gradients of keys and values are held too.

    Every chunk of packed sets reads and writes the states of all sets. A chunk may therefore be as large as these
    states: else they would take more time than the keys.
    """
    (K, B, H, L, D), (_, N, C) = given.query.shape, given.inputs.shape
    of_keys, of_values = (dtype.itemsize for dtype in dtypes_of(given.inputs.dtype))
    E = given.weight.shape[1] // H - D
    row = max(copies * K * H * (D * of_keys + E * of_values), C * given.inputs.element_size())
    most = CHUNK_BYTES // row
    packed = given.cu_seqlens is not None
    if packed:
        most = max(most, K * B * H * L * E * given.query.element_size() // row)
    most = max(most // STEP * STEP, STEP)
    group = max(B, 1) if packed else max(most // max(N, 1), 1)
    for first in range(0, max(B, 1), group):
        yield slice(first, first + group), _chunks(given.cu_seqlens, N, most)


def _chunks(cu_seqlens: Tensor | None, N: int, most: int) -> Iterator[Chunk]:
    """Chunks of at most so many rows. If the given offsets are invalid, those of each chunk are too, and give NaN."""
    offsets = cu_seqlens
    if cu_seqlens is not None and most < N:
        checked = checked_offsets(cu_seqlens, N)
        assert checked is not None
        offsets = checked[:-1].long() + checked[-1] * N  # invalid: the first of each chunk will not be 0
    for start in range(0, max(N, 1), most):
        within = offsets if offsets is None or most >= N else (offsets - start).clamp(0, min(most, N - start))
        yield slice(start, start + most), within


class _Chunked:
    """What both passes make of a chunk."""

    def __init__(self, given: ProjectedAttention | ProjectedAttentionBackward) -> None:
        query, self.inputs, weight, bias, self.mask = (
            given.query,
            given.inputs,
            given.weight,
            given.bias,
            given.key_padding_mask,
        )
        self.heads, self.eps, self.dtypes = query.shape[0] * query.shape[2], given.eps, dtypes_of(given.inputs.dtype)
        keys = query.shape[2] * query.shape[4]
        self.weights = aligned(*(part.flatten(0, 1) for part in weight.split((keys, weight.shape[1] - keys), 1)))
        self.biases = aligned(*(part.flatten(0, 1) for part in bias.split((keys, bias.shape[1] - keys), 1)))

    def read(self, sets: slice, rows: slice) -> Rows:
        return rows_of(self.inputs[sets, rows], self.ignored(sets, rows), (None, None), self.eps)

    def ignored(self, sets: slice, rows: slice) -> Tensor | None:
        return None if self.mask is None else self.mask[sets, rows]

    def projected(self, rows: Rows) -> list[Tensor]:
        """Keys (B, n, K H D) and values (B, n, K H E)."""
        return project(rows, list(zip(self.weights, self.biases, strict=True)), self.dtypes)

    def as_heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def projected_attention_forward(given: ProjectedAttention) -> tuple[Tensor, Tensor]:
    """Return (out, lse): the attention of the queries over these inputs, merged with the incoming state if there is
    one."""
    queries, out, lse = joined(given.query), joined(given.state_out), joined(given.state_lse)
    with on_device(queries):
        whole, states = _Chunked(given), []
        for sets, chunks in cut(given, 1):
            state = None if out is None else out[sets], None if lse is None else lse[sets]
            for rows, offsets in chunks:
                key, value = map(whole.as_heads, whole.projected(whole.read(sets, rows)))
                state = attention_forward(
                    Attention(queries[sets], key, value, whole.ignored(sets, rows), offsets, *state, scale=given.scale)
                )
            states.append(state)
        outs, lses = zip(*states, strict=True)
        return apart(_together(outs), given.query.shape[0]), apart(_together(lses), given.query.shape[0])


def projected_attention_backward(given: ProjectedAttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the contiguous gradients of query, inputs, weight and bias; those that are not in `needs` are empty."""
    query, inputs, weight, bias, needs = given.query, given.inputs, given.weight, given.bias, given.needs
    queries, *kept = (joined(t) for t in (query, given.dout, given.dlse, given.out, given.lse))
    dinputs = torch.empty_like(inputs, memory_format=torch.contiguous_format) if needs[1] else inputs.new_empty(0)
    dqueries: list[Tensor] = []
    wanted = (needs[0], any(needs[1:]), any(needs[1:]), False)
    with on_device(query):
        whole = _Chunked(given)
        sums = [part.sum(-1) if needs[1] and given.eps is not None else None for part in whole.weights]
        shares: list[Shares] = [(None, None), (None, None)]
        for sets, chunks in cut(given, 2) if any(needs) else ():
            dquery = None
            dout, dlse, out, lse = (t[sets] for t in kept)
            for rows, offsets in chunks:
                read = whole.read(sets, rows)
                made = whole.projected(read)
                key, value = map(whole.as_heads, made)
                heads = (queries[sets], key, value)
                call = AttentionBackward(
                    dout, dlse, *heads, whole.ignored(sets, rows), offsets, out, lse, None, given.scale, wanted
                )
                share, *slopes, _ = attention_backward(call)
                dquery = share if dquery is None else dquery.add_(share)
                shares = [
                    matrix_gradient(each, read, needs[2:], more) for each, more in zip(slopes, shares, strict=True)
                ]
                if needs[1]:
                    through = zip(slopes, whole.weights, sums, made, whole.biases, strict=True)
                    project_rows_back(read, list(through), dinputs[sets, rows])
            dqueries += [] if dquery is None else [dquery]
        parts = added([part for pair in shares for part in pair], weight)
        of_query = apart(_together(dqueries), query.shape[0]) if needs[0] else query.new_empty(0)
    return of_query, dinputs, _of_blocks(parts[::2], weight), _of_blocks(parts[1::2], bias)


def _together(groups: Sequence[Tensor]) -> Tensor:
    return groups[0] if len(groups) == 1 else torch.cat(list(groups))


def _of_blocks(parts: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """The gradients of the projections to keys and to values as one for each block; empty if there are none."""
    found = [part.unflatten(0, (like.shape[0], -1)) for part in parts if part is not None]
    return torch.cat(found, 1) if found else like.new_empty(0)

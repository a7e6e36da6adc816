# mypy: disable-error-code="no-untyped-def"
"""Reading for all Triton kernels: rows and tiles with any strides, masks, and runs of keys."""

import triton
import triton.language as tl

GRAIN = tl.constexpr(1024)
"""The smallest number of keys in a run, except for the last run of a set: shorter runs are not worth a partial
result."""


@triton.jit
def run_length(keys, most_runs, grain: tl.constexpr = GRAIN.value, step: tl.constexpr = 128):
    """The number of keys in a run, a multiple of every tile of keys. The host calls it as `run_length.fn`."""
    return max(grain, (keys + most_runs * step - 1) // (most_runs * step) * step)


@triton.jit
def tile_at(base, strides, batch, head, row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr, column=0):
    """Pointers to a tile of a (B, H, rows, columns) tensor.

    Offsets are 64-bit, since rows may be 2**31 elements or more apart. ALIGN is the `alignment` of the tensor; without
    this hint Triton loads rows element by element.
    """
    first = base + (
        tl.cast(batch, tl.int64) * strides[0]
        + tl.cast(head, tl.int64) * strides[1]
        + tl.cast(row, tl.int64) * strides[2]
    )
    rows = tl.arange(0, ROWS).to(tl.int64) * strides[2]
    columns = column + tl.arange(0, COLUMNS)
    if ALIGN == 0:
        columns = columns.to(tl.int64) * strides[3]
    else:
        BYTES: tl.constexpr = ALIGN * base.dtype.element_ty.primitive_bitwidth // 8
        first = tl.multiple_of(first, BYTES)
        rows = tl.multiple_of(rows, ALIGN)
    return first + (rows[:, None] + columns[None, :])


@triton.jit
def rows_at(base, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, column=0):
    """Pointers to rows of a contiguous (rows, WIDTH) tensor."""
    return base + (rows.to(tl.int64)[:, None] * WIDTH + (column + tl.arange(0, COLUMNS))[None, :])


@triton.jit
def rows_from(base, row, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, column=0):
    """Pointers to ROWS rows of a contiguous (rows, WIDTH) tensor, starting at `row`."""
    rows = tl.arange(0, ROWS).to(tl.int64)
    return base + tl.cast(row, tl.int64) * WIDTH + (rows[:, None] * WIDTH + (column + tl.arange(0, COLUMNS))[None, :])


@triton.jit
def load_tile(pointers, keep, WIDTH: tl.constexpr, column=0):
    """Load a tile that starts at `column`.

    Columns from WIDTH on are zeros, and so are rows where `keep` is False, which are not read. `keep` None keeps all
    rows.
    """
    columns = column + tl.arange(0, pointers.shape[1])[None, :] < WIDTH
    WHOLE: tl.constexpr = WIDTH > 0 and tl.constexpr(WIDTH) % pointers.shape[1] == 0
    if keep is None:
        tile = tl.load(pointers) if WHOLE else tl.load(pointers, mask=columns, other=0.0)
    elif WHOLE:
        tile = tl.load(pointers, mask=keep[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=keep[:, None] & columns, other=0.0)
    return tile


@triton.jit
def load_weights(weights, strides, batch, head, start, keep):
    """The weights (rows, 1) of rows of a (B, H, rows, 1) tensor; 0 where `keep` is False."""
    return tl.load(tile_at(weights, strides, batch, head, start, keep.shape[0], 1, 0), mask=keep[:, None], other=0.0)


@triton.jit
def kept_keys(mask, strides, batch, start, last, BLOCK: tl.constexpr, RAGGED: tl.constexpr, biases=None):
    """Whether each key of a tile takes part, or None if all do; None avoids masked loads. Only RAGGED tiles reach
    beyond `last`. `biases` are those of `biases_of`: -inf excludes a key.

    A sum over an axis of length 1 hides the load of bytes; otherwise Triton 3.6 would fail to multiply in float64
    (`as_operand`).
    """
    keys = start + tl.arange(0, BLOCK)
    keep = None
    if mask is not None:
        ignored = tl.load(
            mask + (tl.cast(batch, tl.int64) * strides[0] + keys.to(tl.int64) * strides[1]), mask=keys < last, other=1
        )
        keep = tl.sum(ignored[:, None], 1) == 0
    elif RAGGED:
        keep = keys < last
    if biases is not None:
        keep = biases != float("-inf") if keep is None else keep & (biases != float("-inf"))
    return keep


@triton.jit
def biases_of(bias, strides, batch, head, start, last, BLOCK: tl.constexpr):
    """The bias of each key of a tile, -inf beyond `last`; None if there is no bias."""
    biases = None
    if bias is not None:
        keys = start + tl.arange(0, BLOCK)
        first = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
        biases = tl.load(bias + (first + keys.to(tl.int64) * strides[2]), mask=keys < last, other=float("-inf"))
    return biases

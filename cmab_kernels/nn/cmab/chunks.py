"""Inputs that come in chunks from an array, a table, a loader or any iterable. A thread fetches each next chunk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from ...attention import AfterChunk
from ...runtime.backends import current_impl, use_impl
from ...runtime.checks import is_dense, kind_of, mismatch
from ...runtime.tracing import under_transform
from ..inputs import check_features
from .layers import CHUNK

_END = object()
_NUMBERS = "real numbers of at most 64 bits"


def check_source(source: Any, read_twice: bool) -> None:
    """Raise unless `source` can be cut into chunks or iterated. With `read_twice` the source must
    allow two readings."""
    if not _is_array(source) and not _is_table(source) and not isinstance(source, Iterable):
        allowed = "a tensor, an array, an Arrow table or file, or an iterable of such chunks"
        raise TypeError(mismatch("chunks", kind_of(source), allowed))
    if _is_array(source):
        _check_array("chunks", source)
        if len(source.shape) not in (2, 3):
            raise ValueError(mismatch("chunks", f"shape {tuple(source.shape)}", "(N, dim) or (B, N, dim)"))
    if read_twice and isinstance(source, Iterator):
        allowed = "a source for two readings, such as a list, an array or a DataLoader; or use torch.no_grad()"
        raise ValueError(mismatch("chunks", f"{kind_of(source)}, which can be read only once", allowed))


def callers_modes(device: torch.device) -> Callable[[], AbstractContextManager]:
    """Return a function that makes contexts with the caller's grad mode, inference mode, autocast and `use_impl`.

    Each thread has its own values of these modes.
    """
    impl = current_impl()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = {
        kind: torch.get_autocast_dtype(kind)
        for kind in {"cpu", device.type} - {"meta"}
        if torch.is_autocast_enabled(kind)
    }

    def entered() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(use_impl(impl))
        stack.enter_context(torch.inference_mode(inference))
        for kind, dtype in casts.items():
            stack.enter_context(torch.autocast(kind, dtype))
        stack.enter_context(torch.set_grad_enabled(grad))
        return stack

    return entered


def read_chunks(
    source: Any, weight: Tensor, modes: Callable[[], AbstractContextManager], batch: int | None
) -> Iterator[Tensor]:
    """Yield the chunks of `source` as tensors (B, n, dim) on the device of `weight`. A thread fetches the next chunk.

    The thread runs the code of the source, such as a generator's, in `modes`.

    A chunk that does not fit raises a `ValueError` or `TypeError` that names the chunk. All chunks must have the batch
    size of the first chunk, and of a state if `batch` is given.
    """
    refilled = not (_is_array(source) or type(source) in (list, tuple))
    named = ((f"chunks[{i}]", chunk) for i, chunk in enumerate(_cut(source)))
    for name, chunk in _prefetched(((name, _rows(name, chunk, weight, refilled)) for name, chunk in named), modes):
        if not isinstance(chunk, Tensor):
            raise TypeError(mismatch(name, kind_of(chunk), "a tensor, an array or a batch of an Arrow table"))
        check_features(name, chunk, "(n, dim) or (B, n, dim)", (2, 3), weight.shape[-1], weight)
        chunk = chunk if chunk.dim() == 3 else chunk.unsqueeze(0)
        if batch not in (None, chunk.shape[0]):
            raise ValueError(
                mismatch(name, f"batch {chunk.shape[0]}", f"batch {batch}, as in the state or the earlier chunks")
            )
        batch = chunk.shape[0]
        yield chunk


def _is_array(source: Any) -> bool:
    """Return whether the source is a tensor or a NumPy array (also memory-mapped). A file of arrays is neither."""
    return isinstance(source, Tensor) or (
        type(source).__module__.partition(".")[0] == "numpy" and hasattr(source, "dtype")
    )


def _check_array(name: str, array: Any) -> None:
    """Raise unless the array is a dense tensor, or a NumPy array of real numbers without masked entries."""
    if isinstance(array, Tensor):
        if not is_dense(array):
            raise ValueError(mismatch(name, "a nested tensor" if array.is_nested else array.layout, "a dense tensor"))
    elif array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise TypeError(mismatch(name, f"an array of {array.dtype}", _NUMBERS))
    elif hasattr(array, "mask") and array.mask.any():
        raise ValueError(
            mismatch(
                name,
                "an array with masked entries",
                "an array without masked entries; fill them in, or leave out their rows",
            )
        )


def _is_table(source: Any) -> bool:
    """Return whether the source is an Arrow table or an open Arrow file."""
    return hasattr(source, "to_batches") or hasattr(source, "num_record_batches")


def _starts(source: Any) -> range:
    """Return the index of the first row of each chunk of an array. An array without rows has one chunk."""
    return range(0, max(source.shape[-2], 1), CHUNK)


def _cut(source: Any) -> Iterable[Any]:
    """Return the chunks of a source.

    Arrays and tables give chunks of `CHUNK` rows. An Arrow file gives its batches, and any other source its items.
    """
    if _is_array(source):
        return (source[..., first : first + CHUNK, :] for first in _starts(source))
    if hasattr(source, "num_record_batches"):
        return (source.get_batch(i) for i in range(source.num_record_batches))
    if _is_table(source):
        return source.to_batches(max_chunksize=CHUNK) or [source]
    return source


def _rows(name: str, chunk: Any, weight: Tensor, refilled: bool) -> Any:
    """Return a chunk as a tensor on the device of `weight`. From a tuple or list, take the first entry.

    Arrays and tables are copied, in the dtype of `weight`. A tensor is copied if it may be `refilled`: the source may
    write the next chunk to the same memory during the use of this one. An array or a table column that does not hold
    numbers raises a `TypeError` or `ValueError` with the chunk's `name`.
    """
    if isinstance(chunk, (tuple, list)) and chunk:
        chunk = chunk[0]
    if hasattr(chunk, "column_names"):
        chunk = torch.stack([torch.tensor(values, dtype=weight.dtype) for values in _columns(name, chunk)], -1)
    elif _is_array(chunk):
        _check_array(name, chunk)
        if not isinstance(chunk, Tensor):
            # torch reads neither other byte orders nor negative strides; NumPy keeps the stride of a single reversed
            # row
            chunk = chunk.astype(chunk.dtype.newbyteorder("="), order="C", copy=min(chunk.strides, default=0) < 0)
            chunk = torch.tensor(chunk, dtype=weight.dtype)
        elif chunk.is_meta and not weight.is_meta:
            raise ValueError(
                mismatch(name, "device meta", f"a tensor with values, because the module is on {weight.device}")
            )
    return chunk.to(weight.device, non_blocking=not refilled, copy=refilled) if isinstance(chunk, Tensor) else chunk


def _columns(name: str, table: Any) -> Iterator[Any]:
    """Yield the columns of an Arrow table, or of a batch of a table, as arrays of numbers."""
    for title, column in zip(table.column_names, table.columns, strict=True):
        if column.null_count:
            raise ValueError(
                mismatch(name, f"nulls in the column {title!r}", "numbers; fill them in, or leave out their rows")
            )
        values = column.to_numpy(zero_copy_only=False)
        if values.dtype.kind not in "biuf":
            raise TypeError(mismatch(name, f"a column {title!r} of {column.type}", _NUMBERS))
        yield values


def _prefetched(chunks: Iterator[Any], modes: Callable[[], AbstractContextManager]) -> Iterator[Any]:
    """Yield the chunks. During the use of one chunk, another thread computes the next chunk in `modes`.

    Under a transform of `torch.func` there is no other thread, because the transform's tensors belong to its own
    thread.
    """
    if under_transform():
        yield from chunks
        return

    def fetch() -> Any:
        with modes():
            return next(chunks, _END)

    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(fetch)
        while (chunk := coming.result()) is not _END:
            coming = thread.submit(fetch)
            yield chunk


def _count(source: Any) -> int | None:
    """Return the number of chunks of a source, or None if it is unknown."""
    if _is_array(source):
        return len(_starts(source))
    if hasattr(source, "num_record_batches"):
        return int(source.num_record_batches)
    try:
        return len(cast("Sized", _cut(source)))
    except (TypeError, NotImplementedError):  # a DataLoader has `__len__`, but its data set may not
        return None


@contextmanager
def progress_bar(source: Any) -> Iterator[AfterChunk]:
    """Return a context with a function to call after each chunk. The function shows the number of chunks read.

    It uses tqdm if tqdm is installed, else a line of text.
    """
    total = _count(source)
    try:
        from tqdm.auto import tqdm
    except ImportError:
        tqdm = None
    if tqdm is not None:
        with tqdm(total=total, unit="chunk") as bar:
            yield lambda *_: bar.update(1)
        return
    shown = "?" if total is None else total
    try:
        yield lambda count, _: print(f"\r{count} of {shown} chunks", end="", file=sys.stderr, flush=True)
    finally:
        print(file=sys.stderr)

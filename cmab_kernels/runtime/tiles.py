"""The block sizes that were tuned on a GPU: `tiles.json` beside this file, which `python bench/gpu_check.py --sections
tune` writes.

Each entry gave correct results on a GPU of its capability, and was faster there than the built-in sizes by more than
the noise. Without an entry, the tables in each set's `triton/launch.py` apply. Keys hold no sequence length, so the
length does not change the bits of a result.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

from .checks import mismatch
from .tracing import traced_as_constant

FILE = Path(__file__).with_name("tiles.json")
FORMAT = 1
HOPPER = (9, 0)
BLACKWELL = 10
"""The major compute capability of Blackwell's data-centre GPUs, whose matrix products use tensor memory."""

LITTLE_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Compute capabilities with 99 KiB of shared memory per block (CUDA C++ Programming Guide, technical
specifications)."""

_TILES = (16, 32, 64, 128)
_LAUNCH = {"num_warps": (1, 2, 4, 8, 16), "num_stages": (1, 2, 3, 4, 5, 6)}
_ATTENTION = {"BLOCK_L": (*_TILES, 256), "BLOCK_N": _TILES, **_LAUNCH}
_ROWS = {"TILE": _TILES[:3], "BLOCK_N": (*_TILES, 256), **_LAUNCH}
FIELDS: dict[str, dict[str, tuple[int, ...]]] = {
    "attention.forward": _ATTENTION,
    "attention.backward": _ATTENTION,
    "attention.backward_keys": _ATTENTION,
    "intention.gram": {"BLOCK_N": _TILES, "EXACT_N": _TILES, **_LAUNCH},
    "intention.backward": _ROWS,
    "intention.apply": _ROWS,
    "nystrom.forward": {"num_warps": _LAUNCH["num_warps"]},
    "nystrom.backward": {"num_warps": _LAUNCH["num_warps"]},
}
"""Kernel -> field of its tiles -> allowed values. Block sizes are powers of two. Block sizes of keys or rows divide
every full run."""

KINDS = ("half", "tf32", "tf32x3", "bf16x6", "ieee", "double")
WIDTHS = (16, 32, 64, 128, 256)


class Key(NamedTuple):
    """The key of an entry: kernel, compute capability, kind of matrix product (`KINDS`), and padded width of the widest
    head."""

    kernel: str
    capability: tuple[int, int]
    kind: str
    width: int


Table = Mapping[Key, tuple[int, ...]]


def tuned(kernel: str, device: torch.device, kind: str, width: int) -> tuple[int, ...] | None:
    """Return the tuned tiles in the order of FIELDS; None if there is no entry, so that the built-in tiles apply."""
    table = next(reversed(_planted.values()), None)
    table = _tuned() if table is None else table
    if not table:
        return None
    return table.get(Key(kernel, capability_of(device), kind, padded(width)))


def padded(width: int) -> int:
    """Return the width to which the kernels pad a head: a power of two, at least 16."""
    return max(1 << (width - 1).bit_length(), WIDTHS[0])


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability (major, minor) of a GPU. On a CPU, for Triton's interpreter, it is that of
    Hopper."""
    return _capability(device.index) if device.type == "cuda" else HOPPER


@traced_as_constant
def has_little_shared_memory(device: torch.device) -> bool:
    """Whether a block has 99 KiB of shared memory, rather than 163 KiB or more."""
    return capability_of(device) in LITTLE_SHARED_MEMORY


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


_Choice = TypeVar("_Choice", bound=Callable[..., Any])
_choices: list[Any] = []


def chosen_once(function: _Choice) -> _Choice:
    """Cache a function whose result depends only on the tables and the compute capability; `forget` empties the
    cache."""
    _choices.append(cache(function))
    return cast(_Choice, _choices[-1])


def forget() -> None:
    """Empty the caches of choices after the tables, or the functions that read them, have been replaced."""
    for choice in _choices:
        choice.cache_clear()


_planted: dict[object, Table] = {}


@contextlib.contextmanager
def using(table: Table) -> Iterator[None]:
    """Within this context, `table` replaces the file, for tuning and tests; with `{}` only built-in tiles are used.

    The replacement holds for the whole process, because a backward pass on a GPU runs in one of torch's threads. If
    contexts overlap, the newest applies.
    """
    own = object()
    _planted[own] = table
    forget()
    try:
        yield
    finally:
        del _planted[own]
        forget()


@cache
def _tuned() -> Table:
    """The table of `FILE`, read once per process."""
    return read(FILE)


def read(path: Path) -> Table:
    """Return the table in a file, key -> tiles. If it is not valid, raise a `ValueError` that names the file and the
    entry."""
    return {key: tiles for key, tiles, _ in entries(path)}


def entries(path: Path) -> list[tuple[Key, tuple[int, ...], Mapping[str, Any]]]:
    """Return (key, tiles, evidence) of each entry of a file; `evidence` holds the measurements behind the choice."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            mismatch(str(path), f"a file that cannot be read ({error})", "a table of tiles; reinstall the package")
        ) from None
    if (
        not isinstance(content, dict)
        or content.get("cmab_kernels_tiles") != FORMAT
        or not isinstance(content.get("entries"), list)
    ):
        raise ValueError(
            mismatch(str(path), "another file", f"a table of tiles of format {FORMAT}; reinstall the package")
        )
    found = []
    for number, entry in enumerate(content["entries"]):
        try:
            found.append(_entry(entry))
        except (KeyError, TypeError, ValueError) as error:
            what = mismatch(error.args[0], "nothing", "a value") if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}: entry {number}: {what}; remove the entry, or tune again") from None
    if len({key for key, _, _ in found}) < len(found):
        raise ValueError(mismatch(str(path), "two entries with one key", "one; remove one, or tune again"))
    return found


def _entry(entry: Any) -> tuple[Key, tuple[int, ...], Mapping[str, Any]]:
    if not isinstance(entry, dict):
        raise TypeError(mismatch("entry", repr(entry), "a JSON object"))
    kernel, kind, width, capability = (entry[name] for name in ("kernel", "kind", "width", "capability"))
    if not re.fullmatch(r"\d+\.\d+", str(capability)):
        raise ValueError(mismatch("capability", repr(capability), "a version such as '9.0'"))
    major, minor = map(int, str(capability).split("."))
    for name, value, allowed in (("kernel", kernel, FIELDS), ("kind", kind, KINDS), ("width", width, WIDTHS)):
        if value not in allowed:
            raise ValueError(mismatch(name, repr(value), f"one of {', '.join(map(str, allowed))}"))
    return Key(kernel, (major, minor), kind, width), _checked(kernel, entry["tiles"]), entry["evidence"]


def _checked(kernel: str, tiles: Any) -> tuple[int, ...]:
    """Return the tiles in the order of FIELDS; `ValueError` if they are not valid for this kernel."""
    fields = FIELDS[kernel]
    if not isinstance(tiles, dict) or tiles.keys() != fields.keys():
        raise ValueError(mismatch("tiles", tiles, f"{', '.join(fields)} for {kernel}"))
    for name, allowed in fields.items():
        if type(tiles[name]) is not int or tiles[name] not in allowed:
            raise ValueError(mismatch(name, repr(tiles[name]), f"one of {', '.join(map(str, allowed))}"))
    return tuple(tiles[name] for name in fields)


def as_entry(key: Key, tiles: tuple[int, ...], evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return these tiles as an entry of the file, ready for JSON; `ValueError` if they are not valid for the kernel."""
    named = dict(zip(FIELDS[key.kernel], tiles, strict=True))
    _checked(key.kernel, named)
    capability = ".".join(map(str, key.capability))
    return {
        "kernel": key.kernel,
        "capability": capability,
        "kind": key.kind,
        "width": key.width,
        "tiles": named,
        "evidence": dict(evidence),
    }

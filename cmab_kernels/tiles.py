"""The block sizes that were tuned on a GPU: `tiles.json` beside this file, which `python bench/gpu_check.py --sections tune` writes.

Each was found to be right, and faster than the built-in one by more than the noise, on the GPU that stands with it. What the file does not
name takes the tables in each family's `kernels/launch.py`. No sequence length is in a key, so a length changes no bits.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

FILE = Path(__file__).with_name("tiles.json")
FORMAT = 1
HOPPER = (9, 0)
BLACKWELL = 10
"""The major capability of its data-centre GPUs, which multiply out of tensor memory."""

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
"""kernel -> what its tiles consist of -> the values allowed: powers of two, as products need, that divide every run of keys or rows."""

KINDS = ("half", "tf32", "bf16x6", "ieee", "double")
WIDTHS = (16, 32, 64, 128, 256)


class Key(NamedTuple):
    """The key of an entry: the kernel, the GPU, how matrices are multiplied, and the width of the widest head, padded."""

    kernel: str
    capability: tuple[int, int]
    kind: str
    width: int


Table = Mapping[Key, tuple[int, ...]]


def tuned(kernel: str, device: torch.device, kind: str, width: int) -> tuple[int, ...] | None:
    """The tiles in the order of FIELDS; None where the built-in ones stand."""
    table = _planted[-1] if _planted else _tuned()
    if not table:
        return None
    return table.get(Key(kernel, capability_of(device), kind, padded(width)))


def padded(width: int) -> int:
    """The width that the kernels pad a head to: a power of two, at least 16."""
    return max(1 << (width - 1).bit_length(), WIDTHS[0])


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability (major, minor) of a GPU. On a CPU, for Triton's interpreter, it is that of Hopper."""
    return _capability(device.index) if device.type == "cuda" else HOPPER


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


_planted: list[Table] = []


@contextlib.contextmanager
def using(table: Table) -> Iterator[None]:
    """These tiles, and no others, instead of the file's: for tuning, and for tests. `{}`: the built-in ones."""
    _planted.append(table)
    try:
        yield
    finally:
        _planted.pop()


@cache
def _tuned() -> Table:
    """Read once in a process."""
    return read(FILE)


def read(path: Path) -> Table:
    """`ValueError`, which names the file and the entry, for anything that is not a table of valid tiles."""
    return {key: tiles for key, tiles, _ in entries(path)}


def entries(path: Path) -> list[tuple[Key, tuple[int, ...], Mapping[str, Any]]]:
    """(key, tiles, evidence) of each entry."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable table of tiles ({error}); reinstall the package") from None
    if not isinstance(content, dict) or content.get("cmab_kernels_tiles") != FORMAT or not isinstance(content.get("entries"), list):
        raise ValueError(f"{path}: not a table of tiles of format {FORMAT}; reinstall the package")
    found = []
    for number, entry in enumerate(content["entries"]):
        try:
            found.append(_entry(entry))
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}: entry {number}: {what}; remove the entry, or tune again") from None
    if len({key for key, _, _ in found}) < len(found):
        raise ValueError(f"{path}: two entries have one key; remove one, or tune again")
    return found


def _entry(entry: Any) -> tuple[Key, tuple[int, ...], Mapping[str, Any]]:
    if not isinstance(entry, dict):
        raise TypeError(f"it is {entry!r}: an object is needed")
    kernel, kind, width, capability = (entry[name] for name in ("kernel", "kind", "width", "capability"))
    if not re.fullmatch(r"\d+\.\d+", str(capability)):
        raise ValueError(f"capability is {capability!r}: it must be like '9.0'")
    major, minor = map(int, str(capability).split("."))
    for name, value, allowed in (("kernel", kernel, FIELDS), ("kind", kind, KINDS), ("width", width, WIDTHS)):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(map(str, allowed))}")
    return Key(kernel, (major, minor), kind, width), _checked(kernel, entry["tiles"]), entry["evidence"]


def _checked(kernel: str, tiles: Any) -> tuple[int, ...]:
    """The tiles in the order of FIELDS; `ValueError` if they are no tiles of this kernel."""
    fields = FIELDS[kernel]
    if not isinstance(tiles, dict) or tiles.keys() != fields.keys():
        raise ValueError(f"tiles are {', '.join(map(str, tiles))}: {kernel} has {', '.join(fields)}")
    for name, allowed in fields.items():
        if type(tiles[name]) is not int or tiles[name] not in allowed:
            raise ValueError(f"{name} is {tiles[name]!r}: it must be one of {', '.join(map(str, allowed))}")
    return tuple(tiles[name] for name in fields)


def as_entry(key: Key, tiles: tuple[int, ...], evidence: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of the file for these tiles; `ValueError` if they are no tiles of the kernel."""
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

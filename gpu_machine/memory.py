"""Memory that records for each byte whether it was written, and which warps have written and read it since the last
barrier."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from .report import Fault

UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BYTES = {size: unit(0x0101010101010101 & (1 << 8 * size) - 1) for size, unit in UNITS.items()}
"""For each size, a number whose bytes are all 1."""
WRITTEN, IN_FLIGHT = 0xFF, 0x7F
FILLING = 0xFF
"""The value of bytes before they are written: NaN."""


class Bytes:
    """The `size` addresses from `start` on, over `data` if it is given, else over new memory.

    Each byte has three shadow values: `written`; and `writers` and `readers` since the last barrier, with one bit for
    each warp. Warps whose numbers differ by eight share a bit, so a race between only these two is not noticed. If
    `races` is False, no race is reported.
    """

    def __init__(
        self,
        name: str,
        start: int,
        size: int,
        data: np.ndarray | None = None,
        written: bool = False,
        races: bool = True,
    ) -> None:
        self.name, self.start, self.end, self.races = name, start, start + size, races
        self.origin = start // 16 * 16
        room = (self.end - self.origin + 15) // 16 * 16
        self.inside = slice(start - self.origin, self.end - self.origin)
        self.data = np.full(room, FILLING, np.uint8) if data is None else data
        self.written = np.full(room, WRITTEN if written else 0, np.uint8)
        self.writers, self.readers = np.zeros(room, np.uint8), np.zeros(room, np.uint8)

    def read(self, addresses: np.ndarray, size: int, warps: np.ndarray) -> np.ndarray:
        """Return `size` bytes from each address, (n, units); `warps` are the warps that read."""
        unit, index, mine = self._places(addresses, size, warps, "read")
        if self.written.view(unit)[index].min() != np.iinfo(unit).max:
            self._unwritten(addresses, size)
        others = self.writers.view(unit)[index] & ~mine
        if self.races and others.any():
            raise Fault(
                f"a race: a warp reads what another wrote since the last barrier, {self._name_of(addresses, others)}"
            )
        _mark(self.readers.view(unit), index, mine)
        return self.data.view(unit)[index]

    def write(self, addresses: np.ndarray, values: np.ndarray, warps: np.ndarray) -> None:
        """Write the bytes of each row of `values` (n, units) to its address."""
        size = values.shape[1] * values.itemsize
        unit, index, mine = self._places(addresses, size, warps, "write")
        values = values.view(unit)
        self._no_race(unit, index, mine, addresses, values)
        self._put(unit, index, mine, addresses, values)

    def promise(self, addresses: np.ndarray, size: int, warps: np.ndarray) -> None:
        """Record that a copy to these addresses has started and has not arrived."""
        unit, index, mine = self._places(addresses, size, warps, "copy to")
        self._no_race(unit, index, mine, addresses, None)
        self.written.view(unit)[index] = _BYTES[unit(0).itemsize] * unit(IN_FLIGHT)
        _mark(self.writers.view(unit), index, mine)

    def land(self, addresses: np.ndarray, values: np.ndarray, warps: np.ndarray) -> None:
        """A copy arrives, for the threads that have waited for it."""
        unit, index, mine = self._places(addresses, values.shape[1] * values.itemsize, warps, "copy to")
        self._put(unit, index, mine, addresses, values.view(unit))

    def exchange(self, address: np.ndarray, size: int, value: np.ndarray | None) -> np.ndarray:
        """Return `size` bytes at one address, and write a value there if one is given. This is a step of an atomic
        operation, which cannot race."""
        unit, index, _ = self._places(address, size, np.zeros(1, np.int64), "access")
        if self.written.view(unit)[index].min() != np.iinfo(unit).max:
            self._unwritten(address, size)
        old = self.data.view(unit)[index]
        if value is not None:
            self.data.view(unit)[index] = value
        return old

    def barrier(self) -> None:
        """All earlier reads and writes come before everything that follows."""
        self.writers.fill(0)
        self.readers.fill(0)

    def _put(self, unit: type, index: np.ndarray, mine: np.ndarray, addresses: np.ndarray, values: np.ndarray) -> None:
        data = self.data.view(unit)
        data[index] = values
        if (differs := data[index] != values).any():
            raise Fault(f"two threads write different values at once, {self._name_of(addresses, differs)}")
        self.written.view(unit)[index] = np.iinfo(unit).max
        _mark(self.writers.view(unit), index, mine)

    def _places(
        self, addresses: np.ndarray, size: int, warps: np.ndarray, verb: str
    ) -> tuple[type, np.ndarray, np.ndarray]:
        """Return the type of the units, their indices (n, units), and the bits of the warps (n, 1)."""
        if (outside := (addresses < self.start) | (addresses + size > self.end)).any():
            where = int(addresses[outside.argmax()]) - self.start
            raise Fault(
                f"out of bounds: {verb} {size} bytes at byte {where} of {self.name}, which has {self.end - self.start}"
            )
        if (addresses & (size - 1)).any():
            raise Fault(f"misaligned: {verb} {size} bytes at once, {self._name_of(addresses, addresses & (size - 1))}")
        each = min(size, 8)
        unit = UNITS[each]
        first = (addresses - self.origin) // each
        index = first[:, None] + np.arange(size // each)
        mine = (_BYTES[each] * (unit(1) << (warps & 7).astype(unit)))[:, None]
        return unit, index, mine

    def _no_race(
        self, unit: type, index: np.ndarray, mine: np.ndarray, addresses: np.ndarray, values: np.ndarray | None
    ) -> None:
        """Raise `Fault` if another warp has read these places since the last barrier, or has written another value
        there."""
        if not self.races:
            return
        if (others := self.readers.view(unit)[index] & ~mine).any():
            raise Fault(
                f"a race: a warp writes what another read since the last barrier, {self._name_of(addresses, others)}"
            )
        others = self.writers.view(unit)[index] & ~mine
        if others.any() and (values is None or ((others != 0) & (self.data.view(unit)[index] != values)).any()):
            raise Fault(
                "a race: two warps write different values without a barrier between, "
                f"{self._name_of(addresses, others)}"
            )

    def _unwritten(self, addresses: np.ndarray, size: int) -> None:
        state = self.written[(addresses - self.origin)[:, None] + np.arange(size)]
        if (flying := state == IN_FLIGHT).any():
            raise Fault(f"a copy that has not arrived was read, {self._name_of(addresses, flying)}")
        raise Fault(f"memory that nobody wrote was read, {self._name_of(addresses, state != WRITTEN)}")

    def _name_of(self, addresses: np.ndarray, bad: np.ndarray) -> str:
        first = int(np.flatnonzero(bad.reshape(len(addresses), -1).any(1))[0])
        return f"at byte {int(addresses[first]) - self.start} of {self.name}"


def _mark(shadow: np.ndarray, index: np.ndarray, mine: np.ndarray) -> None:
    """Set the bits `mine` at `index`, where several warps may have the same index."""
    wanted = np.broadcast_to(mine, index.shape)
    while True:
        found = shadow[index]
        missing = (found & wanted) != wanted
        if not missing.any():
            return
        shadow[index[missing]] = found[missing] | wanted[missing]


class Global:
    """Global memory: the tensors that kernels may access; each has its own bounds. The object keeps the tensors
    alive."""

    def __init__(self) -> None:
        self.parts: list[Bytes] = []
        self.results: list[Bytes] = []
        """The parts that had no values when they were passed, in that order."""
        self._starts = np.zeros(0, np.int64)
        self._tensors: list[Tensor] = []

    def give(self, tensor: Tensor, name: str, written: bool = True) -> None:
        """Let kernels access a tensor on the CPU, unless it is part of a tensor that they may access; `written` says
        that it has values."""
        size = _extent(tensor)
        if size == 0 or any(
            part.start <= tensor.data_ptr() and tensor.data_ptr() + size <= part.end for part in self.parts
        ):
            return
        start = tensor.data_ptr()
        origin = start // 16 * 16
        room = (start + size - origin + 15) // 16 * 16
        data = np.frombuffer((ctypes.c_uint8 * room).from_address(origin), np.uint8)
        shape = "x".join(map(str, tensor.shape))
        part = Bytes(f"{name} ({shape}, {str(tensor.dtype).removeprefix('torch.')})", start, size, data, written)
        self.parts.append(part)
        if not written:
            part.data[part.inside] = FILLING
            self.results.append(part)
        self.parts.sort(key=lambda part: part.start)
        self._starts = np.array([part.start for part in self.parts])
        self._tensors.append(tensor)

    def notice_the_host(self) -> None:
        """Treat those results as written to which the host has written since then: those whose filling has changed.
        They are then no longer results."""
        for part in list(self.results):
            if (part.data[part.inside][part.written[part.inside] != WRITTEN] != FILLING).any():
                part.written.fill(WRITTEN)
                self.results.remove(part)

    def digest(self) -> int:
        """Return a number that changes when a bit of a result does."""
        return zlib.crc32(b"".join(part.data[part.written == WRITTEN].tobytes() for part in self.results))

    def read(self, addresses: np.ndarray, size: int, warps: np.ndarray) -> np.ndarray:
        result = np.empty((len(addresses), max(size // 8, 1)), UNITS[min(size, 8)])
        for part, those in self._parts_of(addresses, size):
            result[those] = part.read(addresses[those], size, warps[those])
        return result

    def write(self, addresses: np.ndarray, values: np.ndarray, warps: np.ndarray) -> None:
        for part, those in self._parts_of(addresses, values.shape[1] * values.itemsize):
            part.write(addresses[those], values[those], warps[those])

    def exchange(self, address: np.ndarray, size: int, value: np.ndarray | None) -> np.ndarray:
        ((part, _),) = self._parts_of(address, size)
        return part.exchange(address, size, value)

    def barrier(self) -> None:
        for part in self.parts:
            part.barrier()

    def _parts_of(self, addresses: np.ndarray, size: int) -> Iterator[tuple[Bytes, Any]]:
        """Yield the tensors to which the addresses belong, each with the threads that use it."""
        which = np.searchsorted(self._starts, addresses, "right") - 1
        if len(which) and which[0] >= 0 and (which == which[0]).all():
            yield self.parts[which[0]], slice(None)
            return
        for number in np.unique(which):
            those = np.flatnonzero(which == number)
            if number < 0:
                raise Fault(
                    f"out of bounds: {size} bytes at {int(addresses[those[0]]):#x}, which is before every tensor"
                )
            yield self.parts[number], those


def _extent(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to its last; strides may be 0, and are never negative."""
    if tensor.numel() == 0:
        return 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()

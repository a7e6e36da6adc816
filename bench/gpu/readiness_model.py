"""What a multiprocessor holds of a kernel, and the time that its instructions take at the least.

Sources: the CUDA C++ Programming Guide (technical specifications and throughput of arithmetic instructions, by compute capability), the
rules of NVIDIA's occupancy calculator (cuda_occupancy.h of the toolkit), the data sheets and white papers of A100, H200 and B200. Where a
table says nothing of 10.0, it is taken to be as 9.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from bench.floors import Rates
from cmab_kernels.testing.cubin import TENSOR_COLUMNS

from .readiness_sass import Counts

WARP = 32
SCHEDULERS = 4
"""Schedulers of a multiprocessor; each issues an instruction a clock."""

# ---- occupancy

REGISTERS = 65536
WARPS = 64
BLOCKS = 32
REGISTER_UNIT = 256
"""A warp's registers are given out in multiples of it, and on each scheduler by themselves."""
SHARED_UNIT = 128
SHARED_RESERVED = 1024
"""Bytes of shared memory that the system takes for each block."""
SHARED_MEMORY = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
"""Bytes of a multiprocessor by compute capability. Registers, warps and blocks are the same for all three."""


class Occupancy(NamedTuple):
    """Blocks that a multiprocessor holds at once, the share of its warps, and what there is no more of."""

    blocks: int
    share: float
    limit: str


def occupancy(capability: int, registers: int, shared: int, warps: int, tensor_columns: int = 0) -> Occupancy:
    """`registers` of a thread; bytes of shared memory, warps, and columns of tensor memory of a block."""
    of_warp = _up(max(registers, 1) * WARP, REGISTER_UNIT)
    limits = {
        "registers": REGISTERS // SCHEDULERS // of_warp * SCHEDULERS // warps,
        "shared memory": SHARED_MEMORY[capability] // (_up(shared + SHARED_RESERVED, SHARED_UNIT)),
        "warps": WARPS // warps,
        "blocks": BLOCKS,
        "tensor memory": TENSOR_COLUMNS // max(tensor_columns, 1),
    }
    blocks = min(limits.values())
    return Occupancy(blocks, blocks * warps / WARPS, next(name for name, limit in limits.items() if limit == blocks))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


# ---- time


@dataclass(frozen=True)
class Chip:
    """A GPU by its public figures: lanes and flops are of one multiprocessor and clock."""

    name: str
    capability: int
    multiprocessors: int
    clock: float
    memory: float
    lanes: Mapping[str, int]
    flops: Mapping[str, int]

    @property
    def clocks(self) -> float:
        """Clocks a second of all multiprocessors together."""
        return self.multiprocessors * self.clock

    def rates(self) -> Rates:
        """The rates that floors are computed with. Exact float32: six products of bfloat16 parts, or multiply-adds where faster."""
        float32 = max(self.flops["half"] / 6, 2 * self.lanes["fp32"])
        flops = {"bfloat16": self.flops["half"], "float16": self.flops["half"], "tf32": self.flops["tf32"]}
        flops |= {"float32": float32, "float64": self.flops["double"]}
        return Rates(self.lanes["special"] * self.clocks, self.memory, {name: rate * self.clocks for name, rate in flops.items()})


_LANES = {"special": 16, "fp32": 128, "multiply": 64, "alu": 64, "fp64": 64, "shared": 32}
CHIPS = {
    80: Chip(
        "A100", 80, 108, 1.41e9, 2.039e12, _LANES | {"fp32": 64, "fp64": 32}, {"half": 2048, "tf32": 1024, "double": 128}
    ),  # SXM, 80 GB
    90: Chip("H200", 90, 132, 1.83e9, 4.8e12, _LANES, {"half": 4096, "tf32": 2048, "double": 256}),
    100: Chip("B200", 100, 148, 1.85e9, 8.0e12, _LANES, {"half": 8192, "tf32": 4096, "double": 128}),
}
"""The clock is the one that the data sheet's dense matrix rates imply, which is under the highest that the chip reaches."""


def seconds(chip: Chip, counts: Counts, warps: int, passes: float, moved: float) -> dict[str, float]:
    """Seconds that each unit takes by itself, if it is never idle; `passes`: how often blocks go through what was counted, all together."""
    of_warp: dict[str, float] = {unit: counts.instructions.get(unit, 0.0) for unit in ("special", "alu", "fp64", "multiply")}
    of_warp |= {"fp32": counts.lanes, "shared": counts.wavefronts}
    clocks = {unit: count * warps * WARP / chip.lanes[unit] for unit, count in of_warp.items()}
    clocks["issue"] = counts.total * warps / SCHEDULERS
    clocks["matrix"] = sum(flops / chip.flops[kind] for kind, flops in counts.flops.items())
    return {unit: passes * count / chip.clocks for unit, count in clocks.items()} | {"memory": moved / chip.memory}

"""What a multiprocessor holds of a kernel, and the time that its instructions take at the least.

Sources: the CUDA C++ Programming Guide (technical specifications and throughput of arithmetic instructions, by compute capability), the
rules of NVIDIA's occupancy calculator (cuda_occupancy.h of the toolkit), the data sheets of A100, H200 and B200, and the white papers of
GA102 (RTX 3090), Ada (RTX 4090) and RTX Blackwell (RTX 5090). Where a table says nothing of 10.0, it is taken to be as 9.0.
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
REGISTER_UNIT = 256
"""A warp's registers are given out in multiples of it, and on each scheduler by themselves."""
SHARED_UNIT = 128
SHARED_RESERVED = 1024
"""Bytes of shared memory that the system takes for each block."""


class Occupancy(NamedTuple):
    """Blocks that a multiprocessor holds at once, the share of its warps, and what there is no more of."""

    blocks: int
    share: float
    limit: str


def occupancy(capability: int, registers: int, shared: int, warps: int, tensor_columns: int = 0) -> Occupancy:
    """`registers` of a thread; bytes of shared memory, warps, and columns of tensor memory of a block."""
    chip, of_warp = CHIPS[capability], _up(max(registers, 1) * WARP, REGISTER_UNIT)
    limits = {
        "registers": REGISTERS // SCHEDULERS // of_warp * SCHEDULERS // warps,
        "shared memory": chip.shared // _up(shared + SHARED_RESERVED, SHARED_UNIT),
        "warps": chip.warps // warps,
        "blocks": chip.blocks,
        "tensor memory": TENSOR_COLUMNS // max(tensor_columns, 1),
    }
    blocks = min(limits.values())
    return Occupancy(blocks, blocks * warps / chip.warps, next(name for name, limit in limits.items() if limit == blocks))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


# ---- time


@dataclass(frozen=True)
class Chip:
    """A GPU by its public figures: lanes and flops are of one multiprocessor and clock; `warps`, `blocks` and bytes of `shared` memory are
    what one holds."""

    name: str
    multiprocessors: int
    clock: float
    memory: float
    lanes: Mapping[str, int]
    flops: Mapping[str, int]
    warps: int = 64
    blocks: int = 32
    shared: int = 228 * 1024

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
_CARD = {"lanes": _LANES | {"fp64": 2}, "flops": {"half": 512, "tf32": 256, "double": 4}, "warps": 48, "shared": 100 * 1024}
"""What GeForce cards have in common; their matrix units sum float16 in float32 at half the rate that data sheets lead with."""
CHIPS = {
    80: Chip(  # SXM, 80 GB
        *("A100", 108, 1.41e9, 2.039e12, _LANES | {"fp32": 64, "fp64": 32}, {"half": 2048, "tf32": 1024, "double": 128}),
        shared=164 * 1024,
    ),
    86: Chip("RTX 3090", 82, 1.695e9, 0.936e12, **_CARD, blocks=16),
    89: Chip("RTX 4090", 128, 2.52e9, 1.008e12, **_CARD, blocks=24),
    90: Chip("H200", 132, 1.83e9, 4.8e12, _LANES, {"half": 4096, "tf32": 2048, "double": 256}),
    100: Chip("B200", 148, 1.85e9, 8.0e12, _LANES, {"half": 8192, "tf32": 4096, "double": 128}),
    120: Chip("RTX 5090", 170, 2.407e9, 1.792e12, **_CARD, blocks=24),
}
"""By compute capability. The clock of A100, H200 and B200 is the one that the dense matrix rates of their data sheets imply, under the
highest that they reach; that of the cards is the boost clock, which their rates are given at."""


def seconds(chip: Chip, counts: Counts, warps: int, passes: float, moved: float) -> dict[str, float]:
    """Seconds that each unit takes by itself, if it is never idle; `passes`: how often blocks go through what was counted, all together."""
    of_warp: dict[str, float] = {unit: counts.instructions.get(unit, 0.0) for unit in ("special", "alu", "fp64", "multiply")}
    of_warp |= {"fp32": counts.lanes, "shared": counts.wavefronts}
    clocks = {unit: count * warps * WARP / chip.lanes[unit] for unit, count in of_warp.items()}
    clocks["issue"] = counts.total * warps / SCHEDULERS
    clocks["matrix"] = sum(flops / chip.flops[kind] for kind, flops in counts.flops.items())
    return {unit: passes * count / chip.clocks for unit, count in clocks.items()} | {"memory": moved / chip.memory}

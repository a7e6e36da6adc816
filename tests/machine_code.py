"""Faults of compiled kernels; some kernels are known to spill."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import triton.language as tl

from cmab_kernels.testing.cubin import SPILLS, Launch, compiled, faults


def by_matrix_units(names: Collection[str], launch: Launch, capability: int) -> bool:
    """Return whether matrix units multiply in the kernels of these names.

    They do not for full float32, and for float64 only on sm_80 and sm_90, as in Triton 3.6.
    """
    operand = launch.options.get("OPERAND")
    in_float32 = operand == tl.float32 and launch.options["PRECISION"] == "ieee"
    return launch.kernel.__name__ in names and not in_float32 and (operand != tl.float64 or capability in (80, 90))


def wrong(
    launches: Iterable[Launch],
    capability: int,
    folder: Path,
    by_matrix_units: Callable[[Launch, int], bool],
    spilling: Mapping[str, float] | None = None,
) -> list[str]:
    """Compile launches for one compute capability, print their figures, and return their faults as sentences.

    `by_matrix_units` tells whether matrix units must do the products of a launch. `spilling` has the kernels known to
    spill, by name, and the largest share of their instructions that may access local memory. A kernel that spills more
    is at fault, and so is a declared kernel that no longer spills.
    """
    known, spilled, found = spilling or {}, set(), []
    for launch in launches:
        figures, name = compiled(launch, capability, folder), launch.kernel.__name__
        print(figures)
        found += [
            f"{figures}: {fault}"
            for fault in faults(figures, by_matrix_units(launch, capability), known.get(name, SPILLS))
        ]
        if figures.local > SPILLS * figures.instructions.total():
            spilled.add(name)
    return found + [f"{name} is declared to spill, and does not" for name in sorted(known.keys() - spilled)]

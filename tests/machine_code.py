"""What is wrong with compiled kernels, of which some are known to spill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cmab_kernels.testing.cubin import SPILLS, Launch, compiled, faults


def wrong(
    launches: Iterable[Launch],
    capability: int,
    folder: Path,
    by_matrix_units: Callable[[Launch, int], bool],
    spilling: Mapping[str, float] | None = None,
) -> list[str]:
    """Compile launches for one compute capability, print their figures, and return their faults as sentences.

    `by_matrix_units` says of a launch whether matrix units must do its products. `spilling` holds the kernels known to spill, by name, and
    the most of their instructions that may access local memory, as a share. What spills more is at fault, and so is a declaration of what
    spills no longer.
    """
    known, spilled, found = spilling or {}, set(), []
    for launch in launches:
        figures, name = compiled(launch, capability, folder), launch.kernel.__name__
        print(figures)
        found += [f"{figures}: {fault}" for fault in faults(figures, by_matrix_units(launch, capability), known.get(name, SPILLS))]
        if figures.local > SPILLS * figures.instructions.total():
            spilled.add(name)
    return found + [f"{name} is declared to spill, and does not" for name in sorted(known.keys() - spilled)]

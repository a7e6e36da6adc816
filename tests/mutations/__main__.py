"""Plants new and changed faults, writes and prints which test caught each, and exits with 1 if a fault was not
caught."""

from __future__ import annotations

import contextlib
import sys

from . import FAULTS, table
from .tree import ROOT, Tree


def main(words: list[str]) -> int:
    """Plant the faults whose name or file holds one of the words, all if there are none; the new ones come first."""
    rows = {name: row for name, row in table.read().items() if name in FAULTS}
    sums = {name: table.sum_of(fault) for name, fault in FAULTS.items()}
    chosen = [
        name for name, fault in FAULTS.items() if not words or any(word in f"{name} {fault.path}" for word in words)
    ]
    changed = [name for name in chosen if name not in rows or not rows[name].caught_by or rows[name].sum != sums[name]]
    print(f"{len(chosen)} of {len(FAULTS)} planted faults, {len(changed)} of them new or changed.", flush=True)
    with contextlib.closing(Tree(ROOT / "build" / "mutants")) as tree:
        for name in sorted(changed, key=lambda name: name in rows):
            caught, seconds, output = tree.outcome(FAULTS[name])
            rows[name] = table.Row(caught, round(seconds), sums[name])
            table.write(rows, FAULTS)
            print(f"{name}: {caught or f'NOT CAUGHT{chr(10)}{output}'} ({seconds:.0f} s)", flush=True)
    print(*(table.line(name, FAULTS[name], rows[name]) for name in chosen), sep="\n")
    missed = [name for name in chosen if not rows[name].caught_by]
    print(f"{len(chosen) - len(missed)} caught, {len(missed)} not.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

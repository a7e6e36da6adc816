"""Plants faults and prints a Markdown table of what caught each; ends with 1 if one was not caught."""

from __future__ import annotations

import contextlib
import datetime
import subprocess
import sys
from pathlib import Path

from . import FAULTS
from .fault import Fault
from .tree import ROOT, Tree


def main(words: list[str]) -> int:
    chosen = {name: fault for name, fault in FAULTS.items() if not words or any(word in f"{name} {fault.path}" for word in words)}
    tree, missed = Tree(ROOT / "build" / "mutants"), 0
    commit = subprocess.run(["git", "log", "-1", "--format=%h"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    print(f"{len(chosen)} of {len(FAULTS)} planted faults, {datetime.date.today()}, commit {commit or 'unknown'}.\n")
    print("| fault | file | caught by | seconds |\n|---|---|---|---|", flush=True)
    with contextlib.closing(tree):
        for name, fault in chosen.items():
            missed += not _row(name, fault, tree)
    print(f"\n{len(chosen) - missed} caught, {missed} not.")
    return 1 if missed else 0


def _row(name: str, fault: Fault, tree: Tree) -> bool:
    """Print what came of a fault; return whether it was caught."""
    caught, seconds, output = tree.outcome(fault)
    print(f"| {name} | {Path(fault.path)} | {f'`{caught}`' if caught else '**nothing**'} | {seconds:.0f} |", flush=True)
    if not caught:
        print(f"«{name}» was not caught:\n{output}", file=sys.stderr, flush=True)
    return bool(caught)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

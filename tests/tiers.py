"""The tests that each tier covers.

`python -m tests.tiers` counts the tests of every folder, and the planted faults that each tier catches.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import Counter

from .mutations import FAULTS
from .pages import ROOT

TIERS = {
    "make test": "not thorough and not nightly and not gpu",
    "make test-thorough": "thorough and not nightly and not gpu",
    "make nightly": "nightly and not gpu",
}
"""Command -> the marks that it selects. `make nightly` also runs the other two."""

SAMPLED = re.compile(r"test_triton\w*\.py")
"""Files that run in Triton's interpreter: partly in the ordinary tests, and completely in the thorough tests."""


def collected(marks: str) -> list[str]:
    """Return the tests that a tier selects, as pytest names them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marks]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.startswith(("tests/", "bench/"))]


def counts(lines: list[str]) -> Counter[str]:
    """Return folder -> its number of tests, from lines such as `tests/nn/test_cmab.py: 45`."""
    found: Counter[str] = Counter()
    for line in lines:
        file, _, number = line.rpartition(": ")
        found[file.rpartition("/")[0]] += int(number)
    return found


def ordinary_catches(caught_by: str, ordinary: set[str]) -> bool:
    """Return whether a file with tests that must catch a fault belongs to the ordinary tier as a whole."""
    named = [word.partition("::")[0] for word in shlex.split(caught_by) if word.startswith(("tests", "bench"))]
    return any(file.startswith(name) for name in named if not SAMPLED.search(name) for file in ordinary)


def main() -> None:
    """Print both tables in Markdown."""
    lines = {tier: collected(marks) for tier, marks in TIERS.items()}
    folders = {tier: counts(each) for tier, each in lines.items()}
    print("| folder |", " | ".join(f"`{tier}`" for tier in TIERS), "|\n|---|" + "---|" * len(TIERS))
    for folder in sorted(set().union(*folders.values())):
        print(f"| `{folder}` |", " | ".join(f"{folders[tier][folder]:,}" for tier in TIERS), "|")
    print("| all |", " | ".join(f"{folders[tier].total():,}" for tier in TIERS), "|\n")
    ordinary = {line.rpartition(": ")[0] for line in lines["make test"]}
    later = [name for name, fault in FAULTS.items() if not ordinary_catches(fault.caught_by, ordinary)]
    print(
        f"`make test` has tests of {len(FAULTS) - len(later)} of {len(FAULTS)} planted faults, `make test-thorough` "
        "those of the others:"
    )
    print(*(f"- {name}" for name in later), sep="\n")


if __name__ == "__main__":
    main()

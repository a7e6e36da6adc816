"""Facts of a run of the GPU check: its machine, the commit, how much was run, and which kernels have changed since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from .. import provenance
from ..gpu_check import SECTIONS


def facts(check: Mapping[str, Any], name: str) -> dict[str, str]:
    """Name of a place on the page -> its text. `ValueError` if git does not know the commit."""
    machine, added = check["machine"], check.get("added_later", {})
    there = provenance.sources_of(machine["commit"])
    changed = Changed(machine["kernels"], provenance.kernel_digests(provenance.sources()))
    commit = f"commit {machine['commit'][:7]}"
    if provenance.digest(there) != machine["sources"]:
        commit = f"a tree with uncommitted changes, on top of {commit}"
    return {
        "gpu": machine["gpu"],
        "driver": machine["driver_version"],
        "date": machine["date"][:10],
        "file": name,
        "torch": machine["versions"]["torch"],
        "triton": machine["versions"]["triton"],
        "commit": commit,
        "rates": _rates(check["sections"]["timings"]["rows"]),
        "notes": "".join(["\nAdded to the file later:", *(f"\n- {note}" for note in added["notes"]), "\n"])
        if added
        else "",
        "sections": _sections(check["sections"]),
        "changed": changed.counted(),
        "changed files": changed.listed(),
        **_suite(check["sections"]["suite"]),
    }


def _rates(rows: Sequence[Mapping[str, Any]]) -> str:
    found = next(row["rates"] for row in rows if "rates" in row)
    names = {"float32": "float32 (a third of tf32)"}
    matrix = {names.get(kind, kind): rate for kind, rate in found["matrix"].items() if kind != "float16"}
    products = ", ".join(f"products of {kind} {rate / 1e12:.0f} TFLOP/s" for kind, rate in matrix.items())
    return (
        f"{products}, memory {found['memory'] / 1e12:.2f} TB/s; exponentials {found['exponentials'] / 1e12:.1f} "
        "T/s by the clock"
    )


# ---- how much was run ------------------------------------------------------------------------------------------------


def _suite(suite: Mapping[str, Any]) -> dict[str, str]:
    rows, there = suite["rows"], suite["listed"]
    wrong = sorted(row["key"].partition("tests/")[2] for row in rows if not row.get("ok", True))
    over = Counter(row["passed over"].removeprefix("Skipped: ") for row in rows if "passed over" in row)
    skipped = "".join(f", {count:,} skipped ({reason})" for reason, count in over.items())
    stopped = f", {there - len(rows):,} not run ({suite['problem'] or 'cut off'})" if there > len(rows) else ""
    return {
        "ran": f"{len(rows):,} of {there:,} GPU tests were run, {len(wrong):,} failed",
        "suite": f"{len(rows) - len(wrong) - over.total():,} of {there:,} passed, {len(wrong):,} "
        f"failed{skipped}{stopped}",
        "wrong": "".join(f"\n- `{key}`" for key in wrong) or " none",
    }


def _sections(sections: Mapping[str, Any]) -> str:
    ended = [name for name, section in sections.items() if section["complete"]]
    cut = [
        f"{name} ({section['problem'] or 'cut off'})" for name, section in sections.items() if not section["complete"]
    ]
    absent = [name for name in SECTIONS if name not in sections]
    kinds = {"finished": ended, "begun and not finished": cut, "not begun": absent}
    return "; ".join(f"{kind}: {', '.join(names) or 'none'}" for kind, names in kinds.items())


# ---- which kernels have changed --------------------------------------------------------------------------------------


def _renamed(name: str) -> str:
    """Return the path of a file whose folder had another name earlier."""
    return (
        name.replace("/kernels/", "/triton/")
        .replace("csrc/gram/", "csrc/intention/")
        .replace("csrc/pinv/", "csrc/nystrom/")
    )


class Changed:
    """The kernel sources that have changed, by a comparison of their old and new digests."""

    def __init__(self, then: Mapping[str, str], now: Mapping[str, str]) -> None:
        then = {_renamed(name): value for name, value in then.items()}
        self.total = len(now)
        self.files = sorted(name for name in now if now[name] != then.get(name))
        self.gone = sorted(then.keys() - now.keys())

    def counted(self) -> str:
        gone = f", and {len(self.gone)} are gone" if self.gone else ""
        return (
            f"{len(self.files)} of the {self.total} files of kernels for GPUs have changed since that commit or "
            f"are new{gone}"
        )

    def listed(self) -> str:
        """One line for each folder."""
        folders: dict[str, list[str]] = {}
        for name in self.files:
            folders.setdefault(str(PurePath(name).parent), []).append(PurePath(name).name)
        lines = [f"\n- `{folder}`: {', '.join(names)}" for folder, names in folders.items()]
        return (
            "".join(lines) + (f"\n- gone: {', '.join(f'`{name}`' for name in self.gone)}" if self.gone else "")
            or " none"
        )

"""docs/measured_gpu.md and the GPU's headline in the README, from the newest file that bench/gpu_check.py wrote.

`python -m bench.report.measured_gpu` writes them. The page is measured_gpu.md, beside this file, in which each {group} has given way to the
figures of that group, and each other {name} to a fact of the run. Where time ended before a group's peers were timed, they are those of the
file `..._earlier.json` of the same day, with a mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cmab_kernels.measure import readable

from ..runs import DEFINITION, is_ours
from .marks import put

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "measured_gpu.md"
TEMPLATE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- GPU table: begin -->", "<!-- GPU table: end -->"
EARLIER = "†"
"""The mark of a peer that was timed earlier the same day, not in turn with ours."""
CAPTURED_APART = ", not captured"
"""Last part of the keys of rows that the page does not show: the same calls, made from Python each time."""

SHORTEST = 1e-6
"""A floor below so many seconds is less than any launch takes: no share of it is shown."""

Row = Mapping[str, Any]
PLACE = re.compile(r"\{([^}]+)\}")


def newest() -> Path:
    """The check of the last day."""
    return max(RESULTS.glob("gpu_check_*_????-??-??.json"), key=lambda path: path.stem[-10:])


def page(path: Path) -> str:
    """The text of docs/measured_gpu.md."""
    check = json.loads(path.read_text())
    known, groups = facts(check, path.name), with_earlier(timed(check), path.with_name(f"{path.stem}_earlier.json"))
    lines = (filled(line, groups, known) for line in TEMPLATE.read_text().splitlines())
    return "\n".join(line for line in lines if line is not None) + "\n"


def with_earlier(groups: Mapping[str, list[Row]], path: Path) -> dict[str, list[Row]]:
    """The groups, and for those without a peer the peers of an earlier file, if there is one; their names are marked."""
    if not path.exists():
        return dict(groups)
    before = timed(json.loads(path.read_text()))
    return {
        name: rows if any(map(_is_peer, rows)) else [*rows, *map(_marked, filter(_is_peer, before.get(name, [])))]
        for name, rows in groups.items()
    }


def _is_peer(row: Row) -> bool:
    return not is_ours(row["implementation"]) and row["implementation"] != DEFINITION


def _marked(peer: Row) -> Row:
    return {**peer, "implementation": peer["implementation"] + EARLIER}


def headline(text: str) -> str:
    """The table under the page's first heading of a second level, without that."""
    return text.split("\n## ")[1].partition("\n")[2].strip()


def timed(check: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Group -> its rows, with a time or a problem."""
    groups: dict[str, list[Row]] = {}
    for section in check["sections"].values():
        for row in section["rows"]:
            if "group" in row and not row["key"].endswith(CAPTURED_APART):
                groups.setdefault(row["group"], []).append(row)
    return groups


def facts(check: Mapping[str, Any], name: str) -> dict[str, str]:
    machine, suite = check["machine"], check["sections"]["suite"]["rows"]
    rates = next(row["rates"] for row in check["sections"]["timings"]["rows"] if "rates" in row)
    wrong = [row["key"].partition("tests/")[2] for row in suite if not row.get("ok", True)]
    products = ", ".join(f"{kind} products {rate / 1e12:.0f} TFLOP/s" for kind, rate in rates["matrix"].items() if kind != "float16")
    return {
        "gpu": machine["gpu"],
        "driver": machine["driver_version"],
        "date": machine["date"][:10],
        "file": name,
        "torch": machine["versions"]["torch"],
        "triton": machine["versions"]["triton"],
        "rates": f"{products} (float32 in tf32), memory {rates['memory'] / 1e12:.2f} TB/s; exponentials "
        f"{rates['exponentials'] / 1e12:.1f} T/s by the clock",
        "suite": f"{len(suite) - len(wrong):,} of {len(suite):,} passed",
        "wrong": "".join(f"\n- `{key}`" for key in sorted(wrong)) or " none",
    }


def filled(line: str, groups: Mapping[str, list[Row]], known: Mapping[str, str]) -> str | None:
    """A line with its figures; None where its group has none."""
    for place in PLACE.findall(line):
        if place not in known and not (cells := compared(groups.get(place, ()))):
            return None
        line = line.replace(f"{{{place}}}", known.get(place) or cells)
    return line


def compared(rows: Sequence[Row]) -> str:
    """The cells of a group: the fastest peer and ours; empty without ours."""
    right = [row for row in rows if "seconds" in row]
    ours = [row for row in right if is_ours(row["implementation"]) and "," not in row["implementation"]]
    if not ours:
        return ""
    mine, peer = min(ours, key=_median), min(filter(_is_peer, right), key=_median, default=None)
    share = f"{mine['floor'] / _median(mine):.0%} ({mine['bound']})" if mine.get("floor", 0.0) > SHORTEST else ""
    if peer is None:
        return f"{'none was right' if any(map(_is_peer, rows)) else 'not timed'} | | {_figures(mine)} | | {share}"
    return f"{peer['implementation']} | {_figures(peer)} | {_figures(mine)} | **{_median(mine) / _median(peer):.2g}** | {share}"


def _median(row: Row) -> float:
    return row["seconds"][0]


def _figures(row: Row) -> str:
    return f"{readable(_median(row))}, {(row['extra_memory'] - row['result_memory']) / 2**20:+.1f} MiB"


def main() -> None:
    path = newest()
    text = page(path)
    PAGE.write_text(text)
    README.write_text(put(README.read_text(), headline(text), BEGIN, END, "README.md"))
    print(f"{PAGE.relative_to(ROOT)}, README.md: from {path.name}")


if __name__ == "__main__":
    main()

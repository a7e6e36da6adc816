"""docs/measured_gpu.md and the GPU table in the README, from the newest file that bench/gpu_check.py wrote.

`python -m bench.report.measured_gpu` writes them. The page is measured_gpu.md, beside this file. In it, each {group} is
replaced by the figures of that group, and each other {name} by a fact of the run. Floors are computed here, from the
rates of the run. If the time ended before a group or its peers were timed, the figures of the previous check are used,
with a mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cmab_kernels.measure import readable

from ..devices import device, measure_on
from ..floors import Rates, floors, rounded
from ..gpu import timings
from ..provenance import ROOT
from ..runs import AUTO, DEFINITION, is_ours
from ..scans.case import IN_TF32, Case
from ..scans.plain_attention import stores_scores
from . import measured_gpu_facts as of_run
from .marks import Marks

RESULTS = ROOT / "bench" / "results"
HEADLINE = Marks(ROOT / "README.md", "GPU table")
PAGE = ROOT / "docs" / "measured_gpu.md"
TEMPLATE = Path(__file__).with_suffix(".md")
EARLIER = "†"
"""The mark of figures that were timed in the previous check, and not in turn with the others."""
CAPTURED_APART = ", not captured"
"""Last part of the keys of rows that the page does not show: the same calls from Python."""
TF32 = "; tf32"
"""Last part of a place for the figures of float32 that may be multiplied in tf32, for both implementations."""
OVER_KEYS = ("latent_attention", "projected_attention_state", "nn.MultiheadAttention")
"""Operators for which no library has a fast float32 kernel, so plain torch is the peer there."""

SHORTEST = 1e-6
"""A floor of fewer seconds is shorter than any launch, so no share of it is shown."""

Row = Mapping[str, Any]
PLACE = re.compile(r"\{([^}]+)\}")


def newest() -> Path:
    """The newest check."""
    return _by_day()[-1]


def _by_day() -> list[Path]:
    return sorted(RESULTS.glob("gpu_check_*_????-??-??.json"), key=lambda path: path.stem[-10:])


def page(path: Path) -> str:
    """The text of docs/measured_gpu.md."""
    check, before = json.loads(path.read_text()), _before(path)
    table = Table(check, before, cases())
    known = of_run.facts(check, path.name) | {"earlier": _of_earlier(before)}
    lines = (filled(line, table, known) for line in TEMPLATE.read_text().splitlines())
    return "\n".join(line for line in lines if line is not None) + "\n"


def _before(path: Path) -> Mapping[str, Any] | None:
    """The check of the day before that of a file, with the additional timings of an earlier run of that day."""
    older = [other for other in _by_day() if other.stem[-10:] < path.stem[-10:]]
    if not older:
        return None
    check, earlier = json.loads(older[-1].read_text()), older[-1].with_name(f"{older[-1].stem}_earlier.json")
    if earlier.exists():
        check["sections"] |= {
            f"earlier {name}": section for name, section in json.loads(earlier.read_text())["sections"].items()
        }
    return check


def _of_earlier(before: Mapping[str, Any] | None) -> str:
    if before is None:
        return ""
    machine = before["machine"]
    return (
        f"{EARLIER}: timed on {machine['date'][:10]}, on an {machine['gpu']}, near commit {machine['commit'][:7]}; "
        "not timed again since then."
    )


def cases() -> dict[str, Case]:
    """Group -> the timed case."""
    measured = device()
    measure_on("cuda")
    try:
        return {case.name: case for case in timings.all_cases()}
    finally:
        measure_on(measured)


def headline(text: str) -> str:
    """The table under the page's first second-level heading, without that heading."""
    return text.split("\n## ")[1].partition("\n")[2].strip()


def timed(check: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Group -> its rows, with a time or a problem."""
    groups: dict[str, list[Row]] = {}
    for section in check["sections"].values():
        for row in section["rows"]:
            if "group" in row and not row["key"].endswith(CAPTURED_APART):
                groups.setdefault(row["group"], []).append(row)
    return groups


def with_earlier(groups: Mapping[str, list[Row]], before: Mapping[str, Any] | None) -> dict[str, list[Row]]:
    """The groups. Groups without a peer get the peers of the previous check, and groups that only the previous check
    has are added; figures from it are marked."""
    earlier = (
        {name: [{**row, "earlier": EARLIER} for row in rows] for name, rows in timed(before).items()} if before else {}
    )
    alone = {name: rows for name, rows in earlier.items() if name not in groups}
    both = {
        name: rows if any(map(_is_peer, rows)) else [*rows, *filter(_is_peer, earlier.get(name, []))]
        for name, rows in groups.items()
    }
    return both | alone


def _is_peer(row: Row) -> bool:
    return not is_ours(row["implementation"]) and row["implementation"] != DEFINITION


def rates(check: Mapping[str, Any]) -> Rates:
    """The rates of the run."""
    return Rates(**next(row["rates"] for row in check["sections"]["timings"]["rows"] if "rates" in row))


class Table:
    """The cells of a run's groups."""

    def __init__(self, check: Mapping[str, Any], before: Mapping[str, Any] | None, cases: Mapping[str, Case]) -> None:
        self.groups, self.rates, self.cases = with_earlier(timed(check), before), rates(check), cases

    def cells(self, place: str) -> str:
        """The cells of a group; empty if ours was not timed."""
        group, tf32 = place.removesuffix(TF32), place.endswith(TF32)
        rows = [row for row in self.groups.get(group, ()) if (IN_TF32 in row["implementation"]) == tf32]
        ours = [row for row in rows if is_ours(row["implementation"])]
        auto = [row for row in ours if row["implementation"] == AUTO]
        mine = next(iter(auto or ours), None)  # what a call without `impl` takes
        if mine is None:
            return ""
        if "seconds" not in mine:
            return f"not compared | | {mine['problem']} | | "
        rest = f"{_figures(mine)}{mine.get('earlier', '')} | {{}} | {self._share(group, mine, tf32)}"
        peers = [row for row in rows if _is_peer(row)]
        if not is_fair(mine, peers):
            return f"no fair peer measured | | {rest.format('')}"
        peer = min((row for row in peers if "seconds" in row), key=_median, default=None)
        if peer is None:
            return f"{'none was right' if peers else 'not timed'} | | {rest.format('')}"
        other = " (computes something else)" if peer["implementation"] in self.cases[group].others else ""
        ratio = f"**{_median(mine) / _median(peer):.2g}**"
        return f"{peer['implementation']}{peer.get('earlier', '')}{other} | {_figures(peer)} | {rest.format(ratio)}"

    def _share(self, group: str, mine: Row, tf32: bool) -> str:
        work = self.cases[group].work
        least = floors(rounded(work) if tf32 else work, self.rates) if work else None
        return f"{least.seconds / _median(mine):.0%} ({least.bound})" if least and least.seconds > SHORTEST else ""


def is_fair(mine: Row, peers: Sequence[Row]) -> bool:
    """False if plain torch, which stores the scores, was not timed, and nothing else is fast there."""
    wanted = mine["scan"] in OVER_KEYS and "float32" in mine["group"]
    return not wanted or any(stores_scores(peer["implementation"]) for peer in peers)


def filled(line: str, table: Table, known: Mapping[str, str]) -> str | None:
    """A line with its figures, or None if its group has no figures."""
    for place in PLACE.findall(line):
        if place not in known and not table.cells(place):
            return None
        line = line.replace(f"{{{place}}}", known[place] if place in known else table.cells(place))
    return line


def _median(row: Row) -> float:
    return row["seconds"][0]


def _figures(row: Row) -> str:
    return f"{readable(_median(row))}, {(row['extra_memory'] - row['result_memory']) / 2**20:+.1f} MiB"


def main() -> None:
    path = newest()
    text = page(path)
    PAGE.write_text(text)
    HEADLINE.write(headline(text))
    print(f"{PAGE.relative_to(ROOT)}, README.md: from {path.name}")


if __name__ == "__main__":
    main()

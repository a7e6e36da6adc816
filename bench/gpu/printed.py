"""The printed table: correctness, speed compared with floor and peers, gains of tuning, and what was not run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from cmab_kernels.measure import readable

from .results import Report
from .sections import Outcome, Row, Section

MOST_WRONG = 20
"""The number of rows of a section that are printed in full; the file has all rows."""
MOST_KERNELS = 6
"""The number of kernels of a call that are printed: those that take longest."""


def table(report: Report, sections: Mapping[str, Section]) -> str:
    return "\n".join(
        [
            ", ".join(f"{name} {value}" for name, value in report.machine.items() if name != "kernels"),
            *_judged(report, sections),
            *_passed_over(report),
            *_timed(report, sections),
            *_tuned(report),
            *_left(report, sections),
        ]
    )


def _judged(report: Report, sections: Mapping[str, Section]) -> Iterator[str]:
    for name, outcome in report.outcomes.items():
        wrong = [row for row in outcome.rows if not row.get("ok", True)]
        if sections[name].judged:
            yield f"{name}: {len(outcome.rows) - len(wrong)} of {outcome.listed} right{_state(outcome)}"
        yield from _faults(wrong)


def _faults(wrong: list[Row]) -> Iterator[str]:
    """Failed rows sorted by their cause, and the other rows in full."""
    off = [row for row in wrong if "problem" not in row]
    for problem, keys in _grouped(wrong, "problem").items():
        yield f"  WRONG, {problem}: {'; '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
    yield from (f"  WRONG {json.dumps(row, ensure_ascii=False)}" for row in off[:MOST_WRONG])
    if len(off) > MOST_WRONG:
        yield f"  and {len(off) - MOST_WRONG} more"


def _grouped(rows: list[Row], name: str) -> dict[str, list[str]]:
    """The values of rows under `name` -> their keys."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if name in row:
            groups.setdefault(row[name], []).append(row["key"])
    return groups


def _state(outcome: Outcome) -> str:
    return "" if outcome.complete else f", incomplete: {outcome.problem or 'cut off'}"


def _passed_over(report: Report) -> Iterator[str]:
    """One line for each reason."""
    rows = [row for outcome in report.outcomes.values() for row in outcome.rows]
    for reason, keys in _grouped(rows, "passed over").items():
        yield f"skipped, {len(keys)} row{'s' if len(keys) > 1 else ''}: {reason}"


def _timed(report: Report, sections: Mapping[str, Section]) -> Iterator[str]:
    """Sections of figures, case by case, with the fastest first."""
    for name, outcome in report.outcomes.items():
        if sections[name].judged:
            continue
        yield f"{name}{_state(outcome)}{''.join(f', {what} {value}' for what, value in outcome.state.items())}"
        groups: dict[str, list[Row]] = {}
        for row in outcome.rows:
            groups.setdefault(row.get("group", ""), []).append(row)
        for group, rows in groups.items():
            yield f"  {group}"
            yield from map(
                _figures, sorted(rows, key=lambda row: row["seconds"][0] if "seconds" in row else float("inf"))
            )


def _figures(row: Row) -> str:
    if "rates" in row:
        rates = {
            **row["rates"]["matrix"],
            "exponentials": row["rates"]["exponentials"],
            "memory": row["rates"]["memory"],
        }
        return "  measured, T/s: " + ", ".join(f"{name} {rate / 1e12:.2f}" for name, rate in rates.items())
    name = row.get("key", "").partition("; ")[2] or row["key"]
    if "kernels" in row:
        spent = [
            f"{kernel} {us:.1f} us" + (f" in {count:g}" if count != 1 else "")
            for kernel, (count, us) in row["kernels"].items()
        ]
        return f"    {row['key']}: {'; '.join(spent[:MOST_KERNELS])}"
    if "seconds" not in row:
        return f"    {name}: {row.get('problem', '')}"
    median, low, high = row["seconds"]
    parts = [f"    {name:40} {readable(median):>8} +-{(high - low) / median / 2:4.0%}"]
    if "floor" in row:
        parts.append(f"floor {readable(row['floor'])} ({row['bound']}), {row['floor'] / median:.0%} of it")
    if "speed_up" in row:
        parts.append(f"{row['speed_up'][0]:.2f} times ours")
    parts.append(f"{(row['extra_memory'] - row['result_memory']) / 2**20:+.1f} MiB")
    parts.append(f"error {row['error']:.0e}")
    return "  ".join(parts)


def _tuned(report: Report) -> Iterator[str]:
    rows = report.rows("tune")
    written = [row for row in rows if row.get("written")]
    if rows:
        yield f"tuning: {len(written)} of {len(rows)} block sizes are better than the built-in ones"
    for row in sorted(written, key=lambda row: -row["gain"]):
        yield (
            f"  {row['key']:40} {row['built-in']} -> {row['tiles']}: {row['gain']:.1%} faster, noise {row['noise']:.1%}"
        )


def _left(report: Report, sections: Mapping[str, Section]) -> Iterator[str]:
    absent = [name for name in sections if name not in report.outcomes]
    if absent:
        yield f"not run yet: {', '.join(absent)}"

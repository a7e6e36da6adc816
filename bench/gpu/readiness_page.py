"""docs/gpu_readiness.md, from the record: the text is readiness.md, beside this file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .readiness_amd import ARCH
from .readiness_model import CHIPS

Row = dict[str, Any]

TEXT = Path(__file__).with_name("readiness.md")

UNITS = {
    "issue": "issue of instructions",
    "matrix": "matrix units",
    "special": "special functions",
    "fp32": "float32 units",
    "fp64": "float64 units",
    "multiply": "integer multiplies",
    "alu": "integer units",
    "shared": "shared memory",
    "memory": "memory",
    "exponentials": "exponentials",
}
"""What may bound a kernel, or a floor, in words."""

COUNTED = ("matrix", "special", "fp32", "fp64", "multiply", "alu", "shared", "shuffle", "global", "tensor", "barrier")


def page(content: Row) -> str:
    rows, amd = ([row for row in content["rows"] if (row["arch"] == ARCH) == theirs] for theirs in (False, True))
    summaries, kernels = _by("operator", content["operators"]), _by("kernel", rows)
    return TEXT.read_text().format(
        problems=_problems([*rows, *amd]),
        operators="".join(f"## {name}\n\n{_summary(found)}\n\n" for name, found in summaries.items()),
        chips="\n".join(map(_chip, CHIPS)),
        amd=_table(("kernel", "case", "registers", "spilled", "LDS KiB", "waves", "matrix"), map(_amd_line, amd)),
        compilers=", ".join(sorted({row["compiler"] for row in rows if "compiler" in row})),
        kernels="\n\n".join(_details(name, found) for name, found in kernels.items()),
    )


def _by(field: str, rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by the first word of a field: the second and later launches of a kernel in one call are numbered."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row[field].split()[0] if field == "kernel" else row[field], []).append(row)
    return found


def _problems(rows: Sequence[Row]) -> str:
    lines = [f"- `{row['kernel']}` on {row['arch']}, {row['case']}: {row['problem']}\n" for row in rows if "problem" in row]
    return f"## Without figures\n\n{''.join(lines)}\n" if lines else ""


def _chip(capability: int) -> str:
    chip = CHIPS[capability]
    return (
        f"- {chip.name} (sm_{capability}): {chip.multiprocessors} multiprocessors at {chip.clock / 1e9:.2f} GHz, "
        f"{chip.memory / 1e12:.1f} TB/s; flops of the matrix units a clock and multiprocessor: "
        f"{', '.join(f'{flops:,} {kind}' for kind, flops in chip.flops.items())}."
    )


def _summary(rows: Sequence[Row]) -> str:
    head = ("pass", "shape", "operands", "GPU", "implied", "bound by", "floor", "bound by", "share of the floor", "worst `local`")
    return _table(head, map(_summary_line, rows))


def _summary_line(row: Row) -> tuple[str, ...]:
    names = row["pass"], row["shape"], row["dtype"], row["chip"]
    if "problem" in row:
        return (*names, row["problem"], *["-"] * 5)
    worst = f"{row['local']} (`{row['worst']}`)" if row["local"] else "0"
    if "implied" not in row:
        return (*names, "a launch and its barriers", *["-"] * 4, worst)
    kernel = f"{UNITS[row['bound']]} of `{row['slowest']}`"
    share = f"{row['floor'] / row['implied']:.0%}"
    return (*names, _time(row["implied"]), kernel, _time(row["floor"]), UNITS[row["floor_bound"]], share, worst)


def _amd_line(row: Row) -> tuple[str, ...]:
    if "problem" in row:
        return f"`{row['kernel']}`", row["case"], row["problem"], *["-"] * 4
    figures = (str(row[name]) for name in ("registers", "spilled"))
    return f"`{row['kernel']}`", row["case"], *figures, f"{row['shared'] / 1024:.1f}", str(row["warps"]), str(row["matrix"])


def _details(kernel: str, rows: Sequence[Row]) -> str:
    sound = [row for row in rows if "problem" not in row]
    units = [unit for unit in COUNTED if any(unit in row["counts"] for row in sound)]
    per = ", ".join(dict.fromkeys(row["per"] for row in sound))
    head = ["case", "sm", "registers", "shared KiB", "local", "warps", "blocks", "occupancy", "limit", "all", *units, "matrix flops"]
    lines = []
    for row in rows:
        launch = row["kernel"].partition(" ")[2]
        case = f"{row['pass']}, {row['shape']}, {row['dtype']}{f', launch {launch}' if launch else ''}"
        names = (case, row["arch"].removeprefix("sm_"))
        if "problem" in row:
            lines.append((*names, row["problem"], *["-"] * (len(head) - 3)))
            continue
        local = f"{row['local']} ({row['spilled']} bytes)" if "spilled" in row else str(row["local"])
        held = f"{row['blocks']}", f"{row['occupancy']:.0%}", row["limit"]
        counts = [_count(row["counts"].get(unit, 0.0)) for unit in units]
        flops = ", ".join(f"{flops:.4g} {kind}" for kind, flops in row["flops"].items()) or "0"
        figures = f"{row['registers']}", f"{row['shared'] / 1024:.1f}", local, f"{row['warps']}", *held
        lines.append((*names, *figures, _count(row["total"]), *counts, flops))
    return f"### `{kernel}`\n\nInstructions per {per}.\n\n{_table(head, lines)}"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def _count(x: float) -> str:
    return f"{x:.3g}" if x else "0"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"

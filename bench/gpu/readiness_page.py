"""docs/gpu_readiness.md, from the record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .readiness_cases import LEFT_OUT
from .readiness_model import CHIPS

Row = dict[str, Any]

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

INTRODUCTION = """# GPU readiness

What every GPU kernel of this package compiles to, and the time that its instructions take at the least: **implied by the compiled code, not
measured**. No GPU was used. Written by `python -m bench.gpu.readiness --write`; bench/tests/test_readiness.py refuses what makes it worse.

For each operator: the implied time on three GPUs, the unit that it waits for by count, the floor (what any implementation needs, by
[bench/floors.py](../bench/floors.py), at the same public rates), its share of the implied time (the most that this code can reach), and the
instructions to local memory of its worst kernel: values that did not fit in registers. Why a kernel has no figures stands in its place.
"""

LIMITS = """## What the model says, and what it does not

- A kernel's time is that of the unit that its main loop keeps busiest, as if that unit never waited: instructions of the loop x passes
  through it / what all multiprocessors take in a second. Or that of its memory traffic, each byte once, if that is longer. Kernels of an
  operator follow one another, and their times are added.
- It knows no latencies, no waiting at barriers or for loads, no bank conflicts, no cache, no unit that is idle while another works, no last
  wave that fills half a GPU, no launches, and nothing outside the main loop. Real times are longer: it is a bound for this code, as the
  floor is one for all code. Where little runs at once (occupancy, small batches) it is far off.
- A loop counts as it stands in the machine code: what is predicated off counts, and so does what one warp does for all. Branches that
  are taken once in many passes count by how often (sums that go to float64 every 512 keys).
- Occupancy follows the rules of NVIDIA's calculator: registers in units of 256 a warp, 1 KiB of shared memory reserved for each
  block, 64 warps and 32 blocks; on sm_100 the 512 columns of tensor memory too.
- Rates a clock and multiprocessor are those of the CUDA C++ Programming Guide: 4 instructions issued; 16 lanes of special functions and
  of conversions between types; 128 of float32 (64 on sm_80); 64 of float64 (32); 64 each of integers and of integer multiplies; 128 bytes
  of shared memory (256 of a wide load, whose lanes may share what they read) or one shuffle.
  Where it says nothing of sm_100, that is taken to be as sm_90. Matrix products on sm_90 and sm_100 that run as HMMA, which these chips
  take more slowly than their own instructions, count at the full rate.

{chips}

{left_out}

## Figures of the kernels

Of each block: registers of a thread, shared memory, warps, blocks that a multiprocessor holds, occupancy and what limits it; `local`,
instructions to local memory anywhere (of nvcc's kernels the spilled bytes after it). Then the main loop: instructions of a thread by unit
for each score (or whatever `per` says), and flops of the matrix units. `special`: exponentials, reciprocals, conversions of one number;
`multiply`: integers; `alu`: integers, logic, comparisons, maxima; `tensor`: tensor memory; `barrier`: also jumps.
"""


def page(content: Row) -> str:
    rows, operators = content["rows"], content["operators"]
    parts = [INTRODUCTION, *_problems(rows)]
    for operator in dict.fromkeys(row["operator"] for row in operators):
        parts.append(f"## {operator}\n\n{_summary([row for row in operators if row['operator'] == operator])}\n")
    parts.append(LIMITS.format(chips=_chips(), left_out=LEFT_OUT))
    compilers = ", ".join(sorted({row["compiler"] for row in rows if "compiler" in row}))
    parts.append(f"Compiled by {compilers}.\n")
    for kernel in dict.fromkeys(row["kernel"].split()[0] for row in rows):
        parts.append(_details(kernel, [row for row in rows if row["kernel"].split()[0] == kernel]))
    return "\n".join(parts)


def _problems(rows: Sequence[Row]) -> list[str]:
    lines = [f"- `{row['kernel']}` on {row['arch']}, {row['case']}: {row['problem']}" for row in rows if "problem" in row]
    return ["## Without figures\n", *lines, ""] if lines else []


def _chips() -> str:
    lines = [
        f"- {chip.name} (sm_{capability}): {chip.multiprocessors} multiprocessors at {chip.clock / 1e9:.2f} GHz, "
        f"{chip.memory / 1e12:.1f} TB/s; flops of the matrix units a clock and multiprocessor: "
        f"{', '.join(f'{flops:,} {kind}' for kind, flops in chip.flops.items())}."
        for capability, chip in CHIPS.items()
    ]
    return "\n".join(lines) + "\n\nPublic figures (SXM); the clock is what the dense matrix rates imply. `half`: float16 and bfloat16."


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


def _details(kernel: str, rows: Sequence[Row]) -> str:
    sound = [row for row in rows if "problem" not in row]
    units = [unit for unit in COUNTED if any(unit in row["counts"] for row in sound)]
    per = ", ".join(dict.fromkeys(row["per"] for row in sound))
    head = ["case", "sm", "registers", "shared KiB", "local", "warps", "blocks", "occupancy", "limit", "all", *units, "matrix flops"]
    lines = []
    for row in rows:
        launch = row["kernel"].partition(" ")[2]  # the second and later launches of a kernel in one call are numbered
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
    return f"### `{kernel}`\n\nInstructions per {per}.\n\n{_table(head, lines)}\n"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def _count(x: float) -> str:
    return f"{x:.3g}" if x else "0"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"

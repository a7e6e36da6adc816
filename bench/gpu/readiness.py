"""GPU readiness without a GPU: what every kernel compiles to for six compute capabilities and gfx942, and the time that this implies.

`python -m bench.gpu.readiness` compiles all and says what has become worse than bench/results/gpu_readiness.json, exit code 1 if anything
has; `--kernels _forward _merge` only these. `--write` records what it finds there, and docs/gpu_readiness.md from it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import triton

from bench.floors import floor
from bench.provenance import ROOT
from bench.runs import write_json
from cmab_kernels.testing.cubin import Launch, machine_code

from . import readiness_amd as amd
from . import readiness_cuda as cuda
from .readiness_cases import WHOLE, Case, cases
from .readiness_model import CHIPS, WARP, occupancy, seconds
from .readiness_page import page
from .readiness_passes import PASSES, MultiplyAdds, Pass, counted
from .readiness_sass import Code, Counts

RESULTS = ROOT / "bench" / "results" / "gpu_readiness.json"
PAGE = ROOT / "docs" / "gpu_readiness.md"
FORMAT = 1
LIMIT = 240.0
"""Seconds for one kernel; what takes longer is a row that says so."""

COMPILER = f"triton {triton.__version__}"

Row = dict[str, Any]
Key = tuple[str, str, str]


def key_of(row: Row) -> Key:
    return row["case"], row["kernel"], row["arch"]


# ---- one kernel


def of_launch(launch: Launch, folder: Path, capability: int) -> Row:
    """The row of a launch, compiled now by Triton."""
    made = machine_code(launch, capability, folder)
    code = Code(made.sass, made.warps)
    counts, passing = counted(code, PASSES[launch.kernel.__name__](launch))
    held = occupancy(capability, made.registers, made.shared, made.warps, made.tensor_columns)
    if held.blocks == 0:
        raise ValueError(f"a multiprocessor has not enough {held.limit} for one block: it cannot be launched")
    return {
        **{"registers": made.registers, "shared": made.shared, "warps": made.warps},
        **_figures(code, counts, passing, capability),
        **{"blocks": held.blocks, "occupancy": held.share, "limit": held.limit},
    }


def of_nvcc(case: Case, one: cuda.Compiled, text: str) -> Row:
    """The row of a kernel that nvcc has compiled into the package."""
    kernel, code = cuda.KERNELS[one.kernel], Code(text, cuda.WARPS)
    counts, passing = counted(code, MultiplyAdds(kernel.multiply_adds, case.work.bytes if case.work else 0.0))
    shared = kernel.shared(8 if one.dtype == "float64" else 4)
    held = occupancy(one.capability, one.registers, shared, cuda.WARPS)
    return {
        **_heading(case, one.kernel, f"sm_{one.capability}"),
        "compiler": cuda.compiler(),
        **{"registers": one.registers, "spilled": one.spilled, "shared": shared, "warps": cuda.WARPS},
        **_figures(code, counts, passing, one.capability),
        **{"blocks": held.blocks, "occupancy": held.share, "limit": held.limit},
    }


def _heading(case: Case, kernel: str, arch: str) -> Row:
    names = {"case": case.name, "operator": case.operator, "pass": case.passes, "shape": case.shape}
    return names | {"dtype": case.precision, "width": case.width, "kernel": kernel, "arch": arch}


def _figures(code: Code, counts: Counts, passing: Pass, capability: int) -> Row:
    """`local`: instructions to local memory, anywhere. The others are of the main loop."""
    each = code.warps * WARP / passing.elements
    return {
        "local": sum(instruction.base in ("LDL", "STL") for instruction in code.instructions),
        "instructions": len(code.instructions),
        "per": passing.per,
        "counts": {unit: _rounded(count * each) for unit, count in sorted(counts.instructions.items())},
        "total": _rounded(counts.total * each),
        "flops": {kind: _rounded(flops / passing.elements) for kind, flops in counts.flops.items()},
        "seconds": {
            unit: _rounded(time)
            for unit, time in seconds(CHIPS[capability], counts, code.warps, passing.passes, passing.moved).items()
            if passing.passes
        },
    }


def _rounded(x: float) -> float:
    return float(f"{x:.4g}")


# ---- each in a child process, which may hang


def rows(wanted: Sequence[str], say: Callable[[str], None]) -> Iterator[Row]:
    """Rows of the kernels that are wanted, or of all: those of Triton on each GPU, then those of nvcc."""
    for case in cases():
        for arch, (capability, row) in targets(case).items():
            for label, launch in case.launches(capability).items():
                if wanted and launch.kernel.__name__ not in wanted:
                    continue
                start = time.perf_counter()
                made = in_child(partial(row, launch), LIMIT)
                say(f"{label} {arch}, {case.name}: {made.get('problem', 'done')}, {time.perf_counter() - start:.1f} s")
                yield _heading(case, label, arch) | {"compiler": COMPILER} | made
    compiled = [one for one in cuda.compiled() if not wanted or one.kernel in wanted]
    if compiled:
        say("CUDA kernels of csrc")
        texts = cuda.disassembled()
        yield from (of_nvcc(cuda.case(one.kernel, one.dtype), one, texts[one.mangled, one.target]) for one in compiled)


def targets(case: Case) -> dict[str, tuple[int, Callable[..., Row]]]:
    """What a case is compiled for: the capability whose tiles it takes there, and what makes a row of a launch."""
    chips = {f"sm_{number}": (number, partial(of_launch, capability=number)) for number in CHIPS if case.everywhere or number in WHOLE}
    return chips | ({amd.ARCH: (amd.TILES, amd.of_launch)} if case.everywhere else {})


def launched() -> set[Key]:
    """The keys of the rows that a whole record has."""
    by_nvcc = {(case.name, name, f"sm_{number}") for name in cuda.KERNELS for case in cuda.cases_of(name) for number in CHIPS}
    by_triton = (
        (case.name, label, arch)
        for case in cases()
        for arch, (capability, _) in targets(case).items()
        for label in case.launches(capability)
    )
    return by_nvcc.union(by_triton)


def in_child(work: Callable[[Path], Row], limit: float) -> Row:
    """What `work(folder)` gives, or a row with its problem."""
    with tempfile.TemporaryDirectory() as folder:
        here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=_send, args=(there, work, Path(folder)))
        child.start()
        there.close()
        try:
            return here.recv() if here.poll(limit) else {"problem": f"not compiled within {limit:.0f} s"}
        except EOFError:
            child.join()
            return {"problem": f"the compiler ended its process with {child.exitcode}"}
        finally:
            child.kill()
            child.join()


def _send(there: Connection, work: Callable[[Path], Row], folder: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a compiler that gives up prints all of its program
    try:
        there.send(work(folder))
    except Exception as error:
        there.send({"problem": str(error).strip().split("\n")[0] or type(error).__name__})


# ---- operators


def operators(found: Sequence[Row]) -> list[Row]:
    """A row for each case on each chip: the time of its kernels one after the other, beside the floor."""
    works = {case.name: case.work for case in [*cases(), *cuda.cases()]}
    summed = []
    for name in dict.fromkeys(row["case"] for row in found):
        for capability, chip in CHIPS.items():
            own = [row for row in found if row["case"] == name and row["arch"] == f"sm_{capability}"]
            if not own:
                continue
            row = {key: own[0][key] for key in ("case", "operator", "pass", "shape", "dtype", "width", "arch")}
            if problems := [f"{one['kernel']}: {one['problem']}" for one in own if "problem" in one]:
                summed.append(row | {"chip": chip.name, "problem": "; ".join(problems)})
                continue
            row |= {"chip": chip.name, "local": max(one["local"] for one in own), "worst": max(own, key=lambda one: one["local"])["kernel"]}
            if work := works[name]:
                least = floor(work, chip.rates())
                slowest = max(own, key=_implied)
                implied = sum(map(_implied, own))
                bound = max(slowest["seconds"], key=slowest["seconds"].get)
                row |= {"implied": _rounded(implied), "bound": bound, "slowest": slowest["kernel"]}
                row |= {"floor": _rounded(least.seconds), "floor_bound": least.bound}
            summed.append(row)
    return summed


def _implied(row: Row) -> float:
    return float(max(row["seconds"].values()))


# ---- what has become worse

MORE_REGISTERS = 8
SLOWER = 0.03
"""The share by which instructions, and the time that they imply, may grow."""


def regressions(before: Row, after: Row) -> list[str]:
    """Which figures of one kernel have become worse: what each was, and what it is."""
    if "problem" in after:
        return [] if "problem" in before else [f"it compiled, and now: {after['problem']}"]
    if "problem" in before:
        return []
    allowed = {
        "registers": before["registers"] + MORE_REGISTERS,
        "local": before.get("local", 0),
        "spilled": before.get("spilled", 0),
        "total": before.get("total", 0) * (1 + SLOWER),
    }
    named = {"registers": "registers", "local": "instructions to local memory", "spilled": "spilled values or bytes"}
    named["total"] = f"instructions per {before.get('per')}"
    worse = [f"{named[name]} {before.get(name, 0)} -> {after[name]}" for name, most in allowed.items() if after.get(name, 0) > most]
    if after.get("occupancy", 0) < before.get("occupancy", 0):
        worse.append(f"occupancy {before['occupancy']:.3f} -> {after['occupancy']:.3f}")
    if before.get("seconds") and _implied(after) > (1 + SLOWER) * _implied(before):
        worse.append(f"implied time {_implied(before) * 1e6:.4g} us -> {_implied(after) * 1e6:.4g} us")
    return worse


def complaints(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """One line for each kernel that has become worse. What another compiler made is not compared."""
    known = {key_of(row): row for row in before}
    lines = []
    for row in after:
        recorded_row = known.get(key_of(row))
        worse = ["it is not recorded"] if recorded_row is None else regressions(recorded_row, row) if comparable(recorded_row, row) else []
        if worse:
            again = f"python -m bench.gpu.readiness --kernels {row['kernel'].split()[0]} --write"
            lines.append(f"{row['kernel']} {row['arch']}, {row['case']}: {'; '.join(worse)}. If that is meant: {again}")
    return lines


def comparable(before: Row, after: Row) -> bool:
    return bool(before["compiler"] == after["compiler"])


# ---- the command


def recorded() -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(RESULTS.read_text())
        found = content["cmab_kernels_readiness"]
    except (ValueError, KeyError, TypeError):
        found = None
    if found != FORMAT:
        raise SystemExit(
            f"{RESULTS}: not a record of format {FORMAT}; remove it, and write it anew with python -m bench.gpu.readiness --write"
        )
    return content


def content_of(found: Sequence[Row]) -> dict[str, Any]:
    return {"cmab_kernels_readiness": FORMAT, "rows": list(found), "operators": operators(found)}


def record(content: dict[str, Any]) -> None:
    write_json(RESULTS, content)
    PAGE.write_text(page(content))


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    every = sorted({*PASSES, *cuda.KERNELS})
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.readiness", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kernels", nargs="+", default=[], metavar="KERNEL", choices=every, help=f"only these: {', '.join(every)}")
    parser.add_argument("--write", action="store_true", help="record the figures, and write the page from them")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    wanted = _arguments(given)
    torch.set_num_threads(1)
    before = recorded()["rows"] if RESULTS.exists() else []
    found = list(rows(wanted.kernels, lambda line: print(line, file=sys.stderr, flush=True)))
    known = {key_of(row): row for row in before}
    worse = complaints(before, found) if before else []
    print(*worse, f"{len(found)} kernels, {len(worse)} worse than recorded", sep="\n")
    if others := sum(key_of(row) in known and not comparable(known[key_of(row)], row) for row in found):
        print(f"{others} of them not compared: they were recorded with another compiler")
    if not wanted.write:
        return 1 if worse else 0
    anew, still = {key_of(row): row for row in found}, launched()
    kept = [anew.pop(key_of(row), row) for row in before if key_of(row) in still] if wanted.kernels else []
    content = content_of([*kept, *anew.values()])
    record(content)
    print(f"written: {RESULTS.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m cmab_kernels info`: versions, native extensions, hardware, and the implementation of each operator."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from . import __version__
from .runtime.backends import OPERATORS, explain
from .runtime.extension import build_report, load

_CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve")


def report() -> str:
    """Describe this installation as a page of text.

    The sections are versions, the native extension, the CUDA kernels, the processor, the GPU, and the implementation
    that `auto` takes for each operator. Footnotes say why other implementations cannot run.
    """
    sections = {
        "Versions": _versions(),
        "Native extension": _extension(),
        "CUDA kernels": _cuda_kernels(),
        "Processor": processor(),
        "GPU": _gpu(),
        "Implementations": _implementations(),
    }
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items())


def _columns(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield the rows as lines of left-aligned columns. Each column is two characters wider than its longest cell."""
    cells = list(rows)
    widths = [max(map(len, column)) + 2 for column in zip(*cells, strict=True)]
    for row in cells:
        yield "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _versions() -> Iterator[str]:
    yield from _columns(
        [
            ("cmab_kernels", __version__),
            ("python", f"{platform.python_version()} on {platform.platform()}"),
            *((package, _installed(package)) for package in ("torch", "triton", "numpy")),
        ]
    )


def _installed(package: str) -> str:
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else "not installed"


def _extension() -> Iterator[str]:
    build = build_report()
    if not build["built"]:
        yield f"not built: {build['reason']}"
        yield "with a C++17 compiler (g++ or clang++), reinstall; CMAB_KERNELS_BUILD=1 makes a failed build an error"
        return
    yield f"built by {build['compiler']} for {', '.join(map(str, build['targets']))}"
    try:
        yield f"runs {load().instruction_set()} on this processor"
    except ImportError as error:
        yield f"cannot be loaded: {error}; reinstall with this Python"
    except RuntimeError as error:  # the environment requests instructions that this processor does not have
        yield str(error)


def _cuda_kernels() -> Iterator[str]:
    build = build_report()["cuda"]
    if not build["built"]:
        yield f"not built: {build['reason']}"
        yield "with nvcc in CUDA_HOME or on the PATH, reinstall with CMAB_KERNELS_CUDA=1; no GPU is needed for that"
        return
    yield f"built by {build['compiler']} for {', '.join(build['targets'])}"
    spilled = sum(kernel["stores"] + kernel["loads"] for kernel in build["kernels"])
    most = max(kernel["registers"] for kernel in build["kernels"])
    yield f"{len(build['kernels'])} kernels of up to {most} registers, {spilled} bytes spilled"


def processor() -> Iterator[str]:
    """Yield the name of the processor with the number of threads, and then its features."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = dict(part.split(":", 1) for part in reversed(lines) if ":" in part)
    fields = {name.strip(): text.strip() for name, text in fields.items()}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    threads = torch.get_num_threads()
    yield (
        f"{fields.get('model name', platform.processor() or platform.machine())}, {threads} "
        f"thread{'' if threads == 1 else 's'}"
    )
    yield " ".join(flag for flag in _CPU_FEATURES if flag in flags) or "features unknown"


def _gpu() -> Iterator[str]:
    if not torch.cuda.is_available():
        yield "none that torch can use"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        size = f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB"
        yield f"{index}: {properties.name}, sm_{properties.major}{properties.minor}, {size}"


def _implementations() -> Iterator[str]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    notes: dict[str, int] = {}
    yield from _columns(
        [
            _choice(operator, operator_set, device, notes)
            for operator, operator_set in OPERATORS.items()
            for device in devices
        ]
    )
    yield from (f"[{number}] {reason}" for reason, number in notes.items())


def _choice(operator: str, operator_set: str, device: str, notes: dict[str, int]) -> tuple[str, str, str, str]:
    """Return a row: operator, device, the implementation that "auto" takes there, and the implementations that cannot
    run.

    Each implementation that cannot run has the number of its reason. A new reason is added to `notes` under the next
    number.
    """
    rows = explain(operator, *_sample(operator_set, device))
    taken = next(row.impl for row in rows if row.usable)
    others = ", ".join(f"{row.impl} [{notes.setdefault(row.reason, len(notes) + 1)}]" for row in rows if not row.usable)
    return operator, device, f"auto = {taken}", f"not {others}" if others else ""


def _sample(operator_set: str, device: str) -> tuple[torch.Tensor, ...]:
    """Return small float32 inputs for the operators of a set.

    Solves get a system and its right-hand sides. Projected attention gets a query, inputs and two weights. All other
    operators get a query, a key and a value.
    """
    if operator_set == "intention.solve":
        return torch.zeros(1, 16, 16, device=device), torch.zeros(1, 16, 16, device=device)
    if operator_set == "attention.projected":
        square = torch.zeros(16, 16, device=device)
        return square[None], square[None], square, square
    rows = torch.zeros(1, 1, 1, 16, device=device)
    return rows, rows, rows

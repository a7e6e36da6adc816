"""Measurements for the demo and the benchmarks: the time of competing calls, and peak memory.

On a GPU, time is measured with events and memory is the allocator's peak. On a CPU, memory is the rise of the peak
resident set size in a separate process. That process first builds the inputs and makes a small call, so that inputs,
libraries and thread pools do not count.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Task = Callable[[], Iterable[Tensor]]
"""A function whose memory is measured. It returns the tensors that it made."""


class Peak(NamedTuple):
    """The memory that a task took, in bytes."""

    extra: int
    """The peak of memory beyond the inputs. It includes intermediates and results."""
    results: int
    """The size of the tensors that the task returned. Every implementation needs this memory."""


def interleave(
    calls: Mapping[str, Callable[[], Any]], rounds: int, device: str = "cpu", repeats: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Measure every call once in each of `rounds` rounds, in a rotating order; return `rounds` samples of each.

    Samples are in seconds. The rotation lets a change of clock frequency, or other load on the machine, affect all
    calls. A sample is the mean of `repeats[name]` consecutive calls (default: 1). There is no warm-up, so make each
    call once before.

    >>> calls = {"one": lambda: torch.zeros(10), "other": lambda: torch.ones(10)}
    >>> samples = cmab_kernels.measure.interleave(calls, rounds=3)
    >>> {name: len(seconds) for name, seconds in samples.items()}
    {'one': 3, 'other': 3}
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        for name in order:
            samples[name].append(seconds(calls[name], device, (repeats or {}).get(name, 1)))
        order = order[1:] + order[:1]
    return samples


def seconds(call: Callable[[], Any], device: str = "cpu", repeats: int = 1) -> float:
    """Return the seconds per call, as the mean of `repeats` consecutive calls. The time to free results is included."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return (_gpu_seconds if torch.device(device).type == "cuda" else _cpu_seconds)(call, repeats) / repeats
    finally:
        if collecting:
            gc.enable()


def _cpu_seconds(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in itertools.repeat(None, repeats):
        call()
    return time.perf_counter() - start


def _gpu_seconds(call: Callable[[], Any], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in itertools.repeat(None, repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def peak_memory(
    prepare: Callable[..., Task], *arguments: Any, warm_up: tuple[Any, ...], device: str = "cpu", limit: float = 120.0
) -> Peak:
    """Return the most memory that `prepare(*arguments)()` holds at once, beyond the memory that `prepare` allocated.

    `prepare` must be picklable: a function of a module. It returns a task, which returns its results.
    `prepare(*warm_up)()` is a small task of the same kind. On Linux the measurement is accurate to about 0.3 MiB, the
    kernel's granularity. Where the high-water mark cannot be reset (macOS), the result is a lower bound. On a CPU, a
    `TimeoutError` is raised after `limit` seconds, and a `RuntimeError` if the task failed or the process died.
    """
    if torch.device(device).type == "cuda":
        _hold_results(prepare(*warm_up))
        return _gpu_peak(prepare(*arguments))
    context: Any = multiprocessing.get_context(
        "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    )
    if sys.platform != "win32":
        # The modules are imported once, before child processes are forked.
        context.set_forkserver_preload(["torch", "cmab_kernels", prepare.__module__])
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(
        target=_measure_in_child, args=(sender, prepare, arguments, warm_up, torch.get_num_threads())
    )
    child.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            raise TimeoutError(f"not done after {limit:g} s")
        answer = receiver.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"the process died with exit code {child.exitcode}: out of memory?") from None
    finally:
        child.kill()
        child.join()
    if isinstance(answer, Exception):
        raise answer
    return Peak(*answer)


def readable(seconds: float) -> str:
    """Return a duration as text with three significant digits and a unit: s, ms or us.

    >>> cmab_kernels.measure.readable(0.01234)
    '12.3 ms'
    """
    unit, scale = next((u, s) for u, s in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if seconds >= s or u == "us")
    return f"{seconds / scale:.3g} {unit}"


def available_memory(device: str = "cpu") -> float:
    """Return the bytes of free memory on the device, or infinity if the system does not report them."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info()[0]
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    return min(int(found[1]) * 1024 if found else float("inf"), _left_in_container())


def _left_in_container() -> float:
    """Return the bytes left before the process reaches the memory limit of its control group; infinity without one."""
    group = Path("/sys/fs/cgroup")
    try:
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # the file does not exist, or holds "max"
        return float("inf")


def _gpu_peak(task: Task) -> Peak:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = _hold_results(task)
    torch.cuda.synchronize()
    return Peak(torch.cuda.max_memory_allocated() - before, results)


def _measure_in_child(
    answer: Connection, prepare: Callable[..., Task], arguments: tuple, warm_up: tuple, threads: int
) -> None:
    try:
        torch.set_num_threads(threads)
        _hold_results(prepare(*warm_up))
        task = prepare(*arguments)
        _return_free_memory()
        before = _reset_high_water()
        results = _hold_results(task)
        answer.send((max(_high_water() - before, 0), results))
    except Exception as error:
        answer.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _hold_results(task: Task) -> int:
    """Run the task, and return the bytes of its results. All results are alive when the task ends."""
    return sum(result.nbytes for result in task())


def _return_free_memory() -> None:
    """Return freed memory to the system. Otherwise the task would reuse it, and its peak would look smaller."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _reset_high_water() -> int:
    """Lower the high-water mark to the current resident size, if the system allows it. Return the mark in bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _high_water()


def _high_water() -> int:
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    if found:
        return int(found[1]) * 1024
    import resource  # some systems without /proc do not have this module

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

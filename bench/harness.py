"""What is common to all benchmarks: the implementations of a case take turns, and a speed counts only with a right result."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from cmab_kernels.measure import Task, available_memory, interleave, peak_memory

from .floors import Work, floor
from .rates import rates_of

ERROR_BOUND = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Relative RMS error of a result beyond which it is wrong, and has no speed. One key of 100,000 left out makes 2e-3."""

KERNELS = {"cpu": ("native",), "cuda": ("triton", "cuda")}
"""Implementations of this package by the device that they run on."""

COLD_BYTES = 2**28
"""Calls go round copies of the inputs of this size in all, so that a cache does not pass for memory."""

SAMPLE_SECONDS = 2e-3
"""A sample is the mean of as many calls as take this long, or of one."""

TIME_LIMIT = 60.0
"""Seconds for a first call, in a process of its own: peers have been seen to hang."""


_device = "cpu"


COMPILED = ", compiled"
"""Ends the names of what `torch.compile` made."""


class Case(Protocol):
    """One operation at one shape: what is the same for all rows of a group."""

    quick: bool
    dtype: torch.dtype
    threads: int | None
    """None: as many as the run has."""
    baselines: tuple[str, ...]
    """Ratios are to the fastest of these implementations."""
    others: tuple[str, ...]
    """Implementations that compute something else: shown for comparison, with no share of the floor."""

    def __str__(self) -> str: ...

    @property
    def scan(self) -> str:
        """The public operator, or the module, that is measured."""

    @property
    def parameters(self) -> Mapping[str, int | str]:
        """The sizes and choices that matter to the operator, by the letters of the formulas: a plot goes along one of them."""

    @property
    def work(self) -> Work | None:
        """What the result cannot be had without, of one step where a call does several; None where no floor means anything."""

    @property
    def implementations(self) -> Mapping[str, Callable[[Any], Sequence[Tensor]]]:
        """name -> function of the inputs that returns its results."""

    def inputs(self, seed: int) -> Any:
        """A tuple with the tensors that the implementations take."""

    def oracle(self, inputs: Any) -> Mapping[str, Sequence[Tensor]]:
        """name -> the results in float64, by other means."""

    def small(self) -> Case:
        """The same on little data: it starts thread pools and loads libraries."""

    def refusal(self, implementation: str) -> str | None:
        """Why an implementation cannot be measured here; None when it can."""


@dataclass
class Row:
    """What was measured of one implementation of a case; `problem` says why there is nothing, and is an error if `wrong`."""

    samples: list[float] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    wrong: bool = False


def device() -> str:
    """That is measured."""
    return _device


def measure_on(device: str) -> None:
    """Not torch's default device: that is a mode, through which every call would go."""
    global _device
    _device = device


def generator(seed: int) -> torch.Generator:
    """For `normal`: the same numbers on every device."""
    return torch.Generator("cpu").manual_seed(seed)


def normal(random: torch.Generator, *shape: int) -> Tensor:
    """On the device that is measured."""
    return torch.randn(*shape, generator=random, device="cpu").to(device())


def ours() -> tuple[str, ...]:
    """The kernels for the device that is measured, and their definition."""
    return (*KERNELS[device()], "reference")


def is_ours(implementation: str) -> bool:
    """A kernel or a module of this package; the definition is none."""
    kernels = {name for names in KERNELS.values() for name in names}
    return implementation.split(",")[0] in kernels or implementation.startswith("cmab_kernels")


def measure(case: Case, names: Iterable[str], budget: float) -> dict[str, Row]:
    """Each implementation of `case`: memory, result and FLOPs one by one, then time with all of them in turn for about `budget` seconds."""
    inputs = case.inputs(seed=0)
    expected = case.oracle(inputs)
    with threads(case.threads):
        rows = {name: _examine(case, name, inputs, expected[name]) for name in names}
        sound = {name: row for name, row in rows.items() if not row.problem}
        if sound:
            _time(case, sound, [inputs, *(case.inputs(seed) for seed in range(1, _copies(inputs)))], budget)
            _compare(case, sound)
    return rows


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many of torch and of this package, here and in the process that measures memory; None: as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _examine(case: Case, name: str, inputs: Any, expected: Sequence[Tensor]) -> Row:
    """All but the time."""
    if reason := case.refusal(name):
        return Row(problem=reason)
    try:
        before = case if name.endswith(COMPILED) else case.small()  # what compiles for a shape must have done so
        peak = peak_memory(prepare, case, name, warm_up=(before, name), device=device(), limit=TIME_LIMIT)
        results, flops = _results(case, name, inputs)
    except Exception as error:  # a peer that cannot run a shape, or hangs, is no fault of ours
        reason, at_fault = str(error).strip().partition("\n")[0], name in ours() or is_ours(name)
        return Row(problem=f"failed: {reason}" if at_fault else reason, wrong=at_fault)
    error = relative_error(results, expected)
    if not error <= ERROR_BOUND[case.dtype]:
        return Row(problem=f"wrong: relative RMS error {error:.1e}, allowed {ERROR_BOUND[case.dtype]:.0e}", wrong=True)
    moved = sum(tensor.nbytes for tensor in (*inputs, *results))
    memory = {"extra_memory": peak.extra, "result_memory": peak.results}
    counts = {"flops": flops // steps_of(case, name), "bytes": moved // steps_of(case, name)}
    return Row(info=memory | counts | {"error": error, "threads": torch.get_num_threads()})


def steps_of(case: Case, name: str) -> int:
    """Of one call: time and FLOPs are of a single step where a case has a mapping `steps` that says how many an implementation does."""
    return getattr(case, "steps", {}).get(name, 1)


def prepare(case: Case, name: str) -> Task:
    """A case as a task whose memory can be measured in a process of its own."""
    return partial(case.implementations[name], case.inputs(seed=0))


def _results(case: Case, name: str, inputs: Any) -> tuple[Sequence[Tensor], int]:
    """And the operations; the counter cannot see into what is compiled, whose are those of `counted`."""
    run = partial(case.implementations[name], inputs)
    if not name.endswith(COMPILED):
        return count_flops(run)
    counted: Mapping[str, str] = case.counted  # of those alone that have such names
    return run(), count_flops(partial(case.implementations[counted[name]], inputs))[1]


def count_flops(run: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], int]:
    """Results, and the floating-point operations of the matrix products and factorisations that torch's counter sees."""
    with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counter:
        results = run()
    return results, counter.get_total_flops()


def _attention_flops(query: Any, key: Any, value: Any, *rest: Any, **_: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward_flops(dout: Any, query: Any, key: Any, value: Any, *rest: Any, **_: Any) -> int:
    return sdpa_backward_flop_count(dout, query, key, value)


def _cholesky_flops(matrix: Any, *rest: Any, **_: Any) -> int:
    return math.prod(matrix) * matrix[-1] // 3


def _cholesky_solve_flops(rhs: Any, factor: Any, *rest: Any, **_: Any) -> int:
    return 2 * math.prod(rhs) * factor[-1]


_UNCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    torch.ops.aten.linalg_cholesky_ex: _cholesky_flops,
    torch.ops.aten.cholesky_solve: _cholesky_solve_flops,
}
"""torch counts its attention on GPUs, but not that on CPUs, and no factorisation."""


def relative_error(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Of the worst result: RMS of the difference over RMS of what is expected; infinity for anything not finite or of another shape."""
    if [r.shape for r in results] != [e.shape for e in expected]:
        return math.inf
    errors = [float((r.double() - e).norm() / e.norm()) for r, e in zip(results, expected, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _copies(inputs: Iterable[Tensor]) -> int:
    size = sum(tensor.nbytes for tensor in inputs)
    return min(max(math.ceil(COLD_BYTES / size), 1), 8)


def _time(case: Case, rows: Mapping[str, Row], copies: Sequence[Any], budget: float) -> None:
    calls = {name: _rotating(case.implementations[name], copies) for name in rows}
    repeats, once, again = dict.fromkeys(calls, 1), {}, calls
    for _ in range(2):  # the first call of some microseconds takes ten times as long
        once |= {name: samples[-1] for name, samples in interleave(again, 2, device(), repeats).items()}
        repeats = {name: max(1, min(1000, int(SAMPLE_SECONDS / once[name]))) for name in calls}
        again = {name: call for name, call in calls.items() if repeats[name] > 1}
    rounds = max(5, min(50, int(budget / sum(repeats[name] * once[name] for name in calls))))
    for name, samples in interleave(calls, rounds, device(), repeats).items():
        rows[name].samples = [sample / steps_of(case, name) for sample in samples]
        rows[name].info |= {"repeats": repeats[name], "gflops": rows[name].info["flops"] / statistics.median(rows[name].samples) / 1e9}


def _compare(case: Case, rows: Mapping[str, Row]) -> None:
    """Each with its floor, and with the fastest of the baselines."""
    if case.work:
        least = floor(case.work, rates_of(device()))
        for name in rows.keys() - set(case.others):
            rows[name].info |= {
                "floor": least.seconds,
                "bound": least.bound,
                "share": least.seconds / statistics.median(rows[name].samples),
            }
    baseline = min(rows.keys() & set(case.baselines), key=lambda name: statistics.median(rows[name].samples), default=None)
    if baseline:
        for row in rows.values():
            row.info |= ratio(row.samples, rows[baseline].samples) | {"baseline": baseline}


def _rotating(implementation: Callable[[Any], Any], copies: Sequence[Any]) -> Callable[[], Any]:
    """Each call takes the next copy of the inputs."""
    following = itertools.cycle(copies)
    return lambda: implementation(next(following))


def ratio(samples: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Of the medians, and the quartiles of the ratios within each round, which are its spread."""
    within = sorted(a / b for a, b in zip(samples, baseline, strict=True))
    low, _, high = statistics.quantiles(within, n=4, method="inclusive")
    return {"ratio": statistics.median(samples) / statistics.median(baseline), "ratio_quartiles": [low, high]}


def lacking_memory(needed: float) -> str | None:
    """Says so when `needed` bytes would take more than half of what is left."""
    left = available_memory(device())
    return f"needs {needed / 2**30:.1f} GiB, of {left / 2**30:.1f} available" if needed > left / 2 else None

"""Measurement of a case on a CPU or a GPU: implementations are timed in turn, and a speed counts only with a right
result."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from cmab_kernels.measure import Task, interleave, peak_memory

from .devices import device, threads
from .floors import floors, rounded
from .load import others_since, usage
from .rates import rates_of
from .runs import FAULTS, Row, Spread, fastest, of_this_package
from .scans.case import COLD_BYTES, COMPILED, IN_TF32, Case, Implementation, Results

ERROR_BOUND = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The relative RMS error beyond which a result is wrong, and has no speed. If one key of 100,000 is left out, the error
is 2e-3."""

TF32_BOUND = 2e-3
"""The same limit if float32 is multiplied in tf32."""

SAMPLE_SECONDS = 2e-3
"""A sample is the mean of several calls that take this long together, or of one longer call."""

TIME_LIMIT = 60.0
"""Seconds for a first call, in a process of its own, because some peers hang."""


@dataclass
class Group:
    """The results of a case: rows of the right implementations, their samples, and why others have none."""

    rows: dict[str, Row] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    """Implementation -> seconds of a step, for each round."""
    problems: dict[str, str] = field(default_factory=dict)

    def at_fault(self, name: str) -> bool:
        """True if a problem is not due to the machine, an installation or a peer."""
        return self.problems[name].startswith(FAULTS)


class Problem(Exception):
    """Why an implementation has no row."""


def measure(
    case: Case, names: Iterable[str], budget: float, expected: Mapping[str, Results] | None = None, capture: bool = True
) -> Group:
    """Measures implementations of a case: first memory, result and FLOPs one by one, and then time, for about `budget`
    seconds.

    For time, all implementations are called in turn. `expected`: the results for the inputs of seed 0, if known.
    `capture`: on a GPU, time the replays of captured graphs.
    """
    if any(name.endswith(COMPILED) for name in case.implementations):
        torch.compiler.reset()  # torch compiles a function for eight shapes, also if they are of several cases
    inputs = case.inputs(0)
    expected = expected or case.expected(inputs)
    group, examined = Group(), {}
    with threads(case.threads):
        for name in names:
            try:
                examined[name] = examine(case, name, inputs, expected[name])
            except Problem as problem:
                group.problems[name] = str(problem)
        if examined:
            copies = [inputs, *(case.inputs(seed) for seed in range(1, _copies(inputs)))]
            calls = {
                name: timed_call(case.implementations[name], copies, capture and name not in case.uncaptured)
                for name in examined
            }
            before = usage()
            samples, repeats = take_samples(calls, budget)
            others = others_since(before)
            group.samples = {name: [sample / case.steps.get(name, 1) for sample in samples[name]] for name in calls}
            group.rows = {
                name: replace(row, others=others) for name, row in _rows(case, examined, group.samples, repeats).items()
            }
    return group


# ---- all but the time ------------------------------------------------------------------------------------------------


def examine(case: Case, name: str, inputs: Any, expected: Results) -> dict[str, Any]:
    """Memory, operations and error of an implementation, or a Problem."""
    if reason := case.refusal(name):
        raise Problem(reason)
    try:
        compiles = name.endswith(COMPILED) or device() == "cuda"  # for a shape, because the counter must have run
        before = case if compiles else case.small()
        peak = peak_memory(prepare, case, name, warm_up=(before, name), device=device(), limit=TIME_LIMIT)
        results, flops = _counted(case, name, inputs)
    except Exception as error:  # a peer may fail or hang for some shapes
        reason = str(error).strip().partition("\n")[0]
        raise Problem(f"failed: {reason}" if of_this_package(name) else reason) from None
    error, allowed = relative_error(results, expected), TF32_BOUND if IN_TF32 in name else ERROR_BOUND[case.dtype]
    if not error <= allowed:
        found = f"relative RMS error {error:.1e}, allowed {allowed:.0e}"
        raise Problem(f"wrong: {found}" if of_this_package(name) else f"its result is wrong here: {found}")
    steps, moved = case.steps.get(name, 1), sum(tensor.nbytes for tensor in (*inputs, *results))
    memory = {"extra_memory": peak.extra, "result_memory": peak.results}
    return memory | {"flops": flops // steps, "bytes": moved // steps, "error": error}


def prepare(case: Case, name: str) -> Task:
    """A task whose memory can be measured in a separate process."""
    return partial(case.implementations[name], case.inputs(0))


def _counted(case: Case, name: str, inputs: Any) -> tuple[Results, int]:
    """Results and operations.

    The counter cannot count in compiled code, so a function with the same products is counted instead.
    """
    run = partial(case.implementations[name], inputs)
    if not name.endswith(COMPILED):
        return count_flops(run)
    return run(), count_flops(partial(case.implementations[case.counted[name]], inputs))[1]


def count_flops(run: Callable[[], Results]) -> tuple[Results, int]:
    """Results,
    and the floating-point operations of the matrix products and factorisations that torch's counter sees."""
    counter = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED)
    counter.mod_tracker = _NoModules()
    with counter:
        results = run()
    return results, counter.get_total_flops()


class _NoModules(nullcontext[None]):
    """Replaces torch's tracker of modules,
    whose hooks fail if autograd goes through a module with a given parameter."""

    parents = frozenset({"Global"})


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
"""torch counts its attention on GPUs, but not its attention on CPUs, and no factorisations."""


def relative_error(results: Results, expected: Results) -> float:
    """RMS of the difference divided by the RMS of the expected result, for the worst result; infinity if a result is
    not finite or has another shape."""
    if [r.shape for r in results] != [e.shape for e in expected]:
        return math.inf
    errors = [float((r.double() - e).norm() / e.norm()) for r, e in zip(results, expected, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


# ---- time ------------------------------------------------------------------------------------------------------------


def _copies(inputs: Iterable[Tensor]) -> int:
    size = sum(tensor.nbytes for tensor in inputs)
    return min(max(math.ceil(COLD_BYTES / size), 1), 8)


def timed_call(implementation: Implementation, copies: Sequence[Any], capture: bool = True) -> Callable[[], Any]:
    """A call that takes the next copy of the inputs each time; on a GPU, the replay of a captured graph if possible."""
    calls: list[Callable[[], Any]] = [partial(implementation, inputs) for inputs in copies]
    if device() == "cuda" and capture:
        calls = replays(calls)
    following = itertools.cycle(calls)
    return lambda: next(following)()


def replays(calls: list[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """The replays of the calls as graphs, or the calls themselves if they cannot be captured, as for some peers."""
    try:
        return [captured(call) for call in calls]
    except RuntimeError:
        torch.cuda.synchronize()
        return calls


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The replay of a call. A first call on a side stream prepares compiled kernels and handles.

    A stream that continues replaces the tensors of its state, but the graph still reads their memory, so they are kept.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    read = [thing for thing in gc.get_objects() if type(thing) is Tensor and thing.is_cuda]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return partial(_replay, graph, read)


def _replay(graph: torch.cuda.CUDAGraph, read: list[Tensor]) -> None:
    graph.replay()


def take_samples(
    calls: Mapping[str, Callable[[], Any]], budget: float
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of a call, in rounds in which all calls alternate, for about `budget` seconds; and the number of calls
    per sample."""
    repeats, once, again = dict.fromkeys(calls, 1), {}, calls
    for _ in range(2):  # the first call of a function of some microseconds takes ten times as long
        once |= {name: samples[-1] for name, samples in interleave(again, 2, device(), repeats).items()}
        repeats = {name: max(1, min(1000, int(SAMPLE_SECONDS / once[name]))) for name in calls}
        again = {name: call for name, call in calls.items() if repeats[name] > 1}
    rounds = max(5, min(50, int(budget / sum(repeats[name] * once[name] for name in calls))))
    return interleave(calls, rounds, device(), repeats), repeats


def spread(samples: Sequence[float]) -> Spread:
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(statistics.median(samples), low, high)


def ratio(samples: Sequence[float], others: Sequence[float]) -> Spread:
    """The ratio of the medians, and the quartiles of the ratios within each round."""
    _, low, high = spread([a / b for a, b in zip(samples, others, strict=True)])
    return Spread(statistics.median(samples) / statistics.median(others), low, high)


def _rows(
    case: Case,
    examined: Mapping[str, dict[str, Any]],
    samples: Mapping[str, Sequence[float]],
    repeats: Mapping[str, int],
) -> dict[str, Row]:
    """The rows of a group, each compared with its floor, the fastest baseline, and our fastest kernel."""
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    baseline = min((name for name in case.baselines if name in medians), key=lambda name: medians[name], default=None)
    shared = {"group": case.name, "scan": case.scan, "baseline": baseline}
    rows = {}
    for name, found in examined.items():
        least = floors(rounded(case.work) if IN_TF32 in name else case.work, rates_of(device())) if case.work else None
        bounded = {"floor": least.seconds, "bound": least.bound} if least and name not in case.others else {}
        rows[name] = Row(
            implementation=name,
            parameters={**case.parameters, "threads": torch.get_num_threads()},
            seconds=spread(samples[name]),
            rounds=len(samples[name]),
            repeats=repeats[name],
            ratio=ratio(samples[name], samples[baseline]) if baseline else None,
            **shared,
            **found,
            **bounded,
        )
    return _beside_ours(rows, samples)


def _beside_ours(rows: dict[str, Row], samples: Mapping[str, Sequence[float]]) -> dict[str, Row]:
    """The rows with the speed-up of our fastest kernel over each peer."""
    ours = fastest(rows.values())
    if ours is None:
        return rows
    gains = {name: ratio(samples[name], samples[ours.implementation]) for name, row in rows.items() if row.peer}
    return {name: replace(row, speed_up=gains.get(name)) for name, row in rows.items()}

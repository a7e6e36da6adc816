"""`pytest bench [--quick] [--device cuda] [-k SCAN]`: the same cases under pytest-benchmark, with each row timed
separately.

`extra_info` has the memory, error, FLOPs and bytes of a step, the steps of a call, and the ratio to the fastest
baseline. In the runs of `python -m cmab_kernels bench`, the rows of a group are timed in turn, which makes their ratios
more constant, so those runs are committed and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from .devices import device, threads
from .harness import Problem, examine
from .runs import DEFINITION, FAULTS
from .scans import all_cases
from .scans.case import Case, Results

ROWS = [
    pytest.param(case, name, id=f"{case.scan}-{case}-{name}")
    for case in all_cases()
    for name in sorted(case.implementations, key=lambda name: name not in case.baselines)  # ratios are to earlier rows
    if name != DEFINITION
]
MEDIANS: dict[str, dict[str, float]] = {}


@lru_cache(maxsize=1)
def prepared(case: Case) -> tuple[Any, dict[str, Results]]:
    """Inputs and expected results of a case; the rows of a case come one after the other."""
    inputs = case.inputs(0)
    return inputs, case.expected(inputs)


def _finished(call: Callable[[Any], Any], inputs: Any) -> None:
    """Call, and wait for a GPU, because the host's clock does not include the work of a launch."""
    call(inputs)
    if device() == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize(("case", "name"), ROWS)
def bench_operator(case: Case, name: str, benchmark: BenchmarkFixture) -> None:
    inputs, expected = prepared(case)
    with threads(case.threads):
        try:
            benchmark.extra_info.update(examine(case, name, inputs, expected[name]), steps=case.steps.get(name, 1))
        except Problem as problem:
            benchmark.skipped = True
            (pytest.fail if str(problem).startswith(FAULTS) else pytest.skip)(str(problem))
        benchmark.group = case.name
        benchmark(_finished, case.implementations[name], inputs)
    if benchmark.disabled:  # --benchmark-disable, or workers of pytest-xdist
        return
    taken = MEDIANS.setdefault(case.name, {})
    taken[name] = benchmark.stats.stats.median / benchmark.extra_info["steps"]
    if beside := [taken[baseline] for baseline in case.baselines if baseline in taken]:
        benchmark.extra_info["ratio"] = taken[name] / min(beside)

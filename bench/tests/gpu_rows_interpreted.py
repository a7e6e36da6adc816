"""The GPU check's rows on the CPU: kernels in Triton's interpreter, and a clock of nobody's. Run by test_gpu_check_rows.py, as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import triton

from bench import harness, runs
from bench.floors import Rates
from bench.gpu import candidates, timings, tune
from bench.gpu.sections import Row, Task
from bench.scans import attention as scan
from bench.scans import nystrom as windows
from cmab_kernels.measure import Peak

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"
RATES = Rates(4e12, 4e12, {"float64": 6e13, "float32": 4e14, "bfloat16": 8e14, "float16": 8e14})


def made(tasks: list[Task]) -> dict[str, Row]:
    """The rows of tasks, as a worker makes them."""
    rows = {}
    for task in tasks:
        try:
            rows[task.key] = task.make()
        except Exception as error:
            rows[task.key] = {"problem": f"{type(error).__name__}: {error}", **({} if task.peer else {"ok": False})}
    return rows


def times() -> Any:
    """Kernels and peers of tiny cases on the CPU; a peer whose result is wrong, and one that is not installed."""
    wrong = scan.passes(lambda q, k, v: 3 * scan.naive_attention(q, k, v), 3, False)

    def cases() -> Any:
        tiny = scan.attention(1, 8, keys=40, latents=5)
        others = {"wrong": wrong, scan.FLASH: scan.passes(scan.flash_attention, 3, False)}
        yield replace(tiny, implementations={**tiny.implementations, **others})
        yield windows.pinv(5, 2)

    with (
        mock.patch.dict(runs.KERNELS, {"cpu": ("triton",)}),
        mock.patch.object(timings, "measure_on", lambda device: None),
        mock.patch.object(harness, "peak_memory", lambda *_, **__: Peak(0, 0)),
        mock.patch.object(harness, "rates_of", lambda device: RATES),
    ):
        return made(timings.of_cases(cases, "cuda"))


def tiles() -> Any:
    """A few candidates of each kernel on small shapes: those that are right are found so, and one that is off is not."""
    kernels = ("attention.forward", "intention.gram", "intention.apply", "nystrom.forward")
    every = [candidates.Target(kernel, "float32", 16) for kernel in kernels]
    tried = [(target, chosen) for target in every for chosen in candidates.candidates(target, torch.device("cpu"))[:2]]
    with (
        mock.patch.dict(candidates.LENGTHS, {"small": 60}),
        mock.patch.object(candidates, "SET", 30),
        mock.patch.object(candidates.Target, "latents", 20),
    ):
        rows = {tune._name(target, chosen): tune.check(target, chosen, "cpu") for target, chosen in tried}
        with mock.patch.object(tune, "relative_error", mock.Mock(side_effect=[1e-7, 1e-3])):
            wrong = tune.check(every[0], (16, 16, 4, 1), "cpu")
    return [rows, wrong]


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps(globals()[sys.argv[1]]()))

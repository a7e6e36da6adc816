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
from bench.gpu import candidates, nystrom_parity, parity, promises, repeats, ridge_parity, small_cases, timings, tune
from bench.gpu.problems import checked
from bench.gpu.sections import Row, Task
from bench.scans import attention as scan
from bench.scans import nystrom as windows
from cmab_kernels.attention.kernels import forward
from cmab_kernels.intention.kernels import sums
from cmab_kernels.intention.kernels.launch import Cut
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


def attention() -> Any:
    """Right kernels pass in every variant; a kernel whose lse is off by a little does not."""
    tiny = [parity.Problem("float32", 8, 8, latents=5, keys=70, variant=v) for v in ("plain", "mask", "packed", "state", "strided")]
    tiny += [parity.Problem(d, 9, 7, "ten times", latents=3, keys=33) for d in ("float64", "float16")]
    rows = [checked(parity.shares, problem, "cpu") for problem in tiny]
    with mock.patch.object(forward, "LN_2", forward.tl.constexpr(0.69)):
        wrong = checked(parity.shares, replace(tiny[0], dtype="float16"), "cpu")
    return [rows, wrong]


def intention() -> Any:
    """Right kernels pass; one that drops the last key does not; bits that change are seen."""
    tiny = [ridge_parity.Problem("triton", "float32", 9, 7, keys=70, variant=v) for v in ("plain", "masked", "strided", "huge")]
    tiny += [ridge_parity.Problem("triton", d, 5, 3, keys=33, variant="masked", exact=True) for d in ("float64", "float16")]
    rows = [checked(ridge_parity.shares, problem, "cpu") for problem in tiny]
    absent = checked(ridge_parity.shares, ridge_parity.Problem("cuda", "float32", 9, 7, keys=70), "cpu")
    with mock.patch.object(sums, "cut_keys", lambda keys, *_: Cut(1, keys - 1)):
        wrong = checked(ridge_parity.shares, tiny[0], "cpu")
    return [rows, absent, wrong]


def bits() -> Any:
    """Whether the bits of Intention and of the pseudo-inverse are the same again and alone; and those of something that changes."""
    found = []
    for call, given in (
        (repeats._ridge("triton", "cpu"), repeats._ridge_inputs(torch.float32, 4, 40, "cpu")),
        (repeats._pinv, (torch.randn(2, 3, 5, 5).softmax(-1),)),
    ):
        moved = [0]

        def restless(*inputs: Any, call: Any = call, moved: list[int] = moved) -> Any:
            moved[0] += 1
            return tuple(t + moved[0] for t in call(*inputs)[:1])

        found.append(
            [repeats.again(call, given, 2), repeats.alone(call, given), repeats.again(restless, given, 2), repeats.alone(restless, given)]
        )
    return found


def nystrom() -> Any:
    """Whole windows; solves, with the native kernel in the place of CUDA's."""
    windows = [nystrom_parity.Window("float32", 3, 9, 7, 13, "masked"), nystrom_parity.Window("float64", 3, 8, 8, 13, "given")]
    rows = [checked(nystrom_parity.window_shares, problem, "cpu") for problem in windows]
    systems = [
        ridge_parity.Solve(dtype, 16, 3, condition, 20, variant, "native")
        for dtype in ("float64", "float32")
        for condition, variant in ((10.0, "plain"), (1e4, "plain"), (10.0, "bad"), (10.0, "strided"))
    ]
    rows += [checked(ridge_parity.solve_shares, problem, "cpu") for problem in systems]
    with mock.patch.object(ridge_parity, "LIMIT", 1e-3):
        return [rows, checked(ridge_parity.solve_shares, systems[0], "cpu")]


def promised() -> Any:
    """Second order of everything that the interpreter runs; whole graphs are left to a GPU."""
    return made([task for task in promises.tasks("cpu", {}) if task.key.startswith("second order")])


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


def small() -> Any:
    """What a sanitizer looks on at."""
    return [small_cases.main([family, "--device", "cpu"]) for family in small_cases.FAMILIES]


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps(globals()[sys.argv[1]]()))

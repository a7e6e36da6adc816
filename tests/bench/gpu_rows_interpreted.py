"""The GPU check's rows on the CPU: kernels in Triton's interpreter, and a clock of nobody's. Run by test_gpu_check_rows.py, as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import triton

from bench.floors import Rates
from bench.gpu import (
    candidates,
    nystrom_timings,
    parity,
    promises,
    repeats,
    ridge_parity,
    ridge_timings,
    small_cases,
    solve_parity,
    timings,
    tune,
    window_parity,
)
from bench.gpu.peers import PEERS
from bench.gpu.sections import Row, Task
from cmab_kernels.attention.kernels import forward
from cmab_kernels.intention.kernels import sums
from cmab_kernels.intention.kernels.launch import Cut

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"
RATES = Rates(4e12, 4e12, {"float64": 6e13, "float32": 4e14, "bfloat16": 8e14, "float16": 8e14})


def made(tasks: list[Task]) -> dict[str, Row]:
    """As a worker makes them."""
    rows = {}
    for task in tasks:
        try:
            rows[task.key] = task.make()
        except Exception as error:
            rows[task.key] = {"problem": f"{type(error).__name__}: {error}", **({} if task.peer else {"ok": False})}
    return rows


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Nothing is captured, and nobody's memory is counted."""

    def samples_of(calls: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
        """Each is run; the first takes as long as two of the second."""
        for call in calls.values():
            call()
        return {name: [2e-6 / number, 2e-6 / number] for number, name in enumerate(calls, 1)}

    fakes = {"cold_copies": lambda size: 1, "memory_of": lambda call: 0, "measured_rates": lambda device: RATES}
    with contextlib.ExitStack() as stack:
        for module in (timings, ridge_timings, nystrom_timings):
            for name, fake in fakes.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, fake))
        stack.enter_context(mock.patch.object(timings, "captured", lambda call: call))
        stack.enter_context(mock.patch.object(timings, "samples_of", samples_of))
        stack.enter_context(mock.patch.object(torch.cuda, "synchronize", lambda: None))
        yield


def attention() -> Any:
    """Right kernels pass in every variant; a kernel whose lse is off by a little does not."""
    tiny = [parity.Problem("float32", 8, 8, latents=5, keys=70, variant=v) for v in ("plain", "mask", "packed", "state", "strided")]
    tiny += [parity.Problem(d, 9, 7, "ten times", latents=3, keys=33) for d in ("float64", "float16")]
    rows = [parity.check(problem, "cpu") for problem in tiny]
    with mock.patch.object(forward, "LN_2", forward.tl.constexpr(0.69)):
        wrong = parity.check(replace(tiny[0], dtype="float16"), "cpu")
    return [rows, wrong]


def intention() -> Any:
    """Right kernels pass; one that drops the last key does not; bits that change are seen."""
    tiny = [ridge_parity.Problem("triton", "float32", 9, 7, keys=70, variant=v) for v in ("plain", "masked", "strided", "huge")]
    tiny += [ridge_parity.Problem("triton", d, 5, 3, keys=33, variant="masked", exact=True) for d in ("float64", "float16")]
    rows = [ridge_parity.check(problem, "cpu") for problem in tiny]
    absent = ridge_parity.check(ridge_parity.Problem("cuda", "float32", 9, 7, keys=70), "cpu")
    with mock.patch.object(sums, "cut_keys", lambda keys, *_: Cut(1, keys - 1)):
        wrong = ridge_parity.check(tiny[0], "cpu")
    return [rows, absent, wrong]


def bits() -> Any:
    """Of Intention and of Nyström's pseudo-inverse: the same again and alone; and of something that changes."""
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
    windows = [window_parity.Problem("float32", 3, 9, 7, 13, "masked"), window_parity.Problem("float64", 3, 8, 8, 13, "given")]
    rows = [window_parity.check(problem, "cpu") for problem in windows]
    systems = [
        solve_parity.Problem(dtype, 16, 3, condition, 20, variant, "native")
        for dtype in ("float64", "float32")
        for condition, variant in ((10.0, "plain"), (1e4, "plain"), (10.0, "bad"), (10.0, "strided"))
    ]
    rows += [solve_parity.check(problem, "cpu") for problem in systems]
    with mock.patch.object(solve_parity, "LIMIT", 1e-3):
        return [rows, solve_parity.check(systems[0], "cpu")]


def promised() -> Any:
    """Second order of everything that the interpreter runs; whole graphs are left to a GPU."""
    return made([task for task in promises.tasks("cpu", {}) if task.key.startswith("second order")])


def times() -> Any:
    """Each row is made, peers and all; what is not installed or wrong says so."""
    tiny = timings.Shape("tiny", 1, 1, 5, 40, 8, "float32")
    backends = {name: make for name, make in PEERS.items() if name in ("torch math", "naive", "flash-attn")}

    def wrong() -> Callable[..., Any]:
        return lambda q, k, v: 3 * timings.ck.latent_attention(q, k, v, impl="reference")

    with on_cpu():
        rows = made(
            [*timings._tasks(tiny, timings._own(tiny), "cpu", False), *timings._tasks(tiny, {**backends, "wrong": wrong}, "cpu", True)]
        )
        with (
            mock.patch.object(ridge_timings, "SHAPES", (ridge_timings.Shape("tiny", 2, 40, 4),)),
            mock.patch.object(ridge_timings, "SYSTEMS", ((3, 4),)),
        ):
            ridge = made([task for task in ridge_timings.tasks("cpu", {}) if "compiled" not in task.key])
        windows = (nystrom_timings.Window(1, 1, 12, 3, 8), nystrom_timings.Matrices(2, 5))
        with mock.patch.object(nystrom_timings, "SHAPES", windows):
            nystrom_rows = made(nystrom_timings.tasks("cpu", {}))
    return [rows, ridge, nystrom_rows]


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
        with mock.patch.object(tune, "error", mock.Mock(side_effect=[1e-7, 1e-3])):
            wrong = tune.check(every[0], (16, 16, 4, 1), "cpu")
    return [rows, wrong]


def small() -> Any:
    """What a sanitizer looks on at."""
    return [small_cases.main([family, "--device", "cpu"]) for family in small_cases.FAMILIES]


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps(globals()[sys.argv[1]]()))

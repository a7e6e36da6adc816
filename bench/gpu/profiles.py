"""The GPU time of a call by kernel, from torch's profiler, for each timed case of "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from bench.devices import measure_on
from bench.runs import is_ours
from bench.scans.case import IN_TF32, Case

from .sections import Row, Task
from .timings import all_cases

CALLS = 5
"""The number of calls in the mean of a figure; a first call compiles the kernels."""


def tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    measure_on(device)
    return [Task(str(case), partial(profiled, case)) for case in all_cases()]


def profiled(case: Case) -> Row:
    """Kernel -> its number of launches in a call and their total microseconds, the longest first."""
    name = next(name for name in case.implementations if is_ours(name) and IN_TF32 not in name)
    call = partial(case.implementations[name], case.inputs(0))
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    events = [
        event for event in profiler.key_averages() if event.self_device_time_total and event.device_type.name == "CUDA"
    ]
    kernels = {
        event.key[:100]: [event.count / CALLS, round(event.self_device_time_total / CALLS, 2)] for event in events
    }
    return {"implementation": name, "kernels": dict(sorted(kernels.items(), key=lambda one: -one[1][1]))}

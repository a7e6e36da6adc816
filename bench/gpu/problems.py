"""What the checks share: problems with defaults, errors as shares of what is allowed, launches, and what cannot run on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.backends import OPERATORS
from cmab_kernels.testing import bound

from .sections import Row, Task

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Shares = dict[str, float]
"""Name of a result -> its worst error as a share of what it may be; above 1 it is wrong."""


def key_of(problem: Any) -> str:
    """What differs from the defaults of the problem's class."""
    return ", ".join(f"{f.name} {getattr(problem, f.name)}" for f in fields(problem) if getattr(problem, f.name) != f.default)


def parity_tasks(problems: Iterable[Any], shares: Callable[[Any, str], Shares], device: str, prefix: str = "") -> list[Task]:
    """A task for each problem, whose results `shares` judges."""
    return [Task(prefix + key_of(problem), partial(checked, shares, problem, device)) for problem in problems]


def checked(shares: Callable[[Any, str], Shares], problem: Any, device: str) -> Row:
    """The row of a problem; it says so where the implementation cannot run here, which is a fault unless it is one that must be built."""
    try:
        found = shares(problem, device)
    except NotHere as reason:
        return {**asdict(problem), "ok": problem.impl == "cuda", "passed over": str(reason)}
    return {**asdict(problem), "shares": found, "ok": all(share <= 1 for share in found.values())}


class NotHere(Exception):
    """An implementation cannot run on this machine."""


def worst(share: Tensor) -> float:
    """The largest element; infinity for NaN, 0 where there is none."""
    return float(share.nan_to_num(nan=math.inf).max()) if share.numel() else 0.0


def if_not(right: bool | Tensor) -> float:
    """The share of what is either right or wrong."""
    return 0.0 if right else math.inf


def sizes_of(rows: Tensor) -> Tensor:
    """The norm of each row, and at least a twentieth of the largest of its head: errors of tiny rows go by their neighbours."""
    norms = rows.norm(dim=-1)
    return norms.maximum(0.05 * norms.amax(-1, keepdim=True)).clamp(min=1e-300)


def row_shares(
    names: Sequence[str], ours: Sequence[Tensor], theirs: Sequence[Tensor], right: Sequence[Tensor], dtype: torch.dtype, score: float
) -> Shares:
    """The worst row of a result and of its gradients, which may be off by four times as much.

    Rows of a head share one pseudo-inverse, whose error all of them show: the error of the definition in the same precision (`theirs`) is
    the largest of a head's rows.
    """
    found = {}
    for name, mine, other, wanted in zip(names, ours, theirs, right, strict=True):
        size = sizes_of(wanted)
        error, own = ((t.double() - wanted).norm(dim=-1) / size for t in (mine, other))
        found[name] = worst(error / bound(dtype, score, own.amax(-1, keepdim=True), factor=4.0 if found else 1.0))
    return found


def why_not(operator: str, impl: str, device: str) -> str:
    """Why `impl` cannot run small float32 inputs here; empty where it can."""
    inputs = [torch.zeros(1, 1, 16, 16, device=device)] * (2 if OPERATORS[operator] == "intention.solve" else 3)
    (found,) = (one for one in ck.explain(operator, *inputs) if one.impl == impl)
    return "" if found.usable else found.reason


# ---- what a call does on the GPU


def launches(call: Callable[[], Any]) -> int:
    """The number of kernels and copies that run on the GPU in a call, which has been made once before."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def waits(call: Callable[[], Any]) -> bool:
    """True if a call waits for the device, once everything is compiled."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


@contextmanager
def side_stream() -> Iterator[None]:
    """Work in it runs on a stream of its own, which starts behind the current one and is waited for at the end."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()

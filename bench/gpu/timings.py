"""Our attention beside every other that there is, each shape beside its floor.

A row is one implementation of one pass at one shape. It is made in a process that can be stopped, and a peer's rounds take turns with
ours, so that the ratio between them does not hang on the clocks of the moment.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch
from torch import Tensor

import cmab_kernels as ck
from bench.floors import BYTES, Floor, attention_work, floor

from .graphs import Call, captured, cold_copies, in_turn, memory_of, ratios, samples_of, spread
from .peers import COMPILED, PEERS, Attention, ours
from .rates import allow_tf32, measured_rates
from .sections import Row, Task, first_line

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, keys, values, and the gradient of the output."""
PASSES = ("forward", "forward + backward")
SLOWEST = 2.0
"""Seconds; what takes longer once is not run again."""
WRONG = {"bfloat16": 2e-2, "float16": 2e-2, "float32": 2e-3}
"""Relative error beyond which there is no speed; tf32 stays below the last."""


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    heads: int
    latents: int
    keys: int
    width: int
    dtype: str = "bfloat16"

    @property
    def read(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.batch * self.heads * self.keys * self.width * BYTES[self.dtype]

    def floors(self, device: str) -> dict[str, tuple[float, str]]:
        """pass -> seconds, and what takes them."""
        rates, pairs = measured_rates(device), self.batch * self.heads * self.keys
        parts: list[Floor] = [
            floor(attention_work(pairs * self.latents, pairs, self.width, self.width, self.dtype, backward, "cuda"), rates)
            for backward in (False, True)
        ]
        return {PASSES[0]: (parts[0].seconds, parts[0].bound), PASSES[1]: (parts[0].seconds + parts[1].seconds, parts[0].bound)}


SHAPES = (
    Shape("4 heads of 16", 1, 4, 128, 10**6, 16),
    Shape("8 heads of 8", 1, 8, 128, 10**6, 8),
    Shape("1 head of 64", 1, 1, 128, 10**6, 64),
    Shape("8 heads of 64, 512 latents", 1, 8, 512, 10**6, 64),
    Shape("float32, 4 heads of 16", 1, 4, 128, 10**6, 16, "float32"),
    Shape("float16, 4 heads of 16", 1, 4, 128, 10**6, 16, "float16"),
    Shape("100 small sets, 4 heads of 16", 100, 4, 128, 197, 16),
)


def _own(shape: Shape) -> dict[str, Callable[[], Attention]]:
    return dict.fromkeys(("triton", "triton, tf32") if shape.dtype == "float32" else ("triton",), ours)


def tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    """What the floors are computed with, then all shapes of ours: they are what the check is for."""
    rates = Task("rates", lambda: {"rates": asdict(measured_rates(device))})
    of_ours = [task for shape in SHAPES for task in _tasks(shape, _own(shape), device, peer=False)]
    return [rates, *of_ours, *(task for shape in SHAPES for task in _tasks(shape, PEERS, device, peer=True))]


def tuned_tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    """Ours again, where something was tuned meanwhile."""
    if not any(row.get("written") for row in before.get("tune", [])):
        return []
    return [task for shape in SHAPES for task in _tasks(shape, _own(shape), device, peer=False)]


def compiled_tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    return [task for shape in SHAPES for task in _tasks(shape, COMPILED, device, peer=True)]


def _tasks(shape: Shape, makers: Mapping[str, Callable[[], Attention]], device: str, peer: bool) -> list[Task]:
    return [
        Task(f"{shape.name}; {pass_}; {name}", lambda name=name, make=make, pass_=pass_: measure(shape, pass_, name, make, device), peer)
        for name, make in makers.items()
        for pass_ in PASSES
    ]


def measure(shape: Shape, pass_: str, name: str, make: Callable[[], Attention], device: str) -> Row:
    """Time, memory and error; a wrong result has no speed, and is a fault if it is ours."""
    labels = {"shape": shape.name, "pass": pass_, "impl": name}
    tf32: AbstractContextManager[None] = allow_tf32(name.endswith("tf32")) if shape.dtype == "float32" else nullcontext()
    with tf32:
        attention = make()
        copies, wanted = _prepared(shape, device)
        calls = _calls(attention, copies, pass_)
        error = _error(calls[0](), wanted[pass_])
        if not error < WRONG[shape.dtype]:
            return {**labels, "ok": name not in _own(shape), "problem": f"wrong result: relative error {error:.1e}", "error": error}
        first = _seconds(calls[0])
        if first > SLOWEST:
            return {**labels, "problem": f"{first:.1f} s a call: not timed", "error": error}
        timed = timed_beside(calls, None if name in _own(shape) else _calls(ours(), copies, pass_))
        return {**labels, **timed, **beside_floor(timed["seconds"], *shape.floors(device)[pass_]), "error": error}


def timed_beside(calls: list[Call], own: list[Call] | None) -> Row:
    """Seconds, spread and memory; of a peer also its time as a multiple of ours in the same rounds."""
    memory = memory_of(calls[0])
    turns = {"it": _replays(calls), **({} if own is None else {"ours": _replays(own)})}
    samples = samples_of({name: in_turn(replays) for name, (replays, _) in turns.items()})
    row: Row = {
        "seconds": statistics.median(samples["it"]),
        "spread": spread(samples["it"]),
        "rounds": len(samples["it"]),
        "memory": memory,
    }
    if problem := turns["it"][1]:
        row["eager"] = problem
    return row if own is None else row | {"times ours": ratios(samples["it"], samples["ours"])}


def _replays(calls: list[Call]) -> tuple[list[Call], str]:
    """Of captured graphs; where a peer cannot be captured, the calls themselves, and why."""
    try:
        return [captured(call) for call in calls], ""
    except RuntimeError as error:
        torch.cuda.synchronize()
        return calls, first_line(error)


def beside_floor(seconds: float, least: float, bound: str) -> Row:
    return {"floor": least, "bound": bound, "share": least / seconds}


def _calls(attention: Attention, copies: list[Inputs], pass_: str) -> list[Callable[[], tuple[Tensor, ...]]]:
    if pass_ == PASSES[0]:
        return [lambda x=x: (attention(*(t.detach() for t in x[:3])),) for x in copies]
    return [lambda x=x: torch.autograd.grad(attention(*x[:3]), x[:3], x[3]) for x in copies]


def _error(results: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Relative, of the worst result."""
    return max(float((ours.double() - right).norm() / right.norm()) for ours, right in zip(results, wanted, strict=True))


@lru_cache(maxsize=1)
def _prepared(shape: Shape, device: str) -> tuple[list[Inputs], dict[str, tuple[Tensor, ...]]]:
    """Inputs, and the results for the first of them by pass. The rows of a shape follow each other."""
    copies = [_inputs(shape, seed, device) for seed in range(cold_copies(shape.read))]
    out, *grads = exact(copies[0])
    return copies, dict(zip(PASSES, ((out,), tuple(grads)), strict=True))


def exact(inputs: Inputs, most: int = 2**25) -> tuple[Tensor, ...]:
    """The output and the gradients in float64, over pieces of the keys: `most` scores at a time."""
    q, k, v, dout = (t.detach().double() for t in inputs)
    step = max(most // (q.shape[0] * q.shape[1] * q.shape[2]), 1)
    pieces = list(zip(k.split(step, 2), v.split(step, 2), strict=True))
    state = ck.merge_states(*(ck.attention_state(q, a, b, impl="reference") for a, b in pieces))
    scale, delta = q.shape[-1] ** -0.5, (dout * state.out).sum(-1, keepdim=True)
    dq, dkeys, dvalues = torch.zeros_like(q), [], []
    for a, b in pieces:
        weights = (scale * q @ a.mT - state.lse[..., None]).exp()
        slope = scale * weights * (dout @ b.mT - delta)
        dq += slope @ a
        dkeys.append(slope.mT @ q)
        dvalues.append(weights.mT @ dout)
    return state.out, dq, torch.cat(dkeys, 2), torch.cat(dvalues, 2)


def _inputs(shape: Shape, seed: int, device: str) -> Inputs:
    torch.manual_seed(seed)
    sizes = (shape.latents, shape.keys, shape.keys, shape.latents)
    q, k, v, dout = (
        torch.randn(shape.batch, shape.heads, n, shape.width, device=device).to(getattr(torch, shape.dtype)).requires_grad_() for n in sizes
    )
    return q, k, v, dout.detach()


def _seconds(call: Call) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start

"""Our kernels beside every attention that torch has, each shape beside its floor: replayed graphs, medians, inputs that no cache holds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import cmab_kernels as ck

from .floors import EXPONENTIALS_PER_CLOCK, Rates, Shape, backward_floor, forward_floor

SHAPES = (
    Shape("4 heads of 16", 1, 4, 128, 10**6, 16, "bfloat16", "bfloat16"),
    Shape("8 heads of 8", 1, 8, 128, 10**6, 8, "bfloat16", "bfloat16"),
    Shape("1 head of 64", 1, 1, 128, 10**6, 64, "bfloat16", "bfloat16"),
    Shape("8 heads of 64, 512 latents", 1, 8, 512, 10**6, 64, "bfloat16", "bfloat16"),
    Shape("float32, 4 heads of 16", 1, 4, 128, 10**6, 16, "float32", "tf32"),
    Shape("float16, 4 heads of 16", 1, 4, 128, 10**6, 16, "float16", "bfloat16"),
    Shape("100 small sets, 4 heads of 16", 100, 4, 128, 197, 16, "bfloat16", "bfloat16"),
)

SLOWEST = 2.0
"""Seconds; what takes longer once is not run again."""

Inputs = tuple[Tensor, Tensor, Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ck.latent_attention(q, k, v, impl="triton")


def _backend(backend: SDPBackend) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return attention


def _compiled_flex() -> Attention:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def implementations(dtype: str) -> dict[str, Callable[[], Attention]]:
    """name -> what makes the function; the slowest to prepare last. Another family brings a table like it."""
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    ours = ("triton", "triton, tf32") if dtype == "float32" else ("triton",)
    return {
        **{name: lambda: _ours for name in ours},
        **{f"torch {b.name.removesuffix('_ATTENTION').lower()}": lambda b=b: _backend(b) for b in backends},
        "torch flex": _compiled_flex,
    }


def measured_rates(device: str) -> Rates:
    """Copy bandwidth and matrix rates of this card on random data; exponentials from its clock."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    clock = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())["sm_clock_rate"] * 1e3
    source = torch.randn(2**28, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds_of([lambda: target.copy_(source)])
    matrix = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("tf32", torch.float32)):
        a, b = (torch.randn(8192, 8192, device=device, dtype=dtype) for _ in range(2))
        with _tf32(name == "tf32"):
            matrix[name] = 2 * 8192**3 / seconds_of([lambda a=a, b=b: a @ b])
    return Rates(EXPONENTIALS_PER_CLOCK * multiprocessors * clock, copy, matrix)


class _tf32:
    """Within it torch may multiply float32 as tf32, or may not."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.allowed else "highest")

    def __exit__(self, *exception: object) -> None:
        torch.set_float32_matmul_precision(self.before)


def seconds_of(calls: list[Callable[[], Any]], rounds: int = 30) -> float:
    """Median of one call: each is a captured graph, and these are replayed in turn, so that no input is still in the cache."""
    graphs = []
    for call in calls:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    samples = []
    for i in range(rounds + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graphs[i % len(graphs)].replay()
        stop.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(stop) * 1e-3)
    return statistics.median(samples[2:])


def _inputs(shape: Shape, seed: int, device: str) -> Inputs:
    torch.manual_seed(seed)
    sizes = (shape.latents, shape.keys, shape.keys)
    return tuple(
        torch.randn(shape.batch, shape.heads, n, shape.width, device=device).to(getattr(torch, shape.dtype)).requires_grad_() for n in sizes
    )


def _copies(shape: Shape, device: str) -> list[Inputs]:
    return [_inputs(shape, seed, device) for seed in range(l2_copies(2 * shape.bytes, device))]


def l2_copies(bytes_read: int, device: str) -> int:
    """How many inputs there must be, that one has left the cache when its turn comes."""
    return min(1 + 4 * torch.cuda.get_device_properties(device).L2_cache_size // bytes_read, 16)


def memory_of(call: Callable[[], Any]) -> int:
    """Bytes beyond what was there, at the peak, results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _first_call(call: Callable[[], Any]) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _measure(name: str, attention: Attention, copies: list[Inputs], wanted: Tensor, pass_: str) -> dict[str, Any]:
    tf32: AbstractContextManager[None] = _tf32(name.endswith("tf32")) if copies[0][0].dtype == torch.float32 else nullcontext()
    with tf32:
        douts = torch.randn_like(wanted).to(copies[0][0].dtype)

        def task(inputs: Inputs) -> Callable[[], Any]:
            if pass_ == "forward":
                return lambda: attention(*(t.detach() for t in inputs))
            return lambda: torch.autograd.grad(attention(*inputs), inputs, douts)

        error = float((attention(*copies[0]).detach().double() - wanted).norm() / wanted.norm())
        if not error < (2e-2 if copies[0][0].dtype != torch.float32 else 2e-3):
            return {"problem": f"wrong result: relative error {error:.1e}"}
        first = _first_call(task(copies[0]))
        if first > SLOWEST:
            return {"problem": f"{first:.1f} s a call: not timed", "error": error}
        memory = memory_of(task(copies[0]))
        return {"seconds": seconds_of([task(inputs) for inputs in copies]), "memory": memory, "error": error}


def _wanted(inputs: Inputs) -> Tensor:
    """The result in float64, over pieces of the keys."""
    q, k, v = (t.detach() for t in inputs)
    pieces = [
        ck.attention_state(q.double(), a.double(), b.double(), impl="reference")
        for a, b in zip(k.split(50_000, 2), v.split(50_000, 2), strict=True)
    ]
    return ck.merge_states(*pieces).out


def run(device: str) -> Iterator[dict[str, Any]]:
    rates = measured_rates(device)
    yield {"rates": {"exponentials": rates.exponentials, "copy": rates.copy, **rates.matrix}}
    for late in (False, True):  # what must be compiled first comes last of all, when the rest is written
        for shape in SHAPES:
            yield from _rows(shape, rates, device, late)


def _rows(shape: Shape, rates: Rates, device: str, late: bool) -> Iterator[dict[str, Any]]:
    copies = _copies(shape, device)
    wanted = _wanted(copies[0])
    floors = {"forward": forward_floor(shape, rates)}
    total = floors["forward"].seconds + backward_floor(shape, rates).seconds
    for name, make in implementations(shape.dtype).items():
        if (name == "torch flex") != late:
            continue
        for pass_ in ("forward", "forward + backward"):
            floor = floors["forward"].seconds if pass_ == "forward" else total
            row = {"shape": shape.name, "pass": pass_, "impl": name, "floor": floor, "bound": floors["forward"].bound}
            try:
                row |= _measure(name, make(), copies, wanted, pass_)
            except Exception as error:  # one that cannot run a shape says so in its row
                row["problem"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}"
                torch.cuda.synchronize()
            if "seconds" in row:
                row["share of floor"] = floor / row["seconds"]
            yield row

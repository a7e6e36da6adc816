"""Intention's sums, their gradients and the solution beside torch's own, each shape beside its floor: replayed graphs, medians."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cmab_kernels.backends import choose, implementation

from .floors import Rates, RidgeShape, ridge_backward_floor, ridge_floor
from .timings import l2_copies, measured_rates, memory_of, seconds_of

SHAPES = (
    RidgeShape("256 x (1,024 of 64)", 256, 1024, 64, "float32", "tf32"),
    RidgeShape("256 x (1,024 of 64), bf16", 256, 1024, 64, "bfloat16", "bfloat16"),
    RidgeShape("1 x (1e6 of 64)", 1, 10**6, 64, "float32", "tf32"),
    RidgeShape("1,024 x (256 of 16)", 1024, 256, 16, "float32", "tf32"),
)
ALPHA = 1.0


class Inputs(NamedTuple):
    key: Tensor
    value: Tensor
    dgram: Tensor
    dmoment: Tensor


class Passes(NamedTuple):
    """What an implementation makes of keys and values: the two sums, their gradients, and the solution with its info."""

    sums: Callable[[Inputs], Any]
    gradients: Callable[[Inputs], Any]
    solution: Callable[[Inputs], Any]


def ours(impl: str, sample: Tensor) -> Passes:
    module = implementation("ridge", choose("ridge", impl, sample, sample, sample))
    alpha = sample.new_full(sample.shape[:2], ALPHA, dtype=torch.float64)
    return Passes(
        lambda x: module.gram(x.key, x.value, None, None, (True, True), False),
        lambda x: module.gram_backward(x.dgram, x.dmoment, x.key, x.value, None, None, (True, True, False), False),
        lambda x: module.ridge_solve(x.key, x.value, None, None, alpha)[0],
    )


def torchs() -> Passes:
    """In the dtype of the inputs; the solution in float32."""

    def sums(x: Inputs) -> tuple[Tensor, Tensor]:
        return x.key.mT @ x.key, x.key.mT @ x.value

    def gradients(x: Inputs) -> tuple[Tensor, Tensor]:
        slope, dmoment = (x.dgram + x.dgram.mT).to(x.key.dtype), x.dmoment.to(x.key.dtype)
        return x.key @ slope + x.value @ dmoment.mT, x.key @ dmoment

    def solution(x: Inputs) -> Tensor:
        gram, moment = (t.float() for t in sums(x))
        system = gram + ALPHA * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        return torch.cholesky_solve(moment, torch.linalg.cholesky_ex(system)[0])

    return Passes(sums, gradients, solution)


def _inputs(shape: RidgeShape, seed: int, device: str) -> Inputs:
    torch.manual_seed(seed)
    dtype = getattr(torch, shape.dtype)
    key, value = (torch.randn(shape.batch, 1, shape.keys, shape.width, device=device).to(dtype) for _ in range(2))
    dgram, dmoment = (torch.randn(shape.batch, 1, shape.width, shape.width, device=device).double() for _ in range(2))
    return Inputs(key, value, dgram, dmoment)


def _wanted(x: Inputs) -> Tensor:
    """The solution in float64, summed over pieces of the keys."""
    pieces = list(zip(x.key.split(50_000, 2), x.value.split(50_000, 2), strict=True))
    gram = sum(k.double().mT @ k.double() for k, _ in pieces)
    moment = sum(k.double().mT @ v.double() for k, v in pieces)
    return torch.cholesky_solve(moment, torch.linalg.cholesky(gram + ALPHA * torch.eye(x.key.shape[-1], device=x.key.device)))


def _measure(run: Callable[[Inputs], Any], solution: Callable[[Inputs], Tensor], copies: list[Inputs], wanted: Tensor) -> dict[str, Any]:
    error = float((solution(copies[0]).double() - wanted).norm() / wanted.norm())
    if not error < 5e-2:
        return {"problem": f"wrong result: relative error {error:.1e}"}
    memory = memory_of(lambda: run(copies[0]))
    return {"seconds": seconds_of([lambda x=x: run(x) for x in copies]), "memory": memory, "error": error}


def run(device: str) -> Iterator[dict[str, Any]]:
    rates = measured_rates(device)
    yield {"rates": {"copy": rates.copy, **rates.matrix}}
    for shape in SHAPES:
        yield from rows(shape, rates, device)


def rows(shape: RidgeShape, rates: Rates, device: str) -> Iterator[dict[str, Any]]:
    copies = [_inputs(shape, seed, device) for seed in range(l2_copies(2 * shape.bytes, device))]
    wanted = _wanted(copies[0])
    floors = {"sums": ridge_floor(shape, rates), "gradients": ridge_backward_floor(shape, rates), "solution": ridge_floor(shape, rates)}
    makers = {"triton": lambda: ours("triton", copies[0].key), "cuda": lambda: ours("cuda", copies[0].key), "torch": torchs}
    for pass_, floor in floors.items():
        for name, make in makers.items():
            row = {"shape": shape.name, "pass": pass_, "impl": name, "floor": floor.seconds, "bound": floor.bound}
            try:
                passes = make()
                row |= _measure(getattr(passes, pass_), passes.solution, copies, wanted)
            except Exception as error:  # one that cannot run a shape, or cannot be captured, says so in its row
                row["problem"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}"
                torch.cuda.synchronize()
            if "seconds" in row:
                row["share of floor"] = floor.seconds / row["seconds"]
            yield row

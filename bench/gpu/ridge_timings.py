"""Intention's sums, their gradients, its solution and batches of solves beside torch's own and its compiled, each beside its floor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.floors import BYTES, Work, floor, ridge_work, solve_work
from cmab_kernels.backends import choose, implementation, kernel
from cmab_kernels.intention.api import solve_rows

from .graphs import cold_copies
from .rates import measured_rates
from .sections import Row, Task
from .timings import beside_floor, timed_beside
from .usable import why_not

ALPHA = 1.0
WRONG = 5e-2
"""Relative error beyond which there is no speed: bfloat16 sums, solved."""


@dataclass(frozen=True)
class Shape:
    """Sums over `keys` keys and values, both `width` wide."""

    name: str
    batch: int
    keys: int
    width: int
    dtype: str = "float32"

    @property
    def read(self) -> int:
        return 2 * self.batch * self.keys * self.width * BYTES[self.dtype]

    def work(self, pass_: str) -> Work:
        """A solution's few operations are small beside its sums'."""
        return ridge_work(self.batch * self.keys, self.width, self.width, self.dtype, pass_ == "gradients")


SHAPES = (
    Shape("256 x (1,024 of 64)", 256, 1024, 64),
    Shape("256 x (1,024 of 64), bf16", 256, 1024, 64, "bfloat16"),
    Shape("1 x (1e6 of 64)", 1, 10**6, 64),
    Shape("1,024 x (256 of 16)", 1024, 256, 16),
)
PASSES = ("sums", "gradients", "solution")


class Inputs(NamedTuple):
    key: Tensor
    value: Tensor
    dgram: Tensor
    dmoment: Tensor


class Passes(NamedTuple):
    """What an implementation makes of keys and values: the two sums, their gradients, and the solution."""

    sums: Callable[[Inputs], Any]
    gradients: Callable[[Inputs], Any]
    solution: Callable[[Inputs], Any]


def ours(impl: str, sample: Tensor) -> Passes:
    chosen = choose("intention", impl, sample, sample, sample)
    gram, gram_backward = (kernel("intention", chosen, name) for name in ("gram", "gram_backward"))
    alpha = sample.new_full(sample.shape[:2], ALPHA, dtype=torch.float64)
    return Passes(
        lambda x: gram(x.key, x.value, None, None, (True, True), False),
        lambda x: gram_backward(x.dgram, x.dmoment, x.key, x.value, None, None, (True, True, False), False),
        lambda x: solve_rows(x.key, x.value, None, None, alpha, chosen, "auto")[0],
    )


def _sums(x: Inputs) -> tuple[Tensor, Tensor]:
    return x.key.mT @ x.key, x.key.mT @ x.value


def _gradients(x: Inputs) -> tuple[Tensor, Tensor]:
    slope, dmoment = (x.dgram + x.dgram.mT).to(x.key.dtype), x.dmoment.to(x.key.dtype)
    return x.key @ slope + x.value @ dmoment.mT, x.key @ dmoment


def _solution(x: Inputs) -> Tensor:
    """In float32, by Cholesky: batched `linalg.solve`, `inv` and `lu` have been seen to hang."""
    gram, moment = (t.float() for t in _sums(x))
    system = gram + ALPHA * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return torch.cholesky_solve(moment, torch.linalg.cholesky_ex(system)[0])


MAKERS: dict[str, Callable[[Tensor], Passes]] = {
    "triton": lambda sample: ours("triton", sample),
    "cuda": lambda sample: ours("cuda", sample),
    "torch": lambda sample: Passes(_sums, _gradients, _solution),
    "torch, compiled": lambda sample: Passes(*(torch.compile(call, dynamic=False) for call in (_sums, _gradients)), _solution),
}


def tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    """What must be compiled comes last."""
    of_sums = [
        Task(
            f"{shape.name}; {pass_}; {name}",
            lambda shape=shape, pass_=pass_, name=name, make=make: measure(shape, pass_, name, make, device),
            name.startswith("torch") or bool(_passed_over(name, device)),
        )
        for name, make in MAKERS.items()
        for shape in SHAPES
        for pass_ in PASSES
        if not (name == "torch, compiled" and pass_ == "solution")
    ]
    rest = len(SHAPES) * 2
    return [*of_sums[:-rest], *_solve_tasks(device), *_mesa_tasks(device), *of_sums[-rest:]]


def _passed_over(impl: str, device: str) -> bool:
    """Whether it was not built here, which is no fault: its rows say so."""
    return impl == "cuda" and bool(why_not("intention", "cuda", device))


def measure(shape: Shape, pass_: str, name: str, make: Callable[[Tensor], Passes], device: str) -> Row:
    copies = [_inputs(shape, seed, device) for seed in range(cold_copies(shape.read))]
    passes = make(copies[0].key)
    wanted = _wanted(copies[0])
    error = float((passes.solution(copies[0]).double() - wanted).norm() / wanted.norm())
    labels = {"shape": shape.name, "pass": pass_, "impl": name, "error": error}
    if not error < WRONG:
        return {**labels, "ok": name.startswith("torch"), "problem": f"wrong result: relative error {error:.1e}"}
    own = ours("triton", copies[0].key) if name.startswith("torch") else None
    calls, others = (None if made is None else [lambda x=x, made=made: getattr(made, pass_)(x) for x in copies] for made in (passes, own))
    assert calls is not None
    timed = timed_beside(calls, others)
    least = floor(shape.work(pass_), measured_rates(device))
    return {**labels, **timed, **beside_floor(timed["seconds"], least.seconds, least.bound)}


def _inputs(shape: Shape, seed: int, device: str) -> Inputs:
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
    system = gram + ALPHA * torch.eye(x.key.shape[-1], dtype=torch.float64, device=x.key.device)
    return torch.cholesky_solve(moment, torch.linalg.cholesky_ex(system)[0])


# ---- batches of solves


SYSTEMS = ((4096, 16), (4096, 64), (1024, 128))


def _cholesky(gram: Tensor, rhs: Tensor) -> Tensor:
    return torch.cholesky_solve(rhs, torch.linalg.cholesky_ex(gram)[0])


def _solve_tasks(device: str) -> list[Task]:
    solvers = {
        "cuda": lambda a, b: implementation("intention.solve", "cuda").regularised_solve(a, b, a.new_zeros(len(a)))[0],
        "torch": _cholesky,
    }
    return [
        Task(
            f"{count} systems of {order}; solve; {name}",
            lambda name=name, count=count, order=order: _measure_solve(name, solvers, count, order, device),
            name == "torch" or _passed_over(name, device),
        )
        for name in solvers
        for count, order in SYSTEMS
    ]


def _measure_solve(name: str, solvers: Mapping[str, Callable[[Tensor, Tensor], Tensor]], count: int, order: int, device: str) -> Row:
    torch.manual_seed(0)
    copies = []
    for _ in range(cold_copies(count * order * order * 8)):
        a = torch.randn(count, order, order, device=device)
        copies.append((a @ a.mT / order + torch.eye(order, device=device), torch.randn(count, order, order, device=device)))
    gram, rhs = copies[0]
    if name == "cuda":
        choose("intention.solve", "cuda", gram, rhs)
    wanted = _cholesky(gram.double(), rhs.double())
    error = float((solvers[name](gram, rhs).double() - wanted).norm() / wanted.norm())
    labels = {"shape": f"{count} systems of {order}", "pass": "solve", "impl": name, "error": error}
    if not error < 1e-4:
        return {**labels, "ok": name == "torch", "problem": f"wrong result: relative error {error:.1e}"}
    beside = solvers["cuda"] if name == "torch" and not _passed_over("cuda", device) else None
    calls, others = (None if one is None else [lambda x=x, one=one: one(*x) for x in copies] for one in (solvers[name], beside))
    assert calls is not None
    timed = timed_beside(calls, others)
    least = floor(solve_work(count, order, order, "float32"), measured_rates(device))
    return {**labels, **timed, **beside_floor(timed["seconds"], least.seconds, least.bound)}


# ---- flash-linear-attention's mesa_net


def _mesa_tasks(device: str) -> list[Task]:
    return [Task("256 x (1,024 of 64), bf16; a solve a token; mesa_net", lambda: _measure_mesa(device), peer=True)]


def _measure_mesa(device: str) -> Row:
    """Ridge regression for each token over those before it, by 30 steps of conjugate gradients; right where its last token is.

    It computes more than one solution a set, and with keys of norm 1: beside ours, with no share of our floor.
    """
    from fla.ops.mesa_net import chunk_mesa_net  # of PyPI's flash-linear-attention

    shape = Shape("256 x (1,024 of 64), bf16", 256, 1024, 64, "bfloat16")
    x = _inputs(shape, 0, device)
    key, value = (t.transpose(1, 2).contiguous() for t in (torch.nn.functional.normalize(x.key, dim=-1), x.value))
    gate, beta = torch.zeros(key.shape[:3], device=device), torch.ones(key.shape[:3], device=device, dtype=key.dtype)
    penalty = torch.full((1, shape.width), ALPHA, device=device)

    def call() -> Tensor:
        return chunk_mesa_net(q=key, k=key, v=value, g=gate, beta=beta, lamb=penalty, max_CG_iteration=30)[0]

    k, v = (t.transpose(1, 2) for t in (key, value))
    wanted = k[:, :, -1:].double() @ _wanted(Inputs(k, v, x.dgram, x.dmoment))
    error = float((call()[:, -1:].transpose(1, 2).double() - wanted).norm() / wanted.norm())
    labels = {"shape": shape.name, "pass": "a solve a token", "impl": "mesa_net", "error": error}
    if not error < WRONG or math.isnan(error):
        return {**labels, "problem": f"wrong result: relative error {error:.1e}"}
    own = ours("triton", x.key)
    return {**labels, **timed_beside([call], [lambda: own.solution(x)])}

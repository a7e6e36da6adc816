"""Nyström attention of whole windows and the iterative pseudo-inverse, beside torch's own, each beside its floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import cmab_kernels as ck
from bench.floors import BYTES, Work, floor, nystrom_work, pinv_work

from .graphs import cold_copies
from .rates import measured_rates
from .sections import Row, Task
from .timings import beside_floor, timed_beside

ITERATIONS = 6
WRONG = {"float32": 1e-2, "bfloat16": 1e-1}
"""Relative error beyond which there is no speed; six iterations make rounding errors up to a thousand times as large."""


@dataclass(frozen=True)
class Window:
    batch: int
    heads: int
    tokens: int
    landmarks: int
    width: int
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.batch} x {self.heads} heads, N {self.tokens}, m {self.landmarks}, d {self.width}, {self.dtype}"

    @property
    def work(self) -> Work:
        heads = self.batch * self.heads
        return nystrom_work(heads, self.tokens, self.landmarks, self.width, self.width, ITERATIONS, self.dtype)

    @property
    def read(self) -> int:
        return 3 * self.batch * self.heads * self.tokens * self.width * BYTES[self.dtype]

    def inputs(self, seed: int, device: str) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        shape = (self.batch, self.heads, self.tokens, self.width)
        return tuple(torch.randn(shape, device=device).to(getattr(torch, self.dtype)) for _ in range(3))

    def implementations(self) -> dict[str, Callable[..., Tensor]]:
        def attention(impl: str) -> Callable[..., Tensor]:
            return lambda q, k, v: ck.nystrom_attention(q, k, v, self.landmarks, impl=impl)

        return {
            "triton": attention("triton"),
            "torch": attention("reference"),
            "torch attention": torch.nn.functional.scaled_dot_product_attention,
        }


@dataclass(frozen=True)
class Matrices:
    count: int
    landmarks: int
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.count} pinv of {self.landmarks}, {self.dtype}"

    @property
    def work(self) -> Work:
        return pinv_work(self.count, self.landmarks, ITERATIONS, self.dtype)

    @property
    def read(self) -> int:
        return self.count * self.landmarks**2 * BYTES[self.dtype]

    def inputs(self, seed: int, device: str) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        return (torch.randn(self.count, self.landmarks, self.landmarks, device=device).softmax(-1),)

    def implementations(self) -> dict[str, Callable[..., Tensor]]:
        return {
            "triton": lambda a: ck.iterative_pinv(a, ITERATIONS, impl="triton"),
            "torch": lambda a: ck.iterative_pinv(a, ITERATIONS, impl="reference"),
        }


Shape = Window | Matrices
SHAPES: Sequence[Shape] = (
    Window(8, 8, 4096, 64, 64),
    Window(8, 8, 4096, 64, 64, "bfloat16"),
    Window(1, 8, 100_000, 64, 64),
    Matrices(8, 64),
    Matrices(4096, 16),
    Matrices(4096, 64),
)
ELSE = "torch attention"
"""Exact attention: it computes something else, beside which ours stands, with no share of the floor."""


def tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    return [
        Task(f"{shape}; {name}", lambda shape=shape, name=name: measure(shape, name, device), name != "triton")
        for shape in SHAPES
        for name in shape.implementations()
    ]


def measure(shape: Shape, name: str, device: str) -> Row:
    made = shape.implementations()
    copies = [shape.inputs(seed, device) for seed in range(cold_copies(shape.read))]
    labels = {"shape": str(shape), "pass": "forward", "impl": name}
    if name != ELSE:
        wanted = made["torch"](*(t.double() for t in copies[0]))
        labels["error"] = error = float((made[name](*copies[0]).double() - wanted).norm() / wanted.norm())
        if not error < WRONG[shape.dtype]:
            return {**labels, "ok": name != "triton", "problem": f"wrong result: relative error {error:.1e}"}
    calls, own = ([lambda x=x, one=one: one(*x) for x in copies] for one in (made[name], made["triton"]))
    timed = timed_beside(calls, None if name == "triton" else own)
    if name == ELSE:
        return {**labels, **timed}
    least = floor(shape.work, measured_rates(device))
    return {**labels, **timed, **beside_floor(timed["seconds"], least.seconds, least.bound)}

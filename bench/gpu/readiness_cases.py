"""What is compiled to be read: every kernel, at the shapes that the speed targets name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

import cmab_kernels as ck
from bench.floors import BYTES, Work, attention_work, pinv_work, ridge_work, rows_work, solve_work
from cmab_kernels.attention import kernels as attention
from cmab_kernels.attention.kernels import launch as attention_launch
from cmab_kernels.attention.prefix import kernels as prefix
from cmab_kernels.attention.projected import kernels as projected
from cmab_kernels.attention.projected.kernels import launch as projected_launch
from cmab_kernels.intention import kernels as intention
from cmab_kernels.intention.kernels import launch as intention_launch
from cmab_kernels.intention.solve import kernels as solve
from cmab_kernels.layers import kernels as layers
from cmab_kernels.layers.kernels import launch as layers_launch
from cmab_kernels.nystrom import kernels as nystrom
from cmab_kernels.nystrom.continual import kernels as continual
from cmab_kernels.nystrom.kernels.blocks import multiply
from cmab_kernels.testing.cubin import Launch, as_if_on, record

ITERATIONS = 6

WHOLE = (80, 90, 100)
"""Compute capabilities that all cases are compiled for: the GPUs of data centres."""

EVERYWHERE = (
    *(f"{heads}, bfloat16" for heads in ("4 heads of 16, L 128, N 1e6", "8 heads of 64, L 512, N 1e6")),
    *("4 heads of 16, L 128, N 1e6, float32", "1 head of 64, L 128, N 1e6, float32"),
    "16 x 4 heads of 16, L 16, N 1,000, every 1, float32",
    *("4 heads of 16, C 64, L 128, N 1e6, float32", "4 heads of 16, C 64, L 128, N 1e6, bfloat16"),
    *("2,048 rows of 64, 128 features, float32", "16 x (4 heads of 16, L 128), float32", "16 x (N 1,000, d 16), every 1, float32"),
    *("256 x (N 1,024, d 64), float32", "1 x (N 1e6, d 64), float32", "1,024 x (m 16), float32", "64 x (m 256), float32"),
    *(f"256 x (order {order}, 64 columns), {dtype}" for order in (64, 256) for dtype in ("float32", "float64")),
    *(f"{shape}n 64, d 64, a block a head, float32" for shape in ("", "m 16, ")),
    "m 256, n 256, d 64, a block a head, float32",
)
"""The shapes that every GPU has figures of: each kernel is among them."""


@dataclass(frozen=True)
class Case:
    """A pass of an operator at one shape; its kernels are recorded on tensors without memory."""

    operator: str
    passes: str
    shape: str
    dtype: str
    width: int
    call: Callable[[], Any] | None
    """None for kernels that nvcc has compiled."""
    work: Work | None
    """What the floor is computed from, with the dtype at whose rate the products run; None where no floor means anything."""
    tf32: bool = False

    @property
    def precision(self) -> str:
        return "tf32" if self.tf32 else self.dtype

    @property
    def name(self) -> str:
        return f"{self.operator} {self.passes}, {self.shape}, {self.precision}"

    @property
    def everywhere(self) -> bool:
        return self.call is None or f"{self.shape}, {self.precision}" in EVERYWHERE

    def launches(self, capability: int) -> dict[str, Launch]:
        """The launches by the name of the kernel; a second launch of the same kernel has a number."""
        with ExitStack() as as_there:
            as_there.enter_context(torch.device("meta"))
            as_there.enter_context(as_if_on(capability))
            for family in (attention_launch, projected_launch, layers_launch, intention_launch):
                as_there.enter_context(mock.patch.object(family, "allows_tf32", lambda: self.tf32))
            found: dict[str, Launch] = {}
            for launch in record(self.call) if self.call else []:
                name = launch.kernel.__name__
                count = sum(other.kernel.jit is launch.kernel.jit for other in found.values())  # whatever constants it was given
                found[f"{name} {count + 1}" if count else name] = launch
            return found


# ---- attention


def _attention(B: int, H: int, L: int, N: int, D: int, dtype: str, shape: str, tf32: bool = False) -> Iterator[Case]:
    kind = getattr(torch, dtype)
    sums = torch.promote_types(kind, torch.float32)

    def inputs() -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty(B, H, n, D, dtype=kind) for n in (L, N, N))

    def forward() -> None:
        attention.attention_forward(*inputs(), None, None, None, None, D**-0.5)

    def backward() -> None:
        out, lse = torch.empty(B, H, L, D, dtype=sums), torch.empty(B, H, L, dtype=torch.float64)
        attention.attention_backward(out, lse, *inputs(), None, None, out, lse, D**-0.5, (True, True, True))

    for name, call in (("forward", forward), ("backward", backward)):
        work = attention_work(B * H * L * N, B * H * N, D, D, dtype, name == "backward", "cuda")
        through_tf32 = tf32 or (dtype == "float16" and name == "backward")
        yield Case("latent_attention", name, shape, dtype, D, call, replace(work, dtype="tf32") if through_tf32 else work, tf32)


def _prefixes(B: int, H: int, L: int, N: int, D: int, every: int, dtype: str, shape: str) -> Iterator[Case]:
    kind = getattr(torch, dtype)
    prefixes = N // every

    def inputs() -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty(B, H, n, D, dtype=kind) for n in (L, N, N))

    def forward() -> None:
        prefix.prefix_forward(*inputs(), None, None, None, every, D**-0.5)

    def backward() -> None:
        out, lse = torch.empty(B, H, prefixes, L, D), torch.empty(B, H, prefixes, L, dtype=torch.float64)
        prefix.prefix_backward(out, lse, *inputs(), None, None, None, out, lse, every, D**-0.5, (True, True, True, False))

    states = B * H * prefixes * L * (4 * D + 8)
    for name, call, moved in (("forward", forward, states), ("backward", backward, 2 * states)):
        work = attention_work(B * H * L * N, B * H * N, D, D, dtype, name == "backward", "cuda")
        yield Case("prefix_attention_states", name, shape, dtype, D, call, replace(work, bytes=work.bytes + moved))


def _projected(K: int, H: int, L: int, N: int, C: int, D: int, dtype: str, shape: str) -> Iterator[Case]:
    """K stacked blocks behind a norm each, whose weights are folded into the projections."""
    kind = getattr(torch, dtype)
    sums = torch.promote_types(kind, torch.float32)

    def given() -> tuple[Any, ...]:
        query, inputs = torch.empty(K, 1, H, L, D, dtype=sums), torch.empty(1, N, C, dtype=kind)
        return query, inputs, torch.empty(K, 2 * H * D, C, dtype=sums), torch.empty(K, 2 * H * D, dtype=sums), None, None

    def forward() -> None:
        projected.projected_attention_forward(*given(), None, None, D**-0.5, 1e-5)

    def backward() -> None:
        out, lse = torch.empty(K, 1, H, L, D, dtype=sums), torch.empty(K, 1, H, L, dtype=torch.float64)
        projected.projected_attention_backward(out, lse, *given(), out, lse, D**-0.5, 1e-5, (True,) * 4)

    for name, call, passes in (("forward", forward, 1), ("backward", backward, 3)):
        attention = attention_work(K * H * L * N, 0, D, D, dtype, name == "backward", "cuda")
        moved = (2 if name == "backward" else 1) * N * C * kind.itemsize
        work = Work(attention.exponentials, attention.products + passes * 4 * K * N * C * H * D, moved, dtype)
        yield Case("projected_attention_state", name, shape, dtype, D, call, work)


# ---- layers


def _feed_forward(rows: int, C: int, F: int, dtype: str, shape: str) -> Iterator[Case]:
    kind = getattr(torch, dtype)

    def given() -> list[torch.Tensor]:
        return [torch.empty(sizes, dtype=kind) for sizes in ((rows, C), (C,), (C,), (2 * F, C), (2 * F,), (C, F), (C,))]

    def backward() -> None:
        layers.feed_forward_layer_backward(given()[0], *given(), 1e-5, "geglu", "input", (True,) * 7)

    forward = Work(0.0, 2 * rows * 3 * C * F, 2 * rows * C * kind.itemsize, dtype)
    back = replace(forward, products=8 / 3 * forward.products, bytes=1.5 * forward.bytes)
    yield Case(
        "feed_forward_layer", "forward", shape, dtype, C, lambda: layers.feed_forward_layer(*given(), 1e-5, "geglu", "input"), forward
    )
    yield Case("feed_forward_layer", "backward", shape, dtype, C, backward, back)


def _attention_layer(B: int, H: int, L: int, C: int, dtype: str, shape: str) -> Iterator[Case]:
    """Self-attention, as many columns in all heads as in a row."""
    kind = getattr(torch, dtype)

    def given() -> tuple[Any, ...]:
        matrix, vector = torch.empty(C, C, dtype=kind), torch.empty(C, dtype=kind)
        norm = (vector, vector, None, None)
        return torch.empty(B, L, C, dtype=kind), None, None, *norm, *(matrix, vector) * 4, H, (C // H) ** -0.5, 1e-5, 1e-5, "input"

    def backward() -> None:
        heads = [torch.empty(B, L, C, dtype=kind) for _ in range(3)]
        out, lse = torch.empty(B, H, L, C // H, dtype=torch.float32), torch.empty(B, H, L, dtype=torch.float64)
        needs = (True, False, True, True, False, False, *(True,) * 8)
        layers.attention_layer_backward(given()[0], *given(), *heads, out, lse, needs)

    calls = {"forward": lambda: layers.attention_layer(*given(), False), "backward": backward}
    for (name, call), passes in zip(calls.items(), (1, 2), strict=True):
        attention = attention_work(B * H * L * L, 0, C // H, C // H, dtype, passes == 2, "cuda")
        projections = passes * 8 * B * L * C * C
        moved = (passes + 1) * B * L * C * kind.itemsize
        work = Work(attention.exponentials, attention.products + projections, moved, dtype)
        yield Case("attention_layer", name, shape, dtype, C, call, work)


# ---- Intention


def _ridge_prefixes(B: int, N: int, D: int, every: int, dtype: str, shape: str) -> Iterator[Case]:
    kind = getattr(torch, dtype)
    states = B * (-(-N // every)) * 2 * D * D * 8
    rows = B * N * 2 * D * kind.itemsize

    def given() -> tuple[Any, ...]:
        return torch.empty(B, 1, N, D, dtype=kind), torch.empty(B, 1, N, D, dtype=kind), None, None

    def backward() -> None:
        dsums = [torch.empty(B, 1, -(-N // every), D, D, dtype=torch.float64) for _ in range(2)]
        intention.prefix_ridge_backward(*dsums, *given(), every, (True, True, False, False))

    sums = ridge_work(B * N, D, D, dtype, exact=True)
    back = ridge_work(B * N, D, D, dtype, backward=True, exact=True)
    forward = replace(sums, bytes=rows + states)
    yield Case("prefix_ridge_states", "forward", shape, dtype, D, lambda: intention.prefix_ridge(*given(), None, None, every), forward)
    yield Case("prefix_ridge_states", "backward", shape, dtype, D, backward, replace(back, bytes=2 * rows + states))


def _intention(B: int, N: int, D: int, dtype: str, shape: str, tf32: bool = False) -> Iterator[Case]:
    kind = getattr(torch, dtype)

    def rows() -> torch.Tensor:
        return torch.empty(B, 1, N, D, dtype=kind)

    def square() -> torch.Tensor:
        return torch.empty(B, 1, D, D, dtype=torch.float64)

    calls: dict[str, tuple[Callable[[], Any], Work]] = {
        "sums": (lambda: intention.gram(rows(), rows(), None, None, (True, True), False), ridge_work(B * N, D, D, dtype)),
        "gradients of the sums": (
            lambda: intention.gram_backward(square(), square(), rows(), rows(), None, None, (True, True, False), False),
            ridge_work(B * N, D, D, dtype, backward=True),
        ),
        "rows": (lambda: intention.apply_rows(rows(), square()), rows_work(B * N, D, D, dtype)),
    }
    for name, (call, work) in calls.items():
        through_tf32 = tf32 or (dtype in ("bfloat16", "float16") and name != "sums")
        yield Case("ridge_state", name, shape, dtype, D, call, replace(work, dtype="tf32") if through_tf32 else work, tf32)


# ---- Nyström


def _nystrom(batch: int, m: int, width: int, dtype: str, shape: str) -> Iterator[Case]:
    kind = getattr(torch, dtype)

    def matrix() -> torch.Tensor:
        return torch.empty(batch, m, m, dtype=kind)

    def given() -> tuple[Any, ...]:
        rows = torch.empty(batch, m, width, dtype=kind)
        return rows, rows, rows, None, width**-0.5, ITERATIONS

    inverse = pinv_work(batch, m, ITERATIONS, dtype)
    both = Work(batch * m * m, batch * 4 * m * m * width, batch * 4 * m * width * kind.itemsize, dtype)
    values = replace(inverse + both, bytes=both.bytes)
    calls: dict[tuple[str, str], tuple[Callable[[], Any], Work]] = {
        ("iterative_pinv", "forward"): (lambda: nystrom.iterative_pinv(matrix(), ITERATIONS), inverse),
        ("iterative_pinv", "backward"): (lambda: nystrom.iterative_pinv_backward(matrix(), matrix(), ITERATIONS), _differentiated(inverse)),
        ("landmark values", "forward"): (lambda: nystrom.landmark_values(*given()), values),
        ("landmark values", "backward"): (lambda: nystrom.landmark_values_backward(given()[0], *given()), _differentiated(values)),
    }
    for (operator, name), (call, work) in calls.items():
        yield Case(operator, name, shape, dtype, m, call, work)


def _differentiated(work: Work) -> Work:
    """The forward again, and two products for each of it; what is read has a gradient."""
    return replace(work, products=3 * work.products, bytes=2 * work.bytes)


def _products(batch: int, m: int, dtype: str) -> Case:
    """One of the products that all operators with more than 64 landmarks consist of."""
    kind = getattr(torch, dtype)

    def call() -> None:
        multiply(torch.empty(batch, m, m, dtype=kind), torch.empty(batch, m, m, dtype=kind))

    work = Work(0.0, 2 * batch * m**3, 3 * batch * m**2 * BYTES[dtype], dtype)
    return Case("iterative_pinv", "one product", f"{batch} x (m {m})", dtype, m, call, work)


# ---- solves, and steps of streams


def _solve(systems: int, order: int, columns: int, dtype: str) -> Case:
    kind = getattr(torch, dtype)

    def call() -> None:
        gram, rhs = (torch.empty(systems, order, n, dtype=kind) for n in (order, columns))
        solve.regularised_solve(gram, rhs, gram[:, 0, 0])

    shape, work = f"{systems} x (order {order}, {columns} columns)", solve_work(systems, order, columns, dtype)
    return Case("regularised_solve", "in Triton", shape, dtype, order, call, work)


def _step(landmarks: int | None, dtype: str) -> Case:
    """The newest output after one token: Nyström attention through landmarks, or exact attention."""
    window, width = max(landmarks or 0, 64), 64

    def call() -> None:
        with torch.device("cpu"):  # a stream begins with a window that is there
            rows, token = (torch.zeros(1, 1, n, width, dtype=getattr(torch, dtype)) for n in (window, 1))
            if landmarks is None:
                continual.continual_attention_step(ck.continual_attention_init(rows, rows, rows), token, token, token, False)
            else:
                continual.continual_nystrom_step(ck.continual_nystrom_init(rows, rows, rows, landmarks), token, token, token, False)

    operator, through = ("continual_attention_step", "") if landmarks is None else ("continual_nystrom_step", f"m {landmarks}, ")
    return Case(operator, "in Triton", f"{through}n {window}, d {width}, a block a head", dtype, width, call, None)


def cases() -> list[Case]:
    million = 10**6
    return [
        *_attention(1, 4, 128, million, 16, "bfloat16", "4 heads of 16, L 128, N 1e6"),
        *_attention(1, 8, 128, million, 8, "bfloat16", "8 heads of 8, L 128, N 1e6"),
        *_attention(1, 1, 128, million, 64, "bfloat16", "1 head of 64, L 128, N 1e6"),
        *_attention(1, 8, 512, million, 64, "bfloat16", "8 heads of 64, L 512, N 1e6"),
        *_attention(1, 4, 128, million, 16, "float32", "4 heads of 16, L 128, N 1e6", tf32=True),
        *_attention(1, 4, 128, million, 16, "float32", "4 heads of 16, L 128, N 1e6"),
        *_attention(1, 1, 128, million, 64, "float32", "1 head of 64, L 128, N 1e6"),
        *_attention(1, 4, 128, million, 16, "float16", "4 heads of 16, L 128, N 1e6"),
        *_attention(1, 4, 128, million // 10, 16, "float64", "4 heads of 16, L 128, N 1e5"),
        *_prefixes(16, 4, 16, 1000, 16, 1, "float32", "16 x 4 heads of 16, L 16, N 1,000, every 1"),
        *_prefixes(16, 4, 16, 1000, 16, 1, "bfloat16", "16 x 4 heads of 16, L 16, N 1,000, every 1"),
        *_projected(1, 4, 128, million, 64, 16, "float32", "4 heads of 16, C 64, L 128, N 1e6"),
        *_projected(1, 4, 128, million, 64, 16, "bfloat16", "4 heads of 16, C 64, L 128, N 1e6"),
        *_projected(6, 4, 128, million, 64, 16, "bfloat16", "6 blocks of 4 heads of 16, C 64, L 128, N 1e6"),
        *_projected(1, 4, 128, million // 10, 512, 128, "bfloat16", "4 heads of 128, C 512, L 128, N 1e5"),
        *(case for dtype in ("float32", "bfloat16") for case in _feed_forward(2048, 64, 128, dtype, "2,048 rows of 64, 128 features")),
        *(case for dtype in ("float32", "bfloat16") for case in _attention_layer(16, 4, 128, 64, dtype, "16 x (4 heads of 16, L 128)")),
        *_ridge_prefixes(16, 1000, 16, 1, "float32", "16 x (N 1,000, d 16), every 1"),
        *_intention(256, 1024, 64, "float32", "256 x (N 1,024, d 64)"),
        *_intention(256, 1024, 64, "float32", "256 x (N 1,024, d 64)", tf32=True),
        *_intention(256, 1024, 64, "bfloat16", "256 x (N 1,024, d 64)"),
        *_intention(1, million, 64, "float32", "1 x (N 1e6, d 64)"),
        *_intention(1024, 256, 16, "float32", "1,024 x (N 256, d 16)"),
        *_intention(256, 1024, 32, "float64", "256 x (N 1,024, d 32)"),
        *_nystrom(1024, 16, 64, "float32", "1,024 x (m 16)"),
        *_nystrom(1024, 64, 64, "float32", "1,024 x (m 64)"),
        *_nystrom(1024, 16, 64, "float64", "1,024 x (m 16)"),
        *(_products(64, 256, dtype) for dtype in ("float32", "float64")),
        *(_solve(256, order, 64, dtype) for order in (64, 256) for dtype in ("float32", "float64")),
        *(_step(landmarks, dtype) for landmarks in (None, 16) for dtype in ("float32", "bfloat16", "float64")),
        *(_step(landmarks, "float32") for landmarks in (64, 256)),
    ]

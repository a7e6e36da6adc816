"""What is compiled to be read: every kernel at the shapes that the speed targets name, and what one pass through its main loop does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton

import cmab_kernels as ck
from bench.floors import BYTES, Work, attention_work, pinv_work, ridge_work, rows_work, solve_work
from cmab_kernels.attention import kernels as attention
from cmab_kernels.attention.kernels import launch as attention_launch
from cmab_kernels.attention.prefix import kernels as prefix
from cmab_kernels.intention import kernels as intention
from cmab_kernels.intention.kernels import launch as intention_launch
from cmab_kernels.intention.kernels.sums import IN_FLOAT32
from cmab_kernels.intention.solve import kernels as solve
from cmab_kernels.intention.solve.kernels.solve import STEP
from cmab_kernels.nystrom import kernels as nystrom
from cmab_kernels.nystrom.continual import kernels as continual
from cmab_kernels.nystrom.kernels.blocks import BLOCK, multiply
from cmab_kernels.testing.cubin import Launch, as_if_on, record

from .readiness_model import WARP
from .readiness_sass import Code, Counts, Loop

ITERATIONS = 6

WHOLE = (80, 90, 100)
"""Compute capabilities that all cases are compiled for: the GPUs of data centres."""

EVERYWHERE = (
    *(f"{heads}, bfloat16" for heads in ("4 heads of 16, L 128, N 1e6", "8 heads of 64, L 512, N 1e6")),
    *("4 heads of 16, L 128, N 1e6, float32", "1 head of 64, L 128, N 1e6, float32"),
    "16 x 4 heads of 16, L 16, N 1,000, every 1, float32",
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
            for family in (attention_launch, intention_launch):
                as_there.enter_context(mock.patch.object(family, "allows_tf32", lambda: self.tf32))
            found: dict[str, Launch] = {}
            for launch in record(self.call) if self.call else []:
                name = launch.kernel.__name__
                count = sum(other.kernel is launch.kernel for other in found.values())
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


# ---- Intention


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


# ---- what one pass through the main loop of a kernel does


class Pass(NamedTuple):
    """`per`: what is counted, of which a block does `elements` in a pass; `passes` of all blocks together; `moved`: bytes, each once.

    `trips`: of a loop within the main one. `loops`: that many of the outermost loops, each as often as the other. `inner`: the main loop is
    the innermost that has all products, and those between the loops in it are its own.
    """

    per: str
    elements: float
    passes: float
    moved: float
    trips: float = 1.0
    loops: int = 1
    rare: tuple[tuple[str, float], ...] = ()
    inner: bool = False


class MultiplyAdds(NamedTuple):
    """A kernel that is counted by its loop with the most multiply-adds: `count` of all blocks together, padding included, and bytes moved.

    None for a step: it is a launch and its barriers, whose time no count implies.
    """

    count: float | None
    moved: float = 0.0


def counted(code: Code, passing: Pass | MultiplyAdds) -> tuple[Counts, Pass]:
    """What a pass does, and how it is to be read."""
    if isinstance(passing, MultiplyAdds):
        loop = code.busiest()
        each = code.multiply_adds(loop) * code.warps * WARP
        return code.count(loop), Pass("multiply-add", each, (passing.count or 0.0) / each, passing.moved)
    counts = Counts()
    loops: list[Loop | None] = [code.around_products(loop) if passing.inner else loop for loop in code.main_loops(passing.loops)]
    for main in loops or [None]:
        counts.add(code.count(main, passing.trips, dict(passing.rare), peeled=not passing.inner), 1.0)
    return counts, passing


def _scores(launch: Launch, moved: int) -> Pass:
    """Attention, a block of queries at hand: one tile of scores a pass. `moved`: how often keys and values are."""
    o = launch.options
    B, H, L, N = o["sizes"]
    passes = B * H * triton.cdiv(L, o["BLOCK_L"]) * triton.cdiv(N, o["BLOCK_N"])
    return Pass("score", o["BLOCK_L"] * o["BLOCK_N"], passes, moved * B * H * N * (o["D"] + o["E"]) * launch.args[1].element_size())


def _scores_of_keys(launch: Launch) -> Pass:
    """A tile of keys at hand, and all blocks of queries a pass."""
    o = launch.options
    B, H, L, N = o["sizes"]
    blocks = triton.cdiv(L, o["BLOCK_L"])
    moved = 2 * B * H * N * (o["D"] + o["E"]) * launch.args[1].element_size()
    return Pass("score", blocks * o["BLOCK_L"] * o["BLOCK_N"], B * H * triton.cdiv(N, o["BLOCK_N"]), moved, trips=blocks)


def _scores_in_parts(launch: Launch) -> Pass:
    """A block of queries and a chunk of keys at hand: one tile of keys a pass, by pieces of its columns where they are many."""
    o = launch.options
    B, H, L, N = o["sizes"]
    passes = B * H * triton.cdiv(L, o["BLOCK_L"]) * triton.cdiv(N, o["BLOCK_N"])
    moved = 2 * B * H * N * (o["D"] + o["E"]) * launch.args[1].element_size()
    return Pass("score", o["BLOCK_L"] * o["BLOCK_N"], passes, moved, trips=max(o["D"] / (o["PIECE"] or o["D"]), 1.0), inner=True)


def _row_terms(launch: Launch) -> Pass:
    o = launch.options
    rows = math.prod(o["sizes"])
    moved = rows * o["E"] * (launch.args[0].element_size() + launch.args[2].element_size() + launch.args[4].element_size())
    return Pass("element of dout", o["ROWS"] * o["E"], launch.grid[0], moved)


def _runs(launch: Launch, runs: int, width: int) -> Pass:
    """Sums over runs, `width` elements each."""
    chunk = launch.options["CHUNK"]
    moved = launch.grid[0] * runs * width * launch.args[0].element_size()
    return Pass("element of a run", chunk * width, launch.grid[0] * triton.cdiv(runs, chunk), moved)


def _windows(launch: Launch) -> Pass:
    """One tile of scores of a window; the states are written once."""
    o, (_, key, value, *_, out, lse) = launch.options, launch.args
    tiles = triton.cdiv(o["cut"][3], o["BLOCK_N"])
    moved = key.nbytes + value.nbytes + out.nbytes + lse.nbytes
    return Pass("score", o["BLOCK_L"] * o["BLOCK_N"], launch.grid[0] * tiles, moved)


def _scanned(launch: Launch, steps: int, moved: int) -> Pass:
    """One tile of the steps of a scan."""
    o = launch.options
    return Pass("element of a state", o["TILE"] * o["E"], launch.grid[0] * triton.cdiv(steps, o["TILE"]), moved)


def _send_back(launch: Launch) -> Pass:
    o, (dout, _, _, lse, *_, slopes, high, low, delta, _, _) = launch.options, launch.args
    written = sum(t.nbytes for t in (slopes, high, low, delta) if t is not None)
    return _scanned(launch, min(o["cut"][1], o["sizes"][2]), 2 * dout.nbytes + 2 * lse.nbytes + written)


def _scores_of_chunks(launch: Launch, outer: int, inner: int, moved: int) -> Pass:
    """Tiles of scores of several chunks, `inner` of them in each pass through the outer loop, of which a block makes `outer`."""
    o = launch.options
    return Pass("score", inner * o["BLOCK_L"] * o["BLOCK_N"], launch.grid[0] * outer, moved, trips=inner)


def _prefix_keys(launch: Launch) -> Pass:
    o, (_, key, value, _, slopes, *_) = launch.options, launch.args
    blocks = triton.cdiv(o["sizes"][1], o["BLOCK_L"] // o["GROUP"])
    groups = triton.cdiv(o["BLOCK_N"], o["GROUP"] * o["every"])
    return _scores_of_chunks(launch, groups, blocks, 2 * (key.nbytes + value.nbytes) + slopes.nbytes)


def _prefix_queries(launch: Launch) -> Pass:
    o, (_, key, value, _, slopes, *_) = launch.options, launch.args
    groups = triton.cdiv(o["BLOCK_N"], o["GROUP"] * o["every"])
    tiles = triton.cdiv(min(o["cut"][1], o["sizes"][2]), o["BLOCK_N"])
    return _scores_of_chunks(launch, tiles, groups, key.nbytes + value.nbytes + slopes.nbytes)


def _gram(launch: Launch) -> Pass:
    """One tile of keys into one tile of a sum. Tiles above the diagonal are not formed."""
    o = launch.options
    key, value, *_, gram, moment, _ = launch.args
    down = triton.cdiv(o["D"], o["TILE_D"])
    formed = (down + 1) / (2 * down) if gram is not None else 1.0
    loaded = o["TILE_D"] * (2 if gram is not None and down > 1 else 1) + (o["TILE_E"] if moment is not None else 0)
    length = min(o["cut"][1], o["keys"])
    in_float64 = str(o["OPERAND"]) == "fp64"
    block = o["EXACT_N"] if in_float64 else o["BLOCK_N"]
    rare = () if in_float64 else tuple((name, block / IN_FLOAT32.value) for name in ("DADD", "F2F.F64"))
    moved = key.nbytes + (value.nbytes if moment is not None else 0)
    return Pass("element loaded", block * loaded, launch.grid[0] * formed * triton.cdiv(length, block), moved, rare=rare)


def _row_tiles(launch: Launch, elements: int, moved: int) -> Pass:
    """One tile of rows: all columns, tile by tile."""
    o = launch.options
    rows = o["keys"] if "keys" in o else o["queries"]
    tiles = triton.cdiv(o["D"], o["TILE_D"])
    passes = launch.grid[0] * triton.cdiv(min(o["RUN"], rows), o["BLOCK_N"])
    return Pass("element of a row", o["BLOCK_N"] * elements, passes, moved, trips=tiles)


def _squares(launch: Launch, loops: int) -> Pass:
    """One iteration of the inverse of one matrix; the gradient goes through them again, and then back."""
    o = launch.options
    moved = sum(t.nbytes for t in launch.args if isinstance(t, torch.Tensor) and t.dim() == 3)
    return Pass("element of a square", o["SIZE"] ** 2, launch.grid[0] * o["ITERATIONS"], moved, loops=loops)


def _product(launch: Launch) -> Pass:
    """One block of the left matrix times one of the right."""
    block, (left, right, *_, out) = BLOCK.value, launch.args
    return Pass(
        "multiply-add", block**3, launch.grid[0] * triton.cdiv(launch.options["inner"], block), left.nbytes + right.nbytes + out.nbytes
    )


def _eliminations(launch: Launch) -> MultiplyAdds:
    """The lines before each tile are eliminated from it, and then its own: in the factor, and twice in each piece of [s I, B]."""
    o, (gram, rhs, _, weight, *_) = launch.options, launch.args
    tiles, step = triton.cdiv(o["D"], STEP.value), STEP.value
    sweep = o["COLUMNS"] * (step**2 * tiles * (tiles - 1) / 2 + tiles * step * (step - 1) / 2)
    pieces = triton.cdiv(o["D"] + o["E"], o["COLUMNS"])
    return MultiplyAdds(o["systems"] * (1 + 2 * pieces) * sweep, gram.nbytes + rhs.nbytes + weight.nbytes)


PASSES: dict[str, Callable[[Launch], Pass | MultiplyAdds]] = {
    "_forward": lambda launch: _scores(launch, 1),
    "_merge": lambda launch: _runs(launch, launch.options["cut"][0], launch.options["E"]),
    "_row_terms": _row_terms,
    "_backward": lambda launch: _scores(launch, 2),
    "_backward_keys": _scores_of_keys,
    "_backward_in_parts": _scores_in_parts,
    "_sum_runs": lambda launch: _runs(launch, launch.options["cut"][0], launch.options["D"]),
    "_windows": _windows,
    "_scan": lambda launch: _scanned(launch, launch.options["sizes"][2], sum(t.nbytes for t in launch.args if t is not None)),
    "_send_back": _send_back,
    "_prefix_keys": _prefix_keys,
    "_prefix_queries": _prefix_queries,
    "_gram": _gram,
    "_add_runs": lambda launch: _runs(launch, launch.options["runs"], launch.options["BLOCK"]),
    "_gram_backward": lambda launch: _row_tiles(
        launch, launch.options["D"] + launch.options["E"], 2 * (launch.args[2].nbytes + launch.args[3].nbytes)
    ),
    "_apply": lambda launch: _row_tiles(launch, launch.options["D"], launch.args[0].nbytes + launch.args[2].nbytes),
    "_pinv": lambda launch: _squares(launch, 1),
    "_pinv_backward": lambda launch: _squares(launch, 2),
    "_landmark_values": lambda launch: _squares(launch, 1),
    "_landmark_values_backward": lambda launch: _squares(launch, 2),
    "_multiply": _product,
    "_solve": _eliminations,
    "_attention_step": lambda _: MultiplyAdds(None),
    "_nystrom_step": lambda _: MultiplyAdds(None),
}
"""Name of a kernel -> what one pass through its main loop does."""

LEFT_OUT = (
    "_vet",
    *("_projected_forward", "_projected_backward", "_projected_backward_inputs"),
    *("_feed_forward", "_feed_forward_back", "_project", "_join", "_part", "_project_back", "_matrix_gradient"),
    *("_prefix_sums", "_send_sums_back", "_scan_matrices", "_add_planes"),
)
"""Kernels without figures: the check of a packed set's offsets, those whose main loop holds loops of several lengths side by side, and the
scans of Intention's prefixes, whose registers and spills the tests of machine code have, but no model of their time yet."""

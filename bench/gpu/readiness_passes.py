"""What one pass through the main loop of each kernel does, and how often all blocks together go through it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

from cmab_kernels.attention.projected.kernels.launch import chunks
from cmab_kernels.intention.kernels.sums import IN_FLOAT32
from cmab_kernels.intention.solve.kernels.solve import STEP
from cmab_kernels.nystrom.kernels.blocks import BLOCK
from cmab_kernels.testing.cubin import Launch

from .readiness_model import WARP
from .readiness_sass import Code, Counts, Loop


class Pass(NamedTuple):
    """`per`: what is counted, of which a block does `elements` in a pass; `passes` of all blocks together; `moved`: bytes, each once.

    `trips`: of a loop within the main one; `around`: of loops around exponentials, from the outermost on. `loops`: that many of the
    outermost loops, each as often as the other. `inner`: the main loop is the innermost that has all products, and those between the
    loops in it are its own. `whole`: all of the code is a pass.
    """

    per: str
    elements: float
    passes: float
    moved: float
    trips: float = 1.0
    loops: int = 1
    rare: tuple[tuple[str, float], ...] = ()
    inner: bool = False
    around: tuple[float, ...] = ()
    whole: bool = False


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
    found = [] if passing.whole else code.main_loops(passing.loops)
    loops: list[Loop | None] = [code.around_products(loop) if passing.inner else loop for loop in found]
    peeled = not (passing.inner or passing.around or passing.whole)
    for main in loops or [None]:
        counts.add(code.count(main, passing.trips, dict(passing.rare), peeled, passing.around), 1.0)
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


def _squares(launch: Launch, loops: int, products: int = 4, beside: int = 0) -> Pass:
    """One iteration of the inverse of one matrix; the gradient goes through them again, and then back. What is multiplied `beside`, once,
    by this number of columns, counts as if by iterations, which have this number of products."""
    o = launch.options
    moved = sum(t.nbytes for t in launch.args if isinstance(t, torch.Tensor) and t.dim() == 3)
    passes = launch.grid[0] * (o["ITERATIONS"] + beside / (products * o["SIZE"]))
    return Pass("element of a square", o["SIZE"] ** 2, passes, moved, loops=loops)


def _landmark_values(launch: Launch) -> Pass:
    return _squares(launch, 1, beside=launch.options["D"] + launch.options["E"])


def _landmark_values_backward(launch: Launch) -> Pass:
    return _squares(launch, 2, products=15, beside=3 * launch.options["D"] + 2 * launch.options["E"])


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


def _projected_tiles(launch: Launch) -> tuple[int, int, float]:
    """(Tiles of rows of all blocks and heads, chunks of a head, pieces of the columns of a row)."""
    o = launch.options
    B, K, H, _, N = o["sizes"]
    return B * K * H * triton.cdiv(N, o["BLOCK_N"]), max(chunks(o["D"]), chunks(o["E"])), triton.cdiv(o["C"], o["COLUMNS"])


def _projected_scores(launch: Launch, times: int) -> Pass:
    """A tile of rows for a block of queries. `times`: how often programs take one, each for columns of its own."""
    o = launch.options
    tiles, _, columns = _projected_tiles(launch)
    passes = times * tiles * triton.cdiv(o["sizes"][3], o["BLOCK_L"])
    return Pass("score", o["BLOCK_L"] * o["BLOCK_N"], passes, launch.args[1].nbytes, trips=columns, inner=True)


def _projected_inputs(launch: Launch) -> Pass:
    """A tile of rows for all heads of all blocks, and all queries."""
    o = launch.options
    tiles, chunked, columns = _projected_tiles(launch)
    heads, blocks = o["sizes"][1] * o["sizes"][2], triton.cdiv(o["sizes"][3], o["BLOCK_L"])
    passes = tiles / heads * triton.cdiv(o["C"], o["PIECE"])
    scores = heads * blocks * o["BLOCK_L"] * o["BLOCK_N"]
    return Pass("score", scores, passes, 2 * launch.args[1].nbytes, trips=columns, around=(heads * chunked, blocks))


def _layer_rows(launch: Launch, features: int, columns: int) -> Pass:
    """A block of rows of `columns`: all of the code, and its loops over tiles of features."""
    o = launch.options
    moved = sum(t.nbytes for t in launch.args if t is not None and t.numel() >= o["rows"])
    return Pass("element of a row", o["BLOCK_R"] * columns, launch.grid[0], moved, trips=triton.cdiv(features, o["TILE"]), whole=True)


def _matrix_tiles(launch: Launch) -> Pass:
    """A block of rows into a tile of a matrix."""
    o, (left, right, *_) = launch.options, launch.args
    tiles = triton.cdiv(o["M"], o["TILE"]) * triton.cdiv(o["C"], o["PIECE"])
    passes = tiles * triton.cdiv(o["rows"], o["BLOCK_R"])
    return Pass("multiply-add", o["BLOCK_R"] * o["TILE"] * o["PIECE"], passes, left.nbytes + right.nbytes)


def _shares(launch: Launch) -> Pass:
    """A chunk of shares of a block of columns, of each of the gradients that the launch adds up."""
    o = launch.options
    sizes = zip(o["counts"], o["widths"], strict=True)
    passes = sum(triton.cdiv(count, o["CHUNK"]) * triton.cdiv(width, o["BLOCK"]) for count, width in sizes)
    return Pass("element of a share", o["CHUNK"] * o["BLOCK"], passes, sum(t.nbytes for t in launch.args if t is not None))


def _matrix_steps(launch: Launch, length: int, elements: int, moved: int) -> Pass:
    """STEPS matrices, or keys, of a run: `elements` of each."""
    steps = launch.options["STEPS"]
    return Pass("element of a sum", steps * elements, launch.grid[0] * triton.cdiv(length, steps), moved)


def _ridge_steps(launch: Launch) -> Pass:
    o = launch.options
    moved = sum(t.nbytes for t in launch.args if t is not None)
    return _matrix_steps(launch, min(o["cut"][1], o["sizes"][1]), o["TILE_D"] * o["TILE_E"], moved)


def _scanned_matrices(launch: Launch) -> Pass:
    o, (matrices, *_) = launch.options, launch.args
    return _matrix_steps(launch, min(o["length"], o["steps"]), o["BLOCK"], matrices.nbytes * (1 if o["TOTAL"] else 2))


def _planes(launch: Launch) -> Pass:
    o, (planes, rows, *_) = launch.options, launch.args
    return Pass("element of a row", o["ROWS"] * o["D"], launch.grid[0], planes.nbytes + 2 * rows.nbytes, whole=True)


PASSES: dict[str, Callable[[Launch], Pass | MultiplyAdds]] = {
    "_forward": lambda launch: _scores(launch, 1),
    "_merge": lambda launch: _runs(launch, launch.options["cut"][0], launch.options["E"]),
    "_row_terms": _row_terms,
    "_backward": lambda launch: _scores(launch, 2),
    "_backward_keys": _scores_of_keys,
    "_backward_in_parts": _scores_in_parts,
    "_sum_runs": lambda launch: _runs(launch, launch.options["cut"][0], launch.options["ROWS"] * launch.options["D"]),
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
    "_landmark_values": _landmark_values,
    "_landmark_values_backward": _landmark_values_backward,
    "_multiply": _product,
    "_solve": _eliminations,
    "_projected_forward": lambda launch: _projected_scores(launch, chunks(launch.options["E"])),
    "_projected_backward": lambda launch: _projected_scores(
        launch, _projected_tiles(launch)[1] * triton.cdiv(launch.options["C"], launch.options["PIECE"])
    ),
    "_projected_backward_inputs": _projected_inputs,
    "_feed_forward": lambda launch: _layer_rows(launch, launch.options["F"], launch.options["C"]),
    "_feed_forward_back": lambda launch: _layer_rows(launch, launch.options["F"], launch.options["C"]),
    "_project": lambda launch: _layer_rows(launch, launch.options["FIRST"], launch.options["C"]),
    "_join": lambda launch: _layer_rows(launch, launch.options["HEADS"] * launch.options["WIDTH"], launch.options["C"]),
    "_part": lambda launch: _layer_rows(launch, launch.options["HEADS"] * launch.options["WIDTH"], launch.options["C"]),
    "_project_back": lambda launch: _layer_rows(launch, launch.options["HEADS"] * launch.options["FIRST"], launch.options["C"]),
    "_matrix_gradient": _matrix_tiles,
    "_add_shares": _shares,
    "_prefix_sums": _ridge_steps,
    "_send_sums_back": _ridge_steps,
    "_scan_matrices": _scanned_matrices,
    "_add_planes": _planes,
    "_attention_step": lambda _: MultiplyAdds(None),
    "_nystrom_step": lambda _: MultiplyAdds(None),
}
"""Name of a kernel -> what one pass through its main loop does."""

LEFT_OUT = ("_vet", "_subtract")
"""Kernels without figures, which read a few numbers: the check of a packed set's offsets, and a state without some of its keys."""

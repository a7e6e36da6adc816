"""The number of blocks of each Triton kernel that a GPU's multiprocessor holds, as compiled here: `python -m
bench.gpu.occupancy --write` writes the page docs/gpu_occupancy.md, in half an hour on two cores; with `--kernels _pinv
_solve` it writes only the rows of these kernels. Without `--write` it says which rows are out of date."""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

import cmab_kernels as ck
from bench.provenance import ROOT
from cmab_kernels.attention import triton as attention
from cmab_kernels.attention.contract import Attention, AttentionBackward
from cmab_kernels.attention.prefix import triton as prefix
from cmab_kernels.attention.prefix.contract import PrefixAttention, PrefixAttentionBackward
from cmab_kernels.attention.projected import triton as projected
from cmab_kernels.attention.projected.contract import ProjectedAttention, ProjectedAttentionBackward
from cmab_kernels.attention.triton.runs import checked_offsets
from cmab_kernels.intention import triton as intention
from cmab_kernels.intention.contract import ApplyRows, Gram, GramBackward, PrefixRidge, PrefixRidgeBackward
from cmab_kernels.intention.solve import triton as solve
from cmab_kernels.intention.solve.contract import RegularisedSolve
from cmab_kernels.layers import triton as layers
from cmab_kernels.layers.contract import (
    AttentionLayer,
    AttentionLayerBackward,
    FeedForwardLayer,
    FeedForwardLayerBackward,
)
from cmab_kernels.nystrom import triton as nystrom
from cmab_kernels.nystrom.continual import triton as continual
from cmab_kernels.nystrom.continual.gradient.function import Setting
from cmab_kernels.nystrom.contract import LandmarkValues, LandmarkValuesBackward, Pinv, PinvBackward
from cmab_kernels.nystrom.triton.blocks import multiply
from cmab_kernels.testing.cubin import TENSOR_COLUMNS, Launch, as_if_on, machine_code, record

PAGE = ROOT / "docs" / "gpu_occupancy.md"
TEXT = Path(__file__).with_name("occupancy.md")
COMPILER = f"triton {triton.__version__}"

# ---- what a multiprocessor holds


class Chip(NamedTuple):
    """The `warps`, `blocks` and bytes of `shared` memory for which one multiprocessor has room."""

    name: str
    multiprocessors: int
    shared: int
    warps: int = 64
    blocks: int = 32


CHIPS = {
    80: Chip("A100", 108, 164 * 1024),
    86: Chip("RTX 3090", 82, 100 * 1024, 48, 16),
    90: Chip("H100", 132, 228 * 1024),
    100: Chip("B200", 148, 228 * 1024),
    120: Chip("RTX 5090", 170, 100 * 1024, 48, 24),
}
"""The limits by compute capability (CUDA C++ Programming Guide, technical specifications; data sheets)."""


def blocks_held(capability: int, registers: int, shared: int, warps: int, tensor_columns: int = 0) -> tuple[int, str]:
    """The number of blocks that a multiprocessor holds, and the limiting resource, by the rules of NVIDIA's
    cuda_occupancy.h.

    The arguments are the `registers` of a thread, and the bytes of shared memory, the warps, and the columns of tensor
    memory of a block. The registers of a warp are allocated in units of 256 from the 16,384 of its scheduler. The
    system takes 1 KiB of each block's shared memory, which is allocated in units of 128 bytes.
    """
    chip, of_warp = CHIPS[capability], -(-max(registers, 1) * 32 // 256) * 256
    room = {
        "registers": 16384 // of_warp * 4 // warps,
        "shared memory": chip.shared // (-(-(shared + 1024) // 128) * 128),
        "warps": chip.warps // warps,
        "blocks": chip.blocks,
        "tensor memory": TENSOR_COLUMNS // max(tensor_columns, 1),
    }
    blocks = min(room.values())
    return blocks, next(name for name, most in room.items() if most == blocks)


# ---- compiled calls

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
Call = tuple[str, int, torch.dtype, Callable[[], Any]]
"""A call: its name on the page, width and dtype, and its forward and backward pass on tensors without memory."""


def _attention(dtype: torch.dtype, heads: int, latents: int, width: int) -> Call:
    def call() -> None:
        q, k, v = (torch.empty(1, heads, n, width, dtype=dtype) for n in (latents, 10**6, 10**6))
        out, lse = torch.empty(1, heads, latents, width), torch.empty(1, heads, latents, dtype=F64)
        attention.attention_forward(Attention(q, k, v, scale=1.0))
        attention.attention_backward(
            AttentionBackward(out, lse, q, k, v, None, None, out, lse, None, 1.0, (True, True, True, False))
        )

    return f"latent_attention, {heads} x (L {latents}, N 1e6, d {width})", width, dtype, call


def _removal() -> None:
    q, k = torch.empty(1, 4, 128, 16), torch.empty(1, 4, 1000, 16)
    attention.attention_removal(Attention(q, k, k, None, None, q, torch.empty(1, 4, 128, dtype=F64), None, 1.0))
    checked_offsets(torch.empty(65, dtype=torch.int32), 1000)


def _prefixes() -> None:
    q, k = torch.empty(16, 4, 16, 16), torch.empty(16, 4, 1000, 16)
    out, lse = torch.empty(16, 4, 1000, 16, 16), torch.empty(16, 4, 1000, 16, dtype=F64)
    prefix.prefix_forward(PrefixAttention(q, k, k, every=1, scale=1.0))
    needs = (True, True, True, False, False, False, False)
    given = (out, lse, q, k, k, None, None, None, out, lse, None, None, 1, 1.0)
    prefix.prefix_backward(PrefixAttentionBackward(*given, needs))


def _projected(dtype: torch.dtype) -> Call:
    def call() -> None:
        out, lse = torch.empty(1, 1, 4, 128, 16), torch.empty(1, 1, 4, 128, dtype=F64)
        given = (out, torch.empty(1, 2**16, 64, dtype=dtype), torch.empty(1, 128, 64), torch.empty(1, 128), None, None)
        projected.projected_attention_forward(ProjectedAttention(*given, scale=1.0, eps=1e-5))
        projected.projected_attention_backward(
            ProjectedAttentionBackward(out, lse, *given, out, lse, 1.0, 1e-5, (True,) * 4)
        )

    return "projected_attention_state, 4 x (L 128, N 65,536, C 64, d 16)", 16, dtype, call


def _feed_forward() -> None:
    given = [torch.empty(sizes) for sizes in ((2048, 64), (64,), (64,), (256, 64), (256,), (64, 128), (64,))]
    layers.feed_forward_layer(FeedForwardLayer(*given, 1e-5, "geglu", "input"))
    layers.feed_forward_layer_backward(FeedForwardLayerBackward(given[0], *given, 1e-5, "geglu", "input", (True,) * 7))


def _attention_layer() -> None:
    x, matrix, vector = torch.empty(16, 128, 64), torch.empty(64, 64), torch.empty(64)
    tensors, settings = (
        (x, None, None, vector, vector, None, None, *(matrix, vector) * 4),
        (4, 0.25, 1e-5, 1e-5, "input"),
    )
    out, lse = torch.empty(16, 4, 128, 16), torch.empty(16, 4, 128, dtype=F64)
    layers.attention_layer(AttentionLayer(*tensors, *settings))
    needs = True, False, True, True, False, False, *(True,) * 8
    layers.attention_layer_backward(AttentionLayerBackward(x, *tensors, x, x, x, out, lse, *settings, needs))


def _prefix_sums() -> None:
    rows, sums = torch.empty(16, 1, 1000, 16), torch.empty(16, 1, 1000, 16, 16, dtype=F64)
    intention.prefix_ridge(PrefixRidge(rows, rows, None, None, None, None, 1))
    intention.prefix_ridge_backward(
        PrefixRidgeBackward(sums, sums, rows, rows, None, None, 1, (True, True, False, False, False))
    )


def _sums(dtype: torch.dtype, batch: int, keys: int) -> Call:
    def call() -> None:
        rows, square = torch.empty(batch, 1, keys, 64, dtype=dtype), torch.empty(batch, 1, 64, 64, dtype=F64)
        intention.gram(Gram(rows, rows, None, None, None, (True, True), False))
        intention.gram_backward(GramBackward(square, square, rows, rows, None, None, None, (True, True, False), False))
        intention.apply_rows(ApplyRows(rows, square))

    return f"ridge_state, {batch} x (N {keys:,}, d 64)", 64, dtype, call


def _landmarks() -> None:
    matrix, rows = torch.empty(1024, 16, 16), torch.empty(1024, 16, 64)
    nystrom.iterative_pinv(Pinv(matrix, 6))
    nystrom.iterative_pinv_backward(PinvBackward(matrix, matrix, 6))
    nystrom.landmark_values(LandmarkValues(rows, rows, rows, None, 0.125, 6))
    nystrom.landmark_values_backward(LandmarkValuesBackward(rows, rows, rows, rows, None, 0.125, 6))


def _solve(dtype: torch.dtype) -> Call:
    def call() -> None:
        gram = torch.empty(256, 64, 64, dtype=dtype)
        solve.regularised_solve(RegularisedSolve(gram, gram, gram[:, 0, 0]))

    return "regularised_solve, 256 x (order 64, 64 columns)", 64, dtype, call


def _steps() -> None:
    with torch.device("cpu"):  # a stream begins with the values of a real window
        rows, token = torch.zeros(16, 4, 64, 64), torch.zeros(16, 4, 1, 64)
        continual.continual_attention_step(ck.continual_attention_init(rows, rows, rows), token, token, token, False)
        continual.continual_nystrom_step(ck.continual_nystrom_init(rows, rows, rows, 16), token, token, token, False)


def _step_gradient() -> None:
    step, position = Setting(1, 64, 65, 0.125, False), torch.empty(16, 4, dtype=torch.int64)
    token, ring = (torch.empty(16, 4, rows, 64) for rows in (1, 65))
    shapes = ((16, 69), (16, 64), (16, 64), (16, 16), (16, 67))
    sums, *others = (torch.empty(16, 4, *shape) for shape in shapes)
    continual.step_backward(step, token, ring, ring, (sums, *others), position, token, ring, ring, sums)


CALLS: Sequence[Call] = [
    *(_attention(dtype, *sizes) for dtype, sizes in ((BF16, (4, 128, 16)), (BF16, (8, 512, 64)), (F32, (4, 128, 16)))),
    ("subtract_state and cu_seqlens, 4 x (L 128, d 16)", 16, F32, _removal),
    ("prefix_attention_states, 64 x (L 16, N 1,000, d 16)", 16, F32, _prefixes),
    *(_projected(dtype) for dtype in (BF16, F32)),
    ("feed_forward_layer, 2,048 rows of 64, 128 features", 64, F32, _feed_forward),
    ("attention_layer, 16 x (4 heads of 16, L 128)", 16, F32, _attention_layer),
    ("prefix_ridge_states, 16 x (N 1,000, d 16)", 16, F32, _prefix_sums),
    *(_sums(dtype, *sizes) for sizes, dtype in (((256, 1024), BF16), ((256, 1024), F32), ((1, 10**6), F32))),
    ("landmarks of nystrom_attention, 1,024 x (m 16, d 64)", 16, F32, _landmarks),
    (
        "one product of 65 landmarks or more, 64 x (m 256)",
        256,
        F32,
        lambda: multiply(torch.empty(64, 256, 256), torch.empty(64, 256, 256)),
    ),
    *(_solve(dtype) for dtype in (F32, F64)),
    ("a step of a stream, 64 x (n 64, m 16, d 64)", 64, F32, _steps),
    ("the gradient of a step, 64 x (n 64, m 16, d 64)", 64, F32, _step_gradient),
]

Key = tuple[str, str]
"""A kernel, and a call that launches it, by their names on the page."""


def launches() -> dict[Key, dict[int, Launch]]:
    """The launches, by the compute capability of the GPU that makes them.

    A kernel has one row for each dtype and width of rows, with the first call that launches it.
    """
    found: dict[Key, dict[int, Launch]] = {}
    for capability in CHIPS:
        seen = set()
        for name, width, dtype, call in CALLS:
            with torch.device("meta"), as_if_on(capability):
                recorded = {launch.kernel.__name__: launch for launch in record(call)}
            for kernel, launch in recorded.items():
                if (kernel, width, dtype) not in seen:
                    seen.add((kernel, width, dtype))
                    found.setdefault((f"`{kernel}`", f"{name}, {str(dtype)[6:]}"), {})[capability] = launch
    return found


# ---- the page


def row(key: Key, on_chips: Mapping[int, Launch], folder: Path) -> str:
    """A line of the table, compiled now. Each figure is given for every chip, or once if it is the same for all; "-"
    means that another kernel runs."""
    of_chips = [_figures(on_chips[chip], chip, folder) if chip in on_chips else ["-"] * 9 for chip in CHIPS]
    cells = (" / ".join(cell) if len(set(cell)) > 1 else cell[0] for cell in zip(*of_chips, strict=True))
    return f"| {' | '.join([*key, *cells, _on_amd(next(iter(on_chips.values())))])} |"


def _figures(launch: Launch, capability: int, folder: Path) -> list[str]:
    made, (programs,) = machine_code(launch, capability, folder), launch.grid
    spilled = len(re.findall(r"\s(?:LDL|STL)[. ]", made.sass))
    blocks, limit = blocks_held(capability, made.registers, made.shared, made.warps, made.tensor_columns)
    if not blocks:
        raise ValueError(
            f"{launch.kernel.__name__} on sm_{capability}: a multiprocessor has not enough {limit} for one block: no "
            "launch"
        )
    waves = programs / (blocks * CHIPS[capability].multiprocessors)
    held = f"{made.warps}", f"{made.registers}", f"{spilled}", f"{made.shared / 1024:.1f}", f"{blocks}", limit
    return [*held, f"{programs}", f"{waves:.2f}", f"{math.ceil(waves) - waves:.0%}"]


def _on_amd(launch: Launch) -> str:
    """Vector registers, spilled registers, and KiB of LDS, as Triton compiles a launch for AMD's gfx942."""
    source, options = launch.kernel.source(*launch.args, **launch.options)
    kernel = triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options=options)
    registers, spilled = (
        re.findall(rf"\.{name}:\s+(\d+)", kernel.asm["amdgcn"])[0] for name in ("vgpr_count", "vgpr_spill_count")
    )
    return f"{registers}, {spilled}, {kernel.metadata.shared / 1024:.1f}"


def written() -> dict[Key, str]:
    """The rows of the existing page."""
    lines = re.findall(r"(?m)^\| `.*$", PAGE.read_text()) if PAGE.exists() else []
    return {(line.split(" | ")[0][2:], line.split(" | ")[1]): line for line in lines}


def page(rows: Mapping[Key, str]) -> str:
    chips = ", ".join(
        f"{chip.name} (sm_{capability}, {chip.multiprocessors} multiprocessors)" for capability, chip in CHIPS.items()
    )
    return TEXT.read_text().format(rows="\n".join(rows.values()), chips=chips, compiler=COMPILER)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.occupancy", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--kernels", nargs="+", metavar="KERNEL", help="compile only these")
    parser.add_argument("--write", action="store_true", help="write the page")
    wanted = parser.parse_args(given)
    before, rows = written(), {}
    with tempfile.TemporaryDirectory() as folder:
        for key, on_chips in launches().items():
            known = wanted.kernels and key[0].strip("`") not in wanted.kernels and key in before
            rows[key] = before[key] if known else row(key, on_chips, Path(folder))
            if rows[key] != before.get(key):
                print(rows[key], flush=True)
    if wanted.write:
        PAGE.write_text(page(rows))
    return 0 if wanted.write or rows == before else 1


if __name__ == "__main__":
    raise SystemExit(main())

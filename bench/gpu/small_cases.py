"""Every kernel once or twice on very little data, for a sanitizer to look on: `python -m bench.gpu.small_cases FAMILY [--device cuda]`.

Ragged sizes, masks, packed sets and states are among them. The faults at the end are for the sanitizer to find: it must be shown to see.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.backends import implementation

from .problems import why_not

Case = tuple[str, Callable[[], Any]]


def _normal(*shape: int, dtype: torch.dtype = torch.float32, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def attention(device: str) -> Iterator[Case]:
    """Several runs of keys and their merge, one and several blocks of queries, forward and backward."""
    mask = torch.zeros(2, 1100, dtype=torch.bool, device=device)
    mask[:, 7:13] = True
    offsets = torch.tensor([0, 0, 300, 1100], device=device)

    def run(dtype: torch.dtype, latents: int, width: int, **options: Any) -> None:
        batch = 3 if "cu_seqlens" in options else 2
        q = _normal(batch, 1, latents, width, dtype=dtype, device=device).requires_grad_()
        k, v = (
            _normal(1 if batch == 3 else 2, 1, 1100, w, dtype=dtype, device=device).requires_grad_() for w in (width, max(width // 2, 1))
        )
        out, lse = ck.attention_state(q, k, v, impl="triton", **options)
        torch.autograd.grad((out.sum(), lse.sum()), (q, k, v))

    state = ck.AttentionState(_normal(2, 1, 5, 8, device=device), _normal(2, 1, 5, dtype=torch.float64, device=device))
    half = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float16  # which the interpreter knows
    yield "half precision", lambda: run(half, 5, 16)
    yield "float32 with a mask and a state", lambda: run(torch.float32, 5, 16, key_padding_mask=mask, state=state)
    yield "float16, packed", lambda: run(torch.float16, 5, 9, cu_seqlens=offsets)
    yield "several blocks of queries", lambda: run(torch.float32, 140, 33)
    yield "float64", lambda: run(torch.float64, 3, 7)


def intention(device: str) -> Iterator[Case]:
    """Sums over several runs, in one tile and in several, their gradients, and rows."""
    module = implementation("intention", "triton")
    mask = torch.zeros(2, 1100, dtype=torch.bool, device=device)
    mask[1, 7:13] = True

    def run(dtype: torch.dtype, width: int, value_width: int, weighted: bool, exact: bool) -> None:
        k, v = (_normal(2, 1, 1100, w, dtype=dtype, device=device) for w in (width, value_width))
        weights = torch.rand(2, 1, 1100, device=device, dtype=torch.promote_types(dtype, torch.float32)) if weighted else None
        hidden = mask if weighted else None
        sums = module.gram(k, v, weights, hidden, (True, True), exact)
        module.gram_backward(*sums, k, v, weights, hidden, (True, True, weighted), exact)
        module.apply_rows(k, sums[1])

    yield "bfloat16", lambda: run(torch.bfloat16, 16, 16, False, False)
    yield "float32 with weights and a mask", lambda: run(torch.float32, 9, 7, True, False)
    yield "several tiles", lambda: run(torch.float32, 70, 3, False, False)
    yield "float64", lambda: run(torch.float64, 33, 5, True, True)


def nystrom(device: str) -> Iterator[Case]:
    """The pseudo-inverse and what lies around it, with their gradients."""
    module = implementation("nystrom", "triton")

    def run(dtype: torch.dtype, m: int, width: int) -> None:
        q, k = (_normal(3, m, width, dtype=dtype, device=device) for _ in range(2))
        v = _normal(3, m, 5, dtype=dtype, device=device)
        absent = torch.zeros(3, m, dtype=torch.bool, device=device)
        absent[1, 0] = True
        matrix = _normal(3, m, m, dtype=dtype, device=device).softmax(-1)
        module.iterative_pinv_backward(module.iterative_pinv(matrix, 2), matrix, 2)
        out = module.landmark_values(q, k, v, absent, 0.3, 2)
        module.landmark_values_backward(out, q, k, v, absent, 0.3, 2)

    yield "float32, m 7", lambda: run(torch.float32, 7, 9)
    yield "float32, m 40", lambda: run(torch.float32, 40, 33)
    yield "float64, m 16", lambda: run(torch.float64, 16, 16)


def cuda(device: str) -> Iterator[Case]:
    """The CUDA kernels of csrc: sums with a solve, batches of solves, and both continual steps."""
    if reason := why_not("regularised_solve", "cuda", device):
        print(f"passed over: {reason}")
        return

    def ridge(dtype: torch.dtype, width: int) -> None:
        k, v = (_normal(2, 1, 300, w, dtype=dtype, device=device) for w in (width, 5))
        ck.intention(k[:, :, :3], k, v, 1.0, form="primal", impl="cuda")

    def solve(dtype: torch.dtype, order: int) -> None:
        a, b = (_normal(5, order, w, dtype=dtype, device=device) for w in (order, 3))
        ck.regularised_solve(a @ a.mT, b, 1.0, impl="cuda")

    def steps(dtype: torch.dtype, output: str, exact: bool) -> None:
        q, k, v = (_normal(2, 1, 40, w, dtype=dtype, device=device) for w in (9, 9, 7))
        window = tuple(t[:, :, :13] for t in (q, k, v))
        state = ck.continual_attention_init(*window) if exact else ck.continual_nystrom_init(*window, 5)
        step = ck.continual_attention_step if exact else ck.continual_nystrom_step
        for at, to in ((13, 14), (14, 15), (15, 40)):
            _, state = step(state, *(t[:, :, at:to] for t in (q, k, v)), output=output, impl="cuda")

    yield "ridge, float32", lambda: ridge(torch.float32, 17)
    yield "ridge, bfloat16", lambda: ridge(torch.bfloat16, 64)
    yield "solve, float64", lambda: solve(torch.float64, 33)
    yield "solve, float32", lambda: solve(torch.float32, 16)
    for exact in (False, True):
        for output in ("single", "retroactive"):
            yield f"{'exact' if exact else 'Nyström'} step, {output}", lambda e=exact, o=output: steps(torch.float32, o, e)
    yield "Nyström step, bfloat16", lambda: steps(torch.bfloat16, "single", False)


# ---- faults


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def out_of_bounds(device: str) -> Iterator[Case]:
    source, target = torch.zeros(4096, device=device), torch.zeros(16, device=device)
    yield "a write beyond the end", lambda: _copy[(1,)](source, target, 4096, BLOCK=4096)


def uninitialised(device: str) -> Iterator[Case]:
    source, target = torch.empty(64, device=device), torch.zeros(64, device=device)
    yield "a read of what was never written", lambda: _copy[(1,)](source, target, 64, BLOCK=64)


FAMILIES = {"attention": attention, "intention": intention, "nystrom": nystrom, "cuda": cuda}
FAULTS = {"out_of_bounds": out_of_bounds, "uninitialised": uninitialised}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=[*FAMILIES, *FAULTS])
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    for name, run in {**FAMILIES, **FAULTS}[options.family](options.device):
        print(f"{options.family}: {name}", flush=True)
        run()
        if torch.device(options.device).type == "cuda":
            torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())

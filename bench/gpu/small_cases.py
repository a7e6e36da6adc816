"""Every kernel once or twice on very little data, for a sanitizer to look on: `python -m bench.gpu.small_cases FAMILY [--device cuda]`.

The problems are those of the parity sections, small; what is expected of them is not computed, for the sanitizer would look on at that
too. Ragged sizes, masks, packed sets and states are among them. The faults at the end are there for the sanitizer to find.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

import cmab_kernels as ck

from . import continual_parity, nystrom_parity, parity, ridge_parity
from .problems import key_of, why_not

Case = tuple[str, Callable[[], Any]]


def attention(device: str) -> Iterator[Case]:
    """Several runs of keys and their merge, one and several blocks of queries, forward and backward."""
    half = "bfloat16" if torch.device(device).type == "cuda" else "float16"  # which the interpreter knows
    few = {"latents": 5, "keys": 1100}
    for problem in (
        parity.Problem(half, 16, 8, **few),
        parity.Problem("float32", 16, 8, **few, variant="mask"),
        parity.Problem("float32", 16, 8, **few, variant="state"),
        parity.Problem("float16", 9, 4, **few, variant="packed"),
        parity.Problem("float32", 33, 16, latents=140, keys=1100),
        parity.Problem("float64", 7, 3, latents=3, keys=1100),
    ):
        yield key_of(problem), lambda problem=problem: parity.by_kernels(parity.make(problem, device))


def intention(device: str) -> Iterator[Case]:
    """Sums over several runs, in one tile and in several, their gradients, and rows."""
    for problem in (
        ridge_parity.Problem("triton", "bfloat16", 16, 16, keys=1100),
        ridge_parity.Problem("triton", "float32", 9, 7, keys=1100, variant="masked"),
        ridge_parity.Problem("triton", "float32", 70, 3, keys=1100),
        ridge_parity.Problem("triton", "float64", 33, 5, keys=1100, variant="masked", exact=True),
    ):
        yield key_of(problem), lambda problem=problem: ridge_parity.by_kernels(ridge_parity.make(problem, device), "triton", problem.exact)


def nystrom(device: str) -> Iterator[Case]:
    """The pseudo-inverse and what lies around it, with their gradients."""
    for dtype, landmarks, width in (("float32", 7, 9), ("float32", 40, 33), ("float64", 16, 16)):
        problem = nystrom_parity.Problem(dtype, landmarks, width, 5, "absent", iterations=2, count=3)
        yield key_of(problem), lambda problem=problem: nystrom_parity.by_kernels(nystrom_parity.make(problem, device), "triton")


def cuda(device: str) -> Iterator[Case]:
    """The CUDA kernels of csrc: sums with a solve, batches of solves, and both continual steps."""
    if reason := why_not("regularised_solve", "cuda", device):
        print(f"passed over: {reason}")
        return

    def ridge(problem: ridge_parity.Problem) -> None:
        given = ridge_parity.make(problem, device)
        ck.intention(given.key[:, :, :3], given.key, given.value, 1.0, form="primal", impl="cuda")

    def solve(dtype: torch.dtype, order: int) -> None:
        a, b = (torch.randn(5, order, n, dtype=dtype, device=device) for n in (order, 3))
        ck.regularised_solve(a @ a.mT, b, 1.0, impl="cuda")

    def steps(problem: continual_parity.Problem) -> None:
        tokens = continual_parity.stream(problem, 40, device)
        state = continual_parity.start(problem, tokens)
        for at, to in ((13, 14), (14, 15), (15, 40)):
            _, state = continual_parity.step(problem, state, tuple(t[:, :, at:to] for t in tokens), "cuda")

    for sums in (ridge_parity.Problem("cuda", "float32", 17, 5, 300), ridge_parity.Problem("cuda", "bfloat16", 64, 5, 300)):
        yield f"ridge, {key_of(sums)}", lambda sums=sums: ridge(sums)
    for dtype, order in ((torch.float64, 33), (torch.float32, 16)):
        yield f"solve, {dtype}, order {order}", lambda dtype=dtype, order=order: solve(dtype, order)
    shape = {"window": 13, "landmarks": 5, "width": 9, "value_width": 7}
    for dtype, kind, retroactive in (
        *itertools.product(("float32",), ("continual", "exact"), (False, True)),
        ("bfloat16", "continual", False),
    ):
        problem = continual_parity.Problem(dtype, kind, retroactive, **shape)
        yield f"step, {key_of(problem)}", lambda problem=problem: steps(problem)


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

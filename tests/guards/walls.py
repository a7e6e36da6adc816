"""Every public operator on inputs between memory pages that cannot be accessed, with results between margins: `python
-m tests.guards.walls`.

The operators are those of the suites, in every layout, without gradients and with them. A read outside of an input ends
the process; the last line that it printed names the case. The arguments are the names of dtypes; without arguments,
only float32.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import mmap
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import LAYOUTS, OperatorSuite, guarded_results
from cmab_kernels.testing.memory import MARGIN

TESTS = Path(__file__).resolve().parents[1]
PAGE = mmap.PAGESIZE
NO_ACCESS = 0
"""PROT_NONE"""
MADE_BY_TORCH = ("prefix_ridge_states", "remove_ridge")
"""Operators whose results torch computes from those of a kernel."""


def between_walls(dtype: torch.dtype, elements: int, at_the_end: bool, beyond: int = 0) -> Tensor:
    """Return a vector of zeros in its own pages, with a page that cannot be accessed before and after them.

    Its last element ends where the page after begins. If not `at_the_end`, its first element begins where the page
    before ends. `beyond` more elements belong to the tensor, and cannot be read.
    """
    size = elements * dtype.itemsize
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for wall in (address, address + (pages + 1) * PAGE):
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(wall), ctypes.c_size_t(PAGE), NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    start = (pages + 1) * PAGE - size if at_the_end else PAGE
    return torch.frombuffer(memory, dtype=dtype, count=elements + beyond, offset=start)


def walled(tensor: Tensor, at_the_end: bool) -> Tensor:
    """Return a copy with the same strides in memory from `between_walls`."""
    if not tensor.numel():
        return tensor
    reach = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    placed = between_walls(tensor.dtype, reach, at_the_end)
    placed.copy_(tensor.as_strided((reach,), (1,)) if reach > 1 else tensor.reshape(1))
    return placed.as_strided(tensor.shape, tensor.stride())


def suites() -> Iterator[type[OperatorSuite]]:
    """Yield the suites of all operators with a native implementation."""
    for file in sorted(TESTS.rglob("test_suite.py")):
        module = importlib.import_module(".".join(("tests", *file.relative_to(TESTS).with_suffix("").parts)))
        for name, suite in vars(module).items():
            if name.startswith("Test") and "native" in suite.impls:
                yield suite


def check(suite: OperatorSuite, dtype: torch.dtype, layout: str, at_the_end: bool) -> None:
    """Run an operator, without gradients and with them, on inputs between walls, with results between margins."""
    inputs = suite.inputs(dtype)
    if suite.mask:
        inputs[suite.mask] = torch.rand(suite.extents[suite.batch], suite.extents[suite.masked]) < 0.1
    along = [torch.randn(r.shape).to(r) for r in suite.call("native", **inputs)]
    placed = {name: walled(_laid(t, layout), at_the_end) for name, t in inputs.items()}
    with torch.no_grad(), guarded_results():
        results = suite.call("native", **placed)
    by_torch = suite.operator in MADE_BY_TORCH or dtype.itemsize < 4  # torch rounds some results to half types
    assert by_torch or all(map(_has_margins, results)), "a result has no margins"
    with guarded_results():
        suite.run("native", placed, tuple(walled(_laid(t, layout), at_the_end) for t in along))


def check_merge(dtype: torch.dtype, layout: str, at_the_end: bool) -> None:
    """Merge two states between such pages: this native call is not an operator of a suite."""
    shapes = ((2, 3, 5, 7), torch.promote_types(dtype, torch.float32)), ((2, 3, 5), torch.float64)
    first, second = (
        ck.AttentionState(
            *(walled(_laid(torch.randn(shape, dtype=kind), layout), at_the_end) for shape, kind in shapes)
        )
        for _ in range(2)
    )
    with torch.no_grad(), guarded_results():
        assert all(map(_has_margins, ck.merge_states(first, second))), "a result has no margins"


def _has_margins(result: Tensor) -> bool:
    return result.untyped_storage().nbytes() >= (result.numel() + 2 * MARGIN) * result.itemsize


def allocate_in_python() -> None:
    """Let the extension create tensors as with an older torch, through `torch.empty`, and let `torch.empty` use
    `Tensor.new_empty`: with margins.

    This must be called before the extension is called.
    """
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        del torch.Tensor.__dlpack_c_exchange_api__
    plain, like = torch.empty, torch.zeros(0)

    def empty(*shape: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        others = options.keys() - {"device"}  # the extension asks for a tensor on the CPU; `like` is there
        return plain(*shape, dtype=dtype, **options) if others else like.new_empty(*shape, dtype=dtype)

    torch.empty = empty  # type: ignore[assignment]  # the calls that are made here, of all its overloads


def _laid(tensor: Tensor, layout: str) -> Tensor:
    """The tensor in a layout; a mask, which the layout does not apply to, and a number are returned unchanged."""
    return LAYOUTS[layout](tensor) if tensor.dim() and tensor.is_floating_point() else tensor


class _Run:
    """A suite that has been set up."""

    def __init__(self, kind: type[OperatorSuite]) -> None:
        self.suite = kind()
        self.suite.setup_method()

    def close(self) -> None:
        self.suite.teardown_method()


def main(names: list[str]) -> None:
    allocate_in_python()
    chosen = [getattr(torch, name) for name in names or ["float32"]]
    for kind in suites():
        with closing(_Run(kind)) as run:
            for dtype, layout, at_the_end in cases(
                f"{kind.__module__}.{kind.__name__}", [each for each in chosen if each in kind.dtypes]
            ):
                check(run.suite, dtype, layout, at_the_end)
    for dtype, layout, at_the_end in cases("merge_states", chosen):
        check_merge(dtype, layout, at_the_end)


def cases(name: str, dtypes: list[torch.dtype]) -> Iterator[tuple[torch.dtype, str, bool]]:
    """Yield each dtype, layout and side, and print them first."""
    for dtype, layout, at_the_end in itertools.product(dtypes, LAYOUTS, (True, False)):
        print(f"{name}, {dtype}, {layout}, {'end' if at_the_end else 'beginning'}", flush=True)
        yield dtype, layout, at_the_end


if __name__ == "__main__":
    main(sys.argv[1:])

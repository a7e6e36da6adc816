"""Memory does not grow over hundreds of calls of any operator, with and without a backward pass (nightly 100,000 calls,
and 10,000 with a backward pass)."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from cmab_kernels.runtime import backends
from cmab_kernels.testing import OperatorSuite

from ..declarations import declarations

WARM_UP, ROUNDS = 50, 10


class _Heap(ctypes.Structure):
    """The C library's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


try:
    _mallinfo = ctypes.CDLL(None).mallinfo2
    _mallinfo.restype = _Heap
except (AttributeError, OSError):
    _mallinfo = None

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(_mallinfo is None, reason="the C library does not say how much memory is in use (mallinfo2)"),
]


def _in_use() -> tuple[int, int]:
    """Return the bytes that C and C++ hold, tensors among them, and the number of blocks that Python holds.

    Python has a table of attribute names that were looked up. The table has at most 4,096 places, and the place of a
    name depends on its address. The engine of autograd looks up these names by new strings, so that several successive
    calls may each leave a name in the table. This does not count as growth. The table of the tensors to which continual
    steps may write removes dead tensors when it has doubled; here it removes them at once.
    """
    sys._clear_type_cache()
    if native := backends.imported("nystrom.continual", "native"):
        native.remembered()
    gc.collect()
    heap = _mallinfo()
    return heap.uordblks + heap.hblkhd, sys.getallocatedblocks()


def _growth(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Return by how many bytes and Python blocks the memory in use grows at each call, in the best of ten rounds.

    A cache that is being filled grows in one round; a leak grows in all rounds.
    """
    for _ in range(WARM_UP):
        call()
    gc.collect()
    gc.freeze()  # the collector then does not search existing objects again
    in_use = [_in_use()]
    for _ in range(ROUNDS):
        for _ in range(calls // ROUNDS):
            call()
        in_use.append(_in_use())
    gc.unfreeze()
    rounds = [
        [(now - then) / (calls // ROUNDS) for now, then in zip(after, before, strict=True)]
        for before, after in pairwise(in_use)
    ]
    byte, block = (min(figures) for figures in zip(*rounds, strict=True))
    return byte, block


def _assert_flat(call: Callable[[], object], calls: int) -> None:
    """Assert that each call leaves less behind than the smallest possible block."""
    byte, block = _growth(call, calls)
    assert byte < 8.0 and block < 0.9, f"{byte:.1f} bytes and {block:.2f} blocks of Python stay behind of each call"


SUITES = {
    operator: next(suite for suite in declarations() if suite.operator == operator)
    for operator in sorted(backends.OPERATORS)
}


def _suite(operator: str) -> tuple[OperatorSuite, str, dict[str, torch.Tensor]]:
    suite = SUITES[operator]()
    impl = "native" if backends.imported(backends.OPERATORS[operator], "native") else "reference"
    dtype = torch.float32 if torch.float32 in suite.dtypes else torch.float64
    return suite, impl, suite.inputs(dtype, extents=suite.small)


@pytest.mark.parametrize("operator", SUITES)
@pytest.mark.parametrize("calls, with_backward", [(300, 300), pytest.param(100_000, 10_000, marks=pytest.mark.nightly)])
def test_calls_leave_nothing_behind(operator: str, calls: int, with_backward: int) -> None:
    suite, impl, inputs = _suite(operator)
    torch.use_deterministic_algorithms(False)
    with torch.no_grad():
        _assert_flat(lambda: suite.call(impl, **inputs), calls)
    _assert_flat(lambda: suite.run(impl, inputs), with_backward)


KEPT: list[object] = []


@pytest.mark.parametrize(
    "leak", [lambda: KEPT.append(torch.empty(1)), lambda: KEPT.append([])], ids=["a tensor", "an object"]
)
def test_what_stays_behind_is_seen(leak: Callable[[], None]) -> None:
    """Rounds have 2,000 calls, because in 200 calls a leak of one object per call could be hidden by twenty blocks that
    a thread frees."""
    suite, impl, inputs = _suite("latent_attention")
    with torch.no_grad(), pytest.raises(AssertionError, match="stay behind"):
        _assert_flat(lambda: (suite.call(impl, **inputs), leak()), 20_000)
    KEPT.clear()

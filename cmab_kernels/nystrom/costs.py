"""The cost of a step: the operations and memory that the paper on continual Nyström attention states, and those of our
kernels.

All counts are for one head, with n tokens in the window, m landmarks, queries and keys of width D, and values of width
E. The paper has one width d for both. `paper_operations` and `paper_memory` are the paper's formulas as printed. These
formulas are not on one scale: the two products of full attention, n^2 d multiply-adds each, count as 4 n^2 d, and the
four products of Nyström attention, n m d each, count as 4 n m d. The operations that are executed here are counted as
torch's `FlopCounterMode` does: two for each multiply-add of a product, and none for the rest.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Collection
from typing import NamedTuple

from ..runtime.checks import mismatch
from ..runtime.constants import SCHEDULE
from .reference import segment_ends

Formula = Callable[[int, int, int], int]
"""A count as a function of n, m and d."""

PAPER_OPERATIONS: dict[str, Formula] = {
    "full": lambda n, m, d: 4 * n * n * d,
    "retroactive": lambda n, m, d: 13 * n * d + 8 * n - 9 * d - 5,
    "single": lambda n, m, d: 4 * n * d + n + d - 1,
    "nystrom": lambda n, m, d: 4 * n * d * m + 2 * n * d + n * m**2 + 2 * n * m + d * m**2 + 24 * m**3 + 23 * m**2,
    "continual retroactive, kept": lambda n, m, d: n * d * m + 8 * d * m + m**2 + 8 * m,
    "continual retroactive, updated": lambda n, m, d: (
        8 * n * d + n * m**2 + 11 * n + 17 * d * m + 24 * m**3 + 22 * m**2 + 23 * m
    ),
    "continual single, kept": lambda n, m, d: 8 * d * m + m**2 + 6 * m,
    "continual single, updated": lambda n, m, d: (
        n * d * m + 3 * n * d + n + 14 * d * m + 24 * m**3 + 23 * m**2 + 20 * m
    ),
}
"""Scheme -> the paper's number of operations of one step.

"full" (softmax) and "nystrom" recompute attention over the whole window. "retroactive" and "single" are steps of
continual exact attention, with outputs for all tokens of the window or for the newest. The others are steps of
continual Nyström attention: "kept" steps keep their landmarks, and "updated" steps replace the oldest.
"""


SCHEMES = (
    "full",
    "nystrom",
    *(f"{kind}{output}" for kind in ("", "continual ", "fixed ") for output in ("retroactive", "single")),
)
"""Schemes of `paper_operations` and `executed_on_average`. "continual" landmarks change with the window, "fixed"
landmarks do not."""


class Memory(NamedTuple):
    """Memory of a scheme, in elements for one head."""

    between: int
    """Elements kept from one step to the next."""
    peak: int
    """Largest number of elements held during a step."""


PAPER_MEMORY: dict[str, tuple[Formula, Formula]] = {
    "retroactive": (lambda n, m, d: 4 * n * d + n - d - 4, lambda n, m, d: 5 * n * d + 2 * n),
    "single": (lambda n, m, d: 2 * n * d - 2, lambda n, m, d: 2 * n * d + n + 2 * d),
    "continual retroactive": (
        lambda n, m, d: 3 * n * d + 2 * n * m + 4 * d * m + 2 * m**2 - 2 * m - 6,
        lambda n, m, d: 4 * n * d + 3 * n * m + 2 * n + 4 * d * m + 7 * m**2 + 4 * m,
    ),
    "continual single": (
        lambda n, m, d: 2 * n * d + 4 * d * m + 2 * m**2 - 2,
        lambda n, m, d: 2 * n * d + n * m + n + 4 * d * m + d + 7 * m**2 + 4 * m,
    ),
    "fixed retroactive": (
        lambda n, m, d: n * m + 3 * d * m + m**2 + m,
        lambda n, m, d: n * d + n * m + 3 * d * m + m**2 + 2 * m,
    ),
    "fixed single": (lambda n, m, d: 3 * d * m + m**2 + m, lambda n, m, d: 3 * d * m + d + m**2 + 2 * m),
}
"""Scheme -> the paper's formulas for the memory between steps, and at the peak within a step.

The formulas for fixed landmarks leave out the window itself, 2 n d elements, which a step needs to remove the oldest
token.
"""


def paper_operations(scheme: str, n: int, m: int, d: int) -> float:
    """Operations of one step by the paper's formulas.

    `scheme` is a key of `PAPER_OPERATIONS` or one of four other names. "continual single" and "continual retroactive"
    are means over steps: m steps in n replace a landmark. "fixed single" and "fixed retroactive" replace no landmark.
    The result is an integer except for the means.

    >>> from cmab_kernels.nystrom.costs import paper_operations
    >>> schemes = "full", "single", "continual single", "fixed single"
    >>> {scheme: paper_operations(scheme, 120, 4, 192) for scheme in schemes}
    {'full': 11059200, 'single': 92471, 'continual single': 11782.4, 'fixed single': 6184}
    """
    _check_scheme(scheme, (*PAPER_OPERATIONS, *SCHEMES[-4:]))
    landmarks, _, output = scheme.partition(" ")
    if landmarks == "fixed":
        return PAPER_OPERATIONS[f"continual {output}, kept"](n, m, d)
    if scheme in ("continual single", "continual retroactive"):
        kept, updated = (PAPER_OPERATIONS[f"{scheme}, {kind}"](n, m, d) for kind in ("kept", "updated"))
        return (kept * n + (updated - kept) * m) / n
    return PAPER_OPERATIONS[scheme](n, m, d)


def paper_memory(scheme: str, n: int, m: int, d: int) -> Memory:
    """Memory of a scheme, in elements, by the paper's formulas; `scheme` is a key of `PAPER_MEMORY`.

    >>> from cmab_kernels.nystrom.costs import paper_memory
    >>> paper_memory("continual single", 120, 4, 192)
    Memory(between=49182, peak=50072)
    """
    _check_scheme(scheme, PAPER_MEMORY)
    between, peak = PAPER_MEMORY[scheme]
    return Memory(between(n, m, d), peak(n, m, d))


def _check_scheme(scheme: str, known: Collection[str]) -> None:
    if scheme not in known:
        raise ValueError(mismatch("scheme", repr(scheme), f"one of {'; '.join(known)}"))


# ---- ours ------------------------------------------------------------------------------------------------------------


def replacements(n: int, m: int, position: int) -> int:
    """Number of segments that end within the first `position` tokens of a stream. Each segment makes a landmark or
    replaces the oldest landmark.

    >>> from cmab_kernels.nystrom.costs import replacements
    >>> [replacements(7, 3, position) for position in range(8)]
    [0, 0, 0, 1, 1, 2, 2, 3]
    """
    windows, rest = divmod(position, n)
    return m * windows + bisect_right(segment_ends(n, m), rest)


def executed_operations(
    n: int, m: int, D: int, E: int, position: int, tokens: int, iterations: int, fixed: bool, retroactive: bool
) -> int:
    """Operations for one head of a `continual_nystrom_step` of `tokens` tokens after the first `position`. A
    multiply-add counts as two.

    Rows that are recomputed on schedule are counted. Rows that are recomputed because of the data are not counted.

    >>> from cmab_kernels.nystrom.costs import executed_operations
    >>> executed_operations(64, 16, 64, 64, position=64, tokens=1, iterations=6, fixed=True, retroactive=False)
    12800
    """
    outputs = _retroactive_output(n, m, D, E) if retroactive else tokens * _single_output(m, D, E)
    return _upkeep(n, m, D, E, position, tokens, iterations, fixed) + outputs


def mean_operations(
    n: int, m: int, D: int, E: int, tokens: int, iterations: int, fixed: bool, retroactive: bool
) -> float:
    """The mean of `executed_operations` over the positions of an endless stream.

    >>> from cmab_kernels.nystrom.costs import mean_operations
    >>> mean_operations(64, 16, 64, 64, tokens=1, iterations=6, fixed=True, retroactive=False)
    13056.0
    """
    outputs = _retroactive_output(n, m, D, E) if retroactive else tokens * _single_output(m, D, E)
    return tokens * _mean_upkeep(n, m, D, E, iterations, fixed) + outputs


@functools.cache
def _mean_upkeep(n: int, m: int, D: int, E: int, iterations: int, fixed: bool) -> float:
    # A period of the stream: whole windows, and whole intervals between scheduled recomputations.
    stretch = n * SCHEDULE
    return _upkeep(n, m, D, E, n, stretch, iterations, fixed) / stretch


def _upkeep(n: int, m: int, D: int, E: int, position: int, tokens: int, iterations: int, fixed: bool) -> int:
    """Operations that keep the sums, the landmarks and the pseudo-inverse up to date, without those of the output."""
    end = position + tokens
    replaced = 0 if fixed else replacements(n, m, end) - replacements(n, m, position)
    refreshed = _refreshed(n, m, position, end, fixed)
    kept_rows = 4 * (tokens * m - replaced) * (D + E)  # the terms of the new token and of the old token
    whole_rows = 2 * n * (replaced + refreshed) * (D + E)
    return kept_rows + whole_rows + replaced * (2 * m * m * D + pinv_operations(m, iterations))


def _refreshed(n: int, m: int, position: int, end: int, fixed: bool) -> int:
    """Number of rows recomputed on schedule: token P recomputes row r if (P - r) % 1024 = 0, unless P replaces the
    row's landmark."""
    scheduled = sum((end - row) // SCHEDULE - (position - row) // SCHEDULE for row in range(m))
    last = range(position + 1 + (m - 2 - position) % SCHEDULE, end + 1, SCHEDULE)
    return scheduled - (
        0 if fixed else sum(replacements(n, m, token) - replacements(n, m, token - 1) for token in last)
    )


def _single_output(m: int, D: int, E: int) -> int:
    return 2 * m * (D + E) + 2 * m * m


def _retroactive_output(n: int, m: int, D: int, E: int) -> int:
    return 2 * m * m * E + 2 * n * m * (D + E)


def gradient_operations(n: int, m: int, D: int, E: int, tokens: int, retroactive: bool) -> int:
    """Operations for one head of the fused backward pass of a `continual_nystrom_step`, without recomputed rows, new
    landmarks and their pseudo-inverse. A recomputed row has n (6 D + 4 E).

    torch's `FlopCounterMode` does not see the fused pass, because under a dispatch mode the definition runs.

    >>> from cmab_kernels.nystrom.costs import gradient_operations
    >>> gradient_operations(64, 16, 64, 64, tokens=1, retroactive=False)
    32256
    """
    both_tokens = 2 * m * (6 * D + 4 * E)  # the token that enters and the token that leaves
    rows = m * (6 * D + 4 * E)  # a query with all landmarks
    outputs = n * rows + 6 * m * m * E if retroactive else tokens * (rows + 6 * m * m)
    return tokens * both_tokens + outputs


def attention_gradient_operations(n: int, D: int, E: int, tokens: int) -> int:
    """Operations for one head of the fused backward pass of a `continual_attention_step` with single outputs.

    >>> from cmab_kernels.nystrom.costs import attention_gradient_operations
    >>> attention_gradient_operations(120, 192, 192, tokens=1)
    230400
    """
    return tokens * n * (6 * D + 4 * E)


def pinv_operations(m: int, iterations: int) -> int:
    """Operations of `iterative_pinv`: four products in each iteration. An exact pseudo-inverse (0 iterations) counts
    0."""
    return 8 * iterations * m**3


def nystrom_attention_operations(n: int, m: int, D: int, E: int, iterations: int) -> int:
    """Operations for one head of `nystrom_attention` with as many queries as keys.

    >>> from cmab_kernels.nystrom.costs import nystrom_attention_operations
    >>> nystrom_attention_operations(120, 4, 192, 192, iterations=6)
    752640
    """
    landmark_rows = 2 * n * m * (D + E)
    return landmark_rows + 2 * m * m * D + pinv_operations(m, iterations) + _retroactive_output(n, m, D, E)


def executed_attention_operations(n: int, D: int, E: int, tokens: int, retroactive: bool, first: bool = False) -> int:
    """Operations for one head of `continual_attention_step`. Single outputs are rows of attention; retroactive outputs
    keep n rows of sums.

    `first`: the state has no such sums yet, so the first token computes all of them.

    >>> from cmab_kernels.nystrom.costs import executed_attention_operations
    >>> executed_attention_operations(120, 192, 192, tokens=1, retroactive=False)
    92160
    """
    row = 2 * n * (D + E)
    if not retroactive:
        return tokens * row
    refreshed = n // SCHEDULE
    update = (1 + refreshed) * row + 4 * (n - 1) * (D + E)
    return tokens * update if not first else n * row + (tokens - 1) * update


def state_elements(n: int, m: int, D: int, E: int) -> int:
    """Elements of a `ContinualNystromState` for one head: a ring of n + 1 tokens, two copies of the sums, landmarks,
    pseudo-inverse.

    This holds for a stream of single tokens. After blocks of t tokens the ring has n + t rows, at most 2 n.

    >>> from cmab_kernels.nystrom.costs import state_elements
    >>> state_elements(64, 16, 64, 64)
    16992
    """
    return (n + 1) * (2 * D + E) + 2 * m * (E + 5) + 2 * m * D + m * m


def attention_state_elements(n: int, D: int, E: int, retroactive: bool) -> int:
    """Elements of a `ContinualAttentionState` for one head: a ring of n + 1 tokens, and for retroactive outputs two
    times n rows of sums.

    >>> from cmab_kernels.nystrom.costs import attention_state_elements
    >>> [attention_state_elements(64, 64, 64, retroactive) for retroactive in (False, True)]
    [12480, 21312]
    """
    return (n + 1) * (2 * D + E) + (2 * n * (E + 5) if retroactive else 0)


# ---- side by side ----------------------------------------------------------------------------------------------------


def executed_on_average(scheme: str, n: int, m: int, d: int, iterations: int = 6) -> float:
    """Mean operations of a step of one token in our code, over an endless stream; `scheme` as in `paper_operations`.

    >>> from cmab_kernels.nystrom.costs import executed_on_average
    >>> [executed_on_average(scheme, 120, 4, 192) for scheme in ("full", "single", "continual single", "fixed single")]
    [11059200, 92160, 12936.0, 9608.0]
    """
    _check_scheme(scheme, SCHEMES)
    if scheme == "full":
        return 4 * n * n * d
    if scheme == "nystrom":
        return nystrom_attention_operations(n, m, d, d, iterations)
    if scheme in ("single", "retroactive"):
        return executed_attention_operations(n, d, d, 1, scheme == "retroactive")
    landmarks, output = scheme.split(" ")
    return mean_operations(n, m, d, d, 1, iterations, landmarks == "fixed", output == "retroactive")


def cost_table(n: int, m: int, d: int, iterations: int = 6) -> list[str]:
    """Lines of a table for one head and a step of one token: the paper's counts, and the mean operations and elements
    of our code.

    >>> from cmab_kernels.nystrom.costs import cost_table
    >>> for line in cost_table(120, 4, 192):
    ...     print(line)
                                      operations of a step        elements between steps
    n = 120, m = 4, d = 192           paper           here          paper           here
    full                         11,059,200     11,059,200
    nystrom                         422,576        752,640
    retroactive                     298,747        274,944         92,084        116,976
    single                           92,471         92,160         46,078         69,696
    continual retroactive           101,827        384,616         73,170         72,824
    continual single                 11,782         12,936         49,182         72,824
    fixed retroactive                98,352        381,288          2,804         72,824
    fixed single                      6,184          9,608          2,324         72,824
    """
    return [
        f"{'':<24}{'operations of a step':>30}{'elements between steps':>30}",
        f"{f'n = {n:,}, m = {m}, d = {d}':<24}" + 2 * f"{'paper':>15}{'here':>15}",
        *(_line(scheme, n, m, d, iterations) for scheme in SCHEMES),
    ]


def _line(scheme: str, n: int, m: int, d: int, iterations: int) -> str:
    operations = (
        f"{paper_operations(scheme, n, m, d):>15,.0f}{executed_on_average(scheme, n, m, d, iterations):>15,.0f}"
    )
    if scheme in ("full", "nystrom"):
        return f"{scheme:<24}{operations}"
    kept = state_elements(n, m, d, d) if " " in scheme else attention_state_elements(n, d, d, scheme == "retroactive")
    return f"{scheme:<24}{operations}{paper_memory(scheme, n, m, d).between:>15,}{kept:>15,}"

"""What a step costs: the counts that the paper on continual Nyström attention prints, and what these kernels execute and keep.

All counts are of one head: n tokens in the window, m landmarks, queries and keys D wide, values E wide (d where the paper has one width).
`paper_operations` and `paper_memory` are the paper's formulas, exact. They do not count alike: full attention's two products, n^2 d
multiply-adds each, make 4 n^2 d, Nyström attention's four of n m d make 4 n m d. What is executed here is counted as torch's
`FlopCounterMode` counts: two for each multiply-add of a product, nothing for the rest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from .reference import segment_ends

SCHEDULE = 1024
"""Tokens after which a row of sums is recomputed from the window, whatever its guard says."""

Formula = Callable[[int, int, int], int]

PAPER_OPERATIONS: dict[str, Formula] = {
    "full": lambda n, m, d: 4 * n * n * d,
    "retroactive": lambda n, m, d: 13 * n * d + 8 * n - 9 * d - 5,
    "single": lambda n, m, d: 4 * n * d + n + d - 1,
    "nystrom": lambda n, m, d: 4 * n * d * m + 2 * n * d + n * m**2 + 2 * n * m + d * m**2 + 24 * m**3 + 23 * m**2,
    "continual retroactive, kept": lambda n, m, d: n * d * m + 8 * d * m + m**2 + 8 * m,
    "continual retroactive, updated": lambda n, m, d: 8 * n * d + n * m**2 + 11 * n + 17 * d * m + 24 * m**3 + 22 * m**2 + 23 * m,
    "continual single, kept": lambda n, m, d: 8 * d * m + m**2 + 6 * m,
    "continual single, updated": lambda n, m, d: n * d * m + 3 * n * d + n + 14 * d * m + 24 * m**3 + 23 * m**2 + 20 * m,
}
"""Of one step. The whole window anew: "full" (softmax) and "nystrom". Exact attention continued: "retroactive" (all rows of the output) and
"single" (the newest). Nyström attention continued, in a step that keeps its landmarks or in one that replaces the oldest."""


SCHEMES = ("full", "nystrom", *(f"{kind}{output}" for kind in ("", "continual ", "fixed ") for output in ("retroactive", "single")))
"""What `paper_operations` and `executed_on_average` both know; "continual" landmarks follow the window, "fixed" ones stay."""


class Memory(NamedTuple):
    """Elements of a head."""

    between: int
    """Kept from one step to the next."""
    peak: int
    """Held at most within a step."""


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
    "fixed retroactive": (lambda n, m, d: n * m + 3 * d * m + m**2 + m, lambda n, m, d: n * d + n * m + 3 * d * m + m**2 + 2 * m),
    "fixed single": (lambda n, m, d: 3 * d * m + m**2 + m, lambda n, m, d: 3 * d * m + d + m**2 + 2 * m),
}
"""Between steps and at the peak. Those of fixed landmarks leave out the window's 2 n d elements, without which no token can be removed."""


def paper_operations(scheme: str, n: int, m: int, d: int) -> float:
    """Operations of one step by the paper's formulas.

    `scheme` is a key of `PAPER_OPERATIONS`; or "continual single" and "continual retroactive", the mean over steps, of which m in n replace
    a landmark; or "fixed single" and "fixed retroactive", which replace none. An integer in all but the means.

    >>> from cmab_kernels.nystrom.costs import paper_operations
    >>> {scheme: paper_operations(scheme, 120, 4, 192) for scheme in ("full", "single", "continual single", "fixed single")}
    {'full': 11059200, 'single': 92471, 'continual single': 11782.4, 'fixed single': 6184}
    """
    landmarks, _, output = scheme.partition(" ")
    if landmarks == "fixed":
        return PAPER_OPERATIONS[f"continual {output}, kept"](n, m, d)
    if scheme in ("continual single", "continual retroactive"):
        kept, updated = (PAPER_OPERATIONS[f"{scheme}, {kind}"](n, m, d) for kind in ("kept", "updated"))
        return (kept * n + (updated - kept) * m) / n
    return PAPER_OPERATIONS[scheme](n, m, d)


def paper_memory(scheme: str, n: int, m: int, d: int) -> Memory:
    """Elements by the paper's formulas; `scheme` is a key of `PAPER_MEMORY`.

    >>> from cmab_kernels.nystrom.costs import paper_memory
    >>> paper_memory("continual single", 120, 4, 192)
    Memory(between=49182, peak=50072)
    """
    between, peak = PAPER_MEMORY[scheme]
    return Memory(between(n, m, d), peak(n, m, d))


# ---- ours ------------------------------------------------------------------------------------------------------------------------------


def replacements(n: int, m: int, position: int) -> int:
    """Landmarks that the first `position` tokens of a stream replace or make: one at the end of each segment of each window.

    >>> from cmab_kernels.nystrom.costs import replacements
    >>> [replacements(7, 3, position) for position in range(8)]
    [0, 0, 0, 1, 1, 2, 2, 3]
    """
    windows, rest = divmod(position, n)
    return m * windows + bisect_right(segment_ends(n, m), rest)


def executed_operations(n: int, m: int, D: int, E: int, position: int, tokens: int, iterations: int, fixed: bool, retroactive: bool) -> int:
    """Of one head of `continual_nystrom_step` that takes `tokens` more after `position`: two for each multiply-add.

    Rows that are recomputed on schedule are counted; those that the guard recomputes depend on the data, and are not.

    >>> from cmab_kernels.nystrom.costs import executed_operations
    >>> executed_operations(64, 16, 64, 64, position=64, tokens=1, iterations=6, fixed=True, retroactive=False)
    12800
    """
    outputs = _retroactive_output(n, m, D, E) if retroactive else tokens * _single_output(m, D, E)
    return _upkeep(n, m, D, E, position, tokens, iterations, fixed) + outputs


def _upkeep(n: int, m: int, D: int, E: int, position: int, tokens: int, iterations: int, fixed: bool) -> int:
    """Of the sums, the landmarks and the pseudo-inverse, whatever is read from them."""
    end = position + tokens
    replaced = 0 if fixed else replacements(n, m, end) - replacements(n, m, position)
    refreshed = _refreshed(n, m, position, end, fixed)
    kept_rows = 4 * (tokens * m - replaced) * (D + E)  # the new token's terms and the old one's
    whole_rows = 2 * n * (replaced + refreshed) * (D + E)
    return kept_rows + whole_rows + replaced * (2 * m * m * D + pinv_operations(m, iterations))


def _refreshed(n: int, m: int, position: int, end: int, fixed: bool) -> int:
    """Rows that are recomputed on schedule: row r by the tokens P with (P - r) % 1024 = 0, unless it is a landmark's that is new."""
    scheduled = sum((end - row) // SCHEDULE - (position - row) // SCHEDULE for row in range(m))
    last = range(position + 1 + (m - 2 - position) % SCHEDULE, end + 1, SCHEDULE)
    return scheduled - (0 if fixed else sum(replacements(n, m, token) - replacements(n, m, token - 1) for token in last))


def _single_output(m: int, D: int, E: int) -> int:
    return 2 * m * (D + E) + 2 * m * m


def _retroactive_output(n: int, m: int, D: int, E: int) -> int:
    return 2 * m * m * E + 2 * n * m * (D + E)


def pinv_operations(m: int, iterations: int) -> int:
    """Of `iterative_pinv`: four products an iteration. An exact pseudo-inverse (0 iterations) is not counted."""
    return 8 * iterations * m**3


def nystrom_attention_operations(n: int, m: int, D: int, E: int, iterations: int) -> int:
    """Of one head of `nystrom_attention` with as many queries as keys.

    >>> from cmab_kernels.nystrom.costs import nystrom_attention_operations
    >>> nystrom_attention_operations(120, 4, 192, 192, iterations=6)
    752640
    """
    landmark_rows = 2 * n * m * (D + E)
    return landmark_rows + 2 * m * m * D + pinv_operations(m, iterations) + _retroactive_output(n, m, D, E)


def executed_attention_operations(n: int, D: int, E: int, tokens: int, retroactive: bool, first: bool = False) -> int:
    """The same of `continual_attention_step`: single outputs are rows of attention; retroactive ones keep n rows of sums up to date.

    `first`: of a state that had no such sums yet, so that the first of the tokens computes them all.

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
    """Of a head of `ContinualNystromState`: a ring of n + 1 tokens, the sums and as much for the next, landmarks, pinv.

    So of a stream of single tokens. One that took blocks of t has a ring of n + t, at most 2 n.

    >>> from cmab_kernels.nystrom.costs import state_elements
    >>> state_elements(64, 16, 64, 64)
    16928
    """
    return (n + 1) * (2 * D + E) + 2 * m * (E + 3) + 2 * m * D + m * m


def attention_state_elements(n: int, D: int, E: int, retroactive: bool) -> int:
    """Of a head of `ContinualAttentionState`: a ring of n + 1 tokens, and for retroactive outputs the sums of n rows, twice.

    >>> from cmab_kernels.nystrom.costs import attention_state_elements
    >>> [attention_state_elements(64, 64, 64, retroactive) for retroactive in (False, True)]
    [12480, 21056]
    """
    return (n + 1) * (2 * D + E) + (2 * n * (E + 3) if retroactive else 0)


# ---- side by side ----------------------------------------------------------------------------------------------------------------------


def executed_on_average(scheme: str, n: int, m: int, d: int, iterations: int = 6) -> float:
    """Operations of a step of one token here, the mean over an endless stream; `scheme` as in `paper_operations`.

    >>> from cmab_kernels.nystrom.costs import executed_on_average
    >>> [executed_on_average(scheme, 120, 4, 192) for scheme in ("full", "single", "continual single", "fixed single")]
    [11059200, 92160, 12936.0, 9608.0]
    """
    if scheme == "full":
        return 4 * n * n * d
    if scheme == "nystrom":
        return nystrom_attention_operations(n, m, d, d, iterations)
    if scheme in ("single", "retroactive"):
        return executed_attention_operations(n, d, d, 1, scheme == "retroactive")
    landmarks, output = scheme.split(" ")
    stretch = n * SCHEDULE  # what is done at every segment's end and on schedule has come round
    upkeep = _upkeep(n, m, d, d, n, stretch, iterations, landmarks == "fixed") / stretch
    return upkeep + (_single_output(m, d, d) if output == "single" else _retroactive_output(n, m, d, d))


def cost_table(n: int, m: int, d: int, iterations: int = 6) -> list[str]:
    """The paper's counts beside what is executed and kept here, for one head and one step of one token, means over an endless stream.

    >>> from cmab_kernels.nystrom.costs import cost_table
    >>> for line in cost_table(120, 4, 192):
    ...     print(line)
                                      operations of a step        elements between steps
    n = 120, m = 4, d = 192           paper           here          paper           here
    full                         11,059,200     11,059,200
    nystrom                         422,576        752,640
    retroactive                     298,747        274,944         92,084        116,496
    single                           92,471         92,160         46,078         69,696
    continual retroactive           101,827        384,616         73,170         72,808
    continual single                 11,782         12,936         49,182         72,808
    fixed retroactive                98,352        381,288          2,804         72,808
    fixed single                      6,184          9,608          2,324         72,808
    """
    return [
        f"{'':<24}{'operations of a step':>30}{'elements between steps':>30}",
        f"{f'n = {n:,}, m = {m}, d = {d}':<24}" + 2 * f"{'paper':>15}{'here':>15}",
        *(_line(scheme, n, m, d, iterations) for scheme in SCHEMES),
    ]


def _line(scheme: str, n: int, m: int, d: int, iterations: int) -> str:
    operations = f"{paper_operations(scheme, n, m, d):>15,.0f}{executed_on_average(scheme, n, m, d, iterations):>15,.0f}"
    if scheme in ("full", "nystrom"):
        return f"{scheme:<24}{operations}"
    kept = state_elements(n, m, d, d) if " " in scheme else attention_state_elements(n, d, d, scheme == "retroactive")
    return f"{scheme:<24}{operations}{paper_memory(scheme, n, m, d).between:>15,}{kept:>15,}"

"""The counts of the paper equal the printed ones, and our counts equal those of the products that the definition
needs."""

from __future__ import annotations

import doctest
import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cmab_kernels import (
    continual_attention_init,
    continual_attention_step,
    continual_nystrom_init,
    continual_nystrom_step,
)
from cmab_kernels.nystrom import costs
from cmab_kernels.nystrom.costs import (
    PAPER_MEMORY,
    SCHEDULE,
    SCHEMES,
    attention_state_elements,
    cost_table,
    executed_attention_operations,
    executed_on_average,
    executed_operations,
    nystrom_attention_operations,
    paper_memory,
    paper_operations,
    replacements,
    state_elements,
)
from cmab_kernels.nystrom.reference import pinv_reference, segment_ends


def test_examples_of_the_docstrings():
    failed, tried = doctest.testmod(costs)
    assert failed == 0 and tried > 10


# ---- the paper's -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "operations"),
    [
        ("full", 11_059_200),
        ("single", 92_471),
        ("nystrom", 422_576),
        ("continual single", 11_782.4),
        ("continual single, kept", 6184),
        ("continual single, updated", 174_136),
        ("fixed single", 6184),
        ("retroactive", 298_747),
        ("continual retroactive, kept", 98_352),
        ("continual retroactive, updated", 202_596),
        ("continual retroactive", 98_352 + (202_596 - 98_352) * 4 / 120),
        ("fixed retroactive", 98_352),
    ],
)
def test_operations_of_a_step_at_120_tokens(scheme, operations):
    """The counts for n = 120, m = 4, d = 192, in millions, equal the printed ones, and those of retroactive outputs by
    hand.

    The first is printed as 11.1, and is 11.06.
    """
    assert paper_operations(scheme, 120, 4, 192) == operations


@pytest.mark.parametrize(
    ("scheme", "operations"),
    [("full", 16.78), ("single", 0.263), ("nystrom", 4.71), ("continual single", 0.493), ("fixed single", 0.131)],
)
def test_operations_of_a_step_at_64_tokens(scheme, operations):
    """The counts for n = 64, d = 1024, m = 16, in millions, are the printed ones,
    except for the first, which is printed as 16.85."""
    assert paper_operations(scheme, 64, 16, 1024) / 1e6 == pytest.approx(
        operations, abs=0.5 * 10.0 ** (2 - len(str(operations)) + 1)
    )


def test_ratios_that_the_paper_draws():
    cheap = {scheme: paper_operations(scheme, 120, 4, 192) for scheme in ("continual single", "fixed single")}
    assert [round(11.1e6 / operations) for operations in cheap.values()] == [942, 1795]
    long = [paper_operations(f"{landmarks} single", 10**9, 8, 200) for landmarks in ("continual", "fixed")]
    assert long[0] / long[1] == pytest.approx(2.36, abs=0.005)


@pytest.mark.parametrize(
    ("scheme", "memory"),
    [
        ("retroactive", (92_084, 115_440)),
        ("single", (46_078, 46_584)),
        ("continual retroactive", (73_170, 97_040)),
        ("continual single", (49_182, 50_072)),
        ("fixed retroactive", (2804, 25_848)),
        ("fixed single", (2324, 2520)),
    ],
)
def test_memory_at_120_tokens(scheme, memory):
    """Memory for n = 120, m = 4, d = 192 is that worked out by hand from the formulas."""
    assert paper_memory(scheme, 120, 4, 192) == memory


def test_unknown_schemes_are_refused():
    for scheme in ("fixed", "fixed double", "continual", "Full"):
        with pytest.raises(
            ValueError, match=rf"^scheme: got '{scheme}'.*full; .*continual single, updated; .*fixed single$"
        ):
            paper_operations(scheme, 120, 4, 192)
        with pytest.raises(ValueError, match=rf"^scheme: got '{scheme}'.*full; .*fixed single$"):
            executed_on_average(scheme, 120, 4, 192)
    with pytest.raises(ValueError, match=r"^scheme: got 'full'.*retroactive; single; "):
        paper_memory("full", 120, 4, 192)


# ---- ours ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(1, 1), (7, 3), (8, 4), (9, 9), (13, 5)])
def test_replacements_are_the_ends_of_segments(n, m):
    ends = {end % n for end in segment_ends(n, m)}
    count = 0
    for position in range(1, 4 * n):
        count += position % n in ends
        assert replacements(n, m, position) == count


def counted(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


N, M, D, E = 13, 5, 6, 3


def landmark_inverse(iterations: int) -> torch.Tensor:
    return pinv_reference((torch.randn(M, D) @ torch.randn(D, M)).softmax(-1), iterations)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("retroactive", [False, True])
def test_operations_are_those_of_the_products_of_a_step(replaced, retroactive):
    """torch counts the same operations for a step written as products,
    both where a landmark is replaced and where none is."""
    q, k, v = torch.randn(N, D), torch.randn(N, D), torch.randn(N, E)
    landmarks = torch.randn(M, D)

    def step():
        kept = M - replaced
        for token in (-1, 0):
            landmarks[:kept] @ k[token : token + 1 or None].T @ v[token : token + 1 or None]
        inverse = torch.randn(M, M)
        if replaced:
            landmarks[-1:] @ k.T @ v
            inverse = landmark_inverse(6)
        if retroactive:
            q @ landmarks.T @ (inverse @ torch.randn(M, E))
        else:
            q[-1:] @ landmarks.T @ inverse @ torch.randn(M, E)

    position = 15 if replaced else 16
    assert replacements(N, M, position + 1) - replacements(N, M, position) == replaced
    assert executed_operations(N, M, D, E, position, 1, 6, fixed=False, retroactive=retroactive) == counted(step)


@pytest.mark.parametrize("fixed", [False, True])
def test_operations_of_a_stretch_are_those_of_its_tokens(fixed):
    """The count for 100 tokens is the sum over the tokens, including the rows that are recomputed on schedule."""
    start, tokens = SCHEDULE - 50, 100

    def of(position, tokens):
        return executed_operations(N, M, D, E, position, tokens, 6, fixed=fixed, retroactive=False)

    assert of(start, tokens) == sum(of(position, 1) for position in range(start, start + tokens))
    plain = of(start - 100 * N, tokens)  # with as many ends of segments
    assert of(start, tokens) - plain == M * 2 * N * (D + E)


def test_a_new_landmark_is_not_recomputed_on_schedule_too():
    """With n landmarks for n tokens, each token replaces one landmark. A new row that would also be recomputed counts
    only once."""
    n = m = 5
    token = SCHEDULE + m - 1
    by_token = [
        executed_operations(n, m, D, E, position, 1, 6, fixed=False, retroactive=False)
        for position in range(token - m, token + 1)
    ]
    row = 2 * n * (D + E)
    assert [operations - by_token[-1] for operations in by_token] == [row, row, row, row, 0, 0]


def test_a_block_reads_retroactive_outputs_once():
    one, block = (executed_operations(N, M, D, E, 16, tokens, 6, fixed=True, retroactive=True) for tokens in (1, 10))
    assert block - one == 9 * 4 * M * (D + E)


def test_operations_of_exact_attention_are_those_of_its_products():
    q, k, v = torch.randn(N, D), torch.randn(N, D), torch.randn(N, E)

    def retroactive():
        q[-1:] @ k.T @ v
        for token in (0, N - 1):
            q[:-1] @ k[token, :, None] @ v[None, token]

    assert executed_attention_operations(N, D, E, 3, retroactive=False) == 3 * counted(lambda: q[-1:] @ k.T @ v)
    assert executed_attention_operations(N, D, E, 3, retroactive=True) == 3 * counted(retroactive)
    assert executed_attention_operations(N, D, E, 1, True, first=True) == counted(lambda: q @ k.T @ v)
    assert executed_attention_operations(N, D, E, 3, True, first=True) == counted(lambda: q @ k.T @ v) + 2 * counted(
        retroactive
    )


@pytest.mark.parametrize(("n", "times"), [(SCHEDULE - 1, 0), (SCHEDULE, 1), (2 * SCHEDULE + 1, 2)])
def test_rows_that_live_long_are_recomputed(n, times):
    """In exact attention a row is recomputed on schedule: row i belongs to the token that has been in the window for n
    - i steps."""
    assert times == sum((n - row) % SCHEDULE == 0 for row in range(n))
    assert executed_attention_operations(n, D, E, 1, True) == (1 + times) * 2 * n * (D + E) + 4 * (n - 1) * (D + E)


def test_operations_of_whole_windows_are_those_of_their_products():
    q, k, v, landmarks = torch.randn(N, D), torch.randn(N, D), torch.randn(N, E), torch.randn(M, D)

    def run():
        values = landmark_inverse(4) @ (landmarks @ k.T @ v)
        q @ landmarks.T @ values

    assert nystrom_attention_operations(N, M, D, E, 4) == counted(run)
    assert executed_on_average("nystrom", N, M, D, 4) == nystrom_attention_operations(N, M, D, D, 4)
    assert executed_on_average("full", N, M, D) == counted(lambda: q @ k.T @ k)


@pytest.mark.parametrize(
    ("landmarks", "output"), list(itertools.product(("continual", "fixed"), ("single", "retroactive")))
)
def test_averages_are_over_the_stream(landmarks, output):
    stretch = N * SCHEDULE
    steps = sum(
        executed_operations(N, M, D, D, position, 1, 6, fixed=landmarks == "fixed", retroactive=output == "retroactive")
        for position in range(5 * N, 5 * N + stretch)
    )
    assert executed_on_average(f"{landmarks} {output}", N, M, D) == steps / stretch


def elements(state) -> int:
    """Return the number of elements of a state, over all heads and without the scale and the positions."""
    return (
        sum(field.numel() for field in state if isinstance(field, torch.Tensor))
        - state.scale.numel()
        - state.position.numel()
    )


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.filterwarnings("ignore:cmab_kernels runs its PyTorch reference")
def test_elements_of_states_are_those_of_their_tensors(impl):
    query, key, value = torch.randn(2, 3, N + 5, D), torch.randn(2, 3, N + 5, D), torch.randn(2, 3, N + 5, E)
    window, after = ([part[:, :, rows] for part in (query, key, value)] for rows in (slice(N), slice(N, None)))
    given = torch.randn(3, M, D), torch.randn(3, M, D)
    for state in (continual_nystrom_init(*window, M), continual_nystrom_init(*window, landmarks=given)):
        stepped = continual_nystrom_step(state, *(part[:, :, :1] for part in after), impl=impl).state
        assert elements(state) == elements(stepped) == 6 * state_elements(N, M, D, E)
    state = continual_attention_init(*window)
    for output, retroactive in (("single", False), ("retroactive", True)):
        state = continual_attention_step(state, *(part[:, :, :1] for part in after), output=output, impl=impl).state
        assert elements(state) == 6 * attention_state_elements(N, D, E, retroactive)


@pytest.mark.filterwarnings("ignore:cmab_kernels runs its PyTorch reference")
@pytest.mark.parametrize("tokens", [1, 5, 2 * N])
def test_a_block_leaves_a_ring_for_as_many_tokens(tokens):
    """After a block of t tokens the ring has n + t rows, and at most two windows;
    the formula is for blocks of one token."""
    query, key, value = torch.randn(1, 1, 3 * N, D), torch.randn(1, 1, 3 * N, D), torch.randn(1, 1, 3 * N, E)
    state = continual_nystrom_init(*(part[:, :, :N] for part in (query, key, value)), M)
    stepped = continual_nystrom_step(state, *(part[:, :, N : N + tokens] for part in (query, key, value))).state
    assert elements(stepped) <= state_elements(N, M, D, E) + (min(tokens, N) - 1) * (2 * D + E)


def test_the_table_has_both_for_every_scheme():
    lines = cost_table(64, 16, 1024)[2:]
    assert [line[:24].strip() for line in lines] == list(SCHEMES)
    for line in lines:
        scheme, figures = line[:24].strip(), [float(figure.replace(",", "")) for figure in line[24:].split()]
        assert figures[0] == round(paper_operations(scheme, 64, 16, 1024))
        assert figures[1] == round(executed_on_average(scheme, 64, 16, 1024))
        assert len(figures) == (4 if scheme in PAPER_MEMORY else 2)

"""The algebra of states, for rows of any extents, dtype, layout and distribution: a state depends only on its set of
keys."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from .drawn import Rows, holds, rows, seeds
from .families import ATTENTION, FAMILIES, Family, far, part, together

families = st.sampled_from(sorted(FAMILIES)).map(FAMILIES.__getitem__)


def _cuts(rows: Rows, seed: int, pieces: int) -> list[Rows]:
    """Return the rows cut at random places; a piece may be empty."""
    torch.manual_seed(seed)
    ends = [0, *torch.randint(0, rows.key.shape[2] + 1, (pieces - 1,)).sort().values.tolist(), rows.key.shape[2]]
    return [part(rows, slice(*ends[i : i + 2])) for i in range(pieces)]


@holds(family=families, given=rows(), seed=seeds)
def test_merge_is_associative_and_commutative(family: Family, given: Rows, seed: int, impl: str) -> None:
    a, b, c = (family.of(piece, impl) for piece in _cuts(given, seed, 3))
    orders = (
        family.merge(a, b, c),
        family.merge(family.merge(a, b), c),
        family.merge(a, family.merge(b, c)),
        family.merge(c, a, b),
    )
    right = family.right(given)
    assert [far(order, right, family.allowed(given), 2.0) for order in orders] == [""] * 4


@holds(family=families, given=rows())
def test_the_empty_state_is_the_identity(family: Family, given: Rows, impl: str) -> None:
    """A merge with the empty state, on either side, changes no bit. The state of no keys is the empty state."""
    state, empty = family.of(given, impl), family.empty(given)
    for same in (family.merge(state, empty), family.merge(empty, state), family.of(part(given, slice(0)), impl, state)):
        assert all(torch.equal(ours, field) for ours, field in zip(same, state, strict=True))
    assert all(
        torch.equal(ours, field) for ours, field in zip(family.of(part(given, slice(0)), impl), empty, strict=True)
    )


@holds(family=families, given=rows(), seed=seeds, pieces=st.integers(1, 6))
def test_chunking_does_not_matter(family: Family, given: Rows, seed: int, pieces: int, impl: str) -> None:
    state = None
    for piece in _cuts(given, seed, pieces):
        state = family.of(piece, impl, state)
    assert far(state, family.right(given), family.allowed(given), 2.0) == ""


@holds(family=families, given=rows(), seed=seeds)
def test_permuting_the_keys_changes_nothing(family: Family, given: Rows, seed: int, impl: str) -> None:
    torch.manual_seed(seed)
    mixed = part(given, torch.randperm(given.key.shape[2]))
    assert far(family.of(mixed, impl), family.of(given, impl), family.allowed(given), 2.0) == ""


@holds(family=families, given=rows(least=1), seed=seeds)
def test_removal_undoes_addition(family: Family, given: Rows, seed: int, impl: str) -> None:
    """The state of the other keys remains, up to the digits that cancel; if too few are left, the removal reports
    it."""
    kept, gone = _cuts(given, seed, 2)
    both = family.of(given, impl)
    left, reliable = family.remove(both, gone, impl)
    if family is not ATTENTION:
        assert reliable.all()
        assert far(left, family.right(kept), family.allowed(given), 2.0) == ""
        return
    right = family.right(kept)
    share = (right[1] - family.right(given)[1]).exp()  # the share of the mass that is left
    allowed = torch.where(reliable, 4 * family.allowed(given)[0] / share, math.inf)
    assert ((left.out.double() - right[0]).abs() <= allowed.unsqueeze(-1)).all()
    assert reliable[share > 1e-2].all() or kept.key.shape[2] == 0


@holds(given=rows(least=1))
def test_duplicating_all_keys_adds_log_2(given: Rows, impl: str) -> None:
    once, twice = (ATTENTION.of(each, impl) for each in (given, together(given, given)))
    allowed = ATTENTION.allowed(given)
    assert far(twice, (once.out, once.lse + math.log(2)), allowed, 2.0) == ""


@holds(given=rows())
def test_duplicating_all_keys_doubles_the_sums(given: Rows, impl: str) -> None:
    once, twice = (FAMILIES["ridge"].of(each, impl) for each in (given, together(given, given)))
    assert far(twice, tuple(2 * field for field in once), FAMILIES["ridge"].allowed(given), 2.0) == ""

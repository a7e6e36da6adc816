"""Properties of the results of every operator with queries, keys and values, over rows of any extents and layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import oracles

from .drawn import WIDE, Rows, holds, rows, seeds
from .families import part

ALPHA = 1.0
LANDMARKS = 3


def _nystrom(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Return Nyström attention with landmarks that are far apart,
    so that six iterations of the pseudo-inverse keep the digits."""
    near = 4 * torch.eye(LANDMARKS, query.shape[-1], dtype=query.dtype).expand(query.shape[1], -1, -1)
    return ck.nystrom_attention(query, key, value, landmarks=(near, near), **options)


def _projected(
    query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None, impl: str
) -> Tensor:
    """Return attention over inputs that hold keys and values side by side, which the projections take apart."""
    heads, width = key.shape[1], key.shape[3]
    inputs = torch.cat([t.transpose(1, 2).flatten(2) for t in (key, value)], -1)
    one = torch.eye(inputs.shape[2], dtype=inputs.dtype)
    weights = one[: heads * width], one[heads * width :]
    return ck.projected_attention_state(query, inputs, *weights, key_padding_mask=key_padding_mask, impl=impl).out


class Operator(NamedTuple):
    """An operator of queries, keys and values,
    and the change that rounding may make to its results, in units of attention's."""

    run: Callable[..., Tensor]
    digits: float = 1.0


OPERATORS = {
    "latent_attention": Operator(ck.latent_attention),
    "projected_attention_state": Operator(_projected, 4.0),
    "nystrom_attention": Operator(_nystrom, 1e3),
    "intention, primal": Operator(lambda *given, **options: ck.intention(*given, ALPHA, form="primal", **options), 1e3),
    "intention, dual": Operator(lambda *given, **options: ck.intention(*given, ALPHA, form="dual", **options), 1e3),
    "sigma_intention": Operator(lambda *given, **options: ck.sigma_intention(*given, ALPHA, **options), 1e3),
}
every = st.sampled_from(sorted(OPERATORS)).map(OPERATORS.__getitem__)
mild = rows(dtypes=WIDE, laws=("normal", "all equal"), least=1)


def _close(ours: Tensor, right: Tensor, operator: Operator, given: Rows) -> None:
    difference = (ours.double() - right.double()).abs()
    size = max(1.0, float(right.abs().max()) / given.size)
    assert float(difference.max()) <= operator.digits * size * given.tolerance


@holds(operator=every, given=mild, seed=seeds)
def test_permuting_the_keys_changes_nothing(operator: Operator, given: Rows, seed: int, impl: str) -> None:
    torch.manual_seed(seed)
    mixed = part(given, torch.randperm(given.key.shape[2]))
    _close(operator.run(*mixed, impl=impl), operator.run(*given, impl=impl), operator, given)


@holds(operator=every, given=mild, seed=seeds, poison=st.sampled_from([math.nan, math.inf]))
def test_a_mask_equals_deletion(operator: Operator, given: Rows, seed: int, poison: float, impl: str) -> None:
    """Masked keys do not affect the result, whatever they hold; each batch element has its own mask."""
    torch.manual_seed(seed)
    mask = torch.rand(given.key.shape[0], given.key.shape[2]) < 0.4
    hidden = mask[:, None, :, None]
    spoilt = given._replace(key=given.key.masked_fill(hidden, poison), value=given.value.masked_fill(hidden, poison))
    ours = operator.run(*spoilt, key_padding_mask=mask, impl=impl)
    for i, absent in enumerate(mask):
        alone = part(Rows(*(t[i : i + 1] for t in given)), ~absent)
        _close(ours[i : i + 1], operator.run(*alone, impl=impl), operator, given)


@holds(operator=every, given=mild, seed=seeds)
def test_results_are_linear_in_the_values(operator: Operator, given: Rows, seed: int, impl: str) -> None:
    torch.manual_seed(seed)
    other = torch.randn(given.value.shape, dtype=given.value.dtype)
    parts = [operator.run(given.query, given.key, value, impl=impl) for value in (given.value, other)]
    summed = operator.run(given.query, given.key, 2 * given.value - 3 * other, impl=impl)
    largest = given._replace(value=given.value.abs() * 2 + other.abs() * 3)
    _close(summed, 2 * parts[0] - 3 * parts[1], operator, largest)


@holds(given=rows(), shift=st.sampled_from([-1000.0, -30.0, 0.5, 7.0, 256.0]))
def test_a_constant_added_to_all_logits_changes_lse_alone(given: Rows, shift: float, impl: str) -> None:
    """A column of ones in the queries and of a constant in the keys adds the constant to every logit."""
    given = given._replace(query=F.pad(given.query, (0, 1), value=1.0), key=F.pad(given.key, (0, 1)))
    shifted = given._replace(key=given.key.clone())
    shifted.key[..., -1] = shift
    plain, moved = (ck.attention_state(*each, scale=0.5, impl=impl) for each in (given, shifted))
    eps = torch.finfo(torch.promote_types(given.query.dtype, torch.float32)).eps
    seen = plain.lse.isfinite()
    assert torch.equal(seen, moved.lse.isfinite())
    assert ((moved.lse - plain.lse - 0.5 * shift).abs()[seen] <= 8 * eps * (shifted.score + 4)).all()
    assert float((moved.out - plain.out).abs().max()) <= 2 * shifted.tolerance


@holds(given=mild, shift=st.sampled_from([-20.0, 0.5, 7.0, 60.0]))
def test_a_constant_added_to_all_logits_changes_no_nystrom_attention(given: Rows, shift: float, impl: str) -> None:
    query, key = F.pad(given.query, (0, 1), value=1.0), F.pad(given.key, (0, 1))
    near = F.pad(4 * torch.eye(LANDMARKS, query.shape[-1] - 1, dtype=query.dtype), (0, 1)).expand(
        query.shape[1], -1, -1
    )
    lefts, outs = near.clone(), []
    lefts[..., -1] = 1.0
    for constant in (0.0, shift):
        keys, rights = key.clone(), near.clone()
        keys[..., -1] = rights[..., -1] = constant
        outs.append(ck.nystrom_attention(query, keys, given.value, landmarks=(lefts, rights), scale=0.5, impl=impl))
    _close(
        outs[1],
        outs[0],
        OPERATORS["nystrom_attention"],
        given._replace(query=query, key=F.pad(given.key, (0, 1), value=shift)),
    )


@holds(given=mild, alpha=st.sampled_from([0.3, 1.0, 30.0]))
def test_primal_equals_dual(given: Rows, alpha: float, impl: str) -> None:
    primal, dual = (ck.intention(*given, alpha, form=form, impl=impl) for form in ("primal", "dual"))
    right = oracles.intention(*(t.double() for t in given), alpha)
    for ours in (primal, dual):
        _close(ours, right, Operator(ck.intention, 3e3), given)


@holds(given=mild)
def test_a_key_twice_is_a_weight_of_two(given: Rows, impl: str) -> None:
    twice = part(given, torch.arange(given.key.shape[2]).repeat(2))
    weights = torch.full(given.key.shape[:3], 2.0, dtype=given.key.dtype)
    ours = ck.intention(*given, ALPHA, weights=weights, impl=impl)
    _close(ours, ck.intention(*twice, ALPHA, impl=impl), OPERATORS["intention, primal"], given)


@holds(given=rows(least=1), every=st.integers(1, 50))
def test_states_of_prefixes_are_the_states_of_the_prefixes(given: Rows, every: int, impl: str) -> None:
    states = ck.prefix_attention_states(*given, every=every, impl=impl)
    sums = ck.prefix_ridge_states(given.key, given.value, every=every, impl=impl)
    length = given.key.shape[2]
    for i, end in enumerate(range(every, length + every, every)):
        prefix = part(given, slice(min(end, length)))
        alone = oracles.attention(*(t.double() for t in prefix))
        assert float((states.out[:, :, i].double() - alone[0]).abs().max()) <= 2 * given.tolerance
        right = ck.ridge_state(prefix.key, prefix.value, impl="reference")
        assert torch.equal(sums.count[:, :, i], right.count)
        torch.testing.assert_close(
            sums.gram[:, :, i], right.gram, rtol=1e-12, atol=1e-12 * max(1.0, float(right.gram.abs().max()))
        )

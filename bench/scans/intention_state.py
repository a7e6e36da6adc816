"""The states of Intention: sums over keys that grow, shrink, merge and are solved again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cmab_kernels import RidgeState, merge_ridge, remove_ridge, ridge_state, ridge_step
from cmab_kernels.intention.contract import Gram
from cmab_kernels.intention.reference import gram_reference
from cmab_kernels.intention.schema import gram_op

from ..devices import device, generator, normal
from ..floors import ridge_work
from .case import (
    DTYPES,
    EAGER,
    Case,
    Implementation,
    Results,
    declared,
    direction,
    dtype_name,
    kernels,
    moved,
    operator,
    refusing,
)
from .intention_peers import ALPHA, cholesky_solve, inverse_of, regularised, summed_heads, sums_gradients

TORCH, TORCH_SINGLE = "torch, float64", "torch, float32"
RUNS = "native, float32 runs"


def _keys(
    seed: int, batch: int, heads: int, keys: int, width: int, dtype: torch.dtype, grad: bool = False
) -> list[Tensor]:
    """Keys and values."""
    random = generator(seed)
    return [normal(random, batch, heads, keys, width, dtype=dtype, grad=grad) for _ in range(2)]


def _exact_sum(first: Tensor, second: Tensor) -> Tensor:
    """first' second in float64, as sums over a few keys each: the error of one product over all keys is 1e-13, and that
    of kernels is 1e-15."""
    pieces = zip(first.double().split(256, dim=2), second.double().split(256, dim=2), strict=True)
    return torch.stack([rows.mT @ others for rows, others in pieces]).sum(0)


def _sums_by(key: Tensor, value: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    state = ridge_state(key, value, impl=impl)
    return state.gram, state.moment


def _by_torch(inputs: Sequence[Tensor], dtype: torch.dtype) -> Results:
    with torch.no_grad():
        results = tuple(total.double() for total in summed_heads(*inputs[:2], dtype))
        return results if len(inputs) == 2 else results + sums_gradients(*inputs, dtype)


@declared()
def sums(
    keys: int = 100_000,
    width: int = 64,
    heads: int = 1,
    batch: int = 1,
    backward: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """The sums over this number of keys, for a state: products in float64.

    Sums of float32 products, as in a single call of `intention`, show how much time they save.
    """
    scan, named = "ridge_state", dtype_name(dtype)
    ours = kernels(scan, definition=keys < 1_000_000)  # the definition copies what it reads
    peers: dict[str, Implementation] = {TORCH: partial(_by_torch, dtype=torch.float64)}
    if dtype != torch.float64:
        peers[TORCH_SINGLE] = partial(_by_torch, dtype=torch.float32)
    if "native" in ours and not backward and dtype == torch.float32:
        peers[RUNS] = lambda i: gram_op(Gram(*i, impl="native"))

    def inputs(seed: int) -> tuple[Tensor, ...]:
        """Keys and values; with a backward pass also the gradients of both sums."""
        random, square = generator(seed + 1), (batch, heads, width, width)
        douts = [normal(random, *square, dtype=torch.float64) for _ in range(2)] if backward else []
        return *_keys(seed, batch, heads, keys, width, dtype, backward), *douts

    count = batch * heads * keys
    forward = ridge_work(count, width, width, named, exact=True)
    return operator(
        {name: partial(_sums_by, impl=name) for name in ours},
        lambda key, value: (_exact_sum(key, key), _exact_sum(key, value)),
        operands=2,
        backward=backward,
        implementations=peers,
        scan=scan,
        name=f"ridge-state{'+backward' if backward else ''}-{named}-{heads}x{width}-N{keys}"
        + (f"-B{batch}" if batch > 1 else ""),
        sizes={"pass": direction(backward), "B": batch, "H": heads, "N": keys, "D": width},
        inputs=inputs,
        baselines=(TORCH,),
        others=(TORCH_SINGLE, RUNS),
        work=[forward, ridge_work(count, width, width, named, backward=True, exact=True)] if backward else forward,
        refusal=refusing(scan, *3 * [(1, heads, 1, width)], dtype=dtype),
        smaller={"keys": 1000},
    )


class Held(NamedTuple):
    """A state, and keys."""

    key: Tensor
    value: Tensor
    gram: Tensor
    moment: Tensor
    count: Tensor


def _removed_by(i: Held, impl: str) -> Results:
    left = remove_ridge(RidgeState(*i[2:]), i.key, i.value, impl=impl)
    return left.gram, left.moment


def _subtracted(i: Held, dtype: torch.dtype) -> Results:
    gram, moment = summed_heads(i.key, i.value, dtype)
    return i.gram - gram, i.moment - moment


@declared()
def removal(keys: int, width: int = 64, heads: int = 1) -> Case:
    """This number of keys removed from a state of twice as many."""
    scan = "remove_ridge"

    def inputs(seed: int) -> Held:
        gone, kept = (_keys(each, 1, heads, keys, width, torch.float32) for each in (seed, seed + 1000))
        gram, moment = (
            sum(parts) for parts in zip(*(summed_heads(*pair, torch.float64) for pair in (gone, kept)), strict=True)
        )
        return Held(*gone, gram, moment, torch.full(gram.shape[:2], 2 * keys, device=gram.device))

    return Case(
        scan=scan,
        name=f"remove-ridge-float32-{heads}x{width}-N{keys}",
        sizes={"pass": direction(False), "B": 1, "H": heads, "N": keys, "D": width},
        inputs=inputs,
        implementations={
            **{name: partial(_removed_by, impl=name) for name in kernels(scan)},
            TORCH: partial(_subtracted, dtype=torch.float64),
            TORCH_SINGLE: partial(_subtracted, dtype=torch.float32),
        },
        oracle=lambda i: (i.gram - _exact_sum(i.key, i.key), i.moment - _exact_sum(i.key, i.value)),
        baselines=(TORCH,),
        others=(TORCH_SINGLE,),
        work=ridge_work(heads * keys, width, width, "float32", exact=True),
        refusal=refusing(scan, *3 * [(1, heads, 1, width)]),
        smaller={"keys": 1000},
    )


def _updated_by(i: Held, impl: str) -> Results:
    return (ridge_step(RidgeState(*i[2:]), i.key, i.value, ALPHA, impl=impl).solution.weight,)


def eager_update(i: Held) -> Results:
    """The update in plain torch."""
    key, value = i.key.double(), i.value.double()
    gram, moment = i.gram + key.mT @ key, i.moment + key.mT @ value
    return (cholesky_solve(regularised(gram), moment),)


@declared()
def update(heads: int, width: int, keys: int = 100_000, tokens: int = 1) -> Case:
    """An update with more keys after `keys` whose sums alone were kept, and a new solve of the regression. All sums are
    in float64.

    There is no floor: the state stays in a cache, and the rest is the cost of calls.
    """

    def inputs(seed: int) -> Held:
        key, value = _keys(seed, 1, heads, keys + tokens, width, torch.float32)
        gram, moment = gram_reference(key[:, :, :keys], value[:, :, :keys], None, None, exact=True)
        return Held(
            key[:, :, keys:].clone(),
            value[:, :, keys:].clone(),
            gram,
            moment,
            torch.full((1, heads), keys, device=gram.device),
        )

    def oracle(i: Held) -> Results:
        outer, cross = (torch.einsum("bhni,bhnj->bhij", i.key.double(), part.double()) for part in (i.key, i.value))
        return (inverse_of(regularised(i.gram + outer)) @ (i.moment + cross),)

    sums_refusal = refusing("ridge_step", *3 * [(1, heads, 1, width)])
    solve_refusal = refusing("solve_ridge", *2 * [(heads, 1, width)], dtype=torch.float64)
    more = "one-key" if tokens == 1 else f"{tokens}-keys"
    return Case(
        scan="ridge_step",
        name=f"intention-update-float32-{heads}x{width}-{more}-after-{keys}",
        sizes={"pass": "update and solution", "H": heads, "t": tokens, "D": width},
        inputs=inputs,
        implementations={
            **{
                name: partial(_updated_by, impl=name)
                for name in kernels("ridge_step")
                if name in kernels("solve_ridge")
            },
            EAGER: eager_update,
        },
        oracle=oracle,
        baselines=(EAGER,),
        refusal=lambda name: sums_refusal(name) or solve_refusal(name),
        smaller={"keys": 1000},
    )


@declared()
def merge(states: int = 2, heads: int = 512, width: int = 64) -> Case:
    """Several states merged into one."""

    def inputs(seed: int) -> tuple[Tensor, ...]:
        """The gram, moment and count of each state, one state after the other."""
        random, square, count = generator(seed), (1, heads, width, width), torch.full((1, heads), 10, device=device())
        made = [[*(normal(random, *square, dtype=torch.float64) for _ in range(2)), count] for _ in range(states)]
        return tuple(part for state in made for part in state)

    return Case(
        scan="merge_ridge",
        name=f"merge-ridge-{states}-states-{heads}x{width}",
        sizes={"states": states, "H": heads, "D": width},
        inputs=inputs,
        implementations={"cmab_kernels.merge_ridge": _over_states(merge_ridge), EAGER: _over_states(_added)},
        oracle=lambda i: tuple(torch.stack(i[part::3]).sum(0).double() for part in range(3)),
        baselines=(EAGER,),
        work=moved((states + 1) * heads * (2 * width**2 + 1) * 8, "float64"),  # each state is read, and one written
        smaller={"heads": 1},
        dtype=torch.float64,
    )


def _over_states(merge: Callable[..., Results]) -> Implementation:
    return lambda inputs: merge(*(RidgeState(*inputs[i : i + 3]) for i in range(0, len(inputs), 3)))


def _added(first: RidgeState, *others: RidgeState) -> Results:
    """The states added up without a check."""
    totals = [mine + theirs for mine, theirs in zip(first, others[0], strict=True)]
    for state in others[1:]:
        for total, part in zip(totals, state, strict=True):
            total += part
    return totals


def errors_of_additions(keys: int, width: int = 8) -> dict[str, float]:
    """Relative error of the sum K'K after `keys` additions of one key each, for a `ridge_state` and for float32 sums in
    torch."""
    key = normal(generator(0), 1, 1, keys, width)
    exact_sum = key.double().mT @ key.double()
    state, plain = None, key.new_zeros(width, width)
    for row in key.unbind(2):
        state = ridge_state(row.unsqueeze(2), row.unsqueeze(2), state=state)
        plain.addr_(row[0, 0], row[0, 0])
    assert state is not None
    found = {"ridge_state": state.gram, "float32 sums in torch": plain}
    return {name: float((total.double() - exact_sum).norm() / exact_sum.norm()) for name, total in found.items()}


def cases() -> Iterator[Case]:
    yield from (sums(keys, quick=keys == 100_000) for keys in (1000, 10_000, 100_000, 1_000_000))
    yield from (sums(keys, backward=True) for keys in (10_000, 100_000))
    yield from (sums(width=width) for width in (16, 128))
    yield from (sums(heads=heads) for heads in (2, 8))
    yield from (sums(dtype=dtype) for dtype in DTYPES)
    yield sums(threads=2)
    yield update(4, 16, quick=True)
    yield from (update(1, width) for width in (16, 64))
    yield from (update(4, 16, tokens=tokens) for tokens in (16, 256))
    yield from (removal(keys, quick=keys == 10_000) for keys in (100, 1000, 10_000, 100_000))
    yield removal(10_000, threads=2)
    yield from (removal(10_000, width=width) for width in (16, 128))
    yield from (merge(states, quick=states == 2) for states in (2, 4, 8))
    yield from (merge(width=width) for width in (16, 32))
    yield from (merge(heads=heads) for heads in (1, 64))

"""Family C's states: sums over keys, that grow, shrink, merge and are solved anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cmab_kernels import RidgeState, merge_ridge, remove_ridge, ridge_state, solve_ridge
from cmab_kernels.intention.reference import gram_reference
from cmab_kernels.intention.schema import gram_op

from ..floors import Work, ridge_work
from ..harness import device, generator, normal
from .intention_peers import ALPHA, cholesky_solve, inverse_of, regularised, sums, sums_gradients
from .operators import EAGER, Implementation, OperatorCase, direction, kernels, moved, passes, refused, sample

TORCH, TORCH_SINGLE = "torch, float64", "torch, float32"
RUNS = "native, float32 runs"


@dataclass(frozen=True)
class Sums(OperatorCase):
    """The sums of so many keys, for a state: of products in float64. Those of float32 products, as `intention` forms them for a single
    call, are shown for what they save."""

    keys: int = 100_000
    width: int = 64
    heads: int = 1
    batch: int = 1
    backward: bool = False

    scan = "ridge_state"
    baselines = (TORCH,)
    others = (TORCH_SINGLE, RUNS)

    def __str__(self) -> str:
        way = "+backward" if self.backward else ""
        batch = f"-B{self.batch}" if self.batch > 1 else ""
        name = self.scan.replace("_", "-")
        return f"{name}{way}-{self._dtype}-{self.heads}x{self.width}-N{self.keys}{batch}{self._threads}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {"pass": direction(self.backward), "B": self.batch, "H": self.heads, "N": self.keys, "D": self.width}

    @property
    def work(self) -> Work:
        keys = self.batch * self.heads * self.keys
        forward = ridge_work(keys, self.width, self.width, self._dtype, exact=True)
        return forward + ridge_work(keys, self.width, self.width, self._dtype, backward=True, exact=True) if self.backward else forward

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        known = (name for name in kernels(self.scan) if name != "reference" or self.keys < 1_000_000)  # it copies what it reads
        ours = {name: passes(partial(_sums_by, impl=name), 2, self.backward) for name in known}
        runs = {RUNS: _in_runs} if "native" in ours and not self.backward and self.dtype == torch.float32 else {}
        single = {TORCH_SINGLE: partial(_by_torch, dtype=torch.float32)} if self.dtype != torch.float64 else {}
        return {**ours, **runs, TORCH: partial(_by_torch, dtype=torch.float64), **single}

    def inputs(self, seed: int) -> tuple[Tensor, ...]:
        """Keys and values; with a backward the gradients of both sums."""
        random = generator(seed)
        pair = [normal(random, self.batch, self.heads, self.keys, self.width).to(self.dtype) for _ in range(2)]
        square = (self.batch, self.heads, self.width, self.width)
        douts = [normal(random, *square).double() for _ in range(2)] if self.backward else []
        return *(part.requires_grad_(self.backward) for part in pair), *douts

    def oracle(self, inputs: Sequence[Tensor]) -> Mapping[str, Sequence[Tensor]]:
        key, value = (part.detach().double() for part in inputs[:2])
        results = _of_pieces(key, key), _of_pieces(key, value)
        if self.backward:
            dgram, dmoment = inputs[2:]
            results += (key @ (dgram + dgram.mT) + value @ dmoment.mT, key @ dmoment)
        return dict.fromkeys(self.implementations, results)

    def small(self) -> Sums:
        return replace(self, keys=1000)

    def refusal(self, implementation: str) -> str | None:
        return refused(self.scan, implementation, *3 * [sample(1, self.heads, 1, self.width, dtype=self.dtype)])


def _of_pieces(first: Tensor, second: Tensor) -> Tensor:
    """first' second in float64, of sums of few keys each: one product over all is good to 1e-13 only, and kernels to 1e-15."""
    pieces = zip(first.split(256, dim=2), second.split(256, dim=2), strict=True)
    return torch.stack([rows.mT @ others for rows, others in pieces]).sum(0)


def _sums_by(key: Tensor, value: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    state = ridge_state(key, value, impl=impl)
    return state.gram, state.moment


def _in_runs(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    return gram_op(*inputs, None, None, (True, True), False, "native")


def _by_torch(inputs: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    with torch.no_grad():
        results = tuple(total.double() for total in sums(*inputs[:2], dtype))
        return results if len(inputs) == 2 else results + sums_gradients(*inputs, dtype)


class Held(NamedTuple):
    """A state, and keys."""

    key: Tensor
    value: Tensor
    gram: Tensor
    moment: Tensor
    count: Tensor


@dataclass(frozen=True)
class Removal(Sums):
    """So many keys taken out of a state of twice as many."""

    scan = "remove_ridge"
    others = (TORCH_SINGLE,)

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        ours = {name: partial(_removed_by, impl=name) for name in kernels(self.scan)}
        return {**ours, TORCH: partial(_subtracted, dtype=torch.float64), TORCH_SINGLE: partial(_subtracted, dtype=torch.float32)}

    def inputs(self, seed: int) -> Held:
        keys, others = (super(Removal, self).inputs(each) for each in (seed, seed + 1000))
        gram, moment = (sum(parts) for parts in zip(*(sums(*pair, torch.float64) for pair in (keys, others)), strict=True))
        return Held(*keys, gram, moment, torch.full(gram.shape[:2], 2 * self.keys, device=gram.device))

    def oracle(self, inputs: Held) -> Mapping[str, Sequence[Tensor]]:
        gone = next(iter(super().oracle(inputs[:2]).values()))
        return dict.fromkeys(self.implementations, (inputs.gram - gone[0], inputs.moment - gone[1]))


def _removed_by(inputs: Held, impl: str) -> Sequence[Tensor]:
    left = remove_ridge(RidgeState(*inputs[2:]), inputs.key, inputs.value, impl=impl)
    return left.gram, left.moment


def _subtracted(inputs: Held, dtype: torch.dtype) -> Sequence[Tensor]:
    gram, moment = sums(inputs.key, inputs.value, dtype)
    return inputs.gram - gram, inputs.moment - moment


@dataclass(frozen=True)
class Update(OperatorCase):
    """Some more keys after `keys` of which only the sums were kept, and the regression anew. All sums in float64."""

    heads: int
    width: int
    keys: int = 100_000
    tokens: int = 1
    """More keys."""

    scan = "ridge_state"
    baselines = (EAGER,)
    work = None
    """The state stays in a cache, and the rest is calls."""

    def __str__(self) -> str:
        more = "one-key" if self.tokens == 1 else f"{self.tokens}-keys"
        return f"intention-update-{self._dtype}-{self.heads}x{self.width}-{more}-after-{self.keys}{self._threads}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {"pass": "update and solution", "H": self.heads, "t": self.tokens, "D": self.width}

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        ours = (name for name in kernels("ridge_state") if name in kernels("solve_ridge"))
        return {**{name: partial(_updated_by, impl=name) for name in ours}, EAGER: eager_update}

    def inputs(self, seed: int) -> Held:
        random = generator(seed)
        key, value = (normal(random, 1, self.heads, self.keys + self.tokens, self.width) for _ in range(2))
        gram, moment = gram_reference(key[:, :, : self.keys], value[:, :, : self.keys], None, None, exact=True)
        new = (part[:, :, self.keys :].to(self.dtype, copy=True) for part in (key, value))
        return Held(*new, gram, moment, torch.full((1, self.heads), self.keys, device=gram.device))

    def oracle(self, inputs: Held) -> Mapping[str, Sequence[Tensor]]:
        outer, cross = (torch.einsum("bhni,bhnj->bhij", inputs.key.double(), part.double()) for part in (inputs.key, inputs.value))
        system = regularised(inputs.gram + outer)
        return dict.fromkeys(self.implementations, (inverse_of(system) @ (inputs.moment + cross),))

    def small(self) -> Update:
        return replace(self, keys=1000)

    def refusal(self, implementation: str) -> str | None:
        key = sample(1, self.heads, 1, self.width, dtype=self.dtype)
        return refused("ridge_state", implementation, *3 * [key]) or refused("solve_ridge", implementation, *2 * [key.double()[0]])


def _updated_by(inputs: Held, impl: str) -> Sequence[Tensor]:
    state = ridge_state(inputs.key, inputs.value, state=RidgeState(*inputs[2:]), impl=impl)
    return (solve_ridge(state, ALPHA, impl=impl).weight,)


def eager_update(inputs: Held) -> Sequence[Tensor]:
    """The update as one writes it in torch."""
    key, value = inputs.key.double(), inputs.value.double()
    gram, moment = inputs.gram + key.mT @ key, inputs.moment + key.mT @ value
    return (cholesky_solve(regularised(gram), moment),)


@dataclass(frozen=True)
class Merge(OperatorCase):
    """Several states in one."""

    states: int = 2
    heads: int = 512
    width: int = 64
    dtype: torch.dtype = field(default=torch.float64, kw_only=True)

    scan = "merge_ridge"
    baselines = (EAGER,)

    def __str__(self) -> str:
        return f"merge-ridge-{self.states}-states-{self.heads}x{self.width}{self._threads}"

    @property
    def sizes(self) -> Mapping[str, int | str]:
        return {"states": self.states, "H": self.heads, "D": self.width}

    @property
    def work(self) -> Work | None:
        """Each state is read, and one written."""
        return moved((self.states + 1) * self.heads * (2 * self.width**2 + 1) * 8, "float64")

    @property
    def implementations(self) -> Mapping[str, Implementation]:
        return {"cmab_kernels.merge_ridge": _over_states(merge_ridge), EAGER: _over_states(_added)}

    def inputs(self, seed: int) -> tuple[Tensor, ...]:
        """Each state's gram, moment and count, one after the other."""
        random = generator(seed)
        square, count = (1, self.heads, self.width, self.width), torch.full((1, self.heads), 10, device=device())
        states = [[*(normal(random, *square).double() for _ in range(2)), count] for _ in range(self.states)]
        return tuple(part for state in states for part in state)

    def oracle(self, inputs: Sequence[Tensor]) -> Mapping[str, Sequence[Tensor]]:
        return dict.fromkeys(self.implementations, tuple(torch.stack(inputs[part::3]).sum(0).double() for part in range(3)))

    def small(self) -> Merge:
        return replace(self, heads=1)

    def refusal(self, implementation: str) -> str | None:
        return None


def _over_states(merge: Callable[..., Sequence[Tensor]]) -> Implementation:
    return lambda inputs: merge(*(RidgeState(*inputs[i : i + 3]) for i in range(0, len(inputs), 3)))


def _added(first: RidgeState, *others: RidgeState) -> Sequence[Tensor]:
    """Into one sum each, without a check."""
    totals = [mine + theirs for mine, theirs in zip(first, others[0], strict=True)]
    for state in others[1:]:
        for total, part in zip(totals, state, strict=True):
            total += part
    return totals


def errors_of_additions(keys: int, width: int = 8) -> dict[str, float]:
    """Relative error of the sum K'K after `keys` additions of one key each: of a `ridge_state`, and of float32 sums kept in torch."""
    key = normal(generator(0), 1, 1, keys, width)
    exact_sum = key.double().mT @ key.double()
    state, plain = None, key.new_zeros(width, width)
    for row in key.unbind(2):
        state = ridge_state(row.unsqueeze(2), row.unsqueeze(2), state=state)
        plain.addr_(row[0, 0], row[0, 0])
    assert state is not None
    sums = {"ridge_state": state.gram, "float32 sums in torch": plain}
    return {name: float((total.double() - exact_sum).norm() / exact_sum.norm()) for name, total in sums.items()}

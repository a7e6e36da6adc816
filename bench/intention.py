"""Family C: what is measured, beside whom, and what is right. One thread, as its targets say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import cmab_kernels
from cmab_kernels import RidgeState, intention, regularised_solve, ridge_state, solve_ridge
from cmab_kernels.intention.reference import gram_reference
from cmab_kernels.intention.schema import gram_op

from .attention import SDPA, exact
from .harness import Case, lacking_memory

ALPHA = 1.0
CHUNK = 4096
"""Keys that torch is given at a time: the fastest of 512 to all of them, and of eight ways to write the products."""

CHOLESKY = "torch, Cholesky"
INVERSE = "torch, inverse"
CHUNKED = "torch, in chunks"
EAGER = "eager torch"


def cholesky_solve(gram: Tensor, rhs: Tensor) -> Tensor:
    """Cholesky and two triangular solves as fast as torch has them: from the upper triangle, without a check."""
    return torch.cholesky_solve(rhs, torch.linalg.cholesky_ex(gram, upper=True)[0], upper=True)


def _normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random)


def _refused(operator: str, impl: str, *tensors: Tensor) -> str | None:
    """Why `explain` says that `impl`, if it is one of ours, cannot run such tensors."""
    return {row.impl: row.reason for row in cmab_kernels.explain(operator, *tensors) if not row.usable}.get(impl)


# ---- many systems ----------------------------------------------------------------------------------------------------------------------


class SystemInputs(NamedTuple):
    gram: Tensor
    rhs: Tensor


@dataclass(frozen=True)
class Solve:
    """Well-conditioned systems of `width` unknowns for `columns` right-hand sides each. alpha is 0, so that torch need not add it.

    A product with the inverse is less accurate (it fails LAPACK's test from condition 1e3 on), but faster in torch than its triangular
    solves: it is shown, and no baseline.
    """

    width: int
    columns: int
    batch: int
    dtype: torch.dtype = torch.float32
    threads: int = 1
    quick: bool = False
    baselines: tuple[str, ...] = (CHOLESKY,)

    def __str__(self) -> str:
        return f"solve-float32-D{self.width}-E{self.columns}-B{self.batch}"

    @property
    def implementations(self) -> Mapping[str, Callable[[SystemInputs], Sequence[Tensor]]]:
        return {
            "native": lambda i: (regularised_solve(i.gram, i.rhs, 0.0, impl="native").weight,),
            "reference": lambda i: (regularised_solve(i.gram, i.rhs, 0.0, impl="reference").weight,),
            CHOLESKY: lambda i: (cholesky_solve(i.gram, i.rhs),),
            INVERSE: lambda i: (torch.cholesky_inverse(torch.linalg.cholesky_ex(i.gram)[0]) @ i.rhs,),
        }

    def inputs(self, seed: int) -> SystemInputs:
        random = torch.Generator().manual_seed(seed)
        rows = _normal(random, self.batch, 4 * self.width, self.width)
        return SystemInputs(rows.mT @ rows / (4 * self.width), _normal(random, self.batch, self.width, self.columns))

    def oracle(self, inputs: SystemInputs) -> Mapping[str, Sequence[Tensor]]:
        return dict.fromkeys(self.implementations, (cholesky_solve(inputs.gram.double(), inputs.rhs.double()),))

    def small(self) -> Solve:
        return replace(self, batch=4)

    def refusal(self, implementation: str) -> str | None:
        return _refused("regularised_solve", implementation, torch.empty(1, self.width, self.width), torch.empty(1, self.width, 1))


# ---- a layer ---------------------------------------------------------------------------------------------------------------------------


class LayerInputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor
    """Gradient of the output; empty without a backward."""


@dataclass(frozen=True)
class Layer:
    """As many queries as keys. Short ones stand beside attention, which computes something else; long ones beside torch's best form."""

    length: int
    heads: int = 1
    width: int = 64
    backward: bool = False
    dtype: torch.dtype = torch.float32
    threads: int = 1
    quick: bool = False

    def __str__(self) -> str:
        direction = "forward+backward" if self.backward else "forward"
        return f"intention-{direction}-float32-{self.heads}x{self.width}-N{self.length}"

    @property
    def _beside_attention(self) -> bool:
        return self.length <= 16_384

    @property
    def baselines(self) -> tuple[str, ...]:
        return (SDPA,) if self._beside_attention else (CHUNKED,)

    @property
    def implementations(self) -> Mapping[str, Callable[[LayerInputs], Sequence[Tensor]]]:
        direction = _forward_and_backward if self.backward else _forward
        attention = {SDPA: direction(F.scaled_dot_product_attention)} if self._beside_attention else {}
        return {
            "native": direction(lambda q, k, v: intention(q, k, v, ALPHA, impl="native")),
            "reference": direction(lambda q, k, v: intention(q, k, v, ALPHA, impl="reference")),
            CHUNKED: chunked,
            **attention,
        }

    def inputs(self, seed: int) -> LayerInputs:
        random = torch.Generator().manual_seed(seed)
        query, key, value = (_normal(random, 1, self.heads, self.length, self.width).requires_grad_(self.backward) for _ in range(3))
        return LayerInputs(query, key, value, _normal(random, *(query.shape if self.backward else (0,))))

    def oracle(self, inputs: LayerInputs) -> Mapping[str, Sequence[Tensor]]:
        solved = chunked(LayerInputs(*(part.detach().double() for part in inputs)))
        attended = exact(*inputs[:3], inputs.dout if self.backward else None) if self._beside_attention else ()
        return {name: attended if name == SDPA else solved for name in self.implementations}

    def small(self) -> Layer:
        return replace(self, length=256)

    def refusal(self, implementation: str) -> str | None:
        sample = torch.empty(1, self.heads, 1, self.width)
        held = 4 * self.heads * self.length * self.width * (24 if self.backward else 12)  # inputs and results, in float64 too
        return _refused("intention", implementation, *3 * [sample]) or lacking_memory(held + 2**30)


def _forward(layer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[LayerInputs], Sequence[Tensor]]:
    return lambda inputs: (layer(*inputs[:3]),)


def _forward_and_backward(layer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[LayerInputs], Sequence[Tensor]]:
    def run(inputs: LayerInputs) -> Sequence[Tensor]:
        out = layer(*inputs[:3])
        return out.detach(), *torch.autograd.grad(out, inputs[:3], inputs.dout)

    return run


@torch.no_grad()
def chunked(inputs: LayerInputs) -> tuple[Tensor, ...]:
    """Intention as fast as torch has it, head by head; with a dout its gradients by hand, in 0.45 of the time that autograd takes."""
    query, key, value, dout = inputs
    if not dout.numel():
        out = torch.empty_like(value)
        for head in range(key.shape[1]):
            _, weight = _solved(key[0, head], value[0, head])
            torch.mm(query[0, head], weight, out=out[0, head])
        return (out,)
    results = tuple(torch.empty_like(rows) for rows in (value, query, key, value))
    for head in range(key.shape[1]):
        _results_of_head(*(part[0, head] for part in (*inputs, *results)))
    return results


def _solved(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The factor of the system, and its solution."""
    factor = torch.linalg.cholesky_ex(_summed(key, key) + ALPHA * torch.eye(key.shape[1], dtype=key.dtype))[0]
    return factor, torch.cholesky_solve(_summed(key, value), factor)


def _results_of_head(
    query: Tensor, key: Tensor, value: Tensor, dout: Tensor, out: Tensor, dquery: Tensor, dkey: Tensor, dvalue: Tensor
) -> None:
    factor, weight = _solved(key, value)
    dmoment = torch.cholesky_solve(_summed(query, dout), factor)
    slope = -(dmoment @ weight.T + weight @ dmoment.T)
    for start in range(0, len(key), CHUNK):
        part = slice(start, start + CHUNK)
        torch.mm(query[part], weight, out=out[part])
        torch.mm(dout[part], weight.T, out=dquery[part])
        torch.mm(key[part], slope, out=dkey[part])
        torch.addmm(dkey[part], value[part], dmoment.T, out=dkey[part])
        torch.mm(key[part], dmoment, out=dvalue[part])


def _summed(first: Tensor, second: Tensor) -> Tensor:
    """first' second, each chunk in the cache once."""
    total = first.new_zeros(first.shape[1], second.shape[1])
    for rows, others in zip(first.split(CHUNK), second.split(CHUNK), strict=True):
        torch.addmm(total, rows.T, others, out=total)
    return total


# ---- streams ---------------------------------------------------------------------------------------------------------------------------


class StreamInputs(NamedTuple):
    key: Tensor
    value: Tensor
    gram: Tensor
    moment: Tensor
    count: Tensor


@dataclass(frozen=True)
class OneMore:
    """One more key after `keys` of which only the sums were kept, and the regression anew. All sums in float64."""

    heads: int
    width: int
    keys: int = 100_000
    dtype: torch.dtype = torch.float32
    threads: int = 1
    quick: bool = False
    baselines: tuple[str, ...] = (EAGER,)

    def __str__(self) -> str:
        return f"intention-update-float32-{self.heads}x{self.width}-one-key-after-{self.keys}"

    @property
    def implementations(self) -> Mapping[str, Callable[[StreamInputs], Sequence[Tensor]]]:
        return {"native": _updated_by("native"), "reference": _updated_by("reference"), EAGER: eager_update}

    def inputs(self, seed: int) -> StreamInputs:
        _, key, value, _ = Layer(self.keys + 1, self.heads, self.width).inputs(seed)
        gram, moment = gram_reference(key[:, :, :-1], value[:, :, :-1], None, None, exact=True)
        return StreamInputs(key[:, :, -1:].clone(), value[:, :, -1:].clone(), gram, moment, torch.full((1, self.heads), self.keys))

    def oracle(self, inputs: StreamInputs) -> Mapping[str, Sequence[Tensor]]:
        outer, cross = (torch.einsum("bhni,bhnj->bhij", inputs.key.double(), part.double()) for part in (inputs.key, inputs.value))
        system = inputs.gram + outer + ALPHA * torch.eye(self.width, dtype=torch.float64)
        return dict.fromkeys(self.implementations, (torch.cholesky_inverse(torch.linalg.cholesky(system)) @ (inputs.moment + cross),))

    def small(self) -> OneMore:
        return replace(self, keys=1000)

    def refusal(self, implementation: str) -> str | None:
        sample = torch.empty(1, self.heads, 1, self.width)
        return _refused("ridge_state", implementation, *3 * [sample]) or _refused("solve_ridge", implementation, *2 * [sample.double()[0]])


def _updated_by(impl: str) -> Callable[[StreamInputs], Sequence[Tensor]]:
    def update(i: StreamInputs) -> Sequence[Tensor]:
        state = ridge_state(i.key, i.value, state=RidgeState(i.gram, i.moment, i.count), impl=impl)
        return (solve_ridge(state, ALPHA, impl=impl).weight,)

    return update


def eager_update(i: StreamInputs) -> Sequence[Tensor]:
    """The update as one writes it in torch."""
    key, value = i.key.double(), i.value.double()
    gram, moment = i.gram + key.mT @ key, i.moment + key.mT @ value
    return (cholesky_solve(gram + ALPHA * torch.eye(gram.shape[-1], dtype=gram.dtype), moment),)


RUNS, EXACT = "native, float32 runs", "native, float64"


@dataclass(frozen=True)
class Sums:
    """Gram and moment alone: what the float64 products of a state cost beside the float32 ones of a single call."""

    keys: int = 100_000
    width: int = 64
    dtype: torch.dtype = torch.float32
    threads: int = 1
    quick: bool = True
    baselines: tuple[str, ...] = (RUNS,)

    def __str__(self) -> str:
        return f"sums-float32-1x{self.width}-N{self.keys}"

    @property
    def implementations(self) -> Mapping[str, Callable[[LayerInputs], Sequence[Tensor]]]:
        return {
            RUNS: lambda i: gram_op(i.key, i.value, None, None, (True, True), False, "native"),
            EXACT: lambda i: gram_op(i.key, i.value, None, None, (True, True), True, "native"),
            "torch, float32": lambda i: (i.key.mT @ i.key, i.key.mT @ i.value),
            "torch, float64": lambda i: gram_reference(i.key, i.value, None, None, exact=True),
        }

    def inputs(self, seed: int) -> LayerInputs:
        return Layer(self.keys, width=self.width).inputs(seed)

    def oracle(self, inputs: LayerInputs) -> Mapping[str, Sequence[Tensor]]:
        key, value = inputs.key.double(), inputs.value.double()
        return dict.fromkeys(self.implementations, (key.mT @ key, key.mT @ value))

    def small(self) -> Sums:
        return replace(self, keys=1000)

    def refusal(self, implementation: str) -> str | None:
        return _refused("ridge_state", implementation.split(",")[0], *3 * [torch.empty(1, 1, 1, self.width)])


def errors_of_additions(keys: int, width: int = 8) -> dict[str, float]:
    """Relative error of the sum K'K after `keys` additions of one key each: of a `ridge_state`, and of float32 sums kept in torch."""
    key = _normal(torch.Generator().manual_seed(0), 1, 1, keys, width)
    exact_sum = key.double().mT @ key.double()
    state, plain = None, torch.zeros(width, width)
    for row in key.unbind(2):
        state = ridge_state(row.unsqueeze(2), row.unsqueeze(2), state=state)
        plain.addr_(row[0, 0], row[0, 0])
    assert state is not None
    sums = {"ridge_state": state.gram, "float32 sums in torch": plain}
    return {name: float((total.double() - exact_sum).norm() / exact_sum.norm()) for name, total in sums.items()}


WIDTHS = (16, 32, 64, 128)

CASES: list[Case] = [
    *(
        Solve(width, columns, batch, quick=columns == width and batch == 1024)
        for width in WIDTHS
        for columns in (width, 1)
        for batch in (64, 1024)
    ),
    Layer(1_000_000, quick=True),
    Layer(1_000_000, backward=True, quick=True),
    *(Layer(length, heads, quick=heads == 1 and length in (256, 16_384)) for heads in (1, 8) for length in (256, 1024, 4096, 16_384)),
    *(Layer(length, backward=True) for length in (256, 1024, 4096, 16_384)),
    OneMore(4, 16, quick=True),
    OneMore(1, 64),
    Sums(),
]

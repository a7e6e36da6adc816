"""Intention as a layer, and its systems, compared with their peers; on one thread unless stated, as in the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels import RidgeState, intention, regularised_inverse, regularised_solve, sigma_intention, solve_ridge

from ..devices import device, generator, normal
from ..floors import Work, attention_work, inverse_work, ridge_work, rows_work, solve_work
from .attention import SDPA
from .case import (
    DTYPES,
    EAGER,
    Case,
    Implementation,
    Operands,
    declared,
    direction,
    drawn,
    dtype_name,
    identity,
    kernels,
    operator,
    refusing,
    way,
    wide,
)
from .intention_peers import ALPHA, cholesky_gradients, cholesky_solve, inverse_of, regression, regularised, sigma

CHUNKED = "torch, in chunks"
SCALED = F.scaled_dot_product_attention
BESIDE_ATTENTION = 16_384
"""The largest number of rows for which attention is shown together with Intention and torch's best form. Attention
computes something else."""


def _inverse(key: Tensor) -> Tensor:
    return inverse_of(regularised(key.mT @ key))


def regression_work(heads: int, length: int, width: int, dtype: str, backward: bool) -> list[Work]:
    """The work of sums, solution and rows, with as many queries as keys. The backward pass adds the gradients of each,
    with the same factor."""
    rows = heads * length
    forward = (
        ridge_work(rows, width, width, dtype)
        + solve_work(heads, width, width, dtype)
        + rows_work(rows, width, width, dtype)
    )
    if not backward:
        return [forward]
    again = Work(0.0, heads * 4 * width**3, 0.0, dtype)
    gradients = ridge_work(rows, width, width, dtype, backward=True) + rows_work(
        rows, width, width, dtype, backward=True
    )
    return [forward, again + gradients]


@declared()
def layer(
    length: int,
    heads: int = 1,
    width: int = 64,
    batch: int = 1,
    backward: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """`intention` with as many queries as keys.

    The oracle uses an inverse in float64. For many keys, where the gradient of the inverse takes gigabytes, it is
    torch's form in float64.
    """
    short, named = length <= BESIDE_ATTENTION, dtype_name(dtype)
    ours = kernels("intention", definition=length < 1_000_000)  # the definition copies what it reads
    functions = {name: partial(intention, alpha=ALPHA, impl=name) for name in ours} | ({SDPA: SCALED} if short else {})
    held = 4 * batch * heads * length * width * (24 if backward else 12)  # in float64 too
    case = operator(
        functions,
        dict.fromkeys((*ours, CHUNKED), lambda q, k, v: q @ (_inverse(k) @ (k.mT @ v)))
        | ({SDPA: SCALED} if short else {}),
        operands=3,
        backward=backward,
        implementations={CHUNKED: lambda i: regression(*i)},
        scan="intention",
        name=f"intention-{way(backward)}-{named}-{heads}x{width}-N{length}{f'-B{batch}' if batch > 1 else ''}",
        sizes={"pass": direction(backward), "B": batch, "H": heads, "N": length, "D": width},
        inputs=lambda seed: Operands(
            *drawn(seed, *3 * [(batch, heads, length, width)], backward=backward, dtype=dtype)
        ),
        baselines=(CHUNKED,),
        uncaptured=(CHUNKED,),
        others=(SDPA,),
        work=regression_work(batch * heads, length, width, named, backward),
        refusal=refusing("intention", *3 * [(1, heads, 1, width)], dtype=dtype, memory=held + 2**30),
        smaller={"length": 256},
    )
    return case if short else replace(case, oracle=lambda i: regression(*(part.detach().double() for part in i)))


@declared()
def sigma_layer(
    length: int = 10_000,
    queries: int = 128,
    heads: int = 1,
    width: int = 64,
    batch: int = 1,
    backward: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A few queries that go through the inverse of a ridge regression, over many keys: attention with logits of the
    usual size."""
    scan, named = "sigma_intention", dtype_name(dtype)
    scale = length * width**-0.5  # K'K is about N I, and queries are divided by it
    ours = kernels(scan, definition=length < 100_000)  # the definition stores the scores
    shapes = [(batch, heads, count, width) for count in (queries, length, length)]
    keys, scores = batch * heads * length, batch * heads * queries * length
    attend = partial(attention_work, scores, keys, width, width, named, device=device())
    inverse = ridge_work(keys, width, 0, named) + solve_work(batch * heads, width, queries, named)
    forward = attend() + replace(inverse, bytes=0.0)  # the keys are counted with the attention
    return operator(
        {name: partial(sigma_intention, alpha=ALPHA, scale=scale, impl=name) for name in ours}
        | {EAGER: partial(sigma, scale=scale), SDPA: SCALED},
        dict.fromkeys((*ours, EAGER), lambda q, k, v: (scale * (q @ _inverse(k)) @ k.mT).softmax(-1) @ v)
        | {SDPA: SCALED},
        operands=3,
        backward=backward,
        scan=scan,
        name=f"sigma-intention-{way(backward)}-{named}-B{batch}-{heads}x{width}-L{queries}-N{length}",
        sizes={"pass": direction(backward), "B": batch, "H": heads, "L": queries, "N": length, "D": width},
        inputs=lambda seed: Operands(*drawn(seed, *shapes, backward=backward, dtype=dtype)),
        baselines=(EAGER,),
        uncaptured=(EAGER,),
        others=(SDPA,),
        work=[forward, attend(backward=True)] if backward else forward,
        refusal=refusing(scan, *3 * [(1, heads, 1, width)], dtype=dtype, memory=40 * scores + 2**30),
        smaller={"length": 256},
    )


# ---- systems ---------------------------------------------------------------------------------------------------------

CHOLESKY, INVERSE = "torch, Cholesky", "torch, inverse"


def matrices(random: torch.Generator, batch: int, width: int) -> Tensor:
    """Return means of `width` outer products, with eigenvalues of up to 4, plus 1/2: the condition number is 9."""
    rows = normal(random, batch, width, width)
    return rows.mT @ rows / width + 0.5 * identity(rows)


def _solve(
    scan: str,
    name: str,
    solved: Callable[[Tensor, Tensor, str], Tensor],
    width: int,
    columns: int,
    batch: int,
    backward: bool,
    dtype: torch.dtype,
) -> Case:
    """Well-conditioned systems of `width` unknowns for `columns` right-hand sides each. alpha is 0, so torch need not
    add it.

    A product with the inverse is less accurate (it fails LAPACK's test from condition 1e3 on), but faster in torch than
    its triangular solves. It is shown, but is not a baseline.
    """

    def widened(solve: Callable[..., Tensor]) -> Implementation:
        """torch cannot factorise half precision."""
        return lambda inputs: (solve(*(part.to(wide(dtype)) for part in inputs)).to(dtype),)

    peers: dict[str, Implementation] = {CHOLESKY: lambda inputs: cholesky_gradients(*inputs)}
    if not backward:
        peers = {CHOLESKY: widened(cholesky_solve), INVERSE: widened(lambda gram, rhs: inverse_of(gram) @ rhs)}

    def inputs(seed: int) -> tuple[Tensor, ...]:
        """Matrices and right-hand sides; with a backward pass also the gradient of the solution."""
        random = generator(seed)
        gram = matrices(random, batch, width)
        rhs, dweight = (normal(random, batch, width, columns) for _ in range(2))
        gram, rhs = (part.to(dtype).requires_grad_(backward) for part in (gram, rhs))
        return (gram, rhs, dweight.to(dtype)) if backward else (gram, rhs)

    def exact(gram: Tensor, rhs: Tensor) -> Tensor:
        return torch.cholesky_solve(rhs, torch.linalg.cholesky_ex((gram + gram.mT) / 2)[0])

    named = dtype_name(wide(dtype))
    work = [solve_work(batch, width, columns, named)]
    if backward:  # two more triangular solves, and a product of the two solutions
        product = replace(rows_work(batch * width, columns, width, named), bytes=0.0)
        work.append(Work(0.0, batch * 2 * width**2 * columns, work[0].bytes, named) + product)
    right_hand_sides = "D" if columns == width else str(columns)  # so that D varies alone
    return operator(
        {impl: partial(solved, impl=impl) for impl in kernels(scan)},
        exact,
        operands=2,
        backward=backward,
        implementations=peers,
        scan=scan,
        name=f"{name}{'+backward' if backward else ''}-{dtype_name(dtype)}-D{width}-E{columns}-B{batch}",
        sizes={"pass": direction(backward), "B": batch, "D": width, "right-hand sides": right_hand_sides},
        inputs=inputs,
        baselines=(CHOLESKY,),
        uncaptured=(CHOLESKY, INVERSE),
        work=work,
        refusal=refusing(scan, (1, width, width), (1, width, columns), dtype=wide(dtype)),
        smaller={"batch": 4},
        dtype=dtype,
    )


@declared()
def solve(width: int, columns: int, batch: int, backward: bool = False, dtype: torch.dtype = torch.float32) -> Case:
    def solved(gram: Tensor, rhs: Tensor, impl: str) -> Tensor:
        return regularised_solve(gram, rhs, 0.0, impl=impl).weight

    return _solve("regularised_solve", "solve", solved, width, columns, batch, backward, dtype)


@declared()
def solve_state(width: int, columns: int, batch: int) -> Case:
    """The same for the sums of a state, which are float64."""

    def solved(gram: Tensor, rhs: Tensor, impl: str) -> Tensor:
        state = RidgeState(gram[None], rhs[None], torch.full((1, len(gram)), 4 * gram.shape[-1], device=gram.device))
        return solve_ridge(state, 0.0, impl=impl).weight[0]

    return _solve("solve_ridge", "solve-state", solved, width, columns, batch, False, torch.float64)


@declared()
def inverse(width: int, batch: int, dtype: torch.dtype = torch.float32) -> Case:
    """Inverses of the same matrices, if their elements are needed. The oracle uses eigenvalues."""
    scan = "regularised_inverse"

    def exact(gram: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(gram)
        return (vectors / values.unsqueeze(-2)) @ vectors.mT

    return operator(
        {name: partial(regularised_inverse, alpha=0.0, impl=name) for name in kernels(scan)}
        | {CHOLESKY: lambda gram: cholesky_solve(gram, identity(gram).expand_as(gram)), INVERSE: inverse_of},
        exact,
        operands=1,
        scan=scan,
        name=f"inverse-{dtype_name(dtype)}-D{width}-B{batch}",
        sizes={"B": batch, "D": width},
        inputs=lambda seed: (matrices(generator(seed), batch, width).to(dtype),),
        baselines=(CHOLESKY, INVERSE),
        uncaptured=(CHOLESKY, INVERSE),
        work=inverse_work(batch, width, dtype_name(dtype)),
        refusal=refusing(scan, *2 * [(1, width, width)], dtype=dtype),
        smaller={"batch": 4},
    )


# ---- what is measured ------------------------------------------------------------------------------------------------

WIDTHS = (16, 32, 64, 128)


def cases() -> Iterator[Case]:
    yield from (layer(length, quick=length in (256, 16_384)) for length in (256, 1024, 4096, 16_384))
    yield layer(100_000, quick=True)
    yield layer(1_000_000, quick=True)
    yield from (layer(length, backward=True) for length in (256, 1024, 4096, 100_000))
    yield layer(1_000_000, backward=True, quick=True)
    yield from (layer(4096, width=width) for width in WIDTHS if width != 64)
    yield from (layer(4096, heads) for heads in (2, 8))
    yield from (layer(4096, batch=batch) for batch in (2, 8))
    yield from (layer(4096, dtype=dtype) for dtype in DTYPES)
    yield layer(4096, threads=2)

    yield from (sigma_layer(length, quick=length < 100_000) for length in (1000, 10_000, 100_000, 300_000))
    yield from (sigma_layer(length, backward=True) for length in (1000, 10_000, 100_000))
    yield from (sigma_layer(width=width) for width in (16, 128))
    yield from (sigma_layer(heads=heads) for heads in (2, 8))
    yield from (sigma_layer(queries=queries) for queries in (16, 1024))
    yield sigma_layer(batch=8)
    yield from (sigma_layer(dtype=dtype) for dtype in DTYPES)
    yield sigma_layer(threads=2)

    yield from (solve(width, width, 1024, quick=True) for width in WIDTHS)
    yield from (solve(width, 1, 1024) for width in (16, 64))
    yield from (solve(32, 32, batch) for batch in (1, 64))
    yield from (solve(32, 32, 1024, dtype=dtype) for dtype in DTYPES)
    yield from (solve(width, width, 1024, backward=True) for width in (16, 32, 64))
    yield solve(32, 32, 1024, threads=2)
    yield from (solve_state(width, width, 64, quick=width == 64) for width in WIDTHS)
    yield solve_state(64, 1, 64)
    yield from (solve_state(64, 64, batch) for batch in (1, 8))
    yield solve_state(64, 64, 64, threads=2)
    yield from (inverse(width, 1024, quick=width == 32) for width in WIDTHS)
    yield from (inverse(32, batch) for batch in (1, 64))
    yield inverse(32, 1024, dtype=torch.float64)
    yield inverse(32, 1024, threads=2)

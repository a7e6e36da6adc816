"""Nyström attention of whole windows, its pseudo-inverse, and the first windows of streams, compared with their
peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels import continual_attention_init, continual_nystrom_init, iterative_pinv, nystrom_attention
from cmab_kernels.nystrom.reference import segment_means

from ..devices import device, generator, normal
from ..floors import attention_work, nystrom_work, pinv_work
from .attention import SDPA
from .case import (
    DTYPES,
    EAGER,
    PACKAGE,
    Case,
    Implementation,
    Results,
    declared,
    direction,
    doubled,
    drawn,
    dtype_name,
    identity,
    kernels,
    missing,
    moved,
    operator,
    passes,
    refusing,
    way,
    wide,
)
from .eager import ITERATIONS, eager_attention, eager_pinv, eager_rings, eager_start


class LayerInputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    together: Tensor
    """All three in one tensor, as the package takes them: (B, N, 3 H D)."""
    dout: Tensor
    """Gradient of the output; empty without a backward."""


@declared(threads=None)
def layer(
    length: int = 4096,
    heads: int = 4,
    width: int = 64,
    landmarks: int = 64,
    batch: int = 1,
    backward: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """As many queries as keys; compared with attention, which computes something else, and with the package
    nystrom-attention, whose heads share their norms."""
    scan, named, rows = "nystrom_attention", dtype_name(dtype), batch * heads * length

    def by(attend: Callable[..., Tensor]) -> Implementation:
        run = passes(attend, 3, backward)
        return lambda i: run((*i[:3], i.dout))

    module = cache(partial(packaged_attention, heads, width, landmarks))

    def packaged(i: LayerInputs) -> Results:
        dout = i.dout.transpose(1, 2).flatten(-2) if backward else i.dout
        return passes(module(), 1, backward)((i.together, dout))

    def inputs(seed: int) -> LayerInputs:
        *parts, dout = drawn(seed, *3 * [(batch, heads, length, width)], backward=backward, dtype=dtype)
        together = torch.cat([part.detach().transpose(1, 2).flatten(-2) for part in parts], dim=-1)
        return LayerInputs(*parts, together.requires_grad_(backward), dout)

    def oracle(i: LayerInputs) -> Mapping[str, Results]:
        """The definition in float64; attention and the package have their own definitions."""
        doubles = LayerInputs(*doubled(i))
        own = {
            name: implementations[name](doubles)
            for name in (SDPA, PACKAGE)
            if name in implementations and missing(name) is None
        }
        return dict.fromkeys(implementations, implementations["reference"](doubles)) | own

    implementations = {
        name: by(partial(nystrom_attention, num_landmarks=landmarks, impl=name)) for name in kernels(scan)
    }
    implementations[EAGER] = by(partial(eager_attention, number=landmarks))
    if dtype == wide(dtype):  # half precision has too few digits for the package's pseudo-inverse
        implementations[PACKAGE] = packaged
    if length <= (4096 if backward else 16_384):
        implementations[SDPA] = by(F.scaled_dot_product_attention)
    work = [nystrom_work(batch * heads, length, landmarks, width, width, ITERATIONS, named)]
    if backward:  # the sum for both attentions: of the landmarks to all keys, and of all queries to the landmarks
        half = attention_work(rows * landmarks, rows, width, width, named, backward=True)
        work.append(half + half)
    return Case(
        scan=scan,
        name=f"nystrom-{way(backward)}-{named}-{heads}x{width}-N{length}-m{landmarks}"
        + (f"-B{batch}" if batch > 1 else ""),
        sizes={"pass": direction(backward), "B": batch, "H": heads, "N": length, "D": width, "m": landmarks},
        inputs=inputs,
        implementations=implementations,
        oracle=oracle,
        baselines=(PACKAGE, EAGER),
        others=(SDPA,),
        work=work,
        refusal=refusing(
            scan, (heads, landmarks, width), dtype=dtype, memory=8 * rows * (8 * width + 12 * landmarks) + 2**30
        ),
        smaller={"length": 4 * landmarks},
    )


def _unchanged(tokens: Tensor) -> Tensor:
    return tokens


def packaged_attention(
    heads: int,
    width: int,
    landmarks: int,
    enter: Callable[[Tensor], Tensor] = _unchanged,
    leave: Callable[[Tensor], Tensor] = _unchanged,
) -> Callable[[Tensor], Tensor]:
    """The package's attention with other functions in place of its projections."""
    from nystrom_attention import NystromAttention

    module = NystromAttention(heads * width, width, heads, landmarks, ITERATIONS, residual=False)
    for name, function in (("to_qkv", enter), ("to_out", leave)):
        delattr(module, name)
        setattr(module, name, function)
    return module.forward  # torch's counter of FLOPs cannot follow modules under autograd.grad


# ---- the pseudo-inverse ----------------------------------------------------------------------------------------------


@declared()
def pinv(landmarks: int = 16, batch: int = 1, backward: bool = False, dtype: torch.dtype = torch.float32) -> Case:
    """The iterated pseudo-inverse of softmaxes over random landmarks.

    The backward pass has no floor, because recomputation is optional.
    """
    scan = "iterative_pinv"

    def eager(matrix: Tensor) -> Tensor:
        return eager_pinv(matrix[0], ITERATIONS)[None] if batch == 1 else eager_pinv(matrix, ITERATIONS)

    def inputs(seed: int) -> tuple[Tensor, ...]:
        """Matrices; with a backward pass also the gradient of their inverses. The rows have different sums, because
        among equal sums the gradient of the largest is not unique."""
        random = generator(seed)
        matrix = (2 * normal(random, batch, landmarks, landmarks)).softmax(-1).to(dtype)
        if not backward:
            return (matrix,)
        dinverse = normal(random, *matrix.shape, dtype=dtype)
        sums = torch.linspace(0.5, 1, batch * landmarks, device=matrix.device).view(batch, landmarks, 1)
        return (matrix * sums).requires_grad_(), dinverse

    ours = {name: partial(iterative_pinv, iterations=ITERATIONS, impl=name) for name in kernels(scan)}
    return operator(
        ours | {EAGER: eager, PACKAGE: _packaged_pinv},
        dict.fromkeys((*ours, EAGER), iterated) | {PACKAGE: partial(iterated, together=True)},
        operands=1,
        backward=backward,
        scan=scan,
        name=f"iterative-pinv{'+backward' if backward else ''}-{dtype_name(dtype)}-m{landmarks}-B{batch}",
        sizes={"pass": direction(backward), "B": batch, "m": landmarks},
        inputs=inputs,
        baselines=(EAGER, PACKAGE),
        work=None if backward else pinv_work(batch, landmarks, ITERATIONS, dtype_name(dtype)),
        refusal=refusing(scan, (1, landmarks, landmarks), dtype=dtype),
    )


def _packaged_pinv(matrix: Tensor) -> Tensor:
    from nystrom_attention.nystrom_attention import moore_penrose_iter_pinv

    return moore_penrose_iter_pinv(matrix, ITERATIONS).reshape(matrix.shape)


def iterated(matrix: Tensor, together: bool = False) -> Tensor:
    """Razavi's iteration, multiplied out. With `together` it starts from the norms of all matrices."""
    one, size = identity(matrix), matrix.abs()
    columns, rows = (size.sum(dim).amax(-1) for dim in (-2, -1))
    norms = (columns.max() * rows.max()).expand_as(rows) if together else columns * rows
    z = matrix.mT / norms[..., None, None]
    for _ in range(ITERATIONS):
        az = matrix @ z
        z = z @ (13 * one - 15 * az + 7 * az @ az - az @ az @ az) / 4
    return z


# ---- first windows of streams ----------------------------------------------------------------------------------------


def _with_a_row(tokens: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat([part, torch.zeros_like(part[:, :, :1])], dim=2).double() for part in tokens]


def _window(seed: int, heads: int, window: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(drawn(seed, *3 * [(1, heads, window, width)], backward=False, dtype=dtype)[:3])


def _window_bytes(heads: int, window: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of queries, keys and values, read and written."""
    return 6 * heads * window * width * dtype.itemsize


@declared()
def exact_start(window: int = 64, width: int = 64, heads: int = 16, dtype: torch.dtype = torch.float32) -> Case:
    """Exact attention keeps the window, in ring buffers with a spare row."""
    return Case(
        scan="continual_attention_init",
        name=f"exact-start-{dtype_name(dtype)}-{heads}x{width}-n{window}",
        sizes={"H": heads, "n": window, "D": width},
        inputs=lambda seed: _window(seed, heads, window, width, dtype),
        implementations={
            "cmab_kernels.continual_attention_init": lambda i: continual_attention_init(*i)[:3],
            EAGER: lambda i: eager_rings(*i),
        },
        oracle=_with_a_row,
        baselines=(EAGER,),
        work=moved(_window_bytes(heads, window, width, dtype), dtype_name(dtype)),
        smaller={"window": 64},
    )


@declared()
def start(
    window: int = 64,
    width: int = 64,
    heads: int = 16,
    landmarks: int = 16,
    fixed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Rings, landmarks, their sums over the window, and the pseudo-inverse between them."""
    kind, scale = "fixed" if fixed else "continual", width**-0.5

    def inputs(seed: int) -> tuple[Tensor, ...]:
        """The window, and landmarks if they are given.

        Each segment has its own level: with pure noise all landmarks would be alike, and float32 could not resolve
        their inverse.
        """
        random = generator(seed + 1000)
        segments = torch.arange(window, device=device()) * landmarks // window
        levels = (normal(random, 1, heads, landmarks, width)[:, :, segments].to(dtype) for _ in range(3))
        tokens = [part + level for part, level in zip(_window(seed, heads, window, width, dtype), levels, strict=True)]
        given = [normal(random, 1, heads, landmarks, width, dtype=wide(dtype)) for _ in range(2)] if fixed else []
        return *tokens, *given

    def by_ours(i: Sequence[Tensor]) -> Results:
        given = tuple(i[3:]) or None
        state = continual_nystrom_init(*i[:3], None if given else landmarks, landmarks=given)
        return *state[:3], state.sums[..., :-1], state.inverse  # without the mark that torch computed the sums

    def eager(i: Sequence[Tensor]) -> Results:
        rings, sums, inverse = eager_start(*i[:3], landmarks, tuple(i[3:]) or None)
        return *rings, sums, inverse

    def oracle(i: Sequence[Tensor]) -> Mapping[str, Results]:
        """The peer's sums of exponentials have no shift. Our sums are relative to the largest logit. They are followed
        by this logit, by phi again as its own largest value, and by the size."""
        query, key, value = (part.double() for part in i[:3])
        near, far = (
            (part.double() for part in i[3:]) if fixed else (segment_means(part, landmarks) for part in (query, key))
        )
        scores = torch.einsum("...md,...nd->...mn", near, key) * scale
        inverse = iterated((torch.einsum("...md,...nd->...mn", near, far) * scale).softmax(-1))
        top, phi = scores.amax(-1, keepdim=True), scores.logsumexp(-1, keepdim=True)
        means = scores.softmax(-1) @ value
        size = (scores - top).exp() @ value.abs().sum(-1, keepdim=True)
        ours = torch.cat([means * (phi - top).exp(), (phi - top).exp(), top, (phi - top).exp(), size], dim=-1)
        theirs = torch.cat([means * phi.exp(), phi.exp()], dim=-1)
        rings = _with_a_row(i[:3])
        return {OURS: (*rings, ours, inverse), EAGER: (*rings, theirs, inverse)}

    pairs = heads * window
    sums = attention_work(pairs * landmarks, pairs, width, width, dtype_name(dtype), device=device())
    inverses = pinv_work(heads, landmarks, ITERATIONS, dtype_name(dtype))
    return Case(
        scan="continual_nystrom_init",
        name=f"nystrom-start-{kind}-{dtype_name(dtype)}-{heads}x{width}-n{window}-m{landmarks}",
        sizes={"H": heads, "n": window, "D": width, "m": landmarks, "landmarks": kind},
        inputs=inputs,
        implementations={OURS: by_ours, EAGER: eager},
        oracle=oracle,
        baselines=(EAGER,),
        work=replace(sums + inverses, bytes=_window_bytes(heads, window, width, dtype)),
        smaller={"window": 64},
    )


OURS = "cmab_kernels.continual_nystrom_init"

WINDOWS = (64, 256, 1024, 4096)


def cases() -> Iterator[Case]:
    yield from (layer(length, quick=length in (1024, 4096)) for length in (1024, 4096, 16_384, 65_536))
    yield from (layer(length, backward=True) for length in (1024, 4096, 16_384))
    yield from (layer(landmarks=landmarks) for landmarks in (16, 32, 128))
    yield from (layer(width=width) for width in (16, 128))
    yield from (layer(heads=heads) for heads in (1, 8))
    yield layer(batch=4)
    yield from (layer(dtype=dtype) for dtype in DTYPES)
    yield layer(threads=1)

    yield from (pinv(landmarks, quick=landmarks == 16) for landmarks in (8, 16, 32, 64))
    yield from (pinv(batch=batch) for batch in (16, 1024))
    yield from (pinv(landmarks, backward=True) for landmarks in (16, 64))
    yield from (pinv(64, 16, threads=threads) for threads in (1, 2))
    yield pinv(dtype=torch.float64)

    yield from (start(window, quick=window == 64) for window in WINDOWS)
    yield from (start(landmarks=landmarks) for landmarks in (4, 64))
    yield from (start(heads=heads) for heads in (1, 256))
    yield from (start(dtype=dtype) for dtype in DTYPES[:2])
    yield start(fixed=True)
    yield from (exact_start(window, quick=window == 64) for window in WINDOWS)
    yield from (exact_start(heads=heads) for heads in (1, 256))
    yield exact_start(width=16)

"""Modules with their projections.

They are the replacement for `nn.MultiheadAttention`, a CMAB that reads one more point, and modules that replace torch's
self-attention over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cmab_kernels import AttentionState
from cmab_kernels.nn import CMAB, MultiheadAttention, MultiheadIntention, NystromAttention

from ..devices import device, generator, lacking_memory, normal
from ..floors import BYTES, Work, attention_work, nystrom_work
from .attention import ATTENTION, SDPA
from .case import (
    COMPILED,
    EAGER,
    IN_TF32,
    PACKAGE,
    Case,
    Results,
    declared,
    direction,
    doubled,
    drawn,
    dtype_name,
    missing,
    way,
)
from .eager import ITERATIONS, eager_attention
from .intention import regression_work
from .intention_peers import ALPHA, cholesky_solve, regularised
from .nystrom import packaged_attention
from .plain_attention import PLAIN, as_named, stores_scores

THEIRS = "nn.MultiheadAttention"
BETWEEN = "linear layers and "
OURS = "cmab_kernels.nn.MultiheadAttention"

Attend = Callable[..., Tensor]
"""A function of tokens, or of queries and the context to which they attend."""


def torch_attention(features: int, heads: int, dtype: torch.dtype = torch.float32) -> nn.MultiheadAttention:
    """torch's module, whose weights all other modules use; it is the same each time, on the measured device."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.MultiheadAttention(features, heads, batch_first=True, device=device(), dtype=dtype)


def called(module: nn.Module) -> Attend:
    """The output of a module for tokens, or for a query and its context."""
    return lambda *tokens: module(tokens[0], tokens[-1], tokens[-1], need_weights=False)[0]


def with_weights(module: nn.Module, weights: nn.Module) -> nn.Module:
    """The module with the same parameters as `weights`."""
    for name, parameter in weights.named_parameters():
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, parameter)
    return module


def between_projections(attend: Attend, weights: nn.MultiheadAttention) -> Attend:
    """A function of heads (B, H, N, D), turned into a function of tokens (B, N, C)."""

    def whole(tokens: Tensor) -> Tensor:
        packed = F.linear(tokens, weights.in_proj_weight, weights.in_proj_bias)
        out = attend(*packed.unflatten(-1, (3, weights.num_heads, -1)).permute(2, 0, 3, 1, 4))
        return F.linear(out.transpose(1, 2).flatten(-2), weights.out_proj.weight, weights.out_proj.bias)

    return whole


def over_context(attend: Attend, weights: nn.MultiheadAttention) -> Attend:
    """The same, for queries and the context to which they attend."""

    def whole(tokens: Tensor, context: Tensor) -> Tensor:
        matrices, shifts = weights.in_proj_weight.chunk(3), weights.in_proj_bias.chunk(3)
        rows = (F.linear(*each) for each in zip((tokens, context, context), matrices, shifts, strict=True))
        out = attend(*(each.unflatten(-1, (weights.num_heads, -1)).transpose(1, 2) for each in rows))
        return F.linear(out.transpose(1, 2).flatten(-2), weights.out_proj.weight, weights.out_proj.bias)

    return whole


def module_case(
    makers: Mapping[str, Callable[[nn.MultiheadAttention], Attend]],
    alike: Mapping[str, str],
    shapes: Sequence[Sequence[int]],
    heads: int,
    backward: bool,
    leaves: Sequence[str],
    dtype: torch.dtype = torch.float32,
    **declared: Any,
) -> Case:
    """Modules with the same weights: name -> the module that is made from torch's module. The backward pass gives the
    gradients of all inputs and of `leaves`.

    The oracle is the same module in float64; `alike` maps a name to the peer that replaces it there.
    """

    @cache
    def made(name: str, double: bool) -> tuple[nn.Module, Attend]:
        weights = torch_attention(shapes[0][-1], heads, dtype)
        weights = weights.double() if double else weights
        return weights, makers[name](weights)

    def run(name: str, inputs: Sequence[Tensor], double: bool = False) -> Results:
        weights, attend = made(name, double)
        *operands, dout = inputs
        with torch.set_grad_enabled(backward):
            out = attend(*operands)
        if not backward:
            return (out,)
        return out.detach(), *torch.autograd.grad(out, [*operands, *map(weights.get_parameter, leaves)], dout)

    def oracle(inputs: Sequence[Tensor]) -> Mapping[str, Results]:
        wanted = {alike.get(name, name) for name in makers}
        found = {name: run(name, doubled(inputs), double=True) for name in wanted if missing(name) is None}
        return {name: found.get(alike.get(name, name), ()) for name in makers}

    return Case(
        inputs=lambda seed: tuple(drawn(seed, *shapes, backward=backward, dtype=dtype)),
        implementations={name: as_named(name, partial(run, name)) for name in makers},
        oracle=oracle,
        **declared,
    )


@declared(threads=None)
def cross_attention(
    heads: int = 4, width: int = 64, keys: int = 100_000, latents: int = 128, backward: bool = False
) -> Case:
    """The whole of nn.MultiheadAttention with `latents` queries over a context; the backward pass gives the gradients
    of parameters and inputs."""
    each, scores = width // heads, heads * latents * keys
    attend = [
        attention_work(scores, heads * keys, each, each, "float32", pass_, device())
        for pass_ in (False, True)[: 1 + backward]
    ]
    projections = (
        4 * keys * width**2
    )  # projects the context to keys and values; backward gives gradients of its weights and of the context
    moved = keys * width * BYTES["float32"]

    def ours(weights: nn.MultiheadAttention) -> Attend:
        return called(with_weights(MultiheadAttention(width, heads, batch_first=True).to(device()), weights))

    makers: dict[str, Callable[[nn.MultiheadAttention], Attend]] = {OURS: ours, THEIRS: called}
    if device() == "cuda":
        makers |= {OURS + IN_TF32: ours} | {BETWEEN + name: partial(over_context, ATTENTION[name]) for name in PLAIN}
    return module_case(
        makers,
        alike=dict.fromkeys(makers, THEIRS),
        shapes=[(1, length, width) for length in (latents, keys)],
        heads=heads,
        backward=backward,
        leaves=("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"),
        scan=THEIRS,
        name=f"module{'-forward+backward' if backward else ''}-float32-{heads}-heads-C{width}-L{latents}-N{keys}",
        sizes={"pass": direction(backward), "H": heads, "L": latents, "N": keys, "C": width},
        baselines=(THEIRS,),
        work=[
            one + Work(products=times * projections, bytes=moved) for times, one in zip((1, 2), attend, strict=False)
        ],
        counted={BETWEEN + name: BETWEEN + name.removesuffix(COMPILED) for name in PLAIN if name.endswith(COMPILED)},
        refusal=lambda name: lacking_memory(20 * width * keys + (16 * scores if stores_scores(name) else 0)),
        smaller={"keys": min(keys, 4096)},
    )


# ---- a block that is given one more point ----------------------------------------------------------------------------

UPDATE, FORWARD, WITH_SDPA = "cmab_kernels.nn.CMAB.update", "cmab_kernels.nn.CMAB.forward", f"the block with {SDPA}"


class BlockInputs(NamedTuple):
    """All points, the latents that attend to them, and the state of all points but the last."""

    points: Tensor
    latents: Tensor
    out: Tensor
    lse: Tensor


def _with_sdpa(block: CMAB, inputs: BlockInputs) -> Results:
    """All keys and values in memory; the layers after the attention over the points are run as an update without
    points."""
    cross = block.compress.cross_attention
    query = cross.heads(cross.query, cross.norm(block.latents)).unsqueeze(0)
    context = cross.context_norm(inputs.points)
    attended = F.scaled_dot_product_attention(query, cross.heads(cross.key, context), cross.heads(cross.value, context))
    state = AttentionState(attended, attended.new_zeros(attended.shape[:-1], dtype=torch.float64))
    return (block.update(inputs.points[:, :0], inputs.latents, state).latents,)


@declared(threads=None)
def block(heads: int = 4, width: int = 64, keys: int = 100_000, latents: int = 128) -> Case:
    """A Constant Memory Attention Block that has read `keys` points reads one more: from its state, and from all points
    again.

    There is no floor: most of an update is the layers after the attention.
    """

    @cache
    def module() -> CMAB:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return CMAB(width, latents, heads).to(device()).eval()

    @torch.no_grad()
    def update(i: BlockInputs) -> Results:
        return (module().update(i.points[:, -1:], i.latents, AttentionState(i.out, i.lse)).latents,)

    @torch.no_grad()
    def inputs(seed: int) -> BlockInputs:
        random = generator(seed)
        points, asked = normal(random, 1, keys + 1, width), normal(random, latents, width)
        return BlockInputs(points, asked, *module().update(points[:, :-1], asked, module().init_state(1)).state)

    @torch.no_grad()
    def oracle(i: BlockInputs) -> Results:
        return _with_sdpa(deepcopy(module()).double(), BlockInputs(*(part.double() for part in i)))

    return Case(
        scan="nn.CMAB",
        name=f"cmab-one-point-after-{keys}-float32-{heads}-heads-C{width}-L{latents}",
        sizes={"H": heads, "L": latents, "N": keys, "C": width},
        inputs=inputs,
        implementations={
            UPDATE: update,
            FORWARD: torch.no_grad()(lambda i: (module()(i.points, i.latents),)),
            WITH_SDPA: torch.no_grad()(lambda i: _with_sdpa(module(), i)),
        },
        oracle=oracle,
        baselines=(WITH_SDPA,),
        refusal=lambda name: lacking_memory(40 * width * keys),
        smaller={"keys": min(keys, 4096)},
    )


# ---- self-attention --------------------------------------------------------------------------------------------------

LONGEST = 4096
"""The largest number of tokens for which torch's module is measured, because its time is quadratic in this number."""


def self_attention(
    scan: str,
    module: Callable[..., nn.Module],
    attend: Attend,
    attention_work: Work,
    length: int,
    heads: int,
    features: int,
    batch: int,
    backward: bool,
    dtype: torch.dtype,
    peers: Mapping[str, Callable[[nn.MultiheadAttention], Attend]] | None = None,
    more: Mapping[str, int] | None = None,
    smallest: int = 256,
) -> Case:
    """A module, compared with peers that compute the same result: `attend` in eager torch between the same projections,
    and `peers`, which are made from torch's weights. torch's own module, which computes something else, is also
    shown."""
    ours, more, short, named = f"cmab_kernels.{scan}", more or {}, length <= LONGEST, dtype_name(dtype)
    like = {"batch_first": True, "device": device()}
    makers: dict[str, Callable[[nn.MultiheadAttention], Attend]] = {
        ours: lambda weights: called(with_weights(module(features, heads, **like, dtype=dtype), weights)),
        EAGER: partial(between_projections, attend),
        **(peers or {}),
        **({THEIRS: called} if short else {}),
    }
    weights = 4 * features**2
    read = Work(0.0, 2 * batch * length * weights, (2 * batch * length * features + weights) * dtype.itemsize, named)
    return module_case(
        makers,
        alike={ours: EAGER},
        shapes=[(batch, length, features)],
        heads=heads,
        backward=backward,
        leaves=("in_proj_weight", "out_proj.weight"),
        dtype=dtype,
        scan=scan,
        name=f"{scan.removeprefix('nn.')}-{way(backward)}-{named}-B{batch}-{heads}-heads-C{features}-N{length}"
        + "".join(f"-{letter}{size}" for letter, size in more.items()),
        sizes={"pass": direction(backward), "B": batch, "H": heads, "N": length, "C": features, **more},
        baselines=(EAGER, *(peers or {})),
        others=(THEIRS,),
        work=None if backward else replace(attention_work, bytes=0.0) + read,
        refusal=lambda name: missing(name) or lacking_memory(100 * batch * length * features),
        smaller={"length": smallest},
    )


@declared()
def intention_module(
    length: int = 1024,
    heads: int = 4,
    features: int = 256,
    batch: int = 1,
    backward: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """`nn.MultiheadIntention`, whose penalty is its initial value exp(0) = 1."""
    return self_attention(
        "nn.MultiheadIntention",
        MultiheadIntention,
        lambda q, k, v: q @ ((1 + ALPHA) * cholesky_solve(regularised(k.mT @ k), k.mT @ v)),
        regression_work(batch * heads, length, features // heads, dtype_name(dtype), backward=False)[0],
        *(length, heads, features, batch, backward, dtype),
    )


@declared()
def nystrom_module(
    length: int = 1024,
    heads: int = 4,
    features: int = 256,
    batch: int = 1,
    backward: bool = False,
    landmarks: int = 64,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """`nn.NystromAttention`, also compared with the package's module, whose heads share their norms."""
    width = features // heads

    def package(weights: nn.MultiheadAttention) -> Attend:
        enter, leave = (
            partial(F.linear, weight=weight) for weight in (weights.in_proj_weight, weights.out_proj.weight)
        )
        return packaged_attention(heads, width, landmarks, enter, leave)

    return self_attention(
        "nn.NystromAttention",
        partial(NystromAttention, num_landmarks=landmarks),
        partial(eager_attention, number=landmarks),
        nystrom_work(batch * heads, length, landmarks, width, width, ITERATIONS, dtype_name(dtype)),
        *(length, heads, features, batch, backward, dtype),
        peers={PACKAGE: package},
        more={"m": landmarks},
        smallest=4 * landmarks,
    )


# ---- what is measured ------------------------------------------------------------------------------------------------


def cases() -> Iterator[Case]:
    yield from (
        cross_attention(keys=keys, quick=keys in (10_000, 100_000)) for keys in (1000, 10_000, 100_000, 1_000_000)
    )
    yield from (cross_attention(keys=keys, backward=True) for keys in (1000, 10_000, 100_000))
    yield from (cross_attention(heads) for heads in (1, 2, 8))
    yield from (block(keys=keys, quick=keys < 1_000_000) for keys in (1000, 10_000, 100_000, 1_000_000))
    for module in (intention_module, nystrom_module):
        yield from (module(length, quick=length == 1024) for length in (256, 1024, 4096, 16_384))
        yield from (module(length, backward=True) for length in (256, 1024, 4096))
        yield from (module(features=features) for features in (64, 512))
        yield module(threads=2)
    yield from (intention_module(heads=heads) for heads in (2, 16))
    yield from (intention_module(batch=batch) for batch in (4, 16))
    yield from (nystrom_module(heads=heads) for heads in (1, 16))
    yield nystrom_module(batch=8)
    yield nystrom_module(landmarks=16)

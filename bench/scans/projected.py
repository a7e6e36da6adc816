"""Attention of stacked blocks over inputs that each block norms and projects, compared with torch's LayerNorm, linear
layers and attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels import projected_attention_state

from ..devices import device, generator, lacking_memory, normal
from ..floors import BYTES, Work, attention_work
from .attention import ATTENTION, SDPA
from .case import COMPILED, IN_TF32, Case, Results, declared, direction, kernels
from .plain_attention import PLAIN, Attend, as_named, stores_scores

SCAN = "projected_attention_state"
LAYERS = "linear layers and "
LINEAR = LAYERS + SDPA
OURS_IN_TF32 = "triton" + IN_TF32
EPS = 1e-5


class Stacked(NamedTuple):
    """The inputs, and the queries, weights and norms of K blocks."""

    inputs: Tensor
    query: Tensor
    key_weight: Tensor
    value_weight: Tensor
    norm_weight: Tensor
    norm_bias: Tensor


def one_by_one(attend: Attend, given: Stacked) -> Tensor:
    """The attention of each block in torch: out (K, B, H, L, E)."""
    heads, found = given.query.shape[1], []
    for query, *weights, scale, shift in zip(*given[1:], strict=True):
        rows = F.layer_norm(given.inputs, given.inputs.shape[-1:], scale, shift, EPS)
        key, value = (F.linear(rows, weight).unflatten(-1, (heads, -1)).transpose(1, 2) for weight in weights)
        found.append(attend(query.expand(len(rows), -1, -1, -1), key, value))
    return torch.stack(found)


def in_one_pass(impl: str, given: Stacked) -> Tensor:
    inputs, query, *weights, scale, shift = given
    return projected_attention_state(query, inputs, *weights, context_norm=(scale, shift, EPS), impl=impl).out


def _run(name: str, backward: bool, given: Stacked) -> Results:
    """The result, and in the backward pass its gradients with respect to queries, weights and norms, as in training."""
    attend = (
        partial(one_by_one, ATTENTION[theirs])
        if (theirs := name.removeprefix(LAYERS)) != name
        else partial(in_one_pass, name)
    )
    if not backward:
        with torch.no_grad():
            return (attend(given),)
    leaves = [part.detach().requires_grad_() for part in given[1:]]
    out = attend(Stacked(given.inputs, *leaves))
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)


@declared(threads=None)
def projected(
    blocks: int = 6, heads: int = 4, width: int = 64, keys: int = 100_000, latents: int = 128, backward: bool = False
) -> Case:
    """A stack of blocks over `keys` rows of inputs."""
    each, scores = width // heads, blocks * heads * latents * keys
    attend = [
        attention_work(scores, 0, each, each, "float32", pass_, device()) for pass_ in (False, True)[: 1 + backward]
    ]
    projections = 4 * blocks * keys * width**2  # the backward pass gives the gradients of the weights
    moved = keys * width * BYTES["float32"]
    names = (
        *kernels(SCAN, definition=False),
        LINEAR,
        *((OURS_IN_TF32, *(LAYERS + name for name in PLAIN)) if device() == "cuda" else ()),
    )

    def inputs(seed: int) -> Stacked:
        random = generator(seed)
        weights = (width**-0.5 * normal(random, blocks, width, width) for _ in range(2))
        return Stacked(
            normal(random, 1, keys, width),
            normal(random, blocks, heads, latents, each),
            *weights,
            *normal(random, 2, blocks, width),
        )

    def oracle(given: Stacked) -> Results:
        return _run(LINEAR, backward, Stacked(*(part.double() for part in given)))

    def refusal(name: str) -> str | None:
        stored = (blocks if backward else 1) * 16 * heads * latents * keys if stores_scores(name) else 0
        return lacking_memory(40 * (blocks if backward else 1) * width * keys + stored)

    return Case(
        scan=SCAN,
        name=f"projected-{direction(backward)}-float32-K{blocks}-{heads}-heads-C{width}-L{latents}-N{keys}",
        sizes={"pass": direction(backward), "K": blocks, "H": heads, "L": latents, "N": keys, "C": width},
        inputs=inputs,
        implementations={name: as_named(name, partial(_run, name.removesuffix(IN_TF32), backward)) for name in names},
        oracle=oracle,
        baselines=(LINEAR,),
        work=[one + Work(products=projections, bytes=moved) for one in attend],
        counted={LAYERS + name: LAYERS + name.removesuffix(COMPILED) for name in PLAIN if name.endswith(COMPILED)},
        refusal=refusal,
        smaller={"keys": min(keys, 4096)},
    )


def cases() -> Iterator[Case]:
    if not kernels(SCAN, definition=False):
        return
    yield from (projected(keys=keys, quick=keys in (10_000, 100_000)) for keys in (1000, 10_000, 100_000, 1_000_000))
    yield from (projected(keys=keys, backward=True) for keys in (1000, 10_000, 100_000))
    yield from (projected(blocks) for blocks in (1, 2))

"""Modules, projections and all: the drop-in for `nn.MultiheadAttention`, a CMAB that takes in one more point, and modules that stand in the
place of torch's attention over tokens that attend to themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cmab_kernels import AttentionState
from cmab_kernels.nn import CMAB, MultiheadAttention, MultiheadIntention, NystromAttention
from cmab_kernels.nystrom.reference import segment_means

from ..devices import device, generator, lacking_memory, normal
from ..floors import BYTES, Work, attention_work, nystrom_work
from .attention import SDPA, exact
from .case import EAGER, PACKAGE, Case, Results, declared, direction, drawn, missing, way
from .eager import ITERATIONS, eager_attention
from .intention import regression_work
from .intention_peers import ALPHA, cholesky_solve, regression, regularised
from .nystrom import iterated, packaged_attention

THEIRS = "nn.MultiheadAttention"
OURS = "cmab_kernels.nn.MultiheadAttention"


def torch_attention(features: int, heads: int, dtype: torch.dtype = torch.float32) -> nn.MultiheadAttention:
    """torch's module, whose weights all others take; the same each time, on the device that is measured."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.MultiheadAttention(features, heads, batch_first=True, device=device(), dtype=dtype)


def joined(heads: Tensor) -> Tensor:
    """(B, N, H D) of (B, H, N, D)."""
    return heads.transpose(1, 2).flatten(-2)


class ModuleInputs(NamedTuple):
    latents: Tensor
    context: Tensor
    dout: Tensor
    """Gradient of the output; empty without a backward."""


@declared(threads=None)
def cross_attention(heads: int = 4, width: int = 64, keys: int = 100_000, latents: int = 128, backward: bool = False) -> Case:
    """The whole of nn.MultiheadAttention of `latents` over a context; backward to parameters and inputs."""

    @cache
    def modules() -> tuple[nn.Module, nn.Module]:
        theirs, ours = torch_attention(width, heads), MultiheadAttention(width, heads, batch_first=True).to(device())
        ours.load_state_dict(theirs.state_dict())
        return ours, theirs

    def run(inputs: ModuleInputs, which: int) -> Results:
        module = modules()[which]
        with torch.set_grad_enabled(backward):
            out = module.forward(inputs.latents, inputs.context, inputs.context, need_weights=False)[0]  # the counter cannot follow modules
        if not backward:
            return (out,)
        return out.detach(), *torch.autograd.grad(out, [*inputs[:2], *module.parameters()], inputs.dout)

    def inputs(seed: int) -> ModuleInputs:
        return ModuleInputs(*drawn(seed, *((1, length, width) for length in (latents, keys)), backward=backward))

    def oracle(inputs: ModuleInputs) -> Results:
        """The definition by autograd, with the parameters of the module, head by head."""
        module = deepcopy(modules()[1]).double()
        query, context = (part.detach().double().requires_grad_(backward) for part in inputs[:2])
        parts = zip(module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), (query, context, context), strict=True)
        projected = [F.linear(x, w, b).unflatten(-1, (heads, -1)).transpose(1, 2) for w, b, x in parts]
        if not backward:
            return (module.out_proj(joined(exact(*projected)[0])).detach(),)
        out = module.out_proj(joined(F.scaled_dot_product_attention(*projected)))
        return out.detach(), *torch.autograd.grad(out, [query, context, *module.parameters()], inputs.dout.double())

    each, scores = width // heads, heads * latents * keys
    attend = [attention_work(scores, heads * keys, each, each, "float32", pass_, device()) for pass_ in (False, True)[: 1 + backward]]
    projections = (3 if backward else 1) * 4 * keys * width**2  # of the context, to keys and values; backward to its weights and to itself
    moved = len(attend) * keys * width * BYTES["float32"]
    return Case(
        scan=THEIRS,
        name=f"module{'-forward+backward' if backward else ''}-float32-{heads}-heads-C{width}-L{latents}-N{keys}",
        sizes={"pass": direction(backward), "H": heads, "L": latents, "N": keys, "C": width},
        inputs=inputs,
        implementations={OURS: partial(run, which=0), THEIRS: partial(run, which=1)},
        oracle=oracle,
        baselines=(THEIRS,),
        work=Work(sum(w.exponentials for w in attend), sum(w.products for w in attend) + projections, moved),
        refusal=lambda name: lacking_memory(20 * width * keys),
        smaller={"keys": min(keys, 4096)},
    )


# ---- a block that is given one more point ----------------------------------------------------------------------------------------------

UPDATE, FORWARD, WITH_SDPA = "cmab_kernels.nn.CMAB.update", "cmab_kernels.nn.CMAB.forward", f"the block with {SDPA}"


class BlockInputs(NamedTuple):
    """All points, the latents of the one who asks, and the state of all points but the last."""

    points: Tensor
    latents: Tensor
    out: Tensor
    lse: Tensor


def _with_sdpa(block: CMAB, inputs: BlockInputs) -> Results:
    """All keys and values in memory; what follows the attention over the points is an update of its result with no points at all."""
    cross = block.compress.cross_attention
    query = cross.heads(cross.query, cross.norm(block.latents)).unsqueeze(0)
    context = cross.context_norm(inputs.points)
    attended = F.scaled_dot_product_attention(query, cross.heads(cross.key, context), cross.heads(cross.value, context))
    state = AttentionState(attended, attended.new_zeros(attended.shape[:-1], dtype=torch.float64))
    return (block.update(inputs.points[:, :0], inputs.latents, state).latents,)


@declared(threads=None)
def block(heads: int = 4, width: int = 64, keys: int = 100_000, latents: int = 128) -> Case:
    """A Constant Memory Attention Block that has read `keys` points, given one more: by its state, and from all points again.

    It has no floor: most of an update is the layers behind the attention.
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


# ---- self-attention --------------------------------------------------------------------------------------------------------------------

Exact = Callable[..., Sequence[Tensor]]
"""Heads of queries, keys and values in float64, and the gradient of the output or None -> the output, and the gradients of all three."""

LONGEST = 4096
"""Tokens up to which torch's module, which is quadratic in them, is measured."""


class Tokens(NamedTuple):
    tokens: Tensor
    dout: Tensor
    """Gradient of the output; empty without a backward."""


class Projections:
    """What the modules of one case share: the weights of torch's, without biases but zero, which is how torch starts them."""

    def __init__(self, features: int, heads: int, backward: bool, dtype: torch.dtype) -> None:
        self.heads, self.backward = heads, backward
        self.weights = torch_attention(features, heads, dtype)

    def run(self, inputs: Tokens, attend: Callable[[Tensor], Tensor], module: nn.Module | None = None) -> Results:
        """The output and, with a backward, the gradients of the tokens and of what projects them."""
        module = module or self.weights
        with torch.set_grad_enabled(self.backward):
            out = attend(inputs.tokens)
        if not self.backward:
            return (out,)
        leaves = (inputs.tokens, module.in_proj_weight, module.out_proj.weight)
        return out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)

    def run_module(self, inputs: Tokens, module: nn.Module) -> Results:
        return self.run(inputs, lambda x: module.forward(x, x, x, need_weights=False)[0], module)

    def around(self, attend: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        """A function of heads (B, H, N, D), between the projections."""

        def whole(tokens: Tensor) -> Tensor:
            heads = self.split(F.linear(tokens, self.weights.in_proj_weight, self.weights.in_proj_bias))
            return F.linear(joined(attend(*heads)), self.weights.out_proj.weight, self.weights.out_proj.bias)

        return whole

    def split(self, packed: Tensor) -> Sequence[Tensor]:
        return packed.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    def exactly(self, inputs: Tokens, attend: Exact) -> Results:
        """`attend` between the projections in float64 and, with a backward, their gradients."""
        tokens, enter, leave = (
            part.detach().double().requires_grad_(self.backward)
            for part in (inputs.tokens, self.weights.in_proj_weight, self.weights.out_proj.weight)
        )
        with torch.set_grad_enabled(self.backward):
            heads = self.split(F.linear(tokens, enter))
        given = [head.detach() for head in heads]
        if not self.backward:
            return (F.linear(joined(attend(*given, None)[0]), leave),)
        dout = inputs.dout.double()
        out, *dheads = attend(*given, (dout @ leave.detach()).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        grads = torch.autograd.grad(heads, (tokens, enter), dheads)
        return F.linear(joined(out), leave).detach(), *grads, dout.flatten(0, 1).mT @ joined(out).flatten(0, 1)


def self_attention(
    scan: str,
    module: Callable[[], nn.Module],
    attend: Callable[..., Tensor],
    definition: Exact,
    attention_work: Work,
    length: int,
    heads: int,
    features: int,
    batch: int,
    backward: bool,
    dtype: torch.dtype,
    peers: Mapping[str, tuple[Callable[[nn.MultiheadAttention], Callable[[Tensor], Tensor]], Exact]] | None = None,
    more: Mapping[str, int] | None = None,
    smallest: int = 256,
) -> Case:
    """A module beside torch's own, which computes something else, and beside peers that compute the same: `attend` in eager torch between
    the same projections, and `peers`, name -> from torch's weights to a function of tokens, and what it computes."""
    ours, peers, more = f"cmab_kernels.{scan}", peers or {}, more or {}

    @cache
    def projections() -> Projections:
        return Projections(features, heads, backward, dtype)

    @cache
    def loaded() -> nn.Module:
        made = module()
        made.load_state_dict(projections().weights.state_dict(), strict=False)
        return made

    @cache
    def peer(name: str) -> Callable[[Tensor], Tensor]:
        return peers[name][0](projections().weights)

    def inputs(seed: int) -> Tokens:
        return Tokens(*drawn(seed, (batch, length, features), backward=backward, dtype=dtype))

    def oracle(i: Tokens) -> Mapping[str, Results]:
        found = {computed: projections().exactly(i, computed) for computed in set(meant.values())}
        return {name: found[computed] for name, computed in meant.items()}

    named = str(dtype).removeprefix("torch.")
    short = length <= LONGEST
    implementations = {
        ours: lambda i: projections().run_module(i, loaded()),
        EAGER: lambda i: projections().run(i, projections().around(attend)),
        **{name: lambda i, name=name: projections().run(i, peer(name)) for name in peers},
        **({THEIRS: lambda i: projections().run_module(i, projections().weights)} if short else {}),
    }
    meant = {ours: definition, EAGER: definition, **{name: computed for name, (_, computed) in peers.items()}}
    meant |= {THEIRS: exact} if short else {}
    weights = 4 * features**2
    read = Work(0.0, 2 * batch * length * weights, (2 * batch * length * features + weights) * dtype.itemsize, named)
    return Case(
        scan=scan,
        name=f"{scan.removeprefix('nn.')}-{way(backward)}-{named}-B{batch}-{heads}-heads-C{features}-N{length}"
        + "".join(f"-{letter}{size}" for letter, size in more.items()),
        sizes={"pass": direction(backward), "B": batch, "H": heads, "N": length, "C": features, **more},
        inputs=inputs,
        implementations=implementations,
        oracle=oracle,
        baselines=(THEIRS,) if short else (EAGER,),
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
    """`nn.MultiheadIntention`, whose penalty is exp(0) = 1, as it starts."""
    return self_attention(
        "nn.MultiheadIntention",
        lambda: MultiheadIntention(features, heads, batch_first=True, device=device(), dtype=dtype),
        lambda q, k, v: q @ ((1 + ALPHA) * cholesky_solve(regularised(k.mT @ k), k.mT @ v)),
        _scaled_regression,
        regression_work(batch * heads, length, features // heads, str(dtype).removeprefix("torch."), backward=False),
        *(length, heads, features, batch, backward, dtype),
    )


def _scaled_regression(query: Tensor, key: Tensor, value: Tensor, dout: Tensor | None) -> Results:
    """(1 + alpha) times Intention."""
    gain = 1 + ALPHA
    if dout is None:
        return [gain * part for part in regression(query, key, value, query.new_empty(0))]
    out, *gradients = regression(query, key, value, gain * dout)
    return [gain * out, *gradients]


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
    """`nn.NystromAttention`, beside the package's module too, whose heads share their norms."""
    width = features // heads

    def package(weights: nn.MultiheadAttention) -> Callable[[Tensor], Tensor]:
        enter, leave = (partial(F.linear, weight=weight) for weight in (weights.in_proj_weight, weights.out_proj.weight))
        return packaged_attention(heads, width, landmarks, enter, leave)

    return self_attention(
        "nn.NystromAttention",
        lambda: NystromAttention(features, heads, batch_first=True, num_landmarks=landmarks, device=device(), dtype=dtype),
        partial(eager_attention, number=landmarks),
        partial(_nystrom_exactly, landmarks=landmarks),
        nystrom_work(batch * heads, length, landmarks, width, width, ITERATIONS, str(dtype).removeprefix("torch.")),
        *(length, heads, features, batch, backward, dtype),
        peers={PACKAGE: (package, partial(_nystrom_exactly, landmarks=landmarks, together=True))},
        more={"m": landmarks},
        smallest=4 * landmarks,
    )


def _nystrom_exactly(query: Tensor, key: Tensor, value: Tensor, dout: Tensor | None, landmarks: int, together: bool = False) -> Results:
    """The definition with its gradients by autograd; the pseudo-inverse multiplied out."""
    operands = [part.requires_grad_(dout is not None) for part in (query, key, value)]
    query, key, value = operands
    scale = key.shape[-1] ** -0.5
    near, far = (segment_means(part, landmarks) for part in (query, key))
    inverse = iterated((scale * near @ far.mT).softmax(-1).flatten(0, 1), together).unflatten(0, key.shape[:2])
    out = (scale * query @ far.mT).softmax(-1) @ (inverse @ ((scale * near @ key.mT).softmax(-1) @ value))
    return (out,) if dout is None else (out.detach(), *torch.autograd.grad(out, operands, dout))


# ---- what is measured ------------------------------------------------------------------------------------------------------------------


def cases() -> Iterator[Case]:
    yield from (cross_attention(keys=keys, quick=keys in (10_000, 100_000)) for keys in (1000, 10_000, 100_000, 1_000_000))
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

"""Layers of a transformer in one call, and stacks of such blocks: the papers' models in training and in inference,
compared with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

import cmab_kernels
from cmab_kernels.nn import CMABStack

from ..devices import device
from ..floors import Work
from .attention import SDPA, naive_attention
from .case import COMPILED, EAGER, Case, Results, compiled, declared, direction, drawn, kernels, operator, refusing, way

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


# ---- one layer -------------------------------------------------------------------------------------------------------


def torch_feed_forward(x: Tensor, weight: Tensor, bias: Tensor, expand: Tensor, contract: Tensor) -> Tensor:
    features, gate = F.linear(F.layer_norm(x, x.shape[-1:], weight, bias), expand).chunk(2, dim=-1)
    return x + F.linear(features * F.gelu(gate), contract)


def torch_attention(x: Tensor, context: Tensor, weight: Tensor, bias: Tensor, *weights: Tensor, heads: int) -> Tensor:
    """An attention layer whose context is not normed again."""
    query, key, value, output = weights
    rows = (F.layer_norm(x, x.shape[-1:], weight, bias), query), (context, key), (context, value)
    out = F.scaled_dot_product_attention(*(F.linear(*each).unflatten(-1, (heads, -1)).transpose(1, 2) for each in rows))
    return x + F.linear(out.transpose(1, 2).flatten(-2), output)


@declared()
def feed_forward(rows: int = 2048, width: int = 64, backward: bool = False) -> Case:
    """The feed-forward layer of a block: a norm, twice as many gated features as columns, and no biases."""

    def ours(impl: str, x: Tensor, weight: Tensor, bias: Tensor, *weights: Tensor) -> Tensor:
        return cmab_kernels.feed_forward_layer(x, *weights, norm=(weight, bias, 1e-5), impl=impl)

    shapes = [(rows, width), (width,), (width,), (4 * width, width), (width, 2 * width)]
    return _layer(
        "feed_forward_layer",
        ours,
        torch_feed_forward,
        shapes,
        6 * rows * width**2,
        0,
        backward,
        {"R": rows, "C": width},
        "rows",
    )


@declared()
def attention_layer(
    latents: int = 128, width: int = 64, heads: int = 4, keys: int = 128, batch: int = 16, backward: bool = False
) -> Case:
    """The attention layer of a block, where the latents attend to others."""

    def ours(impl: str, x: Tensor, context: Tensor, weight: Tensor, bias: Tensor, *weights: Tensor) -> Tensor:
        return cmab_kernels.attention_layer(
            x, *weights, num_heads=heads, context=context, norm=(weight, bias, 1e-5), impl=impl
        )

    shapes = [(batch, latents, width), (batch, keys, width), (width,), (width,), *4 * [(width, width)]]
    products = batch * (2 * (latents + keys) * width**2 + 2 * latents * keys * width)
    sizes = {"B": batch, "H": heads, "L": latents, "N": keys, "C": width}
    theirs = partial(torch_attention, heads=heads)
    return _layer(
        "attention_layer", ours, theirs, shapes, products, batch * heads * latents * keys, backward, sizes, "batch"
    )


def _layer(
    scan: str,
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    shapes: Sequence[Sequence[int]],
    products: int,
    exponentials: int,
    backward: bool,
    sizes: Mapping[str, int],
    shorter: str,
) -> Case:
    """One layer: our implementations, and eager and compiled torch. `shorter`: the argument that reduces the size."""
    functions = {name: partial(ours, name) for name in kernels(scan)} | {
        EAGER: theirs,
        EAGER + COMPILED: lambda *i: compiled(theirs)(*i),
    }
    return operator(
        functions,
        theirs,
        len(shapes),
        backward,
        scan=scan,
        name=f"{scan}-{way(backward)}-" + "-".join(f"{letter}{size}" for letter, size in sizes.items()),
        sizes={"pass": direction(backward), **sizes},
        inputs=lambda seed: tuple(_initialised(seed, shapes, backward)),
        baselines=(EAGER, EAGER + COMPILED),
        work=None if backward else Work(float(exponentials), 2.0 * products),
        counted={EAGER + COMPILED: EAGER},
        refusal=refusing(scan, shapes[0]),
        smaller={shorter: 2},
    )


def _initialised(seed: int, shapes: Sequence[Sequence[int]], backward: bool) -> list[Tensor]:
    """Operands in which the matrices after the norm's vectors do not change the size of rows: matrices from N(0, 1)
    saturate a softmax, and errors grow."""
    operands = drawn(seed, *shapes, backward=backward)
    first = max(number for number, shape in enumerate(shapes) if len(shape) == 1) + 1
    with torch.no_grad():
        for matrix in operands[first : len(shapes)]:
            matrix *= matrix.shape[-1] ** -0.5
    return operands


# ---- a stack of blocks -----------------------------------------------------------------------------------------------

STACK = "cmab_kernels.nn.CMABStack"
WITH_SDPA, NAIVE = f"torch with {SDPA}", "plain torch"


def torch_block(attend: Attend, heads: int, weights: Mapping[str, Tensor], inputs: Tensor, latents: Tensor) -> Tensor:
    """The block of the paper in torch's operations, with the parameters of `nn.CMAB`."""

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    def attention(name: str, x: Tensor, context: Tensor | None) -> Tensor:
        normed = norm(f"{name}.norm", x)
        context = normed if context is None else norm(f"{name}.context_norm", context)
        rows = zip(("query", "key", "value"), (normed, context, context), strict=True)
        out = attend(
            *(
                F.linear(y, weights[f"{name}.{part}.weight"]).unflatten(-1, (heads, -1)).transpose(1, 2)
                for part, y in rows
            )
        )
        return x + F.linear(
            out.transpose(1, 2).flatten(-2), weights[f"{name}.output.weight"], weights[f"{name}.output.bias"]
        )

    def feed_forward(name: str, x: Tensor) -> Tensor:
        wide = F.linear(norm(f"{name}.norm", x), weights[f"{name}.expand.weight"], weights[f"{name}.expand.bias"])
        features, gate = wide.chunk(2, dim=-1)
        return x + F.linear(
            features * F.gelu(gate), weights[f"{name}.contract.weight"], weights[f"{name}.contract.bias"]
        )

    def layer(name: str, x: Tensor, context: Tensor) -> Tensor:
        x = feed_forward(f"{name}.cross_feed_forward", attention(f"{name}.cross_attention", x, context))
        return feed_forward(f"{name}.self_feed_forward", attention(f"{name}.self_attention", x, None))

    return layer("retrieve", latents, layer("compress", weights["latents"].expand(len(inputs), -1, -1), inputs))


@cache
def _blocks(name: str, heads: int) -> Callable[..., Tensor]:
    block = partial(
        torch_block, F.scaled_dot_product_attention if name.startswith(WITH_SDPA) else naive_attention, heads
    )
    return compiled(block) if name.endswith(COMPILED) else block


@declared(threads=None)
def stack(
    latents: int = 128,
    width: int = 64,
    heads: int = 4,
    depth: int = 6,
    backward: bool = True,
    points: int = 50,
    batch: int = 16,
) -> Case:
    """A stack of blocks over `batch` functions of `points` points, as in training, or without gradients.

    It has no floor, because its time consists of small products and of the operations between them.
    """

    @cache
    def module(double: bool) -> CMABStack:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = CMABStack(width, latents, heads, depth).to(device())
        return deepcopy(made).double() if double else made

    def run(name: str, inputs: Sequence[Tensor], double: bool = False) -> Results:
        made, (rows, asked, dout) = module(double), inputs
        with torch.set_grad_enabled(backward):
            y = asked if name == STACK else asked.expand(batch, -1, -1)
            if name == STACK:
                y = made(rows, asked)
            else:
                for block in made.blocks:
                    y = _blocks(name, heads)(dict(block.named_parameters()), rows, y)
        return (y.detach(), *torch.autograd.grad(y, list(made.parameters()), dout)) if backward else (y,)

    def inputs(seed: int) -> tuple[Tensor, ...]:
        (rows, _), (asked, _) = (
            drawn(seed + i, shape, backward=False) for i, shape in enumerate(((batch, points, width), (latents, width)))
        )
        return rows, asked, drawn(seed + 2, (batch, latents, width), backward=False)[0]

    peers = (WITH_SDPA, NAIVE, WITH_SDPA + COMPILED, NAIVE + COMPILED)
    sizes = {"B": batch, "H": heads, "L": latents, "C": width, "blocks": depth, "points": points}
    return Case(
        scan="nn.CMABStack",
        name=f"stack-{way(backward)}-" + "-".join(f"{letter}{size}" for letter, size in sizes.items()),
        sizes={"pass": direction(backward), **sizes},
        inputs=inputs,
        implementations={name: partial(run, name) for name in (STACK, *peers)},
        oracle=lambda i: run(WITH_SDPA, tuple(part.double() for part in i), double=True),
        baselines=peers,
        counted={name + COMPILED: name for name in (WITH_SDPA, NAIVE)},
        smaller={"batch": 2},
    )


def cases() -> Iterator[Case]:
    for backward in (False, True):
        yield from (feed_forward(rows, backward=backward, quick=rows == 2048) for rows in (8, 128, 2048, 16_384))
        yield from (attention_layer(keys=keys, backward=backward, quick=keys == 128) for keys in (8, 128, 512, 2048))
        yield attention_layer(batch=1, backward=backward)
        yield stack(backward=backward, quick=True)
        yield stack(32, 32, depth=2, backward=backward)
        yield stack(8, 16, heads=1, depth=4, backward=backward)

"""The states of all prefixes of a row of keys, for attention and for Intention, and their plain torch forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels import attention_state, prefix_attention_states, prefix_ridge_states, ridge_state

from ..devices import device, generator, normal
from ..floors import BYTES, Work, attention_work, ridge_work
from .case import EAGER, Case, declared, direction, dtype_name, kernels, operator, refusing, way

LOOP = "attention_state, in a loop"
MASKED = "scaled_dot_product_attention, masked"
CUMULATIVE = EAGER + ", cumulative sums"
SCANNED = EAGER + ", parallel scan"
RIDGE_LOOP = "ridge_state, in a loop"


def cumulative_attention(query: Tensor, key: Tensor, value: Tensor, every: int) -> Tensor:
    """Cumulative sums of weights and of weighted values; a prefix whose logits are far below those of the last keys has
    no digits left."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp().unflatten(-1, (-1, every)).transpose(2, 3)
    return (weights @ value.unflatten(2, (-1, every))).cumsum(2) / weights.sum(-1, keepdim=True).cumsum(2)


def scanned_attention(query: Tensor, key: Tensor, value: Tensor, every: int) -> Tensor:
    """The merge as a parallel scan over the states of chunks, where each step covers twice as many chunks; it is right
    for any logits."""
    scores = (query @ key.mT * query.shape[-1] ** -0.5).unflatten(-1, (-1, every)).transpose(2, 3)
    peak = scores.detach().amax(-1)
    weights = (scores - peak.unsqueeze(-1)).exp()
    total, acc = weights.sum(-1), weights @ value.unflatten(2, (-1, every))
    step = 1
    while step < peak.shape[2]:
        higher = torch.maximum(peak[:, :, step:], peak[:, :, :-step])
        own, before = (peak[:, :, step:] - higher).exp(), (peak[:, :, :-step] - higher).exp()
        total = torch.cat([total[:, :, :step], total[:, :, step:] * own + total[:, :, :-step] * before], 2)
        merged = acc[:, :, step:] * own.unsqueeze(-1) + acc[:, :, :-step] * before.unsqueeze(-1)
        acc = torch.cat([acc[:, :, :step], merged], 2)
        peak = torch.cat([peak[:, :, :step], higher], 2)
        step *= 2
    return acc / total.unsqueeze(-1)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, every: int) -> Tensor:
    """torch's attention of each query, repeated for every prefix, with a mask that hides later keys."""
    length, (latents, _) = key.shape[2], query.shape[2:]
    chunk = torch.arange(length, device=key.device) // every
    prefixes = length // every
    seen = (chunk <= torch.arange(prefixes, device=key.device).unsqueeze(-1)).repeat_interleave(latents, 0)
    repeated = query.unsqueeze(2).expand(-1, -1, prefixes, -1, -1).flatten(2, 3)
    return F.scaled_dot_product_attention(repeated, key, value, attn_mask=seen).unflatten(2, (prefixes, latents))


def looped_attention(query: Tensor, key: Tensor, value: Tensor, every: int) -> Tensor:
    """An update of the state for every chunk."""
    return torch.stack([state.out for state in updates(partial(attention_state, query), key, value, every)], 2)


def updates(update: Callable[..., Any], key: Tensor, value: Tensor, every: int) -> Iterator[Any]:
    """The state after each chunk of keys."""
    state = None
    for chunk, values in zip(key.split(every, dim=2), value.split(every, dim=2), strict=True):
        state = update(chunk, values, state=state)
        yield state


def _ours(query: Tensor, key: Tensor, value: Tensor, every: int, impl: str) -> Tensor:
    return prefix_attention_states(query, key, value, every=every, impl=impl).out


@declared(threads=None)
def attention_prefixes(
    keys: int = 1024,
    every: int = 1,
    latents: int = 16,
    heads: int = 4,
    width: int = 16,
    batch: int = 4,
    backward: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """The outputs of all states; there are keys / every of them, and `every` divides the number of keys."""
    scan, named, prefixes = "prefix_attention_states", dtype_name(dtype), keys // every
    rows = batch * heads * prefixes * latents
    ours = kernels(scan, definition=rows * keys < 2**23)
    functions: dict[str, Callable[..., Tensor]] = {name: partial(_ours, impl=name) for name in ours}
    functions |= {CUMULATIVE: cumulative_attention, SCANNED: scanned_attention}
    if prefixes <= 1024:
        functions[LOOP] = looped_attention
    if rows * keys <= 2**25:
        functions[MASKED] = masked_attention

    def inputs(seed: int) -> tuple[Tensor, ...]:
        random = generator(seed)
        operands = [normal(random, batch, heads, n, width, dtype=dtype, grad=backward) for n in (latents, keys, keys)]
        sent = (batch, heads, prefixes if backward else 0, latents, width)
        return *operands, normal(random, *sent, dtype=torch.promote_types(dtype, torch.float32))

    scores, pairs = batch * heads * latents * keys, batch * heads * keys
    written = Work(bytes=rows * (width * max(BYTES[named], 4) + 8), dtype=named)
    work = [attention_work(scores, pairs, width, width, named, device=device()) + written]
    if backward:  # reads the results of the forward pass, and gradients of the same size
        work.append(attention_work(scores, pairs, width, width, named, True, device()) + written + written)
    return operator(
        {name: partial(function, every=every) for name, function in functions.items()},
        partial(cumulative_attention, every=every),
        3,
        backward,
        scan=scan,
        name=f"prefixes-{way(backward)}-{named}-B{batch}-{heads}x{width}-L{latents}-N{keys}-every-{every}",
        sizes={"pass": direction(backward), "B": batch, "H": heads, "L": latents, "N": keys, "t": every, "D": width},
        inputs=inputs,
        baselines=tuple(name for name in (CUMULATIVE, SCANNED, LOOP, MASKED) if name in functions),
        work=work,
        refusal=refusing(scan, *3 * [(1, heads, 1, width)], dtype=dtype, memory=12 * rows * width * 8),
        smaller={"keys": 4 * every, "batch": 1},
    )


# ---- Intention -------------------------------------------------------------------------------------------------------


def cumulative_ridge(key: Tensor, value: Tensor, every: int) -> tuple[Tensor, Tensor]:
    """Sums of the chunks in float64, added up."""
    chunks = key.double().unflatten(2, (-1, every))
    return (chunks.mT @ chunks).cumsum(2), (chunks.mT @ value.double().unflatten(2, (-1, every))).cumsum(2)


def looped_ridge(key: Tensor, value: Tensor, every: int) -> tuple[Tensor, ...]:
    """An update of the state for every chunk."""
    sums = (state[:2] for state in updates(ridge_state, key, value, every))
    return tuple(torch.stack(parts, 2) for parts in zip(*sums, strict=True))


def _our_ridge(key: Tensor, value: Tensor, every: int, impl: str) -> tuple[Tensor, ...]:
    return tuple(prefix_ridge_states(key, value, every=every, impl=impl)[:2])


@declared(threads=None)
def ridge_prefixes(
    keys: int = 1024,
    every: int = 1,
    heads: int = 4,
    width: int = 16,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Both sums of all states; `every` divides the number of keys."""
    scan, named, prefixes = "prefix_ridge_states", dtype_name(dtype), keys // every
    functions: dict[str, Callable[..., tuple[Tensor, ...]]] = {
        name: partial(_our_ridge, impl=name) for name in kernels(scan)
    }
    functions |= {CUMULATIVE: cumulative_ridge, **({RIDGE_LOOP: looped_ridge} if prefixes <= 512 else {})}
    sums = batch * heads * prefixes * 2 * width * width

    def inputs(seed: int) -> tuple[Tensor, ...]:
        random = generator(seed)
        return tuple(normal(random, batch, heads, keys, width, dtype=dtype) for _ in range(2))

    return operator(
        {name: partial(function, every=every) for name, function in functions.items()},
        partial(cumulative_ridge, every=every),
        2,
        scan=scan,
        name=f"prefixes-ridge-{named}-B{batch}-{heads}x{width}-N{keys}-every-{every}",
        sizes={"B": batch, "H": heads, "N": keys, "t": every, "D": width},
        inputs=inputs,
        baselines=(CUMULATIVE,),
        work=ridge_work(batch * heads * keys, width, width, named, exact=True) + Work(bytes=8 * sums, dtype="float64"),
        refusal=refusing(scan, *3 * [(1, heads, 1, width)], dtype=dtype, memory=4 * 8 * sums),
        smaller={"keys": 4 * every},
    )


def cases() -> Iterator[Case]:
    for backward in (False, True):
        yield attention_prefixes(backward=backward, quick=True)
        yield attention_prefixes(every=16, backward=backward)
        yield from (
            attention_prefixes(events, latents=8, heads=1, batch=16, backward=backward)
            for events in (100, 200, 500, 1000)
        )
        for latents in (8, 32):
            yield from (
                attention_prefixes(n, latents=latents, heads=1, width=32, batch=16, backward=backward)
                for n in (200, 1000)
            )
    yield from (ridge_prefixes(keys, quick=keys == 1024) for keys in (256, 1024, 2048, 4096))
    yield ridge_prefixes(every=16)

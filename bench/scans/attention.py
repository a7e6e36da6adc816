"""Attention of few queries over many keys, its mergeable state, and the peers of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cmab_kernels import AttentionState, attention_state, latent_attention, merge_states, remove_from_state

from ..devices import device, generator, normal
from ..floors import BYTES, Work, attention_work
from ..runs import of_this_package
from . import plain_attention
from .case import (
    COMPILED,
    EAGER,
    FLASH,
    FLASHINFER,
    IN_TF32,
    Case,
    Operands,
    Results,
    declared,
    direction,
    dtype_name,
    kernels,
    passes,
    refusing,
    way,
)
from .plain_attention import NAIVE, PLAIN, Attend, as_named, flashinfer_attention, naive_attention, plain, stores_scores

SDPA = "scaled_dot_product_attention"
FLEX, FLEX_IN_TF32 = (plain_attention.FLEX + precision + COMPILED for precision in ("", IN_TF32))
OURS_IN_TF32 = "triton" + IN_TF32
BACKENDS = {"cpu": ("MATH",), "cuda": ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")}
"""Backends of torch's attention, by name; on a CPU, torch uses its flash kernel without being told."""


def by_backend(name: str) -> Attend:
    """torch's attention, limited to one `SDPBackend`."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, name)):
            return F.scaled_dot_product_attention(query, key, value)

    return attend


def flash_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from flash_attn import flash_attn_func

    return flash_attn_func(*(part.transpose(1, 2) for part in (query, key, value))).transpose(1, 2)


def _backend_names(device: str) -> dict[str, str]:
    """The implementation that limits torch to a backend -> the backend."""
    return {f"{SDPA}, {name.removesuffix('_ATTENTION').lower()}": name for name in BACKENDS[device]}


ATTENTION: dict[str, Attend] = {
    **{name: partial(latent_attention, impl=name) for name in ("native", "triton", "reference")},
    OURS_IN_TF32: partial(latent_attention, impl="triton"),
    SDPA: F.scaled_dot_product_attention,
    SDPA + IN_TF32: F.scaled_dot_product_attention,
    **{name: by_backend(backend) for name, backend in _backend_names("cuda").items()},
    **{name: plain(name) for name in (*PLAIN, FLEX, FLEX_IN_TF32)},
    FLASHINFER: flashinfer_attention,
    FLASH: flash_attention,
}


def exact(query: Tensor, key: Tensor, value: Tensor, dout: Tensor | None = None) -> tuple[Tensor, ...]:
    """Attention and, for a `dout`, its gradients, in float64 by autograd. They are computed head by head, because the
    scores are stored."""
    if dout is None:
        return (attended(query, key, value).out,)
    heads = [
        _exact_gradients(*(part[:, head].detach().double() for part in (query, key, value, dout)))
        for head in range(query.shape[1])
    ]
    return tuple(torch.stack(results, dim=1) for results in zip(*heads, strict=True))


def _exact_gradients(query: Tensor, key: Tensor, value: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    outs, inputs = [], [part.requires_grad_() for part in (query, key, value)]
    few = _queries_at_a_time(key)
    for part, gradient in zip(query.split(few, dim=1), dout.split(few, dim=1), strict=True):
        out = naive_attention(part, key, value)
        out.backward(gradient)
        outs.append(out.detach())
    return torch.cat(outs, dim=1), *(part.grad for part in inputs)


def attended(query: Tensor, key: Tensor, value: Tensor) -> AttentionState:
    """The state by the formula, in float64. Some queries of a head are computed at a time, because the scores are
    stored."""
    heads = []
    for q, k, v in zip(*(part.detach().unbind(1) for part in (query, key, value)), strict=True):
        k, v = k.double(), v.double()
        scores = (part.double() @ k.mT * q.shape[-1] ** -0.5 for part in q.split(_queries_at_a_time(k), dim=1))
        parts = zip(*((part.softmax(-1) @ v, part.logsumexp(-1)) for part in scores), strict=True)
        heads.append([torch.cat(part, dim=1) for part in parts])
    return AttentionState(*(torch.stack(parts, dim=1) for parts in zip(*heads, strict=True)))


def _queries_at_a_time(key: Tensor) -> int:
    """The number of queries whose scores take 512 MiB."""
    return max(1, 2**26 // max(1, key.shape[0] * key.shape[1]))


@declared(threads=None)
def attention(
    heads: int = 4,
    width: int = 16,
    keys: int = 100_000,
    batch: int = 1,
    latents: int = 128,
    backward: bool = False,
    transposed: bool = False,
    every_peer: bool = False,
    logits: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Attention of `latents` queries over `keys` given keys and values, all with one width.

    `transposed`: the layout is (B, N, H, D), as the result of a projection, instead of (B, H, N, D). `every_peer`: also
    include peers that take seconds to compile. `logits`: their standard deviation.
    """
    scores = batch * heads * latents * keys
    named = dtype_name(dtype)

    def known() -> Iterator[str]:
        """Peers in tf32 are compared with our kernel in tf32, for float32 alone."""
        yield from kernels("latent_attention")
        yield from (SDPA, NAIVE)
        if every_peer:
            yield from (*_backend_names(device()), NAIVE + COMPILED, FLEX)
        if every_peer and device() == "cuda":
            both = (*PLAIN, OURS_IN_TF32, SDPA + IN_TF32, FLEX_IN_TF32)
            yield from (name for name in both if IN_TF32 not in name or dtype == torch.float32)
            yield from (FLASH, FLASHINFER)

    def in_reach(name: str) -> bool:
        """On a CPU, peers that store the scores are left out if the scores take a gigabyte or more; on a GPU its memory
        decides."""
        return device() == "cuda" or scores <= 2**28 or not _stores_scores(name)

    def inputs(seed: int) -> Operands:
        random = generator(seed)

        def rows(length: int) -> Tensor:
            shape = (length, heads) if transposed else (heads, length)
            made = normal(random, batch, *shape, width, dtype=dtype, grad=backward)
            return made.transpose(1, 2) if transposed else made

        query, key, value = rows(latents), rows(keys), rows(keys)
        query.data.mul_(logits)
        return Operands(query, key, value, normal(random, *(query.shape if backward else (0,)), dtype=dtype))

    def refusal(implementation: str) -> str | None:
        if implementation == FLEX and backward and device() == "cpu":
            return "torch has no backward pass for it on a CPU"
        if implementation == FLEX and dtype == torch.float64:
            return "torch has no float64 version of it"
        stored = 4 * dtype.itemsize * scores if _stores_scores(implementation) else 0
        return refusing("latent_attention", *3 * [(1, heads, 1, width)], dtype=dtype, memory=stored + 3 * 2**30)(
            implementation
        )

    works = [
        attention_work(scores, batch * heads * keys, width, width, named, pass_, device())
        for pass_ in ((False, True) if backward else (False,))
    ]
    sizes = {"pass": direction(backward), "B": batch, "H": heads, "L": latents, "N": keys, "D": width}
    large = {"logits": logits} if logits > 1 else {}
    names = [name for name in known() if in_reach(name)]
    suffix = f"{'-transposed' if transposed else ''}{f'-logits{logits}' if large else ''}"
    return Case(
        scan="latent_attention",
        name=f"{way(backward)}-{named}-B{batch}-{heads}x{width}-L{latents}-N{keys}{suffix}",
        sizes={**sizes, "layout": "(B, N, H, D)" if transposed else "(B, H, N, D)", **large},
        inputs=inputs,
        implementations={name: as_named(name, passes(ATTENTION[name], 3, backward)) for name in names},
        oracle=lambda i: exact(*i[:3], i.dout if backward else None),
        baselines=tuple(name for name in names if not of_this_package(name) and IN_TF32 not in name),
        work=works,
        counted={FLEX: SDPA, FLEX_IN_TF32: SDPA}
        | {name: name.removesuffix(COMPILED) for name in PLAIN if name.endswith(COMPILED)},
        refusal=refusal,
        smaller={"keys": min(keys, 4096), "batch": min(batch, 4)},
    )


def _stores_scores(name: str) -> bool:
    return stores_scores(name) or name in ("reference", f"{SDPA}, math")


# ---- the state -------------------------------------------------------------------------------------------------------


class StateInputs(NamedTuple):
    """All keys and values (the keys that are added or removed come last), and the state of the other keys."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


def eager_update(i: StateInputs, new: int, removes: bool = False) -> Results:
    """The update in plain torch: the scores of the new keys are merged into the sum, or removed from it."""
    scores, lse = (i.query @ i.key[:, :, -new:].mT).double() * i.query.shape[-1] ** -0.5, i.lse.unsqueeze(-1)
    part = scores if new == 1 else scores.logsumexp(-1, keepdim=True)
    merged = lse + torch.log1p(-(part - lse).exp()) if removes else torch.logaddexp(lse, part)
    added = (scores - merged).exp().to(i.out.dtype) @ i.value[:, :, -new:].to(i.out.dtype)
    kept = i.out * (lse - merged).exp().to(i.out.dtype)
    return (kept - added if removes else kept + added), merged.squeeze(-1)


def _updated_by(impl: str, removes: bool, new: int, i: StateInputs) -> Results:
    state, key, value = AttentionState(i.out, i.lse), i.key[:, :, -new:], i.value[:, :, -new:]
    if removes:
        return tuple(remove_from_state(state, i.query, key, value, impl=impl).state)
    return tuple(attention_state(i.query, key, value, state=state, impl=impl))


@declared(threads=None)
def update(
    heads: int = 4,
    width: int = 16,
    keys: int = 100_000,
    new: int = 1,
    latents: int = 128,
    removes: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """`new` keys after `keys` whose state alone was kept; or `new` keys that are removed from the state of all keys."""
    scan, named = "remove_from_state" if removes else "attention_state", dtype_name(dtype)
    rest = slice(0, keys) if removes else slice(None)  # the keys of the result

    def inputs(seed: int) -> StateInputs:
        query, key, value, _ = attention(heads, width, keys + new, latents=latents, dtype=dtype).inputs(seed)
        kept = slice(None) if removes else slice(0, keys)
        return StateInputs(query, key, value, *attention_state(query, key[:, :, kept], value[:, :, kept]))

    def by_torch(i: StateInputs) -> Results:
        return (F.scaled_dot_product_attention(i.query, i.key[:, :, rest], i.value[:, :, rest]),)

    def oracle(i: StateInputs) -> Mapping[str, Results]:
        state = attended(i.query, i.key[:, :, rest], i.value[:, :, rest])
        return dict.fromkeys((*kernels(scan), EAGER), tuple(state)) | {SDPA: (state.out,)}

    count = "one-key" if new == 1 else f"{new}-keys"
    return Case(
        scan=scan,
        name=f"{'removal' if removes else 'update'}-{named}-{heads}x{width}-L{latents}-{count}"
        f"-{'of' if removes else 'after'}-{keys}",
        sizes={"H": heads, "L": latents, "N": keys, "t": new, "D": width},
        inputs=inputs,
        implementations={
            **{name: partial(_updated_by, name, removes, new) for name in kernels(scan)},
            EAGER: partial(eager_update, new=new, removes=removes),
            SDPA: by_torch,
        },
        oracle=oracle,
        baselines=(EAGER,),
        others=(SDPA,),  # starts again with all keys, which is not needed with a state
        work=attention_work(latents * heads * new, heads * new, width, width, named, device=device()),
        refusal=refusing("latent_attention", *3 * [(1, heads, 1, width)], dtype=dtype, memory=3 * 2**30),
        smaller={"keys": min(keys, 4096), "new": min(new, 64)},
    )


@declared(threads=None)
def merge(parts: int = 2, heads: int = 4, width: int = 16, latents: int = 128, batch: int = 1) -> Case:
    """Merges the states of parts, from different processes or times, into the state of the whole, with the same formula
    on every device."""
    rows = batch * heads * latents

    def inputs(seed: int) -> tuple[Tensor, Tensor]:
        """(P, B, H, L, E) and (P, B, H, L): this number of states one after the other."""
        random, shape = generator(seed), (parts, batch, heads, latents)
        return normal(random, *shape, width), 10 * normal(random, *shape).double()

    def oracle(i: Sequence[Tensor]) -> Results:
        """The merged state by weights of the parts that sum to 1."""
        outs, lses = i
        return (lses.softmax(0).unsqueeze(-1) * outs.double()).sum(0), lses.logsumexp(0)

    return Case(
        scan="merge_states",
        name=f"merge-{parts}-states-float32-B{batch}-{heads}x{width}-L{latents}",
        sizes={"B": batch, "H": heads, "L": latents, "D": width, "states": parts},
        inputs=inputs,
        implementations={
            "cmab_kernels.merge_states": lambda i: tuple(merge_states(*map(AttentionState, *i))),
            EAGER: _eager_merge,
        },
        oracle=oracle,
        baselines=(EAGER,),
        # Each state is read, and one state is written.
        work=Work(bytes=(parts + 1) * rows * (width * BYTES["float32"] + BYTES["float64"])),
        smaller={"batch": 1},
    )


def _eager_merge(inputs: Sequence[Tensor]) -> Results:
    """The merge in plain torch, one state after the other."""
    (out, *outs), (lse, *lses) = inputs
    for other_out, other_lse in zip(outs, lses, strict=True):
        merged = torch.logaddexp(lse, other_lse)
        share, other_share = ((part - merged).exp().unsqueeze(-1) for part in (lse, other_lse))
        out, lse = (out * share + other_out * other_share).to(out.dtype), merged
    return out, lse


# ---- what is measured ------------------------------------------------------------------------------------------------

WIDTHS = ((8, 8), (4, 16), (1, 64))
"""(heads, width) for the model width 64."""
NUMBERS = (1000, 10_000, 100_000, 1_000_000)


SHORT = (
    *((latents, keys, 4) for latents in (1, 16, 128) for keys in (128, 256, 1024)),
    *((latents, 64, 4) for latents in (1, 64)),
    *((1, keys, 1) for keys in (4096, 65_536)),
)
"""(queries, keys, batch) of calls with little work, where this package is slower in some cases."""


def short_cases() -> Iterator[Case]:
    """Attention at `SHORT`, in heads of 16 and 64, on one thread."""
    for latents, keys, batch in SHORT:
        yield from (
            attention(4, width, keys, batch, latents, threads=1, quick=latents < 128 and keys == 256 and width == 64)
            for width in (16, 64)
        )


def cases() -> Iterator[Case]:
    half, wide, double = torch.bfloat16, torch.float32, torch.float64
    yield from (attention(keys=keys, quick=True, every_peer=keys == 100_000) for keys in NUMBERS)
    yield from (
        attention(keys=keys, backward=True, quick=keys == 100_000, every_peer=keys == 100_000) for keys in NUMBERS
    )
    yield from (
        attention(heads, width, backward=backward, quick=True)
        for heads, width in WIDTHS
        if heads != 4
        for backward in (False, True)
    )
    yield from (attention(heads, width, transposed=True) for heads, width in WIDTHS)
    yield from (attention(heads, width, dtype=half, quick=heads != 8) for heads, width in WIDTHS)
    yield from (attention(heads, width, backward=True, dtype=half) for heads, width in WIDTHS)
    yield from (attention(dtype=dtype) for dtype in (double, torch.float16))
    yield from (attention(heads=heads) for heads in (1, 2, 8))
    yield from (attention(width=width) for width in (8, 32, 64, 128))
    yield from (attention(latents=latents, backward=backward) for latents in (8, 32, 512) for backward in (False, True))
    yield from (attention(threads=1, backward=backward) for backward in (False, True))
    yield from short_cases()
    yield from (attention(keys=197, batch=batch, backward=True, quick=batch == 100) for batch in (1, 10, 100))
    yield from (attention(keys=197, batch=batch) for batch in (1, 10, 100))
    yield attention(keys=197, batch=100, backward=True, transposed=True)
    yield attention(keys=1_000_000, dtype=half)
    yield from (attention(keys=197, batch=10, logits=64, backward=backward) for backward in (False, True))
    yield from (attention(transposed=True, backward=dtype == wide, dtype=dtype) for dtype in (wide, half))

    yield from (update(keys=keys, quick=keys == 100_000) for keys in NUMBERS)
    yield from (update(new=new, quick=new == 1000) for new in (10, 100, 1000, 10_000))
    yield from (update(latents=latents) for latents in (8, 32, 512))
    yield from (update(heads=heads) for heads in (1, 8))
    yield update(width=64)
    yield from (update(dtype=dtype, new=1000) for dtype in (double, half))
    yield update(threads=1, new=1000)
    yield from (update(new=new, removes=True, quick=new == 1000) for new in (1, 10, 100, 1000))
    yield from (update(keys=keys, new=100, removes=True) for keys in (1000, 10_000, 1_000_000))
    yield from (merge(parts, quick=parts == 2) for parts in (2, 8, 32))
    yield from (merge(batch=batch) for batch in (16, 256))

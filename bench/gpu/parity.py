"""Every Triton kernel against the definition in float64, in every dtype and width class, row by row, within the bounds of promise P2."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import LAWS, bound, row_error
from cmab_kernels.testing.oracles import attention, attention_terms, largest_score

from .problems import DTYPES, Shares, parity_tasks, worst
from .sections import Row, Task

WIDTHS = (8, 16, 64, 128, 256)


@dataclass(frozen=True)
class Problem:
    dtype: str
    width: int
    value_width: int
    law: str = "normal"
    latents: int = 128
    keys: int = 1500
    variant: str = "plain"
    """What else there is: "mask", "packed", "state" or "strided"."""


def problems() -> Iterator[Problem]:
    """Every dtype with every width class; the laws of the inputs; blocks of queries; masks, packed sets, states, strides; odd widths."""
    for dtype, width in itertools.product(DTYPES, WIDTHS):
        yield Problem(dtype, width, width)
        yield Problem(dtype, width, width, latents=300, keys=200)
    for dtype, law in itertools.product(DTYPES, list(LAWS)[1:]):
        yield Problem(dtype, 16, 16, law)
        yield Problem(dtype, 64, 64, law)
    for dtype, variant in itertools.product(DTYPES, ("mask", "packed", "state", "strided")):
        yield Problem(dtype, 16, 16, variant=variant)
        yield Problem(dtype, 33, 7, latents=5, variant=variant)
        yield Problem(dtype, 64, 64, latents=200, keys=5000, variant=variant)


def tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    return parity_tasks(problems(), shares, device)


@dataclass
class Inputs:
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    state: ck.AttentionState | None = None

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def make(problem: Problem, device: str, seed: int = 0) -> Inputs:
    torch.manual_seed(seed)
    packed = problem.variant == "packed"
    shapes = ((problem.latents, problem.width), (problem.keys, problem.width), (problem.keys, problem.value_width))
    q, k, v = (
        LAWS[problem.law](1 if packed and i else 3, 2, *shape).to(DTYPES[problem.dtype]).to(device) for i, shape in enumerate(shapes)
    )
    if problem.variant == "mask":
        mask = torch.rand(3, problem.keys, device=device) < 0.3
        mask[1, : problem.keys // 2] = True
        k, v = (t.masked_fill(mask[:, None, :, None], math.nan) for t in (k, v))
        return Inputs(q, k, v, mask)
    if packed:
        return Inputs(q, k, v, cu_seqlens=torch.tensor([0, 0, problem.keys // 3, problem.keys], device=device))
    if problem.variant == "strided":
        q, k, v = q.mT.contiguous().mT, k.transpose(1, 2).contiguous().transpose(1, 2), v.repeat_interleave(2, -1)[..., ::2]
    state = None
    if problem.variant == "state":
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.randn(3, 2, problem.latents, problem.value_width, dtype=wide, device=device)
        lse = 5 * torch.randn(3, 2, problem.latents, dtype=torch.float64, device=device)
        out[:, :, 0], lse[:, :, 0] = 0.0, -math.inf
        state = ck.AttentionState(out, lse)
    return Inputs(q, k, v, state=state)


def _reference(given: Inputs, leaves: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    out, lse = attention(*leaves, given.mask, given.cu_seqlens)
    return (out, lse) if given.state is None else tuple(ck.merge_states(ck.AttentionState(out, lse), _double(given.state)))


def _double(state: ck.AttentionState) -> ck.AttentionState:
    return ck.AttentionState(state.out.double(), state.lse)


def _torch(given: Inputs, leaves: tuple[Tensor, ...]) -> Tensor | None:
    """torch's result in the same precision; None where torch has no such thing."""
    if given.cu_seqlens is not None or given.state is not None:
        return None
    q, k, v = leaves
    if given.mask is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)
    k, v = (t.masked_fill(given.mask[:, None, :, None], 0.0) for t in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~given.mask[:, None, None, :])


def by_kernels(given: Inputs) -> tuple[ck.AttentionState, tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """The state, random gradients of its two parts, and the gradients of the inputs for them."""
    leaves = tuple(t.detach().requires_grad_() for t in given.leaves)
    state = ck.attention_state(*leaves, state=given.state, key_padding_mask=given.mask, cu_seqlens=given.cu_seqlens, impl="triton")
    slopes = torch.randn_like(state.out).to(leaves[0].dtype).to(state.out.dtype), torch.randn_like(state.lse)
    return state, slopes, torch.autograd.grad(tuple(state), leaves, slopes)


def shares(problem: Problem, device: str) -> Shares:
    """How far each result's worst row is from the definition."""
    given = make(problem, device)
    wide = tuple(t.detach().double().requires_grad_() for t in given.leaves)
    state, (dout, dlse), grads = by_kernels(given)
    expected = _reference(given, wide)
    wanted = torch.autograd.grad(expected, wide, (dout.double(), dlse))

    own_leaves = tuple(t.detach().requires_grad_() for t in given.leaves)
    own = _torch(given, own_leaves)
    own_grads = (None,) * 3 if own is None else torch.autograd.grad(own, own_leaves, dout.to(own.dtype))
    own_wanted = (None,) * 3 if own is None else torch.autograd.grad(_reference(given, wide)[0], wide, dout.double())
    score = largest_score(*given.leaves[:2], given.mask, given.cu_seqlens)
    dtype = given.query.dtype
    error = row_error(state.out, expected[0]).masked_fill(state.out.isnan().any(-1), math.inf)
    found = {"out": worst(error / bound(dtype, score, 0.0 if own is None else row_error(own, expected[0])))}
    eps = torch.finfo(state.out.dtype).eps
    found["lse"] = worst((state.lse - expected[1]).abs().masked_fill(state.lse == expected[1], 0.0) / (8 * eps * (score + 4)))
    terms = _terms(given, wide, dout, dlse, expected)
    for name, ours, right, other, other_right, term in zip("qkv", grads, wanted, own_grads, own_wanted, terms, strict=True):
        size = torch.maximum(right.norm(dim=-1), 0.05 * term).clamp(min=max(1e-30 * float(term.max()), 1e-300))
        error = (ours.double() - right).norm(dim=-1) / size
        theirs = 0.0 if other is None else (other.double() - other_right).norm(dim=-1) / size
        found[f"d{name}"] = worst(error / bound(dtype, score, theirs, factor=4.0))
    return found


def _terms(given: Inputs, wide: tuple[Tensor, ...], dout: Tensor, dlse: Tensor, expected: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The size of the gradients' rows if nothing cancelled, with the share of dlse; for packed sets, 1."""
    if given.cu_seqlens is not None:
        q, k, v = wide
        return [torch.ones(t.shape[:-1], dtype=torch.float64, device=t.device) for t in (q, k, v)]
    with torch.no_grad():
        q, k, v = (t if given.mask is None or i == 0 else t.masked_fill(given.mask[:, None, :, None], 0.0) for i, t in enumerate(wide))
        out, lse = expected[0], expected[1].masked_fill(expected[1] == -math.inf, math.inf)
        weight = (q.shape[-1] ** -0.5 * q @ k.mT - lse[..., None]).exp()
        slope = q.shape[-1] ** -0.5 * weight * dlse.abs()[..., None]
        plain = attention_terms(dout.double(), q, k, v, out, lse)
        return [
            (t + extra).norm(dim=-1)
            for t, extra in zip(plain, (slope @ k.abs(), slope.mT @ q.abs(), torch.zeros_like(plain[2])), strict=True)
        ]

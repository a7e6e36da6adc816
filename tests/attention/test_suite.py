"""Latent cross-attention under the suite that every operator inherits."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cmab_kernels as ck
from cmab_kernels.testing import Measured, OperatorSuite, oracles
from cmab_kernels.testing.suite import DTYPES

Results = tuple[Tensor, ...]
OFFSETS = torch.tensor([0, 2, 2, 5])
WIDE = tuple(
    {"H": 2, "L": latents, "N": keys, "D": width, "E": width}
    for width in (8, 16, 64, 128, 256)
    for latents, keys in ((128, 1500), (300, 200))
)
"""The classes of widths that GPU kernels have, with one block of queries and with several."""


@functools.cache
def _offsets(device: torch.device) -> Tensor:
    return OFFSETS.to(device)


class TestAttentionState(OperatorSuite):
    """`attention_state` of batches of keys, with a mask."""

    operator = "attention_state"
    arguments = {"query": "BHLD", "key": "BHND", "value": "BHNE"}
    outputs = ("out", "lse")
    logits = (("query",), ("key",))
    extents = {"B": 2, "H": 3, "L": 5, "N": 133, "D": 16, "E": 7}
    small = {"H": 2, "L": 3, "N": 5, "D": 4, "E": 3}
    shapes = (
        {"H": 2, "N": 1000, "E": 16},
        {"L": 33, "N": 197, "D": 8, "E": 24},
        {"H": 1, "L": 128, "N": 130, "D": 64, "E": 64},
    )
    impls = ("reference", "native")
    repeatable = ("native",)
    repeats = 1000
    empty = "BHLN"
    mask = "key_padding_mask"
    bits = tuple(
        {"B": 3, "H": 2, "L": latents, "N": keys, "E": 16} for latents, keys in ((128, 5000), (5, 20_000), (700, 300))
    )
    many = {"B": 66_000, "H": 1, "L": 1, "N": 3, "D": 2, "E": 2}
    compilers = ("aot_eager", "inductor")
    autocast = ("query", "key", "value")
    accepted = ("query of a dimension too few",)
    on_gpu = {"shapes": (*shapes, *WIDE)}

    def call(self, impl: str, **inputs: Any) -> Results:
        return tuple(ck.attention_state(**inputs, impl=impl))

    def oracle(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None) -> Results:
        return oracles.attention(query, key, value, key_padding_mask)

    def in_torch(self, query: Tensor, key: Tensor, value: Tensor) -> Results:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return out, out.new_zeros(out.shape[:-1], dtype=torch.float64)

    def incoming(self, results: Results) -> Results:
        """Return random gradients of `out` and zeros for `lse`, because torch's attention has no `lse` with a
        gradient."""
        out, *lse = results
        return torch.randn(out.shape), *(torch.zeros_like(t) for t in lse)

    def score(self, inputs: dict[str, Tensor]) -> float:
        return oracles.largest_score(inputs["query"], inputs["key"])

    def row_sizes(self, found: Measured) -> Tensor:
        """Measure the rows of gradients relative to the terms that they add up, because these may cancel."""
        size = found.right.norm(dim=-1)
        if not found.is_gradient:
            return size
        given = [found.inputs[name] for name in ("query", "key", "value")]
        terms = oracles.attention_terms(found.cotangents[0].double(), *given, *oracles.attention(*given))
        term = dict(zip(("query", "key", "value"), terms, strict=True))[found.name].norm(dim=-1)
        return torch.maximum(size, 0.05 * term).clamp(min=1e-30 * float(term.max()))

    def check_rows(self, found: Measured) -> None:
        """Check `lse` by its absolute error: 4 eps max abs(S) are allowed for the kernel, and the same for the
        oracle."""
        if found.name != "lse":
            return super().check_rows(found)
        eps = torch.finfo(torch.promote_types(found.dtype, torch.float32)).eps
        assert (found.ours - found.right).abs().max() <= 8 * eps * (found.score + 4)


class Variant(TestAttentionState):
    """Another way to call the operator; its accuracy is checked with one shape and normal inputs."""

    dtypes = (torch.float64, torch.float32)
    shapes = ({},)
    laws = ("normal",)
    bits = ()
    repeats = 100
    many = None
    compilers = ("eager", "aot_eager")
    on_gpu = {"dtypes": DTYPES}

    def bad_arguments(self) -> list[str]:
        return []


class TestLatentAttention(TestAttentionState):
    """`latent_attention` of queries that all batch elements share, with a scale that is not the default."""

    operator = "latent_attention"
    arguments = {"query": "HLD", "key": "BHND", "value": "BHNE"}
    outputs = ("out",)
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    shapes = ({},)
    bits = ()
    repeats = 100
    many = None
    compilers = ("aot_eager",)

    def call(self, impl: str, **inputs: Any) -> Results:
        return (ck.latent_attention(**inputs, impl=impl),)

    def oracle(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None) -> Results:
        return oracles.attention(query.expand(key.shape[0], *query.shape), key, value, key_padding_mask)[:1]

    def in_torch(self, query: Tensor, key: Tensor, value: Tensor) -> Results:
        return (torch.nn.functional.scaled_dot_product_attention(query.expand(key.shape[0], *query.shape), key, value),)

    def score(self, inputs: dict[str, Tensor]) -> float:
        return oracles.largest_score(inputs["query"][None], inputs["key"])

    def row_sizes(self, found: Measured) -> Tensor:
        query = found.inputs["query"].expand(found.inputs["key"].shape[0], -1, -1, -1)
        if found.name == "query":
            each = super().row_sizes(
                found._replace(inputs={**found.inputs, "query": query}, right=found.right.expand_as(query))
            )
            return each.square().sum(0).sqrt()
        return super().row_sizes(found._replace(inputs={**found.inputs, "query": query}))


class TestPackedSets(Variant):
    """`latent_attention` of sets of keys packed into one row by offsets."""

    operator = "latent_attention"
    arguments = {"query": "SHLD", "key": "OHND", "value": "OHNE"}
    outputs = ("out",)
    extents = {"S": 3, "O": 1, "H": 2, "L": 3, "N": 5, "D": 4, "E": 3}
    batch = ""
    empty = ""
    mask = None

    def call(self, impl: str, **inputs: Any) -> Results:
        return (ck.latent_attention(**inputs, cu_seqlens=_offsets(inputs["key"].device), impl=impl),)

    def oracle(self, query: Tensor, key: Tensor, value: Tensor) -> Results:
        return oracles.attention(query, key, value, None, _offsets(key.device))[:1]

    def in_torch(self, query: Tensor, key: Tensor, value: Tensor) -> Results:
        return (oracles.attention(query, key, value, None, _offsets(key.device))[0].to(query.dtype),)


class TestKeyBias(Variant):
    """`attention_state` with a bias of each key."""

    arguments = {"query": "BHLD", "key": "BHND", "value": "BHNE", "key_bias": "BHN"}
    autocast = ()

    def oracle(
        self, query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor, key_padding_mask: Tensor | None = None
    ) -> Results:
        return oracles.attention(query, key, value, key_padding_mask, key_bias=key_bias)

    def in_torch(self, query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor) -> Results:
        added = key_bias[:, :, None].expand(-1, -1, query.shape[2], -1)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, added)
        return out, out.new_zeros(out.shape[:-1], dtype=torch.float64)

    def score(self, inputs: dict[str, Tensor]) -> float:
        bias = inputs["key_bias"]
        return super().score(inputs) + (float(bias.abs().max()) if bias.numel() else 0.0)

    def row_sizes(self, found: Measured) -> Tensor:
        return OperatorSuite.row_sizes(self, found)


class TestGroupedHeads(Variant):
    """`latent_attention` of queries with three times the heads of the keys."""

    operator = "latent_attention"
    arguments = {"query": "BGLD", "key": "BHND", "value": "BHNE"}
    outputs = ("out",)
    extents = {**TestAttentionState.extents, "G": 6, "H": 2}
    small = {**TestAttentionState.small, "G": 6, "H": 2}
    empty = "BLN"

    def call(self, impl: str, **inputs: Any) -> Results:
        return (ck.latent_attention(**inputs, enable_gqa=True, impl=impl),)

    def oracle(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None) -> Results:
        return oracles.attention(query, *(t.repeat_interleave(3, 1) for t in (key, value)), key_padding_mask)[:1]

    def in_torch(self, query: Tensor, key: Tensor, value: Tensor) -> Results:
        return (torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True),)

    def score(self, inputs: dict[str, Tensor]) -> float:
        return oracles.largest_score(inputs["query"], inputs["key"].repeat_interleave(3, 1))

    def row_sizes(self, found: Measured) -> Tensor:
        return OperatorSuite.row_sizes(self, found)


class TestIncomingState(Variant):
    """`attention_state` that starts from the state of other keys."""

    arguments = {"query": "BHLD", "key": "BHND", "value": "BHNE", "other_key": "BHMD", "other_value": "BHME"}
    logits = (("query",), ("key", "other_key"))
    extents = {**TestAttentionState.extents, "M": 40}
    small = {**TestAttentionState.small, "M": 4}
    empty = "BNM"
    mask = None
    autocast = ()

    def call(
        self, impl: str, query: Tensor, key: Tensor, value: Tensor, other_key: Tensor, other_value: Tensor
    ) -> Results:
        state = ck.attention_state(query, other_key, other_value, impl=impl)
        return tuple(ck.attention_state(query, key, value, state=state, impl=impl))

    def oracle(self, query: Tensor, key: Tensor, value: Tensor, other_key: Tensor, other_value: Tensor) -> Results:
        return oracles.attention(query, torch.cat([other_key, key], 2), torch.cat([other_value, value], 2))

    def in_torch(self, **inputs: Tensor) -> Results:
        out, lse = self.oracle(**inputs)
        return out.to(inputs["query"].dtype), lse.detach()

    def score(self, inputs: dict[str, Tensor]) -> float:
        return oracles.largest_score(inputs["query"], torch.cat([inputs["other_key"], inputs["key"]], 2))

    def row_sizes(self, found: Measured) -> Tensor:
        return OperatorSuite.row_sizes(self, found)


class TestRemoval(TestIncomingState):
    """`remove_from_state` of keys that the state has seen: the state of the other keys is left."""

    operator = "remove_from_state"

    def call(
        self, impl: str, query: Tensor, key: Tensor, value: Tensor, other_key: Tensor, other_value: Tensor
    ) -> Results:
        whole = ck.attention_state(query, torch.cat([other_key, key], 2), torch.cat([other_value, value], 2), impl=impl)
        return tuple(ck.remove_from_state(whole, query, other_key, other_value, impl=impl).state)

    def oracle(self, query: Tensor, key: Tensor, value: Tensor, other_key: Tensor, other_value: Tensor) -> Results:
        return oracles.attention(query, key, value)

    def is_bounded(self, name: str, is_gradient: bool, law: str) -> bool:
        """Do not check gradients of removed keys, because they are differences that vanish."""
        return not (is_gradient and name.startswith("other"))


# ---- tests of attention alone


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _leaves() -> tuple[Tensor, Tensor, Tensor]:
    return _leaf(2, 2, 3, 4), _leaf(2, 2, 5, 4), _leaf(2, 2, 5, 3)


def test_compile_of_several_calls() -> None:
    """States and results compile into one graph, whichever implementation `use_impl` names."""

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = ck.attention_state(q[0], k, v)
        return ck.latent_attention(q, k, v).pow(2).sum() + ck.attention_state(q, k, v, state=state).lse.sum()

    inputs = _leaves()
    for impl in ("auto", "reference"):
        torch._dynamo.reset()
        with ck.use_impl(impl):
            torch.testing.assert_close(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), loss(*inputs))


def test_flops() -> None:
    q, k, v = _leaves()
    with FlopCounterMode(display=False) as forward:
        out = ck.latent_attention(q, k, v, impl="native")
    assert forward.get_total_flops() == 2 * (2 * 2 * 3 * 5) * (4 + 3)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() == 2 * (2 * 2 * 3 * 5) * (3 * 4 + 2 * 3)
    with FlopCounterMode(display=False) as packed:
        ck.latent_attention(_leaf(3, 2, 3, 4), k[:1], v[:1], cu_seqlens=OFFSETS, impl="native")
    assert packed.get_total_flops() == 2 * (2 * 3 * 5) * (4 + 3)

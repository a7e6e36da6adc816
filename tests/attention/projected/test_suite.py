"""Attention over projected inputs under the suite that every operator inherits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cmab_kernels as ck
from cmab_kernels.testing import Measured, OperatorSuite, oracles
from cmab_kernels.testing.bounds import LAWS

Results = tuple[Tensor, ...]
EPS = 1e-3


def offsets(inputs: Any) -> Tensor:
    """Return the offsets of three sets; the second is empty. The offsets are made on the device, so that a CUDA graph
    can capture this."""
    length = inputs.shape[1] if isinstance(inputs, Tensor) and inputs.dim() > 1 else 5
    at = torch.arange(4, device=inputs.device if isinstance(inputs, Tensor) else None)
    first = 2 * length // 5
    return first * (at > 0) + (length - first) * (at > 2)


def joined(weight: Any, dim: int = 0) -> Any:
    """Return weights of heads (..., H, D, C) in the form of `torch.nn.Linear` (..., H D, C); other values are returned
    unchanged."""
    return weight.flatten(dim, dim + 1) if isinstance(weight, Tensor) and weight.dim() > dim + 1 else weight


def projected(inputs: Tensor, weight: Tensor, bias: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
    """Return the heads (B, H, N, D) of the normed inputs,
    for the weights of heads (H, D, C) and their biases (H, D)."""
    rows = F.layer_norm(inputs, inputs.shape[-1:], *norm, EPS)
    return F.linear(rows, joined(weight), bias.flatten()).unflatten(-1, (weight.shape[0], -1)).transpose(1, 2)


class TestProjectedAttention(OperatorSuite):
    """`projected_attention_state` with biases, a norm and a mask."""

    operator = "projected_attention_state"
    arguments = {
        "query": "BHLD",
        "inputs": "BNC",
        "key_weight": "HDC",
        "value_weight": "HEC",
        "key_bias": "HD",
        "value_bias": "HE",
        "norm_weight": "C",
        "norm_bias": "C",
    }
    outputs = ("out", "lse")
    extents = {"B": 2, "H": 3, "L": 5, "N": 133, "C": 12, "D": 16, "E": 7}
    small = {"H": 2, "L": 3, "N": 5, "C": 3, "D": 4, "E": 3}
    shapes = ({"H": 2, "N": 1000, "C": 64, "E": 16}, {"H": 1, "L": 128, "N": 130, "C": 33, "D": 64, "E": 64})
    impls = ("reference", "native")
    repeatable = ("native",)
    repeats = 1000
    empty = "BLN"
    mask = "key_padding_mask"
    bits = tuple(
        {"B": 3, "H": 2, "L": latents, "N": keys, "C": columns, "E": 16}
        for latents, keys, columns in ((128, 5000, 32), (5, 20_000, 7), (700, 300, 16))
    )
    many = {"B": 66_000, "H": 1, "L": 1, "N": 3, "C": 2, "D": 2, "E": 2}
    compilers = ("aot_eager", "inductor")
    autocast = ("query", "inputs", "key_weight", "value_weight", "key_bias", "value_bias", "norm_weight", "norm_bias")
    accepted = ("query of a dimension too few",)
    stacked = 0
    """The position of the heads in the shapes of the weights."""

    def make(self, name: str, shape: tuple[int, ...], law: str) -> Tensor:
        """Return weights that keep the size of a row, so that logits have the given distribution; an outlier goes to
        the rows and queries."""
        if law == "one outlier" and name not in ("query", "inputs"):
            law = "normal"
        return LAWS[law](*shape) / (shape[-1] ** 0.5 if name.endswith("weight") and len(shape) > 2 else 1)

    def call(self, impl: str, norm_weight: Any, norm_bias: Any, **inputs: Any) -> Results:
        flat = {
            n: joined(t, self.stacked) if n.startswith(("key_", "value_")) and n != self.mask else t
            for n, t in inputs.items()
        }
        return tuple(ck.projected_attention_state(**flat, context_norm=(norm_weight, norm_bias, EPS), impl=impl))

    def oracle(
        self, query: Tensor, inputs: Tensor, key_padding_mask: Tensor | None = None, **weights: Tensor
    ) -> Results:
        return oracles.attention(query, *self.key_and_value(inputs, **weights), key_padding_mask)

    def key_and_value(self, inputs: Tensor, **weights: Tensor) -> tuple[Tensor, Tensor]:
        norm = weights["norm_weight"], weights["norm_bias"]
        key = projected(inputs, weights["key_weight"], weights["key_bias"], norm)
        return key, projected(inputs, weights["value_weight"], weights["value_bias"], norm)

    def in_torch(self, query: Tensor, inputs: Tensor, **weights: Tensor) -> Results:
        out = F.scaled_dot_product_attention(query, *self.key_and_value(inputs, **weights))
        return out, out.new_zeros(out.shape[:-1], dtype=torch.float64)

    def incoming(self, results: Results) -> Results:
        """Return random gradients of `out` and zeros for `lse`, because torch's attention has no `lse` with a
        gradient."""
        out, *lse = results
        return torch.randn(out.shape), *(torch.zeros_like(t) for t in lse)

    def score(self, inputs: dict[str, Tensor]) -> float:
        weights = {name: t for name, t in inputs.items() if name not in ("query", "inputs")}
        return oracles.largest_score(inputs["query"], self.key_and_value(inputs["inputs"], **weights)[0])

    def is_bounded(self, name: str, is_gradient: bool, law: str) -> bool:
        """Do not check gradients that vanish: all gradients if the norm makes equal rows 0, and the gradient of a bias
        that adds the same number to all scores."""
        return not is_gradient or (law != "all equal" and name != "key_bias")

    def row_sizes(self, found: Measured) -> Tensor:
        """Measure the rows of gradients through the softmax relative to the terms that they add up, because these may
        cancel."""
        size = super().row_sizes(found)
        if found.name not in ("query", "key_weight", "inputs", "norm_weight", "norm_bias") or not found.is_gradient:
            return size
        weights = {name: t for name, t in found.inputs.items() if name not in ("query", "inputs")}
        given = found.inputs["query"], *self.key_and_value(found.inputs["inputs"], **weights)
        dquery, dkey, dvalue = oracles.attention_terms(found.cotangents[0].double(), *given, *oracles.attention(*given))
        rows = F.layer_norm(
            found.inputs["inputs"], found.inputs["inputs"].shape[-1:], weights["norm_weight"], weights["norm_bias"], EPS
        )
        if found.name in ("query", "key_weight"):
            term = dquery if found.name == "query" else torch.einsum("bhnd,bnc->hdc", dkey, rows.abs())
            return torch.maximum(size, 0.05 * term.norm(dim=-1)).clamp(min=1e-30 * float(term.max()))
        pairs = (dkey, weights["key_weight"]), (dvalue, weights["value_weight"])
        normed = sum(torch.einsum("bhnd,hdc->bnc", term, weight.abs()) for term, weight in pairs)
        terms = oracles.norm_terms(normed, found.inputs["inputs"], weights["norm_weight"], EPS)
        term = dict(zip(("inputs", "norm_weight", "norm_bias"), terms, strict=True))[found.name]
        return torch.maximum(size, oracles.share_of_terms(found.dtype) * term.norm(dim=-1))

    def check_rows(self, found: Measured) -> None:
        """Check `lse` by its absolute error: 4 eps max abs(S) are allowed for the kernel, and the same for the
        oracle."""
        if found.name != "lse":
            return super().check_rows(found)
        eps = torch.finfo(torch.promote_types(found.dtype, torch.float32)).eps
        assert (found.ours - found.right).abs().max() <= 8 * eps * (found.score + 4)


class Variant(TestProjectedAttention):
    """Another way to call the operator; its accuracy is checked with one shape and normal inputs."""

    dtypes = (torch.float64, torch.float32)
    shapes = ({},)
    laws = ("normal",)
    bits = ()
    repeats = 100
    many = None
    compilers = ("eager", "aot_eager")

    def bad_arguments(self) -> list[str]:
        return []


class TestStackedBlocks(TestProjectedAttention):
    """Several blocks over one read of the inputs; their states have the batch first, as the suite expects."""

    arguments = {
        "query": "KHLD",
        "inputs": "BNC",
        "key_weight": "KHDC",
        "value_weight": "KHEC",
        "key_bias": "KHD",
        "value_bias": "KHE",
        "norm_weight": "KC",
        "norm_bias": "KC",
    }
    extents = {**TestProjectedAttention.extents, "K": 3}
    small = {**TestProjectedAttention.small, "K": 2}
    shapes = ({},)
    laws = ("normal",)
    bits = TestProjectedAttention.bits[:1]
    repeats = 100
    many = None
    compilers = ("eager", "aot_eager")
    accepted = ()
    stacked = 1

    def row_sizes(self, found: Measured) -> Tensor:
        return OperatorSuite.row_sizes(self, found)

    def call(self, impl: str, **inputs: Any) -> Results:
        return tuple(part.movedim(0, 1) for part in super().call(impl, **inputs))

    def _each(
        self, function: Callable, query: Tensor, inputs: Tensor, weights: dict[str, Tensor], **options: Any
    ) -> Results:
        found = [
            function(
                query[i].expand(inputs.shape[0], -1, -1, -1),
                inputs,
                **options,
                **{name: t[i] for name, t in weights.items()},
            )
            for i in range(len(query))
        ]
        return tuple(torch.stack(parts, 1) for parts in zip(*found, strict=True))

    def oracle(
        self, query: Tensor, inputs: Tensor, key_padding_mask: Tensor | None = None, **weights: Tensor
    ) -> Results:
        return self._each(super().oracle, query, inputs, weights, key_padding_mask=key_padding_mask)

    def in_torch(self, query: Tensor, inputs: Tensor, **weights: Tensor) -> Results:
        return self._each(super().in_torch, query, inputs, weights)

    def score(self, inputs: dict[str, Tensor]) -> float:
        each = [
            {name: t if name == "inputs" else t[i] for name, t in inputs.items()} for i in range(len(inputs["query"]))
        ]
        return max(super(TestStackedBlocks, self).score({**one, "query": one["query"][None]}) for one in each)


class TestPlainProjections(Variant):
    """Projections without a bias or a norm, of a shared query."""

    arguments = {"query": "HLD", "inputs": "BNC", "key_weight": "HDC", "value_weight": "HEC"}
    autocast = ("query", "inputs", "key_weight", "value_weight")
    mask = None

    def call(self, impl: str, query: Any, inputs: Any, key_weight: Any, value_weight: Any) -> Results:
        return tuple(ck.projected_attention_state(query, inputs, joined(key_weight), joined(value_weight), impl=impl))

    def key_and_value(self, inputs: Tensor, **weights: Tensor) -> tuple[Tensor, Tensor]:
        key, value = (
            (inputs @ joined(weights[name]).mT).unflatten(-1, (weights[name].shape[0], -1)).transpose(1, 2)
            for name in ("key_weight", "value_weight")
        )
        return key, value

    def oracle(self, query: Tensor, inputs: Tensor, **weights: Tensor) -> Results:
        return super().oracle(query.expand(inputs.shape[0], -1, -1, -1), inputs, **weights)

    def in_torch(self, query: Tensor, inputs: Tensor, **weights: Tensor) -> Results:
        return super().in_torch(query.expand(inputs.shape[0], -1, -1, -1), inputs, **weights)

    def row_sizes(self, found: Measured) -> Tensor:
        return OperatorSuite.row_sizes(self, found)

    def score(self, inputs: dict[str, Tensor]) -> float:
        return super().score({**inputs, "query": inputs["query"][None]})


class TestPackedSets(Variant):
    """Sets of inputs packed into one row by offsets."""

    arguments = {**TestProjectedAttention.arguments, "query": "SHLD", "inputs": "ONC"}
    outputs = ("out",)
    extents = {"S": 3, "O": 1, "H": 2, "L": 3, "N": 70, "C": 4, "D": 4, "E": 3}
    batch = ""
    empty = ""
    mask = None

    def row_sizes(self, found: Measured) -> Tensor:
        return OperatorSuite.row_sizes(self, found)

    def call(self, impl: str, **inputs: Any) -> Results:
        return super().call(impl, cu_seqlens=offsets(inputs["inputs"]), **inputs)[:1]

    def oracle(self, query: Tensor, inputs: Tensor, **weights: Tensor) -> Results:
        return oracles.attention(query, *self.key_and_value(inputs, **weights), None, offsets(inputs))[:1]

    def in_torch(self, **inputs: Tensor) -> Results:
        return (self.oracle(**inputs)[0].to(inputs["query"].dtype),)


class TestIncomingState(Variant):
    """`projected_attention_state` that starts from the state of other inputs."""

    arguments = {**TestProjectedAttention.arguments, "others": "BMC"}
    extents = {**TestProjectedAttention.extents, "M": 40}
    small = {**TestProjectedAttention.small, "M": 4}
    empty = "BNM"
    mask = None
    autocast = ()

    def row_sizes(self, found: Measured) -> Tensor:
        return OperatorSuite.row_sizes(self, found)

    def call(self, impl: str, others: Any, **inputs: Any) -> Results:
        state = ck.AttentionState(*super().call(impl, **{**inputs, "inputs": others}))
        return super().call(impl, state=state, **inputs)

    def oracle(self, inputs: Tensor, others: Tensor, **rest: Tensor) -> Results:
        return super().oracle(inputs=torch.cat([others, inputs], 1), **rest)

    def in_torch(self, **inputs: Tensor) -> Results:
        out, lse = self.oracle(**inputs)
        return out.to(inputs["query"].dtype), lse.detach()

    def score(self, inputs: dict[str, Tensor]) -> float:
        rest = {name: t for name, t in inputs.items() if name != "others"}
        return super().score({**rest, "inputs": torch.cat([inputs["others"], inputs["inputs"]], 1)})


# ---- tests of this operator alone


def _calls() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(2, 3, 4), torch.randn(1, 9, 5), torch.randn(8, 5), torch.randn(6, 5)


def test_flops() -> None:
    query, inputs, *weights = (t.requires_grad_() for t in _calls())
    with FlopCounterMode(display=False) as forward:
        out = ck.projected_attention_state(query, inputs, *weights, impl="native").out
    scores, projection = 2 * 3 * 9, 9 * 5 * 14
    assert forward.get_total_flops() == 2 * scores * (4 + 3) + 2 * projection
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() == 2 * scores * (3 * 4 + 2 * 3) + 2 * 3 * projection


@pytest.mark.parametrize("eps", [-1.0, float("nan"), "small", 10**400], ids=["negative", "nan", "text", "huge"])
def test_a_norm_that_is_none(eps: Any) -> None:
    query, inputs, *weights = _calls()
    with pytest.raises(ValueError, match=r"^context_norm\[2\]: got"):
        ck.projected_attention_state(query, inputs, *weights, context_norm=(torch.ones(5), torch.ones(5), eps))
    with pytest.raises(TypeError, match=r"^context_norm: got a Tensor"):
        ck.projected_attention_state(query, inputs, *weights, context_norm=torch.ones(5))  # type: ignore[arg-type]


def test_bad_shapes_are_named() -> None:
    query, inputs, key_weight, value_weight = _calls()
    bad = {
        "query": (query[:0], inputs, key_weight, value_weight),
        "inputs": (query, inputs[..., :0], key_weight, value_weight),
        "key_weight": (query, inputs, key_weight[:-1], value_weight),
        "value_weight": (query, inputs, key_weight, value_weight[:-1]),
    }
    for name, arguments in bad.items():
        with pytest.raises(ValueError, match=rf"^{name}: got shape"):
            ck.projected_attention_state(*arguments)
    state = ck.empty_state(1, 2, 4, 3)
    with pytest.raises(ValueError, match=r"^state.out: got shape \(1, 2, 4, 3\), expected \(1, 2, 3, 3\)"):
        ck.projected_attention_state(query, inputs, key_weight, value_weight, state=state)
    with pytest.raises(ValueError, match=r"^cu_seqlens: got \[0, 100\]"):
        ck.projected_attention_state(query, inputs, key_weight, value_weight, cu_seqlens=torch.tensor([0, 100]))


def test_packed_rows_beyond_the_sets(impl: str) -> None:
    """Rows beyond the last set, which hold NaN, reach neither a result nor a gradient."""
    offsets, total = torch.tensor([0, 3, 40]), 40
    shapes = (2, 2, 3, 4), (1, 61, 6), (8, 6), (10, 6)
    q, x, *weights = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    buffer = x.detach().clone()
    buffer[:, total:] = math.nan
    sets = x.detach()[:, :total].requires_grad_()
    found = []
    for inputs in (buffer.requires_grad_(), sets):
        state = ck.projected_attention_state(q, inputs, *weights, cu_seqlens=offsets, impl=impl)
        found.append((*state, *torch.autograd.grad(state.out.sin().sum() + state.lse.sum(), (inputs, q, *weights))))
    ours, right = found
    assert not ours[2][:, total:].any()
    for a, b in zip((*ours[:2], ours[2][:, :total], *ours[3:]), right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_explain_says_which_can_run() -> None:
    found = {row.impl: row.usable for row in ck.explain("projected_attention_state", *_calls())}
    assert found["native"] and found["reference"] and list(found) == ["native", "triton", "reference"]
    query, inputs, *_ = _calls()
    wide = torch.randn(2 * 257, 5)
    row = ck.explain("projected_attention_state", query, inputs, torch.randn(8, 5), wide)[0]
    assert not row.usable and "keys are 4 wide, values 257" in row.reason

"""The fused layers under the suite that every operator inherits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import LAWS, Measured, OperatorSuite, oracles

Results = tuple[Tensor, ...]
EPS = 1e-5
HEADS = 3


class LayerSuite(OperatorSuite):
    """A layer whose weights make features of about the size of their inputs, like those of a network."""

    impls = ("reference", "native")
    repeatable = ("native",)
    outputs = ("y",)
    autocast = ("x",)

    def make(self, name: str, shape: tuple[int, ...], law: str) -> Tensor:
        if name.endswith("bias"):
            return 0.5 * torch.randn(shape)
        if name.endswith("norm_weight"):
            return 1 + 0.2 * torch.randn(shape)
        if not name.endswith("weight"):
            return LAWS[law](*shape)
        # Outliers in several matrices make gradients that float16 does not hold.
        law = "normal" if law == "one outlier" else law
        return LAWS[law](*shape) * shape[-1] ** -0.5

    def test_autocast(self, impl: str, cast: bool) -> None:
        """Under autocast all arguments are cast, and all gradients are in the arguments' dtypes."""
        self.autocast = tuple(self.arguments)
        super().test_autocast(impl, cast)


# ---- feed-forward


class TestGeglu(LayerSuite):
    """A feed-forward layer with all its parts: norm, biases, and a gate."""

    operator = "feed_forward_layer"
    arguments = {
        "x": "BRC",
        "expand_weight": "GC",
        "contract_weight": "CF",
        "expand_bias": "G",
        "contract_bias": "C",
        "norm_weight": "C",
        "norm_bias": "C",
    }
    extents = {"B": 2, "R": 33, "C": 16, "F": 24, "G": 48}
    small = {"R": 3, "C": 4, "F": 3, "G": 6}
    shapes = (
        {},
        {"R": 130, "C": 64, "F": 128, "G": 256},
        {"R": 5, "C": 17, "F": 3, "G": 6},
        {"R": 1, "C": 100, "F": 70, "G": 140},
    )
    empty = "BR"
    bits = ({"B": 3, "R": 128, "C": 64, "F": 128, "G": 256}, {"B": 5, "R": 7, "C": 17, "F": 33, "G": 66})
    many = {"B": 66_000, "R": 1, "C": 2, "F": 1, "G": 2}
    compilers = ("aot_eager", "inductor")
    accepted = ("x of a dimension too few",)
    activation, residual = "geglu", "input"

    def call(self, impl: str, norm_weight: Any = None, norm_bias: Any = None, **inputs: Any) -> Results:
        norm = None if norm_weight is None else (norm_weight, norm_bias, EPS)
        return (
            ck.feed_forward_layer(**inputs, norm=norm, activation=self.activation, residual=self.residual, impl=impl),
        )

    def oracle(self, **inputs: Any) -> Results:
        x, weight, bias = (inputs.get(name) for name in ("x", "norm_weight", "norm_bias"))
        rows = normed(x, weight, bias)
        hidden = F.linear(rows, inputs["expand_weight"], inputs.get("expand_bias"))
        if self.activation == "geglu":
            features, gate = hidden.chunk(2, -1)
            hidden = features * F.gelu(gate)
        else:
            hidden = getattr(F, self.activation)(hidden)
        return (
            (x if self.residual == "input" else rows)
            + F.linear(hidden, inputs["contract_weight"], inputs.get("contract_bias")),
        )


class TestNormedGeglu(TestGeglu):
    """A feed-forward layer with all its parts, and with norm(x) as the residual."""

    bits, many = TestGeglu.bits[1:], None
    compilers = ("eager", "aot_eager")
    residual = "normed"


class TestGelu(TestGeglu):
    """A feed-forward layer without a gate; its norm has no bias."""

    arguments = {"x": "BRC", "expand_weight": "FC", "contract_weight": "CF", "norm_weight": "C"}
    shapes = ({}, {"R": 130, "C": 64, "F": 128})
    laws = ("normal", "ten times")
    compilers = ("eager", "aot_eager")
    bits, many = (), None
    activation = "gelu"


class TestRelu(TestGeglu):
    """A feed-forward layer with matrices and nothing else."""

    arguments = {"x": "RC", "expand_weight": "FC", "contract_weight": "CF"}
    shapes = ({}, {"R": 130, "C": 64, "F": 128})
    laws = ("normal", "ten times")
    empty = "R"
    batch = ""
    compilers = ("eager", "aot_eager")
    bits, many = (), None
    activation = "relu"


# ---- attention


class TestAttentionLayer(LayerSuite):
    """Cross-attention with all its parts: two norms, four biases, a context of another width,
    values of another width, a mask."""

    operator = "attention_layer"
    arguments = {
        "x": "BLC",
        "context": "BNM",
        "query_weight": "KC",
        "key_weight": "KM",
        "value_weight": "VM",
        "output_weight": "CV",
        "query_bias": "K",
        "key_bias": "K",
        "value_bias": "V",
        "output_bias": "C",
        "norm_weight": "C",
        "norm_bias": "C",
        "context_norm_weight": "M",
        "context_norm_bias": "M",
    }
    extents = {"B": 2, "L": 5, "N": 133, "C": 12, "M": 10, "K": 8 * HEADS, "V": 4 * HEADS}
    small = {"L": 2, "N": 3, "C": 3, "M": 4, "K": 2 * HEADS, "V": HEADS}
    shapes = (
        {},
        {"L": 33, "N": 40, "C": 64, "M": 64, "K": 16 * HEADS, "V": 16 * HEADS},
        {"L": 130, "N": 7, "C": 17, "M": 5, "K": 5 * HEADS, "V": HEADS},
    )
    laws = ("normal", "ten times", "one outlier")  # where all keys are equal, no gradient gets through the softmax
    empty = "BLN"
    mask = "key_padding_mask"
    bits = (
        {"B": 3, "L": 128, "N": 50, "C": 64, "M": 64, "K": 16 * HEADS, "V": 16 * HEADS},
        {"B": 5, "L": 7, "N": 300, "C": 17, "M": 9, "K": 5 * HEADS, "V": 7 * HEADS},
    )
    many = {"B": 66_000, "L": 1, "N": 2, "C": 2, "M": 1, "K": HEADS, "V": HEADS}
    compilers = ("aot_eager", "inductor")
    scale: float | None = None
    residual = "input"

    def call(self, impl: str, **inputs: Any) -> Results:
        for name in ("norm", "context_norm"):
            weight, bias = (inputs.pop(f"{name}_{part}", None) for part in ("weight", "bias"))
            inputs[name] = None if weight is None else (weight, bias, EPS)
        return (ck.attention_layer(**inputs, num_heads=HEADS, scale=self.scale, residual=self.residual, impl=impl),)

    def oracle(self, key_padding_mask: Tensor | None = None, **inputs: Any) -> Results:
        query, key, value = self.heads(key_padding_mask, **inputs)
        return self.leave(oracles.attention(query, key, value, key_padding_mask, scale=self.scale)[0], **inputs)

    def in_torch(self, **inputs: Any) -> Results:
        return self.leave(F.scaled_dot_product_attention(*self.heads(None, **inputs), scale=self.scale), **inputs)

    def score(self, inputs: dict[str, Tensor]) -> float:
        query, key, _ = self.heads(None, **inputs)
        largest = oracles.largest_score(query, key)
        return largest if self.scale is None else largest * self.scale * query.shape[-1] ** 0.5

    def is_bounded(self, name: str, is_gradient: bool, law: str) -> bool:
        """Leave out the gradient of the keys' bias, which vanishes:
        a number that is added to all logits does not change a softmax."""
        return not (is_gradient and name == "key_bias")

    def row_sizes(self, found: Measured) -> Tensor:
        """Measure gradients through the softmax by the terms that they add up,
        which cancel where a weight is nearly 1."""
        size = super().row_sizes(found)
        term = self.terms(found).get(found.name) if found.is_gradient else None
        return size if term is None else torch.maximum(size, oracles.share_of_terms(found.dtype) * term.norm(dim=-1))

    def terms(self, found: Measured) -> dict[str, Tensor]:
        """Return, for these gradients, the sums of the absolute values of their terms."""
        inputs = found.inputs
        query, key, value = self.heads(None, **inputs)
        unit = 1.0 if self.scale is None else self.scale * query.shape[-1] ** 0.5
        given = unit * query, key, value
        dout = (found.cotangents[0].double() @ inputs["output_weight"]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        terms = oracles.attention_terms(dout, *given, *oracles.attention(*given))
        dquery, dkey, dvalue = (term.transpose(1, 2).flatten(-2) for term in terms)
        own, other = (
            unit * dquery @ inputs["query_weight"].abs(),
            dkey @ inputs["key_weight"].abs() + dvalue @ inputs["value_weight"].abs(),
        )
        context, norms = (inputs["x"], "norm") if inputs.get("context") is None else (inputs["context"], "context_norm")
        weights, biases = ([inputs.get(f"{name}_{part}") for name in ("norm", norms)] for part in ("weight", "bias"))
        read, seen = (normed(*each).abs() for each in zip((inputs["x"], context), weights, biases, strict=True))
        found_terms = {
            "query_weight": torch.einsum("blk,blc->kc", unit * dquery, read),
            "key_weight": torch.einsum("bnk,bnc->kc", dkey, seen),
            "x": oracles.norm_terms(own + other if context is inputs["x"] else own, inputs["x"], weights[0], EPS)[0],
        }
        return found_terms | (
            {} if context is inputs["x"] else {"context": oracles.norm_terms(other, context, weights[1], EPS)[0]}
        )

    @staticmethod
    def heads(mask: Tensor | None, **inputs: Any) -> list[Tensor]:
        """Return the heads of query, key and value."""
        context, norms = (inputs["x"], "norm") if inputs.get("context") is None else (inputs["context"], "context_norm")
        if mask is not None:
            context = context.masked_fill(mask[..., None], 0.0)
        own, other = (
            normed(rows, inputs.get(f"{name}_weight"), inputs.get(f"{name}_bias"))
            for rows, name in ((inputs["x"], "norm"), (context, norms))
        )
        return [
            F.linear(rows, inputs[f"{part}_weight"], inputs.get(f"{part}_bias"))
            .unflatten(-1, (HEADS, -1))
            .transpose(1, 2)
            for part, rows in (("query", own), ("key", other), ("value", other))
        ]

    def leave(self, out: Tensor, **inputs: Any) -> Results:
        """Return the result of the layer from that of its heads."""
        rows, norm = inputs["x"], (inputs.get(f"norm_{part}") for part in ("weight", "bias"))
        rows = rows if self.residual == "input" else normed(rows, *norm)
        return (rows + F.linear(out.transpose(1, 2).flatten(-2), inputs["output_weight"], inputs.get("output_bias")),)


class TestSelfAttentionLayer(TestAttentionLayer):
    """Self-attention behind a norm, as in a constant memory block, at a scale of its own."""

    arguments = {
        "x": "BLC",
        "query_weight": "KC",
        "key_weight": "KC",
        "value_weight": "VC",
        "output_weight": "CV",
        "output_bias": "C",
        "norm_weight": "C",
        "norm_bias": "C",
    }
    shapes = ({}, {"L": 130, "C": 64, "K": 16 * HEADS, "V": 16 * HEADS})
    empty = "BL"
    mask = None
    compilers = ("eager", "aot_eager")
    many = None
    scale = 0.3


class TestNormedAttentionLayer(TestAttentionLayer):
    """Cross-attention with all its parts and norm(x) as the residual, as in the authors' constant memory block."""

    bits, many = TestAttentionLayer.bits[1:], None
    compilers = ("eager", "aot_eager")
    residual = "normed"


class TestNormedSelfAttentionLayer(TestSelfAttentionLayer):
    """Self-attention with norm(x) as the residual."""

    bits = TestAttentionLayer.bits[1:]
    residual = "normed"


class TestBareAttentionLayer(TestAttentionLayer):
    """Cross-attention with matrices and nothing else."""

    arguments = {
        "x": "BLC",
        "context": "BNM",
        "query_weight": "KC",
        "key_weight": "KM",
        "value_weight": "VM",
        "output_weight": "CV",
    }
    shapes = ({},)
    compilers = ("eager", "aot_eager")
    bits, many = (), None

    def row_sizes(self, found: Measured) -> Tensor:
        """Measure gradients by the terms that they add up,
        which cancel where no norm keeps logits small and softmax has one weight."""
        size, inputs = super().row_sizes(found), found.inputs
        heads = self.heads(None, **inputs)
        dout = (found.cotangents[0].double() @ inputs["output_weight"]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        parts = (
            t.transpose(1, 2).flatten(-2) for t in oracles.attention_terms(dout, *heads, *oracles.attention(*heads))
        )
        terms = dict(zip(("query", "key", "value"), parts, strict=True))
        made_of = {"x": ("query",), "context": ("key", "value")}
        if not found.is_gradient or found.name == "output_weight":
            return size
        if found.name in made_of:
            term = sum(terms[part] @ inputs[f"{part}_weight"].abs() for part in made_of[found.name])
        else:
            part = found.name.removesuffix("_weight")
            rows = inputs["x" if part == "query" else "context"]
            term = (terms[part].mT @ rows.abs()).sum(0)
        return size.maximum(0.05 * torch.as_tensor(term).norm(dim=-1))


def normed(rows: Any, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return rows if weight is None else F.layer_norm(rows, rows.shape[-1:], weight, bias, EPS)

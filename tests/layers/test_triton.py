"""The Triton kernels of layers in Triton's interpreter. tests/test_interpreter.py runs this file with
TRITON_INTERPRET=1.

The interpreter checks no bounds: inputs lie between margins of NaN, results between margins that must stay as they
were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels import nn
from cmab_kernels.attention.projected.triton import launch
from cmab_kernels.attention.projected.triton.shares import added
from cmab_kernels.layers import triton as kernels
from cmab_kernels.layers.contract import (
    AttentionLayer,
    AttentionLayerBackward,
    FeedForwardLayer,
    FeedForwardLayerBackward,
)
from cmab_kernels.layers.reference import RESIDUALS, attention_layer_reference, feed_forward_reference
from cmab_kernels.runtime.triton_launch import Kernel
from cmab_kernels.testing import between_margins, guarded_results, row_error

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3}
EPS = 1e-3
both_forms = pytest.mark.parametrize("residual", RESIDUALS)


@pytest.fixture(autouse=True)
def margins() -> Iterator[None]:
    """Put results between margins of memory, and check at the end of the test that no kernel wrote to the margins."""
    with guarded_results():
        yield


def check(
    y: Tensor,
    grads: Sequence[Tensor],
    definition: Callable[..., Tensor],
    tensors: Sequence[Any],
    dy: Tensor,
    needs: Any,
) -> None:
    """Check each row of a result, and each gradient as a whole, against those of the definition in float64."""
    tolerance = TOLERANCE[y.dtype]
    wide = [None if t is None else t.double().requires_grad_() for t in tensors]
    right = definition(*wide)
    wanted = torch.autograd.grad(right, [t for t in wide if t is not None], dy.double(), materialize_grads=True)
    left = iter(wanted)
    assert y.is_contiguous() and (row_error(y, right.detach()) <= tolerance).all(), "y"
    for number, (ours, like, need) in enumerate(zip(grads, tensors, needs, strict=True)):
        expected = None if like is None else next(left)
        if expected is None or not need:
            assert ours.shape == (0,)
            continue
        assert ours.shape == like.shape and ours.dtype == like.dtype and ours.is_contiguous()
        size = max(float(expected.norm()), 0.1 * float(dy.norm()))  # the gradient of the keys' bias vanishes
        assert float((ours.double() - expected).norm()) <= 4 * tolerance * size, f"gradient {number}"


# ---- feed-forward


def feed_forward(
    rows: int = 5,
    columns: int = 12,
    features: int = 24,
    activation: str = "geglu",
    dtype: torch.dtype = torch.float32,
    absent: str = "",
) -> list[Any]:
    """Return x, dy and the parameters; those that `absent` names are None."""
    made = 2 * features if activation == "geglu" else features
    shapes = {
        "norm": (columns,),
        "shift": (columns,),
        "expand": (made, columns),
        "bias": (made,),
        "contract": (columns, features),
    }
    parameters = {name: torch.randn(shape) / (columns**0.5 if len(shape) > 1 else 1) for name, shape in shapes.items()}
    parameters["last"] = torch.randn(columns)
    given = [None if name in absent.split() else between_margins(t.to(dtype)) for name, t in parameters.items()]
    return [torch.randn(rows, columns).to(dtype), between_margins(torch.randn(rows, columns).to(dtype)), *given]


def check_feed_forward(
    given: list[Any], activation: str, needs: Sequence[bool] = (True,) * 7, residual: str = "input"
) -> None:
    dy, *tensors = given
    settings = EPS, activation, residual
    y = kernels.feed_forward_layer(FeedForwardLayer(*tensors, *settings))
    grads = kernels.feed_forward_layer_backward(FeedForwardLayerBackward(dy, *tensors, *settings, tuple(needs)))
    check(y, grads, lambda *t: feed_forward_reference(*t, *settings), tensors, dy, needs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"activation": "gelu", "rows": 70, "columns": 8, "features": 40, "absent": "shift"},
        {"activation": "relu", "columns": 17, "features": 3, "absent": "norm shift bias last"},
        {"rows": 3, "columns": 72, "features": 33, "absent": "bias"},
    ],
    ids=["plain", "gelu", "relu", "pieces"],
)
@both_forms
def test_feed_forward(shape: dict[str, Any], dtype: torch.dtype, residual: str) -> None:
    check_feed_forward(feed_forward(**shape, dtype=dtype), shape.get("activation", "geglu"), residual=residual)


@both_forms
@pytest.mark.parametrize("needed", range(8))
def test_only_what_is_needed_of_a_feed_forward_layer(needed: int, residual: str) -> None:
    """The gradient of one argument alone, and of none."""
    check_feed_forward(feed_forward(), "geglu", [i == needed for i in range(7)], residual)


def test_many_shares() -> None:
    """More shares than a program reads at a time, and more gradients than one launch adds up."""
    x = torch.empty(1)
    shares = [None, *(between_margins(torch.randn(count, 5, 17)) for count in (1, 70, 33, 0, 32, 2, 5))]
    for ours, each in zip(added(shares, x), shares, strict=True):
        assert (ours is None) == (each is None)
        if each is not None:
            torch.testing.assert_close(ours, each.double().sum(0).float(), rtol=1e-5, atol=1e-5)


def test_more_rows_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program takes several blocks of rows, and the last is not full."""
    monkeypatch.setattr(launch, "MOST_PROGRAMS", 4)
    check_feed_forward(feed_forward(rows=3 * 32 + 1, features=5), "geglu")


@pytest.mark.parametrize("activation", ["geglu", "gelu", "relu"])
def test_a_row_that_is_not_a_number_stays_alone(activation: str) -> None:
    """A NaN or an infinity stays in its row. A norm without eps gets a constant row, and rows that do not exist."""
    _, x, *parameters = feed_forward(rows=5, activation=activation)
    clean = kernels.feed_forward_layer(FeedForwardLayer(x, *parameters, 0.0, activation, "input"))
    x[1, 3], x[2, 0], x[4] = math.nan, math.inf, 2.0
    spoilt = kernels.feed_forward_layer(FeedForwardLayer(x, *parameters, 0.0, activation, "input"))
    assert torch.equal(spoilt[[0, 3]], clean[[0, 3]]) and spoilt[[1, 2]].isnan().any(1).all()
    x[[1, 2]], x[4] = 1.0 * torch.arange(12), torch.arange(12.0)
    grads = kernels.feed_forward_layer_backward(
        FeedForwardLayerBackward(torch.randn(5, 12), x, *parameters, 0.0, activation, "input", (True,) * 7)
    )
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("bias", [math.inf, -math.inf])
def test_an_infinite_feature_sends_back_a_number(bias: float) -> None:
    dy, x, *parameters = feed_forward(activation="gelu")
    parameters[3][7] = bias
    grads = kernels.feed_forward_layer_backward(
        FeedForwardLayerBackward(dy, x, *parameters, EPS, "gelu", "input", (True,) * 7)
    )
    assert grads[0].isfinite().all() and grads[3].isfinite().all()


# ---- attention


def attention(
    batch: int = 2,
    latents: int = 5,
    rows: int | None = 21,
    columns: int = 12,
    others: int = 10,
    heads: int = 3,
    width: int = 8,
    value_width: int = 7,
    mask: bool = False,
    absent: str = "",
    dtype: torch.dtype = torch.float32,
    residual: str = "input",
) -> tuple[list[Any], Any, tuple[Any, ...]]:
    """Return dy, x, the context and the parameters; the mask; and the settings. Without `rows` x is its own context."""
    others, seen = (columns, latents) if rows is None else (others, rows)
    shapes: dict[str, tuple[int, ...]] = {
        "norm": (columns,),
        "shift": (columns,),
        "other_norm": (others,),
        "other_shift": (others,),
    }
    for name, made, read in (("query", width, columns), ("key", width, others), ("value", value_width, others)):
        shapes |= {name: (heads * made, read), f"{name}_bias": (heads * made,)}
    shapes |= {"output": (columns, heads * value_width), "output_bias": (columns,)}
    absent = absent if rows is not None else f"{absent} other_norm other_shift"
    parameters = {
        name: torch.randn(shape) / (shape[-1] ** 0.5 if len(shape) > 1 else 1) for name, shape in shapes.items()
    }
    given = [None if name in absent.split() else between_margins(t.to(dtype)) for name, t in parameters.items()]
    x = between_margins(torch.randn(batch, latents, columns).to(dtype))
    context = None if rows is None else between_margins(torch.randn(batch, rows, others).to(dtype))
    ignore = torch.rand(batch, seen) < 0.3 if mask else None
    return [torch.randn(x.shape).to(dtype), x, context, *given], ignore, (heads, width**-0.5, EPS, 2 * EPS, residual)


def check_attention(
    given: list[Any], mask: Any, settings: tuple[Any, ...], needs: Sequence[bool] = (True,) * 14
) -> None:
    dy, x, context, *parameters = given
    y, *kept = kernels.attention_layer(AttentionLayer(x, context, mask, *parameters, *settings, True))
    assert all(
        t.shape == (0,)
        for t in kernels.attention_layer(AttentionLayer(x, context, mask, *parameters, *settings, False))[1:]
    )
    grads = kernels.attention_layer_backward(
        AttentionLayerBackward(dy, x, context, mask, *parameters, *kept, *settings, tuple(needs))
    )

    def definition(x: Tensor, context: Any, *parameters: Any) -> Tensor:
        return attention_layer_reference(x, context, mask, *parameters, *settings, False)[0]

    check(y, grads, definition, [x, context, *parameters], dy, needs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        {"mask": True},
        {"latents": 66, "batch": 1, "rows": 3, "heads": 2, "width": 3, "value_width": 3, "absent": "shift query_bias"},
        {"latents": 2, "batch": 1, "rows": 3, "columns": 68, "others": 66, "heads": 2, "width": 9, "value_width": 8},
        {"rows": None, "absent": "query_bias key_bias value_bias"},
        {"rows": None, "mask": True, "absent": "shift"},
        {"absent": "norm shift other_norm other_shift query_bias key_bias value_bias output_bias", "heads": 1},
    ],
    ids=["mask", "blocks", "pieces", "own", "own mask", "bare"],
)
@both_forms
def test_attention(shape: dict[str, Any], dtype: torch.dtype, residual: str) -> None:
    check_attention(*attention(**shape, dtype=dtype, residual=residual))


@pytest.mark.parametrize(
    "rows, needed", [*((9, i) for i in range(0, 15, 2)), (9, 1), (9, 13), *((None, i) for i in (0, 2, 8))]
)
@both_forms
def test_only_what_is_needed_of_an_attention_layer(rows: int | None, needed: int, residual: str) -> None:
    """The gradient of one argument alone, and of none."""
    check_attention(*attention(batch=1, rows=rows, residual=residual), [i == needed for i in range(14)])


def test_float64() -> None:
    check_attention(*attention(batch=1, mask=True, dtype=torch.float64))
    check_feed_forward(feed_forward(dtype=torch.float64), "geglu")


@pytest.mark.parametrize("emptied", ["batch", "latents", "rows"])
def test_nothing(emptied: str) -> None:
    check_attention(*attention(**{emptied: 0}))
    check_feed_forward(feed_forward(rows=0), "geglu")


def test_ignored_rows_do_not_matter() -> None:
    """Masked rows are NaN, which reaches no result and no gradient."""
    (dy, x, context, *parameters), mask, settings = attention(rows=9, mask=True)
    found = []
    for ignored in (0.5, math.nan):
        seen = context.masked_fill(mask[..., None], ignored)
        y, *kept = kernels.attention_layer(AttentionLayer(x, seen, mask, *parameters, *settings, True))
        found.append(
            (
                y,
                *kernels.attention_layer_backward(
                    AttentionLayerBackward(dy, x, seen, mask, *parameters, *kept, *settings, (True,) * 14)
                ),
            )
        )
    assert mask.any() and all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and not found[1][2][mask].any()


def test_an_ignored_row_is_a_query_of_its_own() -> None:
    """A NaN in an ignored row of x makes the result of this row NaN, and changes no other result."""
    (_, x, _, *parameters), mask, settings = attention(rows=None, latents=9, mask=True)
    clean, spoilt = (
        kernels.attention_layer(
            AttentionLayer(x.masked_fill(mask[..., None], ignored), None, mask, *parameters, *settings, False)
        )[0]
        for ignored in (0.5, math.nan)
    )
    assert mask.any() and torch.equal(clean[~mask], spoilt[~mask]) and spoilt[mask].isnan().all()


# ---- promises


@pytest.mark.usefixtures("_sums_in_one_order")
def test_same_bits_again_and_alone() -> None:
    """The bits are the same on every run, and for a batch element by itself."""
    given, mask, settings = attention(batch=2, rows=9, mask=True)
    dy, x, context, *parameters = given
    whole = kernels.attention_layer(AttentionLayer(x, context, mask, *parameters, *settings, True))
    grads = kernels.attention_layer_backward(
        AttentionLayerBackward(dy, x, context, mask, *parameters, *whole[1:], *settings, (True,) * 14)
    )
    for i in range(2):
        one = slice(i, i + 1)
        alone = kernels.attention_layer(AttentionLayer(x[one], context[one], mask[one], *parameters, *settings, True))
        assert all(torch.equal(a, b[one]) for a, b in zip(alone, whole, strict=True))
        dx, dcontext, *_ = kernels.attention_layer_backward(
            AttentionLayerBackward(
                dy[one], x[one], context[one], mask[one], *parameters, *alone[1:], *settings, (True,) * 14
            )
        )
        assert torch.equal(dx, grads[0][one]) and torch.equal(dcontext, grads[1][one])


@pytest.mark.parametrize("layout", ["columns first", "step 2", "offset by 3"])
def test_layouts(layout: str) -> None:
    moved = {
        "columns first": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
        "step 2": lambda t: t.repeat_interleave(2, -1)[..., ::2],
        "offset by 3": lambda t: torch.cat([t.new_full((3,), math.nan), t.reshape(-1)])[3:].view(t.shape),
    }[layout]
    given, mask, settings = attention()
    check_attention([moved(t) for t in given], mask, settings)
    check_feed_forward([moved(t) for t in feed_forward()], "geglu")


@both_forms
def test_a_stack_of_these_kernels(residual: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack of blocks runs them with attention over projected inputs:
    no key of an input is written, in either pass."""
    monkeypatch.setattr(nn.CrossAttention, "_read_in_parts", None)
    module = nn.CMABStack(dim=8, num_latents=3, num_heads=2, depth=2, dtype=torch.float64, residual=residual)
    inputs, latents = torch.randn(1, 9, 8).double().requires_grad_(), torch.randn(2, 8).double()
    mask, ran, found = torch.arange(9)[None] == 4, set(), []
    plain = Kernel.__call__
    monkeypatch.setattr(Kernel, "__call__", lambda self, *a, **k: ran.add(self.__name__) or plain(self, *a, **k))
    for impl in ("triton", "reference"):
        with ck.use_impl(impl):
            y = module(inputs, latents, key_padding_mask=mask)
        found.append((y, *torch.autograd.grad(y.sin().sum(), (inputs, *module.parameters()))))
        assert ran >= {"_feed_forward_back", "_project_back", "_matrix_gradient", "_project_rows_back"}
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-11)


def test_second_derivatives() -> None:
    """Second derivatives come from the definition, whichever implementation computed the first ones."""
    dy, x, *parameters = (t.double() for t in feed_forward(rows=2, columns=3, features=2))
    norm, shift, expand, bias, contract, last = parameters
    x.requires_grad_()
    found = []
    for impl in ("triton", "reference"):
        y = ck.feed_forward_layer(
            x, expand, contract, expand_bias=bias, contract_bias=last, norm=(norm, shift, EPS), impl=impl
        )
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_what_is_refused() -> None:
    x, heads = torch.zeros(2, 3, 8), torch.zeros(2, 4, 8)
    assert kernels.unsupported(x, x, heads, heads) is None
    assert "at most 256 wide, and are 257 wide" in str(kernels.unsupported(torch.zeros(3, 257)))
    assert "at most 256 wide, and are 300 wide" in str(kernels.unsupported(x, torch.zeros(2, 3, 300), heads, heads))
    assert "heads are at most 256 wide, and are 258 wide" in str(
        kernels.unsupported(x, x, heads, torch.zeros(2, 258, 8))
    )
    assert "bfloat16" in str(kernels.unsupported(x.bfloat16()))

"""`nn.InformerEncoderLayer` is torch's encoder layer with Intention, on every path through which torch may call it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels.nn import InformerEncoderLayer, MultiheadIntention, MultiheadSigmaIntention

DIM, HEADS, HIDDEN, BATCH, LENGTH = 16, 2, 24, 3, 11
MASK = torch.arange(LENGTH) >= torch.tensor([[11], [7], [2]])  # different lengths, as nested tensors need
KINDS = ("intention", "sigma")


def made(**config: Any) -> InformerEncoderLayer:
    layer = InformerEncoderLayer(
        DIM, HEADS, HIDDEN, **{"dropout": 0.0, "batch_first": True, "dtype": torch.float64, **config}
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer


def source(**factory: Any) -> Tensor:
    return torch.randn(BATCH, LENGTH, DIM, **{"dtype": torch.float64, **factory})


def defined(layer: InformerEncoderLayer, src: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the layer of figure 1 of "On Layer Normalization in the Transformer Architecture" (Xiong et al., 2020),
    batch first."""

    def norm(module: torch.nn.LayerNorm, x: Tensor) -> Tensor:
        return F.layer_norm(x, (DIM,), module.weight, module.bias, module.eps)

    def attention(x: Tensor) -> Tensor:
        inner = copy.deepcopy(layer.self_attn)
        inner.batch_first = True
        return inner(x, x, x, mask, need_weights=False)[0]

    def feed_forward(x: Tensor) -> Tensor:
        return F.linear(
            layer.activation(F.linear(x, layer.linear1.weight, layer.linear1.bias)),
            layer.linear2.weight,
            layer.linear2.bias,
        )

    if layer.norm_first:
        src = src + attention(norm(layer.norm1, src))
        return src + feed_forward(norm(layer.norm2, src))
    src = norm(layer.norm1, src + attention(src))
    return norm(layer.norm2, src + feed_forward(src))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "config",
    [{}, {"norm_first": True}, {"bias": False, "activation": "gelu"}, {"activation": torch.tanh, "alpha": 0.2}],
)
@pytest.mark.parametrize("kind", KINDS)
def test_definition(kind: str, config: dict[str, Any], masked: bool, training: bool) -> None:
    """In eval mode without gradients, torch's layer runs a fused attention kernel; it must not bypass ours."""
    layer, src = made(kind=kind, **config).train(training), source()
    mask = MASK if masked else None
    with torch.set_grad_enabled(training):
        out = layer(src, src_key_padding_mask=mask)
    seen = ~MASK if masked else ...
    torch.testing.assert_close(out[seen], defined(layer, src, mask)[seen], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batched", [False, True])
def test_layouts(batched: bool) -> None:
    layer, src, mask = made(batch_first=False), source(), MASK
    expected = defined(layer, src, mask)
    src, mask, expected = (src, mask, expected) if batched else (src[1], mask[1], expected[1])
    out = (
        layer(src.transpose(0, 1), src_key_padding_mask=mask).transpose(0, 1)
        if batched
        else layer(src, src_key_padding_mask=mask)
    )
    torch.testing.assert_close(out[~mask], expected[~mask], rtol=1e-12, atol=1e-12)


def test_kinds() -> None:
    assert type(made().self_attn) is MultiheadIntention
    assert type(made(kind="sigma", scale=2.0).self_attn) is MultiheadSigmaIntention
    layer = made(alpha=0.5, scale=2.0, dropout=0.3)
    assert (layer.self_attn.fixed_alpha, layer.self_attn.scale, layer.self_attn.dropout, layer.dropout1.p) == (
        0.5,
        2.0,
        0.0,
        0.3,
    )
    with pytest.raises(ValueError, match=r"^kind: "):
        made(kind="attention")


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_in_torchs_encoder(kind: str, nested: bool, norm_first: bool) -> None:
    """The layer works in torch's encoder, even if the encoder is constructed for nested tensors: it warns and does not
    use them."""
    layer = made(kind=kind, norm_first=norm_first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
    assert ["use_nested_tensor is False" in str(each.message) for each in caught] == [True] * nested
    for each in encoder.layers:
        torch.nn.init.normal_(each.self_attn.in_proj_weight, std=0.5)
    src = source()
    expected = defined(encoder.layers[1], defined(encoder.layers[0], src, MASK), MASK)
    for training, grad in ((True, True), (False, True), (False, False)):
        with torch.set_grad_enabled(grad):
            out = encoder.train(training)(src, src_key_padding_mask=MASK)
        torch.testing.assert_close(out[~MASK], expected[~MASK], rtol=1e-12, atol=1e-12)


def test_same_seed_same_weights_as_torchs() -> None:
    torch.manual_seed(5)
    theirs = torch.nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN)
    torch.manual_seed(5)
    ours = InformerEncoderLayer(DIM, HEADS, HIDDEN)
    assert all(torch.equal(entry, ours.state_dict()[name]) for name, entry in theirs.state_dict().items())
    assert set(ours.state_dict()) == {*theirs.state_dict(), "self_attn.log_alpha"}
    made(dtype=torch.float32).load_state_dict(theirs.state_dict())
    other = InformerEncoderLayer(DIM, HEADS, HIDDEN)
    other.load_state_dict(ours.state_dict())
    assert ours.self_attn.log_alpha.requires_grad


def test_dropout_drops_in_training_alone() -> None:
    layer, src = made(dropout=0.5), source()
    assert not torch.allclose(layer(src), layer(src))
    assert torch.equal(layer.eval()(src), layer(src))


def test_padding_may_hold_anything() -> None:
    layer, src = made(), source()
    src[MASK] = torch.nan
    leaves = list(layer.parameters())
    ragged = layer(src, src_key_padding_mask=MASK)[~MASK]
    alone = torch.cat([layer(src[row : row + 1, :length])[0] for row, length in enumerate((11, 7, 2))])
    torch.testing.assert_close(ragged, alone, rtol=1e-10, atol=1e-10)
    pairs = zip(*(torch.autograd.grad(out.sin().sum(), leaves) for out in (ragged, alone)), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_compile(kind: str) -> None:
    encoder = torch.nn.TransformerEncoder(made(kind=kind), 2, enable_nested_tensor=False)
    src = source(requires_grad=True)
    leaves = [src, *encoder.parameters()]
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    results = [module(src, src_key_padding_mask=MASK)[~MASK] for module in (encoder, compiled)]
    gradients = [torch.autograd.grad(out.sin().sum(), leaves) for out in results]
    for mine, other in ((results[1], results[0]), *zip(*reversed(gradients), strict=True)):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision(dtype: torch.dtype, autocast: bool) -> None:
    layer, src = made(), source()
    exact = defined(layer, src, MASK)[~MASK]
    held = torch.float32 if autocast else dtype
    with torch.autocast("cpu", dtype, enabled=autocast):
        out = layer.to(held)(src.to(held), src_key_padding_mask=MASK)[~MASK]
    out.float().sum().backward()
    assert (out.double() - exact).pow(2).mean().sqrt() <= 8 * torch.finfo(dtype).eps * exact.pow(2).mean().sqrt()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


BAD: dict[str, tuple[type[Exception], str, tuple[Any, ...]]] = {
    "mask by query": (ValueError, "src_mask", (torch.zeros(2, 5, DIM), torch.zeros(5, 5))),
    "causal": (ValueError, "is_causal", (torch.zeros(2, 5, DIM), None, None, True)),
    "width": (ValueError, "src", (torch.zeros(2, 5, 3),)),
    "dtype": (TypeError, "src", (torch.zeros(2, 5, DIM).double(),)),
    "mask": (ValueError, "src_key_padding_mask", (torch.zeros(2, 5, DIM), None, torch.zeros(2, 4, dtype=torch.bool))),
    "added mask": (ValueError, "src_key_padding_mask", (torch.zeros(2, 5, DIM), None, torch.ones(2, 5))),
    "nested": (ValueError, "src", (torch.nested.nested_tensor([torch.zeros(5, DIM)]),)),
}


@pytest.mark.parametrize("error, name, arguments", BAD.values(), ids=BAD)
@pytest.mark.parametrize("norm_first", [False, True])
def test_errors_name_the_argument(
    norm_first: bool, error: type[Exception], name: str, arguments: tuple[Any, ...]
) -> None:
    with torch.no_grad(), pytest.raises(error, match=rf"^{name}: "):
        made(norm_first=norm_first, dtype=torch.float32).eval()(*arguments)

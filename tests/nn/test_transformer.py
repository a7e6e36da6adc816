"""The fused Transformer layers equal torch's, and report where torch's own code runs."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

import cmab_kernels
from cmab_kernels.nn import TransformerDecoderLayer, TransformerEncoderLayer, replace_modules
from cmab_kernels.nn.transformer import layers

WIDTH, HEADS, BATCH, TOKENS, MEMORY = 12, 2, 2, 7, 9
MAPPING = {nn.TransformerEncoderLayer: TransformerEncoderLayer, nn.TransformerDecoderLayer: TransformerDecoderLayer}
BOTH = [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer]
PADDING = torch.arange(TOKENS) >= torch.tensor([[7], [4]])
PADDED_MEMORY = torch.arange(MEMORY) >= torch.tensor([[3], [9]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64)


def pair(kind: type[nn.Module], **options: Any) -> tuple[Any, Any]:
    """Return torch's layer, in which every parameter affects the result, and our layer with its weights."""
    theirs = kind(WIDTH, HEADS, 2 * WIDTH, **{"dropout": 0.0, "batch_first": True, "dtype": torch.float64, **options})
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    holder = nn.ModuleList([copy.deepcopy(theirs)])
    assert replace_modules(holder, MAPPING) == 1
    return theirs, holder[0]


def inputs(layer: nn.Module, batch_first: bool = True, single: bool = False) -> tuple[Tensor, ...]:
    shapes = ((BATCH, TOKENS, WIDTH), (BATCH, MEMORY, WIDTH))[
        : 2 if isinstance(layer, nn.TransformerDecoderLayer) else 1
    ]
    made = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return tuple(
        (t[0] if single else t if batch_first else t.transpose(0, 1).contiguous()).requires_grad_() for t in made
    )


def close(ours: Any, theirs: Any) -> None:
    for mine, other in zip(tree_iter(ours), tree_iter(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12 * max(1.0, float(other.detach().abs().max())))


def same(ours: nn.Module, theirs: nn.Module, given: tuple[Tensor, ...], **options: Any) -> None:
    """Assert equal results and equal gradients of all inputs and parameters."""
    found = []
    for layer in (ours, theirs):
        result = layer(*given, **options)
        found.append((result, torch.autograd.grad(result.sin().sum(), [*given, *layer.parameters()])))
    close(*found)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the operators that are called from now on."""
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Tensor]:
        operator = getattr(cmab_kernels, name)
        return lambda *a, **k: calls.append(name) or operator(*a, **k)  # type: ignore[func-returns-value]

    for name in ("attention_layer", "feed_forward_layer"):
        monkeypatch.setattr(layers, name, counted(name))
    return calls


OPTIONS = [
    {"norm_first": norm_first, "activation": activation, "batch_first": batch_first, "bias": bias}
    for norm_first, activation, batch_first, bias in itertools.product(
        [False, True], ["relu", "gelu"], [False, True], [False, True]
    )
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("kind", BOTH)
def test_results_and_gradients_are_those_of_torch(
    kind: type[nn.Module], options: dict[str, Any], operators: list[str]
) -> None:
    theirs, ours = pair(kind, **options)
    same(ours, theirs, inputs(theirs, options["batch_first"]))
    assert operators == ["attention_layer"] * (1 if kind is BOTH[0] else 2) + ["feed_forward_layer"]
    same(ours, theirs, inputs(theirs, single=True))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("kind", BOTH)
def test_padding(kind: type[nn.Module], additive: bool, batch_first: bool, operators: list[str]) -> None:
    theirs, ours = pair(kind, batch_first=batch_first, norm_first=True)
    names = ("src_key_padding_mask",) if kind is BOTH[0] else ("tgt_key_padding_mask", "memory_key_padding_mask")
    masks: tuple[Tensor, ...] = (PADDING, PADDED_MEMORY)
    if additive:
        masks = tuple(torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf) for mask in masks)
    same(ours, theirs, inputs(theirs, batch_first), **dict(zip(names, masks, strict=False)))
    assert operators[-1] == "feed_forward_layer"


@pytest.mark.parametrize("layout", ["step 3", "expanded"])
def test_masks_of_any_layout(layout: str) -> None:
    """Masks may have any layout, also if a single batch element or a single key makes a view where torch usually
    copies."""
    theirs, ours = pair(nn.TransformerEncoderLayer, norm_first=True)
    (x,) = inputs(theirs)
    apart = PADDING[1:, :, None].expand(1, TOKENS, 3).clone()[..., 0]
    mask = apart if layout == "step 3" else torch.zeros(1, 1, dtype=torch.bool).expand(1, TOKENS)
    same(ours, theirs, (x[:1].detach().requires_grad_(),), src_key_padding_mask=mask)


@pytest.mark.parametrize("training", [False, True])
def test_whole_transformers(training: bool, operators: list[str]) -> None:
    """A model with torch's layers keeps its results, with padding, and with a causal mask in the decoder, where torch
    runs the self-attention."""
    model = nn.Transformer(WIDTH, HEADS, 2, 2, 24, 0.0, batch_first=True, dtype=torch.float64).train(training)
    source, target = torch.randn(BATCH, MEMORY, WIDTH).double(), torch.randn(BATCH, TOKENS, WIDTH).double()
    options = {"src_key_padding_mask": PADDED_MEMORY, "memory_key_padding_mask": PADDED_MEMORY, "tgt_mask": CAUSAL}
    parameters = list(model.parameters())
    found = []
    for replaced in (0, 4):
        if replaced:
            assert replace_modules(model, MAPPING) == replaced
            assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        result = model(source, target, **options)
        found.append((result, torch.autograd.grad(result.sin().sum(), parameters)))
    close(*found)
    assert (operators.count("attention_layer"), operators.count("feed_forward_layer")) == (4, 4)
    with torch.no_grad():  # torch may make nested tensors of padded inputs here, which its own layers read
        close(model.eval()(source, target, **options), found[0][0])


def test_compiled() -> None:
    theirs, ours = pair(nn.TransformerEncoderLayer, norm_first=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    same(compiled, theirs, inputs(theirs), src_key_padding_mask=PADDING)


def with_hook(layer: Any, name: str, part: nn.Module) -> None:
    part.register_forward_hook(lambda _module, _given, result: 2 * result)
    setattr(layer, name, part)


def twice(module: Any, name: str) -> None:
    """Assign a method that returns twice the result of the module's own."""
    own = getattr(module, name)
    setattr(module, name, lambda x: 2 * own(x))


REASONS: dict[str, tuple[str, Callable[[Any], Any], dict[str, Any]]] = {
    "an attention mask": ("no attention mask", lambda layer: layer, {"src_mask": CAUSAL, "is_causal": True}),
    "an additive mask": (
        "is a float mask that may be added",
        lambda layer: layer,
        {"src_key_padding_mask": -1.0 * PADDING.double()},
    ),
    "an activation": ("neither relu nor gelu", lambda layer: setattr(layer, "activation", torch.tanh), {}),
    "gelu by tanh": ("neither relu nor gelu", lambda layer: setattr(layer, "activation", nn.GELU("tanh")), {}),
    "a hook": (
        "feed-forward network was changed",
        lambda layer: layer.linear1.register_forward_hook(lambda m, i, o: 2 * o),
        {},
    ),
    "a hook of the norm": (
        "attention was changed",
        lambda layer: layer.norm1.register_forward_hook(lambda m, i, o: 2 * o),
        {},
    ),
    "a hook of a dropout": (
        "a dropout module was changed",
        lambda layer: layer.dropout1.register_forward_hook(lambda m, i, o: 2 * o),
        {},
    ),
    "another dropout": ("a dropout module was changed", lambda layer: setattr(layer, "dropout2", nn.Hardtanh()), {}),
    "a hook of the activation": (
        "feed-forward network was changed",
        lambda layer: with_hook(layer, "activation", nn.ReLU()),
        {},
    ),
    "a norm without weights": (
        "attention was changed",
        lambda layer: setattr(layer, "norm1", nn.LayerNorm(WIDTH, elementwise_affine=False)),
        {},
    ),
    "a forward": ("feed-forward network was changed", lambda layer: twice(layer.linear1, "forward"), {}),
    "a block": ("a subclass overrides a block", lambda layer: twice(layer, "_ff_block"), {}),
    "a hook of the output": (
        "feed-forward network was changed",
        lambda layer: layer.norm2.register_forward_hook(lambda m, i, o: 2 * o),
        {},
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_torchs_own_code_runs_with_a_reason(name: str, operators: list[str]) -> None:
    reason, change, options = REASONS[name]
    theirs, ours = pair(nn.TransformerEncoderLayer)
    given = inputs(theirs)
    assert ours.why_torch(*given) is None
    for layer in (theirs, ours):
        change(layer)
    assert reason in ours.why_torch(*given, **options)
    same(ours, theirs, given, **options)
    assert not operators


def test_norms_may_be_kept_in_float32(operators: list[str]) -> None:
    theirs, ours = pair(nn.TransformerEncoderLayer, dtype=torch.bfloat16, norm_first=True)
    for layer in (theirs, ours):
        layer.norm1.float()
    given = inputs(theirs)[0].bfloat16()
    assert torch.equal(ours(given), theirs(given)) and "several dtypes" in ours.why_torch(given) and not operators


class Mean(nn.Module):
    """An attention with torch's arguments, but without its attributes."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, None]:
        return query + value.mean(1, keepdim=True), None


@pytest.mark.parametrize("kind", BOTH)
def test_an_attention_of_another_kind_is_called(kind: type[nn.Module], operators: list[str]) -> None:
    theirs, ours = pair(kind)
    for layer in (theirs.train(), ours.train()):
        layer.self_attn = Mean()
    same(ours, theirs, inputs(theirs))
    assert "attention was changed" in ours.why_torch(*inputs(ours))
    assert operators == (["attention_layer", "feed_forward_layer"] if kind is nn.TransformerDecoderLayer else [])


class Doubled(nn.Linear):
    """An adapter replaces a projection; code that reads only the weights of the projection lacks the adapter's
    factor."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class CenteredNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - 1


def _feed_twice(self: Any, x: Tensor) -> Tensor:
    return 2 * nn.TransformerEncoderLayer._ff_block(self, x)


ADAPTERS = {
    "linear1": lambda layer: setattr(layer, "linear1", Doubled(8, 16)),
    "linear2": lambda layer: setattr(layer, "linear2", Doubled(16, 8)),
    "norm1": lambda layer: setattr(layer, "norm1", CenteredNorm(8)),
    "forward": lambda layer: setattr(layer.linear1, "forward", lambda x: torch.sin(x).repeat(1, 1, 2)),
    "attention": lambda layer: setattr(layer, "self_attn", Mean()),
    "block": lambda layer: setattr(layer, "_ff_block", types.MethodType(_feed_twice, layer)),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_called_in_evaluation(name: str, masked: bool) -> None:
    """torch's fused layer, which torch prefers without gradients, reads the weights of its parts and calls none of
    them."""
    layer, x = TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).eval(), torch.randn(2, 5, 8)
    ADAPTERS[name](layer)
    mask = torch.zeros(5, 5).fill_diagonal_(-math.inf) if masked else None
    with_gradients = layer(x, src_mask=mask)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, src_mask=mask), with_gradients.detach())


ADDED = torch.tensor([[0.0, 0.0, -1.0, -2.0, 0.0], [0.0, -3.0, 0.0, 0.0, 1.0], [-1.0, -2.0, -3.0, -4.0, -5.0]])
SLOPES = -(torch.arange(5)[:, None] - torch.arange(5)).abs() / 2
FLOAT_MASKS: dict[str, dict[str, Tensor]] = {
    "of padding": {"src_key_padding_mask": ADDED},
    "ALiBi": {"src_mask": SLOPES},
    "ALiBi of each head": {"src_mask": torch.cat([SLOPES, SLOPES / 16] * 3).view(6, 5, 5)},
    "without a 0": {"src_mask": SLOPES - 1},
    "both": {"src_mask": SLOPES, "src_key_padding_mask": ADDED},
    "ALiBi and a bool mask": {"src_mask": SLOPES, "src_key_padding_mask": torch.arange(5).expand(3, 5) > 3},
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", FLOAT_MASKS)
def test_float_masks_are_added_in_evaluation(name: str, compiled: bool) -> None:
    """torch's fused layer, which torch prefers without gradients, would ignore keys whose number is not 0, and add
    nothing."""
    layer, x, masks = TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), torch.randn(3, 5, 8), FLOAT_MASKS[name]
    with_gradients = layer(x, **masks).detach()
    run = torch.compile(layer.eval(), backend="eager") if compiled else layer.eval()
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    with torch.no_grad():
        torch.testing.assert_close(run(x, **masks), with_gradients)
        masks = {kind.replace("src_mask", "mask"): mask for kind, mask in masks.items()}
        torch.testing.assert_close(encoder(x, **masks), with_gradients)


def test_a_float_mask_of_nested_features_is_refused() -> None:
    layer = TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).eval()
    nested = torch.nested.as_nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
    with torch.no_grad(), pytest.raises((AssertionError, RuntimeError)):
        layer(nested, src_key_padding_mask=torch.tensor([[0.0, 0.0, 0.0, -1.0, -1.0], [0.0] * 5]))


def test_dropout_autocast_and_missing_kernels(operators: list[str]) -> None:
    _, ours = pair(nn.TransformerEncoderLayer, dropout=0.1)
    given = inputs(ours)
    assert ours.train().why_torch(*given) == "dropout is on" and ours.eval().why_torch(*given) is None
    with cmab_kernels.use_impl("reference"):
        assert "no kernel" in ours.why_torch(*given)
        ours(*given)
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in ours.why_torch(given[0].float())
    ours.train()(*given)
    assert not operators
    ours.eval()(*given)
    assert operators


@pytest.mark.parametrize("part", ["dropout1", "dropout", "self_attn"])
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_a_dropout_that_is_left_on_drops(kind: type[nn.Module], part: str) -> None:
    """Monte Carlo dropout needs this in evaluation: each part has its own mode."""
    theirs, ours = pair(kind, dropout=0.5)
    for layer in (theirs.eval(), ours.eval()):
        layer.get_submodule(part).train()
    given = inputs(ours)
    assert not torch.equal(ours(*given), ours(*given))
    outs = []
    for layer in (theirs, ours):
        torch.manual_seed(0)
        outs.append(layer(*given))
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_a_copy_keeps_an_activation_that_is_a_module(kind: type[nn.Module]) -> None:
    _, ours = pair(kind, activation=nn.GELU())
    given = inputs(ours)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(copied(*given), ours(*given))


def test_causal_decoder(operators: list[str]) -> None:
    for norm_first in (False, True):
        operators.clear()
        theirs, ours = pair(nn.TransformerDecoderLayer, norm_first=norm_first)
        same(ours, theirs, inputs(theirs), tgt_mask=CAUSAL, tgt_is_causal=True)
        assert operators == ["attention_layer", "feed_forward_layer"]
        same(ours, theirs, inputs(theirs), memory_mask=torch.zeros(TOKENS, MEMORY).bool())
        assert operators[2:] == ["attention_layer", "feed_forward_layer"]


def test_a_decoder_says_which_parts_are_torchs() -> None:
    _, ours = pair(nn.TransformerDecoderLayer)
    given = inputs(ours)
    assert ours.why_torch(*given) is None
    assert (
        ours.why_torch(*given, tgt_mask=CAUSAL)
        == "self-attention: the operator has key padding masks, but no attention mask"
    )
    ours.activation = torch.tanh
    assert "cross-attention: the operator has" in ours.why_torch(*given, memory_is_causal=True)
    assert "; feed-forward: the activation is" in ours.why_torch(*given, memory_is_causal=True)
    with cmab_kernels.use_impl("reference"):
        assert ours.why_torch(given[0].float(), given[1]).startswith("self-attention: no kernel")


def test_wrong_shapes_are_named() -> None:
    _, ours = pair(nn.TransformerDecoderLayer)
    target, memory = inputs(ours)
    for name, given in {"tgt": (target[..., :3], memory), "memory": (target, memory[..., :3])}.items():
        with pytest.raises(ValueError, match=rf"^{name}: got shape"):
            ours(*given)
    with pytest.raises(TypeError, match=r"^memory: got torch\.float32"):
        ours(target, memory.float())
    with pytest.raises(ValueError, match=r"^memory: got shape .*, expected \(B, N, C\) with B = 2"):
        ours(target, memory[:1])
    for name in ("memory_key_padding_mask", "tgt_key_padding_mask"):
        with pytest.raises(TypeError, match=rf"^{name}: got a list, expected a torch\.Tensor of bool"):
            ours(target, memory, **{name: [True]})
    with pytest.raises(TypeError, match=r"^tgt: got torch\.int32, expected a floating torch\.Tensor"):
        ours(target.int(), memory)
    for name, mask in {"memory_key_padding_mask": PADDING, "tgt_key_padding_mask": PADDING[:, 1:]}.items():
        with pytest.raises(ValueError, match=rf"^{name}: got shape"):
            ours(target, memory, **{name: mask})
    with pytest.raises(TypeError, match=r"^tgt_key_padding_mask: got torch\.int64"):
        ours(target, memory, tgt_key_padding_mask=PADDING.long())
    with pytest.raises(TypeError, match=r"^memory: got None, expected a torch\.Tensor"):
        ours(target, None)
    _, encoder = pair(nn.TransformerEncoderLayer)
    with pytest.raises(TypeError, match=r"^src: got a ndarray, expected a torch\.Tensor"):
        encoder(target.detach().numpy())
    for training in (True, False):
        with (
            torch.set_grad_enabled(training),
            pytest.raises(TypeError, match=r"^src: got torch\.int32, expected a floating"),
        ):
            encoder.train(training)(target.int())
    with pytest.raises(TypeError, match=r"^src_key_padding_mask: got a list, expected a torch\.Tensor of bool"):
        encoder(target, src_key_padding_mask=[True])
    with pytest.raises(ValueError, match=r"^src_key_padding_mask: got shape"):
        encoder(target, src_key_padding_mask=PADDING[:1])

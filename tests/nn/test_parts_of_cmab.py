"""A wrapper or a replacement of a part of an `nn.CMAB` has its effect; parts may differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize
from torch import Tensor

import cmab_kernels
from cmab_kernels.nn import CMAB, AttentionStream
from cmab_kernels.nn.cmab import layers

from .cmab_cases import BATCH, BLOCK, DIM, HEADS, INPUTS, block, close, definition, points

PARTS = ["compress.cross_attention.query", "retrieve.self_feed_forward.expand", "retrieve.self_attention.value"]
PARTS += ["compress.cross_attention.key", "retrieve.cross_attention.output"]


class Doubled(torch.nn.Linear):
    """A layer with its own forward method, as an adapter has."""

    def forward(self, features: Tensor) -> Tensor:
        return 2 * super().forward(features)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("how", ["a hook", "a parametrization", "a subclass", "a forward", "an adapter"])
def test_a_part_that_does_more_is_called(name: str, how: str) -> None:
    """A wrapper or a replacement of a part of a layer has its effect."""
    module, (inputs, latents) = block(), points()
    part = module.get_submodule(name)
    weights = {
        key: p.detach() * (2 if key in (f"{name}.weight", f"{name}.bias") else 1)
        for key, p in module.named_parameters()
    }
    if how == "a hook":
        part.register_forward_hook(lambda _module, _given, result: 2 * result)
    elif how == "a parametrization":
        for parameter, _ in [*part.named_parameters()]:
            torch.nn.utils.parametrize.register_parametrization(part, parameter, Double())
    elif how == "a forward":  # assigned in the way of accelerate
        forward = part.forward
        part.forward = lambda features: 2 * forward(features)
    elif how == "an adapter":  # without a weight of its own, like quantised layers
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, torch.nn.Sequential(part, Double()))
    else:
        part.__class__ = Doubled
    close(module(inputs, latents), definition(weights, inputs, latents))


class Double(torch.nn.Module):
    def forward(self, parameter: Tensor) -> Tensor:
        return 2 * parameter


@pytest.mark.parametrize("options", [{"elementwise_affine": False}, {"bias": False}])
@pytest.mark.parametrize(
    "name",
    ["compress.cross_attention.norm", "compress.cross_attention.context_norm", "retrieve.self_feed_forward.norm"],
)
def test_a_norm_with_less_still_is_a_norm(name: str, options: dict[str, bool]) -> None:
    """For the operators, a missing weight means that there is no norm. But a module for a norm without a weight, or
    without a bias, still normalises."""
    module, (inputs, latents) = block(), points()
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, torch.nn.LayerNorm(inputs.shape[-1], dtype=torch.float64, **options))
    weights = dict(module.named_parameters())
    weights.setdefault(f"{name}.weight", inputs.new_ones(inputs.shape[-1]))
    weights.setdefault(f"{name}.bias", inputs.new_zeros(inputs.shape[-1]))
    close(module(inputs, latents), definition(weights, inputs, latents))


def test_a_hook_on_any_layer_runs() -> None:
    """The hooks are on a layer, on all modules, and on layers that a stream uses only in part."""
    module, (inputs, latents) = block(), points()
    ignore = torch.rand(BATCH, INPUTS) < 0.4
    expected = module(inputs, latents, key_padding_mask=ignore), module(inputs, latents[0], key_padding_mask=ignore)
    layers = [part for name, part in module.named_modules() if name and name != "stream"]
    seen: list[torch.nn.Module] = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda part, *_: seen.append(part))
    close(module(inputs, latents, key_padding_mask=ignore), expected[0])
    handle.remove()
    assert set(seen) == {module, *layers}
    for part in layers:
        seen.clear()
        handle = part.register_forward_hook(lambda part, *_: seen.append(part))
        close(module(inputs, latents[0], key_padding_mask=ignore), expected[1])
        handle.remove()
        assert seen == [part]


WRONG: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "a list": (CMAB(8, 2, 2), ([[0.0] * 8], torch.zeros(2, 8)), "^inputs: got a list"),
    "self-attention, columns": (layers.SelfAttention(8, 2), (torch.zeros(1, 2, 7),), "^latents: got shape"),
    "self-attention, dtype": (
        layers.SelfAttention(8, 2),
        (torch.zeros(1, 2, 8).double(),),
        "^latents: got torch.float64",
    ),
    "feed-forward, columns": (layers.FeedForward(8, 4), (torch.zeros(2, 7),), "^latents: got shape"),
    "context, columns": (
        layers.CrossAttention(8, 2),
        (torch.zeros(1, 2, 8), torch.zeros(1, 3, 7)),
        "^context: got shape",
    ),
    "context, batch": (
        layers.CrossAttention(8, 2),
        (torch.zeros(1, 2, 8), torch.zeros(2, 3, 8)),
        "^context: got batch 2",
    ),
    "mask": (
        layers.LatentLayer(8, 2, 4),
        (torch.zeros(1, 2, 8), torch.zeros(1, 3, 8), torch.zeros(1, 3)),
        "^key_padding_mask: got",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_layer_names_what_is_wrong(case: str) -> None:
    layer, arguments, message = WRONG[case]
    with pytest.raises((TypeError, ValueError), match=message):
        layer(*arguments)


class Halved(torch.nn.Module):
    """A layer that replaces a layer of a block, or wraps it like a checkpoint."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *features: Tensor) -> Tensor:
        return self.layer(*features) / 2


@pytest.mark.parametrize(
    "name", ["compress.self_attention", "retrieve.cross_feed_forward", "retrieve.cross_attention", "retrieve"]
)
@pytest.mark.parametrize("how", ["another", "a subclass"])
def test_layers_in_place_of_its_own_are_called(name: str, how: str) -> None:
    """The layer may be wrapped or of a subclass; it runs with a gradient, without a gradient, and as a stream."""
    module, (inputs, latents) = block(), points()
    parent, _, child = name.rpartition(".")
    layer = module.get_submodule(name)
    if how == "another":
        setattr(module.get_submodule(parent), child, Halved(layer))
    else:
        kind = type(layer)
        layer.__class__ = type("Sub", (kind,), {"forward": lambda self, *features: kind.forward(self, *features) / 2})
    with cmab_kernels.use_impl("reference"):
        expected = module(inputs, latents)
    close(module(inputs, latents), expected)
    with torch.no_grad():
        close(module(inputs, latents), expected)
        close(module.update(inputs, latents, module.init_state(BATCH)).latents, expected)


def test_norms_may_be_kept_in_float32() -> None:
    module, (inputs, latents) = block(torch.float32), points(torch.float32)
    expected = module(inputs, latents)
    module.bfloat16()
    for part in module.modules():
        if isinstance(part, torch.nn.LayerNorm):
            part.float()
    out = module(inputs.bfloat16(), latents.bfloat16())
    assert out.dtype == torch.bfloat16 and ((out - expected).norm() / expected.norm()) < 0.1


def test_layers_may_differ_in_heads() -> None:
    module, (inputs, latents) = block(), points()
    module.retrieve.self_attention.num_heads = 2
    with cmab_kernels.use_impl("reference"):
        expected = module(inputs, latents)
    close(module(inputs, latents), expected)


def test_weights_that_are_no_parameters() -> None:
    """The replicas of DataParallel, and modules in FullyShardedDataParallel, have their weights as attributes."""
    module, (inputs, latents) = block(), points()
    expected = module(inputs, latents)
    for part in module.modules():
        weights = {name: part._parameters.pop(name) for name in [*part._parameters]}
        part.__dict__.update(
            {name: weight.detach() if weight is not None else None for name, weight in weights.items()}
        )
    close(module(inputs, latents), expected)


def test_the_default_device_is_not_asked() -> None:
    """Tensors that a call makes for itself are on the device of its inputs,
    not on the default device; the meta device represents a GPU here."""
    module, (inputs, latents) = block(), points()
    expected = torch.autograd.grad(module(inputs, latents).sum(), [*module.parameters()])
    with torch.device("meta"):
        close(torch.autograd.grad(module(inputs, latents).sum(), [*module.parameters()]), expected)


@pytest.mark.parametrize("kind", [layers.SelfAttention, layers.CrossAttention])
def test_heads_that_were_cut_off(kind: Any) -> None:
    """The scale of logits follows the width of the remaining heads."""
    attention, x, context = kind(16, 2), torch.randn(1, 5, 16), torch.randn(1, 7, 16)
    for name in ("query", "key", "value"):
        projection = getattr(attention, name)
        projection.weight = torch.nn.Parameter(4 * projection.weight[:8])
    attention.output.weight = torch.nn.Parameter(attention.output.weight[:, :8])
    attention.num_heads = 1
    given = (x, context) if kind is layers.CrossAttention else (x,)
    found = attention(*given)
    with cmab_kernels.use_impl("reference"):
        torch.testing.assert_close(found, attention(*given), rtol=1e-5, atol=1e-5)


def cut(part: Any) -> None:
    """Remove the last head of an attention, or the last hidden column of a feed-forward layer."""
    if isinstance(part, layers.FeedForward):
        hidden = part.contract.weight.shape[1]
        kept, (first, last) = hidden - 1, (part.expand, part.contract)
        rows = [row for row in range(2 * hidden) if row % hidden < kept]  # features, then gate
        first.bias = torch.nn.Parameter(first.bias[rows])
        first.weight = torch.nn.Parameter(first.weight[rows])
    else:
        kept, last = DIM - DIM // HEADS, part.output
        part.num_heads -= 1
        for each in (part.query, part.key, part.value):
            each.weight = torch.nn.Parameter(each.weight[:kept])
    last.weight = torch.nn.Parameter(last.weight[:, :kept])


LAYERS = [f"{half}.{layer}" for half in ("compress", "retrieve") for layer in ("cross_attention", "self_attention")]
HALVES = ["compress.cross_feed_forward", "retrieve.self_feed_forward"]


@pytest.mark.parametrize("names", [*([name] for name in LAYERS + HALVES), LAYERS, LAYERS + HALVES], ids=" ".join)
def test_layers_may_lose_a_head_or_a_column(names: list[str]) -> None:
    module, (inputs, latents) = block(), points()
    weights = dict(module.named_parameters())
    for name in names:
        part: Any = module.get_submodule(name)
        last = "contract" if "feed" in name else "output"
        cut(part)
        kept = part.get_submodule(last).weight.shape[1]
        whole = weights[f"{name}.{last}.weight"].detach()
        # The removed part has no effect.
        weights[f"{name}.{last}.weight"] = whole.index_fill(1, torch.arange(kept, whole.shape[1]), 0.0)
    expected = definition(weights, inputs, latents)
    close(module(inputs, latents), expected)
    if "compress.cross_attention" in names:
        module.stream = AttentionStream(HEADS - 1, BLOCK, DIM // HEADS, dtype=torch.float64)
    with torch.no_grad():
        module.update(inputs[:, :9], latents)
        close(module.update(inputs[:, 9:], latents).latents, expected)

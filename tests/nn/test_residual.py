"""Both residuals of the layers: one `fused` call equals the modules one by one, in values and derivatives."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels.nn import CMAB, CMABStack, CrossAttention, FeedForward, LatentLayer, SelfAttention

SIZES: dict[Any, dict[str, int]] = {
    FeedForward: {"dim": 8, "ff_dim": 5},
    SelfAttention: {"dim": 8, "num_heads": 2},
    CrossAttention: {"dim": 8, "num_heads": 2},
    LatentLayer: {"dim": 8, "num_heads": 2, "ff_dim": 5},
    CMAB: {"dim": 8, "num_latents": 3, "num_heads": 2},
    CMABStack: {"dim": 8, "num_latents": 3, "num_heads": 2, "depth": 2},
}
of_each = pytest.mark.parametrize("kind", SIZES)


def made(kind: Any, residual: str = "normed") -> Any:
    """Return a module in float64 whose norms have an effect."""
    module = kind(**SIZES[kind], residual=residual).double()
    for name, parameter in module.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.5)
    return module


def given(kind: Any) -> list[Tensor]:
    latents, others = torch.randn(2, 4, 8).double().requires_grad_(), torch.randn(2, 7, 8).double().requires_grad_()
    if kind in (CMAB, CMABStack):
        return [others, latents]
    return [latents] if kind in (FeedForward, SelfAttention) else [latents, others]


def derivatives(module: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Return the result, the first derivatives of its sine, and the second derivatives of the squares of these."""
    leaves = [*inputs, *module.parameters()]
    result = module(*inputs)
    first = torch.autograd.grad(result.sin().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(slope.square().sum() for slope in first), leaves)
    return [result, *first, *second]


def watched(module: Any) -> Any:
    """Return a copy whose modules are called one by one."""
    watched = copy.deepcopy(module)
    for part in watched.modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_hook(lambda *_: None)
    return watched


@of_each
def test_fused_and_one_by_one(kind: Any) -> None:
    module, inputs = made(kind), given(kind)
    for ours, right in zip(derivatives(module, inputs), derivatives(watched(module), inputs), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(module(*inputs), watched(module)(*inputs), rtol=1e-12, atol=1e-12)


def test_the_formula() -> None:
    """The formula is y = LN(x) + f(LN(x)), and not x + f(LN(x))."""
    layer, (x,) = made(FeedForward), given(FeedForward)
    normed = F.layer_norm(x, (8,), layer.norm.weight, layer.norm.bias)
    features, gate = layer.expand(normed).chunk(2, -1)
    torch.testing.assert_close(layer(x), normed + layer.contract(features * F.gelu(gate)), rtol=1e-12, atol=1e-12)


@of_each
def test_the_residual_is_no_part_of_the_weights(kind: Any) -> None:
    """Each form loads the weights of the other, and gives other results."""
    normed, plain = made(kind), made(kind, "input")
    plain.load_state_dict(normed.state_dict())
    inputs = given(kind)
    assert not torch.allclose(plain(*inputs), normed(*inputs), atol=1e-3)


@pytest.mark.parametrize("kind", [CMAB, CMABStack])
def test_layers_of_several_residuals(kind: Any) -> None:
    """One call cannot replace the layers, because each layer keeps its own residual."""
    module, inputs = made(kind), given(kind)
    block = module if kind is CMAB else module.blocks[1]
    block.retrieve.self_feed_forward.residual = "input"
    torch.testing.assert_close(module(*inputs), watched(module)(*inputs), rtol=1e-12, atol=1e-12)
    block.compress.cross_attention.residual = "input"
    with torch.no_grad():
        torch.testing.assert_close(module(*inputs), watched(module)(*inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [CMAB, CMABStack])
def test_streams(kind: Any) -> None:
    """Updates and removals of inputs give the same result as all inputs at once."""
    module, (inputs, latents) = made(kind).eval(), given(kind)
    with torch.no_grad():
        for chunk in inputs.split(3, 1):
            streamed = module.update(chunk, latents).latents
        torch.testing.assert_close(streamed, module(inputs, latents), rtol=1e-12, atol=1e-12)
        left = module.remove(inputs[:, 5:], latents).latents
        torch.testing.assert_close(left, module(inputs[:, :5], latents), rtol=1e-9, atol=1e-9)


@of_each
def test_a_module_that_was_pickled_before(kind: Any) -> None:
    """The module has no `residual` attribute, and adds to its inputs as before."""
    module, inputs = made(kind, "input"), given(kind)
    expected = module(*inputs)
    for part in module.modules():
        vars(part).pop("residual", None)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(*inputs), expected)


@of_each
@pytest.mark.parametrize("residual", ["post", None, True, ["normed"]])
def test_other_residuals_are_refused(kind: Any, residual: Any) -> None:
    with pytest.raises(ValueError, match=r"^residual: got .*, expected one of input, normed$"):
        kind(**SIZES[kind], residual=residual)

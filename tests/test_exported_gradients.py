"""Programs of `torch.export` can be differentiated: the gradients of a program's inputs are those of its module."""

import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import cmab_kernels as ck
from cmab_kernels import nn as modules
from cmab_kernels.runtime import backends

STRICT = pytest.param(
    True,
    marks=pytest.mark.skipif(
        not hasattr(torch.compiler, "is_exporting"), reason="this torch does not tell that it exports"
    ),
)


class _Layer(nn.Module):
    """A function of x (2, 5, 16), a context (2, 9, 16) and a parameter (16, 16)."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(16, 16) / 4), function

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.function(x, context, self.weight)


class _Network(nn.Module):
    """`FeedForward` with a second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.network = modules.FeedForward(16, 8)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        y: Tensor = self.network(x) + self.network(context).sum()
        return y


def _latent_attention(x: Tensor, context: Tensor, weight: Tensor) -> Tensor:
    query, key = ((rows @ weight).unflatten(-1, (2, 8)).transpose(1, 2) for rows in (x, context))
    return ck.latent_attention(query, key, key.sin())


def _kernel_features(x: Tensor, context: Tensor, weight: Tensor) -> Tensor:
    """Keys at equal distances, with two keys given twice: the recorded operations have no gradient where eigenvalues
    are equal."""
    key = torch.eye(9, 16) + context - context.detach()
    query, key = torch.cat([x @ weight, key], 1), torch.cat([key, key[:, :2]], 1)
    return ck.intention.variants.kernel_features(query[:, None].double(), key[:, None].double(), 0.1)


def _dual_intention(x: Tensor, context: Tensor, weight: Tensor) -> Tensor:
    """The weights of three keys are 0."""
    weights = context[..., 0].relu() * (torch.arange(9) > 2)
    return ck.intention(
        (x @ weight)[:, None], (context @ weight)[:, None], context[:, None], 0.5, form="dual", weights=weights
    )


CASES: dict[str, Callable[[], nn.Module]] = {
    "latent_attention": lambda: _Layer(_latent_attention),
    "attention_layer": lambda: _Layer(
        lambda x, context, weight: ck.attention_layer(x, *[weight] * 4, num_heads=2, context=context)
    ),
    "feed_forward_layer": lambda: _Layer(
        lambda x, context, weight: ck.feed_forward_layer(x, weight, weight[:, :8]) + context.sum()
    ),
    "kernel_features": lambda: _Layer(_kernel_features),
    "dual_intention": lambda: _Layer(_dual_intention),
    "FeedForward": _Network,
    "LatentLayer": lambda: modules.LatentLayer(16, 2, 8),
    "CMAB": lambda: modules.CMAB(16, 4, 2, 8),
}


def _gradients(module: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    return torch.autograd.grad(module(*leaves).sin().sum(), leaves)


def _loaded(module: nn.Module, inputs: tuple[Tensor, ...], strict: bool) -> nn.Module:
    """The program of a module, saved and loaded."""
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, inputs, strict=strict), file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.parametrize("strict", [False, STRICT])
@pytest.mark.parametrize("name", CASES)
def test_of_a_module_with_parameters(name: str, strict: bool) -> None:
    module, inputs = CASES[name](), (torch.randn(2, 5, 16), torch.randn(2, 9, 16))
    torch.testing.assert_close(_gradients(_loaded(module, inputs, strict), inputs), _gradients(module, inputs))


@pytest.mark.parametrize("name", CASES)
def test_of_a_program_that_was_recorded_without_a_gradient(name: str) -> None:
    module, inputs = CASES[name](), (torch.randn(2, 5, 16), torch.randn(2, 9, 16))
    with torch.no_grad():
        program = _loaded(module, inputs, False)
    torch.testing.assert_close(_gradients(program, inputs), _gradients(module, inputs))


def test_of_an_attention_layer_that_kept_nothing() -> None:
    """A program may have been recorded with `keep=False`."""
    x, weight = torch.randn(2, 5, 16, requires_grad=True), torch.randn(16, 16) / 4
    parameters = *[None] * 4, *(weight, None) * 4
    layer = torch.ops.cmab.attention_layer.default
    found = [layer(x, None, None, *parameters, 2, 0.5, 0.0, 0.0, "input", keep, "native")[0] for keep in (False, True)]
    assert torch.equal(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in found))


def _program(requires_grad: bool = True) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    module, x = modules.FeedForward(8, 16).requires_grad_(requires_grad), torch.randn(2, 5, 8)
    return torch.export.export(module, (x,)).module(), x


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("how", ["jacrev", "jvp"])
def test_a_transform_of_a_program_is_refused_and_gives_no_zeros(how: str, requires_grad: bool) -> None:
    program, x = _program(requires_grad)
    with pytest.raises(RuntimeError, match=r"^feed_forward_layer: got a call of a recorded program under a transform"):
        torch.func.jacrev(program)(x) if how == "jacrev" else torch.func.jvp(program, (x,), (x,))


def test_a_program_may_be_a_constant_of_a_transform_and_run_in_forward_mode() -> None:
    program, x = _program()
    right = program(x)
    torch.testing.assert_close(
        torch.func.grad(lambda w: (program(x).detach() * w).sum())(torch.ones(8)), right.sum((0, 1)).detach()
    )
    with torch.autograd.forward_ad.dual_level(), FlopCounterMode(display=False):
        assert torch.equal(program(x), right)
    with torch.profiler.profile():
        assert torch.equal(program(x), right)
    assert torch.equal(torch.vmap(program)(x[None]), right[None])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def test_no_module_holds_a_tensor() -> None:
    """The first call imports an implementation. Under `torch.export` or in inference mode, tensors made then would be
    fake tensors, or of inference mode, for the life of the process."""
    for operator_set, implementations in backends.IMPLEMENTATIONS.items():
        for impl in implementations:
            backends.imported(operator_set, impl)
    ours = [module for name, module in sys.modules.items() if name.split(".")[0] in ("cmab_kernels", "cmab_models")]
    values = [(f"{module.__name__}.{name}", value) for module in ours for name, value in vars(module).items()]
    held = {name for name, value in values if next(_tensors(value), None) is not None}
    assert len(ours) > 100 and not held


def test_empty_results_may_be_saved_by_autograd() -> None:
    native = pytest.importorskip("cmab_kernels.layers.native", reason="there is no native code")
    native.nothing.cache_clear()
    with torch.inference_mode():
        assert not any(each.is_inference() for each in native.nothing(torch.float32))

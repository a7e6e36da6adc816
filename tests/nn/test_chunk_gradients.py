"""`CMABStack.encode` has the same gradients as `read`, whichever implementation reads or differentiates its chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from cmab_kernels import AttentionState, use_impl
from cmab_kernels.nn import CMABStack

from .test_cmab_stack import close, points, stack


def read_by(module: CMABStack) -> list[Tensor]:
    """Return the parameters on which the state of inputs depends."""
    layers = [block.compress.cross_attention for block in module.blocks]
    parts = [part for layer in layers for part in (layer.norm, layer.context_norm, layer.query, layer.key, layer.value)]
    return [*(block.latents for block in module.blocks), *(p for part in parts for p in part.parameters())]


@pytest.mark.parametrize("forward", ["native", "reference"])
@pytest.mark.parametrize("backward", ["native", "reference"])
def test_each_pass_over_chunks_chooses_its_implementation(forward: str, backward: str) -> None:
    module, (inputs, _) = stack(), points()
    with use_impl(forward):
        state = module.encode(inputs.split(9, 1))
    expected, leaves = module.read(inputs), read_by(module)
    close(state, expected, 1e-11)
    with use_impl(backward):
        ours = torch.autograd.grad([part.sin().sum() for part in state], leaves)
    close(ours, torch.autograd.grad([part.sin().sum() for part in expected], leaves), 1e-11)


@pytest.mark.filterwarnings("ignore:cmab_kernels runs its PyTorch reference")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_chunks_train_where_only_the_definition_runs(device: str) -> None:
    """Heads of 300 are too wide for native code, and no native code runs on the meta device."""
    module = CMABStack(300, 4, 1, 2, device=device)
    module.encode(torch.randn(1, 20, 300, device=device)).out.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.shape == parameter.shape for parameter in read_by(module))


def test_chunks_train_in_forward_mode() -> None:
    module, (inputs, _) = stack(), points()
    state = module.encode(inputs)
    with forward_ad.dual_level():
        ours = torch.autograd.grad(state.out.sin().sum(), read_by(module))
    close(ours, torch.autograd.grad(module.read(inputs).out.sin().sum(), read_by(module)), 1e-11)


def in_forward_mode(function: Callable[[Any], Tensor], weights: dict[str, Tensor]) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(
            function({name: forward_ad.make_dual(t, t.cos()) for name, t in weights.items()})
        ).tangent


TRANSFORMS: dict[str, Callable[[Callable[[Any], Tensor], dict[str, Tensor]], Any]] = {
    "grad": lambda function, weights: torch.func.grad(function)(weights),
    "jvp": lambda function, weights: torch.func.jvp(
        function, (weights,), ({name: t.cos() for name, t in weights.items()},)
    ),
    "vmap": lambda function, weights: torch.func.vmap(function)(
        {name: torch.stack([t, t.cos()]) for name, t in weights.items()}
    ),
    "forward mode": in_forward_mode,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_go_through_chunks(transform: str) -> None:
    module, (inputs, _) = stack(), points()
    weights = {f"module.{name}": parameter.detach() for name, parameter in module.named_parameters()}

    class Total(torch.nn.Module):
        def __init__(self, read: Callable[[], AttentionState]) -> None:
            super().__init__()
            self.module, self.read = module, read

        def forward(self) -> Tensor:
            return sum((part.sin().sum() for part in self.read()), torch.zeros(()))

    def of(read: Callable[[], AttentionState]) -> Any:
        return TRANSFORMS[transform](lambda given: torch.func.functional_call(Total(read), given, ()), weights)

    close(of(lambda: module.encode(inputs.split(9, 1))), of(lambda: module.read(inputs)), 1e-11)


def test_transforms_of_the_inputs_go_through_chunks() -> None:
    module, (inputs, _) = stack(), points()
    ours, theirs = (
        torch.func.grad(lambda x, read=read: read(x).out.sin().sum())(inputs) for read in (module.encode, module.read)
    )
    close(ours, theirs, 1e-11)
    several = torch.stack([inputs, inputs.cos()])
    close(
        torch.func.vmap(lambda x: module.encode(x).out)(several),
        torch.stack([module.read(each).out for each in several]),
        1e-11,
    )


def test_batches_of_gradients_go_through_chunks() -> None:
    module, (inputs, _) = stack(), points()
    ours, theirs = (
        torch.autograd.grad(
            state.out.flatten()[:3], read_by(module), torch.eye(3, dtype=torch.float64), is_grads_batched=True
        )
        for state in (module.encode(inputs.split(9, 1)), module.read(inputs))
    )
    close(ours, theirs, 1e-11)

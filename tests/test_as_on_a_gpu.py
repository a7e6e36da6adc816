"""The properties of a GPU that can be tested without one: a compiler's trace of the choice of an implementation, and
CPU tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cmab_kernels.runtime import backends
from cmab_kernels.testing import OperatorSuite

from .declarations import declarations

SHAPES = {
    "attention": ((2, 3, 5, 8), (2, 3, 9, 8), (2, 3, 9, 8)),
    "attention.prefix": ((2, 3, 5, 8), (2, 3, 9, 8), (2, 3, 9, 8)),
    "attention.projected": ((1, 3, 5, 8), (2, 9, 7), (24, 7), (24, 7)),
    "layers": ((18, 8),),
    "nystrom": ((2, 3, 5, 8), (2, 3, 9, 8), (2, 3, 9, 8)),
    "nystrom.continual": ((2, 3, 1, 8), (2, 3, 1, 8), (2, 3, 1, 8), (2, 3, 4, 8)),
    "intention": ((2, 3, 5, 8), (2, 3, 9, 8), (2, 3, 9, 8)),
    "intention.solve": ((6, 8, 8), (6, 8, 4)),
}
"""Operator set -> the shapes of the tensors that decide the implementation."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of compute capability 9.0, as far as the choice of implementations needs it."""
    cuda_launch, triton_launch = (
        pytest.importorskip(f"cmab_kernels.runtime.{module}", exc_type=ImportError)
        for module in ("cuda_launch", "triton_launch")
    )
    monkeypatch.setattr(cuda_launch, "_properties", lambda index: (None, 227 * 1024))
    monkeypatch.setattr(cuda_launch, "capability", lambda index: (9, 0))
    monkeypatch.setattr(triton_launch, "_gpu_problem", lambda index: None)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "operator_set, impl",
    [
        (operator_set, impl)
        for operator_set in backends.SETS
        if backends.IMPLEMENTATIONS[operator_set].keys() - {"native"}  # on a GPU, a stack is its layers
        for impl in ("auto", *backends.IMPLEMENTATIONS[operator_set])
        if impl != "native"
    ],
)
def test_a_compiler_traces_the_choice(operator_set: str, impl: str, dynamic: bool, gpu: None) -> None:
    """There is one graph for all sizes, because a compiler traces no function of an extension."""
    chosen = []

    def choose(*tensors: Tensor) -> Tensor:
        chosen.append(backends.choose(operator_set, impl, *tensors))
        return tensors[0] + 1

    with FakeTensorMode():
        tensors = [torch.empty(shape, device="cuda") for shape in SHAPES[operator_set]]
        assert torch.compile(choose, fullgraph=True, dynamic=dynamic, backend="eager")(*tensors).device.type == "cuda"
    assert chosen[0] in backends.IMPLEMENTATIONS[operator_set] and chosen[0] != "native"


@pytest.mark.parametrize("declaration", declarations(), ids=lambda each: each.__qualname__)
def test_a_declaration_makes_its_tensors_where_its_inputs_are(declaration: type[OperatorSuite]) -> None:
    """A declaration makes its tensors on the device of its inputs. The meta device shows this, because it is not the
    CPU."""
    suite = declaration()
    inputs = {name: tensor.to("meta") for name, tensor in suite.inputs(suite.dtypes[0]).items()}
    with torch.no_grad():
        assert {result.device.type for result in suite.call("auto", **inputs)} == {"meta"}

"""What is launched on a GPU to check values: nothing, or what makes a NaN of a value that is not allowed; no assertion on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cmab_kernels as ck
from cmab_kernels import checks
from cmab_kernels.intention.solve.api import penalty_of


class OnGpu(Tensor):
    """A tensor on the CPU that says that it is on a GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)


class Launched(TorchDispatchMode):
    """The names of the operations that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


def _on_gpu(values: list[float]) -> Tensor:
    return torch.tensor(values).as_subclass(OnGpu)


def test_a_negative_value_on_a_gpu_launches_nothing() -> None:
    alpha, mask = _on_gpu([1.0, -1.0]), torch.tensor([False, True])
    with Launched() as launched:
        checks.refuse_negative("alpha", alpha)
        checks.refuse_negative("weights", alpha, absent=mask)
        checks.refuse_not_finite(alpha=alpha)
    assert not launched.names


def test_a_value_that_is_not_allowed_becomes_nan_on_a_gpu_only() -> None:
    values = [0.5, -1e-9, 2.0, -0.0]
    found = checks.nan_if_refused(_on_gpu(values), largest=1.0)
    assert torch.equal(found.isnan(), torch.tensor([False, True, True, False]))
    on_cpu = torch.tensor(values)
    assert checks.nan_if_refused(on_cpu, largest=1.0) is on_cpu


def test_a_number_costs_one_fill() -> None:
    with Launched() as launched:
        penalty_of(0.1, torch.Size([3, 4]), torch.device("cpu"))
    assert launched.names == ["full"]


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_a_negative_weight_that_is_not_read_is_nan(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host does not wait for the values, a negative weight spoils its head, not the others, and not under the mask."""
    monkeypatch.setattr(checks, "_is_read", lambda tensor: False)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    key, value = torch.randn(3, 1, 9, 4), torch.randn(3, 1, 9, 2)
    mask = torch.zeros(3, 9, dtype=torch.bool)
    mask[2, 5] = True
    weights = torch.ones(3, 9)
    weights[1, 3] = weights[2, 5] = -1.0
    out = ck.intention(key, key, value, 0.1, form=form, weights=weights, key_padding_mask=mask, impl="reference")
    assert torch.equal(out.isnan().flatten(1).all(1), torch.tensor([False, True, False])) and not out[[0, 2]].isnan().any()

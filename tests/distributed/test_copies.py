"""Copies of modules that hold a process group."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel

from cmab_kernels import nn
from cmab_kernels.distributed import ShardedCMAB, ShardedMultiheadAttention, ShardedMultiheadIntention

MODULES = {
    ShardedCMAB: lambda: nn.CMABStack(16, 8, 2, 2),
    ShardedMultiheadAttention: lambda: nn.MultiheadAttention(16, 2, batch_first=True),
    ShardedMultiheadIntention: lambda: nn.MultiheadIntention(16, 2, batch_first=True),
}


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([0])
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_a_copy_has_weights_of_its_own_and_the_same_group(kind: Any, group: Any) -> None:
    sharded = kind(MODULES[kind](), group)
    few, many = torch.randn(1, 3, 16), torch.randn(1, 9, 16)
    given = (many, few) if kind is ShardedCMAB else (few, many, many)
    for other in (
        copy.deepcopy(sharded),
        copy.deepcopy(torch.nn.Sequential(sharded))[0],
        AveragedModel(sharded).module,
        copy.copy(sharded),
    ):
        assert other.group is group and other is not sharded
        torch.testing.assert_close(other(*given), sharded(*given))
    if hasattr(sharded.module, "stream"):
        assert copy.copy(sharded).module.stream is not sharded.module.stream
    own = copy.deepcopy(sharded)
    assert not {id(each) for each in own.parameters()} & {id(each) for each in sharded.parameters()}


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_a_pickle_says_what_to_do(kind: Any, group: Any) -> None:
    sharded = kind(MODULES[kind](), group)
    for save in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(
            TypeError,
            match=r"^group: got a process group, which belongs to its process.*save the state_dict\(\)",
        ):
            save(sharded)
    assert pickle.loads(pickle.dumps(kind(MODULES[kind]()))).group is None


class Counted(torch.nn.Module):
    """A parametrization that does not change the tensor, and counts its calls."""

    count = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return weight * 1.0


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_a_parametrization_is_computed_once_a_call(kind: Any, group: Any) -> None:
    module = MODULES[kind]()
    place, name = (module.blocks[1], "latents") if kind is ShardedCMAB else (module, "in_proj_weight")
    parametrize.register_parametrization(place, name, part := Counted())
    few, many = torch.randn(1, 3, 16), torch.randn(1, 9, 16)
    part.count = 0  # registration reads the shape, which is one call
    kind(module, group)(*((many, few) if kind is ShardedCMAB else (few, many, many)))
    assert part.count == 1


@torch.no_grad()
@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_a_module_may_have_no_parameters(kind: Any, group: Any) -> None:
    sharded, few, many = kind(MODULES[kind](), group), torch.randn(1, 3, 16), torch.randn(1, 9, 16)
    given = (many, few) if kind is ShardedCMAB else (few, many, many)
    expected = sharded(*given)
    for part in sharded.modules():
        for name, parameter in [*part.named_parameters(recurse=False)]:
            delattr(part, name)
            part.register_buffer(name, parameter.detach())
    torch.testing.assert_close(sharded(*given), expected)

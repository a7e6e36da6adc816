"""Cases: merges inside a compiled graph."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels import AttentionState
from cmab_kernels.distributed import ShardedCMAB, all_merge_state
from cmab_kernels.nn import CMAB

from .cases_modules import DIM, HEADS, data, shaken
from .common import close, own, raises


def case_compiled() -> None:
    """A merge compiles into one graph with the code around it: values and gradients are the same, and errors of other
    ranks are raised."""
    rank, world = dist.get_rank(), dist.get_world_size()
    query, points = torch.randn(2, 3, 4), torch.randn(world, 1, 2, 5, 4)

    def losses(q: Tensor, own: Tensor) -> Tensor:
        merged = all_merge_state(ck.attention_state(q, own, 2 * own))
        sums = all_merge_state(ck.ridge_state(own, 3 * own))
        return merged.out.square().sum() + merged.lse.sum() + sums.gram.sin().sum() + sums.count.sum()

    leaves = query.clone().requires_grad_(), points[rank].clone().requires_grad_()
    compiled = torch.compile(losses, fullgraph=True, dynamic=True, backend="aot_eager")
    results = [(value, *torch.autograd.grad(value, leaves)) for value in (losses(*leaves), compiled(*leaves))]
    close(*results, 1e-6)
    ragged = torch.randn(1, 2 + (rank == 0), 5, 4)
    with torch.no_grad(), raises(ValueError, "one type, shape and dtype on all ranks"):
        torch.compile(lambda own: all_merge_state(ck.ridge_state(own, own)), fullgraph=True, backend="aot_eager")(
            ragged
        )


def case_compiled_on_ranks_of_which_one_wants_a_gradient() -> None:
    """A graph is compiled either with or without a backward pass, so all ranks raise an error."""
    part = AttentionState(torch.randn(1, 2, 3, 4).requires_grad_(dist.get_rank() == 0), torch.randn(1, 2, 3).double())
    with raises(RuntimeError, "state: got one that requires a gradient on rank 0", "the graph is compiled"):
        torch.compile(all_merge_state, backend="aot_eager")(part)


def case_compiled_module() -> None:
    """A compiled block has the results of the block, in one graph."""
    inputs, query, mask = data()
    module = ShardedCMAB(shaken(CMAB(DIM, 5, HEADS)))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = []
    for call in (module, compiled):
        out = call(own(inputs, 1), query, key_padding_mask=own(mask, 1))
        results.append((out, *torch.autograd.grad(out.sin().sum(), list(module.parameters()))))
    close(*results, 1e-10)
    close(results[0][0], module.module(inputs, query, key_padding_mask=mask), 1e-11)

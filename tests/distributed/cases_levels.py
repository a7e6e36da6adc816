"""Cases: merges in levels, on four ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

import cmab_kernels as ck
from cmab_kernels.distributed import all_merge_state

from .cases_gradients import leaves_of, loss, rebuilt, total
from .common import close, same_bits_on_all_ranks


def case_levels() -> None:
    """Ranks merge in levels, one level for each bit of the rank's number. All ranks get the merged state of all ranks,
    and its gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world == 4
    groups = [dist.new_group(pair) for pair in ([0, 1], [2, 3], [0, 2], [1, 3])]
    levels = (groups[rank // 2], groups[2 + rank % 2])
    for kind in (ck.AttentionState, ck.RidgeState):
        leaves = leaves_of(kind)
        merged = rebuilt(kind, leaves[rank])
        for group in levels:
            merged = all_merge_state(merged, group)
        same_bits_on_all_ranks(merged)
        close(merged, all_merge_state(rebuilt(kind, leaves[rank])))
        wanted = torch.autograd.grad(total(kind, leaves), leaves[rank])
        close(torch.autograd.grad(loss(merged, rank), leaves[rank]), wanted)

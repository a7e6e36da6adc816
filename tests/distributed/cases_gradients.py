"""Cases: gradients of any order through merged states, and which ranks take part in a backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels import AttentionState, RidgeState
from cmab_kernels.distributed import all_merge_state

from .cases_merge import states
from .common import close, counted, raises


def loss(state: tuple, rank: int) -> Tensor:
    """Return a loss that depends on every number of a state, and differs from rank to rank."""
    finite = (field.masked_fill(field == -math.inf, 0.0) for field in state if field.is_floating_point())
    return sum(((rank + 1 + i) * field / 7).sin().square().sum() for i, field in enumerate(finite))


def leaves_of(kind: type) -> list[list[Tensor]]:
    """Return for each rank the fields of its state that need a gradient; all ranks know them."""
    parts = states(kind, 2, 3)
    return [[field.requires_grad_() for field in part if field.is_floating_point()] for part in parts]


def rebuilt(kind: type, leaves: list[Tensor]) -> tuple:
    return kind(*leaves, *([torch.ones(2, 3, dtype=torch.int64)] if kind is RidgeState else []))


def total(kind: type, leaves: list[list[Tensor]]) -> Tensor:
    """Return the sum of all ranks' losses, computed by one process."""
    merge: Callable[..., tuple] = ck.merge_states if kind is AttentionState else ck.merge_ridge
    merged = merge(*(rebuilt(kind, each) for each in leaves))
    return sum(loss(merged, rank) for rank in range(dist.get_world_size()))


def case_gradients_are_those_of_the_sum_of_all_losses() -> None:
    for kind in (AttentionState, RidgeState):
        leaves = leaves_of(kind)
        wanted = torch.autograd.grad(total(kind, leaves), [leaf for each in leaves for leaf in each])
        merged = all_merge_state(rebuilt(kind, leaves[dist.get_rank()]))
        found = torch.autograd.grad(loss(merged, dist.get_rank()), leaves[dist.get_rank()])
        close(found, wanted[len(found) * dist.get_rank() :][: len(found)])


def derivative(value: Tensor, leaves: list[Tensor], order: int) -> list[Tensor]:
    """Differentiate repeatedly: each further value is a sum of functions of the gradient before."""
    for _ in range(order - 1):
        gradients = torch.autograd.grad(value, leaves, create_graph=True)
        value = sum((gradient.sin() * torch.linspace(1, 2, gradient.shape[-1])).sum() for gradient in gradients)
    return list(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))


def case_gradients_of_second_and_third_order() -> None:
    """The further values are sums over all leaves, so a rank's own leaves give its part of the values."""
    for kind in (AttentionState, RidgeState):
        for order in (2, 3):
            leaves = leaves_of(kind)
            flat = [leaf for each in leaves for leaf in each]
            wanted = derivative(total(kind, leaves), flat, order)
            mine = leaves[dist.get_rank()]
            found = derivative(loss(all_merge_state(rebuilt(kind, mine)), dist.get_rank()), mine, order)
            close(found, wanted[len(mine) * dist.get_rank() :][: len(mine)], 1e-11)


def case_a_backward_pass_is_one_collective() -> None:
    leaves = leaves_of(AttentionState)[dist.get_rank()]
    merged = all_merge_state(rebuilt(AttentionState, leaves))
    with counted() as calls:
        loss(merged, 0).backward()
    assert calls == [("all_reduce", 8 * sum(leaf.numel() for leaf in leaves))]


def case_equal_losses_count_once_each() -> None:
    query = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    points = torch.randn(dist.get_world_size(), 1, 2, 5, 4, dtype=torch.float64)
    whole = ck.attention_state(query, *2 * [torch.cat(list(points), 2)])
    wanted = torch.autograd.grad(whole.out.square().sum() + whole.lse.sum(), query)[0]
    merged = all_merge_state(ck.attention_state(query, *2 * [points[dist.get_rank()]]))
    found = torch.autograd.grad(merged.out.square().sum() + merged.lse.sum(), query)[0]
    dist.all_reduce(found)
    close(found, dist.get_world_size() * wanted)


def case_a_rank_without_a_gradient_takes_part() -> None:
    """If the state of one rank requires a gradient, the losses of all ranks reach it; if not all ranks are in grad
    mode, all ranks raise an error."""
    rank, leaves = dist.get_rank(), leaves_of(AttentionState)
    part = rebuilt(AttentionState, leaves[rank] if rank == 0 else [leaf.detach() for leaf in leaves[rank]])
    loss(all_merge_state(part), rank).backward()
    wanted = torch.autograd.grad(total(AttentionState, leaves), leaves[0])
    if rank == 0:
        close([leaf.grad for leaf in leaves[0]], wanted)
    assert rank == 0 or not any(field.requires_grad for field in part)
    with (
        torch.set_grad_enabled(rank == 0),
        raises(RuntimeError, "state: got one that requires a gradient on rank 0 while grad mode is off on rank"),
    ):
        all_merge_state(part)


def case_a_state_of_inference_mode_takes_part() -> None:
    """Autograd does not accept inference tensors, so a rank that has one merges a copy. The other ranks get their
    gradients."""
    rank, leaves = dist.get_rank(), leaves_of(AttentionState)
    with torch.inference_mode():
        copies = [leaf.clone() for leaf in leaves[rank]]
    wanted = torch.autograd.grad(total(AttentionState, leaves), leaves[rank])
    for part in (
        rebuilt(AttentionState, leaves[rank] if rank == 0 else copies),
        AttentionState(leaves[rank][0], copies[1]),
    ):
        loss(all_merge_state(part), rank).backward()
        for field, each in zip(part, wanted, strict=True):
            if field.requires_grad:
                close(field.grad, each)
                field.grad = None


def case_no_graph_where_none_is_wanted() -> None:
    leaves = leaves_of(AttentionState)[dist.get_rank()]
    with torch.no_grad():
        assert not all_merge_state(rebuilt(AttentionState, leaves)).out.requires_grad
    assert not all_merge_state(rebuilt(AttentionState, [leaf.detach() for leaf in leaves])).out.requires_grad


def case_gradients_of_float32() -> None:
    """Parts of a hundred keys in float32 have the gradients of one pass over all keys, up to rounding."""
    world = dist.get_world_size()
    points = torch.randn(2, world, 1, 2, 100, 8)
    query = torch.randn(2, 16, 8)
    q, (keys, values) = query.clone().requires_grad_(), points[:, dist.get_rank()].clone().requires_grad_()
    weight = torch.randn(1, 2, 16, 8)
    merged = all_merge_state(ck.attention_state(q, keys, values))
    dq, dk, dv = torch.autograd.grad((merged.out * weight).sum() / world, (q, keys, values))
    dist.all_reduce(dq)
    q, rest = query.double().requires_grad_(), points.double().requires_grad_()
    whole = ck.latent_attention(q, *(torch.cat(list(each), 2) for each in rest))
    oracle = torch.autograd.grad((whole * weight).sum(), (q, rest))
    close([dq.double(), dk.double(), dv.double()], [oracle[0], *oracle[1][:, dist.get_rank()]], 1e-5)


def case_nothing_read_has_no_gradient() -> None:
    """If no rank has seen a key, gradients are 0, even if the loss has no finite derivative there."""
    part = AttentionState(*(field.requires_grad_() for field in ck.empty_state(1, 1, 2, 3)))
    merged = all_merge_state(part)
    assert merged.lse.eq(-math.inf).all() and merged.out.eq(0).all()
    gradients = torch.autograd.grad(merged.out.sum() + merged.lse.exp().sum(), tuple(part))
    assert all(gradient.eq(0).all() for gradient in gradients)


def case_transforms_are_refused() -> None:
    """Transforms of `torch.func` and forward mode raise an error, because a collective has no rule for them."""
    state = states(AttentionState, 2)[0]

    def merged(out: Tensor) -> Tensor:
        return all_merge_state(AttentionState(out, state.lse)).out.sum()

    transformed = [
        torch.func.grad(merged),
        torch.func.vmap(merged),
        torch.func.jacfwd(merged),
        lambda out: torch.func.jvp(merged, (out,), (out,)),
    ]
    for function in transformed:
        with raises(RuntimeError, "state: got tensors under a transform of torch.func"):
            function(state.out)

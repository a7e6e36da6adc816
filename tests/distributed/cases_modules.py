"""Cases: modules whose context is spread over the ranks have the results and the parameter gradients of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cmab_kernels as ck
from cmab_kernels.distributed import ShardedCMAB, ShardedMultiheadAttention, ShardedMultiheadIntention, all_merge_state
from cmab_kernels.nn import CMAB, CMABStack, MultiheadAttention, MultiheadIntention

from .common import close, counted, own, raises, same_bits_on_all_ranks, summed

POINTS, DIM, HEADS = 11, 12, 3


def shaken(module: Any) -> Any:
    """Return the module with parameters that all affect the result: no bias is 0, and no norm is 1."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, queries and a mask, the same on all ranks."""
    return torch.randn(2, POINTS, DIM).double(), torch.randn(2, 4, DIM).double(), torch.rand(2, POINTS) < 0.3


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[..., Any], type]] = {
    "block": (
        lambda: CMAB(DIM, 5, HEADS),
        lambda module, inputs, query, mask: module(inputs, query, key_padding_mask=mask),
        lambda module, inputs, query, mask: module(inputs, query, key_padding_mask=mask),
        ShardedCMAB,
    ),
    "stack": (
        lambda: CMABStack(DIM, 5, HEADS, depth=2),
        lambda module, inputs, query, mask: module(inputs, query, key_padding_mask=mask),
        lambda module, inputs, query, mask: module(inputs, query, key_padding_mask=mask),
        ShardedCMAB,
    ),
    "attention": (
        lambda: MultiheadAttention(DIM, HEADS, batch_first=True, add_bias_kv=True, add_zero_attn=True),
        lambda module, inputs, query, mask: module(
            query, inputs, 2 * inputs, key_padding_mask=mask, need_weights=False
        )[0],
        lambda module, inputs, query, mask: module(query, inputs, 2 * inputs, key_padding_mask=mask)[0],
        ShardedMultiheadAttention,
    ),
    "intention": (
        lambda: MultiheadIntention(DIM, HEADS, batch_first=True),
        lambda module, inputs, query, mask: module(
            query, inputs, 2 * inputs, key_padding_mask=mask, need_weights=False
        )[0],
        lambda module, inputs, query, mask: module(query, inputs, 2 * inputs, key_padding_mask=mask)[0],
        ShardedMultiheadIntention,
    ),
}
"""name -> how to make the module, how to call it and the sharded one with inputs,
query and mask, and the class that shards it."""


def masks() -> dict[str, Tensor | None]:
    """Return masks (2, POINTS): none, a random mask, all of the first rank's inputs, all other inputs, all inputs."""
    position = torch.arange(POINTS).expand(2, -1)
    return {"none": None, "random": data()[2], "first": position < 3, "rest": position >= 3, "all": position >= 0}


def case_forward_and_gradients() -> None:
    """For each module and mask, compare the output, the gradients with respect to parameters, and W times the gradients
    of the inputs; there is one collective."""
    world = dist.get_world_size()
    for make, call, call_sharded, wrapper in MODULES.values():
        module = shaken(make())
        sharded = wrapper(module)
        inputs, query, _ = data()
        for mask in masks().values():
            leaves = [part.clone().requires_grad_() for part in (inputs, query)]
            whole = call(module, *leaves, mask)
            wanted = torch.autograd.grad(whole.sin().sum(), [*leaves, *module.parameters()], materialize_grads=True)
            mine = [own(inputs, 1).clone().requires_grad_(), query.clone().requires_grad_()]
            with counted() as calls:
                out = call_sharded(sharded, *mine, None if mask is None else own(mask, 1))
            assert len(calls) == 1
            close(out, whole, 1e-11)
            same_bits_on_all_ranks(out)
            found = torch.autograd.grad(out.sin().sum(), [*mine, *module.parameters()], materialize_grads=True)
            close(found[0], world * own(wanted[0], 1), 1e-9)
            for gradient, each in zip(found[1:], wanted[1:], strict=True):
                dist.all_reduce(gradient)
                close(gradient / world, each, 1e-9)


def case_updates() -> None:
    """Streams to which every rank adds its part, twice, equal one pass; the states have the same bits on all ranks."""
    inputs, query, mask = data()
    parts, masked = [own(part, 1) for part in (inputs, 3 - inputs)], own(mask, 1)
    both = torch.cat([inputs, 3 - inputs], 1)
    block, stack, attention, fit = (shaken(make()) for make, *_ in MODULES.values())

    for module in (block, stack):
        sharded, state = ShardedCMAB(module), module.init_state(2)
        for part in parts:
            result, state = sharded.update(part, query, state, key_padding_mask=masked)
        whole = module.update(both, query, module.init_state(2), key_padding_mask=torch.cat([mask, mask], 1))
        close((result, state), tuple(whole), 1e-11)
        same_bits_on_all_ranks((result, state))

    stream, state = ShardedMultiheadAttention(attention), None
    for part in parts:
        out, state = stream.attend_state(query, part, state)
    close((out, state), tuple(attention.attend_state(query, both)))

    regression = ShardedMultiheadIntention(fit)
    sums = regression.init_state(2)
    for part in parts:
        sums = regression.update(part, 2 * part, state=sums)
    close(sums, fit.update(both, 2 * both, state=fit.init_state(2)))
    close(fit.predict(query, sums), fit(query, both, 2 * both, need_weights=False)[0], 1e-10)


def case_earlier_inputs_fade() -> None:
    """A decay fades what all ranks have read."""
    inputs, query, _ = data()
    first, second = inputs[:, :5], inputs[:, 5:]
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [first.tensor_split(world, 1)[rank], second.tensor_split(world, 1)[rank]]
    weights = torch.tensor([0.5, 0.9], dtype=torch.float64)[:, None]
    calls: dict[str, Callable[[Any, Tensor, Any, Any], Any]] = {
        "block": lambda module, part, state, decay: module.update(part, query, state, decay=decay).state,
        "stack": lambda module, part, state, decay: module.update(part, query, state, decay=decay).state,
        "attention": lambda module, part, state, decay: module.attend_state(query, part, state, decay=decay).state,
        "intention": lambda module, part, state, decay: module.update(part, state=state, decay=decay),
    }
    for name, call in calls.items():
        make, *_, wrapper = MODULES[name]
        module = shaken(make())
        sharded = wrapper(module)
        for decay in (0.5, weights if name == "intention" else weights[..., None]):
            before = call(sharded, parts[0], module.init_state(2) if hasattr(module, "init_state") else None, None)
            whole = call(module, first, module.init_state(2) if hasattr(module, "init_state") else None, None)
            close(call(sharded, parts[1], before, decay), call(module, second, whole, decay), 1e-11)
        for wrong in (2.0, 0.0):
            with raises(ValueError, "decay: got "):
                call(sharded, parts[1], before, wrong)


def case_own_streams_are_the_same_on_all_ranks() -> None:
    """A module's own stream advances in the same way on all ranks, and is saved and loaded; an error does not change
    it."""
    inputs, query, _ = data()
    for make, *_, wrapper in (MODULES["block"], MODULES["stack"], MODULES["intention"]):
        module = shaken(make())
        sharded = wrapper(module)
        extra = (query,) if wrapper is ShardedCMAB else ()
        with torch.no_grad():
            for part in own(inputs, 1).split(
                [1, own(inputs, 1).shape[1] - 1] if own(inputs, 1).shape[1] else [0, 0], 1
            ):
                sharded.update(part, *extra)
        alone = copy.deepcopy(module)
        alone.stream.state = None
        with torch.no_grad():
            alone.update(inputs, *extra)
        close(module.stream.state, alone.stream.state, 1e-11)
        same_bits_on_all_ranks(module.stream.state)
        again = wrapper(make().double())
        again.load_state_dict(sharded.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(again.module.stream.state, module.stream.state, strict=True))
        before = module.stream.state
        with raises(RuntimeError, "requires a gradient"):
            sharded.update(own(inputs, 1), *extra)
        assert all(a is b for a, b in zip(module.stream.state, before, strict=True))


def case_encoded_files() -> None:
    """Each rank encodes its own chunks; the merged states give the result and the gradients of all chunks."""
    stack, (inputs, query, _) = shaken(CMABStack(DIM, 5, HEADS, depth=2)), data()
    whole = stack(inputs, query)
    wanted = torch.autograd.grad(whole.sin().sum(), list(stack.parameters()))
    state = all_merge_state(stack.encode(list(own(inputs, 1).split(2, 1)), stack.init_state(2)))
    out = stack.retrieve(query, state)
    close(out, whole, 1e-11)
    found = summed(torch.autograd.grad(out.sin().sum(), list(stack.parameters())))
    close([gradient / dist.get_world_size() for gradient in found], list(wanted), 1e-9)


def case_an_error_on_one_rank_is_raised_on_all() -> None:
    """No rank waits for a rank that raises an error for its inputs, and states do not change."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    inputs, query, mask = data()
    block, stack, attention, fit = (shaken(make()) for make, *_ in MODULES.values())
    calls: list[Callable[[Tensor, Tensor], Any]] = [
        lambda part, masked: ShardedCMAB(block)(part, query, key_padding_mask=masked),
        lambda part, masked: ShardedCMAB(block).update(part, query, key_padding_mask=masked),
        lambda part, masked: ShardedCMAB(stack).update(part, query, key_padding_mask=masked),
        lambda part, masked: ShardedMultiheadAttention(attention)(query, part, part, masked),
        lambda part, masked: ShardedMultiheadAttention(attention).attend_state(query, part, key_padding_mask=masked),
        lambda part, masked: ShardedMultiheadIntention(fit)(query, part, part, masked),
        lambda part, masked: ShardedMultiheadIntention(fit).update(part, key_padding_mask=masked),
    ]
    for call in calls:
        for part, masked, error in (
            (inputs[..., :3], mask, ValueError),
            (inputs.float(), mask, TypeError),
            (inputs, mask[:, 1:], ValueError),
        ):
            with (
                torch.no_grad(),
                raises(error) if rank == last else raises(RuntimeError, f"rank {last} raised an error and sent none"),
            ):
                call(*((part, masked) if rank == last else (inputs, mask)))
    assert block.stream.state is None and stack.stream.state is None and fit.stream.state is None
    with raises(ValueError, "one type, shape and dtype on all ranks", "(1, 3, 5, 4)"):
        ShardedCMAB(block)(inputs[: 1 if rank == last else 2], query[: 1 if rank == last else 2])


def refused(call: Callable[[bool], Any], error: type[Exception]) -> None:
    """Assert that the last rank, whose argument is wrong, raises this error, and that the others report that its state
    is missing."""
    last = dist.get_world_size() - 1
    with (
        raises(error) if dist.get_rank() == last else raises(RuntimeError, f"rank {last} raised an error and sent none")
    ):
        call(dist.get_rank() == last)


def case_what_follows_the_merge_is_checked_before_it() -> None:
    """If one rank cannot continue with its query, state or stream, no rank continues: no backward pass waits, and no
    stream advances."""
    inputs, query, _ = data()
    block, stack, attention, fit = (shaken(make()) for make, *_ in MODULES.values())
    queried: list[Callable[[Any], Tensor]] = [
        lambda given: ShardedCMAB(block)(inputs, given),
        lambda given: ShardedCMAB(stack)(inputs, given),
        lambda given: ShardedMultiheadAttention(attention)(given, inputs, inputs)[0],
        lambda given: ShardedMultiheadIntention(fit)(given, inputs, inputs)[0],
    ]
    for call in queried:
        for bad, error in (
            (query[..., :3], ValueError),
            (query.float(), TypeError),
            (query[:1], ValueError),
            (None, TypeError),
        ):
            refused(lambda wrong, call=call, bad=bad: call(bad if wrong else query).sum().backward(), error)
    for call in queried[:2]:
        refused(lambda wrong, call=call: call(query.to_sparse() if wrong else query).sum().backward(), TypeError)

    streams: list[tuple[Callable[[int], Any], Callable[[Any], tuple]]] = [
        (block.init_state, lambda state: ShardedCMAB(block).update(inputs, query, state)),
        (stack.init_state, lambda state: ShardedCMAB(stack).update(inputs, query, state)),
        (fit.init_state, lambda state: ShardedMultiheadIntention(fit).update(inputs, state=state)),
        (
            lambda batch: ck.empty_state(batch, HEADS, 4, DIM // HEADS, dtype=torch.float64),
            lambda state: ShardedMultiheadAttention(attention).attend_state(query, inputs, state),
        ),
    ]
    for start, call in streams:
        good = start(2)
        for bad, error in (
            (start(3), ValueError),
            (good._replace(**{good._fields[0]: good[0].float()}), TypeError),
            ("none", TypeError),
        ):
            refused(
                lambda wrong, call=call, bad=bad, good=good: call(bad if wrong else good)[0].sum().backward(), error
            )
    with torch.no_grad():
        for module, (start, call) in zip((block, stack, fit), streams, strict=False):
            module.stream.state = start(3) if dist.get_rank() == dist.get_world_size() - 1 else None
            before = module.stream.state
            refused(lambda _, call=call: call(None), ValueError)
            assert module.stream.state is before or all(
                a is b for a, b in zip(module.stream.state, before, strict=True)
            )


def case_queries_of_inference_mode() -> None:
    """Autograd does not accept inference tensors, so a rank that has one continues with a copy. Otherwise the other
    ranks would wait in the backward pass."""
    inputs, query, _ = data()
    for make, _, call, wrapper in (MODULES["block"], MODULES["stack"], MODULES["intention"]):
        module = shaken(make())
        with torch.inference_mode(dist.get_rank() == 0):
            given = query.clone()
        out = call(wrapper(module), inputs, given, None)
        out.sum().backward()
        close(out, call(wrapper(module), inputs, query, None))


def case_construction() -> None:
    with raises(
        TypeError,
        "module: got a torch.nn.modules.linear.Linear, expected a cmab_kernels.nn.CMAB or a cmab_kernels.nn.CMABStack",
    ):
        ShardedCMAB(nn.Linear(2, 2))
    with raises(
        TypeError,
        "module: got a torch.nn.modules.activation.MultiheadAttention, expected a cmab_kernels.nn.MultiheadAttention",
    ):
        ShardedMultiheadAttention(nn.MultiheadAttention(DIM, HEADS))
    dropping = ShardedMultiheadAttention(MultiheadAttention(DIM, HEADS, dropout=0.5, batch_first=True).double())
    inputs, query, _ = data()
    with raises(RuntimeError, "dropout: "):
        dropping(query, inputs, inputs)
    assert dropping.eval()(query, inputs, inputs)[0].shape == query.shape


def train(module: nn.Module, call: Callable[[Tensor], Tensor], steps: Tensor) -> None:
    """Take steps of SGD on a loss that is the same on all ranks."""
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    for inputs in steps:
        optimizer.zero_grad()
        call(inputs).sin().mean().backward()
        optimizer.step()


def same_as_one_process(
    wrapped: Callable[[nn.Module], nn.Module], weights: Callable[[nn.Module], list[Tensor]]
) -> None:
    """Train each module sharded and wrapped, and alone on all inputs; assert that parameters change, and that both end
    with the same values."""
    _, query, mask = data()
    steps = torch.randn(3, 2, POINTS, DIM).double()
    for make, call, call_sharded, wrapper in MODULES.values():
        alone = shaken(make())
        start = [parameter.detach().clone() for parameter in alone.parameters()]
        module = wrapped(wrapper(copy.deepcopy(alone)))
        train(alone, lambda inputs, call=call, module=alone: call(module, inputs, query, mask), steps)
        train(
            module,
            lambda inputs, call=call_sharded, module=module: call(module, own(inputs, 1), query, own(mask, 1)),
            steps,
        )
        ended = weights(module)
        close(ended, list(alone.parameters()), 1e-10)
        assert any((a - b).abs().max() > 1e-3 for a, b in zip(ended, start, strict=True))


def case_distributed_data_parallel() -> None:
    same_as_one_process(
        DistributedDataParallel, lambda module: [parameter.detach() for parameter in module.parameters()]
    )


def case_fully_shard() -> None:
    """Training gives the same values if the parameters are also spread over the ranks (FSDP2)."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))

    def wrapped(module: nn.Module) -> nn.Module:
        return fully_shard(module, mesh=mesh)

    same_as_one_process(wrapped, lambda module: [parameter.full_tensor().detach() for parameter in module.parameters()])


def case_batch_and_context_both_spread() -> None:
    """A module merges over its own group: here each rank is a group, with its own batch."""
    inputs, query, _ = data()
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    block = shaken(CMAB(DIM, 5, HEADS))
    close(
        ShardedCMAB(block, group)(inputs * (dist.get_rank() + 1), query),
        block(inputs * (dist.get_rank() + 1), query),
        1e-12,
    )

"""Cases: merged states, the messages that are sent, and errors."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

import cmab_kernels as ck
from cmab_kernels import AttentionState, RidgeState
from cmab_kernels.distributed import all_merge_state, merge, messages

from .common import close, counted, own, raises, same_bits_on_all_ranks


class OwnState(AttentionState):
    """A state with a type of its own."""


def states(kind: type, *leading: int, dtype: torch.dtype = torch.float64) -> list:
    """Return a state for each rank, known to all ranks; if there are three, the last is empty."""
    found = []
    for rank in range(dist.get_world_size()):
        if kind is AttentionState:
            out, lse = torch.randn(*leading, 3, 5, dtype=dtype), 30 * torch.randn(*leading, 3, dtype=torch.float64)
            state = AttentionState(out.zero_(), lse.fill_(-math.inf)) if rank == 2 else AttentionState(out, lse)
        else:
            key, value = torch.randn(*leading, 7, 4, dtype=dtype), torch.randn(*leading, 7, 3, dtype=dtype)
            state = RidgeState(key.mT @ key, key.mT @ value, torch.full(leading, 7))
            state = RidgeState(*(part.zero_() for part in state)) if rank == 2 else state
        found.append(state)
    return found


def equal(ours: tuple, theirs: tuple) -> bool:
    return type(ours) is type(theirs) and all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True)
    )


def case_attention_states_merge_to_the_same_bits() -> None:
    """With any number of leading dimensions (also none), both dtypes and any strides, each rank gets `merge_states` of
    all states."""
    for dtype in (torch.float32, torch.float64):
        for leading in ((), (2,), (2, 3), (2, 1, 3), (2, 0, 3)):
            parts = states(AttentionState, *leading, dtype=dtype)
            part = parts[dist.get_rank()]
            merged = all_merge_state(part._replace(out=part.out.mT.contiguous().mT))
            assert equal(merged, ck.merge_states(*parts))
            assert equal(all_merge_state(part._replace(out=torch._neg_view(-part.out))), merged), "a lazy negation"
            same_bits_on_all_ranks(merged)


def case_ridge_states_merge_to_the_same_bits() -> None:
    for leading in ((2,), (2, 3), (2, 1, 3), (0, 3)):
        parts = states(RidgeState, *leading)
        merged = all_merge_state(parts[dist.get_rank()])
        assert equal(merged, RidgeState(*(sum(each[1:], start=each[0]) for each in zip(*parts, strict=True))))
        same_bits_on_all_ranks(merged)


def case_keys_of_all_ranks_count_once() -> None:
    """A merged state equals one pass over all keys. The parts have different lengths, one part is masked, and with
    three ranks one part is empty."""
    query, key, value = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 11, 6), torch.randn(2, 3, 11, 5)
    mask = torch.zeros(2, 11, dtype=torch.bool)
    for masked in (slice(0, 0), slice(0, 3), slice(3, 11), slice(0, 11)):
        mask[:] = False
        mask[:, masked] = True
        q, k, v = (tensor.double() for tensor in (query, key, value))
        merged = all_merge_state(ck.attention_state(q, own(k, 2), own(v, 2), key_padding_mask=own(mask, 1)))
        close(merged, ck.attention_state(q, k, v, key_padding_mask=mask))
        sums = all_merge_state(ck.ridge_state(own(k, 2), own(v, 2), key_padding_mask=own(mask, 1)))
        close(sums, ck.ridge_state(k, v, key_padding_mask=mask))
        assert torch.equal(sums.count, torch.full((2, 3), 11 - int(mask[0].sum())))


def case_one_collective_whose_bytes_do_not_depend_on_the_keys() -> None:
    group = dist.new_group()
    query = torch.randn(2, 3, 4, 6)
    header, size = 8 * messages.NUMBERS, 2 * 3 * 4 * (4 * 6 + 8)
    for count in (1, 1000):
        state = ck.attention_state(query, *torch.randn(2, 2, 3, count, 6))
        with counted() as calls:
            all_merge_state(state, group)
        assert [sent for _, sent in calls] == [header + (messages.FIRST_ROOM if count == 1 else size)]
    for large in (ck.empty_state(4, 8, 64, 32), ck.empty_ridge(4, 8, 64, 32)):
        size = sum(field.nbytes for field in large)
        with counted() as first:
            all_merge_state(large, group)
        with counted() as second:
            all_merge_state(large, group)
        assert [sent for _, sent in first][1:] == [size]
        assert [sent for _, sent in second] == [header + size]
    with counted() as calls:
        all_merge_state(state, group)
    assert [sent for _, sent in calls] == [header + size]


def case_errors_are_raised_on_all_ranks() -> None:
    """If ranks have different states, all raise an error that names the state of each rank, and can continue."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    good = ck.empty_state(1, 2, 3, 4)
    different: dict[str, tuple[object, type[Exception], str]] = {
        "a shape": (ck.empty_state(1, 2, 3, 5), ValueError, "(1, 2, 3, 5)"),
        "a shape of many bytes": (ck.empty_state(64, 8, 64, 16), ValueError, "(64, 8, 64, 16)"),
        "a shape of as many bytes": (ck.empty_state(2, 1, 3, 4), ValueError, "(2, 1, 3, 4)"),
        "a dimension": (ck.AttentionState(*(part[None] for part in good)), ValueError, "(1, 1, 2, 3, 4)"),
        "a dtype": (ck.empty_state(1, 2, 3, 4, dtype=torch.float64), TypeError, "torch.float64"),
        "a type": (ck.empty_ridge(1, 2, 3, 4), TypeError, "RidgeState"),
    }
    for other, error, word in different.values():
        with raises(
            error,
            "state: got ",
            f"rank {last}: ",
            word,
            "(1, 2, 3, 4) torch.float32",
            "one type, shape and dtype on all ranks",
        ):
            all_merge_state(other if rank == last else good)  # type: ignore[type-var]
        assert equal(all_merge_state(good), good)
    nested = torch.nested.nested_tensor([good.out[0], good.out[0, :1]], layout=torch.strided)
    unfit: list[tuple[object, type[Exception], str]] = [
        ("a word", TypeError, "state: got a str"),
        ((good.out, good.lse), TypeError, "state: got a tuple"),
        (good._replace(lse=None), TypeError, "state.lse: got None"),
        (good._replace(lse=good.lse.float()), TypeError, "state.lse: got torch.float32, expected torch.float64"),
        (good._replace(lse=good.lse[:, :1]), ValueError, "state.lse: got shape (1, 1, 3), expected (1, 2, 3)"),
        (good._replace(lse=good.lse.to("meta")), ValueError, "state.lse: got device meta"),
        (AttentionState(*(part.to("meta") for part in good)), TypeError, "state: got tensors on device meta"),
        (
            AttentionState(*(part.to_sparse() for part in good)),
            TypeError,
            "state.out: got torch.sparse_coo, expected a dense tensor",
        ),
        (
            good._replace(lse=good.lse.to_sparse()),
            TypeError,
            "state.lse: got torch.sparse_coo, expected a dense tensor",
        ),
        (good._replace(out=nested), TypeError, "state.out: got a nested tensor, expected a dense tensor"),
        (OwnState(*good), TypeError, "state: got an OwnState, expected an AttentionState or a RidgeState"),
        (good._replace(out=good.out.half()), TypeError, "state.out: got torch.float16, expected torch.float32"),
        (
            ck.empty_ridge(1, 2, 3, 4)._replace(gram=torch.zeros(3, 3).double()),
            ValueError,
            "state.gram: got shape (3, 3), expected (1, 2, 3, 3)",
        ),
        (ck.empty_ridge(1, 2, 3, 4)._replace(count=torch.zeros(1, 2)), TypeError, "state.count: got torch.float32"),
        (ck.AttentionState(torch.zeros([1] * 13), torch.zeros([1] * 12).double()), ValueError, "13 dimensions"),
    ]
    for state, error, words in unfit:
        with raises(error, words) if rank == 0 else raises(RuntimeError, "state: rank 0 raised an error and sent none"):
            all_merge_state(state if rank == 0 else good)  # type: ignore[type-var]
        assert equal(all_merge_state(good), good)


def case_as_on_a_gpu() -> None:
    """A rank that would have to wait for headers reads headers only for new shapes, and gets NaN if other ranks changed
    their shapes."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    before, messages._waits = messages._waits, lambda tensor: True
    group = dist.new_group()
    try:
        for kind in (AttentionState, RidgeState):
            with torch.no_grad():
                for parts in (states(kind, 2), states(kind, 3), states(kind, 2)):
                    wanted = all_merge_state(parts[rank])
                    for _ in range(2):
                        assert equal(all_merge_state(parts[rank], group), wanted)
                if rank == last:
                    with raises(ValueError, "one type, shape and dtype on all ranks"):
                        all_merge_state(states(kind, 7)[rank], group)
                else:
                    assert all(field.isnan().all() for field in all_merge_state(parts[rank], group)[:2])
                assert equal(all_merge_state(parts[rank], group), wanted)
            for wanting in ((0, 1, 2), (0,), (0, 1, 2), (last,)):
                part = kind(
                    *(
                        field.clone().requires_grad_(field.is_floating_point() and rank in wanting)
                        for field in parts[rank]
                    )
                )
                all_merge_state(part, group)[0].sum().backward()
                assert (part[0].grad is not None) == (rank in wanting)
    finally:
        messages._waits = before


def case_an_error_of_packing_reaches_all_ranks() -> None:
    """Memory may run out here."""
    state, packed = ck.empty_state(1, 2, 3, 4), merge.packed_bytes

    def fail(_: object) -> None:
        raise MemoryError("no memory is left")

    merge.packed_bytes = fail if dist.get_rank() == 0 else packed
    try:
        with (
            raises(MemoryError, "no memory")
            if dist.get_rank() == 0
            else raises(RuntimeError, "state: rank 0 raised an error and sent none")
        ):
            all_merge_state(state)
    finally:
        merge.packed_bytes = packed


def case_groups() -> None:
    """A group of some ranks merges the states of these ranks; other ranks get an error. Merges over groups compose."""
    rank, parts = dist.get_rank(), states(AttentionState, 2)
    members = [0, dist.get_world_size() - 1]
    group = dist.new_group(members)
    if rank in members:
        assert equal(all_merge_state(parts[rank], group), ck.merge_states(*(parts[member] for member in members)))
    else:
        with raises(TypeError, "expected a ProcessGroup that this process belongs to"):
            all_merge_state(parts[rank], group)
    with raises(TypeError, "group: got 'all'"):
        all_merge_state(parts[rank], "all")  # type: ignore[arg-type]
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    close(all_merge_state(all_merge_state(parts[rank], alone)), ck.merge_states(*parts))


def case_states_of_many_sizes_in_any_order() -> None:
    """The ranks agree on the room in a message, whatever was merged before, even in a group whose first state is
    empty."""
    group = dist.new_group()
    for batch in (0, 1, 40, 3, 200, 199, 201, 0, 7):
        parts = [
            ck.AttentionState(torch.randn(batch, 2, 16, 5), torch.randn(batch, 2, 16).double())
            for _ in range(dist.get_world_size())
        ]
        assert equal(all_merge_state(parts[dist.get_rank()], group), ck.merge_states(*parts))


def case_a_new_group_knows_nothing_of_an_old_one() -> None:
    """An agreement of ranks is forgotten with the group."""
    before = len(messages._AGREEMENTS)
    group = dist.new_group()
    all_merge_state(ck.empty_state(1, 2, 3, 4), group)
    assert len(messages._AGREEMENTS) == before + 1
    dist.destroy_process_group(group)
    del group
    assert len(messages._AGREEMENTS) == before

"""Blocks that read a sliding window: the results of `update`, and the window that the module's own stream holds."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import cmab_kernels as ck
from cmab_kernels import nn
from cmab_kernels.distributed import ShardedCMAB
from cmab_kernels.nn import CMAB, CMABStack

DIM, LATENTS, HEADS, WINDOW = 12, 5, 3, 3


def made(stacked: bool, window: int | None = WINDOW, dtype: torch.dtype = torch.float64) -> Any:
    if stacked:
        return CMABStack(DIM, LATENTS, HEADS, 2, dtype=dtype, window=window).eval()
    return CMAB(DIM, LATENTS, HEADS, dtype=dtype, window=window).eval()


def chunk(points: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, points, DIM, dtype=dtype)


wanted_latents = torch.randn(4, DIM, dtype=torch.float64)
BOTH = pytest.mark.parametrize("stacked", [False, True])
pytestmark = pytest.mark.usefixtures("no_gradients")


@BOTH
def test_an_update_is_over_the_newest_chunks(stacked: bool) -> None:
    block, chunks = made(stacked), [chunk(n) for n in (4, 1, 0, 7, 2, 5, 3)]
    for step, new in enumerate(chunks):
        latents, state = block.update(new, wanted_latents)
        held = torch.cat(chunks[max(0, step + 1 - WINDOW) : step + 1], dim=1)
        torch.testing.assert_close(latents, block(held, wanted_latents), rtol=1e-12, atol=1e-12)
        assert all(map(torch.equal, state, block.stream.state)) and len(block.stream.held) == min(step + 1, WINDOW)


@BOTH
def test_padding_and_one_by_one(stacked: bool) -> None:
    """Masked inputs do not count; with hooks the modules run one by one."""
    block, other = made(stacked), made(stacked)
    other.load_state_dict(block.state_dict())
    for module in other.modules():
        module.register_forward_hook(lambda *_: None)
    points, masks = torch.randn(2, 20, DIM, dtype=torch.float64), torch.rand(2, 20) < 0.4
    for new, mask in zip(points.split(4, 1), masks.split(4, 1), strict=True):
        found = (
            block.update(new, wanted_latents, key_padding_mask=mask),
            other.update(new, wanted_latents, key_padding_mask=mask),
        )
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    right = block(points[:, -4 * WINDOW :], wanted_latents, key_padding_mask=masks[:, -4 * WINDOW :])
    torch.testing.assert_close(found[0].latents, right, rtol=1e-12, atol=1e-12)


@BOTH
def test_a_state_that_is_passed_has_no_window(stacked: bool) -> None:
    block, plain = made(stacked), made(stacked, window=None)
    plain.load_state_dict(block.state_dict())
    state, theirs = block.init_state(2), plain.init_state(2)
    for _ in range(5):
        new = chunk()
        (latents, state), (right, theirs) = (
            block.update(new, wanted_latents, state),
            plain.update(new, wanted_latents, theirs),
        )
        assert torch.equal(latents, right)
    removed = block.remove(new, wanted_latents, state)
    assert torch.equal(removed.latents, plain.remove(new, wanted_latents, theirs).latents)
    assert block.stream.state is None


def test_a_spike_leaves_without_a_trace() -> None:
    """A chunk of huge inputs leaves; the state equals that of a stream that never contained it, also in float32."""
    block = made(False, dtype=torch.float32)
    block.compress.cross_attention.key.weight.mul_(100)
    points, latents = [chunk(dtype=torch.float32) for _ in range(8)], wanted_latents.float()
    for new in points:
        found = block.update(new, latents)
    block.stream.state = None
    for new in points[-WINDOW:]:
        never = block.update(new, latents)
    torch.testing.assert_close(found.state.out, never.state.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.state.lse, never.state.lse, rtol=1e-12, atol=1e-12)


def saved(module: torch.nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@BOTH
def test_saved_copied_and_cast(stacked: bool) -> None:
    block = made(stacked)
    for step in range(7):
        block.update(chunk(), wanted_latents)
        second, third = made(stacked), made(stacked)
        second.load_state_dict(saved(block))
        third.load_state_dict(block.state_dict(), assign=True)
        fourth = made(stacked)
        set_model_state_dict(fourth, get_model_state_dict(block))
        others = [
            second,
            third,
            fourth,
            copy.copy(block),
            copy.deepcopy(block),
            pickle.loads(pickle.dumps(block)),
            copy.deepcopy(block).to("cpu"),
        ]
        new = chunk()
        right = copy.deepcopy(block).update(new, wanted_latents)
        for other in others:
            assert all(map(torch.equal, other.update(new, wanted_latents).state, right.state))
        assert len(block.stream.held) == min(step + 1, WINDOW), "the copies step by themselves"
    before = block.stream.state
    single = copy.deepcopy(block).float()
    assert single.stream.state.out.dtype == torch.float32 and torch.equal(single.stream.state.lse, before.lse)
    bits = single.stream.state
    assert all(map(torch.equal, single.half().stream.state, bits)), "casts below float32 leave the bits"
    assert {part.device.type for part in single.to("meta").stream.state} == {"meta"}
    assert single.to_empty(device="cpu").stream.state is None


@BOTH
def test_weights_alone_end_the_stream_and_other_windows_are_refused(stacked: bool) -> None:
    block, plain, longer = made(stacked), made(stacked, window=None), made(stacked, window=WINDOW + 1)
    weights = block.state_dict()
    for each in (block, plain, longer):
        each.update(chunk(), wanted_latents)
    for other in (plain, longer):
        before = block.stream.state
        with pytest.raises(RuntimeError, match=r"stream\."):
            block.load_state_dict(other.state_dict())
        with pytest.raises(RuntimeError, match=r"stream\."):
            other.load_state_dict(block.state_dict())
        assert all(map(torch.equal, block.stream.state, before))
    assert all(part.isfinite().all() for part in plain.stream.state)
    block.load_state_dict(weights)
    assert block.stream.state is None and not [name for name in block.state_dict() if name.startswith("stream.")]


@pytest.mark.parametrize("stacked", [False, True])
def test_mutated_files_are_refused(stacked: bool) -> None:
    block = made(stacked)
    for _ in range(5):
        block.update(chunk(), wanted_latents)
    good, before = block.state_dict(), block.stream.state
    for name, wrong, match in (
        ("front", torch.tensor(4), "stream.front: got 4"),
        ("front", torch.tensor(1.0), "stream.front: got torch.float32"),
        ("size", torch.tensor(7), "stream.size: got 7, expected 3"),
        ("out", good["stream.out"][:1], "stream.lse: got"),
        ("out", good["stream.out"][..., :1], "stream.out: got"),
        ("out", good["stream.out"].float(), "stream.out: got torch.float32"),
        ("out", good["stream.out"] * torch.nan, "stream.out: got a NaN"),
        ("lse", good["stream.lse"] + torch.inf, r"stream.lse: got [+]inf"),
        ("lse", None, "stream.lse: got None"),
    ):
        with pytest.raises(RuntimeError, match=match):
            block.load_state_dict({**good, f"stream.{name}": wrong})
        assert all(map(torch.equal, block.stream.state, before))


@BOTH
def test_what_is_refused_leaves_the_window(stacked: bool) -> None:
    block = made(stacked)
    with pytest.raises(ValueError, match=r"^state: got None, expected a state, because the module's own window"):
        block.remove(chunk(), wanted_latents)
    block.update(chunk(), wanted_latents)
    before = block.stream.state
    with pytest.raises(ValueError, match=r"^decay: got a float, expected None"):
        block.update(chunk(), wanted_latents, decay=0.5)
    with pytest.raises(ValueError, match=r"^state.out: got shape"):
        block.update(chunk()[:1], wanted_latents)
    with torch.enable_grad(), pytest.raises(RuntimeError, match=r"^state: it requires a gradient"):
        block.update(chunk(), wanted_latents)
    handle = (block.blocks[-1] if stacked else block).retrieve.register_forward_hook(_fail)
    with pytest.raises(KeyError):
        block.update(chunk(), wanted_latents)
    handle.remove()
    assert all(map(torch.equal, block.stream.state, before)) and len(block.stream.held) == 1
    for window in (0, -1, 1.5, "3", True):
        with pytest.raises(ValueError, match=r"^window: got .*, expected an int >= [01]"):
            made(stacked, window)


def _fail(*_: object) -> None:
    raise KeyError


def test_an_assigned_state_begins_a_window() -> None:
    block, whole = made(False), chunk(10)
    block.stream.state = block.update(whole, wanted_latents, block.init_state(2)).state
    chunks = [chunk() for _ in range(WINDOW)]
    found = [block.update(new, wanted_latents).latents for new in chunks]
    torch.testing.assert_close(
        found[0], block(torch.cat([whole, chunks[0]], 1), wanted_latents), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(found[-1], block(torch.cat(chunks, 1), wanted_latents), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"^state.out: got shape"):
        block.stream.state = ck.empty_state(2, 1, 1, 1, dtype=torch.float64)


def test_blocks_that_change_end_the_window() -> None:
    stack = made(True)
    stack.update(chunk(), wanted_latents)
    stack.blocks.append(CMAB(DIM, LATENTS, HEADS, dtype=torch.float64))
    new = chunk()
    torch.testing.assert_close(
        stack.update(new, wanted_latents).latents, stack(new, wanted_latents), rtol=1e-12, atol=1e-12
    )
    assert len(stack.stream.held) == 1


def test_compiled_and_recorded() -> None:
    block, other = made(False, dtype=torch.float32), made(False, dtype=torch.float32)
    other.load_state_dict(block.state_dict())
    compiled, latents = torch.compile(block.update, backend="eager"), wanted_latents.float()
    for _ in range(3):
        new = chunk(dtype=torch.float32)
        torch.testing.assert_close(compiled(new, latents).latents, other.update(new, latents).latents)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, new: Tensor) -> Tensor:
            return self.block.update(new, latents).latents

    with pytest.raises(Exception, match=r"torch\.export"):
        torch.export.export(Step(), (new,), strict=False)


def test_a_transform_does_not_enter_the_window() -> None:
    block = made(False)
    with pytest.raises(RuntimeError, match=r"^stream: it would hold tensors that belong to a transform"):
        torch.func.vmap(lambda new: block.update(new, wanted_latents).latents)(
            torch.randn(3, 2, 4, DIM, dtype=torch.float64)
        )
    assert block.stream.state is None


def test_ranks_need_a_state() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = ShardedCMAB(made(False))
        with pytest.raises(ValueError, match=r"^state: got None, expected a state, as the window"):
            sharded.update(chunk(), wanted_latents)
        assert sharded.update(chunk(), wanted_latents, sharded.init_state(2)).latents.shape == (2, 4, DIM)
    finally:
        dist.destroy_process_group()


def test_half_precision_keeps_a_float32_window() -> None:
    block = nn.CMAB(DIM, LATENTS, HEADS, window=2, dtype=torch.bfloat16).eval()
    for _ in range(3):
        latents, state = block.update(chunk(dtype=torch.bfloat16), wanted_latents.bfloat16())
    assert latents.dtype == torch.bfloat16 and state.out.dtype == torch.float32

"""`nn.CMABStack` equals its blocks one after the other, as a stream or at once, in constant memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from cmab_kernels import AttentionState
from cmab_kernels.nn import CMAB, CMABStack

DIM, BLOCK, HEADS, DEPTH, BATCH, INPUTS, LATENTS = 12, 5, 3, 3, 2, 41, 4


def stack(dtype: torch.dtype = torch.float64) -> CMABStack:
    """Return a stack in which every parameter affects the result."""
    made = CMABStack(DIM, BLOCK, HEADS, DEPTH, dtype=dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return made


def points(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, INPUTS, DIM, dtype=dtype), torch.randn(BATCH, LATENTS, DIM, dtype=dtype)


def close(ours: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    for mine, other in zip(tree_iter(ours), tree_iter(theirs), strict=True):
        torch.testing.assert_close(
            mine, other, rtol=tolerance, atol=tolerance * max(1.0, float(other.detach().abs().max()))
        )


def same(ours: AttentionState, theirs: AttentionState) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def one_by_one(
    module: CMABStack, inputs: Tensor, latents: Tensor, ignore: Tensor | None = None, depth: int = DEPTH
) -> Tensor:
    for block in module.blocks[:depth]:
        latents = block(inputs, latents, key_padding_mask=ignore)
    return latents


@pytest.mark.parametrize("masked", [False, True])
def test_it_equals_its_blocks_with_all_gradients(masked: bool) -> None:
    module = stack()
    inputs, latents = (t.requires_grad_() for t in points())
    ignore = torch.rand(BATCH, INPUTS) < 0.4 if masked else None
    leaves = [inputs, latents, *module.parameters()]
    ours, theirs = module(inputs, latents, key_padding_mask=ignore), one_by_one(module, inputs, latents, ignore)
    close(ours, theirs)
    close(torch.autograd.grad(ours.sin().sum(), leaves), torch.autograd.grad(theirs.sin().sum(), leaves))


def test_one_pass_serves_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    module, (inputs, latents) = stack(), points()
    monkeypatch.setattr("cmab_kernels.nn.CMAB._read", None)
    assert module(inputs, latents).shape == latents.shape


def test_a_projection_with_a_hook_is_called() -> None:
    module, (inputs, latents) = stack(), points()
    expected, called = module(inputs, latents), []
    module.blocks[1].compress.cross_attention.key.register_forward_hook(lambda *_: called.append(1))
    close(module(inputs, latents), expected)
    assert called
    called.clear()
    counts: list[int] = []
    state = module.encode(inputs.split(9, 1), progress=lambda count, _: counts.append(count))
    close(module.retrieve(latents, state), expected)
    assert len(called) == len(counts) == len(inputs.split(9, 1))
    with pytest.raises(ValueError, match=r"^chunks: got no chunk"):
        module.encode([])


@pytest.mark.parametrize("all_blocks", [False, True])
def test_a_block_with_a_hook_is_called(all_blocks: bool) -> None:
    """A block with a hook is called, and so is a block that is wrapped by `fully_shard` or a checkpoint, so that its
    weights exist only during its call."""
    module, (inputs, latents) = stack(), points()
    expected, seen = module(inputs, latents, all_blocks=True), []
    for block in module.blocks:
        block.register_forward_hook(lambda _module, _given, result: seen.append(result))
    close(module(inputs, latents, all_blocks=all_blocks), expected if all_blocks else expected[-1])
    close(torch.stack(seen), expected)


class Wrapper(torch.nn.Module):
    """A block under another name, as in wrappers of other packages."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Any, **options: Any) -> Any:
        return self.inner(*given, **options)


@pytest.mark.parametrize("wrapped", [(0,), (1,), (0, 1, 2)])
def test_a_block_in_a_wrapper_is_called(wrapped: tuple[int, ...]) -> None:
    """The module has no state, and calls that need a state name it in their error."""
    module, (inputs, latents) = stack(), points()
    expected = module(inputs, latents)
    for i in wrapped:
        module.blocks[i] = Wrapper(module.blocks[i])
    close(module(inputs, latents), expected)
    with pytest.raises(ValueError, match=r"^(inputs|latents): got shape"):
        module(inputs[..., :-1], latents)
    state = stack().init_state(BATCH)
    uses = {
        "update": lambda: module.update(inputs, latents, state),
        "remove": lambda: module.remove(inputs, latents, state),
        "read": lambda: module.read(inputs),
        "unread": lambda: module.unread(inputs, state),
        "encode": lambda: module.encode(inputs),
        "retrieve": lambda: module.retrieve(latents, state),
    }
    for use in uses.values():
        with pytest.raises(
            TypeError,
            match=rf"^blocks\[{wrapped[0]}\]: got a Wrapper, expected a CMAB, because only a CMAB has a state",
        ):
            use()


@pytest.mark.parametrize("name", ["compress", "compress.cross_attention"])
def test_a_layer_with_a_hook_is_called(name: str) -> None:
    module, (inputs, latents) = stack(), points()
    expected, called = module(inputs, latents), []
    module.blocks[1].get_submodule(name).register_forward_hook(lambda *_: called.append(1))
    close(module(inputs, latents), expected)
    assert called


def test_norms_may_differ_in_eps() -> None:
    module, (inputs, latents) = stack(), points()
    for position, block in enumerate(module.blocks):
        block.compress.cross_attention.context_norm.eps = 0.1 * (position + 1)
    close(module(inputs, latents), one_by_one(module, inputs, latents))
    close(module.update(inputs, latents, module.init_state(BATCH)).latents, one_by_one(module, inputs, latents))


def replaced(module: CMABStack, **options: Any) -> None:
    module.blocks[1] = CMAB(DIM, **{"num_latents": BLOCK, "num_heads": HEADS, "dtype": torch.float64, **options})


CHANGES: dict[str, Callable[[CMABStack], Any]] = {
    "one more": lambda module: module.blocks.append(CMAB(DIM, BLOCK, HEADS, dtype=torch.float64)),
    "one less": lambda module: module.blocks.__delitem__(0),
    "wider": lambda module: replaced(module, ff_dim=40),
    "another": replaced,
    "another order": lambda module: module.blocks.insert(0, module.blocks.pop(-1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_blocks_may_be_added_deleted_and_replaced(change: str) -> None:
    module, (inputs, latents) = stack(), points()
    CHANGES[change](module)
    expected = one_by_one(module, inputs, latents, depth=len(module.blocks))
    close(module(inputs, latents), expected)
    close(
        torch.autograd.grad(module(inputs, latents).sum(), [*module.parameters()]),
        torch.autograd.grad(expected.sum(), [*module.parameters()]),
    )
    close(module.retrieve(latents, module.encode(inputs, module.init_state(BATCH))), expected)
    with torch.no_grad():
        module.update(inputs[:, :9], latents)
        loaded = stack()
        CHANGES[change](loaded)
        loaded.load_state_dict(module.state_dict())
        close(loaded.update(inputs[:, 9:], latents).latents, expected)


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_stream_begins_anew_with_other_blocks(change: str) -> None:
    """A stream belongs to the blocks that read its inputs; a copied stream belongs to the copy's blocks."""
    module, (inputs, latents) = stack(), points()
    module.update(inputs[:, :9], latents)
    copies = [copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))]
    expected = module(inputs, latents)
    for each in copies:
        close(each.update(inputs[:, 9:], latents).latents, expected)
    CHANGES[change](module)
    assert not [name for name in copy.deepcopy(module).state_dict() if "stream" in name]
    close(
        module.update(inputs[:, 9:], latents).latents,
        one_by_one(module, inputs[:, 9:], latents, depth=len(module.blocks)),
    )


@pytest.mark.parametrize("options", [{"num_latents": 2}, {"num_heads": 2}])
def test_blocks_whose_states_differ_have_no_stream(options: dict[str, int]) -> None:
    module, (inputs, latents) = stack(), points()
    replaced(module, **options)
    close(module(inputs, latents), one_by_one(module, inputs, latents))
    with pytest.raises(
        ValueError, match=r"^blocks: got states of shapes .*, expected one shape for the one state of all"
    ):
        module.read(inputs)


def test_a_stack_without_blocks_is_named() -> None:
    module = stack()
    del module.blocks[:]
    with pytest.raises(ValueError, match=r"^blocks: got no block, expected at least one"):
        module(*points())


def test_updates_and_removals_equal_one_pass() -> None:
    module = stack()
    inputs, latents = (t.requires_grad_() for t in points())
    state = module.init_state(BATCH)
    for chunk in inputs.split(9, 1):
        streamed, state = module.update(chunk, latents, state)
    leaves, expected = [inputs, latents, *module.parameters()], module(inputs, latents)
    close(streamed, expected)
    close(torch.autograd.grad(streamed.sin().sum(), leaves), torch.autograd.grad(expected.sin().sum(), leaves), 1e-11)
    left, _, reliable = module.remove(
        inputs[:, :9], latents, module.update(inputs, latents, module.init_state(BATCH)).state
    )
    close(left, module(inputs[:, 9:], latents), 1e-8)
    assert reliable.shape == (DEPTH, BATCH, HEADS, BLOCK) and reliable.all()


def test_the_own_stream_is_saved_and_loaded() -> None:
    module, (inputs, latents) = stack(), points()
    with torch.no_grad():
        module.update(inputs[:, :20], latents)
        saved, other = module.state_dict(), stack()
        other.load_state_dict(saved)
        assert saved["stream.out"].shape == (DEPTH, BATCH, HEADS, BLOCK, DIM // HEADS)
        assert torch.equal(
            other.update(inputs[:, 20:], latents).latents, module.update(inputs[:, 20:], latents).latents
        )
        other.remove(inputs, latents)
    assert other.half().stream.state is not None and other.stream.state.out.dtype == torch.float32
    with pytest.raises(RuntimeError, match=rf"\bstream\.out\b.*\({DEPTH}, B, {HEADS}, {BLOCK}"):
        module.load_state_dict({**saved, "stream.out": saved["stream.out"][:1]})
    with pytest.raises(ValueError, match=r"^state.out: got shape"):
        module.update(inputs, latents, AttentionState(*(part[0] for part in module.init_state(BATCH))))


def test_bad_arguments_leave_the_stream_as_it_was() -> None:
    module, (inputs, latents) = stack(), points()
    with torch.no_grad():
        module.update(inputs, latents)
        before = module.stream.state
        for name, bad in (
            ("inputs", (inputs[..., 1:], latents)),
            ("latents", (inputs, latents[:1])),
            ("inputs", (inputs.float(), latents)),
        ):
            with pytest.raises((ValueError, TypeError), match=rf"^{name}: "):
                module.update(*bad)
        with pytest.raises(ValueError, match=r"^latents: got batch 1"):
            module.retrieve(latents[:1], module.init_state(BATCH))
    assert before is not None and module.stream.state is not None and same(before, module.stream.state)
    with pytest.raises(ValueError, match=r"^depth: got 0"):
        CMABStack(DIM, BLOCK, HEADS, 0)


def test_the_latents_of_every_block() -> None:
    module, (inputs, latents), state = stack(), points(), None
    every, expected = module(inputs, latents, all_blocks=True), latents
    for chunk in inputs.split(17, 1):
        state = module.read(chunk, state)
    retrieved = module.retrieve(latents, state, all_blocks=True)
    left, reliable = module.unread(inputs[:, 17:], state)
    close(left, module.read(inputs[:, :17]), 1e-9)
    assert reliable.all()
    for block, each, again in zip(module.blocks, every, retrieved, strict=True):
        expected = block(inputs, expected)
        close([each, again], [expected, expected])
    parameters = list(module.parameters())
    expected = torch.stack([one_by_one(module, inputs, latents, depth=k) for k in range(1, DEPTH + 1)])
    close(torch.autograd.grad(every.sin().sum(), parameters), torch.autograd.grad(expected.sin().sum(), parameters))
    assert module.stream.state is None
    with pytest.raises(ValueError, match="state"):
        module.read(inputs, module.init_state(BATCH + 1))
    with pytest.raises(ValueError, match="state"):
        module.unread(inputs, AttentionState(*(part[:1] for part in state)))
    for of_one_sequence in (module.unread, lambda given, one: module.remove(given, latents, one)):
        with pytest.raises(ValueError, match="state"):
            of_one_sequence(inputs, AttentionState(*(part[:, :1] for part in state)))

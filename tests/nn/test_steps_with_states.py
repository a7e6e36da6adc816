"""`_forward_step` takes and returns the state of a stream, computes what `forward_step` does, and can be recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import cmab_kernels.nn as ours

WINDOW: dict[str, Any] = {"sequence_len": 4, "batch_first": True}
LAYER: dict[str, Any] = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "sequence_len": 4}
MODULES: dict[str, Callable[[], Any]] = {
    "ContinualAttention": lambda: ours.ContinualAttention(16, 2, **WINDOW),
    "retroactive attention": lambda: ours.ContinualAttention(16, 2, output="retroactive", **WINDOW),
    "landmarks": lambda: ours.ContinualNystromAttention(16, 2, num_landmarks=2, **WINDOW),
    "layer": lambda: ours.ContinualEncoderLayer(**LAYER, num_landmarks=2),
    "norm first": lambda: ours.ContinualEncoderLayer(**LAYER, norm_first=True),
    "retroactive layer": lambda: ours.RetroactiveEncoderLayer(**LAYER, batch_first=True),
    "retroactive layer, tokens first": lambda: ours.RetroactiveEncoderLayer(**LAYER),
    "encoder": lambda: ours.ContinualEncoder(ours.ContinualEncoderLayer(**LAYER), 2, torch.nn.LayerNorm(16)),
    "retroactive encoder": lambda: ours.ContinualEncoder(ours.RetroactiveEncoderLayer(**LAYER), 2),
    "positions": lambda: ours.CircularPositionalEncoding(16, 4, batch_first=True),
}


def begun(name: str) -> tuple[Any, Any]:
    """A module whose own stream has seen one token, and the state after a full window of others."""
    torch.manual_seed(0)
    module, state = MODULES[name]().eval(), None
    module.forward_step(torch.randn(2, 16))
    for _ in range(8):
        state = module._forward_step(torch.randn(2, 16), prev_state=state)[1]
    return module, state


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("batch", [2, None])
@torch.no_grad()
def test_it_is_the_step_of_a_stream(name: str, batch: int | None) -> None:
    torch.manual_seed(0)
    module, state, apart = MODULES[name]().eval(), None, MODULES[name]().eval()
    apart.load_state_dict(module.state_dict())
    entries = module.state_dict().keys()
    for _ in range(12):
        token = torch.randn(16) if batch is None else torch.randn(batch, 16)
        out, state = module._forward_step(token, prev_state=state)
        wanted = apart.forward_step(token)
        assert (out is None) == (wanted is None)
        if out is not None:
            torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)
    assert module.state_dict().keys() == entries  # it has no stream
    module.set_state(state)
    assert torch.equal(module.forward_step(token), module._forward_step(token, prev_state=state)[0])


class Step(nn.Module):
    """A step of tensors: the state is given and returned as its tensors."""

    def __init__(self, module: Any, state: Any) -> None:
        super().__init__()
        self.module = module
        self.leaves, self.form = pytree.tree_flatten(state)

    def forward(self, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        out, state = self.module._forward_step(token, prev_state=pytree.tree_unflatten(leaves, self.form))
        return out, *(leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor))


def step_of(name: str) -> tuple[Step, tuple[Tensor, ...]]:
    """A step as a module, and tensors for it; a place becomes a tensor."""
    module, state = begun(name)
    state = torch.tensor(state) if name == "positions" else state
    return Step(module, state), (torch.randn(2, 16), *(x for x in pytree.tree_leaves(state) if isinstance(x, Tensor)))


@pytest.mark.parametrize("how", ["export", "trace"])
@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_a_program_of_it_goes_on(name: str, how: str) -> None:
    step, given = step_of(name)
    program: Any = (
        torch.export.export(step, given).module()
        if how == "export"
        else torch.jit.trace(step, given, check_trace=False)
    )
    theirs = given
    for _ in range(6):
        given, theirs = program(*given), step(*theirs)
        torch.testing.assert_close(given[0], theirs[0], rtol=1e-6, atol=1e-6)
        token = torch.randn(2, 16)
        given, theirs = (token, *given[1:]), (token, *theirs[1:])


@torch.no_grad()
def test_rows_of_a_batch_go_on_from_states_of_their_own() -> None:
    """A layer takes the state of rows with different numbers of tokens; an encoder needs rows that are alike."""
    layer, encoder = (MODULES[name]().eval() for name in ("layer", "encoder"))
    for _ in range(6):
        layer.forward_step(torch.randn(2, 16))
        encoder.forward_step(torch.randn(2, 16))
    layer.clean_state([0])
    encoder.clean_state([0])
    token, state = torch.randn(2, 16), layer.get_state()
    torch.testing.assert_close(layer._forward_step(token, state)[0], layer.forward_step(token), equal_nan=True)
    with pytest.raises(ValueError, match="prev_state: got a StaggeredWindow, expected rows with the same number"):
        encoder._forward_step(token, encoder.get_state())


@pytest.mark.parametrize(
    ("name", "state", "message"),
    [
        ("ContinualAttention", 3, "state: got an int"),
        ("ContinualAttention", "landmarks", "state: got a ContinualNystromState"),
        ("ContinualAttention", "wider", "prev_state.window: got 5, expected 4"),
        ("retroactive layer", (torch.zeros(2), None), "state: got no state of the attention"),
        ("retroactive layer", (3, 4), r"prev_state\[0\]: got an int"),
        ("encoder", (None,), "prev_state: got 1 parts, expected one for each of 2 layers"),
        ("encoder", 3, "prev_state: got an int"),
        ("positions", 1.5, "prev_state: got 1.5, expected an int"),
    ],
)
@torch.no_grad()
def test_errors(name: str, state: Any, message: str) -> None:
    if state == "landmarks":
        state = begun("landmarks")[1]
    elif isinstance(state, str):
        wider = ours.ContinualAttention(16, 2, sequence_len=5, batch_first=True).eval()
        wider.forward_steps(torch.randn(2, 6, 16))
        state = wider.get_state()
    with pytest.raises((TypeError, ValueError), match=message):
        MODULES[name]().eval()._forward_step(torch.randn(2, 16), prev_state=state)

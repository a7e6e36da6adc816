"""Containers of the package continual-inference hold our modules, train them and stream them."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from torch import nn

from cmab_kernels.nn import (
    CircularPositionalEncoding,
    ContinualAttention,
    ContinualEncoder,
    ContinualEncoderLayer,
    ContinualNystromAttention,
    RetroactiveEncoderLayer,
)

peer = pytest.importorskip("continual", reason="the package continual-inference is not installed")
from cmab_kernels.integrations import continual as integration  # noqa: E402 - the package that it adapts is asked for first

N, C = 6, 8
OPTIONS: dict[str, Any] = {"batch_first": True, "sequence_len": N}
MODULES = {
    "exact": lambda: ContinualAttention(C, 2, **OPTIONS),
    "landmarks": lambda: ContinualNystromAttention(C, 2, num_landmarks=3, **OPTIONS),
    "layer": lambda: ContinualEncoderLayer(C, 2, 16, 0.0, num_landmarks=3, **OPTIONS),
    "stack": lambda: ContinualEncoder(ContinualEncoderLayer(C, 2, 16, 0.0, **OPTIONS), 2, nn.LayerNorm(C)),
    "retroactive stack": lambda: ContinualEncoder(RetroactiveEncoderLayer(C, 2, 16, 0.0, **OPTIONS), 2),
}


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


@pytest.mark.parametrize("kind", MODULES)
def test_a_sequential_trains_and_streams(kind: str) -> None:
    positions = CircularPositionalEncoding(C, N, batch_first=True)
    module = MODULES[kind]()
    model = peer.Sequential(positions, module, nn.ReLU(), peer.Linear(C, 3, channel_dim=1)).double().eval()
    tokens = torch.randn(2, C, 20, dtype=torch.float64)
    seen = module.sequence_len
    assert model.receptive_field == seen
    trained = model(tokens)
    assert trained.shape == (2, 3, 20 - seen + 1)
    assert all(each is not None for each in torch.autograd.grad(trained.sum(), list(model.parameters())))
    with torch.no_grad():
        torch.testing.assert_close(model.forward_steps(tokens), trained, rtol=1e-12, atol=1e-12)
        model.clean_state()
        steps = [model.forward_step(token) for token in tokens.unbind(2)]
        assert all(step is None for step in steps[: seen - 1])
        torch.testing.assert_close(torch.stack(steps[seen - 1 :], 2), trained, rtol=1e-12, atol=1e-12)
        state, outs = None, []
        for token in tokens.unbind(2):
            out, state = model._forward_step(token, state)
            outs.append(out)
        assert all(out is None for out in outs[: seen - 1])
        torch.testing.assert_close(torch.stack(outs[seen - 1 :], 2), trained, rtol=1e-12, atol=1e-12)


def test_our_attention_in_a_residual_equals_theirs() -> None:
    theirs = peer.SingleOutputMultiheadAttention(C, 2, batch_first=True, embed_dim_second=True, sequence_len=N).eval()
    ours = ContinualAttention(C, 2, **OPTIONS).eval()
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randn(2, C, 20)
    with torch.no_grad():
        pair = []
        for each in (peer.continual(ours), theirs):
            residual = peer.Residual(each)
            pair.append([residual.forward_step(token) for token in tokens.unbind(2)][N - 1 :])
    torch.testing.assert_close(torch.stack(pair[0]), torch.stack(pair[1]), rtol=1e-5, atol=1e-5)


def positions() -> nn.Module:
    return CircularPositionalEncoding(C, N, learned=False, batch_first=True)


@pytest.mark.parametrize("kind", [*MODULES, "positions"])
@pytest.mark.parametrize("container", ["Residual", "BroadcastReduce", "Parallel"])
def test_other_containers_take_our_modules_as_they_are(kind: str, container: str) -> None:
    """Containers ask for delays before they convert modules, and wait for a branch that has a delay."""
    make = MODULES.get(kind, positions)
    torch.manual_seed(0)
    module = make().eval()
    tokens = torch.randn(2, C, 20)
    adapted = peer.continual(module)
    with torch.no_grad():
        alone = [adapted.forward_step(token) for token in tokens.unbind(2)]
        adapted.clean_state()
        if container == "Residual":
            whole = peer.Residual(module)
            steps = [whole.forward_step(token) for token in tokens.unbind(2)]
            expected = [
                None if out is None else out + token for out, token in zip(alone, tokens.unbind(2), strict=True)
            ]
        elif container == "BroadcastReduce":
            whole = peer.BroadcastReduce(module, peer.Delay(2), reduce="sum")
            steps = [whole.forward_step(token) for token in tokens.unbind(2)]
            late = [None, None, *alone[:-2]]
            delayed = [tokens[:, :, max(i - 2, 0)] for i in range(20)]
            expected = [None if out is None or i < 2 else out + delayed[i] for i, out in enumerate(late)]
        else:
            whole = peer.Parallel(module, peer.forward_stepping(nn.Identity()))
            pairs = [whole.forward_step([token, token]) for token in tokens.unbind(2)]
            steps, expected = [first for first, _ in pairs], alone
            assert all(torch.equal(second, token) for (_, second), token in zip(pairs, tokens.unbind(2), strict=True))
        for step, wanted in zip(steps, expected, strict=True):
            assert isinstance(step, torch.Tensor) == (wanted is not None)
            if wanted is not None:
                torch.testing.assert_close(step, wanted, rtol=1e-5, atol=1e-5)
    assert whole.receptive_field >= module.receptive_field


def test_a_stack_with_a_retroactive_layer_equals_theirs() -> None:
    """The result of the other package is right for n - 1 outputs only, because the position in its ring buffer of n
    tokens wraps after n - 1.

    Two layers are needed to see this.
    """
    whole = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(C, 2, 16, 0.0, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    theirs = peer.TransformerEncoder.build_from(whole, N).eval()
    ours = ContinualEncoder(RetroactiveEncoderLayer(C, 2, 16, 0.0, **OPTIONS), 2).eval()
    ours.load_state_dict(whole.state_dict())
    with torch.no_grad():
        steps = [
            (ours.forward_step(token), theirs.forward_step(token)) for token in torch.randn(2, C, 2 * N - 2).unbind(2)
        ]
    assert all(mine is None and not isinstance(other, torch.Tensor) for mine, other in steps[: N - 1])
    for mine, other in steps[N - 1 :]:
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_first"):
        peer.Sequential(ContinualAttention(C, 2, sequence_len=N))
    with pytest.raises(ValueError, match="output='single'"):
        peer.Sequential(ContinualAttention(C, 2, output="retroactive", **OPTIONS))
    with pytest.raises(ValueError, match=r"^input: got 5 tokens, expected at least a window of 6"):
        peer.Sequential(MODULES["exact"]())(torch.randn(1, C, N - 1))


def test_doctest() -> None:
    import cmab_kernels

    assert doctest.testmod(integration, extraglobs={"cmab_kernels": cmab_kernels, "torch": torch}) == (0, 7)

"""Encoders over a stream: what is trained is what is streamed, and a single window is torch's layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cmab_kernels.nn import ContinualEncoder, ContinualEncoderLayer

N, C = 7, 8
KINDS: dict[str, dict[str, Any]] = {"exact": {}, "landmarks": {"num_landmarks": 3}}


def layer(kind: str = "exact", **options: Any) -> ContinualEncoderLayer:
    options = {"batch_first": True, "dropout": 0.0, "dtype": torch.float64, **KINDS[kind], **options}
    return ContinualEncoderLayer(C, 2, 16, sequence_len=N, **options)


def tokens(number: int = 25) -> Tensor:
    return torch.randn(2, number, C, dtype=torch.float64)


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm_first", [True, False])
def test_one_window_is_torchs_layer_at_its_last_token(norm_first: bool) -> None:
    theirs = nn.TransformerEncoderLayer(C, 2, 16, 0.0, "gelu", 1e-3, True, norm_first, dtype=torch.float64)
    ours = layer(activation="gelu", layer_norm_eps=1e-3, norm_first=norm_first)
    ours.load_state_dict(theirs.state_dict())
    window = tokens(N)
    same(ours(window), theirs(window)[:, -1:])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_what_is_streamed(kind: str, depth: int, batch_first: bool) -> None:
    """A layer by itself, which is depth 0, and a stack: all at once, in blocks of tokens, and token by token from a state that was kept."""
    made = layer(kind, batch_first=batch_first)
    module: Any = ContinualEncoder(made, depth, nn.LayerNorm(C, dtype=torch.float64)) if depth else made
    assert module.sequence_len == max(depth, 1) * (N - 1) + 1
    stream, along = tokens() if batch_first else tokens().transpose(0, 1), int(batch_first)
    trained = module(stream)
    assert trained.shape[along] == 25 - module.sequence_len + 1
    gradients = torch.autograd.grad(trained.sin().sum(), list(module.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)
    with torch.no_grad():
        same(module.forward_steps(stream), trained)
        module.clean_state()
        first, rest = stream.split([20, 5], along)
        same(module.forward_steps(first), trained.narrow(along, 0, trained.shape[along] - 5))
        held, nexts = module.get_state(), rest.unbind(along)
        module.forward_steps(rest)
        module.set_state(held)
        same(module.forward_step(nexts[0]), trained.select(along, -5))
        module.set_state(held)
        same(torch.stack([module.forward_step(token) for token in nexts], along), trained.narrow(along, trained.shape[along] - 5, 5))


def test_a_checkpoint_has_the_stream() -> None:
    module, copied = (ContinualEncoder(layer("landmarks"), 2).eval() for _ in range(2))
    with torch.no_grad():
        module.forward_steps(tokens())
        copied.load_state_dict(module.state_dict())
        more = tokens(5)
        assert torch.equal(copied.forward_steps(more), module.forward_steps(more))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="`src` has shape"):
        layer()(tokens(N - 1))
    with torch.no_grad(), pytest.raises(RuntimeError, match="`dropout` is on"):
        layer(dropout=0.1).forward_step(tokens()[:, 0])
    with pytest.raises(RuntimeError, match="requires a gradient"):
        layer().forward_step(tokens()[:, 0])
    with pytest.raises(ValueError, match="`num_layers` is 0"):
        ContinualEncoder(layer(), 0)
    with pytest.raises(ValueError, match="`state` has 1 parts"):
        ContinualEncoder(layer(), 2).set_state([None])

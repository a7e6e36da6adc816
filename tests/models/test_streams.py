"""Streams of tokens: a step equals the whole window where the attention says so, also after a state is saved, and landmarks are fitted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cmab_models.streams import ContinualNystromformer, ContinualTransformer, Nystromformer, StreamClassifier
from torch import Tensor

from cmab_kernels import nystrom_attention

N, C = 8, 3
KINDS: dict[str, tuple[type[StreamClassifier], dict[str, Any]]] = {
    "continual": (ContinualNystromformer, {"num_landmarks": 4}),
    "fixed": (ContinualNystromformer, {"num_landmarks": 4, "landmarks": "fixed"}),
    "exact": (ContinualTransformer, {}),
    "whole": (Nystromformer, {"num_landmarks": 4}),
}


def made(kind: str, depth: int = 1) -> StreamClassifier:
    torch.manual_seed(depth)
    cls, options = KINDS[kind]
    model = cls(C, 5, N, dim=12, num_heads=3, depth=depth, **options).double().eval()  # type: ignore[call-arg]
    if kind == "fixed":
        model.fit_landmarks(torch.randn(6, N, C, dtype=torch.float64))
    return model


def stream(tokens: int = 29) -> Tensor:
    return torch.randn(2, tokens, C, dtype=torch.float64)


def steps(model: StreamClassifier, tokens: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield for each full window how many tokens were seen, the streamed scores, and those of the window with the places of the stream."""
    for seen, token in enumerate(tokens.unbind(1), start=1):
        streamed, state = model.forward_step(token), model.get_state()
        assert (streamed is None) == (seen < N)
        if streamed is not None:
            model.positions.set_state((seen - N) % (2 * N - 1))
            whole = model(tokens[:, seen - N : seen])
            assert state is not None
            model.positions.set_state(state.place)
            yield seen, streamed, whole


@torch.no_grad()
@pytest.mark.parametrize(("kind", "depth"), [(kind, 1) for kind in KINDS] + [("whole", 2)])
def test_a_step_equals_the_window(kind: str, depth: int) -> None:
    exact = {seen: torch.allclose(*pair, rtol=1e-10, atol=1e-10) for seen, *pair in steps(made(kind, depth), stream())}
    if kind == "continual":  # landmarks move when a segment of n / m tokens is full
        assert exact == {seen: seen % (N // 4) == 0 for seen in exact}
    else:
        assert all(exact.values())


@torch.no_grad()
def test_between_segments_the_landmarks_are_those_of_the_stream() -> None:
    model, tokens = made("continual"), stream()
    layer = model.layers[0]
    for seen, streamed, _ in steps(model, tokens):
        state = model.get_state()
        assert state is not None
        places = (torch.arange(seen - N, seen)) % (2 * N - 1)
        window = layer.norm1(model.embedding(tokens[:, seen - N : seen]) + model.positions.encodings[places])
        heads = [part.unflatten(-1, (3, 4)).transpose(1, 2) for part in _projected(layer.self_attn, window)]
        attended = nystrom_attention(*heads, landmarks=(state.last.landmark_queries, state.last.landmark_keys))[:, :, -1:]
        features = layer.self_attn.out_proj(attended.transpose(1, 2).flatten(2))
        newest = model.embedding(tokens[:, seen - 1 : seen]) + model.positions.encodings[places[-1:]]
        added = newest + features
        hidden = layer.linear1(layer.norm2(added)).relu()
        expected = model.head(model.norm(added + layer.linear2(hidden)))[:, 0]
        torch.testing.assert_close(streamed, expected, rtol=1e-10, atol=1e-10)


def _projected(attention: Any, tokens: Tensor) -> tuple[Tensor, ...]:
    return torch.nn.functional.linear(tokens, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fixed", "exact"])
def test_with_more_layers_the_last_sees_the_newest_features_of_each_window(kind: str) -> None:
    model, tokens = made(kind, depth=2), stream()
    first, last = model.layers
    embedded = model.embedding(tokens) + model.positions.encodings[torch.arange(tokens.shape[1]) % (2 * N - 1)]
    features = first(embedded[:, :N])
    for seen, streamed, whole in steps(model, tokens):
        if seen > N:
            features = torch.cat([features, first(embedded[:, seen - N : seen])[:, -1:]], 1)
        expected = model.head(model.norm(last(features[:, -N:])))[:, -1]
        torch.testing.assert_close(streamed, expected, rtol=1e-10, atol=1e-10)
        assert torch.allclose(streamed, whole, rtol=1e-10, atol=1e-10) == (seen == N)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_goes_on_from_its_state_and_errors_leave_it(kind: str) -> None:
    model, tokens = made(kind, depth=2), stream(2 * N)
    for token in tokens[:, : N + 3].unbind(1):
        model.forward_step(token)
    state, next_token = model.get_state(), tokens[:, N + 3]
    expected = model.forward_step(next_token)
    model.set_state(state)
    nan = next_token.clone()
    nan[0, 0] = torch.nan
    for wrong, said in (
        (next_token[:1], "there are 2 streams"),
        (nan, "finite"),
        (next_token[:, 1:], "have shape"),
        (tokens, "have shape"),
    ):
        with pytest.raises(ValueError, match=said):
            model.forward_step(wrong)
    torch.testing.assert_close(model.forward_step(next_token), expected, rtol=1e-12, atol=1e-12)
    model.clean_state()
    assert model.get_state() is None
    assert model.forward_step(next_token[:1]) is None
    with pytest.raises(ValueError, match="have shape"):
        model(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_comes_back_without_the_stream(kind: str, tmp_path: Path) -> None:
    model, tokens = made(kind, depth=2).float(), stream().float()
    for token in tokens[:, : N + 1].unbind(1):
        model.forward_step(token)
    model.save_pretrained(tmp_path)
    again = KINDS[kind][0].from_pretrained(tmp_path).eval()
    assert again.get_state() is None
    assert model.get_state() is not None
    model.clean_state()
    assert torch.equal(model(tokens[:, :N]), again(tokens[:, :N]))


def test_landmarks_are_fitted_layer_by_layer() -> None:
    model, windows = made("fixed", depth=2), stream(N)
    parameters = dict(model.named_parameters())
    first, second = (layer.self_attn for layer in model.layers)
    assert isinstance(model, ContinualNystromformer)
    before = first.landmark_keys.clone(), second.landmark_keys.clone()
    model.fit_landmarks(windows, layer=1)
    assert torch.equal(first.landmark_keys, before[0])
    assert not torch.equal(second.landmark_keys, before[1])
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    expected = ContinualNystromformer(C, 5, N, dim=12, num_heads=3, landmarks="fixed").double().layers[0].self_attn
    expected.load_state_dict({**second.state_dict()})
    features = model.layers[0](model.positions(model.embedding(windows)))
    expected.fit_landmarks(model.layers[1].norm1(features))
    torch.testing.assert_close(second.landmark_keys, expected.landmark_keys)
    model(windows).sum().backward()
    assert first.landmark_queries.grad is not None
    with pytest.raises(ValueError, match="layers 0 to 1"):
        model.fit_landmarks(windows, layer=2)
    with pytest.raises(ValueError, match="only fixed landmarks"):
        made("continual").fit_landmarks(windows)
    with pytest.raises(ValueError, match="depth is 0"):
        made("exact", depth=0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_what_is_streamed(kind: str, depth: int) -> None:
    """`forward_stream` has the scores of the steps at every token; `forward` has not, where landmarks lag behind the window."""
    model, tokens = made(kind, depth), stream()
    trained = model.forward_stream(tokens)
    streamed = [model.forward_step(token) for token in tokens.unbind(1)]
    assert all(scores is None for scores in streamed[: N - 1])
    torch.testing.assert_close(trained, torch.stack([scores for scores in streamed if scores is not None], 1), rtol=1e-12, atol=1e-12)
    model.clean_state()
    model.train().forward_stream(tokens).sin().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(ValueError, match="tokens have shape"):
        model.forward_stream(tokens[:, : N - 1])

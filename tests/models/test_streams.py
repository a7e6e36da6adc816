"""Streams of tokens: a step equals the whole window if the attention promises it,
also after a restore; landmarks are fitted."""

from __future__ import annotations

import copy
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
    """Yield for each full window the number of tokens so far, the streamed scores,
    and those of the window at the stream's places."""
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
@pytest.mark.parametrize("kind", ["fixed", "exact"])
def test_a_compiled_step_is_a_step(kind: str) -> None:
    """All of the step is one graph, also the check that the features of a token are finite."""
    one, other = made(kind), made(kind)
    compiled = torch.compile(other.forward_step, backend="eager", fullgraph=True)
    for seen, token in enumerate(stream(N + 2).unbind(1), start=1):
        a, b = one.forward_step(token), (compiled if seen > N else other.forward_step)(token)
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-10, atol=1e-10)


def test_between_segments_the_landmarks_are_those_of_the_stream() -> None:
    model, tokens = made("continual"), stream()
    layer = model.layers[0]
    for seen, streamed, _ in steps(model, tokens):
        state = model.get_state()
        assert state is not None
        places = (torch.arange(seen - N, seen)) % (2 * N - 1)
        window = layer.norm1(model.embedding(tokens[:, seen - N : seen]) + model.positions.encodings[places])
        heads = [part.unflatten(-1, (3, 4)).transpose(1, 2) for part in _projected(layer.self_attn, window)]
        attended = nystrom_attention(*heads, landmarks=(state.last.landmark_queries, state.last.landmark_keys))[
            :, :, -1:
        ]
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
    nan, largest = next_token.clone(), max(model.embedding.weight, key=lambda row: float(row.abs().sum()))
    nan[0, 0] = torch.nan
    for wrong, said in (
        (next_token[:1], "^token: got batch 1, expected batch 2"),
        (nan, "finite"),
        (1.7e308 * largest.sign().expand(2, C), "finite"),  # embedded, it overflows
        (next_token[:, 1:], "^token: got shape"),
        (tokens, "^token: got shape"),
    ):
        with pytest.raises(ValueError, match=said):
            model.forward_step(wrong)
    torch.testing.assert_close(model.forward_step(next_token), expected, rtol=1e-12, atol=1e-12)
    model.clean_state()
    with pytest.raises(TypeError, match=r"^token: got torch\.float32, expected torch\.float64 as the module has"):
        model.forward_step(torch.randn(3, C))
    assert model.get_state() is None
    assert model.forward_step(next_token[:1]) is None
    with pytest.raises(ValueError, match=r"^tokens: got shape"):
        model(tokens)


@torch.no_grad()
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["continual", "fixed", "exact"])
def test_an_error_in_a_layer_leaves_the_stream(kind: str, depth: int) -> None:
    model, tokens = made(kind, depth), stream(N + 4)
    for token in tokens[:, :-1].unbind(1):
        model.forward_step(token)
    expected = copy.deepcopy(model).forward_step(tokens[:, -1])
    with pytest.raises(ValueError, match=r"^query: got a NaN"):
        model.forward_step(torch.randn(2, C, dtype=torch.float64).sign() * 1e200)  # its variance overflows
    assert torch.equal(model.forward_step(tokens[:, -1]), expected)  # type: ignore[arg-type]  # the window is full


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_goes_on_by_itself_and_a_save_keeps_the_place(kind: str, tmp_path: Path) -> None:
    model, tokens = made(kind, 2), stream(N + 6)
    model.positions.set_state(3)
    model.save_pretrained(tmp_path)
    assert model.positions.get_state() == 3
    for token in tokens[:, : N + 2].unbind(1):
        model.forward_step(token)
    before, other = copy.deepcopy(model.state_dict()), copy.copy(model)
    for token in tokens[:, N + 2 :].unbind(1):
        ours = other.forward_step(token)
    assert all(torch.equal(before[name], entry) for name, entry in model.state_dict().items())
    for token in tokens[:, N + 2 :].unbind(1):
        theirs = model.forward_step(token)
    assert torch.equal(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("seen", [3, N + 3])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_dict_holds_the_stream_and_weights_alone_end_it(kind: str, depth: int, seen: int) -> None:
    model, other, tokens = made(kind, depth), made(kind, depth), stream()
    weights = copy.deepcopy(model.state_dict())
    for token in tokens[:, :seen].unbind(1):
        model.forward_step(token)
    other.load_state_dict(model.state_dict())
    assert other.get_state() is not None
    for token in tokens[:, seen : seen + N].unbind(1):
        ours, theirs = model.forward_step(token), other.forward_step(token)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)  # type: ignore[arg-type]  # the line above
    other.load_state_dict(weights)
    assert other.get_state() is None
    assert other.forward_step(tokens[:1, 0]) is None


@torch.no_grad()
@pytest.mark.parametrize("kind", ["continual", "exact"])
def test_parts_of_a_stream_are_refused(kind: str) -> None:
    model, tokens = made(kind, depth=2), stream(N + 4)
    for token in tokens[:, : N + 2].unbind(1):
        model.forward_step(token)
    state, entries = model.get_state(), copy.deepcopy(model.state_dict())
    assert state is not None
    expected = copy.deepcopy(model).forward_step(tokens[:, -1])
    del entries["stream.tokens"]
    with pytest.raises(RuntimeError, match=r"stream\.tokens: got 0 tokens of 0 streams and a last layer of 2"):
        model.load_state_dict(entries)
    for wrong, said in (
        (state._replace(window=None), "^state.window: got 0 tokens"),
        (state._replace(last=None), "a last layer of 0"),
        (state._replace(place=99), "^state: got 99"),
        (state._replace(window=state.window.float()), "^state.tokens: got torch.float32"),
    ):
        with pytest.raises(ValueError, match=said):
            model.set_state(wrong)
    assert torch.equal(model.forward_step(tokens[:, -1]), expected)


@torch.no_grad()
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_cast_with_its_model(kind: str, depth: int) -> None:
    model, tokens = made(kind, depth), stream(N + 4)
    for token in tokens[:, :-1].unbind(1):
        model.forward_step(token)
    expected = copy.deepcopy(model).forward_step(tokens[:, -1])
    torch.testing.assert_close(
        model.float().forward_step(tokens[:, -1].float()), expected.float(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_comes_back_without_the_stream(kind: str, depth: int, tmp_path: Path) -> None:
    model, tokens = made(kind, depth).float(), stream().float()
    for token in tokens[:, : N + 1].unbind(1):
        model.forward_step(token)
    model.load_state_dict(model.state_dict())
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
    with pytest.raises(ValueError, match=r"^layer: got .*, expected an int from 0 to 1"):
        model.fit_landmarks(windows, layer=2)
    with pytest.raises(ValueError, match=r"^landmarks: got 'continual', expected 'fixed'"):
        made("continual").fit_landmarks(windows)
    with pytest.raises(ValueError, match=r"^depth: got 0"):
        made("exact", depth=0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_what_is_streamed(kind: str, depth: int) -> None:
    """At every token, `forward_stream` has the scores of the steps. `forward` has other scores if landmarks lag behind
    the window."""
    model, tokens = made(kind, depth), stream()
    trained = model.forward_stream(tokens)
    streamed = [model.forward_step(token) for token in tokens.unbind(1)]
    assert all(scores is None for scores in streamed[: N - 1])
    torch.testing.assert_close(
        trained, torch.stack([scores for scores in streamed if scores is not None], 1), rtol=1e-12, atol=1e-12
    )
    model.clean_state()
    model.train().forward_stream(tokens).sin().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(ValueError, match=rf"^tokens: got {N - 1} tokens"):
        model.forward_stream(tokens[:, : N - 1])

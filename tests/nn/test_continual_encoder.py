"""Encoders over a stream: training and streaming agree, and a single window equals torch's layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cmab_kernels.nn import ContinualEncoder, ContinualEncoderLayer, RecentStream, RecentTokens, RetroactiveEncoderLayer

N, C = 7, 8
KINDS: dict[str, dict[str, Any]] = {"exact": {}, "landmarks": {"num_landmarks": 3}}
LAYERS = {"single": ContinualEncoderLayer, "retroactive": RetroactiveEncoderLayer}


def layer(kind: str = "exact", output: str = "single", **options: Any) -> Any:
    options = {"batch_first": True, "dropout": 0.0, "dtype": torch.float64, **KINDS[kind], **options}
    return LAYERS[output](C, 2, 16, sequence_len=N, **options)


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
    retroactive = layer(output="retroactive", activation="gelu", layer_norm_eps=1e-3, norm_first=norm_first)
    retroactive.load_state_dict(theirs.state_dict())
    same(retroactive(window), theirs(window)[:, None])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("depth", [2, 3])
def test_each_output_of_a_retroactive_stack_is_torchs_encoder_on_its_window(depth: int, batch_first: bool) -> None:
    made = nn.TransformerEncoderLayer(C, 2, 16, 0.0, batch_first=batch_first, norm_first=True, dtype=torch.float64)
    theirs = nn.TransformerEncoder(made, depth, nn.LayerNorm(C, dtype=torch.float64), enable_nested_tensor=False)
    ours = ContinualEncoder(
        layer(output="retroactive", batch_first=batch_first, norm_first=True),
        depth,
        nn.LayerNorm(C, dtype=torch.float64),
    )
    ours.load_state_dict(theirs.state_dict())
    stream, along = tokens(12) if batch_first else tokens(12).transpose(0, 1), int(batch_first)
    windows = [theirs(stream.narrow(along, first, N)).select(along, -1) for first in range(12 - N + 1)]
    same(ours(stream), torch.stack(windows, along))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("output", LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_what_is_streamed(kind: str, output: str, depth: int, batch_first: bool) -> None:
    """A single layer (depth 0) and a stack read all tokens at once, in blocks, and token by token from a kept state."""
    made = layer(kind, output, batch_first=batch_first)
    module: Any = ContinualEncoder(made, depth, nn.LayerNorm(C, dtype=torch.float64)) if depth else made
    assert module.sequence_len == (N if output == "retroactive" else max(depth, 1) * (N - 1) + 1)
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
        same(
            torch.stack([module.forward_step(token) for token in nexts], along),
            trained.narrow(along, trained.shape[along] - 5, 5),
        )


@pytest.mark.parametrize("output", LAYERS)
def test_what_stands_in_place_of_a_dropout_is_called(output: str) -> None:
    """A step calls it in the same way as `forward`, for example a layer scale."""
    made = layer(output=output).eval()
    made.dropout1 = nn.Tanh()
    stream = tokens()
    with torch.no_grad():
        same(made.forward_steps(stream), made(stream))
        made.clean_state()
        steps = [made.forward_step(token) for token in stream.unbind(1)]
        same(torch.stack(steps[N - 1 :], 1), made(stream))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("part", ["linear1", "linear2", "dropout", "dropout1", "dropout2", "norm1", "norm2"])
def test_a_hook_of_a_part_sees_every_step(part: str, norm_first: bool) -> None:
    """A step may compute a module without calling it only if the module is unchanged: a module with a hook is called,
    and its result is that of the hook."""
    made, stream = layer(norm_first=norm_first).eval(), tokens()
    with torch.no_grad():
        made.forward_steps(stream[:, :-1])
        plain = made.forward_step(stream[:, -1], update_state=False)
        with made.get_submodule(part).register_forward_hook(lambda *given: given[-1].sin()):
            hooked = made.forward_step(stream[:, -1], update_state=False)
            expected = made(stream)[:, -1]
        assert not torch.allclose(hooked, plain)
        same(made.forward_step(stream[:, -1], update_state=False), plain)
        if part == "norm1" and norm_first:  # earlier tokens came without the hook
            return
        same(hooked, expected)


@pytest.mark.parametrize("output", LAYERS)
def test_a_stream_without_a_batch(output: str) -> None:
    for batch_first in (True, False):
        module = ContinualEncoder(layer(output=output, batch_first=batch_first), 2).eval()
        alone = tokens()[0]
        batch = alone.unsqueeze(0 if batch_first else 1)
        with torch.no_grad():
            same(module(alone), module(batch).squeeze(0 if batch_first else 1))
            steps = [module.forward_step(token) for token in alone]
            same(torch.stack([step for step in steps if step is not None]), module(alone))
            module.clean_state()
            same(module.forward_steps(alone), module(alone))


def test_a_retroactive_stream_starts_anew_where_its_attention_does() -> None:
    """Earlier tokens are not read, whatever their batch, if only the attention was reset, as by `fit_landmarks`."""
    module = layer("landmarks", "retroactive", landmarks="fixed").eval()
    module.self_attn.fit_landmarks(tokens()[0])
    with torch.no_grad():
        module.forward_steps(tokens())
        module.self_attn.fit_landmarks(tokens()[0])
        more = tokens(9)[:1]
        same(module.forward_steps(more), module(more))


def test_the_window_of_a_retroactive_layer_is_kept_with_its_attention() -> None:
    module = layer(output="retroactive").eval()
    with torch.no_grad():
        module.forward_steps(tokens(9))
        recent, attention = module.get_state()
        expected = module.forward_step(tokens(1)[:, 0] * 0 + 1, update_state=False)
        assert module.get_state()[0] is not None and torch.equal(module.get_state()[0].tokens, recent.tokens)
        for wrong, error in (
            (recent._replace(tokens=recent.tokens[:, 1:]), ValueError),
            (recent._replace(tokens=recent.tokens.float()), ValueError),
            (recent._replace(tokens=recent.tokens / 0), ValueError),
            (recent.tokens, TypeError),
        ):
            with pytest.raises(error, match="state"):
                module.set_state((wrong, attention))
        with pytest.raises(ValueError, match="state"):
            module.set_state((RecentTokens(recent.tokens[:1]), attention._replace(window=3)))
        same(module.forward_step(tokens(1)[:, 0] * 0 + 1, update_state=False), expected)
        module.stream.state = RecentTokens(recent.tokens[:1])
        with pytest.raises(ValueError, match=r"^src: got batch 2, expected batch 1, the batch of the stream's window"):
            module.forward_step(tokens(1)[:, 0])
        module.stream.state = None
        with pytest.raises(ValueError, match=r"^stream: got a state of attention without the window of tokens"):
            module.forward_step(tokens(1)[:, 0])
        module.set_state((recent, attention))
        with torch.inference_mode():
            module.forward_steps(tokens(2))
        held = module.get_state()[0].tokens
        module.float()
        assert torch.equal(module.get_state()[0].tokens, held.float())
        assert module.forward_step(tokens(1)[:, 0].float()).shape == (2, N, C)


@pytest.mark.parametrize("output", LAYERS)
def test_a_checkpoint_has_the_stream(output: str) -> None:
    module, copied = (ContinualEncoder(layer("landmarks", output), 2).eval() for _ in range(2))
    with torch.no_grad():
        module.forward_steps(tokens())
        copied.load_state_dict(module.state_dict())
        more = tokens(5)
        assert torch.equal(copied.forward_steps(more), module.forward_steps(more))


def test_recent_tokens_are_copied() -> None:
    stream, given = RecentStream(3, C), torch.randn(2, 3, C)
    stream.state = RecentTokens(given)
    given.zero_()
    assert stream.state.tokens.abs().min() > 0 and list(stream.state_dict()) == ["tokens"]


def test_a_checkpoint_of_half_a_stream_is_refused() -> None:
    module = layer(output="retroactive").eval()
    with torch.no_grad():
        module.forward_steps(tokens(9))
        entries, expected = module.state_dict(), module.forward_step(tokens(1)[:, 0] * 0, update_state=False)
        halves = (
            {name: entry for name, entry in entries.items() if name != "stream.tokens"},
            {name: entry for name, entry in entries.items() if "self_attn.stream" not in name},
            {**entries, "stream.tokens": entries["stream.tokens"][:1]},
        )
        for half in halves:
            with pytest.raises(RuntimeError, match=r"\tstream.tokens: got batch"):
                module.load_state_dict(half)
            same(module.forward_step(tokens(1)[:, 0] * 0, update_state=False), expected)


@pytest.mark.parametrize("output", LAYERS)
def test_an_error_in_a_later_layer_leaves_no_layer_ahead(output: str) -> None:
    """In grad mode the streams do not change; without it they end, because earlier steps have overwritten the oldest
    tokens."""
    module = ContinualEncoder(layer(output=output), 2, torch.nn.LayerNorm(C, dtype=torch.float64)).eval()
    module.layers[0].requires_grad_(False)
    token = tokens()[:, 0]

    def fails(*_: Any) -> None:
        raise OverflowError

    with torch.no_grad():
        module.forward_steps(tokens())
        expected = module.forward_step(token, update_state=False)
    handle = module.norm.register_forward_pre_hook(fails)
    with pytest.raises(
        OverflowError if output == "retroactive" else RuntimeError,
        match=None if output == "retroactive" else "gradient",
    ):
        module.forward_step(token)
    with torch.no_grad():
        with pytest.raises(OverflowError):
            module.forward_step(token, update_state=False)
        handle.remove()
        assert torch.equal(module.forward_step(token, update_state=False), expected)
        handle = module.norm.register_forward_pre_hook(fails)
        with pytest.raises(OverflowError):
            module.forward_step(token)
        assert module.get_state() == (None, None)
        handle.remove()
        same(module.forward_steps(part := tokens()), module(part))


@pytest.mark.parametrize("output", LAYERS)
def test_an_interrupt_within_a_layer_leaves_no_part_ahead(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C in a step, a layer whose attention has taken the token completes the step. A stack in which other
    layers lack the token ends all streams."""
    alone, stream = layer(output=output).eval(), tokens()
    stack = ContinualEncoder(alone, 2).eval()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        for module, first in ((alone, alone), (stack, stack.layers[0])):
            module.forward_steps(stream[:, :-2])
            with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                patched.setattr(first.self_attn, "_joined", interrupted)
                module.forward_step(stream[:, -2])
        assert stack.get_state() == (None, None)
        same(alone.forward_step(stream[:, -1]), alone(stream)[:, -1])


@pytest.mark.parametrize("output", LAYERS)
def test_a_state_is_taken_by_all_layers_or_none(output: str) -> None:
    module = ContinualEncoder(layer(output=output), 2).eval()
    with torch.no_grad():
        module.forward_steps(tokens())
        older, token = module.get_state(), tokens()[:, 0]
        module.forward_steps(tokens())
        expected = module.forward_step(token, update_state=False)
        with pytest.raises((TypeError, ValueError), match="state"):
            module.set_state((older[0], (1, 2)))
        assert torch.equal(module.forward_step(token, update_state=False), expected)
        module.set_state(None)
        assert module.get_state() == (None, None)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"^num_layers: got 1"):
        ContinualEncoder(layer(output="retroactive"), 1)
    with pytest.raises(ValueError, match=r"^src: got shape"):
        layer(output="retroactive")(tokens(N - 1))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"^dropout: it applies in training mode"):
        layer(output="retroactive", dropout=0.1).forward_step(tokens()[:, 0])
    with pytest.raises(ValueError, match=r"^src: got shape"):
        layer()(tokens(N - 1))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"^dropout: it applies in training mode"):
        layer(dropout=0.1).forward_step(tokens()[:, 0])
    with pytest.raises(RuntimeError, match="requires a gradient"):
        layer().forward_step(tokens()[:, 0])
    with pytest.raises(ValueError, match=r"^num_layers: got 0"):
        ContinualEncoder(layer(), 0)
    with pytest.raises(ValueError, match=r"^state: got 1 parts"):
        ContinualEncoder(layer(), 2).set_state([None])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("filled", [0, 3, N + 2])
def test_no_tokens_change_nothing(filled: int, stacked: bool) -> None:
    """A state that holds tokens without an attention over them could not be loaded again."""
    alone = layer(output="retroactive").eval()
    module: Any = ContinualEncoder(alone, 2).eval() if stacked else alone
    with torch.no_grad():
        if filled:
            module.forward_steps(tokens(filled))
        before = module.state_dict()
        assert module.forward_steps(tokens(0)) is None
        after = module.state_dict()
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        module.load_state_dict(after)


def test_half_a_state_is_refused() -> None:
    module, other = (layer(output="retroactive").eval() for _ in range(2))
    with torch.no_grad():
        module.forward_steps(tokens(9))
        other.forward_steps(tokens(9)[:1])
        recent, attention = module.get_state()
        token = tokens(1)[:, 0]
        expected = module.forward_step(token, update_state=False)
        halves = ((recent, None), (None, attention), (recent, other.get_state()[1]), (other.get_state()[0], attention))
        for half, given in zip(
            halves, ("no state of the attention", "no tokens", "batch 2 and", "batch 1 and"), strict=True
        ):
            with pytest.raises(ValueError, match=rf"^state: got .*{given}"):
                module.set_state(half)
            assert torch.equal(module.forward_step(token, update_state=False), expected)
        module.set_state((None, None))
        assert module.get_state() is None


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("output", LAYERS)
def test_a_batch_of_none(output: str, batch_first: bool) -> None:
    module = ContinualEncoder(layer(output=output, batch_first=batch_first), 2).eval()
    number, along = 25 - module.sequence_len + 1, int(batch_first)
    none = tokens()[:0] if batch_first else tokens()[:0].transpose(0, 1)
    shape = (0, number, C) if batch_first else (number, 0, C)
    with torch.no_grad():
        assert module(none).shape == module.forward_steps(none).shape == shape
        assert module.forward_step(none.select(along, 0)).shape == (0, C)


BAD_SOURCES: dict[str, tuple[type[Exception], Any]] = {
    "another width": (ValueError, torch.zeros(2, 25, C - 1, dtype=torch.float64)),
    "another dtype": (TypeError, torch.zeros(2, 25, C)),
    "a list": (TypeError, [1.0] * C),
    "nothing": (TypeError, None),
    "a number": (ValueError, torch.tensor(1.0, dtype=torch.float64)),
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("output", LAYERS)
@pytest.mark.parametrize("name", BAD_SOURCES)
def test_what_is_no_source_is_named(name: str, output: str, norm_first: bool, stacked: bool) -> None:
    """The error uses the caller's name and shape, and comes before any layer reads the input."""
    error, given = BAD_SOURCES[name]
    alone = layer(output=output, norm_first=norm_first).eval()
    module: Any = ContinualEncoder(alone, 2).eval() if stacked else alone
    with torch.no_grad():
        module.forward_steps(tokens(9))
        before = module.forward_step(token := tokens(1)[:, 0], update_state=False)
        token_given = given[:, 0] if isinstance(given, Tensor) and given.dim() == 3 else given
        for call, argument in ((module, given), (module.forward_steps, given), (module.forward_step, token_given)):
            with pytest.raises(error, match=r"^src: "):
                call(argument)
        shape = r"\(2, 1, 8\)"
        with pytest.raises(ValueError, match=rf"^src: got shape {shape}"):
            module.forward_step(tokens(1))
        after = module.forward_step(token, update_state=False)
        assert before is after is None or torch.equal(after, before)


@pytest.mark.parametrize("output", LAYERS)
def test_what_is_no_state_is_named(output: str) -> None:
    alone = layer(output=output).eval()
    module = ContinualEncoder(alone, 2)
    for wrong in (3, (1,), (1, 2), "ab", {}):
        with pytest.raises((TypeError, ValueError), match=r"^state: "):
            alone.set_state(wrong)
        with pytest.raises((TypeError, ValueError), match=r"^state: "):
            module.set_state(wrong)


def test_a_stack_of_other_modules_is_refused() -> None:
    other: Any = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"^layer: got a Linear"):
        ContinualEncoder(other, 2)
    number: Any = 3
    with pytest.raises(TypeError, match=r"^norm: got an int"):
        ContinualEncoder(layer(), 2, number)

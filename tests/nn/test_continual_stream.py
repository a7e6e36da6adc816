"""The window of a continual module: a value that is saved and restored with the same bits; an error is raised if no
stream can have it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cmab_kernels.nn import ContinualAttention, ContinualNystromAttention, FillingWindow
from cmab_kernels.nn.continual.base import Continual
from cmab_kernels.nystrom.continual.reference import row_means, row_sums, window_of

from .test_continual import KINDS, OUTPUTS, assert_equal, made, same, stream

SMALL: dict[str, Any] = {"sequence_len": 5, "dtype": torch.float32}
KIND_OUTPUTS = [(kind, output) for kind in KINDS for output in OUTPUTS]


def streaming(kind: str, tokens: int, **config: Any) -> Continual:
    """Return a module in the middle of its stream."""
    module = made(kind, **{**SMALL, **config})
    with torch.no_grad():
        module.forward_steps(stream(tokens, module))
    return module


def fresh(module: Continual) -> Continual:
    """Return another module with the same weights and no stream."""
    other = copy.deepcopy(module)
    other.clean_state()
    return other


def saved(module: nn.Module) -> dict[str, Tensor]:
    """Save and load the `state_dict`, with `weights_only=True`, which executes no code."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@torch.no_grad()
def goes_on_alike(first: Continual, second: Continual, steps: int = 12) -> bool:
    tokens = stream(steps, first)
    pairs = [(first.forward_step(token), second.forward_step(token)) for token in tokens]
    pairs.append((first.forward_steps(tokens), second.forward_steps(tokens)))
    return all(mine is other is None or torch.equal(mine, other) for mine, other in pairs) and same(
        first.get_state(), second.get_state()
    )


# ---- saving and restoring


@pytest.mark.parametrize("kind, output", KIND_OUTPUTS)
def test_saved_and_restored_at_every_step(kind: str, output: str) -> None:
    """A stream is saved before its window is full, when it becomes full, at and between replacements of landmarks, and
    past the end of the ring.

    It continues with the same bits.
    """
    for tokens in range(14):
        module = streaming(kind, tokens, output=output)
        entries = saved(module)
        assert ("stream.queries" in entries) == (tokens > 0)
        assert ("stream.position" in entries) == (tokens >= 5)
        other = fresh(module)
        other.load_state_dict(entries)
        assert other.state_dict().keys() == entries.keys()
        third = fresh(module)
        third.set_state(module.get_state())
        assert goes_on_alike(copy.deepcopy(module), third)
        assert goes_on_alike(module, other)


@pytest.mark.parametrize("kind, output", KIND_OUTPUTS)
@pytest.mark.parametrize("tokens", [3, 9])
def test_copied_and_pickled_in_midstream(kind: str, output: str, tokens: int) -> None:
    module = streaming(kind, tokens, output=output)
    assert goes_on_alike(pickle.loads(pickle.dumps(module)), copy.deepcopy(module))
    before = module.get_state()
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.forward_steps(stream(20, other))
    assert same(module.get_state(), before)


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_window_taken_in_blocks_is_saved_like_any_other(chunk: int) -> None:
    """A step of many tokens leaves a longer ring, and the stream can still be saved and restored."""
    for kind in KINDS:
        module = made(kind, **SMALL)
        with torch.no_grad():
            for some in stream(24, module).split(chunk):
                module.forward_steps(some)
        other = fresh(module)
        other.load_state_dict(saved(module))
        assert goes_on_alike(module, other)


def test_entries_are_tensors_and_ints() -> None:
    entries = saved(streaming("continual", 13))
    window = {name.removeprefix("stream."): entry for name, entry in entries.items() if name.startswith("stream.")}
    assert {*window} == {
        *("queries", "keys", "values", "sums", "landmark_queries", "landmark_keys", "inverse"),
        *("scale", "position", "window", "pinv_iterations", "fixed"),
    }
    numbers = {name: int(entry.unique()) for name, entry in window.items() if entry.dtype == torch.int64}
    assert numbers == {"position": 13, "window": 5, "pinv_iterations": 8, "fixed": 0}
    assert window["position"].shape == (2, 3)
    assert window["queries"].shape == (2, 3, 5, 8)
    module = streaming("continual", 13)
    ring = module.get_state().keys
    assert torch.equal(module.state_dict()["stream.keys"][:, :, -1], ring[:, :, 12 % ring.shape[2]])


def test_a_snapshot_does_not_move_with_the_stream() -> None:
    for tokens in (3, 9):
        module = streaming("continual", tokens)
        snapshot, file = module.state_dict(), saved(module)
        other = fresh(module)
        other.load_state_dict(file)
        held = copy.deepcopy(other.get_state())
        for entry in file.values():
            entry.zero_()
        assert same(other.get_state(), held)
        file = saved(module)
        with torch.no_grad():
            module.forward_steps(stream(7, module))
        assert all(torch.equal(snapshot[name], file[name]) for name in file)


def test_weights_alone_are_a_complete_checkpoint() -> None:
    for kind in KINDS:
        module = streaming(kind, 9)
        weights = saved(fresh(module))
        assert set(weights) == {name for name, _ in module.named_parameters()}
        module.load_state_dict(weights)
        assert module.get_state() is None
        module = streaming(kind, 3)
        module.load_state_dict(nn.MultiheadAttention(24, 3).state_dict())
        assert module.get_state() is None


def test_strict_still_means_strict() -> None:
    module = streaming("continual", 9)
    with pytest.raises(RuntimeError, match=r"Unexpected.*stream\.other"):
        module.load_state_dict({**module.state_dict(), "stream.other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"Missing.*in_proj_weight"):
        module.load_state_dict({name: entry for name, entry in module.state_dict().items() if name != "in_proj_weight"})


# ---- refusals


def changed(name: str, value: float, *index: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def fault(state: dict[str, Any]) -> dict[str, Any]:
        entry = state[name].clone()
        entry[index] = value
        return {name: entry}

    return fault


def number(name: str, value: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda s: {name: torch.tensor(value)}


BAD: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "heads": ("queries", lambda s: {name: entry[:, :2] for name, entry in s.items() if entry.dim()}),
    "window": ("queries", lambda s: {name: s[name][:, :, 1:] for name in FillingWindow._fields}),
    "width": ("keys", lambda s: {"keys": s["keys"][..., :3]}),
    "batches": ("values", lambda s: {"values": s["values"][:1]}),
    "batches of sums": ("sums", lambda s: {"sums": s["sums"][:1]}),
    "dimensions": ("queries", lambda s: {"queries": s["queries"][0]}),
    "scalar": ("queries", lambda s: {"queries": torch.tensor(0.0)}),
    "rows": ("sums", lambda s: {"sums": s["sums"][:, :, :2]}),
    "columns": ("sums", lambda s: {"sums": s["sums"][..., 1:]}),
    "landmarks": ("landmark_keys", lambda s: {"landmark_keys": s["landmark_keys"][:, :, 1:]}),
    "inverse": ("inverse", lambda s: {"inverse": s["inverse"][..., :2]}),
    "dtype of tokens": ("keys", lambda s: {"keys": s["keys"].half()}),
    "precision of tokens": ("queries", lambda s: {name: s[name].double() for name in FillingWindow._fields}),
    "dtype of sums": ("sums", lambda s: {"sums": s["sums"].double()}),
    "dtype of landmarks": ("landmark_queries", lambda s: {"landmark_queries": s["landmark_queries"].bfloat16()}),
    "dtype of position": ("position", lambda s: {"position": s["position"].int()}),
    "dtype of scale": ("scale", lambda s: {"scale": s["scale"].float()}),
    "nan in a token": ("values", changed("values", torch.nan, 1, 2, 3, 4)),
    "inf in a token": ("queries", changed("queries", torch.inf, 0, 0, 0, 0)),
    "nan in sums": ("sums", changed("sums", torch.nan, 0, 1, 2, 3)),
    "inf in landmarks": ("landmark_keys", changed("landmark_keys", -torch.inf, 0, 1, 2, 3)),
    "nan in the inverse": ("inverse", changed("inverse", torch.nan, 0, 1, 2, 1)),
    "nan for a scale": ("scale", lambda s: {"scale": torch.tensor(torch.nan, dtype=torch.float64)}),
    "another scale": ("scale", lambda s: {"scale": s["scale"] * 2}),
    "a total of 0": ("sums", changed("sums", 0.0, 1, 2, 0, -5)),
    "a negative total": ("sums", changed("sums", -1.0, 0, 0, 0, -5)),
    "a negative position": ("position", number("position", -1)),
    "an early position": ("position", number("position", 4)),
    "one early position": ("position", changed("position", 4, 1, 2)),
    "positions of one batch": ("position", lambda s: {"position": s["position"][:1]}),
    "another window": ("window", number("window", 6)),
    "other iterations": ("pinv_iterations", number("pinv_iterations", 6)),
    "fixed": ("fixed", number("fixed", 1)),
    "no keys": ("keys", lambda s: {"keys": None}),
    "no sums": ("sums", lambda s: {"sums": None}),
    "no inverse": ("inverse", lambda s: {"inverse": None}),
    "no position": ("position", lambda s: {"position": None}),
    "a spare": ("spare", lambda s: {"spare": s["sums"]}),
    "not a tensor": ("values", lambda s: {"values": [1.0]}),
    "an int": ("position", lambda s: {"position": 13}),
}

BAD_FILLING: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "full": ("queries", lambda s: {name: entry[:, :, :1].repeat(1, 1, 5, 1) for name, entry in s.items()}),
    "empty": ("queries", lambda s: {name: entry[:, :, :0] for name, entry in s.items()}),
    "tokens": ("keys", lambda s: {"keys": s["keys"][:, :, :2]}),
    "heads": ("queries", lambda s: {"queries": s["queries"][:, :1]}),
    "dtype": ("values", lambda s: {"values": s["values"].double()}),
    "nan": ("keys", changed("keys", torch.nan, 1, 2, 0, 3)),
    "a position": ("keys|queries|values|sums", number("position", 3)),
    "no values": ("values", lambda s: {"values": None}),
}


@pytest.mark.parametrize("held", [0, 3, 9])
@pytest.mark.parametrize(
    "tokens, name, fault",
    [*((13, *bad) for bad in BAD.values()), *((3, *bad) for bad in BAD_FILLING.values())],
    ids=[*BAD, *(f"filling: {name}" for name in BAD_FILLING)],
)
def test_what_is_no_window_is_refused_and_the_old_one_stays(
    tokens: int, name: str, fault: Callable[[dict[str, Any]], dict[str, Any]], held: int
) -> None:
    module = streaming("continual", held)
    before = module.get_state()
    entries = saved(streaming("continual", tokens))
    state = {part: entries.pop(f"stream.{part}") for part in [key[7:] for key in entries if key.startswith("stream.")]}
    entries.update({f"stream.{part}": entry for part, entry in {**state, **fault(state)}.items() if entry is not None})
    with pytest.raises(RuntimeError, match=rf"\tstream\.({name}): "):
        module.load_state_dict(entries)
    assert same(module.get_state(), before)


def test_windows_of_other_modules_are_refused() -> None:
    """A window of another shape, another kind, or with other landmarks raises an error, both in `set_state` and in
    loading."""
    module = streaming("continual", 9)
    before = module.get_state()
    others = [
        streaming("continual", 9, sequence_len=6),
        streaming("continual", 9, num_landmarks=2),
        streaming("continual", 9, pinv="exact"),
        streaming("continual", 9, dtype=torch.float64),
        streaming("continual", 3, dtype=torch.bfloat16),
        streaming("fixed", 9),
        streaming("exact", 9),
        streaming("exact", 9, output="retroactive"),
        ContinualNystromAttention(24, 2, sequence_len=5, num_landmarks=3),
    ]
    with torch.no_grad():
        others[-1].forward_steps(torch.randn(9, 2, 24))
    for other in others:
        with pytest.raises((ValueError, TypeError), match="state"):
            module.set_state(other.get_state())
        entries = {
            **saved(fresh(module)),
            **{name: entry for name, entry in saved(other).items() if name.startswith("stream")},
        }
        with pytest.raises(RuntimeError, match="stream"):
            module.load_state_dict(entries)
        assert same(module.get_state(), before)


def test_assignment_is_checked() -> None:
    module = streaming("continual", 9)
    good = module.get_state()
    bad: list[tuple[type[Exception], Any]] = [
        (TypeError, tuple(good)),
        (ValueError, good._replace(keys=good.keys[..., :3])),
        (ValueError, good._replace(position=torch.full_like(good.position, 3))),
        (TypeError, good._replace(position=9)),
        (ValueError, good._replace(window=6)),
        (ValueError, good._replace(fixed=1)),
        (TypeError, good._replace(sums=good.sums.double())),
        (ValueError, good._replace(values=good.values * torch.nan)),
        (RuntimeError, good._replace(inverse=good.inverse.clone().requires_grad_())),
        (ValueError, FillingWindow(*good[:3])),
        (TypeError, FillingWindow(None, None, None)),
        (TypeError, FillingWindow(good.queries[:, :, :3], good.keys[:, :, :3], [1.0])),
        (RuntimeError, FillingWindow(*(ring[:, :, :3].clone().requires_grad_() for ring in good[:3]))),
    ]
    for error, state in bad:
        with pytest.raises(error, match="state"):
            module.set_state(state)
        assert same(module.get_state(), good)
    module.set_state(None)
    assert module.get_state() is None


def test_retroactive_sums_may_come_from_single_outputs() -> None:
    """A state with single outputs has no row sums yet;
    a module with retroactive outputs computes them after loading it."""
    single = streaming("exact", 9)
    module = ContinualAttention(24, 3, output="retroactive", **SMALL).eval()
    module.load_state_dict(single.state_dict())
    token = stream(1, module)[0]
    with torch.no_grad():
        assert_equal(module.forward_step(token)[-1], single.forward_step(token), 1e-5)


# ---- states are values


@pytest.mark.parametrize("kind, output", KIND_OUTPUTS)
@pytest.mark.parametrize("tokens", [0, 3, 5, 9])
@torch.no_grad()
def test_get_state_is_a_value_and_update_state_false_leaves_it(kind: str, output: str, tokens: int) -> None:
    """`get_state` returns a value, and `update_state=False` does not change the stream.

    Steps fill the window, pass replacements of landmarks, or wrap the ring.
    """
    module = streaming(kind, tokens, output=output)
    reference = copy.deepcopy(module)
    before = copy.deepcopy(module.get_state())  # nothing else holds the state, so its memory could be reused
    more = stream(14, module)
    for some in (more[:1], more[:2], more):
        expected = reference.forward_steps(some, update_state=False)
        for _ in range(2):
            out = module.forward_steps(some, update_state=False)
            assert out is expected is None or torch.equal(out, expected)
            out = module.forward_step(some[0], update_state=False)
            first = None if tokens < 4 else reference.forward_steps(some[:1], update_state=False)[0]
            assert out is first is None or torch.equal(out, first)
        assert same(module.get_state(), before)
    given = module.get_state()
    module.forward_steps(more)
    for token in more:
        module.forward_step(token)
    assert same(given, before)
    module.set_state(given)
    assert goes_on_alike(module, reference)
    assert same(given, before)


@pytest.mark.parametrize("kind, output", KIND_OUTPUTS)
@torch.no_grad()
def test_a_stream_that_nobody_else_holds_keeps_its_memory(kind: str, output: str) -> None:
    """The ring is written in place at every step; it is copied once after its state was taken."""
    pytest.importorskip("cmab_kernels._C", reason="the extension was not built")
    module = streaming(kind, 9, output=output)
    tokens = stream(20, module)
    module.forward_step(tokens[0])
    ring = id(module.stream.held.keys), module.stream.held.keys.data_ptr()

    def same_ring() -> bool:
        return (id(module.stream.held.keys), module.stream.held.keys.data_ptr()) == ring

    for token in tokens:
        module.forward_step(token)
        assert same_ring()
    saved_state = module.state_dict()
    module.forward_step(tokens[0])
    assert same_ring() and "stream.sums" in saved_state
    kept = module.get_state()
    module.forward_step(tokens[0])
    assert not same_ring()
    assert kept.keys.data_ptr() == ring[1]


@torch.no_grad()
def test_memory_is_constant_however_tokens_come() -> None:
    for kind, output in KIND_OUTPUTS:
        module = streaming(kind, 9, output=output)
        module.forward_steps(stream(500, module))
        assert module.get_state().keys.shape[2] <= 2 * 5


# ---- casts and moves


@pytest.mark.parametrize("kind, output", KIND_OUTPUTS)
@pytest.mark.parametrize("tokens", [3, 9])
@pytest.mark.parametrize(
    "first, then", [(torch.float32, torch.bfloat16), (torch.float64, torch.float32), (torch.float32, torch.float64)]
)
@torch.no_grad()
def test_a_cast_stream_goes_on(kind: str, output: str, tokens: int, first: torch.dtype, then: torch.dtype) -> None:
    """After a cast, the stream continues in the new dtype, with sums over the cast tokens, and older states do not
    change."""
    module = streaming(kind, tokens, output=output, dtype=first)
    older = module.get_state()
    before = copy.deepcopy(older)
    module.to(then)
    more = stream(3, module)
    assert (module.forward_steps(more[:1]) is None) == (tokens < 4)
    module.forward_steps(more[1:])
    assert same(older, before)
    state, sums = module.get_state(), torch.float64 if then == torch.float64 else torch.float32
    assert state.keys.dtype == then
    assert state.sums.dtype == sums
    window = [window_of(ring, state.position, state.window).to(sums) for ring in state[:3]]
    rows = state.landmark_queries if isinstance(module, ContinualNystromAttention) else window[0]
    expected = row_means(row_sums(rows, *window[1:], state.scale))
    tolerance = 20 * torch.finfo(sums).eps * window[2].abs().max()
    assert state.sums.shape[2] == 0 or (row_means(state.sums) - expected).abs().max() < tolerance
    copy.deepcopy(module).load_state_dict(module.state_dict())


def test_what_changes_nothing_leaves_the_very_state() -> None:
    for tokens in (3, 9):
        module = streaming("continual", tokens)
        held = module.stream.held
        module.to("cpu").float().train().eval()
        assert module.stream.held is held


def test_the_state_moves_with_the_module() -> None:
    for kind in KINDS:
        for tokens in (3, 9):
            module = streaming(kind, tokens).to("meta")
            devices = {
                name: field.device.type
                for name, field in module.stream.held._asdict().items()
                if isinstance(field, Tensor)
            }
            assert devices.pop("scale", "cpu") == "cpu"
            assert {*devices.values()} == {"meta"}

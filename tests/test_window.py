"""States of sets from which points are removed: equal to recomputation after any steps, without drift; saved and
copied; an error changes nothing."""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels import AttentionState, RidgeState, StateTree, StateWindow
from cmab_kernels import window as module

State = AttentionState | RidgeState
Maker = Callable[..., State]


def attention(keys: int = 3, dtype: torch.dtype = torch.float64, size: float = 1.0) -> AttentionState:
    q, k, v = (torch.randn(2, 3, n, 4, dtype=dtype) for n in (2, keys, keys))
    return ck.attention_state(size * q, k, v)


def ridge(keys: int = 3) -> RidgeState:
    return ck.ridge_state(*(torch.randn(2, 3, keys, n, dtype=torch.float64) for n in (4, 5)))


def anew(states: list[Any]) -> State:
    return (ck.merge_states if isinstance(states[0], AttentionState) else ck.merge_ridge)(*states)


def close(found: State, wanted: State) -> None:
    torch.testing.assert_close(tuple(found), tuple(wanted), rtol=1e-12, atol=1e-12)


def same(found: State, wanted: State) -> bool:
    return type(found) is type(wanted) and all(map(torch.equal, found, wanted))


KINDS = pytest.mark.parametrize("make", [attention, ridge])


@KINDS
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_window_equals_the_merge_of_the_newest(make: Maker, size: int) -> None:
    window, held = StateWindow(size), []
    for _ in range(4 * size + 3):
        held = [*held, make()][-size:]
        window.push(held[-1])
        assert len(window) == len(held)
        close(window.state, anew(held))
    while held := held[1:]:
        window.pop()
        close(window.state, anew(held))


@KINDS
def test_random_pushes_and_pops(make: Maker) -> None:
    """Sets may be empty; the window is copied, saved and restored at random."""
    choose = random.Random(0)
    window, held, others = StateWindow(5), [], []
    for _ in range(300):
        if held and choose.random() < 0.45:
            window.pop()
            del held[0]
        else:
            held = [*held, make(choose.randrange(4))][-5:]
            window.push(held[-1])
        if choose.random() < 0.2:
            others.append((copy.copy(window), list(held)))
            window = choose.choice([copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w)), reloaded])(window)
        if held:
            close(window.state, anew(held))
    for other, what in others:
        assert len(other) == len(what)
        if what:
            close(other.state, anew(what))


@KINDS
def test_random_members_of_a_tree(make: Maker) -> None:
    choose = random.Random(0)
    tree, held, others = StateTree(), {}, []
    for _ in range(400):
        key = choose.choice([choose.randrange(40), f"{choose.randrange(5)}"])
        if choose.random() < (0.3 if len(held) < 20 else 0.7):
            tree.discard(key)
            held.pop(key, None)
        else:
            held[key] = make(choose.randrange(4))
            tree.put(key, held[key])
        if choose.random() < 0.2:
            others.append((copy.copy(tree), dict(held)))
            tree = choose.choice([copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)), reloaded])(tree)
        assert (
            len(tree) == len(held)
            and set(tree) == held.keys()
            and all(key in tree for key in held)
            and None not in tree
        )
        if held:
            close(tree.state, anew(list(held.values())))
    for other, what in others:
        assert set(other) == what.keys()
        if what:
            close(other.state, anew(list(what.values())))


def merges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list with one entry for each merge of two states from now on."""
    counted: list[int] = []
    merge = module.merge

    def count(*states: State) -> State:
        counted.extend([1] * (len(states) > 1))
        return merge(*states)

    monkeypatch.setattr(module, "merge", count)
    return counted


def test_a_push_takes_two_merges_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    window, counted, state = StateWindow(64), merges(monkeypatch), attention()
    for _ in range(640):
        window.push(state)
    assert len(counted) <= 2 * 640
    assert len(window._queue.front) + len(window._queue.back) == 64, "memory is that of the states held"


def test_a_change_of_a_tree_takes_log_n_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, counted, state = StateTree(), merges(monkeypatch), attention()
    for key in range(1000):
        before = len(counted)
        tree.put(key, state)
        assert len(counted) - before <= 10
    assert sum(map(len, tree._levels)) <= 2 * 1000 + 10
    for key in random.Random(0).sample(range(1000), 1000):
        before = len(counted)
        tree.put(key, state)
        assert len(counted) - before <= 10
        tree.discard(key)
        assert len(counted) - before <= 30
    assert not len(tree) and tree._levels == [[]]


LAWS = {
    "one": lambda logits: logits,
    "ten": lambda logits: 10 * logits,
    "spikes of 20": lambda logits: logits + 20 * (torch.arange(len(logits)) % 500 == 499),
    "spikes of 40": lambda logits: logits + 40 * (torch.arange(len(logits)) % 500 == 499),
}


@pytest.mark.parametrize("law", LAWS)
def test_errors_stay_flat_where_subtraction_drifts(law: str) -> None:
    """float32 states of single keys against a float64 softmax over the window, in the first steps and in the last."""
    steps, size = 1500, 50
    logits, values = LAWS[law](torch.randn(steps)), torch.randn(steps, 2)
    query, keys, rows = torch.ones(1, 1, 1, 1), logits.view(-1, 1, 1, 1, 1), values.view(-1, 1, 1, 1, 2)
    window, tree, left = StateWindow(size), StateTree(), ck.empty_state(1, 1, 1, 2)
    outs = {"window": [], "tree": [], "left": []}
    for step in range(steps):
        state = ck.attention_state(query, keys[step], rows[step], scale=1.0)
        window.push(state)
        tree.put(step, state)
        tree.discard(step - size)
        left = ck.merge_states(left, state)
        if step >= size:
            left, _ = ck.remove_from_state(left, query, keys[step - size], rows[step - size], scale=1.0)
        if step >= size - 1:
            for name, found in (("window", window.state), ("tree", tree.state), ("left", left)):
                outs[name].append(found.out.flatten())
    weights = logits.double().unfold(0, size, 1).softmax(-1)
    right = torch.einsum("tn,ten->te", weights, values.double().unfold(0, size, 1))
    errors = {name: (torch.stack(out).double() - right).abs() for name, out in outs.items()}
    for name in ("window", "tree"):
        first, last = errors[name].chunk(2)
        assert errors[name].max() < 4e-6 and last.median() < 2 * first.median() < 1e-6
    assert law == "one" or not errors["left"].max() < 1e-2, "subtraction would do"


def _leaf(state: Any) -> Any:
    return type(state)(*(part.requires_grad_() if part.is_floating_point() else part for part in state))


@KINDS
def test_gradients_reach_what_is_held(make: Maker) -> None:
    def loss(state: State) -> Tensor:
        return sum(part.sin().sum() for part in state if part.is_floating_point())

    window, tree, states = StateWindow(3), StateTree(), [_leaf(make()) for _ in range(8)]
    for key, state in enumerate(states):
        window.push(state)
        tree.put(key, state)
    for key in (4, 0, 3, 1, 2):
        tree.discard(key)
    parts = [part for state in states for part in state if part.requires_grad]
    wanted = torch.autograd.grad(loss(anew(states[-3:])), parts, allow_unused=True)
    for holder in (window, tree):
        found = torch.autograd.grad(loss(holder.state), parts, allow_unused=True)
        for ours, right in zip(found, wanted, strict=True):
            assert (ours is None) == (right is None)
            if right is not None:
                torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-12)


@KINDS
def test_gradients_do_not_depend_on_the_mode_of_earlier_calls(make: Maker) -> None:
    """A merge runs in the first call that needs it, even if this is a `pop` under `no_grad`."""

    states = [_leaf(make()) for _ in range(4)]
    window, tree = StateWindow(4), StateTree()
    with torch.no_grad():
        for key, state in enumerate(states):
            window.push(state)
            tree.put(key, state)
        window.pop()
        tree.discard(0)
        assert not any(part.requires_grad for holder in (window, tree) for part in holder.state)
    for holder in (window, tree):
        out = sum(part.sin().sum() for part in holder.state if part.is_floating_point())
        found = torch.autograd.grad(out, [state[0] for state in states], allow_unused=True)
        assert [slope is not None for slope in found] == [False, True, True, True]


@KINDS
def test_what_is_pushed_and_returned_is_apart(make: Maker) -> None:
    """The holder does not write to a state that it is given, and the state that it returns may be written to."""
    for holder in (StateWindow(2), StateTree()):
        add = holder.push if isinstance(holder, StateWindow) else lambda state, tree=holder: tree.put(len(tree), state)
        states = [make() for _ in range(3)]
        before = copy.deepcopy(states)
        for state in states:
            add(state)
            for part in holder.state:
                part.zero_()
        assert all(map(same, states, before))
        close(holder.state, anew(states[-len(holder) :]))


def test_states_of_stacks_and_of_any_size() -> None:
    window = StateWindow(2)
    states = [AttentionState(torch.randn(3, 2, 4, 5, 6), torch.randn(3, 2, 4, 5).double()) for _ in range(3)]
    for state in states:
        window.push(state)
    torch.testing.assert_close(tuple(window.state), tuple(ck.merge_states(*states[1:])))
    huge = StateWindow(2)
    for lse in (-math.inf, 1e300, -math.inf, -math.inf):
        huge.push(
            AttentionState(
                torch.full((1, 1, 1, 1), math.nan if lse == -math.inf else 2.0),
                torch.full((1, 1, 1), lse, dtype=torch.float64),
            )
        )
    assert huge.state.out.eq(0).all() and huge.state.lse.eq(-math.inf).all(), "the spike has left without a trace"


def reloaded(holder: Any) -> Any:
    """Save and restore through a file that executes nothing."""
    file = io.BytesIO()
    torch.save(holder.state_dict(), file)
    file.seek(0)
    made = StateWindow(holder.size) if isinstance(holder, StateWindow) else StateTree()
    made.load_state_dict(torch.load(file, weights_only=True))
    return made


@KINDS
def test_saved_and_restored_it_goes_on_with_the_same_bits(make: Maker) -> None:
    window, tree = StateWindow(4), StateTree()
    assert len(reloaded(window)) == len(reloaded(tree)) == 0
    for step in range(11):
        state = make()
        window.push(state)
        tree.put(step, state)
        tree.discard(step // 2 if step % 3 else "none")
        restored = reloaded(window), reloaded(tree)
        new = make()
        for holder in (window, restored[0]):
            holder = copy.copy(holder)
            holder.push(new)
            close(holder.state, holder.state)
        assert (
            same(restored[0].state, window.state)
            and same(restored[1].state, tree.state)
            and list(restored[1]) == list(tree)
        )
        window, tree = restored if step % 2 else (window, tree)


def test_a_saved_window_is_a_file_of_safetensors() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    window = StateWindow(3)
    for _ in range(5):
        window.push(attention())
    restored = StateWindow(3)
    restored.load_state_dict(safetensors.load(safetensors.save(window.state_dict())))
    assert same(restored.state, window.state)


def _untouched(holder: Any, call: Callable[[], object], error: type[Exception], match: str) -> None:
    before, saved = holder.state, holder.state_dict()
    with pytest.raises(error, match=match):
        call()
    assert same(holder.state, before) and saved.keys() == holder.state_dict().keys() and len(holder) == 2
    assert all(torch.equal(part, holder.state_dict()[name]) for name, part in saved.items() if isinstance(part, Tensor))


@pytest.mark.parametrize("kind", [StateWindow, StateTree])
def test_states_that_do_not_fit_are_refused(kind: type) -> None:
    holder = StateWindow(2) if kind is StateWindow else StateTree()
    add = holder.push if kind is StateWindow else lambda state: holder.put("new", state)
    for wrong in (3, None, (torch.ones(1), torch.ones(1)), [attention()]):
        with pytest.raises(TypeError, match=r"^state: got .*, expected an AttentionState or a RidgeState"):
            add(wrong)
    with pytest.raises(TypeError, match=r"^state.out: got torch.float16"):
        add(AttentionState(torch.ones(1, 1, 1, 1).half(), torch.ones(1, 1, 1).double()))
    for key in range(2):
        holder.push(attention()) if kind is StateWindow else holder.put(key, attention())
    good = attention()
    for wrong, error, match in (
        (ridge(), TypeError, r"^state: got a RidgeState, expected an AttentionState"),
        (
            AttentionState(good.out[:1], good.lse[:1]),
            ValueError,
            r"^state.out: got shape \(1, 3, 2, 4\), expected \(2, 3, 2, 4\)",
        ),
        (
            AttentionState(good.out.float(), good.lse),
            TypeError,
            r"^state.out: got torch.float32, expected torch.float64",
        ),
        (AttentionState(good.out, good.lse.float()), TypeError, r"^state.lse: got torch.float32"),
        (AttentionState(*(part.to("meta") for part in good)), ValueError, r"^state.out: got device meta"),
        (AttentionState(good.out, good.lse + math.inf), ValueError, r"^state.lse: got \+inf"),
    ):
        _untouched(holder, lambda wrong=wrong: add(wrong), error, match)


def test_what_is_not_there() -> None:
    for holder in (StateWindow(2), StateTree()):
        with pytest.raises(
            ValueError, match=rf"^{type(holder).__name__}: got no state that is held, expected at least one"
        ):
            holder.state  # noqa: B018 - the property raises
    with pytest.raises(ValueError, match=r"^StateWindow: got no state"):
        StateWindow(2).pop()
    StateTree().discard("absent")
    tree = StateTree()
    for key in range(6):
        tree.put(key, attention())
    for key in tree:
        tree.discard(key)
    assert len(tree) == 0
    for size in (0, -1, 2.5, True, "3", None):
        with pytest.raises(ValueError, match=r"^size: got .*, expected an int >= 1"):
            StateWindow(size)
    for call in (lambda: StateTree().put([], attention()), lambda: StateTree().discard({})):
        with pytest.raises(TypeError, match=r"^key: got .*, expected a hashable value"):
            call()


def test_an_emptied_holder_takes_any_kind() -> None:
    window, tree = StateWindow(2), StateTree()
    window.push(attention())
    window.pop()
    window.push(ridge())
    tree.put(1, attention())
    tree.discard(1)
    tree.put(1, ridge())
    assert isinstance(window.state, RidgeState) and isinstance(tree.state, RidgeState)


@KINDS
@pytest.mark.parametrize("pushed", [6, 8])
@pytest.mark.parametrize("failing", [1, 3])
def test_a_failing_merge_leaves_what_is_held(
    make: Maker, pushed: int, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may run out in any merge of a change; then the change has no effect."""
    merge, calls = module.merge, []

    def fail(*states: State) -> State:
        calls.append(1)
        if len(calls) >= failing:
            raise MemoryError
        return merge(*states)

    for change, arguments in (("push", (make(),)), ("pop", ()), ("put", (3, make())), ("discard", (0,))):
        holder = StateWindow(6) if change in ("push", "pop") else StateTree()
        for key in range(pushed):
            holder.push(make()) if isinstance(holder, StateWindow) else holder.put(key, make())
        if isinstance(holder, StateWindow) and pushed == 8 and (change == "pop" or failing == 3):
            continue  # this call needs at most one merge
        before, count = holder.state, len(holder)
        calls.clear()
        with monkeypatch.context() as patched, pytest.raises(MemoryError):
            patched.setattr(module, "merge", fail)
            getattr(holder, change)(*arguments)
        assert len(holder) == count and same(holder.state, before)


def _mutated(saved: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    nan = saved["out"].clone()
    nan[0, 0, 0, 0, 0] = math.nan
    lse = saved["lse"].clone()
    lse[1, 0, 0, 0] = math.inf
    return {
        "nan": ({**saved, "out": nan}, "out: got a NaN"),
        "inf": ({**saved, "lse": lse}, "lse: got a NaN or [+]inf"),
        "truncated": ({**saved, "lse": lse[:1]}, "lse: got shape"),
        "another shape": ({**saved, "lse": lse[..., :1]}, "lse: got shape"),
        "another dtype": ({**saved, "lse": saved["lse"].float()}, "lse: got torch.float32"),
        "half": ({**saved, "out": saved["out"].half()}, "out: got torch.float16"),
        "no lse": ({name: part for name, part in saved.items() if name != "lse"}, "got out"),
        "a stranger": ({**saved, "gram": lse}, "got out, lse, gram"),
        "none": ({**saved, "out": None}, "out: got None"),
        "number": ({**saved, "out": torch.tensor(1.0)}, "out: got shape"),
        "sparse": ({**saved, "out": saved["out"].to_sparse()}, "out: got torch.sparse"),
        "no mapping": ([saved], "state_dict: got a list"),
    }


WINDOWS = {
    "size": ({"size": torch.tensor(9)}, "size: got 9, expected 2"),
    "front": ({"front": torch.tensor(3)}, "front: got 3, expected an int from 0 to 2"),
    "negative": ({"front": torch.tensor(-1)}, "front: got -1"),
    "a float": ({"front": torch.tensor(1.0)}, "front: got tensor"),
    "an int": ({"size": 2}, "size: got 2"),
    "a meta tensor": ({"size": torch.tensor(2, device="meta")}, "size: got tensor"),
}
TREES = {
    "too many keys": ({"keys": [1, 2, 3]}, "keys: got 3 different keys of 3, expected 2"),
    "twice": ({"keys": [1, 1]}, "keys: got 1 different keys of 2"),
    "unhashable": ({"keys": [[], 1]}, "key: got a list"),
    "no list": ({"keys": 3}, "keys: got an int"),
}


@pytest.mark.parametrize("kind", [StateWindow, StateTree])
def test_mutated_files_are_refused(kind: type) -> None:
    holder = StateWindow(2) if kind is StateWindow else StateTree()
    for key in range(2):
        holder.push(attention()) if kind is StateWindow else holder.put(key, attention())
    saved = holder.state_dict()
    cases: dict[str, tuple[Any, str]] = _mutated(saved)
    cases |= {
        name: ({**saved, **change}, match)
        for name, (change, match) in (WINDOWS if kind is StateWindow else TREES).items()
    }
    for name in ("front", "size") if kind is StateWindow else ("keys",):
        cases[f"without {name}"] = ({key: part for key, part in saved.items() if key != name}, f"{name}: got nothing")
    for wrong, match in cases.values():
        _untouched(holder, lambda wrong=wrong: holder.load_state_dict(wrong), (ValueError, TypeError), match)
    if kind is StateWindow:
        longer = StateWindow(3)
        for _ in range(3):
            longer.push(attention())
        too_long = {**longer.state_dict(), "size": torch.tensor(2)}
        _untouched(
            holder, lambda: holder.load_state_dict(too_long), ValueError, "out: got 3 states, expected at most 2"
        )


def test_a_ridge_file_is_read_with_its_own_rules() -> None:
    window = StateWindow(2)
    window.push(ridge())
    saved = window.state_dict()
    for wrong, match in (
        ({"count": -saved["count"]}, "count: got a negative"),
        ({"gram": saved["gram"] + torch.rand(4, 4)}, "gram: got a matrix that is not"),
    ):
        with pytest.raises(ValueError, match=f"^state_dict.{match}"):
            window.load_state_dict({**saved, **wrong})


def test_compiled() -> None:
    """A compiled step pushes and reads in the same way as the step itself."""
    query, points = torch.randn(3, 2, 4), torch.randn(1, 3, 15, 4)

    def step(window: StateWindow, chunk: Tensor) -> Tensor:
        window.push(ck.attention_state(query, chunk, chunk))
        return window.state.out

    compiled, ours, theirs = torch.compile(step, backend="aot_eager"), StateWindow(3), StateWindow(3)
    for chunk in points.split(5, 2):
        torch.testing.assert_close(compiled(ours, chunk), step(theirs, chunk))


def test_pickles_of_earlier_versions() -> None:
    """A window had three attributes before its queue was one object; a tree had no change that is being written."""
    window, tree, states = StateWindow(3), StateTree(), [attention() for _ in range(5)]
    for key, state in enumerate(states):
        window.push(state)
        tree.put(key, state)
    front, older, back, newer, total = window._queue
    earlier: StateWindow = StateWindow.__new__(StateWindow)
    earlier.__setstate__({"size": 3, "_front": front[:older], "_back": back[:newer], "_total": total})
    assert len(earlier) == 3 and torch.equal(earlier.state.out, window.state.out)
    earlier.push(states[0])
    assert len(earlier) == 3
    tree.__dict__.pop("_change", None)
    tree.discard(2)
    assert len(pickle.loads(pickle.dumps(tree))) == 4 and len(pickle.loads(pickle.dumps(window))) == 3

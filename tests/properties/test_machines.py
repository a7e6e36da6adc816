"""States of every family in any order of moves that Hypothesis finds.

Each state is accompanied by the plain list of its points; after every move, all states, including older ones, must
equal their points.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels import nn
from cmab_kernels.nn import ContinualStream
from cmab_kernels.nystrom.continual.state import window_of

from .drawn import IMPLS, WIDE, Rows, with_examples
from .families import ATTENTION, RIDGE, Family, far, part, together
from .windows import OUTPUTS, Stream, some_tokens, step

FEW, MANY = 6, 100
BATCH, HEADS, QUERIES, WIDTH = 2, 2, 3, 4
LAWS = {"normal": 1.0, "ten times": 10.0, "far": 40.0}
which, sizes, laws = st.integers(0, 99), st.integers(0, 12), st.sampled_from(sorted(LAWS))


def _through_a_file(source: torch.nn.Module, target: torch.nn.Module) -> torch.nn.Module:
    """Return `target` with the state that `source` saves; it is written and read as bytes, which executes nothing."""
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    return target


# ---- sets of points


class Kind(NamedTuple):
    """A family of mergeable states: its operations, points for it, and the module that keeps its states."""

    family: Family
    points: Callable[[int, float], Rows]
    """(number, size of the keys) -> rows whose elements are exact in float32."""
    stream: Callable[[], Any]


def _rows(query: Tensor) -> Callable[[int, float], Rows]:
    def points(number: int, size: float) -> Rows:
        key, value = (torch.randn(*query.shape[:2], number, width) for width in (WIDTH, WIDTH + 1))
        return Rows(query, size * key, value)

    return points


def _attention(impl: str) -> Kind:
    query = torch.randn(BATCH, HEADS, QUERIES, WIDTH)
    return Kind(ATTENTION, _rows(query), lambda: nn.AttentionStream(HEADS, QUERIES, WIDTH + 1))


def _ridge(impl: str) -> Kind:
    return Kind(RIDGE, _rows(torch.zeros(BATCH, HEADS, 0, WIDTH)), lambda: nn.RidgeStream(HEADS, WIDTH, WIDTH + 1))


def _stack(impl: str) -> Kind:
    """Return the states of a `CMABStack`, whose points are rows of inputs; these rows are used as keys."""
    stack = nn.CMABStack(HEADS * WIDTH, QUERIES, HEADS, depth=2).eval().requires_grad_(False)
    stacks = {torch.float32: stack, torch.float64: copy.deepcopy(stack).double()}

    def of(rows: Rows, _: str, state: Any = None) -> ck.AttentionState:
        with ck.use_impl(impl):
            return stacks[rows.key.dtype].read(rows.key[:, 0], state)

    def right(rows: Rows) -> tuple[Tensor, ...]:
        with ck.use_impl("reference"):
            return stacks[torch.float64].read(rows.key[:, 0].double())

    def remove(state: Any, rows: Rows, _: str) -> tuple[Any, Tensor]:
        with ck.use_impl(impl):
            return tuple(stacks[rows.key.dtype].unread(rows.key[:, 0], state))

    def points(number: int, size: float) -> Rows:
        inputs = torch.randn(BATCH, 1, number, HEADS * WIDTH)
        return Rows(inputs.new_zeros(BATCH, 1, 0, HEADS * WIDTH), size * inputs, inputs)

    family = Family(of, lambda _: stack.init_state(BATCH), ck.merge_states, remove, right, lambda _: (4e-5, 4e-5))
    return Kind(family, points, lambda: nn.AttentionStream(HEADS, QUERIES, WIDTH, blocks=2))


KINDS = {"AttentionState": _attention, "RidgeState": _ridge, "CMABStack": _stack}


class Known(NamedTuple):
    """A state, the dtype of its module, its points, and the error that its history allows for each field."""

    state: Any
    dtype: torch.dtype
    points: Rows
    allowed: tuple[float, ...]


class Sets(RuleBasedStateMachine):
    """A pool of states; every move makes a new state from some of them, and they do not change."""

    kind: Callable[[str], Kind]
    impl = "native"

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.made = type(self).kind(self.impl)
        none = self.made.points(0, 1.0)
        self.pool = [Known(self.made.family.empty(none), torch.float32, none, self.made.family.allowed(none))]

    def taken(self, at: int) -> Known:
        return self.pool[at % len(self.pool)]

    def keep(self, known: Known) -> None:
        self.pool.append(known)
        if len(self.pool) > 6:
            self.pool.pop(1)

    def given(self, points: Rows, dtype: torch.dtype) -> Rows:
        return Rows(*(t.to(dtype) for t in points))

    @rule(at=which, number=sizes, law=laws)
    def push(self, at: int, number: int, law: str) -> None:
        known, more, family = self.taken(at), self.made.points(number, LAWS[law]), self.made.family
        state = family.of(self.given(more, known.dtype), self.impl, known.state)
        points = together(known.points, more)
        self.keep(Known(state, known.dtype, points, _added(known.allowed, family.allowed(points))))

    @rule(at=which, other=which)
    def merge(self, at: int, other: int) -> None:
        a, b, family = self.taken(at), self.taken(other), self.made.family
        if a.dtype == b.dtype and a.points.key.shape[2] + b.points.key.shape[2] < 200:
            points = together(a.points, b.points)
            allowed = _added(a.allowed, b.allowed, family.allowed(points))
            self.keep(Known(family.merge(a.state, b.state), a.dtype, points, allowed))

    @rule(at=which, number=sizes, seed=st.integers(0, 2**32))
    def remove(self, at: int, number: int, seed: int) -> None:
        known, family = self.taken(at), self.made.family
        torch.manual_seed(seed)
        mixed = torch.randperm(known.points.key.shape[2])
        gone, kept = part(known.points, mixed[:number]), part(known.points, mixed[number:])
        left, reliable = family.remove(known.state, self.given(gone, known.dtype), self.impl)
        share = self.share_left(known.points, kept)
        allowed = tuple(a / share for a in _added(known.allowed, family.allowed(known.points)))
        if reliable.all() and allowed[0] < 1.0:
            self.keep(Known(left, known.dtype, kept, allowed))
        else:
            assert share < 1e-2, "a removal that leaves much of the mass is called unreliable"

    def share_left(self, before: Rows, after: Rows) -> float:
        """Return the least share of the mass of a row that is left, or 1 if states are sums."""
        if self.made.family is RIDGE:
            return 1.0
        masses = [self.made.family.right(rows)[1] for rows in (before, after)]
        return float((masses[1] - masses[0]).nan_to_num(0.0, 0.0, -math.inf).exp().min().clamp(1e-300, 1.0))

    @rule(at=which)
    def save_and_load(self, at: int) -> None:
        known = self.taken(at)
        source, target = (self.made.stream().to(known.dtype) for _ in range(2))
        source.state = known.state
        loaded = _through_a_file(source, target).state
        assert all(torch.equal(a, b) for a, b in zip(loaded, known.state, strict=True))
        self.keep(known._replace(state=loaded))

    @rule(at=which, dtype=st.sampled_from([*WIDE, torch.bfloat16]))
    def move(self, at: int, dtype: torch.dtype) -> None:
        known, stream = self.taken(at), self.made.stream()
        stream = stream.to(known.dtype)
        stream.state = known.state
        stream.to(dtype).to("cpu").to(dtype if dtype in WIDE else torch.float32)
        self.keep(known._replace(state=stream.state, dtype=stream.weight_like.dtype))

    @rule(at=which)
    def copy(self, at: int) -> None:
        known = self.taken(at)
        self.keep(known._replace(state=copy.deepcopy(known.state)))

    @invariant()
    def states_are_what_their_points_say(self) -> None:
        for known in self.pool:
            assert far(known.state, self.made.family.right(known.points), known.allowed) == ""


def _added(*several: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*several, strict=True)))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.nightly)])
def test_sets_of_points(kind: str, examples: int, impl: str) -> None:
    machine = type(f"{kind}Machine", (Sets,), {"kind": staticmethod(KINDS[kind]), "impl": impl})
    run_state_machine_as_test(machine, settings=with_examples(examples, steps=20))


# ---- windows


class Windows(RuleBasedStateMachine):
    """A pool of states of windows; every step makes a new state from one of them."""

    kind = "fixed"
    impl = "native"
    window, number, width = 7, 3, 4

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        stream = Stream(self.kind, self.window, self.number, self.tokens(self.window, "normal"))
        self.pool = [(stream.start(), stream)]

    def tokens(self, count: int, law: str) -> tuple[Tensor, ...]:
        law = law if self.kind != "continual" else "normal"
        return some_tokens((BATCH, HEADS, self.width, self.width), count, torch.float32, law, "heads inside")

    def keep(self, state: Any, stream: Stream) -> None:
        self.pool.append((state, stream))
        if len(self.pool) > 6:
            self.pool.pop(1)

    def kept_by(self, state: Any) -> ContinualStream:
        """Return a module for such states, in the dtype of the window."""
        counts = {name: getattr(state, name) for name in ("window", "pinv_iterations", "fixed") if hasattr(state, name)}
        rows = (0, self.window) if self.kind == "exact" else (self.number,)
        return ContinualStream(type(state), HEADS, self.width, rows, counts, dtype=state.keys.dtype)

    @rule(
        at=which,
        count=st.integers(1, 16),
        law=st.sampled_from(["normal", "ten times", "a spike"]),
        output=st.sampled_from(OUTPUTS),
    )
    def step(self, at: int, count: int, law: str, output: str) -> None:
        state, stream = self.pool[at % len(self.pool)]
        before, tokens = int(state.position.unique()), self.tokens(count, law)
        out, state = step(state, tuple(t.to(state.keys.dtype) for t in tokens), output, self.impl)
        stream = stream.with_more(tokens)
        assert float((out.double() - stream.outputs(before, output)).abs().max()) <= stream.allowed()
        self.keep(state, stream)

    @rule(at=which)
    def save_and_load(self, at: int) -> None:
        state, stream = self.pool[at % len(self.pool)]
        source, target = self.kept_by(state), self.kept_by(state)
        source.state = state
        self.keep(_through_a_file(source, target).state, stream)

    @rule(at=which, dtype=st.sampled_from(WIDE))
    def move(self, at: int, dtype: torch.dtype) -> None:
        state, stream = self.pool[at % len(self.pool)]
        keeper = self.kept_by(state)
        keeper.state = state
        self.keep(ck.move_state(keeper.to(dtype).state, "cpu"), stream)

    @rule(at=which)
    def copy(self, at: int) -> None:
        state, stream = self.pool[at % len(self.pool)]
        self.keep(copy.deepcopy(state), stream)

    @invariant()
    def windows_hold_the_newest_tokens(self) -> None:
        for state, stream in self.pool:
            end = stream.tokens[0].shape[2]
            assert (state.position == end).all()
            held = (window_of(ring, state.position, self.window).double() for ring in state[:3])
            assert all(torch.equal(ours, right) for ours, right in zip(held, stream.newest(end), strict=True))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["exact", "fixed", "continual"])
@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.nightly)])
def test_windows(kind: str, examples: int, impl: str) -> None:
    machine = type(f"{kind.title()}Machine", (Windows,), {"kind": kind, "impl": impl})
    run_state_machine_as_test(machine, settings=with_examples(examples, steps=20))

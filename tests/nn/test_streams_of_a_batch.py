"""Rows of a batch that begin, pause and end independently: each has the bits of a stream whose batch does the same in
all rows."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cmab_kernels
from cmab_kernels.nn import ContinualEncoder, ContinualEncoderLayer, ContinualStream, StaggeredWindow
from cmab_kernels.nn import RetroactiveEncoderLayer as Retroactive

from .test_continual import DIM, KINDS, OUTPUTS
from .test_continual import made as attention
from .test_continual_stream import saved

ROWS, WINDOW = 5, 6


def encoder(layer: type[ContinualEncoderLayer], **config: Any) -> Callable[..., nn.Module]:
    def made(dtype: torch.dtype) -> nn.Module:
        one = layer(DIM, 3, 32, sequence_len=4, dtype=dtype, batch_first=True, **config)
        return ContinualEncoder(one, 3, nn.LayerNorm(DIM, dtype=dtype)).eval()

    return made


MODULES: dict[str, Callable[..., Any]] = {
    **{
        f"{kind}, {output}": lambda dtype, kind=kind, output=output: attention(
            kind, output=output, sequence_len=WINDOW, dtype=dtype
        )
        for kind in KINDS
        for output in OUTPUTS
    },
    "layer": lambda dtype: ContinualEncoderLayer(DIM, 3, 32, sequence_len=WINDOW, dtype=dtype).eval(),
    "retroactive layer": lambda dtype: Retroactive(
        DIM, 3, 32, sequence_len=WINDOW, dtype=dtype, norm_first=True
    ).eval(),
    "encoder": encoder(ContinualEncoderLayer),
    "Nyström encoder": encoder(ContinualEncoderLayer, num_landmarks=2, norm_first=True),
    "retroactive encoder": encoder(Retroactive),
}


def same(module: nn.Module, *states: Any) -> bool:
    """Return whether two states of a module have the same bits in all meaningful memory."""
    entries = []
    for state in states:
        other: Any = copy.deepcopy(module)
        other.set_state(state)
        entries.append(other.state_dict())
    return entries[0].keys() == entries[1].keys() and all(
        torch.equal(entry, entries[1][name]) for name, entry in entries[0].items()
    )


def row_of(out: Tensor, row: int) -> Tensor:
    """Return a row of a result of `forward_step`: (B, C); for a retroactive module (n, B, C), or (B, n, C) with
    `batch_first`."""
    return out.select(0 if out.dim() == 2 else out.shape.index(ROWS), row)


class Alone:
    """The stream of one row: a module with the same batch that takes a step in all rows when this row has a token."""

    def __init__(self, module: nn.Module, row: int) -> None:
        self.module, self.row = copy.deepcopy(module), row
        self.module.clean_state()

    def step(self, token: Tensor) -> Tensor | None:
        others = torch.randn_like(token.expand(ROWS, -1))
        others[self.row] = token
        out = self.module.forward_step(others)
        return None if out is None else row_of(out, self.row)


def schedule(steps: int, seed: int, begins: float) -> list[tuple[list[int], Tensor]]:
    """Return (rows that restart, rows without a token) before and at each step."""
    draw = random.Random(seed)
    often = [draw.choice([0.2, 0.6, 0.9, 1.0]) for _ in range(ROWS)]
    made = []
    for at in range(steps):
        begin = [row for row in range(ROWS) if draw.random() < begins]
        gone = [draw.random() > share for share in often]
        made.append((begin, torch.tensor(gone if at % 9 else [True] * ROWS)))
    return made


def through(
    module: Any,
    change: Callable[[Any, int], Any] = lambda module, at: module,
    steps: int = 90,
    seed: int = 0,
    begins: float = 0.03,
) -> None:
    """Follow a schedule with a module, which `change` may replace before each step, and compare each row with its own
    stream."""
    torch.manual_seed(seed)
    dtype = next(module.parameters()).dtype
    alone = [Alone(module, row) for row in range(ROWS)]
    results = 0
    for at, (begin, absent) in enumerate(schedule(steps, seed, begins)):
        module = change(module, at)
        if begin:
            module.clean_state(begin if at % 2 else torch.tensor([row in begin for row in range(ROWS)]))
            for row in begin:
                alone[row].module.clean_state()
        tokens = torch.randn(ROWS, DIM, dtype=torch.float64).to(dtype)
        wanted = [None if absent[row] else alone[row].step(tokens[row]) for row in range(ROWS)]
        tokens[absent] = torch.nan  # the entries without a token are not read
        out = module.forward_step(tokens, key_padding_mask=absent if at % 4 else absent[:, None])
        ready = module.ready
        for row in range(ROWS):
            mine = row_of(out, row)
            if wanted[row] is None:
                assert mine.isnan().all()
                assert absent[row] or not ready[row]
            else:
                assert ready[row] and torch.equal(mine, wanted[row]), (at, row)
                results += 1
    assert results > steps / 3


DTYPES = [
    torch.float32,
    torch.bfloat16,
    *(pytest.param(dtype, marks=pytest.mark.thorough) for dtype in (torch.float64, torch.float16)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_each_row_is_a_stream_of_its_own(name: str, dtype: torch.dtype) -> None:
    through(MODULES[name](dtype))


@pytest.mark.parametrize("name", ["exact, single", "exact, retroactive", "continual, single", "fixed, retroactive"])
@torch.no_grad()
def test_long_windows(name: str) -> None:
    """Sums over windows that are not small are updated, and not recomputed at every token."""
    kind, output = name.split(", ")
    through(
        attention(kind, output=output, sequence_len=70, dtype=torch.float32, batch_first=True),
        steps=400,
        seed=3,
        begins=0.002,
    )


@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_saved_copied_and_set_in_midstream(name: str) -> None:
    """A module that is loaded, copied or set from a state continues with the same bits, whatever the ages of its
    rows."""

    def change(module: Any, at: int) -> Any:
        if at % 5 == 0 and module.get_state() is not None:
            other = copy.deepcopy(module)
            other.clean_state()
            if at % 10:
                other.set_state(module.get_state())
            else:
                other.load_state_dict(saved(module))
            return other
        return copy.copy(module) if at % 7 == 0 else pickle.loads(pickle.dumps(module)) if at % 11 == 0 else module

    through(MODULES[name](torch.float32), change, steps=60)


@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_what_is_held_elsewhere_does_not_move(name: str) -> None:
    """A state that was taken out, and a step without an update, leave the module unchanged."""
    kept: list[Any] = []
    draw = torch.Generator().manual_seed(1)

    def change(module: Any, at: int) -> Any:
        if at and at % 3 == 0:
            state = module.get_state()
            kept.append((state, copy.deepcopy(state)))
            before = copy.deepcopy(module.state_dict())
            mask = torch.rand(ROWS, generator=draw) < 0.5
            tokens = torch.randn(ROWS, DIM, generator=draw)
            out = module.forward_step(tokens, update_state=False, key_padding_mask=mask)
            after = module.state_dict()
            assert before.keys() == after.keys() and all(torch.equal(before[each], after[each]) for each in before)
            along = 1 if getattr(module, "batch_first", True) and "layer" not in name else 0
            again = (
                copy.deepcopy(module)
                .forward_steps(tokens.unsqueeze(along), key_padding_mask=mask[:, None])
                .squeeze(along)
            )
            assert torch.equal(out.isnan(), again.isnan())
            torch.testing.assert_close(out, again, rtol=1e-5, atol=1e-5, equal_nan=True)
        return module

    module = MODULES[name](torch.float32)
    through(module, change, steps=36)
    for state, copied in kept:
        assert same(module, state, copied)


@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_several_tokens_are_as_many_steps(name: str) -> None:
    module = MODULES[name](torch.float64)
    other, along = copy.deepcopy(module), 1 if "encoder" in name else 0
    for at in range(12):
        tokens, absent = torch.randn(ROWS, 4, DIM, dtype=torch.float64), torch.rand(ROWS, 4) < 0.3
        tokens[absent] = torch.nan
        out = module.forward_steps(tokens if along else tokens.transpose(0, 1), key_padding_mask=absent)
        each = [
            other.forward_step(token, key_padding_mask=gone)
            for token, gone in zip(tokens.unbind(1), absent.unbind(1), strict=True)
        ]
        torch.testing.assert_close(out, torch.stack(each, along), rtol=1e-10, atol=1e-10, equal_nan=True)
        assert torch.equal(module.ready, other.ready)
        if at % 3 == 1:
            module.clean_state(range(at % 2, ROWS, 3)), other.clean_state(list(range(at % 2, ROWS, 3)))


@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_a_batch_of_one_age_is_as_ever(name: str) -> None:
    """Without a mask and with all windows full, the state is that of the operators; a mask without True changes no
    bits."""
    module = MODULES[name](torch.float32)
    other = copy.deepcopy(module)
    for _ in range(25):
        tokens = torch.randn(ROWS, DIM)
        out, masked = (
            module.forward_step(tokens),
            other.forward_step(tokens, key_padding_mask=torch.zeros(ROWS, dtype=torch.bool)),
        )
        if out is None:
            assert masked.isnan().all()
            assert module.ready is None or not module.ready.all()
        else:
            assert torch.equal(out, masked) and module.ready.all() and other.ready.all()
    assert same(module, module.get_state(), other.get_state())
    assert all(
        type(stream.held) is not StaggeredWindow for stream in other.modules() if isinstance(stream, ContinualStream)
    )


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_under_inference_mode_and_by_the_definition(kind: str, impl: str) -> None:
    module = attention(kind, output="retroactive", sequence_len=WINDOW)
    with cmab_kernels.use_impl(impl):
        plain = copy.deepcopy(module)
        for at in range(3 * WINDOW):
            tokens = torch.randn(ROWS, DIM, dtype=torch.float64)
            absent = torch.tensor([False, at % 2 == 0, True, False, False])
            out = module.forward_step(tokens, key_padding_mask=absent)
            wanted = plain.forward_step(tokens)
            if wanted is not None:
                torch.testing.assert_close(row_of(out, 0), row_of(wanted, 0), rtol=1e-9, atol=1e-9)
            if at == WINDOW:
                with torch.inference_mode(False), torch.no_grad():  # a stream continues outside
                    module.clean_state(4)
                    module.forward_step(tokens.clone(), key_padding_mask=absent.clone())
                    plain.forward_step(tokens.clone())


@torch.no_grad()
def test_a_step_reuses_the_memory_of_the_rings() -> None:
    for kind in KINDS:
        module, rings = attention(kind, sequence_len=WINDOW, dtype=torch.float32), set()
        for at in range(60):
            if at % 10 == 5:
                module.clean_state([at % ROWS])
            module.forward_step(torch.randn(ROWS, DIM), key_padding_mask=torch.rand(ROWS) < 0.3)
            held = module.stream.held
            rings.add((held.window if type(held) is StaggeredWindow else held).keys.data_ptr())
            del held  # otherwise the next step copies
        assert len(rings) <= 2


@torch.no_grad()
def test_a_saved_stream_has_nothing_of_one_that_ended() -> None:
    for kind in KINDS:
        module = attention(kind, output="retroactive", sequence_len=WINDOW, dtype=torch.float32)
        for _ in range(2 * WINDOW):
            module.forward_step(torch.randn(ROWS, DIM))
        module.clean_state(2)
        entries = module.stream.state_dict()
        assert entries["tokens"].tolist() == [WINDOW, WINDOW, 0, WINDOW, WINDOW]
        for name in ("queries", "keys", "values"):
            assert not entries[name][2].any() and entries[name][3].any()
        for name in {"sums", "landmark_queries", "landmark_keys", "inverse"} & entries.keys():
            assert (entries[name][2] == 1).all()


@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_casts(name: str) -> None:
    """A cast casts the tokens of a row that is not ready, and the rows continue."""
    module = MODULES[name](torch.float32)
    tokens = torch.randn(30, ROWS, DIM)
    for at, each in enumerate(tokens[:20]):
        module.forward_step(each, key_padding_mask=torch.tensor([False, at % 2 == 0, at > 1, False, False]))
    module.clean_state([3])
    module.forward_step(tokens[20])
    wide = copy.deepcopy(module).double()
    for each in tokens[21:]:
        out, wanted = module.forward_step(each), wide.forward_step(each.double())
        assert torch.equal(out.isnan(), wanted.isnan())
        torch.testing.assert_close(out.double(), wanted, rtol=1e-3, atol=1e-3, equal_nan=True)


@torch.no_grad()
def test_a_masked_step_of_full_windows_compiles() -> None:
    module = attention("continual", sequence_len=WINDOW, dtype=torch.float32, batch_first=True)
    module.forward_steps(torch.randn(ROWS, WINDOW, DIM))
    other = copy.deepcopy(module)
    step = torch.compile(module.forward_step, backend="eager", fullgraph=True)
    for _ in range(3):
        tokens, absent = torch.randn(ROWS, DIM), torch.tensor([False, True, True, False, False])
        out, wanted = step(tokens, key_padding_mask=absent), other.forward_step(tokens, key_padding_mask=absent)
        torch.testing.assert_close(out, wanted, equal_nan=True)


@pytest.mark.thorough
@torch.no_grad()
def test_windows_that_fill_go_through_a_compiled_step() -> None:
    module = attention("continual", sequence_len=WINDOW, dtype=torch.float32, batch_first=True)
    other = copy.deepcopy(module)
    step = torch.compile(module.forward_step, backend="aot_eager")
    for at in range(3 * WINDOW):
        if at == 2 * WINDOW:
            module.clean_state(np.int64(1)), other.clean_state(1)
        tokens, absent = torch.randn(ROWS, DIM), torch.rand(ROWS) < 0.2
        out, wanted = step(tokens, key_padding_mask=absent), other.forward_step(tokens, key_padding_mask=absent)
        torch.testing.assert_close(out, wanted, equal_nan=True)
        assert torch.equal(module.ready, other.ready)


@pytest.mark.parametrize("name", ["fixed", "fixed, in an encoder"])
def test_a_cleaned_row_brings_no_graph_into_the_stream(name: str) -> None:
    """Fixed landmarks are parameters, and `clean_state` is called without `no_grad`: it computes no outputs."""
    options = {"sequence_len": 4, "num_landmarks": 2, "landmarks": "fixed", "batch_first": True}
    module = (
        cmab_kernels.nn.ContinualNystromAttention(8, 2, **options)
        if name == "fixed"
        else ContinualEncoder(ContinualEncoderLayer(8, 2, 16, **options), 2)
    ).eval()
    for part in module.modules():
        if hasattr(part, "fit_landmarks"):
            part.fit_landmarks(torch.randn(1, 30, 8))
    with torch.no_grad():
        module.forward_step(torch.randn(3, 8))
    module.clean_state(1)
    assert not any(t.requires_grad for t in module.state_dict().values())
    copy.deepcopy(module)


def test_a_mask_without_values_is_refused() -> None:
    module = attention("exact", sequence_len=WINDOW, batch_first=True).float().to("meta")
    absent = torch.zeros(ROWS, dtype=torch.bool, device="meta")
    with pytest.raises(ValueError, match=r"^key_padding_mask: got a mask on the meta device"):
        module.forward_step(torch.randn(ROWS, DIM, device="meta"), key_padding_mask=absent)


@torch.no_grad()
def test_rows_without_values_are_refused() -> None:
    module = attention("exact", sequence_len=WINDOW, batch_first=True).float().to("meta").eval()
    token = torch.randn(ROWS, DIM, device="meta")
    for _ in range(WINDOW):
        module.forward_step(token)
    with pytest.raises(ValueError, match=r"^rows: got a tensor on the meta device"):
        module.clean_state(torch.zeros(ROWS, dtype=torch.bool, device="meta"))
    module.clean_state(0)
    with pytest.raises(ValueError, match=r"^state: got a state on the meta device, expected values"):
        module.forward_step(token)


LAYOUTS: dict[str, Callable[[bool], Any]] = {
    "exact": lambda batch_first: attention("exact", sequence_len=3, batch_first=batch_first),
    "retroactive": lambda batch_first: attention(
        "continual", sequence_len=3, output="retroactive", batch_first=batch_first
    ),
    "retroactive layer": lambda batch_first: Retroactive(
        DIM, 3, 32, sequence_len=3, dtype=torch.float64, batch_first=batch_first
    ),
    "encoder": lambda batch_first: ContinualEncoder(
        ContinualEncoderLayer(DIM, 3, 32, sequence_len=2, dtype=torch.float64, batch_first=batch_first), 2
    ),
    "retroactive encoder": lambda batch_first: ContinualEncoder(
        Retroactive(DIM, 3, 32, sequence_len=3, dtype=torch.float64, batch_first=batch_first), 2
    ),
}


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_an_unbatched_stream_may_have_gaps(name: str, batch_first: bool) -> None:
    """An unbatched stream may have gaps: its mask may have any layout, no tokens, and no rows."""
    module = LAYOUTS[name](batch_first).eval()
    other, tokens = copy.deepcopy(module), torch.randn(7, DIM, dtype=torch.float64)
    gaps = torch.tensor([False, True, False, False, True, False, False])
    out, wanted = module.forward_steps(tokens, key_padding_mask=gaps), other.forward_steps(tokens[~gaps])
    assert out.shape[0] == 7 and out[[0, 1, 2, 4]].isnan().all()
    torch.testing.assert_close(out[[3, 5, 6]], wanted)
    assert module.forward_step(tokens[0], key_padding_mask=torch.tensor([True])).isnan().all()
    torch.testing.assert_close(
        module.forward_step(tokens[0], key_padding_mask=torch.tensor([False])), other.forward_step(tokens[0])
    )
    for batch in (0, 2):
        module.clean_state()
        none = torch.randn((batch, 0, DIM) if batch_first else (0, batch, DIM), dtype=torch.float64)
        assert module.forward_steps(none, key_padding_mask=torch.zeros(batch, 0, dtype=torch.bool)) is None
        for _ in range(4):
            out = module.forward_step(
                torch.randn(batch, DIM, dtype=torch.float64), key_padding_mask=torch.zeros(batch, dtype=torch.bool)
            )
            module.clean_state(torch.zeros(batch, dtype=torch.bool))
        assert batch in out.shape and not out.isnan().any() and module.ready.all()


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a mask that is a list": (
        lambda module, token: module.forward_step(token, key_padding_mask=[True]),
        "key_padding_mask: got a list",
    ),
    "a mask of numbers": (
        lambda module, token: module.forward_step(token, key_padding_mask=torch.zeros(ROWS)),
        "key_padding_mask: got torch.float32, expected torch.bool",
    ),
    "a mask of another batch": (
        lambda module, token: module.forward_step(token, key_padding_mask=torch.zeros(2, dtype=torch.bool)),
        r"key_padding_mask: got shape \(2,\), expected \(B, 1\) or \(B,\) = \(5, 1\)",
    ),
    "a mask on another device": (
        lambda module, token: module.forward_step(
            token, key_padding_mask=torch.zeros(ROWS, dtype=torch.bool, device="meta")
        ),
        "key_padding_mask: got device meta, expected cpu, the device of the tokens",
    ),
    "a row that is not there": (
        lambda module, token: module.clean_state(ROWS),
        "rows: got 5, expected a row from 0 to 4",
    ),
    "a negative row": (lambda module, token: module.clean_state([0, -1]), "rows: got -1, expected a row from 0 to 4"),
    "a row by name": (lambda module, token: module.clean_state("first"), "rows: got a str, expected a row from 0 to 4"),
    "one bool": (lambda module, token: module.clean_state(True), "rows: got a bool, expected a row from 0 to 4"),
    "rows as numbers": (
        lambda module, token: module.clean_state(torch.zeros(ROWS)),
        r"rows: got torch.float32 \(5,\), expected a row",
    ),
    "bools of another batch": (
        lambda module, token: module.clean_state(torch.ones(2, dtype=torch.bool)),
        r"rows: got torch.bool \(2,\)",
    ),
    "a token that is not finite": (
        lambda module, token: module.forward_step(
            token / 0, key_padding_mask=torch.tensor([True, True, False, True, True])
        ),
        "a NaN or an infinity",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", ["exact, retroactive", "encoder", "retroactive layer"])
def test_refusals_leave_the_streams(kind: str, name: str) -> None:
    module = MODULES[kind](torch.float32).requires_grad_(False)
    for at in range(12):
        module.forward_step(
            torch.randn(ROWS, DIM), key_padding_mask=torch.tensor([False, False, at % 5 != 0, False, False])
        )
    before = copy.deepcopy(module.state_dict())
    call, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call(module, torch.randn(ROWS, DIM))
    after = module.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[each], after[each]) for each in before)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_a_later_token_that_is_refused_leaves_the_streams(name: str, full: bool) -> None:
    module = LAYOUTS[name](True).eval()
    for at in range(9):
        gone = torch.tensor([not full and at % 3 > 0, False])
        module.forward_step(torch.randn(2, DIM, dtype=torch.float64), key_padding_mask=gone)
    module.clean_state([] if full else 0)
    before, tokens = copy.deepcopy(module.state_dict()), torch.randn(2, 4, DIM, dtype=torch.float64)
    tokens[1, 3] = torch.inf
    with pytest.raises(ValueError, match="a NaN or an infinity"):
        module.forward_steps(tokens, key_padding_mask=torch.zeros(2, 4, dtype=torch.bool))
    after = module.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[each], after[each]) for each in before)
    absent = torch.zeros(2, 4, dtype=torch.bool)
    absent[1, 3] = True
    module.forward_steps(tokens, key_padding_mask=absent)


def test_states_that_no_batch_has_are_refused() -> None:
    module = attention("exact", sequence_len=WINDOW, dtype=torch.float32).requires_grad_(False)
    for at in range(2 * WINDOW):
        module.forward_step(
            torch.randn(ROWS, DIM), key_padding_mask=torch.tensor([False, False, at % 5 != 0, False, False])
        )
    state = module.get_state()
    assert type(state) is StaggeredWindow
    wrong = {
        "state.tokens: got 7, expected 0 to 6": state._replace(tokens=state.tokens + 4),
        "state.position: got another number, expected 6": state._replace(tokens=state.tokens * 0),
        r"state.tokens: got torch.int64 \(2,\)": state._replace(tokens=state.tokens[:2]),
        "state.tokens: got a list": state._replace(tokens=[1]),
        "state.window: got a list": state._replace(window=[1]),
    }
    for message, other in wrong.items():
        with pytest.raises((ValueError, TypeError), match=message):
            module.set_state(other)
    with pytest.raises(RuntimeError, match="requires a gradient"):
        module.set_state(state._replace(window=state.window._replace(keys=state.window.keys.clone().requires_grad_())))
    assert same(module, state, module.get_state())

"""Bad input raises an error that names the argument, the given value and the allowed values; states do not change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cmab_kernels as ck
from cmab_kernels.runtime.checks import refuse_not_finite

Q, K, V = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 5)
NEAR = torch.randn(3, 4, 8)
MASK = torch.zeros(2, 9, dtype=torch.bool)
Error = tuple[type[Exception], str, dict[str, Any]]

BAD_WINDOWS: dict[str, Error] = {
    "query that is a list": (TypeError, r"^query: got a list", {"query": Q.tolist()}),
    "query of another width": (ValueError, r"^query: got shape \(2, 3, 9, 7\)", {"query": Q[..., :7]}),
    "integer key": (TypeError, r"^key: got torch.int64", {"key": K.long()}),
    "value elsewhere": (ValueError, r"^value: got device meta", {"value": V.to("meta")}),
    "fewer values than keys": (ValueError, r"^value: got shape \(2, 3, 8, 5\)", {"value": V[:, :, 1:]}),
    "no landmarks": (ValueError, r"^num_landmarks: got None.*one of the two", {"num_landmarks": None}),
    "landmarks twice": (ValueError, r"^num_landmarks: got 3 beside landmarks", {"landmarks": (NEAR, NEAR)}),
    "landmarks twice, of one tensor": (ValueError, r"^num_landmarks: got 3 beside landmarks", {"landmarks": NEAR}),
    "more landmarks than tokens": (ValueError, r"^num_landmarks: got 10.*between 1 and 9", {"num_landmarks": 10}),
    "no landmark": (ValueError, r"^num_landmarks: got 0.*between 1 and 9", {"num_landmarks": 0}),
    "half a landmark": (ValueError, r"^num_landmarks: got 2.5.*an int", {"num_landmarks": 2.5}),
    "one landmark tensor": (TypeError, r"^landmarks: got a Tensor.*pair", {"num_landmarks": None, "landmarks": NEAR}),
    "landmarks of another width": (
        ValueError,
        r"^landmarks\[1\]: got shape \(3, 4, 7\).*\(3, m, 8\)",
        {"num_landmarks": None, "landmarks": (NEAR, NEAR[..., :7])},
    ),
    "landmarks of another number": (
        ValueError,
        r"^landmarks: got 4 for queries and 3 for keys",
        {"num_landmarks": None, "landmarks": (NEAR, NEAR[:, :3])},
    ),
    "landmarks without a row": (
        ValueError,
        r"^landmarks\[0\]: got shape \(3, 0, 8\).*m >= 1",
        {"num_landmarks": None, "landmarks": (NEAR[:, :0], NEAR[:, :0])},
    ),
    "landmarks elsewhere": (
        ValueError,
        r"^landmarks\[0\]: got device meta",
        {"num_landmarks": None, "landmarks": (NEAR.to("meta"), NEAR)},
    ),
    "integer landmarks": (
        TypeError,
        r"^landmarks\[0\]: got torch.int64",
        {"num_landmarks": None, "landmarks": (NEAR.long(), NEAR)},
    ),
    "unknown pinv": (ValueError, r"^pinv: got 'svd'.*iterative, exact", {"pinv": "svd"}),
    "no iteration": (ValueError, r"^pinv_iterations: got 0", {"pinv_iterations": 0}),
    "iterations beyond 64 bits": (
        ValueError,
        r"^pinv_iterations: got \d+, expected an int from 1 to \d+",
        {"pinv_iterations": 2**63},
    ),
}
BAD_ATTENTION: dict[str, Error] = {
    "a causal mask": (ValueError, r"^is_causal: got True.*means over past and future", {"is_causal": True}),
    "a square mask": (
        ValueError,
        r"^key_padding_mask: got shape \(9, 9\).*\(B, N\)",
        {"key_padding_mask": torch.ones(9, 9).bool()},
    ),
    "a mask of other tokens": (
        ValueError,
        r"^key_padding_mask: got a mask for 8 queries.*9 queries",
        {"query": Q[:, :, 1:], "key_padding_mask": MASK, "num_landmarks": 4},
    ),
    "unknown impl": (ValueError, r"^impl: got 'fast'.*auto, native, triton, reference", {"impl": "fast"}),
}
BAD_INITS: dict[str, Error] = {
    "a query too few": (
        ValueError,
        r"^query: got shape \(2, 3, 8, 8\), expected \(2, 3, 9, 8\), the shape of key",
        {"query": Q[:, :, 1:]},
    ),
    "no token": (ValueError, r"^key: got no token", {"query": Q[:, :, :0], "key": K[:, :, :0], "value": V[:, :, :0]}),
    "a NaN": (ValueError, r"^key: got a NaN", {"key": K.masked_fill(K.max() == K, torch.nan)}),
    "an infinity": (ValueError, r"^value: got a NaN or an infinity", {"value": V / 0}),
    "a NaN landmark": (
        ValueError,
        r"^landmarks\[1\]: got a NaN",
        {"num_landmarks": None, "landmarks": (NEAR, NEAR * torch.nan)},
    ),
    "a NaN scale": (ValueError, r"^scale: got a NaN", {"scale": float("nan")}),
    "an infinite scale": (ValueError, r"^scale: got a NaN or an infinity", {"scale": torch.tensor(torch.inf)}),
}


@pytest.mark.parametrize("name", [*BAD_WINDOWS, *BAD_ATTENTION])
def test_nystrom_attention(name: str) -> None:
    error, message, given = {**BAD_WINDOWS, **BAD_ATTENTION}[name]
    with pytest.raises(error, match=message):
        ck.nystrom_attention(**{"query": Q, "key": K, "value": V, "num_landmarks": 3, **given})


@pytest.mark.parametrize("name", [*BAD_WINDOWS, *BAD_INITS])
def test_init(name: str) -> None:
    error, message, given = {**BAD_WINDOWS, **BAD_INITS}[name]
    with pytest.raises(error, match=message):
        ck.continual_nystrom_init(**{"query": Q, "key": K, "value": V, "num_landmarks": 3, **given})


@pytest.mark.parametrize("scale", [torch.nan, torch.inf])
def test_init_of_attention(scale: float) -> None:
    with pytest.raises(ValueError, match=r"^scale: got a NaN or an infinity"):
        ck.continual_attention_init(Q, K, V, scale=scale)


BAD_MATRICES: dict[str, tuple[type[Exception], str, Any, Any]] = {
    "a list": (TypeError, r"^matrix: got a list", [[1.0]], 6),
    "integers": (TypeError, r"^matrix: got torch.int64", torch.eye(3).long(), 6),
    "a rectangle": (ValueError, r"^matrix: got shape \(2, 3\)", torch.ones(2, 3), 6),
    "nothing": (ValueError, r"^matrix: got shape \(0, 0\)", torch.ones(0, 0), 6),
    "no iteration": (ValueError, r"^iterations: got 0", torch.eye(3), 0),
    "iterations beyond 32 bits": (
        ValueError,
        r"^iterations: got \d+, expected an int from 1 to \d+",
        torch.eye(3),
        2**32,
    ),
    "iterations beyond 64 bits": (
        ValueError,
        r"^iterations: got \d+, expected an int from 1 to \d+",
        torch.eye(3),
        2**70,
    ),
}


@pytest.mark.parametrize("name", BAD_MATRICES)
def test_iterative_pinv(name: str) -> None:
    error, message, matrix, iterations = BAD_MATRICES[name]
    with pytest.raises(error, match=message):
        ck.iterative_pinv(matrix, iterations)


TOKEN = tuple(t[:, :, :1] for t in (Q, K, V))


def _all(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    return dict(zip(("query", "key", "value"), map(change, TOKEN), strict=True))


BAD_TOKENS: dict[str, Error] = {
    "query of another width": (
        ValueError,
        r"^query: got shape \(2, 3, 1, 7\).*\(2, 3, t, 8\)",
        {"query": TOKEN[0][..., :7]},
    ),
    "key of another width": (ValueError, r"^key: got shape \(2, 3, 1, 7\)", {"key": TOKEN[1][..., :7]}),
    "value of another width": (
        ValueError,
        r"^value: got shape \(2, 3, 1, 4\).*\(2, 3, t, 5\)",
        {"value": TOKEN[2][..., :4]},
    ),
    "another batch": (ValueError, r"^query: got shape \(1, 3, 1, 8\)", {"query": TOKEN[0][:1]}),
    "other heads": (ValueError, r"^key: got shape \(2, 2, 1, 8\)", {"key": TOKEN[1][:, :2]}),
    "three dimensions": (ValueError, r"^query: got shape \(2, 3, 8\)", {"query": TOKEN[0][:, :, 0]}),
    "two keys": (ValueError, r"^query: got shape \(2, 3, 1, 8\)", {"key": K[:, :, :2]}),
    "no token": (
        ValueError,
        r"^key: got shape \(2, 3, 0, 8\).*t >= 1",
        _all(lambda t: t[:, :, :0]),
    ),
    "another dtype": (
        TypeError,
        r"^key: got torch.float64.*torch.float32 as the state's window has",
        _all(lambda t: t.double()),
    ),
    "one of another dtype": (TypeError, r"^value: got torch.bfloat16", {"value": TOKEN[2].bfloat16()}),
    "elsewhere": (
        ValueError,
        r"^key: got device meta.*cpu, the device of the state",
        _all(lambda t: t.to("meta")),
    ),
    "a list": (TypeError, r"^key: got a list", {"key": TOKEN[1].tolist()}),
    "a NaN query": (ValueError, r"^query: got a NaN", {"query": TOKEN[0] * torch.nan}),
    "a NaN key": (ValueError, r"^key: got a NaN", {"key": TOKEN[1] * torch.nan}),
    "an infinite value": (ValueError, r"^value: got a NaN or an infinity", {"value": TOKEN[2] * torch.inf}),
    "another output": (ValueError, r"^output: got 'last'.*single, retroactive", {"output": "last"}),
}
STEPS: dict[str, tuple[Callable[..., Any], Any]] = {
    "nystrom": (ck.continual_nystrom_step, ck.continual_nystrom_init(Q, K, V, 4)),
    "exact": (ck.continual_attention_step, ck.continual_attention_init(Q, K, V)),
}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", BAD_TOKENS)
def test_tokens(impl: str, name: str, kind: str) -> None:
    """A bad token raises an error with its message, and the state keeps its bits."""
    error, message, given = BAD_TOKENS[name]
    step, state = STEPS[kind]
    before = copy.deepcopy(state)
    for chosen in (impl, "auto"):
        with pytest.raises(error, match=message):
            step(state, **{"query": TOKEN[0], "key": TOKEN[1], "value": TOKEN[2], "impl": chosen, **given})
    assert all(_bits(a) == _bits(b) for a, b in zip(before, state, strict=True))


def _bits(field: Any) -> Any:
    """Equality of a state's memory: `spare` may be unwritten and hold a NaN, which equals no number."""
    return field.numpy().tobytes() if isinstance(field, torch.Tensor) else field


STATE = STEPS["nystrom"][1]
BAD_STATES: dict[str, tuple[type[Exception], str, Any]] = {
    "nothing": (TypeError, r"^state: got None.*from continual_nystrom_init", None),
    "a plain tuple": (TypeError, r"^state: got a tuple", tuple(STATE)),
    "the other kind": (TypeError, r"^state: got a ContinualAttentionState", STEPS["exact"][1]),
    "unfilled": (
        ValueError,
        r"^state.position: got 8, expected a position from 9, the window, to",
        STATE._replace(position=STATE.position - 1),
    ),
    "a window of nothing": (ValueError, r"^state.window: got 0", STATE._replace(window=0)),
    "a larger window": (
        ValueError,
        r"^state.keys: got a ring of 10 rows, expected more than 10, the window",
        STATE._replace(window=10, position=STATE.position + 1),
    ),
    "a position that is a number": (TypeError, r"^state.position: got an int", STATE._replace(position=9)),
    "one position for all": (ValueError, r"^state.position: got shape \(\)", STATE._replace(position=torch.tensor(9))),
    "a position of no stream": (
        ValueError,
        r"^state.position: got 9223",
        STATE._replace(position=STATE.position + (2**63 - 10)),
    ),
    "rings that differ": (
        ValueError,
        r"^state.queries: got shape \(2, 3, 9, 8\)",
        STATE._replace(queries=STATE.queries[:, :, 1:]),
    ),
    "sums of another width": (
        ValueError,
        r"^state.sums: got shape \(2, 3, 4, 9\)",
        STATE._replace(sums=STATE.sums[..., 1:]),
    ),
    "no spare memory": (TypeError, r"^state.spare: got None", STATE._replace(spare=None)),
    "half landmarks": (
        TypeError,
        r"^state.landmark_keys: got torch.bfloat16",
        STATE._replace(landmark_keys=STATE.landmark_keys.bfloat16()),
    ),
    "an inverse of more": (
        ValueError,
        r"^state.inverse: got shape \(2, 3, 5, 5\)",
        STATE._replace(inverse=torch.zeros(2, 3, 5, 5)),
    ),
    "a scale of float32": (TypeError, r"^state.scale: got torch.float32", STATE._replace(scale=STATE.scale.float())),
    "negative iterations": (ValueError, r"^state.pinv_iterations: got -1", STATE._replace(pinv_iterations=-1)),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_states(name: str) -> None:
    error, message, state = BAD_STATES[name]
    with pytest.raises(error, match=message):
        ck.continual_nystrom_step(state, *TOKEN)


def test_the_exact_pseudo_inverse_of_continual_landmarks_is_the_definitions_alone() -> None:
    state = ck.continual_nystrom_init(Q, K, V, 4, pinv="exact")
    assert ck.continual_nystrom_step(state, *TOKEN).out.isfinite().all()
    with pytest.raises(RuntimeError, match=r"^impl: 'native' cannot run here: .*pinv=\"exact\""):
        ck.continual_nystrom_step(state, *TOKEN, impl="native")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen_wherever_it_is(bad: float, dtype: torch.dtype) -> None:
    """A NaN or infinity is found anywhere: among full vectors, in the remainder, in strided and in transposed tokens.

    The largest finite number passes.
    """
    for position in (0, 1, 63, 64, 130, 262):
        tokens = torch.full((263,), torch.finfo(dtype).max, dtype=dtype)
        refuse_not_finite(tokens=tokens)
        tokens[position] = bad
        for view in (tokens, tokens.expand(3, -1).mT, torch.stack([tokens, tokens], -1)[:, 0]):
            with pytest.raises(ValueError, match="tokens"):
                refuse_not_finite(tokens=view)
    refuse_not_finite(tokens=tokens[:0])

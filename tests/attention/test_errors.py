"""Bad input raises an error that names the argument, the given value and the allowed values; states do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import cmab_kernels as ck
from cmab_kernels import AttentionState

Q, K, V = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 5)
STATE = ck.empty_state(2, 3, 4, 5)
NESTED = torch.nested.nested_tensor([K[0], K[1, :, 1:]], layout=torch.strided)
PACKED = torch.randn(1, 3, 9, 8)

BAD_ARGUMENTS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "query of two dimensions": (ValueError, r"^query: got shape \(4, 8\).*\(B, H, L, D\)", {"query": Q[0, 0]}),
    "query of other heads": (ValueError, r"^query: got shape \(2, 4, 8\)", {"query": Q[0, :2]}),
    "key of three dimensions": (ValueError, r"^key: got shape \(3, 9, 8\)", {"key": K[0]}),
    "key of no width": (ValueError, r"^key: got shape.*D >= 1", {"key": K[..., :0], "query": Q[..., :0]}),
    "fewer values than keys": (ValueError, r"^value: got shape \(2, 3, 8, 5\).*\(2, 3, 9, E\)", {"value": V[:, :, 1:]}),
    "mask too long": (
        ValueError,
        r"^key_padding_mask: got shape \(2, 10\).*\(2, 9\)",
        {"key_padding_mask": torch.zeros(2, 10).bool()},
    ),
    "mask for one": (ValueError, r"^key_padding_mask: got shape \(9,\)", {"key_padding_mask": torch.zeros(9).bool()}),
    "mask of NumPy": (TypeError, r"^key_padding_mask: got a ndarray", {"key_padding_mask": np.zeros((2, 9), bool)}),
    "learned scale": (
        TypeError,
        r"^scale: got a tensor that requires a gradient.*multiply the query",
        {"scale": torch.tensor(0.5, requires_grad=True)},
    ),
    "scale of text": (TypeError, r"^scale: got a str, expected a number", {"scale": "0.5"}),
    "scale of two": (TypeError, r"^scale: got a Tensor, expected a number", {"scale": torch.ones(2)}),
    "scale of an array": (TypeError, r"^scale: got a ndarray, expected a number", {"scale": np.array([1.0, 2.0])}),
    "complex scale": (TypeError, r"^scale: got a complex, expected a number", {"scale": 1j}),
    "scale of a complex tensor": (TypeError, r"^scale: got a Tensor, expected a number", {"scale": torch.tensor(1j)}),
    "scale without a value": (
        TypeError,
        r"^scale: got a Tensor, expected a number",
        {"scale": torch.ones((), device="meta")},
    ),
    "nested scale": (TypeError, r"^scale: got a Tensor, expected a number", {"scale": NESTED}),
    "huge scale": (ValueError, r"^scale: got an int beyond the range of floats", {"scale": 10**400}),
    "sparse key": (TypeError, r"^key: got torch.sparse_coo, expected a dense tensor", {"key": K.to_sparse()}),
    "nested key": (TypeError, r"^key: got a nested tensor, expected ", {"key": NESTED}),
    "additive mask": (
        TypeError,
        r"^key_padding_mask: got torch.float32.*True = ignore",
        {"key_padding_mask": torch.zeros(2, 9)},
    ),
    "nested mask": (TypeError, r"^key_padding_mask: got a nested tensor, expected ", {"key_padding_mask": NESTED > 0}),
    "sparse mask": (
        TypeError,
        r"^key_padding_mask: got torch.sparse_coo, expected ",
        {"key_padding_mask": torch.ones(2, 9).bool().to_sparse()},
    ),
    "a list of impls": (ValueError, r"^impl: got \['native'\], expected one of auto", {"impl": ["native"]}),
    "unknown impl": (ValueError, r"^impl: got 'cuda'.*auto, native, triton, reference", {"impl": "cuda"}),
}

BAD_OFFSETS: dict[str, tuple[type[Exception], str, torch.Tensor]] = {
    "falling": (ValueError, r"^cu_seqlens: got \[0, 5, 3, 9\].*N = 9", torch.tensor([0, 5, 3, 9])),
    "long": (ValueError, r"^cu_seqlens: got \[0, 5, 6, 10\].*at most N = 9", torch.tensor([0, 5, 6, 10])),
    "late": (ValueError, r"^cu_seqlens: got \[1, 5, 6, 9\]", torch.tensor([1, 5, 6, 9])),
    "negative": (ValueError, r"^cu_seqlens: got \[0, -5, 6, 9\]", torch.tensor([0, -5, 6, 9])),
    "a matrix": (ValueError, r"^cu_seqlens: got shape \(1, 4\)", torch.tensor([[0, 5, 6, 9]])),
    "nothing": (ValueError, r"^cu_seqlens: got shape \(0,\)", torch.tensor([], dtype=torch.int64)),
    "a list": (TypeError, r"^cu_seqlens: got a list", [0, 5, 6, 9]),
    "nested": (
        TypeError,
        r"^cu_seqlens: got a nested tensor, expected a dense",
        torch.nested.nested_tensor([torch.tensor([0, 9])]),
    ),
    "sparse": (
        TypeError,
        r"^cu_seqlens: got torch.sparse_coo, expected a dense",
        torch.tensor([0, 5, 6, 9]).to_sparse(),
    ),
    "floats": (TypeError, r"^cu_seqlens: got torch.float32", torch.tensor([0.0, 5.0, 6.0, 9.0])),
}

BAD_STATES: dict[str, tuple[type[Exception], str, Any]] = {
    "a tuple": (TypeError, r"^state: got a tuple.*AttentionState", tuple(STATE)),
    "other width": (ValueError, r"^state.out: got shape \(2, 3, 4, 6\).*\(2, 3, 4, 5\)", ck.empty_state(2, 3, 4, 6)),
    "other batch": (ValueError, r"^state.out: got shape \(1, 3, 4, 5\)", ck.empty_state(1, 3, 4, 5)),
    "other lse": (ValueError, r"^state.lse: got shape \(2, 3, 3\)", AttentionState(STATE.out, STATE.lse[:, :, 1:])),
    "double out": (
        TypeError,
        r"^state.out: got torch.float64.*float32",
        ck.empty_state(2, 3, 4, 5, dtype=torch.float64),
    ),
    "float lse": (TypeError, r"^state.lse: got torch.float32.*float64", AttentionState(STATE.out, STATE.lse.float())),
    "no out": (TypeError, r"^state.out: got None, expected a torch.Tensor", AttentionState(None, STATE.lse)),
    "nested out": (TypeError, r"^state.out: got a nested tensor, expected a dense tensor", STATE._replace(out=NESTED)),
    "sparse lse": (
        TypeError,
        r"^state.lse: got torch.sparse_coo, expected a dense tensor",
        STATE._replace(lse=STATE.lse.to_sparse()),
    ),
    "elsewhere": (ValueError, r"^state.out: got device meta", ck.empty_state(2, 3, 4, 5, device="meta")),
}


@pytest.mark.parametrize("operator", [ck.latent_attention, ck.attention_state])
@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments(operator: Callable, case: str) -> None:
    error, message, changed = BAD_ARGUMENTS[case]
    with pytest.raises(error, match=message):
        operator(**{"query": Q, "key": K, "value": V, **changed})


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("case", BAD_OFFSETS)
def test_bad_offsets(case: str, impl: str) -> None:
    error, message, offsets = BAD_OFFSETS[case]
    with pytest.raises(error, match=message):
        ck.latent_attention(Q[0], PACKED, PACKED, cu_seqlens=offsets, impl=impl)


def test_packed_keys_have_batch_one() -> None:
    with pytest.raises(ValueError, match=r"^key: got batch 2.*batch 1"):
        ck.latent_attention(Q, K, V, cu_seqlens=torch.tensor([0, 4, 9]))
    with pytest.raises(ValueError, match=r"^query: got shape \(2, 3, 4, 8\).*\(3, 3, L, 8\)"):
        ck.latent_attention(Q, PACKED, PACKED, cu_seqlens=torch.tensor([0, 4, 5, 9]))


def test_bad_offsets_inside_a_compiled_graph() -> None:
    compiled = torch.compile(
        lambda o: ck.latent_attention(Q[0], PACKED, PACKED, cu_seqlens=o), fullgraph=True, backend="aot_eager"
    )
    compiled(torch.tensor([0, 5, 6, 9]))
    with pytest.raises(ValueError, match="cu_seqlens"):
        compiled(torch.tensor([0, 5, 3, 9]))


@pytest.mark.parametrize("case", BAD_STATES)
def test_bad_states(case: str) -> None:
    error, message, state = BAD_STATES[case]
    with pytest.raises(error, match=message):
        ck.attention_state(Q, K, V, state=state)
    with pytest.raises(error, match=message):
        ck.remove_from_state(state, Q, K, V)


def test_merge_of_foreign_states() -> None:
    with pytest.raises(ValueError, match=r"^states\[1\].out: got shape \(2, 3, 4, 6\)"):
        ck.merge_states(STATE, ck.empty_state(2, 3, 4, 6))
    with pytest.raises(TypeError, match=r"^states\[2\].out: got torch.float64"):
        ck.merge_states(STATE, STATE, ck.empty_state(2, 3, 4, 5, dtype=torch.float64))
    for position, states in enumerate([(tuple(STATE), STATE), (STATE, tuple(STATE))]):
        with pytest.raises(TypeError, match=rf"^states\[{position}\]: got a tuple"):
            ck.merge_states(*states)
    scalar = AttentionState(STATE.out[0, 0, 0, 0], STATE.lse[0, 0, 0])
    for state, message in (
        (AttentionState("x", 1), r"^states\[0\].out: got a str, expected a torch.Tensor"),
        (AttentionState(STATE.out, None), r"^states\[0\].lse: got None, expected a torch.Tensor"),
        (STATE._replace(out=NESTED), r"^states\[0\].out: got a nested tensor"),
        (scalar, r"^states\[0\].out: got shape \(\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ck.merge_states(state, state)


def test_empty_states_of_no_extents() -> None:
    for extent in (1.0, True, "a", None):
        for name, extents in {"batch": (extent, 1, 1, 1), "width": (1, 1, 1, extent)}.items():
            with pytest.raises(TypeError, match=rf"^{name}: got {extent!r}, expected an int >= 0"):
                ck.empty_state(*extents)
    assert ck.empty_state(*np.array([2, 0, 3, 4])).lse.shape == (2, 0, 3)
    with pytest.raises(ValueError, match=r"^device: got 'nowhere'"):
        ck.empty_state(1, 1, 1, 1, device="nowhere")
    with pytest.raises(TypeError, match=r"^dtype: got torch.bfloat16"):
        ck.empty_state(1, 1, 1, 1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^heads: got -1, expected an int >= 0"):
        ck.empty_state(1, -1, 1, 1)
    with pytest.raises(ValueError, match=rf"^batch: got {10**30}, expected an int from 0 to 2\*\*63 - 1"):
        ck.empty_state(10**30, 1, 1, 1)


def test_the_state_is_never_changed() -> None:
    state = ck.attention_state(Q, K, V)
    before = [t.clone() for t in state]
    ck.attention_state(Q, K, V, state=state)
    ck.remove_from_state(state, Q, K, V)
    with pytest.raises(ValueError):
        ck.attention_state(Q, K[..., :3], V, state=state)
    assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))


def test_an_impl_that_cannot_run_here_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"^impl: 'triton' cannot run here"):
        ck.latent_attention(Q, K, V, impl="triton")


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_states_in_half_precision_are_not_merged(impl: str) -> None:
    half = AttentionState(STATE.out.half(), STATE.lse)
    with ck.use_impl(impl), pytest.raises(TypeError, match=r"^states\[0\]\.out: got torch.float16"):
        ck.merge_states(half, half)


@pytest.mark.parametrize("call", [ck.latent_attention, ck.continual_attention_init], ids=lambda call: call.__name__)
def test_float64_is_not_cast_by_autocast_nor_are_its_neighbours(call: Callable[..., Any]) -> None:
    """torch does not cast float64 under autocast, and raises an error if it is mixed with other dtypes."""
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=r"^key: got torch.float32.*torch.float64 as query has"),
    ):
        call(K.double(), K, K)

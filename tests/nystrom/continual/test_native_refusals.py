"""Steps that the C++ extension does not support: it returns None and writes nothing.

This also holds for a torch without DLPack's table of functions.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cmab_kernels.nystrom.continual import continual_nystrom_init, continual_nystrom_step
from cmab_kernels.nystrom.continual.reference import nystrom_step_reference

from .test_native import Tokens, _some, _start, _step, _tokens, native

pytestmark = pytest.mark.usefixtures("threads", "no_gradients")


def _bits(state: Any) -> list[bytes]:
    """Return the bytes of all tensors of a state, including spare memory and the free row of the ring."""
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in state if isinstance(t, Tensor) and t.dim()]


def _ordinary(kind: str = "continual") -> tuple[Any, Tokens]:
    tokens = _tokens(2, 2, 22, 4, 3)
    return _start(kind, tokens, 20, 4), _some(tokens, 20, 22)


BAD_TOKENS: dict[str, Callable[[Tensor], Any]] = {
    "a NaN": lambda t: t.index_fill(2, torch.tensor(1), math.nan),
    "an infinity": lambda t: torch.cat([t[..., :-1], torch.full_like(t[..., :1], math.inf)], -1),
    "a strided NaN": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2].index_fill(0, torch.tensor(1), -math.inf),
    "another type": lambda t: t.double(),
    "integers": lambda t: t.int(),
    "a dimension less": lambda t: t[0],
    "a dimension more": lambda t: t[None],
    "another width": lambda t: t[..., 1:],
    "another batch": lambda t: t[:1],
    "no token": lambda t: t[:, :, :0],
    "a lazy negation": lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag,
    "a hidden negation": lambda t: torch._neg_view(t),
    "a parameter": lambda t: torch.nn.Parameter(t),
    "no memory": lambda t: t.to("meta"),
    "not dense": lambda t: t.to_sparse(),
    "an array": lambda t: t.numpy(),
    "nothing": lambda t: None,
}


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("name", BAD_TOKENS)
def test_tokens_out_of_the_ordinary(name: str, position: int) -> None:
    """The step returns None for unusual tokens, and no bit of the state changes, not even in its spare memory."""
    for kind, step in (("continual", native.continual_nystrom_step), ("exact", native.continual_attention_step)):
        state, tokens = _ordinary(kind)
        before = _bits(state)
        given = [*tokens]
        given[position] = BAD_TOKENS[name](given[position])
        assert step(state, *given, False) is None and step(state, *given, True) is None
        assert _bits(state) == before
        assert step(state, *tokens, False) is not None


def test_half_precision_infinities_are_seen() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        tokens = _tokens(1, 1, 22, 4, 3, dtype)
        state = _start("continual", tokens, 20, 4)
        largest = _some(tokens, 20, 22)
        largest[2][:] = torch.finfo(dtype).max
        assert native.continual_nystrom_step(state, *largest, False) is not None
        largest[2][..., 1, 1] = math.inf
        assert native.continual_nystrom_step(state, *largest, False) is None


BAD_STATES: dict[str, Callable[[Any], Any]] = {
    "a plain tuple": lambda s: tuple(s),
    "a list": lambda s: list(s),
    "nothing": lambda s: None,
    "a field less": lambda s: s[:-1],
    "expanded": lambda s: s._replace(keys=s.keys[:1].expand(2, -1, -1, -1)),
    "transposed": lambda s: s._replace(sums=s.sums.transpose(0, 1).contiguous().transpose(0, 1)),
    "another type": lambda s: s._replace(sums=s.sums.double()),
    "another type of ring": lambda s: s._replace(values=s.values.half()),
    "sums of another width": lambda s: s._replace(sums=s.sums[..., 1:].contiguous()),
    "spare of another size": lambda s: s._replace(spare=s.spare[:, :, 1:].contiguous()),
    "a ring that is too short": lambda s: s._replace(
        **{f: getattr(s, f)[:, :, -20:].contiguous() for f in ("queries", "keys", "values")}
    ),
    "rings of two lengths": lambda s: s._replace(values=torch.cat([s.values, s.values], 2)),
    "a window not filled": lambda s: s._replace(position=torch.full_like(s.position, 19)),
    "no window": lambda s: s._replace(window=0),
    "one window of four not filled": lambda s: s._replace(position=torch.tensor([[20, 20], [20, 19]])),
    "a position that is a number": lambda s: s._replace(position=20),
    "one position for all": lambda s: s._replace(position=s.position[0, 0]),
    "positions without memory of their own": lambda s: s._replace(position=s.position[:1, :1].expand(2, 2)),
    "positions of another type": lambda s: s._replace(position=s.position.int()),
    "a position of no stream": lambda s: s._replace(position=torch.full_like(s.position, 2**62 + 1)),
    "a scale of its own type": lambda s: s._replace(scale=s.scale.float()),
    "a scale that is a number": lambda s: s._replace(scale=0.5),
}
BAD_LANDMARKS: dict[str, Callable[[Any], Any]] = {
    "no landmark": lambda s: s._replace(sums=s.sums[:, :, :0].contiguous(), spare=s.spare[:, :, :0].contiguous()),
    "more landmarks than tokens": lambda s: s._replace(sums=torch.zeros(2, 2, 21, 6), spare=torch.zeros(2, 2, 21, 6)),
    "landmarks missing": lambda s: s._replace(landmark_keys=s.landmark_keys[:, :, 1:].contiguous()),
    "an inverse of another size": lambda s: s._replace(inverse=s.inverse[..., 1:].contiguous()),
    "the exact pseudo-inverse": lambda s: s._replace(pinv_iterations=0),
    "negative iterations": lambda s: s._replace(pinv_iterations=-1, fixed=1),
}


@pytest.mark.parametrize("name", [*BAD_STATES, *BAD_LANDMARKS])
def test_states_out_of_the_ordinary(name: str) -> None:
    state, tokens = _ordinary()
    before = _bits(state)
    assert native.continual_nystrom_step((BAD_STATES | BAD_LANDMARKS)[name](state), *tokens, False) is None
    assert _bits(state) == before
    if name in BAD_STATES:
        state, tokens = _ordinary("exact")
        _, state = _step(state, tokens, retroactive=True)
        assert native.continual_attention_step(BAD_STATES[name](state), *tokens, False) is None


@pytest.mark.parametrize("field", ["fixed", "pinv_iterations", "window"])
def test_a_count_that_is_a_bool_is_named(field: str) -> None:
    state, tokens = _ordinary()
    with pytest.raises(ValueError, match=rf"^state.{field}: got True, expected an int from"):
        continual_nystrom_step(state._replace(**{field: True}), *tokens)


def test_states_of_the_other_kind() -> None:
    state, tokens = _ordinary()
    exact, _ = _ordinary("exact")
    assert native.continual_attention_step(state, *tokens, False) is None
    assert native.continual_nystrom_step(exact, *tokens, False) is None
    with pytest.raises(TypeError, match="retroactive"):
        native.continual_nystrom_step(state, *tokens)


def test_fixed_landmarks_take_the_exact_pseudo_inverse() -> None:
    tokens = _tokens(1, 1, 30, 4, 3)
    landmarks = (torch.randn(1, 3, 4), torch.randn(1, 3, 4))
    state = continual_nystrom_init(*_some(tokens, 0, 20), landmarks=landmarks, pinv="exact")
    out, _ = _step(state, _some(tokens, 20, 30))
    right, _ = nystrom_step_reference(state, *_some(tokens, 20, 30), False)
    assert torch.allclose(out, right, atol=1e-5)


def test_no_heads() -> None:
    tokens = _tokens(0, 3, 22, 4, 3)
    for kind in ("continual", "exact"):
        out, state = _step(_start(kind, tokens, 20, 4), _some(tokens, 20, 22))
        assert out.shape == (0, 3, 2, 3) and state.position.shape == (0, 3)


def test_an_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    state, tokens = _ordinary()
    monkeypatch.setenv("CMAB_KERNELS_ISA", "sse9")
    with pytest.raises(RuntimeError, match="sse9"):
        native.continual_nystrom_step(state, *tokens, False)


def test_types_and_devices_it_cannot_take() -> None:
    q = torch.zeros(1, 1, 1, 1)
    assert native.unsupported(q, q, q) is None
    assert "meta" in native.unsupported(*(q.to("meta"),) * 3)
    assert "int64" in native.unsupported(*(q.long(),) * 3)


WITHOUT_TABLE = """
import torch
if {without} and hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    del torch.Tensor.__dlpack_c_exchange_api__
from cmab_kernels.nystrom.continual import native as native_step
from cmab_kernels.nystrom.continual import continual_nystrom_init
with torch.no_grad():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        tokens = [torch.randn(2, 2, 60, 5, dtype=torch.float64).to(dtype) for _ in range(3)]
        state = continual_nystrom_init(*(t[:, :, :10] for t in tokens), num_landmarks=3)
        for i in range(10, 60, 5):
            out, state = native_step.continual_nystrom_step(state, *(t[:, :, i : i + 5] for t in tokens), False)
        assert native_step.continual_nystrom_step(state, *(t[0] for t in tokens), False) is None
        assert native_step.continual_nystrom_step(state, *(t.to("meta") for t in tokens), False) is None
        assert native_step.continual_nystrom_step(state, *(t.int() for t in tokens), False) is None
        print(out.dtype, out.double().flatten().tolist(), state.sums.double().sum().item())
"""


def test_torch_without_the_table_of_functions() -> None:
    """Older versions of torch have no such table: the extension then goes through Python, and gives the same bits."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", WITHOUT_TABLE.format(without=without)], capture_output=True, text=True, check=True
        ).stdout
        for without in (False, True)
    ]
    assert runs[0] == runs[1] and runs[0].count("torch.") == 4

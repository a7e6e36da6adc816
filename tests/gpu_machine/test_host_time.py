"""Each call whose host time is measured is one launch; the times are not tested, since a machine may be busy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._vmap_internals import _vmap

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

import cmab_kernels as ck
from cmab_kernels.nystrom.continual import api
from cmab_kernels.nystrom.continual.schema import attention_step_op, form_of, nystrom_step_op
from gpu_machine.driver import Launched, stub

from .host_time import calls, positions_unread, stream


def test_one_launch_a_call() -> None:
    launched: list[Launched] = []
    with stub(90, launched.append):
        for name, call in calls():
            for _ in range(3):
                launched.clear()
                call()
            assert len(launched) == 1, name


# ---- continual steps: the checks that a repeated step skips

STEPS = {"attention": ck.continual_attention_step, "nystrom": ck.continual_nystrom_step}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for operator in (attention_step_op, nystrom_step_op):
        monkeypatch.setattr(operator, "_ready", {})
    with stub(90), positions_unread(), torch.no_grad():
        yield


def _token() -> torch.Tensor:
    return torch.randn(1, 4, 1, 16)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.usefixtures("device")
def test_steps_of_one_form_are_checked_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rings of a stream stay in place if nothing else holds its state; a check must hold no tensor."""
    _, state = STEPS[kind](stream(kind), *[_token()] * 3, impl="triton")
    _, state = STEPS[kind](state, *[_token()] * 3, impl="triton")
    rings = [ring.data_ptr() for ring in state[:3]]
    monkeypatch.setattr(api, "_check_step", lambda *_: pytest.fail("checked again"))
    for _ in range(3):
        _, state = STEPS[kind](state, *[_token()] * 3, impl="triton")
    assert [ring.data_ptr() for ring in state[:3]] == rings


FAULTS: dict[str, Callable[[Any, list[torch.Tensor]], Any]] = {
    "value: got shape": lambda state, tokens: (state, [*tokens[:2], torch.randn(1, 4, 1, 17)]),
    "query: got shape": lambda state, tokens: (state, [tokens[0], torch.randn(1, 4, 2, 16), tokens[2]]),
    "key: got torch.float64": lambda state, tokens: (state, [t.double() for t in tokens]),
    "value: got device meta": lambda state, tokens: (state, [*tokens[:2], tokens[2].to("meta")]),
    "key: got a list": lambda state, tokens: (state, [tokens[0], [1.0], tokens[2]]),
    "state.window: got 64.0": lambda state, tokens: (state._replace(window=64.0), tokens),
    "state.spare: got shape": lambda state, tokens: (state._replace(spare=state.spare.mT), tokens),
    "state.keys: got torch.int32": lambda state, tokens: (state._replace(keys=state.keys.int()), tokens),
    "state.position: got torch.int32": lambda state, tokens: (state._replace(position=state.position.int()), tokens),
    "state.values: got device meta": lambda state, tokens: (state._replace(values=state.values.to("meta")), tokens),
    "output: got 'both'": lambda state, tokens: (state, tokens),
}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("message", FAULTS)
@pytest.mark.usefixtures("device")
def test_what_differs_from_the_step_before_is_refused(kind: str, message: str) -> None:
    _, state = STEPS[kind](stream(kind), *[_token()] * 3, impl="triton")
    state, tokens = FAULTS[message](state, [_token()] * 3)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        STEPS[kind](state, *tokens, output="both" if "both" in message else "single", impl="triton")


@pytest.mark.usefixtures("device")
def test_what_only_the_checked_path_decides() -> None:
    state, token = stream("nystrom"), _token()
    form = form_of("triton", False, state, token, token, token)
    assert form is not None and form == form_of("triton", False, state, _token(), token, token[:, :, :1].clone())
    assert form != form_of("triton", True, state, token, token, token) and form != form_of(
        "cuda", False, state, token, token, token
    )
    for unusual in (torch._neg_view(token), torch.nn.Parameter(token)):
        assert form_of("triton", False, state, token, unusual, token) is None
    batched: list[Any] = []
    # As is_grads_batched does.
    _vmap(lambda t: batched.append(form_of("triton", False, state, token, t, token)) or t)(token[None])
    assert batched == [None]
    assert form_of("triton", False, state._replace(keys=state.keys.mT.contiguous().mT), token, token, token) is None
    assert form_of("triton", False, tuple(state), token, token, token) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert form_of("triton", False, state, token, token, token) is None

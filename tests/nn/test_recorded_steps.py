"""Programs do not record steps of a module's own stream, because they would hold one state for ever; compiled steps
advance."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import cmab_kernels.nn as ours
from cmab_kernels.runtime import tracing

WINDOW: dict[str, Any] = {"sequence_len": 4, "batch_first": True}
TOKEN, ROWS, FEW = (1, 16), (1, 5, 16), (1, 3, 16)
STEPS: dict[str, tuple[Callable[[], nn.Module], str, tuple[tuple[int, ...], ...], str]] = {
    "ContinualAttention": (
        lambda: ours.ContinualAttention(16, 2, **WINDOW),
        "forward_step",
        (TOKEN,),
        "continual_attention_step",
    ),
    "landmarks": (
        lambda: ours.ContinualNystromAttention(16, 2, num_landmarks=2, **WINDOW),
        *("forward_steps", (ROWS,), "continual_nystrom_step"),
    ),
    "layer": (
        lambda: ours.ContinualEncoderLayer(16, 2, 32, **WINDOW),
        "forward_step",
        (TOKEN,),
        "continual_attention_step",
    ),
    "retroactive": (
        lambda: ours.RetroactiveEncoderLayer(16, 2, 32, **WINDOW),
        "forward_step",
        (TOKEN,),
        "continual_attention_step",
    ),
    "encoder": (
        lambda: ours.ContinualEncoder(ours.ContinualEncoderLayer(16, 2, 32, **WINDOW), 2),
        *("forward_step", (TOKEN,), "continual_attention_step"),
    ),
    "positions": (
        lambda: ours.CircularPositionalEncoding(16, 4, batch_first=True),
        "forward_step",
        (TOKEN,),
        "forward_stream",
    ),
    "CMAB": (lambda: ours.CMAB(16, 4, 2), "update", (ROWS, FEW), "state"),
    "CMABStack": (lambda: ours.CMABStack(16, 4, 2, 2), "update", (ROWS, FEW), "state"),
    "CMAB, removal": (lambda: ours.CMAB(16, 4, 2), "remove", (ROWS, FEW), "state"),
    "MultiheadIntention": (lambda: ours.MultiheadIntention(16, 2, batch_first=True), "update", (ROWS,), "state"),
    "MultiheadIntention, removal": (
        lambda: ours.MultiheadIntention(16, 2, batch_first=True),
        "remove",
        (ROWS,),
        "state",
    ),
}


class Step(nn.Module):
    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module, self.method = module, method

    def forward(self, *given: Tensor) -> Any:
        result = getattr(self.module, self.method)(*given)
        return result if result is None or isinstance(result, Tensor) else result[0]


def export(strict: bool) -> Callable[..., Any]:
    return lambda step, given: torch.export.export(step, given, strict=strict)


RECORDERS: dict[str, Callable[..., Any]] = {
    "export": export(False),
    "strict export": export(True),
    "trace": lambda step, given: torch.jit.trace(step, given, check_trace=False),
    "make_fx": lambda step, given: make_fx(step)(*given),
}


def begun(name: str) -> tuple[Step, tuple[Tensor, ...]]:
    make, method, shapes, _ = STEPS[name]
    torch.manual_seed(0)
    step = Step(make().eval(), method)
    given = tuple(torch.randn(shape) for shape in shapes)
    first = Step(step.module, "update") if method == "remove" else step
    with torch.no_grad():
        for _ in range(8):
            first(*given)
    return step, given


CASES = [
    (name, how)
    for name in STEPS
    for how in RECORDERS
    if how in ("export", "trace") or name in ("ContinualAttention", "CMAB")
]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_recorded_step_is_refused(name: str, how: str) -> None:
    if "export" in how and not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("this torch does not tell whether it exports")
    step, given = begun(name)
    before = {key: value.clone() for key, value in step.state_dict().items()}
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        pytest.raises(Exception, match=f"would freeze the stream.*{STEPS[name][3]}"),
    ):
        warnings.simplefilter("ignore")
        RECORDERS[how](step, given)
    assert not tracing.is_recorded()
    after = step.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", ["ContinualAttention", "layer", "CMAB", "MultiheadIntention", "positions"])
def test_a_compiled_step_goes_on(name: str) -> None:
    if name == "MultiheadIntention" and not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("the compiler of this torch knows no generators")
    step, given = begun(name)
    theirs = copy.deepcopy(step)
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(*given), theirs(*given))

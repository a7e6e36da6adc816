"""If a stream is interrupted in the middle of an update, it has the state before the update or the state after it, and
continues."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cmab_kernels import nn
from cmab_kernels.nn.stream import Keeper

CHUNK, POINTS, DIM = 40, 4, 8
INTERRUPTIONS, SECONDS = 60, 5e-4
"""The number of interruptions, and the largest delay of each after a stream has continued: an update takes about as
long."""


Module = tuple[Any, Callable[[Any, Tensor], Any]]
"""A streaming module, and how rows advance its stream."""


def _stack() -> Module:
    latents = torch.randn(2, DIM)
    return nn.CMABStack(DIM, 3, 2, depth=2).eval(), lambda module, rows: module.update(rows, latents).latents


def _intention() -> Module:
    return nn.MultiheadIntention(DIM, 2, batch_first=True).eval(), lambda module, rows: module.update(rows).count


def _exact() -> Module:
    return nn.ContinualAttention(
        DIM, 2, sequence_len=6, batch_first=True
    ).eval(), lambda module, rows: module.forward_steps(rows)


def _nystrom() -> Module:
    module = nn.ContinualNystromAttention(DIM, 2, sequence_len=6, num_landmarks=3, batch_first=True).eval()
    return module, lambda module, rows: module.forward_steps(rows)


MODULES: dict[str, Callable[[], Module]] = {
    "CMABStack": _stack,
    "MultiheadIntention": _intention,
    "ContinualAttention": _exact,
    "ContinualNystromAttention": _nystrom,
}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, as Python raises it: between any two instructions of the main thread."""


@pytest.fixture
def interruptions() -> Iterator[Callable[[float], None]]:
    """Interrupt the main thread after this number of seconds, by a signal; 0 stops this."""

    def interrupt(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _held(module: Any) -> dict[str, Tensor]:
    weights = dict(module.named_parameters())
    return {name: entry.clone() for name, entry in module.state_dict().items() if name not in weights}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", MODULES)
def test_an_interruption_leaves_the_old_state_or_the_new_one(name: str, interruptions: Callable[[float], None]) -> None:
    """After an interrupted update, the stream holds its state before the update, or the state after the whole update,
    and continues from there."""
    module, update = MODULES[name]()
    other = copy.deepcopy(module)
    with torch.no_grad():
        update(module, torch.randn(1, CHUNK, DIM))
        for _ in range(INTERRUPTIONS):
            rows, before = torch.randn(1, POINTS, DIM), _held(module)
            try:
                interruptions(float(torch.rand(())) * SECONDS + 1e-6)
                while True:
                    update(module, rows)
                    before = _held(module)
            except Interrupted:
                interruptions(0)
            held = _held(module)
            other.load_state_dict({**module.state_dict(), **before})
            assert _same(held, before) or _same(held, _after(update, other, rows)), "the stream holds half of an update"
            other.load_state_dict(module.state_dict())
            assert torch.equal(update(module, rows), update(other, rows))


def _after(update: Callable[[Any, Tensor], Any], module: Any, rows: Tensor) -> dict[str, Tensor]:
    update(module, rows)
    return _held(module)


def test_half_an_update_is_seen(interruptions: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream whose state is replaced in two steps fails if it is interrupted between the two."""

    def hold(self: Any, value: Any) -> None:
        if value is not None and self._value is not None:
            self._value = value._replace(lse=self._value.lse)
            sum(range(2000))
        self._loaded, self._value = None, value

    monkeypatch.setattr(Keeper, "hold", hold)
    with pytest.raises(AssertionError, match="half of an update"):
        for _ in range(5):
            test_an_interruption_leaves_the_old_state_or_the_new_one("CMABStack", interruptions)

"""Promise P4 with random operations: a stream of random chunks, saves, restores, merges and removals equals its points,
for four distributions.

A million steps run nightly; bench/results/streams.json holds the figures of a whole run, which `python -m tests.fire`
writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import cmab_kernels as ck

from .. import record
from . import streams
from .streams import LAWS, STREAMS, Figures

BOUNDS = {
    "N(0, 1)": (2e-7, 3e-6),
    "N(0, 10²)": (5e-7, 3e-5),
    "spikes of 20": (2e-7, 4e-5),
    "spikes of 40": (2e-7, 3e-6),
}
"""distribution -> the median and the largest error of a window that docs/numerics.md promises"""


pytestmark = pytest.mark.usefixtures("threads", "no_gradients")


def _check(operator: str, found: Figures) -> None:
    """Assert the promises of the numerics page.

    The error bound of attention depends on its history, that of sums on their largest values so far, and that of
    windows on the distribution.
    """
    assert set(found) == set(LAWS)
    for law, figures in found.items():
        median, largest = (
            BOUNDS[law]
            if operator.startswith("continual")
            else (1e-12, 1e-12)
            if operator == "ridge_state"
            else (1e-2, 1e-2)
        )
        assert figures["median"] <= median and figures["largest"] <= largest, (law, figures)
        assert figures.get("of_allowed", 0.0) <= 4.0, (law, figures)


@pytest.mark.parametrize("operator", STREAMS)
@pytest.mark.parametrize("steps", [5_000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_a_stream_under_fire(operator: str, steps: int) -> None:
    _check(operator, STREAMS[operator](steps))


@pytest.mark.parametrize("operator", STREAMS)
def test_the_figures_of_a_million_steps(operator: str) -> None:
    """The committed figures have a million steps of every distribution, and are within the promises."""
    kept = record.read("streams")
    assert kept["steps"] == 1_000_000 and set(kept["streams"]) == set(STREAMS)
    assert {"processor", "versions", "commit", "when"} <= set(kept)
    _check(operator, kept["streams"][operator])


FAULTS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "a merge that favours one part": (
        "attention_state",
        "merge_states",
        lambda run, a, b: run(a._replace(lse=a.lse + 1e-3), b),
    ),
    "a removal of one key too few": (
        "ridge_state",
        "remove_ridge",
        lambda run, state, key, value: run(state, key, value)._replace(
            gram=run(state, key[:, :, 1:], value[:, :, 1:]).gram
        ),
    ),
    "sums that are rounded to float32": (
        "ridge_state",
        "ridge_state",
        lambda run, key, value, state=None: (lambda made: made._replace(gram=made.gram.float().double()))(
            run(key, value, state=state)
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, name, faulty = FAULTS[fault]
    run = getattr(ck, name)
    monkeypatch.setattr(streams.ck, name, lambda *given, **options: faulty(run, *given, **options))
    with pytest.raises(AssertionError):
        _check(operator, STREAMS[operator](3_000))


def test_a_restored_state_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a restore changes one key of the window, the outputs of the following steps show it."""
    plain = streams.restored

    def changed(state: Any) -> Any:
        state = plain(state)
        state.keys[:, :, int(state.position.unique()) % state.keys.shape[2] - 2] += 5.0
        return state

    monkeypatch.setattr(streams, "restored", changed)
    with pytest.raises(AssertionError):
        _check("continual_attention_step", STREAMS["continual_attention_step"](3_000))

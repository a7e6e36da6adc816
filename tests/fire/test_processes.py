"""Kernels in other processes and threads: forked children, spawned processes, workers of a data loader, and many
threads with one state."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels import nn

pytest.importorskip("cmab_kernels.attention.native", reason="the extension was not built", exc_type=ImportError)

ROOT = Path(__file__).parents[2]
THREADS = 8


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux")
@pytest.mark.parametrize("how", ["fork", "loader", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_children_have_the_same_bits(how: str) -> None:
    """A parent that has used the threads of all kernels forks; the child runs the same kernels on one thread, and does
    not hang."""
    done = subprocess.run([sys.executable, "-m", "tests.fire.workers", how], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _together(run: Callable[[int], Any]) -> list[Any]:
    """Return the results of eight threads that run at the same time."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def _tokens(count: int, batch: int = 1) -> tuple[Tensor, ...]:
    return tuple(torch.randn(batch, 8, count, 16) for _ in range(3))


STARTS: dict[str, Callable[[], Any]] = {
    "ridge": lambda: ck.ridge_state(*_tokens(50)[1:]),
    "nystrom": lambda: ck.continual_nystrom_init(*_tokens(32), num_landmarks=8),
    "exact": lambda: ck.continual_attention_init(*_tokens(32)),
}


def _step(kind: str, state: Any, query: Tensor, key: Tensor, value: Tensor) -> Any:
    if kind == "attention":
        return ck.attention_state(query, key, value, state=state)
    if kind == "ridge":
        return ck.ridge_state(key, value, state=state)
    step = ck.continual_nystrom_step if kind == "nystrom" else ck.continual_attention_step
    return step(state, query, key, value)


def _tensors(result: Any) -> list[Tensor]:
    """Return the meaningful tensors of a result: those of an output, or of a state of sums."""
    return [result.out] if isinstance(result, ck.StepResult) else list(result)


def _stepped(kind: str, state: Any, given: Sequence[tuple[Tensor, ...]], at: int) -> list[Tensor]:
    return _tensors(_step(kind, state, *given[at]))


@pytest.mark.parametrize("tokens", [1, 200], ids=["a token", "many tokens"])
@pytest.mark.parametrize("kind", ["attention", *STARTS])
def test_eight_threads_step_one_state(kind: str, tokens: int) -> None:
    """Each thread steps the shared state to the same bits as alone; 200 tokens are a call without Python's lock."""
    query = torch.randn(1, 8, 50, 16)
    given = [
        (query if kind == "attention" else torch.randn(1, 8, tokens, 16), *_tokens(tokens)[1:]) for _ in range(THREADS)
    ]
    with torch.no_grad():
        start = ck.attention_state(query, *_tokens(50)[1:]) if kind == "attention" else STARTS[kind]()
        kept = copy.deepcopy(start)
        alone = [_stepped(kind, copy.deepcopy(kept), given, i) for i in range(THREADS)]
        for _ in range(10):
            found = _together(functools.partial(_stepped, kind, start, given))
            assert all(
                torch.equal(a, b)
                for one, other in zip(found, alone, strict=True)
                for a, b in zip(one, other, strict=True)
            )
            start = copy.deepcopy(kept)


def test_states_after_steps_at_the_same_instant_share_no_memory() -> None:
    """Eight threads step a state that is the sole owner of its tensors; one thread may do so in place.

    Each result continues as if it had been computed alone. In a free-threaded Python, without the state's own lock, 1
    in 50 results differed. So there are more rounds in that case.
    """
    unlocked = not getattr(sys, "_is_gil_enabled", lambda: True)()

    def step(start: Any, tokens: Tensor, go: threading.Barrier) -> Any:
        with torch.no_grad():
            go.wait()
            return ck.continual_nystrom_step(start, *tokens)

    with torch.no_grad(), ThreadPoolExecutor(THREADS) as pool:
        for _ in range(1000 if unlocked else 10):
            window, *given = torch.randn(3, 1, 2, 64, 16), *torch.randn(THREADS, 3, 1, 2, 1, 16)
            start = ck.continual_nystrom_step(ck.continual_nystrom_init(*window, num_landmarks=8), *given[0]).state
            alone = [ck.continual_nystrom_step(copy.deepcopy(start), *tokens) for tokens in given]
            go = threading.Barrier(THREADS)
            found = list(pool.map(lambda tokens, start=start, go=go: step(start, tokens, go), given))
            for one, other in zip(found, alone, strict=True):
                nexts = [ck.continual_nystrom_step(each.state, *given[0]).out for each in (one, other)]
                assert torch.equal(one.out, other.out) and torch.equal(*nexts)


def test_eight_threads_update_one_module() -> None:
    """The threads may lose each other's updates, but the stream holds whole updates: k times the same rows add log
    k."""
    module, rows, latents = nn.CMABStack(16, 4, 2, depth=2).eval(), torch.randn(1, 20, 16), torch.randn(2, 16)

    def update(_: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                module.update(rows, latents)

    once = module.read(rows)
    _together(update)
    state = module.stream.state
    times = (state.lse - once.lse).exp()
    assert times.min() >= 1 and times.max() <= 20 * THREADS
    torch.testing.assert_close(times, times.flatten()[0].round().expand_as(times), rtol=1e-5, atol=0)
    torch.testing.assert_close(state.out, once.out, rtol=1e-4, atol=1e-5)

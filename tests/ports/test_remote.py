"""Kernels of another process give the same bits as kernels here, and write to the same places; tests see these
kernels."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import cmab_kernels as ck
from cmab_kernels.testing import failures

from ..attention.test_suite import TestLatentAttention as LatentAttention

native = pytest.importorskip(
    "cmab_kernels.attention.native", reason="the extension was not built", exc_type=ImportError
)

from .remote import Remote  # noqa: E402  after the skip of what it needs

FAULTY = """
import runpy, sys, types
import cmab_kernels._C as right

def attention_forward(**named):
    right.attention_forward(**named)
    named["out"][..., 0] += 1e-4

wrong = types.ModuleType(right.__name__)
vars(wrong).update(vars(right), attention_forward=attention_forward)
sys.modules[right.__name__] = wrong
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def _remote(*command: str) -> Iterator[Remote]:
    with mock.patch.dict("os.environ", PYTHONPATH=str(Path(ck.__file__).parents[1])):
        remote = Remote([sys.executable, *command], importlib.import_module("cmab_kernels._C"))
    yield remote
    remote.close()


remote = pytest.fixture(scope="module")(_remote)


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Remote]:
    (tmp_path / "faulty.py").write_text(FAULTY)
    yield from _remote(str(tmp_path / "faulty.py"))


class Quick(LatentAttention):
    """A few of the suite's checks for the native implementation."""

    impls = ("native",)
    dtypes = (torch.float32, torch.bfloat16)


def test_the_suite_runs_there(remote: Remote) -> None:
    before = remote.calls.total()
    with mock.patch.object(native, "_C", remote):
        assert failures(Quick, "test_accuracy", "test_layouts", "test_masks", "test_empty_extents") == {}
    assert remote.calls.total() > before + 50 and remote.calls["attention_backward"]


def test_a_fault_there_is_seen(faulty: Remote) -> None:
    with mock.patch.object(native, "_C", faulty):
        assert failures(Quick, "test_accuracy")


def test_a_step_of_a_state_that_came_from_elsewhere(remote: Remote) -> None:
    """The memory is copied there, like memory that the library did not make."""
    tokens = torch.randn(1, 2, 20, 4)
    found = []
    for extension in (remote, remote.here):
        torch.manual_seed(0)
        state = ck.continual_nystrom_init(tokens, tokens, tokens, num_landmarks=3)
        state = extension.continual_nystrom_step(state, *[tokens[:, :, :1]] * 3, False).state  # has room in its rings
        found.append(extension.continual_nystrom_step(state, *[tokens[:, :, 1:2]] * 3, False))
    ours, right = found
    assert torch.equal(ours.out, right.out) and torch.equal(ours.state.sums, right.state.sums)
    assert torch.equal(ours.state.position, right.state.position)


def test_what_is_too_large_is_not_cut(remote: Remote) -> None:
    """A tensor in the middle of memory that is not accessed, as in tests of offsets beyond 32 bits."""
    far = torch.UntypedStorage(2**31)
    with pytest.raises(pytest.skip.Exception, match="2147483648 bytes"):
        remote.apply_rows(query=torch.empty(0).set_(far, 2**28, (1, 1, 1, 1), (1, 1, 1, 1)))


def test_what_the_extension_refuses(remote: Remote) -> None:
    with pytest.raises(TypeError, match="attention_forward"):
        remote.attention_forward(wrong=1)
    tokens = torch.zeros(1, 1, 4, 2)
    state = ck.continual_attention_init(tokens, tokens, tokens)
    for odd in (tokens[:, :, :1].to("meta"), torch.nn.Parameter(tokens[:, :, :1]), tokens[:, :, :1].bool()):
        assert remote.continual_attention_step(state, odd, odd, odd, False) is None
    assert remote.continual_attention_step(None, *[tokens[:, :, :1]] * 3, False) is None

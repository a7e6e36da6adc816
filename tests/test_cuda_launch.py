"""Launches of CUDA kernels, and the reasons why a GPU cannot run them, with a simulated GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

cuda_launch = pytest.importorskip("cmab_kernels.runtime.cuda_launch", exc_type=ImportError)
KIB = 1024


@pytest.fixture(autouse=True)
def no_known_gpu() -> Iterator[None]:
    """Forget all known GPUs before and after each test."""
    cuda_launch._properties.cache_clear()
    yield
    cuda_launch._properties.cache_clear()


class Gpus:
    """Two simulated GPUs: which is current, and how much shared memory a block may have."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, shared_bytes: int, capability: tuple[int, int] = (8, 6)
    ) -> None:
        self.current, self.shared_bytes = 0, shared_bytes
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "_exchange_device", self.exchange)
        monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", self.exchange)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
        monkeypatch.setattr(cuda_launch, "CUDA", _with(cuda_launch.CUDA, shared_memory=self.shared_memory))

    def exchange(self, index: int) -> int:
        before, self.current = self.current, index
        return before

    def shared_memory(self, index: int) -> int:
        if self.shared_bytes == 0:
            raise RuntimeError("shared memory of a block: CUDA driver version is insufficient for CUDA runtime version")
        return self.shared_bytes


def _with(module: Any, **changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(module), **changed})


def test_a_launch_restores_the_callers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is launched on its tensors' device and stream. Afterwards, also after an exception, the caller's
    device is current."""
    gpus = Gpus(monkeypatch, 99 * KIB)
    seen: list[Any] = []
    cuda_launch.launch(lambda **given: seen.append((gpus.current, given)), torch.device("cuda", 1), out="a tensor")
    assert seen == [(1, {"out": "a tensor", "stream": 101})] and gpus.current == 0
    with pytest.raises(ZeroDivisionError):
        cuda_launch.launch(lambda **given: 1 // 0, torch.device("cuda", 1))
    assert gpus.current == 0


def test_csrc_leaves_the_device_alone() -> None:
    sources = [*(Path(cuda_launch.__file__).parents[2] / "csrc").rglob("*.cu*")]
    if not sources:
        pytest.skip("there are no sources beside the package")
    assert not [path.name for path in sources if "cudaSetDevice" in path.read_text()]


def test_a_driver_older_than_the_runtime_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 0)
    problem = cuda_launch.gpu_problem(0, "step_shared_bytes", 64, 0, False)
    assert problem is not None and "driver version is insufficient" in problem


def test_shared_memory_is_judged_by_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 99 KiB in a block, only wide float64 systems, and float64 steps with many landmarks, do not run."""
    Gpus(monkeypatch, 99 * KIB)
    assert cuda_launch.gpu_problem(0, "solve_shared_bytes", 96, 130, True) is None
    problem = cuda_launch.gpu_problem(0, "solve_shared_bytes", 97, 130, True)
    assert problem is not None and "113 KiB" in problem and "99" in problem
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: 1 // 0)
    assert cuda_launch.gpu_problem(0, "step_shared_bytes", 64, 0, False) is None, "properties are asked for once"
    fits = cuda_launch.CUDA
    assert max(fits.solve_shared_bytes(order, 130, False) for order in range(1, 129)) <= 99 * KIB
    assert fits.solve_shared_bytes(96, 130, True) <= 99 * KIB < fits.solve_shared_bytes(128, 130, True) <= 163 * KIB
    assert fits.step_shared_bytes(512, 64, False) <= 99 * KIB and fits.step_shared_bytes(512, 40, True) <= 99 * KIB
    assert fits.step_shared_bytes(512, 64, True) <= 163 * KIB

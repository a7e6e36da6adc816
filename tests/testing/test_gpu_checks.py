"""The suite's GPU checks find an operator that is wrong on another stream or in a graph, or that waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from cmab_kernels.testing import OperatorSuite, failures


class Gpu:
    """The parts of `torch.cuda` for streams, graphs and waiting, on the CPU. A replay repeats the captured calls."""

    def __init__(self) -> None:
        self.current, self.waiting = "default", "default"
        self.recorded: list[Callable[[], Any]] | None = None

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.current = "other"
        yield
        self.current = "default"

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.recorded = graph.recorded = []
        yield
        self.recorded = None

    def launch(self, kernel: Callable[[], Any]) -> None:
        kernel()
        if self.recorded is not None:
            self.recorded.append(kernel)

    def wait(self) -> None:
        if self.waiting == "error":
            raise RuntimeError("called a synchronizing CUDA operation")


class Stream:
    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...


class Graph:
    def replay(self) -> None:
        for kernel in self.recorded:
            kernel()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    replaced = {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": gpu.stream,
        "CUDAGraph": Graph,
        "graph": gpu.graph,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(gpu, "waiting", mode))
    return gpu


def _suite(gpu: Gpu, fault: str) -> type[OperatorSuite]:
    def double(rows: Tensor) -> Tensor:
        out = torch.empty_like(rows)
        factor = 3.0 if fault == "another stream" and gpu.current == "other" else 2.0
        held = rows.clone() if fault == "a capture that holds values" else rows
        gpu.launch(lambda: out.copy_(factor * held))
        if fault == "a wait":
            gpu.wait()
        return out

    class Doubled(OperatorSuite):
        arguments = {"rows": "BN"}  # noqa: RUF012  a declaration
        extents = {"B": 2, "N": 5}  # noqa: RUF012  a declaration
        differentiable = ()
        repeats = 3

        def parameters(self) -> dict[str, Any]:
            return {**super().parameters(), "streamed": ("python",)}

        def call(self, impl: str, rows: Tensor) -> tuple[Tensor, ...]:
            return (double(rows),)

    return Doubled


CATCHES = {
    "another stream": "test_a_side_stream",
    "a capture that holds values": "test_a_captured_graph",
    "a wait": "test_nothing_is_waited_for",
}


@pytest.mark.parametrize("fault", ["", *CATCHES])
def test_each_fault_fails_its_check_alone(gpu: Gpu, fault: str) -> None:
    found = failures(_suite(gpu, fault), *CATCHES.values())
    assert [name.split("-")[0] for name in found] == ([CATCHES[fault]] if fault else []), found

"""Checks that need a GPU: other streams, CUDA graphs, and calls that do not wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .declaration import Inputs
from .numerics import Numerics, same_bits


@contextmanager
def side_stream() -> Iterator[None]:
    """Within this context, work goes to a separate stream, which starts after the current stream. At the end the host
    waits for it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Within this context a call that waits for the device raises RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class OnGpu(Numerics):
    """Checks of a call and its gradients under conditions that only a GPU has. `captured` says whether the operator
    promises them."""

    def _stream_inputs(self) -> Inputs:
        return self.bit_inputs(torch.float32 if torch.float32 in self.dtypes else self.dtypes[0], 0)

    def _streamed(self, impl: str, inputs: Inputs) -> tuple[Tensor, ...]:
        """Return the results, and the gradients unless a call with gradients takes another path."""
        if not self.ungraded:
            return self.run(impl, inputs)
        with torch.no_grad():
            return tuple(self.call(impl, **inputs))

    def test_a_side_stream(self, streamed: str) -> None:
        """The bits are the same on another stream."""
        inputs = self._stream_inputs()
        first = self._streamed(streamed, inputs)
        with side_stream():
            other = self._streamed(streamed, inputs)
        assert same_bits(other, first)

    def test_a_captured_graph(self, streamed: str) -> None:
        """A graph is captured once and replayed on other inputs in the same memory. The bits are those of a call with
        these inputs."""
        inputs = self._stream_inputs()
        with side_stream():
            self._streamed(streamed, inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = self._streamed(streamed, inputs)
        for name, tensor in inputs.items():
            if self._is_batched(name):
                tensor.copy_(tensor.flip(0))
        wanted = tuple(t.clone() for t in self._streamed(streamed, inputs))
        for _ in range(self.repeats):
            graph.replay()
            assert same_bits(captured, wanted)

    def test_nothing_is_waited_for(self, streamed: str) -> None:
        """Neither the call nor its gradients wait for the device, once everything is compiled."""
        inputs = self._stream_inputs()
        self._streamed(streamed, inputs)
        with no_waiting():
            self._streamed(streamed, inputs)

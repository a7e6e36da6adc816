"""The time that the host takes for a call on a GPU, measured with the stub of the driver: `python -m
tests.gpu_machine.host_time`.

Kernels are compiled, loaded and launched as on a GPU of compute capability 9.0, and do nothing. The driver of a real
GPU adds the time of its queue to each launch. Tensors are on the CPU, and its allocator replaces that of a GPU; streams
keep their position in a tensor, as on a GPU. So the calls name Triton. "auto" looks at the device, and would also call
`unsupported` of one or two other implementations.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

import cmab_kernels as ck
from cmab_kernels.layers import triton as layer_kernels
from cmab_kernels.layers.contract import (
    AttentionLayer,
    AttentionLayerBackward,
    FeedForwardLayer,
    FeedForwardLayerBackward,
)
from cmab_kernels.nystrom.continual import state as state_module
from cmab_kernels.nystrom.continual import triton as kernels
from gpu_machine.driver import stub

CALLS, ROUNDS = 30, 400
"""The calls of a sample, and the samples of a figure, which is their minimum."""


class Stream:
    """Steps of a stream whose state nothing else references."""

    def __init__(self, step: Callable[..., Any], state: Any, *arguments: Any, **options: Any) -> None:
        self._step, self._state, self._arguments, self._options = step, state, arguments, options

    def __call__(self) -> None:
        _, self._state = self._step(self._state, *self._arguments, **self._options)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls by name: one key or token, 4 heads of 16, in float32."""
    query, key, square = torch.randn(1, 4, 128, 16), torch.randn(1, 4, 1, 16), torch.rand(4, 16, 16)
    state, sums = ck.attention_state(query, key, key, impl="native"), ck.ridge_state(key, key, impl="native")
    rows = torch.randn(1, 4, 64, 16)[:, :, 3:4]
    yield "attention_state", lambda: ck.attention_state(query, key, key, impl="triton")
    yield "attention_state with a state", lambda: ck.attention_state(query, key, key, state=state, impl="triton")
    yield (
        "attention_state with a state, keys a view",
        lambda: ck.attention_state(query, rows, rows, state=state, impl="triton"),
    )
    yield "ridge_state", lambda: ck.ridge_state(key, key, impl="triton")
    yield "ridge_state with a state", lambda: ck.ridge_state(key, key, state=sums, impl="triton")
    yield "iterative_pinv", lambda: ck.iterative_pinv(square, impl="triton")
    with positions_unread():
        for name in ("attention", "nystrom"):
            for output in ("single", "retroactive"):
                options = {"output": output, "impl": "triton"}
                step = getattr(ck, f"continual_{name}_step")
                yield f"continual_{name}_step, {output}", Stream(step, stream(name), key, key, key, **options)
            function = getattr(kernels, f"continual_{name}_step")
            yield f"    its kernel's function alone, {name}", Stream(function, stream(name), key, key, key, False)


def layers() -> Iterator[tuple[str, Callable[[], object]]]:
    """The functions of the kernels of layers by name: 32 rows of 64, 4 heads, in float32.

    Gradients take several launches.
    """
    x, context, matrix, vector = torch.randn(2, 16, 64), torch.randn(2, 4, 64), torch.randn(64, 64), torch.randn(64)
    weights = (matrix, None, matrix, None, matrix, None, matrix, vector)
    for name, other, norm in (("attention_layer", None, None), ("attention_layer, a context", context, vector)):
        parameters, settings = (vector, vector, norm, norm, *weights), (4, 0.25, 1e-5, 1e-5, "input")
        inputs = AttentionLayer(x, other, None, *parameters, *settings, True)
        _, *kept = layer_kernels.attention_layer(inputs)
        needs = tuple(t is not None for t in (x, other, *parameters))
        yield name, partial(layer_kernels.attention_layer, inputs)
        backward = AttentionLayerBackward(x, x, other, None, *parameters, *kept, *settings, needs)
        yield f"{name}: gradients", partial(layer_kernels.attention_layer_backward, backward)
    rows, network = (
        x.view(32, 64),
        (vector, vector, torch.randn(512, 64), torch.randn(512), torch.randn(64, 256), vector, 1e-5, "geglu", "input"),
    )
    yield "feed_forward_layer", partial(layer_kernels.feed_forward_layer, FeedForwardLayer(rows, *network))
    back = FeedForwardLayerBackward(rows, rows, *network, (True,) * 7)
    yield "feed_forward_layer: gradients", partial(layer_kernels.feed_forward_layer_backward, back)


def positions_unread() -> Any:
    """A context in which no check reads the position of a state, as on a GPU, because the stub's kernels write none."""
    return mock.patch.object(state_module, "_check_positions", lambda *_: None)


def stream(name: str) -> Any:
    """The state of a stream after its first window of 64 tokens; of Nyström attention with 16 landmarks."""
    window = torch.randn(1, 4, 64, 16)
    landmarks = (16,) if name == "nystrom" else ()
    return getattr(ck, f"continual_{name}_init")(window, window, window, *landmarks)


def least(call: Callable[[], object]) -> float:
    """The least time of a call, in microseconds."""
    samples = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        samples.append(time.perf_counter() - begin)
    return min(samples) / CALLS * 1e6


def main() -> None:
    torch.set_num_threads(1)
    with stub(90), torch.no_grad():
        for name, call in itertools.chain(calls(), layers()):
            call()
            print(f"{name:44} {least(call):6.1f} us", flush=True)


if __name__ == "__main__":
    main()

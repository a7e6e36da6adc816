"""`torch.compile(mode="reduce-overhead")` can capture a training step as CUDA graphs. It needs one graph for each
direction, with the package's operators, all tensors on the GPU, and no write to an input.

The meta device stands for the GPU, because a CPU build of torch records no gradients of tensors that claim to be on
one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_compiler
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.fx import GraphModule, Node

import cmab_kernels.nn as ours
from cmab_kernels.runtime import backends

OPTIONS: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
LAYER: tuple[Any, ...] = (16, 2, 32)
LAYERS = {"attention_layer", "feed_forward_layer"}


def _encoder(**options: Any) -> nn.Module:
    return ours.ContinualEncoder(ours.RetroactiveEncoderLayer(*LAYER, sequence_len=6, **options, **OPTIONS), 2)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], set[str]]] = {
    "CMABStack": (
        lambda: ours.CMABStack(16, 8, 2, 2),
        lambda module, tokens, queries: module(tokens, queries),
        LAYERS | {"projected_attention"},
    ),
    "MultiheadAttention": (
        lambda: ours.MultiheadAttention(16, 2, **OPTIONS),
        lambda module, tokens, queries: module(queries, tokens, tokens, need_weights=False)[0],
        {"attention"},
    ),
    "MultiheadIntention": (
        lambda: ours.MultiheadIntention(16, 2, **OPTIONS),
        lambda module, tokens, queries: module(queries, tokens, tokens, need_weights=False)[0],
        {"gram", "apply_rows", "regularised_solve"},
    ),
    "NystromAttention": (
        lambda: ours.NystromAttention(16, 2, num_landmarks=4, **OPTIONS),
        lambda module, tokens, queries: module(tokens, tokens, tokens, need_weights=False)[0],
        {"attention", "landmark_values"},
    ),
    "TransformerEncoderLayer": (
        lambda: ours.TransformerEncoderLayer(*LAYER, **OPTIONS),
        lambda module, tokens, queries: module(tokens),
        LAYERS,
    ),
    "TransformerDecoderLayer": (
        lambda: ours.TransformerDecoderLayer(*LAYER, norm_first=True, **OPTIONS),
        lambda module, tokens, queries: module(queries, tokens),
        LAYERS,
    ),
    "ContinualEncoder": (_encoder, lambda module, tokens, queries: module(tokens), {"attention"}),
    "ContinualEncoder with landmarks": (
        lambda: _encoder(num_landmarks=4),
        lambda module, tokens, queries: module(tokens),
        {"attention", "landmark_values", "iterative_pinv"},
    ),
}
"""Name -> the module, its call, and the operators of its forward graph."""


@pytest.fixture
def meta_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "auto" choose Triton for tensors on the meta device."""
    runs = {"triton": None, "reference": None}
    monkeypatch.setattr(backends, "_unsupported", lambda operator_set, impl, tensors: runs.get(impl, "not on a GPU"))


def _host_tensors(node: Node) -> list[Tensor]:
    value = node.meta.get("val")
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.device.type == "cpu"]


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_is_captured(name: str, meta_as_gpu: None) -> None:
    make, call, operators = CASES[name]
    graphs: list[list[Node]] = []

    def keep(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        assert get_first_incompatible_cudagraph_node(graph) is None
        graphs.append(list(graph.graph.nodes))
        return graph.forward

    with torch.device("meta"):
        module, tokens, queries = make(), torch.empty(2, 16, 16), torch.empty(2, 5, 16)
    backend = aot_autograd(fw_compiler=make_boxed_compiler(keep), bw_compiler=make_boxed_compiler(keep))
    compiled = torch.compile(lambda *inputs: call(module, *inputs), fullgraph=True, backend=backend)
    compiled(tokens, queries).sum().backward()
    forward, backward = ({str(node.target) for node in graph} for graph in graphs)
    assert {target.split(".")[1] for target in forward if target.startswith("cmab.")} == operators
    assert any(target.startswith("cmab.") for target in backward)
    assert not [target for target in forward | backward if "copy_." in target]
    assert not [(node, found) for graph in graphs for node in graph if (found := _host_tensors(node))]

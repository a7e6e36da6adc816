"""Float padding masks whose numbers may not be read: in a transform,
a trace or with fake tensors, as in torch's modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cmab_kernels.nn as fused
from cmab_kernels.integrations import scaled_dot_product_attention

_Attend = Callable[[Tensor, Tensor], Tensor]
X = torch.randn(3, 2, 6, 8, dtype=torch.float64)
PADDING = torch.zeros(3, 2, 6, dtype=torch.float64)
PADDING[..., 4:] = -math.inf
ADDED = torch.randn(3, 2, 6, dtype=torch.float64)


def attention(kind: type[nn.Module]) -> _Attend:
    torch.manual_seed(0)
    module = kind(8, 2, batch_first=True, dtype=torch.float64).requires_grad_(False)
    return lambda x, mask: module(x, x, x, key_padding_mask=mask, need_weights=False)[0]


def encoder(kind: type[nn.Module]) -> _Attend:
    torch.manual_seed(0)
    layer = kind(8, 2, 16, 0.0, batch_first=True, dtype=torch.float64).requires_grad_(False)
    return lambda x, mask: layer(x, src_key_padding_mask=mask)


def function(attend: Callable[..., Tensor]) -> _Attend:
    return lambda x, mask: attend(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1), attn_mask=mask[:, None, None])


PAIRS = {
    "attention": (attention(nn.MultiheadAttention), attention(fused.MultiheadAttention)),
    "encoder": (encoder(nn.TransformerEncoderLayer), encoder(fused.TransformerEncoderLayer)),
    "function": (function(nn.functional.scaled_dot_product_attention), function(scaled_dot_product_attention)),
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> tuple[_Attend, _Attend]:
    return PAIRS[request.param]


@pytest.mark.parametrize("mask", [PADDING, ADDED], ids=["padding", "added"])
def test_vmap(pair: tuple[_Attend, _Attend], mask: Tensor) -> None:
    theirs, ours = pair
    torch.testing.assert_close(
        torch.func.vmap(ours)(X, mask), torch.stack([theirs(*each) for each in zip(X, mask, strict=True)])
    )


@pytest.mark.parametrize(
    "trace", [make_fx, lambda f: lambda *example: torch.jit.trace(f, example)], ids=["make_fx", "jit"]
)
@pytest.mark.filterwarnings("ignore")  # torch warns of tracing and of its deprecation
def test_a_trace_takes_other_numbers(pair: tuple[_Attend, _Attend], trace: Callable[..., Any]) -> None:
    theirs, ours = pair
    traced = trace(ours)(X[0], PADDING[0])
    torch.testing.assert_close(traced(X[1], ADDED[1]), theirs(X[1], ADDED[1]))


def test_fake_tensors(pair: tuple[_Attend, _Attend]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert (
            pair[1](mode.from_tensor(X[0]), mode.from_tensor(PADDING[0])).shape
            == X[0].shape[:1] + pair[0](X[0], PADDING[0]).shape[1:]
        )


def test_a_module_without_torchs_code_has_nan_for_what_it_cannot_add() -> None:
    module = fused.MultiheadIntention(8, 2, batch_first=True, dtype=torch.float64)
    attend = torch.func.vmap(lambda x, mask: module(x, x, x, key_padding_mask=mask, need_weights=False)[0])
    torch.testing.assert_close(attend(X, PADDING), attend(X, -math.inf == PADDING))
    assert attend(X, ADDED).isnan().all()
    with pytest.raises(ValueError, match=r"^key_padding_mask: "):
        module(X[0], X[0], X[0], key_padding_mask=ADDED[0])

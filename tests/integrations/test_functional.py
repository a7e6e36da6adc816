"""Our `scaled_dot_product_attention` equals torch's; the operator computes it where it can, and torch elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cmab_kernels
from cmab_kernels.integrations import functional, scaled_dot_product_attention

theirs = torch.nn.functional.scaled_dot_product_attention
BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 4, 5, 7, 8
SEEN = torch.arange(KEYS) < torch.tensor([[KEYS], [3]])
ROW = SEEN[:, None, None]
WHOLE = ROW.expand(BATCH, HEADS, QUERIES, KEYS)
BY_QUERY = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]) -> list[str]:
    """Record whether the operator, or torch, computed each call."""
    calls: list[str] = []
    for name, function in {"latent_attention": functional.latent_attention, "_torchs": functional._torchs}.items():
        monkeypatch.setattr(functional, name, lambda *a, f=function, n=name, **k: calls.append(n) or f(*a, **k))
    return calls


def added(mask: Tensor, low: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, low)


def heads(groups: int = HEADS, width: int = WIDTH) -> list[Tensor]:
    shapes = ((BATCH, HEADS, QUERIES, width), (BATCH, groups, KEYS, width), (BATCH, groups, KEYS, 6))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


LOWEST = torch.finfo(torch.float64).min
# the options, and whether the operator supports them
CALLS: dict[str, tuple[dict[str, Any], bool]] = {
    "all keys": ({}, True),
    "a scale": ({"scale": 0.7}, True),
    "a row": ({"attn_mask": ROW}, True),
    "a row for all": ({"attn_mask": SEEN[:1]}, True),
    "a row expanded": ({"attn_mask": WHOLE}, True),
    "a row of -inf": ({"attn_mask": added(ROW, -torch.inf)}, True),
    "a row of the lowest number": ({"attn_mask": added(ROW, LOWEST).expand(-1, HEADS, QUERIES, -1)}, True),
    "a row that hides nothing": ({"attn_mask": torch.zeros(1, KEYS, dtype=torch.float64)}, True),
    "a row written out": ({"attn_mask": WHOLE.contiguous()}, False),
    "by query": ({"attn_mask": BY_QUERY}, False),
    "by head": ({"attn_mask": torch.rand(HEADS, 1, KEYS) < 0.9}, False),
    "numbers": ({"attn_mask": torch.linspace(-1, 0, KEYS, dtype=torch.float64)[None]}, False),
    "numbers with a gradient": ({"attn_mask": added(ROW, -torch.inf).requires_grad_()}, False),
    "all keys at the lowest number": ({"attn_mask": added(ROW & False, LOWEST)}, False),
    "causal": ({"is_causal": True}, False),
    "dropout": ({"dropout_p": 0.5}, False),
}


@pytest.mark.parametrize("options, is_fused", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("groups", [HEADS, 2, 1])
def test_results_and_gradients_are_torchs(
    options: dict[str, Any], is_fused: bool, groups: int, fused: list[str]
) -> None:
    tensors, options = heads(groups), {**options, "enable_gqa": groups < HEADS}
    results = []
    for function in (scaled_dot_product_attention, theirs):
        torch.manual_seed(3)
        out = function(*tensors, **options)
        results.append([out, *torch.autograd.grad(out.sin().sum(), tensors)])
    assert fused == ["latent_attention" if is_fused else "_torchs"]
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)
        assert is_fused or torch.equal(ours, other)


def test_without_a_dimension_of_heads(fused: list[str]) -> None:
    """Models that fold heads into the batch pass three dimensions, and a mask with or without the dimension of the
    batch."""
    tensors = [each[:, 0] for each in heads()]
    for mask in (None, SEEN[:, None], SEEN[:1], BY_QUERY):
        torch.testing.assert_close(
            scaled_dot_product_attention(*tensors, mask), theirs(*tensors, mask), rtol=1e-12, atol=1e-12
        )
    assert fused == ["latent_attention"] * 3 + ["_torchs"]


def test_what_has_no_kernel_is_torchs(fused: list[str]) -> None:
    cases = {
        "wide heads": heads(width=300),
        "no keys": [each[:, :, :0] if each.shape[2] == KEYS else each for each in heads()],
        "two dimensions": [each[0, 0] for each in heads()],
        "a meta device": [each.to("meta") for each in heads()],
    }
    for tensors in cases.values():
        assert scaled_dot_product_attention(*tensors).shape == (*tensors[0].shape[:-1], tensors[2].shape[-1])
    assert fused == ["_torchs"] * len(cases)


FEW = functional.FEW, functional.FEW_KEYS, functional.WIDE
# queries, keys, width, key heads of 2, and whether the operator runs
COUNTS = {
    "few over few": (FEW[0] - 1, FEW[1] - 1, 8, 2, False),
    "few over many": (FEW[0] - 1, FEW[1], 8, 2, True),
    "few and wide": (FEW[0] - 1, FEW[1], FEW[2], 2, False),
    "enough": (FEW[0], 7, FEW[2], 2, True),
    "enough for each key head": (FEW[0] // 2, 7, FEW[2], 1, True),
}


@pytest.mark.parametrize("queries, keys, width, groups, is_fused", COUNTS.values(), ids=COUNTS)
def test_few_queries_without_gradients_are_torchs(
    queries: int, keys: int, width: int, groups: int, is_fused: bool, fused: list[str]
) -> None:
    """torch is faster for these calls. With a gradient, a mask or a named implementation, the operator runs
    nevertheless."""
    query, (key, value) = torch.randn(1, 2, queries, width), torch.randn(2, 1, groups, keys, width)
    given: dict[str, Any] = {"enable_gqa": True}
    out = scaled_dot_product_attention(query, key, value, **given)
    torch.testing.assert_close(out, theirs(query, key, value, **given))
    assert fused == ["latent_attention" if is_fused else "_torchs"]
    scaled_dot_product_attention(query.clone().requires_grad_(), key, value, **given)
    scaled_dot_product_attention(query, key, value, torch.ones(keys, dtype=torch.bool)[None], **given)
    with cmab_kernels.use_impl("native"):
        scaled_dot_product_attention(query, key, value, **given)
    assert fused[1:] == ["latent_attention"] * 3


@pytest.mark.parametrize("wrong", ["heads", "dtype", "length", "mask"])
def test_errors_are_torchs(wrong: str) -> None:
    query, key, value = heads(groups=2 if wrong == "heads" else HEADS)
    value = value.float() if wrong == "dtype" else value[:, :, 1:] if wrong == "length" else value
    mask = torch.ones(3, KEYS, dtype=torch.bool) if wrong == "mask" else None
    messages = []
    for function in (scaled_dot_product_attention, theirs):
        with pytest.raises(RuntimeError) as raised:
            function(query, key, value, mask)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_a_query_that_sees_no_key_is_0() -> None:
    out = scaled_dot_product_attention(
        *heads(), attn_mask=SEEN[:, None, None] & torch.tensor([True, False])[:, None, None, None]
    )
    assert out[0].any() and not out[1].any()


def test_the_signature_is_torchs() -> None:
    torchs = "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
    given = inspect.signature(scaled_dot_product_attention).parameters.values()
    assert ", ".join(each.name + ("" if each.default is each.empty else f"={each.default}") for each in given) == torchs
    assert "dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)" in " ".join(theirs.__doc__.split())


def test_it_can_stand_in_torchs_place(fused: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention)
    for causal in (False, True):
        torch.nn.functional.scaled_dot_product_attention(*heads(), is_causal=causal)
    assert fused == ["latent_attention", "_torchs"]


def test_compiled() -> None:
    tensors = heads()
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    for mask in (None, ROW, added(ROW, -torch.inf), BY_QUERY):
        torch.testing.assert_close(compiled(*tensors, mask), theirs(*tensors, mask), rtol=1e-12, atol=1e-12)


def test_use_impl_is_followed(fused: list[str]) -> None:
    with cmab_kernels.use_impl("reference"):
        scaled_dot_product_attention(*heads(width=300))
    assert fused == ["latent_attention"]

"""`enable_gqa`: heads of the query that share the heads of key and value, as in torch's function."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels import AttentionState
from cmab_kernels.attention import api

IMPLS = ("reference", "native")


def _inputs(heads: int = 6, of_keys: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, heads, 5, 8), (2, of_keys, 133, 8), (2, of_keys, 133, 7)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def _torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_is_torchs(impl: str) -> None:
    """Result and gradients are those of torch's function, also for a query that the batch shares, and for one head of
    keys."""
    inputs = [x.requires_grad_() for x in _inputs()]
    ours = ck.latent_attention(*inputs, enable_gqa=True, impl=impl)
    theirs = _torch(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    dout = torch.randn_like(theirs)
    got, right = torch.autograd.grad(ours, inputs, dout), torch.autograd.grad(theirs, inputs, dout)
    torch.testing.assert_close(got, right, rtol=0, atol=1e-12)
    for of_keys in (1, 6):
        q, k, v = _inputs(of_keys=of_keys)
        shared = ck.latent_attention(q[0], k, v, enable_gqa=True, impl=impl)
        torch.testing.assert_close(shared, _torch(q[:1].expand_as(q), k, v), rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_states(impl: str) -> None:
    """States have the heads of the query; merges, decay and removals work as for states of repeated keys."""
    q, k, v = _inputs()
    many = [x.repeat_interleave(3, 1) for x in (k, v)]
    decay = torch.linspace(0.1, 1.0, 60, dtype=torch.float64).view(2, 6, 5)

    def both(keys: slice, state: AttentionState | None, other: AttentionState | None) -> tuple[AttentionState, ...]:
        grouped = ck.attention_state(
            q, k[:, :, keys], v[:, :, keys], state=state, decay=decay, enable_gqa=True, impl=impl
        )
        alone = ck.attention_state(q, *(x[:, :, keys] for x in many), state=other, decay=decay, impl=impl)
        return grouped, alone

    grouped, alone = both(slice(100, None), *both(slice(100), None, None))
    assert grouped.out.shape == (2, 6, 5, 7)
    torch.testing.assert_close(grouped, alone, rtol=0, atol=1e-12)
    removed = ck.remove_from_state(grouped, q, k[:, :, 120:], v[:, :, 120:], enable_gqa=True, impl=impl)
    right = ck.remove_from_state(alone, q, *(x[:, :, 120:] for x in many), impl=impl)
    torch.testing.assert_close(removed.state, right.state, rtol=0, atol=1e-12)
    assert bool((removed.reliable == right.reliable).all())
    with pytest.raises(ValueError, match=r"^state.out: got shape \(2, 2, 15, 7\), expected \(2, 6, 5, 7\)"):
        ck.attention_state(q, k, v, state=ck.empty_state(2, 2, 15, 7, dtype=torch.float64), enable_gqa=True, impl=impl)


def test_packed_sets_and_a_mask() -> None:
    q, k, v = _inputs()
    offsets, mask = torch.tensor([0, 60, 133]), torch.rand(1, 133) < 0.3
    got = ck.attention_state(q, k[:1], v[:1], key_padding_mask=mask, cu_seqlens=offsets, enable_gqa=True)
    many = [x[:1].repeat_interleave(3, 1) for x in (k, v)]
    right = ck.attention_state(q, *many, key_padding_mask=mask, cu_seqlens=offsets)
    torch.testing.assert_close(got, right, rtol=0, atol=1e-12)


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator gets the tensors of the caller: keys as they are, and a view of the query."""
    q, k, v = _inputs()
    seen = []
    monkeypatch.setattr(api, "attention_op", lambda call: seen.append(call) or ck.empty_state(2, 2, 15, 7))
    ck.latent_attention(q, k, v, enable_gqa=True)
    assert [x.data_ptr() for x in seen[0][:3]] == [x.data_ptr() for x in (q, k, v)]
    assert seen[0].key.shape == k.shape
    assert seen[0].query.shape == (2, 2, 15, 8)


def test_transforms() -> None:
    """Compiled, exported and mapped calls, and second derivatives."""
    q, k, v = _inputs()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ck.latent_attention(q, k, v, enable_gqa=True)

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v))
    each = torch.stack([q, 2 * q])
    mapped = torch.func.vmap(call, (0, None, None))(each, k, v)
    torch.testing.assert_close(mapped, torch.stack([call(x, k, v) for x in each]))
    small = [x[:1, :, :3].clone().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradgradcheck(call, small)

    class Reader(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return call(q, k, v)

    program = torch.export.export(copy.deepcopy(Reader()), (q, k, v))
    torch.testing.assert_close(program.module()(q, k, v), call(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    q, k, v = _inputs(dtype=dtype)
    got = ck.latent_attention(q, k, v, enable_gqa=True)
    assert got.dtype == dtype
    torch.testing.assert_close(got, ck.latent_attention(q, *(x.repeat_interleave(3, 1) for x in (k, v))))


def test_errors() -> None:
    q, k, v = _inputs()
    with pytest.raises(ValueError, match=r"^query: got shape \(2, 6, 5, 8\).*enable_gqa=True"):
        ck.latent_attention(q, k, v)
    with pytest.raises(ValueError, match=r"^query: got 5 heads, expected a multiple of 2"):
        ck.latent_attention(q[:, :5], k, v, enable_gqa=True)
    with pytest.raises(ValueError, match=r"^query: got 0 heads, expected a multiple of 2"):
        ck.attention_state(q[:, :0], k, v, enable_gqa=True)
    with pytest.raises(ValueError, match=r"^query: got 6 heads, expected a multiple of 0"):
        ck.attention_state(q, k[:, :0], v[:, :0], enable_gqa=True)
    with pytest.raises(TypeError, match=r"^enable_gqa: got a Tensor, expected True or False"):
        ck.latent_attention(q, k, v, enable_gqa=torch.ones(2))

"""`key_bias`: a number for each key that is added to its scores. test_suite.py has accuracy, layouts and transforms."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.attention.schema import attention_op


def _inputs(
    shape: tuple[int, ...] = (2, 3, 133), latents: int = 5, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    keys, width = shape[-1], 7 if latents > 1 else 8  # single queries of whole vectors have a path of their own
    shapes = (2, 3, latents, 8), (2, 3, keys, 8), (2, 3, keys, width), shape
    q, k, v, b = (torch.randn(each, generator=generator, dtype=torch.float64).to(dtype) for each in shapes)
    return q, k, v, 3 * b


def _definition(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float = 8**-0.5) -> tuple[Tensor, Tensor]:
    scores = scale * q @ k.mT + bias[..., None, :]
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("latents", [1, 5, 300])
@pytest.mark.parametrize("shape", [(2, 3, 133), (1, 3, 133), (2, 1, 133), (3, 133), (133,), (1, 3, 1), (1,)])
def test_is_its_definition(impl: str, shape: tuple[int, ...], latents: int) -> None:
    """Result and gradients; the gradient of a bias is the sum over the axes along which it is broadcast."""
    q, k, v, _ = _inputs(latents=latents)
    inputs = [x.requires_grad_() for x in (q, k, v, 3 * torch.randn(shape, dtype=torch.float64))]
    for scale in (8**-0.5, 0.0, -0.4):
        state = ck.attention_state(*inputs[:3], key_bias=inputs[3], scale=scale, impl=impl)
        right = _definition(*inputs, scale=scale)
        slopes = torch.randn_like(state.out), torch.randn_like(state.lse)
        for ours, theirs in zip(
            (*state, *torch.autograd.grad(state, inputs, slopes)),
            (*right, *torch.autograd.grad(right, inputs, slopes)),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_is_torchs_additive_mask() -> None:
    q, k, v, bias = _inputs(dtype=torch.float32)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias[:, :, None].expand(-1, -1, 5, -1))
    torch.testing.assert_close(ck.latent_attention(q, k, v, key_bias=bias), theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_excluded_keys(impl: str, dtype: torch.dtype) -> None:
    """A bias of -inf masks a key for its head. Nothing in such a key has an effect, not even a NaN. This also holds if
    the key is masked too, and if the head has no other key."""
    q, k, v, bias = _inputs((2, 3, 700), latents=40, dtype=dtype)
    bias = bias.to(torch.promote_types(dtype, torch.float32))
    excluded = torch.rand(2, 3, 700) < 0.3
    excluded[1, 2] = True
    excluded[0, 1, 64:128] = True
    bias[excluded], k[excluded], v[excluded] = -math.inf, math.nan, math.inf
    mask = torch.rand(2, 700) < 0.3
    inputs = [x.requires_grad_() for x in (q, k, v, bias)]
    state = ck.attention_state(*inputs[:3], key_bias=inputs[3], key_padding_mask=mask, impl=impl)
    assert state.lse[1, 2].eq(-math.inf).all() and not state.out[1, 2].any()
    loss = state.out.sin().sum() + state.lse[state.lse > -math.inf].sum()
    found = torch.autograd.grad(loss, inputs)
    for h in range(3):
        gone = excluded[0, h] | mask[0]
        rest = [q[:1, h : h + 1], *(x[:1, h : h + 1, ~gone] for x in (k, v)), bias[:1, h : h + 1, ~gone]]
        rest = [x.detach().requires_grad_() for x in rest]
        alone = ck.attention_state(*rest[:3], key_bias=rest[3], impl=impl)
        right = torch.autograd.grad(alone.out.sin().sum() + alone.lse.sum(), rest)
        tolerance = {"rtol": 1e-11, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(state.lse[0, h], alone.lse[0, 0], **tolerance)
        torch.testing.assert_close(state.out[0, h], alone.out[0, 0], **tolerance)
        torch.testing.assert_close(found[0][0, h], right[0][0, 0], **tolerance)
        for ours, theirs in zip(found[1:], right[1:], strict=True):
            torch.testing.assert_close(ours[0, h, ~gone], theirs[0, 0], **tolerance)
            assert not ours[0, h, gone].any()
    assert not any(grad[1, 2].any() for grad in found)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("latents", [1, 5])
def test_a_bad_bias_stays_in_its_head(impl: str, dtype: torch.dtype, bad: float, latents: int) -> None:
    """NaN and +inf make all rows of their head NaN, and no others; where the key is masked they have no effect."""
    q, k, v, bias = _inputs(latents=latents, dtype=dtype)
    q, k, v = q.repeat(1, 1, 1, 8), k.repeat(1, 1, 1, 8), v[..., :4].repeat(1, 1, 1, 16)
    clean = ck.attention_state(q, k, v, key_bias=bias, impl=impl)
    bias[0, 1, 77] = bad
    state = ck.attention_state(q, k, v, key_bias=bias, impl=impl)
    assert state.out[0, 1].isnan().all() and state.lse[0, 1].isnan().all()
    others = torch.ones(2, 3, dtype=torch.bool)
    others[0, 1] = False
    assert all(torch.equal(a[others], b[others]) for a, b in zip(state, clean, strict=True))
    mask = torch.zeros(2, 133, dtype=torch.bool)
    mask[0, 77] = True
    state = ck.attention_state(q, k, v, key_bias=bias.requires_grad_(), key_padding_mask=mask, impl=impl)
    (slope,) = torch.autograd.grad(state.out.sum() + state.lse.sum(), bias)
    assert state.out.isfinite().all() and slope.isfinite().all() and slope[0, 1, 77] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_far_bias(native: str, dtype: torch.dtype) -> None:
    """Weights sum to 1, forward and backward, even if the bias is far larger than the scores."""
    q, k, v, _ = _inputs(dtype=dtype)
    v.requires_grad_()
    for far in (1e4, -1e4):
        state = ck.attention_state(q, k, v, key_bias=torch.full((1,), far), impl=native)
        assert ((state.lse - far).abs() < 20).all()
        (slope,) = torch.autograd.grad(state.out.sum(), v)
        assert (slope.double().sum(2) - 5).abs().max() < (1e-4 if dtype == torch.float32 else 0.02)


def test_states_and_removal(impl: str) -> None:
    """Chunks with their biases merge to the state of all keys, and are removed with the same biases."""
    q, k, v, bias = _inputs()
    whole, state = ck.attention_state(q, k, v, key_bias=bias, impl=impl), None
    for part in torch.arange(133).split(40):
        state = ck.attention_state(
            q, k[:, :, part], v[:, :, part], state=state, key_bias=bias[..., part], decay=1.0, impl=impl
        )
    torch.testing.assert_close(state, whole, rtol=1e-12, atol=1e-12)
    gone, kept = slice(40), slice(40, None)
    left = ck.remove_from_state(whole, q, k[:, :, gone], v[:, :, gone], key_bias=bias[..., gone], impl=impl)
    right = ck.attention_state(q, k[:, :, kept], v[:, :, kept], key_bias=bias[..., kept], impl=impl)
    torch.testing.assert_close(left.state, right, rtol=1e-9, atol=1e-9)


def test_packed_sets_and_groups(impl: str) -> None:
    """Packed sets and shared heads work with biases: a bias belongs to a key, and each head of keys has its own
    biases."""
    q, k, v, bias = _inputs()
    q = q.repeat_interleave(2, 1)
    offsets, ends = torch.tensor([0, 60, 120]), (slice(0, 60), slice(60, 120))
    inputs = [x[:1].requires_grad_() for x in (k, v, bias)]
    found = ck.attention_state(q, *inputs[:2], key_bias=inputs[2], cu_seqlens=offsets, enable_gqa=True, impl=impl)
    many = [x.repeat_interleave(2, 1) for x in inputs]
    parts = [_definition(q[i : i + 1], *(x[:, :, part] for x in many)) for i, part in enumerate(ends)]
    right = tuple(torch.cat(part) for part in zip(*parts, strict=True))
    slopes = torch.randn_like(found.out), torch.randn_like(found.lse)
    got, wanted = torch.autograd.grad(found, inputs, slopes), torch.autograd.grad(right, inputs, slopes)
    torch.testing.assert_close((*found, *got), (*right, *wanted), rtol=1e-12, atol=1e-12)


def test_weights_alibi_and_a_sink() -> None:
    """The promises of docs/attention.md hold: weights of points, a bias that is shifted over a stream, and a sink."""
    q, k, v, _ = _inputs()
    twice = torch.cat((k, k[:, :, :9]), 2), torch.cat((v, v[:, :, :9]), 2)
    weight = torch.ones(133, dtype=torch.float64)
    weight[:9] = 2
    torch.testing.assert_close(ck.latent_attention(q, k, v, key_bias=weight.log()), ck.latent_attention(q, *twice))
    slope, time = torch.tensor([0.5, 0.25, 0.125]).double()[:, None], torch.arange(133)
    first = ck.attention_state(q, k[:, :, :100], v[:, :, :100], key_bias=slope * (time[:100] - 99))
    decay = (-slope * 33).exp()
    state = ck.attention_state(
        q, k[:, :, 100:], v[:, :, 100:], state=first, decay=decay, key_bias=slope * (time[100:] - 132)
    )
    torch.testing.assert_close(state, ck.attention_state(q, k, v, key_bias=slope * (time - 132)))
    sink = torch.randn(3, dtype=torch.float64)
    state = ck.empty_state(2, 3, 5, 7, dtype=torch.float64)
    state = state._replace(lse=sink[:, None].expand(2, 3, 5))
    none = torch.cat((v.new_zeros(2, 3, 1, 7), v), 2)
    right = _definition(
        q, torch.cat((k.new_zeros(2, 3, 1, 8), k), 2), none, torch.cat((sink[:, None], sink.new_zeros(3, 133)), 1)
    )
    torch.testing.assert_close(tuple(ck.attention_state(q, k, v, state=state)), right)


def test_a_broadcast_bias_is_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, bias = _inputs(dtype=torch.float32)
    seen = []
    monkeypatch.setattr("cmab_kernels.attention.api.attention_op", lambda call: seen.append(call) or attention_op(call))
    ck.latent_attention(q, k, v, key_bias=bias[:1, :1])
    assert seen[0].key_bias.stride() == (0, 0, 1) and seen[0].key_bias.data_ptr() == bias.data_ptr()


def test_transforms() -> None:
    """Second derivatives, forward mode, and compiled, exported and mapped calls work, also if only the bias is
    mapped."""
    q, k, v, bias = _inputs((3, 133))

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return ck.latent_attention(q, k, v, key_bias=bias)

    inputs = (q, k, v, bias)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs), call(*inputs))
    biases = torch.stack([bias, 2 * bias])
    right = torch.stack([call(q, k, v, x) for x in biases])
    torch.testing.assert_close(torch.func.vmap(call, (None, None, None, 0))(q, k, v, biases), right)
    small = [x[..., :5, :].clone() if x.dim() == 4 else x[:, :5].clone() for x in inputs]
    small = [x[:1].requires_grad_() if x.dim() == 4 else x.requires_grad_() for x in small]
    assert torch.autograd.gradcheck(call, small) and torch.autograd.gradgradcheck(call, small)
    _, tangent = torch.func.jvp(lambda x: call(q, k, v, x), (bias,), (torch.ones_like(bias),))
    assert tangent.abs().max() < 1e-12  # a constant changes no weight

    class Reader(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return call(q, k, v, bias)

    program = torch.export.export(copy.deepcopy(Reader()), inputs)
    torch.testing.assert_close(program.module()(*inputs), call(*inputs))


def test_errors() -> None:
    q, k, v, bias = _inputs(dtype=torch.float32)
    state = ck.empty_state(2, 3, 5, 7)
    for call in (ck.latent_attention, ck.attention_state, lambda *a, **b: ck.remove_from_state(state, *a, **b)):
        with pytest.raises(ValueError, match=r"^key_bias: got shape \(2, 133\).*\(2, 3, 133\)"):
            call(q, k, v, key_bias=bias[:, 0])
        with pytest.raises(TypeError, match=r"^key_bias: got a float, expected a floating torch\.Tensor"):
            call(q, k, v, key_bias=0.5)
        with pytest.raises(TypeError, match=r"^key_bias: got torch\.bool, expected float64"):
            call(q, k, v, key_bias=bias > 0)
        with pytest.raises(TypeError, match=r"^key_bias: got torch\.sparse_coo, expected a dense tensor"):
            call(q, k, v, key_bias=bias.to_sparse())
        with pytest.raises(ValueError, match=r"^key_bias: got device meta"):
            call(q, k, v, key_bias=bias.to("meta"))

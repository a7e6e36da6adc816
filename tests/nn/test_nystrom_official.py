"""Nyström attention with a convolution of the values, and with weights of published code."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cmab_kernels
from cmab_kernels.nn import ContinualNystromAttention, MultiheadAttention, NystromAttention

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
published = pytest.importorskip("nystrom_attention", reason="nystrom-attention is not installed")
SIZES = {"num_heads": 4, "num_landmarks": 8}


def drawn(module: nn.Module, scale: float) -> nn.Module:
    """Give a module weights of N(0, scale^2): with large weights the pseudo-inverse is far from convergence."""
    generator = torch.Generator().manual_seed(3)
    for weight in module.parameters():
        weight.data = torch.randn(weight.shape, dtype=torch.float64, generator=generator) * scale
    return module.double().eval()


def of_transformers(conv: int, *, whole: bool = False) -> Any:
    from transformers.models.nystromformer import modeling_nystromformer as theirs

    config = transformers.NystromformerConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_landmarks=8,
        segment_means_seq_len=64,
        conv_kernel_size=conv,
        hidden_dropout_prob=0.0,
    )
    return (theirs.NystromformerAttention if whole else theirs.NystromformerSelfAttention)(config)


def tokens(length: int = 64, batch: int = 3) -> Tensor:
    return torch.randn(batch, length, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("scale", [0.05, 1.0])
@pytest.mark.parametrize("conv", [1, 5, 65])
def test_weights_of_transformers(conv: int, scale: float) -> None:
    theirs, x = drawn(of_transformers(conv), scale), tokens()
    ours = NystromAttention.from_official(theirs.state_dict(), **SIZES)
    torch.testing.assert_close(ours(x, x, x, need_weights=False)[0], theirs(x)[0], rtol=1e-10, atol=1e-10)


def test_weights_of_a_whole_layer_of_transformers() -> None:
    theirs, x = drawn(of_transformers(5, whole=True), 0.3), tokens()
    ours: Any = NystromAttention.from_official(theirs.state_dict(), **SIZES)
    after: Any = theirs.output
    torch.testing.assert_close(
        after.LayerNorm(ours(x, x, x, need_weights=False)[0] + x), theirs(x)[0], rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("length", [64, 8, 120])
def test_weights_of_nystrom_attention(length: int, residual: bool) -> None:
    theirs, x = (
        published.NystromAttention(32, dim_head=8, heads=4, num_landmarks=8, residual=residual, residual_conv_kernel=9),
        tokens(length),
    )
    theirs = drawn(theirs, 0.5)
    ours = NystromAttention.from_official(theirs.state_dict(), **SIZES)
    expected = theirs(x)
    # The published module computes 1 in float32.
    torch.testing.assert_close(ours(x, x, x, need_weights=False)[0], expected, rtol=1e-6, atol=1e-6)
    assert (ours.conv is not None) == residual


def test_the_shared_norm_is_the_largest_of_the_batch() -> None:
    """One batch of one head is the iteration with its own norms; in a batch, the largest norm counts."""
    query, key, value = (torch.randn(3, 2, 24, 4, dtype=torch.float64) for _ in range(3))
    options: dict[str, Any] = {"num_landmarks": 6, "pinv_iterations": 3}
    single = [part[:1, :1] for part in (query, key, value)]
    alone = cmab_kernels.nystrom_attention(*single, pinv="shared", **options)
    torch.testing.assert_close(alone, cmab_kernels.nystrom_attention(*single, **options), rtol=1e-12, atol=1e-12)
    together = cmab_kernels.nystrom_attention(query, key, value, pinv="shared", **options)
    near, far = (part.unflatten(2, (6, 4)).mean(3) for part in (query, key))
    gamma = (near @ far.mT / 2).softmax(-1)
    inverse, one = gamma.mT / gamma.sum(-2).max() / gamma.sum(-1).max(), torch.eye(6, dtype=torch.float64)
    for _ in range(3):
        product = gamma @ inverse
        inverse = inverse @ (13 * one - product @ (15 * one - product @ (7 * one - product))) / 4
    expected = (query @ far.mT / 2).softmax(-1) @ inverse @ (near @ key.mT / 2).softmax(-1) @ value
    torch.testing.assert_close(together, expected, rtol=1e-11, atol=1e-11)
    assert torch.autograd.gradcheck(
        lambda *given: cmab_kernels.nystrom_attention(*given, num_landmarks=2, pinv="shared", pinv_iterations=2),
        [part[:, :1, :4, :2].clone().requires_grad_() for part in (query, key, value)],
    )
    assert cmab_kernels.nystrom_attention(query[:0], key[:0], value[:0], pinv="shared", **options).shape == (
        0,
        2,
        24,
        4,
    )


# ---- the convolution


def made(conv: int | None = 3, **options: Any) -> NystromAttention:
    torch.manual_seed(1)
    return NystromAttention(8, 2, batch_first=True, num_landmarks=2, conv_kernel_size=conv, **options).double().eval()


@pytest.mark.parametrize("landmarks", ["segments", "fixed"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_convolution_is_added_to_each_head(masked: bool, landmarks: str) -> None:
    module, plain = made(landmarks=landmarks), made(None, landmarks=landmarks)
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    if landmarks == "fixed":
        module.fit_landmarks(x)
    plain.load_state_dict({name: value for name, value in module.state_dict().items() if name != "conv.weight"})
    ignored = torch.tensor([[False] * 7, [False] * 4 + [True] * 3]) if masked else None
    hidden = x if ignored is None else x.masked_fill(ignored.unsqueeze(-1), torch.nan)
    value = F.linear(x, module.in_proj_weight[16:], module.in_proj_bias[16:]).unflatten(-1, (2, 4))  # (B, N, H, E)
    if ignored is not None:
        value = value.masked_fill(ignored[..., None, None], 0.0)
    kernel = module.conv.weight[:, 0, :, 0]  # type: ignore[union-attr]  # it has one
    before, after = F.pad(value, (0, 0, 0, 0, 1, 0))[:, :-1], F.pad(value, (0, 0, 0, 0, 0, 1))[:, 1:]
    convolved = before * kernel[:, 0, None] + value * kernel[:, 1, None] + after * kernel[:, 2, None]
    expected = plain(x, x, x, ignored, need_weights=False)[0] + convolved.flatten(2) @ module.out_proj.weight.T
    kept = torch.ones(2, 7, dtype=torch.bool) if ignored is None else ~ignored
    out, weights = module(hidden, hidden, hidden, ignored, average_attn_weights=False)
    torch.testing.assert_close(out[kept], expected[kept], rtol=1e-12, atol=1e-12)
    shown = (weights @ value.transpose(1, 2)).transpose(1, 2).flatten(
        2
    ) @ module.out_proj.weight.T + module.out_proj.bias
    torch.testing.assert_close(shown[kept], out[kept], rtol=1e-12, atol=1e-12)


def test_gradients_saves_copies_and_hooks() -> None:
    module, x = made(), torch.randn(1, 6, 8, dtype=torch.float64)
    seen: list[tuple[int, ...]] = []
    module.conv.register_forward_hook(lambda _, given, __: seen.append(tuple(given[0].shape)))  # type: ignore[union-attr]  # it has one
    module(x, x, x, need_weights=False)[0].square().sum().backward()
    assert module.conv.weight.grad.abs().min() > 0 and seen == [(1, 2, 6, 4)]  # type: ignore[union-attr]  # it has one
    other = copy.deepcopy(made())
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x, x, x)[0], module(x, x, x)[0])
    compiled = torch.compile(module, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x, need_weights=False)[0], module(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype: torch.dtype) -> None:
    module, x = made(), torch.randn(2, 9, 8, dtype=torch.float64)
    right = module(x, x, x, need_weights=False)[0]
    ours = module.to(dtype)(*[x.to(dtype)] * 3, need_weights=False)[0]
    torch.testing.assert_close(ours.double(), right, rtol=0.1, atol=0.05)


# ---- errors


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="conv_kernel_size: got 4, expected an odd number"):
        made(4)
    with pytest.raises(ValueError, match="conv_kernel_size: got 0, expected an int >= 1"):
        made(0)
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="value: got 5 tokens, expected 6, as many as query has"):
        made()(x, x[:, :5], x[:, :5], need_weights=False)
    for options, told in (
        ({"conv_kernel_size": 3}, "conv_kernel_size: got 3, expected None"),
        ({"pinv": "shared"}, "pinv: got 'shared'"),
    ):
        with pytest.raises(ValueError, match=told):
            ContinualNystromAttention(8, 2, num_landmarks=2, sequence_len=4, **options)
    with pytest.raises(ValueError, match="conv_kernel_size: got 3, expected no such option"):
        cmab_kernels.nn.replace_modules(
            nn.TransformerEncoderLayer(8, 2),
            {nn.MultiheadAttention: partial(NystromAttention, num_landmarks=2, conv_kernel_size=3)},
        )
    tensor = torch.randn(1, 1, 4, 4)
    with pytest.raises(ValueError, match="pinv: got 'shared', expected 'iterative' or 'exact'"):
        cmab_kernels.continual_nystrom_init(tensor, tensor, tensor, 2, pinv="shared")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda weights: MultiheadAttention(32, 4).state_dict(),
            "state_dict: got in_proj_bias, .* expected those of a module of transformers",
        ),
        (lambda weights: {}, "state_dict: got no names"),
        (lambda weights: weights | {"layer.weight": torch.ones(1)}, "state_dict: got also layer.weight"),
        (
            lambda weights: weights | {"value.weight": torch.ones(16, 32)},
            r"state_dict: got weights of shape \(80, 32\)",
        ),
        (lambda weights: [1], "state_dict: got a list, expected a dict"),
    ],
)
def test_weights_of_other_modules_are_refused(change: Any, told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        NystromAttention.from_official(change(of_transformers(5).state_dict()), **SIZES)

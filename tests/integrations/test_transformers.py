"""Models of `transformers` give the same results and gradients with `attn_implementation="cmab"` as with "eager" and
"sdpa"."""

from __future__ import annotations

import copy
import doctest
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cmab_kernels
from cmab_kernels.integrations import functional
from cmab_kernels.integrations import transformers as integration

transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")


@pytest.fixture(autouse=True)
def registered(threads: Callable[[int], None]) -> None:
    integration.register_transformers()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Record the shape of the queries of every call of our operator."""
    shapes: list[tuple[int, ...]] = []
    operator = functional.latent_attention

    def seen(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shapes.append(tuple(query.shape))
        return operator(query, *args, **kwargs)

    monkeypatch.setattr(functional, "latent_attention", seen)
    yield shapes


TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
PADDED = (torch.arange(9) < torch.tensor([[9], [6]])).long()


def ids(length: int = 9) -> Tensor:
    return torch.randint(3, 50, (2, length))


def vit() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig(**TINY, image_size=16, patch_size=4)
    return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def detr() -> tuple[nn.Module, dict[str, Any]]:
    """The second picture is narrower than the first, so that some of its pixels are padding."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=16,
        num_queries=5,
        **{
            f"{part}_{name}": size
            for part in ("encoder", "decoder")
            for name, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
        },
    )
    pixels = torch.ones(2, 32, 48, dtype=torch.long)
    pixels[1, :, 32:] = 0
    return transformers.DetrModel(config), {"pixel_values": torch.randn(2, 3, 32, 48), "pixel_mask": pixels}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.BertConfig(**TINY, vocab_size=50, max_position_embeddings=16)
    return transformers.BertModel(config, add_pooling_layer=False), {"input_ids": ids(), "attention_mask": PADDED}


def bert_decoder() -> tuple[nn.Module, dict[str, Any]]:
    """Return a decoder with causal self-attention,
    and cross-attention to the outputs of an encoder, some of them padding."""
    config = transformers.BertConfig(
        **TINY, vocab_size=50, max_position_embeddings=16, is_decoder=True, add_cross_attention=True
    )
    read = {"encoder_hidden_states": torch.randn(2, 9, 16), "encoder_attention_mask": PADDED}
    return transformers.BertModel(config, add_pooling_layer=False), {"input_ids": ids(4), "use_cache": False, **read}


def bart() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {
        f"{part}_{name}": size
        for part in ("encoder", "decoder")
        for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
    }
    config = transformers.BartConfig(vocab_size=50, d_model=16, max_position_embeddings=16, **sizes)
    return transformers.BartModel(config), {
        "input_ids": ids(),
        "attention_mask": PADDED,
        "decoder_input_ids": ids(4),
        "use_cache": False,
    }


def llama() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.LlamaConfig(**{**TINY, "num_attention_heads": 4}, num_key_value_heads=2, vocab_size=50)
    return transformers.LlamaModel(config), {"input_ids": ids(), "attention_mask": PADDED, "use_cache": False}


# name -> model and inputs, and how many of its calls of attention are fused
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Any]]], int]] = {
    "ViT": (vit, 2),
    "DETR": (detr, 6),
    "BERT": (bert, 2),
    "BERT as a decoder": (bert_decoder, 2),
    "BART": (bart, 2),
    "Llama": (llama, 0),
}


def results(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the last hidden state, and the gradients of its sum of squares."""
    out = model(**inputs).last_hidden_state
    if "attention_mask" in inputs and out.shape[1] == PADDED.shape[1]:
        out = out * PADDED[..., None]  # results at padded positions have no meaning
    model.zero_grad()
    (out**2).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def in_dtype(dtype: torch.dtype, inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: given.to(dtype) if isinstance(given, Tensor) and given.is_floating_point() else given
        for name, given in inputs.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, fused: list[tuple[int, ...]]) -> None:
    """Results agree to rounding. If gradients cancel, as in DETR, they agree as closely as torch's two ways do."""
    make, calls = MODELS[name]
    model, inputs = make()
    precise, precise_inputs = copy.deepcopy(model).double().eval(), in_dtype(torch.float64, inputs)
    precise.config._attn_implementation = "sdpa"  # `set_attn_implementation` refuses "sdpa" for the ResNet inside DETR
    exact, gradients = results(precise, precise_inputs)
    assert not fused
    precise.set_attn_implementation("eager")
    _, eager_gradients = results(precise, precise_inputs)
    precise.set_attn_implementation("cmab")
    out, our_gradients = results(precise, precise_inputs)
    assert len(fused) == calls
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert our_gradients.keys() == gradients.keys()
    assert len(gradients) > 10
    theirs = max(float((eager_gradients[each] - gradient).abs().max()) for each, gradient in gradients.items())
    for each, gradient in gradients.items():
        assert (our_gradients[each] - gradient).abs().max() <= 2 * theirs + 1e-12 * largest, each

    errors = {}
    for other in ("sdpa", "eager", "cmab"):
        model.eval().config._attn_implementation = other
        out, found = results(model, inputs)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        errors[other] = {each: float((found[each] - gradient).abs().max()) for each, gradient in gradients.items()}
    # for a single parameter, agreement may be chance
    theirs = max(error for other in ("sdpa", "eager") for error in errors[other].values())
    for each, error in errors["cmab"].items():
        assert error <= 2 * theirs + 1e-6 * largest, each


def test_models_are_made_with_it() -> None:
    model, _ = vit()
    made = transformers.AutoModel.from_config(copy.deepcopy(model.config), attn_implementation="cmab")
    assert made.config._attn_implementation == "cmab"


def test_training_with_dropout_is_that_of_sdpa(fused: list[tuple[int, ...]]) -> None:
    """Training with dropout has the bits of "sdpa": such calls go to it, with the same random numbers."""
    model, inputs = bert()
    outs = []
    for name in ("sdpa", "cmab"):
        model.train().set_attn_implementation(name)
        torch.manual_seed(1)
        outs.append(model(**inputs).last_hidden_state)
    assert torch.equal(*outs)
    assert not fused


@torch.no_grad()
def test_generation(fused: list[tuple[int, ...]]) -> None:
    """Generation works: one new query sees all keys, two query heads share a key head, and the second prompt has left
    padding.

    Without padding, torch runs calls with so few queries, because it is faster.
    """
    model, inputs = llama()
    causal = transformers.LlamaForCausalLM(model.config).eval()
    for mask, calls in ((torch.ones(2, 9, dtype=torch.long), 0), (PADDED.flip(0, 1), 2 * 4)):
        fused.clear()
        tokens, scores = [], []
        for name in ("sdpa", "cmab"):
            causal.set_attn_implementation(name)
            options = {
                "max_new_tokens": 5,
                "do_sample": False,
                "output_scores": True,
                "return_dict_in_generate": True,
                "pad_token_id": 0,
            }
            generated = causal.generate(inputs["input_ids"], attention_mask=mask, **options)
            tokens.append(generated.sequences)
            scores.append(torch.stack(generated.scores))
        assert torch.equal(*tokens)
        torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)
        assert len(fused) == calls
        assert {shape[1:3] for shape in fused} <= {(4, 1)}


# ---- the function itself, beside that of transformers


def heads(length: int = 5, keys: int = 7, groups: int = 4) -> list[Tensor]:
    shapes = ((2, 4, length, 8), (2, groups, keys, 8), (2, groups, keys, 8))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


ABSENT = torch.arange(7) >= torch.tensor([[7], [3]])
SEEN = ~ABSENT[:, None, None]
BY_QUERY = torch.ones(2, 1, 5, 7, dtype=torch.bool).tril()
ADDED = torch.zeros(2, 1, 5, 7).masked_fill(ABSENT[:, None, None], torch.finfo(torch.float32).min)

# mask, further options, whether it is fused
CALLS: dict[str, tuple[Tensor | None, dict[str, Any], bool]] = {
    "all keys": (None, {}, True),
    "a scale": (None, {"scaling": 0.7}, True),
    "padding": (SEEN.expand(2, 1, 5, 7), {}, True),
    "padding for all heads": (SEEN.expand(2, 4, 5, 7), {}, True),
    "padding of one row": (SEEN, {}, True),
    "causal": (None, {"is_causal": True}, False),
    # As in transformers, a given mask overrides is_causal.
    "causal with a mask": (
        SEEN.expand(2, 1, 5, 7),
        {"is_causal": True},
        True,
    ),
    "by query": (BY_QUERY, {}, False),
    "padding written out": (SEEN.expand(2, 1, 5, 7).contiguous(), {}, False),
    "by head": (BY_QUERY.expand(2, 4, 5, 7), {}, False),
    "to be added": (ADDED, {}, False),
    "padding to be added": (ADDED[:, :, :1].expand(2, 1, 5, 7), {}, True),
    "to be added for all queries": (ADDED[:, :, :1].expand(2, 1, 5, 7).clamp(min=-2), {}, False),
    "a bias": (None, {"position_bias": torch.linspace(0, 1, 35).reshape(1, 1, 5, 7)}, False),
    "dropout of 0": (None, {"dropout": 0.0}, True),
    "what models pass": (
        None,
        {"use_cache": False, "position_bias": None, "softcap": None, "output_attentions": False},
        True,
    ),
}


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("mask, options, is_fused", CALLS.values(), ids=CALLS)
def test_calls(
    mask: Tensor | None, options: dict[str, Any], is_fused: bool, groups: int, fused: list[tuple[int, ...]]
) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module, tensors = SimpleNamespace(is_causal=False, num_key_value_groups=4 // groups), heads(groups=groups)
    (expected, _), (ours, weights) = (
        each(module, *tensors, mask, **options) for each in (sdpa_attention_forward, integration.attention)
    )
    assert bool(fused) == is_fused
    assert weights is None
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    cotangent = torch.randn_like(ours)
    gradients = [torch.autograd.grad(out, tensors, cotangent) for out in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["s_aux", "sinks"])
def test_attention_sinks_are_refused(name: str) -> None:
    """GPT-OSS and others pass their own logits, which "sdpa" ignores:
    these models do not support it, but the name "cmab" passes."""
    rows = torch.randn(1, 2, 1, 4)
    with pytest.raises(ValueError, match=rf"^{name}: got a Tensor, expected None.*eager"):
        integration.attention(nn.Identity(), rows, rows, rows, None, **{name: torch.zeros(2)})


def test_modules_are_causal_unless_they_say_otherwise(fused: list[tuple[int, ...]]) -> None:
    """As for "sdpa", `is_causal` of the call has precedence over that of the module,
    and a single query sees all keys."""
    for module, options, length, is_fused in (
        (SimpleNamespace(), {}, 5, False),
        (SimpleNamespace(), {"is_causal": False}, 5, True),
        (SimpleNamespace(is_causal=False), {"is_causal": True}, 5, False),
        (SimpleNamespace(), {}, 1, True),
    ):
        fused.clear()
        integration.attention(module, *heads(length), None, **options)
        assert bool(fused) == is_fused


def test_a_query_without_keys_is_zero() -> None:
    mask = torch.zeros(2, 1, 5, 7, dtype=torch.bool)[:, :, :1].expand(2, 1, 5, 7)
    out, _ = integration.attention(SimpleNamespace(is_causal=False), *heads(), mask)
    assert not out.any()


def test_compiled() -> None:
    model, inputs = vit()
    model.eval().set_attn_implementation("cmab")
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager")(**inputs).last_hidden_state
        torch.testing.assert_close(compiled, model(**inputs).last_hidden_state, rtol=1e-5, atol=1e-5)


def test_perceiver_has_an_attention_of_its_own(fused: list[tuple[int, ...]]) -> None:
    """Perceiver never asks the attention interface: it accepts the name "cmab", and nothing changes."""
    heads_of = {"num_self_attention_heads": 2, "num_cross_attention_heads": 2}
    config = transformers.PerceiverConfig(
        num_latents=4, d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=1, **heads_of
    )
    model = transformers.AutoModel.from_config(config, attn_implementation="cmab").eval()
    assert model(torch.randn(1, 5, 16)).last_hidden_state.shape == (1, 4, 16)
    assert not fused


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "transformers.masking_utils"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"cmab_kernels\.integrations\.register_transformers .* pip install"):
        integration.register_transformers()


def test_doctest() -> None:
    import cmab_kernels

    assert doctest.testmod(integration, extraglobs={"cmab_kernels": cmab_kernels, "torch": torch}) == (0, 7)


def test_a_silent_fallback_warns_once_and_explain_has_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "_warned", set())
    config = transformers.LlamaConfig(**TINY, vocab_size=50, max_position_embeddings=16, num_key_value_heads=2)
    model = transformers.AutoModel.from_config(config, attn_implementation="cmab").eval()
    with pytest.warns(RuntimeWarning, match=r"LlamaAttention runs 'sdpa', because attention is causal") as seen:
        for _ in range(2):
            model(input_ids=ids())
    assert len([each for each in seen if "LlamaAttention" in str(each.message)]) == 1
    rows = cmab_kernels.explain(model, input_ids=ids())
    assert [(row.module, row.fused) for row in rows] == [(f"layers.{i}.self_attn", False) for i in range(2)]
    encoder, given = vit()
    encoder.set_attn_implementation("cmab")
    rows = cmab_kernels.explain(encoder, **given)
    assert len(rows) == 2 and all(row.fused for row in rows)

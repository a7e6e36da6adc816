"""`replace_modules` shares the weights, and the model's results stay the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cmab_kernels
from cmab_kernels.nn import InformerEncoderLayer, MultiheadAttention, MultiheadIntention, MultiheadSigmaIntention, replace_modules

MAPPING = {nn.MultiheadAttention: MultiheadAttention}
MASK = torch.arange(9) >= torch.tensor([[9], [6]])


def models() -> dict[str, tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor], int]]:
    """Return name -> (model, inputs, options, number of attention modules)."""
    factory = {"batch_first": True, "dtype": torch.float64}
    source, target = torch.randn(2, 9, 16, dtype=torch.float64), torch.randn(2, 4, 16, dtype=torch.float64)
    encoder_layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, **factory)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, **factory), 3)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, 0.0, **factory), 2)
    transformer = nn.Transformer(16, 2, 2, 2, 32, 0.0, **factory)
    causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    padding = {"src_key_padding_mask": MASK, "memory_key_padding_mask": MASK, "tgt_mask": causal}
    return {
        "encoder layer": (encoder_layer, (source,), {}, 1),
        "encoder": (encoder, (source,), {}, 3),
        "padded encoder": (encoder, (source,), {"src_key_padding_mask": MASK}, 3),
        "decoder": (decoder, (target, source), {"memory_key_padding_mask": MASK}, 4),
        "transformer": (transformer, (source, target), padding, 6),
    }


@pytest.mark.parametrize("fast_path", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", models())
def test_transformers_compute_what_they_did(name: str, training: bool, fast_path: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results stay the same, also in eval mode. There torch's layers run fused kernels, and padded inputs become nested tensors."""
    model, tensors, options, count = models()[name]
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.train(training)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast_path)
    try:
        with torch.set_grad_enabled(training):
            expected = model(*tensors, **options)
            assert replace_modules(model, MAPPING) == count
            result = model(*tensors, **options)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    seen = ~MASK if name == "padded encoder" else ...  # padded rows hold whatever torch's path leaves there
    torch.testing.assert_close(result[seen], expected[seen], rtol=1e-12, atol=1e-12)


def test_the_new_forward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = MultiheadAttention.forward
    monkeypatch.setattr(MultiheadAttention, "forward", lambda self, *a, **k: calls.append(self) or forward(self, *a, **k))
    model, tensors, options, count = models()["transformer"]
    replace_modules(model, MAPPING)
    model.train()(*tensors, **options)
    assert len(calls) == len(set(calls)) == count
    calls.clear()
    with torch.no_grad():
        model.eval()(*tensors, **options)
    assert len(calls) == 4  # those of the decoder; torch's encoder layers do without in eval mode
    calls.clear()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            model(*tensors, **options)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert len(calls) == count


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": 3, "vdim": 5}, {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.2}]
)
def test_parameters_are_the_very_same(options: dict) -> None:
    old = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.bfloat16, **options)
    model = nn.Sequential(old, nn.Linear(2, 2)).eval()
    old.out_proj.train()
    old.in_proj_bias = None if old.in_proj_bias is None else old.in_proj_bias.requires_grad_(False)
    names, parameters = zip(*model.named_parameters(), strict=True)
    assert replace_modules(model, MAPPING) == 1
    new = model[0]
    assert type(new) is MultiheadAttention
    assert [name for name, _ in model.named_parameters()] == list(names)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [module.training for module in model.modules()] == [False, False, True, False]
    for name in ("embed_dim", "num_heads", "dropout", "kdim", "vdim", "batch_first", "add_zero_attn", "head_dim", "_qkv_same_embed_dim"):
        assert getattr(new, name) == getattr(old, name), name


def test_a_shared_module_is_replaced_once_by_one() -> None:
    shared = nn.MultiheadAttention(16, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared, nn.MultiheadAttention(16, 2)]), "c": shared})
    assert replace_modules(model, MAPPING) == 2
    assert model["a"] is model["b"][0] is model["c"]
    assert model["a"] is not model["b"][1]
    assert replace_modules(model, MAPPING) == 0


def test_modules_that_hold_each_other() -> None:
    model, inner = nn.ModuleDict(), nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2)})
    model["inner"], inner["outer"] = inner, model
    assert replace_modules(model, MAPPING) == 1
    assert type(inner["attention"]) is MultiheadAttention


def test_subclasses_are_left_alone() -> None:
    class Special(nn.MultiheadAttention):
        pass

    model = nn.Sequential(Special(16, 2), MultiheadAttention(16, 2))
    assert replace_modules(model, MAPPING) == 0


def hooked(register: str) -> nn.Module:
    model = nn.Sequential(nn.MultiheadAttention(16, 2), nn.MultiheadAttention(16, 2))
    getattr(model[1], register)(lambda *_: None)
    return model


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_state_dict_post_hook",
        "register_state_dict_pre_hook",
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ],
)
def test_hooks_are_refused_and_the_model_untouched(register: str) -> None:
    model = hooked(register)
    with pytest.raises(ValueError, match="'1'"):
        replace_modules(model, MAPPING)
    assert [type(module) for module in model] == [nn.MultiheadAttention] * 2


def test_refusals() -> None:
    with pytest.raises(ValueError, match="is itself a MultiheadAttention: put it into a container"):
        replace_modules(nn.MultiheadAttention(16, 2), MAPPING)
    for mapping in ({nn.Linear: MultiheadAttention}, {nn.MultiheadAttention: nn.Linear}, {nn.MultiheadAttention: cmab_kernels.nn.CMAB}):
        with pytest.raises(TypeError, match="mapping"):
            replace_modules(nn.Sequential(), mapping)


@pytest.mark.parametrize(
    "mapping", [(), ("MultiheadAttention",), (nn.MultiheadAttention,), ([(nn.MultiheadAttention, MultiheadAttention)],)]
)
def test_what_is_no_mapping_is_told_what_is_needed(mapping: tuple) -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 2))
    with pytest.raises(
        TypeError, match=r"^`mapping` is .*\{torch\.nn\.MultiheadAttention: cmab_kernels\.nn\.MultiheadAttention\}.* is needed$"
    ):
        replace_modules(model, *mapping)
    with pytest.raises(TypeError, match=r"^`mapping` asks to replace 'MultiheadAttention'"):
        replace_modules(model, {"MultiheadAttention": MultiheadAttention})
    with pytest.raises(TypeError, match=r"^`model` is 'MultiheadAttention': a torch\.nn\.Module is needed$"):
        replace_modules("MultiheadAttention", MAPPING)
    assert type(model[0]) is nn.MultiheadAttention


INTENTION = {nn.MultiheadAttention: MultiheadIntention}
SIGMA = {nn.MultiheadAttention: MultiheadSigmaIntention}
INFORMER = {nn.TransformerEncoderLayer: InformerEncoderLayer}


def encoder(layers: int = 2, **options: object) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, **{"batch_first": True, "dtype": torch.float64, **options})
    model = nn.TransformerEncoder(layer, layers)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("mapping", [INTENTION, SIGMA, INFORMER], ids=["intention", "sigma", "informer"])
def test_torchs_fast_path_does_not_bypass_intention(mapping: dict[type[nn.Module], type[nn.Module]]) -> None:
    """In eval mode without gradients torch's encoder would make nested tensors of padded inputs, and its layers would run attention.

    Intention must run all the same.
    """
    model, source = encoder(), torch.randn(2, 9, 16, dtype=torch.float64)
    attention = model(source, src_key_padding_mask=MASK)
    assert replace_modules(model, mapping) == 2
    trained = model.train()(source, src_key_padding_mask=MASK)
    assert not torch.allclose(trained[~MASK], attention[~MASK], atol=1e-2)
    with torch.no_grad():
        for options in ({}, {"src_key_padding_mask": MASK}):
            expected = model.train()(source, **options)
            seen = ~MASK if options else ...
            torch.testing.assert_close(model.eval()(source, **options)[seen], expected[seen], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(expected[~MASK], trained[~MASK], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("new", [MultiheadIntention, MultiheadSigmaIntention])
@pytest.mark.parametrize("options", [{}, {"bias": False, "batch_first": True}, {"kdim": 3, "vdim": 5}])
def test_intention_takes_the_very_parameters(new: type[nn.Module], options: dict) -> None:
    old = nn.MultiheadAttention(16, 2, dtype=torch.bfloat16, **options)
    model = nn.Sequential(old).eval()
    expected = new(16, 2, dtype=torch.bfloat16, **options)
    expected.load_state_dict(old.state_dict())
    parameters = dict(old.named_parameters())
    assert replace_modules(model, {nn.MultiheadAttention: new}) == 1
    ours = dict(model[0].named_parameters())
    log_alpha = ours.pop("log_alpha")
    assert list(ours) == list(parameters)
    assert all(ours[name] is parameter for name, parameter in parameters.items())
    assert log_alpha.dtype == torch.bfloat16
    assert not log_alpha.is_meta
    assert not model[0].training
    query, points = torch.randn(3, 3, 16).bfloat16(), torch.randn(3, 3, 16).bfloat16()
    arguments = (query, points[..., : old.kdim], points[..., : old.vdim])
    assert torch.equal(model[0](*arguments)[0], expected(*arguments)[0])
    if new is MultiheadIntention and not options:
        with torch.no_grad():
            assert model[0].update(points).gram.device.type == "cpu"


def test_an_encoder_layer_becomes_an_informers() -> None:
    old = nn.TransformerEncoderLayer(16, 2, 32, 0.1, "gelu", 1e-3, True, True, dtype=torch.float64)
    old.linear1.register_forward_hook(lambda *_: None)  # stays with its module
    model = nn.ModuleList([old, old]).eval()
    parameters = dict(old.named_parameters())
    assert replace_modules(model, {**INFORMER, **INTENTION}) == 1
    assert model[0] is model[1]
    new = model[0]
    assert type(new) is InformerEncoderLayer
    assert {name for name, _ in new.named_parameters()} == {*parameters, "self_attn.log_alpha"}
    assert all(parameter is parameters.get(name, parameter) for name, parameter in new.named_parameters())
    assert (new.norm_first, new.norm1.eps, new.dropout1.p, new.self_attn.batch_first, new.training) == (True, 1e-3, 0.1, True, False)
    assert new.activation is old.activation
    built = InformerEncoderLayer(16, 2, 32, 0.1, "gelu", 1e-3, True, True, dtype=torch.float64).eval()
    built.load_state_dict(new.state_dict())
    source = torch.randn(2, 9, 16, dtype=torch.float64)
    assert torch.equal(new(source), built(source))


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_what_intention_lacks_is_refused_and_the_model_untouched(options: dict) -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 2), nn.MultiheadAttention(16, 2, **options))
    with pytest.raises(ValueError, match=f"'1'.*{next(iter(options))}"):
        replace_modules(model, INTENTION)
    assert [type(module) for module in model] == [nn.MultiheadAttention] * 2


def test_hooks_on_an_encoder_layers_attention_are_refused() -> None:
    model = encoder()
    model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"'layers\.1\.self_attn'"):
        replace_modules(model, INFORMER)
    assert [type(layer) for layer in model.layers] == [nn.TransformerEncoderLayer] * 2


def test_crossed_pairs_are_refused() -> None:
    crossed = ({nn.MultiheadAttention: InformerEncoderLayer}, {nn.TransformerEncoderLayer: MultiheadIntention})
    for mapping in (*crossed, {nn.TransformerEncoderLayer: nn.TransformerEncoderLayer}):
        with pytest.raises(TypeError, match="mapping"):
            replace_modules(nn.Sequential(), mapping)

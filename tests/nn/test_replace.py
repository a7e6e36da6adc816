"""`replace_modules` shares the weights, and the model's results stay the same."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cmab_kernels
from cmab_kernels.nn import (
    InformerEncoderLayer,
    MultiheadAttention,
    MultiheadIntention,
    MultiheadSigmaIntention,
    NystromAttention,
    Replacement,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    replace_modules,
)

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
def test_transformers_compute_what_they_did(
    name: str, training: bool, fast_path: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results stay the same, also in eval mode.

    In eval mode, torch's layers run fused kernels, and padded inputs become nested tensors.
    """
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
    seen = ~MASK if name == "padded encoder" else ...  # torch's path may leave any number in padded rows
    torch.testing.assert_close(result[seen], expected[seen], rtol=1e-12, atol=1e-12)


@pytest.fixture
def only_fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function. After it was called, torch's own attention and its fused encoder layer raise an error."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("torch's own code")

    def forbid() -> None:
        monkeypatch.setattr(nn.MultiheadAttention, "forward", refuse)
        monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", refuse)

    return forbid


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["encoder layer", "encoder", "padded encoder"])
def test_replaced_means_used(name: str, training: bool, only_fused: Callable[[], None]) -> None:
    """No call goes to torch: neither with padding, which torch's layers turn into a float mask, nor in torch's fast
    path in eval mode."""
    model, tensors, options, count = models()[name]
    model.train(training)
    with torch.set_grad_enabled(training):
        expected = model(*tensors, **options)
        assert replace_modules(model, MAPPING) == count
        only_fused()
        result = model(*tensors, **options)
        assert all(row.fused for row in cmab_kernels.explain(model, *tensors, **options))
    seen = ~MASK if name == "padded encoder" else ...
    torch.testing.assert_close(result[seen], expected[seen], rtol=1e-12, atol=1e-12)


def test_layers_replaced_as_a_whole_are_used_for_padded_inputs(only_fused: Callable[[], None]) -> None:
    """Our layers cannot read the nested tensors that a `TransformerEncoder` would make in eval mode."""
    model, tensors, options, count = models()["padded encoder"]
    model.eval()
    with torch.no_grad():
        expected = model(*tensors, **options)
        assert replace_modules(model, {nn.TransformerEncoderLayer: TransformerEncoderLayer}) == count
        only_fused()
        torch.testing.assert_close(model(*tensors, **options)[~MASK], expected[~MASK], rtol=1e-12, atol=1e-12)


def test_every_module_is_called_once() -> None:
    calls = []
    forward = MultiheadAttention.forward
    model, tensors, options, count = models()["transformer"]
    replace_modules(model, MAPPING)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            MultiheadAttention, "forward", lambda self, *a, **k: calls.append(self) or forward(self, *a, **k)
        )
        for training in (True, False):
            calls.clear()
            with torch.set_grad_enabled(training):
                model.train(training)(*tensors, **options)
            assert len(calls) == len(set(calls)) == count


def test_the_result_says_what_is_fused_and_what_is_torchs_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    model.decoder.layers[0].multihead_attn.dropout = 0.0
    result = replace_modules(model, MAPPING)
    assert capsys.readouterr().out == f"{result}\n"
    replace_modules(nn.Transformer(16, 2, 1, 1, 32), MAPPING, verbose=False)
    assert capsys.readouterr().out == ""
    assert isinstance(result, int) and result == 3
    names = ("encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn")
    assert result.modules == (
        *(Replacement(name, "MultiheadAttention", "dropout is on", None) for name in names[:2]),
        Replacement(names[2], "MultiheadAttention", None, None),
    )
    assert repr(result) == "3"
    lines = str(result).splitlines()
    assert lines[0] == "3 modules replaced"
    assert [line.split()[0] for line in lines[2:5]] == list(names)
    assert lines[2].endswith("torch's: dropout is on                fused if need_weights=False, no mask")
    assert "attention mask" in str(result) and "need_weights" in str(result)
    for again in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert (again, again.modules) == (3, result.modules)
    assert all(module.training for module in model.modules())


class Caller(nn.Module):
    """A model that calls its attention without `need_weights`, and one with it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        return self.part(x, x, x, **options)


@pytest.mark.parametrize(
    "mapping",
    [
        MAPPING,
        {nn.MultiheadAttention: MultiheadIntention},
        {nn.MultiheadAttention: partial(NystromAttention, num_landmarks=4)},
    ],
)
def test_the_default_of_need_weights_can_be_changed(mapping: Any) -> None:
    model, x = Caller().eval(), torch.randn(3, 16, 16)
    before = copy.deepcopy(model)
    replaced = replace_modules(model, mapping, need_weights=False)
    replace_modules(before, mapping)
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for module in (model, again):
        out, weights = module(x)
        assert weights is None and torch.equal(out, before(x, need_weights=False)[0])
        assert torch.equal(module(x, need_weights=True)[1], before(x)[1])
    assert model.part.need_weights is False and before.part.need_weights is True
    if mapping is MAPPING:
        assert str(replaced).count("fused if no mask") == 2 and "no mask" in str(copy.deepcopy(replaced))
        assert model.part.why_torch(x, x, x) is None and "matrix" in before.part.why_torch(x, x, x)
    with pytest.raises(TypeError, match=r"^need_weights: got"):
        replace_modules(Caller(), mapping, need_weights=torch.ones(2))


def test_the_result_speaks_for_layers_and_other_attentions() -> None:
    layers = {nn.TransformerEncoderLayer: TransformerEncoderLayer, nn.TransformerDecoderLayer: TransformerDecoderLayer}
    model = nn.Transformer(16, 2, 1, 1, 32)
    model.encoder.layers[0].activation = torch.tanh
    encoder, decoder = replace_modules(model, layers).modules
    assert encoder.training == "dropout is on" and "relu" in encoder.evaluation
    assert decoder == Replacement("decoder.layers.0", "TransformerDecoderLayer", "dropout is on", None)
    for mapping in (INTENTION, INFORMER):
        assert [each[2:] for each in replace_modules(encoder_of_floats(), mapping).modules] == [(None, None)] * 2
    with cmab_kernels.use_impl("reference"):
        assert (
            "no kernel"
            in replace_modules(nn.ModuleList([nn.TransformerEncoderLayer(16, 2)]), layers).modules[0].evaluation
        )
    wide = replace_modules(nn.ModuleList([nn.MultiheadAttention(600, 2)]), MAPPING)
    assert "no kernel" in wide.modules[0].evaluation
    assert "its own attention class" in str(replace_modules(nn.Sequential(), MAPPING))


def encoder_of_floats() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)


def test_attention_dropout_can_be_given_up_alone(only_fused: Callable[[], None]) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.5, batch_first=True), 2)
    replaced = replace_modules(model, {nn.MultiheadAttention: partial(MultiheadAttention, dropout=0.0)})
    assert all(each.training is None for each in replaced.modules)
    assert model.layers[0].dropout1.p == 0.5
    only_fused()
    model.train()(torch.randn(2, 9, 16), src_key_padding_mask=MASK)


# ---- explain


class TwoWays(nn.Module):
    """A model with torch's own attention, our attention, an attention that is never called, and a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.theirs, self.ours, self.idle = (
            nn.MultiheadAttention(16, 2),
            MultiheadAttention(16, 2),
            MultiheadIntention(16, 2),
        )
        self.special = type("Special", (nn.MultiheadAttention,), {})(16, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        theirs = self.theirs(x, x, x)[0] + self.special(x, x, x)[0]
        return theirs + self.ours(x, x, x)[0] + self.ours(x, x, x, need_weights=False, attn_mask=mask)[0]


def test_explain_says_of_each_module_what_a_call_ran() -> None:
    model, x = TwoWays(), torch.randn(9, 2, 16)
    before = model(x)
    rows = cmab_kernels.explain(model, x)
    assert [(row.module, row.kind, row.fused) for row in rows] == [
        ("theirs", "MultiheadAttention", False),
        ("ours", "MultiheadAttention", False),
        ("ours", "MultiheadAttention", True),
        ("idle", "MultiheadIntention", False),
        ("special", "Special", False),
    ]
    said = [row.reason for row in rows]
    for reason, part in zip(
        said, ("replace_modules replaces it", "need_weights", "operators run", "not called", "subclass"), strict=True
    ):
        assert part in reason
    assert "no attention mask" in cmab_kernels.explain(model, x, mask=torch.zeros(9, 9))[2].reason
    assert torch.equal(model(x), before)
    assert all("forward" not in module.__dict__ for module in model.modules())


class Copied(nn.Module):
    """Copies and pickles a part of itself in each call, and waits there for another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.pause, self.made = MultiheadAttention(16, 2), lambda: None, []

    def forward(self, x: Tensor) -> Tensor:
        self.made += [copy.copy(self.part), copy.deepcopy(self.part), pickle.loads(pickle.dumps(self.part))]
        out = self.part(x, x, x, need_weights=False)[0]
        self.pause()
        return out


def test_explain_leaves_nothing_on_a_module_that_two_threads_explain() -> None:
    """Nothing is left on copies that are made in the meantime either. The call that begins first ends first."""
    model, x, second_began, first_ended = Copied(), torch.randn(9, 2, 16), threading.Event(), threading.Event()
    before = dict(model.part.__dict__)

    def second() -> list[Any]:
        def pause() -> None:
            second_began.set()
            assert first_ended.wait(10)

        model.pause = pause
        return cmab_kernels.explain(model, x)

    with ThreadPoolExecutor(1) as thread:

        def pause() -> None:
            if not results:
                results.append(thread.submit(second))
            assert second_began.wait(10)

        results: list[Any] = []
        model.pause = pause
        rows = cmab_kernels.explain(model, x)
        first_ended.set()
        assert [row.fused for row in rows] == [row.fused for row in results[0].result()] == [True]
    for module in (model.part, *model.made):
        assert module.__dict__.keys() == before.keys()
        pickle.dumps(module)


@pytest.mark.parametrize("compiled", ["the model", "in place", "a part"])
def test_explain_of_a_compiled_model(compiled: str) -> None:
    model, x = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 16)).train(), torch.randn(9, 2, 16)
    replace_modules(model, {nn.MultiheadAttention: MultiheadAttention}, verbose=False)
    if compiled == "in place":
        model.compile(backend="eager")
    elif compiled == "a part":
        model[0] = torch.compile(model[0], backend="eager")  # type: ignore[assignment]  # torch calls it a function
    rows = cmab_kernels.explain(torch.compile(model, backend="eager") if compiled == "the model" else model, x)
    assert [row.reason for row in rows] == ["dropout is on"]
    assert model(x).shape == x.shape and (model._compiled_call_impl is not None) == (compiled == "in place")


def test_explain_of_what_streams() -> None:
    """If key and value are None, the query takes their place. The `forward_stream` of an encoder does not call its
    attentions."""
    tokens = torch.randn(1, 3, 16)
    (row,) = cmab_kernels.explain(cmab_kernels.nn.ContinualAttention(16, 2, batch_first=True, sequence_len=3), tokens)
    assert "need_weights" in row.reason
    layer = cmab_kernels.nn.ContinualEncoderLayer(16, 2, 16, batch_first=True, sequence_len=2)
    for row in cmab_kernels.explain(cmab_kernels.nn.ContinualEncoder(layer, 2).eval(), tokens):
        assert "forward_stream" in row.reason


def test_explain_sees_torchs_fast_path() -> None:
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    model.self_attn = MultiheadAttention.sharing(model.self_attn)  # replaced by hand, so no layer calls it
    with torch.no_grad():
        (row,) = cmab_kernels.explain(model, torch.randn(2, 9, 16))
    assert not row.fused and "torch's fused encoder layer" in row.reason


def test_explain_leaves_a_model_as_it_was_after_an_error() -> None:
    model = nn.Sequential(MultiheadAttention(16, 2))
    own = model[0].forward = functools.partial(model[0].forward)
    with pytest.raises(TypeError):
        cmab_kernels.explain(model, torch.randn(9, 16))
    assert model[0].forward is own
    with pytest.raises(ValueError, match="a module, or one of"):
        cmab_kernels.explain("nothing")


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"kdim": 3, "vdim": 5}, {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.2}],
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
    for name in (
        "embed_dim",
        "num_heads",
        "dropout",
        "kdim",
        "vdim",
        "batch_first",
        "add_zero_attn",
        "head_dim",
        "_qkv_same_embed_dim",
    ):
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


def test_added_attributes_are_kept() -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 2))
    model[0].temperature = 2.0
    replace_modules(model, MAPPING)
    assert type(model[0]) is not nn.MultiheadAttention and model[0].temperature == 2.0


def test_added_parts_are_refused() -> None:
    """Added parts raise an error. Otherwise they would silently be removed from the model and its state_dict."""
    for add in (lambda m: m.register_buffer("seen", torch.zeros(1)), lambda m: m.add_module("lora", nn.Linear(2, 2))):
        model = nn.Sequential(nn.MultiheadAttention(16, 2))
        add(model[0])
        with pytest.raises(ValueError, match=r"^model: got '0' with (seen|lora) added"):
            replace_modules(model, MAPPING)


def test_an_assigned_forward_is_refused() -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 2))
    model[0].forward = lambda *_: "patched"
    with pytest.raises(ValueError, match=r"^model: got '0' with a `forward` assigned"):
        replace_modules(model, MAPPING)


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match=r"^model: got a MultiheadAttention itself, expected .*; put it into a container"
    ):
        replace_modules(nn.MultiheadAttention(16, 2), MAPPING)
    for mapping in (
        {nn.Linear: MultiheadAttention},
        {nn.MultiheadAttention: nn.Linear},
        {nn.MultiheadAttention: cmab_kernels.nn.CMAB},
    ):
        with pytest.raises(TypeError, match="mapping"):
            replace_modules(nn.Sequential(), mapping)


@pytest.mark.parametrize(
    "mapping", [(), ("MultiheadAttention",), (nn.MultiheadAttention,), ([(nn.MultiheadAttention, MultiheadAttention)],)]
)
def test_what_is_no_mapping_is_told_what_is_needed(mapping: tuple) -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 2))
    with pytest.raises(
        TypeError,
        match=r"^mapping: got .*, expected .*\{torch\.nn\.MultiheadAttention: "
        r"cmab_kernels\.nn\.MultiheadAttention\}.*$",
    ):
        replace_modules(model, *mapping)
    with pytest.raises(TypeError, match=r"^mapping: got 'MultiheadAttention'"):
        replace_modules(model, {"MultiheadAttention": MultiheadAttention})
    with pytest.raises(TypeError, match=r"^model: got 'MultiheadAttention', expected a torch\.nn\.Module$"):
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
    """In eval mode without gradients, torch's encoder would make nested tensors of padded inputs, and its layers would
    run attention.

    Intention must run nevertheless.
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
    old.linear1.register_forward_hook(lambda *_: None)  # this stays on its module
    model = nn.ModuleList([old, old]).eval()
    parameters = dict(old.named_parameters())
    assert replace_modules(model, {**INFORMER, **INTENTION}) == 1
    assert model[0] is model[1]
    new = model[0]
    assert type(new) is InformerEncoderLayer
    assert {name for name, _ in new.named_parameters()} == {*parameters, "self_attn.log_alpha"}
    assert all(parameter is parameters.get(name, parameter) for name, parameter in new.named_parameters())
    assert (new.norm_first, new.norm1.eps, new.dropout1.p, new.self_attn.batch_first, new.training) == (
        True,
        1e-3,
        0.1,
        True,
        False,
    )
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


@pytest.mark.parametrize(
    "kind",
    [MultiheadAttention, MultiheadIntention, MultiheadSigmaIntention, partial(NystromAttention, num_landmarks=2)],
)
@pytest.mark.parametrize(
    "first, second, widths", [("k", "v", {"kdim": 3, "vdim": 3}), ("q", "k", {"kdim": 8, "vdim": 5})]
)
def test_weights_tied_inside_an_attention_stay_tied(kind: Any, first: str, second: str, widths: dict[str, int]) -> None:
    old = nn.MultiheadAttention(8, 2, batch_first=True, **widths)
    setattr(old, f"{second}_proj_weight", getattr(old, f"{first}_proj_weight"))
    box = nn.Sequential(old)
    replace_modules(box, {nn.MultiheadAttention: kind}, verbose=False)
    assert all(getattr(box[0], f"{name}_proj_weight") is getattr(old, f"{name}_proj_weight") for name in "qkv")


def test_parts_that_an_informers_layer_shares_stay_shared() -> None:
    old = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5)
    old.norm2, old.dropout2 = old.norm1, old.dropout1
    new = InformerEncoderLayer.sharing(old)
    assert new.norm2 is new.norm1 is old.norm1 and new.dropout2 is new.dropout1 is old.dropout1


def test_an_informers_layer_does_not_forget_a_penalty() -> None:
    box = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32))
    box[0].self_attn = MultiheadSigmaIntention(16, 2, alpha=0.2)
    with pytest.raises(
        ValueError, match=r"^model: '0' cannot be replaced by .*: self_attn: got a MultiheadSigmaIntention"
    ):
        replace_modules(box, {nn.TransformerEncoderLayer: InformerEncoderLayer}, verbose=False)


@pytest.mark.parametrize(
    "option", [{"kdim": 3}, {"bias": False}, {"add_bias_kv": True}, {"dtype": torch.float64}, {"num_heads": 4}]
)
def test_an_option_that_contradicts_the_weights_is_refused(option: dict[str, Any]) -> None:
    box, (name,) = nn.Sequential(nn.MultiheadAttention(16, 2)), option
    with pytest.raises(
        ValueError, match=rf"^model: '0' cannot be replaced by .*: {name}: got .*, expected no such option"
    ):
        replace_modules(box, {nn.MultiheadAttention: partial(MultiheadAttention, **option)}, verbose=False)
    assert type(box[0]) is nn.MultiheadAttention


def test_what_was_added_to_a_layer_is_not_lost_in_an_informers() -> None:
    box = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32))
    box[0].register_parameter("prompt", nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match=r"^model: got '0' with prompt added"):
        replace_modules(box, {nn.TransformerEncoderLayer: InformerEncoderLayer}, verbose=False)

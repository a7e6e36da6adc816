"""A changed part of a module is called, whether it was changed by adapters, hooks, parametrizations or tensor
subclasses."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import cmab_kernels.nn as ours
from cmab_kernels.nn.multihead import torchs_attention
from cmab_kernels.nn.multihead.projections import MultiheadProjections
from cmab_kernels.nn.stream import Keeper, Stream

C, H, N = 16, 2, 6
WINDOW: dict[str, Any] = {"sequence_len": N, "batch_first": True}
LAYER = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": True}
Run = Callable[[Any, Tensor, Tensor], Any]


def attended(module: Any, few: Tensor, many: Tensor) -> Tensor:
    return module(few, many, many, need_weights=False)[0]


def weighed(module: Any, few: Tensor, many: Tensor) -> Tensor:
    return module(few, many, many)[0]


def windows(module: Any, few: Tensor, many: Tensor) -> Tensor:
    return module.forward_stream(many)


def steps(module: Any, few: Tensor, many: Tensor) -> Tensor:
    module.clean_state()
    return module.forward_steps(many)


def single_steps(module: Any, few: Tensor, many: Tensor) -> Tensor:
    module.clean_state()
    return torch.stack([out for token in many.unbind(1) if (out := module.forward_step(token)) is not None])


def updated(module: Any, few: Tensor, many: Tensor) -> Tensor:
    state = module.update(many[:, :5], few, module.init_state(len(many))).state
    return module.update(many[:, 5:], few, state).latents


def removed(module: Any, few: Tensor, many: Tensor) -> Tensor:
    state = module.update(many, few, module.init_state(len(many))).state
    return module.remove(many[:, :3], few, state).latents


def encoded(module: Any, few: Tensor, many: Tensor) -> Tensor:
    return module.retrieve(few, module.encode([many[:, :5], many[:, 5:]]))


def predicted(module: Any, few: Tensor, many: Tensor) -> Tensor:
    return module.predict(few, module.update(many, state=module.init_state(len(many))))


def tokens(module: Any, few: Tensor, many: Tensor) -> Tensor:
    return module(many)


def causal(module: Any, few: Tensor, many: Tensor) -> Tensor:
    return module(many, src_mask=torch.full((many.shape[1],) * 2, -torch.inf, dtype=many.dtype).triu(1))


def pair(module: Any, few: Tensor, many: Tensor) -> Tensor:
    return module(few, many)


def context_first(module: Any, few: Tensor, many: Tensor) -> Tensor:
    return module(many, few)


def causal_pair(module: Any, few: Tensor, many: Tensor) -> Tensor:
    return module(
        few,
        many,
        tgt_mask=torch.full((few.shape[1],) * 2, -torch.inf, dtype=few.dtype).triu(1),
        memory_mask=few.new_zeros(3, 11),
    )


def chained(module: Any, few: Tensor, many: Tensor) -> Tensor:
    state = module.attend_state(few, many[:, :5]).state
    return module.attend_state(few, many[:, 5:], state).out


CONTINUAL = {"train": [windows], "eval": [windows, steps, single_steps]}
ENCODER = {"train": [tokens], "eval": [tokens, steps, single_steps]}
MODULES: dict[str, tuple[Callable[[], nn.Module], dict[str, list[Run]]]] = {
    "CMAB": (
        lambda: ours.CMAB(C, 4, H),
        {"train": [context_first, updated], "eval": [context_first, updated, removed]},
    ),
    "CMABStack": (
        lambda: ours.CMABStack(C, 4, H, 2),
        {"train": [context_first, updated, encoded], "eval": [context_first, updated, encoded, removed]},
    ),
    "CrossAttention": (lambda: ours.CrossAttention(C, H), {"train": [pair], "eval": [pair]}),
    "SelfAttention": (lambda: ours.SelfAttention(C, H), {"train": [tokens], "eval": [tokens]}),
    "FeedForward": (lambda: ours.FeedForward(C, 24), {"train": [tokens], "eval": [tokens]}),
    "LatentLayer": (lambda: ours.LatentLayer(C, H, 24), {"train": [pair], "eval": [pair]}),
    "MultiheadAttention": (
        lambda: ours.MultiheadAttention(C, H, batch_first=True),
        {"train": [attended, weighed, chained], "eval": [attended, weighed, chained]},
    ),
    "MultiheadIntention": (
        lambda: ours.MultiheadIntention(C, H, batch_first=True),
        {"train": [attended, weighed, predicted], "eval": [attended, weighed, predicted]},
    ),
    "MultiheadSigmaIntention": (
        lambda: ours.MultiheadSigmaIntention(C, H, batch_first=True),
        {"train": [attended], "eval": [weighed]},
    ),
    "NystromAttention": (
        lambda: ours.NystromAttention(C, H, batch_first=True, num_landmarks=3),
        {"train": [attended, weighed], "eval": [attended, weighed]},
    ),
    "ContinualAttention": (lambda: ours.ContinualAttention(C, H, **WINDOW), CONTINUAL),
    "ContinualNystromAttention": (lambda: ours.ContinualNystromAttention(C, H, num_landmarks=3, **WINDOW), CONTINUAL),
    "ContinualEncoderLayer": (lambda: ours.ContinualEncoderLayer(C, H, 24, 0.0, **WINDOW), ENCODER),
    "ContinualEncoderLayer, norm first": (
        lambda: ours.ContinualEncoderLayer(C, H, 24, 0.0, "gelu", norm_first=True, **WINDOW),
        ENCODER,
    ),
    "RetroactiveEncoderLayer": (lambda: ours.RetroactiveEncoderLayer(C, H, 24, 0.0, **WINDOW), ENCODER),
    "ContinualEncoder": (
        lambda: ours.ContinualEncoder(ours.ContinualEncoderLayer(C, H, 24, 0.0, **WINDOW), 2, nn.LayerNorm(C)),
        ENCODER,
    ),
    "ContinualEncoder, retroactive": (
        lambda: ours.ContinualEncoder(ours.RetroactiveEncoderLayer(C, H, 24, 0.0, **WINDOW), 2, nn.LayerNorm(C)),
        ENCODER,
    ),
    "InformerEncoderLayer": (lambda: ours.InformerEncoderLayer(C, H, **LAYER), {"train": [tokens], "eval": [tokens]}),
    "TransformerEncoderLayer": (
        lambda: ours.TransformerEncoderLayer(C, H, activation=nn.GELU(), **LAYER),
        {"train": [tokens, causal], "eval": [tokens, causal]},
    ),
    "TransformerEncoderLayer, norm first": (
        lambda: ours.TransformerEncoderLayer(C, H, norm_first=True, **LAYER),
        {"train": [tokens, causal], "eval": [tokens, causal]},
    ),
    "TransformerDecoderLayer": (
        lambda: ours.TransformerDecoderLayer(C, H, **LAYER),
        {"train": [pair, causal_pair], "eval": [pair, causal_pair]},
    ),
}
NO_PARTS = {
    "AttentionStream",
    "ContinualStream",
    "RecentStream",
    "RidgeStream",
    "WindowStream",
    "CircularPositionalEncoding",
}
"""Public modules that have no parts."""


def test_every_module_is_here() -> None:
    public = {
        name
        for name in ours.__all__
        if isinstance(getattr(ours, name), type) and issubclass(getattr(ours, name), nn.Module)
    }
    assert public == {name.partition(",")[0] for name in MODULES} | NO_PARTS


def leaves(module: nn.Module) -> list[str]:
    """Return the parts that have no parts themselves; for a stack, whose blocks are CMABs, some from each half of a
    block."""
    names = [
        name
        for name, part in module.named_modules()
        if name and not list(part.children()) and not isinstance(part, Keeper)
    ]
    some = ("blocks.1.compress.cross_attention", "blocks.0.retrieve.self_feed_forward")
    return [name for name in names if name.startswith(some)] if isinstance(module, ours.CMABStack) else names


class Twice(nn.Module):
    """A layer that replaces another, with weights of the same name, like a LoRA."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.calls = layer, 0

    def __getattr__(self, name: str) -> Any:
        return (
            getattr(super().__getattr__("layer"), name)
            if name in ("weight", "bias", "eps", "p")
            else super().__getattr__(name)
        )

    def forward(self, features: Tensor) -> Tensor:
        self.calls += 1
        return 2 * self.layer(features)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class TwiceTensor(Tensor):
    """A weight that works in a linear layer and a norm, and raises an error in all other uses, as quantised weights
    do."""

    calls = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function in (F.linear, F.layer_norm, torch.layer_norm):
                cls.calls += 1
                given = [2 * each.as_subclass(Tensor) if isinstance(each, TwiceTensor) else each for each in args]
                named = {
                    key: 2 * each.as_subclass(Tensor) if isinstance(each, TwiceTensor) else each
                    for key, each in (kwargs or {}).items()
                }
                return function(*given, **named)
            if function in (
                torch.stack,
                torch.cat,
                Tensor.chunk,
                Tensor.t,
                Tensor.__getitem__,
                Tensor.to,
                Tensor.matmul,
            ):
                raise NotImplementedError(f"TwiceTensor has no {function}")
        return super().__torch_function__(function, types, args, kwargs or {})


def twice_tensors(part: nn.Module) -> None:
    for name, parameter in [*part.named_parameters(recurse=False)]:
        part.register_parameter(name, nn.Parameter(parameter.detach().as_subclass(TwiceTensor)))


NO_PARAMETERS: dict[str, Callable[[nn.Module, str, Tensor], None]] = {
    "tensor": setattr,
    "buffer": nn.Module.register_buffer,
}
"""Kind of attribute that holds a weight in a replica or a frozen model -> how to set it."""


def changed(module: nn.Module, name: str, how: str) -> Callable[[], int]:
    """Double the result of a part of a module in one of these ways; return a function that counts the part's calls."""
    part: Any = module.get_submodule(name)
    parent, _, child = name.rpartition(".")
    calls: list[int] = []
    if how == "adapter":
        adapter = Twice(part)
        setattr(module.get_submodule(parent), child, adapter)
        return lambda: adapter.calls
    if how == "hook":
        part.register_forward_hook(lambda _part, _given, result: calls.append(1) or 2 * result)
    elif how == "forward":
        forward = part.forward
        part.forward = lambda features: calls.append(1) or 2 * forward(features)
    elif how == "parametrization":
        for each, _ in [*part.named_parameters()]:
            parametrize.register_parametrization(part, each, Doubled())
        return lambda: 1
    elif how in NO_PARAMETERS:
        for each, parameter in [*part.named_parameters()]:
            delattr(part, each)
            NO_PARAMETERS[how](part, each, 2 * parameter.detach())
        return lambda: 1
    else:
        before = TwiceTensor.calls
        twice_tensors(part)
        return lambda: TwiceTensor.calls - before
    return lambda: len(calls)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 3, C, dtype=torch.float64), torch.randn(2, 11, C, dtype=torch.float64)


def ran(module: nn.Module, run: Run, training: bool) -> tuple[Tensor, list[Tensor]]:
    """Return the result, and in training also the gradients of the parameters in their order, without those that are
    None."""
    few, many = inputs()
    module.train(training)
    with torch.set_grad_enabled(training):
        out = run(module, few, many)
    if training:
        module.zero_grad()
        out.sin().sum().backward()
    return out.detach(), [p.grad for p in module.parameters() if p.grad is not None]


WITHOUT_WEIGHTS = ["adapter", "hook", "forward"]
"""The ways to change a part that also work for a part without weights."""
WAYS = [*WITHOUT_WEIGHTS, "parametrization", "subclass", *NO_PARAMETERS]


def cases(module: nn.Module, runs: dict[str, list[Run]]) -> list[tuple[str, str, str, Run]]:
    """Return for each case a part, a way to change it, a mode and a run. All pairs of two of these occur, and for a
    module of few parts every combination."""
    calls = [(mode, run) for mode, ways in runs.items() for run in ways]
    weighty, found = with_weights(module), []
    for parts, ways in ((weighty, WAYS), ([name for name in leaves(module) if name not in weighty], WITHOUT_WEIGHTS)):
        for at, part in enumerate(parts):
            if len(parts) < len(calls):
                found += [(part, how, *call) for how in ways for call in calls]
            else:
                found += [
                    (part, ways[i % len(ways)], *calls[(at + i) % len(calls)])
                    for i in range(max(len(ways), len(calls)))
                ]
    return found


def with_weights(module: nn.Module) -> list[str]:
    return [name for name in leaves(module) if [*module.get_submodule(name).parameters()]]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", MODULES)
def test_a_changed_part_is_called(kind: str, how: str) -> None:
    make, runs = MODULES[kind]
    torch.manual_seed(1)
    made = make().double()
    for name, way, mode, run in cases(made, runs):
        if way != how:
            continue
        weights = [*made.get_submodule(name).parameters()]
        ours_, theirs = copy.deepcopy(made), copy.deepcopy(made)
        if weights:
            with torch.no_grad():
                for each in theirs.get_submodule(name).parameters():
                    each.mul_(2)
        else:  # a dropout of 0 or an activation
            changed(theirs, name, "hook")
        count = changed(ours_, name, how)
        expected, gradients = ran(theirs, run, mode == "train")
        result, found = ran(ours_, run, mode == "train")
        assert count(), (name, mode, run.__name__)
        torch.testing.assert_close(
            result, expected, rtol=1e-9, atol=1e-9, msg=lambda m, at=(name, mode, run.__name__): f"{at}: {m}"
        )
        lost = len(weights) if how in NO_PARAMETERS and mode == "train" else 0
        assert len(found) == len(gradients) - lost, (name, mode, run.__name__)


@pytest.mark.parametrize("kind", MODULES)
def test_the_cases_have_all_pairs(kind: str) -> None:
    make, runs = MODULES[kind]
    module = make()
    found = cases(module, runs)
    calls = {(mode, run) for mode, ways in runs.items() for run in ways}
    ways = {part: WAYS if part in with_weights(module) else WITHOUT_WEIGHTS for part in leaves(module)}
    assert {(part, how) for part, how, *_ in found} == {(part, how) for part in ways for how in ways[part]}
    assert {(part, *call) for part, _, *call in found} == {(part, *call) for part in ways for call in calls}
    assert {(how, *call) for _, how, *call in found} == {(how, *call) for how in WAYS for call in calls}


@pytest.mark.parametrize("kind", MODULES)
def test_hooks_of_all_kinds_run(kind: str) -> None:
    make, runs = MODULES[kind]
    made = make().double()
    for name in leaves(made):
        for mode, ways in runs.items():
            for run in ways:
                module, calls = copy.deepcopy(made), []
                part = module.get_submodule(name)
                part.register_forward_pre_hook(lambda *_, calls=calls: calls.append("before"))
                if mode == "train":
                    part.register_full_backward_hook(lambda *_, calls=calls: calls.append("backward"))
                    part.register_full_backward_pre_hook(lambda *_, calls=calls: calls.append("before backward"))
                ran(module, run, mode == "train")
                wanted = {"before", "backward", "before backward"} if mode == "train" else {"before"}
                assert set(calls) == wanted, (name, mode, run.__name__)


def negated(module: nn.Module) -> nn.Module:
    """Return a copy of the module with weights of the same values, whose memory holds the negatives of these values."""
    copied = copy.deepcopy(module)
    for each in copied.parameters():
        each.data = torch.complex(torch.zeros_like(each.data), -each.data).conj().imag
        assert each.is_neg()
    return copied


@pytest.mark.parametrize("kind", MODULES)
def test_weights_may_be_lazily_negated(kind: str) -> None:
    make, runs = MODULES[kind]
    made = make().double()
    for mode, ways in runs.items():
        for run in ways:
            result, found = ran(negated(made), run, mode == "train")
            expected, gradients = ran(copy.deepcopy(made), run, mode == "train")
            torch.testing.assert_close((result, found), (expected, gradients), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["CrossAttention", "SelfAttention", "FeedForward", "LatentLayer"])
def test_a_weight_that_a_load_left_on_the_meta_device_is_refused(kind: str) -> None:
    make, runs = MODULES[kind]
    weights = make().double().state_dict()
    few, many = inputs()
    for missing in weights:
        with torch.device("meta"):
            module = make().double()
        module.load_state_dict(
            {name: each for name, each in weights.items() if name != missing}, strict=False, assign=True
        )
        for grad in (True, False):
            with (
                torch.set_grad_enabled(grad),
                pytest.raises(ValueError, match=r"got device (meta, expected cpu|cpu, expected meta)"),
            ):
                runs["train"][0](module, few, many)


@pytest.mark.parametrize("kind", MODULES)
def test_a_forward_of_the_class_is_called(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some packages put adapters of all linear layers into torch's class; these adapters read attributes of a layer."""
    make, runs = MODULES[kind]
    torch.manual_seed(1)
    made, forward = make().double(), nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * getattr(self, "factor", 1))
    for name in leaves(made):
        if not isinstance(made.get_submodule(name), nn.Linear):
            continue
        for mode, ways in runs.items():
            for run in ways:
                ours_, theirs = copy.deepcopy(made), copy.deepcopy(made)
                ours_.get_submodule(name).factor = 2
                changed(theirs, name, "hook")
                torch.testing.assert_close(
                    ran(ours_, run, mode == "train"), ran(theirs, run, mode == "train"), rtol=1e-9, atol=1e-9
                )


CALLS: dict[Run, int] = {chained: 2, updated: 2, removed: 2, encoded: 2, predicted: 2, single_steps: 11}
"""The number of calls of a run that read a parameter of the module; other runs make one call."""


class Counted(nn.Module):
    """A parametrization that does not change the tensor, and counts its calls."""

    count = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.count += 1
        return weight * 1.0


def counted(module: nn.Module) -> list[Counted]:
    """Put a parametrization on each parameter of our attention or block itself, and on a feed-forward weight of a
    decoder."""
    owners: list[nn.Module] = [part for part in module.modules() if isinstance(part, MultiheadProjections | ours.CMAB)]
    places = [(owner, name) for owner in owners for name, _ in owner.named_parameters(recurse=False)]
    places += [(part.linear1, "weight") for part in module.modules() if isinstance(part, nn.TransformerDecoderLayer)]
    made = [Counted() for _ in places]
    for (owner, name), each in zip(places, made, strict=True):
        parametrize.register_parametrization(owner, name, each)
        each.count = 0  # registration reads the shape, which is one call
    return made


@pytest.mark.parametrize("kind", [kind for kind, (make, _) in MODULES.items() if counted(make())])
def test_a_parametrization_is_computed_once_a_call(kind: str) -> None:
    """In training each computation of `spectral_norm` is a step of its power iteration."""
    make, runs = MODULES[kind]
    for mode, ways in runs.items():
        for run in ways:
            module = make().double()
            expected, gradients = ran(module, run, mode == "train")
            parts = counted(module)
            result, found = ran(module, run, mode == "train")
            torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)
            assert len(found) == len(gradients), (mode, run.__name__)
            counts = [part.count for part in parts]
            assert 0 < min(counts) <= max(counts) == CALLS.get(run, 1), (mode, run.__name__, counts)


@pytest.mark.parametrize("hooked", [True, False])
def test_a_hook_of_a_block_with_parametrized_latents_gets_the_block(hooked: bool) -> None:
    stack = ours.CMABStack(C, 4, H, 2)
    parametrize.register_parametrization(stack.blocks[0], "latents", part := Counted())
    part.count, seen = 0, []
    if hooked:
        stack.blocks[0].register_forward_hook(lambda block, *_: seen.append(block))
    stack(torch.randn(2, N, C), torch.randn(2, 3, C))
    assert part.count == 1 and seen == [stack.blocks[0]] * hooked


def test_the_encodings_of_places_are_computed_once_a_call() -> None:
    module, tokens = ours.CircularPositionalEncoding(C, N, batch_first=True), torch.randn(2, N, C)
    parametrize.register_parametrization(module, "encodings", part := Counted())
    for count, call in enumerate((module, module.forward_stream, torch.no_grad()(module.forward_steps)), 2):
        call(tokens)
        assert part.count == count


def test_spectral_norm_is_torchs() -> None:
    theirs = nn.MultiheadAttention(C, H, batch_first=True, dtype=torch.float64)
    module = ours.MultiheadAttention.sharing(copy.deepcopy(theirs))
    for each in (theirs, module):
        torch.manual_seed(1)
        parametrizations.spectral_norm(each, "in_proj_weight")
    for _ in range(3):
        (out, found), (expected, gradients) = ran(module, attended, True), ran(theirs, attended, True)
        torch.testing.assert_close([out, *found], [expected, *gradients], rtol=1e-9, atol=1e-9)


def without_parameters(module: nn.Module, how: str) -> Any:
    for part in module.modules():
        for name, parameter in [*part.named_parameters(recurse=False)]:
            delattr(part, name)
            NO_PARAMETERS[how](part, name, parameter.detach())
    return module


@pytest.mark.parametrize("how", NO_PARAMETERS)
@pytest.mark.parametrize("kind", MODULES)
def test_a_module_may_have_no_parameters(kind: str, how: str) -> None:
    make, runs = MODULES[kind]
    module = make().double()
    frozen = without_parameters(copy.deepcopy(module), how)
    for run in runs["eval"]:
        expected, _ = ran(module, run, False)
        torch.testing.assert_close(ran(frozen, run, False)[0], expected, rtol=1e-9, atol=1e-9)
    frozen.load_state_dict(frozen.state_dict())
    assert all(each.weight_like.dtype == torch.float64 for each in frozen.modules() if isinstance(each, Stream))


@pytest.mark.parametrize("new", [ours.MultiheadAttention, ours.MultiheadIntention])
@pytest.mark.parametrize("theirs", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_weights_that_are_no_parameters_are_taken_over(theirs: Any, new: Any) -> None:
    few, many = inputs()
    given = (many,) if theirs is nn.TransformerEncoderLayer else (few, many)
    layer = theirs(C, H, **LAYER, dtype=torch.float64).eval()
    frozen = without_parameters(copy.deepcopy(layer), "tensor")
    for each in (layer, frozen):
        ours.replace_modules(each, {nn.MultiheadAttention: new}, verbose=False)
    torch.testing.assert_close(frozen(*given), layer(*given), rtol=1e-9, atol=1e-9)
    whole = nn.Sequential(without_parameters(theirs(C, H, **LAYER), "tensor"))
    assert ours.replace_modules(whole, {theirs: getattr(ours, theirs.__name__)}, verbose=False) == 1


class _Counted(nn.Module):
    """A parametrization that counts how often it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.times += 1
        return 2 * weight


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize(
    ("kind", "window"), [(ours.NystromAttention, {}), (ours.ContinualNystromAttention, {"sequence_len": 16})]
)
def test_landmarks_are_fitted_with_one_value_of_a_parametrization(
    kind: Any, window: dict[str, int], crossed: bool
) -> None:
    tokens = torch.randn(2, 2, 32, 16).unbind(0)[: 1 + crossed]
    plain, counted = kind(16, 2, num_landmarks=4, landmarks="fixed", batch_first=True, **window), _Counted()
    changed = copy.deepcopy(plain)
    parametrize.register_parametrization(changed, "in_proj_weight", counted)
    with torch.no_grad():
        plain.in_proj_weight.mul_(2)
    counted.times = 0
    plain.fit_landmarks(*tokens)
    changed.fit_landmarks(*tokens)
    assert counted.times == 1
    assert torch.equal(changed.landmark_queries, plain.landmark_queries)
    assert torch.equal(changed.landmark_keys, plain.landmark_keys)


def test_classes_of_attention_are_not_kept_alive() -> None:
    """One class per module, as `parametrize` makes them; a cache keeps only the last classes."""
    classes = []
    for i in range(torchs_attention.MOST_KINDS + 5):
        kind = type(f"Attention{i}", (nn.MultiheadAttention,), {})
        attention = kind(4, 1, batch_first=True)
        attention.out_proj.register_forward_hook(lambda *_: None)
        torchs_attention.call(attention, *[torch.randn(1, 2, 4)] * 3)
        classes.append(weakref.ref(kind))
        del kind, attention
    gc.collect()
    assert sum(each() is not None for each in classes) <= torchs_attention.MOST_KINDS


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, ours.TransformerEncoderLayer])
def test_hooks_of_attention_work_on_the_attention_when_out_proj_is_hooked(kind: Any) -> None:
    """Pruning sets the pruned weight in a pre-hook. A hook of the user counts calls of the module."""
    torch.manual_seed(0)
    layer, x = kind(16, 2, 24, dropout=0.0, batch_first=True).eval(), torch.randn(2, 5, 16)
    prune.l1_unstructured(layer.self_attn, "in_proj_weight", amount=0.4)
    layer.self_attn.out_proj.register_forward_hook(lambda *_: None)
    layer.self_attn.calls = 0
    layer.self_attn.register_forward_pre_hook(lambda module, _: setattr(module, "calls", module.calls + 1))
    before = layer(x)
    layer.self_attn.in_proj_weight_orig.data.mul_(2.0)
    after = layer(x)
    assert layer.self_attn.calls == 2
    assert (before - after).abs().max() > 0.1
    after.sum().backward()


@pytest.mark.parametrize("name", ["feed forward", "self-attention", "CMAB", "encoder"])
def test_a_norm_over_several_dimensions_is_called(name: str) -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(2, 5, 16), nn.LayerNorm((5, 16))
    nn.init.normal_(norm.weight)
    if name == "encoder":
        layer, right = (
            each(16, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
            for each in (ours.TransformerEncoderLayer, nn.TransformerEncoderLayer)
        )
        right.load_state_dict(layer.state_dict())
        layer.norm1 = right.norm1 = norm
        torch.testing.assert_close(layer(x), right(x))
    elif name == "CMAB":
        block = ours.CMAB(16, 5, 2)
        block.compress.cross_attention.context_norm = norm
        wrapped = copy.deepcopy(block)
        wrapped.compress.cross_attention.context_norm.register_forward_hook(lambda *_: None)
        torch.testing.assert_close(block(x, torch.zeros(2, 5, 16)), wrapped(x, torch.zeros(2, 5, 16)))
    else:
        part = ours.FeedForward(16, 32) if name == "feed forward" else ours.SelfAttention(16, 2)
        part.norm = nn.Sequential(norm)
        right = part(x)
        part.norm = norm
        torch.testing.assert_close(part(x), right)

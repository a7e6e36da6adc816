"""Calls are visible to `torch.jit.trace`, to fake and meta tensors,
and to `torch.export`, for every operator and module."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import cmab_kernels as ck
from cmab_kernels import nn as modules
from cmab_kernels.layers import block_stack
from cmab_kernels.runtime import backends

from .forked import Forks
from .layers.stack.test_suite import parameters

SHAPES = ((2, 2, 5, 8), (2, 2, 12, 8), (2, 2, 12, 3))
"""Shapes of query, key and value."""


def _projected(q: Tensor, k: Tensor, v: Tensor) -> Any:
    weights = k[0, :, :8].flatten(0, 1), k[1, :, :3].flatten(0, 1)
    return tuple(ck.projected_attention_state(q, k[:, 0], *weights, context_norm=(k[0, 0, 0], k[0, 0, 1], 1e-3)))


def _layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Both layers, one after the other, with the first rows of the keys as weights."""
    x, square, expand = k[:, 0], k[1, 0, :8], k[0, :, :8].flatten(0, 1)
    return ck.feed_forward_layer(ck.attention_layer(x, square, square.mT, square, square, num_heads=2), expand, square)


def _stack(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two blocks with the same parameters, which are parts of the keys."""
    rows, network = k[0].flatten(0, 1), ([k[0].flatten(0, 1)] * 4, [k[0, :, :, 0].flatten()] * 4, [k[0, 0].mT] * 4)
    block = parameters(k[1, 0, :4], [*rows, *rows[:4]], [k[1, 1, :8]] * 16, *network)
    return block_stack(q[:, 0], k[:, 0], 2 * block, num_heads=2)


def _remove(q: Tensor, k: Tensor, v: Tensor) -> Any:
    (out, lse), reliable = ck.remove_from_state(ck.attention_state(q, k, v), q, k[:, :, :2], v[:, :, :2])
    return out, lse, reliable


def _ridge_step(k: Tensor, v: Tensor) -> Any:
    solution, state = ck.ridge_step(ck.ridge_state(k[:, :, :2], v[:, :, :2]), k[:, :, 2:], v[:, :, 2:], 0.5)
    return *solution, *state


def _steps(init: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        first, last = ((k[:, :, s], k[:, :, s], v[:, :, s]) for s in (slice(0, 10), slice(10, 12)))
        out, state = step(init(*first), *last)
        return out, state.sums

    return run


def _system(k: Tensor) -> Tensor:
    return k.mT @ k + torch.eye(8, dtype=k.dtype, device=k.device)


OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "latent_attention": lambda q, k, v: ck.latent_attention(q, k, v),
    "attention_state": lambda q, k, v: tuple(
        ck.attention_state(q, k, v, state=ck.attention_state(q, k[:, :, :4], v[:, :, :4]))
    ),
    "projected_attention_state": _projected,
    "prefix_attention_states": lambda q, k, v: tuple(ck.prefix_attention_states(q, k, v, every=5)),
    "attention_layer": _layers,
    "feed_forward_layer": lambda q, k, v: ck.feed_forward_layer(
        k, k[0, :, :8].flatten(0, 1), k[1, 0, :8], norm=(k[0, 0, 0], k[0, 0, 1], 1e-3)
    ),
    "block_stack": _stack,
    "remove_from_state": _remove,
    "nystrom_attention": lambda q, k, v: ck.nystrom_attention(q, k, v, 3),
    "iterative_pinv": lambda q, k, v: ck.iterative_pinv((q @ q.mT).softmax(-1)),
    "continual_nystrom_step": _steps(
        lambda *t: ck.continual_nystrom_init(*t, num_landmarks=3), ck.continual_nystrom_step
    ),
    "continual_attention_step": _steps(ck.continual_attention_init, ck.continual_attention_step),
    "intention": lambda q, k, v: ck.intention(q, k, v, 0.5),
    "intention, dual": lambda q, k, v: ck.intention(q, k[:, :, :3], v[:, :, :3], 0.5),
    "sigma_intention": lambda q, k, v: ck.sigma_intention(q, k, v, 0.5),
    "sigma_intention, dual": lambda q, k, v: ck.sigma_intention(q, k[:, :, :3], v[:, :, :3], 0.5),
    "ridge_state": lambda q, k, v: tuple(ck.ridge_state(k, v)),
    "ridge_step": lambda q, k, v: _ridge_step(k, v),
    "prefix_ridge_states": lambda q, k, v: tuple(ck.prefix_ridge_states(k, v, every=5)),
    "remove_ridge": lambda q, k, v: tuple(ck.remove_ridge(ck.ridge_state(k, v), k[:, :, :2], v[:, :, :2])),
    "solve_ridge": lambda q, k, v: tuple(ck.solve_ridge(ck.ridge_state(k, v), 0.5)),
    "regularised_solve": lambda q, k, v: tuple(ck.regularised_solve(_system(k), k.mT @ v, 0.5)),
    "regularised_inverse": lambda q, k, v: ck.regularised_inverse(_system(k), 0.5),
}


class SelfAttended(nn.Module):
    """A module that calls an attention module on one sequence, and returns the output alone."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attention(tokens, tokens, tokens, need_weights=False)[0]


MODULES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "TransformerEncoderLayer": (lambda: modules.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 1),
    "TransformerDecoderLayer": (lambda: modules.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2),
    "CMAB": (lambda: modules.CMAB(16, num_heads=2, num_latents=4), 2),
    "CMABStack": (lambda: modules.CMABStack(16, num_latents=4, num_heads=2, depth=2), 2),
    "LatentLayer": (lambda: modules.LatentLayer(16, 2, 32), 2),
    "CrossAttention": (lambda: modules.CrossAttention(16, 2), 2),
    "SelfAttention": (lambda: modules.SelfAttention(16, 2), 1),
    "FeedForward": (lambda: modules.FeedForward(16, 32), 1),
    "InformerEncoderLayer": (lambda: modules.InformerEncoderLayer(16, 2, 32, batch_first=True), 1),
    "MultiheadAttention": (lambda: SelfAttended(modules.MultiheadAttention(16, 2, batch_first=True)), 1),
    "MultiheadIntention": (lambda: SelfAttended(modules.MultiheadIntention(16, 2, batch_first=True)), 1),
    "MultiheadSigmaIntention": (lambda: SelfAttended(modules.MultiheadSigmaIntention(16, 2, batch_first=True)), 1),
    "NystromAttention": (lambda: SelfAttended(modules.NystromAttention(16, 2, batch_first=True, num_landmarks=3)), 1),
    "ContinualAttention": (
        lambda: SelfAttended(modules.ContinualAttention(16, 2, batch_first=True, sequence_len=12)),
        1,
    ),
    "ContinualNystromAttention": (
        lambda: SelfAttended(
            modules.ContinualNystromAttention(16, 2, batch_first=True, sequence_len=12, num_landmarks=3)
        ),
        1,
    ),
    "ContinualEncoderLayer": (
        lambda: modules.ContinualEncoderLayer(16, 2, 32, 0.0, batch_first=True, sequence_len=9, num_landmarks=3),
        1,
    ),
    "ContinualEncoder": (
        lambda: modules.ContinualEncoder(
            modules.ContinualEncoderLayer(16, 2, 32, 0.0, batch_first=True, sequence_len=5), 2
        ),
        1,
    ),
    "RetroactiveEncoderLayer": (
        lambda: modules.RetroactiveEncoderLayer(16, 2, 32, 0.0, batch_first=True, sequence_len=9),
        1,
    ),
    "CircularPositionalEncoding": (lambda: modules.CircularPositionalEncoding(16, 12, batch_first=True), 1),
}
"""Maps the name of a module to (its constructor, its number of inputs of shape (B, N, 16))."""


def _inputs(seed: int = 0) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    return tuple(torch.randn(shape) for shape in SHAPES)


def _flat(result: Any) -> Iterator[Tensor]:
    for part in result if isinstance(result, tuple) else (result,):
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, tuple):
            yield from _flat(part)


def test_every_operator_is_traced_here() -> None:
    assert {name.split(",")[0] for name in OPERATORS} == backends.OPERATORS.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_traced_function_computes_what_it_traced(name: str, impl: str) -> None:
    """A traced function is right on inputs that were not used for the trace, and writes all memory: unwritten memory is
    NaN. It computes in float64 what is computed in float64."""
    function = OPERATORS[name]
    with ck.use_impl(impl):
        traced = torch.jit.trace(function, tuple(each.double() for each in _inputs()), check_trace=False)
        fresh = [each.double() for each in _inputs(1)]
        for ours, wanted in zip(_flat(traced(*fresh)), _flat(function(*fresh)), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-11, equal_nan=False)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_fake_tensors_have_the_shapes_of_real_ones(name: str, impl: str) -> None:
    function = OPERATORS[name]
    with ck.use_impl(impl):
        wanted = list(_flat(function(*_inputs())))
        with FakeTensorMode() as mode:
            fake = list(_flat(function(*(mode.from_tensor(t) for t in _inputs()))))
    assert all(isinstance(t, FakeTensor) for t in fake)
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in wanted]


@pytest.mark.parametrize("name", OPERATORS)
def test_meta_tensors_have_the_shapes_of_real_ones(name: str) -> None:
    """Meta tensors compute nothing, so there is no warning about the cost either."""
    wanted = list(_flat(OPERATORS[name](*_inputs())))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        meta = list(_flat(OPERATORS[name](*(t.to("meta") for t in _inputs()))))
    assert all(t.is_meta for t in meta)
    assert [(t.shape, t.dtype) for t in meta] == [(t.shape, t.dtype) for t in wanted]


def _module(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    make, inputs = MODULES[name]
    return make().eval(), tuple(torch.randn(2, 12, 16) for _ in range(inputs))


def test_every_module_is_exported_here() -> None:
    every = {
        name
        for name in modules.__all__
        if isinstance(getattr(modules, name), type) and issubclass(getattr(modules, name), nn.Module)
    }
    assert (
        every - {"AttentionStream", "RidgeStream", "ContinualStream", "RecentStream", "WindowStream"} == MODULES.keys()
    )


@pytest.mark.parametrize("name", MODULES)
def test_export_of_a_module(name: str) -> None:
    """The exported program computes the same as the module.

    Parameters record gradients, so that calls reach the dispatcher and the program contains the operators.
    """
    module, inputs = _module(name)
    program = torch.export.export(module, inputs, strict=False)
    fresh = tuple(torch.randn_like(t) for t in inputs)
    torch.testing.assert_close(program.module()(*fresh), module(*fresh))


@pytest.mark.parametrize("plain", [True, False])
def test_an_exported_update_takes_any_number_of_inputs(plain: bool) -> None:
    """An exported update takes any number of inputs, also if its projections have hooks and are called one by one."""

    class Update(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = modules.CMAB(8, 4, 2)

        def forward(self, inputs: Tensor, latents: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
            result = self.block.update(inputs, latents, ck.AttentionState(*state))
            return result.latents, *result.state

    update = Update()
    if not plain:
        update.block.compress.cross_attention.key.register_forward_hook(lambda *_: None)
    inputs = torch.randn(1, 100, 8), torch.randn(1, 3, 8), *update.block.init_state(1)
    with torch.no_grad():
        shapes = ({1: torch.export.Dim("n", max=2**20)}, None, (None, None))
        program = torch.export.export(update, inputs, dynamic_shapes=shapes, strict=False)
        more = torch.randn(1, 20_000, 8), *inputs[1:]
        torch.testing.assert_close(program.module()(*more), update(*more))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
def test_a_traced_module_computes_what_it_traced(name: str) -> None:
    module, inputs = _module(name)
    fresh = tuple(torch.randn_like(t) for t in inputs)
    with torch.no_grad():
        module, inputs, fresh = module.double(), [each.double() for each in inputs], [each.double() for each in fresh]
        traced = torch.jit.trace(module, inputs, check_trace=False)
        torch.testing.assert_close(traced(*fresh), module(*fresh), rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["CMAB", "FeedForward", "MultiheadIntention", "NystromAttention"])
def test_a_traced_module_with_trainable_parameters_is_saved_and_has_its_gradients(name: str) -> None:
    module, inputs = _module(name)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(module, inputs), file)
    file.seek(0)
    loaded, fresh = torch.jit.load(file), tuple(torch.randn_like(t) for t in inputs)
    ours, wanted = (each(*fresh) for each in (loaded, module))
    torch.testing.assert_close(ours, wanted)
    gradients = [
        torch.autograd.grad(out.sin().sum(), [*each.parameters()]) for out, each in ((ours, loaded), (wanted, module))
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_fake_or_meta_tensors(name: str) -> None:
    module, inputs = _module(name)
    wanted = module(*inputs).shape
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert module(*(mode.from_tensor(t) for t in inputs)).shape == wanted
    out = module.to("meta")(*(t.to("meta") for t in inputs))
    assert out.is_meta and out.shape == wanted


_FIRST_CALL = """
import torch
from cmab_kernels import nn
module = nn.{name}(16, 2, batch_first=True, {options})
x = torch.randn(2, 20, 16)
with torch.no_grad():
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")(x, x, x)[0]
    torch.testing.assert_close(compiled, module(x, x, x)[0])
"""


@pytest.mark.parametrize(("name", "options"), [("NystromAttention", "num_landmarks=4"), ("MultiheadIntention", "")])
def test_the_first_call_of_a_process_may_be_a_compiled_one(
    name: str, options: str, forks: Forks, tmp_path: Path
) -> None:
    """The first call imports implementations while the compiler traces; the compiler must see those that it did not
    know when it began."""
    program = _FIRST_CALL.format(name=name, options=options)
    ended = forks.run(tmp_path, program=program)
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.parametrize("train", [True, False])
def test_padding_on_the_meta_device(train: bool) -> None:
    """torch's encoder makes a float mask from a bool mask; on the meta device there are no values that show whether it
    may do so."""
    tokens, padding = torch.empty(2, 12, 16, device="meta"), torch.zeros(2, 12, dtype=torch.bool, device="meta")
    for kind in (modules.TransformerEncoderLayer, modules.InformerEncoderLayer):
        encoder = nn.TransformerEncoder(kind(16, 2, 32, batch_first=True, device="meta"), 2, enable_nested_tensor=False)
        assert encoder.train(train)(tokens, src_key_padding_mask=padding).shape == tokens.shape
    attention = modules.NystromAttention(16, 2, batch_first=True, num_landmarks=3, device="meta")
    assert (
        attention(tokens, tokens, tokens, key_padding_mask=torch.where(padding, -torch.inf, 0.0))[0].shape
        == tokens.shape
    )


@pytest.mark.parametrize("empty", [ck.empty_state, ck.empty_ridge], ids=["attention", "ridge"])
def test_an_empty_state_of_traced_extents(empty: Callable[..., Any]) -> None:
    """While `torch.jit.trace` runs, an extent of a tensor is a tensor."""

    def sums(tokens: Tensor) -> Tensor:
        return empty(tokens.shape[0], 2, tokens.shape[1], 3)[1] + tokens.sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trace warns of the comparisons of the checks
        traced = torch.jit.trace(sums, torch.randn(2, 4))
    assert traced(torch.randn(5, 4)).shape[0] == 5

"""`torch.onnx.export` translates every module and step, and onnxruntime computes what they compute here.

The operators are recorded as by any exporter, and translated by their definitions. States pass in and out.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cmab_kernels as ck
from cmab_kernels import nn as ours
from cmab_kernels.intention.variants import kernel_features

from .nn.test_dynamic_shapes import CASES, DIM, FEW, HEADS, WINDOW, Inputs, Output, tokens
from .nn.test_steps_with_states import MODULES as STEPS
from .nn.test_steps_with_states import step_of

pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")


class Function(nn.Module):
    """A function of tensors, or of a module and tensors."""

    def __init__(self, function: Callable[..., Any], module: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.module = function, module

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given) if self.module is None else self.function(self.module, *given)


def _update(module: Any, inputs: Tensor, latents: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    result = module.update(inputs, latents, ck.AttentionState(*state))
    return result.latents, *result.state


def _remove(module: Any, inputs: Tensor, latents: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    first = module.update(inputs, latents, ck.AttentionState(*state)).state
    result = module.remove(inputs[:, :2], latents, first)
    return result.latents, *result.state, result.reliable


def _learn(module: Any, rows: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    return (*module.update(rows, state=ck.RidgeState(*state)),)


def _exact_step(token: Tensor, *fields: Tensor) -> tuple[Tensor, ...]:
    state = ck.ContinualAttentionState(*fields, WINDOW)
    out, state = ck.continual_attention_step(state, token, token.sin(), token.cos())
    return out, state.queries, state.keys, state.values, state.position


def _nystrom_step(token: Tensor, *fields: Tensor) -> tuple[Tensor, ...]:
    state = ck.ContinualNystromState(*fields, WINDOW, 6, 0)
    out, new = ck.continual_nystrom_step(state, token, token.sin(), token.cos())
    return out, new.queries, new.keys, new.values, new.landmark_queries, new.landmark_keys, new.inverse, new.position


def _ridge_step(key: Tensor, value: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    solution, new = ck.ridge_step(ck.RidgeState(*state), key, value, 0.5)
    return *solution, *new


def _states_of_attention(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape, 4), torch.randn(*shape, dtype=torch.float64)


def _states_of_ridge(batch: int, heads: int, width: int, columns: int) -> tuple[Tensor, ...]:
    rows = torch.randn(batch, heads, 20, width), torch.randn(batch, heads, 20, columns)
    return (*ck.ridge_state(*rows),)


def _states_of_steps(init: Callable[..., Any], batch: int, **options: Any) -> tuple[Tensor, ...]:
    window = torch.randn(batch, 2, WINDOW, 8)
    return tuple(field for field in init(window, window.sin(), window.cos(), **options) if isinstance(field, Tensor))


def _heads(batch: int, length: int) -> Tensor:
    return torch.randn(batch, 2, length, 8)


MORE: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "MultiheadSigmaIntention": (
        lambda: Output(ours.MultiheadSigmaIntention(DIM, HEADS, batch_first=True)),
        lambda b, n: (tokens(b, n),),
    ),
    "ContinualEncoder": (
        lambda: ours.ContinualEncoder(ours.ContinualEncoderLayer(DIM, HEADS, 32, sequence_len=WINDOW, **FEW), 2),
        lambda b, _: (tokens(b, 2 * WINDOW),),
    ),
    "CircularPositionalEncoding": (
        lambda: ours.CircularPositionalEncoding(DIM, 64, batch_first=True),
        lambda b, n: (tokens(b, n),),
    ),
    "CMAB.update": (
        lambda: Function(_update, ours.CMAB(DIM, 8, HEADS)),
        lambda b, n: (tokens(b, n), tokens(1, 3)[0], *_states_of_attention(b, HEADS, 8)),
    ),
    "CMAB.remove": (
        lambda: Function(_remove, ours.CMAB(DIM, 8, HEADS)),
        lambda b, n: (tokens(b, n), tokens(1, 3)[0], *_states_of_attention(b, HEADS, 8)),
    ),
    "CMABStack.update": (
        lambda: Function(_update, ours.CMABStack(DIM, 8, HEADS, 2)),
        lambda b, n: (tokens(b, n), tokens(1, 3)[0], *_states_of_attention(2, b, HEADS, 8)),
    ),
    "MultiheadIntention.update": (
        lambda: Function(_learn, ours.MultiheadIntention(DIM, HEADS, batch_first=True)),
        lambda b, n: (tokens(b, n), *_states_of_ridge(b, HEADS, 4, 4)),
    ),
    "latent_attention": (lambda: Function(ck.latent_attention), lambda b, n: (_heads(b, 5), *[_heads(b, n)] * 2)),
    "nystrom_attention": (
        lambda: Function(lambda x: ck.nystrom_attention(x, x.sin(), x.cos(), 4)),
        lambda b, n: (_heads(b, n),),
    ),
    "intention": (
        lambda: Function(lambda q, k: ck.intention(q, k, k.sin(), 0.1)),
        lambda b, n: (_heads(b, 5), _heads(b, n + 16)),
    ),
    "intention, dual": (
        lambda: Function(
            lambda q, k: ck.intention(q, k[:, :, :5], k.sin()[:, :, :5], 0.1, weights=k[:, :, :5, 0].abs())
        ),
        lambda b, n: (_heads(b, 5), _heads(b, n)),
    ),
    "sigma_intention": (
        lambda: Function(lambda q, k: ck.sigma_intention(q, k, k.sin(), 0.1)),
        lambda b, n: (_heads(b, 5), _heads(b, n + 16)),
    ),
    "attention_state": (
        lambda: Function(lambda q, k, *s: (*ck.attention_state(q, k, k[..., :4], state=ck.AttentionState(*s)),)),
        lambda b, n: (_heads(b, 5), _heads(b, n), *_states_of_attention(b, 2, 5)),
    ),
    "prefix_attention_states": (
        lambda: Function(lambda q, k: (*ck.prefix_attention_states(q, k, k, every=4),)),
        lambda b, _: (_heads(b, 5), _heads(b, 20)),
    ),
    "prefix_ridge_states": (
        lambda: Function(lambda k: (*ck.prefix_ridge_states(k, k, every=4),)),
        lambda b, _: (_heads(b, 20),),
    ),
    "regularised_solve": (
        lambda: Function(lambda a, b: (*ck.regularised_solve(a @ a.mT, b, 0.5),)),
        lambda b, _: (torch.randn(b, 17, 17, dtype=torch.float64), torch.randn(b, 17, 3, dtype=torch.float64)),
    ),
    "continual_attention_step": (
        lambda: Function(_exact_step),
        lambda b, _: (_heads(b, 1), *_states_of_steps(ck.continual_attention_init, b)),
    ),
    "continual_nystrom_step": (
        lambda: Function(_nystrom_step),
        lambda b, _: (_heads(b, 1), *_states_of_steps(ck.continual_nystrom_init, b, num_landmarks=3)),
    ),
    "ridge_step": (
        lambda: Function(_ridge_step),
        lambda b, n: (_heads(b, n), _heads(b, n)[..., :3].contiguous(), *_states_of_ridge(b, 2, 8, 3)),
    ),
}


EVERY_TIME = ("CMAB.update", "continual_nystrom_step")
"""The cases that are always tested, of layers and of streams; each takes seconds."""


def session(program: Any) -> Any:
    file = io.BytesIO()
    program.save(file)
    return ort.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])


def computed(run: Any, given: tuple[Tensor, ...]) -> list[Tensor]:
    names = [each.name for each in run.get_inputs()]
    return [torch.from_numpy(out) for out in run.run(None, dict(zip(names, [t.numpy() for t in given], strict=True)))]


def listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [*results]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.thorough) for name in (*CASES, *MORE)]
)
def test_onnxruntime_computes_the_same(name: str) -> None:
    """Batches and lengths differ from those of the export, where they may differ."""
    make, inputs = {**CASES, **MORE}[name]
    torch.manual_seed(0)
    module = make().eval()
    first, *others = (inputs(batch, length) for batch, length in ((2, 8), (3, 9), (5, 64)))
    vary: Any = tuple(
        {
            dim: torch.export.Dim.DYNAMIC
            for dim, (size, other) in enumerate(zip(a.shape, b.shape, strict=True))
            if size != other
        }
        for a, b in zip(first, others[0], strict=True)
    )
    vary = (vary,) if isinstance(module, Function) else vary
    with torch.no_grad():
        run = session(torch.onnx.export(module, first, dynamic_shapes=vary, dynamo=True, verbose=False))
        for given in others:
            torch.testing.assert_close(computed(run, given), listed(module(*given)), rtol=1e-6, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("name", STEPS)
@torch.no_grad()
def test_steps_of_modules_go_on_in_onnxruntime(name: str) -> None:
    step, given = step_of(name)
    run = session(torch.onnx.export(step, given, dynamo=True, verbose=False))
    for _ in range(6):
        out, *state = computed(run, given)
        torch.testing.assert_close(out, step(*given)[0], rtol=1e-6, atol=2e-6)
        given = (torch.randn(2, 16), *state)


def _solve(*given: Tensor) -> tuple[Tensor, ...]:
    return (*ck.regularised_solve(*given),)


@pytest.mark.parametrize(
    "how", ["auto", *(pytest.param(how, marks=pytest.mark.thorough) for how in ("reference", "a program saved before"))]
)
def test_solves_that_fail(how: str) -> None:
    """The solutions of bad systems are NaN, and `info` reports each system."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 13, 13, generator=generator, dtype=torch.float64)
    gram, alpha = rows @ rows.mT, torch.tensor([0.5, 0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    gram[1] -= 100 * torch.eye(13)
    gram[2, 3, 3] = torch.nan
    gram[3] = 0.0
    gram[4] = torch.diag(torch.logspace(0, -15, 13))
    given = (gram, rows[..., :2].contiguous(), alpha)
    with torch.no_grad(), ck.use_impl("reference" if how == "reference" else "auto"):
        module: Any = Function(_solve)
        if how == "a program saved before":
            file = io.BytesIO()
            torch.export.save(torch.export.export(module, given), file)
            file.seek(0)
            module = torch.export.load(file)
        run = session(torch.onnx.export(module, given, dynamo=True, verbose=False))
    weight, info = computed(run, given)
    wanted, expected = _solve(*given)
    assert info.tolist() == expected.tolist() == [0, 1, 1, 1, 2]
    torch.testing.assert_close(weight[:4], wanted[:4], rtol=1e-9, atol=1e-9, equal_nan=True)
    residual = gram[4] @ weight[4] - given[1][4]
    assert residual.abs().max() < 1e-9


def test_other_exporters_keep_the_operators() -> None:
    """`run_decompositions`, and with it AOTInductor, keeps the operators, also after an export to ONNX."""
    program = torch.export.export(ours.FeedForward(8, 16), (torch.randn(2, 5, 8),))
    torch.onnx.export(program, dynamo=True, verbose=False)
    assert "cmab.feed_forward_layer" in str(program.run_decompositions().graph)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: ck.nystrom_attention(x, x, x, 2, pinv="exact"), "pinv: got 'exact' in an export to ONNX, expected"),
        (lambda x: kernel_features(x, x, 0.5), "model: got kernel_features in an export to ONNX, expected"),
    ],
    ids=["pinv", "kernel_features"],
)
def test_what_onnx_lacks_is_refused_by_name(call: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(Exception, match="Exception summary") as caught:
        torch.onnx.export(Function(call), (torch.randn(1, 2, 8, 4),), dynamo=True, verbose=False)
    assert message in str(caught.value)

"""Peers that are written here are right: hand-written gradients, and continual steps in eager torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from bench import devices, harness
from bench.scans import attention, intention, modules, plain_attention, projected
from bench.scans.case import COMPILED, compiled, passes
from bench.scans.continual import banded
from bench.scans.eager import (
    EagerBlocks,
    EagerExact,
    EagerExactBlocks,
    EagerNystrom,
    EagerRetroactive,
    Ring,
    eager_pinv,
)
from bench.scans.intention_peers import ALPHA, CHUNK, regression
from bench.scans.intention_state import errors_of_additions
from bench.scans.nystrom import iterated
from cmab_kernels import continual_nystrom_init, continual_nystrom_step
from cmab_kernels.nystrom.reference import iterative_pinv_reference


@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 3])
def test_gradients_by_hand_are_those_of_autograd(length: int):
    case = intention.layer(length, heads=2, width=4, backward=True)
    query, key, value, dout = (part.detach().double() for part in case.inputs(0))
    inputs = [part.requires_grad_() for part in (query, key, value)]
    system = key.mT @ key + ALPHA * torch.eye(4, dtype=torch.float64)
    out = query @ torch.linalg.solve_ex(system, key.mT @ value)[0]
    expected = out.detach(), *torch.autograd.grad(out, inputs, dout)
    assert harness.relative_error(regression(query, key, value, dout), expected) < 1e-12
    assert harness.relative_error(regression(query, key, value, dout[:0, 0, 0, 0]), expected[:1]) < 1e-12


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("keys", [2, 3000, 2311])
@pytest.mark.parametrize("form", plain_attention.FORMS)
def test_attention_in_plain_torch(form: str, keys: int, backward: bool, monkeypatch: pytest.MonkeyPatch):
    """Plain attention runs on all keys at once, in chunks, and in turn with several chunks each. If
    the keys cannot be divided into equal chunks, they are one chunk."""
    monkeypatch.setattr(plain_attention, "CACHED", 8 * 2 * 5 * 2000)
    inputs = attention.attention(2, 4, keys=keys, latents=5, backward=backward, dtype=torch.float64).inputs(0)
    expected = attention.exact(*inputs[:3], inputs.dout if backward else None)
    assert harness.relative_error(passes(plain_attention.plain(form), 3, backward)(inputs), expected) < 1e-12


@pytest.fixture
def quickly_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Functions are traced as ever, and their graphs are interpreted. Returns the graphs."""
    graphs: list[Any] = []
    compiler = torch.compile

    def counting(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(compiler, backend=counting))
    compiled.cache_clear()
    torch.compiler.reset()
    yield graphs
    compiled.cache_clear()
    torch.compiler.reset()


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("name", [name for name in plain_attention.PLAIN if name.endswith(COMPILED)])
def test_what_is_compiled_is_what_it_is_named_after(name: str):
    inputs = attention.attention(2, 4, keys=3000, latents=5).inputs(0)[:3]
    expected = plain_attention.plain(name.removesuffix(COMPILED))(*inputs)
    torch.testing.assert_close(plain_attention.plain(name)(*inputs), expected)


@pytest.mark.parametrize("fresh", [True, False])
def test_what_is_named_compiled_is_compiled_for_every_shape(quickly_compiled: list[Any], fresh: bool):
    """torch compiles a function for eight shapes, and then runs it as it is, which would flatter us."""
    run = plain_attention.plain(plain_attention.NAIVE + COMPILED)
    for keys in range(2, 12):
        case = attention.attention(2, 4, keys=keys, latents=5, every_peer=True)
        if fresh:
            harness.measure(case, [], budget=0.0)
        elif keys == 10:
            with pytest.raises(Exception, match="fullgraph"):
                run(*case.inputs(0)[:3])
            return
        run(*case.inputs(0)[:3])
        assert len(quickly_compiled) == keys - 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_chunks_of_half_precision_are_merged_in_float32(dtype: torch.dtype):
    case = attention.attention(2, 16, keys=20_000, latents=5, dtype=dtype)
    inputs = case.inputs(0)
    found = plain_attention.in_turn(*inputs[:3])
    assert (
        found.dtype == dtype
        and harness.relative_error([found], attention.exact(*inputs[:3])) < harness.ERROR_BOUND[dtype]
    )


def test_tf32_is_allowed_where_a_name_says_so():
    """The gradients too, which are computed after the forward pass."""
    seen: list[str] = []

    class Looking(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            seen.append(torch.get_float32_matmul_precision())
            return x.clone()

        @staticmethod
        def backward(context, dout):
            seen.append(torch.get_float32_matmul_precision())
            return dout

    x = torch.ones(2, requires_grad=True)
    for name in ("naive", "naive, tf32", "naive, tf32, compiled"):
        plain_attention.as_named(name, passes(Looking.apply, 1, True))((x, torch.ones(2)))
    assert (
        seen == ["highest", "highest", "high", "high", "high", "high"]
        and torch.get_float32_matmul_precision() == "highest"
    )


@pytest.mark.usefixtures("on_a_gpu")
def test_peers_over_many_keys_are_all_of_plain_torch():
    """A state, blocks that project, and the module have each form, in float32 and in tf32; the memory of a GPU decides,
    not the size."""
    cases = [
        attention.attention(keys=10**6, backward=True, every_peer=True),
        projected.projected(),
        modules.cross_attention(),
    ]
    for case in cases:
        assert all(any(name.endswith(plain) for name in case.implementations) for plain in plain_attention.PLAIN), case
        assert all(
            case.counted[name] in case.implementations for name in case.implementations if name.endswith(COMPILED)
        )
    assert {"flash-attention", "flashinfer", "scaled_dot_product_attention, math"} < cases[0].implementations.keys()
    half = attention.attention(dtype=torch.bfloat16, every_peer=True)
    assert (
        not any("tf32" in name for name in half.implementations) and "naive, in chunks in turn" in half.implementations
    )


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("make", [projected.projected, modules.cross_attention])
def test_peers_with_linear_layers_are_right(make, backward: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "_device", "cpu")
    inputs = make(heads=2, width=8, keys=2000, latents=5, backward=backward).inputs(0)
    monkeypatch.setattr(devices, "_device", "cuda")
    case = make(heads=2, width=8, keys=2000, latents=5, backward=backward)
    monkeypatch.setattr(devices, "_device", "cpu")
    plain = [name for name in case.implementations if "naive" in name and not name.endswith(COMPILED)]
    expected = case.expected(inputs)
    assert len(plain) == 6
    for name in plain:
        assert harness.relative_error(case.implementations[name](inputs), expected[name]) < 1e-5, name


def test_float64_sums_stay_exact_where_float32_sums_do_not():
    errors = errors_of_additions(3000)
    assert errors["ridge_state"] < 1e-14 < 1e-7 < errors["float32 sums in torch"]


def test_the_eager_stream_is_the_definition_however_long():
    """In float64, over several windows and with segments of two lengths."""
    n, m, width, heads = 11, 4, 6, 2
    tokens = torch.randn(3, 1, heads, 5 * n, width, dtype=torch.float64)
    first, after = [part[:, :, :n] for part in tokens], [part[:, :, n:] for part in tokens]
    given = (torch.randn(heads, m, width, dtype=torch.float64), torch.randn(heads, m, width, dtype=torch.float64))
    for landmarks in (None, given):
        state = continual_nystrom_init(*first, None if landmarks else m, landmarks=landmarks, scale=0.3)
        expected = continual_nystrom_step(state, *after, impl="reference").out[0]
        eager = EagerNystrom(*(part[0] for part in first), 0.3, m, landmarks, iterations=6)
        outs = [eager.step(*token) for token in zip(*(part[0].split(1, dim=1) for part in after), strict=True)]
        assert torch.allclose(torch.cat(outs, dim=1), expected, rtol=1e-12, atol=1e-12)
    eager = EagerRetroactive(*(part[0] for part in first), 0.3, m, given, 6)
    whole = [eager.step(*token) for token in zip(*(part[0].split(1, dim=1) for part in after), strict=True)][-1]
    state = continual_nystrom_init(*first, landmarks=given, scale=0.3)
    retroactive = continual_nystrom_step(state, *after, output="retroactive", impl="reference").out[0]
    assert torch.allclose(whole, retroactive, rtol=1e-12, atol=1e-12)
    blocks = EagerBlocks(*(part[0] for part in first), 0.3, given, iterations=6, block=4)
    outs = [blocks.step(*block) for block in zip(*(part[0].split(4, dim=1) for part in after), strict=True)]
    assert torch.allclose(torch.cat(outs, dim=1), expected, rtol=1e-12, atol=1e-12)


def test_a_ring_gives_a_token_with_the_one_that_it_evicts():
    keys = torch.arange(20.0).view(1, 20, 1)
    ring = Ring(keys[:, :3], 10 * keys[:, :3])
    for place in range(3, 20):
        pair, values = ring.push(keys[0, place : place + 1], 10 * keys[0, place : place + 1])
        assert pair.tolist() == [[place, place - 3]] and values.tolist() == [[10 * place, 1], [10 * (place - 3), 1]]
        rows, _, evicted = ring.window()
        assert rows[evicted].item() == place - 3 and sorted(rows.flatten().tolist()) == list(
            range(place - 3, place + 1)
        )


@pytest.mark.parametrize("shape", [(5, 5), (3, 5, 5)])
def test_the_eager_inverse_is_the_iteration(shape: tuple[int, ...]):
    matrix = torch.randn(shape, dtype=torch.float64)
    assert torch.allclose(eager_pinv(matrix, 6), iterative_pinv_reference(matrix, 6), rtol=1e-12)
    assert torch.allclose(iterated(matrix), iterative_pinv_reference(matrix, 6), rtol=1e-9)


def test_the_eager_exact_stream_forgets():
    tokens = torch.randn(3, 1, 2, 9, 4)
    stream = EagerExact(*(part[:, :, :4] for part in tokens[1:]))
    outs = [stream.step(*token) for token in zip(*(part[:, :, 4:].split(1, dim=2) for part in tokens), strict=True)]
    expected = banded(tokens[0][:, :, 4:], tokens[1], tokens[2], window=4)
    assert torch.allclose(torch.cat(outs, dim=2).double(), expected, atol=1e-6)
    blocks = EagerExactBlocks(*(part[:, :, :4] for part in tokens[1:]), block=3)
    outs = [
        blocks.step(*block)
        for block in zip(*(part[:, :, 4:].split(3, dim=2) for part in tokens[:, :, :, :7]), strict=True)
    ]
    assert torch.allclose(torch.cat(outs, dim=2).double(), expected[:, :, :3], atol=1e-6)

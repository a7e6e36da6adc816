"""Promises P1 and P3: a row of queries changes no bit of another row, in every operator that takes queries.

The kernels work on blocks of rows, with a row in each vector lane or in each row of a tile. A NaN, a rescaling or a
slow path in one row must not change the order of additions in the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.runtime.extension import load

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "infinity": lambda row: row.index_fill(-1, torch.tensor([0]), math.inf),
    "minus infinity": lambda row: torch.full_like(row, -math.inf),
    "nan": lambda row: row.index_fill(-1, torch.tensor([0]), math.nan),
    "zero": torch.zeros_like,
    "opposite": torch.neg,
    "huge": lambda row: 300 * row,
}
"""Functions that make the replacement of a row."""

FINITE = {name: CHANGES[name] for name in ("zero", "opposite", "huge")}


def _instruction_sets() -> list[str]:
    try:
        names = list(load().instruction_sets())
    except ImportError:
        return []
    return [*names, "amx_emulated"] if "avx512bf16" in names else names


@pytest.fixture(params=_instruction_sets())
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test for every instruction set of this processor, and for AMX in software."""
    monkeypatch.setenv("CMAB_KERNELS_ISA", request.param)
    assert load().instruction_set() == request.param
    return request.param


Operator = Callable[[Tensor], tuple[Tensor, ...]]
"""Maps queries (.., L, D) to results with a row for each query: (.., L) or (.., L, width)."""


def _rows(results: tuple[Tensor, ...], length: int, kept: Tensor) -> list[Tensor]:
    return [t.movedim(t.shape.index(length, 1), 0)[kept] for t in results]


def _check(operator: Operator, query: Tensor, row: int, changes: dict[str, Callable[[Tensor], Tensor]]) -> None:
    """Replace `row`, which has large logits, by each of the changes,
    and then all other rows: the others keep their bits."""
    length = query.shape[-2]
    query[..., row, :] *= 30
    others = torch.arange(length) != row
    clean = operator(query)
    for name, change in changes.items():
        changed = query.clone()
        changed[..., row, :] = change(query[..., row, :])
        for ours, wanted in zip(_rows(operator(changed), length, others), _rows(clean, length, others), strict=True):
            assert torch.equal(ours, wanted), name
    changed = 20 * torch.randn(query.shape, dtype=torch.float64).to(query.dtype)
    changed[..., row, :] = query[..., row, :]
    for ours, wanted in zip(_rows(operator(changed), length, ~others), _rows(clean, length, ~others), strict=True):
        assert torch.equal(ours, wanted), "all others"


def _differentiated(operator: Callable[..., tuple[Tensor, ...]], query: Tensor) -> tuple[Tensor, ...]:
    """Return the results, and the gradient with respect to the queries for incoming gradients of 1."""
    leaf = query.detach().requires_grad_()
    results = operator(leaf)
    (gradient,) = torch.autograd.grad(results, leaf, tuple(torch.ones_like(t) for t in results))
    return (*(t.detach() for t in results), gradient)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


# ---- latent attention


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "latents, keys, width", [(5, 150, 5), (31, 301, 8), (40, 1000, 16), (129, 270, 64), (61, 6000, 3)]
)
def test_attention(engine: str, dtype: torch.dtype, latents: int, keys: int, width: int) -> None:
    q, k, v = (_random(1, 2, n, width, dtype=dtype) for n in (latents, keys, keys))

    def attend(query: Tensor) -> tuple[Tensor, ...]:
        return _differentiated(lambda leaf: tuple(ck.attention_state(leaf, k, v, impl="native")), query)

    for row in {0, latents // 2, latents - 1}:
        _check(attend, q.clone(), row, CHANGES)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_attention_with_a_mask_and_a_state(engine: str, dtype: torch.dtype) -> None:
    q, k, v = (_random(2, 2, n, 8, dtype=dtype) for n in (40, 300, 300))
    mask = torch.rand(2, 300) < 0.3

    def attend(query: Tensor) -> tuple[Tensor, ...]:
        before = ck.attention_state(query, k[:, :, :100], v[:, :, :100], impl="native")
        return tuple(ck.attention_state(query, k, v, key_padding_mask=mask, state=before, impl="native"))

    _check(attend, q, 17, CHANGES)


# ---- Nyström attention and its streams: landmarks are given, because all rows share means of queries


@pytest.mark.parametrize("dtype", DTYPES)
def test_nystrom_attention(engine: str, dtype: torch.dtype) -> None:
    q, k, v = (_random(1, 2, n, 16, dtype=dtype) for n in (40, 100, 100))
    landmarks = (_random(2, 7, 16, dtype=dtype), _random(2, 7, 16, dtype=dtype))
    q = torch.cat([q, _random(1, 2, 60, 16, dtype=dtype)], 2)

    def attend(query: Tensor) -> tuple[Tensor, ...]:
        return _differentiated(
            lambda leaf: (ck.nystrom_attention(leaf, k, v, landmarks=landmarks, impl="native"),), query
        )

    _check(attend, q, 17, FINITE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_continual_nystrom_attention(engine: str, dtype: torch.dtype) -> None:
    """One query of the window changes; the outputs of all tokens of the window are compared."""
    q, k, v = (_random(1, 2, 43, 8, dtype=dtype) for _ in range(3))
    landmarks = (_random(2, 4, 8, dtype=dtype), _random(2, 4, 8, dtype=dtype))

    def attend(query: Tensor) -> tuple[Tensor, ...]:
        tokens = torch.cat([q[:, :, :3], query], 2), k, v
        state = ck.continual_nystrom_init(*(t[:, :, :40] for t in tokens), landmarks=landmarks)
        out, _ = ck.continual_nystrom_step(state, *(t[:, :, 40:] for t in tokens), output="retroactive", impl="native")
        return (out,)

    _check(attend, q[:, :, 3:].clone(), 17, FINITE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_landmarks(engine: str, dtype: torch.dtype) -> None:
    """A stream has a row of sums for each landmark; some are recomputed from the window while others are updated."""
    tokens = [_random(1, 2, 90, 8, dtype=dtype) for _ in range(3)]
    far = _random(2, 9, 8, dtype=dtype)

    def attend(near: Tensor) -> tuple[Tensor, ...]:
        state = ck.continual_nystrom_init(*(t[:, :, :40] for t in tokens), landmarks=(near, far))
        for start in range(40, 90):
            _, state = ck.continual_nystrom_step(state, *(t[:, :, start : start + 1] for t in tokens), impl="native")
        return (state.sums,)

    _check(attend, _random(2, 9, 8, dtype=dtype), 4, FINITE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_continual_attention(engine: str, dtype: torch.dtype) -> None:
    """A query of the first window changes; after thirty steps the other rows,
    one for each query of the window, are compared."""
    q, k, v = (_random(1, 2, 70, 8, dtype=dtype) for _ in range(3))

    def attend(query: Tensor) -> tuple[Tensor, ...]:
        tokens = torch.cat([q[:, :, :30], query], 2), k, v
        state = ck.continual_attention_init(*(t[:, :, :40] for t in tokens))
        for start in range(40, 70):
            now = (t[:, :, start : start + 1] for t in tokens)
            out, state = ck.continual_attention_step(state, *now, output="retroactive", impl="native")
        return (out,)

    _check(attend, q[:, :, 30:].clone(), 4, FINITE)


# ---- Intention


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", ["intention", "sigma_intention"])
def test_intention(engine: str, operator: str, dtype: torch.dtype) -> None:
    q, k, v = (_random(1, 2, n, 8, dtype=dtype) for n in (70, 300, 300))

    def attend(query: Tensor) -> tuple[Tensor, ...]:
        return _differentiated(lambda leaf: (getattr(ck, operator)(leaf, k, v, alpha=0.5, impl="native"),), query)

    _check(attend, q, 17, CHANGES)

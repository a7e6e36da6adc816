"""Promises P2 (accurate) and P3 (repeatable) for the dual form and for sigma-intention,
on random shapes, layouts and dtypes."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import oracles, row_error

Case = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
SEEDS = range(60)


def _dual(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    return ck.intention(q, k, v, alpha, form="dual", weights=weights, key_padding_mask=mask)


def _plain_dual(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    return ck.intention(q, k, v, alpha, form="dual")


def _sigma(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    return ck.sigma_intention(q, k, v, alpha, key_padding_mask=mask)


def _weighted_sigma(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    return ck.sigma_intention(q, k, v, alpha, weights=weights)


def _case(seed: int) -> Case:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch, heads, rows = draw.choice((2, 3, 5)), draw.choice((1, 2, 4)), draw.choice((1, 2, 5, 17, 50))
    keys, width = draw.choice((1, 2, 3, 7, 12, 16, 31, 33, 60)), draw.choice((4, 8, 17, 32, 64, 96, 128))
    dtype = draw.choice((torch.float64, torch.float32, torch.bfloat16))
    value_width = draw.choice((1, 3, 8, 17, 64))
    q, k, v = (
        torch.randn(batch, heads, n, w).to(dtype) for n, w in ((rows, width), (keys, width), (keys, value_width))
    )
    alpha, weights, mask = (
        torch.rand(batch, heads, dtype=torch.float64) + 0.2,
        torch.rand(batch, keys),
        torch.rand(batch, keys) < 0.2,
    )
    return draw.choice((_dual, _plain_dual, _sigma, _weighted_sigma)), (q, k, v, alpha, weights, mask)


def _bits(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the result and all gradients."""
    *leaves, mask = (t.detach().requires_grad_(t.is_floating_point()) for t in inputs)
    out = function(*leaves, mask)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
    return [t for t in (out.detach(), *grads) if t is not None]


def _same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _every_second(tensor: Tensor) -> Tensor:
    spread = torch.full((*tensor.shape[:2], 2 * tensor.shape[2], tensor.shape[3]), torch.nan, dtype=tensor.dtype)
    spread[:, :, ::2] = tensor
    return spread[:, :, ::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "step 2": _every_second,
}


def test_same_bits_whatever_the_threads(threads: Callable[[int], None]) -> None:
    for seed in SEEDS:
        function, inputs = _case(seed)
        alone = _bits(function, inputs)
        for number in (2, 4):
            threads(number)
            assert _same(_bits(function, inputs), alone), (seed, number)
        threads(1)


def test_same_bits_alone_and_in_a_batch(threads: Callable[[int], None]) -> None:
    for seed in SEEDS:
        function, inputs = _case(seed)
        whole, alone = _bits(function, inputs), _bits(function, tuple(t[1:2] for t in inputs))
        assert _same([t[1:2] for t in whole], alone), seed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_bits_in_any_layout(layout: str, threads: Callable[[int], None]) -> None:
    for seed in SEEDS:
        function, (q, k, v, *rest) = _case(seed)
        changed = tuple(LAYOUTS[layout](t) for t in (q, k, v))
        assert _same(_bits(function, (*changed, *rest)), _bits(function, (q, k, v, *rest))), seed


def test_same_bits_of_expanded_tensors() -> None:
    q, k, v = torch.randn(1, 2, 5, 64), torch.randn(1, 2, 12, 64), torch.randn(1, 2, 12, 8)
    spread = tuple(t.expand(3, -1, -1, -1) for t in (q, k, v))
    for function in (lambda *t: ck.intention(*t, 0.3), lambda *t: ck.sigma_intention(*t, 0.3)):
        assert torch.equal(function(*spread), function(*(t.contiguous() for t in spread)))


@pytest.mark.parametrize(
    "keys, width, alpha", [(513, 16, 0.1), (100, 8, 0.01), (16, 256, 0.1), (60, 64, 0.1), (7, 32, 1e-3)]
)
def test_rows_are_as_accurate_as_in_the_primal(impl: str, keys: int, width: int, alpha: float) -> None:
    """The error against float64 is at most three times that of torch's own float32 result,
    or 32 eps, whichever is larger."""
    q, k, v = torch.randn(2, 3, 20, width), torch.randn(2, 3, keys, width), torch.randn(2, 3, keys, 4)
    wanted = oracles.intention(q.double(), k.double(), v.double(), alpha)
    own = row_error(oracles.intention_in_torch(q, k, v, alpha), wanted).max()
    error = row_error(ck.intention(q, k, v, alpha, form="dual", impl=impl), wanted).max()
    assert error <= max(3 * float(own), 32 * torch.finfo(torch.float32).eps), float(error)


@pytest.mark.parametrize("keys", [5, 40])
def test_sigma_rows_are_accurate(impl: str, keys: int) -> None:
    q, k, v = torch.randn(2, 3, 20, 64), torch.randn(2, 3, keys, 64), torch.randn(2, 3, keys, 4)
    wide = k.double()
    system = wide @ wide.mT + 0.5 * torch.eye(keys, dtype=torch.float64)
    scores = torch.linalg.solve(system, wide @ q.double().mT).mT
    error = row_error(ck.sigma_intention(q, k, v, 0.5, impl=impl), scores.softmax(-1) @ v.double())
    assert error.max() <= 32 * torch.finfo(torch.float32).eps, float(error.max())


@pytest.mark.parametrize("keys, width, warns", [(300, 290, True), (290, 300, True), (20, 300, False)])
def test_wide_keys_and_many(keys: int, width: int, warns: bool) -> None:
    """Keys wider than any attention kernel takes run nevertheless, with a warning if the definition runs."""
    q, k, v = (torch.randn(1, 1, n, w, dtype=torch.float64) for n, w in ((3, width), (keys, width), (keys, 2)))
    for form in ("primal", "dual"):
        torch.testing.assert_close(
            ck.intention(q, k, v, 0.5, form=form), oracles.intention(q, k, v, 0.5), rtol=1e-10, atol=1e-10
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ck.sigma_intention(q, k, v, 0.5).isfinite().all()
    assert any("PyTorch reference" in str(warning.message) for warning in caught) == warns

"""Decay: old keys fade in every state, exactly, with gradients, and only if there is a state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels import nn

STEPS, CHUNK = 6, 5


def _points(width: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 3, 4, width, dtype=dtype), *(
        torch.randn(2, 3, STEPS * CHUNK, n, dtype=dtype) for n in (width, 5)
    )


def _streamed(q: Tensor, k: Tensor, v: Tensor, decay: object, **options: object) -> ck.AttentionState:
    state = None
    for key, value in zip(k.split(CHUNK, 2), v.split(CHUNK, 2), strict=True):
        state = ck.attention_state(q, key, value, state=state, decay=decay, **options)
    return state


def _ages() -> Tensor:
    """Return how often each key of a stream has faded, (N,)."""
    return torch.arange(STEPS - 1, -1, -1).repeat_interleave(CHUNK).double()


def _faded(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return out and lse of one softmax over all keys: the logit of a key of age t is S + t log(decay)."""
    logits = scale * q @ k.mT + _ages() * decay.log().unsqueeze(-1)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("shape", [(), (3, 1), (2, 3, 4), (4,)])
def test_attention_equals_a_softmax_of_shifted_logits(shape: tuple[int, ...], size: float) -> None:
    q, k, v = _points()
    decay = 0.05 + 0.95 * torch.rand(shape, dtype=torch.float64)
    out, lse = _faded(q, k, v, decay.expand(2, 3, 4), size)
    for given in (decay, decay.item()) if not shape else (decay,):
        state = _streamed(q, k, v, given, scale=size)
        torch.testing.assert_close(state.out, out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state.lse, lse, rtol=1e-12, atol=1e-12)


def test_ridge_equals_weights_on_all_keys() -> None:
    _, k, v = _points()
    weights = torch.rand(2, 3, STEPS * CHUNK, dtype=torch.float64)
    for decay in (0.7, torch.rand(3, dtype=torch.float64), torch.rand(2, 1, dtype=torch.float64)):
        state = stepped = ck.empty_ridge(2, 3, 3, 5)
        for key, value, weight in zip(k.split(CHUNK, 2), v.split(CHUNK, 2), weights.split(CHUNK, 2), strict=True):
            state = ck.ridge_state(key, value, state=state, decay=decay, weights=weight)
            (solution, _), stepped = ck.ridge_step(stepped, key, value, 0.1, decay=decay, weights=weight)
        each = torch.as_tensor(decay, dtype=torch.float64).expand(2, 3).unsqueeze(-1) ** _ages() * weights
        whole = (k * each.unsqueeze(-1)).mT @ k, (k * each.unsqueeze(-1)).mT @ v
        for found in (state, stepped):
            torch.testing.assert_close((found.gram, found.moment), whole, rtol=1e-12, atol=1e-12)
            assert found.count.eq(STEPS * CHUNK).all()
        assert torch.equal(solution, ck.solve_ridge(state, 0.1).weight)


def test_gradients_reach_the_decay() -> None:
    q, k, v = (t.requires_grad_() for t in _points(2))
    decay = (0.5 + 0.5 * torch.rand(3, 1, dtype=torch.float64)).requires_grad_()
    wanted = torch.autograd.grad(
        sum(t.sin().sum() for t in _faded(q, k, v, decay.expand(2, 3, 4), 1.0)), (decay, q, k, v)
    )
    state = _streamed(q, k, v, decay, scale=1.0)
    found = torch.autograd.grad(sum(t.sin().sum() for t in state), (decay, q, k, v))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)

    def sums(decay: Tensor) -> tuple[Tensor, ...]:
        state = ck.ridge_state(k, v)
        return tuple(ck.ridge_state(k[:, :, :2], v[:, :, :2], state=state, decay=decay))[:2]

    assert torch.autograd.gradcheck(sums, (decay.detach().squeeze(-1).requires_grad_(),))


def test_what_is_empty_stays_empty_and_one_changes_nothing() -> None:
    q, k, v = _points(dtype=torch.float32)
    empty = ck.empty_state(2, 3, 4, 5)
    still = ck.attention_state(q, k[:, :, :0], v[:, :, :0], state=empty, decay=0.5)
    assert still.lse.eq(-math.inf).all() and still.out.eq(0).all()
    whole = ck.attention_state(q, k, v)
    for given in (1, 1.0, torch.ones(2, 3, 4), torch.ones((), dtype=torch.float16)):
        same = ck.attention_state(q, k, v, state=whole, decay=given)
        assert all(map(torch.equal, same, ck.attention_state(q, k, v, state=whole)))
    for function, args in ((ck.attention_state, (q, k, v)), (ck.ridge_state, (k, v))):
        assert all(map(torch.equal, function(*args, decay=0.5), function(*args))), (
            "without a state there is nothing to fade"
        )
    tiny = ck.attention_state(q, k, v, state=whole, decay=5e-324)
    torch.testing.assert_close(tiny.out, whole.out, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision(dtype: torch.dtype) -> None:
    q, k, v = _points(dtype=dtype)
    decay = torch.tensor(0.75, dtype=dtype)
    state = _streamed(q, k, v, decay, scale=1.0)
    out, lse = _faded(q.double(), k.double(), v.double(), decay.double().expand(2, 3, 4), 1.0)
    eps = max(torch.finfo(dtype).eps, 1e-6)
    assert (
        state.out.dtype == torch.float32
        and (state.lse - lse).abs().max() < 4 * eps
        and (state.out - out).abs().max() < 8 * eps
    )


@pytest.mark.parametrize(
    "wrong",
    [
        0,
        -0.5,
        1.5,
        math.nan,
        math.inf,
        torch.tensor([0.5, 0.0, 1.0]),
        torch.tensor([0.5, 1.5, 1.0]),
        torch.tensor([0.5, math.nan, 1.5]),
    ],
)
def test_values_outside_0_to_1_are_refused(wrong: float | Tensor) -> None:
    q, k, v = (t.float() for t in _points())
    state, sums = ck.attention_state(q, k, v), ck.ridge_state(k, v)
    block, points, latents = nn.CMAB(6, 4, 3), torch.randn(2, 7, 6), torch.randn(2, 6)
    tensor = isinstance(wrong, Tensor)
    calls = (
        lambda: ck.attention_state(q, k, v, state=state, decay=wrong[:, None] if tensor else wrong),
        lambda: ck.attention_state(q, k, v, decay=wrong[:, None] if tensor else wrong),
        lambda: ck.ridge_state(k, v, state=sums, decay=wrong),
        lambda: ck.ridge_step(sums, k, v, 0.1, decay=wrong),
        lambda: block.update(points, latents, decay=wrong[:, None] if tensor else wrong),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"^decay: got .*, expected (a number|numbers) in \(0, 1\]"):
            call()


def test_wrong_kinds_and_shapes_are_refused() -> None:
    q, k, v = (t.float() for t in _points())
    with pytest.raises(
        ValueError, match=r"^decay: got shape \(2,\), expected a number, or a tensor that broadcasts to \(2, 3, 4\)"
    ):
        ck.attention_state(q, k, v, decay=torch.ones(2))
    with pytest.raises(
        ValueError, match=r"^decay: got shape \(2, 3, 1\), expected a number, or a tensor that broadcasts to \(2, 3\)"
    ):
        ck.ridge_state(k, v, decay=torch.ones(2, 3, 1))
    for wrong in ("0.5", [0.5], 0.5j, torch.ones(3, 1, dtype=torch.int64)):
        with pytest.raises(TypeError, match=r"^decay: got"):
            ck.attention_state(q, k, v, decay=wrong)
    with pytest.raises(ValueError, match=r"^decay: got device meta"):
        ck.attention_state(q, k, v, decay=torch.ones(3, 1, device="meta"))


def test_compiled_exported_and_mapped() -> None:
    q, k, v = _points(dtype=torch.float32)
    state, decay = ck.attention_state(q, k, v), torch.rand(3, 1)

    def both(decay: float | Tensor) -> tuple[Tensor, ...]:
        heads = decay.squeeze(-1) if isinstance(decay, Tensor) else decay
        faded = ck.attention_state(q, k, v, state=ck.AttentionState(*state), decay=decay)
        return *faded, *ck.ridge_state(k, v, state=ck.ridge_state(k, v), decay=heads)[:2]

    for given in (decay, 0.5):
        torch.testing.assert_close(torch.compile(both, fullgraph=True, backend="aot_eager")(given), both(given))
    assert torch.compile(both, fullgraph=True, backend="aot_eager")(2 * torch.ones(3, 1))[0].isnan().all(), (
        "not read in a trace"
    )

    class Model(torch.nn.Module):
        def forward(self, decay: Tensor) -> tuple[Tensor, ...]:
            return both(decay)

    torch.testing.assert_close(torch.export.export(Model(), (decay,)).module()(decay), both(decay))
    many = torch.rand(4, 3, 1)
    mapped = torch.func.vmap(both)(many)
    torch.testing.assert_close(tuple(part[2] for part in mapped), both(many[2]))


@pytest.mark.parametrize("stacked", [False, True])
def test_blocks(stacked: bool) -> None:
    """An update with decay equals an update of the faded state, for the module's own and for the caller's stream."""
    block = (nn.CMABStack(6, 4, 3, 2, dtype=torch.float64) if stacked else nn.CMAB(6, 4, 3, dtype=torch.float64)).eval()
    points, latents = torch.randn(2, 30, 6, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    with torch.no_grad():
        _, before = block.update(points[:, :20], latents)
        faded = ck.AttentionState(before.out, before.lse + math.log(0.25))
        wanted = block.update(points[:, 20:], latents, faded)
        for given in (0.25, torch.tensor(0.25), torch.full((3, 1), 0.25)):
            block.stream.state = before
            for found in (
                block.update(points[:, 20:], latents, decay=given),
                block.update(points[:, 20:], latents, before, decay=given),
            ):
                torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
            assert torch.equal(block.stream.state.lse, found.state.lse)
        with pytest.raises(TypeError, match=r"^state: got"):
            block.update(points, latents, 3, decay=0.5)
    decay = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    block.update(points[:, 20:], latents, before, decay=decay).latents.sum().backward()
    assert decay.grad.abs() > 0
    block.stream.state = None
    with torch.no_grad():
        first = block.update(points, latents, decay=0.5)
        assert torch.equal(first.latents, block.update(points, latents, block.init_state(2)).latents)


def test_modules_of_attention_and_intention() -> None:
    points, query = torch.randn(2, 30, 6), torch.randn(2, 4, 6)
    attention = nn.MultiheadAttention(6, 3, batch_first=True)
    _, before = attention.attend_state(query, points[:, :20])
    found = attention.attend_state(query, points[:, 20:], before, decay=0.25)
    wanted = attention.attend_state(query, points[:, 20:], ck.AttentionState(before.out, before.lse + math.log(0.25)))
    torch.testing.assert_close(tuple(found), tuple(wanted))
    module = nn.MultiheadIntention(6, 3, batch_first=True)
    with torch.no_grad():
        sums = module.update(points[:, :20])
        own, passed = module.update(points[:, 20:], decay=0.25), module.update(points[:, 20:], state=sums, decay=0.25)
        new = module.update(points[:, 20:], state=module.init_state(2))
    assert all(map(torch.equal, own, passed))
    torch.testing.assert_close(own.gram, 0.25 * sums.gram + new.gram)

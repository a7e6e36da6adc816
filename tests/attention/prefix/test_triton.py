"""The Triton kernels in Triton's interpreter. tests/test_interpreter.py runs this file with TRITON_INTERPRET=1.

The interpreter checks no bounds: inputs lie between margins of NaN, results between margins that must stay as they
were.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.attention.prefix import triton as kernels
from cmab_kernels.attention.prefix.contract import PrefixAttention, PrefixAttentionBackward
from cmab_kernels.attention.prefix.reference import prefix_attention_backward_reference, prefix_attention_reference
from cmab_kernels.attention.prefix.triton import backward, cut
from cmab_kernels.testing import between_margins, guarded_results

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"

EVERYTHING = (True,) * 7
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def margins() -> Iterator[None]:
    """Put results between margins of memory, and check at the end of the test that no kernel wrote to the margins."""
    with guarded_results():
        yield


def _check(
    latents: int,
    keys: int,
    width: int,
    value_width: int,
    every: int,
    dtype: torch.dtype,
    state: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    needs: tuple[bool, ...] = EVERYTHING,
    scale: float = 0.3,
    bias: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> None:
    """Compare states and gradients with the definition in float64."""
    shapes = (latents, width), (keys, width), (keys, value_width)
    inputs = tuple(between_margins(torch.randn(2, 2, *shape).to(dtype)) for shape in shapes)
    wide, before = tuple(t.double() for t in inputs), state or (None, None)
    wide_state = tuple(None if t is None else t.double() for t in before)
    faded = (None if bias is None else bias.double(), log_decay)
    out, lse = kernels.prefix_forward(PrefixAttention(*inputs, mask, *before, bias, log_decay, every, scale))
    right = prefix_attention_reference(*wide, mask, *wide_state, every, scale, *faded)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), right[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, right[1], rtol=tolerance, atol=tolerance)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = kernels.prefix_backward(
        PrefixAttentionBackward(
            dout,
            dlse,
            *inputs,
            mask,
            *before,
            out,
            lse,
            bias,
            log_decay,
            every,
            scale,
            needs,
        )
    )
    wanted = prefix_attention_backward_reference(
        dout.double(), dlse, *wide, mask, *wide_state, *right, every, scale, *faded
    )
    like = (*inputs, *before, bias, log_decay)
    for ours, theirs, given, need in zip(grads, wanted, like, needs, strict=True):
        assert ours.shape == (given.shape if given is not None and need else (0,))
        if given is not None and need:
            assert ours.dtype == given.dtype
            assert ours.isfinite().all() and ((ours - theirs).abs() <= 4 * tolerance * theirs.abs().max()).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "latents, keys, width, value_width, every", [(5, 37, 8, 8, 1), (3, 40, 9, 33, 20), (33, 17, 16, 16, 16)]
)
def test_states_and_gradients(
    latents: int, keys: int, width: int, value_width: int, every: int, dtype: torch.dtype
) -> None:
    _check(latents, keys, width, value_width, every, dtype)


@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize("masked", [False, True])
def test_several_runs_on_top_of_a_state(every: int, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks within a run and across runs; a row of the state is empty, and whole chunks are masked."""
    monkeypatch.setattr(cut, "PART", 32)
    for name in ("KEYS", "PREFIXES"):
        monkeypatch.setattr(backward, name, 32)
    state = (torch.randn(2, 2, 3, 7), torch.randn(2, 2, 3).double())
    state[0][:, :, 1], state[1][:, :, 1] = 0.0, -torch.inf
    mask = None
    if masked:
        mask = torch.rand(2, 70) < 0.3
        mask[0, :60] = True
    _check(3, 70, 8, 7, every, torch.float32, state, mask)


def _faded(keys: int, every: int, dtype: torch.dtype = torch.float32, strong: float = 1.0) -> dict[str, Tensor]:
    """Each key has a bias, some biases exclude their keys, and every chunk decays. All inputs lie between margins."""
    bias = torch.randn(2, 2, keys).masked_fill(torch.rand(2, 2, keys) < 0.1, -torch.inf)
    log_decay = -strong * torch.rand(2, 2, -(-keys // every), dtype=torch.float64)
    return {"bias": between_margins(bias.to(torch.promote_types(dtype, torch.float32))), "log_decay": log_decay}


@pytest.mark.parametrize(
    "keys, every, strong, dtype",
    [
        (21, 1, 0.5, torch.float64),
        (21, 1, 60.0, torch.float32),
        (53, 3, 60.0, torch.float64),
        (53, 3, 0.5, torch.float16),
        (40, 20, 0.5, torch.float32),
        (50, 40, 60.0, torch.float32),
    ],
)
def test_a_bias_and_decay(
    keys: int, every: int, strong: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With strong decays only the newest keys have weight, and their scores are far apart before they fade."""
    monkeypatch.setattr(cut, "PART", 32)
    for name in ("KEYS", "PREFIXES"):
        monkeypatch.setattr(backward, name, 16)
    state = (torch.randn(2, 2, 5, 7), torch.randn(2, 2, 5).double())
    state[0][:, :, 1], state[1][:, :, 1] = torch.nan, -torch.inf
    sums = torch.promote_types(dtype, torch.float32)
    given = _faded(keys, every, dtype, strong)
    _check(5, keys, 8, 7, every, dtype, (state[0].to(sums), state[1]), torch.rand(2, keys) < 0.3, **given)


@pytest.mark.parametrize("alone", ["bias", "log_decay"])
@pytest.mark.parametrize("every", [1, 50])
def test_a_bias_or_decay_alone(alone: str, every: int) -> None:
    keys = 20 if every == 1 else 70
    _check(5, keys, 8, 7, every, torch.float64, **{alone: _faded(keys, every, torch.float64)[alone]})


@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize("needed", range(6))
def test_only_the_gradients_that_are_asked_for(needed: int, stated: bool) -> None:
    state = (torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3).double()) if stated else None
    needs = tuple(of == needed for of in (0, 1, 2, 3, 3, 4, 5))
    _check(3, 20, 4, 4, 6, torch.float32, state, needs=needs, **_faded(20, 6))


@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_any_scale(scale: float) -> None:
    _check(3, 20, 4, 4, 6, torch.float64, scale=scale)


def test_a_mask_that_hides_all() -> None:
    """States without a key are empty, and no gradient is sent through them, not even a NaN."""
    rows = torch.randn(2, 2, 20, 4)
    mask = torch.ones(2, 20, dtype=torch.bool)
    out, lse = kernels.prefix_forward(PrefixAttention(rows[:, :, :3], rows, rows, mask, every=6, scale=0.5))
    assert out.eq(0).all() and lse.eq(-torch.inf).all()
    given = (
        torch.full_like(out, torch.nan),
        torch.ones_like(lse),
        rows[:, :, :3],
        rows,
        rows,
        mask,
        None,
        None,
        out,
        lse,
        None,
        None,
        6,
        0.5,
    )
    grads = kernels.prefix_backward(PrefixAttentionBackward(*given, EVERYTHING))
    assert all(grad.eq(0).all() for grad in grads)


def test_the_public_function_takes_them() -> None:
    rows = torch.randn(2, 2, 20, 4)
    states = (
        ck.prefix_attention_states(rows[:, :, :3], rows, rows, every=6, impl=impl) for impl in ("triton", "reference")
    )
    for ours, right in zip(*states, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
def test_huge_logits_in_any_order(order: str, dtype: torch.dtype) -> None:
    """Prefixes share a tile, each with its own maximum; gradients of values depend on the last bit of lse."""
    scores = 2.0 ** torch.linspace(20, 60, 37, dtype=torch.float64)
    scores = {"rising": scores, "falling": scores.flip(0), "mixed": scores[torch.randperm(37)]}[order].to(dtype)
    inputs = (torch.ones(1, 1, 1, 1, dtype=dtype), scores.view(1, 1, -1, 1), torch.randn(1, 1, 37, 5, dtype=dtype))
    wide = tuple(t.double() for t in inputs)
    out, lse = kernels.prefix_forward(PrefixAttention(*inputs, every=2, scale=0.25))
    right = prefix_attention_reference(*wide, None, None, None, 2, 0.25)
    dout, dlse = torch.randn_like(out), torch.zeros_like(lse)
    needs = (True, True, True, False, False, False, False)
    grads = kernels.prefix_backward(
        PrefixAttentionBackward(dout, dlse, *inputs, None, None, None, out, lse, None, None, 2, 0.25, needs)
    )
    wanted = prefix_attention_backward_reference(dout.double(), dlse, *wide, None, None, None, *right, 2, 0.25)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), right[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, right[1], rtol=tolerance, atol=0)
    torch.testing.assert_close(grads[2].double(), wanted[2], rtol=tolerance, atol=8 * tolerance)
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("every", [1, 3, 300])
@pytest.mark.parametrize("lse", [-torch.inf, torch.inf, torch.nan])
def test_a_state_that_is_not_clean(lse: float, every: int) -> None:
    """An empty row adds nothing, also in gradients; an lse that no keys can have makes the row NaN in every prefix."""
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (3, 40, 40))
    out, log = torch.randn_like(q), torch.randn(1, 2, 3, dtype=torch.float64)
    row = (0, 1, 2)
    out[row], log[row] = 0.0, -torch.inf
    bad_out, bad_log = out.clone(), log.clone()
    bad_out[row], bad_log[row] = torch.nan if lse == -torch.inf else 1.0, lse
    states = ((bad_out, bad_log), (out, log))
    (ours, ours_log), (right, right_log) = (
        kernels.prefix_forward(PrefixAttention(q, k, v, None, *s, every=every, scale=0.5)) for s in states
    )
    spoilt = torch.zeros_like(right_log, dtype=torch.bool)
    spoilt[0, 1, :, 2] = lse != -torch.inf
    assert torch.equal(ours.isnan().all(-1), spoilt) and torch.equal(ours_log.isnan(), spoilt)
    assert torch.equal(ours[~spoilt], right[~spoilt]) and torch.equal(ours_log[~spoilt], right_log[~spoilt])
    if lse == -torch.inf:
        dout, dlse = torch.randn_like(ours), torch.randn_like(ours_log)
        given = (dout, dlse, q, k, v, None, bad_out, bad_log, ours, ours_log)
        grads = kernels.prefix_backward(PrefixAttentionBackward(*given, None, None, every, 0.5, EVERYTHING))
        for grad, wanted in zip(grads, prefix_attention_backward_reference(*given, every, 0.5), strict=True):
            torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12)
        assert not grads[3][row].any() and not grads[4][row].any()

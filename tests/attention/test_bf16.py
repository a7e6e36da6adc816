"""The bfloat16 CPU kernels: AVX512-BF16, AMX if there is one, and AMX's data flow on tiles in software, compared with
the definition in float64.

Rounding to bfloat16 can hide an extra key. So there are exact tests in addition to the error bounds. If weights and
products are representable, counts and gradients must be right to the last bits of float32, for every number of keys and
any mask.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.runtime.extension import load
from cmab_kernels.testing import LAWS, bound, oracles, row_error

WIDTHS = [(1, 1), (2, 3), (3, 5), (7, 17), (16, 8), (33, 31), (48, 64), (65, 100), (129, 15), (255, 256), (256, 255)]


def _use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the body on one engine, or skip the test if this processor does not have it; all engines need AVX512-BF16."""
    extension = pytest.importorskip("cmab_kernels._C", reason="the extension was not built")
    needed = "amx" if name == "amx" else "avx512bf16"
    if needed not in extension.instruction_sets():
        pytest.skip(f"this processor has no {needed}, only {', '.join(extension.instruction_sets())}")
    monkeypatch.setenv("CMAB_KERNELS_ISA", name)
    assert extension.instruction_set() == name


@pytest.fixture(params=["avx512bf16", "amx", "amx_emulated"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test once on each engine."""
    _use(request.param, monkeypatch)
    return request.param


def _state(*inputs: Tensor, **options: object) -> ck.AttentionState:
    return ck.attention_state(*inputs, impl="native", **options)  # type: ignore[arg-type]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def _integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape).bfloat16()


def _check_gradients(
    state: ck.AttentionState, inputs: Sequence[Tensor], mask: Tensor | None = None, offsets: Tensor | None = None
) -> None:
    """Check that each row of a gradient is within four roundings of bfloat16, relative to the terms that it adds up."""
    dout, dlse = _random(*state.out.shape).float(), torch.randn(state.lse.shape, dtype=torch.float64)
    dlse = torch.where(state.lse.isinf(), 0.0, dlse)
    mine = torch.autograd.grad((state.out, state.lse), inputs, (dout, dlse))
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected = oracles.attention(*wide, mask, offsets)
    right = torch.autograd.grad(expected, wide, (dout.double(), dlse), allow_unused=True)
    for name, ours, theirs in zip("qkv", mine, right, strict=True):
        assert ours.dtype == torch.bfloat16 and not ours.isnan().any()
        size = theirs.norm(dim=-1).clamp(min=0.05 * float(theirs.norm(dim=-1).max()) + 1e-30)
        error = (ours.double() - theirs).norm(dim=-1) / size
        assert error.max() < 4 * 2**-8, (name, float(error.max()))


@pytest.mark.parametrize(
    "latents, keys, width, value_width", [(1, 65, 1, 1), (16, 300, 64, 64), (33, 1000, 40, 72), (128, 777, 128, 128)]
)
def test_hardware_tiles_give_the_bits_of_tiles_in_software(
    latents: int, keys: int, width: int, value_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMX gives the same bits as its emulation, which other machines test."""
    inputs = [
        _random(1, 2, *shape).requires_grad_() for shape in ((latents, width), (keys, width), (keys, value_width))
    ]
    results = []
    for name in ("amx", "amx_emulated"):
        _use(name, monkeypatch)
        state = _state(*inputs)
        results.append((state.out, state.lse, *torch.autograd.grad(state.out.square().sum() + state.lse.sum(), inputs)))
    assert all(map(torch.equal, *results))


# ---- Accuracy (P2)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("latents, keys, width, value_width", [(5, 1000, 16, 16), (33, 197, 8, 24), (130, 130, 64, 64)])
def test_accuracy(engine: str, law: str, latents: int, keys: int, width: int, value_width: int) -> None:
    shapes = ((latents, width), (keys, width), (keys, value_width))
    inputs = [LAWS[law](2, 2, n, w).bfloat16().requires_grad_() for n, w in shapes]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    score = oracles.largest_score(*inputs[:2])
    expected = oracles.attention(*wide)
    state = _state(*inputs)
    theirs = torch.nn.functional.scaled_dot_product_attention(*inputs)
    assert (row_error(state.out, expected[0]) <= bound(torch.bfloat16, score, row_error(theirs, expected[0]))).all()
    assert (state.out.double() - expected[0]).norm() < 0.005 * expected[0].norm()
    assert (state.lse - expected[1]).abs().max() <= 8 * torch.finfo(torch.float32).eps * (score + 4)

    dout = torch.randn(theirs.shape).bfloat16()
    ours = torch.autograd.grad(state.out, inputs, dout.float())
    wanted = torch.autograd.grad(expected[0], wide, dout.double())
    own = torch.autograd.grad(theirs, inputs, dout)
    terms = oracles.attention_terms(dout.double(), *wide, *expected)
    for name, mine, right, other, term in zip("qkv", ours, wanted, own, terms, strict=True):
        size = torch.maximum(right.norm(dim=-1), 0.05 * term.norm(dim=-1)).clamp(
            min=1e-30 * float(term.norm(dim=-1).max())
        )
        error = (mine.double() - right).norm(dim=-1) / size
        allowed = bound(torch.bfloat16, score, (other.double() - right).norm(dim=-1) / size, factor=4.0)
        assert (error <= allowed).all(), (name, float((error / allowed).max()))


@pytest.mark.parametrize("width, value_width", WIDTHS)
def test_widths(engine: str, width: int, value_width: int) -> None:
    inputs = [_random(1, 2, n, w).requires_grad_() for n, w in ((37, width), (150, width), (150, value_width))]
    state = _state(*inputs)
    expected, lse = oracles.attention(*(t.detach() for t in inputs))
    assert (state.out - expected).norm() < 0.003 * expected.norm() and (state.lse - lse).abs().max() < 2e-5
    _check_gradients(state, inputs)


@pytest.mark.parametrize("latents", [1, 15, 16, 17, 31, 33, 48, 64, 65, 100, 127, 129, 257])
def test_numbers_of_latents(engine: str, latents: int) -> None:
    inputs = [_random(1, 2, n, w).requires_grad_() for n, w in ((latents, 16), (70, 16), (70, 8))]
    state = _state(*inputs)
    expected, _ = oracles.attention(*(t.detach() for t in inputs))
    assert (state.out - expected).norm() < 0.003 * expected.norm()
    _check_gradients(state, inputs)


@pytest.mark.parametrize("scale", [-0.25, 0.0, 3.0])
def test_scales(engine: str, scale: float) -> None:
    q, k, v = (_random(1, 2, n, 8) for n in (20, 100, 100))
    state = _state(q, k, v, scale=scale)
    expected, lse = oracles.attention(q, k, v, scale=scale)
    assert (state.out - expected).norm() < 0.003 * expected.norm() and (state.lse - lse).abs().max() < 1e-4


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_logits(engine: str, size: float) -> None:
    """At large logits, lse is as accurate as float32 logits, and weights are as accurate as the differences of
    logits."""
    q, k, v = torch.full((1, 1, 2, 1), 1.0), size + torch.randn(1, 1, 100, 1), torch.randn(1, 1, 100, 4)
    inputs = [t.bfloat16().requires_grad_() for t in (q, k, v)]
    state = _state(*inputs, scale=1.0)
    expected, lse = oracles.attention(*(t.detach() for t in inputs), scale=1.0)
    assert (state.out - expected).norm() < 0.003 * expected.norm() and (
        state.lse - lse
    ).abs().max() <= 1e-6 + 2**-23 * size


def test_a_mean_of_equal_values_is_exact(engine: str) -> None:
    """Weights are divided by the sum of the rounded weights, so that the mean of equal values is that value."""
    q, k, v = _random(1, 2, 20, 8), _random(1, 2, 7, 8), torch.full((1, 2, 7, 3), 0.75).bfloat16()
    assert (_state(q, k, v).out - 0.75).abs().max() < 1e-6


def test_a_row_that_sees_one_value_has_no_gradient_of_weights(engine: str) -> None:
    """The gradient of the state, in float32, is rounded for the products, so delta must be that of the rounded
    numbers."""
    q, k, v = _random(1, 2, 20, 8).requires_grad_(), _random(1, 2, 40, 8).requires_grad_(), _random(1, 2, 40, 17)
    one, equal = torch.arange(40)[None] != 7, v[:, :, :1].expand(-1, -1, 40, -1)
    for state in (_state(q, k[:, :, :1], v[:, :, :1]), _state(q, k, v, key_padding_mask=one), _state(q, k, equal)):
        dquery, dkey = torch.autograd.grad(state.out, (q, k), torch.randn_like(state.out))
        assert max(float(dquery.abs().max()), float(dkey.abs().max())) < 1e-5


def test_gradients_take_lse_in_two_parts(engine: str) -> None:
    """At logits of 1e6, a float32 lse has an error of 3 %, and so has every weight. So the backward pass takes lse as
    two float32 numbers."""
    q = torch.stack([torch.linspace(1.0, 1.9, 8), torch.ones(8)], -1)[None, None].bfloat16()
    k = torch.stack([torch.full((40,), 2.0**20), torch.randint(0, 3, (40,)).float()], -1)[None, None].bfloat16()
    v = _random(1, 1, 40, 1).requires_grad_()
    (dvalue,) = torch.autograd.grad(_state(q, k, v, scale=1.0).out.sum(), v)
    weights = torch.softmax(q.double() @ k.double().mT, -1).sum(2)[..., None]
    assert ((dvalue.double() - weights).abs() / weights).max() < 0.008


@pytest.mark.parametrize("logit", [0.0, 88.8, -88.8, 104.0, -104.0, 1e4, -1e4, 1e9, -1e9, 1e38, -1e38])
@pytest.mark.parametrize("among", [False, True])
def test_extreme_logits(engine: str, logit: float, among: bool) -> None:
    """Either all keys have an extreme logit, or one key has it and the others have logit 0. Rounding a large logit must
    not change weights."""
    k = torch.zeros(1, 1, 70, 1) if among else torch.full((1, 1, 70, 1), logit)
    k[:, :, 33] = logit
    inputs = [t.bfloat16().requires_grad_() for t in (torch.ones(1, 1, 2, 1), k, torch.randn(1, 1, 70, 3))]
    state = _state(*inputs, scale=1.0)
    expected, lse = oracles.attention(*(t.detach() for t in inputs), scale=1.0)
    assert row_error(state.out, expected).max() < 0.004
    assert (state.lse - lse).abs().max() <= 1e-6 + 2**-23 * abs(logit)
    dquery, *others = torch.autograd.grad(
        tuple(state), inputs, (torch.ones_like(state.out), torch.ones_like(state.lse))
    )
    assert not any(g.isnan().any() for g in others)
    # Otherwise log 70 is less than the last bit of lse, every P is 1, and the sum of dS K overflows.
    if among or abs(logit) < 1e38:
        assert not dquery.isnan().any()


# ---- exact if everything is representable: which keys take part


@pytest.mark.parametrize(
    "keys", [*range(1, 35), 47, 48, 49, 63, 64, 65, 66, 95, 96, 97, 127, 128, 129, 191, 193, 1023, 1025]
)
def test_every_key_counts_once(engine: str, keys: int) -> None:
    """Keys of 0 have weight 1.

    The result is therefore a mean of integers, and lse is log N, to the last bits of float32, with and without a mask.
    """
    q, k, v = _random(1, 1, 3, 5), torch.zeros(1, 1, keys, 5).bfloat16(), _integers(-8, 9, 1, 1, keys, 3)
    for mask in (None, torch.rand(1, keys) < 0.4):
        seen = torch.ones(keys, dtype=torch.bool) if mask is None else ~mask[0]
        state = _state(q, k, v, key_padding_mask=mask)
        if not seen.any():
            assert state.out.eq(0).all() and state.lse.eq(-math.inf).all()
            continue
        assert (state.out - v[0, 0, seen].double().mean(0)).abs().max() < 1e-6
        assert (state.lse - math.log(int(seen.sum()))).abs().max() < 1e-6


@pytest.mark.parametrize("keys, masked", [(32, False), (64, False), (100, True), (128, True), (1000, True)])
def test_exact_gradients(engine: str, keys: int, masked: bool) -> None:
    """A number of equal weights that is a power of two makes P and dS exact in bfloat16,
    so only the result of a gradient is rounded."""
    visible = keys if not masked else 64
    mask = None
    if masked:
        mask = torch.ones(1, keys, dtype=torch.bool)
        mask[0, torch.randperm(keys)[:visible]] = False
    q, k, v = _integers(-3, 4, 1, 1, 40, 6), torch.zeros(1, 1, keys, 6).bfloat16(), _integers(0, 2, 1, 1, keys, 1)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    state = _state(*inputs, key_padding_mask=mask, scale=1.0)
    dout = _integers(0, 2, 1, 1, 40, 1).float()
    mine = torch.autograd.grad(state.out, inputs, dout)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    right = torch.autograd.grad(oracles.attention(*wide, mask, scale=1.0)[0], wide, dout.double())
    assert mine[0].eq(0).all()
    for ours, theirs in zip(mine[1:], right[1:], strict=True):
        assert ((ours.double() - theirs).abs() <= 2**-8 * theirs.abs() + 1e-9).all()


# ---- Masks, sets, states


@pytest.mark.parametrize(
    "start, stop", [(0, 64), (64, 128), (128, 200), (0, 200), (3, 197), (0, 199), (1, 200), (31, 33)]
)
def test_nothing_leaks_from_ignored_keys(engine: str, start: int, stop: int) -> None:
    q, k, v = _random(2, 2, 5, 8), _random(2, 2, 200, 8), _random(2, 2, 200, 4)
    mask = torch.zeros(2, 200, dtype=torch.bool)
    mask[0, start:stop] = True
    k[0, :, start:stop:2], v[0, :, start:stop:2] = math.nan, math.inf
    k[0, :, start + 1 : stop : 2], v[0, :, start + 1 : stop : 2] = math.inf, math.nan
    inputs = [t.requires_grad_() for t in (q, k, v)]
    state = _state(*inputs, key_padding_mask=mask)
    expected, lse = oracles.attention(q, k, v, mask)
    assert (state.out - expected).norm() < 0.003 * expected.norm() and torch.equal(
        state.lse == -math.inf, lse == -math.inf
    )
    grads = torch.autograd.grad(tuple(state), inputs, (torch.randn_like(state.out), torch.randn_like(state.lse)))
    assert not any(g.isnan().any() for g in grads)
    assert grads[1][0, :, start:stop].eq(0).all() and grads[2][0, :, start:stop].eq(0).all()


def test_ragged_sets(engine: str) -> None:
    sizes = [0, 1, 2, 31, 32, 33, 63, 0, 64, 65, 130]
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32)
    inputs = [
        _random(b, 2, n, w).requires_grad_() for b, n, w in ((len(sizes), 7, 6), (1, sum(sizes), 6), (1, sum(sizes), 5))
    ]
    state = _state(*inputs, cu_seqlens=offsets)
    for i, size in enumerate(sizes):
        keys = slice(int(offsets[i]), int(offsets[i + 1]))
        alone = _state(inputs[0][i : i + 1], inputs[1][:, :, keys], inputs[2][:, :, keys])
        assert torch.equal(alone.out[0], state.out[i]) and torch.equal(alone.lse[0], state.lse[i]), size
    grads = torch.autograd.grad(state.out.sum(), inputs)
    assert not any(g.isnan().any() for g in grads) and grads[0][0].eq(0).all()


@pytest.mark.parametrize("split", [0, 1, 63, 64, 65, 150, 299, 300])
def test_streaming_equals_batch(engine: str, split: int) -> None:
    q, k, v = (_random(1, 2, n, 16) for n in (20, 300, 300))
    whole = _state(q, k, v)
    state = _state(q, k[:, :, :split], v[:, :, :split])
    state = _state(q, k[:, :, split:], v[:, :, split:], state=state)
    assert (state.out - whole.out).norm() < 0.002 * whole.out.norm() and (state.lse - whole.lse).abs().max() < 1e-5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_query_stays_in_its_row(engine: str, bad: float) -> None:
    q, k, v = (_random(2, 2, n, 8) for n in (40, 100, 100))
    clean = _state(q, k, v)
    q[0, 1, 17, 3] = bad
    state = _state(q, k, v)
    row = torch.zeros(2, 2, 40, dtype=torch.bool)
    row[0, 1, 17] = True
    assert torch.equal(state.out.isnan().any(-1), row)
    assert torch.equal(state.out[~row], clean.out[~row]) and torch.equal(state.lse[~row], clean.lse[~row])


def test_logits_of_minus_infinity_weigh_nothing(engine: str) -> None:
    q, k, v = torch.ones(1, 1, 2, 1).bfloat16(), torch.zeros(1, 1, 100, 1).bfloat16(), _random(1, 1, 100, 4)
    k[:, :, ::3] = -math.inf
    keep = torch.arange(100) % 3 != 0
    assert (_state(q, k, v).out - v[:, :, keep].double().mean(2, keepdim=True)).abs().max() < 1e-6
    k[:] = -math.inf
    state = _state(q, k, v)
    assert state.out.eq(0).all() and state.lse.eq(-math.inf).all()


@pytest.mark.parametrize("latents", [1, 2, 15, 16, 31, 32, 33, 64, 100])
def test_gradients_of_keys_that_weigh_nothing(engine: str, latents: int) -> None:
    """A logit of -inf gives its key the gradient 0; lanes past the last query, whose 0 * -inf is NaN, must not
    count."""
    k, v = torch.zeros(1, 1, 4, 1).bfloat16(), torch.ones(1, 1, 4, 3).bfloat16()
    k[0, 0, 1] = -math.inf
    inputs = [torch.ones(1, 1, latents, 1).bfloat16(), k.requires_grad_(), v.requires_grad_()]
    state = _state(*inputs, scale=1.0)
    share = latents / 3 * torch.tensor([1.0, 0.0, 1.0, 1.0]).view(1, 1, 4, 1)
    for grad in torch.autograd.grad(state.out[..., 0].sum() + state.lse.sum(), (k, v)):
        torch.testing.assert_close(grad[..., :1].float(), share, rtol=2**-7, atol=0.0)


# ---- Layouts (P5) and bits (P3)


def _layouts(x: Tensor) -> dict[str, Tensor]:
    room = torch.full((*x.shape[:2], 2 * x.shape[2] + 1, 3 * x.shape[3]), math.nan).bfloat16()
    apart = room[:, :, 1::2, ::3].copy_(x)
    return {
        "transposed": x.mT.contiguous().mT,
        "heads in rows": x.transpose(1, 2).contiguous().transpose(1, 2),
        "steps of 2 and 3": apart,
        "offset by 1": torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
        "flipped heads": x.flip(1).contiguous().flip(1),
    }


@pytest.mark.parametrize("width", [5, 16])
def test_layouts_change_no_bit(engine: str, width: int) -> None:
    q, k, v = (_random(2, 3, n, width) for n in (20, 130, 130))
    results = {"contiguous": (q, k, v)} | {
        name: (a, b, c) for name, a, b, c in zip(_layouts(q), *(_layouts(x).values() for x in (q, k, v)), strict=True)
    }
    bits = {}
    for name, inputs in results.items():
        leaves = [t.detach().requires_grad_() for t in inputs]
        state = _state(*leaves)
        bits[name] = (*state, *torch.autograd.grad(state.out.sum(), leaves))
    for name, other in bits.items():
        assert all(torch.equal(a, b) for a, b in zip(bits["contiguous"], other, strict=True)), name


def test_expanded_keys(engine: str) -> None:
    q, k, v = (
        _random(1, 1, 4, 6),
        _random(1, 1, 1, 6).expand(1, 1, 90, 6),
        _integers(-4, 5, 1, 1, 90, 1).expand(1, 1, 90, 7),
    )
    state = _state(q, k, v)
    assert (state.out - v.double().mean(2, keepdim=True)).abs().max() < 1e-5


@pytest.mark.parametrize("latents, keys", [(128, 3000), (5, 9000), (300, 200)])
def test_same_bits_alone_and_for_any_thread_count(engine: str, latents: int, keys: int) -> None:
    def bits(*inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in inputs]
        state = _state(*leaves)
        return (
            *state,
            *torch.autograd.grad(tuple(state), leaves, (torch.ones_like(state.out), torch.ones_like(state.lse))),
        )

    inputs = [_random(2, 2, n, 16) for n in (latents, keys, keys)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = bits(*inputs)
        for count in (2, 3):
            torch.set_num_threads(count)
            assert all(torch.equal(a, b) for a, b in zip(first, bits(*inputs), strict=True)), count
    finally:
        torch.set_num_threads(threads)
    for b in range(2):
        assert all(
            torch.equal(a[b : b + 1], c) for a, c in zip(first, bits(*(t[b : b + 1] for t in inputs)), strict=True)
        )


# ---- The instructions


def test_the_engines_agree(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """Both engines round the same operands, and differ only in the order of float32 sums."""
    inputs = [_random(1, 2, n, 24) for n in (50, 500, 500)]
    mine = _state(*inputs)
    monkeypatch.setenv("CMAB_KERNELS_ISA", "avx512bf16")
    other = _state(*inputs)
    assert (mine.out - other.out).norm() < 1e-4 * other.out.norm() and (mine.lse - other.lse).abs().max() < 2e-6


def test_the_extension_has_the_instructions() -> None:
    extension = load()
    if "avx2" not in extension.instruction_sets() or shutil.which("objdump") is None:
        pytest.skip("needs an x86-64 build and objdump")
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(extension.__file__)], capture_output=True, text=True, check=True
    ).stdout
    for instruction in (
        "ldtilecfg",
        "tileloadd",
        "tdpbf16ps",
        "tilestored",
        "tilerelease",
        "vdpbf16ps",
        "vcvtne2ps2bf16",
    ):
        assert instruction in text, instruction

"""The C++ kernels, compared with the definition in float64: every instruction set of this machine, every type, layout
and border of tiles."""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from cmab_kernels.attention.contract import Attention, AttentionBackward
from cmab_kernels.attention.reference import attention_backward_reference, attention_reference, state_dtype

native = pytest.importorskip(
    "cmab_kernels.attention.native", reason="the extension was not built", exc_type=ImportError
)

ALL = (True, True, True, False)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# The error allowed, relative to the largest entry of a result's row, beyond the rounding of the inputs' type.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 32 * 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.fixture(params=native._C.instruction_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CMAB_KERNELS_ISA", request.param)
    assert native._C.instruction_set() == request.param
    return request.param


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _case(
    batch: int, heads: int, latents: int, keys: int, width: int, value_width: int, dtype: torch.dtype
) -> list[Tensor]:
    shapes = (latents, width), (keys, width), (keys, value_width)
    return [torch.randn(batch, heads, *shape, dtype=torch.float64).to(dtype) for shape in shapes]


def _row_error(ours: Tensor, right: Tensor, floor: float = 1e-2) -> float:
    """Return the largest error of an element, relative to the largest element of its row.

    Terms may cancel in a row, so the size of a row is taken as at least `floor` times the largest element of the
    tensor.
    """
    if right.numel() == 0:
        return 0.0
    size = right.abs().amax(-1, keepdim=True).clamp(min=floor * float(right.abs().max()) + 1e-300)
    difference = (ours.double() - right).abs() / size
    return float(difference.max()) if not difference.isnan().any() else math.inf


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    cu: Tensor | None = None,
    scale: float | None = None,
) -> None:
    """Compare forward and backward with the definition in float64, row by row."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    tolerance = TOLERANCE[query.dtype]
    out, lse = native.attention_forward(Attention(query, key, value, mask, cu, None, None, scale=scale))
    wide = [t.double() for t in (query, key, value)]
    right_out, right_lse = attention_reference(*wide, mask, cu, scale)
    assert out.dtype == state_dtype(query.dtype) and lse.dtype == torch.float64 and out.is_contiguous()
    assert _row_error(out, right_out) <= tolerance
    assert torch.equal(lse.isinf(), right_lse.isinf())
    assert (
        _row_error(
            torch.where(lse.isinf(), 0.0, lse.exp())[..., None],
            torch.where(right_lse.isinf(), 0.0, right_lse.exp())[..., None],
        )
        <= tolerance
    )
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    ours = native.attention_backward(
        AttentionBackward(dout, dlse, query, key, value, mask, cu, out, lse, None, scale, ALL)
    )
    right = attention_backward_reference(dout.double(), dlse, *wide, mask, cu, right_out, right_lse, scale)
    for name, mine, expected, like in zip("qkv", ours[:3], right[:3], (query, key, value), strict=True):
        assert mine.shape == like.shape and mine.dtype == like.dtype and mine.is_contiguous()
        assert _row_error(mine, expected, floor=0.1) <= 4 * tolerance, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "width, value_width",
    [(1, 1), (2, 3), (5, 8), (8, 8), (12, 7), (16, 16), (17, 33), (64, 64), (100, 40), (255, 256), (256, 129)],
)
def test_widths(isa: str, dtype: torch.dtype, width: int, value_width: int) -> None:
    if dtype == torch.bfloat16 and isa in ("avx512bf16", "amx"):
        pytest.skip("kernels of their own: test_bf16.py")
    _check(*_case(1, 2, 20, 75, width, value_width, dtype))


@pytest.mark.parametrize("keys", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257, 4095, 4096, 4097, 6145])
@pytest.mark.parametrize("latents", [1, 7, 128])
def test_borders_of_tiles_and_pieces(isa: str, keys: int, latents: int) -> None:
    _check(*_case(1, 1, latents, keys, 8, 8, torch.float64))


@pytest.mark.parametrize("latents", [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 129, 1025, 2600])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_numbers_of_latents(isa: str, latents: int, dtype: torch.dtype) -> None:
    _check(*_case(1, 2, latents, 70, 16, 8, dtype))


@pytest.mark.parametrize("latents", [1, 2, 3])
@pytest.mark.parametrize("width, value_width", [(16, 32), (64, 16), (17, 16), (16, 8)])
def test_few_queries_of_logits_that_rise(isa: str, latents: int, width: int, value_width: int) -> None:
    """Few queries are processed one by one if widths fill vectors; sums are scaled down in each of four tiles."""
    query, key, value = _case(2, 3, latents, 235, width, value_width, torch.float64)
    key[..., 0] = torch.arange(235) * 0.1
    query[..., 0] = width**0.5
    _check(query, key, value, torch.rand(2, 235) < 0.2)
    _check(query, key, value)


@pytest.mark.parametrize("latents, keys", [(300, 300), (1100, 1100), (3000, 100)])
def test_many_queries(latents: int, keys: int) -> None:
    _check(*_case(1, 1, latents, keys, 16, 16, torch.float64))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "keys inside": lambda t: t.mT.contiguous().mT,
    "step 2": lambda t: torch.stack([t, torch.full_like(t, math.nan)], -1).flatten(-2)[..., ::2],
    "rows of step 2": lambda t: torch.stack([t, torch.full_like(t, math.nan)], 3).flatten(2, 3)[:, :, ::2],
    "offset 1": lambda t: torch.cat([t.new_full((1,), math.nan), t.flatten()])[1:].view(t.shape),
    "offset 3": lambda t: torch.cat([t.new_full((3,), math.nan), t.flatten()])[3:].view(t.shape),
    "batch inside": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_layouts_change_no_bit(isa: str, layout: str, dtype: torch.dtype) -> None:
    plain = _case(2, 3, 40, 200, 8, 12, dtype)
    moved = [LAYOUTS[layout](t) for t in plain]
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(_everything(*plain), _everything(*moved), strict=True))


def test_expanded_operands(isa: str) -> None:
    query, key, value = _case(2, 2, 9, 130, 8, 8, torch.float64)
    _check(query[:1].expand(2, -1, -1, -1), key[:, :1].expand(-1, 2, -1, -1), value[:, :, :1].expand(-1, -1, 130, -1))
    out, lse = native.attention_forward(Attention(query, key, value, scale=1.0))
    one = torch.ones((), dtype=torch.float64)
    spread = native.attention_backward(
        AttentionBackward(
            one.expand_as(out), one.expand_as(lse), query, key, value, None, None, out, lse, None, 1.0, ALL
        )
    )
    dense = native.attention_backward(
        AttentionBackward(
            torch.ones_like(out), torch.ones_like(lse), query, key, value, None, None, out, lse, None, 1.0, ALL
        )
    )
    assert all(torch.equal(a, b) for a, b in zip(spread, dense, strict=True))


MASKED = {
    "first tile": slice(0, 64),
    "middle tiles": slice(64, 192),
    "last tile": slice(192, 230),
    "all but one": slice(1, None),
    "all": slice(None),
    "none": slice(0, 0),
}


@pytest.mark.parametrize("where", MASKED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_of_an_ignored_key_is_seen(isa: str, where: str, dtype: torch.dtype, bad: float) -> None:
    query, key, value = _case(2, 2, 20, 230, 8, 8, dtype)
    mask = torch.rand(2, 460) < 0.3
    mask[0, 230 + MASKED[where].indices(230)[0] : 230 + MASKED[where].indices(230)[1]] = True
    mask = mask[:, 230:] if where != "none" else mask.repeat_interleave(2, 1)[:, 230:690:2]  # also a mask of stride 2
    key, value = (t.masked_fill(mask[:, None, :, None], bad) for t in (key, value))
    _check(query, key, value, mask)
    dquery, dkey, dvalue = _everything(query, key, value, mask)[2:5]
    assert not dquery.isnan().any()
    assert all(d.masked_select(mask[:, None, :, None]).eq(0).all() for d in (dkey, dvalue))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", [[0, 3, 0, 64, 1, 129, 0], [5000, 0, 100], [7], [0, 0]])
def test_packed_sets(isa: str, sizes: list[int], kind: torch.dtype) -> None:
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    query, _, _ = _case(len(sizes), 2, 20, 0, 8, 8, torch.float64)
    _, key, value = _case(1, 2, 0, int(offsets[-1]), 8, 8, torch.float64)
    _check(query, key, value, None, offsets.to(kind))
    _check(query, key, value, torch.rand(1, key.shape[2]) < 0.5, offsets.to(kind))
    for i, (start, stop) in enumerate(pairwise(offsets)):
        alone = _everything(query[i : i + 1], key[:, :, start:stop], value[:, :, start:stop])[:2]
        packed = native.attention_forward(Attention(query, key, value, None, offsets.to(kind), scale=8**-0.5))
        assert all(torch.equal(a, b[i : i + 1]) for a, b in zip(alone, packed, strict=True))


def test_offsets_out_of_range_read_nothing_there() -> None:
    query, key, value = _case(1, 1, 4, 10, 8, 8, torch.float64)
    out, lse = native.attention_forward(
        Attention(query.expand(3, -1, -1, -1), key, value, None, torch.tensor([-5, 4, 1000, 20]), None, None, scale=1.0)
    )
    assert torch.equal(
        out[1:2], native.attention_forward(Attention(query, key[:, :, 4:], value[:, :, 4:], scale=1.0))[0]
    )
    assert (lse[2] == -math.inf).all()


@pytest.mark.parametrize("keys", [0, 1, 100, 5000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_incoming_state(isa: str, keys: int, dtype: torch.dtype) -> None:
    query, key, value = _case(2, 2, 20, keys + 50, 8, 12, dtype)
    first = native.attention_forward(Attention(query, key[:, :, :50], value[:, :, :50], scale=0.3))
    state_out, state_lse = first[0].mT.contiguous().mT, first[1].mT.contiguous().mT
    both = native.attention_forward(
        Attention(query, key[:, :, 50:], value[:, :, 50:], None, None, state_out, state_lse, scale=0.3)
    )
    right = attention_reference(query.double(), key.double(), value.double(), None, None, 0.3)
    own = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.3)
    assert _row_error(both[0], right[0]) <= max(TOLERANCE[dtype], 3 * _row_error(own, right[0]))
    assert (both[1] - right[1]).abs().max() <= 4 * TOLERANCE[dtype]
    if keys == 0:
        assert torch.equal(both[0], first[0]) and torch.equal(both[1], first[1])
    empty = torch.zeros_like(first[0]), torch.full_like(first[1], -math.inf)
    merged = native.attention_forward(Attention(query, key, value, None, None, *empty, scale=0.3))
    assert all(
        torch.equal(a, b)
        for a, b in zip(merged, native.attention_forward(Attention(query, key, value, scale=0.3)), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("logit", [0.0, 88.8, -88.8, 104.0, -104.0, 1e4, -1e4, 1e38, -1e38])
@pytest.mark.parametrize("at", [0, 63, 64, 130])
def test_a_key_of_another_size(isa: str, dtype: torch.dtype, logit: float, at: int) -> None:
    """One key's logit is far above or below the others', early or late: the running reference of the exponentials must
    be right in both cases."""
    query = torch.ones(1, 1, 5, 1, dtype=dtype)
    key = torch.linspace(-1, 1, 150, dtype=torch.float64).to(dtype).view(1, 1, 150, 1).clone()
    key[0, 0, at] = logit
    value = torch.randn(1, 1, 150, 3, dtype=torch.float64).to(dtype)
    out, lse = native.attention_forward(Attention(query, key, value, scale=1.0))
    right_out, right_lse = attention_reference(query.double(), key.double(), value.double(), None, None, 1.0)
    eps = torch.finfo(dtype).eps
    assert _row_error(out, right_out) <= max(TOLERANCE[dtype], 4 * eps * min(abs(logit), 200))
    assert ((lse - right_lse).abs() <= max(TOLERANCE[dtype], 4 * eps * abs(logit))).all()
    gradients = native.attention_backward(
        AttentionBackward(
            torch.ones_like(out), torch.ones_like(lse), query, key, value, None, None, out, lse, None, 1.0, ALL
        )
    )
    assert all(g.isfinite().all() for g in gradients)


def test_logits_of_infinity(isa: str) -> None:
    for dtype in (torch.float64, torch.float32):
        query, key, value = _case(1, 1, 6, 200, 1, 4, dtype)
        query, key = query.abs() + 0.1, key.clone()
        query[0, 0, 5] *= -1
        key[0, 0, :130] = -math.inf
        out, lse = native.attention_forward(Attention(query, key, value, scale=1.0))
        right = attention_reference(
            query.double(), key[:, :, 130:].double(), value[:, :, 130:].double(), None, None, 1.0
        )
        assert _row_error(out[:, :, :5], right[0][:, :, :5]) <= TOLERANCE[dtype]
        assert out[0, 0, 5].isnan().all() and lse[0, 0, 5].isnan()
        out, lse = native.attention_forward(Attention(query, key[:, :, :130], value[:, :, :130], scale=1.0))
        assert (out[:, :, :5] == 0).all() and (lse[:, :, :5] == -math.inf).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_bad_query_stays_in_its_row(isa: str, dtype: torch.dtype, bad: float) -> None:
    query, key, value = _case(1, 1, 40, 300, 8, 8, dtype)
    clean = native.attention_forward(Attention(query, key, value, scale=1.0))
    query[0, 0, 11, 3] = bad
    out, lse = native.attention_forward(Attention(query, key, value, scale=1.0))
    assert out[0, 0, 11].isnan().all() and lse[0, 0, 11].isnan()
    others = torch.arange(40) != 11
    assert torch.equal(out[:, :, others], clean[0][:, :, others]) and torch.equal(
        lse[:, :, others], clean[1][:, :, others]
    )


@pytest.mark.parametrize("needs", list(product([True, False], repeat=4)))
@pytest.mark.parametrize("latents, keys", [(20, 300), (600, 70)])
def test_needs(isa: str, needs: tuple[bool, ...], latents: int, keys: int) -> None:
    inputs, bias = _case(1, 2, latents, keys, 8, 12, torch.float32), torch.randn(1, 2, keys)
    out, lse = native.attention_forward(Attention(*inputs, key_bias=bias, scale=1.0))
    given = torch.randn_like(out), torch.randn_like(lse), *inputs, None, None, out, lse, bias, 1.0
    everything = native.attention_backward(AttentionBackward(*given, (True,) * 4))
    some = native.attention_backward(AttentionBackward(*given, needs))
    for need, mine, full in zip(needs, some, everything, strict=True):
        assert torch.equal(mine, full) if need else mine.shape == (0,)


def test_rows_without_a_key_contribute_nothing(isa: str) -> None:
    query, key, value = _case(1, 1, 20, 100, 8, 8, torch.float64)
    out, lse = native.attention_forward(Attention(query, key, value, scale=1.0))
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    right = native.attention_backward(
        AttentionBackward(
            dout[:, :, 1:],
            dlse[:, :, 1:],
            query[:, :, 1:],
            key,
            value,
            None,
            None,
            out[:, :, 1:],
            lse[:, :, 1:],
            None,
            1.0,
            ALL,
        )
    )
    lse[:, :, 0], out[:, :, 0], dout[:, :, 0], dlse[:, :, 0] = -math.inf, 0.0, math.nan, math.nan
    dquery, dkey, dvalue, _ = native.attention_backward(
        AttentionBackward(dout, dlse, query, key, value, None, None, out, lse, None, 1.0, ALL)
    )
    assert (dquery[:, :, 0] == 0).all() and torch.equal(dquery[:, :, 1:], right[0])
    assert _row_error(dkey, right[1]) < 1e-12 and _row_error(dvalue, right[2]) < 1e-12


@pytest.mark.parametrize("extents", list(product((0, 2), (0, 2), (0, 3), (0, 5))))
def test_empty_extents(extents: tuple[int, int, int, int]) -> None:
    batch, heads, latents, keys = extents
    _check(*_case(batch, heads, latents, keys, 4, 6, torch.float64))


def _everything(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return (out, lse, dquery, dkey, dvalue); incoming gradients depend only on the shapes, so that parts of a batch
    can be compared."""
    scale = query.shape[-1] ** -0.5
    out, lse = native.attention_forward(Attention(query, key, value, mask, None, None, None, scale=scale))
    dout = torch.linspace(-1, 1, out[0].numel(), dtype=out.dtype).view(out.shape[1:]).expand_as(out)
    dlse = torch.linspace(1, -1, lse[0].numel(), dtype=lse.dtype).view(lse.shape[1:]).expand_as(lse)
    return (
        out,
        lse,
        *native.attention_backward(
            AttentionBackward(dout, dlse, query, key, value, mask, None, out, lse, None, scale, ALL)
        ),
    )


@pytest.mark.parametrize("latents, keys", [(128, 9000), (5, 40_000), (700, 700), (1500, 60)])
@pytest.mark.parametrize("layout", ["plain", "heads inside"])
def test_same_bits_for_any_threads_and_alone(
    latents: int, keys: int, layout: str, threads: Callable[[int], None]
) -> None:
    inputs = _case(3, 4, latents, keys, 8, 8, torch.float32)
    if layout != "plain":
        inputs = [LAYOUTS[layout](t) for t in inputs]
    right = _everything(*inputs)
    for count in (1, 2, 3, 4, 8):
        threads(count)
        assert all(torch.equal(a, b) for a, b in zip(right, _everything(*inputs), strict=True)), count
        alone = _everything(*(t[1:2] for t in inputs))
        assert all(torch.equal(a[1:2], b) for a, b in zip(right, alone, strict=True)), count


def test_backward_repeats_its_bits() -> None:
    inputs = _case(1, 2, 130, 700, 8, 8, torch.float32)
    right = _everything(*inputs)
    for _ in range(300):
        assert all(torch.equal(a, b) for a, b in zip(right, _everything(*inputs), strict=True))


def test_more_than_65535_heads() -> None:
    query, key, value = _case(300, 220, 1, 2, 1, 1, torch.float32)
    out, lse = native.attention_forward(Attention(query, key, value, scale=1.0))
    right = attention_reference(query.double(), key.double(), value.double(), None, None, 1.0)
    assert torch.allclose(out.double(), right[0], rtol=1e-5, atol=1e-6) and torch.allclose(
        lse, right[1], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("apart", [0, 1, 2])
def test_offsets_beyond_32_bits(apart: int) -> None:
    """Two batch elements, heads or keys lie 2^31 elements apart: an offset of 32 bits would wrap.

    The memory between them is never accessed.
    """
    shape, strides = [1, 1, 1, 2], [0, 0, 0, 1]
    shape[apart], strides[apart] = 2, 2**31
    query = torch.randn(*shape[:2], 3, 2)
    with tempfile.TemporaryFile() as sparse:
        sparse.truncate((2**31 + 2) * 4)
        memory = torch.frombuffer(mmap.mmap(sparse.fileno(), 0), dtype=torch.float32)
        far = memory.as_strided(shape, strides)
        far.copy_(torch.randn(shape))
        assert all(
            torch.equal(a, b)
            for a, b in zip(_everything(query, far, far), _everything(query, far.clone(), far.clone()), strict=True)
        )
        del memory, far


@pytest.mark.parametrize("wanted", ["sse9", "AVX2"])
def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("CMAB_KERNELS_ISA", wanted)
    inputs: list[Any] = _case(1, 1, 1, 1, 1, 1, torch.float32)
    with pytest.raises(RuntimeError, match=f'"{wanted}"; usable here: portable'):
        native.attention_forward(Attention(*inputs, scale=1.0))

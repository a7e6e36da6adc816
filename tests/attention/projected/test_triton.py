"""The Triton kernels in Triton's interpreter. tests/test_interpreter.py runs this file with TRITON_INTERPRET=1.

The interpreter checks no bounds: inputs lie between margins of NaN, results between margins that must stay as they
were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.attention.projected import triton as kernels
from cmab_kernels.attention.projected.contract import ProjectedAttention, ProjectedAttentionBackward
from cmab_kernels.attention.projected.reference import projected_attention_reference
from cmab_kernels.attention.projected.triton import chunks, launch, projections
from cmab_kernels.runtime.tiles import forget
from cmab_kernels.testing import between_margins, guarded_results, row_error

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"

EVERYTHING = (True, True, True, True)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def margins() -> Iterator[None]:
    """Put results between margins of memory, and check at the end of the test that no kernel wrote to the margins."""
    with guarded_results():
        yield


class Case:
    """Inputs of K blocks, the results of the kernels, and the results of the definition in float64."""

    def __init__(
        self,
        blocks: int = 1,
        batch: int = 2,
        heads: int = 2,
        latents: int = 5,
        rows: int = 21,
        columns: int = 12,
        width: int = 8,
        value_width: int = 7,
        dtype: torch.dtype = torch.float32,
        eps: float | None = 1e-3,
        mask: bool = False,
        offsets: list[int] | None = None,
        state: bool = False,
        needs: tuple[bool, bool, bool, bool] = EVERYTHING,
        query_dtype: torch.dtype | None = None,
    ) -> None:
        sums = torch.promote_types(dtype, torch.float32)
        shape = (blocks, batch, heads, latents)
        stored = 1 if offsets else batch
        self.query = between_margins(torch.randn(*shape, width, dtype=sums).to(query_dtype or sums).to(sums))
        self.inputs = between_margins(torch.randn(stored, rows, columns).to(dtype))
        self.weight = torch.randn(blocks, heads * (width + value_width), columns, dtype=sums) / columns**0.5
        self.bias = torch.randn(self.weight.shape[:2], dtype=sums)
        self.mask = torch.rand(stored, rows) < 0.3 if mask else None
        self.offsets = None if offsets is None else torch.tensor(offsets)
        self.state = (
            ck.AttentionState(torch.randn(*shape, value_width, dtype=sums), torch.randn(shape).double())
            if state
            else None
        )
        self.eps, self.scale, self.needs = eps, width**-0.5, needs
        self.tensors = (self.query, self.inputs, self.weight, self.bias)
        given = (*self.tensors, self.mask, self.offsets)
        call = ProjectedAttention(*given, *(self.state or (None, None)), self.scale, eps)
        self.out, self.lse = kernels.projected_attention_forward(call)
        self.dout, self.dlse = torch.randn(self.out.shape, dtype=sums), torch.randn(self.lse.shape).double()
        self.grads = kernels.projected_attention_backward(
            ProjectedAttentionBackward(self.dout, self.dlse, *given, self.out, self.lse, self.scale, eps, needs)
        )

    def expected(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        wide = tuple(t.double().requires_grad_() for t in self.tensors)
        state = ck.AttentionState(*projected_attention_reference(*wide, self.mask, self.offsets, self.scale, self.eps))
        if self.state is not None:
            state = ck.merge_states(ck.AttentionState(self.state.out.double(), self.state.lse), state)
        seen = state.lse > -math.inf
        loss = (state.out * self.dout)[seen].sum() + (state.lse * self.dlse)[seen].sum()
        return tuple(t.detach() for t in state), torch.autograd.grad(loss, wide)

    def check(self) -> None:
        """Check each row of the results, and each gradient as a whole, because the terms in rows of gradients
        cancel."""
        tolerance = TOLERANCE[self.inputs.dtype]
        (out, lse), grads = self.expected()
        assert self.out.is_contiguous() and self.lse.is_contiguous() and self.lse.dtype == torch.float64
        assert (row_error(self.out, out) <= tolerance).all(), "out"
        assert torch.equal(self.lse == -math.inf, lse == -math.inf)
        seen = lse > -math.inf
        assert ((self.lse - lse)[seen].abs() <= tolerance * (1 + lse[seen].abs())).all(), "lse"
        for name, need, ours, right, like in zip(
            ("query", "inputs", "weight", "bias"), self.needs, self.grads, grads, self.tensors, strict=True
        ):
            if not need:
                assert ours.shape == (0,)
                continue
            assert ours.shape == like.shape and ours.dtype == like.dtype and ours.is_contiguous()
            error = (ours.double() - right).norm() / right.norm().clamp(min=1e-30)
            assert error <= 4 * tolerance or (not right.any() and not ours.any()), f"gradient of {name}: {float(error)}"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"blocks": 3, "mask": True},
        {"columns": 68, "width": 16, "value_width": 20},
        {"latents": 70, "batch": 1, "rows": 33},
        {"batch": 3, "offsets": [0, 9, 9, 21], "mask": True},
        {"state": True, "blocks": 2, "mask": True},
        {"eps": None, "columns": 3, "width": 1, "value_width": 1},
    ],
    ids=lambda shape: "-".join(shape) or "plain",
)
def test_shapes(shape: dict[str, Any], dtype: torch.dtype) -> None:
    Case(dtype=dtype, **shape).check()


@pytest.mark.parametrize(
    "shape", [{"width": 80, "value_width": 66}, {"width": 130, "value_width": 3, "columns": 300}], ids=["both", "keys"]
)
def test_wide_heads(shape: dict[str, Any]) -> None:
    """Wide heads, and rows of several pieces of columns."""
    Case(heads=1, batch=1, rows=17, **shape).check()


@pytest.mark.parametrize(
    "shape", [{"mask": True, "blocks": 2}, {"width": 68, "value_width": 70, "heads": 1}], ids=["narrow", "wide"]
)
def test_half_products(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of bfloat16, which the interpreter does not support, in float16: keys are float32 in memory and in
    products, and everything else is rounded."""
    monkeypatch.setattr(launch, "MULTIPLIED_AS_THEY_ARE", [torch.float16])
    forget()
    case = Case(dtype=torch.float16, query_dtype=torch.float16, **shape)
    case.check()
    (_, lse), _ = case.expected()
    assert (case.lse - lse).abs().max() <= 1e-5
    forget()


def test_several_runs() -> None:
    """More rows than a run has, with an incoming state."""
    Case(batch=1, heads=1, latents=2, rows=1100, columns=4, width=4, value_width=4, state=True).check()


def test_more_blocks_of_rows_than_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_PROGRAMS", 2)
    Case(batch=5, rows=40, heads=1).check()


@pytest.mark.parametrize("filling", [1, 3, 100])
def test_columns_are_divided(filling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tiles of columns of two matrices, in one program, in three programs, and in one program each."""
    monkeypatch.setattr(projections, "FILLING", filling)
    Case(batch=1, rows=9, width=40, value_width=70, needs=(True, False, False, False)).check()


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 rows for two heads of keys and values 8 and 7 wide."""
    monkeypatch.setattr(chunks, "STEP", 16)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2 * 16 * 2 * 15 * 4)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize(
    "shape",
    [
        {"rows": 70},
        {"rows": 70, "blocks": 2, "mask": True, "state": True},
        {"rows": 70, "batch": 3, "offsets": [0, 33, 33, 70], "mask": True, "state": True, "latents": 1},
        {"rows": 7, "batch": 5},
        {"rows": 33, "needs": (True, False, False, False)},
        {"rows": 33, "needs": (False, False, False, True)},
    ],
    ids=["several", "continued", "packed", "of several sets", "of queries", "of biases"],
)
def test_chunks(shape: dict[str, Any]) -> None:
    """Sets that are cut into chunks, and chunks of several small sets."""
    case = Case(**shape)
    case.check()
    call = ProjectedAttention(
        *case.tensors, case.mask, case.offsets, *(case.state or (None, None)), case.scale, case.eps
    )
    assert len([rows for _, group in chunks.cut(call, 1) for rows in group]) > 1


def test_chunks_are_bounded() -> None:
    """A chunk takes a part of the cache. For packed sets, it takes as much as the states that it reads."""
    query, weight = torch.empty(6, 1, 4, 128, 16, device="meta"), torch.empty(6, 128, 64, device="meta")
    for rows, packed in ((10**6, False), (10**8, False), (10**6, True)):
        offsets = torch.empty(1001, device="meta", dtype=torch.int32) if packed else None
        latents = query.expand(-1, 1000, -1, -1, -1) if packed else query
        call = ProjectedAttention(
            latents, torch.empty(1, rows, 64, device="meta"), weight, weight[..., 0], None, offsets
        )
        with mock.patch.object(chunks, "_chunks", lambda offsets, N, most: most):
            ((_, most),) = chunks.cut(call, 2)
        allowed = latents.numel() * 4 if packed else chunks.CHUNK_BYTES
        assert 0.9 * allowed < most * 2 * 6 * 128 * 4 <= allowed


@pytest.mark.parametrize("needed", range(5))
def test_only_what_is_needed(needed: int) -> None:
    """The gradient of one argument alone, and of no argument."""
    Case(rows=9, batch=1, heads=1, needs=tuple(i == needed for i in range(4))).check()


@pytest.mark.parametrize("emptied", ["batch", "latents", "rows"])
def test_nothing(emptied: str) -> None:
    Case(**{emptied: 0}).check()
    Case(**{emptied: 0}, state=True, blocks=2).check()


def test_ignored_rows_do_not_matter() -> None:
    """NaN and infinity are under the mask, and have a gradient of exactly 0."""
    clean = Case(mask=True)
    ignore = clean.mask
    assert ignore is not None and ignore.any()
    spoilt = clean.inputs.clone()
    spoilt[ignore] = math.nan
    spoilt[0][ignore[0]] = math.inf
    given = (clean.query, spoilt, clean.weight, clean.bias, ignore, None)
    out, lse = kernels.projected_attention_forward(ProjectedAttention(*given, scale=clean.scale, eps=clean.eps))
    assert torch.equal(out, clean.out) and torch.equal(lse, clean.lse)
    grads = kernels.projected_attention_backward(
        ProjectedAttentionBackward(clean.dout, clean.dlse, *given, out, lse, clean.scale, clean.eps, EVERYTHING)
    )
    assert all(torch.equal(a, b) for a, b in zip(grads, clean.grads, strict=True))
    assert not grads[1][ignore].any()


@pytest.mark.parametrize("step", [128, 8])
def test_bad_offsets_make_everything_nan(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad offsets make every result and gradient NaN, in one chunk and in three."""
    case = Case(batch=2, offsets=[0, 5, 21], heads=1, latents=1)
    monkeypatch.setattr(chunks, "STEP", step)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunks.CHUNK_BYTES if step == 128 else 1)
    for offsets in ([0, 22, 21], [1, 5, 21], [0, 5, 22]):
        given = (*case.tensors, None, torch.tensor(offsets))
        out, lse = kernels.projected_attention_forward(ProjectedAttention(*given, scale=case.scale, eps=case.eps))
        assert out.isnan().all() and lse.isnan().all()
        slopes = ProjectedAttentionBackward(case.dout, case.dlse, *given, out, lse, case.scale, case.eps, EVERYTHING)
        grads = kernels.projected_attention_backward(slopes)
        assert all(grad.isnan().all() for grad in grads)


@pytest.mark.usefixtures("_sums_in_one_order", "_small_chunks")
def test_same_bits_again_and_alone() -> None:
    """The bits are the same on every run, and for a batch element by itself."""
    torch.manual_seed(0)
    case = Case(batch=2, rows=35, mask=True, blocks=2)
    assert case.mask is not None
    for i in range(2):
        one = slice(i, i + 1)
        given = (case.query[:, one], case.inputs[one], case.weight, case.bias, case.mask[one], None)
        out, lse = kernels.projected_attention_forward(ProjectedAttention(*given, scale=case.scale, eps=case.eps))
        assert torch.equal(out, case.out[:, one]) and torch.equal(lse, case.lse[:, one])
        slopes = ProjectedAttentionBackward(
            case.dout[:, one], case.dlse[:, one], *given, out, lse, case.scale, case.eps, EVERYTHING
        )
        dquery, dinputs, *_ = kernels.projected_attention_backward(slopes)
        assert torch.equal(dquery, case.grads[0][:, one]) and torch.equal(dinputs, case.grads[1][one])


@pytest.mark.parametrize("layout", ["columns first", "step 2", "offset by 3"])
def test_layouts(layout: str) -> None:
    torch.manual_seed(0)
    plain = Case()
    moved = {
        "columns first": lambda t: t.mT.contiguous().mT,
        "step 2": lambda t: t.repeat_interleave(2, -1).repeat_interleave(2, -2)[..., ::2, ::2],
        "offset by 3": lambda t: torch.cat([t.new_full((3,), math.nan), t.reshape(-1)])[3:].view(t.shape),
    }[layout]
    tensors = (*(moved(t) for t in (plain.query, plain.inputs, plain.weight)), plain.bias)
    out, lse = kernels.projected_attention_forward(ProjectedAttention(*tensors, scale=plain.scale, eps=plain.eps))
    torch.testing.assert_close(out, plain.out)
    grads = kernels.projected_attention_backward(
        ProjectedAttentionBackward(
            moved(plain.dout), plain.dlse, *tensors, None, None, out, lse, plain.scale, plain.eps, EVERYTHING
        )
    )
    for ours, right in zip(grads, plain.grads, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


def test_what_is_refused() -> None:
    query, inputs = torch.zeros(1, 1, 1, 2, 257), torch.zeros(1, 3, 4)
    assert "at most 256 wide" in str(kernels.unsupported(query, inputs, torch.zeros(1, 257, 4), torch.zeros(1, 8, 4)))
    narrow = query[..., :8]
    assert "values 257" in str(kernels.unsupported(narrow, inputs, torch.zeros(1, 8, 4), torch.zeros(1, 257, 4)))
    assert "bfloat16" in str(kernels.unsupported(narrow, inputs.bfloat16(), torch.zeros(1, 8, 4), torch.zeros(1, 8, 4)))
    assert kernels.unsupported(narrow, inputs, torch.zeros(1, 8, 4), torch.zeros(1, 8, 4)) is None

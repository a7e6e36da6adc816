"""The Triton kernels in Triton's interpreter. tests/test_interpreter.py runs this file with TRITON_INTERPRET=1.

The interpreter checks no bounds: inputs lie between margins of NaN, results between margins that must stay as they
were.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from cmab_kernels.attention import triton as kernels
from cmab_kernels.attention.contract import Attention, AttentionBackward
from cmab_kernels.attention.state import AttentionState, subtract_state
from cmab_kernels.attention.triton import runs
from cmab_kernels.attention.triton.launch import backward_keys_tiles
from cmab_kernels.attention.triton.rows import sum_runs
from cmab_kernels.runtime import checks
from cmab_kernels.runtime.triton_launch import Products
from cmab_kernels.testing import LAWS, between_margins, bound, guarded_results, oracles, row_error
from cmab_kernels.testing.cubin import as_if_on

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"

EVERYTHING = (True, True, True, False)


@pytest.fixture(autouse=True)
def margins() -> Iterator[None]:
    """Put results between margins of memory, and check at the end of the test that no kernel wrote to the margins."""
    with guarded_results():
        yield


class Case:
    """Inputs, the results of the kernels, and the results of the definition in float64."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: tuple[Tensor, Tensor] | None = None,
        scale: float | None = None,
        needs: tuple[bool, ...] = EVERYTHING,
        cotangents: tuple[Tensor, Tensor] | None = None,
        key_bias: Tensor | None = None,
    ) -> None:
        if key_bias is not None:
            needs = (*needs[:3], True)
        self.key_bias = key_bias
        self.inputs, self.mask, self.cu_seqlens, self.state, self.needs = (q, k, v), mask, cu_seqlens, state, needs
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.out, self.lse = kernels.attention_forward(
            Attention(*self.inputs, mask, cu_seqlens, *(state or (None, None)), key_bias, self.scale)
        )
        self.dout, self.dlse = cotangents or (
            torch.randn(self.out.shape, dtype=self.out.dtype),
            torch.randn(self.lse.shape).double(),
        )
        self.grads = kernels.attention_backward(
            AttentionBackward(
                self.dout, self.dlse, *self.inputs, mask, cu_seqlens, self.out, self.lse, key_bias, self.scale, needs
            )
        )
        self.grads = self.grads[: len(self.given())]

    def given(self) -> tuple[Tensor, ...]:
        """The inputs that have a gradient."""
        return self.inputs if self.key_bias is None else (*self.inputs, self.key_bias)

    def expected(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        wide = tuple(t.detach().double().requires_grad_() for t in self.given())
        out, lse = oracles.attention(*wide[:3], self.mask, self.cu_seqlens, self.scale, *wide[3:])
        if self.state is not None:
            out, lse = _merged((out, lse), (self.state[0].double(), self.state[1]))
        some = lse > -math.inf
        loss = (out * self.dout)[some].sum() + (lse * self.dlse)[some].sum()
        return (out.detach(), lse.detach()), torch.autograd.grad(loss, wide) if loss.requires_grad else tuple(
            torch.zeros_like(t) for t in wide
        )

    def check(self, tolerance: float) -> None:
        """Check each row within `tolerance` of its size, and lse likewise.

        The terms in rows of gradients may cancel, so the size of a row is taken as at least that of the median row.
        """
        (out, lse), grads = self.expected()
        assert not self.out.isnan().any() and (row_error(self.out, out) <= tolerance).all(), "out"
        assert torch.equal(self.lse == -math.inf, lse == -math.inf) and self.lse.dtype == torch.float64
        some = lse > -math.inf
        assert ((self.lse - lse)[some].abs() <= tolerance * (1 + lse[some].abs())).all(), "lse"
        if self.key_bias is not None:
            ours, right = self.grads[3], grads[3]
            error, size = (ours.double() - right).abs(), right.abs().amax() + self.grads[1].abs().amax()
            assert (ours.shape, ours.dtype) == (right.shape, self.key_bias.dtype), "gradient of the bias"
            assert (error <= 4 * tolerance * size).all(), f"gradient of the bias: {float(error.max() / size)}"
        for name, need, ours, right, like in zip("qkv", self.needs, self.grads, grads, self.inputs, strict=False):
            if not need:
                assert ours.shape == (0,)
                continue
            assert ours.shape == like.shape and ours.dtype == like.dtype and ours.is_contiguous()
            rows = right.norm(dim=-1)
            size = torch.maximum(rows, rows[rows > 0].median() if (rows > 0).any() else rows)
            error = (ours.double() - right).norm(dim=-1)
            assert (error <= 4 * tolerance * size).all(), f"gradient of {name}: {float((error / size).max())}"


def _merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(a[1], b[1])
    anchor = lse.masked_fill(lse == -math.inf, 0.0)
    return sum((part - anchor).exp()[..., None] * out for out, part in (a, b)), lse


def _inputs(
    batch: int, heads: int, latents: int, keys: int, width: int, value_width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((latents, width), (keys, width), (keys, value_width))
    return tuple(between_margins(torch.randn(batch, heads, *shape).to(dtype)) for shape in shapes)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "latents, keys, width, value_width",
    [
        (5, 70, 8, 8),
        (1, 1, 1, 1),
        (17, 64, 9, 33),
        (128, 65, 16, 16),
        (3, 63, 100, 7),
        (2, 40, 256, 129),
    ],
)
def test_shapes(dtype: torch.dtype, latents: int, keys: int, width: int, value_width: int) -> None:
    """The last tiles of queries and of keys are not full, and widths are odd."""
    Case(*_inputs(2, 2, latents, keys, width, value_width, dtype)).check(TOLERANCE[dtype])


@pytest.mark.parametrize("dtype, keys", [(torch.float64, 2100), (torch.float32, 1025), (torch.float16, 1100)])
def test_several_runs(dtype: torch.dtype, keys: int) -> None:
    Case(*_inputs(1, 2, 5, keys, 16, 8, dtype)).check(TOLERANCE[dtype])


def test_many_runs() -> None:
    """The gradient of the queries is the sum of the shares of all runs, which are read in several chunks."""
    cut = runs.cut_keys(1, 3, 70_000, False)
    shares, dquery = torch.randn(cut.slots, 2, 3, 5, dtype=torch.float64), torch.empty(1, 2, 3, 5, dtype=torch.float64)
    sum_runs(shares, None, dquery, (1, 2, 3, 70_000), (cut.runs, cut.most_runs), 0.5)
    assert cut.slots > 64 and torch.allclose(dquery[0], 0.5 * shares.sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("left", ["most", "some", "nothing", "nothing there", "nothing removed", "nan"])
def test_removal(left: str) -> None:
    """The state without some keys equals its formula, also in edge cases."""
    q, k, v = _inputs(2, 3, 70, 9, 4, 5, torch.float64)
    gone = slice(0, {"most": 1, "some": 5, "nan": 5, "nothing removed": 0}.get(left, 9))
    out, lse = kernels.attention_forward(Attention(q, k, v, scale=0.5))
    if left == "nothing there":
        out, lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    if left == "nan":
        lse[1, 2, 0] = math.nan
    part = AttentionState(*kernels.attention_forward(Attention(q, k[:, :, gone], v[:, :, gone], scale=0.5)))
    *ours, reliable = kernels.attention_removal(
        Attention(q, k[:, :, gone], v[:, :, gone], None, None, out, lse, scale=0.5)
    )
    state, wanted = subtract_state(AttentionState(out, lse), part)
    assert torch.equal(reliable, wanted)
    for mine, right in zip(ours, state, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("keys", [9, 3000])
@pytest.mark.parametrize("inside", [math.nan, math.inf])
@pytest.mark.parametrize("lse", [-math.inf, math.inf, math.nan])
def test_a_state_that_is_not_clean(lse: float, inside: float, keys: int) -> None:
    """An empty row adds nothing, whatever it contains. An lse that no keys can have makes its row NaN, whether it is
    added or removed."""
    q, k, v = _inputs(1, 2, 3, keys, 4, 5, torch.float64)
    out, log = kernels.attention_forward(Attention(q, k[:, :, :8], v[:, :, :8], scale=0.5))
    row = (0, 1, 2)
    out[row], log[row] = 0.0, -math.inf
    bad_out, bad_log = out.clone(), log.clone()
    bad_out[row], bad_log[row] = inside if lse == -math.inf else 1.0, lse
    spoilt = torch.zeros_like(log, dtype=torch.bool)
    spoilt[row] = lse != -math.inf
    for call in (
        lambda out, log: kernels.attention_forward(Attention(q, k, v, None, None, out, log, scale=0.5)),
        lambda out, log: kernels.attention_removal(
            Attention(q, k[:, :, :2], v[:, :, :2], None, None, out, log, scale=0.5)
        ),
        lambda out, log: kernels.attention_removal(
            Attention(q, k[:, :, :0], v[:, :, :0], None, None, out, log, scale=0.5)
        ),
    ):
        (ours, ours_log, *rest), (right, right_log, *wanted) = call(bad_out, bad_log), call(out, log)
        assert torch.equal(ours.isnan().all(-1), spoilt) and torch.equal(ours_log.isnan(), spoilt)
        assert torch.equal(ours[~spoilt], right[~spoilt]) and torch.equal(ours_log[~spoilt], right_log[~spoilt])
        assert not rest or (torch.equal(rest[0][~spoilt], wanted[0][~spoilt]) and not rest[0][spoilt].any())


@pytest.mark.parametrize("latents, keys", [pytest.param(129, 70, marks=pytest.mark.sampled), (300, 140)])
def test_several_blocks_of_queries(latents: int, keys: int) -> None:
    Case(*_inputs(1, 1, latents, keys, 16, 8, torch.float64)).check(1e-12)


@pytest.mark.parametrize(
    "capability, latents, keys, width, value_width",
    [(90, 129, 530, 16, 16), (80, 70, 300, 30, 17), (90, 70, 300, 64, 64), (100, 70, 300, 9, 50)],
)
def test_float32_in_chunks(capability: int, latents: int, keys: int, width: int, value_width: int) -> None:
    """Gradients are added up over blocks of queries and chunks of keys; the last ones are not full.

    Masked keys are NaN, and fill some tiles.
    """
    q, k, v = _inputs(1, 1, latents, keys, width, value_width, torch.float32)
    mask = torch.rand(1, keys) < 0.2
    mask[0, 60:200] = True
    k[:, :, mask[0]], v[:, :, mask[0]] = math.nan, math.inf
    with as_if_on(capability):
        Case(q, k, v, between_margins(mask)).check(TOLERANCE[torch.float32])


def test_masked_keys_beside_low_logits() -> None:
    """A masked key is read as 0, and its logit is far above all others, so without the mask its weight would be
    infinite."""
    q, k, v = torch.full((1, 1, 3, 2), 1e2), torch.full((1, 1, 70, 2), -1e2), torch.randn(1, 1, 70, 3)
    case = Case(q, k, v, torch.arange(70)[None] % 3 == 0, scale=1.0)
    assert all(grad.isfinite().all() for grad in case.grads)


@pytest.mark.parametrize("latents", [6, 70])
def test_packed_sets_in_float32(latents: int) -> None:
    """Sets with no key, with a part of a tile, and with several chunks have the same bits as each set alone."""
    sizes = [0, 3, 0, 600, 1, 64]
    offsets = torch.tensor([0, *itertools.accumulate(sizes)])
    q, k, v = torch.randn(len(sizes), 1, latents, 16), *_inputs(1, 1, sum(sizes), sum(sizes), 16, 5, torch.float32)[1:]
    packed = Case(q, k, v, torch.rand(1, sum(sizes)) < 0.1, offsets)
    packed.check(TOLERANCE[torch.float32])
    for i, (first, last) in enumerate(itertools.pairwise(offsets.tolist())):
        cotangents = packed.dout[i : i + 1], packed.dlse[i : i + 1]
        alone = Case(
            q[i : i + 1], k[:, :, first:last], v[:, :, first:last], packed.mask[:, first:last], cotangents=cotangents
        )
        ours = packed.grads[0][i : i + 1], *(grad[:, :, first:last] for grad in packed.grads[1:])
        assert all(map(torch.equal, ours, alone.grads))


def test_wide_heads_in_float64_where_shared_memory_is_little() -> None:
    """If a block has 99 KiB of shared memory, a tile holds 8 keys wider than 128."""
    with as_if_on(86):
        assert backward_keys_tiles(Products(torch.float64, "ieee"), torch.device("cpu"), 130).BLOCK_N == 8
        Case(*_inputs(1, 1, 20, 21, 130, 200, torch.float64)).check(1e-12)


@pytest.mark.parametrize("masked", [slice(0, 64), slice(64, 128), slice(1024, 1100), slice(1, None), slice(None)])
def test_masks_hide_nan(masked: slice) -> None:
    """Masks hide a first, middle or last tile, a whole run, all keys but one,
    all keys, or none; hidden keys are NaN."""
    q, k, v = _inputs(2, 1, 5, 1100, 8, 4, torch.float64)
    mask = torch.zeros(2, 1100, dtype=torch.bool)
    mask[1, masked] = True
    k[1, :, masked], v[1, :, masked] = math.nan, math.inf
    case = Case(q, k, v, between_margins(mask))
    case.check(1e-12)
    for grad in case.grads[1:]:
        assert grad[1, :, masked].eq(0).all()


def test_ignored_keys_have_no_gradient_of_a_bad_query() -> None:
    """Ignored keys get gradient 0 even if the incoming gradient of a query is NaN, which reaches all other keys."""
    q, k, v = _inputs(1, 1, 5, 70, 8, 4, torch.float64)
    dout = torch.randn(1, 1, 5, 4).double()
    dout[:, :, 2] = math.nan
    mask = torch.arange(70)[None] % 3 == 0
    for grad in Case(q, k, v, mask, cotangents=(dout, torch.zeros(1, 1, 5).double())).grads[1:]:
        assert grad[:, :, mask[0]].eq(0).all() and grad[:, :, ~mask[0]].isnan().all()


def test_a_mask_of_any_strides() -> None:
    mask = (torch.rand(1, 70, 2) < 0.3)[..., 0].expand(2, 70)
    Case(*_inputs(2, 1, 4, 70, 8, 8, torch.float64), mask).check(1e-12)


@pytest.mark.parametrize("sizes", [[0, 3, 0, 64, 1, 129, 0], [1030, 7, 0, 1100], [1], [0], [1100]])
@pytest.mark.parametrize("dtype, beyond", [(torch.int32, 0), (torch.int64, 0), (torch.int64, 90)])
def test_packed_sets(sizes: list[int], dtype: torch.dtype, beyond: int) -> None:
    """Packed sets are right, whether slots are counted by set or by offset, and have the same bits as each set alone;
    rows beyond the last set have no effect."""
    offsets, keys = torch.tensor([0, *itertools.accumulate(sizes)], dtype=dtype), sum(sizes) + beyond
    q, k, v = torch.randn(len(sizes), 1, 6, 8).double(), *_inputs(1, 1, keys, keys, 8, 5, torch.float64)[1:]
    packed = Case(q, k, v, torch.rand(1, keys) < 0.1, offsets)
    packed.check(1e-12)
    for i, (first, last) in enumerate(itertools.pairwise(offsets.tolist())):
        part = slice(first, last)
        alone = Case(
            q[i : i + 1],
            k[:, :, part],
            v[:, :, part],
            packed.mask[:, part],
            cotangents=(packed.dout[i : i + 1], packed.dlse[i : i + 1]),
        )
        assert torch.equal(alone.out[0], packed.out[i]) and torch.equal(alone.lse[0], packed.lse[i])
        assert torch.equal(alone.grads[0][0], packed.grads[0][i])
        assert all(torch.equal(a, b[:, :, part]) for a, b in zip(alone.grads[1:], packed.grads[1:], strict=True))


BAD_OFFSETS = (
    [-5, 900, 20, 3, 70],
    [70, 0, 70, 0, 70],
    [2**40, -(2**40), 10, 20, 1000],
    [0, 9, 9, 40, 71],
    [1, 9, 9, 40, 70],
    [0, 9, 8, 40, 70],
)


@pytest.mark.parametrize("offsets", BAD_OFFSETS)
@pytest.mark.parametrize("keys", [70, 5000])
def test_wrong_offsets(offsets: list[int], keys: int) -> None:
    """If values are not read, bad offsets make every result NaN, and the kernels read only validated offsets.

    With 5,000 keys there are fewer slots than runs, and offsets determine the slots.
    """
    given = torch.tensor(offsets) * (keys // 70)
    q, k, v = torch.randn(4, 1, 3, 8), *_inputs(1, 1, 1, keys, 8, 8, torch.float32)[1:]
    out, lse = kernels.attention_forward(Attention(q, k, v, None, given, None, None, scale=1.0))
    assert out.isnan().all() and lse.isnan().all()
    grads = kernels.attention_backward(
        AttentionBackward(out, lse, q, k, v, None, given, out, lse, None, 1.0, EVERYTHING)
    )
    assert all(grad.isnan().all() for grad in grads)
    checked_offsets = runs.checked_offsets(given, keys)
    assert checked_offsets is not None and checked_offsets.tolist() == [0, keys, keys, keys, keys, 1]


@pytest.mark.parametrize("sizes", [[], [0], [5, 0, 65], [1] * 3000])
def test_vetted_offsets(sizes: list[int]) -> None:
    """Good offsets with any strides are kept, and a single descent among many sets is found wherever it is."""
    good = [0, *itertools.accumulate(sizes)]
    given = torch.tensor(good).repeat_interleave(3)[::3]
    checked_offsets = runs.checked_offsets(given, good[-1])
    assert checked_offsets is not None and checked_offsets.tolist() == [*good, 0]
    for place in {1, len(good) // 2, len(good) - 2} if len(good) > 2 else ():
        bad = given.clone()
        bad[place] = bad[place - 1] - 1
        spoilt = runs.checked_offsets(bad, good[-1])
        assert spoilt is not None and spoilt[-1] == 1, place


def test_the_host_waits_for_no_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """No value of a tensor on a GPU is read on the host; the tensors of the interpreter represent such tensors."""

    def wait(*_: object) -> None:
        raise AssertionError("the host would wait for the device")

    class OnGPU:
        device = torch.device("cuda")

        def tolist(self) -> None:
            wait()

    q, k, v = torch.randn(3, 1, 3, 8), *_inputs(1, 1, 1, 70, 8, 8, torch.float32)[1:]
    checks.check_offsets(OnGPU(), 70)
    offsets = torch.tensor([0, 9, 40, 70])
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(Tensor, name, wait)
    out, lse = kernels.attention_forward(Attention(q, k, v, None, offsets, None, None, scale=1.0))
    kernels.attention_backward(AttentionBackward(out, lse, q, k, v, None, offsets, out, lse, None, 1.0, EVERYTHING))
    with pytest.raises(AssertionError, match="wait"):
        checks.check_offsets(offsets, 70)


@pytest.mark.parametrize("keys, packed", [(0, False), (0, True), (50, False), (1100, True)])
def test_states(keys: int, packed: bool) -> None:
    """Keys merge with an incoming state with any strides; some of its rows, or all, are empty."""
    q, k, v = _inputs(1, 2, 5, keys, 8, 6, torch.float64)
    offsets = torch.tensor([0, keys]) if packed else None
    out = torch.randn(2, 1, 6, 5).double().transpose(0, 1).mT
    lse = (10 * torch.randn(1, 5, 2).double()).mT
    lse[:, :, 1], out[:, :, 1] = -math.inf, 0.0
    Case(q, k, v, None, offsets, (out, lse)).check(1e-12)
    empty = (
        torch.zeros(1, 1, 1, 1).double().expand(1, 2, 5, 6),
        torch.full((1, 1, 1), -math.inf).double().expand(1, 2, 5),
    )
    merged, plain = Case(q, k, v, None, offsets, empty), Case(q, k, v, None, offsets)
    merged.check(1e-12)
    assert torch.equal(merged.out, plain.out) and torch.equal(merged.lse, plain.lse)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_run_joins_a_state_with_the_bits_of_a_merge(dtype: torch.dtype) -> None:
    """A set of one run is merged with a state by the kernel that reads the set; if it is packed, another kernel merges
    it."""
    q, k, v, old = (torch.randn(1, 2, n, 8, dtype=dtype) for n in (5, 70, 70, 30))
    state = kernels.attention_forward(Attention(q, old, old, scale=0.5))
    alone = kernels.attention_forward(Attention(q, k, v, None, None, *state, scale=0.5))
    packed = kernels.attention_forward(Attention(q, k, v, None, torch.tensor([0, 70]), *state, scale=0.5))
    assert all(map(torch.equal, alone, packed))
    both = kernels.attention_forward(
        Attention(q, torch.cat((old, k), 2), torch.cat((old, v), 2), None, None, None, None, scale=0.5)
    )
    assert (row_error(alone[0], both[0].double()) <= TOLERANCE[dtype]).all()
    assert torch.allclose(alone[1], both[1], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("latents", [5, 129])
def test_needs(latents: int) -> None:
    """Gradients that are not requested are not computed, and the others keep their bits, for one block of queries and
    for several."""
    inputs = _inputs(1, 1, latents, 40, 8, 12, torch.float32)
    whole = Case(*inputs)
    for needs in itertools.product((False, True), (False, True), (False, True), (False,)):
        grads = kernels.attention_backward(
            AttentionBackward(
                whole.dout, whole.dlse, *inputs, None, None, whole.out, whole.lse, None, whole.scale, needs
            )
        )
        for need, grad, reference in zip(needs, grads, whole.grads, strict=False):
            assert torch.equal(grad, reference) if need else grad.shape == (0,)


@pytest.mark.parametrize("extents", list(itertools.product((0, 2), (0, 2), (0, 3), (0, 4))))
def test_empty_extents(extents: tuple[int, int, int, int]) -> None:
    case = Case(*_inputs(*extents, 6, 3, torch.float64))
    case.check(1e-12)
    assert not any(grad.isnan().any() for grad in case.grads)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("latents, keys, width, value_width", [(2, 1100, 16, 16), (17, 197, 8, 24)])
def test_accuracy(law: str, latents: int, keys: int, width: int, value_width: int) -> None:
    """Float32 results stay within the bounds that hold for every implementation."""
    check_accuracy(law, latents, keys, width, value_width)


def check_accuracy(law: str, latents: int, keys: int, width: int, value_width: int) -> None:
    q, k, v = (LAWS[law](1, 2, n, w) for n, w in ((latents, width), (keys, width), (keys, value_width)))
    case = Case(q, k, v, cotangents=(torch.randn(1, 2, latents, value_width), torch.zeros(1, 2, latents).double()))
    (out, lse), grads = case.expected()
    leaves = tuple(t.clone().requires_grad_() for t in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(*leaves)
    score = oracles.largest_score(q, k)
    assert (
        not case.out.isnan().any()
        and (row_error(case.out, out) <= bound(torch.float32, score, row_error(theirs, out))).all()
    )
    assert (case.lse - lse).abs().max() <= 8 * torch.finfo(torch.float32).eps * (score + 4)
    own = torch.autograd.grad(theirs, leaves, case.dout)
    terms = oracles.attention_terms(case.dout.double(), *(t.double() for t in (q, k, v)), out, lse)
    for name, mine, right, other, term in zip("qkv", case.grads, grads, own, terms, strict=True):
        size = torch.maximum(right.norm(dim=-1), 0.05 * term.norm(dim=-1)).clamp(
            min=1e-30 * float(term.norm(dim=-1).max())
        )
        allowed = bound(torch.float32, score, (other.double() - right).norm(dim=-1) / size, factor=4.0)
        assert ((mine.double() - right).norm(dim=-1) / size <= allowed).all(), name


@pytest.mark.parametrize("logit", [0.0, 88.8, -88.8, 104.0, -104.0, 1e4, -1e4, 1e38, -1e38, -math.inf])
@pytest.mark.parametrize("among", [False, True])
def test_extreme_logits(logit: float, among: bool) -> None:
    """Either all keys have the extreme logit, or one key has it and the others have logit 0."""
    k = torch.full((1, 1, 70, 1), 0.0 if among else logit)
    k[:, :, 33] = logit
    q, v = torch.ones(1, 1, 2, 1), torch.randn(1, 1, 70, 3)
    case = Case(q, k, v, scale=1.0)
    expected, lse = oracles.attention(q, k, v, scale=1.0)
    assert not case.out.isnan().any() and row_error(case.out, expected).max() < 1e-5
    assert (
        (case.lse == lse) | ((case.lse - lse).abs() <= 1e-6 + 4 * torch.finfo(torch.float32).eps * abs(logit))
    ).all()
    if math.isfinite(logit):
        assert not any(grad.isnan().any() for grad in case.grads)


def test_small_weights_in_float16() -> None:
    """Two thousand keys have weight 1e-7, and one has weight 1.

    Their weights are near the smallest float16 number, but make up the whole result, and must not be flushed to 0.
    """
    k = torch.zeros(1, 1, 2000, 1, dtype=torch.float16)
    k[:, :, 0] = 16.0
    v = torch.full((1, 1, 2000, 1), 1000.0, dtype=torch.float16)
    v[:, :, 0] = 0.0
    case = Case(torch.ones(1, 1, 1, 1, dtype=torch.float16), k, v, scale=1.0)
    (out, _), _ = case.expected()
    assert row_error(case.out, out).max() < 1e-3


def test_large_gradients_in_float16() -> None:
    """The loss is scaled: incoming gradients exceed the range of float16, and the gradients of the inputs do not."""
    q, k, v = _inputs(1, 1, 4, 1000, 8, 8, torch.float16)
    Case(q, k, v, cotangents=(torch.randn(1, 1, 4, 8) * 1e5, torch.zeros(1, 1, 4).double())).check(4e-3)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
def test_scales(scale: float) -> None:
    q, k, v = _inputs(1, 2, 5, 130, 8, 8, torch.float64)
    Case(q, k, v, torch.rand(1, 130) < 0.3, scale=scale).check(1e-12)


def test_infinities_stay_in_their_row() -> None:
    """A NaN in a query, or a score of +inf, makes one row NaN.

    Other rows keep their bits, and gradients of keys lose only the share of that row.
    """
    q, k, v = _inputs(1, 2, 40, 100, 8, 4, torch.float32)
    clean = Case(q, k, v)
    for poison in (math.nan, math.inf):
        bad = q.clone()
        bad[0, 1, 17, 3] = poison
        out, lse = kernels.attention_forward(Attention(bad, k, v, scale=clean.scale))
        spoilt = torch.zeros(1, 2, 40, dtype=torch.bool)
        spoilt[0, 1, 17] = True
        assert torch.equal(out.isnan().any(-1), spoilt) and torch.equal(lse.isnan(), spoilt)
        assert torch.equal(out[~spoilt], clean.out[~spoilt]) and torch.equal(lse[~spoilt], clean.lse[~spoilt])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_large_query_changes_no_other_row(dtype: torch.dtype) -> None:
    """One query's running maximum is rescaled at every block of keys; the other rows of its tile keep their bits."""
    q, k, v = _inputs(1, 2, 40, 300, 8, 8, dtype)
    clean = Case(q, k, v)
    large = q.clone()
    large[:, :, 17] *= 100
    changed = Case(large, k, v, cotangents=(clean.dout, clean.dlse))
    others = torch.arange(40) != 17
    for ours, wanted in zip(
        (changed.out, changed.lse, changed.grads[0]), (clean.out, clean.lse, clean.grads[0]), strict=True
    ):
        assert torch.equal(ours[:, :, others], wanted[:, :, others])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns first": lambda t: t.mT.contiguous().mT,
    "step 2": lambda t: t.repeat_interleave(2, -1).repeat_interleave(2, -2)[..., ::2, ::2],
    "offset by 3": lambda t: torch.cat([t.new_full((3,), math.nan), t.reshape(-1)])[3:].view(t.shape),
    "expanded": lambda t: t[:1, :1].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """Inputs and incoming gradients may have any strides; the gradient of a sum has stride 0."""
    inputs = tuple(LAYOUTS[layout](t) for t in _inputs(2, 2, 5, 133, 16, 7, torch.float64))
    dout, dlse = torch.randn(2, 2, 5, 7).double(), torch.randn(2, 2, 5).double()
    Case(*inputs, cotangents=(LAYOUTS[layout](dout), LAYOUTS[layout](dlse[..., None])[..., 0])).check(1e-12)
    Case(
        *inputs, cotangents=(dout.new_ones(1, 1, 1, 1).expand(dout.shape), dlse.new_ones(1, 1, 1).expand(dlse.shape))
    ).check(1e-12)


def test_a_result_that_the_batch_shares() -> None:
    """`vmap` over the incoming gradient alone passes to its rule inputs and results with stride 0 along the batch."""
    query, key, value = _inputs(1, 2, 3, 5, 4, 2, torch.float64)
    out, lse = kernels.attention_forward(Attention(query, key, value, scale=0.5))
    shared = [t.expand(3, *t.shape[1:]) for t in (query, key, value, out, lse)]
    gradients = [
        kernels.attention_backward(
            AttentionBackward(
                torch.ones(3, 2, 3, 2).double(),
                lse.new_zeros(3, 2, 3),
                *rows,
                None,
                None,
                *results,
                None,
                0.5,
                EVERYTHING,
            )
        )
        for rows, results in (
            (shared[:3], shared[3:]),
            ([t.contiguous() for t in shared[:3]], [t.contiguous() for t in shared[3:]]),
        )
    ]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.usefixtures("_sums_in_one_order")
def test_same_bits_again_and_alone() -> None:
    """The bits are the same on every run, and for a batch element by itself, with a mask and several runs of keys."""
    q, k, v = _inputs(2, 1, 5, 1100, 8, 8, torch.float32)
    mask = torch.rand(2, 1100) < 0.2
    whole = Case(q, k, v, mask)
    cotangents = (whole.dout, whole.dlse)
    again = Case(q, k, v, mask, cotangents=cotangents)
    assert all(
        torch.equal(a, b)
        for a, b in zip((again.out, again.lse, *again.grads), (whole.out, whole.lse, *whole.grads), strict=True)
    )
    for i in range(2):
        one = slice(i, i + 1)
        alone = Case(q[one], k[one], v[one], mask[one], cotangents=(whole.dout[one], whole.dlse[one]))
        for a, b in zip((alone.out, alone.lse, *alone.grads), (whole.out, whole.lse, *whole.grads), strict=True):
            assert torch.equal(a, b[one])


@pytest.mark.parametrize("queries", [1, 128, 129, 1000, 10**6])
def test_runs_cover_the_keys(queries: int) -> None:
    """Runs cover every key, for any number of keys: there are at most `most_runs` runs, and only the last may be
    short."""
    for keys in (0, 1, 1023, 1024, 1025, 262_144, 262_145, 10**6, 2**31 - 1):
        cut = runs.cut_keys(1, queries, keys, packed=False)
        length = int(runs.run_length.fn(keys, cut.most_runs))
        assert length % 128 == 0 and length >= 1024
        assert (
            cut.runs <= cut.most_runs
            and cut.runs * length >= keys
            and (cut.runs == 1 or (cut.runs - 1) * length < keys)
        )
        assert cut.slots * queries <= max(runs.MOST_RUNS * runs.MOST_QUERIES, queries + 128), (
            "the workspace stays within bounds"
        )
        assert -(-keys // length) <= 1 + keys // 1024


@triton.jit
def _bounds(first, last, run, most_runs, found):
    start, end = runs.run_bounds(first, last, run, most_runs)
    tl.store(found, start)
    tl.store(found + 1, end)


@pytest.mark.parametrize("keys", [24_000_000, 40_000_000, 2**31 - 2**24])
@pytest.mark.parametrize("first", [0, 1000])
@pytest.mark.parametrize("most_runs", [256, 2, 1])
def test_runs_of_slots_that_no_run_uses(keys: int, first: int, most_runs: int) -> None:
    """Packed sets have a slot for every 1,024 keys; a long set uses few of them, and the others hold no key."""
    found = torch.empty(2, dtype=torch.int64)
    length = int(runs.run_length.fn(keys - first, most_runs))
    count = -(-(keys - first) // length)
    for run in (0, 1, count - 1, count, count + 1, keys // 1024, keys // 1024 + 4096):
        _bounds[(1,)](first, keys, run, most_runs, found)
        start, end = found.tolist()
        wanted = first + run * length
        assert (start, end) == ((wanted, min(wanted + length, keys)) if run < count else (keys, keys))


def test_bfloat16_is_refused() -> None:
    q = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    assert "bfloat16" in str(kernels.unsupported(q, q, q))
    assert kernels.unsupported(q.float(), q.float(), q.float()) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "latents, keys, packed, scale", [(5, 70, False, 0.0), (130, 70, False, -0.7), (4, 1100, True, None)]
)
def test_a_bias(latents: int, keys: int, packed: bool, scale: float | None, dtype: torch.dtype) -> None:
    """A bias of each key, broadcast over the batch; keys with a bias of -inf, which hold NaN, do not count."""
    q, k, v = _inputs(1 if packed else 2, 2, latents, keys, 8, 6, dtype)
    offsets = torch.tensor([0, 9, 9, keys]) if packed else None
    if packed:
        q = q.expand(3, -1, -1, -1)
    sums = torch.promote_types(dtype, torch.float32)
    bias = 3 * torch.randn(1, 2, 2 * keys, dtype=sums)[:, :, ::2]
    bias[:, 1, 3::7] = -math.inf
    k[:, 1, 3::7], v[:, 1, 3::7] = math.nan, math.inf
    mask = torch.rand(k.shape[0], keys) < 0.2
    case = Case(q, k, v, mask, offsets, scale=scale, key_bias=bias.expand(k.shape[0], -1, -1))
    case.check(TOLERANCE[dtype])
    assert not case.grads[3][:, 1, 3::7].any() and not case.grads[1][:, 1, 3::7].any()


@pytest.mark.parametrize("capability", [80, 90])
def test_a_bias_in_float32_in_parts(capability: int) -> None:
    q, k, v = _inputs(1, 1, 70, 300, 30, 17, torch.float32)
    with as_if_on(capability):
        Case(q, k, v, torch.rand(1, 300) < 0.2, key_bias=3 * torch.randn(1, 1, 300)).check(TOLERANCE[torch.float32])

"""The classifiers and ridge without a scikit-learn counterpart: definitions, streams, layouts, dtypes, gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cmab_kernels import measure
from cmab_kernels.intention import variants
from cmab_kernels.intention.variants import moments

from .data import CLASSIFIERS, FITTED, blobs, score

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def test_pooled_scatter_is_the_formula(impl: str) -> None:
    """The weights are w = (sum of class scatters + alpha I)^-1 X'y with y = members / N1 - others / N0:
    LDA's direction for two classes."""
    key, labels = blobs(2, 3, 60, 5, 3)
    ours = variants.pooled_class_scatter(key, labels, 3, 0.7, impl=impl)
    member = (labels[..., None] == torch.arange(3)).double()[:, None].expand(2, 3, 60, 3)
    relabelled = member / member.sum(2, keepdim=True) - (1 - member) / (1 - member).sum(2, keepdim=True)
    means = member.mT @ key / member.sum(2)[..., None]
    centred = key - member @ means
    wanted = torch.linalg.solve(centred.mT @ centred + 0.7 * torch.eye(5, dtype=torch.float64), key.mT @ relabelled)
    torch.testing.assert_close(ours.coefficients, wanted)
    others = (1 - member).mT @ key / (1 - member).sum(2)[..., None]
    at_means = [(m * ours.coefficients.mT).sum(-1) + ours.intercept for m in (means, others)]
    torch.testing.assert_close(at_means[0], -at_means[1])
    assert at_means[0].gt(0).all()

    key, labels = blobs(2, 3, 61, 5, 2)
    direction = variants.pooled_class_scatter(key, labels, 2, impl=impl).coefficients
    for other in (variants.lda(key, labels, 2, impl=impl), variants.lssvm(key, labels, 2, 0.0, impl=impl)):
        torch.testing.assert_close(
            torch.cosine_similarity(direction, other.coefficients, dim=-2), torch.ones(2, 3, 2, dtype=torch.float64)
        )


def test_lssvm_is_ridge_on_signs(impl: str) -> None:
    key, labels = blobs(2, 3, 40, 5, 4)
    signs = 2 * (labels[..., None] == torch.arange(4)).double()[:, None].expand(2, 3, 40, 4) - 1
    weights = torch.rand(2, 40, dtype=torch.float64)
    ours = variants.lssvm(key, labels, 4, 0.6, weights=weights, impl=impl)
    theirs = variants.ridge(key, signs, 0.6, weights=weights, impl=impl)
    for name in ("coefficients", "intercept", "offset", "centre"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize("name", FITTED)
def test_weights_count_rows(impl: str, name: str) -> None:
    """A row of weight 2 counts as two rows, and one of weight 0 as none; so does a masked row, whatever it holds."""
    key, labels = blobs(2, 3, 30, 4, 3)
    counts = torch.arange(30).expand(2, -1) % 3
    weighted = FITTED[name](key, labels, 3, weights=counts.double(), impl=impl)
    index = torch.arange(30).repeat_interleave(counts[0])
    repeated = FITTED[name](key[:, :, index], labels[:, index], 3, impl=impl)
    mask = torch.rand(2, len(index) + 9) < -1
    mask[:, -9:] = True
    padding = torch.full((2, 3, 9, 4), math.nan, dtype=torch.float64)
    padding[..., 0] = math.inf
    padded = torch.cat([key[:, :, index], padding], 2), torch.cat([labels[:, index], torch.full((2, 9), -100)], 1)
    if name == "ridge":
        padded = padded[0], padded[1].clamp(min=0)
    masked = FITTED[name](
        *padded, 3, weights=torch.ones(2, len(index) + 9).masked_fill(mask, math.nan), key_padding_mask=mask, impl=impl
    )
    for model in (weighted, masked):
        torch.testing.assert_close(score(model, key), score(repeated, key))


@pytest.mark.parametrize("pooled", [True, False])
def test_streams(impl: str, pooled: bool) -> None:
    """Moments from chunks, merged in any order, are those of all rows at once;
    also for blocks beyond `ROWS` and single rows."""
    key, labels = blobs(2, 2, 9001, 3, 4)
    key = key + 1e3
    weights = torch.rand(2, 2, 9001, dtype=torch.float64)
    whole = variants.class_moments(key, labels, 4, pooled=pooled, weights=weights, impl=impl)
    member = (labels[..., None] == torch.arange(4)).double()[:, None] * weights[..., None]
    torch.testing.assert_close(whole.weight, member.sum(2))
    torch.testing.assert_close(whole.mean, member.mT @ key / member.sum(2)[..., None])
    away = key[:, :, None] - whole.mean[:, :, :, None]
    scatter = away.mT @ (member.mT[..., None] * away)
    torch.testing.assert_close(whole.scatter, scatter.sum(2, keepdim=True) if pooled else scatter)
    cuts = [0, 1, 2, 3, 3, 500, 4097, 9001]
    state, parts = None, []
    for start, stop in itertools.pairwise(cuts):
        chunk = key[:, :, start:stop], labels[:, start:stop], 4
        given = {"pooled": pooled, "weights": weights[:, :, start:stop], "impl": impl}
        state = variants.class_moments(*chunk, state=state, **given)
        parts.append(variants.class_moments(*chunk, **given))
    for merged in (state, variants.merge_moments(*reversed(parts))):
        for a, b in zip(merged, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-9)


def test_models_from_moments(impl: str) -> None:
    key, labels = blobs(2, 3, 50, 4, 3)
    moments = variants.class_moments(key, labels, 3, impl=impl)
    pairs = [
        (variants.lssvm(key, labels, 3, 0.3, impl=impl), variants.solve_lssvm(moments, 0.3, impl=impl)),
        (variants.lda(key, labels, 3, shrinkage=0.1, impl=impl), variants.solve_lda(moments, shrinkage=0.1, impl=impl)),
        (
            variants.pooled_class_scatter(key, labels, 3, 0.3, impl=impl),
            variants.solve_pooled_class_scatter(moments, 0.3, impl=impl),
        ),
        (
            variants.qda(key, labels, 3, regularisation=0.1, impl=impl),
            variants.solve_qda(moments, regularisation=0.1, impl=impl),
        ),
    ]
    for direct, streamed in pairs:
        torch.testing.assert_close(direct.decision(key), streamed.decision(key))


@pytest.mark.parametrize("name", FITTED)
def test_each_head_by_itself(impl: str, name: str) -> None:
    key, labels = blobs(3, 2, 40, 5, 3)
    model = FITTED[name](key, labels, 3, impl=impl)
    for b in range(3):
        alone = FITTED[name](key[b : b + 1, 1:], labels[b : b + 1, None], 3, impl=impl)
        torch.testing.assert_close(
            score(alone, key[b : b + 1, 1:]), score(model, key)[b : b + 1, 1:], rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FITTED)
def test_dtypes(impl: str, name: str, dtype: torch.dtype) -> None:
    """Fitted parameters are float64. They equal the parameters of the same rows converted to float64, so only the
    rounding of the rows loses accuracy."""
    key, labels = blobs(2, 3, 70, 5, 3, dtype)
    query = blobs(2, 3, 11, 5, 3, dtype)[0]
    model, exact = FITTED[name](key, labels, 3, impl=impl), FITTED[name](key.double(), labels, 3, impl="reference")
    for ours, wanted in zip(model[:-1], exact[:-1], strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-11)
    assert score(model, query).dtype == dtype
    torch.testing.assert_close(score(model, query), score(exact, query.double()).to(dtype))


@pytest.mark.parametrize("name", FITTED)
@pytest.mark.parametrize("shift", [1e3, 1e6, 1e9])
def test_far_from_the_origin(impl: str, name: str, shift: float) -> None:
    """Scores do not change when all rows are moved, apart from the rounding of the rows themselves."""
    key, labels = blobs(2, 2, 80, 4, 3)
    far = key + shift
    near = far - shift  # the same rounding
    near.requires_grad_()
    model = FITTED[name](near.detach(), labels, 3, impl=impl)
    wanted = score(model, near)
    slopes = [
        torch.autograd.grad(wanted[..., c].sum(), near, retain_graph=True)[0].abs().sum(-1).max() for c in range(3)
    ]
    ours = score(FITTED[name](far, labels, 3, impl=impl), far)
    of_means = 16 * 2.0**-52 * shift  # the last digits of the means and of their sums
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=of_means * float(max(slopes)) + 1e-12)


@pytest.mark.parametrize("name", ["lda", "qda unregularised"])
def test_units_of_features_do_not_matter(impl: str, name: str) -> None:
    fit = {"lda": variants.lda, "qda unregularised": variants.qda}[name]
    key, labels = blobs(2, 2, 80, 4, 3)
    units = torch.tensor([1e-9, 1.0, 1e6, 1e12], dtype=torch.float64)
    plain, scaled = fit(key, labels, 3, impl=impl), fit(key * units, labels, 3, impl=impl)
    assert plain.info.eq(0).all() and scaled.info.eq(0).all()
    torch.testing.assert_close(scaled.probabilities(key * units), plain.probabilities(key), rtol=1e-8, atol=1e-10)


def test_classes_of_one_member_or_none(impl: str) -> None:
    key, labels = blobs(1, 2, 50, 3, 2)
    labels = labels.clone()
    labels[0, :1] = 3  # class 2 has no member, class 3 has one
    query = torch.randn(1, 2, 9, 3, dtype=torch.float64)
    for name, fit in CLASSIFIERS.items():
        model = fit(key, labels, 4, impl=impl)
        scores = model.decision(query)
        assert (
            not scores.isnan().any() and scores[..., [0, 1, 3]].isfinite().all() and model.predict(query).ne(2).all()
        ), name
        if name == "lssvm":
            torch.testing.assert_close(scores[..., 2], torch.full_like(scores[..., 2], -1.0))
        else:
            assert scores[..., 2].eq(-math.inf).all() and model.probabilities(query)[..., 2].eq(0).all()
            torch.testing.assert_close(model.probabilities(query).sum(-1), torch.ones(1, 2, 9, dtype=torch.float64))
    kept = labels != 3
    without = variants.lda(key[:, :, kept[0]], labels[:, kept[0]].clamp(max=1), 2, impl=impl)
    padded = variants.lda(key[:, :, kept[0]], labels[:, kept[0]], 4, impl=impl)
    torch.testing.assert_close(padded.decision(query)[..., :2], without.decision(query))
    alone = variants.qda(key, labels, 4, impl=impl)
    assert alone.info[..., 3].eq(1).all() and alone.info[..., :3].eq(0).all()
    assert alone.decision(query)[..., 3].isnan().all() and alone.decision(query)[..., :2].isfinite().all()


def test_parameters_of_any_kind_count_in_float64(impl: str) -> None:
    """Shrinkage and priors may be lists or tensors of any precision.

    Priors need not add up to 1, and a class without members gets none.
    """
    key, labels = blobs(2, 3, 40, 3, 2)
    wanted = variants.lda(key, labels, 2, priors=torch.tensor([0.1, 0.9], dtype=torch.float64), impl=impl).decision(key)
    for priors, classes in (([0.1, 0.9], 2), ([2, 18.0], 2), ([0.05, 0.45, 0.5], 3), (torch.tensor([[[1.0, 9.0]]]), 2)):
        for fit in (variants.lda, variants.qda):
            exact = fit(key, labels, 2, priors=[0.1, 0.9], impl=impl).decision(key)
            ours = fit(key, labels, classes, priors=priors, impl=impl).decision(key)[..., :2]
            torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        variants.lda(key, labels, 2, priors=[0.1, 0.9], impl=impl).decision(key), wanted, rtol=1e-12, atol=1e-12
    )
    tenth = torch.full((1, 3), 0.1)
    narrow, wide = (variants.lda(key, labels, 2, shrinkage=t, impl=impl).decision(key) for t in (tenth, tenth.double()))
    assert torch.equal(narrow, wide)


def test_rank_deficient_classes_are_reported(impl: str) -> None:
    key, labels = blobs(3, 1, 40, 4, 2)
    constant, duplicated = key.clone(), key.clone()
    constant[1, ..., 2], duplicated[1, ..., 2] = 7.0, key[1, ..., 0]
    bad = torch.tensor([[False], [True], [False]])
    for rows in (constant, duplicated):
        model, quadratic = variants.lda(rows, labels, 2, impl=impl), variants.qda(rows, labels, 2, impl=impl)
        assert model.info.ne(0).eq(bad).all() and quadratic.info.ne(0).eq(bad[..., None]).all()
        for fit, plain in ((model, variants.lda), (quadratic, variants.qda)):
            torch.testing.assert_close(
                fit.decision(key)[[0, 2]], plain(key[[0, 2]], labels[[0, 2]], 2, impl=impl).decision(key[[0, 2]])
            )
        assert variants.lda(rows, labels, 2, shrinkage=0.1, impl=impl).info.eq(0).all()
        assert variants.qda(rows, labels, 2, regularisation=0.1, impl=impl).info.eq(0).all()
    few = variants.lda(key[:, :, :3], labels[:, :3], 2, impl=impl)
    assert few.info.ne(0).all()


@pytest.mark.parametrize("width", [1, 3, 17, 65])
@pytest.mark.parametrize("name", FITTED)
def test_widths(impl: str, name: str, width: int) -> None:
    key, labels = blobs(1, 2, 300, width, 3)
    model = FITTED[name](key, labels, 3, impl=impl)
    assert model.info.eq(0).all() and score(model, key).isfinite().all()
    assert (score(model, key).argmax(-1) == labels[:, None]).double().mean() > (0.35 if width == 1 else 0.6)


@pytest.mark.parametrize("batch, heads, rows", [(0, 2, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)])
def test_empty_extents(impl: str, batch: int, heads: int, rows: int) -> None:
    key = torch.randn(batch, heads, rows, 4)
    labels = torch.zeros(batch, rows, dtype=torch.int64)
    query = torch.randn(batch, heads, 6, 4)
    scores = {name: score(fit(key, labels, 3, impl=impl), query) for name, fit in FITTED.items()}
    assert all(s.shape == (batch, heads, 6, 3) for s in scores.values())
    if rows == 0:
        assert scores["ridge"].eq(0).all() and scores["lssvm"].eq(-1).all()
        assert scores["qda"].eq(-math.inf).all() and scores["pooled"].eq(-math.inf).all()
        nothing = variants.lda(key, labels, 3, impl=impl)
        assert nothing.info.eq(1).all()
        assert variants.qda(key, labels, 3, impl=impl).probabilities(query).eq(0).all()
    model = variants.ridge(torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 1), 0.1, impl=impl)
    assert model.predict(torch.randn(2, 2, 0, 4)).shape == (2, 2, 0, 1)


def test_layouts(impl: str) -> None:
    """Transposed, strided and expanded rows give the same numbers."""
    key, labels = blobs(2, 3, 40, 4, 3)
    wide = key.repeat_interleave(2, -1).repeat_interleave(2, -2)[..., ::2, ::2]
    strange = [
        (key.mT.contiguous().mT, labels),
        (wide, labels.repeat_interleave(2, 1)[:, ::2]),
        (key, labels.t().contiguous().t()),
    ]
    for name, fit in FITTED.items():
        wanted = score(fit(key, labels, 3, impl=impl), key)
        for rows, classes in strange:
            torch.testing.assert_close(score(fit(rows, classes, 3, impl=impl), rows), wanted, msg=name)
        once = key[:1, :1].expand(2, 3, 40, 4), labels[:1].expand(2, 40)
        shared = score(fit(*once, 3, impl=impl), once[0])
        torch.testing.assert_close(
            shared, score(fit(key[:1, :1], labels[:1], 3, impl=impl), key[:1, :1]).expand(shared.shape), msg=name
        )


@pytest.mark.parametrize("name", FITTED)
def test_gradient(impl: str, name: str) -> None:
    key, labels = blobs(1, 2, 12, 3, 3)
    query, weights = torch.randn(1, 2, 3, 3, dtype=torch.float64), torch.rand(1, 12, dtype=torch.float64) + 0.2
    inputs = tuple(t.requires_grad_() for t in (key, weights, query))

    def run(k: Tensor, w: Tensor, q: Tensor) -> Tensor:
        return score(FITTED[name](k, labels, 3, weights=w, impl=impl), q)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_gradient_of_parameters(impl: str) -> None:
    key, labels = blobs(1, 2, 12, 3, 3)
    query = torch.randn(1, 2, 3, 3, dtype=torch.float64)
    one, priors = (
        torch.rand(1, 2, dtype=torch.float64).requires_grad_(),
        torch.rand(3, dtype=torch.float64).requires_grad_(),
    )

    def run(a: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        return (
            variants.lda(key, labels, 3, shrinkage=a, priors=p, impl=impl).probabilities(query),
            variants.qda(key, labels, 3, regularisation=a, priors=p, impl=impl).probabilities(query),
            variants.lssvm(key, labels, 3, a, impl=impl).decision(query),
            variants.pooled_class_scatter(key, labels, 3, a, impl=impl).decision(query),
            variants.ridge(key, key[..., :1], a, impl=impl).predict(query),
        )

    assert torch.autograd.gradcheck(run, (one, priors))


@pytest.mark.parametrize("name", ["lda", "qda", "pooled"])
def test_a_class_without_members_has_a_finite_gradient(impl: str, name: str) -> None:
    key, labels = blobs(1, 1, 20, 3, 2)
    weights = torch.ones(1, 20, dtype=torch.float64).requires_grad_()
    key.requires_grad_()
    probabilities = CLASSIFIERS[name](key, labels, 3, weights=weights, impl=impl).probabilities(key)
    grads = torch.autograd.grad(probabilities.square().sum(), (key, weights))
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("name", FITTED)
def test_transforms(impl: str, name: str) -> None:
    """`vmap` equals a loop, `torch.func.grad` equals autograd, and a compiler gets one graph."""
    key, labels = blobs(2, 2, 30, 4, 3)

    def run(rows: Tensor) -> Tensor:
        return score(FITTED[name](rows, labels, 3, impl=impl), rows)

    several = torch.stack([key, key + 1, 2 * key])
    torch.testing.assert_close(
        torch.vmap(run)(several), torch.stack([run(rows) for rows in several]), rtol=1e-10, atol=1e-10
    )
    (grad,) = torch.autograd.grad(run(key.requires_grad_()).sin().sum(), key)
    torch.testing.assert_close(
        torch.func.grad(lambda rows: run(rows).sin().sum())(key.detach()), grad, rtol=1e-9, atol=1e-10
    )
    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(key.detach()), run(key.detach()))


def _moments(rows: int) -> Any:
    key, labels = torch.randn(1, 1, rows, 16), torch.arange(rows)[None] % 4
    return lambda: variants.class_moments(key, labels, 4, pooled=True)


def test_constant_memory() -> None:
    few, many = (measure.peak_memory(_moments, rows, warm_up=(1000,)).extra / 2**20 for rows in (20_000, 200_000))
    assert many < few + 4.0, f"{few:.1f} MiB, {many:.1f} MiB"


LATE = torch.tensor([[0, 0, 1, 2, 2, 0, 1, 1, 1]])
"""Labels of nine rows: in blocks of two, class 2 is not in the first, and class 0 shares a block with it."""


def _rows_of_weight_zero(shift: float, labels: Tensor = LATE) -> tuple[Tensor, Tensor]:
    """Nine rows far from 0 by `shift`; weights are 0 for all of class 2 and for all of the last four rows."""
    weights = (torch.rand(1, 2, 9, dtype=torch.float64) + 0.5).masked_fill(labels == 2, 0.0)
    weights[..., 5:] = 0.0
    return torch.randn(1, 2, 9, 2, dtype=torch.float64) + shift, weights


def _two_derivatives(run: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    inputs = tuple(t.detach().clone().requires_grad_() for t in inputs)
    first = torch.autograd.grad(run(*inputs).square().sum(), inputs, create_graph=True)
    return *first, *torch.autograd.grad(sum(g.sin().sum() for g in first), inputs)


def _machine(key: Tensor, weights: Tensor, value: Tensor, query: Tensor) -> Tensor:
    """Weighted ridge regression with an intercept and alpha = 0.5, by its definition."""
    weights = weights.unsqueeze(-1)
    mean, level = ((weights * t).sum(2, keepdim=True) / weights.sum(2, keepdim=True) for t in (key, value))
    away = key - mean
    system = away.mT @ (weights * away) + 0.5 * torch.eye(key.shape[-1], dtype=key.dtype)
    return level + (query - mean) @ torch.linalg.solve(system, away.mT @ (weights * value))


@pytest.mark.parametrize("block", [2, 4, 4096])
@pytest.mark.parametrize("shift", [0.0, 3.0, 1e6])
def test_derivatives_at_weights_of_zero(impl: str, shift: float, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a class or a block of rows with weight 0, the machines have first and second derivatives in each weight and
    in the rows."""
    monkeypatch.setattr(moments, "ROWS", block)
    key, weights = _rows_of_weight_zero(shift)
    query = key[:, :, :4] + 0.5
    signs = 2 * (LATE[..., None] == torch.arange(3)).double()[:, None].expand(1, 2, 9, 3) - 1
    wanted = _two_derivatives(lambda k, w: _machine(k, w, signs, query - shift), key - shift, weights)
    for run in (
        lambda k, w: variants.lssvm(k, LATE, 3, 0.5, weights=w, impl=impl).decision(query),
        lambda k, w: variants.ridge(k, signs, 0.5, weights=w, impl=impl).predict(query),
        lambda k, w: variants.solve_lssvm(_in_chunks(k, w, 3, True, impl), 0.5, impl=impl).decision(query),
    ):
        tolerance = 1e-10 + 1e-14 * shift
        for ours, exact in zip(_two_derivatives(run, key, weights), wanted, strict=True):
            torch.testing.assert_close(ours, exact, rtol=tolerance, atol=tolerance * float(exact.detach().abs().max()))


def _in_chunks(key: Tensor, weights: Tensor, size: int, pooled: bool, impl: str) -> variants.ClassMoments:
    """The moments of each `size` rows, merged from the last to the first."""
    chunks = zip(key.split(size, 2), LATE.split(size, 1), weights.split(size, 2), strict=True)
    parts = [variants.class_moments(k, y, 3, pooled=pooled, weights=w, impl=impl) for k, y, w in chunks]
    return variants.merge_moments(*reversed(parts))


@pytest.mark.parametrize("pooled", [True, False])
def test_the_slope_of_a_scatter_at_a_class_of_weight_zero(impl: str, pooled: bool) -> None:
    """For any origin and any division of the rows, the derivative is that for weights that all grow from 0 at the same
    rate."""
    key, weights = _rows_of_weight_zero(0.0)
    group = (LATE == 2)[0]
    rows = key[:, :, group]
    away = rows - rows.mean(2, keepdim=True)
    weights.requires_grad_()

    def slopes(k: Tensor, w: Tensor) -> Tensor:
        scatter = variants.class_moments(k, LATE, 3, pooled=pooled, weights=w, impl=impl).scatter
        return torch.autograd.grad(scatter[..., 0, 1].sum(), w)[0]

    near = slopes(key, weights)
    torch.testing.assert_close(near[..., group], away[..., 0] * away[..., 1])
    torch.testing.assert_close(slopes(key + 1e6, weights), near, rtol=0, atol=1e-8)
    for size in (1, 2, 3, 4):
        scatters = [_in_chunks(key + shift, weights, size, pooled, impl).scatter for shift in (0.0, 1e6)]
        at = [torch.autograd.grad(scatter[..., 0, 1].sum(), weights)[0] for scatter in scatters]
        torch.testing.assert_close(at[1], at[0], rtol=0, atol=1e-8)
        assert at[0][..., ~group].isfinite().all()
    whole = variants.class_moments(key, LATE, 3, pooled=pooled, weights=weights, impl=impl)
    later = {"pooled": pooled, "weights": torch.zeros_like(weights), "impl": impl}
    merged = variants.merge_moments(whole, variants.class_moments(key + 1, LATE, 3, **later))
    for state in (merged, variants.class_moments(key + 1, LATE, 3, state=whole, **later)):
        torch.testing.assert_close(state.mean[:, :, 2], rows.mean(2))
        torch.testing.assert_close(
            torch.autograd.grad(state.scatter[..., 0, 1].sum(), weights, retain_graph=True)[0], near
        )


@pytest.mark.parametrize("name", ["lda shrunk", "pooled", "qda"])
def test_gradients_at_a_class_of_weight_zero_do_not_know_the_origin(impl: str, name: str) -> None:
    key, weights = _rows_of_weight_zero(0.0)
    query, weights = key[:, :, :4] + 0.5, weights.requires_grad_()

    def run(shift: float) -> Tensor:
        model = CLASSIFIERS[name](key + shift, LATE, 3, weights=weights, impl=impl)
        return torch.autograd.grad(model.decision(query + shift)[..., :2].square().sum(), weights)[0]

    torch.testing.assert_close(run(1e5), run(0.0), rtol=1e-6, atol=1e-6)


def test_values_where_weights_are_zero(impl: str) -> None:
    """The point of a class without weight is the mean of its rows, and the point of a class without rows is 0. Neither
    changes results.

    Without both, ridge is 0.
    """
    key, weights = _rows_of_weight_zero(1e6)
    kept = weights[0, 0] > 0
    mask = ~kept.expand(1, -1) & (LATE == 2)
    for pooled in (True, False):
        whole = variants.class_moments(key, LATE, 4, pooled=pooled, weights=weights, impl=impl)
        torch.testing.assert_close(whole.mean[:, :, 2], key[:, :, LATE[0] == 2].mean(2))
        assert whole.mean[:, :, 3].eq(0).all() and whole.weight[..., 2:].eq(0).all()
        padded = variants.class_moments(key, LATE, 4, pooled=pooled, weights=weights, key_padding_mask=mask, impl=impl)
        assert padded.mean[:, :, 2].eq(0).all()
        less = variants.class_moments(
            key[:, :, kept], LATE[:, kept], 4, pooled=pooled, weights=weights[:, :, kept], impl=impl
        )
        chunked = [_in_chunks(key, w, 2, pooled, impl) for w in (weights, weights.clone().requires_grad_())]
        for state in (whole, padded, *chunked):
            torch.testing.assert_close(state.mean[:, :, :2], less.mean[:, :, :2], rtol=1e-14, atol=0)
            torch.testing.assert_close(state.scatter[:, :, :2], less.scatter[:, :, :2], rtol=1e-8, atol=1e-8)
    nothing = variants.ridge(key, key[..., :1], 0.1, weights=torch.zeros(1, 9, dtype=torch.float64), impl=impl)
    assert nothing.predict(key).eq(0).all()


def test_transforms_at_weights_of_zero(impl: str) -> None:
    """`torch.func.grad` and a compiler return the gradient of autograd, of one call and of states that are merged."""
    key, weights = _rows_of_weight_zero(3.0)

    def run(w: Tensor) -> Tensor:
        state = _in_chunks(key, w, 5, True, impl)
        return variants.solve_lssvm(state, 0.5, impl=impl).decision(key).sin().sum() + state.scatter[..., 0, 0].sum()

    (wanted,) = torch.autograd.grad(run(weights.requires_grad_()), weights)
    torch.testing.assert_close(torch.func.grad(run)(weights.detach()), wanted, rtol=1e-10, atol=1e-10)
    several = torch.vmap(torch.func.grad(run))(torch.stack([weights.detach(), 2 * weights.detach()]))
    torch.testing.assert_close(several[0], wanted, rtol=1e-10, atol=1e-10)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(weights), weights)[0], wanted, rtol=1e-10, atol=1e-10)

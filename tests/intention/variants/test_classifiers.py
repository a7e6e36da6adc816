"""The classifiers and ridge where scikit-learn has no counterpart: definitions, streams, layouts, dtypes, degenerate classes, gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cmab_kernels import measure
from cmab_kernels.intention import variants

from .data import CLASSIFIERS, FITTED, blobs, score

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def test_pooled_scatter_is_the_formula(impl: str) -> None:
    """The weights are w = (sum of class scatters + alpha I)^-1 X'y with y = members / N1 - others / N0: LDA's direction for two classes."""
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
        torch.testing.assert_close(torch.cosine_similarity(direction, other.coefficients, dim=-2), torch.ones(2, 3, 2, dtype=torch.float64))


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
    masked = FITTED[name](*padded, 3, weights=torch.ones(2, len(index) + 9).masked_fill(mask, math.nan), key_padding_mask=mask, impl=impl)
    for model in (weighted, masked):
        torch.testing.assert_close(score(model, key), score(repeated, key))


@pytest.mark.parametrize("pooled", [True, False])
def test_streams(impl: str, pooled: bool) -> None:
    """Moments from chunks, merged in any order, are those of all rows at once; also for blocks beyond `ROWS` and single rows."""
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
        (variants.pooled_class_scatter(key, labels, 3, 0.3, impl=impl), variants.solve_pooled_class_scatter(moments, 0.3, impl=impl)),
        (variants.qda(key, labels, 3, regularisation=0.1, impl=impl), variants.solve_qda(moments, regularisation=0.1, impl=impl)),
    ]
    for direct, streamed in pairs:
        torch.testing.assert_close(direct.decision(key), streamed.decision(key))


@pytest.mark.parametrize("name", FITTED)
def test_each_head_by_itself(impl: str, name: str) -> None:
    key, labels = blobs(3, 2, 40, 5, 3)
    model = FITTED[name](key, labels, 3, impl=impl)
    for b in range(3):
        alone = FITTED[name](key[b : b + 1, 1:], labels[b : b + 1, None], 3, impl=impl)
        torch.testing.assert_close(score(alone, key[b : b + 1, 1:]), score(model, key)[b : b + 1, 1:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FITTED)
def test_dtypes(impl: str, name: str, dtype: torch.dtype) -> None:
    """Fitted parameters are float64, and are those of the same rows in float64: narrow rows cost their own rounding only."""
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
    slopes = [torch.autograd.grad(wanted[..., c].sum(), near, retain_graph=True)[0].abs().sum(-1).max() for c in range(3)]
    ours = score(FITTED[name](far, labels, 3, impl=impl), far)
    of_means = 16 * 2.0**-52 * shift  # their last digits, and those of the sums that they are made of
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
    labels[0, :1] = 3  # class 2 has no member, class 3 one
    query = torch.randn(1, 2, 9, 3, dtype=torch.float64)
    for name, fit in CLASSIFIERS.items():
        model = fit(key, labels, 4, impl=impl)
        scores = model.decision(query)
        assert not scores.isnan().any() and scores[..., [0, 1, 3]].isfinite().all() and model.predict(query).ne(2).all(), name
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
    """Shrinkage and priors may be lists or tensors of any precision. Priors need not add up to 1, and a class without members gets none."""
    key, labels = blobs(2, 3, 40, 3, 2)
    wanted = variants.lda(key, labels, 2, priors=torch.tensor([0.1, 0.9], dtype=torch.float64), impl=impl).decision(key)
    for priors, classes in (([0.1, 0.9], 2), ([2, 18.0], 2), ([0.05, 0.45, 0.5], 3), (torch.tensor([[[1.0, 9.0]]]), 2)):
        for fit in (variants.lda, variants.qda):
            exact = fit(key, labels, 2, priors=[0.1, 0.9], impl=impl).decision(key)
            ours = fit(key, labels, classes, priors=priors, impl=impl).decision(key)[..., :2]
            torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(variants.lda(key, labels, 2, priors=[0.1, 0.9], impl=impl).decision(key), wanted, rtol=1e-12, atol=1e-12)
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
            torch.testing.assert_close(fit.decision(key)[[0, 2]], plain(key[[0, 2]], labels[[0, 2]], 2, impl=impl).decision(key[[0, 2]]))
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
    strange = [(key.mT.contiguous().mT, labels), (wide, labels.repeat_interleave(2, 1)[:, ::2]), (key, labels.t().contiguous().t())]
    for name, fit in FITTED.items():
        wanted = score(fit(key, labels, 3, impl=impl), key)
        for rows, classes in strange:
            torch.testing.assert_close(score(fit(rows, classes, 3, impl=impl), rows), wanted, msg=name)
        once = key[:1, :1].expand(2, 3, 40, 4), labels[:1].expand(2, 40)
        shared = score(fit(*once, 3, impl=impl), once[0])
        torch.testing.assert_close(shared, score(fit(key[:1, :1], labels[:1], 3, impl=impl), key[:1, :1]).expand(shared.shape), msg=name)


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
    one, priors = torch.rand(1, 2, dtype=torch.float64).requires_grad_(), torch.rand(3, dtype=torch.float64).requires_grad_()

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
    torch.testing.assert_close(torch.vmap(run)(several), torch.stack([run(rows) for rows in several]), rtol=1e-10, atol=1e-10)
    (grad,) = torch.autograd.grad(run(key.requires_grad_()).sin().sum(), key)
    torch.testing.assert_close(torch.func.grad(lambda rows: run(rows).sin().sum())(key.detach()), grad, rtol=1e-9, atol=1e-10)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(key.detach()), run(key.detach()))


def _moments(rows: int) -> Any:
    key, labels = torch.randn(1, 1, rows, 16), torch.arange(rows)[None] % 4
    return lambda: variants.class_moments(key, labels, 4, pooled=True)


def test_constant_memory() -> None:
    few, many = (measure.peak_memory(_moments, rows, warm_up=(1000,)).extra / 2**20 for rows in (20_000, 200_000))
    assert many < few + 4.0, f"{few:.1f} MiB, {many:.1f} MiB"

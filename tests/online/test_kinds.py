"""Inputs and outputs of `OnlineRidge`: sparse matrices, data frames, and pickles of an earlier version."""

from __future__ import annotations

import base64
import pickle
import sys
import tracemalloc
import types
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from cmab_kernels import OnlineRidge

from .data import examples

sparse = pytest.importorskip("scipy.sparse", reason="the package scipy is not installed")


def _sparse_examples(rows: int = 80, features: int = 12) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, features)) * (random.uniform(size=(rows, features)) < 0.2)
    return (
        x,
        x @ random.normal(size=(features, 2)) + 5 + random.normal(size=(rows, 2)),
        random.uniform(0.1, 2, size=rows),
    )


def _same(ours: OnlineRidge, right: OnlineRidge, x: np.ndarray) -> None:
    np.testing.assert_allclose(ours.coef_, right.coef_, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(ours.predict(x, return_std=True), right.predict(x, return_std=True), rtol=1e-11)
    assert ours.n_samples_seen_ == right.n_samples_seen_ and ours.info_ == right.info_ == 0


@pytest.mark.parametrize("form", ["csr_matrix", "csr_array", "csc_array", "coo_matrix", "lil_matrix"])
@pytest.mark.parametrize(
    "parameters", [{}, {"fit_intercept": False}, {"forgetting": 0.9}, {"alpha": "gcv"}, {"alpha": "loo"}]
)
def test_sparse_equals_dense(parameters: dict[str, Any], form: str) -> None:
    x, y, weights = _sparse_examples()
    made = getattr(sparse, form)
    for each in (weights, None):
        ours, right = OnlineRidge(**parameters).fit(made(x), y, each), OnlineRidge(**parameters).fit(x, y, each)
        _same(ours, right, x)
        assert ours.alpha_ == right.alpha_ and ours.score(made(x), y, each) == pytest.approx(
            right.score(x, y, each), rel=1e-12
        )
        for got, wanted in zip(ours.predict(made(x), return_std=True), right.predict(x, return_std=True), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-11)
        np.testing.assert_allclose(ours.sample_y(made(x), 2), right.sample_y(x, 2), rtol=1e-6)


@pytest.mark.parametrize("sparse_first", [True, False])
def test_sparse_and_dense_examples_mix(sparse_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After dense examples, whose origin is not 0, sparse examples are read as dense blocks."""
    monkeypatch.setattr("cmab_kernels.online.rows.BLOCK", 100)
    x, y, weights = _sparse_examples()
    x[:, 0] += 2
    parts = [slice(0, 30), slice(30, 55), slice(55, 80)]
    model = OnlineRidge()
    for i, part in enumerate(parts):
        model.partial_fit(
            sparse.csr_array(x[part]) if (i % 2 == 0) == sparse_first else x[part], y[part], weights[part]
        )
    assert bool(model._sums.origin.any()) is not sparse_first
    _same(model, OnlineRidge().fit(x, y, weights), x)
    _same(
        model.forget(sparse.csr_array(x[20:60]), y[20:60], weights[20:60]),
        OnlineRidge().fit(*(np.r_[e[:20], e[60:]] for e in (x, y, weights))),
        x,
    )


def test_sparse_examples_stay_sparse() -> None:
    """Neither a fit nor a prediction makes the matrix dense, which would take 96 MB."""
    x = sparse.random(40_000, 300, density=0.005, format="csr", random_state=np.random.RandomState(0))
    y = x @ np.ones(300)
    tracemalloc.start()
    predicted = OnlineRidge().fit(x, y).predict(x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert predicted.shape == (40_000,) and peak < 40e6


def test_sparse_examples_that_are_none() -> None:
    x, y, _ = _sparse_examples()
    model = OnlineRidge().fit(sparse.csr_array(x), y)
    before = model.coef_
    for given, message in (
        (sparse.csr_array(np.where(x != 0, np.nan, 0)), "Input X contains"),
        (sparse.csr_array(x.astype(complex)), "Complex data not supported"),
        (sparse.csr_array(x[:, :4]), "X has 4 features"),
        (sparse.csr_array((0, 12)), "0 sample"),
        (sparse.csr_array(x[:9]), "^y: got shape"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            model.partial_fit(given, y)
    with pytest.raises(TypeError, match=r"^y: got a sparse matrix"):
        model.partial_fit(x, sparse.csr_array(y))
    np.testing.assert_array_equal(model.coef_, before)
    assert model.predict(sparse.csr_array(x.astype(np.float32))).dtype == np.float32


def test_frames_of_pandas() -> None:
    pandas = pytest.importorskip("pandas", reason="the package pandas is not installed")
    clone = pytest.importorskip("sklearn.base", reason="the package scikit-learn is not installed").clone
    x, y, _ = examples()
    index = pandas.Index(np.arange(60) + 100)
    frame = pandas.DataFrame(x, index, list("abcde"))
    for targets, names in ((pandas.DataFrame(y, index, ["u", "v"]), ["u", "v"]), (y, ["y0", "y1"])):
        model = clone(OnlineRidge().set_output(transform="pandas")).fit(frame, targets)
        mean, std = model.predict(frame, return_std=True)
        for each, right in (
            (mean, OnlineRidge().fit(x, y).predict(x)),
            (std, OnlineRidge().fit(x, y).predict(x, return_std=True)[1]),
        ):
            assert isinstance(each, pandas.DataFrame) and each.columns.tolist() == names and each.index.equals(index)
            np.testing.assert_array_equal(each, right)
    for target, name in ((pandas.Series(y[:, 0], index, name="u"), "u"), (y[:, 0], "y")):
        out = model.fit(frame, target).predict(frame)
        assert isinstance(out, pandas.Series) and out.name == name and out.index.equals(index)
    assert (
        isinstance(model.predict(x.astype(np.float32)), pandas.Series)
        and model.predict(x.astype(np.float32)).dtype == np.float32
    )
    assert isinstance(model.predict(torch.from_numpy(x).bfloat16()), pandas.Series)
    assert isinstance(pickle.loads(pickle.dumps(model)).set_output().predict(x), pandas.Series)
    assert isinstance(model.set_output(transform="default").predict(frame), np.ndarray)
    with pytest.raises(ValueError, match=r"^transform: got 'arrow'"):
        model.set_output(transform="arrow")


def test_names_of_targets_and_of_rows_are_matched() -> None:
    pandas = pytest.importorskip("pandas", reason="the package pandas is not installed")
    x, y, _ = examples()
    frame, targets = pandas.DataFrame(x, columns=list("abcde")), pandas.DataFrame(y, columns=["u", "v"])
    model = OnlineRidge().fit(frame, targets)
    for wrong in (model.partial_fit, model.forget):
        with pytest.raises(ValueError, match=r"^y: got the targets \['v', 'u'\], expected \['u', 'v'\]"):
            wrong(frame, targets[["v", "u"]])
    with pytest.raises(ValueError, match=r"^other: got names of targets"):
        model.merge(OnlineRidge().fit(frame, targets[["v", "u"]]))
    single = OnlineRidge().fit(frame, targets.u)
    row = frame.iloc[3]
    assert single.predict_one(row) == single.predict_one(row[list("edcba")]) == single.predict_one(row.to_dict())
    assert OnlineRidge().fit(x, y[:, 0]).predict_one(row) == single.predict_one(row), "without names, by place"
    single.learn_one(row[list("edcba")], y[3, 0])
    first = OnlineRidge()
    first.learn_one(row, y[3, 0])
    assert first.feature_names_in_.tolist() == list("abcde")
    assert single.n_samples_seen_ == 61


def test_frames_of_polars_are_made_by_its_constructors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package need not be installed: a substitute shows the arguments of its constructors."""
    made = types.SimpleNamespace(
        Series=lambda name, values: (name, values), DataFrame=lambda values, schema: (values, schema)
    )
    monkeypatch.setitem(sys.modules, "polars", made)
    x, y, _ = examples()
    model = OnlineRidge().set_output(transform="polars").fit(x, y)
    right = OnlineRidge().fit(x, y).predict(x)
    values, names = model.predict(x)
    assert names == ["y0", "y1"] and np.array_equal(values, right)
    assert model.fit(x, y[:, 0]).predict(x)[0] == "y"


def test_frames_of_polars() -> None:
    polars = pytest.importorskip("polars", reason="the package polars is not installed")
    x, y, _ = examples()
    frame, targets = polars.DataFrame(x, schema=list("abcde")), polars.DataFrame(y, schema=["u", "v"])
    model = OnlineRidge().set_output(transform="polars").fit(frame, targets)
    out = model.predict(frame)
    assert (
        isinstance(out, polars.DataFrame)
        and out.columns == ["u", "v"]
        and model.feature_names_in_.tolist() == list("abcde")
    )
    np.testing.assert_allclose(out.to_numpy(), OnlineRidge().fit(x, y).predict(x))
    assert isinstance(model.fit(frame, targets["u"]).predict(frame), polars.Series)


EARLIER = (
    "c-q~UO>fgM7{~KgM!RmB7(yT+v}3tcU7PhqLRvLVAQ32IyYzyrv~}CCG-(oN(vT*)!`@JCGdDf}cRm1Ic1HUKyK+O~goFf-(`0M9RrK0AQtZTk"
    "yY|n2KXH4~$BQKACvUOdQEO-$+XmL1v}x#?fvGq9$}encjTWY-^zlC3qbV<@>fN?VpRHa5jpv#gL7G9ZUB_KQkG(|Gv|E@E&1iw_XCR9q$L%<@"
    "%}QIWbk(CnR06;EFft0(qd_#&NC(vke;`}_!zuNW#I)<}G;)ciJJh>_Y+Q3Sy@8;aW7=pZ3#ybi*OxhvsW1(10qLgNKuz21pxQ3MY#eLrJjeBf"
    "4+;Ixr>DP{-hSSAknRaDe~573v$#}s0VdG3O=8wf9qnM-fnixZ2&!{Xqicld7-6HKsfHySR}=7(>~=A7w0GFC#63$&Rb%kdX`42&Vv0}|;R$AF"
    "-BP5g#QHFemNlbDt_#1Js?IQRf5;YB_ot9pH{F^J^Y`B-EWSDqqLN(5<qG*?DVvq$qSf!X-gPZeiC2gvy@u}ISlmroUQNfjfz(?n_Y1eb_4A9>"
    "=ySHrMN(KFriC&+pqo_TQVI{3sECB7lsH_X!V`Mp%>q6h*V&>v%wBc_+qki=)d@4hCMD3iy_jm>Te~~y3sPFnX5_paSrBo=f`nRF5HSKY834Z@"
    "EC4qQm}h`RR`3D0A4MPvlK}ArNJe-%w~{U7@)3mmC{G7kK*$HIq#zHFF+_*7f4>5CME9vDb+NiVHO9-W<cs4PFVGGf?=ljEJN|NK_kDLn`=&b@"
    "AnDyQZLOsl0mtOTbCfg7g?uK$Q5eNB&;myx8WPJx8&?qyz=H>a+~$bNzLqG0Pnvjq*?fLkmdDz>p>|;N4rAl5VT%u*IHabovOLycv!q_ka68>y"
    "8a~5mL1-4~$?*}ign;SsPiUo5dHxrYe^WR@YtTyVz<HqJ#gSv`F8fSf9di!Y$t8}q!U{NBOpntcbdK$GUpwIRjkEOo<k|V^uhN(Avlr)IFP(l<"
    "yqywc#avF#W#qAth1zSuf&YJSn3iBrD3*#V<9*3P?X_SajSdEE`|i_2>ejq@12wTqTpK&^p9E1waBJy*RivLd"
)
"""`OnlineRidge(0.5).fit(X, Y)` as the version before `merge` pickled it."""
X, Y = [[1.0, 2.0], [3.0, 5.0], [4.0, -1.0], [0.5, 2.0]], [1.0, 2.0, 4.0, 3.0]


def test_pickles_of_an_earlier_version() -> None:
    """Such pickles continue as before, but contain no information about the noise."""

    def read() -> OnlineRidge:
        return pickle.loads(zlib.decompress(base64.b85decode(EARLIER)))

    anew = OnlineRidge(0.5).fit(X, Y)
    np.testing.assert_allclose(read().predict(X), anew.predict(X), rtol=1e-13)
    assert repr(read()) == "OnlineRidge(alpha=0.5)" and read().n_features_in_ == 2
    for change in (
        lambda model: model.partial_fit(X, Y),
        lambda model: model.forget(X[:1], Y[:1]),
        lambda model: model.merge(anew),
        lambda model: OnlineRidge(0.5).fit(X, Y).merge(model),
        lambda model: model.learn_one(X[0], Y[0]) or model,
        lambda model: model.set_params(alpha="loo").fit(X, Y),
    ):
        np.testing.assert_allclose(change(read()).coef_, change(OnlineRidge(0.5).fit(X, Y)).coef_, rtol=1e-12)
    assert read().predict_one(X[0]) == pytest.approx(anew.predict(X)[0])
    given = read().set_params(noise_precision=2.0)
    np.testing.assert_allclose(
        given.predict(X, return_std=True)[1], anew.set_params(noise_precision=2.0).predict(X, return_std=True)[1]
    )
    for use in (
        lambda model: model.predict(X, return_std=True),
        lambda model: model.set_params(alpha="gcv").predict(X),
    ):
        with pytest.raises(ValueError, match="saved by a version that kept no squares"):
            use(read())

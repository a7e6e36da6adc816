"""A run's file is read as it is, or refused by name."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

from bench.report import runs

from . import synthetic
from .synthetic import COMMIT, EAGER, SDPA


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    return runs.load(synthetic.write(tmp_path_factory.mktemp("runs") / "some.json", synthetic.run()))


def test_rows_hold_what_the_file_says(run: runs.Run):
    raw = json.loads(run.path.read_text())["benchmarks"]
    assert len(run.rows) == len(raw) > 40
    row, first = run.rows[0], raw[0]
    info = first["extra_info"]
    assert (row.group, row.implementation, row.scan) == (first["group"], "native", "latent_attention")
    assert (row.median, list(row.samples)) == (first["stats"]["median"], first["stats"]["data"])
    assert row.low < row.median < row.high and row.spread == pytest.approx((row.high - row.low) / row.median)
    assert row.scratch == info["extra_memory"] - info["result_memory"] and row.share == 0.5
    assert (row.ratio, row.baseline) == (info["ratio"], SDPA) and row.ratio_quartiles == tuple(info["ratio_quartiles"])
    alone = run.scans["iterative_pinv"][0]
    assert (alone.ratio, alone.ratio_quartiles, alone.baseline, alone.share) == (None, None, None, None)


def test_a_run_says_where_it_comes_from(run: runs.Run):
    assert (run.name, run.quick, run.threads, run.device) == ("some", True, 2, "cpu")
    assert (run.processor, run.commit, run.date) == ("A processor <of 2 cores>", "0123456789", "2026-01-02 03:04")
    assert list(run.scans) == ["latent_attention", "continual_nystrom_step", "iterative_pinv"]
    assert run.implementations[:2] == ("native", "native, exact") and set(run.implementations[2:]) == {SDPA, "naive", EAGER, "reference"}
    assert not run.wrong


def test_work_that_is_in_no_commit_shows(tmp_path: Path):
    dirty = synthetic.run(commit_info={"id": COMMIT, "dirty": True})
    assert runs.load(synthetic.write(tmp_path / "run.json", dirty)).commit == "0123456789+"
    nowhere = synthetic.run(commit_info={"id": "unversioned", "dirty": False})
    assert runs.load(synthetic.write(tmp_path / "run.json", nowhere)).commit == "unversioned"


def test_what_failed_is_told_from_what_cannot_be_measured(tmp_path: Path):
    reasons = {"a": "needs 9 GiB", "b": "wrong: relative RMS error 1.0", "c": "failed: out of range", "d": "not installed: pip install d"}
    assert runs.load(synthetic.write(tmp_path / "run.json", synthetic.run(not_measured=reasons))).wrong.keys() == {"b", "c"}


# ---- what is refused -------------------------------------------------------------------------------------------------------------------


def damaged(**where: object) -> dict:
    """A run with one field of its second row replaced; the value `missing` takes it out."""
    raw = synthetic.run()
    for name, value in where.items():
        part = raw["benchmarks"][1][name.split("__")[0]]
        field = name.split("__")[1]
        if value == "missing":
            del part[field]
        else:
            part[field] = value
    return raw


BAD = {
    "empty": ("", "empty"),
    "no JSON": ("what?", r"no JSON, or cut short \(line 1"),
    "cut short": (json.dumps(synthetic.run())[:-500], "no JSON, or cut short"),
    "no text": (b"\xff\xfe\x00\x81", "no text"),
    "nested": ("[" * 100_000, "no JSON, or cut short"),
    "a list": ([1, 2], "foreign"),
    "foreign": ({"name": "package", "version": "1"}, "foreign"),
    "pytest-benchmark's": ({"benchmarks": [], "machine_info": {}}, "older one or another project's"),
    "another format": (synthetic.run(cmab_kernels_bench=2), "in format 2, and this code reads format 1"),
    "true as format": (synthetic.run(cmab_kernels_bench="1"), "in format '1'"),
    "no machine": ({k: v for k, v in synthetic.run().items() if k != "machine_info"}, "machine_info is missing"),
    "threads as text": (synthetic.run(threads="2"), "threads is '2'"),
    "threads as truth": (synthetic.run(threads=True), "threads is True"),
    "rows as mapping": (synthetic.run(benchmarks={}), "benchmarks is {}"),
    "a row that is none": (synthetic.run(benchmarks=[3]), r"row 1 \(None\): 3 where a mapping"),
    "no scan": (damaged(extra_info__scan="missing"), r"row 2 \(latent-forward-float32-D16-N1000\): scan is missing"),
    "time of nothing": (damaged(stats__median=0.0), "median is 0.0"),
    "time that is none": (damaged(stats__median=float("nan")), "median is nan"),
    "no samples": (damaged(stats__data=[]), "no samples"),
    "samples of text": (damaged(stats__data=["1", "2"]), "no samples"),
    "fewer samples": (damaged(stats__data=[1.0, 2.0]), "have not as many samples"),
    "no baseline": (damaged(extra_info__baseline="missing"), "a ratio is there, and no baseline"),
    "no quartiles": (damaged(extra_info__ratio_quartiles=[1.0]), r"ratio_quartiles is \[1.0\]"),
    "share of nothing": (damaged(extra_info__share=-1.0), "share is -1.0"),
    "error as text": (damaged(extra_info__error="small"), "error is 'small'"),
    "threads as words": (damaged(extra_info__threads="two"), "threads is 'two'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_run_is_refused_by_name(kind: str, tmp_path: Path):
    content, found = BAD[kind]
    path = tmp_path / "given.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(runs.BadRun, match=found) as refused:
        runs.load(path)
    assert str(refused.value).startswith(f"{path}: ") and "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(runs.BadRun, match="cannot be read"):
            runs.load(path)


# ---- curves ----------------------------------------------------------------------------------------------------------------------------


def test_a_series_differs_in_one_parameter(run: runs.Run):
    forward, backward = runs.series(run, "latent_attention", "N")
    assert forward.fixed == {"pass": "forward", "dtype": "float32", "B": 1, "H": 4, "D": 16, "L": 128, "threads": 2}
    assert backward.fixed["pass"] == "forward + backward"
    assert forward.values == list(synthetic.LENGTHS) and forward.numeric
    assert {name: [row.parameters["N"] for row in rows] for name, rows in forward.lines.items()} == {
        "native": list(synthetic.LENGTHS),
        SDPA: list(synthetic.LENGTHS),
        "reference": list(synthetic.LENGTHS),
        "naive": list(synthetic.LENGTHS[:3]),
    }
    (widths,) = runs.series(run, "latent_attention", "D")
    assert widths.values == [8, 16, 32, 64]
    (dtypes,) = runs.series(run, "latent_attention", "dtype")
    assert dtypes.values == ["bfloat16", "float16", "float32"] and not dtypes.numeric


def test_fewer_than_three_points_are_no_curve(run: runs.Run):
    assert runs.series(run, "latent_attention", "pass") == runs.series(run, "continual_nystrom_step", "landmarks") == []
    assert runs.series(run, "iterative_pinv", "m") == []


def test_axes_begin_with_the_length(run: runs.Run):
    assert runs.axes(run, "latent_attention") == ["N", "D", "dtype"]
    assert runs.axes(run, "continual_nystrom_step") == ["n"]
    assert runs.axes(run, "iterative_pinv") == []


def test_labels_tell_groups_apart_and_say_the_rest_once(run: runs.Run):
    once, each = runs.labels(run.scans["latent_attention"])
    assert once == "where not said otherwise, float32, B = 1, H = 4, D = 16, L = 128, threads = 2"
    assert len(set(each.values())) == len(each) == 13
    assert each["latent-forward-float32-D16-N1000"] == "forward, N = 1,000"
    assert each["latent-forward-bfloat16-D16-N100000"] == "forward, bfloat16, N = 100,000"
    assert runs.labels(run.scans["iterative_pinv"]) == ("m = 16, B = 1, float32, threads = 1", {"pinv-m16": "pinv-m16"})


def test_a_group_like_most_says_what_others_vary(tmp_path: Path):
    raw = synthetic.run()
    alone = raw["benchmarks"][-1]
    raw["benchmarks"] = [
        alone | {"group": f"m{m}B{b}", "extra_info": alone["extra_info"] | {"parameters": {"m": m, "B": b}}}
        for m, b in ((16, 1), (32, 1), (16, 4))
    ]
    run = runs.load(synthetic.write(tmp_path / "run.json", raw))
    assert runs.labels(run.rows)[1] == {"m16B1": "m = 16, B = 1", "m32B1": "m = 32", "m16B4": "B = 4"}


def test_examples_in_the_module_are_right():
    assert doctest.testmod(runs) == (0, 2)


def test_speed_up_is_the_peers_time_over_ours(run: runs.Run):
    rows = {row.implementation: row for row in run.groups["latent-forward-float32-D16-N1000"]}
    median, low, high = runs.speed_up(rows["native"], rows[SDPA])
    assert low <= median <= high and low < high and median == pytest.approx(1 / rows["native"].ratio)
    assert runs.fastest(rows.values()) is rows["native"] and runs.fastest([rows[SDPA], rows["reference"]]) is None


def test_what_is_ours_and_computes_something_else_is_not_the_operator(tmp_path: Path):
    raw = synthetic.run(speed=lambda group, name: 0.01 if name == "native, exact" else 1.0)
    group = runs.load(synthetic.write(tmp_path / "run.json", raw)).groups["step-fixed-n64"]
    assert min(group, key=lambda row: row.median).implementation == "native, exact"
    assert runs.fastest(group).implementation == "native"
    assert runs.fastest([row for row in group if row.implementation != "native"]).implementation == "native, exact"

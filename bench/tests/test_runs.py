"""A run's file is read unchanged, or the error names the file."""

from __future__ import annotations

import doctest
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import runs
from bench.report import series
from bench.runs import Run, load, save, write_json

from . import synthetic
from .synthetic import COMMIT, EAGER, SDPA


def test_what_is_written_is_read(run: Run, tmp_path: Path):
    again = synthetic.written(tmp_path, run, "some")
    save(again, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "some.json").read_text()
    assert len(again.rows) == len(run.rows) > 40
    for before, after in zip(run.rows, again.rows, strict=True):
        for name in runs.SPREADS:
            assert (getattr(before, name) or ()) == pytest.approx(getattr(after, name) or (), rel=1e-5)
        rounded = dict.fromkeys(("seconds", "ratio", "speed_up", "floor"), None)
        assert replace(before, **rounded) == replace(after, **rounded)
    assert replace(again, rows=()) == replace(run, rows=())


def test_provenance_is_said_once_and_a_row_takes_a_line(run: Run, tmp_path: Path):
    save(run, tmp_path / "run.json")
    text = (tmp_path / "run.json").read_text()
    assert text.count(COMMIT) == text.count(run.processor) == 1
    rows = [line for line in text.splitlines() if line.startswith('{"group"')]
    assert len(rows) == len(run.rows) + len(run.groups) and all(json.loads(line.rstrip(",")) for line in rows)


def test_a_row_knows_what_follows_from_its_figures(run: Run):
    row = run.rows[0]
    assert (row.group, row.implementation, row.scan, row.threads) == (
        "latent-forward-float32-D16-N1000",
        "native",
        "latent_attention",
        2,
    )
    assert (
        row.seconds.low < row.seconds.median < row.seconds.high
        and row.share == pytest.approx(0.5)
        and row.ours
        and not row.peer
    )
    assert row.spread == pytest.approx((row.seconds.high - row.seconds.low) / row.seconds.median)
    assert row.scratch == row.extra_memory - row.result_memory and row.gflops == row.flops / row.seconds.median / 1e9
    alone = run.scans["iterative_pinv"][0]
    assert (alone.ratio, alone.speed_up, alone.baseline, alone.share) == (None, None, None, None)
    definition = next(row for row in run.rows if row.implementation == "reference")
    assert not definition.ours and not definition.peer


def test_a_run_says_where_it_comes_from(run: Run):
    assert (run.name, run.when, run.revision) == ("some", "2026-01-02 03:04", "0123456789")
    assert replace(run, dirty=True).revision == "0123456789+" and replace(run, commit="unknown").revision == "unknown"
    assert list(run.scans) == ["latent_attention", "continual_nystrom_step", "iterative_pinv"]
    assert run.implementations[:2] == ("native", "native, exact") and set(run.implementations[2:]) == {
        SDPA,
        "naive",
        EAGER,
        "reference",
    }


def test_what_failed_is_told_from_what_cannot_be_measured(run: Run):
    reasons = {
        "a": "needs 9 GiB",
        "b": "wrong: relative RMS error 1.0",
        "c": "failed: out of range",
        "d": "not installed: pip install d",
    }
    assert replace(run, not_measured=reasons).wrong.keys() == {"b", "c"} and not run.wrong


def test_a_variant_is_ours_only_where_there_is_nothing_else(run: Run):
    group = run.groups["step-fixed-n64"]
    fast = [
        replace(row, seconds=runs.Spread(1e-9, 1e-9, 1e-9)) if row.implementation == "native, exact" else row
        for row in group
    ]
    assert runs.fastest(fast).implementation == "native"
    assert runs.fastest([row for row in fast if row.implementation != "native"]).implementation == "native, exact"
    assert runs.fastest([row for row in group if not row.ours]) is None


# ---- refusals --------------------------------------------------------------------------------------------------------


def damaged(raw: dict[str, Any], part: str, **changes: Any) -> dict[str, Any]:
    """A file with replaced fields of the second group or row; the value `missing` removes a field."""
    entry = {**raw[part][1], **changes}
    return {
        **raw,
        part: [raw[part][0], {name: value for name, value in entry.items() if value != "missing"}, *raw[part][2:]],
    }


BAD = {
    "empty": (lambda raw: "", r"not JSON, or cut short \(line 1"),
    "cut short": (lambda raw: json.dumps(raw)[:-500], "not JSON, or cut short"),
    "no text": (lambda raw: b"\xff\xfe\x00\x81", "not a text file"),
    "nested": (lambda raw: "[" * 100_000, "not JSON, or cut short"),
    "a list": (lambda raw: [1, 2], "not a run of these benchmarks"),
    "pytest-benchmark's": (lambda raw: {"benchmarks": [], "machine_info": {}}, "not a run of these benchmarks"),
    "another format": (lambda raw: {**raw, "cmab_kernels_bench": 1}, "in format 1, and this code reads format 2"),
    "a word as format": (lambda raw: {**raw, "cmab_kernels_bench": "2"}, "in format '2'"),
    "no machine": (lambda raw: {name: value for name, value in raw.items() if name != "machine"}, "machine is missing"),
    "threads as truth": (lambda raw: {**raw, "threads": True}, "threads is True"),
    "rows as mapping": (lambda raw: {**raw, "rows": {}}, "rows is {}"),
    "a row that is none": (lambda raw: {**raw, "rows": [3]}, r"row 1 \(None\): 3 where a mapping"),
    "a row of no group": (lambda raw: damaged(raw, "rows", group="other"), r"row 2 \(other\): other is not a group"),
    "a group without a scan": (lambda raw: damaged(raw, "groups", scan="missing"), "scan is missing"),
    "time of nothing": (lambda raw: damaged(raw, "rows", seconds=[0.0, 1.0, 1.0]), r"D16-N1000\): seconds is \[0.0"),
    "time that is none": (lambda raw: damaged(raw, "rows", seconds=[float("nan"), 1.0, 1.0]), r"seconds is \[nan"),
    "no quartiles": (lambda raw: damaged(raw, "rows", ratio=[1.0]), r"ratio is \[1.0\]"),
    "others as text": (lambda raw: damaged(raw, "groups", others="many"), "others is 'many'"),
    "a floor below nothing": (lambda raw: damaged(raw, "rows", floor=-1.0), "floor is -1.0"),
    "error as text": (lambda raw: damaged(raw, "rows", error="small"), "error is 'small'"),
    "a field that is unknown": (lambda raw: damaged(raw, "rows", colour="red"), "colour"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_run_is_refused_by_name(kind: str, run: Run, tmp_path: Path):
    path = tmp_path / "given.json"
    save(run, path)
    change, found = BAD[kind]
    content = change(json.loads(path.read_text()))
    path.write_bytes(content) if isinstance(content, bytes) else path.write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    with pytest.raises(runs.BadRun, match=found) as refused:
        load(path)
    assert str(refused.value).startswith(f"{path}: ") and "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(runs.BadRun, match="cannot be read"):
            load(path)


def test_a_file_is_written_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "some.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})

    def cut_off(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"new": 1})
    assert json.loads(path.read_text()) == {"old": 1}


# ---- curves and words ------------------------------------------------------------------------------------------------


def test_a_series_differs_in_one_parameter(run: Run):
    forward, backward = series.series(run, "latent_attention", "N")
    assert forward.fixed == {"pass": "forward", "dtype": "float32", "B": 1, "H": 4, "D": 16, "L": 128, "threads": 2}
    assert backward.fixed["pass"] == "forward + backward"
    assert forward.values == list(synthetic.LENGTHS)
    assert {name: len(rows) for name, rows in forward.lines.items()} == {
        "native": 4,
        SDPA: 4,
        "reference": 4,
        "naive": 3,
    }
    assert [row.parameters["N"] for row in forward.lines["naive"]] == list(synthetic.LENGTHS[:3])
    (widths,) = series.series(run, "latent_attention", "D")
    assert widths.values == [8, 16, 32, 64] and series.series(run, "latent_attention", "dtype") == [], (
        "words are no axis"
    )


def test_fewer_than_three_points_are_no_curve_and_axes_begin_with_the_length(run: Run):
    assert (
        series.series(run, "latent_attention", "pass")
        == series.series(run, "continual_nystrom_step", "landmarks")
        == []
    )
    assert series.axes(run, "latent_attention") == ["N", "D"]
    assert series.axes(run, "continual_nystrom_step") == ["n"] and series.axes(run, "iterative_pinv") == []


def test_labels_tell_groups_apart_and_say_the_rest_once(run: Run):
    once, each = series.labels(run.scans["latent_attention"])
    assert once == "unless stated otherwise, float32, batch of 1, 4 heads, width 16, 128 queries, 2 threads"
    assert len(set(each.values())) == len(each) == 13
    assert each["latent-forward-float32-D16-N1000"] == "forward, 1,000 keys"
    assert each["latent-forward-bfloat16-D16-N100000"] == "forward, bfloat16, 100,000 keys"
    assert series.labels(run.scans["iterative_pinv"]) == (
        "16 landmarks, batch of 1, float32, 1 thread",
        {"pinv-m16": "pinv-m16"},
    )


def test_a_group_like_most_says_what_others_vary(run: Run):
    alone = run.rows[-1]
    rows = [replace(alone, group=f"m{m}B{b}", parameters={"m": m, "B": b}) for m, b in ((16, 1), (32, 1), (16, 4))]
    assert series.labels(rows)[1] == {
        "m16B1": "16 landmarks, batch of 1",
        "m32B1": "32 landmarks",
        "m16B4": "batch of 4",
    }


def test_examples_in_the_module_are_right():
    assert doctest.testmod(series) == (0, 2)

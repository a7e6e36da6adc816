"""`python -m cmab_kernels bench`: its refusals, its files, and what remains after an interruption."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import runs, session
from bench.harness import Group
from bench.report import page
from bench.scans import all_cases, scans
from cmab_kernels import __main__ as command
from cmab_kernels import bench

from . import synthetic


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return synthetic.written(tmp_path, synthetic.run(), "saved").path


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder in a separate working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "bench_report"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A synthetic run in place of each measurement; returns the arguments of the call."""
    asked: list[tuple[Any, ...]] = []

    def instead(*arguments: Any) -> runs.Run:
        asked.append(arguments)
        return synthetic.run(path=Path("run.json"))

    monkeypatch.setattr(session, "measured", instead)
    return asked


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty files for the page and the pictures: other tests check their contents, and they take seconds."""

    def write(run: runs.Run, folder: Path, comparison: object) -> list[Path]:
        written = [folder / name for name in WRITTEN if name != "run.json"]
        for path in written:
            path.touch()
        return written

    monkeypatch.setattr(page, "write", write)


def status_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cmab_kernels", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    return ended.value.code


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


WRITTEN = ["continual_nystrom_step.png", "latent_attention.png", "overview.png", "report.html", "run.json"]


# ---- what it writes --------------------------------------------------------------------------------------------------


def test_a_saved_run_is_shown_without_measuring(saved: Path, output: Path, monkeypatch, capsys):
    assert status_of(monkeypatch, "--from", str(saved), "--compare", str(saved)) == 0
    assert files(output) == WRITTEN and json.loads((output / "run.json").read_text()) == json.loads(saved.read_text())
    told = capsys.readouterr().out
    assert (
        "latent-forward-float32-D16-N1000 " in told
        and "30 same within noise" in told
        and "bench_report/report.html" in told
    )
    assert "What changed" in (output / "report.html").read_text()


def test_a_run_is_measured_and_written(undrawn, measured, output: Path, monkeypatch):
    asked = ("iterative_pinv", "latent_attention", "--quick", "--device", "cpu", "--threads", "2")
    assert status_of(monkeypatch, *asked) == status_of(monkeypatch, "--force") == 0 and files(output) == WRITTEN
    assert measured == [(["iterative_pinv", "latent_attention"], True, "cpu", 2), ([], False, "cpu", None)]
    assert runs.load(output / "run.json").groups.keys() == synthetic.run().groups.keys()


def test_a_wrong_row_is_an_error_and_the_report_is_written(undrawn, tmp_path: Path, output: Path, monkeypatch):
    wrong = synthetic.run(not_measured={"pinv-m16-native": "wrong: relative RMS error 1.0"})
    assert (
        status_of(monkeypatch, "--from", str(synthetic.written(tmp_path, wrong, "wrong").path)) == 1
        and files(output) == WRITTEN
    )


def test_force_replaces_what_it_writes_and_nothing_else(undrawn, saved: Path, output: Path, monkeypatch):
    output.mkdir()
    for name in ("notes.txt", "report.html"):
        (output / name).write_text("older")
    assert status_of(monkeypatch, "--from", str(saved), "--force") == 0
    assert files(output) == sorted([*WRITTEN, "notes.txt"])
    assert (output / "notes.txt").read_text() == "older" != (output / "report.html").read_text()


def test_a_run_in_its_own_folder_can_be_shown_again(undrawn, saved: Path, output: Path, monkeypatch):
    assert status_of(monkeypatch, "--from", str(saved)) == 0
    assert status_of(monkeypatch, "--from", str(output / "run.json"), "--force") == 0 and files(output) == WRITTEN


# ---- what it refuses -------------------------------------------------------------------------------------------------

REFUSED = {
    "an unknown scan": (
        ["latent_attention", "latent_atention"],
        "scan: got latent_atention, expected one of .*, latent_attention, ",
    ),
    "a saved run that is not there": (["--from", "absent.json"], "absent.json: cannot be read"),
    "a foreign run to compare with": (["--compare", "foreign.json"], "foreign.json: not a run of these benchmarks"),
    "a saved run that should be measured": (
        ["--from", "saved.json", "--quick"],
        "--from: got a saved run together with --quick",
    ),
    "a scan of a saved run": (
        ["latent_attention", "--from", "saved.json"],
        "--from: got a saved run together with a scan",
    ),
    "a device for a saved run": (["--from", "saved.json", "--device", "cpu"], "together with --device"),
    "threads for a saved run": (["--from", "saved.json", "--threads", "0"], "together with --threads"),
    "no threads": (["--threads", "0"], "--threads: got 0, expected an int >= 1"),
    "a GPU that is not there": (["--device", "cuda"], "--device: got cuda, expected cpu, as torch finds no GPU"),
    "no folder": (["--output", "saved.json"], "--output: got saved.json, a file, expected a folder"),
    "a folder with files": (
        ["--output", "full"],
        "--output: got full, which has files in it, expected an empty folder, or --force",
    ),
    "a folder that cannot be": (["--output", "saved.json/in"], "--output: got saved.json/in, which cannot be written"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_come_in_one_line_and_before_anything_is_measured(
    what: str, measured, saved, output: Path, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("foreign.json").write_text('{"name": "package"}')
    Path("full").mkdir()
    Path("full/run.json").write_text("older")
    before = sorted(path.name for path in Path().rglob("*"))
    arguments, expected = REFUSED[what]
    assert status_of(monkeypatch, *arguments) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.startswith("python -m cmab_kernels bench: ") and re.search(expected, told)
    assert not measured and not output.exists() and sorted(path.name for path in Path().rglob("*")) == before
    assert Path("full/run.json").read_text() == "older"


def test_an_installed_package_says_where_the_benchmarks_are(output: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert status_of(monkeypatch) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "in a checkout of the repository" in told


@pytest.mark.parametrize("module", bench.NEEDED)
def test_a_missing_package_is_named(module: str, output: Path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == module else find(name, *rest))
    assert status_of(monkeypatch) == 2
    assert f"{bench.NEEDED[module]}: not installed; pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ends", "status"), [(KeyboardInterrupt, 130), (lambda: synthetic.run(rows=()), 2)], ids=["interrupted", "empty"]
)
def test_a_run_without_an_end_leaves_no_file_under_its_name(ends, status: int, output: Path, monkeypatch, capsys):
    def broken_off(*_: Any) -> runs.Run:
        assert [path.name for path in output.iterdir() if not path.name.startswith(".unfinished-")] == ["run.json"]
        if isinstance(ends, type):
            raise ends
        return ends()

    monkeypatch.setattr(session, "measured", broken_off)
    output.mkdir()
    (output / "run.json").write_text("older")
    assert status_of(monkeypatch, "--force") == status
    assert files(output) == ["run.json"] and (output / "run.json").read_text() == "older"
    assert capsys.readouterr().err.endswith("nothing was written\n")


# ---- what is measured ------------------------------------------------------------------------------------------------


@pytest.fixture
def cases_measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Names of the cases of a session and of their implementations; only the first has a row."""
    seen: list[tuple[str, list[str]]] = []

    def instead(case, names, budget: float) -> Group:
        seen.append((case.name, names))
        row = replace(synthetic.run().rows[0], group=case.name, implementation=names[0])
        return Group({names[0]: row}, problems=dict.fromkeys(names[1:], "wrong: as planted"))

    monkeypatch.setattr(session, "measure", instead)
    monkeypatch.setattr(session, "others", lambda seconds: None)
    return seen


def test_a_session_measures_what_was_asked_for_and_no_definition(cases_measured, capsys):
    before = torch.get_num_threads()
    try:
        run = session.measured(["iterative_pinv", "merge_states"], quick=True, threads=1)
        assert torch.get_num_threads() == run.threads == 1 and run.quick and not run.figures
    finally:
        torch.set_num_threads(before)
    wanted = [case for case in (*scans()["merge_states"], *scans()["iterative_pinv"]) if case.quick]
    assert cases_measured == [
        (case.name, [name for name in case.implementations if name != "reference"]) for case in wanted
    ]
    assert [(row.group, row.implementation) for row in run.rows] == [(name, names[0]) for name, names in cases_measured]
    assert run.wrong.keys() == {f"{name}-{which}" for name, names in cases_measured for which in names[1:]}
    told = capsys.readouterr().out
    assert f"[1/{len(wanted)}] {wanted[0].name} " in told and "wrong: as planted" in told and "left" in told


@pytest.mark.parametrize(("share", "said"), [(None, False), (0.02, False), (0.4, True)])
def test_a_session_says_that_the_machine_is_busy(
    share: float | None, said: bool, cases_measured, monkeypatch: pytest.MonkeyPatch, capsys
):
    """The warning comes before the measurement, and again at the end for the groups that it concerns."""
    monkeypatch.setattr(session, "others", lambda seconds: share)
    run = session.measured(["iterative_pinv"], quick=True)
    assert ("Other programs take 40% of this machine's processors" in capsys.readouterr().err) == said and not run.notes
    rows = tuple(replace(row, group=f"{number}", others=share) for number, row in enumerate(run.rows))
    told = (
        f"{len(rows)} of {len(rows)} groups were timed while other programs took more than 5% of the machine's "
        "processors"
    )
    assert [note.partition(": ")[0] for note in session._notes(rows)] == [told] * said


def test_a_session_measures_scans_and_groups(cases_measured):
    (other, *_), (scan, *_) = scans()["merge_states"], scans()["iterative_pinv"]
    run = session.measured([scan.scan], groups=[other.name])
    assert {name for name, _ in cases_measured} == {other.name, *(case.name for case in scans()[scan.scan])}
    assert not run.quick and not run.figures


def test_a_full_session_measures_every_case(cases_measured, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session, "errors_of_additions", lambda keys: {f"{keys} keys": 0.5})
    run = session.measured()
    assert [name for name, _ in cases_measured] == [case.name for case in all_cases()]
    (figure,) = run.figures
    assert figure.endswith("1000000 keys") and not run.quick and run.rates.keys() == {"2"}


# ---- under pytest-benchmark ------------------------------------------------------------------------------------------

PLANTED = "from bench import harness; harness.ERROR_BOUND = dict.fromkeys(harness.ERROR_BOUND, {bound})"


@pytest.mark.parametrize(("bound", "failures"), [pytest.param(2e-5, 0, marks=pytest.mark.thorough), (0.0, 1)])
def test_pytest_bench_runs_the_same_cases_and_a_wrong_result_fails(bound: float, failures: int, tmp_path: Path):
    (tmp_path / "planted.py").write_text(PLANTED.format(bound=bound))
    options = (
        "--quick",
        "-k",
        "merge_states",
        "-p",
        "planted",
        "--benchmark-max-time=0.01",
        "--benchmark-json=found.json",
    )
    path = os.pathsep.join(map(str, (bench.ROOT, tmp_path)))
    command = [sys.executable, "-m", "pytest", str(bench.ROOT / "bench"), *options]
    # The workers of xdist time nothing.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    found = subprocess.run(command, cwd=tmp_path, env=alone | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert found.returncode == bool(failures) and found.stdout.count("Failed: wrong: relative RMS error") == failures, (
        found.stdout
    )
    assert found.stdout.count("1 skipped") == failures, found.stdout  # the peer is skipped
    if not failures:
        rows = {
            row["name"]: row["extra_info"] for row in json.loads((tmp_path / "found.json").read_text())["benchmarks"]
        }
        eager, ours = rows.values()
        assert (
            all("[merge_states-merge-2-states" in name for name in rows) and eager["ratio"] == 1.0 and ours["ratio"] > 0
        )
        assert ours.keys() == {"extra_memory", "result_memory", "flops", "bytes", "error", "steps", "ratio"}

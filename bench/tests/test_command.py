"""`python -m cmab_kernels bench`: what it refuses, what it writes, and what is left when it is interrupted."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import runs
from bench.report import page
from cmab_kernels import __main__ as command
from cmab_kernels import bench

from . import synthetic

FAKE_PYTEST = """
import json, os, sys, time
from pathlib import Path
print("[1/2] a group")
if "{mode}" == "hangs":
    Path("{started}").touch()
    time.sleep(60)
if "{mode}" == "breaks off":
    sys.exit(3)
if "{mode}" != "measures nothing":
    Path(sys.argv[sys.argv.index("--json") + 1]).write_text(Path("{run}").read_text())
os._exit({{"wrong": 1, "measures nothing": 5}}.get("{mode}", 0))  # what is still in a buffer is lost
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return synthetic.written(tmp_path, synthetic.run(), "saved").path


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder of a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "bench_report"


@pytest.fixture
def measured(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """pytest is played by a program that writes the saved run; gives the arguments that it had, of a run in some mode."""
    seen: list[list[str]] = []

    def play(mode: str) -> list[list[str]]:
        program = tmp_path / "fake_pytest.py"
        program.write_text(FAKE_PYTEST.format(mode=mode, run=saved, started=tmp_path / "started"))
        arguments = bench.Request.arguments

        def instead(self: bench.Request, file: Path) -> list[str]:
            seen.append(arguments(self, file))
            return [str(program), *seen[-1][2:]]

        monkeypatch.setattr(bench.Request, "arguments", instead)
        return seen

    return play


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty files for the page and the pictures: what is on them is tested elsewhere, and takes seconds."""

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


WRITTEN = ["continual_nystrom_step.png", "latent_attention.png", "operation_counts.png", "overview.png", "report.html", "run.json"]


# ---- what it writes --------------------------------------------------------------------------------------------------------------------


def test_a_saved_run_is_shown_without_measuring(saved: Path, output: Path, monkeypatch, capsys):
    assert status_of(monkeypatch, "--from", str(saved), "--compare", str(saved)) == 0
    assert files(output) == WRITTEN and json.loads((output / "run.json").read_text()) == json.loads(saved.read_text())
    told = capsys.readouterr().out
    assert "latent-forward-float32-D16-N1000 " in told and "30 same within noise" in told and "bench_report/report.html" in told
    assert "What changed" in (output / "report.html").read_text()


def test_a_run_is_measured_and_written(undrawn, measured, output: Path, monkeypatch, capfd):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    seen = measured("right")
    status = status_of(monkeypatch, "iterative_pinv", "latent_attention", "--quick", "--device", "cpu", "--threads", "2")
    assert status == 0 and files(output) == WRITTEN
    assert "[1/2] a group" in capfd.readouterr().out
    (arguments,) = seen
    assert arguments[:4] == ["-m", "pytest", "bench", "--json"] and Path(arguments[4]).is_absolute()
    assert arguments[5:] == [*("--scan", "iterative_pinv", "--scan", "latent_attention"), "--quick", "--device", "cpu", "--threads", "2"]


def test_a_wrong_row_is_an_error_and_the_report_is_written(undrawn, measured, output: Path, monkeypatch):
    measured("wrong")
    assert status_of(monkeypatch) == 1 and files(output) == WRITTEN


def test_a_saved_run_with_a_wrong_row_is_an_error_too(undrawn, tmp_path: Path, output: Path, monkeypatch):
    wrong = synthetic.run(not_measured={"pinv-m16-native": "wrong: relative RMS error 1.0"})
    assert status_of(monkeypatch, "--from", str(synthetic.written(tmp_path, wrong, "wrong").path)) == 1 and files(output) == WRITTEN


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


# ---- what it refuses -------------------------------------------------------------------------------------------------------------------

REFUSED = {
    "an unknown scan": (["latent_attention", "latent_atention"], "there is no scan latent_atention: choose among .*, latent_attention, "),
    "a saved run that is not there": (["--from", "absent.json"], "absent.json: cannot be read"),
    "a foreign run": (["--from", "foreign.json"], "foreign.json: no run of these benchmarks"),
    "a foreign run to compare with": (["--compare", "foreign.json"], "foreign.json: no run of these benchmarks"),
    "a run that is cut short": (["--compare", "short.json"], "short.json: no JSON, or cut short"),
    "a saved run that should be measured": (["--from", "saved.json", "--quick"], "--from shows a run that was saved, and --quick"),
    "a scan of a saved run": (["latent_attention", "--from", "saved.json"], "--from shows a run that was saved, and a scan"),
    "a device for a saved run": (["--from", "saved.json", "--device", "cpu"], "and --device says how"),
    "threads for a saved run": (["--from", "saved.json", "--threads", "0"], "and --threads says how"),
    "no threads": (["--threads", "0"], "--threads 0: give a number from 1 on"),
    "a GPU that is not there": (["--device", "cuda"], "--device cuda: torch finds no GPU"),
    "no folder": (["--output", "saved.json"], "--output saved.json: a file, and no folder"),
    "a folder with files": (["--output", "full"], "full has files in it: give another --output, or --force"),
    "a folder that cannot be": (["--output", "saved.json/in"], "--output saved.json/in: cannot be written"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_come_in_one_line_and_before_anything_is_measured(what: str, measured, saved, output: Path, monkeypatch, capsys):
    seen = measured("right")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("foreign.json").write_text('{"name": "package"}')
    Path("short.json").write_text(saved.read_text()[:1000])
    Path("full").mkdir()
    Path("full/run.json").write_text("older")
    before = sorted(path.name for path in Path().rglob("*"))
    arguments, expected = REFUSED[what]
    assert status_of(monkeypatch, *arguments) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.startswith("python -m cmab_kernels bench: ") and re.search(expected, told)
    assert not seen and not output.exists() and sorted(path.name for path in Path().rglob("*")) == before
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
    assert f"not installed: {bench.NEEDED[module]}; pip install" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["breaks off", "measures nothing"])
def test_a_run_that_broke_off_leaves_nothing(mode: str, measured, output: Path, monkeypatch, capsys):
    measured(mode)
    assert status_of(monkeypatch) == 2 and not output.exists()
    assert "the run broke off, or measured nothing" in capsys.readouterr().err


def test_an_interruption_leaves_no_file_under_its_name(tmp_path: Path, saved: Path):
    """As from a terminal, where the whole group of processes has the signal."""
    program = tmp_path / "fake_pytest.py"
    program.write_text(FAKE_PYTEST.format(mode="hangs", run=saved, started=tmp_path / "started"))
    script = (
        "import sys; from cmab_kernels import bench, __main__ as command; "
        f"bench.Request.arguments = lambda self, file: [{str(program)!r}, '--json', str(file)]; "
        "sys.argv = ['cmab_kernels', 'bench', '--force']; command.main()"
    )
    (tmp_path / "bench_report").mkdir()
    (tmp_path / "bench_report" / "run.json").write_text("older")
    root = {"PYTHONPATH": str(bench.ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | root,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130 and told.endswith("python -m cmab_kernels bench: interrupted; nothing was written\n")
    assert files(tmp_path / "bench_report") == ["run.json"] and (tmp_path / "bench_report" / "run.json").read_text() == "older"


def test_pytest_knows_the_options_that_it_is_given():
    """The command and bench/plugin.py agree; nothing is measured."""
    request = bench.Request(scans=["iterative_pinv"], quick=True, device="cpu", threads=1)
    arguments = [*request.arguments(Path("none.json").absolute()), "--collect-only"]
    found = subprocess.run([sys.executable, *arguments], cwd=bench.ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "iterative-pinv" in found.stdout or "iterative_pinv" in found.stdout

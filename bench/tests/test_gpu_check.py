"""The parts of the GPU check that a machine without a GPU can test: coverage, the table, refusals."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench import gpu_check, harness, provenance
from bench.floors import Rates
from bench.gpu import timings
from bench.gpu.printed import table
from bench.gpu.results import Report
from bench.gpu.sections import Outcome, _made
from bench.scans import attention, continual, nystrom
from bench.scans.case import EAGER, FLASH
from cmab_kernels.measure import Peak

pytestmark = pytest.mark.thorough

ROOT = Path(gpu_check.__file__).parents[1]
H200 = Rates(3.87e12, 4.3e12, {"bfloat16": 790e12, "float16": 790e12, "float32": 395e12})
MACHINE = {"gpu": "NVIDIA H200", "commit": "unknown", "date": "2026-01-01T00:00:00+00:00"}


@pytest.mark.usefixtures("on_a_gpu")
def test_peers_and_shapes_of_timings() -> None:
    """Every peer of the design, at its shapes; each row has its own key, and our rows come first."""
    keys = [task.key for task in timings.tasks("cuda", {})]
    for peer in (
        "flash_attention",
        "cudnn_attention",
        "efficient_attention",
        "math",
        "flash-attention",
        "naive",
        "triton, tf32",
    ):
        assert any(peer.removesuffix("_attention") in key for key in keys), peer
    assert len(set(keys)) == len(keys) and not any("compiled" in key for key in keys)
    peers = [task.peer for task in timings.tasks("cuda", {})[1:]]
    assert peers == sorted(peers) and 0 < sum(peers) < len(peers)
    assert all(task.key.endswith("compiled") for task in timings.compiled_tasks("cuda", {}))
    assert timings.tuned_tasks("cuda", {}) == [] and timings.tuned_tasks("cuda", {"tune": [{"written": True}]})
    steps = [task.key for task in timings.continual_tasks("cuda", {})]
    assert sum(key.endswith("not captured") for key in steps) == len(steps) / 2


# ---- the table


def _table(**outcomes: Outcome) -> str:
    return table(Report(Path("x.json"), MACHINE, outcomes), gpu_check.SECTIONS)


def test_the_table_says_what_is_wrong_what_is_missing_and_why() -> None:
    good, bad = {"key": "a", "ok": True}, {"key": "b", "ok": False, "share": 2.0}
    over = {"key": "c", "ok": True, "passed over": "it was not built"}
    text = _table(
        sanitizer=Outcome([good, bad], True, listed=2),
        suite=Outcome([over, {**over, "key": "d"}], False, "stopped after 90 s", listed=7),
    )
    assert "sanitizer: 1 of 2 right\n" in text and 'WRONG {"key": "b", "ok": false, "share": 2.0}' in text
    assert "suite: 2 of 7 right, incomplete: stopped after 90 s" in text
    assert "skipped, 2 rows: it was not built" in text
    stopped = [{"key": f"row {i}", "ok": False, "problem": "out of memory"} for i in range(5)]
    assert "WRONG, out of memory: row 0; row 1; row 2 and 2 more\n" in _table(suite=Outcome(stopped, True))
    assert "not run yet: timings" in text and "tuned_suite" in text.splitlines()[-1]


def test_the_table_has_times_beside_floors_and_peers() -> None:
    row = {
        "key": "some case; triton",
        "group": "some case",
        "extra_memory": 2**21,
        "result_memory": 2**20,
        "error": 1e-3,
    }
    ours = row | {"seconds": [2e-4, 1.9e-4, 2.1e-4], "floor": 1e-4, "bound": "matrix"}
    peer = row | {"key": "some case; flash", "seconds": [3e-4, 3e-4, 3e-4], "speed_up": [1.5, 1.4, 1.6]}
    absent = {"key": "some case; flash-attn", "group": "some case", "problem": "not installed: pip install flash-attn"}
    text = _table(timings=Outcome([peer, absent, ours], True))
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("timings"))
    assert lines[at + 1] == "  some case"
    assert (
        "triton" in lines[at + 2]
        and "200 us" in lines[at + 2]
        and "50% of it" in lines[at + 2]
        and "+1.0 MiB" in lines[at + 2]
    )
    assert "flash " in lines[at + 3] and "1.50 times ours" in lines[at + 3], "the fastest first"
    assert "flash-attn: not installed: pip install flash-attn" in lines[at + 4] and "WRONG" not in text


# ---- the machine, and refusals


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu_check.py"), "--output", str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (
        run.returncode == 2
        and run.stderr == "gpu_check: there is no GPU that torch can use\n"
        and not list(tmp_path.iterdir())
    )


def test_what_cannot_be_asked_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit() == "unknown"
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() == "unknown" and provenance.ask("a", "b") == {"a": "unknown", "b": "unknown"}
    assert provenance.gpu_state()["throttling"] == "unknown"


def test_what_nvidia_smi_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi fails as a whole if it does not know a field: throttling has two names."""

    def output(*command: str) -> str:
        if "clocks_event_reasons.active" in command[3]:
            return "unknown"
        return {"--query-gpu=clocks_throttle_reasons.active": "0x0000000000000001"}.get(
            command[3], "1980 MHz, 3201 MHz, 40, 100 W"
        )

    monkeypatch.setattr(provenance, "output", output)
    assert provenance.gpu_state() == {
        "clocks.sm": "1980 MHz",
        "clocks.mem": "3201 MHz",
        "temperature.gpu": "40",
        "power.draw": "100 W",
        "throttling": "0x0000000000000001",
    }


# ---- the checked commit


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one commit, whose sources are the project's for `provenance`."""
    for name in ("cmab_kernels/attention/triton/forward.py", "csrc/solve/solve.cu", "bench/a.py", "tests/test_a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    (tmp_path / "cmab_kernels" / "tiles.json").write_text("{}")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "COMPILED", tmp_path / "bench" / "results" / "compiled")
    return tmp_path


def _git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True)


def test_a_clean_checkout_says_its_commit(checkout: Path) -> None:
    """Files of tuning and compilers do not make it dirty."""
    assert provenance.clean_commit() == provenance.commit() != "unknown"
    (checkout / "cmab_kernels" / "tiles.json").write_text("[]")
    provenance.COMPILED.mkdir(parents=True)
    (provenance.COMPILED / "a.py").write_text("1")
    assert provenance.clean_commit() == provenance.commit()
    assert provenance.digest(provenance.sources()) == provenance.digest(provenance.sources_of(provenance.commit()))


@pytest.mark.parametrize("name", ["csrc/solve/solve.cu", "tests/test_a.py", "bench/new.py"])
def test_a_dirty_checkout_is_refused(checkout: Path, name: str) -> None:
    """A changed or uncommitted file is named, and so is a missing one."""
    (checkout / name).write_text("2")
    with pytest.raises(ValueError, match=rf"^{name}: different from commit \w{{10}}: commit or restore them$"):
        provenance.clean_commit()
    (checkout / name).unlink()
    if name != "bench/new.py":
        with pytest.raises(ValueError, match=f"^{name}: different from commit"):
            provenance.clean_commit()


def test_a_copy_without_git_must_be_told_its_commit(checkout: Path) -> None:
    """The sources must also have the digest that the checkout had."""
    told = f"{provenance.commit()}:{provenance.digest(provenance.sources())}"
    shutil.rmtree(checkout / ".git")
    with pytest.raises(ValueError, match=r"python -m bench\.provenance"):
        provenance.clean_commit()
    assert provenance.clean_commit(told) == told[:40]
    (checkout / "bench" / "a.py").write_text("2")
    with pytest.raises(ValueError, match=rf"^commit: the sources here are \w{{12}}, expected {told[41:]}"):
        provenance.clean_commit(told)


def test_a_dirty_tree_is_refused_before_anything_runs(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "bench" / "a.py").write_text("2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "run", lambda *_: pytest.fail("a section has begun"))
    assert gpu_check.main(["--output", str(tmp_path / "results")]) == 2
    assert (
        capsys.readouterr().err.startswith("gpu_check: bench/a.py: different from commit")
        and not (tmp_path / "results").exists()
    )


def test_sources_of_kernels_are_what_their_compilers_read() -> None:
    """Each CUDA file of csrc, with all files that it includes, and each folder of Triton's kernels."""
    files = provenance.sources()
    kernels = provenance.kernel_digests(files).keys()
    assert {name for name in files if name.endswith((".cu", ".cuh"))} <= kernels
    for name in (name for name in kernels if name.startswith("csrc")):
        for included in re.findall(r'#include "(.+)"', files[name].decode()):
            assert any(f"{folder}/{included}" in kernels for folder in (Path(name).parent, "csrc")), (name, included)
    assert {
        name for name, source in files.items() if b"@triton.jit" in source and name.startswith("cmab_kernels/")
    } <= kernels


def test_each_row_is_made_and_what_is_wrong_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and peers of tiny cases on the CPU, with a peer whose result is wrong and a peer that is not
    installed."""
    wrong = attention.passes(lambda q, k, v: 3 * attention.naive_attention(q, k, v), 3, False)
    tiny = attention.attention(1, 8, keys=40, latents=5)
    others = {"wrong": wrong, FLASH: attention.passes(attention.flash_attention, 3, False)}
    cases = [replace(tiny, implementations={**tiny.implementations, **others}), nystrom.pinv(5, 2)]
    monkeypatch.setattr(timings, "measure_on", lambda device: None)
    monkeypatch.setattr(harness, "peak_memory", lambda *_, **__: Peak(0, 0))
    monkeypatch.setattr(harness, "rates_of", lambda device: H200)
    for task in timings.of_cases(lambda: iter(cases), "cuda"):
        row, name = _made(task, "cpu")[0], task.key.split("; ")[1]
        assert row.get("ok") is not False, row
        if name == FLASH:
            assert "pip install flash-attn" in row["problem"]
        elif name == "wrong":
            assert "wrong here: relative RMS error" in row["problem"]
        else:
            assert {"group", "seconds", "floor", "extra_memory", "error"} <= row.keys(), row
            assert ("speed_up" in row) == (name != "native"), row


def test_streams_begin_anew_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expected results are kept for all rows of a case; a stream that has continued would be compared with its
    first tokens."""
    monkeypatch.setattr(harness, "peak_memory", lambda *_, **__: Peak(0, 0))
    monkeypatch.setattr(harness, "rates_of", lambda device: H200)
    case = continual.step(8, 8, landmarks=3, calls=4)
    for name in ("native", EAGER, "native", EAGER):
        row = timings.timed(case, name)
        assert "seconds" in row and ("speed_up" in row) == (name == EAGER), row

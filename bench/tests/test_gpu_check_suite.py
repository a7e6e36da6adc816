"""The GPU check's section of tests, and a whole call, with planted faults.

No GPU is needed, because the tests of a folder replace those for a GPU.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("triton")

from bench import gpu_check
from bench.gpu.extension import adopt_installed
from bench.gpu.sections import Outcome, Section, run

from .fake_sections import Hurried, as_on_a_gpu

pytestmark = pytest.mark.thorough

FAKE = "bench.tests.fake_sections"
TESTS = """
import os, time, pytest
pytestmark = pytest.mark.gpu
MARKS = {marks!r}

@pytest.fixture(autouse=True)
def marks(request):
    open(MARKS, "a").write(request.node.name + " ")

@pytest.mark.parametrize("number", range(3))
def test_right(number): pass

def test_wrong():
    assert os.path.exists(MARKS + ".mended"), "other bits"

def test_hangs():
    while not os.path.exists(MARKS + ".mended"): time.sleep(0.1)

def test_crashes():
    if not os.path.exists(MARKS + ".mended"): os._exit(9)

def test_extension(monkeypatch):
    if not os.path.exists(MARKS + ".mended"):
        from cmab_kernels.runtime import extension
        cuda = {{"built": False, "reason": "nvcc was not found"}}
        monkeypatch.setattr(extension, "build_report", lambda: {{"cuda": cuda}})
        extension.load_cuda()

def test_skipped(): pytest.skip("there is one GPU only")
"""


@pytest.fixture
def tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tests that replace those of the package: right, wrong, hanging and crashing ones."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_some.py").write_text(TESTS.format(marks=str(tmp_path / "marks")))
    monkeypatch.setenv("FAKE_SECTIONS_TESTS", str(folder))
    monkeypatch.setenv("FAKE_SECTIONS_MARKS", str(tmp_path))
    return folder


def _ran(folder: Path) -> list[str]:
    """The tests that have run since the last call of this function."""
    marks = folder.parent / "marks"
    names = sorted(marks.read_text().split()) if marks.exists() else []
    marks.unlink(missing_ok=True)
    return names


FAULTY = ["test_crashes", "test_extension", "test_hangs", "test_wrong"]
ALL = sorted([*FAULTY, "test_right[0]", "test_right[1]", "test_right[2]", "test_skipped"])


@pytest.mark.parametrize("content", ["import nothing_of_this_name", "", None])
def test_tests_that_cannot_be_collected_are_a_problem(content: str | None, tests: Path) -> None:
    """A folder without tests is also an error, because nothing would be checked."""
    (tests / "test_some.py").unlink()
    if content is not None:
        (tests / "test_other.py").write_text(content)
    outcome = Outcome()
    run(Section(f"{FAKE}:tests"), "cpu", outcome, {}, 60.0)
    assert not outcome.complete and outcome.problem.startswith("RuntimeError: pytest ended with"), outcome


def test_the_section_lists_the_tests_of_the_package() -> None:
    outcome = Outcome()
    run(Section(f"{FAKE}:listed", workers=2), "cpu", outcome, {}, 300.0)
    assert outcome.right and len(outcome.rows) == outcome.listed > 200, outcome.problem
    assert all(row["key"].startswith("tests/") for row in outcome.rows)


def test_a_check_from_start_to_end(
    tests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The first call finds the faults, the second runs the fixed tests, and the third has nothing to do; tuned tiles
    are then tested."""
    fakes = {"suite": "tests", "timings": "times", "candidates": "fine", "tune": "tuned", "tuned_suite": "tuned_tests"}
    sections = {
        name: Hurried(f"{FAKE}:{fakes.get(name, 'empty')}", workers=2, judged=section.judged, after=section.after)
        for name, section in gpu_check.SECTIONS.items()
    }
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    monkeypatch.setattr(gpu_check, "run", lambda section, device, *rest: run(section, "cpu", *rest))
    as_on_a_gpu(monkeypatch, tmp_path)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "set by the check")
    output = tmp_path / "results"
    copy = output / "gpu_check_nvidia-h200_2026-01-02_tiles.json"

    def call() -> tuple[int, str]:
        return gpu_check.main(["--output", str(output)]), capsys.readouterr().out

    code, said = call()
    assert code == 1 and _ran(tests) == sorted(2 * ALL), "once, and once with tuned tiles"
    suite = json.loads((output / "gpu_check_nvidia-h200_2026-01-02.json").read_text())["sections"]["suite"]
    rows = {row["key"].rpartition("::")[2]: row for row in suite["rows"]}
    assert suite["listed"] == len(ALL)
    assert sorted(rows) == ALL and sorted(name for name in rows if not rows[name]["ok"]) == FAULTY, (
        "each fault costs its row alone"
    )
    assert (
        "AssertionError: other bits" in rows["test_wrong"]["problem"]
        and "test_some.py:" in rows["test_wrong"]["problem"]
    )
    assert "the CUDA kernels are not there (nvcc was not found)" in rows["test_extension"]["problem"]
    assert rows["test_hangs"]["problem"] == "stopped after 2 s" and "exit code 9" in rows["test_crashes"]["problem"]
    assert "\nsuite: 4 of 8 right\n" in said and "\ntuned_suite: 4 of 8 right\n" in said and "not done yet" not in said
    assert "skipped, 2 rows" in said and "[4] -> [8]: 20.0% faster" in said and "100 us" in said
    assert (
        "a case; peer" not in said
        and "peer: RuntimeError: out of memory" in said
        and "another: stopped after 2 s" in said
    ), "no fault of ours"
    assert (
        "timings, clocks.sm 1980 MHz" in said
        and "measured, T/s: bfloat16 790.00, exponentials 3.87, memory 4.30" in said
    )
    assert os.environ["TRITON_CACHE_DIR"] == str(output / "compiled" / "triton"), "what is compiled is kept"
    assert copy.read_text() == "{}"
    (tests.parent / "marks.mended").touch()
    copy.write_text('{"tuned": 1}')
    code, said = call()
    assert code == 0 and _ran(tests) == sorted(2 * FAULTY) and "\nsuite: 8 of 8 right\n" in said and "WRONG" not in said
    assert gpu_check.tiles.FILE.read_text() == '{"tuned": 1}', (
        "a new machine takes the tuned tiles from the copy beside the results"
    )
    code, said = call()
    assert code == 0 and _ran(tests) == [] and "\nsuite: 8 of 8 right\n" in said


# ---- the extension


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A checkout without extensions, and a folder where the same package is installed."""
    for place in ("checkout", "site"):
        (tmp_path / place / "cmab_kernels").mkdir(parents=True)
        (tmp_path / place / "cmab_kernels" / "api.py").write_text("1")
    for name in ("_C.so", "_cuda.abi3.so", "_build.json"):
        (tmp_path / "site" / "cmab_kernels" / name).write_text(name)
    return tmp_path / "checkout", tmp_path / "site"


def test_the_installed_extension_is_found(places: tuple[Path, Path]) -> None:
    checkout, site = places
    adopt_installed(checkout, [str(checkout), str(site)])
    assert sorted(path.name for path in (checkout / "cmab_kernels").iterdir()) == [
        "_C.so",
        "_build.json",
        "_cuda.abi3.so",
        "api.py",
    ]
    (site / "cmab_kernels" / "_cuda.abi3.so").write_text("another")
    adopt_installed(checkout, [str(site)])
    assert (checkout / "cmab_kernels" / "_cuda.abi3.so").read_text() == "_cuda.abi3.so", (
        "what is built in the checkout is taken first"
    )


def test_an_extension_of_other_sources_is_refused(places: tuple[Path, Path]) -> None:
    checkout, site = places
    (checkout / "cmab_kernels" / "api.py").write_text("2")
    with pytest.raises(ValueError, match=r"has other sources than .*: install it again"):
        adopt_installed(checkout, [str(site)])
    adopt_installed(checkout, [str(checkout)])  # nothing is installed: the suite says that there is no extension

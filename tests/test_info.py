"""The output of `python -m cmab_kernels info`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cmab_kernels
from cmab_kernels import info
from cmab_kernels.runtime.backends import IMPLEMENTATIONS, OPERATORS

from .forked import Forks


@pytest.fixture(scope="module")
def printed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> str:
    return forks.run(tmp_path_factory.mktemp("info"), ["cmab_kernels", "info"]).stdout


def test_every_section_is_there(printed: str) -> None:
    for heading in ("Versions", "Native extension", "CUDA kernels", "Processor", "GPU", "Implementations"):
        assert re.search(rf"^{heading}$", printed, flags=re.MULTILINE)
    assert re.search(rf"^  cmab_kernels +{re.escape(cmab_kernels.__version__)}$", printed, flags=re.MULTILINE)


def test_every_operator_has_a_line_whose_words_are_apart(printed: str) -> None:
    """A name longer than its column does not run into the name of the device."""
    lines = [
        line.split() for line in printed.partition("Implementations\n")[2].splitlines() if not line.startswith("  [")
    ]
    assert {line[0] for line in lines} == set(OPERATORS)
    for operator, device, *rest in lines:
        assert (
            device in ("cpu", "cuda")
            and rest[:2] == ["auto", "="]
            and rest[2] in {*IMPLEMENTATIONS[OPERATORS[operator]], "reference"}
        )


def test_one_reason_stands_once(printed: str) -> None:
    """An operator shows the numbers of the reasons why other implementations cannot run; the reasons follow below, each
    once."""
    section = printed.partition("Implementations\n")[2]
    notes = re.findall(r"^  \[(\d+)\] (.+)$", section, flags=re.MULTILINE)
    assert len({reason for _, reason in notes}) == len(notes)
    assert [number for number, _ in notes] == [str(number + 1) for number in range(len(notes))]
    assert set(re.findall(r" (?:not )?\w+ \[(\d+)\]", section)) == {number for number, _ in notes}


def test_version(forks: Forks, tmp_path: Path) -> None:
    told = forks.run(tmp_path, ["cmab_kernels", "--version"]).stdout
    assert told == f"cmab_kernels {cmab_kernels.__version__}\n"


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert list(info._columns([("a", "bc", ""), ("long name", "d", "e")])) == ["a          bc", "long name  d   e"]
    assert list(info._columns([])) == []


def test_instructions_that_there_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMAB_KERNELS_ISA", "avx3")
    assert 'CMAB_KERNELS_ISA is "avx3"; usable here' in info.report()


def test_a_reader_may_stop_early() -> None:
    """The reader closes the pipe early, as in `python -m cmab_kernels info | head -1`."""
    command = [sys.executable, "-m", "cmab_kernels", "info"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout and running.stderr
        running.stdout.close()
        assert not running.stderr.read()
    assert running.returncode == 0

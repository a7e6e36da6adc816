"""States and modules over process groups: the cases beside this file, on two and three processes that talk through Gloo."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .ranks import cases

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")


def torchrun(processes: int, *arguments: str) -> subprocess.CompletedProcess:
    """Run a module or program with `torchrun` on a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


LAUNCHES = {
    "two": (2, "cases_merge", "cases_gradients", "cases_modules"),
    "three": (3, "cases_merge", "cases_gradients", "cases_modules"),
    "four": (4, "cases_levels"),
    "compiled": (2, "cases_compiled"),
}
"""name -> the number of processes, and the modules whose cases they run"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, str]]]:
    """Launch processes once; the value returns what each process of a launch found."""

    @functools.cache
    def launched(name: str) -> list[dict[str, str]]:
        processes, *modules = LAUNCHES[name]
        folder = tmp_path_factory.mktemp(name)
        done = torchrun(processes, "-m", "tests.distributed.ranks", str(folder), *modules)
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        assert len(found) == processes, done.stderr
        return found

    return launched


@pytest.mark.parametrize("launch, case", [(name, case) for name, (_, *modules) in LAUNCHES.items() for case in cases(*modules)])
def test_case(outcomes: Callable[[str], list[dict[str, str]]], launch: str, case: str) -> None:
    found = [each.get(case, "not run: a case before it failed, or another rank") for each in outcomes(launch)]
    failed = {rank: text for rank, text in enumerate(found) if text}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())


def test_page() -> None:
    """The programs of the page run on two processes; `test_docs.py` runs them on one."""
    done = torchrun(2, "-m", "tests.distributed.page")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("`state` differs between ranks (rank 0: AttentionState with out (1, 4, 32, 16)") == 2

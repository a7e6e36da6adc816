"""States and modules over process groups: the cases beside this file,
on two and three processes that talk through Gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
    "two": (2, ["cases_merge", "cases_gradients", "cases_modules"]),
    "three": (3, ["cases_merge", "cases_gradients", "cases_modules"]),
    "four": (4, ["cases_levels"]),
    "compiled": (2, ["cases_compiled"]),
}
"""name -> the number of processes, and the modules whose cases they run"""


@pytest.mark.parametrize("processes, modules", LAUNCHES.values(), ids=LAUNCHES)
def test_cases(processes: int, modules: list[str], tmp_path: Path) -> None:
    """Every case of the modules passes on every process; one launch runs them all,
    as most of the time goes to starting processes."""
    done = torchrun(processes, "-m", "tests.distributed.ranks", str(tmp_path), *modules)
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    failed = [f"rank {rank}, {case}: {text}" for rank, outcomes in enumerate(found) for case, text in outcomes.items() if text]
    assert not failed, "\n".join(failed)
    assert [list(outcomes) for outcomes in found] == processes * [list(cases(*modules))], done.stderr


def test_page() -> None:
    """The programs of the page run on two processes; `test_docs.py` runs them on one."""
    done = torchrun(2, "-m", "tests.distributed.page")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("state: got rank 0: AttentionState with out (1, 4, 32, 16)") == 2

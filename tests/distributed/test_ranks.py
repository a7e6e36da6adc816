"""States and modules over process groups: the cases in this folder, on two to four processes that communicate through
Gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .ranks import LAUNCHES, cases

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch was built without torch.distributed"
)


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    "launches", [("three", "four"), pytest.param(("two", "compiled"), marks=pytest.mark.thorough)], ids="-".join
)
def test_cases(launches: tuple[str, ...], tmp_path: Path) -> None:
    """Every case passes on every process."""
    command = [sys.executable, "-m", "tests.distributed.ranks", str(tmp_path), *launches]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    for launch in launches:
        processes, modules = LAUNCHES[launch]
        found = [json.loads(path.read_text()) for path in sorted((tmp_path / launch).glob("*.json"))]
        failed = [
            f"{launch}, rank {rank}, {case}: {text}"
            for rank, outcomes in enumerate(found)
            for case, text in outcomes.items()
            if text
        ]
        assert not failed, "\n".join(failed)
        assert [list(outcomes) for outcomes in found] == processes * [list(cases(*modules))], (launch, done.stderr)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_page() -> None:
    """The programs of the page run on two processes that `torchrun` starts; `test_docs.py` runs them on one."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "tests.distributed.page"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("state: got rank 0: AttentionState with out (1, 4, 32, 16)") == 2

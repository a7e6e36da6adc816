"""Users' programs pass mypy: the package declares that it is typed."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cmab_kernels as ck

from . import pages

IMPORTS = "import torch\nimport cmab_kernels as ck\nfrom cmab_kernels import nn\n"

RESULTS = """
def few(state: ck.ContinualNystromState, token: torch.Tensor) -> torch.Tensor:
    _, state = ck.continual_nystrom_step(state, token, token, token)
    return state.inverse

def every(state: ck.ContinualAttentionState, token: torch.Tensor) -> ck.ContinualAttentionState:
    result: ck.StepResult[ck.ContinualAttentionState] = ck.continual_attention_step(state, token, token, token)
    return result.state
"""


def programs() -> dict[str, str]:
    """The programs to check: the page's program that streams over a window, and other uses of its steps."""
    streams = {
        page.stem: next(program.lstrip() for program in pages.programs(page) if "continual_nystrom_step" in program)
        for page in (pages.README, pages.DOCS / "quickstart.md")
    }
    return streams | {"results": RESULTS}


@pytest.mark.thorough
def test_programs_pass_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy comes with the extra `lint`")
    for name, program in programs().items():
        (tmp_path / f"{name}.py").write_text(IMPORTS + program)
    # union-attr: for mypy, a state that is None at first may still be None after a loop over chunks
    command = [sys.executable, "-m", "mypy", "--disable-error-code", "union-attr", *map(str, tmp_path.glob("*.py"))]
    done = subprocess.run(command, cwd=pages.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_results_of_steps_have_one_type_which_names_their_state() -> None:
    token = torch.randn(1, 1, 4, 2)
    nystrom = ck.continual_nystrom_step(ck.continual_nystrom_init(*3 * [token], num_landmarks=2), *3 * [token])
    exact = ck.continual_attention_step(ck.continual_attention_init(*3 * [token]), *3 * [token])
    # In the way that torch recognises a NamedTuple.
    assert type(nystrom) is type(exact) is ck.StepResult and ck.StepResult.__bases__ == (tuple,)
    assert type(pickle.loads(pickle.dumps(exact))) is ck.StepResult

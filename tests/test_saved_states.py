"""States are written by `torch.save` and read by `torch.load`, in a process that has only imported the package."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cmab_kernels as ck
from cmab_kernels import nn

KEYS = torch.randn(1, 2, 9, 4)
STATES = {
    "attention": lambda: ck.attention_state(KEYS[:, :, :3], KEYS, KEYS),
    "ridge": lambda: ck.ridge_state(KEYS, KEYS),
    "continual attention": lambda: ck.continual_attention_init(KEYS, KEYS, KEYS),
    "continual Nystrom": lambda: ck.continual_nystrom_init(KEYS, KEYS, KEYS, 3),
    "a window that fills": lambda: _first_token(nn.ContinualAttention(4, 2, sequence_len=3)),
    "tokens of a window": lambda: _first_token(nn.RetroactiveEncoderLayer(4, 2, 8, sequence_len=3).eval())[0],
}


@torch.no_grad()
def _first_token(module: torch.nn.Module) -> object:
    module.forward_step(torch.ones(1, 4))
    return module.get_state()


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_saved_state_is_read_without_pickle(state, tmp_path: Path):
    written, file = state(), tmp_path / "state.pt"
    torch.save(written, file)
    read = torch.load(file, weights_only=True)
    assert type(read) is type(written)
    torch.testing.assert_close(read, written, rtol=0, atol=0, equal_nan=True)  # spare memory holds anything


def test_a_new_process_reads_it(tmp_path: Path):
    file = tmp_path / "states.pt"
    torch.save([state() for state in STATES.values()], file)
    program = "import sys, torch, cmab_kernels.nn; print(*(type(state).__name__ for state in torch.load(sys.argv[1], weights_only=True)))"
    run = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True)
    assert run.stdout.split() == [
        "AttentionState",
        "RidgeState",
        "ContinualAttentionState",
        "ContinualNystromState",
        "FillingWindow",
        "RecentTokens",
    ], run.stderr

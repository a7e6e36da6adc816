"""States are written by `torch.save` and read by `torch.load`, in a process that has only imported the package."""

import io
import pickle
import subprocess
import sys
import zipfile
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
    "streams of several ages": lambda: _first_token(nn.ContinualAttention(4, 2, sequence_len=3), torch.tensor([False])),
}


@torch.no_grad()
def _first_token(module: torch.nn.Module, *mask: torch.Tensor) -> object:
    module.forward_step(torch.ones(1, 4), **({"key_padding_mask": mask[0]} if mask else {}))
    return module.get_state()


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_saved_state_is_read_without_pickle(state, tmp_path: Path):
    written, file = state(), tmp_path / "state.pt"
    torch.save(written, file)
    read = torch.load(file, weights_only=True)
    assert type(read) is type(written)
    torch.testing.assert_close(read, written, rtol=0, atol=0, equal_nan=True)  # spare memory may hold any number


def test_a_new_process_reads_it(tmp_path: Path):
    file = tmp_path / "states.pt"
    torch.save([state() for state in STATES.values()], file)
    program = (
        "import sys, torch, cmab_kernels.nn; print(*(type(state).__name__ for state in torch.load(sys.argv[1], "
        "weights_only=True)))"
    )
    run = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True)
    assert run.stdout.split() == [
        "AttentionState",
        "RidgeState",
        "ContinualAttentionState",
        "ContinualNystromState",
        "FillingWindow",
        "RecentTokens",
        "StaggeredWindow",
    ], run.stderr


MOVED = {
    "cmab": (nn.CMAB, nn.CMABUpdate, nn.CMABRemoval),
    "cmab_stack": (nn.CMABStack,),
    "continual": (nn.ContinualAttention, nn.ContinualNystromAttention),
    "continual_encoder": (nn.ContinualEncoder, nn.ContinualEncoderLayer, nn.RetroactiveEncoderLayer),
    "continual_stream": (nn.ContinualStream, nn.FillingWindow, nn.RecentStream, nn.RecentTokens),
    "informer": (nn.InformerEncoderLayer,),
    "layers": (nn.CrossAttention, nn.FeedForward, nn.LatentLayer, nn.SelfAttention),
    "multihead_attention": (nn.Attended, nn.MultiheadAttention),
    "multihead_intention": (nn.MultiheadIntention, nn.MultiheadSigmaIntention),
    "nystrom_attention": (nn.NystromAttention,),
    "positional": (nn.CircularPositionalEncoding,),
    "stream": (nn.AttentionStream, nn.RidgeStream),
    "transformer": (nn.TransformerDecoderLayer, nn.TransformerEncoderLayer),
}
"""The modules of classes in 0.1.0, which pickles name."""


@pytest.mark.parametrize("module", MOVED)
def test_pickles_of_older_versions_find_their_classes(module: str):
    for kind in MOVED[module]:
        assert pickle.Unpickler(io.BytesIO()).find_class(f"cmab_kernels.nn.{module}", kind.__name__) is kind


@pytest.mark.parametrize("name", ["a window that fills", "tokens of a window"])
def test_a_state_of_an_older_version_is_read_without_pickle(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file of an older version names the old module of the state's class."""
    written, file = STATES[name](), tmp_path / "state.pt"
    with monkeypatch.context() as patch:
        patch.setattr(type(written), "__module__", "cmab_kernels.nn.continual_stream")
        torch.save(written, file)
    assert b"continual_stream" in zipfile.ZipFile(file).read("state/data.pkl")
    assert type(torch.load(file, weights_only=True)) is type(written)

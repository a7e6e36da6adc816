"""Kernels that were compiled without a GPU are found on another machine, in another folder and under another Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import cache

from bench.gpu.cached import pack, same_keys, unpack
from cmab_kernels.nystrom.contract import Pinv
from cmab_kernels.nystrom.triton import iterative_pinv
from cmab_kernels.runtime.triton_launch import compiled_kernel
from cmab_kernels.testing.cubin import as_if_on, record


def _compile(folder: Path) -> list[str]:
    """Compile a small kernel with the cache in a folder; return the names of the files there."""
    with as_if_on(90), triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        (launch,) = record(lambda: iterative_pinv(Pinv(torch.rand(1, 4, 4), 1)))
        numbers = [
            launch.options.pop(name)
            for name in launch.kernel.jit.arg_names[len(launch.args) :]
            if name in launch.options
        ]
        source, options = launch.kernel.source(*launch.args, *numbers, **launch.options)
        compiled_kernel(source, GPUTarget("cuda", 90, 32), options)
    return sorted(path.name for path in folder.rglob("*.*"))


def test_what_was_compiled_is_found_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "triton_key", cache.triton_key)  # put back afterwards
    same_keys()
    assert any(name.endswith(".ptx") for name in _compile(tmp_path / "here"))
    assert pack(tmp_path / "here", tmp_path / "kernels.tar.xz") == 1
    unpack(tmp_path / "kernels.tar.xz", tmp_path / "there")
    (tmp_path / "here").rename(tmp_path / "gone")
    carried = sorted(path.name for path in (tmp_path / "there").rglob("*.*"))
    assert len(carried) == 3 and _compile(tmp_path / "there") == carried, "nothing is compiled again"


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no kernels")
    with pytest.raises(ValueError, match=r"got no kernels .*expected what `python -m bench.gpu.ahead` writes"):
        unpack(tmp_path / "file", tmp_path / "there")

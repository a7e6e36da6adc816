"""Which implementation is chosen and why, and that importing the package starts nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cmab_kernels as ck
from cmab_kernels import backends

Q, K = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8)


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_starts_nothing() -> None:
    """Importing loads neither Triton nor the extension, and touches no GPU: they are imported when they are first used."""
    code = """
import sys, torch, cmab_kernels, cmab_kernels.nn
print([name for name in ("triton", "torch._dynamo", "cmab_kernels._C") if name in sys.modules], torch.cuda.is_initialized())
"""
    assert _run(code).strip() == "[] False"


def test_explain_names_every_implementation_with_a_reason() -> None:
    rows = ck.explain("latent_attention", Q, K, K)
    assert [row.impl for row in rows] == ["native", "triton", "reference"]
    assert all(row.reason for row in rows) and not rows[1].usable and re.search("GPU|or newer|No module", rows[1].reason)
    with pytest.raises(ValueError, match=r"`operator` is 'nothing'.*latent_attention"):
        ck.explain("nothing", Q, K, K)
    with pytest.raises(TypeError, match=r"`key_padding_mask` is given.*inputs alone"):
        ck.explain("latent_attention", Q, K, K, key_padding_mask=None)  # type: ignore[call-overload]  # what is refused


def test_explain_sees_what_an_implementation_cannot_do() -> None:
    wide = torch.randn(1, 1, 2, 300)
    native = ck.explain("latent_attention", wide, wide, wide)[0]
    assert not native.usable and "256" in native.reason
    with pytest.raises(RuntimeError, match="256"):
        ck.latent_attention(wide, wide, wide, impl="native")


def test_use_impl_as_context_and_as_call() -> None:
    with ck.use_impl("reference"):
        assert backends.choose("attention", "auto", Q, K, K) == "reference"
        with ck.use_impl("auto"):
            assert backends.choose("attention", "auto", Q, K, K) == "native"
        assert backends.choose("attention", "auto", Q, K, K) == "reference"
        assert backends.choose("attention", "native", Q, K, K) == "native", "the call's own choice wins"
    assert backends.choose("attention", "auto", Q, K, K) == "native"
    try:
        ck.use_impl("reference")
        assert backends.choose("attention", "auto", Q, K, K) == "reference"
    finally:
        ck.use_impl("auto")
    with pytest.raises(ValueError, match=r"`impl` is 'fast'.*auto, cuda, native, reference, triton"):
        ck.use_impl("fast")


def test_use_impl_is_undone_by_an_exception() -> None:
    with pytest.raises(KeyError), ck.use_impl("reference"):
        raise KeyError
    assert backends.use_impl.current == "auto"


def test_the_reference_is_never_taken_silently() -> None:
    wide = torch.randn(1, 1, 2, 300)
    with pytest.warns(RuntimeWarning, match=r"PyTorch reference.*256"):
        ck.latent_attention(wide, wide, wide)


def test_without_the_extension_everything_still_runs() -> None:
    code = """
import sys, warnings
sys.modules["cmab_kernels._C"] = None
import torch, cmab_kernels
q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cmab_kernels.latent_attention(q, k, k)
print(cmab_kernels.explain("latent_attention", q, k, k)[0].usable, len(caught))
"""
    assert _run(code).strip() == "False 1"


def test_without_the_extension_the_choice_can_still_be_traced() -> None:
    code = """
import sys, warnings
sys.modules["cmab_kernels._C"] = None
import torch, cmab_kernels
q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8)
compiled = torch.compile(lambda q, k: cmab_kernels.latent_attention(q, k, k), fullgraph=True, backend="eager")
print(torch.allclose(compiled(q, k), cmab_kernels.latent_attention(q, k, k, impl="reference")))
"""
    assert _run(code).strip() == "True"


# ---- what a GPU gets


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """Pretend that there is a GPU that can run Triton's kernels, and that the package was built without nvcc."""
    triton_common = pytest.importorskip("cmab_kernels.triton_common", exc_type=ImportError)
    monkeypatch.setattr(triton_common, "_gpu_problem", lambda index: None)
    for family in backends.FAMILIES.values():
        if "cuda" in family:
            monkeypatch.setitem(backends._PROBLEMS, family["cuda"], "the CUDA kernels were not built")
    return "cuda"


def _there(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    """A tensor on a GPU, as far as the choice of an implementation looks at it."""
    return SimpleNamespace(shape=shape, device=torch.device("cuda", 0), dtype=dtype, is_cuda=True, is_meta=False, dim=lambda: len(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("landmarks", [None, 1, 64, 65, 256])
def test_continual_steps_without_nvcc(gpu: str, landmarks: int | None, dtype: torch.dtype) -> None:
    token, value = _there(2, 4, 1, 300, dtype=dtype), _there(2, 4, 1, 512, dtype=dtype)
    more = [] if landmarks is None else [_there(2, 4, landmarks, 300)]
    assert backends.choose("nystrom.continual", "auto", token, token, value, *more) == "triton"


@pytest.mark.parametrize("landmarks", [1, 64, 65, 256])
def test_matrices_of_landmarks_without_nvcc(gpu: str, landmarks: int) -> None:
    assert backends.choose("nystrom", "auto", _there(8, landmarks, 64)) == "triton"
    assert backends.choose("nystrom", "auto", _there(8, landmarks, landmarks, dtype=torch.float64)) == "triton"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("order", [1, 64, 128, 129, 256])
def test_solves_without_nvcc(gpu: str, order: int, dtype: torch.dtype) -> None:
    assert backends.choose("intention.solve", "auto", _there(8, order, order, dtype=dtype), _there(8, order, 1000, dtype=dtype)) == "triton"

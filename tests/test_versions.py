"""The oldest and newest torch and Triton: errors, each Triton's launch, and the suite with both versions."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = [
    "tests/test_info.py",
    "tests/test_backends.py",
    "tests/nn",
    "tests/nystrom/continual",
    "tests/integrations/test_continual.py",
    "tests/test_saved_states.py",
    *sorted(map(str, Path("tests").glob("**/test_suite.py"))),
]
WHOLE = "nn or continual or saved_states or backends or info"
"""Words in the names of files and folders that the sample runs completely: tests that a torch version may break."""
NEEDED = ["pytest", "hypothesis", "pytest-xdist", "scikit-learn", "continual-inference", "safetensors"]
"""The packages that the sample imports in addition to this package, torch and NumPy."""
UNPROMISED = {
    "torch._C._are_functorch_transforms_active",
    "torch._C._cuda_getCurrentRawStream",
    "torch._C._distributed_c10d._resolve_process_group",
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._TorchDispatchModeKey.PROXY",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._get_dispatch_mode",
    "torch._C._has_storage",
    "torch._C._is_any_autocast_enabled",
    "torch._C._is_tracing",
    "torch._C._len_torch_dispatch_stack",
    "torch._assert_async",
    "torch._dynamo.graph_break",
    "torch._dynamo.reset",
    "torch.autograd.profiler._is_profiler_enabled",
    "torch.cuda._DeviceGuard",
    "torch.nn.TransformerEncoderLayer._ff_block",
    "torch.nn.modules.module._global_backward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.ops.aten._cdist_backward",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map_only",
}
"""Names of torch that it does not promise to keep. Each of them is also in torch 2.6; check this before you add one."""


# ---- Triton


def test_a_triton_that_is_too_old_is_a_reason_and_no_error() -> None:
    """Triton 3.2 and 3.3, which come with torch 2.6 and 2.7, have no `knobs`."""
    pytest.importorskip("triton")
    code = """
import triton
triton.__version__ = "3.3.1"
del triton.knobs
from cmab_kernels import explain, info
import torch
print(explain("latent_attention", *[torch.zeros(1, 1, 1, 16)] * 3)[1].reason, info.report(), sep="\\n")
"""
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    reason, report = printed.split("\n", 1)
    assert reason == "the Triton kernels need Triton 3.6 or newer, and this is 3.3.1"
    assert reason in report


@pytest.mark.parametrize("gathered", [False, True], ids=["as 3.6", "as 3.7 and newer"])
def test_each_triton_is_asked_in_its_own_order(gathered: bool) -> None:
    """Triton 3.7 and newer have one launch function for all kernels: hooks come before scratch memory, and the
    arguments are one tuple."""
    triton = pytest.importorskip("triton")
    from cmab_kernels.runtime.triton_launch import Kernel

    def empty(tensor, number: int, WIDTH: triton.language.constexpr):
        pass

    asked: list[tuple[Any, ...]] = []
    launcher = SimpleNamespace(
        launch=lambda *arguments: asked.append(arguments),
        global_scratch_size=0,
        launch_cooperative_grid="grid",
        launch_pdl="pdl",
    )
    if gathered:
        launcher.arg_annotations, launcher.kernel_signature = "kinds", "types"
    compiled = SimpleNamespace(run=launcher, function="function", packed_metadata="packed")
    with mock.patch.object(triton, "compile", lambda *_, **__: compiled):
        launch, before, after = Kernel(empty, ())._load(None, (torch.zeros(2), 3), {"WIDTH": 16})
    launch(5, 1, 1, "stream", *before, "address", 3, *after)
    start = (5, 1, 1, "stream", "function", "grid", "pdl")
    hooks, scratch, arguments = ("packed", None, None, None), (None, None), ("address", 3, 16)
    expected = (
        (*start, *hooks, *scratch, "kinds", "types", arguments) if gathered else (*start, *scratch, *hooks, *arguments)
    )
    assert asked == [expected]


# ---- torch


def _names_of_torch(code: ast.AST) -> Iterator[str]:
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module.split(".")[0] == "torch")
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            yield ast.unparse(node)


def test_what_torch_does_not_promise_is_in_the_oldest_too() -> None:
    """A name that only newer versions have would break the import of the package, and no ordinary test runs the oldest
    version."""
    sources = [*ROOT.glob("cmab_kernels/**/*.py"), *ROOT.glob("python/cmab_models/**/*.py")]
    names = {name for source in sources for name in _names_of_torch(ast.parse(source.read_text()))}
    private = {
        name for name in names if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    }
    assert {name for name in private if not any(longer.startswith(f"{name}.") for longer in private)} == UNPROMISED


@pytest.mark.nightly
@pytest.mark.parametrize("wanted", [["torch==2.6.0", "numpy<2"], ["torch", "numpy"]], ids=["oldest", "newest"])
def test_a_share_of_the_suite(wanted: list[str], tmp_path: Path) -> None:
    """The sample runs in its own environment, with the native extension of this environment. The extension depends only
    on Python."""
    python = tmp_path / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    install = [python, "-m", "pip", "install", "--no-cache-dir", *wanted, *NEEDED]
    installed = subprocess.run(install, capture_output=True, text=True)
    if "No matching distribution" in installed.stderr:
        pytest.skip(f"pip finds no {wanted[0]} here: {installed.stderr.strip().splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'python'}"}
    chosen = f"not cubin and (test_accuracy or test_opcheck or test_compile or test_vmap or test_gradcheck or {WHOLE})"
    run = subprocess.run(
        [python, "-m", "pytest", "-p", "no:cacheprovider", *SAMPLE, "-k", chosen], cwd=ROOT, env=environment
    )
    assert run.returncode == 0

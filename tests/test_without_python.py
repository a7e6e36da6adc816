"""The library of operators in cpp/ runs programs of AOTInductor without Python, with the results of Python."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cmab_kernels as ck
from cmab_kernels import nn as ours

from .pages import ROOT

CPP = ROOT / "cpp"
STEPS, WARM = 200, 10
"""The number of steps of a stream, and the number of its first steps, which are not timed."""


def _schemas() -> dict[str, str]:
    """The operators that the library defines, by name."""
    text = re.sub(r'"\s*"', "", (CPP / "operators.cpp").read_text())
    return {found[1]: found[0] for found in re.findall(r'define<\w+>\(\s*library,\s*"((\w+)\([^"]*)"\)', text)}


def test_the_library_has_the_schemas_of_python() -> None:
    schemas = _schemas()
    assert len(schemas) == 13
    assert schemas == {
        name: str(getattr(torch.ops.cmab, name).default._schema).removeprefix("cmab::") for name in schemas
    }


def _block_step(module: Any, inputs: Tensor, latents: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    result = module.update(inputs, latents, ck.AttentionState(*state))
    return result.latents, *result.state


def _ridge_step(_: Any, key: Tensor, value: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    solution, new = ck.ridge_step(ck.RidgeState(*state), key, value, 0.5)
    return *solution, *new


def _landmark_step(module: Any, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    out, state = module._forward_step(token, prev_state=ck.ContinualNystromState(*tensors, 64, 6, 0))
    return out, *state[:10]


def _others(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    """The operators that the steps do not have."""
    window, token = x[:, :, :8], x[:, :, 8:9]
    exact = ck.continual_attention_init(window, window.sin(), window.cos())
    outs = [ck.continual_attention_step(exact, token, token, token, output=how)[0] for how in ("single", "retroactive")]
    states = ck.prefix_attention_states(x[:, :, :3], x, x.sin(), every=6)
    nystrom = ck.nystrom_attention(x, x.sin(), x, 4)
    inverse = ck.iterative_pinv((window @ window.mT).softmax(-1))
    return *outs, *states, nystrom, inverse, ck.intention(x, x.sin(), x.cos(), 0.1), ck.latent_attention(token, x, x)


class Step(nn.Module):
    def __init__(self, function: Callable[..., Any], module: nn.Module | None) -> None:
        super().__init__()
        self.function, self.module = function, module

    def forward(self, *given: Tensor) -> Any:
        return self.function(self.module, *given)


def _tensors(state: Any) -> list[Tensor]:
    return [field for field in state or () if isinstance(field, Tensor)]


def _cases() -> dict[str, tuple[Step, Callable[[], list[Tensor]], list[Tensor]]]:
    """Name -> a step, a function that makes its new tensors, and the state before it."""
    block = ours.CMAB(16, 8, 4)
    attention = ours.ContinualNystromAttention(16, 2, sequence_len=64, num_landmarks=8, batch_first=True).eval()
    attention.forward_steps(torch.randn(1, 64, 16))
    return {
        "CMAB.update": (
            Step(_block_step, block),
            lambda: [torch.randn(1, 10, 16), torch.randn(1, 3, 16)],
            [*block.init_state(1)],
        ),
        "a step of ContinualNystromAttention": (
            Step(_landmark_step, attention),
            lambda: [torch.randn(1, 16)],
            _tensors(attention.get_state()),
        ),
        "ridge_step": (
            Step(_ridge_step, None),
            lambda: [torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 3)],
            [*ck.empty_ridge(1, 2, 8, 3)],
        ),
        "others": (Step(_others, None), lambda: [torch.randn(2, 2, 20, 8)], []),
    }


def _streamed(step: Callable[..., Any], stream: list[list[Tensor]], state: list[Tensor]) -> tuple[list[Tensor], float]:
    """The results of the last step, and the mean time of a step in us."""
    out, took = [], []
    for new in stream:
        began = time.perf_counter()
        out = list(step(*new, *state))
        took.append(time.perf_counter() - began)
        state = out[len(out) - len(state) :]
    return out, 1e6 * sum(took[WARM:]) / (len(took) - WARM)


@pytest.mark.thorough
@torch.no_grad()
def test_a_program_steps_as_python_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")  # Inductor then refuses operators that it could decompose
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    folder = ROOT / "build" / "cpp"
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-S", CPP, "-B", folder, prefix], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder, "--parallel", "2"], check=True, capture_output=True)
    needed = subprocess.run(["ldd", folder / "step"], check=True, capture_output=True, text=True).stdout
    assert "libcmab_kernels_ops" in needed and "python" not in re.sub(r"=> \S+", "", needed)
    torch.manual_seed(0)
    covered = set()
    for name, (step, new, state) in _cases().items():
        exported = torch.export.export(step.eval(), (*new(), *state))
        covered |= {str(node.target).split(".")[1] for node in exported.graph.nodes if "cmab." in str(node.target)}
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "step.pt2"))
        stream = [new() for _ in range(STEPS)]
        torch.save((state, stream), tmp_path / "stream")
        run = subprocess.run(
            [folder / "step", package, tmp_path / "stream", tmp_path / "results"], capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        got = torch.load(tmp_path / "results")
        loaded, in_python = _streamed(torch._inductor.aoti_load_package(package), stream, state)
        eager, in_eager = _streamed(step, stream, state)
        print(f"\n{name}: C++ {run.stdout.strip()}, Python {in_eager:.1f} us, the package in Python {in_python:.1f} us")
        for out, same, wanted in zip(got, loaded, eager, strict=True):
            if name.endswith("ContinualNystromAttention") and out.shape[-1:] == (8 + 5,):
                continue  # the sums, which kernels round in another way, and memory without values
            assert torch.equal(out, same)
            torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    assert covered == set(_schemas())

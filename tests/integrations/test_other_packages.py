"""The programs of docs/use_it_in.md for packages that the tests do not install run where these packages are installed,
on the operator."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cmab_kernels import nn
from cmab_kernels.integrations import functional

from .. import pages

PAGE = pages.DOCS / "use_it_in.md"
BLOCKS: list[str] = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
FUSED = {"perceiver_pytorch": 4, "timm": 2}
"""Package -> the calls of attention in its program's model, without those of a single query, which torch computes."""


def test_every_program_is_for_a_package() -> None:
    assert [package for block in BLOCKS for package in FUSED if f"\nfrom {package}" in block] == list(FUSED)


@pytest.mark.parametrize("program, package", list(zip(BLOCKS, FUSED, strict=True)), ids=FUSED)
def test_programs(program: str, package: str, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: its program is not run")
    calls: list[Any] = []
    operator, theirs = functional.latent_attention, torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "latent_attention", lambda *a, **k: calls.append(a) or operator(*a, **k))
    # So that it is restored after the program.
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", theirs)
    exec(compile(program, str(PAGE), "exec"), {"__name__": "program"})
    assert len(calls) == FUSED[package]


@pytest.mark.parametrize(
    "make, given",
    [
        (lambda: nn.CMABStack(16, 4, 2, 2), (11, 3)),
        (lambda: nn.TransformerDecoderLayer(16, 2, 24, 0.0, batch_first=True), (3, 11)),
        (lambda: nn.ContinualEncoderLayer(16, 2, 24, 0.0, sequence_len=8, batch_first=True), (11,)),
    ],
    ids=["CMABStack", "TransformerDecoderLayer", "ContinualEncoderLayer"],
)
def test_offloaded_weights_come_for_a_class_that_is_named(make: Any, given: tuple[int, ...]) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    module, tokens = make(), [torch.randn(2, count, 16) for count in given]
    expected = module(*tokens)
    cpu, name = torch.device("cpu"), type(module).__name__
    named = accelerate.cpu_offload(copy.deepcopy(module), cpu, preload_module_classes=[name])
    torch.testing.assert_close(named(*tokens), expected)
    all_offloaded = accelerate.cpu_offload(module, cpu)
    if isinstance(module, nn.CMABStack):  # its blocks have hooks now, so the module calls them one by one
        torch.testing.assert_close(all_offloaded(*tokens), expected)
        return
    with pytest.raises(
        ValueError,
        match=r"got device cpu, expected meta, the device of the module; .*accelerate's preload_module_classes",
    ):
        all_offloaded(*tokens)

"""The programs of docs/use_it_in.md for packages that the tests do not install run where these are installed, on the operator."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cmab_kernels.integrations import functional

from .. import pages

PAGE = pages.DOCS / "use_it_in.md"
BLOCKS: list[str] = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
FUSED = {"perceiver_pytorch": 4, "timm": 2}
"""Package -> the calls of attention in its program's model, without those of a single query, which are torch's."""


def test_every_program_is_for_a_package() -> None:
    assert [package for block in BLOCKS for package in FUSED if f"\nfrom {package}" in block] == list(FUSED)


@pytest.mark.parametrize("program, package", list(zip(BLOCKS, FUSED, strict=True)), ids=FUSED)
def test_programs(program: str, package: str, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: its program is not run")
    calls: list[Any] = []
    operator, theirs = functional.latent_attention, torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "latent_attention", lambda *a, **k: calls.append(a) or operator(*a, **k))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", theirs)  # so that it is restored after the program
    exec(compile(program, str(PAGE), "exec"), {"__name__": "program"})
    assert len(calls) == FUSED[package]

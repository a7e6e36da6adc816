"""The README's programs run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"


def test_programs() -> None:
    """One after the other, as a reader types them."""
    programs = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(programs) == 3
    torch.use_deterministic_algorithms(False)
    namespace: dict[str, object] = {}
    for program in programs:
        exec(compile(program, str(README), "exec"), namespace)


def test_commands_and_files_exist() -> None:
    text = README.read_text()
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"`?make (\w+)", text):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target}"
    for name in re.findall(r"\]\(((?!http)[^)#]+)\)", text) + re.findall(r"`((?:python|bench|cmab_kernels)/[\w/.]+)`", text):
        assert (README.parent / name).exists(), name

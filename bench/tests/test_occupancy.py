"""The occupancy page equals the result of compiling the kernels now."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from bench.gpu import occupancy
from bench.gpu.occupancy import COMPILER, PAGE, ROOT, Key, blocks_held, launches, main, page, row, written

HELD = launches()
CHEAP = [key for key in HELD if key[0] in ("`_merge`", "`_row_terms`") and key[1].endswith("N 1e6, d 16), bfloat16")]


@pytest.mark.parametrize(
    "capability, threads, registers, shared, blocks, limit",
    [
        (80, 128, 140, 16384, 3, "registers"),
        (80, 64, 40, 1024, 24, "registers"),
        (80, 96, 33, 5000, 16, "registers"),
        (80, 32, 16, 0, 32, "blocks"),
        (80, 1024, 64, 0, 1, "registers"),
        (80, 256, 96, 100 * 1024, 1, "shared memory"),
        (80, 256, 128, 227 * 1024, 0, "shared memory"),
        (90, 256, 96, 100 * 1024, 2, "registers"),
        (90, 128, 128, 114 * 1024, 1, "shared memory"),
        (90, 128, 32, 0, 16, "registers"),
        (100, 512, 130, 0, 0, "registers"),
        (86, 128, 140, 16384, 3, "registers"),
        (86, 32, 16, 0, 16, "blocks"),
        (120, 32, 16, 0, 24, "blocks"),
        (120, 256, 40, 33 * 1024, 2, "shared memory"),
        (120, 512, 40, 0, 3, "registers"),
    ],
)
def test_blocks_of_a_multiprocessor(
    capability: int, threads: int, registers: int, shared: int, blocks: int, limit: str
) -> None:
    """Blocks as cudaOccMaxActiveBlocksPerMultiprocessor of NVIDIA's cuda_occupancy.h (CUDA 13.0) gives them."""
    assert blocks_held(capability, registers, shared, threads // 32) == (blocks, limit)


def test_tensor_memory_limits_blocks() -> None:
    assert blocks_held(100, 32, 0, 4, tensor_columns=256) == (2, "tensor memory")
    assert blocks_held(100, 32, 0, 4, tensor_columns=640) == (0, "tensor memory")


def test_every_kernel_is_there() -> None:
    sources = (path.read_text() for path in ROOT.glob("cmab_kernels/**/triton/*.py"))
    named = {f"`{name}`" for text in sources for name in re.findall(r"(?m)^@kernel\(.*\)\ndef (_\w+)", text)}
    assert len(named) > 30 and {kernel for kernel, _ in HELD} == named


def test_the_page_has_the_launches_of_today() -> None:
    """The programs are compared too, without compiling; `python -m bench.gpu.occupancy --write` updates the page."""
    lines = written()
    assert list(lines) == list(HELD) and PAGE.read_text() == page(lines)
    for key, on_chips in HELD.items():
        programs = list(dict.fromkeys(str(launch.grid[0]) for launch in on_chips.values()))
        assert all(one in lines[key].split(" | ")[8].split(" / ") for one in programs), key


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if key in CHEAP else pytest.mark.nightly) for key in HELD], ids=" ".join
)
def test_no_row_is_stale(key: Key, tmp_path: Path) -> None:
    """Each kernel compiles for every GPU, AMD's too, to the figures on the page."""
    if COMPILER not in PAGE.read_text():
        pytest.skip(f"the page was not made with {COMPILER}: write it again")
    assert row(key, HELD[key], tmp_path) == written()[key]


def test_a_stale_page_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the rows of the kernels that are named are compiled."""
    stale, key = tmp_path / "page.md", CHEAP[0]
    monkeypatch.setattr(occupancy, "PAGE", stale)
    monkeypatch.setattr(occupancy, "row", lambda key, *_: f"| {key[0]} | {key[1]} | anew |")
    stale.write_text("\n".join(f"| {kernel} | {call} | old |" for kernel, call in HELD))
    given = ["--kernels", key[0].strip("`")]
    assert main(given) == 1 and all(line.endswith("anew |") for line in capsys.readouterr().out.splitlines())
    assert main([*given, "--write"]) == 0
    found = written()
    assert {line.split(" | ")[2] for (kernel, _), line in found.items() if kernel == key[0]} == {"anew |"}
    assert sum("old" in line for line in found.values()) == sum(kernel != key[0] for kernel, _ in HELD)


def test_what_cannot_be_launched_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occupancy, "blocks_held", lambda *_: (0, "registers"))
    with pytest.raises(
        ValueError, match=r"_row_terms on sm_80: a multiprocessor has not enough registers for one block"
    ):
        row(CHEAP[-1], HELD[CHEAP[-1]], tmp_path)

"""The demo runs, its three ways agree, and it says what is missing."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from cmab_kernels import attention_state, demo
from cmab_kernels.demo import conditioning as c
from cmab_kernels.measure import Peak, peak_memory

pytestmark = pytest.mark.filterwarnings("ignore:cmab_kernels runs its PyTorch reference")
MIB = 2**20


@pytest.fixture(scope="module")
def reader() -> c.Reader:
    return c.Reader.make("cpu")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SECONDS", 0.1)


def test_pixels_are_those_of_the_photograph():
    photo, points = c.photograph(), c.pixels("cpu")
    assert points.shape == (1, 1411 * 1411, 5)
    row, column = ((points[0, :, :2] + 1) / 2 * 1410).round().long().unbind(-1)
    assert torch.equal(((points[0, :, 2:] + 0.5) * 255).round().to(torch.uint8), photo[row, column])
    assert (torch.bincount(row * 1411 + column) == 1).all()
    assert not (row[:100].diff() >= 0).all()


def test_three_ways_agree_with_float64(reader):
    points = c.pixels("cpu")[:, :3000]
    exact = c.Reader.make("cpu")
    for part in (exact.block, exact.embed):
        part.double()
    exact.latents = exact.latents.double()
    with torch.no_grad():
        expected = exact.at_once(points.double(), F.scaled_dot_product_attention)
        for name, method in c.CONDITIONING.items():
            assert (method(reader, points) - expected).abs().max() < 1e-5, name


@torch.no_grad()
def test_stream_is_any_chunking(reader):
    points = c.pixels("cpu")[:, :2000]
    whole, state = reader.stream(points)
    chunked, chunked_state = reader.stream(points, [1, 999, 0, 1000])
    assert torch.allclose(whole, chunked, atol=1e-5)
    query, key, value = reader.project(points)
    assert torch.allclose(chunked_state.out, attention_state(query, key, value).out, atol=1e-5)
    assert torch.allclose(state.lse, chunked_state.lse, atol=1e-5)


def test_memory_of_the_stream_is_constant():
    few, many = (
        peak_memory(c.conditioning, c.CMAB_NAME, count, "cpu", "auto", warm_up=(c.CMAB_NAME, 8192, "cpu", "auto")).extra
        for count in (200_000, 800_000)
    )
    assert many < few + 32 * MIB  # what the allocator keeps varies; the keys and values of 600,000 pixels are 293 MiB
    torchs = peak_memory(c.conditioning, c.SDPA_NAME, 264_000, "cpu", "auto", warm_up=(c.SDPA_NAME, 8192, "cpu", "auto"))
    assert torchs.extra > 2 * 264_000 * c.DIM * 4  # keys and values at the least


def test_random_sizes_add_up():
    sizes = demo._random_sizes(123_456)
    assert sum(sizes) == 123_456 and min(sizes) >= 1 and len(set(sizes)) > 10


def test_a_difference_that_is_no_number_is_told():
    assert demo._largest_difference([torch.zeros(2), torch.tensor([1.0, -3.0])]) == 3.0
    assert math.isnan(demo._largest_difference([torch.zeros(2), torch.tensor([1.0, math.nan])]))


@pytest.mark.parametrize("wrong", [1.05, math.nan])
def test_a_wrong_result_is_no_speed(wrong, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(c.CONDITIONING, c.SDPA_NAME, lambda reader, points: reader.multihead(points) * wrong)
    monkeypatch.setattr(demo, "peak_memory", lambda *_, **__: Peak(0, 0))
    with pytest.raises(RuntimeError, match="one is wrong"):
        demo.run(str(tmp_path / "demo.png"), [700])


def test_demo_prints_tables_and_draws(tmp_path: Path, capsys):
    output = tmp_path / "demo.png"
    output.write_text("of an earlier run")
    demo.run(str(output), [1500, 700])
    text = capsys.readouterr().out
    for expected in (
        "From pixels to latents",
        "        700",
        "      1,500",
        "The attention alone",
        "1,500 pixels streamed in",
        "One more pixel after 1,500:",
    ):
        assert expected in text
    assert f"{output} replaced" in text
    assert output.read_bytes().startswith(b"\x89PNG") and output.stat().st_size > 50_000


@pytest.mark.parametrize(("fits", "left_out"), [(c.SDPA_NAME, 1), (None, 4)])
def test_what_does_not_fit_into_memory_is_left_out(fits, left_out, tmp_path: Path, capsys, monkeypatch):
    left = c.bytes_needed(fits, 2000, "native") / 0.6 + 1 if fits else 0
    monkeypatch.setattr(demo, "explain", lambda *_: [demo.Explanation("auto", True, "")])
    monkeypatch.setattr(demo, "available_memory", lambda device: left)
    demo.run(str(tmp_path / "demo.png"), [2000])
    assert capsys.readouterr().out.count("would not fit into memory") == left_out


def test_demo_without_a_kernel_says_so(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "POINTS_WITHOUT_KERNEL", (300, 600))
    rows = [demo.Explanation("native", False, "no compiler"), demo.Explanation("reference", True, "")]
    monkeypatch.setattr(demo, "explain", lambda *_: rows)
    demo.run(str(tmp_path / "demo.png"))
    text = capsys.readouterr().out
    assert "No compiled kernel runs here" in text and "native: no compiler" in text and "        600" in text and "demo.png written" in text


@pytest.mark.parametrize("package", ["skimage", "matplotlib", "tqdm"])
def test_a_missing_package_is_named(package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(SystemExit, match=rf"{package}.*pip install cmab-kernels\[demo\]"):
        demo.run("demo.png")


@pytest.mark.parametrize(
    "arguments", [("--points", "0"), ("--points", "2000000"), ("--output", "no/such/folder.png"), ("--output", "demo.exe")]
)
def test_bad_arguments_are_one_line(arguments):
    command = [sys.executable, "-m", "cmab_kernels", "demo", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(arguments[0]) and done.stderr.count("\n") == 1

"""The example programs run, and print what they claim."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .forked import ROOT, Forks

EXAMPLES = ROOT / "python" / "examples"


Printed = Callable[[str], str]


@pytest.fixture
def printed(forks: Forks, tmp_path: Path) -> Printed:
    """Run the example of a name and return what it prints."""

    def run(name: str) -> str:
        finished = forks.run(tmp_path, [str(EXAMPLES / f"{name}.py")])
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    return run


def printed_alone(name: str) -> str:
    """Run an example that starts processes. Each of these reads its file again, so the file must be that of a
    process."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")]),
        "OMP_NUM_THREADS": "1",
    }
    finished = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(pattern, text)]


def test_swap_attention(printed: Printed) -> None:
    text = printed("swap_attention")
    assert "replaced 1 module; model.attention is now a cmab_kernels.nn" in text
    (difference,) = numbers(r"difference of the outputs: (\S+)", text)
    assert difference < 1e-5
    assert len(numbers(r"([\d.]+) ms", text)) == 2


def test_stream_to_cmab(printed: Printed) -> None:
    text = printed("stream_to_cmab")
    states, grown, history = (
        numbers(rf"(-?[\d.]+) {unit}", text) for unit in ("KiB", r"MiB(?=.*MiB)", r"MiB(?!.*MiB)")
    )
    assert len(states) == len(grown) == len(history) == 5
    assert len(set(states)) == 1
    assert grown[-1] < history[-1] / 3
    assert numbers(r"one more point: (\d+) us", text)


def test_merge_two_processes() -> None:
    text = printed_alone("merge_two_processes")
    (difference,) = numbers(r"largest difference (\S+)", text)
    (without,) = numbers(r"off by (\S+)", text)
    assert difference < 1e-6 < 1e-3 < without


@pytest.mark.thorough
def test_train_on_two_processes() -> None:
    text = printed_alone("train_on_two_processes")
    weights, states = numbers(r"largest difference (\S+)", text)
    (moved,) = numbers(r"moved weights by (\S+)", text)
    assert weights < 1e-6 < 1e-3 < moved
    assert states < 1e-5


def test_train_on_every_prefix(printed: Printed) -> None:
    text = printed("train_on_every_prefix")
    late = numbers(r"([\d.]+) after 30", text)
    assert late[-1] < 0.7 * late[0] and "the same 39 predictions" in text
    one_pass, loop = numbers(r"([\d.]+) ms", text)
    assert one_pass > 0 and loop > 0


def test_stream_regression(printed: Printed) -> None:
    text = printed("stream_regression")
    sizes, counts = numbers(r"([\d,]+) bytes", text), numbers(r"(\d+) readings", text)
    assert counts == [20, 40, 60, 80, 60, 40]
    assert len(set(sizes)) == 1
    errors, gradients, alphas = (
        numbers(pattern, text) for pattern in (r"error (\S+)", r"gradient (\S+),", r"alpha ([\d.]+)")
    )
    fitted, learned = errors[:6], errors[6:]
    assert fitted[5] < fitted[3] < fitted[1]
    assert gradients[0] < 0
    assert alphas[-1] > 10 * alphas[0]
    assert learned[-1] < learned[0] == fitted[5]


def test_slide_a_window(printed: Printed) -> None:
    text = printed("slide_a_window")
    steps, windows = (numbers(pattern, text) for pattern in (r"a step +(\S+) us", r"recomputed +(\S+) us"))
    assert len(steps) == len(windows) == 3 and min(steps + windows) > 0
    assert text.rstrip().endswith("the same bits: True")


def test_swap_encoder_layers(printed: Printed) -> None:
    text = printed("swap_encoder_layers")
    (difference,) = numbers(r"replaced 2 layers: logits differ by (\S+)", text)
    before, after = numbers(r"accuracy ([\d.]+)", text)
    assert difference < 1e-4
    assert after > before + 0.05


def test_river_regression(printed: Printed) -> None:
    before, after = zip(
        *(numbers(r"([\d.]+) (?:before|after)", line) for line in printed("river_regression").splitlines()), strict=True
    )
    assert max(before) < 0.1 and after[1] < 0.1 < 1 < after[0]


@pytest.mark.thorough
def test_reduce_partitions() -> None:
    text = printed_alone("reduce_partitions")
    assert numbers(r"([\d,]+) (?:examples|points)", text) == [3000, 3000, 120_000, 120_000]
    assert max(numbers(r"off by (\S+),", text)) < 1e-5
    few, many = numbers(r"sends ([\d,]+) bytes", text)[:2], numbers(r"sends ([\d,]+) bytes", text)[2:]
    assert few == many


def test_online_regression(printed: Printed) -> None:
    text = printed("online_regression")
    scores, counts = numbers(r"accuracy ([\d.]+)", text), numbers(r"(\d+) examples", text)
    assert counts == [200, 400, 600, 800, 1000, 1200, 1500, 1200, 1500]
    assert scores[6] < scores[5] - 0.03
    assert scores[7] == scores[5] > 0.9
    (change,) = numbers(r"weights off by (\S+)", text)
    assert change < 1e-10
    assert len(set(numbers(r"([\d,]+) bytes", text))) == 1


def test_serve_departures(printed: Printed) -> None:
    text = printed("serve_departures")
    hit, chance = numbers(r"(?:likely|chance) ([\d.]+)", text)
    assert hit > 5 * chance
    assert len(numbers(r"surprise +([\d.]+)", text)) == 14


def test_events_from_table(printed: Printed) -> None:
    text = printed("events_from_table")
    scores = {name: float(value) for name, value in re.findall(r"^(\w+) +(-?[\d.]+|inf) ", text, flags=re.MULTILINE)}
    trivial = {name: float(value) for name, value in re.findall(r"(\w+_\w+) (-?[\d.]+)", text)}
    assert set(scores) == {"time", "mark", "accuracy", "rmse", "rmse_limited", "rmse_median"}
    assert scores["time"] > trivial["exponential_time"] + 0.2 and scores["time"] > trivial["renewal_time"] - 0.1
    assert scores["mark"] > trivial["last_mark"] - 0.1
    (size,) = numbers(r"file of ([\d,]+) bytes", text)
    assert size < 10_000 and len(re.findall(r"expected [\d.]+ min", text)) > 4


@pytest.mark.thorough
def test_wind_from_flights(printed: Printed) -> None:
    text = printed("wind_from_flights")
    process, usual, gaussian, difference, nearest, mean = numbers(r"error +([\d.]+) mph", text)
    assert difference < process < usual and process < 0.8 * min(gaussian, nearest) and nearest < mean
    (inside,) = numbers(r"(\d+)% of the speeds", text)
    (size,) = numbers(r"file of ([\d,]+) bytes", text)
    assert 85 <= inside <= 95 and size < 10_000 and "drew wind.png" in text


@pytest.mark.thorough
def test_speaker_from_frames(printed: Printed) -> None:
    text = printed("speaker_from_frames")
    reader, regression, frequent = numbers(r"accuracy ([\d.]+)", text)
    assert reader > regression > 0.9 and frequent < 0.4
    assert len(re.findall(r"frame +\d+: speaker \d", text)) > 3 and "the same after a restart" in text


def test_forgetful_bandit(printed: Printed) -> None:
    text = printed("forgetful_bandit")
    remembers, forgets = numbers(r"([\d.]+) long after", text)
    assert forgets < remembers - 0.02
    assert len(numbers(r"an update takes (\d+) us", text)) == 2


def test_complete_photograph(printed: Printed) -> None:
    text = printed("complete_photograph")
    errors, (plain,) = numbers(r"others off by ([\d.]+)", text), numbers(r"every pixel: off by ([\d.]+)", text)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < plain
    assert errors[-1] < 0.6 * plain
    assert len(errors) == 4 and len(set(numbers(r"([\d,]+) bytes", text))) == 1


def test_serve_streams(printed: Printed) -> None:
    text = printed("serve_streams")
    (difference,) = numbers(r"largest difference (\S+)", text)
    together, alone = numbers(r"([\d,]+) tokens per second", text)
    assert difference < 1e-4
    assert together > alone

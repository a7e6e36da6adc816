"""The demo of streams: its comparisons are right, it draws its measurements, and a wrong option gives one line of
error."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from cmab_kernels.__main__ import main
from cmab_kernels.demo import stream
from cmab_kernels.demo.stream import tokens as t

from .forked import Forks

pytestmark = pytest.mark.filterwarnings("ignore:cmab_kernels runs its PyTorch reference")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the demo believe that there is no kernel, and read only two rows of patches."""
    monkeypatch.setattr(stream, "ROWS_WITHOUT_KERNEL", 2)
    rows = [stream.Explanation("native", False, "no compiler"), stream.Explanation("reference", True, "")]
    monkeypatch.setattr(stream, "explain", lambda *_: rows)


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_patches_are_the_photograph_in_rows():
    photo = t.photograph()
    patches = t.to_patches(photo)
    assert photo.shape == (424, 640, 3) and patches.shape == (106 * 160, 48) and t.columns() == 160
    assert torch.equal(patches[161].view(4, 4, 3), photo[4:8, 4:8]) and torch.equal(t.to_pixels(patches), photo)
    assert photo.min() >= 0 and photo.max() <= 1


def test_noise_is_as_told_and_the_same_each_time():
    noise = t.noisy() - t.photograph()
    assert abs(noise.std() - t.NOISE) < 1e-3 and abs(noise.mean()) < 1e-3
    assert abs(t.decibels(t.noisy(), t.photograph()) + 20 * torch.tensor(t.NOISE).log10()) < 0.02
    t.noisy.cache_clear()
    assert torch.equal(t.noisy() - t.photograph(), noise)


def test_attention_is_non_local_means():
    """The logits are computed from distances between features.

    These are almost the distances between patches, since only the least of 48 components is missing.
    """
    query, key, value = (part[0, 0, ::50].double() for part in t.stream())
    between_features, between_patches = (
        torch.cdist(query[:, :47], query[:, :47]),
        torch.cdist(value, value) / t.BANDWIDTH,
    )
    assert torch.allclose((query @ key.T).softmax(-1), (between_features.square() / -2).softmax(-1), atol=1e-5)
    others = ~torch.eye(len(query), dtype=torch.bool)
    shares = (between_features / between_patches)[others]
    assert shares.max() < 1 + 1e-5 and shares.min() > 0.8 and shares.median() > 0.98


def test_the_window_is_the_newest_tokens():
    query, key, value = (part[0, 0].double() for part in t.stream())
    rows = t.exact(100, 103, window=30)
    for row, last in zip(rows, (101, 102, 103), strict=True):
        expected = (query[last - 1] @ key[last - 30 : last].T).softmax(-1) @ value[last - 30 : last]
        assert torch.allclose(row, expected, atol=1e-12)
    seen = t.before(103, 30)
    assert torch.equal(seen.key, t.stream().key[:, :, 73:103]) and seen.value.shape == (1, 1, 30, 48)


def test_landmarks_are_learnt_from_other_photographs():
    query, key = t.learnt_landmarks(6)
    assert query.shape == key.shape == (1, 6, 48) and (query[..., -1] - 1).abs().max() < 1e-5
    patches = t.to_patches(t.noisy())
    # Two noisy patches of the same content are 10 NOISE apart.
    assert torch.cdist(t.training()[::50], patches[::50]).min() > 0.5
    assert len(t.training()) > 6000 and query.isfinite().all()


# ---- the run ---------------------------------------------------------------------------------------------------------


def test_demo_prints_tables_and_draws(short, tmp_path: Path, capsys):
    output = tmp_path / "picture.png"
    output.write_text("of an earlier run")
    stream.run(str(output), window=200, landmarks=5)
    text = capsys.readouterr().out
    for expected in (
        "No compiled kernel runs here",
        "native: no compiler",
        "320 steps over a window of n = 200 patches, m = 5 landmarks",
        "continual landmarks",
        "fixed landmarks",
        "exact, continual",
        "full, recomputed",
        "as it arrives",
        "n = 200, m = 5, d = 48",
        f"{output} replaced",
    ):
        assert expected in text
    assert output.read_bytes().startswith(b"\x89PNG") and output.stat().st_size > 100_000


def test_what_is_measured_is_right(short, tmp_path: Path):
    with torch.no_grad():
        measured = stream._measure(200, 20, "reference")
    assert (measured.first, measured.rows) == (2, 2)
    exact, continual, fixed = (measured.streams[name] for name in (stream.EXACT, stream.CONTINUAL, stream.FIXED))
    assert len(exact.times) == len(continual.errors) == len(measured.full) == 2 and exact.patches().shape == (320, 48)
    expected = t.exact(320, 640, 200)
    assert torch.allclose(exact.patches().double(), expected, atol=1e-5) and max(exact.errors) < 1e-5
    for one in (continual, fixed):
        errors = [
            float((a - b).norm() / b.norm()) for a, b in zip(one.patches().split(160), expected.split(160), strict=True)
        ]
        assert one.errors == pytest.approx(errors, rel=1e-4) and 1e-4 < max(errors) < 0.2
    noisy = measured.decibels(t.to_patches(t.noisy()))
    assert min(measured.decibels(one.patches()) for one in measured.streams.values()) > noisy + 10  # of the sky
    assert noisy == pytest.approx(t.decibels(t.to_patches(t.noisy())[320:640], t.to_patches(t.photograph())[320:640]))


def test_times_are_of_a_step(monkeypatch):
    monkeypatch.setattr(stream, "seconds", lambda call: call() or 3.0)
    one = stream.Stream(0, lambda state, *token: (token[0], state + 1))
    one.take(6 * [3 * (torch.zeros(1, 1, 1, 48),)])
    assert one.times == [0.5] and one.state == 6 and one.patches().shape == (6, 48)


@pytest.mark.parametrize("which", ["step", "full"])
def test_a_wrong_result_is_no_speed(short, tmp_path: Path, monkeypatch, which):
    step, attend = stream.continual_attention_step, stream.F.scaled_dot_product_attention
    if which == "step":
        monkeypatch.setattr(
            stream, "continual_attention_step", lambda *token: (step(*token)[0] * 1.001, step(*token)[1])
        )
    else:
        monkeypatch.setattr(
            stream.F, "scaled_dot_product_attention", lambda *parts, **options: attend(*parts, **options) * 1.001
        )
    with pytest.raises(RuntimeError, match="a wrong result has no speed"):
        stream.run(str(tmp_path / "demo.png"), 20, 4)


def test_progress_tells_what_goes_on():
    streams = {
        name: stream.Stream(None, None, times=[2e-6], errors=[0.123])
        for name in (stream.CONTINUAL, stream.FIXED, stream.EXACT)
    }
    told = stream._live(stream.Run(640, 16, 4, streams, [1.5e-3]), row=7)
    assert told == "row 7: steps continual 2 us, fixed 2 us, exact 2 us, full 1.5 ms; errors 12% and 12%"
    assert len(told) <= 92


# ---- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["sklearn", "skimage", "matplotlib", "tqdm"])
def test_a_missing_package_is_named(package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(SystemExit, match=rf"{package}.*pip install '\.\[demo\]' in the checkout"):
        stream.run("demo.png")


@pytest.mark.parametrize(
    ("window", "landmarks", "said"),
    [
        (0, None, "--window: got 0"),
        (8481, None, "--window: got 8481"),
        (None, 0, "--landmarks: got 0"),
        (10, 11, "--landmarks: got 11"),
    ],
)
def test_bad_options_are_one_line(window, landmarks, said, tmp_path: Path):
    with pytest.raises(SystemExit, match=said) as error:
        stream.run(str(tmp_path / "demo.png"), window, landmarks)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("stream", "--landmarks", "many"), "--landmarks: invalid int"),
        (("stream", "--points", "9"), "--points belongs to the demo cmab"),
        (("--window", "9"), "--window belongs to the demo stream"),
        (("intention", "--landmarks", "9"), "--landmarks belongs to the demo stream"),
    ],
)
def test_what_no_demo_takes_is_refused(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cmab_kernels", "demo", *arguments])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]


def test_arguments_reach_the_demo(monkeypatch):
    called = []
    monkeypatch.setattr(stream, "run", lambda *arguments: called.append(arguments))
    for arguments in ((), ("--window", "9", "--landmarks", "3", "--output", "a.png")):
        monkeypatch.setattr("sys.argv", ["cmab_kernels", "demo", "stream", *arguments])
        main()
    assert called == [("demo_stream.png", None, None), ("a.png", 9, 3)]


def test_bad_arguments_end_the_process_with_one_line(forks: Forks, tmp_path: Path):
    done = forks.run(tmp_path, ["cmab_kernels", "demo", "stream", "--window", "0"])
    assert done.returncode == 1 and done.stderr.startswith("--window: got 0") and done.stderr.count("\n") == 1

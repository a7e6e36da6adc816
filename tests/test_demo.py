"""The demos run, their comparisons are right, and their errors name missing packages."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

import cmab_kernels.__main__
from cmab_kernels import attention_state
from cmab_kernels.demo import checked_output, cmab, intention
from cmab_kernels.demo.cmab import Figures, Scan, plot
from cmab_kernels.demo.cmab import conditioning as c
from cmab_kernels.demo.intention import cloud, digits
from cmab_kernels.measure import Peak, peak_memory, readable

from .forked import ROOT, Forks

pytestmark = pytest.mark.filterwarnings("ignore:cmab_kernels runs its PyTorch reference")
MIB = 2**20


@pytest.fixture(scope="module")
def reader() -> c.Reader:
    return c.Reader.make("cpu")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cmab, "SECONDS", 0.1)


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
    assert many < few + 32 * MIB  # the allocator varies; the keys and values of 600,000 pixels are 293 MiB
    torchs = peak_memory(
        c.conditioning, c.SDPA_NAME, 264_000, "cpu", "auto", warm_up=(c.SDPA_NAME, 8192, "cpu", "auto")
    )
    assert torchs.extra > 2 * 264_000 * c.DIM * 4  # keys and values at the least


def test_random_sizes_add_up():
    sizes = cmab._random_sizes(123_456)
    assert sum(sizes) == 123_456 and min(sizes) >= 1 and len(set(sizes)) > 10


def test_a_difference_that_is_no_number_is_told():
    assert cmab._largest_difference([torch.zeros(2), torch.tensor([1.0, -3.0])]) == 3.0
    assert math.isnan(cmab._largest_difference([torch.zeros(2), torch.tensor([1.0, math.nan])]))


@pytest.mark.parametrize("wrong", [1.05, math.nan])
def test_a_wrong_result_is_no_speed(wrong, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(c.CONDITIONING, c.SDPA_NAME, lambda reader, points: reader.multihead(points) * wrong)
    monkeypatch.setattr(cmab, "peak_memory", lambda *_, **__: Peak(MIB, MIB))
    with pytest.raises(RuntimeError, match="one is wrong"):
        cmab.run(str(tmp_path / "demo.png"), [700])


def test_demo_prints_tables_and_draws(tmp_path: Path, capsys):
    output = tmp_path / "demo.png"
    output.write_text("of an earlier run")
    cmab.run(str(output), [1500, 700])
    text = capsys.readouterr().out
    for expected in (
        "From pixels to latents",
        "        700",
        "      1,500",
        "Only the attention",
        "1,500 pixels streamed in",
        "One more pixel after 1,500 takes ",
    ):
        assert expected in text
    assert f"{output} replaced" in text
    assert output.read_bytes().startswith(b"\x89PNG") and output.stat().st_size > 50_000


@pytest.mark.parametrize("others", [False, True], ids=["quiet", "busy"])
def test_the_best_of_several_calls_is_told_and_a_busy_machine_too(others, tmp_path: Path, capsys, monkeypatch):
    def samples(calls, rounds, device):
        for call in calls.values():
            call()
        return {name: [0.25 * (1 + 7 * others * (i % 4 != 1)) for i in range(rounds)] for name in calls}

    monkeypatch.setattr(cmab, "interleave", samples)
    monkeypatch.setattr(cmab, "peak_memory", lambda *_, **__: Peak(MIB, MIB))
    cmab.run(str(tmp_path / "demo.png"), [700])
    text = capsys.readouterr().out
    assert (
        text.count(readable(0.25)) == 5
        and ("The machine is busy: calls took up to 8.0 times as long" in text) is others
    )


@pytest.mark.parametrize("counts", [(3000,), (700, 1500), (10_000, 100_000, 1_990_921)])
def test_every_axis_of_the_picture_has_two_ticks_and_a_warning_is_read_first(counts, tmp_path: Path, monkeypatch):
    scans = [
        Scan(n, {name: Figures(i * n * 1e-9, i * MIB) for i, name in enumerate(c.CONDITIONING, 2)}) for n in counts
    ]
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot.draw(scans, tmp_path / "demo.png", "a machine", warning="It is busy.")
    for axes in drawn[0].axes[1:]:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = axis.get_view_interval()
            told = [
                label.get_text()
                for label, at in zip(axis.get_ticklabels(), axis.get_ticklocs(), strict=True)
                if low <= at <= high
            ]
            assert len(set(told)) >= 2
    assert [text.get_fontweight() for text in drawn[0].texts if text.get_text() == "It is busy."] == ["bold"]


@pytest.mark.parametrize(("fits", "left_out"), [(c.SDPA_NAME, 1), (None, 4)])
def test_what_does_not_fit_into_memory_is_left_out(fits, left_out, tmp_path: Path, capsys, monkeypatch):
    left = c.bytes_needed(fits, 2000, "native") / 0.6 + 1 if fits else 0
    monkeypatch.setattr(cmab, "explain", lambda *_: [cmab.Explanation("auto", True, "")])
    monkeypatch.setattr(cmab, "available_memory", lambda device: left)
    monkeypatch.setattr(cmab, "peak_memory", lambda *_, **__: Peak(MIB, MIB))
    cmab.run(str(tmp_path / "demo.png"), [2000])
    assert capsys.readouterr().out.count("would not fit into memory") == left_out


def test_demo_without_a_kernel_says_so(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(cmab, "POINTS_WITHOUT_KERNEL", (300, 600))
    monkeypatch.setattr(cmab, "peak_memory", lambda *_, **__: Peak(MIB, MIB))
    rows = [cmab.Explanation("native", False, "no compiler"), cmab.Explanation("reference", True, "")]
    monkeypatch.setattr(cmab, "explain", lambda *_: rows)
    cmab.run(str(tmp_path / "demo.png"))
    text = capsys.readouterr().out
    assert (
        "No compiled kernel runs here" in text
        and "native: no compiler" in text
        and "        600" in text
        and "demo.png written" in text
    )


# ---- Intention -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lessons() -> digits.Lessons:
    return digits.draw(3, half=0)


def test_lessons_are_disjoint_draws_of_five_a_class(lessons):
    again, other = digits.draw(3, half=0), digits.draw(3, half=1)
    assert torch.equal(lessons.support, again.support) and torch.equal(lessons.query, again.query)
    assert not torch.equal(lessons.support[0], lessons.support[1])
    classes = digits.images()[1]
    assert torch.equal(classes[lessons.support], torch.arange(10).repeat_interleave(5).expand(3, -1))
    for support, query in zip(lessons.support, lessons.query, strict=True):
        assert len(torch.cat([support, query]).unique()) == len(support) + len(query) > 800
    assert not torch.isin(
        torch.cat([lessons.support, lessons.query], 1), torch.cat([other.support, other.query], 1)
    ).any()


def test_intention_is_the_ridge_classifier_without_an_intercept(lessons):
    from sklearn.linear_model import RidgeClassifier

    theirs = digits.by_scikit_learn(lambda alpha: RidgeClassifier(alpha=alpha, fit_intercept=False))
    assert (digits.by_intention(*lessons.parts(), 3.0) == theirs(*lessons.parts(), 3.0)).double().mean() > 0.999
    assert (digits.by_intention(*lessons.parts(), 3.0) == theirs(*lessons.parts(), 1.0)).double().mean() < 0.99


def test_intention_of_kernel_features_is_kernel_ridge_regression(lessons):
    from sklearn.kernel_ridge import KernelRidge

    ours = digits.by_kernel_intention(*lessons.parts(), (0.2, 0.1))
    for support, classes, query, predicted in zip(*lessons.parts(), ours, strict=True):
        machine = KernelRidge(alpha=0.1, kernel="rbf", gamma=0.2).fit(
            support.numpy(), 2 * F.one_hot(classes).numpy() - 1
        )
        assert (torch.from_numpy(machine.predict(query.numpy())).argmax(-1) == predicted).double().mean() > 0.999


def test_attention_is_a_softmax_of_cosines(lessons):
    support, classes, query = lessons.parts()
    cosines = F.cosine_similarity(query[:, :, None], support[:, None], dim=-1)
    expected = (torch.softmax(cosines / 0.05, -1) @ F.one_hot(classes).float()).argmax(-1)
    assert (digits.by_attention(support, classes, query, 0.05) == expected).double().mean() > 0.999


def test_the_setting_is_the_best_of_the_trials_and_never_sees_the_lessons(lessons):
    trials, seen = digits.draw(2, half=1), []

    def predict(support, classes, query, setting):
        in_trials = len(support) == 2
        seen.append((setting, in_trials))
        right = digits.images()[1][(trials if in_trials else lessons).query]
        return right if (setting == "good") == in_trials else (right + 1) % 10

    done: list[int] = []
    learner = digits.Learner(predict, ["bad", "good", "worse"], "it is {}")
    outcome = digits.outcome("planted", learner, trials, lessons, lambda: done.append(1))
    assert seen == [("bad", True), ("good", True), ("worse", True), ("good", False)]
    assert (outcome.told, outcome.accuracy, len(done)) == ("it is good", 0.0, 4)


def test_the_cloud_is_turned_scaled_and_shifted():
    source, target = cloud.source(), cloud.target()
    assert torch.allclose(torch.pdist(target[:50]), cloud.SCALE * torch.pdist(source[:50]))
    assert torch.allclose(target.mean(0), torch.tensor(cloud.SHIFT, dtype=torch.float64)) and not torch.allclose(
        source, target, atol=0.3
    )
    assert abs(source.square().sum(-1).mean() - 1) < 1e-12 and source.unique(dim=0).shape == (cloud.POINTS, 2)


@pytest.mark.parametrize("noise", cloud.NOISES)
def test_maps_from_five_pairs(noise):
    comparison = cloud.measure(noise)
    ours, theirs = comparison.predicted[cloud.INTENTION], comparison.predicted[cloud.LEAST_SQUARES]
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert (comparison.errors[cloud.INTENTION] < 1e-8) == (noise == 0)
    assert comparison.errors[cloud.INTENTION] < 2 * noise + 1e-8 < comparison.errors[cloud.ATTENTION]


def test_attention_over_pairs_is_a_softmax_of_distances():
    points, targets = cloud.source()[:5][None], cloud.target()[:5][None]
    weights = torch.softmax(torch.cdist(cloud.source()[None], points).square() / -2 / 0.3, -1)
    assert torch.allclose(cloud.by_attention(points, targets, 0.3), weights @ targets)


def test_demo_of_intention_prints_tables_and_draws(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(digits, "TRIALS", 1)
    monkeypatch.setattr(digits, "LESSONS", 2)
    output = tmp_path / "picture.png"
    intention.run(str(output))
    text = capsys.readouterr().out
    for expected in (*digits.LEARNERS, *cloud.METHODS, "2 draws of examples", "5% noise in pairs", f"{output} written"):
        assert expected in text
    assert output.read_bytes().startswith(b"\x89PNG") and output.stat().st_size > 100_000


# ---- bad options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("demo", "package"),
    [
        *((cmab, package) for package in ("skimage", "matplotlib", "tqdm")),
        *((intention, package) for package in ("sklearn", "matplotlib")),
    ],
)
def test_a_missing_package_is_named(demo, package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(SystemExit, match=rf"{package}.*pip install '\.\[demo\]' in the checkout"):
        demo.run("demo.png")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--points", "0"),
        ("--points", "2000000"),
        ("--output", "no/such/folder.png"),
        ("--output", "demo.exe"),
        ("--output", "/proc/demo.png"),
        ("cmab", "--output", "demo.exe"),
        ("intention", "--output", "no/such/folder.png"),
        ("intention", "--output", f"{'long' * 100}.png"),
        ("stream", "--output", "/proc/demo.png"),
    ],
)
def test_bad_arguments_are_one_line_before_anything_is_printed(arguments, forks: Forks, tmp_path: Path):
    done = forks.run(tmp_path, ["cmab_kernels", "demo", *arguments])
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(arguments[-2]) and done.stderr.count("\n") == 1


def test_a_folder_is_no_picture(tmp_path: Path):
    with pytest.raises(SystemExit, match=r"^--output: got .*, which cannot be written \(Is a directory\)"):
        (folder := tmp_path / "demo.png").mkdir()
        checked_output(str(folder))


def test_to_check_the_output_writes_nothing(tmp_path: Path):
    new, old, link = (tmp_path / f"{name}.png" for name in ("new", "old", "link"))
    old.write_text("of an earlier run")
    link.symlink_to(new)
    for target in (new, old, link):
        assert checked_output(str(target)) == target
    assert old.read_text() == "of an earlier run" and sorted(tmp_path.iterdir()) == [link, old]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("intention", "--points", "9"), "--points belongs to the demo cmab"), (("nystrom",), "nystrom")],
)
def test_what_no_demo_takes_is_refused(arguments, said, forks: Forks, tmp_path: Path):
    done = forks.run(tmp_path, ["cmab_kernels", "demo", *arguments])
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1]


@pytest.mark.thorough
def test_help_in_an_encoding_without_all_letters(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    # A new process: the encoding is read at its start.
    command = [
        sys.executable,
        "-m",
        "cmab_kernels",
        "demo",
        "--help",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0 and "Nystr?m" in done.stdout


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["cmab_kernels", "demo"])
    monkeypatch.setattr(cmab, "run", interrupted)
    with pytest.raises(SystemExit) as stop:
        cmab_kernels.__main__.main()
    assert (
        stop.value.code == 130
        and capsys.readouterr().err == "python -m cmab_kernels demo: interrupted; nothing was drawn\n"
    )

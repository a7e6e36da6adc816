"""Every task has presets, with a source for each number, and every system that can learn it runs with each of them."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cmab_models import cli, presets
from cmab_models.data.images import EMOJI_FONT
from cmab_models.tasks import TASKS
from cmab_models.training import Run, first_losses

from .published import write_cifar, write_mini_imagenet

FILES = Path(presets.__file__).parent
PAIRS = [(task, system) for task in sorted(TASKS) for system in TASKS[task].systems]
FIRST = {task: TASKS[task].systems[0] for task in TASKS}
QUICK = ("gp-rbf", "wheel", "hawkes", "mooc", "gtzan", "emnist", "few-shot", "sine", "outlier", "cifar-outlier")
"""Tasks whose data is available at once."""
slow = pytest.mark.thorough


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Small files in the formats of the data that must be downloaded, by task."""
    from PIL import Image

    tmp_path = tmp_path_factory.mktemp("published")
    numbers = np.random.default_rng(0)
    for part in ("train", "test"):
        for kind, header, shape in (("images-idx3", (3, 60, 28, 28), (60, 28, 28)), ("labels-idx1", (1, 60), (60,))):
            values = numbers.integers(256, size=shape) if "images" in kind else np.arange(60) % 47
            head = bytes([0, 0, 8, header[0]]) + b"".join(size.to_bytes(4, "big") for size in header[1:])
            path = tmp_path / f"emnist-balanced-{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))
    (tmp_path / "img_align_celeba").mkdir()
    for i in range(4):
        pixels = numbers.integers(256, size=(218, 178, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "img_align_celeba" / f"{i:06}.jpg")
    (tmp_path / "list_eval_partition.txt").write_text("".join(f"{i:06}.jpg {2 * (i // 3)}\n" for i in range(4)))
    for task in ("mooc", "reddit"):
        sequences = []
        for _ in range(10):
            times = numbers.exponential(100.0, 8).cumsum()
            marks = numbers.integers(3, size=8)
            sequences.append({"arrival_times": times, "marks": marks, "t_start": 0.0, "t_end": float(times[-1])})
        torch.save({"sequences": sequences}, tmp_path / f"{task}.pkl")
    rows = [
        f"{genre}.{track:05}.{piece}.wav,66149,{','.join(map(str, numbers.normal(size=3)))},{genre}"
        for genre in ("blues", "rock")
        for track in range(6)
        for piece in range(10)
    ]
    (tmp_path / "features_3_sec.csv").write_text("\n".join(["filename,length,a,b,c,label", *rows]) + "\n")
    tokens = numbers.normal(size=(4, 120, 3)).astype("float32")
    np.savez(tmp_path / "gtzan_vggish.npz", tokens=tokens, labels=["blues", "rock"] * 2)
    sets = {"train_session_set": ["one", "two"], "test_session_set": ["three"]}
    (tmp_path / "data_info.json").write_text(json.dumps({"THUMOS": sets}))
    for kind, width in (("rgb_kinetics_resnet50", 4), ("flow_kinetics_bninception", 3), ("target_perframe", 22)):
        (tmp_path / kind).mkdir()
        for name, action in (("one", 1), ("two", 2), ("three", 1)):
            values = numbers.normal(size=(100, width)) if width < 22 else np.eye(22)[[action] * 100]
            np.save(tmp_path / kind / f"{name}.npy", values.astype("float32"))
    write_mini_imagenet(tmp_path)
    write_cifar(tmp_path)
    downloaded = ("emnist", "celeba", "mooc", "reddit", "gtzan", "thumos", "mini-imagenet", "cifar-outlier")
    return dict.fromkeys(downloaded, str(tmp_path))


def made(preset: str, task: str, system: str, folders: dict[str, str], folder: Path) -> Run:
    """Return a run as the command line makes it."""
    if task == "emoji" and not EMOJI_FONT.exists():
        pytest.skip("needs fonts-noto-color-emoji")
    settings = presets.settings(preset, task, system)
    model = {name.removeprefix("model."): value for name, value in settings.items() if name.startswith("model.")}
    of_task = {name: value for name, value in settings.items() if not name.startswith("model.")}
    if task in folders:
        of_task["folder"] = folders[task]
    return Run(system, TASKS[task].for_system(system).changed(of_task), folder, model_settings=model)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_task_has_presets_with_a_source_for_each_number(task: str) -> None:
    text = (FILES / f"{task}.toml").read_text(encoding="utf-8")
    assert re.findall(r"^\[(\w+)\]$", text, re.M) == list(presets.PRESETS)
    paper = text.split("[paper]")[1].split("# Minutes")[0]
    lines = [line for line in paper.splitlines() if "=" in line.split("#")[0]]
    assert all("#" in line for line in lines) and len(lines) >= 8
    for name in ("steps", "learning_rate", "weight_decay", "optimizer", "schedule", "clip"):
        assert any(line.startswith(f"{name} =") for line in lines)


@pytest.mark.parametrize(("task", "system"), PAIRS)
@pytest.mark.parametrize("preset", presets.PRESETS)
def test_settings_of_presets_are_ones_that_there_are(preset: str, task: str, system: str) -> None:
    settings = presets.settings(preset, task, system)
    of_task = {name: value for name, value in settings.items() if not name.startswith("model.")}
    changed: Any = TASKS[task].for_system(system).changed(of_task)
    assert (changed == TASKS[task].for_system(system)) == (preset == "small")
    of_model = {name.removeprefix("model.") for name in settings if name.startswith("model.")}
    assert of_model <= set(presets.known(system))


@pytest.mark.parametrize("task", sorted(TASKS))
def test_tables_of_a_preset_are_read(task: str) -> None:
    """Each table is that of systems of the task, which have no other, and each argument is one of a system's."""
    for preset in presets.PRESETS:
        table = presets._tables(task)[preset]
        groups = {name: part for name, part in table.items() if isinstance(part, dict) and name != "model"}
        systems = [system for group in groups for system in group.split()]
        assert len(systems) == len(set(systems)) and set(systems) <= set(TASKS[task].systems)
        for of, part in ((TASKS[task].systems, table), *((name.split(), each) for name, each in groups.items())):
            assert set(part.get("model", {})) <= {name for system in of for name in presets.known(system)}


def test_a_preset_gives_a_system_what_it_has() -> None:
    assert presets.settings("paper", "gp-rbf", "cmanp")["model.num_latents"] == 128
    of_cnp = presets.settings("paper", "gp-rbf", "cnp")
    assert of_cnp["model.dim"] == 128 and "model.num_latents" not in of_cnp and of_cnp["steps"] == 100_000


@pytest.mark.parametrize("task", [pytest.param(task, marks=() if task in QUICK else slow) for task in sorted(TASKS)])
def test_a_smoke_preset_trains(task: str, folders: dict[str, str], tmp_path: Path) -> None:
    run = made("smoke", task, FIRST[task], folders, tmp_path)
    _, losses = first_losses(run, 2)
    assert len(losses) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("task", sorted(TASKS))
def test_the_papers_size_trains_ten_steps(task: str, folders: dict[str, str], tmp_path: Path) -> None:
    run = made("paper", task, FIRST[task], folders, tmp_path)
    _, losses = first_losses(run, 10)
    assert len(losses) == 10 and run.task.steps > 1000


def test_the_command_line_trains_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cli.main(["train", "mlp", "--task", "sine", "--preset", "smoke", "--set", "steps=3", "--set", "batch_size=4"])
    (record,) = (json.loads(line) for line in Path("runs/sine/mlp-0/results.jsonl").read_text().splitlines())
    assert (record["steps"], record["batch_size"], record["learning_rate"]) == (3, 4, 0.003)


def test_an_evaluation_knows_the_folder_of_the_data(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default sizes of the model follow from these data."""
    monkeypatch.chdir(tmp_path)
    here, data = ["cmhp", "--task", "mooc", "--folder", "run"], ["--set", f"folder={folders['mooc']}"]
    cli.main(["train", *here, *data, "--preset", "smoke", "--set", "steps=1", "--set", "batch_size=2"])
    cli.main(["evaluate", *here])
    first, second = (json.loads(line) for line in Path("run/results.jsonl").read_text().splitlines())
    assert second["scores"] == first["scores"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--preset", "tiny"), "preset: got 'tiny', expected one of paper, small, smoke"),
        (("--precision", "8"), "precision: got '8', expected one of 32-true, bf16-mixed, 16-mixed"),
        (("--precision", "16-mixed"), "precision: got '16-mixed' on a CPU, expected 'bf16-mixed' or '32-true' there"),
        (("--devices", "0"), "argument --devices: got '0', expected an int >= 1"),
        (("--accumulate", "some"), "argument --accumulate: got 'some', expected an int >= 1"),
        (("--save-every", "nan"), "argument --save-every: got 'nan', expected a number >= 0"),
        (("--set", "schedule=linear"), "schedule: got 'linear', expected one of cosine, constant"),
        (("--set", "optimizer=sgd"), "optimizer: got 'sgd', expected one of adam, adamw"),
        (("--set", "weight_decay=-1"), "weight_decay: got -1, expected a finite number >= 0"),
    ],
)
def test_what_is_refused_is_one_line(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "mlp", "--task", "sine", *arguments])
    assert capsys.readouterr().err.splitlines()[-1].endswith(said) and not any(tmp_path.iterdir())


def test_a_task_without_a_file_says_so() -> None:
    with pytest.raises(ValueError, match=r"preset: got one for the task circles, expected none, as the task has no"):
        presets.settings("paper", "circles", "cnp")

"""Training is reproducible, can be stopped and resumed, and can be started from the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cmab_models import cli
from cmab_models.neural_processes import Batch
from cmab_models.reproduce.runner import finished
from cmab_models.tasks import TASKS, Task, seeded
from cmab_models.training import BadCheckpoint, Diverged, Interrupted, Run, append, train
from cmab_models.training.module import Training
from lightning.pytorch import Callback, Trainer
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> type[Task]:
    """A task that exists while a test runs: straight lines."""
    monkeypatch.setattr("cmab_models.tasks.base.TASKS", {})

    @dataclass(frozen=True)
    class Lines(Task):
        name = "lines"
        systems = ("cnp", "np")
        steps: int = 6
        slope: float = 1.0
        width: int = 8

        def sizes(self, system: str) -> dict[str, Any]:
            return {"dim_x": 1, "dim_y": 1, "dim": self.width, "encoder_depth": 2}

        def batch(self, generator: torch.Generator) -> Batch:
            x, target_x = torch.rand(2, 4, 5, 1, generator=generator)
            return Batch(x, self.slope * x, target_x, self.slope * target_x)

        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            return model.loss(batch)

        def evaluate(self, model: nn.Module) -> dict[str, float]:
            with torch.no_grad():
                return {"log-likelihood": float(model.log_prob(*self.batch(torch.Generator().manual_seed(0))).mean())}

        def references(self) -> dict[str, float]:
            return {"zero": -1.0}

        def stream(self, model: nn.Module) -> Iterator[dict[str, float]]:
            for i in range(25):
                yield {"points": i, "error": 1 / (1 + i)}

    monkeypatch.setitem(TASKS, "lines", Lines)
    return Lines


class At(Callback):
    """Does something at the end of a step."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.action()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_seed_gives_the_same_model_and_another_seed_another(toy: type[Task], tmp_path: Path) -> None:
    first, again, other = (
        train(Run("cnp", toy(), tmp_path / name, seed))[0] for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))


def test_noise_of_a_step_is_not_its_batch(toy: type[Task], tmp_path: Path) -> None:
    """The generator of a batch and torch's own, from which a model draws its noise, have no seed in common."""
    seeds: list[int] = []

    @dataclass(frozen=True)
    class Seeds(toy, listed=False):  # type: ignore[misc, valid-type]  # a base class that a fixture returns
        def batch(self, generator: torch.Generator) -> Batch:
            seeds.append(generator.initial_seed())
            return super().batch(generator)

    training, noise = Training(Run("np", Seeds(), tmp_path)), []
    with torch.random.fork_rng():
        for number in range(50):
            training.drawn(number)
            noise.append(torch.initial_seed())
    assert len({*seeds, *noise}) == 100


def test_a_task_with_data_and_lists_is_resumed(toy: type[Task], tmp_path: Path) -> None:
    """Data are not settings, so they are not compared with those of the checkpoint."""

    @dataclass(frozen=True)
    class Known(toy, listed=False):  # type: ignore[misc, valid-type]  # a base class that a fixture returns
        known: Any = field(default=torch.empty(0), repr=False)
        sizes_of_layers: list[int] = field(default_factory=lambda: [8])

    assert Known().changed({"sizes_of_layers": [4]}) == Known(sizes_of_layers=[4])
    with pytest.raises(ValueError, match=r"sizes_of_layers: got 4, expected a list, such as \[8\]"):
        Known().changed({"sizes_of_layers": 4})
    whole, _ = train(Run("cnp", Known(known=torch.ones(3)), tmp_path / "whole"))
    run = Run("cnp", Known(known=torch.ones(3)), tmp_path / "parts")
    with pytest.raises(Interrupted):
        train(run, callbacks=[At(3, lambda: signal.raise_signal(signal.SIGINT))])
    for _ in ("interrupted", "finished"):
        assert torch.equal(weights(train(run, resume=True)[0]), weights(whole))


@pytest.mark.parametrize("name", ["seed", "accumulate"])
def test_a_setting_of_a_task_has_no_name_of_the_run(name: str, toy: type[Task], tmp_path: Path) -> None:
    kind = make_dataclass("Named", [(name, int, 0)], bases=(toy,), frozen=True)
    with pytest.raises(ValueError, match=f"task: got a setting named {name}, expected other names than those of Run"):
        Run("cnp", kind(), tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_and_resumed_it_is_the_run_that_was_not_stopped(
    number: signal.Signals, toy: type[Task], tmp_path: Path
) -> None:
    whole, _ = train(Run("cnp", toy(), tmp_path / "whole"))

    run = Run("cnp", toy(), tmp_path / "parts")
    with pytest.raises(Interrupted, match=r"after 3 of 6 steps; go on with --resume from .*checkpoint\.pt"):
        train(run, callbacks=[At(3, lambda: signal.raise_signal(number))])
    resumed, _ = train(run, resume=True)
    assert torch.equal(weights(whole), weights(resumed))


def test_an_interruption_in_the_middle_of_a_step_waits_for_its_end(toy: type[Task], tmp_path: Path) -> None:
    whole, _ = train(Run("cnp", toy(), tmp_path / "whole"))
    updated: list[int] = []

    def interrupt(*_: Any) -> None:  # called when the weights are updated, and the step is not yet counted
        updated.append(1)
        if len(updated) == 3:
            signal.raise_signal(signal.SIGINT)

    run, handler = Run("cnp", toy(), tmp_path / "parts"), signal.signal(signal.SIGINT, signal.default_int_handler)
    hook = register_optimizer_step_post_hook(interrupt)
    try:
        with pytest.raises(Interrupted, match="after 3 of 6 steps"):
            train(run)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        hook.remove()
        signal.signal(signal.SIGINT, handler)
    resumed, _ = train(run, resume=True)
    assert torch.equal(weights(whole), weights(resumed))


@pytest.mark.parametrize("at", [3, 6])
def test_the_checkpoint_is_written_whatever_comes(
    at: int, toy: type[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interruption comes while a file is written: the last file of the training, or the second file, after step
    3."""
    whole, _ = train(Run("cnp", toy(), tmp_path / "whole"))
    write = torch.save

    def interrupted(value: Any, to: Any) -> None:
        if isinstance(to, Path):
            signal.raise_signal(signal.SIGINT)
        write(value, to)

    def stop() -> None:
        if at == 3:
            signal.raise_signal(signal.SIGINT)

    run, handler = Run("cnp", toy(), tmp_path / "parts"), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch, pytest.raises((Interrupted, KeyboardInterrupt)) as stopped:
            patch.setattr(torch, "save", interrupted)
            train(run, callbacks=[At(3, stop)])
        assert f"after {at} of 6 steps" in str(stopped.value)
    finally:
        signal.signal(signal.SIGINT, handler)
    resumed, _ = train(run, resume=True)
    assert torch.equal(weights(whole), weights(resumed))


def test_checkpoints_that_cannot_be_resumed_say_why(toy: type[Task], tmp_path: Path) -> None:
    run = Run("cnp", toy(), tmp_path)
    with pytest.raises(BadCheckpoint, match="got no such file, expected a checkpoint to resume"):
        train(run, resume=True)
    train(run)
    with pytest.raises(BadCheckpoint, match=r"^slope: got 2\.0, expected 1\.0, as .*checkpoint\.pt was trained with"):
        train(Run("cnp", toy(slope=2.0), tmp_path), resume=True)  # type: ignore[call-arg]
    written = run.checkpoint.read_bytes()
    (tmp_path / "whole.pt").write_bytes(written)
    run.checkpoint.write_bytes(written[: len(written) // 2])
    with pytest.raises(
        BadCheckpoint, match=r"got a file that is cut short or damaged, expected the checkpoint\.pt of a training"
    ):
        train(run, resume=True)
    run.checkpoint.write_bytes(written[:-1])
    with pytest.raises(BadCheckpoint, match="got a file that is cut short or damaged"):
        train(run, resume=True)
    torch.save({"weights": torch.zeros(3)}, run.checkpoint)
    with pytest.raises(BadCheckpoint, match="got a file without the format 'cmab_models checkpoint, version 2'"):
        train(run, resume=True)
    other = torch.load(run.checkpoint.parent / "whole.pt")
    torch.save(other | {"state_dict": {}}, run.checkpoint)  # from a version whose models had other parameters
    with pytest.raises(BadCheckpoint, match=r"got weights of another version .* Missing key"):
        train(run, resume=True)
    torch.save(other | {"run": 5}, run.checkpoint)
    with pytest.raises(BadCheckpoint, match=r"checkpoint\.pt, run: got an int, expected a dict"):
        train(run, resume=True)
    for broken, why in (
        (b"", "an empty file"),
        (b"abc", "a file of another kind"),
        (b'{"steps": 1}', "a file of another kind"),
    ):
        run.checkpoint.write_bytes(broken)
        with pytest.raises(
            BadCheckpoint, match=rf"checkpoint.pt: got {why}, expected the checkpoint.pt of a training.*$"
        ) as refused:
            train(run, resume=True)
        assert "\n" not in str(refused.value)
    torch.save(Run, run.checkpoint)  # a class: loading it would execute code
    with pytest.raises(BadCheckpoint, match="got a file that holds something else"):
        train(run, resume=True)


def test_a_model_setting_is_neither_lost_nor_changed_by_a_resumption(toy: type[Task], tmp_path: Path) -> None:
    """A setting that does not change a shape would otherwise resume another model, without an error."""
    few, plain = Run("np", toy(), tmp_path, model_settings={"num_train_samples": 2}), Run("np", toy(), tmp_path)
    train(few)
    append(tmp_path / "results.jsonl", {**few.recorded(), "cpu_seconds": 1.0, "scores": {}})
    with pytest.raises(BadCheckpoint, match=r"^model\.num_train_samples: got 4, expected 2, as .* was trained with"):
        train(plain, resume=True)
    assert finished(plain) is None and finished(few) is not None
    train(plain)
    default = Run("np", toy(), tmp_path, model_settings={"num_train_samples": 4})
    model, _ = train(default, resume=True)
    assert torch.equal(weights(model), weights(train(plain, resume=True)[0]))


@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [
        (("global_step",), -1, "global_step: got -1, expected an int >= 0"),
        (("global_step",), True, "global_step: got True, expected an int >= 0"),
        (("global_step",), 7, "global_step: got 7, expected an int from 0 to steps = 6"),
        (("cpu_seconds",), "a", "cpu_seconds: got 'a', expected a finite number >= 0"),
        (("wall_seconds",), float("nan"), "wall_seconds: got nan, expected a finite number >= 0"),
        (("state_dict",), [], "state_dict: got a list, expected a dict"),
        (("state_dict", 5), torch.zeros(3), r"got weights of another version \(.*Unexpected key"),
        (
            ("state_dict", "model.encoders.0.points.layers.0.weight"),
            3,
            r"state_dict, encoders\.0\.points\.layers\.0\.weight: got an int, expected a torch\.Tensor",
        ),
        (
            ("state_dict", "model.encoders.0.points.layers.0.weight"),
            torch.zeros(8, 2, dtype=torch.complex64),
            r"state_dict, encoders.*: got a tensor .*complex64",
        ),
        (("optimizer_states",), None, "optimizer_states: got None, expected a list"),
        (("optimizer_states",), [], "optimizer_states: got a list of 0, expected a list of one dict"),
        (("loops",), 3, "loops: got an int, expected a dict"),
        (("optimizer_states", 0, "state"), [], "optimizer, state: got a list, expected a dict"),
        (("optimizer_states", 0, "state", 99), {}, "optimizer, state, 99: got a state, expected none"),
        (("optimizer_states", 0, "state", 0), 3, "optimizer, state, 0: got an int, expected a dict"),
        (
            ("optimizer_states", 0, "state", 0, "step"),
            3,
            r"optimizer, state, 0, step: got an int, expected a torch\.Tensor",
        ),
        (
            ("optimizer_states", 0, "state", 0, "exp_avg"),
            torch.zeros(1),
            r"optimizer, state, 0, exp_avg: got a tensor \(1,\).*, expected a dense",
        ),
    ],
)
def test_a_wrong_entry_of_a_checkpoint_is_named(
    toy: type[Task], entry: tuple[str | int, ...], value: Any, said: str, tmp_path: Path
) -> None:
    run = Run("cnp", toy(), tmp_path)
    train(run)
    entries: Any = torch.load(run.checkpoint)
    folder = entries
    for name in entry[:-1]:
        folder = folder[name]
    folder[entry[-1]] = value
    torch.save(entries | {"global_step": 3} if entry != ("global_step",) else entries, run.checkpoint)
    with pytest.raises(BadCheckpoint, match=rf"checkpoint\.pt(, |: ){said}"):
        train(run, resume=True)


def test_a_loss_that_is_not_finite_is_named(toy: type[Task], tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"^loss: got nan in step 2"):
        train(Run("cnp", toy(steps=2, learning_rate=1e30), tmp_path))


def test_a_first_loss_that_is_not_finite_is_not_blamed_on_the_learning_rate(tmp_path: Path) -> None:
    run = Run(
        "thp", TASKS["hawkes"]().changed({"sequences": 20, "end": 5.0}), tmp_path, model_settings={"log_gap_std": 1e300}
    )
    with pytest.raises(
        Diverged, match=r"^loss: got nan in step 1, .*; the model has not learned yet: check its options and the data"
    ):
        train(run)


def test_data_that_is_not_finite_is_named(toy: type[Task], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^context_y: got a NaN or an infinity"):
        train(Run("cnp", toy(slope=float("inf")), tmp_path))  # type: ignore[call-arg]


def test_a_last_step_that_diverges_is_named(toy: type[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No later step computes a loss that would show this.

    A loss may be infinite although the weights are finite, and finite although the weights are not.
    """
    run = Run("cnp", toy(steps=1, learning_rate=1e30), tmp_path)
    with pytest.raises(Diverged, match=r"^loss: got nan after the last step"):
        train(run)
    assert not run.checkpoint.exists()
    hook = register_optimizer_step_post_hook(
        lambda optimizer, *_: optimizer.param_groups[0]["params"][0].data.fill_(torch.nan)
    )
    monkeypatch.setattr(toy, "loss", lambda self, model, batch: sum(p.nan_to_num().sum() for p in model.parameters()))
    try:
        with pytest.raises(Diverged, match=r"^loss: got -?\d.* after the last step, with a largest weight of nan"):
            train(Run("cnp", toy(steps=1), tmp_path))
    finally:
        hook.remove()
    assert not run.checkpoint.exists()


def run_command(*arguments: str) -> int:
    try:
        cli.main(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_command_line(
    toy: type[Task], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("settings.json").write_text(json.dumps({"steps": 4, "model.dim": 4}))
    asked = ("cnp", "--task", "lines", "--config", "settings.json", "--set", "slope=0.5")
    assert run_command("train", *asked) == 0
    folder = Path("runs/lines/cnp-0")
    (record,) = (json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines())
    assert (record["steps"], record["slope"], record["model.dim"], record["seed"]) == (4, 0.5, 4, 0)
    assert record["scores"].keys() == {"log-likelihood"}
    assert {"torch", "commit", "cpu_seconds", "threads"} <= record.keys()
    assert any((folder / "tensorboard").iterdir())
    assert "without a model" in capsys.readouterr().out

    assert run_command("evaluate", *asked) == 0
    assert f"{record['scores']['log-likelihood']:.4f}" in capsys.readouterr().out
    assert run_command("stream", *asked) == 0
    counts = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert counts == [*map(str, range(1, 11)), "20", "25"]

    assert run_command("train", *asked) == 2
    assert "add --resume" in capsys.readouterr().err
    config = (folder / "model" / "config.json").read_text()
    (folder / "model" / "config.json").write_text("[]")
    assert run_command("evaluate", *asked) == 2
    assert "config.json: got [], expected a JSON object" in capsys.readouterr().err
    (folder / "model" / "config.json").write_text(config)
    (folder / "model" / "model.safetensors").write_bytes(b"nothing")
    assert run_command("evaluate", *asked) == 2
    assert "got files that cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [(), ("--set", "patience=1", "--set", "check_every=1")])
def test_a_model_of_another_training_is_refused(
    settings: tuple[str, ...],
    toy: type[Task],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder may hold the model of a training, and the checkpoint of a later one that was stopped."""
    monkeypatch.chdir(tmp_path)
    asked = ("cnp", "--task", "lines", *settings)
    for rate in ("1e-3", "1e-2"):
        assert run_command("train", *asked, "--folder", rate, "--set", f"learning_rate={rate}") == 0
        assert run_command("evaluate", *asked, "--folder", rate) == 0
    Path("1e-2/checkpoint.pt").replace("1e-3/checkpoint.pt")
    before = Path("1e-3/results.jsonl").read_text()
    for command in ("evaluate", "stream", "plot"):
        assert run_command(command, *asked, "--folder", "1e-3") == 2
        assert "model: got a model that 1e-3/checkpoint.pt did not end with" in capsys.readouterr().err
    assert Path("1e-3/results.jsonl").read_text() == before
    assert run_command("train", *asked, "--folder", "1e-3", "--set", "learning_rate=1e-2", "--resume") == 0
    assert run_command("evaluate", *asked, "--folder", "1e-3") == 0


def test_an_evaluation_tells_what_was_trained(
    toy: type[Task], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ("cnp", "--task", "lines", "--folder", "run")
    assert run_command("train", *asked, "--set", "steps=2", "--set", "model.dim=4") == 0
    assert run_command("evaluate", *asked) == 0
    assert run_command("evaluate", *asked, "--set", "slope=0.5") == 0
    assert run_command("train", *asked, "--resume") == 0
    assert json.loads(Path("run/model/config.json").read_text())["dim"] == 4  # not set, so as in the training
    assert run_command("evaluate", *asked, "--set", "model.pooled_depth=2") == 0  # as it is by default
    Path("kept.jsonl").write_text("".join(Path("run/results.jsonl").read_text().splitlines(True)[:3]))
    Path("kept.jsonl").replace("run/results.jsonl")
    Path("run/checkpoint.pt").rename("kept.pt")
    assert run_command("evaluate", *asked) == 0
    trained, same, changed, unknown = (json.loads(line) for line in Path("run/results.jsonl").read_text().splitlines())
    settings = {"system": "cnp", "task": "lines", "seed": 0, "steps": 2, "slope": 1.0, "model.dim": 4}
    for record, evaluated in ((trained, None), (same, {}), (changed, {"slope": 0.5})):
        assert settings.items() <= record.items()
        assert record.get("evaluated_with") == evaluated
    assert same["scores"] == trained["scores"] != changed["scores"]
    assert "steps" not in unknown
    assert unknown["evaluated_with"]["steps"] == 6
    Path("kept.pt").rename("run/checkpoint.pt")
    capsys.readouterr()
    monkeypatch.setitem(TASKS, "others", type("Others", (toy,), {"name": "others"}))
    for arguments, message in (
        (("--seed", "5"), "seed: got 5, expected 0, as run/checkpoint.pt was trained with"),
        (("--set", "model.dim=8"), "model.dim: got 8, expected 4, as"),
        (("--set", "width=16"), "dim: got 16, expected 8, with which the saved model was made"),
        (("--task", "others"), "task: got 'others', expected 'lines', as"),
    ):
        assert run_command("evaluate", *asked, *arguments) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "cnp", "--set", "slop=1"), "slop: got an unknown setting of lines, expected one of "),
        (("train", "cnp", "--set", "slope"), "--set: got slope, expected KEY=VALUE"),
        (("train", "cnp", "--set", "steps=many"), "steps: got 'many', expected an int, such as 6"),
        (("train", "cnp", "--set", "steps=true"), "steps: got True, expected an int, such as 6"),
        (("train", "cnp", "--set", "steps=0"), "steps: got 0, expected a finite number > 0"),
        (("train", "cnp", "--set", "learning_rate=NaN"), "learning_rate: got nan, expected a finite number > 0"),
        (("train", "cnp", "--set", "learning_rate=Infinity"), "learning_rate: got inf, expected a finite number > 0"),
        (("train", "cnp", "--set", "clip=1e999"), "clip: got inf, expected a finite number > 0"),
        (("train", "cnp", "--set", f"clip=1{'0' * 400}"), "expected a finite number > 0"),
        (("train", "cnp", "--config", "infinite.json"), "slope: got inf, expected a finite number > 0"),
        (("train", "cnp", "--set", "model.dim=Infinity"), "model.dim: got inf, expected finite numbers"),
        (("evaluate", "cnp", "--set", "model.dim=[NaN]"), "model.dim: got [nan], expected finite numbers"),
        (
            ("train", "cnp", "--seed", str(1 << 63)),
            "seed: got '9223372036854775808', expected an int from 0 to 2**63 - 1",
        ),
        (("train", "cnp", "--seed", "-1"), "argument --seed: seed: got '-1'"),
        (("train", "cnp", "--seed", "one"), "argument --seed: seed: got 'one'"),
        (
            ("train", "cnp", "--set", "model.latents=3"),
            "latents: got an unknown argument of cnp, expected one of dim_x, ",
        ),
        (("train", "cnp", "--set", "model.dim=wide"), "dim: got 'wide', expected an int >= 1"),
        (("train", "cnp", "--set", "model.encoder_depth=1"), "encoder_depth: got 1, expected an int >= 2"),
        (("train", "cnp", "--set", "model.dim_y=3"), "dim_y: got 3, expected 1, a size of the data of lines"),
        (("train", "cnp", "--set", "model.dim_x=true"), "dim_x: got True, expected an int >= 1"),
        (("train", "cnp", "--device", "meta"), "--device: got meta, expected cpu, cuda"),
        (("train", "cnp", "--device", "cpu:1"), "--device: got cpu:1, expected cpu, cuda"),
        (("train", "cnp", "--device", "cuda:99"), "--device: got cuda:99, expected cpu, or one of the "),
        (("train", "cnp", "--folder", "a file"), "a file cannot be written: Not a directory"),
        (("train", "cnp", "--folder", ""), "argument --folder: got '', expected the name of a folder"),
        (("train", "cnp", "--folder", "a file/run"), "a file/run cannot be written: Not a directory"),
        (("train", "cnp", "--config", "no.json"), "no.json"),
        (("train", "cnp", "--config", "a file"), "--config: got a file without a JSON object"),
        (("train", "cnp", "--config", "pairs.json"), "--config: got pairs.json without a JSON object"),
        (("train", "cnp", "--config", "."), "Is a directory"),
        (("train", "lbanp"), "system: got lbanp, expected one of "),
        (("evaluate", "cnp", "--seed", "5"), "it holds no model; train one first"),
    ],
)
def test_what_is_refused(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a file").write_text("[1]")
    Path("infinite.json").write_text('{"slope": Infinity}')
    Path("pairs.json").write_text('[["steps", 2]]')
    assert run_command(*arguments, "--task", "lines") == 2
    assert message in capsys.readouterr().err and not Path("runs").exists()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("--set", "slope=1e308"), "context_y: got a NaN or an infinity"),
        (("--resume",), "got no such file, expected a checkpoint to resume"),
    ],
)
def test_a_run_that_records_nothing_leaves_no_folder(
    asked: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command("train", "cnp", "--task", "lines", *asked) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
    Path("mine").mkdir()
    assert run_command("train", "cnp", "--task", "lines", "--folder", "mine/run", *asked) == 2
    assert [str(each) for each in Path().rglob("*")] == ["mine"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no lock of a folder")
def test_a_folder_has_one_training_at_a_time(
    toy: type[Task], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins while the first takes a step; the first is not disturbed, on a device with a number."""
    monkeypatch.chdir(tmp_path)
    asked = ("cnp", "--task", "lines", "--folder", "run")
    codes = []

    def begin_another(self: Task, model: nn.Module, step: int) -> None:
        if step == 2 and not codes:
            codes.append(run_command("train", *asked))

    monkeypatch.setattr(toy, "before_step", begin_another)
    assert run_command("train", *asked, "--device", "cpu:0") == 0
    assert codes == [2]
    assert "run: another training writes there; choose another folder" in capsys.readouterr().err


def test_a_run_that_diverges_says_where_its_losses_are(
    toy: type[Task], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        toy,
        "before_step",
        lambda self, model, step: step < 12 or nn.init.constant_(model.decoder.layers[0].weight, 1e38),
    )
    assert run_command("train", "cnp", "--task", "lines", "--set", "steps=20") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "loss: got nan in step 13, with a gradient of norm nan, expected finite numbers; try a smaller learn" in said
    assert said.endswith("; the losses before it are in runs/lines/cnp-0/tensorboard")
    assert sorted(each.name for each in Path("runs/lines/cnp-0").iterdir()) == ["csv", "tensorboard"]
    rows = Path("runs/lines/cnp-0/csv/version_0/metrics.csv").read_text().splitlines()
    assert [row.split(",")[-1] for row in rows] == ["step", "1", "10"]
    assert any(Path("runs/lines/cnp-0/tensorboard").iterdir())


def test_scores_that_cannot_be_recorded_are_shown(
    toy: type[Task], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command("train", "cnp", "--task", "lines", "--folder", "run") == 0
    Path("run/results.jsonl").unlink()
    Path("run/results.jsonl").mkdir()  # a file there cannot be written, not even by root
    capsys.readouterr()
    assert run_command("evaluate", "cnp", "--task", "lines", "--folder", "run") == 2
    said = capsys.readouterr()
    assert "without a model" in said.out
    assert (
        said.err
        == "python -m cmab_models evaluate: run cannot be written, so these scores are not recorded: Is a directory\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(
    toy: type[Task], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/checkpoint.part").symlink_to("/dev/full")
    asked = ("train", "cnp", "--task", "lines", "--folder", "run")
    assert run_command(*asked) == 2
    told = "python -m cmab_models train: run/checkpoint.pt cannot be written; the one before it is as it was: "
    assert capsys.readouterr().err.startswith(told)
    Path("run/checkpoint.part").unlink()
    with monkeypatch.context() as full:
        error = SafetensorError("I/O error: No space left on device (os error 28)")
        full.setattr("cmab_models.neural_processes.cnp.CNP.save_pretrained", lambda *_: raise_(error))
        assert run_command(*asked) == 2
    told = f"python -m cmab_models train: run/model cannot be written: {error}; --resume tries again\n"
    assert capsys.readouterr().err == told
    assert run_command(*asked, "--resume") == 0


def raise_(error: Exception) -> None:
    raise error


def test_what_is_not_given_is_the_task_s_own_for_the_system(
    toy: type[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(toy, "of_system", {"cnp": {"steps": 3, "slope": 0.5}, "lbanp": {"steps": 9}})
    assert run_command("train", "cnp", "--task", "lines", "--set", "slope=2.0") == 0
    record = json.loads(Path("runs/lines/cnp-0/results.jsonl").read_text())
    assert (record["steps"], record["slope"]) == (3, 2.0)


@pytest.mark.parametrize("task", TASKS.values())
def test_settings_by_system_are_of_systems_and_settings_that_there_are(task: type[Task]) -> None:
    for system, settings in task.of_system.items():
        assert system in task.systems
        assert task.for_system(system) == task().changed(settings) != task()


def test_data_that_is_missing_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command("train", "cmanp", "--task", "celeba") == 2
    assert f"folder: got '', which is {tmp_path}, expected " in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_a_missing_package_is_said(
    toy: type[Task], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    assert run_command("train", "cnp", "--task", "lines", "--folder", str(tmp_path)) == 2
    assert 'pip install "cmab-kernels[models]"' in capsys.readouterr().err


@pytest.mark.parametrize("package", ["huggingface_hub", "safetensors", "tqdm"])
def test_a_package_without_which_nothing_is_imported_is_one_line(package: str) -> None:
    program = f"""
import importlib.util, runpy
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *package: None if name == "{package}" else find(name, *package)
runpy._run_module_as_main("cmab_models")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f'cmab_models: it needs {package}; pip install "cmab-kernels[models]"' in done.stderr


@pytest.mark.parametrize(
    ("system", "task", "name", "value", "message"),
    [
        (
            "nystromformer",
            "patches",
            "num_classes",
            1,
            "num_classes: got 1, expected 16, a size of the data of patches",
        ),
        ("continual-transformer", "patches", "sequence_len", 3, "sequence_len: got 3, expected 64"),
        ("intention", "few-shot", "dim_out", 3, "dim_out: got 3, expected 4"),
        ("mlp", "sine", "num_points", 3, "num_points: got 3, expected 10"),
        ("thp", "hawkes", "num_marks", 2, "num_marks: got 2, expected 3"),
        (
            "cmanp-and",
            "gp-rbf",
            "embedding_depth",
            1,
            "embedding_depth: got 1, expected an int >= 2, the linear layers of a perceptron",
        ),
        ("tnp-nd", "gp-rbf", "projection_depth", 1, "projection_depth: got 1, expected an int >= 2"),
    ],
)
def test_options_of_a_model_that_no_data_fits(system: str, task: str, name: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        TASKS[task]().model(system, **{name: value})


@pytest.mark.parametrize(
    ("system", "task", "settings", "message"),
    [
        ("cnp", "gp-rbf", {"most_points": 6}, "most_points: got 6, expected at least 7"),
        ("cnp", "digits", {"size": 2}, "most_points: got 200, expected at most 5, as squares have 4 pixels"),
        (
            "nystromformer",
            "patches",
            {"side": 100},
            "side: got 100, expected a smaller one, as no photograph has bands of 8 patches so large",
        ),
        ("few-shot", "few-shot", {"ways": 100}, "ways: got 100, expected at most 4"),
        (
            "inctnp",
            "wheel",
            {"memory": 5},
            "memory: got 5, expected 0, which remembers all, as an inctnp cannot forget",
        ),
        ("thp", "hawkes", {"end": 1e-9}, "end: got 1e-09, expected a time after the first event"),
    ],
)
def test_settings_that_no_data_fits(system: str, task: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made = TASKS[task]().changed(settings)
        made.model(system)
        made.batch(seeded(0))

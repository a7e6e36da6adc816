"""The commands of `python -m cmab_models`."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from textwrap import shorten
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

from cmab_kernels.runtime.checks import mismatch

from .presets import PRESETS
from .presets import settings as preset_settings
from .pretrained import Pretrained
from .systems import SYSTEMS
from .tasks import TASKS, seeded
from .training import Diverged, Interrupted, Run, append, provenance, train
from .training.checkpoint import check_same, load
from .training.loop import HOW, PRECISIONS, SAVE_EVERY

EXAMPLES = """\
examples:
  python -m cmab_models train cmanp --task gp-rbf                     train, evaluate, keep it in runs/gp-rbf/cmanp-0
  python -m cmab_models train cmanp --task gp-rbf --resume            continue after Ctrl-C
  python -m cmab_models train lbanp --task gp-rbf --set steps=3000 --set model.num_latents=8 --seed 1
  python -m cmab_models train cmanp --task gp-rbf --preset paper --device cuda --precision bf16-mixed
  python -m cmab_models evaluate cmanp --task gp-rbf                  scores of the saved model and of references
  python -m cmab_models stream cmanp --task wheel                     what the model knows after each new point
  python -m cmab_models plot cmanp --task gp-rbf --output bands.png   draw it

systems and the tasks that they can learn:
"""


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    asked = parser.parse_args(arguments)
    try:
        run = _run(asked)
        COMMANDS[asked.command](run, asked)
    except ModuleNotFoundError as error:
        parser.exit(2, f'{parser.prog} {asked.command}: {error}: pip install "cmab-kernels[models]"\n')
    except (ValueError, OSError, ImportError, NotImplementedError, Diverged) as error:
        parser.exit(2, f"{parser.prog} {asked.command}: {error}\n")
    except Interrupted as stop:
        parser.exit(130, f"\n{parser.prog} {asked.command}: {stop}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"\n{parser.prog} {asked.command}: interrupted\n")


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, SYSTEMS))
    table = "\n".join(
        f"  {name:{width}} {', '.join(task for task in sorted(TASKS) if name in TASKS[task].systems)}"
        for name in SYSTEMS
    )
    parser = argparse.ArgumentParser(
        prog="python -m cmab_models",
        description="Train the papers' systems and their baselines, evaluate them, stream data through them, and draw "
        "what they do.",
        epilog=EXAMPLES + table,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "train": "train a system on a task, evaluate it, and keep it",
        "evaluate": "print the scores of the saved model, and scores that need no model",
        "stream": "print what the model knows after each new point, event or token of a held-out stream",
        "plot": "draw the task's picture with the saved model",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text)
        _add_run(command)
        if name == "train":
            _add_training(command)
        if name == "plot":
            command.add_argument(
                "--output", type=Path, help="the picture to write: .png, .pdf or .svg (default: FOLDER/TASK.png)"
            )
    return parser


def _add_run(command: argparse.ArgumentParser) -> None:
    """Add the arguments that all commands have. They identify the run."""
    command.add_argument("system", choices=SYSTEMS, metavar="SYSTEM", help=f"one of {', '.join(SYSTEMS)}")
    command.add_argument(
        "--task", required=True, choices=sorted(TASKS), metavar="TASK", help=f"one of {', '.join(sorted(TASKS))}"
    )
    command.add_argument(
        "--config", type=Path, metavar="FILE", help='a JSON file with the settings of --set: {"steps": 100}'
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the task (steps, learning_rate, ...; a wrong one lists all), or model.KEY of the model; "
        "may be repeated, "
        "and overrides --config; an unset setting keeps its value from the training, if there was one",
    )
    command.add_argument(
        "--seed", type=_seed, default=0, help="seed of all random numbers; results also depend on the number of threads"
    )
    command.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1 (default: cpu)")
    command.add_argument("--folder", type=_folder, help="where the run is kept (default: runs/TASK/SYSTEM-SEED)")


def _add_training(command: argparse.ArgumentParser) -> None:
    """Add the arguments of a training. The other commands take them from the training of the saved model."""
    command.add_argument("--resume", action="store_true", help="continue from the folder's checkpoint")
    command.add_argument(
        "--preset",
        metavar="PRESET",
        help=f"settings from a file of the task, with their sources: one of {', '.join(PRESETS)}; --config and --set "
        "override them",
    )
    command.add_argument(
        "--precision", metavar="TYPE", help=f"one of {', '.join(PRECISIONS)}, as in Lightning (default: 32-true)"
    )
    command.add_argument(
        "--devices",
        type=positive,
        metavar="N",
        help="processes that share the training; each has its own device (default: 1)",
    )
    command.add_argument(
        "--accumulate", type=positive, metavar="N", help="batches of a process in each step (default: 1)"
    )
    command.add_argument(
        "--patience",
        type=positive,
        metavar="N",
        help="stop after N checks without a lower validation loss, and keep the best weights; a check is made every "
        "`check_every` steps (default: no checks)",
    )
    command.add_argument(
        "--save-every",
        type=_minutes,
        default=SAVE_EVERY,
        metavar="MINUTES",
        help=f"how often the checkpoint is written (default: {SAVE_EVERY:g})",
    )


def _run(asked: argparse.Namespace) -> Run:
    """Return the requested run; a `ValueError` names a setting that does not exist.

    If a setting is not given, a training uses the task's value for the system, and the other commands use the value of
    the training of the saved model.
    """
    given = _settings(asked.config, asked.set)
    if preset := getattr(asked, "preset", None):
        given = preset_settings(preset, asked.task, asked.system) | given
    if (patience := getattr(asked, "patience", None)) is not None:
        given["patience"] = patience
    how = {name: value for name in HOW if (value := getattr(asked, name, None)) is not None}
    run = _made(asked, given, how)
    if asked.command == "train" and not asked.resume:
        return run
    saved = _checked(run, "system", "task", "seed")
    if not saved:
        return run
    settings = {name: value for name, value in saved.items() if name not in ("system", "task", "seed", "code")}
    how = {name: settings.pop(name) for name in HOW if name in settings} | how
    sizes = _made(asked, settings, how).task.sizes(asked.system)
    run = _made(asked, settings | given, how)
    for name, value in run.task.sizes(asked.system).items():
        if value != sizes[name]:
            raise ValueError(mismatch(name, value, f"{sizes[name]}, with which the saved model was made"))
    # A model's defaults may depend on data. Only the settings of the training name the folder of that data.
    _checked(run, *(name for name in run.described() if name.startswith("model.")), defaults=run.defaults())
    return run


def _made(asked: argparse.Namespace, settings: Mapping[str, Any], how: Mapping[str, Any]) -> Run:
    model = {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
    for name, value in model.items():
        _check_json(f"model.{name}", value)
    of_task = {key: value for key, value in settings.items() if not key.startswith("model.")}
    task = TASKS[asked.task].for_system(asked.system).changed(of_task)
    if asked.system not in task.systems:
        raise ValueError(mismatch("system", asked.system, f"one of {', '.join(task.systems)} for {asked.task}"))
    folder = asked.folder or Path("runs") / asked.task / f"{asked.system}-{asked.seed}"
    return Run(asked.system, task, folder, asked.seed, _device(asked.device), model, **how)


def _checked(run: Run, *names: str, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings with which the saved model was trained; empty without a checkpoint. Raise `BadCheckpoint` if
    a setting in `names` differs from the run's."""
    if not run.checkpoint.exists():
        return {}
    checkpoint, described = load(run.checkpoint), run.described()
    check_same(run.checkpoint, checkpoint, {name: described[name] for name in names}, defaults or {})
    return checkpoint.run


def _settings(config: Path | None, given: Iterable[str]) -> dict[str, Any]:
    """Return the settings of a file, overridden by those given as KEY=VALUE."""
    settings: dict[str, Any] = {}
    if config is not None:
        try:
            settings = json.loads(config.read_text())
        except ValueError as error:
            raise ValueError(
                mismatch("--config", f"{config}, which cannot be read ({error})", "a file with a JSON object")
            ) from error
        if not isinstance(settings, dict):
            raise ValueError(mismatch("--config", f"{config} without a JSON object", "a file with a JSON object"))
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(mismatch("--set", text, "KEY=VALUE"))
        settings[key] = _value(value)
    return settings


def _check_json(name: str, value: Any) -> None:
    """Raise an error for a NaN or an infinity anywhere in a value, because records are JSON. If no model is
    constructed, no other check raises an error for them."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ValueError(mismatch(name, repr(value), "finite numbers")) from error


def _seed(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 <= (seed := int(text)) < 1 << 63:
            return seed
    raise argparse.ArgumentTypeError(mismatch("seed", repr(text), "an int from 0 to 2**63 - 1"))


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("got '', expected the name of a folder")
    return Path(text)


def positive(text: str) -> int:
    """Return the int >= 1 that an argument of a command is."""
    with contextlib.suppress(ValueError):
        if (number := int(text)) >= 1:
            return number
    raise argparse.ArgumentTypeError(f"got {text!r}, expected an int >= 1")


def _minutes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (minutes := float(text)) >= 0:
            return minutes
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a number >= 0")


def _device(text: str) -> str:
    kind, _, number = text.partition(":")
    if text == "cpu:0":
        return "cpu"
    if kind not in ("cpu", "cuda") or not (number or "0").isdecimal() or text.startswith("cpu:"):
        raise ValueError(mismatch("--device", text, "cpu, cuda, or such as cuda:1"))
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ValueError(
            mismatch("--device", text, f"cpu, or one of the {torch.cuda.device_count()} GPUs that torch finds")
        )
    return text


def _value(text: str) -> Any:
    """Return the number, truth value or list that the text represents, or else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _train(run: Run, asked: argparse.Namespace) -> None:
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    from .training.callbacks import Bar

    if run.devices == 1:
        # Beside others, a task of SLURM has a rank, and Lightning would log nothing.
        rank_zero_only.rank = 0  # type: ignore[attr-defined]  # set as by Lightning itself
    resume = asked.resume or (_back_from_queue() and run.checkpoint.exists())
    if run.checkpoint.exists() and not resume:
        raise ValueError(
            mismatch("--folder", f"{run.folder}, which has a checkpoint", "one without; add --resume to continue it")
        )
    run.task.loss(run.model(), run.task.batch(seeded(run.seed)))  # if this raises an error, no folder is made
    tensorboard, table = (
        TensorBoardLogger(run.folder, "", "tensorboard"),
        CSVLogger(run.folder, "csv", flush_logs_every_n_steps=1),
    )
    with _made_folder(run.folder):
        try:
            model, seconds = train(
                run, resume=resume, callbacks=[Bar()], loggers=(tensorboard, table), save_every=asked.save_every
            )
        except Diverged as error:
            raise Diverged(f"{error}; the losses before it are in {tensorboard.log_dir}") from error
        if not _first():
            return
        try:
            cast("Pretrained", model).save_pretrained(run.folder / "model")
        except SafetensorError as error:
            raise OSError(f"{run.folder / 'model'} cannot be written: {error}; --resume tries again") from error
        scores = run.task.evaluate(model)
        for logger in (tensorboard, table):
            logger.log_metrics(dict(scores), run.task.steps)
            logger.finalize("success")
    best = f"; best after {seconds['best_step']:,} steps" if "best_step" in seconds else ""
    print(
        f"{run.system} on {run.task.name}: {seconds['cpu_seconds']:.0f} CPU seconds, {seconds['wall_seconds']:.0f} of "
        f"wall time{best}"
    )
    _show(run, scores, {**run.recorded(), **seconds})
    print(f"kept in {run.folder}: model/ (from_pretrained), checkpoint.pt, results.jsonl, tensorboard/, csv/")


def _first() -> bool:
    """Return whether this is the first process of those that share a training: it evaluates and keeps the model."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _back_from_queue() -> bool:
    """Return whether SLURM runs this command again: it cannot add --resume."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


@contextlib.contextmanager
def _made_folder(folder: Path) -> Iterator[None]:
    """Make a folder. Raise `OSError` if no file can be written there, before time is spent on a training. If the folder
    was made here and stays empty, it is removed, and so are the new folders above it."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        try:
            if made:
                folder.mkdir(parents=True)
            TemporaryFile(dir=folder).close()
        except OSError as error:
            raise OSError(f"{folder} cannot be written: {error.strerror}") from error
        yield
    finally:
        with contextlib.suppress(OSError):  # if the folder was not empty
            for each in made:
                each.rmdir()


def _evaluate(run: Run, asked: argparse.Namespace) -> None:
    trained = _checked(run)  # `_run` has compared it with the run
    changed = {name: value for name, value in run.described().items() if name not in trained or trained[name] != value}
    _show(run, run.task.evaluate(kept(run)), {**trained, "evaluated_with": changed})


def _show(run: Run, scores: Mapping[str, float], told: Mapping[str, Any]) -> None:
    """Print the scores and the scores that need no model, and record the scores together with `told`."""
    rows = [(run.system, name, value) for name, value in scores.items()]
    rows += [("without a model", name, value) for name, value in run.task.references().items()]
    for who, name, value in rows:
        print(f"  {who:16} {name:32} {value:10.4f}")
    try:
        append(run.folder / "results.jsonl", {**told, "scores": dict(scores), **provenance()})
    except OSError as error:
        raise OSError(f"{run.folder} cannot be written, so these scores are not recorded: {error.strerror}") from error


def _stream(run: Run, asked: argparse.Namespace) -> None:
    model = kept(run)
    with torch.no_grad():
        _print_rows(run.task.stream(model))


def _print_rows(rows: Iterable[Mapping[str, float]]) -> None:
    """Print the first rows, then fewer and fewer rows (1 2 3 ... 10 20 30 ... 100 200), and the last row."""
    count, row = 0, None
    for count, row in enumerate(rows, 1):
        if count == 1:
            print(f"{'':>8} " + " ".join(f"{name:>14}" for name in row))
        step = 10 ** (len(str(count)) - 1)
        if count % step == 0:
            _print_row(count, row)
    if row is not None and count % 10 ** (len(str(count)) - 1):
        _print_row(count, row)


def _print_row(count: int, row: Mapping[str, float]) -> None:
    print(f"{count:>8} " + " ".join(f"{value:>14.5g}" for value in row.values()), flush=True)


def _plot(run: Run, asked: argparse.Namespace) -> None:
    from .pictures import draw

    output = asked.output or run.folder / f"{run.task.name}.png"
    draw(run.task, {run.system: kept(run)}, output)
    print(f"wrote {output}")


def kept(run: Run) -> nn.Module:
    """Return the trained model of a run."""
    folder = run.folder / "model"
    if not (folder / "model.safetensors").exists():
        raise FileNotFoundError(
            f"{folder}: it holds no model; train one first, with the same --task, --seed and --folder"
        )
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # huggingface_hub prints that it reads from a folder
            model = SYSTEMS[run.system].from_pretrained(folder)
    except (RuntimeError, TypeError, SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(
            mismatch(
                str(folder),
                f"files that cannot be read ({shorten(str(error), 300)})",
                f"a {run.system} that a training wrote",
            )
        ) from error
    if run.checkpoint.exists() and not load(run.checkpoint).is_of(model):
        raise ValueError(
            mismatch(
                str(folder), f"a model that {run.checkpoint} did not end with", "its own, which train --resume writes"
            )
        )
    return model.to(run.device).eval()


COMMANDS = {"train": _train, "evaluate": _evaluate, "stream": _stream, "plot": _plot}

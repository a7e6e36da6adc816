"""The page that `make reproduce` writes, and the parts of it that programs read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..tasks import TASKS, Task
from ..training import Run, provenance
from .claims import CLAIMS
from .experiments import EXPERIMENTS
from .judging import Claim, Verdict, judged
from .results import Results, table

COMMAND = "python -m cmab_models train {system} --task {task} --preset paper"
STANDS_FOR = {
    "digits": "emnist",
    "patches": "gtzan",
    "few-shot": "mini-imagenet",
    "outlier": "cifar-outlier",
    "hawkes": "mooc",
    "departures": "reddit",
}
"""Task of the rehearsal -> the task with the paper's data."""
WORDS = {True: "held", False: "refuted", None: "not judged"}

RULE = (
    "A claim held if the measured difference satisfies it by more than two standard errors. It was refuted if the "
    "difference violates it by more than two standard errors. Both need three seeds or more; otherwise the claim is "
    "not judged. It is also not judged if a baseline that should fail passes or nearly passes. A system counts as "
    "near another if it is not worse by more than in the paper's own figures."
)


def write(
    path: Path,
    results: Results,
    pictures: Sequence[tuple[str, Path]],
    failed: Sequence[Run],
    share: float,
    preset: str | None = None,
) -> None:
    """Write tables, verdicts and pictures as Markdown. Next to it, write as JSON the digests of the code behind the
    results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    verdicts = {claim: judged(claim, results) for claim in CLAIMS}
    parts = [
        "# Results",
        _summed_up(verdicts, preset),
        _claims(verdicts),
        *_how(results, share),
        *_tables(results),
        *_pictures(pictures, path),
        *_failures(failed),
    ]
    path.write_text("\n\n".join(parts) + "\n")
    path.with_suffix(".json").write_text(json.dumps({"code": codes(results)}, indent=1) + "\n")


def codes(results: Results) -> dict[str, dict[str, str]]:
    """Return the digest of the code of the runs, by experiment and system; several digests are joined with commas."""
    return {
        name: {
            system: ", ".join(sorted({str(record.get("code")) for record in records}))
            for system, records in systems.items()
        }
        for name, systems in results.records.items()
    }


def _summed_up(verdicts: Mapping[Claim, Verdict], preset: str | None) -> str:
    """Say in three sentences what the page is, how many claims were judged, and how to train at the papers' size."""
    found = [verdict.held for claim, verdict in verdicts.items() if claim.is_published]
    held, refuted, unknown = (found.count(each) for each in (True, False, None))
    about = (
        "This page is a rehearsal: `make reproduce` trains small models for a few steps, in 60 to 80 minutes on two "
        "cores; digits stand for EMNIST and CIFAR-100, letters for miniImageNet, photographs for GTZAN, and simulated "
        "events and departures of aircraft for Mooc and Reddit."
        if preset is None
        else f"Sizes, steps and seeds are those of the preset `{preset}` of each task."
    )
    return (
        f"{about} Of {len(found)} published claims, {held} held at this size, {refuted} did not, and {unknown} "
        f"could not be judged. `{COMMAND.format(system='SYSTEM', task='TASK')}` trains with a paper's settings, as far "
        "as they are published; for claims that were not judged, the last column has the commands, on the paper's data."
    )


def _how(results: Results, share: float) -> list[str]:
    where = provenance()
    versions = ", ".join(f"{name} {where[name]}" for name in ("cmab_kernels", "torch", "python"))
    told = [
        "## How these results were made",
        RULE,
        "Every system and its closest baseline are trained on the same data, two at a time, with one thread each. "
        "A score with ± is a mean over seeds and the standard deviation between them. Seconds are those of the "
        "training of one seed.",
        "If code has changed since a result was trained, `python -m cmab_models.reproduce --confirm` checks one "
        "seed: the losses of its first 10 steps and its scores after them must equal the old ones to 0.002. "
        "RESULTS.json has the digests of the old and the new code.",
        f"{versions}, {where['machine']}, {where['time']}. {_spent(results.every())}",
        *_warnings(results.every()),
    ]
    if share != 1.0:
        told.append(
            f"**Only {100 * share:g}% of all steps were taken: these numbers only show that the command works.**"
        )
    return told


def _spent(records: Sequence[Mapping[str, Any]]) -> str:
    """Say how long the training of all runs took."""
    cpu, wall = (sum(record[kind] for record in records) / 60 for kind in ("cpu_seconds", "wall_seconds"))
    took = (
        f"The training of {len(records)} runs took {cpu:.0f} minutes of CPU time, and {wall:.0f} minutes of "
        "wall time, added over the runs"
    )
    return f"{took}. Evaluation and pictures are not included."


def _warnings(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say at which commit the runs were made. The text is bold if there are several commits, or changes that were not
    committed."""
    commits = list(dict.fromkeys(str(record["commit"])[:7] for record in records))
    told = f"Commit{'s' if len(commits) > 1 else ''}: {', '.join(f'`{commit}`' for commit in commits)}"
    wrong = ["runs of several commits are mixed"] if len(commits) > 1 else []
    wrong += ["there were uncommitted changes"] if any(record.get("dirty", True) for record in records) else []
    return [f"**{told}: {', and '.join(wrong)}.**" if wrong else f"{told}, without uncommitted changes."]


def _claims(verdicts: Mapping[Claim, Verdict]) -> str:
    lines = ["| claim | source | published | here | because | at the paper's size |", "|---|---|---|---|---|---|"]
    for claim, verdict in verdicts.items():
        commands = "" if verdict.held is not None else "<br>".join(f"`{each}`" for each in at_full_size(claim))
        lines.append(
            f"| {claim.text} | {claim.source} | {claim.published} | **{WORDS[verdict.held]}** | {verdict.reason} | "
            f"{commands} |"
        )
    return "\n".join(lines)


def at_full_size(claim: Claim) -> list[str]:
    """Return the commands that train what a claim compares, at the paper's size and on its data.

    A variant of an experiment ("patches, fixed landmarks") has the settings in which it differs from the experiment.
    """
    by_name = {each.name: each for each in EXPERIMENTS}
    commands = []
    for experiment, system, score in claim.sides:
        task, settings = by_name[experiment].task, by_name[experiment].settings
        full = STANDS_FOR.get(task, task)
        if system not in TASKS[full].systems:
            continue
        usual = by_name[experiment.partition(", ")[0]].settings
        asked = {"autoregressive"} if score.startswith("log_likelihood_") else set()  # such scores take longer
        chosen = {name: value for name, value in settings.items() if name in asked or usual.get(name) != value}
        told = {name: str(value).lower() if value is True else value for name, value in chosen.items()}
        options = [f" --set {name}={value}" for name, value in told.items()]
        options += [" --set folder=FOLDER"] if full != task else []
        commands.append(COMMAND.format(system=system, task=full) + "".join(options))
    return list(dict.fromkeys(commands))


def _tables(results: Results) -> list[str]:
    return [
        "\n\n".join(
            [
                f"## {name}",
                f"{_summary(results.tasks[name])}{_settings(results, name)}",
                table(results, name),
                *_differing(results, name),
            ]
        )
        for name in results.records
    ]


def _summary(task: Task) -> str:
    """Return the first paragraph of the task's docstring."""
    return " ".join((task.__doc__ or "").split("\n\n")[0].split())


def _settings(results: Results, experiment: str) -> str:
    """Say which settings of the task and of the model differ from the defaults in all runs. The steps are left out,
    because the table has them."""
    records = [record for each in results.records[experiment].values() for record in each]
    own = {each.name: each.default for each in fields(results.tasks[experiment]) if each.name != "steps"}
    own |= {name: None for name in records[0] if name.startswith("model.")}
    changed = [
        name for name, value in own.items() if all(record.get(name) == records[0][name] != value for record in records)
    ]
    return f" Here `{'`, `'.join(f'{name}={records[0][name]}' for name in changed)}`." if changed else ""


def _differing(results: Results, experiment: str) -> list[str]:
    """Say which settings of the training, and which arguments of the models, differ between systems."""
    task, systems = results.tasks[experiment], results.records[experiment]
    known = {each.name for each in fields(task)}
    of = {
        system: {f"model.{name}": value for name, value in task.sizes(system).items()}
        | {name: value for name, value in records[0].items() if name in known or name.startswith("model.")}
        for system, records in systems.items()
    }
    told = []
    for name in dict.fromkeys(name for settings in of.values() for name in settings):
        values = {system: settings[name] for system, settings in of.items() if name in settings}
        if len(values) < len(of) or len(set(map(str, values.values()))) > 1:
            told.append(
                f"`{name.removeprefix('model.')}` {', '.join(f'{system} {value}' for system, value in values.items())}"
            )
    return [f"Settings that differ: {'; '.join(told)}."] if told else []


def _pictures(pictures: Sequence[tuple[str, Path]], page: Path) -> list[str]:
    shown = [f"**{title}**\n\n![{title}]({picture.relative_to(page.parent).as_posix()})" for title, picture in pictures]
    return ["## Pictures", *shown]


def _failures(failed: Sequence[Run]) -> list[str]:
    if not failed:
        return []
    return ["## Runs that failed", "\n".join(f"- {run.system} on {run.task.name}, seed {run.seed}" for run in failed)]

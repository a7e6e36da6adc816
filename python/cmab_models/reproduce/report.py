"""The page that `make reproduce` writes, and the parts of it that programs read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..tasks import Task
from ..training import Run, provenance
from .claims import CLAIMS
from .judging import Claim, Verdict, judged
from .results import Results, table

WORDS = {True: "held", False: "refuted", None: "not judged"}

RULE = (
    "A claim held, or was refuted, if the difference is away from what the claim asks by more than two of its "
    "standard errors, over three "
    "seeds or more; else it is not judged. Nor is it if a baseline that should fail passes, too, or nearly. How much "
    "worse a system may be "
    "that is said to be near another is what the paper's own figures differ by."
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
        *_head(results, verdicts, share, preset),
        _claims(verdicts),
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


def _head(results: Results, verdicts: Mapping[Claim, Verdict], share: float, preset: str | None) -> list[str]:
    where = provenance()
    versions = ", ".join(f"{name} {where[name]}" for name in ("cmab_kernels", "torch", "python"))
    told = [
        "# Results",
        _summed_up(verdicts),
        "Written by `make reproduce`: every system and its closest baseline on the same data, one thread each, two "
        "side by side. Small "
        "models and few steps, for one to two hours of two cores; the papers' sizes are the models' defaults. A score "
        "with ± is a "
        "mean over seeds and the standard deviation between them; seconds are those of the training of one seed.",
        "Code that has changed since a result was trained is confirmed by `python -m cmab_models.reproduce "
        "--confirm`: the losses of the "
        "first 10 steps and the scores after them, of one seed, must be as before to 0.001. RESULTS.json has the "
        "digests of both.",
        f"{versions}, {where['machine']}, {where['time']}. {_spent(results.every())}",
        *_warnings(results.every()),
    ]
    if preset is not None:
        told.append(f"**Here sizes, steps and seeds are those of the preset `{preset}` of each task.**")
    if share != 1.0:
        told.append(
            f"**Only {100 * share:g}% of all steps were taken: these numbers show that the command works, nothing "
            "else.**"
        )
    return told


def _summed_up(verdicts: Mapping[Claim, Verdict]) -> str:
    """Say in three sentences which claims were confirmed, which were not, and which could not be judged."""
    held, refuted, unknown = (
        [claim for claim, verdict in verdicts.items() if verdict.held is held] for held in (True, False, None)
    )
    missing = [verdicts[claim].missing for claim in unknown]
    needs = "; ".join(f"{missing.count(need)} for want of {need}" for need in dict.fromkeys(missing))
    return "\n".join(
        [
            f"- Of {len(verdicts)} published claims {_counted(held)} could be confirmed at this scale{_listed(held)}.",
            f"- {_counted(refuted).capitalize()} {'was' if len(refuted) == 1 else 'were'} refuted{_listed(refuted)}.",
            f"- {_counted(unknown).capitalize()} could not be judged{f': {needs}' if needs else ''}.",
        ]
    )


def _counted(claims: Sequence[Claim]) -> str:
    return str(len(claims) or "none")


def _listed(claims: Iterable[Claim]) -> str:
    texts = [claim.text.removesuffix(".") for claim in claims]
    return f": {'; '.join(texts)}" if texts else ""


def _spent(records: Sequence[Mapping[str, Any]]) -> str:
    """Say how long the training of all runs took."""
    cpu, wall = (sum(record[kind] for record in records) / 60 for kind in ("cpu_seconds", "wall_seconds"))
    took = (
        f"The training of {len(records)} runs took {cpu:.0f} minutes of CPU time, {wall:.0f} on the clock if one "
        "after the other"
    )
    return f"{took}; their evaluation and the pictures are not in it."


def _warnings(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say at which commit the runs were made. The text is bold if there are several commits, or changes that were not
    committed."""
    commits = list(dict.fromkeys(str(record["commit"])[:7] for record in records))
    told = f"Commit{'s' if len(commits) > 1 else ''}: {', '.join(f'`{commit}`' for commit in commits)}"
    wrong = ["runs of several commits are mixed"] if len(commits) > 1 else []
    wrong += (
        ["there were changes that are in no commit"] if any(record.get("dirty", True) for record in records) else []
    )
    return [f"**{told}: {', and '.join(wrong)}.**" if wrong else f"{told}, with nothing changed."]


def _claims(verdicts: Mapping[Claim, Verdict]) -> str:
    lines = [
        "## Published claims",
        "",
        RULE,
        "",
        "| claim | source | published | here | because |",
        "|---|---|---|---|---|",
    ]
    for claim, verdict in verdicts.items():
        lines.append(
            f"| {claim.text} | {claim.source} | {claim.published} | **{WORDS[verdict.held]}** | {verdict.reason} |"
        )
    return "\n".join(lines)


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

"""`make reproduce`: runs in processes of their own, which are not run twice, their tables, and what becomes of claims."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cmab_models.reproduce import judging, report
from cmab_models.reproduce.claims import CLAIMS
from cmab_models.reproduce.experiments import EXPERIMENTS
from cmab_models.reproduce.jobs import Experiment
from cmab_models.reproduce.results import Results, Spread
from cmab_models.reproduce.runner import finished, run_all
from cmab_models.tasks import TASKS
from cmab_models.training import Run, append

WEIGHTS = "model/model.safetensors"


def experiment(**changes: Any) -> Experiment:
    return Experiment("functions", "gp-rbf", ("cnp",), (0,), {"steps": 2, "evaluation_batches": 2} | changes)


def test_a_run_is_finished_once(tmp_path: Path) -> None:
    ended: list[int] = []
    runs = [*experiment().runs(tmp_path), *experiment(learning_rate=1e30).runs(tmp_path / "diverges")]
    failed = run_all(runs, 2, lambda run, code: ended.append(code))
    assert failed == runs[1:]
    assert sorted(ended) == [0, 2]
    assert "cnp" in (runs[0].folder / "log.txt").read_text()
    found = finished(runs[0])
    assert found is not None
    assert found["threads"] == 1
    assert run_all(runs[:1], 2, lambda run, code: ended.append(code)) == []
    assert len(ended) == 2
    (changed,) = experiment(steps=3).runs(tmp_path)
    assert finished(changed) is None
    assert run_all([changed], 1, lambda run, code: ended.append(code)) == []  # the checkpoint of other settings is not gone on from
    assert finished(changed) is not None


@pytest.mark.parametrize("cut", [b'{"system": "cnp", "ta', b"\0" * 40])
def test_a_record_that_was_cut_off_counts_as_none(cut: bytes, tmp_path: Path) -> None:
    """As a full disk or a power loss leaves it."""
    (run,) = experiment().runs(tmp_path)
    assert finished(run) is None
    file = run.folder / "results.jsonl"
    file.parent.mkdir(parents=True)
    file.write_bytes(cut)
    assert finished(run) is None
    append(file, run.described() | {"cpu_seconds": 1.0})
    append(file, run.described() | {"cpu_seconds": 2.0})
    found = finished(run)
    assert found is not None
    assert found["cpu_seconds"] == 2.0
    assert file.read_bytes().startswith(cut + b"\n{")


def record(run: Run, scores: dict[str, float]) -> None:
    """Write the record of a run that is finished with these scores."""
    run.folder.mkdir(parents=True)
    line = json.dumps({**run.described(), "scores": scores, "cpu_seconds": 3.0, "wall_seconds": 4.0, "commit": f"{run.seed}23456789"})
    (run.folder / "results.jsonl").write_text(line + "\n")


def recorded(folder: Path, scores: dict[str, list[float]]) -> Results:
    """Results in which each system has these scores, seed by seed."""
    runs: list[Run] = []
    for system, values in scores.items():
        each = Experiment("functions", "gp-rbf", (system,), tuple(range(len(values))))
        for run, value in zip(each.runs(folder), values, strict=True):
            record(run, {"log_likelihood": value})
            runs.append(run)
    return Results({"functions": runs})


def test_claims(tmp_path: Path) -> None:
    results = recorded(tmp_path, {"cmanp": [1.0, 1.2], "lbanp": [0.0, 0.2], "cnp": [0.9, 1.1]})

    def verdict(judge: Any) -> bool | None:
        return judging.judged(judging.Claim("", "", judge), results).held

    task, score = "functions", "log_likelihood"
    assert verdict(lambda r: judging.above(r, task, score, "cmanp", "lbanp")) is True
    assert verdict(lambda r: judging.above(r, task, score, "lbanp", "cmanp")) is False
    assert verdict(lambda r: judging.above(r, task, score, "cmanp", "cnp")) is None  # the seeds scatter more
    assert verdict(lambda r: judging.within(r, task, score, "lbanp", "cmanp", 0.5)) is False
    assert verdict(lambda r: judging.within(r, task, score, "lbanp", "cmanp", 1.1)) is True
    assert judging.above(results, task, score, "cmanp", "cnp").reason == "cmanp 1.100 ± 0.141, cnp 1.000 ± 0.141: the seeds scatter as much"
    assert verdict(lambda r: judging.above(r, task, score, "cmanp", "tnp-d")) is None


def test_small_errors_are_not_shown_as_none() -> None:
    assert str(Spread(6.8e-5, 1.2e-5, 3)) == "6.8e-05 ± 1.2e-05"
    assert str(Spread(-0.5, 0.0, 1)) == "-0.500"


def test_few_shots_are_not_judged_where_pixels_do_better(tmp_path: Path) -> None:
    (claim,) = (claim for claim in CLAIMS if "few examples" in claim.text)

    def verdict(**accuracies: float) -> judging.Verdict:
        runs: dict[str, list[Run]] = {}
        for estimator, accuracy in accuracies.items():
            each = Experiment(f"few shots, {estimator}", "few-shot", ("few-shot",), (0,), {"estimator": estimator})
            runs[each.name] = list(each.runs(tmp_path / str(len(list(tmp_path.iterdir())))))
            record(runs[each.name][0], {"accuracy": accuracy})
        return judging.judged(claim, Results(runs))

    assert verdict(lssvm=0.98, attention=0.97).held is True
    assert verdict(lssvm=0.97, attention=0.98).held is False
    unlearned = verdict(lssvm=0.89, attention=0.88)
    assert unlearned.held is None
    assert "nearest mean of the pixels has 0.92" in unlearned.reason


def test_what_counting_has_is_told_of_departures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TASKS["departures"], "references", lambda task: {"last_mark": -3.0})
    (claim,) = (claim for claim in CLAIMS if "departures" in claim.text)
    runs = list(Experiment("departures", "departures", ("cmhp", "thp"), (0,)).runs(tmp_path))
    for run, mark in zip(runs, (-2.5, -2.45), strict=True):
        record(run, {"mark": mark})
    verdict = judging.judged(claim, Results({"departures": runs}))
    assert verdict.held is True
    assert "counting what follows a mark has -3.000, 0.50 less than cmhp" in verdict.reason


def test_the_page_tells_what_was_changed_of_a_task(tmp_path: Path) -> None:
    """By all runs: what one system has of its own is not said of the others."""
    each = Experiment("few", "few-shot", ("few-shot",), (0, 1), {"steps": 7, "ways": 3, "turn": 30.0})
    other = Experiment("functions", "gp-rbf", ("cnp", "cmanp"), (0,), {}, {"cnp": {"learning_rate": 0.5}})
    runs = {"few": list(each.runs(tmp_path)), "functions": list(other.runs(tmp_path))}
    for run in (run for some in runs.values() for run in some):
        record(run, {"accuracy": 0.5})
    few, functions = report._tables(Results(runs))
    assert few.splitlines()[2] == "Tell classes apart that were never trained on, from a few examples of each. Here `turn=30.0`, `ways=3`."
    assert "Here" not in functions


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = recorded(tmp_path, {"cmanp": [1.0, 1.2], "lbanp": [0.0, 0.2]})
    claim = judging.Claim("It is better.", "a paper", lambda r: judging.above(r, "functions", "log_likelihood", "cmanp", "lbanp"))
    monkeypatch.setattr(report, "CLAIMS", (claim,))
    page, picture = tmp_path / "page.md", tmp_path / "pictures" / "one.png"
    (failed,) = experiment().runs(tmp_path)
    report.write(page, results, [("one", picture)], [failed], share=0.01)
    text = page.read_text()
    assert "| It is better. | a paper | **held** | cmanp 1.100 ± 0.141, lbanp 0.100 ± 0.141 |" in text
    assert "| cmanp | 1.100 ± 0.141 | 2 | 12,000 | 3 | 4 |" in text
    (known,) = (line for line in text.splitlines() if line.startswith("Without a model: "))
    assert re.fullmatch(r"Without a model: exact [\d.]+, exact joint [\d.]+, prior -?[\d.]+\.", known)
    assert "4 runs took 0 minutes of CPU time, 0 on the clock if one after the other; their commits: `0234567`, `1234567`." in text
    assert "**one**\n\n![one](pictures/one.png)" in text
    assert "cnp on gp-rbf, seed 0" in text
    assert "Only 1% of all steps" in text


@pytest.mark.nightly
@pytest.mark.parametrize("each", EXPERIMENTS, ids=lambda each: each.name)
def test_every_experiment_runs(each: Experiment, tmp_path: Path) -> None:
    """All systems take a step, and have the scores that the claims ask for."""
    shortened = replace(each, seeds=(0,), settings=each.settings | {"steps": 1}, of_system={})
    runs = list(shortened.runs(tmp_path))
    assert run_all(runs, 2, lambda run, code: None) == []
    results = Results({each.name: runs})
    for claim in CLAIMS:
        verdict = judging.judged(claim, results)
        assert verdict.held is not None or "was not run" in verdict.reason or "measured" in verdict.reason, verdict.reason


@pytest.mark.nightly
@pytest.mark.parametrize("each", {each.task: each for each in EXPERIMENTS}.values(), ids=lambda each: each.task)
def test_the_same_command_gives_the_same_numbers(each: Experiment, tmp_path: Path) -> None:
    """In another process, to the last bit of every score and weight, for each system of each kind of task."""
    small = {name: value for name, value in {"steps": 2, "evaluation_batches": 2, "plays": 20}.items() if hasattr(TASKS[each.task], name)}
    short = replace(each, seeds=(0,), settings=each.settings | small, of_system={})
    first, again = (list(short.runs(tmp_path / time)) for time in ("first", "again"))
    assert run_all([*first, *again], 2, lambda run, code: None) == []
    for run, other in zip(first, again, strict=True):
        scores, others = finished(run), finished(other)
        assert scores is not None
        assert others is not None
        assert scores["scores"] == others["scores"], run.system
        assert (run.folder / WEIGHTS).read_bytes() == (other.folder / WEIGHTS).read_bytes(), run.system

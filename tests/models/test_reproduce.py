"""`make reproduce`: runs in processes of their own, never run twice, their tables, and the judgement of claims."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cmab_models import cli
from cmab_models.pictures.context import Cost
from cmab_models.reproduce import judging, openings, report, runner
from cmab_models.reproduce.__main__ import PAGE, main
from cmab_models.reproduce.claims import CLAIMS
from cmab_models.reproduce.experiments import EXPERIMENTS
from cmab_models.reproduce.jobs import Experiment
from cmab_models.reproduce.results import Results, Side, Spread, _nearest
from cmab_models.reproduce.runner import finished, run_all
from cmab_models.tasks import TASKS
from cmab_models.training import Run, append, checkpoint, loop

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
    assert run_all([changed], 1, lambda run, code: ended.append(code)) == []  # other settings do not resume it
    assert finished(changed) is not None


def test_the_papers_protocol_of_the_wheel(tmp_path: Path) -> None:
    """Five models of each system play 50 wheels of each radius; an experiment's own settings stay."""
    wheel = next(each for each in EXPERIMENTS if each.name == "wheel")
    runs = list(wheel.runs(tmp_path, "paper", "cuda"))
    assert sorted({run.seed for run in runs}) == [0, 1, 2, 3, 4] and len(runs) == 5 * len(wheel.systems)
    for run in runs:
        assert (run.task.seeds, run.task.plays, run.task.steps) == (50, 2000, 100_000)
        assert run.device == "cuda" and "--device cuda" in " ".join(runner.command(run))
    assert runs[0].model_settings["num_latents"] == 8
    both = next(each for each in EXPERIMENTS if each.name == "functions, residual of the input")
    (run, *more) = both.runs(tmp_path, "paper")
    assert len(more) == 2 and run.model_settings["residual"] == "input" and run.model_settings["dim"] == 64


@pytest.mark.parametrize("cut", [b'{"system": "cnp", "ta', b"\0" * 40])
def test_a_record_that_was_cut_off_counts_as_none(cut: bytes, tmp_path: Path) -> None:
    """The record is cut, as by a full disk or a power loss."""
    (run,) = experiment().runs(tmp_path)
    assert finished(run) is None
    file = run.folder / "results.jsonl"
    file.parent.mkdir(parents=True)
    file.write_bytes(cut)
    assert finished(run) is None
    append(file, run.recorded() | {"cpu_seconds": 1.0})
    append(file, run.recorded() | {"cpu_seconds": 2.0})
    found = finished(run)
    assert found is not None
    assert found["cpu_seconds"] == 2.0
    assert file.read_bytes().startswith(cut + b"\n{")


def record(run: Run, scores: dict[str, float], **changes: Any) -> None:
    """Write the record of a run that is finished with these scores."""
    run.folder.mkdir(parents=True)
    known = {"scores": scores, "cpu_seconds": 3.0, "wall_seconds": 4.0, "commit": "0123456789", "dirty": False}
    (run.folder / "results.jsonl").write_text(json.dumps({**run.recorded(), **known, **changes}) + "\n")


def recorded(
    folder: Path, scores: dict[str, list[float]], task: str = "gp-rbf", score: str = "log_likelihood", **changes: Any
) -> Results:
    """Results in which each system has these scores, seed by seed."""
    runs: list[Run] = []
    settings = {"steps": 12_000, "evaluation_batches": 2} if task == "gp-rbf" else {}
    for system, values in scores.items():
        each = Experiment("functions", task, (system,), tuple(range(len(values))), settings)
        for run, value in zip(each.runs(folder), values, strict=True):
            record(run, {score: value}, **changes)
            runs.append(run)
    return Results({"functions": runs})


def side(system: str, score: str = "log_likelihood") -> Side:
    return Side("functions", system, score)


SCORES = {
    "cmanp": [1.0, 1.2, 1.1],
    "lbanp": [0.0, 0.2, 0.1],
    "tnp-d": [0.9, 1.1, 1.0],
    "tnp-nd": [3.0],
    "cnp": [-0.5, -0.4, -0.45],
}


@pytest.mark.parametrize(
    ("ours", "theirs", "allowed", "held", "why"),
    [
        ("cmanp", "lbanp", 0.0, True, "cmanp 1.100 ± 0.100, lbanp 0.100 ± 0.100"),
        ("lbanp", "cmanp", 0.0, False, "lbanp 0.100 ± 0.100, cmanp 1.100 ± 0.100"),
        (
            "cmanp",
            "tnp-d",
            0.0,
            None,
            "cmanp 1.100 ± 0.100, tnp-d 1.000 ± 0.100: the difference is within the scatter of the seeds",
        ),
        ("tnp-d", "cmanp", 0.3, True, "tnp-d 1.000 ± 0.100, cmanp 1.100 ± 0.100"),
        ("lbanp", "cmanp", 0.8, False, "lbanp 0.100 ± 0.100, cmanp 1.100 ± 0.100"),
        (
            "lbanp",
            "cmanp",
            None,
            None,
            "lbanp 0.100 ± 0.100, cmanp 1.100 ± 0.100: worse, and the paper does not say how much worse is still near",
        ),
        ("cmanp", "lbanp", None, True, "cmanp 1.100 ± 0.100, lbanp 0.100 ± 0.100"),
        ("cmanp", "cnp", 1.0, None, "cmanp 1.100 ± 0.100, cnp -0.450 ± 0.050: prior also passes, or nearly, with -0."),
        # By its seeds.
        (
            "tnp-d",
            "lbanp",
            0.45,
            None,
            "tnp-d 1.000 ± 0.100, lbanp 0.100 ± 0.100: cnp also passes, or nearly, with -0.450",
        ),
        ("tnp-nd", "cmanp", 0.0, None, "tnp-nd 3.000, cmanp 1.100 ± 0.100: fewer than 3 seeds"),
        ("cmanp", "inctnp", 0.0, None, "inctnp was not run in functions"),
    ],
)
def test_a_claim_is_judged_by_the_error_of_the_seeds(
    ours: str, theirs: str, allowed: float | None, held: bool | None, why: str, tmp_path: Path
) -> None:
    """Two standard errors of these differences are .163, and .129 for the difference from CNP."""
    results = recorded(tmp_path, SCORES)
    claim = judging.Claim("", "", lambda r: judging.compared(r, side(ours), side(theirs), allowed))
    verdict = judging.judged(claim, results)
    assert verdict.held is held
    assert verdict.reason.startswith(why)


def test_lower_errors_are_better(tmp_path: Path) -> None:
    """A worse system passes if the allowance is larger than the difference. If a baseline passes too, there is no
    verdict."""
    scores = {"intention": [0.1, 0.11, 0.12], "attention": [0.4, 0.41, 0.42], "mlp": [0.5, 0.51, 0.52]}
    results = recorded(tmp_path, scores, "kabsch", "mse")

    def verdict(ours: str, theirs: str, allowed: float = 0.0) -> bool | None:
        return judging.compared(results, side(ours, "mse"), side(theirs, "mse"), allowed).held

    assert verdict("intention", "attention") is True
    assert verdict("attention", "intention") is False
    assert verdict("attention", "intention", 0.35) is True
    assert verdict("attention", "intention", 0.45) is None  # an MLP passes


def test_equal_seconds_are_asked_for(tmp_path: Path) -> None:
    results = recorded(tmp_path, SCORES)
    told = judging.compared(results, side("cmanp"), side("lbanp"), equal_seconds=True)
    assert (told.held, told.reason.partition("; ")[2]) == (True, "steps 12,000 and 12,000, CPU seconds 3 and 3")
    for each in results.records["functions"]["lbanp"]:
        each["cpu_seconds"] = 4.0
    told = judging.compared(results, side("cmanp"), side("lbanp"), equal_seconds=True)
    assert told.held is None
    assert told.reason.endswith("CPU seconds 3 and 4: not equal")


@pytest.mark.parametrize(
    ("reference", "scores", "found"),
    [
        ("pixel_mean_seen", ("log_likelihood_seen", "log_likelihood_unseen"), ["log_likelihood_seen"]),
        ("uniform_regret_0.9", ("regret_0.9", "simple_0.9", "regret_0.7"), ["regret_0.9"]),
        ("last_mark", ("time", "mark", "accuracy"), ["mark"]),
        ("most_frequent", ("whole", "streamed"), ["whole", "streamed"]),
    ],
)
def test_references_are_of_the_scores_that_their_names_end_in(
    reference: str, scores: tuple[str, ...], found: list[str]
) -> None:
    assert _nearest(reference, scores) == found


def test_what_is_near_is_what_the_paper_says() -> None:
    published = {claim.text: claim.published for claim in CLAIMS}
    assert (
        published["Functions (RBF): CMANP is as near to LBANP as published."] == "1.24 against 1.27: at most 0.03 worse"
    )
    assert (
        published["On wheels of radius 0.99, CMANP's regret is as near to LBANP's as published."]
        == "9.04 against 6.13: at most 2.91 worse"
    )
    assert published["On wheels of radius 0.7, CMANP's regret is below LBANP's."] == "0.93 against 1.11"
    assert (
        published["A sigma-Informer finds outliers as well as a Transformer in equal CPU seconds."]
        == "0.955 against 0.953"
    )


@pytest.mark.parametrize(
    ("lbanp", "cmanp", "held"),
    [((100.0, 2000.0), (5.0, 6.0), True), ((100.0, 2000.0), (5.0, 900.0), False), ((5.0, 6.0), (5.0, 6.0), None)],
)
def test_memory_is_constant_where_less_than_a_number_is_kept_of_a_point(
    lbanp: tuple[float, float], cmanp: tuple[float, float], held: bool | None
) -> None:
    costs = [
        Cost(system, points, 1.0, mebibytes)
        for system, found in (("lbanp", lbanp), ("cmanp", cmanp))
        for points, mebibytes in zip((10_000, 1_000_000), found, strict=True)
    ]
    (claim,) = (claim for claim in CLAIMS if "constant memory" in claim.text)
    assert judging.judged(claim, Results({}, costs)).held is held
    assert judging.judged(claim, Results({}, costs[:1])) == (None, "no large context was measured")


def test_small_errors_are_not_shown_as_none() -> None:
    assert str(Spread(6.8e-5, 1.2e-5, 3)) == "6.8e-05 ± 1.2e-05"
    assert str(Spread(-0.5, 0.0, 1)) == "-0.500"


def test_the_page_tells_what_was_changed_of_a_task_and_what_differs(tmp_path: Path) -> None:
    """Settings of all runs are in one place, and settings of a single system in another."""
    each = Experiment("few", "few-shot", ("few-shot",), (0, 1), {"steps": 7, "ways": 3, "turn": 30.0, "model.dim": 16})
    others = [
        Experiment("functions", "gp-rbf", (system,), (0,), {"learning_rate": rate})
        for system, rate in (("cnp", 0.5), ("cmanp", 0.25))
    ]
    runs = {"few": list(each.runs(tmp_path)), "functions": [run for other in others for run in other.runs(tmp_path)]}
    for run in (run for some in runs.values() for run in some):
        record(run, {"accuracy": 0.5})
    few, functions = report._tables(Results(runs))
    told = (
        "Classify images of classes that were not in the training, from a few examples of each class. "
        "Here `ways=3`, `turn=30.0`, `model.dim=16`."
    )
    assert few.splitlines()[2] == told
    assert "differ" not in few
    assert "Here" not in functions
    differing = functions.splitlines()[-1]
    assert differing.startswith("Settings that differ: ")
    assert "`learning_rate` cnp 0.5, cmanp 0.25" in differing
    assert "`num_latents` cmanp 16" in differing
    assert "clip" not in differing


@pytest.mark.parametrize("command", sorted({each for claim in CLAIMS for each in report.at_full_size(claim)}))
def test_the_commands_of_the_papers_size_are_valid(command: str) -> None:
    asked = cli._parser().parse_args(command.split()[3:])
    assert cli._run(asked).task.name == asked.task


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = recorded(tmp_path, SCORES)
    better = [("cmanp", "lbanp"), ("lbanp", "cmanp"), ("cmanp", "tnp-d"), ("cmanp", "inctnp")]
    claims = [
        judging.Claim(
            f"{ours} is above {theirs}.",
            "a paper",
            lambda r, ours=ours, theirs=theirs: judging.compared(r, side(ours), side(theirs)),
            sides=(side(ours),),
        )
        for ours, theirs in better
    ]
    monkeypatch.setattr(report, "CLAIMS", (claims[0]._replace(published="1.1 against 0.1"), *claims[1:]))
    page, picture = tmp_path / "page.md", tmp_path / "pictures" / "one.png"
    (failed,) = experiment().runs(tmp_path)
    report.write(page, results, [("one", picture)], [failed], share=0.01)
    text = page.read_text()
    lines = text.splitlines()
    assert "Of 4 published claims, 1 held at this size, 1 did not, and 2 could not be judged." in lines[2]
    assert lines[6] == (
        "| cmanp is above lbanp. | a paper | 1.1 against 0.1 | **held** | cmanp 1.100 ± 0.100, lbanp 0.100 ± 0.100 |  |"
    )
    assert "| lbanp is above cmanp. | a paper |  | **refuted** |" in text
    assert lines[9].endswith("| `python -m cmab_models train cmanp --task gp-rbf --preset paper` |")
    assert "| cmanp | 1.100 ± 0.100 | 3 | 12,000 | 3 | 4 |" in text
    (known,) = (line for line in text.splitlines() if line.startswith("Without a model: "))
    assert re.fullmatch(r"Without a model: exact -?[\d.]+, exact joint -?[\d.]+, prior -?[\d.]+\.", known)
    assert "The training of 13 runs took 1 minutes of CPU time, and 1 minutes of wall time, added over the runs" in text
    assert "Commit: `0123456`, without uncommitted changes." in text
    assert "**one**\n\n![one](pictures/one.png)" in text
    assert "cnp on gp-rbf, seed 0" in text
    assert "Only 1% of all steps" in text
    (run,) = Experiment("functions", "gp-rbf", ("cmanp",), (0,)).runs(tmp_path)
    assert json.loads((tmp_path / "page.json").read_text())["code"]["functions"]["cmanp"] == run.recorded()["code"]


@pytest.mark.parametrize(
    ("commits", "dirty", "told"),
    [
        ("a", False, "Commit: `a`, without uncommitted changes."),
        ("ab", False, "**Commits: `a`, `b`: runs of several commits are mixed.**"),
        ("a", True, "**Commit: `a`: there were uncommitted changes.**"),
    ],
)
def test_runs_of_several_commits_or_of_none_are_told_in_bold(commits: str, dirty: bool, told: str) -> None:
    assert report._warnings([{"commit": commit, "dirty": dirty} for commit in commits]) == [told]


def test_a_run_of_other_code_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of other code counts as unfinished, and its checkpoint is not resumed."""
    started: list[list[str]] = []
    monkeypatch.setattr("subprocess.Popen", lambda command, **rest: started.append(command))
    (run,) = experiment().runs(tmp_path)
    record(run, {"log_likelihood": 0.0})
    entries: dict[str, Any] = {"format": checkpoint.FORMAT, "run": run.recorded(), "global_step": 1}
    entries |= {"cpu_seconds": 0.0, "wall_seconds": 0.0, "optimizer_states": [{}], "lr_schedulers": []}
    torch.save(entries | {name: {} for name in ("state_dict", "loops", "callbacks")}, run.checkpoint)
    assert finished(run) is not None
    runner._started(run)
    monkeypatch.setattr(loop, "digest", lambda *modules: "another")
    assert finished(run) is None
    runner._started(run)
    assert ["--resume" in command for command in started] == [True, False]


def test_no_result_is_older_than_its_system() -> None:
    """`python -m cmab_models.reproduce --confirm` keeps runs that begin as before;
    `make reproduce` trains the others again."""
    told = PAGE.with_suffix(".json")
    assert told.exists(), (
        f"{told.name} is not there: the digests of the code of all results are missing; run make reproduce"
    )
    known = json.loads(told.read_text())["code"]
    older = [
        f"{system} in {each.name}"
        for each in EXPERIMENTS
        for system in each.systems
        if known.get(each.name, {}).get(system)
        != Run(system, TASKS[each.task].for_system(system), PAGE.parent).recorded()["code"]
    ]
    assert not older, (
        f"results that are older than the code of their systems: {', '.join(older)}; run python -m "
        "cmab_models.reproduce --confirm"
    )


def test_a_result_stands_for_changed_code_that_begins_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = next(each for each in EXPERIMENTS if each.name == "target")
    monkeypatch.setattr(openings, "EXPERIMENTS", [replace(each, systems=("mlp", "attention"))])
    file = tmp_path / "RESULTS.json"
    file.write_text(json.dumps({"code": {"target": {"mlp": "old", "attention": "old"}}}))
    openings.record(file, lambda told: None)
    told = json.loads(file.read_text())
    told["openings"]["target"]["mlp"]["loss 7"] += 0.01
    file.write_text(json.dumps(told))
    assert openings.confirm(file, lambda told: None) == ["mlp in target: another loss 7"]
    told = json.loads(file.read_text())
    assert told["code"]["target"]["mlp"] == "old" != told["code"]["target"]["attention"]
    assert told["confirmed"] == {"target": {"attention": "old"}}


def test_an_experiment_that_there_is_not_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["reproduce", "kabsch", "wheels"])
    with pytest.raises(SystemExit):
        main()
    assert "there is no experiment 'wheels'" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("each", EXPERIMENTS, ids=lambda each: each.name)
def test_every_experiment_runs(each: Experiment, tmp_path: Path) -> None:
    """All systems take a step, and have the scores that the claims ask for."""
    shortened = replace(each, seeds=(0,), settings=each.settings | {"steps": 1})
    runs = list(shortened.runs(tmp_path))
    assert run_all(runs, 2, lambda run, code: None) == []
    results = Results({each.name: runs})
    for claim in CLAIMS:
        assert judging.judged(claim, results).reason not in {side.score for side in claim.sides}  # no score is missing


@pytest.mark.nightly
@pytest.mark.parametrize("each", {each.task: each for each in EXPERIMENTS}.values(), ids=lambda each: each.task)
def test_the_same_command_gives_the_same_numbers(each: Experiment, tmp_path: Path) -> None:
    """A run in another process has the same bits in every score and weight, for each system of each kind of task."""
    small = {
        name: value
        for name, value in {"steps": 2, "evaluation_batches": 2, "plays": 20}.items()
        if hasattr(TASKS[each.task], name)
    }
    short = replace(each, seeds=(0,), settings=each.settings | small)
    first, again = (list(short.runs(tmp_path / time)) for time in ("first", "again"))
    assert run_all([*first, *again], 2, lambda run, code: None) == []
    for run, other in zip(first, again, strict=True):
        scores, others = finished(run), finished(other)
        assert scores is not None
        assert others is not None
        assert scores["scores"] == others["scores"], run.system
        assert (run.folder / WEIGHTS).read_bytes() == (other.folder / WEIGHTS).read_bytes(), run.system

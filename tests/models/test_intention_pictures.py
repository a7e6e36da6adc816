"""The pictures of Intention's tasks, and the width of features that least squares needs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cmab_models.pictures import curves, draw, errors
from cmab_models.pictures import needed as picture
from cmab_models.reproduce import scaling
from cmab_models.tasks import TASKS
from cmab_models.training import Run, append


def test_errors_of_questions_have_the_score_as_their_mean() -> None:
    task: Any = TASKS["target"]()
    model = task.model("intention")
    found = task.errors(model)
    assert found.shape == (2000,)
    question = task.held_out()
    with torch.no_grad():
        alone = (model(*(part[7:8] for part in question[:3])) - question.answer[7]).square().mean()
    torch.testing.assert_close(found[7], alone, rtol=1e-4, atol=1e-6)
    assert math.isclose(found.mean().item(), task.evaluate(model)["mse"], rel_tol=1e-5)


def test_a_distribution_of_errors_is_drawn() -> None:
    """At each error stands the share of questions with at most this error."""
    task: Any = TASKS["kabsch"]()
    model = task.model("mlp")
    (axes,) = errors.figure(task, {"mlp": model}).axes
    line = next(line for line in axes.lines if str(line.get_label()).startswith("mlp: "))
    x, shares = (torch.as_tensor(each) for each in (line.get_xdata(), line.get_ydata()))
    found = task.errors(model)
    for i in (0, 999, 1999):
        assert shares[i].item() == pytest.approx((found <= x[i]).double().mean().item())
    assert f"{task.evaluate(model)['mse']:.2g}" in str(line.get_label())
    constant = next(line for line in axes.lines if "mean of all answers" in str(line.get_label()))
    mean = torch.as_tensor(constant.get_xdata()).mean().item()
    assert mean == pytest.approx(task.references()["mean"], rel=1e-4)


def test_sines_are_drawn_with_the_curves_of_untrained_models() -> None:
    task: Any = TASKS["sine"]()
    torch.manual_seed(5)
    model = task.model("intention").eval()
    before = torch.get_rng_state()
    made = curves.figure(task, {"intention": model})
    assert torch.equal(torch.get_rng_state(), before)
    assert len(made.axes) == curves.SHOWN
    question = task.held_out()
    for i, axes in enumerate(made.axes):
        lines = {str(line.get_label()): line for line in axes.lines}
        x, truth, trained, untrained = (
            torch.as_tensor(each, dtype=torch.float32)
            for each in (
                lines["sine"].get_xdata(),
                *(lines[name].get_ydata() for name in ("sine", "intention", "untrained")),
            )
        )
        # A sine has the second derivative -y, and passes through its points.
        step = x[1] - x[0]
        assert ((truth[2:] + truth[:-2] - 2 * truth[1:-1]) / step**2 + truth[1:-1]).abs().max() < 0.05
        with torch.no_grad():
            expected = model(x.view(1, -1, 1), question.key[i : i + 1], question.value[i : i + 1]).flatten()
        torch.testing.assert_close(trained, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(trained, untrained, atol=0.01)


@pytest.mark.parametrize("task", ["sine", "target"])
def test_they_are_written(task: str, tmp_path: Path) -> None:
    system = "intention-module"
    draw(TASKS[task](), {system: TASKS[task]().model(system).eval()}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000


def trained(error: Callable[[str, int, int], float | None]) -> Callable[..., list[Run]]:
    """Return a stand-in for `run_all` that records runs with these errors, by system, variables and width."""

    def run_all(runs: Sequence[Run], workers: int, report: object) -> list[Run]:
        for run in runs:
            task: Any = run.task
            found = error(run.system, task.variables, run.model_settings["dim"])
            if found is not None:
                run.folder.mkdir(parents=True)
                record = {**run.recorded(), "cpu_seconds": 1.0, "scores": {"mse": found}}
                append(run.folder / "results.jsonl", record)
        return []

    return run_all


def test_the_first_width_that_does_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def error(system: str, variables: int, width: int) -> float | None:
        if width == 3:
            return None  # the run failed
        return 0.01 if system == "intention" and width > variables else 0.5

    monkeypatch.setattr(scaling, "run_all", trained(error))
    found = scaling.needed(("intention", "mlp"), (1, 2), tmp_path, widths=(1, 2, 3, 4), report=told.append)
    assert found == {"intention": {1: 2, 2: 4}, "mlp": {1: None, 2: None}}
    assert len(told) == 2 + 4 + 8  # intention stops at the width that does
    (axes,) = picture.figure(found, 4).axes
    lines = {str(line.get_label()): line for line in axes.lines}
    assert list(lines["intention"].get_xdata()) == [1, 2] and list(lines["intention"].get_ydata()) == [2, 4]
    assert any(line.get_marker() == "^" and list(line.get_xdata()) == [1, 2] for line in axes.lines)


def test_the_command_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(scaling, "run_all", trained(lambda *which: 0.001))
    scaling.main(["attention", "--variables", "3", "--folder", str(tmp_path), "--steps", "7"])
    assert json.loads((tmp_path / "needed.json").read_text()) == {"attention": {"3": 1}}
    assert (tmp_path / "needed.png").stat().st_size > 5000
    with pytest.raises(SystemExit):
        scaling.main(["cnp"])
    assert "SYSTEM: got cnp, expected one of intention, " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        scaling.main(["mlp", "--variables", "0"])
    assert "variables: got 0, expected a finite number > 0" in capsys.readouterr().err


@pytest.mark.thorough
def test_intention_needs_a_width_that_grows_with_the_variables(tmp_path: Path) -> None:
    widths = scaling.needed(("intention",), (1, 8), tmp_path, widths=(8, 32), settings={"batch_size": 64})
    small, large = widths["intention"].values()
    assert small is not None and large is not None and small < large

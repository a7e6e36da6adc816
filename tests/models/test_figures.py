"""`python -m cmab_models.reproduce.figures`: scans over sizes, their page and their pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cmab_models import CMANPAND
from cmab_models.neural_processes import Batch
from cmab_models.pictures import scans
from cmab_models.reproduce import figures
from torch import Tensor


def test_a_page_of_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [scans.Point(line, at, {"Seconds": at / 8}) for line, at in (("cmanp", 10), ("cmanp", 2_000), ("cnp", 10))]
    part = figures.Part(lambda *_: points, "points", "A scan", "What it is.")
    monkeypatch.setattr(figures, "FIGURES", {"scan": part, "other": part})
    page = tmp_path / "page" / "FIGURES.md"
    page.parent.mkdir()
    figures.main(["scan", "--folder", str(tmp_path / "run"), "--output", str(page), "--share", "0.5"])
    text = page.read_text()
    assert text.count("## A scan, over points") == 1 and "**Only 50% of sizes and steps.**" in text
    assert "| Seconds | 10 | 2,000 |\n|---|---:|---:|\n| cmanp | 1.250 | 250.000 |\n| cnp | 1.250 |  |" in text
    assert (page.parent / "pictures_of_results" / "figure_scan.png").stat().st_size > 1_000
    kept = json.loads((tmp_path / "run" / "scan.json").read_text())
    assert kept["where"]["processor"] in text and kept["where"]["torch"] == torch.__version__
    with pytest.raises(SystemExit):
        figures.main(["third", "--folder", str(tmp_path)])


def test_costs_over_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(scans, "BUDGET", torch.inf)
    monkeypatch.setattr(scans, "MOST_MEMORY", torch.inf)
    (first, second) = scans.over_context((8, 2_000), ("cnp",))
    assert (first.line, first.at, second.at) == ("cnp", 8, 2_000)
    assert second.values[scans.MEBIBYTES] > 1.0 > first.values[scans.MEBIBYTES] and first.values[scans.SECONDS] > 0
    monkeypatch.setattr(scans, "BUDGET", 0.0)
    assert [point.at for point in scans.over_targets((4, 8), ("cnp",))] == [4]  # 8 may take too long
    assert torch.get_num_threads() == threads


def test_blocks_of_points_and_of_targets() -> None:
    (one, all_at_once) = scans.over_blocks_of_points((1, 40, 80), (40,))
    assert (one.line, one.at, all_at_once.at) == ("40 points", 1, 40)
    assert one.values[scans.SECONDS] > all_at_once.values[scans.SECONDS]
    (point,) = scans.over_blocks_of_targets((6,), (10,))
    assert point.values.keys() == {scans.SECONDS, scans.MEBIBYTES}


def test_likelihoods_over_blocks() -> None:
    model = CMANPAND(1, 1, dim=8, num_latents=4, num_heads=2, depth=1).eval()
    batches = [Batch(*torch.randn(4, 2, 6, 1)) for _ in range(2)]
    found = scans.over_trained_blocks(model, batches, (1, 6), "line")
    for point in found:
        expected = sum(model.log_prob(*each, block_size=point.at).mean().item() for each in batches) / 2
        assert abs(point.values[scans.LIKELIHOOD] - expected) < 1e-5


def test_another_context_tells_whether_a_model_reads_its_own() -> None:
    """The second function's values are the first's, so a model that knows only those has the likelihoods swapped."""

    class Reads:
        def log_prob(self, x: Tensor, y: Tensor, target_x: Tensor, target_y: Tensor) -> Tensor:
            return -(y.mean(1) - target_y.mean(1)).abs().squeeze(-1)

    values = torch.tensor([0.0, 3.0]).view(2, 1, 1).expand(2, 4, 1)
    batch = Batch(values, values, values, values)
    assert figures.likelihoods_of_contexts(Reads(), [batch, batch]) == (0.0, -3.0)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["latents", "trained_blocks", "plateau"])
def test_models_are_trained_for_a_figure(name: str, tmp_path: Path) -> None:
    points = figures.FIGURES[name].measure(tmp_path, 0.002)
    sizes = {point.at for point in points}
    assert sizes >= {"latents": {1, 32}, "trained_blocks": {1, 5, 50}, "plateau": {1_000, 30_000}}[name]
    assert all(torch.tensor(point.values[scans.LIKELIHOOD]).isfinite() for point in points)

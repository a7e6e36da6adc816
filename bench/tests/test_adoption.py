"""The page's figures for models of other packages are the measured ones, compared with the fastest of the models' own
forms."""

from __future__ import annotations

import json

import pytest
import torch

from bench import adoption

FOUND = json.loads(adoption.RESULTS.read_text())


def test_the_page_has_the_table_of_the_committed_results():
    assert adoption.PLACE.have(adoption.table(FOUND)), "stale: python -m bench.adoption --page"


def test_every_model_was_measured_in_both_modes_and_with_the_fast_path_on_and_off():
    ways = {
        key: {(row["pass"], row["implementation"]) for row in FOUND["rows"] if row["model"] == key}
        for key in adoption.SUBJECTS
    }
    for key, subject in adoption.SUBJECTS.items():
        peers = ("torch, fast path", "torch, no fast path") if subject.ways is adoption.by_modules else ("eager",)
        assert ways[key] >= {(mode, name) for mode in adoption.PASSES for name in peers}


@pytest.mark.parametrize("fastest", ["torch, fast path", "torch, no fast path"])
def test_a_ratio_is_to_the_fastest_of_what_the_model_has(fastest: str):
    seconds = dict.fromkeys(("torch, fast path", "torch, no fast path"), 3.0) | {
        fastest: 2.0,
        "cmab, attention": 1.5,
        "cmab, layers": 1.0,
    }
    assert adoption.ratio_of(
        {("m", "evaluation", name): taken for name, taken in seconds.items()}, "m", "evaluation"
    ) == (
        *(0.5, "cmab, layers"),
        fastest,
    )


def test_torchs_fast_path_is_on_and_off_as_a_way_says(monkeypatch: pytest.MonkeyPatch):
    model, inputs = adoption.encoder(2, 5, 2, 4).make()
    ways, seen = adoption.by_modules(model.eval()), []
    monkeypatch.setattr(
        torch,
        "_transformer_encoder_layer_fwd",
        lambda src, *_: seen.append(torch.backends.mha.get_fastpath_enabled()) or src,
    )
    for name in ("torch, fast path", "torch, no fast path"):
        with torch.no_grad():
            ways[name](inputs)
    assert seen == [True, True], "two layers, in the fast path alone"
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_wrong_result_has_no_speed(monkeypatch: pytest.MonkeyPatch):
    def ways(model: torch.nn.Module) -> dict[str, adoption.Way]:
        return {"torch": lambda inputs: model(inputs["x"]), "cmab": lambda inputs: 1.001 * model(inputs["x"])}

    made = adoption.Subject("a layer", lambda: (torch.nn.Linear(3, 3), {"x": torch.randn(5, 3)}), ways)
    monkeypatch.setitem(adoption.SUBJECTS, "linear", made)
    with pytest.raises(SystemExit, match=r"linear, evaluation: relative errors of cmab: 1\.0e-03"):
        list(adoption.rows_of("linear"))

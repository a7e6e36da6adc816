"""Tuning with a simulated clock: the right winner, no winner within the noise, and a table that is written completely
or not at all.

No GPU is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu import tune
from bench.gpu.candidates import LENGTHS, Target, candidates, targets
from cmab_kernels.runtime import tiles
from cmab_kernels.runtime.tiles import FIELDS, HOPPER, Key, using
from gpu_machine.launch import on_machine
from gpu_machine.machine import Machine

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
TARGET = Target("attention.forward", "bfloat16", 16)
BUILT_IN, FIRST, SECOND, *_ = candidates(TARGET, CPU)
OTHER = tiles.as_entry(Key("nystrom.forward", HOPPER, "ieee", 16), (8,), {"gpu": "another"})


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({"cmab_kernels_tiles": 1, "entries": [OTHER]}))
    return path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the seconds for the tiles that a launch would use, by the number of their measurement and the round."""

    def prepared(target: Target, device: str, size: str) -> Any:
        assert size == "large"
        return lambda: tiles.tuned(target.kernel, CPU, target.products(CPU).kind, target.width)

    def set_clock(seconds: Callable[[tuple[int, ...], int, int], float]) -> None:
        again: dict[tuple[int, ...], int] = {}

        def samples_of(calls: Mapping[str, tuple[int, ...]], rounds: int) -> dict[str, list[float]]:
            found = {}
            for name, chosen in calls.items():
                again[chosen] = again.get(chosen, 0) + 1
                found[name] = [seconds(chosen, again[chosen], i) for i in range(rounds)]
            return found

        monkeypatch.setattr(tune, "samples_of", samples_of)

    monkeypatch.setattr(tune, "prepared", prepared)
    monkeypatch.setattr(tune, "captured", lambda call: call())
    monkeypatch.setattr(tune, "gpu_name", lambda device: "NVIDIA H200")
    return set_clock


def _sound(*chosen: tuple[int, ...]) -> dict[str, bool]:
    """All candidates were checked; the built-in tiles and these were right."""
    return {tune._name(TARGET, one): one in (BUILT_IN, *chosen) for one in candidates(TARGET, CPU)}


def test_the_fastest_that_is_right_is_written(clock: Callable[..., None], table: Path) -> None:
    """The fastest candidate was wrong; other entries do not change."""
    clock(lambda chosen, times, i: {FIRST: 50e-6, SECOND: 80e-6}.get(chosen, 100e-6))
    row = tune.tune(TARGET, _sound(SECOND), "cpu", table)
    assert row["written"] and row["tiles"] == list(SECOND) and row["gain"] == pytest.approx(0.2) and row["ok"]
    found = {key: (chosen, evidence) for key, chosen, evidence in tiles.entries(table)}
    assert len(found) == 2 and found[Key("nystrom.forward", HOPPER, "ieee", 16)][0] == (8,)
    chosen, evidence = found[TARGET.key(CPU)]
    assert chosen == SECOND and evidence["gpu"] == "NVIDIA H200"
    assert (
        evidence["seconds"] == 80e-6 and evidence["built-in seconds"] == 100e-6 and {"date", "noise"} <= evidence.keys()
    )
    with using(tiles.read(table)):
        assert tiles.tuned(TARGET.kernel, CPU, "half", 16) == SECOND


@pytest.mark.parametrize("gain, noise", [(0.005, 0.0), (0.05, 0.1), (-0.2, 0.0)])
def test_what_is_within_the_noise_is_not(gain: float, noise: float, clock: Callable[..., None], table: Path) -> None:
    """A gain within the noise does not count. An earlier entry is removed, because it no longer gains."""
    old = tiles.as_entry(TARGET.key(CPU), FIRST, {})
    table.write_text(json.dumps({"cmab_kernels_tiles": 1, "entries": [OTHER, old]}))
    clock(lambda chosen, times, i: 100e-6 * ((1 - gain) if chosen == SECOND else 1) * (1 + noise * ((times + i) % 3)))
    row = tune.tune(TARGET, _sound(SECOND), "cpu", table)
    assert not row["written"] and [key.kernel for key, _, _ in tiles.entries(table)] == ["nystrom.forward"]


def test_what_was_luck_is_not_written(clock: Callable[..., None], table: Path) -> None:
    """The best of many candidates are timed three times."""
    clock(lambda chosen, times, i: 60e-6 if chosen == SECOND and times <= 2 else 100e-6)
    row = tune.tune(TARGET, _sound(SECOND), "cpu", table)
    assert row["gain"] > 0.3 and not row["confirmed"] and not row["written"]


def test_without_candidates_nothing_is_tuned(clock: Callable[..., None], table: Path) -> None:
    row = tune.tune(TARGET, dict.fromkeys(_sound(), False), "cpu", table)
    assert row["ok"] is False and "found wrong" in row["problem"]
    clock(lambda chosen, times, i: 100e-6)
    row = tune.tune(TARGET, _sound(), "cpu", table)
    assert row["ok"] and not row["written"] and row["tiles"] == row["built-in"] == list(BUILT_IN)


def test_a_malformed_table_is_not_overwritten(clock: Callable[..., None], table: Path) -> None:
    clock(lambda chosen, times, i: 80e-6 if chosen == SECOND else 100e-6)
    table.write_text("{}")
    with pytest.raises(ValueError, match="got another file, expected a table of tiles"):
        tune.tune(TARGET, _sound(SECOND), "cpu", table)
    assert table.read_text() == "{}"


def test_candidates_are_valid_and_few_and_keys_differ() -> None:
    every = list(targets())
    assert {target.kernel for target in every} == FIELDS.keys() and len({target.key(CPU) for target in every}) == len(
        every
    )
    for target in every:
        found = candidates(target, CPU)
        assert found[0] == target.built_in(CPU) and len(set(found)) == len(found) <= 48
        for chosen in found[1:]:
            entry = tiles.as_entry(target.key(CPU), chosen, {})  # it raises an error for everything except tiles
            assert entry["tiles"].get("BLOCK_L", 0) <= target.latents, (
                "a block that the queries do not fill is not seen"
            )


def test_rows_of_candidates_name_what_was_tried() -> None:
    tasks = tune.candidate_tasks("cpu", {})
    assert len({task.key for task in tasks}) == len(tasks)
    assert sum(not task.peer for task in tasks) == len(list(targets())), "only the built-in tiles must compile"
    before = {
        "candidates": [{"key": tasks[0].key, "sound": True}, {"key": tasks[1].key, "problem": "out of resources"}]
    }
    assert [task.key for task in tune.tasks("cpu", before)] == [str(target) for target in targets()]


@pytest.mark.parametrize("kernel", ["attention.forward", "intention.gram", "intention.apply", "nystrom.forward"])
def test_candidates_that_are_right_are_found_so(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU simulated in software, in small shapes, right tiles pass and wrong tiles fail."""
    target = Target(kernel, "float32", 16)
    monkeypatch.setitem(LENGTHS, "small", 60)
    monkeypatch.setattr("bench.gpu.candidates.SET", 30)
    monkeypatch.setattr(Target, "latents", 20)
    with on_machine(Machine()):
        for chosen in candidates(target, CPU)[:2]:
            assert tune.check(target, chosen, "cpu")["sound"], chosen
        monkeypatch.setattr(tune, "relative_error", mock.Mock(side_effect=[1e-7, 1e-3]))
        wrong = tune.check(target, candidates(target, CPU)[0], "cpu")
    assert not wrong["sound"] and "wrong" in wrong["problem"]

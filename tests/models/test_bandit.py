"""The wheel bandit: the rewards of arms, the observations of an agent, and its regret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cmab_models.data import wheel
from cmab_models.neural_processes.points import KeepsPoints, Points
from cmab_models.pictures import draw
from cmab_models.tasks import TASKS, seeded
from torch import Tensor
from torch.distributions import Normal


def made(**settings: Any) -> Any:
    return TASKS["wheel"]().changed({"plays": 40, "seeds": 2} | settings)


class Plays(KeepsPoints):
    """An agent that always takes one arm, or the best one of a wheel that it knows."""

    dim_x, dim_y = 2, wheel.ARMS

    def __init__(self, arm: int | None = None, delta: Tensor | None = None) -> None:
        super().__init__()
        self.arm, self.delta, self.device = arm, delta, torch.nn.Parameter(torch.zeros(1))
        self.known: list[int] = []

    def predict(self, state: Points, target_x: Tensor) -> Normal:
        self.known.append(int((~state.ignored).sum(1)[0]))
        self.read = state.y
        arm = torch.full(target_x.shape[:2], self.arm or 0)
        if self.delta is not None:
            first, second = (target_x > 0).unbind(-1)
            quadrant = torch.where(second, torch.where(first, 1, 2), torch.where(first, 4, 3))
            arm = torch.where(target_x.norm(dim=-1) >= self.delta.unsqueeze(1), quadrant, 0)
        # The deviation decides: an agent that used means alone would take the last arm.
        means = torch.zeros(*arm.shape, wheel.ARMS).index_fill(2, torch.tensor([4]), 0.5)
        return Normal(means, 1.0 + torch.nn.functional.one_hot(arm, wheel.ARMS))


def test_what_the_arms_pay() -> None:
    delta = torch.tensor([0.3, 0.9])
    x, rewards, best = wheel.draw(delta, 20_000, seeded(0))
    radius = x.norm(dim=-1)
    assert radius.max() <= 1 and (x.mean(1).abs() < 0.02).all()
    torch.testing.assert_close((radius < 0.5).float().mean(1), torch.full((2,), 0.25), atol=0.02, rtol=0)
    beyond = radius >= delta.unsqueeze(1)
    assert torch.equal(beyond, best > 0)
    signs = {1: (1, 1), 2: (-1, 1), 3: (-1, -1), 4: (1, -1)}
    for arm in range(wheel.ARMS):
        large = best == arm
        if arm:
            assert (x[large].sign() == torch.tensor(signs[arm])).all()
            assert abs(rewards[large][:, arm].mean() - 50) < 1e-3 and abs(rewards[large][:, arm].std() - 0.01) < 1e-3
        usual = rewards[..., arm][~large | (best == 0)]
        assert abs(usual.mean() - (1.2 if arm == 0 else 1.0)) < 2e-3 and abs(usual.std() - 0.05) < 1e-3


def test_half_of_the_context_is_hidden_and_no_target() -> None:
    x, y, target_x, target_y = made(wheels=4).batch(seeded(1))
    assert x.shape == (4, 512, 2) and y.shape == (4, 512, 5) and target_x.shape == (4, 50, 2)
    plausible = ((y - 1.1).abs() < 0.35) | (y > 40)
    assert 0.5 < plausible.float().mean() < 0.7  # the rewards that were seen, and noise within the bounds
    assert (((target_y - 1.1).abs() < 0.35) | (target_y > 40)).all()


def test_regrets_of_agents_that_need_no_learning() -> None:
    task = made(plays=200)
    references = task.references()
    assert all(value == pytest.approx(100) for name, value in references.items() if name.startswith("uniform"))
    first = task.evaluate(Plays(arm=0))
    assert first["regret_0.9"] == pytest.approx(references["first_arm_regret_0.9"], rel=0.02)
    assert first["simple_0.7"] == pytest.approx(references["first_arm_simple_0.7"])
    knowing = task.evaluate(Plays(delta=torch.tensor([0.7, 0.9, 0.95, 0.99, 0.995]).repeat_interleave(2)))
    assert all(value == 0 for name, value in knowing.items() if name.startswith("simple"))
    assert all(value < 5 for value in knowing.values())  # the first arm of each is drawn


@pytest.mark.parametrize("plays", [1, 3])
def test_the_last_quarter_of_few_plays_has_one(plays: int) -> None:
    references = made(plays=plays).references()
    assert references["uniform_simple_0.9"] == pytest.approx(100)


def test_the_radius_may_change_half_way() -> None:
    delta = torch.tensor([0.7, 0.9, 0.95, 0.99, 0.995]).repeat_interleave(2)
    knowing = made(plays=200, later_delta=0.2).evaluate(Plays(delta=delta))
    assert knowing["simple_0.7"] > 10
    assert made(plays=200, later_delta=0.2).evaluate(Plays(delta=torch.full((10,), 0.2)))["simple_0.99"] == 0


def test_a_stream_updates_and_forgets() -> None:
    agent = Plays(arm=0)
    steps = list(made(plays=12, memory=4).stream(agent))
    assert agent.known == [1, 2, 3] + [4] * 8
    after_first = agent.read[0, 1:]  # this arm always pays 1.2; the payments of others are hidden
    assert (after_first[:, 0] - 1.2).abs().max() < 0.3
    assert (after_first[:, 1:] - 1.0).abs().amax() > 1
    assert [step["plays"] for step in steps] == list(range(1, 13))
    assert steps[-1]["cumulative_regret"] == pytest.approx(sum(step["regret"] for step in steps))
    assert all(step["update_ms"] > 0 for step in steps)


@pytest.mark.parametrize("system", TASKS["wheel"].systems)
def test_systems_learn_and_play(system: str) -> None:
    task = made(plays=4, context=20, targets=5)
    model = task.model(system)
    task.loss(model, task.batch(seeded(0))).backward()
    assert task.evaluate(model) == task.evaluate(model)


def test_a_picture_of_regrets(tmp_path: Path) -> None:
    draw(made(), {"cnp": Plays(arm=0), "cmanp": Plays(arm=1)}, tmp_path / "wheel.png")
    assert (tmp_path / "wheel.png").stat().st_size > 10_000

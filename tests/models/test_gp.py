"""Functions of Gaussian processes: exact predictions equal the formulas of the textbook, and the upper bounds of
scores equal those of the published tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cmab_models.data import gp
from cmab_models.neural_processes.points import KeepsPoints, Points
from cmab_models.tasks import TASKS, Task, seeded
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

NAMES = ("gp-rbf", "gp-matern")


def made(name: str, **settings: Any) -> Task:
    return TASKS[name]().changed({"functions": 2, "evaluation_batches": 2, "stream_points": 3} | settings)


class Oracle(KeepsPoints):
    """The exact process of each function, as a model."""

    dim_x = dim_y = 1

    def __init__(self, prior: gp.Prior) -> None:
        super().__init__()
        self.prior, self.device = prior, torch.nn.Parameter(torch.zeros(1))

    def predict(self, state: Points, target_x: Tensor) -> Normal:
        joint = self.prior.posterior(state.x, state.y, target_x)
        return Normal(joint.mean.unsqueeze(-1), joint.stddev.unsqueeze(-1))


@pytest.mark.parametrize("kernel", gp.KERNELS)
def test_the_posterior_is_the_textbooks(kernel: str) -> None:
    generator = seeded(0)
    prior = gp.priors(kernel, 3, generator)
    x, y, target_x, target_y = gp.draw(prior, 6, 4, generator)
    joint = prior.covariance(torch.cat([x, target_x], 1))
    inner, cross, outer = joint[:, :6, :6], joint[:, 6:, :6], joint[:, 6:, 6:]
    expected = MultivariateNormal(
        (cross @ inner.inverse() @ y.double()).squeeze(-1), outer - cross @ inner.inverse() @ cross.mT
    )
    found = prior.posterior(x, y, target_x)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.covariance_matrix, expected.covariance_matrix, rtol=1e-8, atol=1e-8)

    values = torch.cat([y, target_y], 1).squeeze(-1).double()
    chain = MultivariateNormal(torch.zeros(3, 10).double(), joint).log_prob(values)
    chain -= MultivariateNormal(torch.zeros(3, 6).double(), inner).log_prob(values[:, :6])
    alone, together = gp.exact_log_prob(prior, gp.Batch(x, y, target_x, target_y))
    torch.testing.assert_close(together, chain / 4)
    torch.testing.assert_close(alone, Normal(expected.mean, expected.stddev).log_prob(values[:, 6:]).mean(1))
    assert torch.equal(prior.posterior(x[:, :0], y[:, :0], target_x).mean, torch.zeros(3, 4).double())


@pytest.mark.parametrize(("kernel", "at_one"), [("rbf", 0.606530660), ("matern", 0.523994109)])
def test_kernels_scales_and_noise(kernel: str, at_one: float) -> None:
    prior = gp.Prior(kernel, torch.tensor([0.5]).double(), torch.tensor([2.0]).double())
    covariance = prior.covariance(torch.tensor([[[0.0], [0.5]]]))
    expected = 4 * torch.tensor([[[1, at_one], [at_one, 1]]]).double() + 0.02**2 * torch.eye(2)
    torch.testing.assert_close(covariance, expected, rtol=1e-7, atol=1e-7)
    y = gp.draw(
        prior._replace(length=prior.length.expand(4000), scale=prior.scale.expand(4000)), 1, 0, seeded(1)
    ).context_y
    assert abs(y.std().item() - 2.0) < 0.1


@pytest.mark.parametrize(("name", "alone", "together"), [("gp-rbf", 1.516, 1.803), ("gp-matern", 1.121, 1.391)])
def test_ceilings_are_the_published_ones(name: str, alone: float, together: float) -> None:
    """The standard errors of means over 300 batches are 0.037 and 0.022."""
    references = TASKS[name]().changed({"evaluation_batches": 300}).references()
    assert abs(references["exact"] - alone) < 0.1
    assert abs(references["exact_joint"] - together) < 0.06
    assert references["prior"] < 0


def test_the_exact_process_reaches_both_ceilings() -> None:
    task: Any = made("gp-rbf", evaluation_batches=1, autoregressive=True)
    oracle = Oracle(next(task._held_out())[0])
    scores, references = task.evaluate(oracle), task.references()
    assert scores["log_likelihood"] == pytest.approx(references["exact"], abs=1e-6)
    assert scores["log_likelihood_at_once"] == scores["log_likelihood"]
    assert scores["log_likelihood_one_by_one"] == pytest.approx(references["exact_joint"], abs=1e-6)
    assert scores["log_likelihood"] < scores["log_likelihood_blocks_of_5"] < scores["log_likelihood_one_by_one"]


@pytest.mark.parametrize("system", TASKS["gp-rbf"].systems)
def test_systems_of_the_tasks_size_learn_and_stream(system: str) -> None:
    task: Any = made("gp-rbf")
    model: Any = task.model(system)
    batch = task.batch(seeded(0))
    task.loss(model, batch).backward()
    assert 3 <= batch.context_x.shape[1] < 47 and 3 <= batch.target_x.shape[1] < 50 - batch.context_x.shape[1]
    scores = torch.stack([model.log_prob(*each).mean() for _, each in task._held_out()])
    assert task.evaluate(model) == {"log_likelihood": pytest.approx(scores.mean().item(), abs=1e-4)}
    assert task.evaluate(model) == task.evaluate(model)
    steps = list(task.stream(model))
    assert [step["points"] for step in steps] == [1, 2, 3]
    assert steps[2]["exact"] > steps[0]["exact"]

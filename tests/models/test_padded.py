"""Sets of different sizes: a padded batch equals each set alone, and a missing output is left out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cmab_models.neural_processes import Batch, Chain, NeuralProcess, PaddedBatch
from cmab_models.neural_processes.family import noise
from cmab_models.neural_processes.parts import JointHead
from cmab_models.systems import SYSTEMS
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from .cases import made

PROCESSES = [name for name, kind in SYSTEMS.items() if issubclass(kind, NeuralProcess)]
JOINT = [name for name in PROCESSES if SYSTEMS[name].joint]  # type: ignore[attr-defined]
SIZES = ((6, 5), (3, 7), (1, 1), (6, 2))
"""Points and targets of each function."""


def functions() -> list[Batch]:
    torch.manual_seed(1)
    return [Batch(*(torch.randn(1, count, width).double() for count in counts for width in (2, 3))) for counts in SIZES]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def small(system: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return made(system, dim_x=2, dim_y=3, **changes).double()


def with_holes(batch: PaddedBatch) -> PaddedBatch:
    """Return the batch with a NaN or an infinity in every place that is ignored."""
    holes = [part.clone() for part in batch]
    for i, mask in ((0, batch.context_mask), (1, batch.context_mask), (2, batch.target_mask), (3, batch.target_mask)):
        holes[i][mask] = torch.inf if i == 1 else torch.nan
    return PaddedBatch(*holes)


def with_gradients(model: Any, found: Tensor) -> list[Tensor]:
    leaves = list(model.parameters())
    return [found, *torch.autograd.grad(found.sum(), leaves, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("block_size", [None, 2])
@pytest.mark.parametrize("system", PROCESSES)
def test_a_padded_batch_equals_each_set_alone(system: str, block_size: int | None) -> None:
    model, alone = small(system), functions()
    padded = with_holes(PaddedBatch.pad(alone))
    ours = with_gradients(model, model.log_prob(*padded, block_size=block_size))
    theirs = torch.cat([model.log_prob(*each, block_size=block_size) for each in alone])
    for mine, other in zip(ours, with_gradients(model, theirs), strict=True):
        close(mine, other)


@pytest.mark.parametrize("bound_std", [False, True])
@pytest.mark.parametrize("system", PROCESSES)
def test_the_loss_of_a_padded_batch_is_the_mean_of_those_of_each_set(system: str, bound_std: bool) -> None:
    if bound_std and system not in JOINT:
        return
    model, alone = small(system, **({"bound_std": True} if bound_std else {})), functions()
    ours = with_gradients(model, model.loss(with_holes(PaddedBatch.pad(alone))))
    theirs = torch.stack([model.loss(each) for each in alone]).mean()
    for mine, other in zip(ours, with_gradients(model, theirs), strict=True):
        close(mine, other)


@pytest.mark.parametrize("system", PROCESSES)
def test_masked_points_and_targets_may_lie_anywhere(system: str) -> None:
    """A function may also have no targets; its likelihood is 0."""
    model, (batch, *_) = small(system), functions()
    batch = Batch(*(part.repeat(2, 1, 1) for part in batch))
    points, targets = torch.zeros(2, 6, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool)
    points[:, 1] = points[:, 4] = targets[0, 0] = targets[0, 3] = targets[1] = True
    padded = with_holes(PaddedBatch(*batch, points, targets))
    left, asked = [0, 2, 3, 5], [1, 2, 4]
    alone = Batch(*(part[:1, kept] for part, kept in zip(batch, (left, left, asked, asked), strict=True)))
    found, loss = model.log_prob(*padded, block_size=1000), model.loss(padded)
    close(found[:1], model.log_prob(*alone, block_size=1000))
    close(loss, model.loss(alone) / 2)
    assert found[1] == 0
    assert all(part.isfinite().all() for part in with_gradients(model, loss))


@pytest.mark.parametrize("block_size", [2, 1000])
@pytest.mark.parametrize("system", PROCESSES)
def test_a_target_without_any_value_is_as_if_masked(system: str, block_size: int) -> None:
    model, (batch, *_) = small(system), functions()
    missing = batch.target_y.clone()
    missing[0, 2] = torch.nan
    mask = (torch.arange(5) == 2).unsqueeze(0)
    nothing = torch.zeros(1, 6, dtype=torch.bool)
    given = batch._replace(target_y=missing)
    close(model.log_prob(*given, block_size=block_size), model.log_prob(*batch, nothing, mask, block_size=block_size))
    close(model.loss(given), model.loss(PaddedBatch(*batch, nothing, mask)))


@pytest.mark.parametrize("system", PROCESSES)
def test_an_output_that_is_missing_is_integrated_out(system: str) -> None:
    """The likelihood is that of the other outputs, from the definition; and gradients are finite."""
    model, (batch, *_) = small(system), functions()
    given = batch.target_y.clone()
    given[0, 1, 0] = given[0, 3, 1] = given[0, 3, 2] = torch.nan
    there = ~given[0].isnan()
    predicted = model(*batch[:3])
    found = model.log_prob(*batch[:3], given, block_size=1000)
    assert model.joint == isinstance(predicted, MultivariateNormal)
    if model.joint:
        kept = there.flatten()
        covariance = predicted.covariance_matrix[0][kept][:, kept]
        error = batch.target_y[0][there] - predicted.mean[0][kept]
        quadratic = error @ torch.linalg.solve(covariance, error)
        expected = -0.5 * (quadratic + covariance.logdet() + int(kept.sum()) * math.log(2 * math.pi))
    elif isinstance(predicted, Chain):  # later targets do not read a target of which an output is missing
        expected, complete = 0.0, []
        for i, some in enumerate(there):
            part, state = [*complete, i], model.condition(*batch[:2])
            normal = model._given_earlier(state, batch.target_x[:, part], batch.target_y[:, part], None)
            expected += normal.log_prob(batch.target_y[:, part])[0, -1][some].sum()
            complete += [i] if some.all() else []
    elif hasattr(predicted, "functions"):
        each = predicted.functions.log_prob(batch.target_y).where(there, 0.0).sum(-1)
        expected = each.exp().mean(0).log().sum()
    else:
        expected = predicted.log_prob(batch.target_y)[0][there].sum()
    # The covariance has fewer digits than its factor.
    tolerance = 1e-11 if model.joint else 1e-12
    torch.testing.assert_close(found, (expected / 5).view(1), rtol=tolerance, atol=tolerance)
    for loss in (found.sum(), model.loss(batch._replace(target_y=given))):
        assert all(part.isfinite().all() for part in with_gradients(model, loss))


@pytest.mark.parametrize("bound_std", [False, True])
@pytest.mark.parametrize("system", JOINT)
def test_covariances_of_low_rank(system: str, bound_std: bool) -> None:
    """They are a part of low rank and a diagonal; padding and missing outputs change nothing."""
    model, alone = small(system, covariance="low-rank", rank=2, bound_std=bound_std), functions()
    covariance = model(*alone[0][:3]).covariance_matrix[0]
    features = model._features(model.condition(*alone[0][:2]), alone[0].target_x)
    diagonal = model.head.diagonal(features).flatten().exp() + 0.0025 * bound_std
    of_low_rank = torch.linalg.eigvalsh(covariance - diagonal.diag())
    assert of_low_rank[-2:].min() > 1e-6 and of_low_rank[:-2].abs().max() < 1e-12
    padded = with_holes(PaddedBatch.pad(alone))
    theirs = torch.cat([model.log_prob(*each) for each in alone])
    for mine, other in zip(*(with_gradients(model, each) for each in (model.log_prob(*padded), theirs)), strict=True):
        close(mine, other)
    given, there = alone[0].target_y.clone(), torch.ones(15, dtype=torch.bool)
    given[0, 1, 0], there[3] = torch.nan, False
    error = (given.flatten() - model(*alone[0][:3]).mean[0])[there]
    kept = covariance[there][:, there]
    quadratic = error @ torch.linalg.solve(kept, error)
    expected = -0.5 * (quadratic + kept.logdet() + 14 * math.log(2 * math.pi)) / 5
    found = model.log_prob(*alone[0][:3], given, block_size=5)
    torch.testing.assert_close(found, expected.view(1), rtol=1e-11, atol=1e-11)


def test_a_covariance_that_is_not_positive_gives_a_nan() -> None:
    head = JointHead(4, 2, 4, 1, 2, 2, False, "low-rank")
    torch.nn.init.constant_(head.diagonal[-1].bias, -200.0)
    torch.nn.init.constant_(head.projection[-1].bias, 1e3)
    assert head(torch.randn(1, 3, 4)).scale_tril.isnan().all()
    with pytest.raises(ValueError, match="covariance: got 'full', expected one of 'cholesky', 'low-rank'"):
        JointHead(4, 2, 4, 1, 2, 2, False, "full")


@pytest.mark.parametrize("system", ["np", "anp"])
def test_a_latent_variable_is_read_from_targets_with_all_outputs(system: str) -> None:
    """The ELBO by its definition: the posterior knows the context and the other targets."""
    model, (batch, *_) = small(system, num_train_samples=1), functions()
    x, y, target_x, target_y = batch
    given = target_y.clone()
    given[0, 1, 0] = torch.nan
    state, kept = model.condition(x, y), [0, 2, 3, 4]
    prior = model._latent(state)
    posterior = model._latent(model.condition(target_x[:, kept], target_y[:, kept], state))
    draws = noise("randn", 1, 1, prior.loc.shape[1], like=prior.loc, fresh=False)
    predicted = model._functions(state, torch.cat([x, target_x], 1), posterior.loc + posterior.scale * draws)
    each = predicted.log_prob(torch.cat([y, target_y], 1))[0, 0]
    each[6 + 1, 0] = 0.0
    bound = each.sum() - kl_divergence(posterior, prior).sum()
    close(model.loss(batch._replace(target_y=given)), -bound / 11)


@pytest.mark.parametrize("system", PROCESSES)
def test_a_target_that_lacks_an_output_is_no_context_of_later_blocks(system: str) -> None:
    model, (batch, *_) = small(system), functions()
    given = batch.target_y.clone()
    given[0, 1, 0] = torch.nan
    found = model.log_prob(*batch[:3], given, block_size=2)
    x, y, target_x, _ = batch
    total = 2 * model.log_prob(x, y, target_x[:, :2], given[:, :2], block_size=2)
    for first, count in ((2, 2), (4, 1)):
        known = [i for i in range(first) if i != 1]
        points = (torch.cat([x, target_x[:, known]], 1), torch.cat([y, given[:, known]], 1))
        block = slice(first, first + count)
        total = total + count * model.log_prob(*points, target_x[:, block], given[:, block], block_size=count)
    torch.testing.assert_close(found, total / 5, rtol=1e-9, atol=1e-9)


def test_sets_that_are_padded() -> None:
    alone = functions()
    found = PaddedBatch.pad([*alone, Batch(*(part.repeat(2, 1, 1) for part in alone[0]))])
    assert [tuple(part.shape) for part in found] == [(6, 6, 2), (6, 6, 3), (6, 7, 2), (6, 7, 3), (6, 6), (6, 7)]
    assert (~found.context_mask).sum(1).tolist() == [6, 3, 1, 6, 6, 6]
    assert (~found.target_mask).sum(1).tolist() == [5, 7, 1, 2, 5, 5]
    assert torch.equal(found.target_y[1], alone[1].target_y[0]) and not found.context_x[1, 3:].any()
    with pytest.raises(ValueError, match=r"^batches: got none, expected at least one"):
        PaddedBatch.pad([])
    with pytest.raises(TypeError, match=r"^batches: got a PaddedBatch, expected batches without masks"):
        PaddedBatch.pad([found])  # type: ignore[list-item]  # its masks would be lost


@pytest.mark.parametrize("name", ["context_mask", "target_mask"])
@pytest.mark.parametrize("system", PROCESSES)
def test_a_mask_that_does_not_fit_is_named(system: str, name: str) -> None:
    model, batch = small(system), PaddedBatch.pad(functions())
    for wrong in (getattr(batch, name)[:, 1:], getattr(batch, name)[:1], getattr(batch, name).double()):
        for call in (lambda given: model.log_prob(*given), model.loss):
            with pytest.raises(ValueError, match=rf"^{name}: got .*, expected torch\.bool of shape \(4, "):
                call(batch._replace(**{name: wrong}))
    with pytest.raises(TypeError, match=rf"^{name}: got a list, expected a torch\.Tensor of bool"):
        model.log_prob(**batch._asdict() | {name: [[False]]})
    broken = batch.target_y.clone()
    broken[0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"^target_y: got a NaN or an infinity"):
        model.loss(batch._replace(target_y=broken))


def test_values_that_cannot_be_read_are_integrated_out_nowhere() -> None:
    """A trace cannot depend on values, so the joint density of a target with a missing output is NaN there."""
    from cmab_models.neural_processes.likelihood import joint_log_prob

    predicted = MultivariateNormal(torch.zeros(2, 4).double(), scale_tril=torch.eye(4).double().expand(2, 4, 4))
    y, there = torch.zeros(2, 2, 2).double(), torch.ones(2, 2, 2, dtype=torch.bool)
    there[0, 1] = there[1, 1, 0] = False
    expected = -0.5 * torch.tensor([2, 3]).double() * math.log(2 * math.pi)
    close(joint_log_prob(predicted, y, there), expected)

    def each(loc: Tensor, some: Tensor) -> Tensor:
        one = MultivariateNormal(loc.unsqueeze(0), scale_tril=torch.eye(4).double().unsqueeze(0), validate_args=False)
        return joint_log_prob(one, torch.zeros(1, 2, 2).double(), some.unsqueeze(0))

    found = torch.func.vmap(each)(torch.zeros(2, 4).double(), there).flatten()
    close(found[:1], expected[:1])
    assert found[1].isnan()

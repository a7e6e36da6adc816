"""Neural processes: reading in pieces equals reading at once, forgetting undoes reading, and saved models come back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cmab_models.neural_processes import (
    ANP,
    BANP,
    BNP,
    CANP,
    CMANP,
    CMANPAND,
    CNP,
    EQTNP,
    LBANP,
    LBANPND,
    NP,
    TNPA,
    TNPD,
    TNPND,
    Batch,
    IncTNP,
    NeuralProcess,
)
from cmab_models.neural_processes.parts import point_embedding
from cmab_models.pictures import context
from cmab_models.systems import SYSTEMS
from torch import Tensor
from torch.utils._pytree import tree_iter

from cmab_kernels import merge_states

SMALL: dict[str, Any] = {"dim": 12, "num_latents": 5, "num_heads": 3, "depth": 2, "embedding_depth": 2}
TRANSFORMER = {name: size for name, size in SMALL.items() if name != "num_latents"}
MODELS: dict[type[NeuralProcess], dict[str, Any]] = {
    **dict.fromkeys((CMANP, CMANPAND, LBANP, LBANPND), SMALL),
    **dict.fromkeys((EQTNP, TNPA, TNPD, TNPND, IncTNP), TRANSFORMER),
    CNP: {"dim": 12},
    CANP: {"dim": 12, "num_heads": 3},
    NP: {"dim": 12, "dim_latent": 5},
    ANP: {"dim": 12, "dim_latent": 5, "num_heads": 3},
    BNP: {"dim": 12},
    BANP: {"dim": 12, "num_heads": 3},
}
FAMILY = (CNP, CANP, NP, ANP, BNP, BANP)
"""Models that are trained to predict their context too, and whose standard deviations are at least 0.1."""


def made(kind: type[NeuralProcess], **changes: Any) -> NeuralProcess:
    return kind(2, 3, **(MODELS[kind] | changes)).double().eval()


def batch(points: int = 11, targets: int = 7) -> Batch:
    return Batch(
        *(torch.randn(2, count, width, dtype=torch.float64) for count in (points, targets) for width in (2, 3))
    )


def values(predicted: Any) -> list[Tensor]:
    return [predicted.mean, predicted.variance]


def close(ours: Any, theirs: Any) -> None:
    for mine, other in zip(tree_iter(ours), tree_iter(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_embedded_points_differ_before_training() -> None:
    """With torch's own initialisation, only 2 % of the signal is left after four layers, and attention cannot
    distinguish points."""
    torch.manual_seed(0)
    points = 2 * torch.rand(500, 3) - 1
    embedded = torch.stack([point_embedding(3, 32, 4)(points) for _ in range(10)])
    assert F.layer_norm(embedded, (32,)).var(1).mean() > 0.1


@pytest.mark.parametrize("kind", MODELS)
def test_points_in_pieces_masked_or_forgotten(kind: type[NeuralProcess]) -> None:
    model, (x, y, target_x, _) = made(kind), batch()
    with torch.no_grad():
        at_once = values(model(x, y, target_x))
        state = None
        for part in torch.arange(x.shape[1]).split(4):
            state = model.condition(x[:, part], y[:, part], state)
        close(values(model.predict(state, target_x)), at_once)

        more_x, more_y = (torch.cat([part, torch.randn_like(part)], 1) for part in (x, y))
        mask = (torch.arange(2 * x.shape[1]) >= x.shape[1]).expand(2, -1)
        close(values(model.predict(model.condition(more_x, more_y, mask=mask), target_x)), at_once)

        more = model.condition(more_x, more_y)
        assert not torch.allclose(model.predict(more, target_x).mean, at_once[0])
        if kind is IncTNP:
            with pytest.raises(RuntimeError, match="call condition with the points that are left"):
                model.forget(more, x, y)
            return
        left = model.forget(more, more_x[:, x.shape[1] :], more_y[:, x.shape[1] :])
        close(values(model.predict(left, target_x)), at_once)


@pytest.mark.parametrize("kind", MODELS)
def test_masked_points_may_hold_anything(kind: type[NeuralProcess]) -> None:
    model, (x, y, target_x, _) = made(kind), batch()
    mask = torch.arange(x.shape[1]) % 3 == 1
    holes = [part.masked_fill(mask.unsqueeze(-1), hole) for part, hole in ((x, torch.nan), (y, torch.inf))]
    leaves, found = list(model.parameters()), []
    for state in (model.condition(*holes, mask=mask.expand(2, -1)), model.condition(x[:, ~mask], y[:, ~mask])):
        predicted = values(model.predict(state, target_x))
        total = torch.stack([each.sin().sum() for each in predicted]).sum()
        found.append((predicted, torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)))
    close(*found)


@pytest.mark.parametrize("kind", MODELS)
def test_of_nothing_there_is_nothing(kind: type[NeuralProcess]) -> None:
    """The first point has no points before it; there may be no points, no targets, and no functions."""
    model, (x, y, target_x, _) = made(kind), batch()
    assert model.prefix_log_prob(x[:, :1], y[:, :1]).shape == (2, 0)
    assert model.prefix_log_prob(x[:, :0], y[:, :0]).shape == (2, 0)
    assert model(x, y, target_x[:, :0]).mean.numel() == 0
    assert model.sample(x, y, target_x[:, :0]).shape == (2, 0, 3)
    assert model(x[:0], y[:0], target_x[:0]).mean.shape[0] == 0
    assert model.sample(x[:0], y[:0], target_x[:0]).shape == (0, 7, 3)
    assert model.prefix_log_prob(x[:0], y[:0]).shape == (0, x.shape[1] - 1)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in (IncTNP, BNP, BANP)])  # in these, order counts
def test_one_of_two_equal_points_is_forgotten(kind: type[NeuralProcess]) -> None:
    model, (x, y, target_x, _) = made(kind), batch()
    with torch.no_grad():
        twice = model.condition(torch.cat([x, x[:, :1]], 1), torch.cat([y, y[:, :1]], 1))
        left = model.forget(twice, x[:, :1], y[:, :1])
        close(values(model.predict(left, target_x)), values(model(x, y, target_x)))


@pytest.mark.parametrize("kind", MODELS)
def test_a_likelihood_of_blocks_is_a_chain_of_predictions(kind: type[NeuralProcess]) -> None:
    model, given = made(kind), batch()
    x, y, target_x, target_y = given
    with torch.no_grad():
        total: Any = 0.0
        for first in range(0, 7, 3):
            block = slice(first, min(first + 3, 7))
            size = block.stop - block.start
            total += size * model.log_prob(x, y, target_x[:, block], target_y[:, block], block_size=size)
            x, y = torch.cat([x, target_x[:, block]], 1), torch.cat([y, target_y[:, block]], 1)
        found = model.log_prob(*given, block_size=3)
        close(found, total / 7)
        if kind not in FAMILY:
            close(model.loss(given), -model.log_prob(*given, block_size=7).mean())
        assert found.shape == (2,)


@pytest.mark.parametrize("kind", MODELS)
def test_likelihoods_after_every_point(kind: type[NeuralProcess]) -> None:
    model, (x, y, *_) = made(kind), batch()
    found = model.prefix_log_prob(x, y)
    expected = [
        model.log_prob(x[:, :i], y[:, :i], x[:, i : i + 1], y[:, i : i + 1], block_size=1) for i in range(1, x.shape[1])
    ]
    close(found, torch.stack(expected, 1))
    leaves = list(model.parameters())
    ours, theirs = (
        torch.autograd.grad(f.sin().sum(), leaves, allow_unused=True) for f in (found, torch.stack(expected, 1))
    )
    close([g for g in ours if g is not None], [g for g in theirs if g is not None])


@pytest.mark.parametrize("kind", [TNPA, TNPD, TNPND, IncTNP])
def test_an_empty_context_is_refused(kind: type[NeuralProcess]) -> None:
    model, (x, y, target_x, _) = made(kind), batch()
    state = model.condition(x, y, mask=torch.ones(2, x.shape[1], dtype=torch.bool))
    with pytest.raises(ValueError, match="at least one"):
        model.predict(state, target_x)


@pytest.mark.parametrize("kind", MODELS)
def test_samples(kind: type[NeuralProcess]) -> None:
    model, (x, y, target_x, _) = made(kind), batch()
    torch.manual_seed(3)
    first = model.sample(x, y, target_x, block_size=2)
    torch.manual_seed(3)
    assert first.shape == (2, 7, 3)
    assert torch.equal(first, model.sample(x, y, target_x, block_size=2))


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_saved_comes_back(kind: type[NeuralProcess], tmp_path: Path) -> None:
    model, (x, y, target_x, _) = made(kind, **({} if kind in FAMILY else {"bound_std": True})), batch()
    model.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path).double().eval()
    assert {path.name for path in tmp_path.iterdir()} >= {"model.safetensors", "config.json"}
    for mine, other in zip(values(model(x, y, target_x)), values(again(x, y, target_x)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_the_papers_sizes() -> None:
    """The published count of CMANP-AND, 1,460,951, includes CMANP's diagonal head, which it does not use."""
    diagonal_head = 64 * 128 + 128 + 128 * 2 + 2
    sizes = [sum(p.numel() for p in kind(1, 1).parameters()) for kind in (CMANP, CMANPAND, LBANP)]
    assert sizes == [1_341_634, 1_460_951 - diagonal_head, 792_514]


def test_states_of_parts_merge_and_size_is_constant() -> None:
    model, (x, y, target_x, _) = made(CMANP), batch()
    with torch.no_grad():
        parts = [model.condition(x[:, part], y[:, part]) for part in (slice(0, 6), slice(6, 11))]
        close(values(model.predict(merge_states(*parts), target_x)), values(model(x, y, target_x)))
        nothing = model.condition(x[:, :0], y[:, :0])
    assert [part.shape for part in nothing] == [part.shape for part in parts[0]]
    assert all(value.isfinite().all() for value in values(model.predict(nothing, target_x)))


def test_many_points_are_embedded_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y, target_x, _) = made(CMANP), batch()
    mask = torch.rand(2, x.shape[1]) < 0.3
    with torch.no_grad():
        expected = model.condition(x, y, mask=mask)
        monkeypatch.setattr("cmab_models.neural_processes.cmanp.CHUNK", 4)
        rows: list[int] = []
        model.embedding.register_forward_hook(lambda _, given, __: rows.append(given[0].shape[1]))
        close(model.condition(x.masked_fill(mask.unsqueeze(-1), torch.nan), y, mask=mask), expected)
        assert rows == [4, 4, 3]
        found = values(model(x, y, target_x))
    assert rows == 2 * [4, 4, 3]
    close(found, values(model(x, y, target_x)))


def test_a_context_takes_constant_memory() -> None:
    (cost,) = context.measured(["cmanp"], [200_000])
    assert cost.mebibytes <= 8.0, f"{cost.mebibytes:.1f} MiB beyond the points"


def test_forgetting_what_dominates_warns() -> None:
    model, (x, y, *_) = made(CMANP), batch()
    with torch.no_grad():
        for block in model.blocks.blocks:
            block.compress.cross_attention.query.weight.mul_(200.0)
        state = model.condition(x, y)
        with pytest.warns(RuntimeWarning, match="digits"):
            model.forget(state, x[:, :10], y[:, :10])


def test_the_joint_density_is_that_of_its_covariance() -> None:
    model, (x, y, target_x, target_y) = made(CMANPAND, bound_std=True), batch()
    with torch.no_grad():
        predicted = model(x, y, target_x)
        error = target_y.flatten(1) - predicted.mean
        inverse, size = predicted.covariance_matrix.inverse(), error.shape[1]
        quadratic = (error.unsqueeze(1) @ inverse @ error.unsqueeze(2)).flatten()
        expected = -0.5 * (quadratic + predicted.covariance_matrix.logdet() + size * math.log(2 * math.pi)) / 7
        torch.testing.assert_close(
            model.log_prob(x, y, target_x, target_y, block_size=7), expected, rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("kind", MODELS)
def test_wrong_shapes_are_named(kind: type[NeuralProcess]) -> None:
    model, (x, y, target_x, target_y) = made(kind), batch()
    for call in (
        lambda: model.condition(x[..., :1], y),
        lambda: model.condition(x, y[:, 1:]),
        lambda: model.predict(model.condition(x, y), target_x[0]),
        lambda: model.log_prob(x, y, target_x, target_y[..., :2]),
    ):
        with pytest.raises(ValueError, match=r"^(\w+_)?[xy]: got shape"):
            call()
    with pytest.raises(ValueError, match=r"^block_size: got 0"):
        model.log_prob(x, y, target_x, target_y, block_size=0)


@pytest.mark.parametrize("kind", MODELS)
def test_a_wrong_batch_or_mask_is_named(kind: type[NeuralProcess]) -> None:
    model, (x, y, target_x, target_y) = made(kind), batch()
    state, of_one = model.condition(x, y), model.condition(x[:1], y[:1])
    calls = [
        lambda: model.condition(x[:1], y[:1], state),
        lambda: model.condition(x, y, of_one),
        lambda: model.predict(state, target_x[:1]),
        lambda: model.predict(of_one, target_x),
        lambda: model(x[:1], y[:1], target_x),
        lambda: model.log_prob(x[:1], y[:1], target_x, target_y),
        lambda: model.sample(x[:1], y[:1], target_x),
    ]
    if kind is not IncTNP:
        calls += [lambda: model.forget(state, x[:1], y[:1]), lambda: model.forget(of_one, x, y)]
    for call in calls:
        with pytest.raises(ValueError, match=r"got batch|state.* shape|expected batch"):
            call()
    for mask in (torch.zeros(2, 10).bool(), torch.zeros(1, 11).bool(), torch.zeros(2, 11)):
        with pytest.raises(ValueError, match=r"^mask: got .*, expected torch\.bool of shape \(2, 11\)"):
            model.condition(x, y, None, mask)


THE_OTHERS = [pytest.param(name, marks=pytest.mark.thorough) for name in ("cmanp", "lbanp", "inctnp", "tnp-d")]


class Mean(torch.nn.Module):
    """The mean of a prediction, as a program has tensors as outputs."""

    def __init__(self, system: str, **options: Any) -> None:
        super().__init__()
        self.process = SYSTEMS[system](dim_x=1, dim_y=1, **options).eval()

    def forward(self, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
        mean: Tensor = self.process(x, y, target).mean
        return mean


@pytest.mark.parametrize("system", ["cnp", *THE_OTHERS])
@torch.no_grad()
def test_a_program_takes_batches_of_any_size(system: str) -> None:
    module, first, later = Mean(system), torch.randn(2, 9, 1), torch.randn(3, 9, 1)
    sizes = ({0: torch.export.Dim("B")},) * 3
    program = torch.export.export(module, (first,) * 3, dynamic_shapes=sizes).module()
    torch.testing.assert_close(program(later, later, later), module(later, later, later))


def test_a_target_of_a_chain_does_not_see_its_own_value() -> None:
    """Nor later ones; and it sees earlier ones."""
    model, (x, y, target_x, target_y) = made(TNPA), batch()
    chain, state = model(x, y, target_x), model.condition(x, y)
    changed = target_y.clone()
    changed[:, 3] += 1.0
    before, after = (model._given_earlier(state, target_x, values, None) for values in (target_y, changed))
    moved = (before.mean != after.mean).any(-1)
    assert not moved[:, :4].any() and moved[:, 4:].all()
    close(chain.log_prob(target_y), before.log_prob(target_y).sum(-1))
    close(chain.sample((2, 3)).shape, torch.Size([2, 3, 2, 7, 3]))


def test_deviations_of_each_target_alone_are_those_of_many_samples() -> None:
    torch.manual_seed(0)
    model, (x, y, target_x, _) = made(TNPA, num_samples=4000), batch(targets=3)
    with torch.no_grad():
        chain = model(x, y, target_x)
        drawn = chain.sample((4000,))
        assert (drawn.mean(0) - chain.mean).abs().max() < 0.1 * chain.stddev.max()
        torch.testing.assert_close(drawn.std(0), chain.stddev, rtol=0.06, atol=0.0)
        single = model(x, y, target_x[:, :1])
        close(
            single.log_prob(drawn[0, :, :1]),
            torch.distributions.Normal(single.mean, single.stddev).log_prob(drawn[0, :, :1]).sum(-1),
        )


@torch.no_grad()
def test_a_program_of_the_likelihood_of_a_chain() -> None:
    class LogProb(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.process = made(TNPA)

        def forward(self, *given: Tensor) -> Tensor:
            return self.process.log_prob(*given)

    module, first = LogProb(), tuple(batch())
    later = [torch.cat([part, part[:1]]) for part in batch()]
    program = torch.export.export(module, first, dynamic_shapes=(({0: torch.export.Dim("B")},) * 4,)).module()
    close(program(*later), module(*later))
    close(torch.compile(module, fullgraph=True, backend="eager")(*first), module(*first))


@pytest.mark.parametrize("system", ["np", "bnp", "tnp-a"])
@torch.no_grad()
def test_a_program_draws_the_same_numbers_in_every_call(system: str) -> None:
    """A call of torch's generator in the program would go on where the last call stopped."""
    module, points = Mean(system, dim=8, num_samples=3), torch.randn(3, 2, 9, 1).unbind()
    program, expected = torch.export.export(module, points).module(), module(*points)
    for _ in range(2):
        torch.testing.assert_close(program(*points), expected)

"""Regressors over keys, values and queries. The tests permute keys, compare with the regressions that the models
contain, and use tasks with exact answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cmab_models.data import glyphs
from cmab_models.regressors import (
    MAML,
    MLP,
    Attention,
    FewShot,
    Informer,
    Intention,
    IntentionModule,
    LinTransformer,
    NPFormer,
    NPRegressor,
    Regressor,
    SigmaInformer,
    Transformer,
)
from cmab_models.tasks import classes, sets
from cmab_models.tasks.base import seeded

from cmab_kernels import intention
from cmab_kernels.intention.variants import lssvm, pooled_class_scatter

KINDS: dict[type[Regressor], dict[str, Any]] = {
    Intention: {},
    Attention: {},
    Informer: {"dim": 16},
    SigmaInformer: {"dim": 16},
    Transformer: {"dim": 16},
    LinTransformer: {"dim": 16},
    NPFormer: {"dim": 16},
    IntentionModule: {"dim": 16},
    NPRegressor: {},
    MAML: {"inner_rate": 0.5},
    MLP: {"num_points": 6},
}
SETS = [sets.Sine, sets.Kabsch, sets.LeastSquares, sets.Target]


def made(kind: type[Regressor]) -> Regressor:
    torch.manual_seed(0)
    widths = {"dim_key": 2, "dim_value": 3} | ({} if kind is MAML else {"dim_out": 4})
    return kind(**widths, **KINDS[kind]).double().eval()


def points() -> list[torch.Tensor]:
    return [torch.randn(2, count, width, dtype=torch.float64) for count, width in ((5, 2), (6, 2), (6, 3))]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_points_have_no_order_and_queries_do_not_see_each_other(kind: type[Regressor]) -> None:
    model, (query, key, value), order = made(kind), points(), torch.randperm(6)
    answers = model(query, key, value)
    assert answers.shape == (2, 5, 3 if kind is MAML else 4)
    permuted = model(query, key[:, order], value[:, order])
    assert torch.allclose(permuted, answers, rtol=1e-9, atol=1e-9) == (kind is not MLP)
    torch.testing.assert_close(model(query[:, 2:3], key, value), answers[:, 2:3], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(model(query, key, value.flip(-1)), answers)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_named_and_what_is_saved_comes_back(kind: type[Regressor], tmp_path: Path) -> None:
    model, (query, key, value) = made(kind).float(), [part.float() for part in points()]
    for wrong, name in (
        ((query[..., :1], key, value), "query"),
        ((query, key[0], value[0]), "key"),
        ((query, key, value[:, 1:]), "value"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: got shape"):
            model(*wrong)
    model.save_pretrained(tmp_path)
    assert torch.equal(kind.from_pretrained(tmp_path).eval()(query, key, value), model(query, key, value))


def test_an_mlp_takes_a_fixed_number_of_points() -> None:
    query, key, value = points()
    with pytest.raises(ValueError, match=r"^key: got 5 keys, expected 6"):
        made(MLP)(query, key[:, 1:], value[:, 1:])


@torch.no_grad()
def test_one_layer_is_a_regression_on_learned_features() -> None:
    model, (query, key, value) = made(Intention), points()
    layer: Any = model.layer
    q, k, v = (
        torch.nn.functional.linear(rows, weight, bias)
        for rows, weight, bias in zip(
            (model.embedding(query), model.embedding(key), model.value(value)),
            layer.in_proj_weight.chunk(3),
            layer.in_proj_bias.chunk(3),
            strict=True,
        )
    )
    alpha = layer.alpha.double()
    fitted = (1 + alpha) * intention(q[:, None], k[:, None], v[:, None], alpha)[:, 0]
    torch.testing.assert_close(model(query, key, value), model.head(layer.out_proj(fitted)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("task", SETS)
def test_exact_answers_are_exact_and_data_is_the_same_again(task: type[sets.SetTask]) -> None:
    made = task()
    references = made.references()
    assert references["exact"] < 1e-10 < 0.5 < references["mean"]
    assert all(torch.equal(*pair) for pair in zip(made.batch(seeded(1)), made.batch(seeded(1)), strict=True))
    assert not torch.equal(made.batch(seeded(1)).key, made.batch(seeded(2)).key)
    for system in made.systems:
        model, batch = made.model(system), made.batch(seeded(3))
        made.loss(model, batch).backward()
        assert model(*batch[:3]).shape == batch.answer.shape
        assert all(
            parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters()
        ), system


def test_kabsch_is_a_rotation() -> None:
    rotation = sets._rotations(seeded(0), 50).double()
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(3).double().expand(50, 3, 3), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotation.det(), torch.ones(50).double(), rtol=1e-6, atol=1e-6)


def error(task: sets.SetTask, system: str, **changes: int) -> float:
    """Return the error of a system after the steps of the task."""
    torch.manual_seed(0)
    model, generator = task.model(system, **changes), seeded(0)
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(task.steps):
        optimiser.zero_grad()
        task.loss(model, task.batch(generator)).backward()
        optimiser.step()
    return task.evaluate(model)["mse"]


def test_intention_learns_a_sine_where_attention_cannot() -> None:
    task = sets.Sine(steps=60, batch_size=32)
    assert error(task, "intention") < 0.25 * error(task, "attention")


def test_intention_finds_a_target_with_more_than_one_head() -> None:
    task = sets.Target(steps=150, batch_size=32)
    assert error(task, "intention") < 0.25 * error(task, "intention", num_heads=1)


@pytest.mark.parametrize("estimator", ["lssvm", "scatter", "kernel", "attention"])
def test_a_class_without_examples_leaves_gradients_finite(estimator: str) -> None:
    torch.manual_seed(0)
    model = FewShot(6, 3, estimator=estimator, dim=8)
    values = torch.eye(3)[torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 0, 1, 1, 1]])]
    scores = model(torch.randn(2, 4, 6), torch.randn(2, 6, 6), values)
    answers = torch.tensor([0, 1, 2, 0, 0, 1, 0, 1])
    torch.nn.functional.cross_entropy(scores.flatten(0, 1), answers).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("estimator", ["lssvm", "scatter", "kernel", "attention"])
def test_few_shot_scores_are_those_of_the_estimator(estimator: str) -> None:
    model = FewShot(64, 4, estimator=estimator, dim=8).double()
    task = classes.FewShotTask(estimator=estimator)
    query, key, value, answer = (part.double() for part in task.drawn(seeded(0), 3, held_out=True))
    scores = model(query, key, value)
    features = [model.embedding(rows)[:, None] for rows in (query, key)]
    alpha, labels = model.log_alpha.exp(), value.argmax(-1)
    if estimator in ("lssvm", "scatter"):
        fitted = (lssvm if estimator == "lssvm" else pooled_class_scatter)(features[1], labels, 4, alpha)
        torch.testing.assert_close(
            scores, (model.log_scale.exp() * fitted.decision(features[0]))[:, 0], rtol=1e-8, atol=1e-8
        )
    again = model(query, key.flip(1), value.flip(1))
    torch.testing.assert_close(again, scores, rtol=1e-6, atol=1e-6)
    torch.nn.functional.cross_entropy(scores.flatten(0, 1), answer.long().flatten()).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    with pytest.raises(ValueError, match=r"^estimator: got .*, expected one of lssvm"):
        FewShot(64, 4, estimator="svm")


@pytest.mark.parametrize("system", ["intention", "attention"])
def test_a_layer_scores_classes_of_few_examples(system: str) -> None:
    task = classes.FewShotTask(dim=8, ways=3)
    model = task.model(system)
    assert task.scores(model, task.drawn(seeded(0), 5, held_out=True)).shape == (5, 3, 3)


def test_a_target_is_seen_by_squared_distances_from_observers_of_variance_a_quarter() -> None:
    _, observers, squared, target = sets.Target().drawn(seeded(0), 4000)
    torch.testing.assert_close(squared, torch.cdist(observers, target).square(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(observers.var((0, 1)), torch.full((2,), 0.25), rtol=0.05, atol=0)
    torch.testing.assert_close(target.var((0, 1)), torch.ones(2), rtol=0.1, atol=0)


def test_few_shot_questions_are_of_held_out_classes() -> None:
    task, (images, labels) = classes.FewShotTask(), glyphs.digits().of_classes(held_out=True)
    assert set(labels.tolist()) == {6, 7, 8, 9}
    question = task.drawn(seeded(0), 20, held_out=True)
    assert question.key.shape == (20, 20, 64)
    of_query = [(images == query).all(-1).nonzero()[0] for query in question.query[0]]
    of_keys = [(images == key).all(-1).nonzero()[0] for key in question.key[0]]
    assert [labels[i].item() for i in of_query for _ in range(5)] == [labels[i].item() for i in of_keys]
    assert not set(map(int, of_query)) & set(map(int, of_keys))
    trained, names = glyphs.digits().of_classes(held_out=False)
    assert len(trained) == 8 * int((glyphs.digits().labels < 6).sum())
    assert names.unique().tolist() == list(range(48))
    with pytest.raises(ValueError, match=r"^shots: got .*, expected at most 173, the examples of a class"):
        task.changed({"shots": 174}).drawn(seeded(0), 1, held_out=True)
    references = task.references()
    assert 0.25 == references["chance"] < 0.8 < references["nearest mean"]


def test_an_outlier_is_of_another_digit() -> None:
    task = classes.Outlier()
    question, (images, labels) = task.drawn(seeded(0), 10, held_out=True), glyphs.digits().part(True)
    for row, place in zip(question.key, question.answer, strict=True):
        of_row = [labels[(images == image).all(-1).nonzero()[0, 0]].item() for image in row]
        assert [label for label in of_row if of_row.count(label) == 1] == [of_row[int(place)]]
    first, second = (glyphs.digits().part(held_out)[0] for held_out in (False, True))
    assert len(first) + len(second) == 1797
    model = task.model("informer", dim=16, depth=1)
    assert set(task.evaluate(model)) == {"accuracy"}
    assert 0.5 < task.references()["furthest"] < 1


def test_letters_are_drawn_from_fonts() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    faces = tuple(
        f"DejaVu{kind}{style}.ttf"
        for kind in ("Sans", "Serif")
        for style in ("", "-Bold", "-Italic", "-Oblique", "-BoldItalic")
    )
    drawn = glyphs.letters(str(folder), faces)
    count = len(drawn.labels.bincount().unique())
    assert count == 1
    assert drawn.images.shape[1] == 256
    per_letter = drawn.images.unflatten(0, (int(drawn.labels.max()) + 1, -1))
    assert (per_letter.flatten(1).sum(1) > 1).all()
    means = per_letter.mean(1)
    nearest = torch.cdist(drawn.images, means).argmin(-1)
    assert (nearest == drawn.labels).double().mean() > 0.9
    with pytest.raises(ImportError, match="apt-get install fonts-noto-core"):
        glyphs.letters("no such folder")
    with pytest.raises(ValueError, match="one of digits, letters, dejavu"):
        classes.FewShotTask(glyphs="runes").references()


def test_every_image_is_turned_by_an_angle_of_its_own() -> None:
    images = torch.zeros(200, 17, 17)
    images[:, 8, 13] = 1.0  # five pixels right of the middle
    found = glyphs.turned(images.flatten(1), 40.0, seeded(0)).view_as(images)
    rows, columns = (found / found.sum((1, 2), keepdim=True)).sum(2), (found / found.sum((1, 2), keepdim=True)).sum(1)
    down, right = (weights @ torch.arange(-8.0, 9.0) for weights in (rows, columns))
    torch.testing.assert_close(torch.hypot(down, right), torch.full((200,), 5.0), rtol=0, atol=0.1)
    angles = torch.atan2(down, right).rad2deg()
    assert -41 < angles.min() < -36
    assert 36 < angles.max() < 41
    assert angles.mean().abs() < 5


def test_turned_letters_are_hard_for_pixels() -> None:
    straight, turned = (classes.FewShotTask(glyphs="dejavu", turn=turn) for turn in (0.0, 45.0))
    assert turned.most_shots() == len(glyphs.DEJAVU) - 1
    assert turned.references()["nearest mean"] < straight.references()["nearest mean"] - 0.1

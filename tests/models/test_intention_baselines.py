"""The paper's module of Intention and the baselines, against their definitions in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cmab_models.choices import largest
from cmab_models.regressors import MAML, IntentionModule, LinTransformer, NPFormer, NPRegressor
from cmab_models.regressors.baselines import EncoderLayer, LinearAttention, Pooled
from cmab_models.systems import SYSTEMS
from cmab_models.tasks import TASKS
from torch import Tensor, nn

from cmab_kernels.nn import FeedForward

NEW = ("intention-module", "lin-transformer", "np-former", "np-regressor", "maml")


def points(batch: int = 2, queries: int = 5, keys: int = 6) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(batch, n, width, dtype=torch.float64) for n, width in ((queries, 2), (keys, 2), (keys, 3))]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def norm(layer: nn.Module, rows: Tensor) -> Tensor:
    away = rows - rows.mean(-1, keepdim=True)
    found: Tensor = away / (away.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return found  # an untrained norm has weights of 1 and biases of 0


def linear_attention(layer: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One element and one head at a time: sum_j (q_i . k_j) v_j / (N sqrt(d))."""
    q, k, v = layer.query(query), layer.key(key), layer.value(value)
    heads, width = layer.num_heads, q.shape[-1] // layer.num_heads
    rows = []
    for b in range(len(q)):
        parts = []
        for h in range(heads):
            at = slice(h * width, (h + 1) * width)
            scores = torch.einsum("id,jd->ij", q[b, :, at], k[b, :, at]) / width**0.5
            parts.append(torch.einsum("ij,je->ie", scores, v[b, :, at]) / k.shape[1])
        rows.append(torch.cat(parts, -1))
    found: Tensor = layer.out(torch.stack(rows))
    return found


def pooled(layer: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One query at a time: h(q_i, mean_j g(k_j, v_j))."""
    rows = []
    for q, k, v in zip(query, key, value, strict=True):
        mean = torch.stack([layer.point(torch.cat(pair)) for pair in zip(k, v, strict=True)]).sum(0) / len(k)
        rows.append(torch.stack([layer.answer(torch.cat([each, mean])) for each in q]))
    return torch.stack(rows)


def encoded(layer: Any, rows: Tensor, read: Callable[..., Tensor]) -> Tensor:
    normed = norm(layer.norm1, rows)
    rows = rows + read(layer.self_attn, normed, normed, normed)
    found: Tensor = rows + layer.linear2(layer.linear1(norm(layer.norm2, rows)).relu())
    return found


@pytest.mark.parametrize(
    ("kind", "inner", "read"),
    [(LinTransformer, LinearAttention, linear_attention), (NPFormer, Pooled, pooled)],
)
def test_a_stack_has_its_own_reading_in_place_of_every_attention(
    kind: type[nn.Module], inner: type[nn.Module], read: Callable[..., Tensor]
) -> None:
    torch.manual_seed(0)
    model: Any = kind(2, 3, 4, dim=16, num_heads=4, depth=2).double().eval()
    query, key, value = points()
    assert sum(isinstance(each, inner) for each in model.modules()) == 3
    assert not any(isinstance(each, nn.MultiheadAttention) for each in model.modules())
    rows = model.point(torch.cat([key, value], -1))
    for layer in model.encoder.layers:
        assert isinstance(layer, EncoderLayer)
        rows = encoded(layer, rows, read)
    features = model.key(query)
    assert isinstance(model.feed_forward, FeedForward)
    expected = model.head(model.feed_forward(features + read(model.cross, features, model.key(key), rows)))
    close(model(query, key, value), expected)


def test_the_module_reads_the_weights_of_the_regression() -> None:
    torch.manual_seed(0)
    model = IntentionModule(2, 3, 4, dim=7, dim_embedded=5).double()
    with torch.no_grad():
        model.log_alpha.fill_(-1.0)
    query, key, value = points()
    rows = []
    for q, k, v in zip(query, key, value, strict=True):
        features, embedded = model.embedding(k), model.value(v)
        system = features.T @ features + torch.exp(torch.tensor(-1.0).double()) * torch.eye(7).double()
        weight = torch.linalg.solve(system, features.T @ embedded)
        rows.append(
            torch.stack([model.readout(torch.cat([model.embedding(one) @ weight, weight.flatten()])) for one in q])
        )
    close(model(query, key, value), torch.stack(rows))
    model(query, key, value).sum().backward()
    assert model.log_alpha.grad is not None and model.log_alpha.grad != 0


def test_the_module_answers_a_question_without_a_place() -> None:
    """At a query of features 0 a prediction is 0, whatever the points are, and the weights are all that is read."""
    torch.manual_seed(0)
    model = IntentionModule(2, 3, 4, dim=7).double()
    with torch.no_grad():
        model.embedding[-1].bias.zero_()
        query, key, value = points()
        whole = model.readout[0].weight.clone()
        model.readout[0].weight[:, : model.value[-1].out_features] = 0.0  # the columns of the prediction
        same = model(query, key, value)
        close(same, same[:, :1].expand_as(same))
        assert not torch.allclose(model(query, key, 2 * value), same)
        model.readout[0].weight.copy_(whole)
        assert not torch.allclose(model(query, key, value), same)


def test_a_neural_process_reads_the_mean_of_its_points() -> None:
    torch.manual_seed(0)
    model = NPRegressor(2, 3, 4, dim=9, depth=3).double()
    close(model(*points()), pooled(model.process, *points()))


@pytest.mark.parametrize(("steps", "classes"), [(1, False), (3, False), (3, True)])
def test_maml_takes_steps_of_gradient_descent_and_learns_through_them(steps: int, classes: bool) -> None:
    torch.manual_seed(0)
    model = MAML(2, 3, dim=9, depth=3, inner_steps=steps, inner_rate=0.3, classes=classes).double()
    query, key, value = points()
    if classes:
        value = F.one_hot(largest(value), 3).double()
    rows = []
    for q, k, v in zip(query, key, value, strict=True):
        weights = dict(model.network.named_parameters())
        for _ in range(steps):
            found = torch.func.functional_call(model.network, weights, (k,))
            loss = F.cross_entropy(found, largest(v)) if classes else (found - v).square().mean()
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {
                name: weight - 0.3 * gradient
                for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
            }
        rows.append(torch.func.functional_call(model.network, weights, (q,)))
    expected = torch.stack(rows)
    close(model(query, key, value), expected)
    parameters = list(model.parameters())
    for found, right in zip(
        torch.autograd.grad(model(query, key, value).square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
    with torch.inference_mode():
        close(model(query, key, value), expected.detach())


@pytest.mark.parametrize("system", NEW)
def test_no_points_are_answered(system: str) -> None:
    kind: Any = SYSTEMS[system]
    model = kind(dim_key=2, dim_value=3, **({} if system == "maml" else {"dim_out": 4})).double().eval()
    assert model(*points(keys=0)).isfinite().all()
    assert model(*points(queries=0)).shape[1] == 0
    assert len(model(*points(batch=0))) == 0


@pytest.mark.parametrize("system", NEW)
def test_a_sine_teaches_the_module_and_the_baselines(system: str) -> None:
    """A fifth of the error of an untrained model is gone after a few steps."""
    torch.manual_seed(0)
    task: Any = TASKS["sine"](batch_size=32)
    model = task.model(system)
    untrained = task.evaluate(model)["mse"]
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(80 if system in ("np-regressor", "maml") else 20):
        optimiser.zero_grad()
        task.loss(model, task.batch(generator)).backward()
        optimiser.step()
    assert task.evaluate(model)["mse"] < 0.8 * untrained


def test_a_place_is_not_learned_from_distances_by_maml() -> None:
    with pytest.raises(ValueError, match="system: got maml, expected one of intention, "):
        TASKS["target"]().model("maml")

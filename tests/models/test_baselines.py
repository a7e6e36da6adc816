"""Baselines of the published tables give the outputs of the published code.

`public_baseline_outputs.pt` holds random weights, and outputs for random points of the public code of LBANP
(https://github.com/BorealisAI/latent-bottlenecked-anp, commit 3852db6, in part from
https://github.com/tung-nd/TNP-pytorch) with these weights, in float64; for CNP and the TNPs, of tung-nd/TNP-pytorch at
commit 73df922. Where that code draws random numbers, it was given the numbers of torch's generator with seed 0, as the
models are here: 5 functions in a prediction, and 4 in a loss.
"""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cmab_models import ANP, BANP, BNP, CANP, CNP, EQTNP, LBANPND, NP, TNPA, TNPD, TNPND
from cmab_models.neural_processes import Batch, Mixture, NeuralProcess, family
from torch import Tensor
from torch.distributions import Normal

CASES: dict[str, dict[str, Any]] = torch.load(Path(__file__).with_name("public_baseline_outputs.pt"), weights_only=True)
DEPTHS = {"encoder_depth": 5, "pooled_depth": 3, "decoder_depth": 4}
ATTENTIVE = {"num_heads": 8, "query_depth": 3}
DRAWS = {"num_samples": 5, "num_train_samples": 4}
MODELS: dict[str, tuple[type[NeuralProcess], dict[str, Any]]] = {
    "cnp": (CNP, DEPTHS),
    "canp": (CANP, ATTENTIVE | DEPTHS),
    "np": (NP, {"dim_latent": 6} | DEPTHS | DRAWS),
    "anp": (ANP, {"dim_latent": 6} | ATTENTIVE | DEPTHS | DRAWS),
    "bnp": (BNP, DEPTHS | DRAWS),
    "banp": (BANP, ATTENTIVE | DEPTHS | DRAWS),
}
TRANSFORMERS: dict[str, tuple[type[NeuralProcess], dict[str, Any]]] = {
    "tnpa": (TNPA, {"num_samples": 5}),
    "tnpa_bound": (TNPA, {"num_samples": 5, "bound_std": True}),
    "tnpd": (TNPD, {}),
    "tnpnd": (TNPND, {"rank": 4, "projection_depth": 3}),
    "tnpnd_lowrank": (TNPND, {"rank": 4, "projection_depth": 3, "covariance": "low-rank"}),
}
CHAINS = ("tnpa", "tnpa_bound")


@pytest.fixture(autouse=True)
def numbers_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the models the random numbers that the public code was given."""

    def drawn(kind: str, shape: tuple[int, ...]) -> Tensor:
        numbers: Tensor = getattr(torch, kind)(*shape, generator=torch.Generator().manual_seed(0))
        return numbers

    monkeypatch.setattr(family, "_same_numbers", drawn)


MIXTURES = ("np", "anp", "bnp", "banp")
PLACES = [
    (r"net_(pre|v)\.2\.|self_attn\.", "points.attention."),
    (r"net_(pre|v)\.(0\.)?(?=\d)", "points.layers."),
    ("net_post", "pooled"),
    ("net_qk", "coordinates"),
    (r"\battn\.", "attention."),
    (r"fc_q", "query"),
    (r"fc_k", "key"),
    (r"fc_v", "value"),
    (r"fc_out", "output"),
    (r"ln1", "norm"),
    (r"ln2", "output_norm"),
    (r"^dec\.fc_ctx", "decoder.more"),
    (r"^dec\.fc", "decoder.layers.0"),
    (r"^dec\.mlp\.(\d+)", lambda found: f"decoder.layers.{int(found[1]) + 1}"),
    (r"^enc1", "encoders.0"),
    (r"^enc2", "encoders.1"),
    (r"^denc", "encoder"),
    (r"^lenc", "latent_encoder"),
]
"""Patterns of the published code's names of parameters -> ours."""
OF_EQTNP = [
    (r"^encoder\.layers\.(\d+)\.dataset_self_attn\.", r"attentions.\1."),
    (r"^encoder\.layers\.(\d+)\.ff\.", r"feed_forwards.\1."),
    (r"cross_attn\.", "cross_attention."),
    (r"cross_ff\.", "cross_feed_forward."),
    (r"fn\.net\.0", "expand"),
    (r"fn\.net\.2", "contract"),
    (r"fn\.to_q", "query"),
    (r"fn\.to_out", "output"),
    (r"norm_context", "context_norm"),
    (r"^embedder", "embedding"),
    (r"^query_embedder", "decoder.embedding"),
    (r"^norm", "decoder.norm"),
    (r"^predictor", "head.layers"),
]
OF_TNP = [
    (r"^embedder", "embedding"),
    (r"^predictor", "head.layers"),
    (r"^mean_net", "head.mean"),
    (r"^std_encoder", "head.encoder"),
    (r"^projector", "head.projection"),
    (r"^diag_net", "head.diagonal"),
]
OF_TNPA = [
    *OF_TNP,
    (r"^encoder\.", ""),
    (r"self_attn", "attention"),
    (r"linear1", "feed_forward.0"),
    (r"linear2", "feed_forward.2"),
    (r"norm1", "norm"),
    (r"norm2", "feed_norm"),
]


def renamed(weights: dict[str, Tensor], places: list[Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        for theirs, ours in places:
            # The value of an attention in `PointEncoder` has an activation before it in one of two encoders.
            if "net_" in theirs and "attention" in str(ours) and not re.search(r"self_attn|net_pre\.2\.(fc|ln)", name):
                continue
            name = re.sub(theirs, ours, name)
        found[name] = weight
    return found


def loaded(name: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    case = CASES[name]
    weights = {key: weight.double() for key, weight in case["weights"].items()}
    if name.startswith("lbanpnd"):
        return LBANPND.from_official(weights, num_heads=3).eval(), case
    if name == "eqtnp":
        model: Any = EQTNP(2, 3, dim=12, num_heads=3, depth=3, ff_dim=10, embedding_depth=3)
        split = {key: part for key in weights if "to_kv" in key for part in [weights[key]]}
        for key, pair in split.items():
            del weights[key]
            for part, ours in zip(pair.chunk(2), ("key", "value"), strict=True):
                weights[key.replace("fn.to_kv", ours)] = part
        weights = renamed(weights, OF_EQTNP)
    elif name in TRANSFORMERS:
        kind, sizes = TRANSFORMERS[name]
        model = kind(2, 3, dim=12, num_heads=3, depth=2, ff_dim=10, embedding_depth=3, **sizes)
        weights = renamed(weights, OF_TNPA if name in CHAINS else OF_TNP)
    else:
        kind, sizes = MODELS[name]
        model, weights = kind(2, 3, dim=16, **(sizes | changes)), renamed(weights, PLACES)
    model.double().load_state_dict(weights)
    return model.eval(), case


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_predictions_are_those_of_the_published_code(name: str) -> None:
    model, case = loaded(name)
    predicted = model(case["xc"], case["yc"], case["xt"])
    if "scale_tril" in case or "covariance" in case:
        close(predicted.loc, case["mean"])
        covariance = case["covariance"] if "covariance" in case else case["scale_tril"] @ case["scale_tril"].mT
        close(predicted.covariance_matrix, covariance)
        return
    functions = predicted.functions if name in MIXTURES + CHAINS else predicted
    close(functions.mean, case["mean"])
    close(functions.stddev, case["stddev"])


@pytest.mark.parametrize("name", CASES)
def test_likelihoods_are_those_of_the_published_code(name: str) -> None:
    """The published code takes the mean over the functions of a mixture of the density of each target."""
    model, case = loaded(name)
    close(model.log_prob(*(case[part] for part in ("xc", "yc", "xt", "yt"))).mean(), case["log_prob"])


@pytest.mark.parametrize("name", [name for name in CASES if "loss" in CASES[name]])
def test_losses_are_those_of_the_published_code(name: str) -> None:
    """With several values of the latent variable the loss is weighted by importance; with one it is the ELBO."""
    model, case = loaded(name)
    batch = Batch(*(case[part] for part in ("xc", "yc", "xt", "yt")))
    close(model.loss(batch), case["loss"])
    if "elbo" in case:
        close(loaded(name, num_train_samples=1)[0].loss(batch), case["elbo"])


@pytest.mark.parametrize("name", [*MIXTURES, *CHAINS])
def test_samples_have_a_density_each(name: str) -> None:
    """As many samples as functions are no pairs of them."""
    model, case = loaded(name)
    with torch.no_grad():
        predicted: Any = model(case["xc"], case["yc"], case["xt"])
        for shape in ((5,), (2, 3)):
            drawn = predicted.sample(shape)
            expected = torch.stack([predicted.log_prob(each) for each in drawn.flatten(0, -4)])
            close(predicted.log_prob(drawn), expected.unflatten(0, shape))


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_that_of_the_published_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws depend on the values drawn before them; in training with bounded deviations, these have noise."""
    model, case = loaded(name)
    draws = family.noise("randn", *case["sample"].shape, like=case["sample"], fresh=False)
    monkeypatch.setattr("cmab_models.neural_processes.tnpa.noise", lambda *_, **__: draws)
    with torch.no_grad():
        close(model(case["xc"], case["yc"], case["xt"]).sample((5,)), case["sample"])
    model.train()
    torch.manual_seed(3)
    close(model.loss(Batch(*(case[part] for part in ("xc", "yc", "xt", "yt")))), case["training_loss"])


SIZES = {"np": 232_194, "anp": 348_418, "canp": 331_906, "bnp": 248_450, "banp": 364_674}
"""System -> parameters of the published model for functions of one variable."""


def test_sizes_are_those_of_the_published_code() -> None:
    """The published LBANP-ND also has the diagonal head of LBANP, which it does not use."""
    for name, size in SIZES.items():
        assert sum(weight.numel() for weight in MODELS[name][0](1, 1).parameters()) == size
    assert sum(weight.numel() for weight in EQTNP(1, 1).parameters()) == 492_354
    assert [sum(weight.numel() for weight in kind(1, 1).parameters()) for kind in (TNPA, TNPD)] == [222_082] * 2
    sizes = {"cholesky": 332_821, "low-rank": 374_294}
    for covariance, size in sizes.items():
        assert sum(weight.numel() for weight in TNPND(1, 1, covariance=covariance).parameters()) == size
    unused = 64 * 128 + 128 + 128 * 2 + 2
    assert sum(weight.numel() for weight in LBANPND(1, 1, num_latents=8).parameters()) == 904_151 - unused


@pytest.mark.parametrize("name", MIXTURES)
def test_training_draws_new_numbers_and_evaluation_the_same(name: str) -> None:
    model, case = loaded(name)
    batch = Batch(*(case[part] for part in ("xc", "yc", "xt", "yt")))
    assert model.loss(batch) == model.loss(batch) and torch.equal(model.log_prob(*batch), model.log_prob(*batch))
    model.train()
    torch.manual_seed(1)
    first, second = model.loss(batch), model.loss(batch)
    torch.manual_seed(1)
    assert first != second and first == model.loss(batch)
    assert torch.equal(model.log_prob(*batch), copy.deepcopy(model).eval().log_prob(*batch))


def test_a_mixture() -> None:
    """Moments and densities equal those of their definitions; all targets of a draw belong to one function."""
    torch.manual_seed(0)
    functions = Normal(torch.randn(6, 2, 4, 3).double(), torch.rand(6, 2, 4, 3).double() + 0.1)
    mixture, y = Mixture(functions), torch.randn(2, 4, 3).double()
    second = (functions.mean.square() + functions.variance).mean(0)
    close(mixture.variance, second - functions.mean.mean(0).square())
    close(mixture.log_prob(y), functions.log_prob(y).sum(-1).exp().mean(0).log())
    apart = Mixture(Normal(100.0 * torch.arange(6.0).view(6, 1, 1, 1).expand(6, 2, 4, 3), 1.0))
    drawn = apart.sample((1000,)) / 100
    which = drawn.round()
    assert drawn.shape == (1000, 2, 4, 3) and (drawn - which).abs().max() < 0.1
    assert (which == which[:, :, :1, :1]).all() and which[:, 0, 0, 0].unique().numel() == 6
    assert not torch.equal(which[:, 0], which[:, 1])
    assert apart.sample().shape == (2, 4, 3) and apart.batch_shape == (2, 4) and apart.event_shape == (3,)


def test_a_bootstrap_of_equal_points_is_the_context() -> None:
    """If all points are the same, a resampled context is the context, and centred residuals are 0."""
    model, case = loaded("bnp")
    x, y = (case[part][:, :1].expand(-1, 5, -1) for part in ("xc", "yc"))
    functions = model(x, y, case["xt"]).functions.mean
    assert functions.std(0).max() < 1e-12
    assert model(case["xc"], case["yc"], case["xt"]).functions.mean.std(0).min() > 1e-6


@torch.no_grad()
@pytest.mark.thorough
def test_bounds_of_the_likelihood_become_tighter() -> None:
    """More values of the latent variable give a better bound of the density of all points, estimated from the prior."""
    (model, case), means = loaded("np"), []
    x, y, target_x, target_y = (case[part] for part in ("xc", "yc", "xt", "yt"))
    model.train()
    for count in (1, 4, 64):
        model.num_train_samples = count
        torch.manual_seed(0)
        losses = [model.loss(Batch(x, y, target_x, target_y)) for _ in range(800 // count)]
        means.append(-torch.stack(losses).mean())
    z = model._latent(state := model.condition(x, y)).sample((5_000,))
    points = torch.cat([x, target_x], 1), torch.cat([y, target_y], 1)
    each = model._functions(state, points[0], z).log_prob(points[1]).sum((2, 3))
    likelihood = (each.logsumexp(0) - math.log(len(z))).mean() / points[0].shape[1]
    assert means[0] < means[1] - 0.003 < means[2] and abs(means[2] - likelihood) < 0.003

"""Weights saved by the authors' code give the outputs of the authors' code.

`public_code_outputs.pt` holds random weights in float64, and outputs for random inputs of the public code of CMANP and
LBANP (https://github.com/BorealisAI/constant-memory-anp) with these weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cmab_models import CMANP, CMANPAND, LBANP
from torch import Tensor

from cmab_kernels import nn, use_impl

CASES: dict[str, dict[str, Any]] = torch.load(Path(__file__).with_name("public_code_outputs.pt"), weights_only=True)
MODELS = {"cmanp": CMANP, "cmanp_bound": CMANP, "lbanp": LBANP, "cmanp_and": CMANPAND}


def loaded(name: str) -> tuple[Any, dict[str, Any]]:
    case = CASES[name]
    return MODELS[name].from_official(case["weights"], num_heads=case["num_heads"], bound_std=case["bound_std"]), case


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.fixture(params=["auto", "reference"])
def implementation(request: pytest.FixtureRequest) -> Any:
    """Run a test with the fused implementation of this machine, and with the definition."""
    with use_impl(request.param):
        yield


by_both = pytest.mark.usefixtures("implementation")


@by_both
@pytest.mark.parametrize("name", ["cmanp", "cmanp_bound", "lbanp"])
def test_means_and_deviations(name: str) -> None:
    model, case = loaded(name)
    predicted = model(case["xc"], case["yc"], case["xt"])
    close(predicted.mean, case["mean"])
    close(predicted.stddev, case["stddev"])


@by_both
@pytest.mark.parametrize("name", ["cmanp", "cmanp_bound"])
def test_a_context_that_grows(name: str) -> None:
    """One update of the state adds four targets to the context; the last two are predicted."""
    model, case = loaded(name)
    with torch.no_grad():
        state = model.condition(case["xc"], case["yc"])
        state = model.condition(case["xt"][:, :4], case["yt"][:, :4], state)
        predicted = model.predict(state, case["xt"][:, 4:])
    close(predicted.mean, case["mean_after_4_targets"])
    close(predicted.stddev, case["stddev_after_4_targets"])


@by_both
def test_the_log_likelihood() -> None:
    model, case = loaded("cmanp")
    close(model.log_prob(*(case[name] for name in ("xc", "yc", "xt", "yt"))), case["log_prob"])


@by_both
def test_joint_likelihoods() -> None:
    """Each block of targets joins the context of the next block. A single block may hold all targets."""
    model, case = loaded("cmanp_and")
    points = [case[name] for name in ("xc", "yc", "xt", "yt")]
    targets = case["xt"].shape[1]
    close(targets * model.log_prob(*points, block_size=targets), case["joint_log_prob_of_all"])
    close(model.log_prob(*points, block_size=case["block_size"]), case["log_prob_in_blocks"])


@by_both
@pytest.mark.parametrize("calls", ["one", "several"])
def test_a_block(calls: str) -> None:
    """A block has the authors' result and state, before and after an update, in one native call and layer by layer."""
    case = CASES["cmab"]
    block = nn.CMAB.from_official(case["weights"], num_heads=case["num_heads"])
    if calls == "several":
        block.compress.self_feed_forward.expand.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        before = block.update(case["inputs"], case["latents"], block.init_state(2))
        after = block.update(case["new_inputs"], case["latents"], before.state)
        whole = block(case["inputs"], case["latents"])
    for update, name in ((before, ""), (after, "_after")):
        close(update.latents, case[f"out{name}"])
        close(update.state.out, case[f"state_out{name}"])
        close(update.state.lse, case[f"lse{name}"])
    close(whole, case["out"])
    close(block(case["inputs"], case["latents"]), case["out"])


def changed(name: str, **changes: Tensor | None) -> dict[str, Tensor]:
    """Return the weights of a case with some replaced, and those without a replacement removed."""
    return {key: tensor for key, tensor in (CASES[name]["weights"] | changes).items() if tensor is not None}


def refused(kind: Any, weights: Any, message: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=message):
        kind.from_official(weights, num_heads=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": None}, "got no 'latents'"),
        ({"query_embedder.0.weight": None}, "got no 'query_embedder.0.weight'"),
        ({"norm.weight": None, "norm.bias": None}, "got no 'norm.bias', 'norm.weight'"),
        ({"encoder.layers.1.cross_attn.fn.to_kv.weight": None}, "got no 'encoder.layers.1.cross_attn.fn.to_kv.weight'"),
        (
            {"encoder.layers.0.cross_ff.fn.net.5.weight": torch.zeros(2)},
            "also 'encoder.layers.0.cross_ff.fn.net.5.weight'",
        ),
        ({"predictor.2.bias": torch.zeros(7)}, r"\['predictor.2.bias'\]: got shape \(7,\), expected \(2,\)"),
        (
            {"encoder.layers.1.cross_attn.fn.to_kv.weight": torch.zeros(12, 12)},
            r"to_kv.weight'\]: got shape \(12, 12\), expected \(24, ",
        ),
        ({"epoch": 7}, "got no tensor at 'epoch'"),
    ],
)
def test_weights_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    refused(CMANP, changed("cmanp", **changes), message)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (LBANP, "cmanp", "got also 'encoder.layers.0.latents'.*, expected the weights of a LBANP"),
        (CMANP, "lbanp", "got no 'encoder.layers.0.latents'"),
        (CMANP, "cmanp_and", "also 'mean_net.0.bias'"),
        (CMANPAND, "cmanp", "got no 'mean_net.0.bias'"),
        (nn.CMAB, "cmanp", "got no 'cross_ff.fn.net.2.weight'"),
    ],
)
def test_weights_of_another_model_are_named(kind: Any, name: str, message: str) -> None:
    refused(kind, CASES[name]["weights"], message)


def test_a_block_that_lacks_a_weight() -> None:
    refused(nn.CMAB, changed("cmab", **{"cross_ff.norm.bias": None}), "got no 'cross_ff.norm.bias'")
    refused(nn.CMAB, list(CASES["cmab"]["weights"]), "got a list", TypeError)
    refused(CMANP, None, "got None", TypeError)


def test_weights_are_copied() -> None:
    weights = changed("cmab")
    block = nn.CMAB.from_official(weights, num_heads=3)
    weights["latents"] += 1
    assert torch.equal(block.latents + 1, weights["latents"]) and block.latents.dtype == torch.float64

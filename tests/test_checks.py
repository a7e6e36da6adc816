"""The launches of value checks on a GPU: none, or one that turns a bad value into NaN; no assertion on the device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import cmab_kernels as ck
from cmab_kernels import nn
from cmab_kernels.intention import variants
from cmab_kernels.intention.solve.api import penalty_of
from cmab_kernels.runtime import checks


class OnGpu(Tensor):
    """A tensor on the CPU that says that it is on a GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)


class Launched(TorchDispatchMode):
    """The names of the operations that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


def _on_gpu(values: list[float]) -> Tensor:
    return torch.tensor(values).as_subclass(OnGpu)


def test_a_negative_value_on_a_gpu_launches_nothing() -> None:
    alpha, mask = _on_gpu([1.0, -1.0]), torch.tensor([False, True])
    with Launched() as launched:
        checks.refuse_negative("alpha", alpha)
        checks.refuse_negative("weights", alpha, absent=mask)
        checks.refuse_not_finite(alpha=alpha)
    assert not launched.names


def test_a_value_that_is_not_allowed_becomes_nan_on_a_gpu_only() -> None:
    values = [0.5, -1e-9, 2.0, -0.0]
    found = checks.nan_if_refused(_on_gpu(values), largest=1.0)
    assert torch.equal(found.isnan(), torch.tensor([False, True, True, False]))
    on_cpu = torch.tensor(values)
    assert checks.nan_if_refused(on_cpu, largest=1.0) is on_cpu


def test_a_number_costs_one_fill() -> None:
    with Launched() as launched:
        penalty_of(0.1, torch.Size([3, 4]), torch.device("cpu"))
    assert launched.names == ["full"]


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_a_negative_weight_that_is_not_read_is_nan(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the host does not wait for the values, a negative weight affects only its own head, and has no effect under
    the mask."""
    monkeypatch.setattr(checks, "is_read", lambda tensor: False)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    key, value = torch.randn(3, 1, 9, 4), torch.randn(3, 1, 9, 2)
    mask = torch.zeros(3, 9, dtype=torch.bool)
    mask[2, 5] = True
    weights = torch.ones(3, 9)
    weights[1, 3] = weights[2, 5] = -1.0
    out = ck.intention(key, key, value, 0.1, form=form, weights=weights, key_padding_mask=mask, impl="reference")
    assert (
        torch.equal(out.isnan().flatten(1).all(1), torch.tensor([False, True, False])) and not out[[0, 2]].isnan().any()
    )


def test_a_label_that_is_not_read_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A label outside the classes affects only its own head, and has no effect under the mask; nothing is gathered out
    of bounds."""
    monkeypatch.setattr(checks, "is_read", lambda tensor: False)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    key, labels = torch.randn(4, 1, 9, 2), torch.arange(9).expand(4, 9) % 3
    labels, mask = labels.clone(), torch.zeros(4, 9, dtype=torch.bool)
    labels[1, 3], labels[2, 4], labels[3, 5] = 3, -1, 2**40
    mask[3, 5] = True
    for pooled in (False, True):
        moments = variants.class_moments(key, labels, 3, pooled=pooled, key_padding_mask=mask, impl="reference")
        for part in moments:
            assert (
                torch.equal(part.isnan().flatten(1).all(1), torch.tensor([False, True, True, False]))
                and not part[[0, 3]].isnan().any()
            )


@pytest.mark.parametrize("module", [nn.MultiheadIntention, nn.MultiheadSigmaIntention, nn.NystromAttention])
def test_a_float_mask_that_is_not_read_is_nan(module: type[torch.nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is neither 0 nor -inf would raise an error if it were read; here it makes every result NaN, without
    an assertion."""
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    options = {"num_landmarks": 3} if module is nn.NystromAttention else {}
    layer, points, mask = module(8, 2, batch_first=True, **options), torch.randn(2, 6, 8), torch.zeros(2, 6)
    mask[1, 4] = -torch.inf
    ignored = layer(points, points, points, key_padding_mask=mask == -torch.inf)[0]
    assert torch.equal(layer(points, points, points, key_padding_mask=mask)[0], ignored)
    mask[0, 2] = -1e4
    with Launched() as launched:
        assert layer(points, points, points, key_padding_mask=mask)[0].isnan().all()
    assert "_assert_async" not in launched.names


TOKENS = torch.randn(1, 2, 12, 4)
COUNTS = {
    "num_landmarks": lambda count: ck.nystrom_attention(TOKENS, TOKENS, TOKENS, count),
    "num_landmarks of a stream": lambda count: ck.continual_nystrom_init(TOKENS, TOKENS, TOKENS, count).sums,
    "pinv_iterations": lambda count: ck.nystrom_attention(TOKENS, TOKENS, TOKENS, 4, pinv_iterations=count),
    "iterations": lambda count: ck.iterative_pinv(torch.eye(3) + 0.1, count),
    "every": lambda count: ck.prefix_attention_states(TOKENS, TOKENS, TOKENS, every=count).out,
    "every of a regression": lambda count: ck.prefix_ridge_states(TOKENS, TOKENS, every=count).gram,
}


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_a_count_may_be_one_of_numpys(count: Any) -> None:
    """A count may be a NumPy integer, like the sizes of modules; True raises an error."""
    for number in (np.int64(3), np.uint8(3)):
        torch.testing.assert_close(count(number), count(3), rtol=0, atol=0)
    for wrong in (True, np.bool_(True), 3.0, "3", np.int64(0), torch.tensor(3)):
        with pytest.raises((TypeError, ValueError), match=r"an int (>= 1|from 1|between 1)"):
            count(wrong)


def test_iterations_of_a_module_may_be_numpys() -> None:
    module = nn.NystromAttention(8, 2, num_landmarks=np.int64(4), pinv_iterations=np.int64(5), batch_first=True)
    assert type(module.pinv_iterations) is int and type(module.num_landmarks) is int


# ---- weights


def test_a_check_of_weights_copies_nothing() -> None:
    """Memory is constant in the number of keys for weights that are expanded, have gaps, or have a mask beside them."""
    heads, keys = 16, 20_000
    key, weights = torch.randn(1, heads, keys, 2), torch.rand(1, heads, keys)
    mask = torch.zeros(1, keys, dtype=torch.bool)
    mask[:, -9:] = True
    for given in (weights[:, 0], weights, torch.rand(1, keys, heads).mT, weights.masked_fill(mask, torch.nan)):
        for padding in (None, mask):
            if padding is None and given.isnan().any():
                continue
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
                ck.ridge_state(key, key, weights=given, key_padding_mask=padding)
            most = max(event.cpu_memory_usage for event in watched.events())
            # Only if some weights are negative, perhaps under the mask, are they checked one by one, with one byte
            # each.
            assert most <= (heads * keys if given.isnan().any() else 8192), (given.stride(), padding is not None, most)


@pytest.mark.parametrize("form", ["of all heads", "of each head", "with gaps", "expanded over the batch"])
def test_a_negative_weight_is_found_wherever_it_is(form: str) -> None:
    key, mask = torch.randn(2, 3, 7, 2), torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 4] = True
    full = {
        "of all heads": lambda: torch.rand(2, 7),
        "of each head": lambda: torch.rand(2, 3, 7),
        "with gaps": lambda: torch.rand(2, 7, 3).mT,
        "expanded over the batch": lambda: torch.rand(1, 7),
    }[form]
    for row in range(2):
        for at in range(7):
            weights = full()
            weights[min(row, len(weights) - 1), ..., at] = -1.0
            weights = weights.expand(2, *weights.shape[1:])
            hidden = (row, at) == (1, 4) and form != "expanded over the batch"
            with nullcontext() if hidden else pytest.raises(ValueError, match=r"^weights: got a negative element"):
                ck.ridge_state(key, key, weights=weights, key_padding_mask=mask)


def test_a_penalty_of_a_wider_dtype_must_fit() -> None:
    gram = torch.eye(2)
    for alpha in (1e300, torch.tensor(1e300, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"^alpha: got (1e|a number that is too large).*finite in torch.float32"):
            ck.regularised_solve(gram, gram, alpha)


@pytest.mark.parametrize("call", ["ridge_state", "intention", "ridge_step", "class_moments"])
def test_weights_that_float32_cannot_hold_are_named(call: str) -> None:
    """Keys in float32 accept weights in float64, for example growing weights that let old keys fade, and so do keys in
    float64."""
    key, grown = torch.randn(1, 1, 400, 2), 1.25 ** torch.arange(400, dtype=torch.float64)[None]
    run = {
        "ridge_state": lambda rows, w: ck.ridge_state(rows, rows, weights=w).gram,
        "intention": lambda rows, w: ck.intention(rows, rows, rows, alpha=1e-300, weights=w),
        "ridge_step": lambda rows, w: (
            ck.ridge_step(ck.empty_ridge(1, 1, 2, 2), rows, rows, alpha=1e-300, weights=w).state.gram
        ),
        "class_moments": lambda rows, w: (
            variants.class_moments(rows, torch.zeros(1, 400, dtype=torch.int64), 1, weights=w).mean
        ),
    }[call]
    for weights in (grown, grown * 1e-90):
        with pytest.raises(ValueError, match=r"^weights: got .* as the largest, expected .* float32"):
            run(key, weights)
        assert run(key.double(), weights).isfinite().all()
    faded = grown / grown.max()  # the smallest weights become 0 compared with 1
    torch.testing.assert_close(run(key, faded).double(), run(key.double(), faded), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "given", ["no", [0], object(), np.ones(2), torch.ones(2)], ids=lambda given: type(given).__name__
)
def test_a_flag_has_a_truth_of_its_own(given: Any) -> None:
    with pytest.raises(TypeError, match=r"^enable_gqa: got .*, expected True or False"):
        ck.latent_attention(torch.ones(1, 2, 3, 4), *2 * [torch.ones(1, 2, 3, 4)], enable_gqa=given)
    assert checks.as_flag("enable_gqa", np.True_) and checks.as_flag("enable_gqa", torch.tensor(1))

"""`nn.MultiheadAttention` equals torch's to 1e-12 in float64, and its fused path runs where it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cmab_kernels
from cmab_kernels.nn import MultiheadAttention
from cmab_kernels.nn.multihead import attention

DIM, HEADS, BATCH, QUERIES, KEYS = 24, 3, 2, 5, 37

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "both extra keys, no bias": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    "other widths": {"kdim": 7, "vdim": 11},
    "other widths, extra keys": {"kdim": 7, "vdim": 24, "add_bias_kv": True, "add_zero_attn": True},
    "unused dropout": {"dropout": 0.5},
}


def pair(**config: Any) -> tuple[torch.nn.MultiheadAttention, MultiheadAttention]:
    """Return torch's module and ours with the same weights and random biases, because torch's initial biases of 0 would
    hide a missing bias."""
    config = {"dtype": torch.float64, **config}
    theirs = torch.nn.MultiheadAttention(DIM, HEADS, **config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours = MultiheadAttention(DIM, HEADS, **config).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(module: torch.nn.MultiheadAttention, batched: bool = True, **factory: Any) -> list[Tensor]:
    """Return query, key and value in the layout of the module.

    The logits of successive queries grow from 0 to a hundred.
    """
    growth = torch.linspace(0.01, 1.0, QUERIES, dtype=torch.float64)[:, None]
    tensors = []
    for length, width in ((QUERIES, DIM), (KEYS, module.kdim), (KEYS, module.vdim)):
        tensor = 3 * torch.randn(BATCH, length, width, dtype=torch.float64)
        tensor = tensor if tensors else tensor * growth
        tensor = tensor if module.batch_first else tensor.transpose(0, 1)
        tensor = tensor if batched else tensor.select(0 if module.batch_first else 1, 1)
        tensors.append(tensor.to(**factory).detach().requires_grad_())
    return tensors


def outputs_and_gradients(module: torch.nn.Module, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Return the output, and the gradients of a random weighting of the output with respect to all tensors and
    parameters."""
    out, weights = module(*tensors, need_weights=False, **options)
    assert weights is None
    generator = torch.Generator().manual_seed(1)
    weighting = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    leaves = [*tensors, *module.parameters()]
    return [out.detach(), *torch.autograd.grad(out, leaves, weighting.to(out.dtype))]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12 * float(other.abs().max()))


@pytest.fixture
def only_fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function. After it was called, every call that goes to torch raises an error."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("handed to torch")

    return lambda: monkeypatch.setattr(torch.nn.MultiheadAttention, "forward", refuse)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parity(
    config: dict[str, Any], masked: bool, batched: bool, batch_first: bool, only_fused: Callable[[], None]
) -> None:
    theirs, ours = pair(**config, batch_first=batch_first)
    tensors = inputs(ours, batched)
    mask = torch.rand((BATCH, KEYS) if batched else (KEYS,)) < 0.4 if masked else None
    expected = outputs_and_gradients(theirs, tensors, key_padding_mask=mask)
    only_fused()
    assert_equal(outputs_and_gradients(ours, tensors, key_padding_mask=mask), expected)


def test_self_attention_of_one_tensor(only_fused: Callable[[], None]) -> None:
    theirs, ours = pair()
    tensor = torch.randn(KEYS, BATCH, DIM, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(theirs(tensor, tensor, tensor)[0].sin().sum(), tensor)
    only_fused()
    gradient = torch.autograd.grad(ours(tensor, tensor, tensor, need_weights=False)[0].sin().sum(), tensor)
    assert_equal(list(gradient), list(expected))


def test_gradient_of_an_expanded_sum() -> None:
    theirs, ours = pair()
    tensors = inputs(ours)
    gradients = [
        torch.autograd.grad(module(*tensors, need_weights=False)[0].sum(), tensors) for module in (theirs, ours)
    ]
    assert_equal(list(gradients[1]), list(gradients[0]))


DELEGATED: dict[str, dict[str, Any]] = {
    "averaged weights": {"need_weights": True},
    "weights of each head": {"need_weights": True, "average_attn_weights": False},
    "bool attn_mask": {"attn_mask": torch.rand(QUERIES, KEYS) < 0.4},
    "float attn_mask": {"attn_mask": torch.randn(QUERIES, KEYS, dtype=torch.float64)},
    "attn_mask of each head": {"attn_mask": torch.rand(BATCH * HEADS, QUERIES, KEYS) < 0.4},
    "causal": {"attn_mask": torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(1), "is_causal": True},
    "float key_padding_mask": {"key_padding_mask": torch.randn(BATCH, KEYS, dtype=torch.float64)},
}


@pytest.mark.parametrize("options", DELEGATED.values(), ids=DELEGATED)
def test_what_the_operator_does_not_do_is_torchs(options: dict[str, Any]) -> None:
    theirs, ours = pair()
    options = {"need_weights": False, **options}
    tensors = inputs(ours)
    mine, my_weights = ours(*tensors, **options)
    other, other_weights = theirs(*tensors, **options)
    assert torch.equal(mine, other)
    assert (my_weights is None) == (not options["need_weights"])
    assert my_weights is None or torch.equal(my_weights, other_weights)


def test_a_float_mask_of_0_and_minus_infinity_is_read_as_bool(only_fused: Callable[[], None]) -> None:
    theirs, ours = pair(batch_first=True)
    tensors = inputs(ours)
    mask = torch.arange(KEYS) >= torch.tensor([[KEYS], [5]])
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)
    expected = outputs_and_gradients(theirs, tensors, key_padding_mask=added)
    assert ours.why_torch(*tensors, added, need_weights=False) is None
    assert "added" in ours.why_torch(*tensors, added.clone().requires_grad_(), need_weights=False)
    only_fused()
    assert_equal(outputs_and_gradients(ours, tensors, key_padding_mask=added), expected)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_equal(outputs_and_gradients(compiled, tensors, key_padding_mask=added), expected)


def test_heads_without_a_kernel_are_torchs() -> None:
    theirs, ours = torch.nn.MultiheadAttention(600, 2), MultiheadAttention(600, 2)
    ours.load_state_dict(theirs.state_dict())
    tensor = torch.randn(5, 2, 600)
    assert "no kernel" in ours.why_torch(tensor, tensor, tensor, need_weights=False)
    assert torch.equal(*(module(tensor, tensor, tensor, need_weights=False)[0] for module in (ours, theirs)))
    with cmab_kernels.use_impl("reference"):
        assert ours.why_torch(tensor, tensor, tensor, need_weights=False) is None


def test_weights_come_by_default() -> None:
    _, ours = pair()
    assert ours(*inputs(ours))[1].shape == (BATCH, QUERIES, KEYS)


def test_dropout_is_torchs_in_training_and_nothing_in_eval() -> None:
    theirs, ours = pair(dropout=0.5)
    tensors = inputs(ours)
    results = []
    for module in (theirs.train(), ours.train()):
        torch.manual_seed(3)
        results.append(module(*tensors, need_weights=False)[0])
    assert torch.equal(*results)
    assert not torch.allclose(results[0], ours.eval()(*tensors, need_weights=False)[0])


def test_causal_without_a_mask_is_refused() -> None:
    _, ours = pair(batch_first=True)
    tensor = torch.randn(BATCH, KEYS, DIM, dtype=torch.float64)
    for need_weights in (False, True):
        with torch.no_grad(), pytest.raises(ValueError, match="is_causal"):
            ours(tensor, tensor, tensor, need_weights=need_weights, is_causal=True)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_no_floating_tensor_is_named(name: str, need_weights: bool) -> None:
    given = dict(zip(("query", "key", "value"), inputs(pair()[1]), strict=True))
    for bad, said in (
        (None, "None, expected a"),
        ([1.0], "a list, expected a"),
        (given[name].int(), r"torch\.int32, expected a floating"),
    ):
        with pytest.raises(TypeError, match=rf"^{name}: got {said} torch\.Tensor"):
            pair()[1](**{**given, name: bad}, need_weights=need_weights)


def test_a_padding_mask_that_is_no_tensor_is_named() -> None:
    _, ours = pair()
    with pytest.raises(TypeError, match=r"^key_padding_mask: got a list, expected a torch\.Tensor of bool"):
        ours(*inputs(ours), key_padding_mask=[True], need_weights=False)


def test_a_row_without_keys_is_zero_and_padding_may_hold_anything() -> None:
    _, ours = pair(batch_first=True)
    query, key, value = inputs(ours)
    mask = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    mask[0], mask[1, 5:] = True, True
    with torch.no_grad():
        key[mask], value[mask] = torch.nan, torch.inf
    out, _ = ours(query, key, value, mask, need_weights=False)
    assert torch.equal(out[0], ours.out_proj.bias.expand(QUERIES, DIM))
    seen = ours(query[1:], key[1:, :5], value[1:, :5], need_weights=False)[0]
    torch.testing.assert_close(out[1:], seen, rtol=1e-12, atol=1e-12)
    leaves = [ours.in_proj_weight, ours.in_proj_bias, query]
    assert_equal(
        list(torch.autograd.grad(out[1].sin().sum(), leaves, retain_graph=True)),
        list(torch.autograd.grad(seen.sin().sum(), leaves)),
    )
    assert not any(gradient[mask].any() for gradient in torch.autograd.grad(out.sin().sum(), [key, value]))


def test_no_keys_no_queries_no_batch() -> None:
    _, ours = pair(batch_first=True)
    query, key = torch.randn(2, 3, DIM, dtype=torch.float64), torch.randn(2, 4, DIM, dtype=torch.float64)
    for q, k in ((query, key[:, :0]), (query[:, :0], key), (query[:0], key[:0])):
        assert ours(q, k, k, need_weights=False)[0].shape == q.shape


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_state_dict_both_ways(config: dict[str, Any]) -> None:
    theirs, ours = pair(**config)
    theirs.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert list(dict(ours.named_parameters())) == list(dict(theirs.named_parameters()))


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_compile(dynamic: bool, only_fused: Callable[[], None]) -> None:
    _, ours = pair(add_bias_kv=True)
    tensors = inputs(ours)
    mask = torch.rand(BATCH, KEYS) < 0.4
    expected = outputs_and_gradients(ours, tensors, key_padding_mask=mask)
    only_fused()
    compiled = torch.compile(ours, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_equal(outputs_and_gradients(compiled, tensors, key_padding_mask=mask), expected)


def rms(tensor: Tensor, truth: Tensor) -> float:
    return float((tensor.double() - truth).pow(2).mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_is_as_good_as_torchs(dtype: torch.dtype, autocast: bool, only_fused: Callable[[], None]) -> None:
    theirs, ours = pair(add_zero_attn=True, add_bias_kv=True)
    tensors = inputs(ours)
    truth = outputs_and_gradients(theirs, tensors)
    held = torch.float32 if autocast else dtype
    tensors = [tensor.detach().to(held).requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", dtype, enabled=autocast):
        other = outputs_and_gradients(theirs.to(held), tensors)
        only_fused()
        mine = outputs_and_gradients(ours.to(held), tensors)
    assert mine[0].dtype == other[0].dtype == dtype
    for a, b, exact in zip(mine, other, truth, strict=True):
        assert rms(a, exact) <= 2 * rms(b, exact) + 1e-3 * float(exact.std()), (rms(a, exact), rms(b, exact))


def test_checkpoint_and_functional_call() -> None:
    _, ours = pair()
    tensors = inputs(ours)
    plain = ours(*tensors, need_weights=False)[0]
    expected = torch.autograd.grad(plain.sum(), tensors)
    again = checkpoint(lambda *t: ours(*t, need_weights=False)[0], *tensors, use_reentrant=False)
    assert_equal(list(torch.autograd.grad(again.sum(), tensors)), list(expected))
    halved = {name: parameter.detach() / 2 for name, parameter in ours.named_parameters()}
    called = torch.func.functional_call(ours, halved, tuple(tensors), {"need_weights": False})[0]
    other, _ = pair()
    other.load_state_dict(halved)
    torch.testing.assert_close(called, other(*tensors, need_weights=False)[0], rtol=1e-12, atol=1e-12)


Q, K = torch.zeros(5, 2, DIM), torch.zeros(9, 2, DIM)
BAD: dict[str, tuple[type[Exception], str, tuple[Any, ...]]] = {
    "width": (ValueError, "query", (Q[..., :7], K, K)),
    "dimensions": (ValueError, "query", (Q[None], K, K)),
    "unbatched key": (ValueError, "key", (Q, K[:, 0], K)),
    "batch": (ValueError, "query", (Q[:, :1], K, K)),
    "length": (ValueError, "value", (Q, K, K[:4])),
    "dtype": (TypeError, "key", (Q, K.double(), K)),
    "device": (ValueError, "value", (Q, K, K.to("meta"))),
    "unbatched mask": (
        ValueError,
        "key_padding_mask",
        (Q[:, 0], K[:, 0], K[:, 0], torch.zeros(1, 9, dtype=torch.bool)),
    ),
    "mask": (ValueError, "key_padding_mask", (Q, K, K, torch.zeros(2, 8, dtype=torch.bool))),
}


@pytest.mark.parametrize("error, name, arguments", BAD.values(), ids=BAD)
def test_errors_name_the_argument(error: type[Exception], name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(error, match=rf"^{name}: "):
        MultiheadAttention(DIM, HEADS)(*arguments, need_weights=False)


@pytest.mark.parametrize("split", [[37], [1] * 37, [0, 20, 0, 17], [36, 1]])
@pytest.mark.parametrize("batch_first", [False, True])
def test_stream_equals_batch_with_gradients(split: list[int], batch_first: bool) -> None:
    theirs, ours = pair(batch_first=batch_first, add_bias_kv=True, add_zero_attn=True)
    query, points, _ = inputs(ours)
    mask = torch.rand(BATCH, KEYS) < 0.4
    state = None
    for chunk, chunk_mask in zip(points.split(split, 1 if batch_first else 0), mask.split(split, 1), strict=True):
        out, state = ours.attend_state(query, chunk, state, key_padding_mask=chunk_mask)
    expected = theirs(query, points, points, mask, need_weights=False)[0]
    leaves = [query, points]
    mine = [out, *torch.autograd.grad(out.sin().sum(), [*leaves, *ours.parameters()])]
    other = [expected, *torch.autograd.grad(expected.sin().sum(), [*leaves, *theirs.parameters()])]
    assert_equal(mine, other)


def test_unbatched_stream() -> None:
    theirs, ours = pair()
    query, points, _ = inputs(ours, batched=False)
    state = ours.attend_state(query, points[:30]).state
    out, state = ours.attend_state(query, points[30:], state)
    assert state.out.shape == (1, HEADS, QUERIES, DIM // HEADS)
    assert_equal([out], [theirs(query, points, points, need_weights=False)[0]])


def test_merged_streams_count_the_extra_keys_once() -> None:
    _, ours = pair(add_bias_kv=True, add_zero_attn=True)
    query, points, _ = inputs(ours)
    halves = [ours.attend_state(query, half).state for half in (points[:9], points[9:])]
    out, _ = ours.attend_state(query, points[:0], cmab_kernels.merge_states(*halves))
    assert_equal([out], [ours(query, points, points, need_weights=False)[0]])


def test_a_stream_refuses_what_it_cannot_do() -> None:
    query, points = torch.zeros(5, 2, DIM), torch.zeros(9, 2, 7)
    with pytest.raises(ValueError, match="kdim = 7 and vdim = 24"):
        MultiheadAttention(DIM, HEADS, kdim=7).attend_state(query, points)
    with pytest.raises(ValueError, match=r"^inputs: "):
        MultiheadAttention(DIM, HEADS).attend_state(query, points)
    with pytest.raises(TypeError, match=r"^key_padding_mask: "):
        MultiheadAttention(DIM, HEADS).attend_state(query, query, key_padding_mask=torch.zeros(2, 5))
    with pytest.raises(RuntimeError, match="dropout"):
        MultiheadAttention(DIM, HEADS, dropout=0.1).attend_state(query, query)
    with pytest.raises(ValueError, match=r"state\.out"):
        MultiheadAttention(DIM, HEADS).attend_state(query, query, cmab_kernels.empty_state(2, HEADS, 4, 8))


def test_the_fused_path_is_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("fused")

    monkeypatch.setattr(attention, "attention_state", refuse)
    _, ours = pair()
    ours(*inputs(ours))
    with pytest.raises(AssertionError, match="fused"):
        ours(*inputs(ours), need_weights=False)

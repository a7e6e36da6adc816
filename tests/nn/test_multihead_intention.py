"""The modules of Intention equal their definition to 1e-10 in float64,
with torch's weights, as a layer and as a stream."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cmab_kernels
from cmab_kernels.nn import MultiheadIntention, MultiheadSigmaIntention
from cmab_kernels.nn.multihead import intention
from cmab_kernels.nn.multihead.intention import LearnedRidge

DIM, HEADS, BATCH, QUERIES, KEYS = 24, 3, 2, 5, 37
KINDS = [MultiheadIntention, MultiheadSigmaIntention]

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "other widths, batch first": {"kdim": 7, "vdim": 11, "batch_first": True},
    "scale": {"scale": 8**0.5 / 2},
    "fixed alpha": {"alpha": 0.3, "batch_first": True},
}


def made(kind: type[LearnedRidge], **config: Any) -> LearnedRidge:
    """Return a module in which no weight is 0, and each head has another alpha."""
    module = kind(DIM, HEADS, **{"dtype": torch.float64, **config})
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def inputs(module: LearnedRidge, keys: int = KEYS, batched: bool = True) -> list[Tensor]:
    """Return query, key and value in the layout of the module."""
    tensors = []
    for length, width in ((QUERIES, DIM), (keys, module.kdim), (keys, module.vdim)):
        tensor = torch.randn(BATCH, length, width, dtype=module.out_proj.weight.dtype)
        tensor = tensor if module.batch_first else tensor.transpose(0, 1)
        tensor = tensor if batched else tensor.select(0 if module.batch_first else 1, 1)
        tensors.append(tensor.detach().requires_grad_())
    return tensors


def defined(module: LearnedRidge, tensors: list[Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (out, weights of each head) for batched, batch-first tensors by the printed formula,
    from the module's weights alone."""
    weights = module.in_proj_weight.chunk(3) if module.in_proj_weight is not None else None
    weights = weights or (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    heads = [
        F.linear(*each).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for each in zip(tensors, weights, biases, strict=True)
    ]
    q, k, v = (head.double() for head in heads)
    keep = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool) if mask is None else ~mask
    kept = k * keep[:, None, :, None]
    alpha = torch.tensor(module.fixed_alpha, dtype=torch.float64).expand(HEADS) if module.log_alpha is None else None
    a = torch.sigmoid(module.log_alpha.double()) if alpha is None else alpha / (1 + alpha)
    a = a[:, None, None]
    matrix = (1 - a) * (kept.mT @ kept) + a * torch.eye(k.shape[-1], dtype=torch.float64)
    linear = module.scale * q @ torch.linalg.solve(matrix, kept.mT)
    if isinstance(module, MultiheadSigmaIntention):
        linear = linear.masked_fill(~keep[:, None, None], -torch.inf).softmax(-1)
    out = (linear @ v).transpose(1, 2).flatten(-2)
    return F.linear(
        out, module.out_proj.weight.double(), None if module.out_proj.bias is None else module.out_proj.bias.double()
    ), linear


def gradients(out: Tensor, leaves: list[Tensor], again: bool = True) -> list[Tensor]:
    """Return the gradients of a random weighting of `out`; `again` keeps the graph for another call."""
    weighting = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(torch.autograd.grad(out, leaves, weighting.to(out.dtype), retain_graph=again))


def assert_equal(ours: Any, theirs: Any, tolerance: float = 1e-10) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            mine, other, rtol=tolerance, atol=tolerance * float(other.detach().abs().max()) if other.numel() else 0
        )


@pytest.mark.parametrize("keys", [KEYS, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_definition(kind: type[LearnedRidge], config: dict[str, Any], masked: bool, keys: int) -> None:
    """The result, the weights, and all gradients (also of alpha) equal the definition, if there are more keys than a
    head is wide, and if there are fewer."""
    module = made(kind, **config)
    tensors = inputs(module, keys)
    mask = (torch.arange(keys) % 3 == torch.tensor([[1], [2]])) if masked else None
    out, weights = module(*tensors, mask, average_attn_weights=False)
    averaged = module(*tensors, mask)[1]
    alone, none = module(*tensors, mask, need_weights=False)
    flip = (lambda t: t) if module.batch_first else (lambda t: t.transpose(0, 1))
    expected, expected_weights = defined(module, [flip(tensor) for tensor in tensors], mask)
    leaves = [*tensors, *module.parameters()]
    assert none is None
    assert torch.equal(alone, out)
    assert_equal([flip(out), weights, averaged], [expected, expected_weights, expected_weights.mean(1)])
    assert_equal(gradients(flip(out), leaves), gradients(expected, leaves), 1e-8)
    score_leaves = [tensors[0], tensors[1], *([] if module.log_alpha is None else [module.log_alpha])]
    assert_equal(gradients(weights, score_leaves), gradients(expected_weights, score_leaves), 1e-8)
    assert not masked or not weights[mask[:, None, None].expand_as(weights)].any()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_unbatched(kind: type[LearnedRidge], batch_first: bool) -> None:
    module = made(kind, batch_first=batch_first)
    tensors = inputs(module, batched=False)
    mask = torch.arange(KEYS) % 4 == 0
    expected, weights = defined(module, [tensor.unsqueeze(0) for tensor in tensors], mask[None])
    assert_equal(module(*tensors, mask), [expected[0], weights[0].mean(0)])
    assert_equal(module(*tensors, mask, average_attn_weights=False), [expected[0], weights[0]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_fixed_alpha_of_zero_is_least_squares_where_it_has_a_solution(kind: type[LearnedRidge]) -> None:
    module = made(kind, alpha=0.0)
    many = inputs(module)
    q, k, v = (module._project(part, tensor) for part, tensor in enumerate(many))
    linear = q @ torch.linalg.pinv(k)
    linear = linear if kind is MultiheadIntention else linear.softmax(-1)
    out, weights = module(*many, average_attn_weights=False)
    assert_equal([weights, out], [linear, module._output(linear @ v, out)])
    assert all(result.isfinite().all() for result in module(*inputs(module, 3)))


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: type[LearnedRidge]) -> None:
    module = kind(4, 2, dtype=torch.float64)
    tensors = [torch.randn(n, 1, 4, dtype=torch.float64, requires_grad=True) for n in (2, 5, 5)]
    names, parameters = zip(*module.named_parameters(), strict=True)

    def function(*leaves: Tensor) -> Tensor:
        return torch.func.functional_call(
            module, dict(zip(names, leaves[3:], strict=True)), leaves[:3], {"need_weights": False}
        )[0]

    assert "log_alpha" in names
    assert torch.autograd.gradcheck(function, (*tensors, *parameters))


def test_both_ends_of_alpha() -> None:
    """With a = 0, values that are linear in the keys are fitted exactly; with a = 1 the module is linear attention, and
    nothing overflows."""
    module = made(MultiheadIntention)
    query, key, value = inputs(module)
    q, k, v = (module._project(part, tensor) for part, tensor in enumerate((query, key, value)))
    for log_alpha, expected in (
        (-40.0, q @ torch.linalg.lstsq(k, v).solution),
        (40.0, q @ (k.mT @ v)),
        (300.0, q @ (k.mT @ v)),
    ):
        torch.nn.init.constant_(module.log_alpha, log_alpha)
        assert_equal([module(query, key, value, need_weights=False)[0]], [module._output(expected, query)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_from_the_meta_device_has_the_penalty_that_it_starts_with(kind: type[LearnedRidge]) -> None:
    ours = kind(DIM, HEADS, device="meta").to_empty(device="cpu")
    ours.load_state_dict(torch.nn.MultiheadAttention(DIM, HEADS).state_dict())
    assert torch.equal(ours.log_alpha, kind(DIM, HEADS).log_alpha) and ours.log_alpha.requires_grad
    assert kind(DIM, HEADS, alpha=1.0, device="meta").to_empty(device="cpu").log_alpha is None
    with torch.no_grad():
        ours.log_alpha.fill_(3.0)
    assert (ours.half().log_alpha == 3.0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_without_values_leaves_the_penalty_as_it_was(
    kind: type[LearnedRidge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that occurs at two places is visited twice. At the second visit it has already left the meta device."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: empty_like(*args, **options).fill_(7.0))
    module = kind(DIM, HEADS, device="meta")
    torch.nn.ModuleList([torch.nn.Sequential(module), torch.nn.Sequential(module)]).to_empty(device="cpu")
    assert module.log_alpha.tolist() == [0.0] * HEADS
    with torch.no_grad():
        module.log_alpha.fill_(0.25)
    assert module.to_empty(device="cpu").half().log_alpha.tolist() == [0.25] * HEADS


@pytest.mark.parametrize("kind", KINDS)
def test_what_torch_saved_is_loaded_as_it_is(kind: type[LearnedRidge]) -> None:
    for config in ({}, {"kdim": 7, "vdim": 11}, {"bias": False}):
        theirs, ours = torch.nn.MultiheadAttention(DIM, HEADS, **config), kind(DIM, HEADS, **config)
        torch.nn.init.constant_(ours.log_alpha, 3.0)
        ours.load_state_dict(theirs.state_dict())
        assert (ours.log_alpha == 3.0).all()
        assert set(ours.state_dict()) == {*theirs.state_dict(), "log_alpha"}
        assert all(torch.equal(entry, ours.state_dict()[name]) for name, entry in theirs.state_dict().items())
        assert set(kind(DIM, HEADS, alpha=1.0, **config).state_dict()) == set(theirs.state_dict())
        other = kind(DIM, HEADS, **config)
        other.load_state_dict(ours.state_dict())
        assert (other.log_alpha == 3.0).all()
    with pytest.raises(RuntimeError, match=r"Missing.*in_proj_weight"):
        kind(DIM, HEADS).load_state_dict(
            {name: entry for name, entry in theirs.state_dict().items() if name != "in_proj_weight"}
        )
    with pytest.raises(RuntimeError, match=r"Unexpected.*log_alpha"):
        kind(DIM, HEADS, alpha=1.0).load_state_dict(kind(DIM, HEADS).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing.*log_alpha"):  # a meta module has no value to keep
        kind(DIM, HEADS, device="meta").load_state_dict(
            torch.nn.MultiheadAttention(DIM, HEADS).state_dict(), assign=True
        )


@pytest.mark.parametrize("kind", KINDS)
def test_padding_may_hold_anything(kind: type[LearnedRidge]) -> None:
    module = made(kind, batch_first=True)
    query, key, value = inputs(module)
    mask = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    mask[0], mask[1, 9:] = True, True
    with torch.no_grad():
        key[mask], value[mask] = torch.nan, torch.inf
    out, weights = module(query, key, value, mask)
    nothing = module.out_proj.bias.expand(QUERIES, DIM)
    seen, seen_weights = module(query[1:], key[1:, :9], value[1:, :9])
    assert torch.equal(out[0], nothing)
    assert not weights[0].any()
    assert_equal([out[1:], weights[1:, :, :9]], [seen, seen_weights])
    leaves = list(module.parameters())
    assert_equal(gradients(out[1:], leaves), gradients(seen, leaves), 1e-8)
    assert not any(gradient[mask].any() for gradient in torch.autograd.grad(out.sin().sum(), [key, value]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_for_logits(kind: type[LearnedRidge]) -> None:
    module = made(kind)
    tensors = inputs(module)
    mask = torch.rand(BATCH, KEYS) < 0.4
    added = torch.zeros(BATCH, KEYS, dtype=torch.float64).masked_fill(mask, -torch.inf)
    compiled = torch.compile(lambda m: module(*tensors, m, need_weights=False)[0], fullgraph=True, backend="aot_eager")
    expected = module(*tensors, mask, need_weights=False)[0]
    assert torch.equal(module(*tensors, added, need_weights=False)[0], expected)
    torch.testing.assert_close(compiled(added), expected, rtol=1e-12, atol=1e-12)
    for wrong in (0.5, torch.nan, torch.inf):
        added[1, 3] = wrong
        with pytest.raises(ValueError, match="key_padding_mask"):
            module(*tensors, added)
        with pytest.raises(RuntimeError, match="key_padding_mask"):
            compiled(added)


@pytest.mark.parametrize("kind", KINDS)
def test_no_keys_no_queries_no_batch(kind: type[LearnedRidge]) -> None:
    module = made(kind, batch_first=True)
    query, key, _ = inputs(module)
    for q, k in ((query, key[:, :0]), (query[:, :0], key), (query[:0], key[:0])):
        out, weights = module(q, k, k)
        assert out.shape == q.shape
        assert weights.shape == (*q.shape[:2], k.shape[1])
        assert out.isfinite().all()


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize("kind", KINDS)
def test_compile(kind: type[LearnedRidge], dynamic: bool) -> None:
    module = made(kind)
    tensors = inputs(module)
    mask = torch.rand(BATCH, KEYS) < 0.4
    leaves = [*tensors, *module.parameters()]
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    need_weights = dynamic == (kind is KINDS[0])  # each kind with and without weights, in graphs of both forms
    out, weights = module(*tensors, mask, need_weights)
    again, more = compiled(*tensors, mask, need_weights)
    assert_equal([again, *gradients(again, leaves, False)], [out, *gradients(out, leaves, False)], 1e-9)
    assert need_weights is False or torch.allclose(more, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision(kind: type[LearnedRidge], dtype: torch.dtype, autocast: bool) -> None:
    """Projections are rounded to the low precision; everything else is as accurate as in float64, apart from rounding
    the result."""
    module = made(kind)
    tensors = inputs(module)
    held = torch.float32 if autocast else dtype
    module, tensors = module.to(held), [tensor.detach().to(held).requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", dtype, enabled=autocast):
        out, weights = module(*tensors, average_attn_weights=False)
        heads = [module._project(part, tensor) for part, tensor in enumerate(tensors)]
        assert out.dtype == dtype
        out.float().sum().backward()
    q, k, v = (head.double() for head in heads)
    a = torch.sigmoid(module.log_alpha.double())[:, None, None]
    exact = q @ torch.linalg.solve((1 - a) * (k.mT @ k) + a * torch.eye(k.shape[-1], dtype=torch.float64), k.mT)
    exact = exact if kind is MultiheadIntention else exact.softmax(-1)
    expected = F.linear(
        (exact @ v).transpose(1, 2).flatten(-2), module.out_proj.weight.double(), module.out_proj.bias.double()
    )
    eps = torch.finfo(dtype).eps
    for mine, other in ((weights, exact), (out, expected.transpose(0, 1))):
        assert (mine.double() - other).pow(2).mean().sqrt() <= 2 * eps * other.pow(2).mean().sqrt()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())
    assert module.log_alpha.grad.all()


Q, K = torch.zeros(5, 2, DIM), torch.zeros(9, 2, DIM)
BAD: dict[str, tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = {
    "width": (ValueError, "query", (Q[..., :7], K, K), {}),
    "unbatched key": (ValueError, "key", (Q, K[:, 0], K), {}),
    "batch": (ValueError, "query", (Q[:, :1], K, K), {}),
    "length": (ValueError, "value", (Q, K, K[:4]), {}),
    "dtype": (TypeError, "key", (Q, K.double(), K), {}),
    "device": (ValueError, "value", (Q, K, K.to("meta")), {}),
    "mask": (ValueError, "key_padding_mask", (Q, K, K, torch.zeros(2, 8, dtype=torch.bool)), {}),
    "dtype of mask": (TypeError, "key_padding_mask", (Q, K, K, torch.zeros(2, 9, dtype=torch.int32)), {}),
    "mask by query": (ValueError, "attn_mask", (Q, K, K), {"attn_mask": torch.zeros(5, 9, dtype=torch.bool)}),
    "causal": (ValueError, "is_causal", (Q, Q, Q), {"is_causal": True}),
    "nested": (ValueError, "query", (torch.nested.nested_tensor([Q, Q]), K, K), {}),
}


@pytest.mark.parametrize("error, name, arguments, options", BAD.values(), ids=BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_errors_name_the_argument(
    kind: type[LearnedRidge], error: type[Exception], name: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=rf"^{name}: "):
        kind(DIM, HEADS)(*arguments, **options)


@pytest.mark.parametrize(
    "name, value",
    [
        ("dropout", 0.1),
        ("add_bias_kv", True),
        ("add_zero_attn", True),
        ("alpha", -1.0),
        ("alpha", torch.inf),
        ("alpha", torch.nan),
        ("scale", torch.inf),
        ("scale", torch.nan),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_makes_no_sense_is_refused(kind: type[LearnedRidge], name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: "):
        kind(DIM, HEADS, **{name: value})


def test_a_copy_has_its_own_weights_and_stream() -> None:
    module = made(MultiheadIntention)
    query, key, _ = (tensor.detach() for tensor in inputs(module))
    with torch.no_grad():
        module.update(key)
        copied = copy.deepcopy(module)
        before = copied.predict(query)
        module.update(key)
        module.log_alpha.add_(1.0)
        assert torch.equal(copied.predict(query), before)
        assert not torch.equal(module.predict(query), before)


@pytest.mark.parametrize("split", [[37], [1] * 37, [0, 20, 0, 17]])
@pytest.mark.parametrize("batch_first", [False, True])
def test_stream_equals_batch_with_gradients(split: list[int], batch_first: bool) -> None:
    module = made(MultiheadIntention, batch_first=batch_first, kdim=7, vdim=11, scale=1.5)
    query, key, value = inputs(module)
    mask = torch.rand(BATCH, KEYS) < 0.4
    along = 1 if batch_first else 0
    state = module.init_state(BATCH)
    for k, v, m in zip(key.split(split, along), value.split(split, along), mask.split(split, 1), strict=True):
        state = module.update(k, v, state=state, key_padding_mask=m)
    assert module.stream.state is None
    assert torch.equal(state.count, (~mask).sum(1)[:, None].expand(BATCH, HEADS))
    out, expected = module.predict(query, state), module(query, key, value, mask, need_weights=False)[0]
    leaves = [query, key, value, *module.parameters()]
    assert_equal([out], [expected])
    assert_equal(gradients(out, leaves), gradients(expected, leaves), 1e-8)


@torch.no_grad()
def test_own_stream_and_what_is_removed_from_it() -> None:
    module = made(MultiheadIntention, dtype=torch.float32)
    query, key, value = (tensor.detach() for tensor in inputs(module))
    value[:4] = 1e6  # the rows that are removed have more weight than the rest
    for k, v in zip(key.split(10), value.split(10), strict=True):
        held = module.update(k, v)
    assert module.stream.state == held
    left = module.remove(key[:4], value[:4])
    assert module.stream.state == left
    assert left.count.eq(KEYS - 4).all()
    expected = module(query, key[4:], value[4:], need_weights=False)[0]
    torch.testing.assert_close(module.predict(query), expected, rtol=1e-4, atol=1e-4)
    emptied = module.remove(key[4:], value[4:])
    assert not any(part.any() for part in emptied)
    assert torch.equal(module.predict(query), module.out_proj.bias.expand_as(query))
    before = module.stream.state
    with pytest.raises(ValueError, match="count"):
        module.remove(key, value)
    assert module.stream.state == before


def test_the_gradient_of_alpha_in_a_stream() -> None:
    module = made(MultiheadIntention)
    query, key, value = (tensor.detach() for tensor in inputs(module))
    with torch.no_grad():
        module.update(key, value)
    leaves = [module.log_alpha, module.out_proj.weight]
    assert_equal(
        gradients(module.predict(query), leaves),
        gradients(module(query, key, value, need_weights=False)[0], leaves),
        1e-8,
    )


def test_unbatched_stream_and_merged_streams() -> None:
    module = made(MultiheadIntention)
    query, key, value = inputs(module, batched=False)
    states = [module.update(key[rows], value[rows], state=module.init_state(1)) for rows in (slice(9), slice(9, None))]
    out = module.predict(query, cmab_kernels.merge_ridge(*states))
    assert_equal([out], [module(query, key, value, need_weights=False)[0]])


def test_a_stream_refuses_what_it_cannot_do() -> None:
    module, points = MultiheadIntention(DIM, HEADS), torch.zeros(9, 2, DIM)
    for call in (lambda: module.remove(points), lambda: module.predict(points)):
        with pytest.raises(RuntimeError, match="has seen nothing"):
            call()
    with pytest.raises(RuntimeError, match="gradient"):
        module.update(points)
    with torch.no_grad():
        module.update(points)
        held = module.stream.state
        with pytest.raises(ValueError, match=r"^value: "):
            module.update(points, points[..., :3])
        with pytest.raises(TypeError, match=r"^key_padding_mask: got a list"):
            module.update(points, key_padding_mask=[True])
        with pytest.raises(ValueError, match=r"^key_padding_mask: "):
            module.update(points, key_padding_mask=torch.zeros(2, 8, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"^query: "):
            module.predict(points[..., :3])
        with pytest.raises(ValueError, match=r"state\.gram"):
            module.predict(points[:, :1])
        with pytest.raises(TypeError, match="RidgeState"):
            module.predict(points, tuple(held))
    assert module.stream.state == held


def test_the_fast_path_is_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no weights are requested, only the operator is called: no float64 state, and no solve for queries."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("another way")

    for name in ("ridge_state", "regularised_solve", "solve_ridge"):
        monkeypatch.setattr(intention, name, refuse)
    for kind in KINDS:
        module = made(kind)
        module(*inputs(module), need_weights=False)
        with pytest.raises(AssertionError, match="another way"):
            module(*inputs(module))

"""Nyström attention as a module equals its formula to 1e-10 in float64,
with torch's weights and with landmarks from k-means."""

from __future__ import annotations

import copy
import pickle
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cmab_kernels.nn import ContinualNystromAttention, NystromAttention, replace_modules
from cmab_kernels.nn.multihead.nystrom import LANDMARKS

DIM, HEADS, BATCH, TOKENS, WIDTH = 24, 3, 2, 37, 8

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"num_landmarks": 5},
    "no bias": {"num_landmarks": 5, "bias": False},
    "other widths, batch first": {"num_landmarks": 4, "kdim": 7, "vdim": 11, "batch_first": True},
    "exact": {"num_landmarks": 3, "pinv": "exact"},
    "many iterations": {"num_landmarks": 4, "pinv_iterations": 9, "batch_first": True},
    "one landmark": {"num_landmarks": 1},
    "fixed": {"num_landmarks": 6, "landmarks": "fixed", "batch_first": True},
}


def made(**config: Any) -> NystromAttention:
    """Return a module in which no weight is 0, with logits of about 3."""
    module = NystromAttention(DIM, HEADS, **{"dtype": torch.float64, **config})
    if module.landmarks == "fixed":
        for name in LANDMARKS:
            landmarks = torch.empty(HEADS, module.num_landmarks, WIDTH, dtype=module.out_proj.weight.dtype)
            setattr(module, name, nn.Parameter(landmarks))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def inputs(module: NystromAttention, queries: int = TOKENS, batched: bool = True) -> list[Tensor]:
    """Return query, key and value in the layout of the module."""
    tensors = []
    for length, width in ((queries, DIM), (TOKENS, module.kdim), (TOKENS, module.vdim)):
        tensor = torch.randn(BATCH, length, width, dtype=torch.float64).to(module.out_proj.weight.dtype)
        tensor = tensor if module.batch_first else tensor.transpose(0, 1)
        tensor = tensor if batched else tensor.select(0 if module.batch_first else 1, 1)
        tensors.append(tensor.detach().requires_grad_())
    return tensors


def means(tokens: Tensor, number: int) -> Tensor:
    """Return the means of segments of the tokens (N, D) that are not masked; as in numpy's split, the first segments
    have one token more."""
    return torch.stack([segment.mean(0) for segment in torch.tensor_split(tokens, number)])


def iterated(a: Tensor, iterations: int) -> Tensor:
    """Return the pseudo-inverse of one matrix, by the iteration as the paper writes it."""
    one = torch.eye(len(a), dtype=a.dtype)
    z = a.mT / (a.abs().sum(0).max() * a.abs().sum(1).max())
    for _ in range(iterations):
        z = 0.25 * z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z)))
    return z


def defined(module: NystromAttention, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return (out, weights of each head) for batched, batch-first tensors by the printed formula,
    head by head, from the weights alone."""
    weights = module.in_proj_weight.chunk(3) if module.in_proj_weight is not None else None
    weights = weights or (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    heads = [
        F.linear(*each).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for each in zip(tensors, weights, biases, strict=True)
    ]
    maps, scale, m = [], WIDTH**-0.5, module.num_landmarks
    for q, k in zip(heads[0].flatten(0, 1), heads[1].flatten(0, 1), strict=True):
        fixed, head = module.landmarks == "fixed", len(maps) % HEADS
        near, far = (module.landmark_queries[head], module.landmark_keys[head]) if fixed else (means(q, m), means(k, m))
        gamma = (scale * near @ far.mT).softmax(-1)
        inverse = torch.linalg.pinv(gamma) if module.pinv == "exact" else iterated(gamma, module.pinv_iterations)
        maps.append((scale * q @ far.mT).softmax(-1) @ inverse @ (scale * near @ k.mT).softmax(-1))
    linear = torch.stack(maps).unflatten(0, (-1, HEADS))
    out = (linear @ heads[2]).transpose(1, 2).flatten(-2)
    return F.linear(out, module.out_proj.weight, module.out_proj.bias), linear


def gradients(out: Tensor, leaves: list[Tensor], again: bool = True) -> list[Tensor]:
    """Return the gradients of a random weighting of `out`; `again` keeps the graph for another call."""
    weighting = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return list(torch.autograd.grad(out, leaves, weighting, retain_graph=again))


def assert_equal(ours: Any, theirs: Any, tolerance: float = 1e-10) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * float(other.detach().abs().max()))


@pytest.mark.filterwarnings("error")
def test_the_weights_are_the_largest_matrix() -> None:
    """The weights are the largest matrix: a call stores nothing of size N x N, and no warning mentions a size that the
    caller did not give."""
    module, largest = made(num_landmarks=2, landmarks="fixed", batch_first=True).float(), 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            largest = max(largest, *(part.numel() for part in tree_iter(result) if isinstance(part, Tensor)), 0)
            return result

    query, tokens = torch.randn(1, 4, DIM), torch.randn(1, 300, DIM)
    with torch.no_grad(), Sizes():
        weights = module(query, tokens, tokens)[1]
    assert weights.shape == (1, 4, 300)
    assert largest == tokens.numel()


@pytest.mark.parametrize("queries", [TOKENS, 11])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_definition(config: dict[str, Any], queries: int) -> None:
    """The result, the weights, and all gradients (also of landmarks) equal the definition."""
    module = made(**config)
    tensors = inputs(module, queries)
    flip = (lambda t: t) if module.batch_first else (lambda t: t.transpose(0, 1))
    out, weights = module(*tensors, average_attn_weights=False)
    alone, none = module(*tensors, need_weights=False)
    expected, expected_weights = defined(module, [flip(tensor) for tensor in tensors])
    assert none is None
    assert torch.equal(alone, out)
    assert_equal([flip(out), weights, module(*tensors)[1]], [expected, expected_weights, expected_weights.mean(1)])
    leaves = [*tensors, *module.parameters()]
    assert_equal(gradients(flip(out), leaves), gradients(expected, leaves), 1e-7)


@pytest.mark.parametrize("landmarks", ["segments", "fixed"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_unbatched(batch_first: bool, landmarks: str) -> None:
    module = made(batch_first=batch_first, num_landmarks=5, landmarks=landmarks)
    tensors = inputs(module, batched=False)
    expected, weights = defined(module, [tensor.unsqueeze(0) for tensor in tensors])
    assert_equal(module(*tensors), [expected[0], weights[0].mean(0)])


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_padding_is_as_if_it_were_not_there(batch_first: bool, additive: bool) -> None:
    """Padding at the end covers whole segments, differs between rows and holds a NaN: it changes no result or
    gradient."""
    module = made(batch_first=batch_first, num_landmarks=6)
    ends, along = (24, 12), 1 if batch_first else 0
    tokens = torch.randn(BATCH, 24, DIM, dtype=torch.float64)
    mask = torch.arange(24) >= torch.tensor(ends)[:, None]
    tokens[mask] = torch.nan
    tokens = tokens if batch_first else tokens.transpose(0, 1)
    given = torch.zeros(BATCH, 24, dtype=torch.float64).masked_fill(mask, -torch.inf) if additive else mask
    out = module(tokens, tokens, tokens, given, need_weights=False)[0]
    short = [made(batch_first=batch_first, num_landmarks=number) for number in (6, 3)]
    total = 0.0
    for row, (end, other) in enumerate(zip(ends, short, strict=True)):
        other.load_state_dict(module.state_dict())
        kept = tokens.select(1 - along, row)[:end]
        expected = other(kept, kept, kept, need_weights=False)[0]
        assert_equal([out.select(1 - along, row)[:end]], [expected])
        total = total + expected.square().sum()
    seen = (~mask if batch_first else ~mask.T).unsqueeze(-1)
    ours = torch.autograd.grad(out.masked_fill(~seen, 0.0).square().sum(), list(module.parameters()))
    total.backward()
    pairs = zip(*(other.parameters() for other in short), strict=True)
    assert_equal(ours, [a.grad + b.grad for a, b in pairs], 1e-8)


def test_padding_with_fixed_landmarks_hides_keys_alone() -> None:
    module = made(num_landmarks=6, landmarks="fixed", batch_first=True)
    query, key, value = inputs(module, 11)
    mask = torch.arange(TOKENS).expand(BATCH, -1) >= 30
    assert_equal(
        [module(query, key, value, mask, need_weights=False)[0]],
        [module(query, key[:, :30], value[:, :30], need_weights=False)[0]],
    )
    square = inputs(module)
    full, weights = module(*square, mask)
    assert not weights[..., 30:].any()
    assert_equal([full], [module(square[0], *(t[:, :30] for t in square[1:]), need_weights=False)[0]])


def test_m_equal_to_n_exact_pinv_is_attention() -> None:
    """With as many landmarks as tokens, B pinv(B) B = B: the module equals torch's, up to the error of the inverse."""
    theirs = nn.MultiheadAttention(DIM, HEADS, dtype=torch.float64, batch_first=True)
    ours = NystromAttention(DIM, HEADS, dtype=torch.float64, batch_first=True, num_landmarks=6, pinv="exact")
    ours.load_state_dict(theirs.state_dict())
    tokens = 3 * torch.randn(BATCH, 6, DIM, dtype=torch.float64)
    assert_equal(ours(tokens, tokens, tokens), theirs(tokens, tokens, tokens), 1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("landmarks", ["segments", "fixed"])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision(dtype: torch.dtype, landmarks: str, autocast: bool) -> None:
    module = made(dtype=torch.float32 if autocast else dtype, num_landmarks=5, landmarks=landmarks)
    with torch.no_grad():  # landmarks are far apart, because pinv is not tested here
        for parameter in module.parameters():
            parameter.mul_(0.5)
    exact = copy.deepcopy(module).double()
    tensors = [tensor.detach() for tensor in inputs(module)]
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        out, _ = module(*tensors)
    expected = exact(*(tensor.double() for tensor in tensors))[0]
    assert out.dtype == dtype
    assert (out.double() - expected).pow(2).mean().sqrt() <= 16 * torch.finfo(dtype).eps * expected.pow(2).mean().sqrt()


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_compiled_forward(dynamic: bool) -> None:
    for landmarks in ("segments", "fixed"):
        module = made(num_landmarks=5, landmarks=landmarks, dtype=torch.float32)
        tensors = inputs(module)
        compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        ours, theirs = compiled(*tensors, need_weights=False)[0], module(*tensors, need_weights=False)[0]
        assert_equal([ours], [theirs], 1e-5)
        leaves = [*tensors, *module.parameters()]
        assert_equal(gradients(ours, leaves, False), gradients(theirs, leaves, False), 1e-3)


Q, K = torch.zeros(5, 2, DIM), torch.zeros(9, 2, DIM)
BAD: dict[str, tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = {
    "width": (ValueError, "query", (Q[..., :7], K, K), {}),
    "unbatched key": (ValueError, "key", (Q, K[:, 0], K), {}),
    "batch": (ValueError, "query", (Q[:, :1], K, K), {}),
    "length": (ValueError, "value", (Q, K, K[:4]), {}),
    "dtype": (TypeError, "key", (Q, K.double(), K), {}),
    "device": (ValueError, "value", (Q, K, K.to("meta")), {}),
    "mask": (ValueError, "key_padding_mask", (Q, K, K, torch.zeros(2, 8, dtype=torch.bool)), {}),
    "mask of other queries": (ValueError, "key_padding_mask", (Q, K, K, torch.zeros(2, 9, dtype=torch.bool)), {}),
    "mask by query": (ValueError, "attn_mask", (Q, K, K), {"attn_mask": torch.zeros(5, 9, dtype=torch.bool)}),
    "causal": (ValueError, "is_causal", (Q, Q, Q), {"is_causal": True}),
    "few tokens": (ValueError, "num_landmarks", (Q[:2], K, K), {}),
}


@pytest.mark.parametrize("error, name, arguments, options", BAD.values(), ids=BAD)
def test_errors_name_the_argument(
    error: type[Exception], name: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=rf"^{name}: "):
        NystromAttention(DIM, HEADS, num_landmarks=3)(*arguments, **options)


@pytest.mark.parametrize(
    "name, value",
    [
        ("dropout", 0.1),
        ("add_bias_kv", True),
        ("add_zero_attn", True),
        ("num_landmarks", 0),
        ("num_landmarks", 2.0),
        ("landmarks", "continual"),
        ("pinv", "approximate"),
        ("pinv_iterations", 0),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: "):
        NystromAttention(DIM, HEADS, **{"num_landmarks": 4, name: value})


# ---- fixed landmarks


def clustered(tokens: int = 400, groups: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return (tokens (2, N, C), centres (m, C)) of groups so far apart that k-means finds them."""
    centres = 10 * torch.randn(groups, DIM, dtype=torch.float64)
    tokens = centres.repeat(tokens // groups, 1) + 0.01 * torch.randn(
        tokens // groups * groups, DIM, dtype=torch.float64
    )
    return tokens.unflatten(0, (2, -1)).to(dtype), centres


def matched(found: Tensor, expected: Tensor) -> Tensor:
    """Return the rows of `found` in the order of the nearest rows of `expected`; each row must be found once."""
    order = torch.cdist(expected, found).argmin(-1)
    assert len(set(order.tolist())) == len(expected)
    return found[order]


@pytest.mark.parametrize("batch_first", [False, True])
def test_one_clustering_of_the_tokens_of_self_attention(batch_first: bool) -> None:
    module = NystromAttention(
        DIM, HEADS, num_landmarks=5, landmarks="fixed", batch_first=batch_first, dtype=torch.float64
    )
    tokens, centres = clustered()
    tokens = tokens if batch_first else tokens.transpose(0, 1)
    with pytest.raises(RuntimeError, match=r"^landmarks:.*fit_landmarks"):
        module(tokens, tokens, tokens)
    assert not {*LANDMARKS} & {*module.state_dict()}
    module.fit_landmarks(tokens)
    expected = [module._project(part, centres)[0] for part in range(2)]
    order = torch.cdist(expected[0][0], module.landmark_queries[0]).argmin(-1)
    for name, heads in zip(LANDMARKS, expected, strict=True):
        landmarks = getattr(module, name)
        assert isinstance(landmarks, nn.Parameter)
        assert landmarks.shape == (HEADS, 5, WIDTH) and landmarks.requires_grad
        torch.testing.assert_close(landmarks[:, order], heads, rtol=1e-2, atol=1e-1)  # the same order for both
    first = [getattr(module, name).clone() for name in LANDMARKS]
    module.fit_landmarks(tokens)
    assert all(torch.equal(getattr(module, name), before) for name, before in zip(LANDMARKS, first, strict=True))
    with pytest.raises(ValueError, match=r"^seed: got -1"):
        module.fit_landmarks(tokens, seed=-1)
    module.fit_landmarks(tokens, seed=7)
    assert not torch.equal(module.landmark_queries, first[0])
    out = module(tokens, tokens, tokens, need_weights=False)[0]
    out.square().sum().backward()
    assert all(getattr(module, name).grad.abs().sum() > 0 for name in LANDMARKS)


def test_cross_attention_clusters_each_heads_queries_and_keys() -> None:
    module = NystromAttention(
        DIM, HEADS, kdim=DIM, vdim=7, num_landmarks=5, landmarks="fixed", batch_first=True, dtype=torch.float64
    )
    (tokens, centres), (keys, key_centres) = clustered(), clustered(300)
    module.fit_landmarks(tokens, keys)
    for part, (name, rows) in enumerate(zip(LANDMARKS, (centres, key_centres), strict=True)):
        for found, expected in zip(getattr(module, name), module._project(part, rows)[0], strict=True):
            torch.testing.assert_close(matched(found, expected), expected, rtol=1e-2, atol=1e-1)


def test_fitting_in_the_modules_dtype() -> None:
    module = NystromAttention(DIM, HEADS, num_landmarks=5, landmarks="fixed", batch_first=True, dtype=torch.bfloat16)
    module.fit_landmarks(clustered(dtype=torch.bfloat16)[0])
    assert module.landmark_queries.dtype == torch.bfloat16


def test_landmarks_fitted_in_inference_mode_can_be_trained() -> None:
    tokens = torch.randn(2, 30, 16)
    for keys in (None, tokens + 1):
        module = NystromAttention(16, 2, num_landmarks=4, landmarks="fixed", batch_first=True)
        with torch.inference_mode():
            module.fit_landmarks(tokens, keys, seed=1)
        fitted = copy.deepcopy(module)
        fitted.fit_landmarks(tokens, keys, seed=1)
        assert torch.equal(module.landmark_keys, fitted.landmark_keys)
        module(tokens, tokens, tokens, need_weights=False)[0].square().sum().backward()
        assert module.landmark_queries.grad.abs().min() > 0 and module.landmark_queries.requires_grad


def test_what_cannot_be_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"num_landmarks": 5, "landmarks": "fixed"}
    tokens = torch.randn(7, 2, DIM)
    with pytest.raises(ValueError, match=r"^landmarks: "):
        NystromAttention(DIM, HEADS, num_landmarks=5).fit_landmarks(tokens)
    with pytest.raises(ValueError, match=r"^keys: "):
        NystromAttention(DIM, HEADS, kdim=7, **options).fit_landmarks(tokens)
    module = NystromAttention(DIM, HEADS, **options)
    for name, given in (
        ("tokens", (tokens[..., :3],)),
        ("keys", (tokens, tokens[..., :3])),
        ("tokens", (tokens[:2],)),
        ("keys", (tokens, tokens[:2])),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: "):
            module.fit_landmarks(*given)
    tokens[3, 1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"^tokens: "):
        module.fit_landmarks(tokens)
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        module.fit_landmarks(torch.randn(7, 2, DIM))
    assert module.landmark_queries is None


def test_landmarks_are_saved_and_loaded() -> None:
    make = partial(NystromAttention, DIM, HEADS, num_landmarks=5, landmarks="fixed")
    module, tokens = make(), torch.randn(40, 2, DIM)
    module.fit_landmarks(tokens)
    expected = module(tokens, tokens, tokens, need_weights=False)[0]
    for other in (make(), copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other.load_state_dict(module.state_dict())
        assert torch.equal(other(tokens, tokens, tokens, need_weights=False)[0], expected)
        assert other.landmark_queries is not module.landmark_queries
    continual = ContinualNystromAttention(DIM, HEADS, sequence_len=40, num_landmarks=5, landmarks="fixed")
    continual.load_state_dict(module.state_dict())
    torch.testing.assert_close(continual(tokens)[0], expected[-1:])
    module.load_state_dict(nn.MultiheadAttention(DIM, HEADS).state_dict())
    assert torch.equal(module.landmark_queries, other.landmark_queries)
    saved = module.state_dict()
    bad = {
        "landmark_queries": {**saved, "landmark_queries": saved["landmark_queries"][:, :3]},
        "landmark_keys": {name: entry for name, entry in saved.items() if name != "landmark_keys"},
    }
    for name, entries in bad.items():
        for other in (make(), make()):
            with pytest.raises(RuntimeError, match=name):
                other.load_state_dict(entries)
            assert other.landmark_queries is None and other.landmark_keys is None
    with pytest.raises(RuntimeError, match=r"Unexpected.*landmark_keys"):
        NystromAttention(DIM, HEADS, num_landmarks=5).load_state_dict(saved)


# ---- in torch's models


@pytest.mark.parametrize("training", [False, True])
def test_replaces_torchs_module_in_an_encoder(training: bool) -> None:
    """The module runs in torch's encoder, also in eval mode with padding, where torch's layers would otherwise run
    attention."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2).train(training)
    source, mask = torch.randn(2, 12, 16, dtype=torch.float64), torch.arange(12) >= torch.tensor([[12], [6]])
    parameters = list(model.parameters())
    with torch.set_grad_enabled(training):
        attention = model(source)
        assert replace_modules(model, {nn.MultiheadAttention: partial(NystromAttention, num_landmarks=4)}) == 2
        nystrom = [module for module in model.modules() if isinstance(module, NystromAttention)]
        assert [module.num_landmarks for module in nystrom] == [4, 4]
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        out = model(source)
        assert not torch.allclose(out, attention, atol=1e-3)
        expected = source
        for each in model.layers:
            expected = each.norm1(expected + each.self_attn(expected, expected, expected)[0])
            expected = each.norm2(expected + each.linear2(each.linear1(expected).relu()))
        assert_equal([out], [expected])
        half = model(source[1:, :6], src_key_padding_mask=None)
    with torch.no_grad():
        padded = model(source, src_key_padding_mask=mask)
        assert_equal([padded[0]], [out[0]])
        assert padded[1, :6].isfinite().all()
        assert not torch.allclose(padded[1, :6], half[0])  # six tokens in four segments, not in two


def test_options_are_needed_and_the_model_is_untouched() -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 2), nn.MultiheadAttention(16, 2, dropout=0.1))
    with pytest.raises(TypeError, match="num_landmarks"):
        replace_modules(model, {nn.MultiheadAttention: NystromAttention})
    with pytest.raises(ValueError, match=r"'1'.*dropout"):
        replace_modules(model, {nn.MultiheadAttention: partial(NystromAttention, num_landmarks=4)})
    with pytest.raises(TypeError, match="mapping"):
        replace_modules(model, {nn.MultiheadAttention: partial(nn.Linear, 3)})
    assert [type(module) for module in model] == [nn.MultiheadAttention] * 2


def test_a_parametrized_landmark_is_loaded() -> None:
    module, other = (made(num_landmarks=4, landmarks="fixed") for _ in range(2))
    for each in (module, other):
        nn.utils.parametrizations.weight_norm(each, "landmark_queries")
    other.load_state_dict(module.state_dict())
    assert all(torch.equal(getattr(other, name), getattr(module, name)) for name in LANDMARKS)

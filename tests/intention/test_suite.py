"""Intention and its streaming sums under the suite that every operator inherits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cmab_kernels as ck
from cmab_kernels.testing import LAWS, Measured, OperatorSuite, oracles

Results = tuple[Tensor, ...]
ALPHA = 10.0
WIDE = tuple(
    {"N": 1500, "D": width, "E": value_width}
    for width, value_width in ((16, 16), (64, 64), (128, 128), (33, 7), (64, 1))
)
"""The classes of widths that GPU kernels have."""


def _sums(state: ck.RidgeState) -> Results:
    """Return a state's differentiable fields, by name: the compiler of torch 2.6 does not support slices of a
    NamedTuple."""
    return state.gram, state.moment


class IntentionSuite(OperatorSuite):
    """Intention, whose rows of a head share one solution.

    Its error shows in all of them, so torch's own error is the largest of a head's rows. If torch's own products
    overflow or are no longer positive definite, torch has no correct digit, and the kernels need none.
    """

    extents = {"B": 2, "H": 3, "L": 5, "N": 133, "D": 16, "E": 7}
    small = {"B": 1, "H": 2, "L": 2, "N": 4, "D": 2, "E": 1}
    impls = ("reference", "native")
    repeatable = ("native",)
    mask = "key_padding_mask"
    mask_tolerance = {torch.float64: 1e-11, torch.float32: 2e-3}
    layout_tolerance = {torch.float64: 1e-11, torch.float32: 1e-3}
    gradient_tolerance = 1e-6
    empty = "BHLN"

    def make(self, name: str, shape: tuple[int, ...], law: str) -> Tensor:
        return torch.rand(shape) + 0.2 if name in ("alpha", "weights") else LAWS[law](*shape)

    def torch_errors(self, error: Tensor) -> Tensor:
        return error.nan_to_num(1.0, 1.0).amax(-1, keepdim=True)

    def row_sizes(self, found: Measured) -> Tensor:
        size = found.right.norm(dim=-1)
        return size.clamp(min=0.05 * float(size.max()))

    def bad_arguments(self) -> list[str]:
        """Return no errors, because test_errors.py has all of them."""
        return []


class TestIntention(IntentionSuite):
    """`intention` with one penalty for all."""

    operator = "intention"
    arguments = {"query": "BHLD", "key": "BHND", "value": "BHNE"}
    shapes = (
        {"H": 2, "N": 1000, "E": 16},
        {"L": 33, "N": 197, "D": 8, "E": 24},
        {"H": 1, "L": 128, "N": 130, "D": 64, "E": 64},
    )
    repeats = 1000
    bits = tuple(
        {"B": b, "H": 2, "L": 50, "N": n, "D": d, "E": 24}
        for b, n, d in ((3, 20_000, 16), (17, 100, 16), (9, 700, 40), (3, 300, 100))
    )
    many = {"B": 66_000, "H": 1, "L": 1, "N": 3, "D": 2, "E": 2}
    form = "primal"
    on_gpu = {"shapes": (*shapes, *WIDE)}

    def call(self, impl: str, **inputs: Any) -> Results:
        return (ck.intention(**inputs, alpha=ALPHA, form=self.form, impl=impl),)

    def oracle(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None) -> Results:
        return (oracles.intention(query, key, value, ALPHA, mask=key_padding_mask),)

    def in_torch(self, query: Tensor, key: Tensor, value: Tensor) -> Results:
        return (oracles.intention_in_torch(query, key, value, ALPHA),)


class TestWeighted(IntentionSuite):
    """`intention` with weights of the keys, and a penalty for each head, both differentiable."""

    operator = "intention"
    arguments = {"query": "BHLD", "key": "BHND", "value": "BHNE", "alpha": "BH", "weights": "BN"}
    dtypes = (torch.float64, torch.float32)
    laws = ("normal",)
    form = "primal"

    def call(self, impl: str, **inputs: Any) -> Results:
        return (ck.intention(**inputs, form=self.form, impl=impl),)

    def oracle(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        alpha: Tensor,
        weights: Tensor,
        key_padding_mask: Tensor | None = None,
    ) -> Results:
        return (oracles.intention(query, key, value, alpha, weights, key_padding_mask),)

    def row_sizes(self, found: Measured) -> Tensor:
        return (
            super().row_sizes(found).maximum(found.right.norm() * 0.05)
            if found.is_gradient
            else super().row_sizes(found)
        )


class TestWeightedDual(TestWeighted):
    """`intention` with weights by its dual form: fewer keys than columns."""

    extents = {**IntentionSuite.extents, "N": 9}
    small = {**IntentionSuite.small, "N": 2, "D": 3}
    form = "dual"
    compilers = ("eager", "aot_eager")
    masked_length = 128  # the CUDA kernel solves for so many unknowns
    layout_tolerance = {torch.float64: 1e-11, torch.float32: 1e-2}
    mask_tolerance = {torch.float64: 1e-11}


class TestSigma(TestWeighted):
    """`sigma_intention`: attention whose queries are multiplied by the inverse."""

    operator = "sigma_intention"
    arguments = {"query": "BHLD", "key": "BHND", "value": "BHNE", "alpha": "BH"}

    def call(self, impl: str, **inputs: Any) -> Results:
        return (ck.sigma_intention(**inputs, impl=impl),)

    def oracle(
        self, query: Tensor, key: Tensor, value: Tensor, alpha: Tensor, key_padding_mask: Tensor | None = None
    ) -> Results:
        if key.shape[2] == 0:
            return (query @ key.mT @ value,)
        out = oracles.sigma_intention(query, key, value, alpha, mask=key_padding_mask)
        return (out.nan_to_num(0.0),)  # no key is left: a softmax over nothing is NaN


class TestRidgeState(IntentionSuite):
    """`ridge_state`: sums over weighted keys, in float64."""

    operator = "ridge_state"
    arguments = {"key": "BHND", "value": "BHNE", "weights": "BN"}
    outputs = ("gram", "moment")
    dtypes = (torch.float64, torch.float32, torch.bfloat16)  # float16: test_state.py tests its sums
    empty = "BHN"
    mask_tolerance = {torch.float64: 1e-12}
    on_gpu = {"shapes": WIDE}

    def call(self, impl: str, **inputs: Any) -> Results:
        return _sums(ck.ridge_state(**inputs, impl=impl))

    def oracle(self, key: Tensor, value: Tensor, weights: Tensor, key_padding_mask: Tensor | None = None) -> Results:
        if key_padding_mask is not None:
            weights = weights.masked_fill(key_padding_mask, 0.0)
        weighted = weights[:, None, :, None] * key
        return weighted.mT @ key, weighted.mT @ value


class TestPackedSets(IntentionSuite):
    """`intention` of sets of keys packed into one row by offsets; three rows after the last set belong to none."""

    operator = "intention"
    arguments = {"query": "SHLD", "key": "OHND", "value": "OHNE", "alpha": "SH", "weights": "ON"}
    dtypes = (torch.float64, torch.float32)
    laws = ("normal",)
    extents = {"S": 3, "O": 1, "H": 2, "L": 5, "N": 43, "D": 4, "E": 3}
    small = {"L": 2, "N": 8, "D": 2, "E": 1}
    batch = ""
    empty = ""
    mask = None

    def call(self, impl: str, query: Tensor, alpha: Tensor, **rows: Any) -> Results:
        return (ck.intention(query, **rows, alpha=alpha, cu_seqlens=self.offsets(rows["key"]), impl=impl),)

    def oracle(self, query: Tensor, key: Tensor, value: Tensor, alpha: Tensor, weights: Tensor) -> Results:
        gram, moment = self.sums(key, value, weights)
        one = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        return (query @ torch.linalg.solve(gram + alpha[..., None, None] * one, moment),)

    def offsets(self, key: Tensor) -> Tensor:
        """The second set is empty."""
        return torch.tensor([0, 3, 3, key.shape[2] - 3], device=key.device)

    def sums(self, key: Tensor, value: Tensor, weights: Tensor) -> Results:
        weighted, ends = weights[:, None, :, None] * key, self.offsets(key).tolist()
        sets = [slice(first, end) for first, end in pairwise(ends)]
        gram, moment = (torch.cat([weighted[:, :, s].mT @ rows[:, :, s] for s in sets]) for rows in (key, value))
        return gram, moment


class TestPackedStates(TestPackedSets):
    """`ridge_state` of packed sets."""

    operator = "ridge_state"
    arguments = {"key": "OHND", "value": "OHNE", "weights": "ON"}
    outputs = ("gram", "moment")
    extents = {n: size for n, size in TestPackedSets.extents.items() if n not in "SL"}
    small = {n: size for n, size in TestPackedSets.small.items() if n not in "SL"}

    def call(self, impl: str, **rows: Any) -> Results:
        return _sums(ck.ridge_state(**rows, cu_seqlens=self.offsets(rows["key"]), impl=impl))

    def oracle(self, key: Tensor, value: Tensor, weights: Tensor) -> Results:
        return self.sums(key, value, weights)


class TestStep(IntentionSuite):
    """`ridge_step`: the sums on top of a state, and the regression of both."""

    operator = "ridge_step"
    arguments = {"root": "BHDD", "moment": "BHDE", "key": "BHND", "value": "BHNE", "alpha": "BH"}
    outputs = ("weight", "gram", "moment")
    dtypes = (torch.float64,)  # the state's dtype; test_state.py steps with other keys
    laws = ("normal",)
    empty = "BHN"
    mask_tolerance = {torch.float64: 1e-11}

    def call(self, impl: str, root: Tensor, moment: Tensor, alpha: Tensor, **rows: Any) -> Results:
        before = ck.RidgeState(
            (root @ root.mT).double(), moment.double(), torch.full(root.shape[:2], 3, device=root.device)
        )
        solution, state = ck.ridge_step(before, **rows, alpha=alpha, impl=impl)
        return solution.weight, state.gram, state.moment

    def oracle(
        self,
        root: Tensor,
        moment: Tensor,
        key: Tensor,
        value: Tensor,
        alpha: Tensor,
        key_padding_mask: Tensor | None = None,
    ) -> Results:
        if key_padding_mask is not None:
            key = key.masked_fill(key_padding_mask[:, None, :, None], 0.0)
            value = value.masked_fill(key_padding_mask[:, None, :, None], 0.0)
        gram, moment = root @ root.mT + key.mT @ key, moment + key.mT @ value
        one = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        return torch.linalg.solve(gram + alpha[..., None, None] * one, moment), gram, moment


class TestPrefixStates(TestRidgeState):
    """`prefix_ridge_states`: the sums over every prefix of the keys."""

    operator = "prefix_ridge_states"
    dtypes = (torch.float64, torch.float32)
    laws = ("normal", "one outlier")
    every = 3

    def call(self, impl: str, **inputs: Any) -> Results:
        return _sums(ck.prefix_ridge_states(**inputs, every=self.every, impl=impl))

    def oracle(self, key: Tensor, value: Tensor, weights: Tensor, key_padding_mask: Tensor | None = None) -> Results:
        length = key.shape[2]
        ends = torch.arange(self.every, length + self.every, self.every, device=key.device).clamp(max=length)
        sums = (
            rows.unsqueeze(-1) * other.unsqueeze(-2)
            for rows, other in self._rows(key, value, weights, key_padding_mask)
        )
        gram, moment = (each.cumsum(2)[:, :, ends - 1] for each in sums)
        return gram, moment

    def _rows(self, key: Tensor, value: Tensor, weights: Tensor, mask: Tensor | None) -> list[Results]:
        """Return the pairs of rows whose outer products are added up."""
        hidden = weights if mask is None else weights.masked_fill(mask, 0.0)
        weighted = hidden[:, None, :, None] * key
        return [(weighted, key), (weighted, value)]


class TestPrefixStatesOfEveryKey(TestPrefixStates):
    """A state after every key."""

    every = 1
    laws = ("normal",)
    compilers = ("eager", "aot_eager")


class TestRemoval(TestRidgeState):
    """`remove_ridge` of keys that the state has seen: the state of the other keys is left."""

    operator = "remove_ridge"
    arguments = {"key": "BHND", "value": "BHNE", "other_key": "BHMD", "other_value": "BHME"}
    extents = {**IntentionSuite.extents, "M": 20}
    small = {**IntentionSuite.small, "M": 2}
    empty = "BHNM"
    mask = None
    laws = ("normal",)

    def call(self, impl: str, key: Tensor, value: Tensor, other_key: Tensor, other_value: Tensor) -> Results:
        whole = ck.ridge_state(torch.cat([key, other_key], 2), torch.cat([value, other_value], 2), impl=impl)
        return _sums(ck.remove_ridge(whole, other_key, other_value, impl=impl))

    def oracle(self, key: Tensor, value: Tensor, other_key: Tensor, other_value: Tensor) -> Results:
        return key.mT @ key, key.mT @ value

    def is_bounded(self, name: str, is_gradient: bool, law: str) -> bool:
        """Leave gradients of removed keys unchecked: they are differences that vanish."""
        return not (is_gradient and name.startswith("other"))


MASK = torch.tensor([[False, False, False, False, True], [False] * 5])


# ---- checks of Intention alone


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _positive(*shape: int) -> Tensor:
    return (torch.rand(shape, dtype=torch.float64) + 0.2).requires_grad_()


def _rows(width: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return _leaf(2, 2, 4, width), _leaf(2, 2, 5, width), _leaf(2, 2, 5, 2)


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_gradients_at_a_weight_of_zero(impl: str, form: str) -> None:
    """The gradient at a weight of 0 is finite, and is the one-sided derivative:
    it says what adding the key would change."""
    q, k, v = (t.detach() for t in _rows())
    weights = torch.tensor([[1.0, 0.0, 2.0, 0.0, 1.0]], dtype=torch.float64).expand(2, 5).clone().requires_grad_()

    def loss(weights: Tensor) -> Tensor:
        return ck.intention(q, k, v, 0.3, form=form, weights=weights, impl=impl).pow(2).sum()

    (ours,) = torch.autograd.grad(loss(weights), weights)
    for i in range(5):
        step = torch.zeros(2, 5, dtype=torch.float64)
        step[:, i] = 1e-6
        with torch.no_grad():
            slope = (loss(weights + 2 * step) - loss(weights)) / 2e-6
            bend = (loss(weights + 2 * step) - 2 * loss(weights + step) + loss(weights)) / 1e-6
        assert abs(ours[:, i].sum() - (slope - bend)) < 1e-3 * max(1.0, abs(float(slope)))


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_second_derivatives_at_a_weight_of_zero(impl: str, form: str) -> None:
    """Derivatives with respect to alpha and weights equal those of the primal definition, in any order of
    differentiation."""
    (q, k, v), alpha = (t.detach() for t in _rows(7)), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([[1.0, 0.0, 2.0, 0.0, 1.0]], dtype=torch.float64).expand(2, 5).clone().requires_grad_()

    def second(form: str, impl: str) -> list[Tensor]:
        loss = ck.intention(q, k, v, alpha, form=form, weights=weights, impl=impl).square().sum()
        first = torch.autograd.grad(loss, (alpha, weights), create_graph=True)
        return [g for part in first for g in torch.autograd.grad(part.sum(), (alpha, weights), retain_graph=True)]

    for ours, right in zip(second(form, impl), second("primal", "reference"), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["auto", "primal", "dual"])
def test_gradients_of_no_keys(impl: str, form: str) -> None:
    q, k, v = torch.randn(2, 2, 4, 3), torch.randn(2, 2, 0, 3), torch.randn(2, 2, 0, 5)
    alpha, weights = torch.tensor(0.3, requires_grad=True), torch.ones(2, 0, requires_grad=True)
    out = ck.intention(q, k, v, alpha, form=form, weights=weights, impl=impl)
    grads = torch.autograd.grad(out.sum(), (alpha, weights))
    assert not out.any() and not grads[0] and grads[1].shape == (2, 0)


@pytest.mark.parametrize("mask", [None, torch.tensor([[False, True, False]])])
def test_second_derivatives_in_weights_without_a_penalty(impl: str, mask: Tensor | None) -> None:
    """With alpha = 0 the dual form has the derivatives in the limit of alpha to 0, with respect to weights and keys at
    once."""
    tensors = [torch.randn(1, 1, 3, 5, dtype=torch.float64), torch.rand(1, 1, 3, dtype=torch.float64) + 0.5]
    q, v = torch.randn(1, 1, 2, 5, dtype=torch.float64), torch.randn(1, 1, 3, 2, dtype=torch.float64)

    def second(alpha: float) -> tuple[Tensor, ...]:
        k, weights = (t.requires_grad_() for t in tensors)
        out = ck.intention(q, k, v, alpha, weights=weights, key_padding_mask=mask, impl=impl)
        grads = torch.autograd.grad(out.square().sum(), (k, weights), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), (k, weights))

    limit = second(1e-10)
    size = max(float(t.abs().max()) for t in limit)
    for ours, right in zip(second(0.0), limit, strict=True):
        torch.testing.assert_close(ours, right, rtol=0.0, atol=1e-5 * size)


def test_flops() -> None:
    q, k, v = _rows()
    sums, apply, system = 4 * 5 * (3 * 4 + 2 * 3 * 2), 4 * 4 * 2 * 3 * 2, 4 * (3**3 // 3 + 2 * 3**2 * 2)
    with FlopCounterMode(display=False) as forward:
        out = ck.intention(q, k, v, 0.1, impl="native")
    assert forward.get_total_flops() == sums + apply + system
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    dquery, dweight, rows = 4 * 4 * 2 * 2 * 3, 4 * 4 * 2 * 3 * 2, 2 * 4 * 5 * 3 * (3 + 2 * 2)
    small = 4 * 2 * 3 * 3 * 2  # Z W', by torch
    assert backward.get_total_flops() == dquery + dweight + system + rows + small


def _loss(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    out = (
        ck.intention(q, k, v, alpha)
        + ck.intention(q, k[:, :, :2], v[:, :, :2], 0.5)
        + ck.sigma_intention(q, k, v, alpha)
    )
    state = ck.ridge_state(k[:, :, :3], v[:, :, :3], state=ck.ridge_state(k, v))
    return out.pow(2).sum() + ck.solve_ridge(state, alpha).weight.sum()


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [
        ("aot_eager", True),
        pytest.param("aot_eager", False, marks=pytest.mark.nightly),
        pytest.param("inductor", True, marks=pytest.mark.thorough),
        pytest.param("inductor", False, marks=pytest.mark.nightly),
    ],
)
def test_compile_of_the_whole_graph(backend: str, dynamic: bool) -> None:
    inputs = (*_rows(), _positive(2, 2))
    compiled = torch.compile(_loss, fullgraph=True, dynamic=dynamic, backend=backend)
    wanted = torch.autograd.grad(_loss(*inputs), inputs)
    for ours, theirs in zip(torch.autograd.grad(compiled(*inputs), inputs), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("width", [3, 7])
def test_vmap(impl: str, width: int) -> None:
    q, k, v = torch.randn(4, 2, 2, 3, width), torch.randn(2, 2, 5, width), torch.randn(2, 2, 4, 5, 3)
    alpha = torch.rand(4) + 0.1

    def run(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
        state = ck.ridge_state(k, v, key_padding_mask=MASK, impl=impl)
        streamed = q.double() @ ck.solve_ridge(state, alpha, impl=impl).weight
        both = ck.intention(q, k, v, alpha, key_padding_mask=MASK, impl=impl) + streamed
        return both + ck.sigma_intention(q, k, v, alpha, key_padding_mask=MASK, impl=impl)

    mapped = torch.vmap(run, in_dims=(0, None, 2, 0))(q, k, v, alpha)
    for i in range(4):
        torch.testing.assert_close(mapped[i], run(q[i], k, v[:, :, i], alpha[i]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [50, 5])
def test_autocast(impl: str, length: int) -> None:
    q, k, v = (torch.randn(2, 2, n, 16, requires_grad=True) for n in (3, length, length))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ck.intention(q, k.bfloat16(), v, 1.0, impl=impl)
        sigma = ck.sigma_intention(q, k, v, 1.0, impl=impl)
        state = ck.ridge_state(k, v, impl=impl)
        weight = ck.solve_ridge(state, 1.0, impl=impl).weight
    assert out.dtype == sigma.dtype == torch.bfloat16 and state.gram.dtype == weight.dtype == torch.float64
    half = [t.detach().bfloat16().float() for t in (q, k, v)]
    torch.testing.assert_close(out.float(), ck.intention(*half, 1.0, impl="reference"), rtol=0.03, atol=0.02)
    torch.testing.assert_close(weight, ck.solve_ridge(ck.ridge_state(*half[1:], impl="reference"), 1.0).weight)
    assert all(
        g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum() + sigma.float().sum(), (q, k, v))
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length, width", [(133, 4), (9, 16)])
@pytest.mark.parametrize("exponent", [20, 30, 40, 50, 60])
def test_huge_logits_of_sigma_intention(impl: str, exponent: int, length: int, width: int, dtype: torch.dtype) -> None:
    """With a scale of 2^20 to 2^60, each query's largest score has all the weight; nearly equal scores are left out."""
    q, k, v = (
        torch.randn(2, 2, 30, width).to(dtype),
        torch.randn(2, 2, length, width).to(dtype),
        torch.randn(2, 2, length, 3).to(dtype),
    )
    key = k.double()
    system = key.mT @ key + 0.5 * torch.eye(width, dtype=torch.float64)
    scores = q.double() @ torch.linalg.solve(system, key.mT)
    first, second = scores.topk(2).values.unbind(-1)
    clear = first - second > 0.05 * first.abs()
    assert clear.sum() > 20
    wanted = v.gather(2, scores.argmax(-1, keepdim=True).expand(-1, -1, -1, 3))
    out = ck.sigma_intention(q, k, v, 0.5, scale=2.0**exponent, impl=impl)
    torch.testing.assert_close(out[clear], wanted[clear], rtol=8 * torch.finfo(dtype).eps, atol=0.0)

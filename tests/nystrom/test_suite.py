"""Nyström attention and the pseudo-inverse under the suite that every operator inherits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cmab_kernels as ck
from cmab_kernels.nystrom import costs
from cmab_kernels.testing import LAWS, LAYOUTS, Measured, OperatorSuite, oracles
from cmab_kernels.testing.suite import DTYPES

Results = tuple[Tensor, ...]


class NystromSuite(OperatorSuite):
    """Nyström attention, whose rows of a head share one pseudo-inverse.

    Its error shows in all of them, so torch's own error is the largest of a head's rows. In float64, where torch is the
    oracle, its own error is that of float32, scaled by eps.
    """

    impls = ("reference", "native")
    repeatable = ("native",)
    gradient_tolerance = 1e-8

    def torch_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype == torch.float64 else dtype

    def torch_errors(self, error: Tensor) -> Tensor:
        return error.nan_to_num(1.0, 1.0).amax(-1, keepdim=True)

    def row_sizes(self, found: Measured) -> Tensor:
        size = found.right.norm(dim=-1)
        return size.maximum(0.05 * size.amax(-1, keepdim=True))


class TestGivenLandmarks(NystromSuite):
    """`nystrom_attention` with given landmarks: means computed in half precision would be other landmarks."""

    operator = "nystrom_attention"
    arguments = {"query": "BHLD", "key": "BHND", "value": "BHNE", "near": "BHMD", "far": "BHMD"}
    logits = (("query", "near"), ("key", "far"))
    extents = {"B": 2, "H": 3, "L": 50, "N": 50, "M": 7, "D": 8, "E": 5}
    small = {"B": 1, "H": 2, "L": 2, "N": 4, "M": 3, "D": 2, "E": 1}
    shapes = (
        {"H": 2, "L": 300, "N": 300, "M": 16, "D": 16, "E": 16},
        {"L": 97, "N": 97, "M": 5, "E": 24},
        {"H": 1, "L": 130, "N": 130, "M": 33, "D": 64, "E": 64},
    )
    bits = ({"B": 5, "H": 2, "L": 301, "N": 301, "M": 16, "D": 24, "E": 9},)
    layout_tolerance = {torch.float64: 1e-11, torch.float32: 1e-5}
    empty = "BHLN"
    accepted = (
        "query of a dimension too few",
        *(f"{name} of {what}" for name in ("near", "far") for what in ("a dimension too few", "another dtype")),
    )

    def call(self, impl: str, near: Tensor, far: Tensor, **inputs: Any) -> Results:
        return (ck.nystrom_attention(**inputs, landmarks=(near, far), impl=impl),)

    def oracle(self, query: Tensor, key: Tensor, value: Tensor, near: Tensor, far: Tensor) -> Results:
        return (oracles.nystrom_attention(query, key, value, (near, far)),)

    def score(self, inputs: dict[str, Tensor]) -> float:
        query, key, _, near, far = inputs.values()
        return max(oracles.largest_score(*pair) for pair in ((query, far), (near, key), (near, far)))

    def is_bounded(self, name: str, is_gradient: bool, law: str) -> bool:
        """Leave out gradients if a softmax saturates or all inputs are equal, because they are differences that vanish.

        The tests of attention bound them.
        """
        return law == "normal" or not is_gradient or name == "value"


class TestSegmentMeans(NystromSuite):
    """`nystrom_attention` whose landmarks are means over segments of the tokens."""

    operator = "nystrom_attention"
    arguments = {"query": "BHND", "key": "BHND", "value": "BHNE"}
    logits = (("query",), ("key",))
    extents = {"B": 2, "H": 3, "N": 50, "D": 8, "E": 5}
    small = {"B": 2, "H": 1, "N": 7, "D": 2, "E": 1}
    dtypes = (torch.float64, torch.float32)
    laws = ("normal",)
    layout_tolerance = {torch.float64: 1e-11, torch.float32: 1e-5}
    empty = "BH"
    autocast = ("query", "key", "value")
    accepted = ("query of a dimension too few", "query longer in N")
    on_gpu = {"dtypes": DTYPES, "shapes": ({}, {"N": 1000, "D": 64, "E": 64}, {"N": 301, "D": 33})}
    bits = ({"B": 5, "H": 2, "N": 301, "D": 24, "E": 9},)

    def call(self, impl: str, **inputs: Any) -> Results:
        return (ck.nystrom_attention(**inputs, num_landmarks=3, impl=impl),)

    def oracle(self, query: Tensor, key: Tensor, value: Tensor) -> Results:
        return (oracles.nystrom_attention(query, key, value, tuple(oracles.segment_means(t, 3) for t in (query, key))),)


class TestMasked(TestSegmentMeans):
    """`nystrom_attention` with a mask that leaves some segments empty: derivatives, and torch's transforms."""

    compilers = ("eager", "aot_eager")
    repeatable = ()  # `test_masked_blocks` of test_promises.py has more masks
    test_accuracy = test_empty_extents = test_bad_arguments = test_huge_logits = None

    def call(self, impl: str, **inputs: Any) -> Results:
        batch, _, length, _ = inputs["query"].shape
        mask = torch.arange(batch * length, device=inputs["query"].device).view(batch, length) % 6 == 1
        mask[:, 0] = True
        return (ck.nystrom_attention(**inputs, num_landmarks=7, key_padding_mask=mask, impl=impl),)


class TestExactPinv(TestGivenLandmarks):
    """`nystrom_attention` with the exact pseudo-inverse of landmarks that are far apart."""

    arguments = {"query": "BHLD", "key": "BHND", "value": "BHNE", "near": "BHMD"}
    logits = ((), ())  # one-hot rows have no exact inverse
    extents = {**TestGivenLandmarks.extents, "L": 9, "N": 11, "M": 3}
    small = {**TestGivenLandmarks.small, "M": 2}
    dtypes = (torch.float64,)
    laws = ("normal",)
    shapes = ({},)
    bits = ()
    repeatable = ()
    batched_gradcheck = False
    autocast = ()
    empty = ""
    captured = False
    test_vmap = test_opcheck = test_compile = test_any_order = test_forward_mode = (
        test_a_bad_batch_element_stays_alone
    ) = None

    def make(self, name: str, shape: tuple[int, ...], law: str) -> Tensor:
        made = super().make(name, shape, law)
        return 3 * torch.eye(*shape[-2:]) + 0.3 * made if name == "near" else made

    def call(self, impl: str, near: Tensor, **inputs: Any) -> Results:
        return (ck.nystrom_attention(**inputs, landmarks=(near, near), pinv="exact", impl=impl),)

    def oracle(self, query: Tensor, key: Tensor, value: Tensor, near: Tensor) -> Results:
        return (oracles.nystrom_attention(query, key, value, (near, near), 0),)

    def score(self, inputs: dict[str, Tensor]) -> float:
        return 0.0


class TestPinv(NystromSuite):
    """`iterative_pinv` of matrices whose rows are softmaxes."""

    operator = "iterative_pinv"
    arguments = {"matrix": "BMM"}
    outputs = ("inverse",)
    extents = {"B": 5, "M": 16}
    small = {"B": 2, "M": 3}
    shapes = tuple({"B": 20, "M": number} for number in (1, 3, 16, 40, 64))
    on_gpu = {"shapes": tuple({"B": 300, "M": number} for number in (1, 3, 16, 17, 32, 33, 64))}
    laws = ("normal",)
    dtypes = (torch.float64, torch.float32)
    empty = "B"
    layout_tolerance = {torch.float64: 1e-11, torch.float32: 1e-5}
    accepted = tuple(f"matrix {what}" for what in ("of a dimension too few", "of another dtype", "on another device"))

    def make(self, name: str, shape: tuple[int, ...], law: str) -> Tensor:
        # Rows with different sums, so that one norm is the largest.
        return (2 * LAWS[law](*shape)).softmax(-1) * (1 + torch.rand(*shape[:-1], 1))

    def call(self, impl: str, matrix: Tensor) -> Results:
        return (ck.iterative_pinv(matrix, 3, impl=impl),)

    def oracle(self, matrix: Tensor) -> Results:
        return (oracles.iterative_pinv(matrix, 3),)

    def row_sizes(self, found: Measured) -> Tensor:
        return found.right.norm(dim=(-2, -1))[..., None].expand(found.right.shape[:-1])


# ---- checks of Nyström attention alone


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "offset" not in name])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 50, 8), (1, 4, 301, 16), (1, 1, 97, 1), (2, 2, 700, 64), (1, 1, 2000, 24)])
def test_equal_values_give_equal_bits_in_any_layout(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    q, k, v = (torch.randn(shape).to(dtype) for _ in range(3))
    moved = [LAYOUTS[layout](t) for t in (q, k, v)]
    for number in (1, 7, 16):
        for mask in (None, torch.rand(shape[0], shape[2]) < 0.2):
            ours = ck.nystrom_attention(*moved, num_landmarks=number, key_padding_mask=mask)
            assert torch.equal(ours, ck.nystrom_attention(q, k, v, num_landmarks=number, key_padding_mask=mask)), number


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_explain(dtype: torch.dtype) -> None:
    """`explain` takes the arguments that a user would give to the operator."""
    q, k, v = (torch.randn(2, 2, 7, 3, dtype=dtype) for _ in range(3))
    for operator, given in (
        ("nystrom_attention", (q, k, v)),
        ("iterative_pinv", (q,)),
        ("continual_nystrom_step", (q, k, v)),
    ):
        rows = ck.explain(operator, *given)
        assert rows[0].impl == "native" and rows[-1].impl == "reference" and not any(row.usable for row in rows[1:-1])


@pytest.mark.usefixtures("native")
def test_flops_of_whole_windows() -> None:
    """torch's FLOP counter counts what `nystrom.costs` computes."""
    q, k, v = torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 5)
    with FlopCounterMode(display=False) as counter:
        ck.nystrom_attention(q, k, v, 4)
    assert counter.get_total_flops() == 6 * costs.nystrom_attention_operations(40, 4, 8, 5, 6)

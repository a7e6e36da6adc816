"""Which of the fused kernel and Triton's sums "auto" takes on a GPU, whose capability is made up; tensors are on the meta device."""

from __future__ import annotations

import pytest
import torch

from cmab_kernels import backends, use_impl
from cmab_kernels.intention import api

cuda = pytest.importorskip("cmab_kernels.intention.cuda", exc_type=ImportError)

A100, H200, B200, CARD = (8, 0), (9, 0), (10, 0), (12, 0)
LARGE, SMALL, ONE = (256, 1, 1024, 64), (256, 1, 64, 64), (1, 1, 1_000_000, 64)

CHOICES = [
    (torch.bfloat16, LARGE, False, {A100: True, H200: True, B200: True, CARD: False}),
    (torch.float16, ONE, False, {A100: True, H200: True, B200: True, CARD: False}),
    (torch.bfloat16, SMALL, False, {A100: False, H200: False, B200: False, CARD: False}),
    (torch.bfloat16, LARGE, True, {A100: False, H200: True, B200: False, CARD: False}),
    (torch.float32, LARGE, False, {A100: False, H200: True, B200: False, CARD: False}),
    (torch.float32, SMALL, False, {A100: False, H200: False, B200: False, CARD: False}),
    (torch.float64, ONE, False, {A100: False, H200: False, B200: False, CARD: False}),
]
"""dtype, shape of the keys, weighted -> capability -> whether Triton's sums are faster"""


@pytest.mark.parametrize("dtype, shape, weighted, wanted", CHOICES)
def test_the_table(
    dtype: torch.dtype, shape: tuple[int, ...], weighted: bool, wanted: dict[tuple[int, int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = torch.empty(shape, dtype=dtype, device="meta")
    weights = torch.empty(shape[:3], device="meta") if weighted else None
    for capability, slower in wanted.items():
        monkeypatch.setattr(cuda, "capability", lambda index, found=capability: found)
        assert cuda.is_slower(key, key, weights) == slower, capability


def test_tf32_where_torch_may_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "capability", lambda index: B200)
    key = torch.empty(LARGE, device="meta")
    assert not cuda.is_slower(key, key, None)
    monkeypatch.setattr(cuda, "allows_tf32", lambda: True)
    assert cuda.is_slower(key, key, None)


def test_a_named_implementation_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where the caller leaves the choice does the table decide."""
    monkeypatch.setattr(backends, "_unsupported", lambda family, impl, tensors: "it is made up" if impl == "native" else None)
    monkeypatch.setattr(cuda, "capability", lambda index: A100)
    key = torch.empty(LARGE, dtype=torch.bfloat16, device="meta")
    inputs = api._inputs(key, key, key, None, None)
    assert api._fastest(inputs, "auto") == "triton" and api._fastest(inputs, "cuda") == "cuda"
    with use_impl("cuda"):
        assert api._fastest(inputs, "auto") == "cuda"
    few = inputs._replace(key=key[:, :, :64], value=key[:, :, :64])
    assert api._fastest(few, "auto") == "cuda"

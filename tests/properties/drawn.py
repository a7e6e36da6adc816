"""The values that Hypothesis draws for a property: extents, a dtype, a layout and a distribution for each tensor; and
their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cmab_kernels.runtime import backends
from cmab_kernels.testing import LAWS, LAYOUTS

FEW, MANY = 30, 1000
IMPLS = [impl for impl in ("reference", "native") if impl == "reference" or backends.imported("attention", impl)]
EXACT = {torch.float64: 1e-11, torch.float32: 4e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""dtype -> the relative error by which two ways to compute the same result may differ: a few roundings of the weights'
dtype"""


def with_examples(examples: int, steps: int = 50) -> settings:
    """Return the settings of a test: the same examples on every run in the ordinary tier, others every night."""
    ordinary = examples <= FEW
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=ordinary,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def holds(**strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a check with drawn arguments, with few examples in the ordinary tests and many in the nightly
    tests."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("impl", IMPLS)
        @pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.nightly)])
        def test(examples: int, impl: str) -> None:
            with_examples(examples)(given(impl=st.just(impl), **strategies)(check))()

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


class Rows(NamedTuple):
    """Queries, keys and values (B, H, L or N, D or E)."""

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def score(self) -> float:
        """Return the largest absolute product of a query and a key, at least 1: the error of logits is eps times
        this."""
        products = self.query.double() @ self.key.double().mT
        return max(1.0, float(products.abs().max()) if products.numel() else 0.0)

    @property
    def size(self) -> float:
        """Return the largest absolute value, at least 1e-3."""
        return max(1e-3, float(self.value.abs().max()) if self.value.numel() else 0.0)

    @property
    def tolerance(self) -> float:
        """Return the difference that rounding may make between two ways to the same weighted mean of values."""
        eps = torch.finfo(self.query.dtype).eps if self.query.dtype == torch.float64 else torch.finfo(torch.float32).eps
        return (EXACT[self.query.dtype] + 8 * eps * self.score) * self.size


@st.composite
def rows(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = tuple(EXACT),
    laws: tuple[str, ...] = tuple(LAWS),
    least: int = 0,
    layouts: tuple[str, ...] = tuple(LAYOUTS),
) -> Rows:
    """Draw rows of any extents, with at least `least` keys, and possibly more keys than a tile of a kernel holds."""
    torch.manual_seed(draw(st.integers(0, 2**32)))
    dtype, law = draw(st.sampled_from(dtypes)), draw(st.sampled_from(laws))
    batch, heads, queries = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    keys = draw(st.one_of(st.integers(least, 9), st.integers(60, 140)))
    width, value_width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    made = (
        LAWS[law](batch, heads, *shape).to(dtype) for shape in ((queries, width), (keys, width), (keys, value_width))
    )
    return Rows(*(LAYOUTS[draw(st.sampled_from(layouts))](t) for t in made))


seeds = st.integers(0, 2**32)
WIDE = (torch.float64, torch.float32)

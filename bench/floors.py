"""The least time for a result: its exponentials, products and memory traffic, divided by the rates of a machine.

Formulas count the work that any implementation must do: each score's exponential once, keys and values moved once. They
leave out small terms (queries, latents, states), and all data that a cache holds from one call to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cmab_kernels.nystrom.costs import SCHEMES, executed_on_average, nystrom_attention_operations, pinv_operations

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PADS = {"cpu": (1, 1), "cuda": (16, 8)}
"""The multiple to which a GPU's matrix units round inner and outer widths. The lanes of a CPU hold queries, so no width
is rounded."""


@dataclass(frozen=True)
class Work:
    """The work that a result needs: exponentials, floating-point operations of products, bytes that no cache holds."""

    exponentials: float = 0.0
    products: float = 0.0
    bytes: float = 0.0
    dtype: str = "float32"
    """The dtype of the products' operands, or "tf32" for float32 that may be rounded to it."""

    def __add__(self, other: Work) -> Work:
        """The sum of the work of both, which must have one dtype."""
        return replace(
            self,
            exponentials=self.exponentials + other.exponentials,
            products=self.products + other.products,
            bytes=self.bytes + other.bytes,
        )


@dataclass(frozen=True)
class Rates:
    """Exponentials and bytes per second, and floating-point operations per second by the dtype of the operands."""

    exponentials: float
    memory: float
    matrix: Mapping[str, float]
    """On a GPU, "tf32" is the rate of rounded products. "float32" is the rate of exact products. An exact product takes
    several products of the matrix units."""
    together: bool = False
    """Whether exponentials and products take turns on the same units, as on a CPU."""


Passes = Work | Sequence[Work]
"""The work of a pass, or of several passes one after the other: a backward pass begins when the forward pass has
ended."""


@dataclass(frozen=True)
class Floor:
    """The least time for the work of a pass, in seconds, by kind of work."""

    exponentials: float
    matrix: float
    memory: float
    together: bool = False

    @property
    def seconds(self) -> float:
        if self.together:
            return max(self.exponentials + self.matrix, self.memory)
        return max(self.exponentials, self.matrix, self.memory)

    @property
    def bound(self) -> str:
        """The kind of work that determines the time; if two kinds take turns, the larger of them."""
        if self.together and self.memory < self.seconds:
            return max("exponentials", "matrix", key=lambda name: getattr(self, name))
        return max("exponentials", "matrix", "memory", key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class Floors:
    """The least time for passes one after the other: the sum of their times."""

    passes: Sequence[Floor]

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.passes)

    @property
    def bound(self) -> str:
        """The kind of work of the longest pass."""
        return max(self.passes, key=lambda one: one.seconds).bound


def floor(work: Work, rates: Rates) -> Floor:
    return Floor(
        work.exponentials / rates.exponentials,
        work.products / rates.matrix[work.dtype],
        work.bytes / rates.memory,
        rates.together,
    )


def floors(work: Passes, rates: Rates) -> Floors:
    return Floors([floor(one, rates) for one in passes_of(work)])


def passes_of(work: Passes) -> Sequence[Work]:
    return [work] if isinstance(work, Work) else work


def rounded(work: Passes) -> Passes:
    """The rates if float32 may be multiplied in tf32."""
    return [replace(one, dtype="tf32") if one.dtype == "float32" else one for one in passes_of(work)]


# ---- attention -------------------------------------------------------------------------------------------------------


def attention_work(
    scores: int, pairs: int, width: int, value_width: int, dtype: str, backward: bool = False, device: str = "cpu"
) -> Work:
    """The work of `scores` = B H L N scores, and of `pairs` = B H N keys with their values.

    Forward: an exponential and two products per score, Q K' and P V. Backward alone: the exponential again, five
    products (Q K', dO V', dS' Q, dS K, P' dO), and gradients that are as large as the operands.
    """
    inner, outer = (-(-size // pad) * pad for size, pad in zip((width, value_width), PADS[device], strict=True))
    widths, passes = (3 * inner + 2 * outer, 2) if backward else (inner + outer, 1)
    return Work(scores, 2 * scores * widths, passes * pairs * (width + value_width) * BYTES[dtype], dtype)


# ---- Intention -------------------------------------------------------------------------------------------------------


def ridge_work(
    keys: int, width: int, value_width: int, dtype: str, backward: bool = False, exact: bool = False
) -> Work:
    """The sums K'K (half of it, because it is symmetric) and K'V over `keys` = B H N keys; the backward pass has their
    gradients K (dG + dG') + V dM', K dM.

    `exact`: products in float64, as for a state.
    """
    squares, crossed = keys * width * width, keys * width * value_width
    products = 2 * squares + 4 * crossed if backward else squares + 2 * crossed
    moved = (2 if backward else 1) * keys * (width + value_width) * BYTES[dtype]
    return Work(0.0, products, moved, "float64" if exact else dtype)


def rows_work(rows: int, width: int, value_width: int, dtype: str, backward: bool = False) -> Work:
    """`rows` = B H M queries times a solution; the backward pass has both gradients of the product."""
    passes = 2 if backward else 1
    return Work(
        0.0, passes * 2 * rows * width * value_width, passes * rows * (width + value_width) * BYTES[dtype], dtype
    )


def solve_work(systems: int, width: int, columns: int, dtype: str) -> Work:
    """The work of a Cholesky factorisation and two triangular solves."""
    return Work(
        0.0,
        systems * (width**3 / 3 + 2 * width**2 * columns),
        systems * width * (width + 2 * columns) * BYTES[dtype],
        dtype,
    )


def inverse_work(systems: int, width: int, dtype: str) -> Work:
    """The work of a Cholesky factorisation, and of the inverse from its factor."""
    return Work(0.0, systems * width**3, systems * 2 * width**2 * BYTES[dtype], dtype)


# ---- Nyström ---------------------------------------------------------------------------------------------------------


def pinv_work(matrices: int, landmarks: int, iterations: int, dtype: str) -> Work:
    return Work(
        0.0, matrices * pinv_operations(landmarks, iterations), matrices * 2 * landmarks**2 * BYTES[dtype], dtype
    )


def nystrom_work(
    heads: int, tokens: int, landmarks: int, width: int, value_width: int, iterations: int, dtype: str
) -> Work:
    """A whole window, forward, with as many queries as keys. Queries, keys and values are read, the output is
    written."""
    exponentials = 2 * tokens * landmarks + landmarks**2
    products = nystrom_attention_operations(tokens, landmarks, width, value_width, iterations)
    return Work(
        heads * exponentials, heads * products, heads * tokens * 2 * (width + value_width) * BYTES[dtype], dtype
    )


def step_work(scheme: str, heads: int, window: int, landmarks: int, width: int, dtype: str) -> Work:
    """The work of a continual step for one token, as a mean over a stream; the state stays in a cache.

    `scheme` is one of costs.SCHEMES.
    """
    assert scheme in SCHEMES and scheme not in ("full", "nystrom"), scheme
    outputs = window if "retroactive" in scheme else 1
    row = window if outputs == 1 else 3 * window  # exact attention; retroactive: n sums too
    exponentials = (2 + outputs) * landmarks if " " in scheme else row
    products = executed_on_average(scheme, window, landmarks, width)
    return Work(heads * exponentials, heads * products, heads * (3 + outputs) * width * BYTES[dtype], dtype)

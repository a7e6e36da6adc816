"""The least time that the arithmetic and the memory traffic of a shape leave, on a given GPU."""

from __future__ import annotations

from dataclasses import dataclass

EXPONENTIALS_PER_CLOCK = 16
"""Of one multiprocessor's special function units (CUDA C++ Programming Guide, throughput of native arithmetic instructions)."""


@dataclass(frozen=True)
class Rates:
    """Exponentials, bytes and floating point operations a second, the last by the type of the operands."""

    exponentials: float
    copy: float
    matrix: dict[str, float]


@dataclass(frozen=True)
class Shape:
    """Attention of `latents` queries over `keys` keys; `matrix` names the rate that its products run at."""

    name: str
    batch: int
    heads: int
    latents: int
    keys: int
    width: int
    dtype: str
    matrix: str

    @property
    def bytes(self) -> int:
        """Of all keys, or of all values."""
        return self.batch * self.heads * self.keys * self.width * {"float64": 8, "float32": 4}.get(self.dtype, 2)


@dataclass(frozen=True)
class Floor:
    """Seconds by what takes them."""

    exponentials: float
    matrix: float
    memory: float

    @property
    def seconds(self) -> float:
        return max(self.exponentials, self.matrix, self.memory)

    @property
    def bound(self) -> str:
        return max(vars(self), key=lambda name: getattr(self, name))


def _up(width: int, step: int) -> int:
    return -(-width // step) * step


def forward_floor(shape: Shape, rates: Rates) -> Floor:
    """One exponential a score; S = Q K' and P V, whose inner and outer widths the matrix units pad; keys and values read once."""
    scores = shape.batch * shape.heads * shape.latents * shape.keys
    flops = 2 * scores * (_up(shape.width, 16) + _up(shape.width, 8))
    return Floor(scores / rates.exponentials, flops / rates.matrix[shape.matrix], 2 * shape.bytes / rates.copy)


def backward_floor(shape: Shape, rates: Rates) -> Floor:
    """The same exponentials again; five products; keys and values read, their gradients written."""
    scores = shape.batch * shape.heads * shape.latents * shape.keys
    flops = 2 * scores * (3 * _up(shape.width, 16) + 2 * _up(shape.width, 8))
    return Floor(scores / rates.exponentials, flops / rates.matrix[shape.matrix], 4 * shape.bytes / rates.copy)


@dataclass(frozen=True)
class RidgeShape:
    """Intention's sums over `keys` keys and values, both `width` wide; `matrix` names the rate that its products run at."""

    name: str
    batch: int
    keys: int
    width: int
    dtype: str
    matrix: str

    @property
    def bytes(self) -> int:
        """Of all keys, or of all values."""
        return self.batch * self.keys * self.width * {"float64": 8, "float32": 4}.get(self.dtype, 2)


def ridge_floor(shape: RidgeShape, rates: Rates) -> Floor:
    """Half of K'K, for it is symmetric, and K'V; keys and values read once."""
    flops = shape.batch * shape.keys * 3 * shape.width**2
    return Floor(0.0, flops / rates.matrix[shape.matrix], 2 * shape.bytes / rates.copy)


def ridge_backward_floor(shape: RidgeShape, rates: Rates) -> Floor:
    """Three products; keys and values read, their gradients written."""
    flops = shape.batch * shape.keys * 6 * shape.width**2
    return Floor(0.0, flops / rates.matrix[shape.matrix], 4 * shape.bytes / rates.copy)

"""Floating-point operations with the roundings of PTX, on NumPy arrays."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

_TIE = np.uint64(1 << 28)
_BELOW_FLOAT32 = np.uint64((1 << 29) - 1)
_SPLIT = 134217729.0  # 2**27 + 1


def flush(x: np.ndarray) -> np.ndarray:
    """Return float32 numbers with zeros for subnormal ones, as `.ftz` does."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a b + c of float32 numbers, rounded once.

    The product is exact in float64. The sum is rounded to odd if rounding it twice could differ from rounding it once:
    if it is midway between two float32 numbers, and if it is subnormal.
    """
    a, b, c = np.broadcast_arrays(a, b, c)
    product, wide = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + wide
    unsure = ((total.view(np.uint64) & _BELOW_FLOAT32) == _TIE) | ((np.abs(total) < 2.0**-125) & (total != 0))
    if unsure.any():
        total = np.where(unsure, _odd_sum(product, wide), total)
    return total.astype(np.float32)


def fma32_down(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a b + c of float32 numbers, rounded towards minus infinity."""
    a, b, c = np.broadcast_arrays(a, b, c)
    exact = _odd_sum(a.astype(np.float64) * b, c.astype(np.float64))
    nearest = exact.astype(np.float32)
    return np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a + b rounded, and its error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _odd_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a + b. If it is not exact, it is rounded to the neighbour with an odd last bit (Boldo and Melquiond,
    2008)."""
    total, error = _two_sum(a, b)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    moved = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even & np.isfinite(total), moved, total)


def _two_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a b rounded, and its error (Dekker), for numbers that are far from the ends of the range."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scaled = _SPLIT * x
    high = scaled - (scaled - x)
    return high, x - high


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a b + c of float64 numbers, rounded once (Boldo and Melquiond, 2008); near the ends of the range it is
    computed with fractions."""
    a, b, c = (np.asarray(x, np.float64) for x in np.broadcast_arrays(a, b, c))
    product, low = _two_product(a, b)
    high, middle = _two_sum(c, low)
    top, rest = _two_sum(product, high)
    result = top + _odd_sum(middle, rest)
    plain = (a == 0) | (b == 0) | ~np.isfinite(a) | ~np.isfinite(b) | ~np.isfinite(c)
    sizes = np.abs(np.where(plain, 1.0, [a, b, product, c]))
    far = ~plain & ((sizes > 2.0**960).any(0) | (sizes[:3] < 2.0**-900).any(0) | ((c != 0) & (sizes[3] < 2.0**-900)))
    result = np.where(plain, a * b + c, result)
    if far.any():
        result[far] = [_fma_of_fractions(*numbers) for numbers in zip(a[far], b[far], c[far], strict=True)]
    return result


def _fma_of_fractions(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        return float(exact)
    except OverflowError:
        return np.inf if exact > 0 else -np.inf


def off_by_two(x: np.ndarray) -> np.ndarray:
    """Return float32 numbers with an error of up to two units in the last place, which depends on their bits. 0,
    subnormal and infinite numbers and NaN do not change."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32)
    units = ((bits * np.uint32(0x9E3779B1)) >> np.uint32(16)) % np.uint32(5)
    size = np.abs(x)
    return np.where((size >= 2.0**-125) & (size < 2.0**127), (bits + units - np.uint32(2)).view(np.float32), x)


def truncated_to_float32(x: np.ndarray) -> np.ndarray:
    """Return float64 numbers as float32, rounded towards zero."""
    nearest = x.astype(np.float32)
    return np.where(np.abs(nearest.astype(np.float64)) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(x: np.ndarray, towards_zero: bool = False) -> np.ndarray:
    """Return the bits of float32 numbers rounded to bfloat16, to nearest even or towards zero; NaN is 0x7fff."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    more = np.uint32(0) if towards_zero else np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.where(np.isnan(x), np.uint16(0x7FFF), ((bits + more) >> np.uint32(16)).astype(np.uint16))


def to_tf32(bits: np.ndarray) -> np.ndarray:
    """Return the bits of float32 numbers rounded to tf32, half away from zero (`cvt.rna.tf32.f32`)."""
    return (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)

"""The targets and candidates of tuning: each kernel with a table, on a shape that represents its width."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cmab_kernels.attention.contract import Attention, AttentionBackward
from cmab_kernels.attention.triton import launch as attention_launch
from cmab_kernels.intention.contract import ApplyRows, Gram, GramBackward
from cmab_kernels.intention.triton import launch as ridge_launch
from cmab_kernels.nystrom.contract import Pinv, PinvBackward
from cmab_kernels.nystrom.triton import launch as nystrom_launch
from cmab_kernels.runtime.backends import implementation
from cmab_kernels.runtime.tiles import FIELDS, Key, capability_of, using

Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Target:
    """A kernel whose tiles are chosen, for one dtype and one width of heads."""

    kernel: str
    dtype: str
    width: int

    def __str__(self) -> str:
        return f"{self.kernel}, {self.dtype}, {self.width} wide"

    @property
    def operands(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def latents(self) -> int:
        """The number of queries for attention: one block of queries, or several blocks."""
        return 512 if self.kernel == "attention.backward_keys" else 128

    def products(self, device: torch.device) -> Any:
        if self.kernel.startswith("nystrom"):
            return nystrom_launch.products(self.operands, self.width, device)
        if self.kernel == "intention.gram":
            return ridge_launch.gram_products(self.operands, False, False)
        if self.kernel.startswith("intention"):
            return ridge_launch.row_products(self.operands, False)
        if self.kernel == "attention.forward":
            return attention_launch.forward_products(self.operands, self.width)
        return attention_launch.backward_products(self.operands, self.width, device)

    def key(self, device: torch.device) -> Key:
        products, width = self.products(device), self.width
        if self.kernel == "intention.gram":
            width = ridge_launch.gram_tiles(products, device, width, width).TILE_D
        return Key(self.kernel, capability_of(device), products.kind, width)

    def built_in(self, device: torch.device) -> tuple[int, ...]:
        """The tiles of the built-in table, in the order of FIELDS."""
        products, width = self.products(device), self.width
        made: dict[str, Callable[[], tuple[int, ...]]] = {
            "attention.forward": lambda: tuple(attention_launch.forward_tiles(products, device, width, 10**6)),
            "attention.backward": lambda: tuple(attention_launch.backward_tiles(products, device, width, 10**6)),
            "attention.backward_keys": lambda: tuple(attention_launch.backward_keys_tiles(products, device, width)),
            "intention.gram": lambda: tuple(ridge_launch.gram_tiles(products, device, width, width))[2:],
            "intention.backward": lambda: _of_rows(ridge_launch.backward_tiles(products, device, width, width)),
            "intention.apply": lambda: _of_rows(ridge_launch.apply_tiles(products, device, width, width)),
        }
        with using({}):
            return made.get(self.kernel, lambda: (nystrom_launch.warps(self.kernel, products, device, width),))()


def _of_rows(tiles: Any) -> tuple[int, ...]:
    """TILE_D is also used as TILE_E: with heads of this width, both are the widest tile."""
    return (tiles.TILE_D, tiles.BLOCK_N, tiles.num_warps, tiles.num_stages)


def targets() -> Iterator[Target]:
    """The targets that are used most come first: half precision and float32 at narrow heads.

    float64, and heads that are so wide that few fit, keep the built-in tiles.
    """
    yield from _of_attention(("bfloat16", "float32"), (16, 64))
    for dtype, width in itertools.product(("float32", "bfloat16"), (64, 16)):
        for kernel in ("intention.gram", "intention.backward", "intention.apply"):
            yield Target(kernel, dtype, width)
    for kernel, dtype, width in itertools.product(
        ("nystrom.forward", "nystrom.backward"), ("float32", "float64"), (16, 32, 64)
    ):
        yield Target(kernel, dtype, width)
    yield from _of_attention(("bfloat16", "float32"), (32,))
    yield from _of_attention(("bfloat16",), (128,))


def _of_attention(dtypes: tuple[str, ...], widths: tuple[int, ...]) -> Iterator[Target]:
    for dtype, width in itertools.product(dtypes, widths):
        yield Target("attention.forward", dtype, width)
        yield Target("attention.backward", dtype, width)
        if dtype != "float32":  # its gradients in parts are computed by one kernel
            yield Target("attention.backward_keys", dtype, width)


_SIZES = (32, 64, 128)
_ATTENTION = {"BLOCK_L": _SIZES, "BLOCK_N": _SIZES, "num_warps": (4, 8), "num_stages": (1, 2, 3)}
_ROWS = {"TILE": (16, 32, 64), "BLOCK_N": _SIZES, "num_warps": (4, 8), "num_stages": (1, 2, 3)}
TRIED: dict[str, dict[str, tuple[int, ...]]] = {
    "attention.forward": _ATTENTION,
    "attention.backward": _ATTENTION,
    "attention.backward_keys": _ATTENTION,
    "intention.gram": {"BLOCK_N": (16, *_SIZES), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4)},
    "intention.backward": _ROWS,
    "intention.apply": _ROWS,
    "nystrom.forward": {"num_warps": (1, 2, 4, 8)},
    "nystrom.backward": {"num_warps": (1, 2, 4, 8)},
}
"""Kernel -> field of its tiles -> values to try, in all combinations; other fields keep the built-in value."""

MOST_OF_BUILT_IN = 2
LEAST_OF_BUILT_IN = 1 / 4
"""The sizes of a tile, relative to the built-in tile, beyond which it is not tried; the largest tile only just fits."""


def candidates(target: Target, device: torch.device) -> list[tuple[int, ...]]:
    """The built-in tiles first, then all other candidates."""
    start, fields = target.built_in(device), FIELDS[target.kernel]
    tried = TRIED[target.kernel]
    values = [tried.get(name, (value,)) for name, value in zip(fields, start, strict=True)]
    most = {"TILE": max(target.width, 16), "BLOCK_L": target.latents}  # larger values are cut to this
    in_one_block = target.kernel == "attention.backward" and target.products(device).kind != "tf32x3"
    whole = (
        {"BLOCK_L": min(target.latents, start[0])} if in_one_block else {}
    )  # otherwise another kernel computes dK and dV
    found = [
        tiles
        for tiles in itertools.product(*values)
        if all(
            size <= most.get(name, size) and size == whole.get(name, size)
            for name, size in zip(fields, tiles, strict=True)
        )
        and LEAST_OF_BUILT_IN <= _size(fields, tiles) / _size(fields, start) <= MOST_OF_BUILT_IN
    ]
    return list(dict.fromkeys((start, *found)))


def _size(fields: Iterable[str], tiles: tuple[int, ...]) -> int:
    """The numbers that a tile consists of."""
    return math.prod(size for name, size in zip(fields, tiles, strict=True) if not name.startswith("num_"))


# ---- calls


LENGTHS = {"small": 5003, "large": 200_000}
"""The number of keys. Large calls have this number with heads of 64, and the same number of bytes at other widths."""
SET = 1021
"""The keys of one set in Intention, as in training."""


def prepared(target: Target, device: str, size: str, wide: bool = False) -> Callable[[], Results]:
    """A call in which the kernel takes most of the time. `size` is "small" for a test of its result, and "large" for
    its speed.

    `wide`: the same inputs, to the bit, in float64.
    """
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        made = torch.randn(shape, device=device).to(target.operands)
        return made.double() if wide else made

    keys = LENGTHS[size] if size == "small" else LENGTHS[size] * 64 // target.width
    family = target.kernel.split(".")[0]
    return {"attention": _attention, "intention": _intention, "nystrom": _nystrom}[family](target, draw, keys)


def _attention(target: Target, draw: Callable[..., Tensor], keys: int) -> Callable[[], Results]:
    module = implementation("attention", "triton")
    q, k, v, dout = (draw(1, 4, n, target.width) for n in (target.latents, keys, keys, target.latents))
    scale = target.width**-0.5
    if target.kernel == "attention.forward":
        return lambda: module.attention_forward(Attention(q, k, v, scale=scale))
    out, lse = module.attention_forward(Attention(q, k, v, scale=scale))
    needs = (target.kernel != "attention.backward_keys", True, True, False)
    slopes = dout.to(out.dtype), torch.zeros_like(lse)
    return lambda: tuple(
        t
        for t in module.attention_backward(
            AttentionBackward(*slopes, q, k, v, None, None, out, lse, None, scale, needs)
        )
        if t.numel()
    )


def _intention(target: Target, draw: Callable[..., Tensor], keys: int) -> Callable[[], Results]:
    """A call over the same total number of keys."""
    module = implementation("intention", "triton")
    sets = max(keys // SET, 1)
    k, v = (draw(sets, 1, SET, target.width) for _ in range(2))
    square = draw(sets, 1, target.width, target.width).double()
    if target.kernel == "intention.gram":
        return lambda: module.gram(Gram(k, v, None, None, None, (True, True), False))
    if target.kernel == "intention.apply":
        return lambda: (module.apply_rows(ApplyRows(k, square)),)
    return lambda: module.gram_backward(
        GramBackward(square, square, k, v, None, None, None, (True, True, False), False)
    )[:2]


def _nystrom(target: Target, draw: Callable[..., Tensor], keys: int) -> Callable[[], Results]:
    """A diagonally dominant matrix, so that the iteration does not increase rounding errors."""
    module = implementation("nystrom", "triton")
    a = draw(max(keys // 50, 1), target.width, target.width).softmax(-1)
    a = a + 2 * torch.eye(target.width, dtype=a.dtype, device=a.device)
    if target.kernel == "nystrom.forward":
        return lambda: (module.iterative_pinv(Pinv(a, 6)),)
    return lambda: (module.iterative_pinv_backward(PinvBackward(a, a, 6)),)

"""Matrix instructions of a warp, and the loads of their operands.

Products are exact. NVIDIA's tensor cores do not round the terms of a sum one after the other. For half precision,
bfloat16 and tf32, a few products and the accumulator are shifted to the largest exponent among them, cut off, added,
and cut off again to 24 bits. Compute capability 8.0 adds eight products at a time (four for tf32), with one bit more
than the 24; float64 is rounded to nearest after each product. Experiments found these rules:

- M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ Computer Science
7:e330, 2021;
- X. Li, A. Li, B. Fang, K. Swirydowicz, I. Laguna, G. Gopalakrishnan, FTTN: Feature-targeted testing for numerical
  properties of NVIDIA and AMD matrix accelerators, CCGrid 2024;
- F. A. Khattak, M. Mikaitis, Accurate models of NVIDIA tensor cores, arXiv:2512.07004, 2025, whose models have the bits
  of an A100 (one bit more than the 24) and of an H100 (two more).
"""

from __future__ import annotations

import numpy as np

from .floats import fma64, truncated_to_float32, widen_bfloat16
from .opcodes import opcode
from .parse import Instruction, Vector
from .report import Fault, Unknown
from .team import Team

SIGNIFICANT_BITS = 25
"""The bits of a term that are kept, counted from the largest term's highest."""
TERMS = {"f16": 8, "bf16": 8, "tf32": 4}
"""The number of products that compute capability 8.0 adds at a time."""


def _whole_warps(team: Team) -> int:
    """Return the number of active warps; raise `Fault` if a thread of one of them is not active."""
    positions = team.positions
    if len(positions) % 32 or (positions.reshape(-1, 32) != positions[::32, None] + np.arange(32)).any():
        raise Fault("a matrix instruction without all threads of the warp")
    return len(positions) // 32


def _fragment(team: Team, operand: Vector, kind: str) -> np.ndarray:
    """Return the registers of a fragment, (warps, 8 groups, 4 threads, registers)."""
    columns = [np.broadcast_to(team.read(part, kind), team.positions.shape) for part in operand.parts]
    return np.stack(columns, 1).reshape(-1, 8, 4, len(columns))


def _numbers(words: np.ndarray, kind: str) -> np.ndarray:
    """Return the numbers in registers as float64, with a last dimension for numbers in the same register."""
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)[..., None]
    halves = np.ascontiguousarray(words)[..., None].view(np.uint16)
    return (halves.view(np.float16) if kind == "f16" else widen_bfloat16(halves)).astype(np.float64)


@opcode("mma")
def mma(team: Team, one: Instruction) -> None:
    """`mma.sync`: D = A B + C for each warp; the fragments have the layout in the PTX manual."""
    if not one.has("sync") or not one.has("row") or not one.has("col") or one.has("sp", "satfinite"):
        raise Unknown("this matrix instruction")
    warps = _whole_warps(team)
    shape, (result, kind, _, total) = one.modifiers[2], one.modifiers[-4:]
    if shape == "m8n8k4" and kind == "f64":
        _mma_float64(team, one)
        return
    if not shape.startswith("m16n8") or kind not in TERMS or (result, total) != ("f32", "f32"):
        raise Unknown("this matrix instruction")
    a = _numbers(_fragment(team, one.operands[1], "b32"), kind)
    b = _numbers(_fragment(team, one.operands[2], "b32"), kind)
    depth = b.shape[3] * 4 * b.shape[4]
    a = a.reshape(warps, 8, 4, -1, 2, a.shape[-1]).transpose(0, 4, 1, 3, 2, 5).reshape(warps, 16, 1, depth)
    b = b.transpose(0, 1, 3, 2, 4).reshape(warps, 1, 8, depth)
    c = (
        _fragment(team, one.operands[3], "f32")
        .reshape(warps, 8, 4, 2, 2)
        .transpose(0, 3, 1, 2, 4)
        .reshape(warps, 16, 8)
    )
    for first in range(0, depth, TERMS[kind]):
        some = slice(first, first + TERMS[kind])
        c = truncated_sum(a[..., some], b[..., some], c)
    _store(team, one.operands[0], c.reshape(warps, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4))


def truncated_sum(a: np.ndarray, b: np.ndarray, accumulator: np.ndarray) -> np.ndarray:
    """Return the accumulator plus the products of a and b along the last dimension, added as by a tensor core, in
    float32.

    The exponent of a product is taken as the sum of those of its factors, which hardware knows before it multiplies;
    the product may be twice as large.
    """
    wide = accumulator.astype(np.float64)
    terms = np.concatenate([a * b, wide[..., None]], -1)
    exponents = np.concatenate([_exponent(a) + _exponent(b), _exponent(wide)[..., None]], -1).max(-1)
    unit = np.ldexp(1.0, np.maximum(exponents, -126) - SIGNIFICANT_BITS + 1)[..., None]
    total = truncated_to_float32((np.trunc(terms / unit) * unit).sum(-1))
    return np.where(np.isfinite(terms).all(-1), total, terms.sum(-1).astype(np.float32))


def _exponent(x: np.ndarray) -> np.ndarray:
    """Return the exponent of 2 in numbers whose first bit is the 1 before the point; for 0, return a very small
    exponent."""
    return np.where(x == 0, -5000, np.frexp(x)[1] - 1)


def _mma_float64(team: Team, one: Instruction) -> None:
    a = _fragment(team, one.operands[1], "f64")[..., 0]
    b = _fragment(team, one.operands[2], "f64")[..., 0].transpose(0, 2, 1)
    c = _fragment(team, one.operands[3], "f64").reshape(-1, 8, 8)
    for k in range(4):
        c = fma64(a[:, :, k, None], b[:, k, None, :], c)
    _store(team, one.operands[0], c)


def _store(team: Team, operand: Vector, values: np.ndarray) -> None:
    """Write a fragment back, given as (warps, groups, threads, registers) or in a shape of the same order."""
    for register, column in zip(operand.parts, values.reshape(-1, len(operand.parts)).T, strict=True):
        team.write(register, np.ascontiguousarray(column))


@opcode("ldmatrix")
def ldmatrix(team: Team, one: Instruction) -> None:
    """Load up to four 8 x 8 matrices of 16 bits, or their transposes; lane 8 i + r holds the address of row r of matrix
    i."""
    warps, targets = _whole_warps(team), one.operands[0].parts
    if not one.has("m8n8") or not one.has("b16"):
        raise Unknown("this shape of matrices")
    lanes = np.flatnonzero(team.lanes[team.who] < 8 * len(targets))
    addresses = team.addresses(one.operands[1])[lanes]
    rows = team.block.shared.read(addresses, 16, team.active_warps()[lanes])
    matrices = np.ascontiguousarray(rows).view(np.uint16).reshape(warps, len(targets), 8, 8)
    if one.has("trans"):
        matrices = matrices.transpose(0, 1, 3, 2)
    words = np.ascontiguousarray(matrices).view(np.uint32).reshape(warps, len(targets), 32)
    for number, target in enumerate(targets):
        team.write(target, words[:, number].reshape(-1))


@opcode("stmatrix")
def stmatrix(team: Team, one: Instruction) -> None:
    """The inverse of `ldmatrix`."""
    warps, sources = _whole_warps(team), one.operands[1].parts
    words = np.stack([team.read(source, "b32").reshape(warps, 32) for source in sources], 1)
    matrices = words.view(np.uint16).reshape(warps, len(sources), 8, 8)
    if one.has("trans"):
        matrices = matrices.transpose(0, 1, 3, 2)
    lanes = np.flatnonzero(team.lanes[team.who] < 8 * len(sources))
    rows = np.ascontiguousarray(matrices).reshape(-1, 8).view(np.uint64)
    team.block.shared.write(team.addresses(one.operands[0])[lanes], rows, team.active_warps()[lanes])

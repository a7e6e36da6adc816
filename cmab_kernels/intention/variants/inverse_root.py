"""The square root of a pseudo-inverse, with a gradient that stays finite where eigenvalues are equal."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.checks import mismatch
from ...runtime.operator import Call, Gradients, Operator
from ...runtime.tracing import exports_to_onnx
from ..schema import row_products


class InverseRoot(NamedTuple):
    """The arguments of `cmab::inverse_root`."""

    matrix: Tensor


def _spectrum(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues, with 1 in place of zeros; eigenvectors; and a mask (..., N), True for the nonzero eigenvalues.

    An eigenvalue counts as zero if it is 0 up to rounding. The eigenvalues of a matrix that is not
    finite are NaN. LAPACK would refuse the whole batch.
    """
    defined = matrix.isfinite().all(-1).all(-1)[..., None, None]
    values, vectors = _eigh(matrix.where(defined, 0.0))
    values = values.where(defined.squeeze(-1), torch.nan)
    cutoff = (
        matrix.shape[-1] * torch.finfo(matrix.dtype).eps * values.detach().abs().amax(-1, keepdim=True)
        if values.numel()
        else 0.0
    )
    kept = ~(values <= cutoff)
    return torch.where(kept, values, 1.0), vectors, kept


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of symmetric matrices. On a CPU each matrix is decomposed in a
    separate call, because the bits of LAPACK depend on the address of a matrix."""
    if exports_to_onnx():
        got, allowed = "kernel_features in an export to ONNX", "an export with torch.export: ONNX has no eigenvalues"
        raise NotImplementedError(mismatch("model", got, allowed))
    lead = matrix.shape[:-2]
    if matrix.is_cuda or lead.numel() < 2:
        return torch.linalg.eigh(matrix)
    each = [torch.linalg.eigh(one) for one in matrix.reshape(lead.numel(), *matrix.shape[-2:])]
    values, vectors = (torch.stack(parts).unflatten(0, lead) for parts in zip(*each, strict=True))
    return values, vectors


def _kernel(inputs: InverseRoot) -> Tensor:
    values, vectors, kept = _spectrum(inputs.matrix)
    return products(vectors * (values.rsqrt() * kept).unsqueeze(-2), vectors.mT)


def _operations(inputs: Any) -> int:
    """9 N^3 for the eigenvectors by QR iterations (Golub and Van Loan), and 2 N^3 for the product."""
    return 11 * math.prod(inputs.matrix) * int(inputs.matrix[-1])


def _backward(call: Call[InverseRoot], dout: Tensor) -> Gradients:
    """U (F * U' dout U) U' with the divided differences F_ij = (f_i - f_j) / (l_i - l_j) of f = l^-1/2 (Daletskii and
    Krein).

    For two nonzero eigenvalues F_ij is -1 / (s_i s_j (s_i + s_j)) with s = l^1/2, which has no difference in the
    denominator. For a nonzero and a zero eigenvalue F_ij is f_i / l_i; for two zero eigenvalues it is 0.
    """
    values, vectors, kept = _spectrum(call.inputs.matrix)
    root = values.sqrt()
    one, other = root.unsqueeze(-1), root.unsqueeze(-2)
    both, either = kept.unsqueeze(-1) & kept.unsqueeze(-2), kept.unsqueeze(-1) | kept.unsqueeze(-2)
    inside, across = -1 / (one * other * (one + other)), 1 / (one * other) ** 3  # a zero eigenvalue is stored as 1
    slopes = torch.where(both, inside, torch.where(either, across, 0.0))
    turned = slopes * products(products(vectors.mT, dout), vectors)
    return {"matrix": products(products(vectors, turned), vectors.mT)}


def products(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of matrices in float64. The bits of a product do not depend on the number of matrices."""
    rows, matrices = (each.reshape(each.shape[:-2].numel(), *each.shape[-2:]) for each in (left, right))
    return row_products(rows, matrices).reshape(*left.shape[:-1], right.shape[-1])


_inverse_root_op = Operator(
    _kernel,
    "inverse_root",
    InverseRoot,
    ("root",),
    shapes=lambda inputs: torch.empty_like(inputs.matrix, memory_format=torch.contiguous_format),
    operations=_operations,
    backward=_backward,
)


def inverse_root(matrix: Tensor) -> Tensor:
    """A^-1/2 (B, H, N, N) of symmetric positive semi-definite A; 0 along eigenvectors whose eigenvalue is 0 up to
    rounding."""
    root: Tensor = _inverse_root_op(InverseRoot(matrix))
    return root

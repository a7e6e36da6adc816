"""The definition of Nyström attention, in plain PyTorch.

With rho(a, b) = exp(scale a b'), phi(A) the row sums of A, and m landmarks q~, k~ for the queries and the keys of N
tokens:

    B = rho(Q, k~)     Gamma = rho(q~, k~)     Delta = rho(q~, K)
    out = (B / phi(B)) W,     W = pinv(Gamma / phi(Gamma)) (Delta V / phi(Delta))

(Nyströmformer, Xiong et al., AAAI 2021; Continual Low-Rank Scaled Dot-product Attention, Carreto Picon et al.) Delta V
/ phi(Delta) is the attention of the landmarks to all tokens. B / phi(B) W is the attention of all tokens to the
landmarks. Both are latent attention, which the package `attention` defines. W is `landmark_values`. The pseudo-inverse
is the iteration of Razavi et al. Each matrix is scaled by its own norms:

    Z = A' / (max_j sum_i |A_ij|  max_i sum_j |A_ij|),     Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.dtypes import state_dtype
from ..runtime.tracing import exports_to_onnx

COPIED = 2**17
"""The largest number of elements that are copied at a time for a sum. At least one segment is copied at a time."""


def segment_ends(length: int, segments: int) -> list[int]:
    """Return the index after the last token of each segment of `length` tokens. The first `length % segments` segments
    have one token more."""
    size, longer = length // segments, length % segments  # a compiler cannot trace divmod of symbolic lengths
    return [j * size + min(j, longer) for j in range(1, segments + 1)]


def segment_means(tokens: Tensor, segments: int, absent: Tensor | None = None) -> Tensor:
    """Return the mean (B, H, m, D), in `state_dtype`, of the tokens (B, H, N, D) of each segment that are not `absent`
    (B, N); 0 if all are absent."""
    tokens = tokens.to(state_dtype(tokens.dtype))
    if absent is not None:
        tokens = tokens.masked_fill(absent[:, None, :, None], 0.0)
    sums = _segment_sums(tokens, segments)
    if absent is None:
        return sums / segment_sizes(tokens.shape[-2], segments, tokens)
    return sums / _segment_sums((~absent)[:, None, :, None].to(tokens.dtype), segments).clamp(min=1.0)


def absent_segments(absent: Tensor, segments: int) -> Tensor:
    """Return a bool (B, m): True for segments whose tokens are all `absent` (B, N)."""
    return _segment_sums((~absent)[:, None, :, None].float(), segments)[:, 0, :, 0] == 0


def segment_sizes(length: int, segments: int, like: Tensor) -> Tensor:
    """Return the number of tokens in each segment, (m, 1) in the dtype and on the device of `like`."""
    size, longer = length // segments, length % segments
    return torch.arange(segments, device=like.device).lt(longer).add(size).to(like.dtype).unsqueeze(-1)


def _segment_sums(tokens: Tensor, segments: int) -> Tensor:
    """Return the sum of each segment, (B, H, m, D): the longer segments as one block, then the shorter ones as
    another."""
    size, longer = tokens.shape[-2] // segments, tokens.shape[-2] % segments
    if torch.compiler.is_compiling():
        return _gathered_sums(tokens, segments, size, longer)
    if tokens.numel() <= COPIED:
        tokens = tokens.contiguous()
    first, second = tokens.split([longer * (size + 1), (segments - longer) * size], dim=-2)
    parts = [first.unflatten(-2, (longer, size + 1)), second.unflatten(-2, (segments - longer, size))]
    return torch.cat([part.sum(-2) if tokens.is_contiguous() else _sum_of_copies(part) for part in parts], dim=-2)


def _gathered_sums(tokens: Tensor, segments: int, size: int, longer: int) -> Tensor:
    """Return the same sums, with each segment gathered as `size` + 1 rows. torch's compiler fails on gradients of a
    symbolic number of blocks."""
    numbers = torch.arange(segments, device=tokens.device).unsqueeze(-1)
    place = torch.arange(size + 1, device=tokens.device)
    beyond = place >= (numbers < longer).add(size)
    rows = (numbers * size + numbers.clamp(max=longer) + place).masked_fill(beyond, 0)
    return tokens[..., rows, :].masked_fill(beyond.unsqueeze(-1), 0.0).sum(-2)


def _sum_of_copies(part: Tensor) -> Tensor:
    """Return `part.sum(-2)` of a part (B, H, segments, tokens, D) that is not contiguous, with the same bits as for a
    contiguous part.

    In torch the order of a sum depends on strides. A few segments are copied at a time."""
    of_segment = part.shape[0] * part.shape[1] * part.shape[3] * part.shape[4]
    blocks = part.split(max(1, COPIED // max(1, of_segment)), dim=2)
    return torch.cat([block.contiguous().sum(-2) for block in blocks], dim=2)


def iterative_pinv_reference(matrix: Tensor, iterations: int, *, shared: bool = False) -> Tensor:
    """Return the pseudo-inverse of each matrix (..., m, m) after this number of iterations; 0 for a matrix of zeros.

    With `shared`, the norms are the largest of all matrices."""
    columns, rows = (matrix.abs().sum(dim).amax(-1)[..., None, None] for dim in (-2, -1))
    if shared and matrix.numel():
        columns, rows = columns.max(), rows.max()
    empty = columns == 0
    one = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    # Divide by one norm after the other, because the product of both may overflow or underflow.
    z = (matrix.mT / columns.masked_fill(empty, 1.0) / rows.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)
    for _ in range(iterations):
        az = matrix @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z


def pinv_reference(matrix: Tensor, iterations: int, *, shared: bool = False) -> Tensor:
    """Return the pseudo-inverse of each matrix (..., m, m) after this number of iterations, or the exact one for 0
    iterations."""
    if iterations:
        return iterative_pinv_reference(matrix, iterations, shared=shared)
    if exports_to_onnx():
        expected = "'iterative' or 'shared', because ONNX has no exact pseudo-inverse"
        raise NotImplementedError(f"pinv: got 'exact' in an export to ONNX, expected {expected}")
    # LAPACK would refuse the whole batch for one matrix that is not finite.
    defined = matrix.isfinite().all(-1).all(-1)[..., None, None]
    return torch.linalg.pinv(matrix.where(defined, 0.0)).where(defined, torch.nan)


def logits(query: Tensor, key: Tensor, scale: float | Tensor) -> Tensor:
    """Return scale Q K', clamped to the finite range of its dtype, because a softmax over two infinite logits would be
    NaN."""
    largest = torch.finfo(query.dtype).max
    return (scale * query @ key.mT).clamp(-largest, largest)


def landmark_kernel(
    landmark_query: Tensor, landmark_key: Tensor, absent: Tensor | None, scale: float | Tensor
) -> Tensor:
    """Return Gamma / phi(Gamma), (..., m, m), of landmarks (..., m, D).

    Rows and columns of `absent` (..., m) landmarks are 0. The values of absent landmarks, even NaN, do not affect the
    other landmarks."""
    if absent is None:
        return logits(landmark_query, landmark_key, scale).softmax(-1)
    row, column = absent.unsqueeze(-1), absent.unsqueeze(-2)
    scores = logits(landmark_query.masked_fill(row, 0.0), landmark_key.masked_fill(row, 0.0), scale)
    return scores.masked_fill(column & ~row, -torch.inf).softmax(-1).masked_fill(column | row, 0.0)


def landmark_values_reference(
    landmark_query: Tensor,
    landmark_key: Tensor,
    values: Tensor,
    absent: Tensor | None,
    scale: float,
    iterations: int,
    *,
    shared: bool = False,
) -> Tensor:
    """Return W = pinv(Gamma / phi(Gamma)) values: (..., m, E) from (..., m, D), (..., m, D), (..., m, E).

    With `shared`, the iteration starts with the largest norms of all matrices."""
    if absent is not None:
        values = values.masked_fill(absent.unsqueeze(-1), 0.0)
    return (
        pinv_reference(landmark_kernel(landmark_query, landmark_key, absent, scale), iterations, shared=shared) @ values
    )

"""Nyström attention over whole windows: what users call in training."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..attention import attention_state, latent_attention
from ..runtime.backends import check_name, choose, impl_for
from ..runtime.checks import (
    MOST_ITERATIONS,
    as_autocast,
    as_flag,
    as_they_are,
    check_choice,
    check_floats,
    check_key_value,
    check_mask,
    check_operands,
    fixed,
    has_shape,
    is_count,
    kind_of,
    mismatch,
    not_a_tensor,
    over_batch,
)
from ..runtime.dtypes import default_scale, state_dtype
from .contract import LandmarkValues, Pinv
from .reference import absent_segments, landmark_values_reference, segment_means
from .schema import iterative_pinv_op, landmark_values_op

PINVS = ("iterative", "exact", "shared")
"""The values of `pinv`."""


def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_landmarks: int | None = None,
    *,
    landmarks: tuple[Tensor, Tensor] | None = None,
    pinv: str = "iterative",
    pinv_iterations: int = 6,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attention through m landmarks: O((L + N) m) time, and no L x N matrix.

    Without a mask, in float64 and float32, the forward pass allocates only one number per row besides the result.

    Args:
        query: (B, H, L, D). float64, float32, bfloat16 or float16, any strides.
        key: (B, H, N, D).
        value: (B, H, N, E).
        num_landmarks: m, 1 <= m <= min(L, N). The landmarks are the means of m segments of the queries and of the keys.
            When m does not divide the length, each of the first `length % m` segments has one token more.
        landmarks: the landmarks (q~, k~), in place of `num_landmarks`. Each is (H, m, D), shared over the batch, or (B,
            H, m, D).
        pinv: "iterative"; "exact" (`torch.linalg.pinv`, for every `impl`); or "shared": the iteration starts with one
            norm for all matrices of the batch, as in published code. Use "shared" for weights that were trained with
            that code. A result then depends on the rest of the batch.
        pinv_iterations: the number of iterations of "iterative" and "shared". Nyströmformer takes 6. On matrices
            without structure, 6 iterations are far from convergence.
        key_padding_mask: (B, N) bool, True = ignore. With `num_landmarks` the mask marks tokens, queries as well as
            keys, so it requires L = N. A landmark is then the mean of the unmasked tokens of its segment. A segment
            whose tokens are all masked has no landmark. The result for a masked query is that of a query of zeros.
        is_causal: must be False, because a landmark is a mean over past and future tokens.
        scale: the factor of the logits; None means D ** -0.5.
        impl: "auto", "reference", "native" or "triton". The choice also applies to both attentions: from the landmarks
            to the keys, and from the queries to the landmarks.

    Returns:
        (B, H, L, E) in the dtype of query; 0 where there is no key. For half types the last product is computed in
        float32, which takes L (D + E) more float32 elements. Differentiable to any order in query, key, value and
        landmarks.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it.
        RuntimeError: `impl` cannot run here.

    Source: Nyströmformer (Xiong et al., AAAI 2021). One thing differs: each matrix is scaled by its own norms, so a
    result does not depend on the rest of the batch.

    >>> tokens = torch.randn(2, 4, 1000, 16)
    >>> cmab_kernels.nystrom_attention(tokens, tokens, tokens, num_landmarks=32).shape
    torch.Size([2, 4, 1000, 16])
    """
    if as_flag("is_causal", is_causal):
        raise ValueError(
            mismatch(
                "is_causal",
                True,
                "False, because landmarks are means over past and future; use exact attention, or a continual step",
            )
        )
    check_operands(query=query, key=key, value=value)
    check_key_value(key, value)
    query = over_batch(query, key, key.shape[0])
    check_mask(key_padding_mask, key)
    iterations = check_pinv(pinv, pinv_iterations)
    check_name("nystrom", impl)
    query, key, value = as_autocast(query, key, value)
    with as_they_are(key.device):
        chosen_landmarks = choose_landmarks(query, key, num_landmarks, landmarks, key_padding_mask)
        if chosen_landmarks.absent is not None and key_padding_mask is not None:
            query = query.masked_fill(key_padding_mask[:, None, :, None], 0.0)
        factor = default_scale(key.shape[-1]) if scale is None else fixed(scale)
        return _attend(query, key, value, chosen_landmarks, key_padding_mask, factor, pinv, iterations, impl)


def iterative_pinv(matrix: Tensor, iterations: int = 6, *, impl: str = "auto") -> Tensor:
    """The Moore-Penrose pseudo-inverse of every matrix (..., m, m) by Razavi's iteration of third order, as
    Nyströmformer uses it.

    If landmarks are far from each other, six iterations suffice: the relative error is 1e-15 for softmax(8 I + N(0,
    1)). Otherwise six iterations are far from convergence. For softmax(N(0, 1)) in float64 the median relative error is
    0.9 at m = 16 (3e-15 after twelve iterations) and 0.99 at m = 64 (0.25 after twelve, 1e-14 after twenty). Each
    matrix is scaled by its own norms. A matrix of zeros gives zeros. In float32, kernels keep their accuracy for norms
    from 1e-27 to 1e27. Beyond this range their numbers overflow or become 0. Then use float64, or `impl="reference"` if
    the inverse is in the range of float32.

    Args:
        matrix: (..., m, m), float64 or float32; half types are computed in float32.
        iterations: from 1 to 2^28.
        impl: "auto", "reference", "native" or "triton".

    Returns:
        (..., m, m) in the dtype of matrix, differentiable to any order.

    Raises:
        ValueError, TypeError, RuntimeError: as in `nystrom_attention`.

    >>> matrix = torch.randn(16, 16, dtype=torch.float64).softmax(-1)
    >>> inverse = cmab_kernels.iterative_pinv(matrix, 30)
    >>> torch.allclose(matrix @ inverse, torch.eye(16, dtype=torch.float64), atol=1e-6)
    True
    """
    if not isinstance(matrix, Tensor):
        raise TypeError(not_a_tensor("matrix", matrix))
    check_floats("matrix", matrix)
    if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise ValueError(mismatch("matrix", f"shape {tuple(matrix.shape)}", "(..., m, m) with m >= 1"))
    iterations = _check_iterations("iterations", iterations)
    # Skip casts and views that change nothing: each takes 1 us, and the whole call takes 10 us.
    dtype = state_dtype(matrix.dtype)
    if matrix.dtype != dtype:
        return iterative_pinv(matrix.to(dtype), iterations, impl=impl).to(matrix.dtype)
    if matrix.dim() == 3:
        return iterative_pinv_op(Pinv(matrix, iterations, choose("nystrom", impl, matrix)))
    matrices = matrix.unsqueeze(0).flatten(0, -3)
    return iterative_pinv_op(Pinv(matrices, iterations, choose("nystrom", impl, matrices))).view_as(matrix)


class Landmarks(NamedTuple):
    """m landmarks of the queries and m of the keys, each (B, H, m, D) in `state_dtype`.

    `absent` is a bool (B, m), True for segments without tokens, which have no landmark. None means that every segment
    has a landmark."""

    queries: Tensor
    keys: Tensor
    absent: Tensor | None = None


def check_pinv(pinv: str, iterations: int) -> int:
    """Check both options and return the number of iterations, 0 for "exact"."""
    check_choice("pinv", pinv, PINVS)
    iterations = _check_iterations("pinv_iterations", iterations)
    return 0 if pinv == "exact" else iterations


def _check_iterations(name: str, iterations: int) -> int:
    if not is_count(iterations, MOST_ITERATIONS):
        raise ValueError(mismatch(name, repr(iterations), f"an int from 1 to {MOST_ITERATIONS}"))
    return int(iterations)


def _check_number(num_landmarks: int, length: int, tokens: str) -> int:
    """Return `num_landmarks` as an int; raise unless it is an int from 1 to `length`. The message calls the tokens
    `tokens`, "queries" or "keys"."""
    if not is_count(num_landmarks, length):
        allowed = f"an int between 1 and {length}, the number of {tokens}"
        raise ValueError(mismatch("num_landmarks", repr(num_landmarks), allowed))
    return int(num_landmarks)


def _given_landmarks(landmarks: tuple[Tensor, Tensor], key: Tensor) -> Landmarks:
    """Check the caller's landmarks against the key, expand them to the batch, and cast them to `state_dtype`."""
    if not isinstance(landmarks, (tuple, list)) or len(landmarks) != 2:
        raise TypeError(
            mismatch("landmarks", kind_of(landmarks), "a pair (q~, k~) of tensors (H, m, D) or (B, H, m, D)")
        )
    batch, heads, _, width = key.shape
    parts = []
    for i, part in enumerate(landmarks):
        name = f"landmarks[{i}]"
        if not isinstance(part, Tensor):
            raise TypeError(not_a_tensor(name, part))
        check_floats(name, part)
        if part.device != key.device:
            raise ValueError(
                mismatch(name, f"device {part.device}", f"{key.device}, the device of key; move them together")
            )
        number = part.shape[-2] if part.dim() in (3, 4) else 0
        if number == 0 or not has_shape(part, (heads, number, width), (batch, heads, number, width)):
            allowed = f"(H, m, D) = ({heads}, m, {width}) with m >= 1, or (B, H, m, D) with B = {batch}"
            raise ValueError(mismatch(name, f"shape {tuple(part.shape)}", allowed))
        parts.append(part.to(state_dtype(key.dtype)).expand(batch, heads, number, width))
    if parts[0].shape != parts[1].shape:
        raise ValueError(
            mismatch(
                "landmarks", f"{parts[0].shape[-2]} for queries and {parts[1].shape[-2]} for keys", "as many for both"
            )
        )
    return Landmarks(*parts)


def choose_landmarks(
    query: Tensor, key: Tensor, number: int | None, given: tuple[Tensor, Tensor] | None, mask: Tensor | None
) -> Landmarks:
    """Return the landmarks: the means of `number` segments, or the landmarks that the caller has `given`."""
    if (number is None) == (given is None):
        both = "None without landmarks" if given is None else f"{number} beside landmarks"
        raise ValueError(mismatch("num_landmarks", both, "one of the two"))
    if given is not None:
        return _given_landmarks(given, key)
    assert number is not None
    number = _check_number(number, key.shape[2], "keys")
    _check_number(number, query.shape[2], "queries")
    if mask is None:
        return Landmarks(segment_means(query, number), segment_means(key, number))
    if query.shape[2] != key.shape[2]:
        allowed = f"{key.shape[2]} queries, as many as keys, because with num_landmarks the mask marks both"
        raise ValueError(mismatch("key_padding_mask", f"a mask for {query.shape[2]} queries", allowed))
    of_queries, of_keys = segment_means(query, number, mask), segment_means(key, number, mask)
    return Landmarks(of_queries, of_keys, absent_segments(mask, number))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    landmarks: Landmarks,
    mask: Tensor | None,
    scale: float,
    pinv: str,
    iterations: int,
    impl: str,
) -> Tensor:
    """Attend from the landmarks to the keys, multiply by the pseudo-inverse, and attend from the queries to the
    landmarks."""
    attend = impl_for(impl, "nystrom", "attention")
    near = landmarks.queries.to(key.dtype)
    averaged = attention_state(near, key, value, key_padding_mask=mask, scale=scale, impl=attend).out
    if pinv == "shared":
        absent = None if landmarks.absent is None else landmarks.absent.unsqueeze(1)
        values = landmark_values_reference(
            landmarks.queries, landmarks.keys, averaged, absent, scale, iterations, shared=True
        )
    else:
        values = _landmark_values(landmarks, averaged, scale, iterations, impl)
    wide = query.to(values.dtype)  # half precision cannot resolve W, whose entries are large and have both signs
    return latent_attention(
        wide, landmarks.keys, values, key_padding_mask=landmarks.absent, scale=scale, impl=attend
    ).to(query.dtype)


def _landmark_values(landmarks: Landmarks, averaged: Tensor, scale: float, iterations: int, impl: str) -> Tensor:
    batch, heads, number, _ = averaged.shape
    queries, keys, values = (
        t.reshape(batch * heads, number, t.shape[-1]) for t in (landmarks.queries, landmarks.keys, averaged)
    )
    absent = landmarks.absent
    if absent is not None:
        absent = absent.unsqueeze(1).expand(batch, heads, number).flatten(0, 1)
    # Only the reference computes the exact pseudo-inverse.
    chosen = choose("nystrom", impl, queries) if iterations else "reference"
    return landmark_values_op(LandmarkValues(queries, keys, values, absent, scale, iterations, chosen)).reshape(
        averaged.shape
    )

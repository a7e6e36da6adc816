"""The attention states of all prefixes of a row of keys: the public function."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...runtime.backends import choose
from ...runtime.checks import (
    as_autocast,
    as_decay,
    check_every,
    check_key_value,
    check_mask,
    check_operands,
    fixed,
    over_batch,
)
from ...runtime.dtypes import default_scale, state_dtype
from ..api import of_keys
from ..state import AttentionState, check_state
from .contract import PrefixAttention
from .schema import prefix_attention_op


def prefix_attention_states(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    every: int = 1,
    state: AttentionState | None = None,
    decay: float | Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    key_bias: Tensor | None = None,
    impl: str = "auto",
) -> AttentionState:
    """The attention states after each chunk of `every` keys, and after the last key, in one call.

    State t is the result of `attention_state` for the first (t + 1) `every` keys. A loss at every length of the context
    then costs one pass over the keys, forward and backward.

    Args:
        query: (B, H, L, D), or (H, L, D) shared over the batch. float64, float32, bfloat16 or float16.
        key: (B, H, N, D), any strides; N may be 0.
        value: (B, H, N, E).
        every: the number of keys between one state and the next, >= 1. The last chunk may have fewer keys.
        state: the state of earlier keys, which every result includes: out (B, H, L, E) in float32 (float64 for float64
            inputs), lse (B, H, L) in float64. `state` is not changed.
        decay: how older keys fade: a number in (0, 1] for every key, or a tensor of such numbers d that broadcasts to
            (B, H, N) and may require a gradient; None means 1. The weight of everything that was held before key n,
            `state` included, is multiplied by d_n before key n is added. In the state after key n, key i <= n has the
            weight d_{i+1} ... d_n exp(S_i), and `state` the weight d_1 ... d_n exp(lse). This is what `attention_state`
            returns when it is called for one key after the other with `decay=d_n`. Ignored keys fade the others too.
            For a decay per chunk, give this decay to the first key of each chunk, and 1 to the
            others. Other numbers raise a `ValueError`. On a GPU and in traces the numbers in a
            tensor are not checked, and a wrong number gives NaN in all rows after it.
        key_padding_mask: (B, N) bool, True = ignore. Ignored keys keep their places: the `every` keys of a chunk
            include them.
        scale: factor of the scores; None means D ** -0.5.
        key_bias: a floating tensor that broadcasts to (B, H, N): it is added to every score of its key, as in
            `latent_attention`.
        impl: "auto", "reference", "native" or "triton". The reference stores T L N scores.

    Returns:
        out (B, H, T, L, E) in float32 (float64 for float64 inputs) and lse (B, H, T, L) in float64, where T = ceil(N /
        every). Where no key has been seen yet, out is 0 and lse is -inf. Differentiable to any order in query, key,
        value, key_bias, decay and the state. The results take T L E numbers, and the gradient needs no N x L matrix.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or value; the message names it.
        RuntimeError: `impl` cannot run here.

    Source: Attention as an RNN (Feng et al., 2024), for the scan over prefixes.
    `cmab_kernels/attention/prefix/reference.py` defines the gradient.

    >>> latents, points = torch.randn(4, 16, 8), torch.randn(2, 4, 1000, 8)
    >>> states = cmab_kernels.prefix_attention_states(latents, points, points, every=100)
    >>> states.out.shape
    torch.Size([2, 4, 10, 16, 8])
    >>> third = cmab_kernels.attention_state(latents, points[:, :, :300], points[:, :, :300])
    >>> torch.allclose(states.out[:, :, 2], third.out, atol=1e-5)
    True
    >>> faded = cmab_kernels.prefix_attention_states(latents, points, points, decay=0.9)
    >>> state = None
    >>> for point in points[:, :, :50].split(1, dim=2):
    ...     state = cmab_kernels.attention_state(latents, point, point, state=state, decay=0.9)
    >>> torch.allclose(faded.out[:, :, 49], state.out, atol=1e-5)
    True
    """
    check_operands(query=query, key=key, value=value)
    check_key_value(key, value)
    query = over_batch(query, key, key.shape[0])
    every = check_every(every)
    check_mask(key_padding_mask, key)
    query, key, value = as_autocast(query, key, value)
    if state is not None:
        check_state(state, (*query.shape[:-1], value.shape[-1]), state_dtype(query.dtype), query.device)
    chosen = choose("attention.prefix", impl, query, key, value)
    scale = default_scale(key.shape[-1]) if scale is None else fixed(scale)
    every = min(every, max(key.shape[2], 1))
    bias = None if key_bias is None else of_keys(key_bias, key)
    log_decay = None
    if decay is not None:
        faded, log_decay = _fading(as_decay(decay, key.shape[:3], key.device), key, every)
        bias = faded if bias is None else bias + faded
    if bias is not None:
        bias = bias.to(state_dtype(key.dtype)).expand(key.shape[:3])
    out, lse = state or (None, None)
    return AttentionState(
        *prefix_attention_op(
            PrefixAttention(query, key, value, key_padding_mask, out, lse, bias, log_decay, every, scale, chosen)
        )
    )


def _fading(decay: float | Tensor, key: Tensor, every: int) -> tuple[Tensor, Tensor]:
    """Return the logarithms of two decays: the decay of each key until the end of its chunk, which
    broadcasts to (B, H, N), and the decay of all earlier keys over each chunk, (B, H, T).

    Both are sums over a part of one chunk, from its end. A float32 kernel that adds the first to the scores thus
    rounds only keys that have faded, however many chunks there are.
    """
    batch, heads, length, _ = key.shape
    log = decay.log() if isinstance(decay, Tensor) else key.new_full((), math.log(decay), dtype=torch.float64)
    log = log.expand(*log.shape[:-1], length)
    count = -(-length // every)
    chunks = pad(log, (0, count * every - length)).unflatten(-1, (count, every))
    since = chunks.flip(-1).cumsum(-1).flip(-1)
    # A slice would restrict a program of `torch.export` to numbers of keys with the recorded
    # remainder.
    keys = torch.arange(length, device=log.device)
    return pad(since[..., 1:], (0, 1)).flatten(-2).index_select(-1, keys), since[..., 0].expand(batch, heads, -1)

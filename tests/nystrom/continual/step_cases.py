"""Streams, the definition of their steps, and comparisons with the definition, for the kernels of GPUs that run here on
the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.nystrom.continual.reference import attention_step_reference, nystrom_step_reference, window_of
from cmab_kernels.nystrom.continual.state import ContinualNystromState
from cmab_kernels.runtime.dtypes import state_dtype
from cmab_kernels.testing import bound

Tokens = tuple[Tensor, Tensor, Tensor]
Step = Callable[[Any, Tokens, bool], tuple[Tensor, Any]]
"""(state, tokens, retroactive) -> (out, state)."""


def tokens(
    batch: int,
    heads: int,
    length: int,
    width: int,
    value_width: int,
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
) -> Tokens:
    query, key, value = (torch.randn(batch, heads, length, n) for n in (width, width, value_width))
    return (size * query).to(dtype), key.to(dtype), value.to(dtype)


def part(tokens: Tokens, first: int, end: int) -> Tokens:
    query, key, value = (t[:, :, first:end] for t in tokens)
    return query, key, value


def wide(tokens: Tokens) -> Tokens:
    query, key, value = (t.double() for t in tokens)
    return query, key, value


def start(tokens: Tokens, landmarks: int | None, fixed: bool = False, **options: Any) -> Any:
    """Return the state of a window with m landmarks, or of exact attention for None."""
    if landmarks is None:
        return ck.continual_attention_init(*tokens, **options)
    if fixed:
        given = tuple(t[:, :, :landmarks].to(state_dtype(t.dtype)) for t in tokens[:2])
        return ck.continual_nystrom_init(*tokens, landmarks=given, **options)
    return ck.continual_nystrom_init(*tokens, landmarks, **options)


def defined(state: Any, tokens: Tokens, retroactive: bool = False) -> tuple[Tensor, Any]:
    step = nystrom_step_reference if isinstance(state, ContinualNystromState) else attention_step_reference
    return step(state, *tokens, retroactive)


def logits(tokens: Tokens) -> float:
    if tokens[0].numel() == 0:
        return 0.0
    return float((tokens[0].double() @ tokens[1].double().mT).abs().max()) * tokens[0].shape[-1] ** -0.5


def errors(wanted: Tensor, *results: Tensor) -> Iterator[Tensor]:
    """Yield the error of each row, relative to its size,
    or to a 20th of the largest row if that is more: rows may cancel."""
    size = wanted.norm(dim=-1)
    size = size.clamp(min=1e-300).maximum(0.05 * size.amax(-1, keepdim=True))
    return ((result.double() - wanted).norm(dim=-1) / size for result in results)


def check_the_largest_of_huge_logits_leaves(step: Callable[[Any, Tokens], Any], dtype: torch.dtype) -> None:
    """Check the sums after a step in which the token with the largest logit leaves, if this logit is too large for the
    digits of its dtype.

    Its weight was added by other code, which rounded the logit to a neighbour of the logit that is subtracted.
    """
    heads, window, size = 64, 5, 2.0 ** (20 if dtype == torch.float32 else 35)
    query, key, value = (t.double() for t in tokens(1, heads, window + 1, 8, 3))
    key = (size * key * 2.0 ** -torch.arange(0, 3 * window + 3, 3)[:, None]).to(dtype)
    near, stream = (size * torch.randn(heads, 2, 8)).to(dtype), (query.to(dtype), key, value.to(dtype))
    state = ck.continual_nystrom_init(*part(stream, 0, window), landmarks=(near, near))
    top = state.sums[..., 4]
    top.copy_(top.nextafter(torch.full_like(top, torch.inf)))
    state.sums[..., -1] = state.sums[..., -2]  # in the form in which a kernel stores it
    sums = step(state, part(stream, window, window + 1)).sums
    right = (near.double() @ key[:, :, 1:].double().mT * 8**-0.5).softmax(-1) @ stream[2][:, :, 1:].double()
    torch.testing.assert_close(sums[..., :3] / sums[..., 3:4], right.to(sums.dtype), rtol=1e-5, atol=1e-5)


FADING: dict[str, Callable[[Tensor], Tensor]] = {
    "a fade of 0.9": lambda t: 0.9**t * torch.randn(len(t), 3),
    "a fade of 0.7": lambda t: 0.7**t * torch.randn(len(t), 3),
    "a click that dies away": lambda t: 1e7 * 0.6**t + torch.randn(len(t), 3),
    "silence": lambda t: (t < 20) * torch.randn(len(t), 3),
}
"""Return values (t, E) of a stream that become small, by the numbers (t, 1) of its tokens."""


def check_values_that_fade(step: Callable[[Any, Tokens], Any], law: str, dtype: torch.dtype) -> None:
    """Check the sums of each step of a stream whose values become small: large values must leave no error behind."""
    window, length = 16, 60
    query, key, _ = tokens(1, 1, length, 8, 3, dtype)
    value = FADING[law](torch.arange(length, dtype=torch.float64)[:, None]).expand(1, 1, length, 3).to(dtype)
    near = torch.randn(1, 4, 8, dtype=dtype)
    state = ck.continual_nystrom_init(*part((query, key, value), 0, window), landmarks=(near, near))
    for end in range(window + 1, length + 1):
        state = step(state, part((query, key, value), end - 1, end))
        keys, values = (t[:, :, end - window : end].double() for t in (key, value))
        weights = (near.double() @ keys.mT * 8**-0.5).softmax(-1)
        error = (state.sums[..., :3] / state.sums[..., 3:4] - weights @ values).abs()
        assert (error <= 100 * torch.finfo(dtype).eps * (weights @ values.abs())).all(), end


def check_log_scales(step: Callable[[Any, Tokens], Any]) -> None:
    """Check that a logit becomes the log-scale of a row only if it exceeds the log-scale by 1, because each change
    rounds the row to one side."""
    window, logits = 8, [0.0, 0.9, 1.1, 2.0, 2.2]
    ones, keys = torch.ones(1, 1, window + 5, 1), torch.tensor([0.0] * window + logits).view(1, 1, -1, 1)
    landmark = torch.ones(1, 1, 1)
    state = ck.continual_nystrom_init(*part((ones, keys, ones), 0, window), landmarks=(landmark, landmark), scale=1.0)
    scales = []
    for end in range(window + 1, window + 6):
        state = step(state, part((ones, keys, ones), end - 1, end))
        scales.append(float(state.sums[0, 0, 0, 2]))
    torch.testing.assert_close(torch.tensor(scales), torch.tensor([0.0, 0.0, 1.1, 1.1, 2.2]))


def compare(
    step: Step,
    stream: Tokens,
    window: int,
    landmarks: int | None,
    chunks: list[int],
    retroactive: bool,
    fixed: bool = False,
) -> None:
    """Check the rows of each chunk of a stream against the definition in float64, by promise P2.

    The rows of a head share one pseudo-inverse, whose error affects all of them, so torch's own error is the largest of
    the rows of a head.
    """
    dtype = stream[1].dtype
    ours, own = (start(part(stream, 0, window), landmarks, fixed) for _ in range(2))
    right = start(wide(part(stream, 0, window)), landmarks, fixed)
    at, score = window, logits(stream)
    for chunk in chunks:
        new = part(stream, at, at + chunk)
        out, ours = step(ours, new, retroactive)
        wanted, right = defined(right, wide(new), retroactive)
        same_precision, own = defined(own, new, retroactive)
        error, torchs = errors(wanted, out, same_precision)
        assert out.dtype == dtype and out.is_contiguous()
        assert (error <= bound(dtype, score, torchs.amax(-1, keepdim=True))).all(), (at, error)
        at += chunk
    assert (ours.position == at).all()
    for ring, given in zip(ours[:3], stream, strict=True):
        assert torch.equal(window_of(ring, ours.position, window), given[:, :, at - window : at])


def same(a: Any, b: Any) -> bool:
    """Compare the bits of outputs or states, except spare memory and rows of the rings that hold no token."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    assert (a.position == b.position).all()
    rings = all(torch.equal(*(window_of(s[i], s.position, s.window) for s in (a, b))) for i in range(3))
    names = [name for name in a._fields if name not in ("queries", "keys", "values", "spare")]
    return rings and all(torch.equal(torch.as_tensor(getattr(a, n)), torch.as_tensor(getattr(b, n))) for n in names)

"""Continual attention by its definition: the whole stream is kept,
and every output is computed from its window in float64."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import LAYOUTS, oracles

LAYOUTS_OF_TOKENS = tuple(LAYOUTS)
KINDS = ("exact", "fixed", "continual")
OUTPUTS = ("single", "retroactive")


class Stream:
    """The tokens of a stream, and the right result of any of its steps."""

    def __init__(self, kind: str, window: int, number: int, tokens: tuple[Tensor, ...]) -> None:
        """Take the first window of `tokens` (B, H, n, *) and, for Nyström attention, `number` landmarks."""
        self.kind, self.window, self.number, self.tokens = kind, window, number, tokens
        heads, width, dtype = tokens[1].shape[1], tokens[1].shape[3], tokens[1].dtype
        landmark = (4 * torch.eye(number, width, dtype=dtype)).expand(heads, -1, -1)
        self.fixed = (landmark, landmark)

    def start(self) -> Any:
        """Return the operator's state after the first window."""
        if self.kind == "exact":
            return ck.continual_attention_init(*self.tokens)
        chosen: dict[str, Any] = {"landmarks": self.fixed} if self.kind == "fixed" else {"num_landmarks": self.number}
        return ck.continual_nystrom_init(*self.tokens, **chosen)

    def with_more(self, tokens: tuple[Tensor, ...]) -> Stream:
        """Return the stream with further tokens; this stream does not change."""
        longer = Stream.__new__(Stream)
        longer.__dict__.update(self.__dict__)
        longer.tokens = tuple(torch.cat(parts, 2) for parts in zip(self.tokens, tokens, strict=True))
        return longer

    def newest(self, end: int) -> list[Tensor]:
        """Return the window that ends after `end` tokens."""
        return [t[:, :, end - self.window : end].double() for t in self.tokens]

    def landmarks(self, end: int) -> tuple[Tensor, ...]:
        """Return the landmarks after `end` tokens: those given, or the means of the newest segments that are full."""
        if self.kind == "fixed":
            return tuple(t.double() for t in self.fixed)
        size, longer = divmod(self.window, self.number)
        ends = [0]
        while len(ends) <= self.number or ends[-1] < end:
            ends.append(ends[-1] + size + ((len(ends) - 1) % self.number < longer))
        last = max(i for i, each in enumerate(ends) if each <= end)
        segments = [slice(ends[i], ends[i + 1]) for i in range(last - self.number, last)]
        return tuple(torch.stack([t[:, :, each].double().mean(2) for each in segments], 2) for t in self.tokens[:2])

    def right(self, end: int, output: str) -> Tensor:
        """Return the output for the token before `end`, or those of its whole window."""
        query, key, value = self.newest(end)
        query = query if output == "retroactive" else query[:, :, -1:]
        if self.kind == "exact":
            return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value
        return oracles.nystrom_attention(query, key, value, self.landmarks(end))

    def outputs(self, before: int, output: str) -> Tensor:
        """Return the right result of a step that began after `before` tokens and took all later ones."""
        end = self.tokens[0].shape[2]
        if output == "retroactive":
            return self.right(end, output)
        return torch.cat([self.right(each, output) for each in range(before + 1, end + 1)], 2)

    def allowed(self) -> float:
        """Return the difference that rounding may make;
        the pseudo-inverse of landmarks far apart multiplies it by less than a hundred."""
        dtype = self.tokens[0].dtype
        eps = torch.finfo(dtype).eps
        score = float((self.tokens[0].double() @ self.tokens[1].double().mT).abs().max())
        size = float(self.tokens[2].abs().max())
        return (1e3 if self.kind != "exact" else 4.0) * eps * max(8.0, score) * size


def step(state: Any, tokens: tuple[Tensor, ...], output: str, impl: str) -> Any:
    """Call the step of the state's kind."""
    run = ck.continual_attention_step if isinstance(state, ck.ContinualAttentionState) else ck.continual_nystrom_step
    return run(state, *tokens, output=output, impl=impl)


def some_tokens(shape: tuple[int, ...], count: int, dtype: torch.dtype, law: str, layout: str) -> tuple[Tensor, ...]:
    """Return `count` tokens for `shape` (B, H, D, E): N(0, 1);
    depending on the law, some keys are many times larger."""
    batch, heads, width, value_width = shape
    factors = {
        "normal": 1.0,
        "ten times": 10.0,
        "a spike": torch.where(torch.arange(count) == count // 2, 40.0, 1.0).unsqueeze(-1),
    }[law]
    query, key, value = (torch.randn(batch, heads, count, each) for each in (width, width, value_width))
    return tuple(LAYOUTS[layout](t.to(dtype)) for t in (query, factors * key, value))


shapes = st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(3, 6), st.integers(1, 5))

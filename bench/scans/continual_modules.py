"""Modules over streams, with their projections. Figures are per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cmab_kernels.nn import ContinualAttention, ContinualNystromAttention

from ..devices import device, generator, normal
from ..floors import Work, step_work
from .case import CONTINUAL_INFERENCE, EAGER, Case, Results, declared, missing
from .continual import WINDOWS, Call, Streams, all_steps, banded, stream_case
from .eager import ITERATIONS, EagerNystrom
from .modules import torch_attention

OURS, OURS_EXACT = "cmab_kernels.nn.ContinualNystromAttention", "cmab_kernels.nn.ContinualAttention"


def _module_step(
    names: Sequence[str], window: int, width: int, calls: int, heads: int, batch: int, landmarks: int
) -> Case:
    """Modules over a stream, with their projections, in float32; landmarks change with the window, and `names[0]` is
    measured.

    If this is Nyström attention, modules of exact attention are also measured; they compute something else.
    """
    nystrom, features = names[0] == OURS, heads * width

    @cache
    def weights() -> nn.MultiheadAttention:
        return torch_attention(features, heads)

    def module(name: str) -> Any:
        like: dict[str, Any] = {"batch_first": True, "device": device(), "sequence_len": window}
        if name == OURS:
            return ContinualNystromAttention(features, heads, num_landmarks=landmarks, **like)
        if name == OURS_EXACT:
            return ContinualAttention(features, heads, **like)
        from continual import SingleOutputMultiheadAttention

        return SingleOutputMultiheadAttention(features, heads, forward_returns_attn_mask=False, **like)

    def split(packed: Tensor) -> list[Tensor]:
        """(B H, t, D) of (B, t, 3 C)."""
        return [part.flatten(0, 1) for part in packed.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)]

    def eager(tokens: Tensor, enter: Tensor, leave: Tensor) -> Callable[[Tensor], Tensor]:
        """The step in eager torch: each stream of each head is a matrix. A single stream has no dimension for this,
        because torch is faster then."""
        shape = (-1, 1, width) if batch * heads > 1 else (1, width)
        stream = EagerNystrom(*split(F.linear(tokens[:, :window], enter)), width**-0.5, landmarks, None, ITERATIONS)

        def step(token: Tensor) -> Tensor:
            query, key, value = F.linear(token, enter).view(batch, 3, -1, 1, width).unbind(1)
            out = stream.step(*(part.reshape(shape) for part in (query, key, value)))
            return F.linear(out.view(batch, -1), leave)

        return step

    @torch.no_grad()
    def started(name: str, given: Streams, seed: int) -> Call:
        (tokens,) = given
        after = [(token.contiguous(),) for token in tokens[:, window:].unbind(1)]
        if name == EAGER:
            return all_steps(eager(tokens, weights().in_proj_weight, weights().out_proj.weight), after)
        made = module(name)
        made.load_state_dict(weights().state_dict(), strict=False)
        made.forward_steps(tokens[:, :window])
        return all_steps(made.forward_step, after)

    @torch.no_grad()
    def oracle(i: Streams) -> Mapping[str, Results]:
        """The eager stream, which is the definition, or attention over the window of each token, between projections in
        float64."""
        tokens, enter, leave = (part.double() for part in (*i, weights().in_proj_weight, weights().out_proj.weight))
        query, key, value = (part[None] for part in split(F.linear(tokens, enter)))
        rows = banded(query[:, :, window:], key, value, window)
        rows = rows[0].unflatten(0, (batch, heads)).transpose(1, 2).flatten(-2)
        results = dict.fromkeys((OURS_EXACT, CONTINUAL_INFERENCE), F.linear(rows, leave).unbind(1))
        if nystrom:
            step = eager(tokens, enter, leave)
            results |= dict.fromkeys((OURS, EAGER), tuple(step(token) for token in tokens[:, window:].unbind(1)))
        return results

    scan = names[0].removeprefix("cmab_kernels.")
    projections = Work(0.0, 2 * batch * 4 * features**2, 0.0)  # the weights stay in a cache
    return stream_case(
        lambda seed: [normal(generator(seed), batch, window + calls, features)],
        {name: partial(started, name) for name in names},
        missing,
        scan=scan,
        name=f"{scan.removeprefix('nn.')}-step-float32-B{batch}-{heads}-heads-C{features}-n{window}"
        + (f"-m{landmarks}" if nystrom else ""),
        sizes={"B": batch, "H": heads, "n": window, "D": width, **({"m": landmarks} if nystrom else {})},
        oracle=oracle,
        baselines=(CONTINUAL_INFERENCE,),
        others=(OURS_EXACT, CONTINUAL_INFERENCE) if nystrom else (),
        work=step_work("continual single" if nystrom else "single", batch * heads, window, landmarks, width, "float32")
        + projections,
        steps=dict.fromkeys(names, calls),
    )


@declared()
def module_step(
    window: int = 64, width: int = 64, calls: int = 64, heads: int = 4, batch: int = 1, landmarks: int = 16
) -> Case:
    return _module_step((OURS, OURS_EXACT, EAGER, CONTINUAL_INFERENCE), window, width, calls, heads, batch, landmarks)


@declared()
def exact_module_step(window: int = 64, width: int = 64, calls: int = 64, heads: int = 4, batch: int = 1) -> Case:
    return _module_step((OURS_EXACT, CONTINUAL_INFERENCE), window, width, calls, heads, batch, 16)


def cases() -> Iterator[Case]:
    yield from (module_step(window, calls=max(64, window // 16), quick=window == 64) for window in WINDOWS)
    yield from (module_step(batch=batch) for batch in (4, 32))
    yield from (module_step(heads=heads) for heads in (1, 16))
    yield module_step(landmarks=4)
    yield from (exact_module_step(window, quick=window == 64) for window in WINDOWS)

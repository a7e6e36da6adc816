"""The continual steps against the definition in float64, row by row; captured, on side streams, in one launch each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import STREAMS

from .problems import DTYPES, Shares, parity_tasks, row_shares, side_stream, waits, why_not
from .problems import launches as launched
from .sections import Row, Task

Tokens = tuple[Tensor, ...]
CHUNKS = (1, 1, 1, 5, 1, 90, 1, 1, 17, 1)


@dataclass(frozen=True)
class Problem:
    dtype: str
    kind: str = "continual"
    """The kind of landmarks, "continual" or "fixed"; "exact" for attention without landmarks."""
    retroactive: bool = False
    law: str = "normal"
    window: int = 64
    landmarks: int = 16
    width: int = 64
    value_width: int = 64
    impl: str = "cuda"


def problems() -> Iterator[Problem]:
    """Every dtype with every kind of landmarks and of output; the four laws of logits; shapes that are ragged, least, most."""
    for dtype, kind, retroactive in itertools.product(DTYPES, ("continual", "fixed", "exact"), (False, True)):
        yield Problem(dtype, kind, retroactive)
    for dtype, kind, law in itertools.product(("float64", "float32"), ("continual", "fixed", "exact"), list(STREAMS)[1:]):
        yield Problem(dtype, kind, law=law, width=4, window=50, landmarks=7)
    for dtype, shape in itertools.product(("float64", "float32"), ((1, 1, 1, 1), (13, 5, 7, 3), (40, 1, 3, 17), (64, 64, 65, 256))):
        yield Problem(dtype, "continual", True, "normal", *shape)
    for retroactive in (False, True):
        yield Problem("float32", "exact", retroactive, window=600, width=17, value_width=300)


def stream(problem: Problem, length: int, device: str) -> Tokens:
    """Queries of norm 2, so that the size of keys is that of logits; keys of the law."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, length, n) for n in (problem.width, problem.width, problem.value_width))
    if problem.law != "normal":
        query, key = 2 * torch.nn.functional.normalize(query, dim=-1), 2 * key * STREAMS[problem.law](length)[:, None]
    return tuple(t.to(DTYPES[problem.dtype]).to(device) for t in (query, key, value))


def start(problem: Problem, tokens: Tokens) -> Any:
    """The state after the first window of the stream."""
    window = tuple(t[:, :, : problem.window] for t in tokens)
    if problem.kind == "exact":
        return ck.continual_attention_init(*window)
    if problem.kind == "continual":
        return ck.continual_nystrom_init(*window, problem.landmarks)
    given = tuple(t[:, :, : problem.landmarks].to(torch.promote_types(t.dtype, torch.float32)) for t in window[:2])
    return ck.continual_nystrom_init(*window, landmarks=(given[0], given[1]))


def step(problem: Problem, state: Any, tokens: Tokens, impl: str) -> Any:
    name = "continual_attention_step" if problem.kind == "exact" else "continual_nystrom_step"
    return getattr(ck, name)(state, *tokens, output="retroactive" if problem.retroactive else "single", impl=impl)


def shares(problem: Problem, device: str) -> Shares:
    """The worst row of all chunks."""
    tokens = stream(problem, problem.window + sum(CHUNKS), device)
    score = float((tokens[0].double() @ tokens[1].double().mT).abs().max()) * problem.width**-0.5
    ours, own = (start(problem, tokens) for _ in range(2))
    right = start(problem, tuple(t.double() for t in tokens))
    found, at = 0.0, problem.window
    for chunk in CHUNKS:
        part = tuple(t[:, :, at : at + chunk] for t in tokens)
        out, ours = step(problem, ours, part, problem.impl)
        theirs, own = step(problem, own, part, "reference")
        wanted, right = step(problem, right, tuple(t.double() for t in part), "reference")
        found = max(found, row_shares(("out",), (out,), (theirs,), (wanted,), out.dtype, score)["out"])
        at += chunk
    return {"out": found}


# ---- graphs, streams, launches

BEHAVED = [Problem("float32", kind, retroactive) for kind, retroactive in itertools.product(("continual", "exact"), (False, True))]


def captured(problem: Problem, device: str, replays: int = 1000, after: int = 100) -> bool:
    """A captured step streams on at each replay, and goes on eagerly after: the bits of a stream that was never captured."""
    first = problem.window + 1
    tokens = stream(problem, first + replays + after, device)
    token = tuple(t[:, :, first - 1 : first].clone() for t in tokens)
    _, state = step(problem, start(problem, tokens), token, "cuda")
    _, eager = step(problem, start(problem, tokens), token, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, same = step(problem, state, token, "cuda")
    alike = [same is state]
    for at in range(first, first + replays + after):
        now = tuple(t[:, :, at : at + 1] for t in tokens)
        wanted, eager = step(problem, eager, now, "cuda")
        if at < first + replays:
            for held, new in zip(token, now, strict=True):
                held.copy_(new)
            graph.replay()
        else:
            out, state = step(problem, state, now, "cuda")
        alike.append((out == wanted).all())
    return all(map(bool, alike))


def on_a_side_stream(problem: Problem, device: str) -> bool:
    tokens = stream(problem, problem.window + 50, device)
    state, other = (start(problem, tokens) for _ in range(2))
    part = tuple(t[:, :, problem.window :] for t in tokens)
    wanted, _ = step(problem, state, part, "cuda")
    with side_stream():
        out, _ = step(problem, other, part, "cuda")
    return torch.equal(out, wanted)


def launches(problem: Problem, device: str, chunk: int = 1, shared: bool = False) -> float:
    """How many things run on the GPU in a step, of twelve, some of which replace a landmark; `shared`: that copy the window."""
    tokens = stream(problem, problem.window + 13 * chunk, device)
    parts = [tuple(t[:, :, at : at + chunk] for t in tokens) for at in range(problem.window, problem.window + 13 * chunk, chunk)]
    state = [step(problem, start(problem, tokens), parts[0], "cuda").state]

    def twelve() -> None:
        held = []
        for part in parts[1:]:
            if shared:
                held.append(list(state[0]))
            state[0] = step(problem, state[0], part, "cuda").state

    return launched(twelve) / 12


def waits_for_nothing(problem: Problem, device: str) -> bool:
    tokens = stream(problem, problem.window + 2, device)
    first, second = (tuple(t[:, :, at : at + 1] for t in tokens) for at in (problem.window, problem.window + 1))
    _, state = step(problem, start(problem, tokens), first, "cuda")
    return not waits(lambda: step(problem, state, second, "cuda"))


def many_heads(device: str) -> bool:
    """66,000 blocks, the bits of the last as it is alone."""
    tokens = tuple(torch.randn(66_000, 1, 9, 4, device=device) for _ in range(3))
    window, new = (tuple(t[:, :, part] for t in tokens) for part in (slice(0, 8), slice(8, 9)))
    state = ck.continual_attention_init(*window)
    alone = ck.continual_attention_init(*(t[-1:] for t in window))
    out, _ = ck.continual_attention_step(state, *new, impl="cuda")
    return torch.equal(out[-1:], ck.continual_attention_step(alone, *(t[-1:] for t in new), impl="cuda")[0])


def checks(device: str) -> Iterator[tuple[str, Callable[[], bool]]]:
    for problem in BEHAVED:
        name = f"{problem.kind}, {'retroactive' if problem.retroactive else 'single'}"
        yield f"1,000 replays and on eagerly, {name}", lambda problem=problem: captured(problem, device)
        yield f"side stream, {name}", lambda problem=problem: on_a_side_stream(problem, device)
        yield f"one launch a step, {name}", lambda problem=problem: launches(problem, device) == 1
        yield f"one launch a step of 80 tokens, {name}", lambda problem=problem: launches(problem, device, 80) == 1
        yield f"one launch a step that copies the window, {name}", lambda problem=problem: launches(problem, device, 1, True) == 1
        yield f"nothing is waited for, {name}", lambda problem=problem: waits_for_nothing(problem, device)
    yield "66,000 heads", lambda: many_heads(device)


def tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    if reason := why_not("continual_attention_step", "cuda", device):
        return [Task("continual steps", lambda: {"ok": True, "passed over": reason})]
    return [
        *parity_tasks(problems(), shares, device),
        *(Task(name, lambda passes=passes: {"ok": passes()}) for name, passes in checks(device)),
    ]

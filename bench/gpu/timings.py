"""Our kernels and every peer on a GPU, each compared with its floor: cases of the scans, at the shapes of the targets.

A row is one implementation of one case. It is made in a process that can be stopped. The rounds of a peer and of our
kernel alternate, so that the ratio between them does not depend on changes of the clock rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache, partial

import torch
from torch import Tensor

from bench.devices import generator, measure_on, normal
from bench.harness import measure
from bench.rates import rates_of
from bench.runs import is_ours, told
from bench.scans import continual, intention, layers, modules, nystrom, prefix, projected
from bench.scans.attention import attention, update
from bench.scans.case import COMPILED, IN_TF32, Case, Results, declared
from bench.scans.intention_peers import ALPHA, inverse_of, regularised

from .sections import Row, Task

BUDGET = 0.3
"""Seconds of timing per row."""
HALF = torch.bfloat16
MILLION = 10**6
EAGERLY = ", not captured"
"""Last part of the keys of rows whose calls Python makes each time."""


def attention_cases() -> Iterator[Case]:
    for backward in (False, True):
        both = {"backward": backward, "every_peer": True}
        yield from (attention(heads, width, MILLION, dtype=HALF, **both) for heads, width in ((4, 16), (8, 8), (1, 64)))
        yield attention(8, 64, MILLION, latents=512, dtype=HALF, **both)
        yield from (attention(4, 16, MILLION, dtype=dtype, **both) for dtype in (torch.float32, torch.float16))
        yield attention(4, 16, 197, batch=100, dtype=HALF, **both)


def intention_cases() -> Iterator[Case]:
    for backward in (False, True):
        yield from (intention.layer(1024, batch=256, dtype=dtype, backward=backward) for dtype in (torch.float32, HALF))
        yield intention.layer(MILLION, backward=backward)
        yield intention.layer(256, width=16, batch=1024, backward=backward)
    yield from (intention.solve(order, order, count) for count, order in ((4096, 16), (4096, 64), (1024, 128)))
    yield a_solve_a_token()


def nystrom_cases() -> Iterator[Case]:
    yield from (nystrom.layer(4096, 8, batch=8, dtype=dtype) for dtype in (torch.float32, HALF))
    yield nystrom.layer(100_000, 8)
    yield from (nystrom.pinv(landmarks, count) for landmarks, count in ((64, 8), (16, 4096), (64, 4096)))


def continual_cases() -> Iterator[Case]:
    """As many tokens as four landmarks need, because capturing a graph of 64 steps of a peer takes seconds."""
    yield from (continual.step(heads=heads, fixed=False, calls=16) for heads in (1, 64, 1024))


def layer_cases() -> Iterator[Case]:
    """Blocks and their parts, at the papers' sizes, in training and in inference."""
    for backward in (False, True):
        yield layers.stack(backward=backward)
        yield layers.stack(32, 32, depth=2, backward=backward)
        yield projected.projected(backward=backward)
        yield modules.cross_attention(keys=MILLION, backward=backward)
        yield layers.feed_forward(16_384, backward=backward)
        yield layers.attention_layer(backward=backward)
        yield prefix.attention_prefixes(1000, latents=8, heads=1, width=32, batch=16, backward=backward)
    yield projected.projected(1, keys=MILLION)
    yield modules.block()
    yield from (update(removes=removes) for removes in (False, True))


def all_cases() -> Iterator[Case]:
    """The cases of all sections."""
    for family in (attention_cases, intention_cases, nystrom_cases, continual_cases, layer_cases):
        yield from family()


# ---- sections --------------------------------------------------------------------------------------------------------


def tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    """First the rates for the floors, then our kernels at all shapes, because the check is for these, and then
    peers."""
    rates = Task("rates", lambda: {"rates": asdict(rates_of(device))})
    return [rates, *of_cases(attention_cases, device, compiled=False)]


def intention_tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    return of_cases(intention_cases, device)


def nystrom_tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    return of_cases(nystrom_cases, device)


def continual_tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    """Steps replayed from a graph, and steps called from Python."""
    return [*of_cases(continual_cases, device), *of_cases(continual_cases, device, capture=False)]


def layer_tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    return of_cases(layer_cases, device, compiled=False)


def tuned_tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    """Our kernels again, if tiles were tuned in the meantime."""
    if not any(row.get("written") for row in before.get("tune", [])):
        return []
    return [task for task in of_cases(attention_cases, device, compiled=False) if not task.peer]


def compiled_tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    """Peers that need seconds to prepare."""
    return [*of_cases(attention_cases, device, compiled=True), *of_cases(layer_cases, device, compiled=True)]


def of_cases(
    cases: Callable[[], Iterable[Case]], device: str, compiled: bool | None = None, capture: bool = True
) -> list[Task]:
    """A task for each implementation. `compiled` selects the implementations that `torch.compile` makes (True),
    or all others (False)."""
    measure_on(device)
    made = [
        Task(f"{case}; {name}{'' if capture else EAGERLY}", partial(timed, case, name, capture), not is_ours(name))
        for case in cases()
        for name in case.implementations
        if name != "reference" and compiled in (None, name.endswith(COMPILED))
    ]
    return sorted(made, key=lambda task: task.peer)


def timed(case: Case, name: str, capture: bool = True) -> Row:
    """The row of an implementation.

    A peer is timed together with "auto", in tf32 if that is allowed. A wrong result of ours is a fault.
    """
    ours = next(other for other in case.implementations if is_ours(other) and (IN_TF32 in other) == (IN_TF32 in name))
    names = dict.fromkeys((name,) if is_ours(name) else (ours, name))
    group = measure(case, names, BUDGET, _expected(case), capture)
    if name in group.rows:
        return told(group.rows[name], whole=True)
    problem = {"group": case.name, "implementation": name, "problem": group.problems[name]}
    return problem | ({"ok": False} if group.at_fault(name) else {})


@lru_cache(maxsize=1)
def _expected(case: Case) -> Mapping[str, Results]:
    """The expected results of a case; the rows of a case come one after the other."""
    return case.expected(case.inputs(0))


# ---- flash-linear-attention's mesa_net -------------------------------------------------------------------------------

MESA = "flash-linear-attention, mesa_net"


@declared()
def a_solve_a_token(batch: int = 256, length: int = 1024, width: int = 64) -> Case:
    """Ridge regression with keys of norm 1, compared with mesa_net. mesa_net solves one regression for each token over
    the tokens before it, by 30 steps of conjugate gradients, and its result is right at its last token. It computes
    more than one solution for each set, so our floor does not apply to it."""
    ours = intention.layer(length, batch=batch, width=width, dtype=HALF)

    def inputs(seed: int) -> tuple[Tensor, Tensor]:
        key, value = (normal(generator(seed + i), batch, 1, length, width, dtype=HALF) for i in range(2))
        return torch.nn.functional.normalize(key, dim=-1), value

    def mesa(i: tuple[Tensor, Tensor]) -> Results:
        from fla.ops.mesa_net import chunk_mesa_net  # from PyPI's flash-linear-attention

        key, value = (part.transpose(1, 2).contiguous() for part in i)
        gate, beta = key.new_zeros(key.shape[:3], dtype=torch.float32), key.new_ones(key.shape[:3])
        penalty = torch.full((1, width), ALPHA, device=key.device)
        out = chunk_mesa_net(q=key, k=key, v=value, g=gate, beta=beta, lamb=penalty, max_CG_iteration=30)[0]
        return (out[:, -1:].transpose(1, 2),)

    def last(impl: str, i: tuple[Tensor, Tensor]) -> Results:
        key, value = i
        return (ours.implementations[impl]((key[:, :, -1:], key, value, key[:0]))[0],)

    def oracle(i: tuple[Tensor, Tensor]) -> Results:
        key, value = (part.double() for part in i)
        return (key[:, :, -1:] @ (inverse_of(regularised(key.mT @ key)) @ (key.mT @ value)),)

    return Case(
        scan="intention",
        name=f"last-of-a-solve-a-token-bfloat16-B{batch}-1x{width}-N{length}",
        sizes={"B": batch, "N": length, "D": width},
        inputs=inputs,
        implementations={name: partial(last, name) for name in ours.implementations if is_ours(name)} | {MESA: mesa},
        oracle=oracle,
        baselines=(MESA,),
        others=(MESA,),
        refusal=lambda name: None if name == MESA else ours.refusal(name),
        smaller={"batch": 2},
        dtype=HALF,
    )

"""`python -m bench.sliding_window`: the error of a window's state after many steps, without and with subtraction, and
the time of a step.

A stream of single keys slides through a window; the logits have four distributions. Queries are 1, keys are the logits
and the scale is 1, so that every output is the weighted mean of the values in the window. All methods are compared with
this mean in float64. The distributions are four streams of one batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import cmab_kernels as ck

LAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "N(0, 1)": lambda numbers: torch.randn(len(numbers)),
    "N(0, 10²)": lambda numbers: 10 * torch.randn(len(numbers)),
    "N(0, 1), every 5,000th + 20": lambda numbers: torch.randn(len(numbers)) + 20 * (numbers % 5_000 == 4_999),
    "N(0, 1), every 50,000th + 40": lambda numbers: torch.randn(len(numbers)) + 40 * (numbers % 50_000 == 49_999),
}
WRONG, BLOCK = 1e-2, 10_000
"""A mean of values from N(0, 1) is useless if its error exceeds the first number. The second is the number of steps
between two comparisons."""

Method = Callable[[ck.AttentionState, ck.AttentionState | None], ck.AttentionState]
"""A function from the state of the newest key, and of the key that leaves, to the state of the window."""


def of_window(size: int) -> Method:
    window: ck.StateWindow[ck.AttentionState] = ck.StateWindow(size)

    def step(new: ck.AttentionState, _: ck.AttentionState | None) -> ck.AttentionState:
        window.push(new)
        return window.state

    return step


def of_tree(size: int) -> Method:
    tree: ck.StateTree[ck.AttentionState] = ck.StateTree()
    steps = 0

    def step(new: ck.AttentionState, _: ck.AttentionState | None) -> ck.AttentionState:
        nonlocal steps
        tree.put(steps % size, new)
        steps += 1
        return tree.state

    return step


def of_subtraction(dtype: torch.dtype) -> Method:
    """The newest key is merged in, and the oldest is removed by the formula of `remove_from_state`."""
    from cmab_kernels.attention import subtract_state

    held: list[ck.AttentionState] = []

    def step(new: ck.AttentionState, old: ck.AttentionState | None) -> ck.AttentionState:
        new, *gone = (ck.AttentionState(state.out.to(dtype), state.lse) for state in (new, old) if state is not None)
        state = ck.merge_states(*held, new)
        held[:] = [subtract_state(state, gone[0]).state if gone else state]
        return held[0]

    return step


def errors(steps: int, size: int) -> Iterator[dict[str, Tensor]]:
    """The errors of each method in a block of steps, (distributions, steps); the first `size` steps are left out."""
    methods = {
        "`StateWindow`": of_window(size),
        "`StateTree`": of_tree(size),
        "subtraction": of_subtraction(torch.float32),
        "subtraction in float64": of_subtraction(torch.float64),
    }
    recent, logits, values = [], torch.empty(len(LAWS), 0), torch.empty(len(LAWS), 0)
    for first in range(0, steps, BLOCK):
        numbers = torch.arange(first, min(first + BLOCK, steps))
        logits = torch.cat([logits[:, 1 - size :], torch.stack([law(numbers) for law in LAWS.values()])], 1)
        values = torch.cat([values[:, 1 - size :], torch.randn(len(LAWS), len(numbers))], 1)
        outs: dict[str, list[Tensor]] = {name: [] for name in methods}
        for at in range(logits.shape[1] - len(numbers), logits.shape[1]):
            new = ck.AttentionState(values[:, at].reshape(-1, 1, 1, 1), logits[:, at].double().reshape(-1, 1, 1))
            recent.append(new)
            old = recent.pop(0) if len(recent) > size else None
            for name, method in methods.items():
                outs[name].append(method(new, old).out.double().flatten())
        weights = logits.double().unfold(1, size, 1).softmax(-1)
        means = (weights * values.double().unfold(1, size, 1)).sum(-1)
        yield {
            name: (torch.stack(out, 1)[:, -means.shape[1] :] - means).abs().nan_to_num(torch.inf)
            for name, out in outs.items()
        }


def table_of_errors(steps: int, size: int) -> None:
    blocks: dict[str, list[Tensor]] = {}
    for found in errors(steps, size):
        for name, error in found.items():
            blocks.setdefault(name, []).append(error)
    print(
        "| logits | method | median, first tenth | median, last tenth | largest, first tenth | largest, last tenth | "
        "above 0.01 |"
    )
    print("|---|---|---|---|---|---|---|")
    whole = {name: torch.cat(parts, 1) for name, parts in blocks.items()}
    for law, of_law in enumerate(LAWS):
        for name, every in whole.items():
            row = every[law]
            tenth = len(row) // 10
            ends = row[:tenth], row[-tenth:]
            figures = [f"{end.median():.0e}" for end in ends] + [f"{end.max():.0e}" for end in ends]
            print(f"| {of_law} | {name} | {' | '.join(figures)} | {(row > WRONG).double().mean():.1%} |")


def table_of_times(chunk: int, rounds: int) -> None:
    """Time of a step: the state of a chunk, a push and a read, compared with attention over all keys of the window.

    The slowest step of a round is the step with n merges. Each time is the minimum of all rounds."""
    print(f"| chunks of {chunk} keys | keys in the window | a step, median | slowest step | recomputed attention |")
    print("|---|---|---|---|---|")
    query = torch.randn(4, 32, 16)
    for size in (16, 64, 256, 1024):
        keys, values = torch.randn(2, 1, 4, size * chunk, 16)
        window: ck.StateWindow[ck.AttentionState] = ck.StateWindow(size)
        pairs = list(zip(keys.split(chunk, 2), values.split(chunk, 2), strict=True))
        taken, again = [], []
        for key, value in pairs:
            window.push(ck.attention_state(query, key, value))
        for _ in range(rounds):
            steps = []
            for key, value in pairs:
                begin = time.perf_counter()
                window.push(ck.attention_state(query, key, value))
                window.state  # noqa: B018
                steps.append(time.perf_counter() - begin)
            taken.append((statistics.median(steps), max(steps)))
            begin = time.perf_counter()
            ck.latent_attention(query, keys, values)
            again.append(time.perf_counter() - begin)
        median, slowest = (min(each) * 1e6 for each in zip(*taken, strict=True))
        print(f"| {size:,} | {size * chunk:,} | {median:,.0f} us | {slowest:,.0f} us | {min(again) * 1e6:,.0f} us |")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=100_000)
    options.add_argument("--size", type=int, default=256, help="keys in the window")
    options.add_argument("--chunk", type=int, default=64, help="keys in a chunk, for the times")
    options.add_argument("--rounds", type=int, default=10, help="rounds of timing; the minimum counts")
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        table_of_times(given.chunk, given.rounds)
        print()
        table_of_errors(given.steps, given.size)


if __name__ == "__main__":
    main()

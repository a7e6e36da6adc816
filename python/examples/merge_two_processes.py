"""Merge the states of two processes. Each process attends to the half of the keys that it holds, and sends only its
state.

Two states of 66 KiB represent 40,000 keys. Merged, they give the attention over all of the keys. The same works between
machines.
"""

import multiprocessing

import numpy as np
import torch
from torch import Tensor

import cmab_kernels

HEADS, QUERIES, WIDTH, KEYS = 4, 64, 64, 20_000


def half(process: int) -> tuple[Tensor, Tensor]:
    """The keys and values (1, heads, keys, width) that a process holds, for instance its part of a file."""
    generator = torch.Generator().manual_seed(process)
    key, value = torch.randn(2, 1, HEADS, KEYS, WIDTH, generator=generator)
    return key, value


def attend(process: int, query: np.ndarray) -> dict[str, np.ndarray]:
    """Runs in each process: the state of its half of the keys, as plain arrays that can be sent anywhere."""
    state = cmab_kernels.attention_state(torch.from_numpy(query), *half(process))
    return {name: part.numpy() for name, part in state._asdict().items()}


def main() -> None:
    query = torch.randn(1, HEADS, QUERIES, WIDTH, generator=torch.Generator().manual_seed(2))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        messages = pool.starmap(attend, [(process, query.numpy()) for process in (0, 1)])
    first, second = (
        cmab_kernels.AttentionState(**{name: torch.from_numpy(part) for name, part in each.items()})
        for each in messages
    )
    merged = cmab_kernels.merge_states(first, second)

    (key0, value0), (key1, value1) = half(0), half(1)
    whole = cmab_kernels.latent_attention(query, torch.cat([key0, key1], 2), torch.cat([value0, value1], 2))
    print(
        f"each process attended to {KEYS:,} keys and sent a state of {sum(part.nbytes for part in first) / 2**10:.0f} "
        "KiB"
    )
    print(
        f"merged against one pass over all {2 * KEYS:,} keys: largest difference {(merged.out - whole).abs().max():.1e}"
    )
    print(f"one half alone would be off by {(first.out - whole).abs().max():.1e}")


if __name__ == "__main__":
    main()

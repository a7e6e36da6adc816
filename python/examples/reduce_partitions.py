"""A data set in files that no process reads as a whole: each worker reads a file, and the states of the workers are
merged in a tree.

The workers are those of a Dask cluster on this machine if the package `dask[distributed]` is installed, and otherwise
those of a pool of processes. The workers send states, whose size does not depend on the number of rows.
"""

import multiprocessing
import pickle
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cmab_kernels import OnlineRidge, nn
from cmab_kernels.distributed import reduce_states

FEATURES = 8


def write_partitions(folder: Path, rows: int, number: int = 6) -> list[Path]:
    """Write files of rows of features and a target."""
    files = [folder / f"{rows}_{each}.npy" for each in range(number)]
    for seed, file in enumerate(files):
        random = np.random.default_rng(seed)
        x = random.normal(size=(rows, FEATURES))
        np.save(file, np.c_[x, x.sum(1) + 0.1 * random.normal(size=rows)])
    return files


def regression(file: Path) -> OnlineRidge:
    table = np.load(file, mmap_mode="r")
    return OnlineRidge(alpha=0.1).fit(table[:, :-1], table[:, -1])


def cluster() -> AbstractContextManager[Any]:
    """Return two workers: an object with `submit`."""
    try:
        from distributed import Client
    except ImportError:
        return ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))
    return Client(n_workers=2, threads_per_worker=1, dashboard_address=None)


def main() -> None:
    torch.manual_seed(0)
    stack = nn.CMABStack(dim=FEATURES + 1, num_latents=4, num_heads=3, depth=2)
    with tempfile.TemporaryDirectory() as folder, cluster() as client:
        for rows in (500, 20_000):
            files = write_partitions(Path(folder), rows)
            model = reduce_states(client, regression, files)
            whole = np.concatenate([np.load(file) for file in files])
            right = OnlineRidge(alpha=0.1).fit(whole[:, :-1], whole[:, -1])
            off = abs(model.coef_ - right.coef_).max()
            print(
                f"{model.n_samples_seen_:,} examples: off by {off:.0e}, a merge sends {len(pickle.dumps(model)):,} "
                "bytes"
            )

            state = reduce_states(client, stack.encode, [np.load(file, mmap_mode="r") for file in files])
            with torch.no_grad():
                off = (state.out - stack.encode(whole).out).abs().max()
            print(
                f"{len(whole):,} points in a stack: off by {off:.0e}, a merge sends {len(pickle.dumps(state)):,} bytes"
            )


if __name__ == "__main__":
    main()

"""Train a block on two processes with DistributedDataParallel. Each process reads half of every batch, and both
processes end with the same weights.

The weights equal the weights that one process learns from whole batches. The stream that a module holds is not shared
between processes.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from cmab_kernels import merge_states, nn

PROCESSES, BATCH, POINTS, DIM, STEPS = 2, 4, 64, 16, 5


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The sets (BATCH, POINTS, DIM) of a step, and their targets (BATCH, DIM), the means."""
    sets = torch.randn(BATCH, POINTS, DIM, generator=torch.Generator().manual_seed(step))
    return sets, sets.mean(1)


def block() -> nn.CMAB:
    """The block from which all processes start."""
    torch.manual_seed(0)
    return nn.CMAB(DIM, num_latents=8, num_heads=2)


def train(module: torch.nn.Module, latents: Tensor, process: int, processes: int) -> None:
    """Train on this process's share of every batch; `DistributedDataParallel` averages the gradients."""
    optimizer = torch.optim.SGD(module.parameters(), 0.3)
    for step in range(STEPS):
        sets, targets = (part.chunk(processes)[process] for part in batch(step))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(sets, latents).mean(1), targets).backward()
        optimizer.step()


def work(process: int, folder: str) -> None:
    """Runs in each process: train, then read this process's part of a set of points as a stream."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=process, world_size=PROCESSES
    )
    module = block()
    train(DistributedDataParallel(module), torch.ones(1, DIM), process, PROCESSES)
    with torch.no_grad():
        points, _ = batch(STEPS)
        module.update(points[:1].chunk(PROCESSES, dim=1)[process], torch.ones(1, DIM))
    torch.save(module.state_dict(), Path(folder) / f"{process}.pt")
    torch.distributed.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), nprocs=PROCESSES)
        trained = [torch.load(Path(folder) / f"{process}.pt", weights_only=True) for process in range(PROCESSES)]
    alone, modules = block(), [block() for _ in trained]
    train(alone, torch.ones(1, DIM), 0, 1)
    weights = alone.state_dict()
    apart = max(float((entries[name] - weights[name]).abs().max()) for entries in trained for name in weights)
    moved = max(float((weight - weights[name]).abs().max()) for name, weight in block().state_dict().items())
    print(f"{STEPS} steps of training moved weights by {moved:.3f}")
    print(f"weights of {PROCESSES} processes against those of one: largest difference {apart:.0e}")

    for module, entries in zip(modules, trained, strict=True):
        module.load_state_dict(entries)
    merged = merge_states(*(module.stream.state for module in modules))
    with torch.no_grad():
        points, _ = batch(STEPS)
        whole = modules[0].update(points[:1], torch.ones(1, DIM), modules[0].init_state(1)).state
    print(
        "their streams, merged, against one stream of all points: largest difference "
        f"{(merged.out - whole.out).abs().max():.0e}"
    )


if __name__ == "__main__":
    main()

"""Feed a stream to a Constant Memory Attention Block, and watch its memory.

Points arrive in chunks, and none of them is kept. The block holds a state of constant size, and its latents summarise
everything that has arrived. Attention over the history would have to keep every key and value.
"""

import resource
import time
from pathlib import Path

import torch

from cmab_kernels.nn import CMAB

DIM, HEADS, LATENTS, CHUNK, CHUNKS = 64, 4, 64, 10_000, 20


def resident_mib() -> float:
    """Resident memory of this process in MiB: the current value, or the peak if the system reports only the peak
    (macOS)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    block, latents = CMAB(DIM, LATENTS, HEADS), torch.randn(1, 8, DIM)
    state = block.init_state(batch=1)
    print(f"{'points':>10}  {'state':>9}  {'memory grew by':>14}  {'a history would hold':>20}  {'a chunk took':>12}")
    for count in range(1, CHUNKS + 1):
        points = torch.randn(1, CHUNK, DIM)  # from a file, a sensor, a socket
        start = time.perf_counter()
        summary, state = block.update(points, latents, state)
        elapsed = time.perf_counter() - start
        if count == 1:
            before = resident_mib()
        if count % 4 == 0:
            history = 2 * count * CHUNK * DIM * points.element_size()
            print(
                f"{count * CHUNK:>10,}  {sum(part.nbytes for part in state) / 2**10:>5.1f} KiB  "
                f"{resident_mib() - before:>10.1f} MiB  "
                f"{history / 2**20:>16.1f} MiB  {1e3 * elapsed:>9.1f} ms"
            )
    one_more = torch.randn(1, 1, DIM)
    start = time.perf_counter()
    summary, state = block.update(one_more, latents, state)
    print(f"one more point: {1e6 * (time.perf_counter() - start):.0f} us; the summary is {tuple(summary.shape)}")


if __name__ == "__main__":
    main()

"""Attention over the newest tokens of a stream, one token at a time, compared with attention that is recomputed for
every window.

The weights are those of a `torch.nn.MultiheadAttention`. A step of `ContinualNystromAttention` takes as long for a
window of 4,096 tokens as for one of 64. At the end the window is saved, and a second module continues from there with
the same bits.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from cmab_kernels.nn import ContinualNystromAttention

WIDTH, HEADS, LANDMARKS, STEPS = 64, 4, 8, 16


def timed(step: Callable[[int], object]) -> float:
    """Seconds of a step, the median over `STEPS` steps."""
    taken = []
    for index in range(STEPS):
        start = time.perf_counter()
        step(index)
        taken.append(time.perf_counter() - start)
    return median(taken)


@torch.no_grad()
def compare(window: int) -> ContinualNystromAttention:
    """Time both on a random walk, a stream of shape (T, B, C); returns the module after its last step."""
    theirs = nn.MultiheadAttention(WIDTH, HEADS)
    ours = ContinualNystromAttention(WIDTH, HEADS, sequence_len=window, num_landmarks=LANDMARKS)
    ours.load_state_dict(theirs.state_dict())
    stream = torch.randn(window + STEPS, 1, WIDTH).cumsum(0) / 10

    def the_window_anew(index: int) -> Tensor:
        tokens = stream[index + 1 : index + 1 + window]
        return theirs(tokens, tokens, tokens, need_weights=False)[0][-1]

    ours.forward_steps(stream[:window])
    steps = timed(lambda index: ours.forward_step(stream[window + index])), timed(the_window_anew)
    print(f"window of {window:>5}: a step {steps[0] * 1e6:>6.0f} us, the window recomputed {steps[1] * 1e6:>7.0f} us")
    return ours


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    for window in (64, 512, 4096):
        ours = compare(window)

    second = ContinualNystromAttention(WIDTH, HEADS, sequence_len=window, num_landmarks=LANDMARKS)
    second.load_state_dict(ours.state_dict())  # weights, and the window
    more = torch.randn(100, 1, WIDTH)
    same = torch.equal(ours.forward_steps(more), second.forward_steps(more))
    print(f"saved and restored after {window + STEPS} tokens; 100 tokens later the same bits: {same}")


if __name__ == "__main__":
    main()

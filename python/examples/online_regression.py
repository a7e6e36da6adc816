"""A classifier over frozen features that learns from every example at once, and forgets what it is told to forget.

Handwritten digits arrive in chunks. Their features come from a network that is not trained (random convolutions, in
place of the body of a pretrained network). A ridge regression on top is kept as a `RidgeState`: two sums, whose size
does not depend on the number of examples. A chunk with wrong labels is read by mistake; subtracting it forgets it. The
sums of two readers are added.
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from cmab_kernels import RidgeState, merge_ridge, remove_ridge, ridge_state, solve_ridge

WIDTH, CLASSES, ALPHA = 256, 10, 1.0


def frozen_features(images: Tensor) -> Tensor:
    """Features (N, WIDTH + 1) of images (N, 8, 8), the last of them 1."""
    torch.manual_seed(1)
    body = nn.Sequential(nn.Conv2d(1, 64, 3), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten())
    with torch.no_grad():
        return nn.functional.pad(body(images.unsqueeze(1)), (0, 1), value=1.0)


def rows(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values in the shapes of the operators, (1, 1, N, *), in float64."""
    targets = nn.functional.one_hot(labels, CLASSES)
    return features.double()[None, None], targets.double()[None, None]


def accuracy(state: RidgeState, features: Tensor, labels: Tensor) -> float:
    """The share of right answers. The regression is solved from the sums, in a time that does not depend on how many
    examples they hold."""
    weight = solve_ridge(state, ALPHA).weight[0, 0]
    return ((features.double() @ weight).argmax(-1) == labels).double().mean().item()


def main() -> None:
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    features = frozen_features(images)
    test = features[1500:], labels[1500:]

    state = None
    for first in range(0, 1200, 200):
        chunk = slice(first, first + 200)
        state = ridge_state(*rows(features[chunk], labels[chunk]), state=state)
        print(
            f"{int(state.count):>5} examples: accuracy {accuracy(state, *test):.3f}, "
            f"{sum(part.nbytes for part in state):,} bytes"
        )
    assert state is not None

    spoilt = rows(features[1200:1500], (labels[1200:1500] + 1) % CLASSES)
    worse = ridge_state(*spoilt, state=state)
    print(f"{int(worse.count):>5} examples, 300 of them with wrong labels: accuracy {accuracy(worse, *test):.3f}")
    mended = remove_ridge(worse, *spoilt)
    change = (solve_ridge(mended, ALPHA).weight - solve_ridge(state, ALPHA).weight).abs().max()
    print(
        f"{int(mended.count):>5} examples, the 300 forgotten: accuracy {accuracy(mended, *test):.3f}, weights off by "
        f"{change:.0e}"
    )

    other = ridge_state(*rows(features[1200:1500], labels[1200:1500]))
    both = merge_ridge(mended, other)
    print(f"{int(both.count):>5} examples of two readers: accuracy {accuracy(both, *test):.3f}")

    start = time.perf_counter()
    for i in range(100):
        both = ridge_state(*rows(features[i : i + 1], labels[i : i + 1]), state=both)
        solve_ridge(both, ALPHA)
    print(f"one more example and a new solve: {1e4 * (time.perf_counter() - start):.0f} us")


if __name__ == "__main__":
    main()

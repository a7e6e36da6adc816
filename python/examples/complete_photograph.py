"""A photograph that is completed while its pixels arrive: after each packet all other pixels are predicted, and no
pixel is kept.

The pixels of a photograph of a cat arrive in random order. A colour is modelled as a sum of waves over the image. Slow
waves are larger than fast ones. A ridge regression on the pixels so far gives the sizes of the waves. Each packet is
added to its sums and the regression is solved again, in one call. The time and memory of this call do not grow. Nothing
is trained in advance: the image is learned only from its own pixels.
"""

import time

import torch
from cmab_models.data.images import photographs
from torch import Tensor

from cmab_kernels import empty_ridge, ridge_step

WAVES, ALPHA, PACKET = 20, 0.1, 64
SHOWN = (64, 256, 1024, 4096)
"""Numbers of pixels after which the prediction is evaluated."""


def waves(places: Tensor) -> Tensor:
    """Products (N, WAVES * WAVES) of cosines of rows and columns (N, 2) from 0 to 1; the amplitude decreases with the
    frequency."""
    order = torch.arange(WAVES, dtype=torch.float64)
    row, column = torch.cos(torch.pi * places.unsqueeze(-1) * order).unbind(1)
    amplitude = (1 + order.square()[:, None] + order.square()).rsqrt()
    return (row.unsqueeze(2) * column.unsqueeze(1) * amplitude).flatten(1)


def main() -> None:
    image = photographs()["chelsea"][::4, ::4].double() / 255 - 0.5
    height, width, _ = image.shape
    places = torch.cartesian_prod(
        torch.linspace(0, 1, height, dtype=torch.float64), torch.linspace(0, 1, width, dtype=torch.float64)
    )
    features, colours = waves(places), image.flatten(0, 1)
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))
    missing, arriving = order[: len(order) // 3], order[len(order) // 3 :]

    state, known, spent = empty_ridge(1, 1, WAVES**2, 3), 0, []
    for packet in arriving[: SHOWN[-1]].split(PACKET):
        start = time.perf_counter()
        (weight, _), state = ridge_step(state, features[packet][None, None], colours[packet][None, None], ALPHA)
        spent.append(time.perf_counter() - start)
        known += len(packet)
        if known in SHOWN:
            off = (features[missing] @ weight[0, 0] - colours[missing]).square().mean().sqrt()
            print(
                f"{known:>5} pixels: the others off by {off:.3f}; {sum(part.nbytes for part in state):,} bytes are kept"
            )
    plain = (colours[missing] - colours[arriving].mean(0)).square().mean().sqrt()
    print(f"the mean colour for every pixel: off by {plain:.3f}")
    print(f"a packet of {PACKET} pixels takes {1000 * sorted(spent)[len(spent) // 2]:.1f} ms, the first and the last")


if __name__ == "__main__":
    main()

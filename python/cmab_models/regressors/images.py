"""The convolutional feature network of few-shot learning."""

from __future__ import annotations

import math

from torch import Tensor, nn

from cmab_kernels.runtime.checks import mismatch

from ..neural_processes.parts import perceptron

NETWORKS = ("perceptron", "conv4")


class Conv4(nn.Module):
    """Features (..., dim) of images (..., pixels).

    Four blocks, each a 3 x 3 convolution to `channels`, a batch norm, ReLU and a maximum over 2 x 2 pixels, then a
    linear layer. Source: Matching Networks for One Shot Learning (Vinyals et al., NeurIPS 2016), where the layer is
    left out. A row holds the pixels of a square image, colour by colour: side x side, or 3 x side x side numbers. Other
    widths, and a side below 16, raise a `ValueError`.
    """

    def __init__(self, pixels: int, dim: int, channels: int = 64) -> None:
        super().__init__()
        self.colours = 1 if math.isqrt(pixels) ** 2 == pixels else 3
        self.side = math.isqrt(pixels // self.colours)
        if self.colours * self.side**2 != pixels or self.side < 16:
            allowed = "side x side or 3 x side x side, the numbers of a square image, with a side of at least 16"
            raise ValueError(mismatch("dim_key", pixels, allowed))
        blocks: list[nn.Module] = []
        for inputs in (self.colours, channels, channels, channels):
            blocks += [nn.Conv2d(inputs, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)]
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(channels * (self.side // 16) ** 2, dim)

    def forward(self, images: Tensor) -> Tensor:
        seen = self.blocks(images.reshape(-1, self.colours, self.side, self.side))
        features: Tensor = self.linear(seen.flatten(1))
        return features.unflatten(0, images.shape[:-1])


def embedding(network: str, dim_key: int, hidden: int, dim: int, depth: int) -> nn.Module:
    """Return the network that makes features (..., dim) of keys (..., dim_key): a perceptron, or a `Conv4`."""
    if network not in NETWORKS:
        raise ValueError(mismatch("network", repr(network), f"one of {', '.join(NETWORKS)}"))
    return Conv4(dim_key, dim) if network == "conv4" else perceptron(dim_key, hidden, dim, depth)

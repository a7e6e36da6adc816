"""Swap torch.nn.TransformerEncoderLayer inside a model of your own: the weights are kept, and a layer becomes two fused
calls.

The model classifies sets of points by a Transformer whose first token is read for the answer. The layers are swapped
half-way through the training. The training continues with the same optimizer, because the parameters stay the same
objects.
"""

import time

import torch
from torch import Tensor, nn

from cmab_kernels.nn import TransformerEncoderLayer, replace_modules


class SetTransformer(nn.Module):
    """Classifies a set of points (B, N, 2)."""

    def __init__(self, dim: int = 32, heads: int = 4, depth: int = 2, classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, dim))
        self.embed, self.head = nn.Linear(2, dim), nn.Linear(dim, classes)
        layer = nn.TransformerEncoderLayer(
            dim, heads, 2 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, points: Tensor) -> Tensor:
        tokens = torch.cat([self.first.expand(len(points), -1, -1), self.embed(points)], 1)
        return self.head(self.encoder(tokens)[:, 0])


def shapes(count: int) -> tuple[Tensor, Tensor]:
    """Points (count, 40, 2) on circles, squares and crosses of any size and place, and the index of the shape."""
    kind, angle, along = torch.randint(3, (count,)), 6.2832 * torch.rand(count, 40), 2 * torch.rand(count, 40) - 1
    side = torch.where(torch.rand(count, 40) < 0.5, -1.0, 1.0)
    circle = torch.stack([angle.cos(), angle.sin()], -1)
    square, cross = torch.stack([along, side], -1), torch.stack([along, 0 * along], -1)
    flip = torch.rand(count, 40, 1) < 0.5
    square, cross = (torch.where(flip, points, points.flip(-1)) for points in (square, cross))
    points = torch.stack([circle, square, cross])[kind, torch.arange(count)]
    return points * (0.5 + torch.rand(count, 1, 1)) + torch.randn(count, 1, 2) + 0.05 * torch.randn(count, 40, 2), kind


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Take some steps; return the milliseconds that each step took."""
    start = time.perf_counter()
    for _ in range(steps):
        points, kind = shapes(64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), kind).backward()
        optimizer.step()
    return 1e3 * (time.perf_counter() - start) / steps


@torch.no_grad()
def accuracy(model: nn.Module, points: Tensor, kind: Tensor) -> float:
    return (model(points).argmax(-1) == kind).float().mean().item()


def main() -> None:
    torch.manual_seed(0)
    model, held_out = SetTransformer(), shapes(512)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    before = train(model, optimizer, 60)
    with torch.no_grad():
        logits = model(held_out[0])
    print(f"torch's layers: accuracy {accuracy(model, *held_out):.2f}, {before:.0f} ms a step")

    replaced = replace_modules(model, {nn.TransformerEncoderLayer: TransformerEncoderLayer}, verbose=False)
    with torch.no_grad():
        print(f"replaced {replaced:d} layers: logits differ by {(model(held_out[0]) - logits).abs().max():.0e}")

    after = train(model, optimizer, 60)
    print(f"ours, trained further: accuracy {accuracy(model, *held_out):.2f}, {after:.0f} ms a step")


if __name__ == "__main__":
    main()

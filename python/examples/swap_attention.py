"""Swap torch.nn.MultiheadAttention inside a model of your own, and keep its weights.

The model pools a set of points: 32 learned queries attend to them, and a linear layer classifies the mean of the
results.
"""

import time

import torch
from torch import Tensor, nn

from cmab_kernels.nn import MultiheadAttention, replace_modules


class Pooling(nn.Module):
    """Classifies a set of points (B, N, dim)."""

    def __init__(self, dim: int = 64, heads: int = 4, queries: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, queries, dim))
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.head = nn.Linear(dim, classes)

    def forward(self, points: Tensor) -> Tensor:
        queries = self.queries.expand(len(points), -1, -1)
        pooled, _ = self.attention(queries, points, points, need_weights=False)
        return self.head(pooled.mean(dim=1))


def milliseconds(model: nn.Module, points: Tensor, repeats: int = 5) -> float:
    """Time of a forward and backward pass in milliseconds, the minimum of a few passes."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        model(points).sum().backward()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main() -> None:
    torch.manual_seed(0)
    model, points = Pooling(), torch.randn(2, 20_000, 64)
    before, time_before = model(points), milliseconds(model, points)

    replaced = replace_modules(model, {nn.MultiheadAttention: MultiheadAttention}, verbose=False)

    after, time_after = model(points), milliseconds(model, points)
    print(
        f"replaced {replaced:d} module; model.attention is now a "
        f"{type(model.attention).__module__}.{type(model.attention).__name__}"
    )
    print(f"largest difference of the outputs: {(after - before).abs().max():.1e}")
    print(
        f"forward and backward over {points.shape[1]:,} points: {time_before:.1f} ms before, {time_after:.1f} ms after"
    )


if __name__ == "__main__":
    main()

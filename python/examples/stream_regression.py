"""Regression in context, as a stream: fit a curve, forget it, fit another curve, and learn how much to regularise.

Noisy readings of a curve arrive in chunks, and halfway the curve changes. A `MultiheadIntention` keeps the sums of a
ridge regression and no readings. It forgets the first curve by subtracting its readings from the sums, exactly. Then
gradient steps fit its penalty alpha.
"""

import torch
from torch import Tensor, nn

from cmab_kernels.nn import MultiheadIntention

FEATURES, NOISE = 24, 0.5


def features(x: Tensor) -> Tensor:
    """Features of x (1, N): cosines of rising frequency, (1, N, FEATURES)."""
    return torch.cos(torch.pi * x.unsqueeze(-1) * torch.arange(FEATURES))


def plain_regression() -> MultiheadIntention:
    """A module of one head without projections: keys are the features, values are the readings, in the first column."""
    module = MultiheadIntention(FEATURES, 1, bias=False, vdim=1, batch_first=True)
    for projection in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight, module.out_proj.weight):
        nn.init.eye_(projection)
        projection.requires_grad_(False)
    return module


def readings(frequency: float, count: int) -> tuple[Tensor, Tensor]:
    """Features (1, count, FEATURES) and noisy values (1, count, 1) of a sine at random places."""
    x = torch.rand(1, count)
    return features(x), torch.sin(frequency * x).unsqueeze(-1) + NOISE * torch.randn(1, count, 1)


def main() -> None:
    torch.manual_seed(0)
    model = plain_regression()
    nn.init.constant_(model.log_alpha, -5.0)
    grid = torch.linspace(0, 1, 200).unsqueeze(0)

    def error() -> Tensor:
        """Root mean square error relative to the second curve without noise.

        The module returns (1 + alpha) times the result of a ridge regression.
        """
        fit = model.predict(features(grid))[..., 0] / (1 + model.alpha)
        return (fit - torch.sin(7.0 * grid)).square().mean().sqrt()

    old, new = ([readings(frequency, 20) for _ in range(2)] for frequency in (3.0, 7.0))
    with torch.no_grad():
        for name, change, chunks in (
            ("old", model.update, old),
            ("new", model.update, new),
            ("old", model.remove, old),
        ):
            for key, value in chunks:
                state = change(key, value)
                size = sum(part.nbytes for part in state)
                print(
                    f"{change.__name__:>6} {name}: {int(state.count):>3} readings in {size:,} bytes, error "
                    f"{error():.3f}"
                )

    optimizer = torch.optim.Adam([model.log_alpha], lr=0.5)
    for step in range(13):
        optimizer.zero_grad()
        loss = error()
        loss.backward()
        if step % 3 == 0:
            print(
                f"step {step:>2}: alpha {float(model.alpha):.3f}, its gradient {float(model.log_alpha.grad):+.4f}, "
                f"error {float(loss):.3f}"
            )
        optimizer.step()


if __name__ == "__main__":
    main()

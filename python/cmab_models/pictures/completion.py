"""Completed images next to the true images, from more and more known pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..data.images import crops
from ..tasks import seeded
from ..tasks.images import complete

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES = (0.03, 0.1, 0.3)
"""The shares of the pixels that are known."""


def figure(task: Any, models: Mapping[str, nn.Module]) -> Figure:
    """Return a picture for one image of each held-out set and each share: known pixels, each model's means and
    deviations, and the image."""
    from matplotlib import pyplot as plt

    sets = {
        name: crops(images, task.size, 1, seeded(5))[0] for name, images in task.images().items() if name != "train"
    }
    rows = [(name, image, share) for name, image in sets.items() for share in SHARES]
    titles = ["known", *(f"{name}: {what}" for name in models for what in ("mean", "deviation")), "truth"]
    made, grid = plt.subplots(len(rows), len(titles), figsize=(1.3 * len(titles), 1.35 * len(rows)), squeeze=False)
    for axes, (name, image, share) in zip(grid, rows, strict=True):
        found = [complete(model, image, share) for model in models.values()]
        truth = image / 255
        known = torch.where(found[0].known.unsqueeze(-1), truth.expand(-1, -1, 3), torch.tensor([0.55, 0.65, 0.8]))
        columns = [known, *(part for each in found for part in (each.mean, each.std / 0.5)), truth]
        for each, shown in zip(axes, columns, strict=True):
            _show(each, shown)
        axes[0].set_ylabel(f"{name}\n{share:.0%}", rotation=0, ha="right", va="center")
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, fontsize=7)
    made.set_layout_engine("constrained")
    return made


def _show(axes: Any, image: Tensor) -> None:
    """Show an image of one or three colours, with values from 0 to 1, without frame and ticks."""
    axes.imshow(image.clamp(0, 1).expand(-1, -1, 3).numpy(), interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)

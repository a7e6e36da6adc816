"""The demo's picture: memory and time against the number of pixels, beside the photograph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import conditioning as c

if TYPE_CHECKING:
    from . import Figures, Scan

COLOURS = {c.CMAB_NAME: "#c0392b", c.SDPA_NAME: "#2c6e9f", c.MULTIHEAD_NAME: "#7f8c8d"}
LABELS = {c.CMAB_NAME: "CMAB, streamed", c.SDPA_NAME: "scaled_dot_\nproduct_attention", c.MULTIHEAD_NAME: "nn.Multihead-\nAttention"}


def draw(scans: list[Scan], target: Path, where: str) -> None:
    """Write the plot of `scans` to `target`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
    }
    with plt.rc_context(style):
        figure, (photo, memory, time) = plt.subplots(1, 3, figsize=(12, 4.4), width_ratios=(0.8, 1.2, 1.2), layout="constrained")
        photo.imshow(c.photograph().numpy())
        photo.axis("off")
        photo.set_title(f"{c.photograph().shape[0]} x {c.photograph().shape[1]} pixels, read in random order")
        _curves(memory, scans, lambda figures: figures.memory / 2**20, "peak memory beyond pixels and weights (MiB)", "Memory")
        _curves(time, scans, lambda figures: 1e3 * figures.seconds, "time (ms)", "Time")
        figure.suptitle(
            f"Conditioning {c.LATENTS} latents on the pixels of a photograph, from pixels to latents", x=0.01, ha="left", fontsize=12
        )
        figure.supxlabel(where, fontsize=7, color="0.4")
        figure.savefig(target, dpi=160)
        plt.close(figure)


def _curves(axes: Any, scans: list[Scan], figure_of: Callable[[Figures], float], unit: str, title: str) -> None:
    """One curve a method on logarithmic axes, named at its end."""
    for name, colour in COLOURS.items():
        measured = [(scan.count, figure_of(scan.conditioning[name])) for scan in scans if name in scan.conditioning]
        if not measured:
            continue
        counts, figures = zip(*measured, strict=True)
        axes.plot(counts, figures, color=colour, marker="o", markersize=4, linewidth=2 if name == c.CMAB_NAME else 1.4)
        axes.annotate(LABELS[name], (counts[-1], figures[-1]), (7, 0), textcoords="offset points", color=colour, va="center", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="pixels", ylabel=unit, title=title)
    axes.grid(True, which="major", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)

"""The pictures of the tasks: the results of a trained model, with the truth and with other systems."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from cmab_kernels.runtime.checks import mismatch

from ..tasks import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = {
    "gp-rbf": "bands",
    "gp-matern": "bands",
    **dict.fromkeys(("digits", "faces", "photographs", "emoji", "emnist", "celeba"), "completion"),
    "wheel": "regret",
    **dict.fromkeys(("hawkes", "departures", "mooc", "reddit"), "intensity"),
    **dict.fromkeys(("patches", "series", "gtzan", "thumos"), "landmarks"),
    "few-shot": "shots",
    "least-squares": "width",
}
"""Task -> the module that draws it; its `figure(task, models)` returns the picture."""
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 110,
    "savefig.bbox": "tight",
}
OURS, OTHER, TRUTH = "#c0392b", "#2c6e9f", "0.25"
"""The colours of the papers' systems, of baselines and of the truth."""


PAPERS = ("cmanp", "cmanp-and", "cmhp", "continual-nystromformer", "intention", "informer", "sigma-informer")


def colour(name: str) -> str:
    """Return the colour of a system, given a name such as "cmanp" or "continual-nystromformer, fixed landmarks"."""
    return OURS if name.partition(",")[0] in PAPERS else OTHER


def draw(task: Task, models: Mapping[str, nn.Module], output: Path) -> None:
    """Draw the task's picture with these trained models, by name, and write it to `output` (.png, .pdf or .svg).

    Raises a `ValueError` if the task has no picture, or if the file has another ending.
    """
    if task.name not in PICTURES:
        raise ValueError(mismatch("--task", task.name, f"one that has a picture: {', '.join(PICTURES)}"))
    if output.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(mismatch("--output", output, "a name that ends in .png, .pdf or .svg"))
    save(lambda: importlib.import_module(f"{__name__}.{PICTURES[task.name]}").figure(task, models), output)


def save(figure: Callable[[], Figure], output: Path) -> None:
    """Call `figure` in the style of all pictures, and write the result."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    output.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        made = figure()
        made.savefig(output, dpi=150)
        plt.close(made)

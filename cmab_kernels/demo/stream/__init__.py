"""The demo `stream`: attention over a sliding window removes the noise from a photograph that arrives patch by patch.

The demo compares continual Nyström attention with exact continual attention, and with attention that is recomputed for
every window.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...measure import readable, seconds
from ...nystrom import (
    continual_attention_init,
    continual_attention_step,
    continual_nystrom_init,
    continual_nystrom_step,
)
from ...nystrom.costs import cost_table, executed_on_average, paper_operations
from ...runtime.backends import Explanation, explain, use_impl
from ...runtime.checks import mismatch
from .. import checked_output, require, where
from . import tokens as t

WINDOW, LANDMARKS = 4096, 16
ROWS_WITHOUT_KERNEL = 4
"""Rows of patches to stream if no compiled kernel can run. Steps then take a hundred times as long."""

WRONG = 1e-5
"""A relative error of exact attention that is too large for rounding errors."""

CONTINUAL, FIXED, EXACT, FULL = "continual landmarks", "fixed landmarks", "exact, continual", "full, recomputed"
SCHEMES = {CONTINUAL: "continual single", FIXED: "fixed single", EXACT: "single", FULL: "full"}
"""Method -> the name of its scheme in `nystrom.costs`."""

Step = Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Any]]
"""A step: state, query, key, value -> output, next state."""


@dataclass
class Stream:
    """One of the methods: its state, and its outputs, times and errors so far."""

    state: Any
    step: Step
    outs: list[Tensor] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Seconds of a step, as the mean over each row of patches."""
    errors: list[float] = field(default_factory=list)
    """Error of each row of patches, relative to full attention in float64."""

    def take(self, row: list[tuple[Tensor, ...]]) -> None:
        """Take a step for each token (query, key, value) of a row. Store the outputs and the time of a step."""

        def steps() -> None:
            for token in row:
                out, self.state = self.step(self.state, *token)
                self.outs.append(out)

        self.times.append(seconds(steps) / len(row))

    def compare(self, expected: Tensor) -> None:
        """Record the error of the newest outputs against the expected ones (tokens, width)."""
        newest = torch.cat(self.outs[-len(expected) :], dim=2)[0, 0]
        self.errors.append(float((newest - expected).norm() / expected.norm()))

    def patches(self) -> Tensor:
        """Return all outputs so far, (tokens, width)."""
        return torch.cat(self.outs, dim=2)[0, 0]


class Run(NamedTuple):
    """The measurements of a run of the demo."""

    window: int
    landmarks: int
    first: int
    """Index of the first streamed row of patches."""
    streams: dict[str, Stream]
    """Method -> its stream."""
    full: list[float]
    """Seconds of full attention over the whole window, measured once after each row of patches."""

    @property
    def rows(self) -> int:
        """The number of streamed rows of patches."""
        return len(self.full)

    def decibels(self, patches: Tensor) -> float:
        """Return the peak signal-to-noise ratio in the streamed rows.

        `patches` are those of the streamed rows or of the whole photograph.
        """
        part = slice(self.first * t.columns(), (self.first + self.rows) * t.columns())
        truth = t.to_patches(t.photograph())[part]
        return t.decibels(patches if len(patches) == len(truth) else patches[part], truth)

    def step_time(self, name: str) -> float:
        """Return the seconds of a step of a method, as the median over the rows of patches."""
        return statistics.median(self.full if name == FULL else self.streams[name].times)

    def error(self, name: str) -> float:
        """Return the relative error of a method, as the median over the rows of patches."""
        return statistics.median(self.streams[name].errors)


def run(output: str, window: int | None = None, landmarks: int | None = None) -> None:
    """Stream the photograph, print times and errors, and draw them to `output`.

    `window` is the number of newest patches that a patch attends to (default: `WINDOW`). `landmarks` is the number of
    landmarks (default: `LANDMARKS`). Raises `SystemExit` with one line if a package is missing, a number is out of
    range, or `output` cannot be written.
    """
    require("sklearn", "skimage", "matplotlib", "tqdm")
    target = checked_output(output)
    window, landmarks = _checked(WINDOW if window is None else window, LANDMARKS if landmarks is None else landmarks)
    with torch.no_grad():
        impl = _introduce(window)
        # The steps run with "auto", because a named implementation takes the path with checks,
        # which is slower.
        with use_impl("reference" if impl == "reference" else "auto"):
            measured = _measure(window, landmarks, impl)
    for line in _lines(measured):
        print(line)
    from .plot import draw

    existed = target.exists()
    draw(measured, target, where("cpu", impl))
    print(f"{target} {'replaced' if existed else 'written'}")


def _checked(window: int, landmarks: int) -> tuple[int, int]:
    """Return the window and the number of landmarks. Raise `SystemExit` with one line if either is out of range."""
    most = t.stream().key.shape[2] // 2
    if not 1 <= window <= most:
        raise SystemExit(mismatch("--window", window, f"an int from 1 to {most}, half of the patches"))
    if not 1 <= landmarks <= window:
        raise SystemExit(mismatch("--landmarks", landmarks, f"an int from 1 to {window}, the patches of the window"))
    return window, landmarks


def _introduce(window: int) -> str:
    """Print which computation starts, and on which machine. Return the implementation that `auto` takes."""
    rows: list[Explanation] = explain("continual_nystrom_step", *(part[:, :, :1] for part in t.stream()))
    impl = next(row.impl for row in rows if row.usable)
    count, size = t.stream().key.shape[2], f"{t.PATCH} x {t.PATCH}"
    print(
        f"The {count:,} patches ({size} pixels) of a noisy photograph arrive one by one. Each attends to the similar "
        f"patches"
    )
    print(f"among the newest {window:,}, and becomes their mean, which has less noise (non-local means).")
    print(f"On {where('cpu', impl)}.")
    if impl == "reference":
        reasons = "; ".join(f"{row.impl}: {row.reason}" for row in rows if not row.usable)
        print(f"No compiled kernel runs here, so this is plain PyTorch, which is slow, and fewer patches. ({reasons})")
    print()
    return impl


# ---- measuring -------------------------------------------------------------------------------------------------------


def _measure(window: int, landmarks: int, impl: str) -> Run:
    """Stream the photograph, one row of patches at a time. Within a row the methods run one after the other."""
    from tqdm import tqdm

    columns = t.columns()
    first = -(-window // columns)
    last = t.stream().key.shape[2] // columns
    if impl == "reference":
        last = min(last, first + ROWS_WITHOUT_KERNEL)
    measured = Run(window, landmarks, first, _streams(first * columns, window, landmarks), [])
    with tqdm(range(first, last), leave=False, bar_format="{desc:<92}{percentage:3.0f}% |{bar:30}| {elapsed}") as bar:
        for row in bar:
            _row(measured, row * columns, (row + 1) * columns)
            bar.set_description(_live(measured, row))
    return measured


def _streams(start: int, window: int, landmarks: int) -> dict[str, Stream]:
    """Return a stream for each continual method. Its window holds the tokens before `start`."""
    seen = t.before(start, window)
    continual = continual_nystrom_init(*seen, landmarks, scale=1.0)
    fixed = continual_nystrom_init(*seen, landmarks=t.learnt_landmarks(landmarks), scale=1.0)
    exact = continual_attention_init(*seen, scale=1.0)
    return {
        CONTINUAL: Stream(continual, continual_nystrom_step),
        FIXED: Stream(fixed, continual_nystrom_step),
        EXACT: Stream(exact, continual_attention_step),
    }


def _row(measured: Run, first: int, last: int) -> None:
    """Run all methods over the tokens `first` to `last` - 1, which form a row of patches.

    Raises `RuntimeError` if the relative error of an exact method is `WRONG` or more.
    """
    row = list(zip(*(part[:, :, first:last].split(1, dim=2) for part in t.stream()), strict=True))
    expected = t.exact(first, last, measured.window)
    for stream in measured.streams.values():
        stream.take(row)
        stream.compare(expected)
    seen = t.before(last, measured.window)
    recomputed: list[Tensor] = []
    measured.full.append(seconds(lambda: recomputed.append(F.scaled_dot_product_attention(*seen, scale=1.0))))
    newest = recomputed[0][0, 0, -1]
    exact_error, full_error = (
        measured.streams[EXACT].errors[-1],
        float((newest - expected[-1]).norm() / expected[-1].norm()),
    )
    if not max(exact_error, full_error) < WRONG:
        raise RuntimeError(
            f"exact attention is off by {exact_error:.1e}, torch's by {full_error:.1e}: a wrong result has no speed"
        )


def _live(measured: Run, row: int) -> str:
    """Return the figures of the newest row, as one line for the progress bar."""
    times = {name: stream.times[-1] for name, stream in measured.streams.items()} | {FULL: measured.full[-1]}
    steps = ", ".join(f"{_first_word(name)} {readable(time)}" for name, time in times.items())
    errors = " and ".join(f"{measured.streams[name].errors[-1]:.0%}" for name in (CONTINUAL, FIXED))
    return f"row {row}: steps {steps}; errors {errors}"


def _first_word(name: str) -> str:
    return name.replace(",", "").split(" ")[0]


# ---- printing --------------------------------------------------------------------------------------------------------


def _lines(measured: Run) -> Iterator[str]:
    """Yield the lines of the table of the run and of the table of costs."""
    n, m, tokens = measured.window, measured.landmarks, measured.rows * t.columns()
    yield (
        f"{tokens:,} steps over a window of n = {n:,} patches, m = {m} landmarks, one head {t.WIDTH} wide. Medians "
        "over rows of patches:"
    )
    yield f"{'':<22}{'step':>10}{'of full':>14}{'operations: paper':>20}{'executed':>14}{'error':>12}{'photograph':>14}"
    for name in SCHEMES:
        yield _line(measured, name)
    yield f"{'as it arrives':<22}{measured.decibels(t.to_patches(t.noisy())):>81.1f} dB"
    yield (
        f"Full is torch's scaled_dot_product_attention of all {n:,} queries; errors are relative to its result in "
        "float64."
    )
    yield f"Fixed landmarks were learnt from {len(t.TRAINING)} other photographs, by k-means."
    yield ""
    yield "Costs of a step for one head, on average:"
    yield from cost_table(n, m, t.WIDTH)
    yield ""


def _line(measured: Run, name: str) -> str:
    """Return a method's row of the table: time of a step, operations, error, and signal-to-noise ratio."""
    n, m = measured.window, measured.landmarks
    step, paper = measured.step_time(name), paper_operations(SCHEMES[name], n, m, t.WIDTH)
    figures = f"{name:<22}{readable(step):>10}{f'1 / {measured.step_time(FULL) / step:,.0f}':>14}"
    figures += f"{paper:>20,.0f}{executed_on_average(SCHEMES[name], n, m, t.WIDTH):>14,.0f}"
    if name == FULL:
        return figures
    return f"{figures}{measured.error(name):>12.1e}{measured.decibels(measured.streams[name].patches()):>11.1f} dB"

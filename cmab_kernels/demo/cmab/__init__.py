"""The demo `cmab`: a CMAB reads the 2 million pixels of a photograph in constant memory, compared with torch's own
attention."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...attention import attention_state, latent_attention
from ...measure import Task, available_memory, interleave, peak_memory, readable, seconds
from ...runtime.backends import Explanation, explain, use_impl
from ...runtime.checks import mismatch
from .. import checked_output, require, where
from . import conditioning as c

POINTS = (10_000, 100_000, 1_000_000)
"""The default numbers of pixels to measure. The demo also measures all pixels of the photograph."""

POINTS_WITHOUT_KERNEL = (10_000, 30_000, 100_000, 300_000)
"""The default numbers of pixels to measure if no compiled kernel can run, so that the PyTorch definition runs."""

TIMING_STEPS = 3
"""Steps of the progress bar for the timing of a method. The measurement of its memory is one step."""

WRONG = 1e-2
"""A difference between results of order one that is too large for rounding errors, even for those of tf32 on a GPU."""

SMALL = 8192
"""Pixels of the warm-up call before the measurement of memory."""

SECONDS = 3.0
"""Seconds of timing at each number of pixels, after one call of each method. Each method gets at least two more."""

BUSY = 1.5
"""The ratio of median to best time from which on the demo reports that other work occupies the processor."""


@dataclass
class Figures:
    """The time and memory of one method at one number of pixels."""

    seconds: float
    """Time of the best call. The calls of all methods take turns. Other work on the machine only slows calls down."""
    memory: int
    """Peak memory beyond the inputs, in bytes."""


@dataclass
class Scan:
    """The measurements at one number of pixels. A method that would not fit into memory is left out."""

    count: int
    conditioning: dict[str, Figures] = field(default_factory=dict)
    """Method -> its figures for the whole way from pixels to latents."""
    attention: dict[str, Figures] = field(default_factory=dict)
    """Method -> its figures for the attention alone, with given keys and values."""
    difference: dict[str, float] = field(default_factory=dict)
    """"conditioning" or "attention" -> the largest difference between the results of any two methods that ran."""
    unrest: float = 1.0
    """The largest ratio of any method's median time to its best."""


def run(output: str, points: list[int] | None = None) -> None:
    """Measure at the numbers of pixels in `points` (default: `POINTS` and all), print tables, and draw to `output`.

    Raises `SystemExit` with one line if a package is missing, if a number is less than 1 or larger than the number of
    pixels, or if `output` cannot be written.
    """
    require("skimage", "matplotlib", "tqdm")
    target = checked_output(output)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total = c.pixels(device).shape[1]
    rows = _implementations(device)
    impl = next(row.impl for row in rows if row.usable)
    counts = _checked_points(points, POINTS_WITHOUT_KERNEL if impl == "reference" else (*POINTS, total), total)
    _introduce(rows, device, impl, total)
    with use_impl(impl), torch.no_grad():
        scans = _scan_all(counts, device, impl)
        for line in (*_conditioning_table(scans), "", *_attention_table(scans), ""):
            print(line)
        for line in _streaming(counts[-1], device, impl):
            print(line)
    busy = _busy(scans)
    if busy:
        print(f"\n{busy}")
    from .plot import draw

    existed = target.exists()
    draw(scans, target, where(device, impl), warning=busy)
    print(f"{target} {'replaced' if existed else 'written'}")


def _checked_points(points: list[int] | None, default: tuple[int, ...], total: int) -> list[int]:
    """Return the numbers of pixels in rising order, without repetitions.

    Raise `SystemExit` for a number outside 1 to `total`.
    """
    counts = sorted(set(default if points is None else points))
    if not counts or counts[0] < 1 or counts[-1] > total:
        raise SystemExit(mismatch("--points", points, f"numbers from 1 to {total}, the number of pixels"))
    return counts


def _implementations(device: str) -> list[Explanation]:
    """Return the implementations of the demo's attention, in the order in which `auto` tries them."""
    query, key, value = (torch.zeros(1, c.HEADS, 1, c.DIM // c.HEADS, device=device) for _ in range(3))
    return explain("latent_attention", query, key, value)


def _introduce(rows: list[Explanation], device: str, impl: str, total: int) -> None:
    """Print which computation starts, and on which machine."""
    print(
        f"A CMAB ({c.LATENTS} latents, {c.HEADS} heads of {c.DIM // c.HEADS}) reads the {total:,} pixels of a "
        "photograph."
    )
    print(f"On {where(device, impl)}.")
    if impl == "reference":
        reasons = "; ".join(f"{row.impl}: {row.reason}" for row in rows if not row.usable)
        print(f"No compiled kernel runs here, so this is plain PyTorch, which is slow, and fewer pixels. ({reasons})")
    print()


# ---- measuring -------------------------------------------------------------------------------------------------------


def _scan_all(counts: list[int], device: str, impl: str) -> list[Scan]:
    from tqdm import tqdm

    scans = [Scan(count) for count in counts]
    steps = (1 + TIMING_STEPS) * (len(c.CONDITIONING) + len(c.ATTENTION))
    with tqdm(
        total=steps * sum(map(_effort, counts)),
        leave=False,
        bar_format="{desc:<58}{percentage:3.0f}% |{bar:40}| {elapsed}",
    ) as bar:
        for scan in scans:
            _compare(scan, "conditioning", scan.conditioning, device, impl, bar)
            _compare(scan, "attention", scan.attention, device, impl, bar)
    return scans


def _compare(scan: Scan, kind: str, figures: dict[str, Figures], device: str, impl: str, bar: Any) -> None:
    """Measure time and memory of each method that fits into memory, and the largest difference between their results.

    `kind` is "conditioning" or "attention". The function writes to `figures` and `scan.difference`. It raises a
    `RuntimeError` if two methods differ by more than `WRONG`.
    """
    prepare: Callable[..., Task] = getattr(c, kind)
    names: list[str] = list(c.CONDITIONING if kind == "conditioning" else c.ATTENTION)
    fitting = [name for name in names if _fits(name, scan.count, device, impl)]
    peaks = {}
    for name in fitting:
        bar.set_description(f"{scan.count:,} pixels, memory of {name}")
        small = (name, min(scan.count, SMALL), device, impl)
        peaks[name] = peak_memory(prepare, name, scan.count, device, impl, warm_up=small, device=device)
        bar.update(_effort(scan.count))
    bar.set_description(f"{scan.count:,} pixels, time of {kind}")
    tasks = {name: prepare(name, scan.count, device, impl) for name in fitting}
    results: list[Tensor] = []
    first = interleave(
        {name: functools.partial(lambda task: results.extend(task()), task) for name, task in tasks.items()}, 1, device
    )
    if len(results) > 1:
        scan.difference[kind] = _largest_difference(results)
        if not scan.difference[kind] < WRONG:
            raise RuntimeError(
                f"{' and '.join(tasks)} differ by {scan.difference[kind]:.1e}: one is wrong, and a wrong result has "
                "no speed"
            )
    once = sum(sum(samples) for samples in first.values())
    more = interleave(tasks, min(20, max(2, int(SECONDS / once))) if tasks else 0, device)
    samples = {name: first[name] + more[name] for name in fitting}
    figures |= {name: Figures(min(samples[name]), peaks[name].extra) for name in fitting}
    scan.unrest = max([scan.unrest, *(statistics.median(each) / min(each) for each in samples.values())])
    bar.update(_effort(scan.count) * (TIMING_STEPS * len(names) + len(names) - len(fitting)))


def _effort(count: int) -> int:
    """Return the length of one step of the progress bar: the pixels, and a constant for the start of a process."""
    return count + 200_000


def _fits(name: str, count: int, device: str, impl: str) -> bool:
    """Return whether a method needs less than 60 % of the available memory. A stream always does."""
    return name == c.CMAB_NAME or c.bytes_needed(name, count, impl) < 0.6 * available_memory(device)


def _largest_difference(results: list[Tensor]) -> float:
    """Return the largest difference between any two results at any element, or NaN if a result is not finite."""
    stacked = torch.stack(results)
    return float((stacked.amax(0) - stacked.amin(0)).max()) if bool(stacked.isfinite().all()) else float("nan")


# ---- printing --------------------------------------------------------------------------------------------------------


def _busy(scans: list[Scan]) -> str:
    """Return a warning if other work disturbed the timing, else an empty text."""
    unrest = max(scan.unrest for scan in scans)
    if unrest < BUSY:
        return ""
    return (
        f"The machine is busy: calls took up to {unrest:.1f} times as long as the best, which is shown. Run it "
        "again when it is quiet."
    )


def _conditioning_table(scans: list[Scan]) -> Iterator[str]:
    """Yield the lines about the whole way from pixels to latents."""
    yield (
        "From pixels to latents: embed, project, attend, and run the rest of the block. The columns show time, and "
        "peak memory beyond pixels and weights."
    )
    yield from _table(scans, "conditioning", list(c.CONDITIONING))


def _attention_table(scans: list[Scan]) -> Iterator[str]:
    """Yield the lines about the attention alone."""
    yield "Only the attention, given the keys and values of all pixels. The columns show time, and memory beyond these."
    yield from _table(scans, "attention", list(c.ATTENTION))


def _table(scans: list[Scan], kind: str, names: list[str]) -> Iterator[str]:
    """Yield the lines of a table with time and memory of each method.

    Methods after the first also show their time divided by the time of the first method.
    """
    yield f"{'pixels':>11}" + "".join(f"{name:>32}" for name in names) + f"{'results differ by':>20}"
    for scan in scans:
        figures = getattr(scan, kind)
        difference = f"{scan.difference[kind]:.1e}" if kind in scan.difference else "--"
        cells = [_cell(figures.get(name), figures.get(names[0])) for name in names]
        yield f"{scan.count:>11,}" + "".join(f"{cell:>32}" for cell in cells) + f"{difference:>20}"


def _cell(figures: Figures | None, ours: Figures | None) -> str:
    """Return a method's time and memory as text. For other methods than ours, add the time divided by ours."""
    if figures is None:
        return "would not fit into memory"
    times = f"{figures.seconds / ours.seconds:.1f} x  " if ours and figures is not ours else ""
    return f"{times}{readable(figures.seconds)} {figures.memory / 2**20:+9.1f} MiB"


def _streaming(count: int, device: str, impl: str) -> Iterator[str]:
    """Yield lines about a stream in chunks of random sizes: the error of its latents and the time to add one more
    pixel."""
    while count > 1 and not _fits(c.OPERATOR_NAME, count, device, impl):
        count //= 2
    reader, inputs = c.Reader.make(device), c.pixels(device)[:, :count]
    sizes = _random_sizes(count)
    result, state = reader.stream(inputs, sizes)
    difference = _largest_difference([result, reader.at_once(inputs, latent_attention)])
    yield (
        f"{count:,} pixels streamed in {len(sizes):,} chunks of {min(sizes):,} to {max(sizes):,}: "
        f"the latents differ from those of a single call by {difference:.1e} at most."
    )
    pixel = inputs[:, :1]
    query, key, value = reader.project(pixel)
    whole = _latency(lambda: reader.block.update(reader.embed(pixel), reader.latents, state), device)
    alone = _latency(lambda: attention_state(query, key, value, state=state), device)
    yield (
        f"One more pixel after {count:,} takes {readable(whole)} for the whole block, including {readable(alone)} for "
        "the attention operator."
    )


def _random_sizes(count: int) -> list[int]:
    """Return random chunk sizes from 1 to 100,000 that add up to `count`. Their logarithms are uniform."""
    random = torch.Generator().manual_seed(0)
    sizes: list[int] = []
    while (left := count - sum(sizes)) > 0:
        sizes.append(min(left, int(10 ** (5 * torch.rand(1, generator=random).item()))))
    return sizes


def _latency(call: Callable[[], Any], device: str) -> float:
    """Return the seconds of a short call: the best of 9 samples, each the mean of 20 calls."""
    seconds(call, device, repeats=10)
    return min(seconds(call, device, repeats=20) for _ in range(9))

"""The fastest block sizes on this GPU: they are tried, checked, timed together with the built-in sizes, and written to
the package's table.

There are two sections. `candidates` compiles each candidate and compares its results with float64, in many processes,
because compiling takes long and may crash. `tune` times the candidates that were right, all in turn. It writes the
fastest if its gain over the built-in tiles exceeds the difference between two timings of the built-in tiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness import captured, ratio, relative_error
from bench.provenance import now
from bench.runs import write_json
from cmab_kernels.measure import interleave
from cmab_kernels.runtime import tiles as table

from .candidates import Target, candidates, prepared, targets
from .sections import Row, Task

LEAST_GAIN = 0.01
BUILT_IN, AGAIN = "built-in", "built-in again"
FIRST_ROUNDS, FINALISTS, ROUNDS = 3, 4, 21
"""Rounds in which all candidates take part, the number of candidates that remain, and the rounds of these together with
the built-in tiles."""
SAMPLE = 1e-3
"""Least seconds of a sample, which consists of successive calls, because an event itself takes some microseconds."""


# ---- candidates


def candidate_tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    """If a candidate does not compile or fit, this is not a fault, but the built-in tiles must compile and fit."""
    return [
        Task(_name(target, tiles), lambda target=target, tiles=tiles: check(target, tiles, device), peer=number > 0)
        for target in targets()
        for number, tiles in enumerate(candidates(target, torch.device(device)))
    ]


def _name(target: Target, tiles: Sequence[int]) -> str:
    return f"{target}; {' '.join(map(str, tiles))}"


def check(target: Target, tiles: tuple[int, ...], device: str) -> Row:
    """Whether tiles are sound: their error is at most twice that of the built-in tiles, and their bits are the same
    each time."""
    key = target.key(torch.device(device))
    with table.using({}):
        right = prepared(target, device, "small", wide=True)()
        allowed = 2 * relative_error(prepared(target, device, "small")(), right) + 4 * torch.finfo(torch.float64).eps
    with table.using({key: tiles}):
        call = prepared(target, device, "small")
        first = call()
        same = all(torch.equal(a, b) for _ in range(3) for a, b in zip(first, call(), strict=True))
    off = relative_error(first, right)
    row = {"error": off, "sound": same and off <= allowed}
    if row["sound"]:
        return row
    return row | {"problem": "other bits each time" if not same else f"wrong: error {off:.1e}, allowed {allowed:.1e}"}


# ---- tuning


def tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    sound = {row["key"]: row.get("sound", False) for row in before["candidates"]}
    return [Task(str(target), lambda target=target: tune(target, sound, device)) for target in targets()]


def tune(target: Target, sound: Mapping[str, bool], device: str, path: Path = table.FILE) -> Row:
    """The row has the result. The table gets an entry only if this entry is faster than the built-in tiles."""
    place = torch.device(device)
    built_in, *others = candidates(target, place)
    if not sound[_name(target, built_in)]:
        return {"ok": False, "problem": "the built-in tiles were found wrong"}
    right = [tiles for tiles in others if sound[_name(target, tiles)]]
    key, found = target.key(place), fastest(target, built_in, right, device)
    evidence = {name: found[name] for name in ("seconds", "built-in seconds", "noise")}
    entry = table.as_entry(
        key, found["tiles"], {"gpu": gpu_name(place), **evidence, "tried": len(right), "date": now()[:10]}
    )
    written = found["gain"] > found["noise"] and found["confirmed"]
    put(path, key, entry if written else None)
    return {"ok": True, "written": written, **found, "built-in": list(built_in), "tiles": list(found["tiles"])}


def fastest(
    target: Target, built_in: tuple[int, ...], others: Sequence[tuple[int, ...]], device: str
) -> dict[str, Any]:
    """The best of `others`, compared with the built-in tiles: timed with all of them, then with the best few, and once
    more with only the best."""
    key = target.key(torch.device(device))
    choices = {BUILT_IN: built_in, AGAIN: built_in, **{" ".join(map(str, tiles)): tiles for tiles in others}}
    call, calls = prepared(target, device, "large"), {}
    for name, tiles in choices.items():
        with table.using({key: tiles}):
            calls[name] = captured(call)
    first = {
        name: statistics.median(taken)
        for name, taken in samples_of(calls, FIRST_ROUNDS).items()
        if name not in (BUILT_IN, AGAIN)
    }
    finalists = sorted(first, key=lambda name: first[name])[:FINALISTS]
    samples = samples_of({name: calls[name] for name in (BUILT_IN, AGAIN, *finalists)}, ROUNDS)
    noise = max(LEAST_GAIN, *(abs(part - 1) for part in ratio(samples[AGAIN], samples[BUILT_IN])))
    relative = {name: ratio(samples[name], samples[BUILT_IN]).median for name in finalists}
    best = min(relative, key=lambda name: relative[name], default=BUILT_IN)
    confirmed = False
    if best != BUILT_IN and 1 - relative[best] > noise:
        samples = samples_of({name: calls[name] for name in (BUILT_IN, best)}, ROUNDS)
        confirmed = ratio(samples[best], samples[BUILT_IN]).high < 1 - noise
    return {
        "tiles": choices[best],
        "seconds": statistics.median(samples[best]),
        "built-in seconds": statistics.median(samples[BUILT_IN]),
        "gain": 1 - relative.get(best, 1.0),
        "noise": noise,
        "confirmed": confirmed,
    }


def samples_of(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a call; within a round, all tiles are timed in turn."""
    once = {name: taken[-1] for name, taken in interleave(calls, 3, "cuda").items()}
    repeats = {name: max(1, min(500, int(SAMPLE / max(seconds, 1e-7)))) for name, seconds in once.items()}
    return interleave(calls, rounds, "cuda", repeats)


def put(path: Path, key: table.Key, entry: Mapping[str, Any] | None) -> None:
    """The table with this entry in place of any other entry of its key, or without one."""
    others = [table.as_entry(*one) for one in table.entries(path) if one[0] != key]
    entries = sorted(
        [*others, *([] if entry is None else [entry])],
        key=lambda one: (one["kernel"], one["capability"], one["kind"], one["width"]),
    )
    write_json(path, {"cmab_kernels_tiles": table.FORMAT, "entries": entries})


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)

"""A synthetic run: the contents of a small file of results, with every kind of row."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.harness import ratio, spread
from bench.runs import Row, Run, load, save

MIB = 2**20
COMMIT = "0123456789" * 4
SDPA = "scaled_dot_product_attention"
EAGER = "eager torch"

Speed = Callable[[str, str], float]
"""(group, implementation) -> factor on its time."""


def unchanged(group: str, implementation: str) -> float:
    return 1.0


def run(seed: int = 0, speed: Speed = unchanged, noise: float = 0.02, **changes: Any) -> Run:
    """A run in which the fields in `changes` are replaced."""
    made = Run(
        date="2026-01-02T03:04:05+00:00",
        commit=COMMIT,
        dirty=False,
        quick=True,
        threads=2,
        device="cpu",
        processor="A processor <of 2 cores>",
        machine={"cores": 2, "system": "Linux", "native_instruction_set": "avx2", "torch_instruction_set": "AVX2"},
        versions={"python": "3.11.7", "cmab_kernels": "0.1.0", "torch": "2.13.0", "triton": None, "numpy": "2.3.5"},
        rates={"2": {"exponentials": 1e10, "memory": 2e10, "matrix": {"float32": 1e11}}},
        figures={"error of a million additions": 1e-15},
        notes=[],
        not_measured={"latent-forward-N1000000-naive": "needs 4.0 GiB, of 2.0 available"},
        rows=tuple(row for group in _groups(random.Random(seed), speed, noise) for row in group),
        path=Path("some.json"),
    )
    return replace(made, **changes)


def written(folder: Path, made: Run, name: str = "run") -> Run:
    """A run as it is read from its file."""
    save(made, folder / f"{name}.json")
    return load(folder / f"{name}.json")


def only(made: Run, wanted: Callable[[Row], bool]) -> Run:
    return replace(made, rows=tuple(row for row in made.rows if wanted(row)))


def edited(made: Run, group: str, implementation: str, **changes: Any) -> Run:
    """A run with fields of one row replaced."""
    wanted = (group, implementation)
    return replace(
        made,
        rows=tuple(replace(row, **changes) if (row.group, row.implementation) == wanted else row for row in made.rows),
    )


LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
WINDOWS = (64, 256, 1024, 4096)
Peers = dict[str, tuple[float, float, float | None]]
"""name -> seconds, MiB beyond the results, share of the floor"""


def _groups(draw: random.Random, speed: Speed, noise: float) -> Iterator[list[Row]]:
    cases = [_latent(keys=keys, backward=backward) for backward in (False, True) for keys in LENGTHS]
    cases += [_latent(width=width) for width in (8, 32, 64)]
    cases += [_latent(dtype=dtype) for dtype in ("bfloat16", "float16")]
    cases += [_step(window, landmarks) for landmarks in ("fixed", "continual") for window in WINDOWS]
    alone = {"group": "pinv-m16", "scan": "iterative_pinv", "baseline": None}
    cases.append((alone, {"m": 16, "B": 1, "dtype": "float32", "threads": 1}, {"native": (1e-5, 0.0, None)}))
    for heading, parameters, peers in cases:
        yield _rows(draw, speed, noise, heading, parameters, peers)


def _latent(
    keys: int = 100_000, width: int = 16, backward: bool = False, dtype: str = "float32"
) -> tuple[dict, dict, Peers]:
    """Attention of 128 queries: the time is linear in the keys; the naive form stores its scores, and does not fit at a
    million keys."""
    direction = "forward + backward" if backward else "forward"
    parameters = {"pass": direction, "dtype": dtype, "B": 1, "H": 4, "D": width, "L": 128, "N": keys, "threads": 2}
    seconds = 2e-7 * keys * (3 if backward else 1) * (16 + width) / 32 + 2e-5
    peers: Peers = {
        "native": (seconds, 0.6, 0.5),
        SDPA: (2.2 * seconds, 0.1, 0.23),
        "reference": (9 * seconds, keys / 500, 0.05),
    }
    if keys < 1_000_000:
        peers["naive"] = (8 * seconds, keys / 500, 0.06)
    name = f"latent-{direction.replace(' ', '')}-{dtype}-D{width}-N{keys}"
    return {"group": name, "scan": "latent_attention", "baseline": SDPA}, parameters, peers


def _step(window: int, landmarks: str) -> tuple[dict, dict, Peers]:
    """A token a call. At 4,096 tokens our kernel is slower, so that a report has a loss to show."""
    parameters = {"H": 1, "D": 64, "n": window, "m": 16, "landmarks": landmarks, "dtype": "float32", "threads": 1}
    seconds = 4e-6 if landmarks == "fixed" else 6e-6 + 1e-9 * window
    slower = 0.8 if window == 4096 else 4.0
    peers = {
        "native": (seconds, 0.1, 0.2),
        EAGER: (slower * seconds, 0.2, 0.05),
        "native, exact": (seconds * (1 + window / 500), 0.1, None),
    }
    return (
        {"group": f"step-{landmarks}-n{window}", "scan": "continual_nystrom_step", "baseline": EAGER},
        parameters,
        peers,
    )


def _rows(draw: random.Random, speed: Speed, noise: float, heading: dict, parameters: dict, peers: Peers) -> list[Row]:
    """A run is faster or slower as a whole, and so is each round."""
    rounds = [math.exp(draw.gauss(0, noise / 2)) for _ in range(9)]
    drift = {name: math.exp(draw.gauss(0, noise)) * speed(heading["group"], name) for name in peers}
    samples = {
        name: [seconds * drift[name] * slow * math.exp(draw.gauss(0, noise / 3)) for slow in rounds]
        for name, (seconds, _, _) in peers.items()
    }
    baseline = heading["baseline"]
    rows = []
    for name, (_, scratch, share) in peers.items():
        row = Row(
            **heading,
            implementation=name,
            parameters=parameters,
            seconds=spread(samples[name]),
            rounds=len(rounds),
            repeats=1,
            extra_memory=int((scratch + 0.03) * MIB),
            result_memory=int(0.03 * MIB),
            flops=12_800,
            bytes=1200,
            error=3e-7,
            ratio=ratio(samples[name], samples[baseline]) if baseline else None,
        )
        row = replace(row, speed_up=ratio(samples[name], samples["native"]) if row.peer else None)
        rows.append(replace(row, floor=share * row.seconds.median, bound="exponentials") if share else row)
    return rows

"""A run that nobody measured: what a file of results holds, small, with every kind of row."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MIB = 2**20
COMMIT = "0123456789" * 4
SDPA = "scaled_dot_product_attention"
EAGER = "eager torch"

Raw = dict[str, Any]
Speed = Callable[[str, str], float]
"""(group, implementation) -> factor on its time."""


def unchanged(group: str, implementation: str) -> float:
    return 1.0


def run(seed: int = 0, speed: Speed = unchanged, noise: float = 0.02, **top: Any) -> Raw:
    """The JSON of a run; `top` replaces what stands beside its rows."""
    draw = random.Random(seed)
    rows = [row for group in _groups(draw, speed, noise) for row in group]
    info = {
        "cpu": {"brand_raw": "A processor <of 2 cores>", "features": ["avx2"]},
        "cores": 2,
        "system": "Linux",
        "versions": {"python": "3.11.7", "cmab_kernels": "0.1.0", "torch": "2.13.0", "triton": None, "numpy": "2.3.5"},
        "native_instruction_set": "avx2",
        "torch_instruction_set": "AVX2",
        "native_build": {"built": True, "reason": ""},
    }
    return {
        "cmab_kernels_bench": 1,
        "quick": True,
        "threads": 2,
        "device": "cpu",
        "rates": {"2": {"exponentials": 1e10, "memory": 2e10, "matrix": {"float32": 1e11}}},
        "figures": {"error of a million additions": 1e-15},
        "not_measured": {"latent-forward-N1000000-naive": "needs 4.0 GiB, of 2.0 available"},
        "machine_info": info,
        "commit_info": {"id": COMMIT, "dirty": False, "branch": "main", "time": "2026-01-01T00:00:00"},
        "datetime": "2026-01-02T03:04:05+00:00",
        "version": "5.3.1",
        "benchmarks": rows,
    } | top


def write(path: Path, raw: Raw) -> Path:
    path.write_text(json.dumps(raw))
    return path


LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
WINDOWS = (64, 256, 1024, 4096)


def _groups(draw: random.Random, speed: Speed, noise: float) -> Iterator[list[Raw]]:
    for backward in (False, True):
        for keys in LENGTHS:
            yield _latent(draw, speed, noise, keys=keys, backward=backward)
    for width in (8, 32, 64):
        yield _latent(draw, speed, noise, width=width)
    for dtype in ("bfloat16", "float16"):
        yield _latent(draw, speed, noise, dtype=dtype)
    for landmarks in ("fixed", "continual"):
        for window in WINDOWS:
            yield _step(draw, speed, noise, window, landmarks)
    yield _alone(draw, speed, noise)


def _latent(
    draw: random.Random, speed: Speed, noise: float, keys: int = 100_000, width: int = 16, backward: bool = False, dtype: str = "float32"
) -> list[Raw]:
    """Attention of 128 queries: linear in the keys; the naive form stores its scores, and does not fit at a million keys."""
    direction = "forward + backward" if backward else "forward"
    parameters = {"pass": direction, "dtype": dtype, "B": 1, "H": 4, "D": width, "L": 128, "N": keys, "threads": 2}
    group = f"latent-{direction.replace(' ', '')}-{dtype}-D{width}-N{keys}"
    seconds = 2e-7 * keys * (3 if backward else 1) * (16 + width) / 32 + 2e-5
    peers = {"native": (seconds, 0.6, 0.5), SDPA: (2.2 * seconds, 0.1, 0.23), "reference": (9 * seconds, keys / 500, 0.05)}
    if keys < 1_000_000:
        peers["naive"] = (8 * seconds, keys / 500, 0.06)
    return _rows(draw, speed, noise, group, "latent_attention", parameters, peers, SDPA, keys * 128 * width * 4)


def _step(draw: random.Random, speed: Speed, noise: float, window: int, landmarks: str) -> list[Raw]:
    """A token a call. At 4,096 tokens ours is slower, so that a report has something to admit."""
    parameters = {"H": 1, "D": 64, "n": window, "m": 16, "landmarks": landmarks, "dtype": "float32", "threads": 1}
    seconds = 4e-6 if landmarks == "fixed" else 6e-6 + 1e-9 * window
    slower = 0.8 if window == 4096 else 4.0
    peers = {
        "native": (seconds, 0.1, 0.2),
        EAGER: (slower * seconds, 0.2, 0.05),
        "native, exact": (seconds * (1 + window / 500), 0.1, None),
    }
    return _rows(draw, speed, noise, f"step-{landmarks}-n{window}", "continual_nystrom_step", parameters, peers, EAGER, 12_800)


def _alone(draw: random.Random, speed: Speed, noise: float) -> list[Raw]:
    """A group of one scan, with nobody beside it."""
    parameters = {"m": 16, "B": 1, "dtype": "float32", "threads": 1}
    return _rows(draw, speed, noise, "pinv-m16", "iterative_pinv", parameters, {"native": (1e-5, 0.0, None)}, None, 200_000)


def _rows(
    draw: random.Random,
    speed: Speed,
    noise: float,
    group: str,
    scan: str,
    parameters: Raw,
    peers: dict[str, tuple[float, float, float | None]],
    baseline: str | None,
    flops: int,
) -> list[Raw]:
    """`peers`: name -> seconds, MiB beyond the results, share of the floor. A run is faster or slower as a whole, and so is each round."""
    rounds = [math.exp(draw.gauss(0, noise / 2)) for _ in range(9)]
    drift = {name: math.exp(draw.gauss(0, noise)) * speed(group, name) for name in peers}
    samples = {
        name: [seconds * drift[name] * slow * math.exp(draw.gauss(0, noise / 3)) for slow in rounds]
        for name, (seconds, _, _) in peers.items()
    }
    rows = []
    for name, (_, scratch, share) in peers.items():
        median = statistics.median(samples[name])
        info = {
            "implementation": name,
            "ours": name.split(",")[0] == "native",
            "scan": scan,
            "parameters": parameters,
            "extra_memory": int((scratch + 0.03) * MIB),
            "result_memory": int(0.03 * MIB),
            "flops": flops,
            "bytes": 12 * flops // 128,
            "error": 3e-7,
            "threads": parameters["threads"],
            "repeats": 1,
            "gflops": flops / median / 1e9,
            "provenance": {"device": "A processor <of 2 cores>", "cores": 2, "versions": {"torch": "2.13.0"}, "commit": COMMIT},
        }
        if share:
            info |= {"floor": share * median, "bound": "exponentials", "share": share}
        if baseline:
            info |= _ratio(samples[name], samples[baseline]) | {"baseline": baseline}
        low, _, high = statistics.quantiles(samples[name], n=4)
        stats = {"median": median, "q1": low, "q3": high, "rounds": len(rounds), "data": samples[name]}
        rows.append({"group": group, "name": f"bench[{group}-{name}]", "stats": stats, "extra_info": info})
    return rows


def _ratio(samples: list[float], baseline: list[float]) -> Raw:
    within = sorted(a / b for a, b in zip(samples, baseline, strict=True))
    low, _, high = statistics.quantiles(within, n=4, method="inclusive")
    return {"ratio": statistics.median(samples) / statistics.median(baseline), "ratio_quartiles": [low, high]}

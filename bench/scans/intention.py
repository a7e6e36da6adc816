"""Family C: what is measured. One thread where nothing else is said, as its targets say."""

from __future__ import annotations

from ..harness import Case
from .intention_layer import Layer, SigmaLayer
from .intention_module import IntentionModule
from .intention_solve import Inverse, Solve, SolveState
from .intention_state import Merge, Removal, Sums, Update
from .operators import DTYPES

WIDTHS = (16, 32, 64, 128)

LAYERS = [
    *(Layer(length, quick=length in (256, 16_384)) for length in (256, 1024, 4096, 16_384)),
    Layer(100_000, quick=True),
    Layer(1_000_000, quick=True),
    *(Layer(length, backward=True) for length in (256, 1024, 4096, 100_000)),
    Layer(1_000_000, backward=True, quick=True),
    *(Layer(4096, width=width) for width in WIDTHS if width != 64),
    *(Layer(4096, heads) for heads in (2, 8)),
    *(Layer(4096, batch=batch) for batch in (2, 8)),
    *(Layer(4096, dtype=dtype) for dtype in DTYPES),
    Layer(4096, threads=2),
]

SIGMA_LAYERS = [
    *(SigmaLayer(length, quick=length < 100_000) for length in (1000, 10_000, 100_000, 300_000)),
    *(SigmaLayer(length, backward=True) for length in (1000, 10_000, 100_000)),
    *(SigmaLayer(width=width) for width in (16, 128)),
    *(SigmaLayer(heads=heads) for heads in (2, 8)),
    *(SigmaLayer(queries=queries) for queries in (16, 1024)),
    SigmaLayer(batch=8),
    *(SigmaLayer(dtype=dtype) for dtype in DTYPES),
    SigmaLayer(threads=2),
]

STATES = [
    *(Sums(keys, quick=keys == 100_000) for keys in (1000, 10_000, 100_000, 1_000_000)),
    *(Sums(keys, backward=True) for keys in (10_000, 100_000)),
    *(Sums(width=width) for width in (16, 128)),
    *(Sums(heads=heads) for heads in (2, 8)),
    *(Sums(dtype=dtype) for dtype in DTYPES),
    Sums(threads=2),
    Update(4, 16, quick=True),
    *(Update(1, width) for width in (16, 64)),
    *(Update(4, 16, tokens=tokens) for tokens in (16, 256)),
    *(Removal(keys, quick=keys == 10_000) for keys in (100, 1000, 10_000, 100_000)),
    Removal(10_000, threads=2),
    *(Removal(10_000, width=width) for width in (16, 128)),
    *(Merge(states, quick=states == 2) for states in (2, 4, 8)),
    *(Merge(width=width) for width in (16, 32)),
    *(Merge(heads=heads) for heads in (1, 64)),
]

SYSTEMS = [
    *(Solve(width, width, 1024, quick=True) for width in WIDTHS),
    *(Solve(width, 1, 1024) for width in (16, 64)),
    *(Solve(32, 32, batch) for batch in (1, 64)),
    *(Solve(32, 32, 1024, dtype=dtype) for dtype in DTYPES),
    *(Solve(width, width, 1024, backward=True) for width in (16, 32, 64)),
    Solve(32, 32, 1024, threads=2),
    *(SolveState(width, width, 64, quick=width == 64) for width in WIDTHS),
    SolveState(64, 1, 64),
    *(SolveState(64, 64, batch) for batch in (1, 8)),
    SolveState(64, 64, 64, threads=2),
    *(Inverse(width, 1024, quick=width == 32) for width in WIDTHS),
    *(Inverse(32, batch) for batch in (1, 64)),
    *(Inverse(32, 1024, dtype=dtype) for dtype in DTYPES[:1]),
    Inverse(32, 1024, threads=2),
]

MODULES = [
    *(IntentionModule(length, quick=length == 1024) for length in (256, 1024, 4096, 16_384)),
    *(IntentionModule(length, backward=True) for length in (256, 1024, 4096)),
    *(IntentionModule(heads=heads) for heads in (2, 16)),
    *(IntentionModule(features=features) for features in (64, 512)),
    *(IntentionModule(batch=batch) for batch in (4, 16)),
    IntentionModule(threads=2),
]

CASES: list[Case] = [*LAYERS, *SIGMA_LAYERS, *STATES, *SYSTEMS, *MODULES]

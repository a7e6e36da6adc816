"""Family B: what is measured. Figures of streams are of one token; where landmarks follow the window, a call replaces one or more."""

from __future__ import annotations

from ..harness import Case
from .nystrom_layer import NystromLayer, Pinv
from .nystrom_module import ExactModuleStep, NystromModule, NystromModuleStep
from .nystrom_start import ExactStart, NystromStart
from .nystrom_step import BesideFull, ExactStep, NystromStep
from .operators import DTYPES

WINDOWS = (64, 256, 1024, 4096)

LAYERS = [
    *(NystromLayer(length, quick=length in (1024, 4096)) for length in (1024, 4096, 16_384, 65_536)),
    *(NystromLayer(length, backward=True) for length in (1024, 4096, 16_384)),
    *(NystromLayer(landmarks=landmarks) for landmarks in (16, 32, 128)),
    *(NystromLayer(width=width) for width in (16, 128)),
    *(NystromLayer(heads=heads) for heads in (1, 8)),
    NystromLayer(batch=4),
    *(NystromLayer(dtype=dtype) for dtype in DTYPES),
    NystromLayer(threads=1),
    *(Pinv(landmarks, quick=landmarks == 16) for landmarks in (8, 16, 32, 64)),
    *(Pinv(batch=batch) for batch in (16, 1024)),
    *(Pinv(landmarks, backward=True) for landmarks in (16, 64)),
    Pinv(64, 16),
    Pinv(64, 16, threads=2),
    *(Pinv(dtype=dtype) for dtype in DTYPES[:1]),
]

STEPS = [
    *(NystromStep(window, quick=True) for window in WINDOWS),
    *(NystromStep(window, fixed=False, calls=max(64, window // 16), quick=window == 64) for window in WINDOWS),
    *(NystromStep(block=block, calls=8, quick=block == 64) for block in (8, 64)),
    *(NystromStep(fixed=False, block=block, calls=8) for block in (8, 64)),
    *(NystromStep(window, retroactive=True) for window in (64, 256, 1024)),
    *(NystromStep(landmarks=landmarks) for landmarks in (4, 8, 32)),
    *(NystromStep(width=width) for width in (16, 128)),
    *(NystromStep(heads=heads, calls=calls) for heads, calls in ((16, 64), (256, 32))),
    NystromStep(heads=1024, calls=16),
    NystromStep(heads=1024, calls=16, threads=2, quick=True),
    NystromStep(heads=1024, calls=16, threads=2, fixed=False),
    *(NystromStep(dtype=dtype) for dtype in DTYPES),
    *(BesideFull(window, quick=window < 4096) for window in (120, 1024, 4096)),
    *(BesideFull(window, fixed=False, calls=window // 4) for window in (120, 1024, 4096)),
    *(ExactStep(window, quick=window == 120) for window in (120, 256, 1024, 4096)),
    *(ExactStep(window, retroactive=True, calls=16) for window in (120, 256, 512)),
    *(ExactStep(block=block, calls=8) for block in (8, 64)),
    *(ExactStep(width=width) for width in (32, 64)),
    *(ExactStep(heads=heads) for heads in (1, 128)),
    *(ExactStep(dtype=dtype) for dtype in DTYPES),
    ExactStep(heads=128, threads=2),
]

STARTS = [
    *(NystromStart(window, quick=window == 64) for window in WINDOWS),
    *(NystromStart(landmarks=landmarks) for landmarks in (4, 64)),
    *(NystromStart(heads=heads) for heads in (1, 256)),
    *(NystromStart(dtype=dtype) for dtype in DTYPES[:2]),
    NystromStart(fixed=True),
    *(ExactStart(window, quick=window == 64) for window in WINDOWS),
    *(ExactStart(heads=heads) for heads in (1, 256)),
    ExactStart(width=16),
]

MODULES = [
    *(NystromModule(length, quick=length == 1024) for length in (256, 1024, 4096, 16_384)),
    *(NystromModule(length, backward=True) for length in (256, 1024, 4096)),
    *(NystromModule(heads=heads) for heads in (1, 16)),
    *(NystromModule(features=features) for features in (64, 512)),
    NystromModule(landmarks=16),
    NystromModule(batch=8),
    NystromModule(threads=2),
    *(NystromModuleStep(window, calls=max(64, window // 16), quick=window == 64) for window in WINDOWS),
    *(NystromModuleStep(batch=batch) for batch in (4, 32)),
    *(NystromModuleStep(heads=heads) for heads in (1, 16)),
    NystromModuleStep(landmarks=4),
    *(ExactModuleStep(window, quick=window == 64) for window in WINDOWS),
]

CASES: list[Case] = [*LAYERS, *STEPS, *STARTS, *MODULES]

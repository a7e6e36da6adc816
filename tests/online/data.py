"""Examples of a noisy linear function, with weights."""

import numpy as np


def examples(
    rows: int = 60, targets: int = 2, seed: int = 0, offset: float = 3.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x (N, 5), y (N, E) or (N,) for one target, and weights (N,)."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 5)) + offset
    y = x @ random.normal(size=(5, targets)) + 7 + 0.3 * random.normal(size=(rows, targets))
    return x, y[:, 0] if targets == 1 else y, random.uniform(0.1, 2, size=rows)

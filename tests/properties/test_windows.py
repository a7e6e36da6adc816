"""A sliding window equals its recomputation, for any extents, chunks, dtype, layout and distribution."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from .drawn import WIDE, holds, seeds
from .windows import KINDS, LAYOUTS_OF_TOKENS, OUTPUTS, Stream, shapes, some_tokens, step


@holds(
    kind=st.sampled_from(KINDS),
    shape=shapes,
    window=st.integers(3, 17),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    output=st.sampled_from(OUTPUTS),
    dtype=st.sampled_from(WIDE),
    law=st.sampled_from(["normal", "ten times", "a spike"]),
    layout=st.sampled_from(LAYOUTS_OF_TOKENS),
    seed=seeds,
)
def test_a_window_equals_its_recomputation(
    kind: str,
    shape: tuple[int, ...],
    window: int,
    chunks: list[int],
    output: str,
    dtype: torch.dtype,
    law: str,
    layout: str,
    seed: int,
    impl: str,
) -> None:
    torch.manual_seed(seed)
    law = law if kind != "continual" else "normal"  # the means of large tokens are close together
    stream = Stream(kind, window, 3, some_tokens(shape, window, dtype, law, layout))
    state, taken = stream.start(), window
    for chunk in chunks:
        tokens = some_tokens(shape, chunk, dtype, law, layout)
        stream = stream.with_more(tokens)
        out, state = step(state, tokens, output, impl)
        difference = (out.double() - stream.outputs(taken, output)).abs().max()
        assert float(difference) <= stream.allowed()
        taken += chunk
        assert (state.position == taken).all()


@holds(kind=st.sampled_from(KINDS), shape=shapes, cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=seeds)
def test_chunking_changes_no_bit(kind: str, shape: tuple[int, ...], cuts: list[int], seed: int, impl: str) -> None:
    """Tokens in chunks, or one by one: native steps give the same bits, and the definition gives the same up to
    rounding."""
    torch.manual_seed(seed)
    stream = Stream(kind, 5, 3, some_tokens(shape, 5, torch.float32, "normal", "heads inside"))
    tokens, outs = some_tokens(shape, sum(cuts), torch.float32, "normal", "heads inside"), []
    for sizes in (cuts, [1] * sum(cuts)):
        state, several = stream.start(), []
        for parts in zip(*(t.split(sizes, 2) for t in tokens), strict=True):
            out, state = step(state, parts, "single", impl)
            several.append(out)
        outs.append(torch.cat(several, 2))
    if impl == "native":
        assert torch.equal(*outs)
    assert float((outs[0] - outs[1]).abs().max()) <= stream.with_more(tokens).allowed()

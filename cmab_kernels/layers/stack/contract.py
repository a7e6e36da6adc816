"""The contracts of stacked blocks: their arguments in the order of the schema."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class BlockStack(NamedTuple):
    """The arguments of `cmab::block_stack`, whose results are (y, out, lse, kept) for latents x (B, L, C).

    y is x after the last block, or with `all_blocks` (K, B, L, C), x after each block. (out, lse),
    (K B, H, M, C / H) and (K B, H, M), is the state of the first cross-attentions over the incoming
    state and the inputs (B, N, C). Without inputs both are empty, and y is computed from state_out
    alone. `kept` is for the backward pass, and empty unless `keep`.
    """

    x: Tensor
    inputs: Tensor | None
    key_padding_mask: Tensor | None
    state_out: Tensor | None
    state_lse: Tensor | None
    parameters: tuple[Tensor, ...]
    num_heads: int
    eps: float
    residual: str
    all_blocks: bool = False
    keep: bool = False
    impl: str = "auto"


class BlockStackRead(NamedTuple):
    """The arguments of `cmab::block_stack_read`, whose results are the (out, lse) of `cmab::block_stack`.

    `parameters` are the first `reference.OF_READING` of each block.
    """

    inputs: Tensor
    key_padding_mask: Tensor | None
    state_out: Tensor | None
    state_lse: Tensor | None
    parameters: tuple[Tensor, ...]
    num_heads: int
    eps: float
    impl: str = "auto"


class BlockStackBackward(NamedTuple):
    """The arguments of `cmab::block_stack_backward`, whose result is a list of gradients: of x, inputs, state_out and
    the parameters. Gradients that are not in `needs` are empty."""

    dy: Tensor
    x: Tensor
    inputs: Tensor | None
    key_padding_mask: Tensor | None
    state_out: Tensor | None
    out: Tensor
    lse: Tensor
    kept: Tensor
    parameters: tuple[Tensor, ...]
    num_heads: int
    eps: float
    residual: str
    all_blocks: bool
    needs: tuple[bool, ...]
    impl: str = "auto"


def kept_bytes(given: BlockStack, blocks: int) -> int:
    """Return the bytes of `kept` for this number of blocks, as csrc/layers/block_stack.cpp lays them out and checks."""
    (batch, latents, width), element = given.x.shape, given.x.dtype.itemsize
    own, other, of_sum = batch * given.parameters[0].shape[0], batch * latents, 8 if element == 8 else 4

    def rows(count: int, bytes_of_row: int) -> int:
        return (count * bytes_of_row + 63) // 64 * 64  # each piece begins at a multiple of 64 bytes

    total = 4 * rows(own, width * element) + 4 * rows(other, width * element)
    for queries, keys in ((own, own), (other, own), (other, other)):
        total += 2 * rows(queries, width * of_sum) + 2 * rows(keys, width * of_sum) + rows(queries, given.num_heads * 8)
    return blocks * total

"""Constant Memory Attention Blocks in one native call, when no submodule has been replaced or hooked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import LayerNorm, Linear

from ...attention import AttentionState, check_state
from ...layers import BlockStack, BlockStackRead, block_stack_op, block_stack_read_op, stacked
from ...runtime.backends import kernel
from ...runtime.dtypes import state_dtype
from ...runtime.tracing import is_differentiated, is_observed, may_bypass_dispatcher
from ..parts import has_other_forwards, layer_impl, plain_parameters
from .layers import CrossAttention, FeedForward, LatentLayer, SelfAttention


class Block(Protocol):
    """The submodules of a `CMAB`."""

    latents: nn.Parameter
    compress: LatentLayer
    retrieve: LatentLayer


def forward(
    blocks: Sequence[Block], inputs: Tensor, latents: Tensor, mask: Tensor | None, *, all_blocks: bool = False
) -> Tensor | None:
    """Return the latents (B, L, C) after all blocks, or with `all_blocks` (K, B, L, C), the latents after each block.

    Return None if the modules must be called one by one.
    """
    found = _found(blocks, latents, inputs, mask)
    return None if found is None else _latents(found, latents, inputs.shape[0], (inputs, mask, None), all_blocks)


def attend(blocks: Sequence[Block], latents: Tensor, outs: Tensor, *, all_blocks: bool = False) -> Tensor | None:
    """Return what `forward` returns, from `outs` (K B, H, M, D), the first cross-attentions' outputs."""
    found = _found(blocks, latents, outs)
    batch = outs.shape[0] // len(blocks)
    return None if found is None else _latents(found, latents, batch, (None, None, outs), all_blocks)


def update(
    blocks: Sequence[Block],
    inputs: Tensor,
    latents: Tensor,
    state: AttentionState | None,
    mask: Tensor | None,
    lead: tuple[int, ...] = (),
) -> tuple[Tensor, AttentionState] | None:
    """Return the latents after all blocks, and the state of the first cross-attentions.

    The state covers the inputs and those of `state`. `lead` is (K,) if a state has that dimension. Return None if a
    gradient may be taken, or if the modules must be called one by one.
    """
    found = _found(blocks, latents, inputs, mask)
    if found is None:
        return None
    shape, given = _before(blocks, inputs, state, lead)
    if is_differentiated(inputs, latents, *given, *found[0]) or not may_bypass_dispatcher(*given):
        return None
    tensors: list[Any] = [_over_batch(latents, inputs.shape[0]), inputs, mask, *given]
    y, out, lse, _ = block_stack_op.unseen(_stack(tensors, found))
    return y, AttentionState(out.view(shape), lse.view(shape[:-1]))


def read(
    blocks: Sequence[Block],
    inputs: Tensor,
    state: AttentionState | None,
    mask: Tensor | None,
    lead: tuple[int, ...] = (),
) -> AttentionState | None:
    """Return only the state that `update` returns, or None where `update` returns None."""
    found = _found(blocks, blocks[0].latents, inputs, mask, ("compress",), _READING, _READ_OF_SIZE)
    if found is None:
        return None
    shape, given = _before(blocks, inputs, state, lead)
    if is_differentiated(inputs, *given, *found[0]) or not may_bypass_dispatcher(*given):
        return None
    parameters, num_heads, eps, _ = found
    out, lse = block_stack_read_op.unseen(BlockStackRead(inputs, mask, *given, parameters, num_heads, eps, "native"))
    return AttentionState(out.view(shape), lse.view(shape[:-1]))


def _latents(
    found: Found,
    latents: Tensor,
    batch: int,
    read: tuple[Tensor | None, Tensor | None, Tensor | None],
    all_blocks: bool,
) -> Tensor:
    """Return the latents after the blocks. `read` holds the inputs with their mask, or the
    attention outputs over the inputs."""
    x = _over_batch(latents, batch)
    given = _stack([x, *read, None], found, all_blocks)
    if is_differentiated(x, given.inputs, given.state_out, *given.parameters):
        return stacked(given)
    y: Tensor = block_stack_op.unseen(given)[0]
    return y


def _stack(tensors: Sequence[Any], found: Found, all_blocks: bool = False) -> BlockStack:
    given: list[Any] = [*tensors, *found, all_blocks, False, "native"]
    return BlockStack(*given)


def _before(
    blocks: Sequence[Block], inputs: Tensor, state: AttentionState | None, lead: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[Any, Any]]:
    """Return the shape (..., B, H, M, D) of a state's `out`, and the state's parts in the form of the native call."""
    heads, (block_latents, width) = blocks[0].compress.cross_attention.num_heads, blocks[0].latents.shape
    shape = (*lead, inputs.shape[0], heads, block_latents, width // heads)
    if state is None:
        return shape, (None, None)
    check_state(state, shape, state_dtype(inputs.dtype), inputs.device)
    return shape, (state.out.flatten(0, 1), state.lse.flatten(0, 1)) if lead else state


def _over_batch(latents: Tensor, batch: int) -> Tensor:
    return latents if latents.dim() == 3 else latents.expand(batch, -1, -1)


# ---- the parameters

Found = tuple[Any, ...]
"""(tuple of the parameters of all blocks, number of heads, eps of all norms, residual)"""

Leaves = tuple[tuple[str, type[nn.Module], bool], ...]
Layers = tuple[tuple[str, type[nn.Module], Leaves], ...]
_FEED_FORWARD = (("norm", LayerNorm, True), ("expand", Linear, True), ("contract", Linear, True))
_PROJECTIONS = (*((name, Linear, False) for name in ("query", "key", "value")), ("output", Linear, True))
_SELF_ATTENTION = (("norm", LayerNorm, True), *_PROJECTIONS)
_CROSS_ATTENTION = (("norm", LayerNorm, True), ("context_norm", LayerNorm, True), *_PROJECTIONS)
"""The modules of a layer, their classes, and whether they have a bias, in the order of `layers.stack`."""
_HALF: Layers = (
    ("cross_attention", CrossAttention, _CROSS_ATTENTION),
    ("cross_feed_forward", FeedForward, _FEED_FORWARD),
    ("self_attention", SelfAttention, _SELF_ATTENTION),
    ("self_feed_forward", FeedForward, _FEED_FORWARD),
)
"""The layers of a `LatentLayer`, their classes and modules, also in the order of `layers.stack`."""
_READING: Layers = (("cross_attention", CrossAttention, _CROSS_ATTENTION[:-1]),)
_PLAIN = {nn.Parameter, Tensor}
_is_negated = Tensor.is_neg
_TELLING = {"query": "square", "value": "square", "expand": "hidden"}


def _places(halves: int, layers: Layers) -> dict[int, str]:
    """Map the index in `_found` of each tensor that shows a size of its block to a name of that
    size.

    Tensors with the same name must have the same shape.
    """
    places, at = {0: "latents"}, 1
    for name, _, has_bias in (leaf for _, _, leaves in layers * halves for leaf in leaves):
        if name in _TELLING:
            places[at] = _TELLING[name]
        at += 1 + has_bias
    return places


_OF_SIZE = _places(2, _HALF)
_READ_OF_SIZE = _places(1, _READING)


def _found(
    blocks: Sequence[Block],
    latents: Tensor,
    read: Tensor,
    mask: Tensor | None = None,
    halves: Sequence[str] = ("compress", "retrieve"),
    layers: Layers = _HALF,
    places: Mapping[int, str] = _OF_SIZE,
) -> Found | None:
    """Return the block latents, the parameters of these layers in the halves of each block, and the settings.

    Return None if one call cannot replace the modules. This holds in five cases: the call is
    observed; there is no kernel; a module or a layer was replaced or hooked; a parameter is absent,
    of a subclass, or lazily negated; or the blocks differ in settings or sizes. A compiler, for
    example, observes the call: it cannot follow the C++ code that collects the parameters, so it
    compiles the layers as one operator each. `read` is the inputs, or the attention's output over
    the inputs. The tensors at `places` show the sizes.
    """
    if is_observed() or layer_impl(latents) != "native" or not may_bypass_dispatcher(latents, read, mask):
        return None
    if not latents.numel() or not read.shape[0] or not blocks[0].latents.shape[0]:
        return None
    first = blocks[0].compress.cross_attention
    if (
        not kernel("layers.stack", "native", "reads_heads")(latents.shape[-1] // first.num_heads)
        or has_other_forwards()
    ):
        return None
    collect = kernel("layers.stack", "native", "collect_parameters")
    tensors: list[Tensor] = []
    eps: set[float] = set()
    settings = {"num_heads": first.num_heads, "residual": first.residual}
    for block in blocks:
        if type(block.latents) not in _PLAIN:
            return None
        tensors.append(block.latents)
        for half in (getattr(block, name) for name in halves):
            if plain_parameters(half, LatentLayer) is None:
                return None
            if not collect(modules=half._modules, layers=layers, settings=settings, tensors=tensors, eps=eps):
                return None
    if any(map(_is_negated, tensors)):  # the memory holds negated values, which only torch's dispatcher resolves
        return None
    if len(eps) != 1 or not _of_one_size(tensors, len(blocks), places):
        return None
    return tuple(tensors), first.num_heads, eps.pop(), first.residual


def _of_one_size(tensors: list[Tensor], blocks: int, places: Mapping[int, str]) -> bool:
    """Return whether all blocks have the same sizes. A block may have been replaced, or have lost heads or columns."""
    first, *others = (
        [tensors[at + place].shape for place in places] for at in range(0, len(tensors), len(tensors) // blocks)
    )
    width = tensors[0].shape[1]
    sizes = {**dict(zip(places.values(), first, strict=True)), "square": (width, width)}
    return [sizes[name] for name in places.values()] == first and all(other == first for other in others)

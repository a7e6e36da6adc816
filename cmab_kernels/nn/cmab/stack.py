"""A stack of Constant Memory Attention Blocks that reads its inputs once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...attention import (
    NO_CHUNK,
    AttentionState,
    Removal,
    attention_state_of_chunks,
    projected_attention_state,
    subtract_state,
)
from ...runtime.checks import as_flag, check_count, kind_of, mismatch
from ..constructors import naming_options
from ..parts import computed, own_parameters, plain_parameters, projects_inside
from . import one_call
from .block import CMAB, calls_compress
from .chunks import callers_modes, check_source, progress_bar, read_chunks
from .streaming import StreamingBlocks, check_inputs, check_latents
from .window import own_stream


class CMABStack(StreamingBlocks):
    """The papers' stack of `CMAB`s. The result equals that of its `blocks` run in sequence on each other's latents.

    Only the block latents of a `CMAB` read the inputs, and the previous block does not change them. So one pass over
    the inputs serves the first cross-attentions of all blocks. All other layers have a constant cost. Source: Memory
    Efficient Neural Processes via Constant Memory Attention Block (Feng et al., ICML 2024), section 4.

    Args:
        dim, num_latents, num_heads, ff_dim, device, dtype, residual, window: as in `CMAB`, the same for all blocks.
        depth: K, the number of blocks, at least 1 (`ValueError` otherwise).

    Arguments, errors and streams are those of `CMAB`. One state covers all blocks: out (K, B, H, L_B, dim / H) and lse
    (K, B, H, L_B). The operator normalises and projects the inputs inside. Memory therefore does not grow with N, in
    training either, apart from the inputs' own gradient (on a GPU within the sizes that `CMAB` names).

    `blocks` is a `torch.nn.ModuleList` of the `CMAB`s and holds their parameters: `load_state_dict` takes
    `blocks.0.latents` and so on. You may add, replace and delete blocks. The module's own stream then starts again. If
    blocks differ in the number of latents or in the heads that read the inputs, only `forward` runs. Streams raise a
    `ValueError`, because one state of all blocks has one shape.

    >>> stack = cmab_kernels.nn.CMABStack(dim=16, num_latents=8, num_heads=2, depth=3).eval()
    >>> points, latents = torch.randn(1, 1000, 16), torch.randn(4, 16)
    >>> with torch.no_grad():
    ...     whole, one_by_one = stack(points, latents), latents
    ...     for block in stack.blocks:
    ...         one_by_one = block(points, one_by_one)
    ...     for chunk in points.split(300, dim=1):
    ...         streamed = stack.update(chunk, latents).latents
    >>> torch.allclose(whole, one_by_one, atol=1e-5), torch.allclose(whole, streamed, atol=1e-5)
    (True, True)
    """

    _streamed: tuple[nn.Module, ...] = ()
    """The result of `_readers` for the blocks whose state the stream holds. It is empty in a stack
    that version 0.1.0 pickled."""

    @naming_options
    def __init__(
        self,
        dim: int,
        num_latents: int,
        num_heads: int,
        depth: int,
        ff_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        residual: str = "input",
        window: int | None = None,
    ) -> None:
        super().__init__()
        depth = check_count("depth", depth)
        self.blocks = nn.ModuleList(
            CMAB(dim, num_latents, num_heads, ff_dim, device, dtype, residual=residual) for _ in range(depth)
        )
        self.stream = own_stream(
            window, num_heads, num_latents, dim // num_heads, blocks=depth, device=device, dtype=dtype
        )
        self._streamed = _readers(self.blocks)

    def forward(
        self, inputs: Tensor, latents: Tensor, *, key_padding_mask: Tensor | None = None, all_blocks: bool = False
    ) -> Tensor:
        """Return the latents (B, L_I, dim) after the last block; with `all_blocks`, (K, B, L_I, dim) after each block.

        `forward` reads and writes no state. Plain blocks share one pass over the inputs. If a block has hooks or a
        wrapper, the blocks are called one after the other.
        """
        all_blocks = as_flag("all_blocks", all_blocks)
        # A hook must get the block itself, not a stand-in. The block then computes its parametrizations.
        if all(own_parameters(block, type(block)) is not None for block in self.blocks):
            self = self._computed()
            self._check(inputs, latents, key_padding_mask)
            together = self._together(inputs, latents, key_padding_mask, all_blocks)
            if together is not None:
                return together
        after = []
        for block in self.blocks:
            latents = block(inputs, latents, key_padding_mask=key_padding_mask)
            after.append(latents)
        return torch.stack(after) if all_blocks else latents

    def read(
        self, new_inputs: Tensor, state: AttentionState | None = None, *, key_padding_mask: Tensor | None = None
    ) -> AttentionState:
        """Return the state of the new inputs and the inputs of `state`, in time O(new inputs).

        `retrieve` computes latents from the returned state. With `state` None there are no earlier inputs. The module's
        own stream is neither read nor written.
        """
        self = self._computed()
        self._check_streamed()
        latents = self._blocks[0].latents
        check_inputs(new_inputs, latents, key_padding_mask, latents)
        return self._read(new_inputs, state, key_padding_mask)

    def unread(self, old_inputs: Tensor, state: AttentionState, *, key_padding_mask: Tensor | None = None) -> Removal:
        """Return the state without `old_inputs`, and which rows are accurate. `remove` also computes the latents."""
        self = self._computed()
        self.stream._check(state)
        return subtract_state(state, self.read(old_inputs, key_padding_mask=key_padding_mask))

    def init_state(self, batch: int) -> AttentionState:
        """Return the state of no inputs, to start a stream that the caller keeps.

        out is (K, batch, H, L_B, dim / H), and lse is (K, batch, H, L_B).
        """
        self._follow_blocks()
        return super().init_state(batch)

    def retrieve(self, latents: Tensor, state: AttentionState, *, all_blocks: bool = False) -> Tensor:
        """Return the latents (B, L_I, dim) after the last block, from latents (B, L_I, dim) or (L_I, dim) and a state.

        With `all_blocks` the result is (K, B, L_I, dim), the latents after each block. The papers' decoders attend to
        the latents of every block. A state or latents that do not fit the module raise a `ValueError` or `TypeError`.
        """
        self, all_blocks = self._computed(), as_flag("all_blocks", all_blocks)
        self._check_streamed()
        self.stream._check(state)
        check_latents(latents, state.lse.shape[1], "state", self._blocks[0].latents)
        return self._retrieve(latents, state, all_blocks)

    def encode(
        self,
        chunks: Any,
        state: AttentionState | None = None,
        *,
        progress: bool | Callable[[int, AttentionState], None] = False,
    ) -> AttentionState:
        """Return the state of inputs that come in chunks, by one pass for all blocks.

        `retrieve` computes latents from the returned state.

        Args:
            chunks: a tensor or a NumPy array (N, dim) or (B, N, dim), which may be memory-mapped; an Arrow table or an
                open Arrow file (`pyarrow.ipc.open_file`), whose columns are the features; or any iterable of tensors,
                arrays or batches of a table (n, dim) or (B, n, dim), such as a `DataLoader`. If the iterable yields
                tuples, `encode` takes the first entry of each. Arrays are split into chunks and cast to the module's
                dtype. A thread fetches the next chunk during the computation of the current one, in the caller's grad
                mode and autocast. An iterable may write each chunk to the same memory.
            state: the state of earlier inputs. None means that there are none.
            progress: True shows a bar, with tqdm if it is installed. A function is called after each chunk with the
                number of chunks read and their state. Save the state there. After a stop, continue from the saved state
                with the remaining chunks; the result has the same bits. A stop waits for the chunk that the thread is
                fetching. That chunk is lost to a caller who continues with the same iterator, so make a new iterator.

        With grad mode on, the state has gradients to the parameters and to `state`, but not to the inputs. The backward
        pass reads the chunks a second time for these gradients, and keeps nothing of the first pass. The second reading
        must yield the same chunks. An iterator can be read only once, so it raises a `ValueError`. The module's own
        stream is neither read nor written; `stack.stream.state = stack.encode(...)` under `torch.no_grad()` starts it.
        Transforms of `torch.func` and forward mode differentiate each chunk's `read` instead, also in the inputs, and
        keep the chunks. Autograd does the same where the norms or projections must be called one by one: they have
        hooks, are of another class, or hold quantised weights. A chunk that does not fit raises a `ValueError` or
        `TypeError` that names the chunk.

        >>> stack = cmab_kernels.nn.CMABStack(dim=16, num_latents=8, num_heads=2, depth=2)
        >>> data = torch.randn(10_000, 16).numpy()
        >>> state = stack.encode(data)
        >>> stack.retrieve(torch.randn(4, 16), state).sum().backward()
        >>> state.out.shape, stack.blocks[1].latents.grad.abs().max() > 0
        (torch.Size([2, 1, 2, 8, 8]), tensor(True))
        """
        self = self._computed()
        self._check_streamed()
        weight = self._blocks[0].latents
        if not isinstance(progress, bool) and not callable(progress):
            raise TypeError(mismatch("progress", kind_of(progress), "True, False or a function"))
        check_source(
            chunks, torch.is_grad_enabled() and (state is not None or any(p.requires_grad for p in self.parameters()))
        )
        if state is not None:
            self.stream._check(state)
        stacked = self._stacked()
        modes = callers_modes(weight.device)  # read here: inside autograd's forward and backward the modes differ

        def read() -> Iterator[Tensor]:
            return read_chunks(chunks, weight, modes, None if state is None else state.lse.shape[1])

        told = progress if callable(progress) else lambda *_: None
        with progress_bar(chunks) if progress is True else nullcontext(told) as after:
            if stacked is None:
                return self._read_each(read(), state, after)
            query, weights, norm = stacked
            return attention_state_of_chunks(query, read, *weights, context_norm=norm, state=state, after=after)

    def _read_each(
        self, chunks: Iterator[Tensor], state: AttentionState | None, after: Callable[..., Any]
    ) -> AttentionState:
        """Return what `encode` returns, but call the submodules of the blocks one by one."""
        for count, chunk in enumerate(chunks, 1):
            state = self._read(chunk, state, None)
            after(count, state)
        if state is None:
            raise ValueError(NO_CHUNK)
        return state

    def _computed(self) -> CMABStack:
        """Return the stack, or a stand-in with computed values if block latents have parametrizations (see `computed`).

        The stream then fits the current number of blocks, because callers may change the list `blocks`.
        """
        if not len(self.blocks):
            raise ValueError(mismatch("blocks", "no block", "at least one"))
        self._follow_blocks()
        if not any("parametrizations" in block._modules for block in self.blocks):
            return self
        stand_in = object.__new__(type(self))
        stand_in.__dict__ = {**self.__dict__, "blocks": list(map(computed, self.blocks))}
        return stand_in

    def _follow_blocks(self) -> None:
        """End the stream if `blocks` changed since the stream started. The next stream belongs to the new blocks."""
        readers = _readers(self.blocks)
        if len(readers) == len(self._streamed) and all(map(is_, readers, self._streamed)):
            return
        if self._streamed or self.stream.lead != (len(readers),):
            self.stream.state = None
        self.stream.lead, self._streamed = (len(readers),), readers

    def _save_to_state_dict(self, *args: Any) -> None:
        self._follow_blocks()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._follow_blocks()
        super()._load_from_state_dict(*args)

    @property
    def _blocks(self) -> list[CMAB]:
        return cast("list[CMAB]", list(self.blocks))

    def _stacked(self) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, float]] | None:
        """Return the queries (K, H, L_B, D) of the first cross-attentions, with their projections and norms stacked.

        Return None if the modules of a block must be called one by one.
        """
        layers = [(block.latents, block.compress.cross_attention) for block in self._blocks]
        parts = [layer.projections() for _, layer in layers]
        if any(part is None for part in parts):
            return None
        keys, values, norms = zip(*parts, strict=True)
        scales, shifts, (eps, *others) = zip(*norms, strict=True)
        sizes = {
            (latents.shape, layer.num_heads, key.shape, value.shape)
            for (latents, layer), key, value in zip(layers, keys, values, strict=True)
        }
        if len(sizes) > 1 or any(other != eps for other in others):  # one pass has one size and one eps
            return None
        query = torch.stack([layer.heads(layer.query, layer.norm(latents)) for latents, layer in layers])
        return query, (torch.stack(keys), torch.stack(values)), (torch.stack(scales), torch.stack(shifts), eps)

    def _together(
        self, inputs: Tensor, latents: Tensor, key_padding_mask: Tensor | None, all_blocks: bool
    ) -> Tensor | None:
        """Return what `forward` returns, by one pass over the inputs; None if the blocks must be called."""
        blocks = self._blocks
        if any(plain_parameters(block, CMAB) is None for block in blocks):
            return None
        result = one_call.forward(blocks, inputs, latents, key_padding_mask, all_blocks=all_blocks)
        if result is None and not any(map(calls_compress, blocks)):
            state = self._read_at_once(inputs, None, key_padding_mask)
            result = None if state is None else self._retrieve(latents, state, all_blocks)
        return result

    def _read(self, inputs: Tensor, state: AttentionState | None, key_padding_mask: Tensor | None) -> AttentionState:
        """Return one state that stacks the states of CA(L_B, X) of all blocks."""
        found = self._read_at_once(inputs, state, key_padding_mask)
        if found is not None:
            return found
        before = (
            [None] * len(self._blocks)
            if state is None
            else [AttentionState(*part) for part in zip(*state, strict=True)]
        )
        states = [block._read(inputs, one, key_padding_mask) for block, one in zip(self._blocks, before, strict=True)]
        if len({each.out.shape for each in states}) > 1:
            given = f"states of shapes {', '.join(str(tuple(each.out.shape)) for each in states)}"
            raise ValueError(
                mismatch(
                    "blocks", given, "one shape for the one state of all; let each block keep its own, by its `update`"
                )
            )
        return AttentionState(*(torch.stack(parts) for parts in zip(*states, strict=True)))

    def _read_at_once(
        self, inputs: Tensor, state: AttentionState | None, key_padding_mask: Tensor | None
    ) -> AttentionState | None:
        """Return what `_read` returns, by one pass over the inputs; None if each block must read the inputs itself."""
        found = one_call.read(self._blocks, inputs, state, key_padding_mask, self.stream.lead)
        if found is not None:
            return found
        if state is not None:
            self.stream._check(state)
        stacked = self._stacked()
        if stacked is None or not projects_inside(stacked[0], inputs, *stacked[1]):
            return None
        query, weights, norm = stacked
        return projected_attention_state(
            query, inputs, *weights, context_norm=norm, state=state, key_padding_mask=key_padding_mask
        )

    def _retrieve(self, latents: Tensor, state: AttentionState, all_blocks: bool = False) -> Tensor:
        """Apply to the latents all layers that follow the first cross-attention in each block."""
        result = one_call.attend(self._blocks, latents, state.out.flatten(0, 1), all_blocks=all_blocks)
        if result is not None:
            return result
        after = []
        for block, *own in zip(self._blocks, *state, strict=True):
            latents = block._retrieve(latents, AttentionState(*own))
            after.append(latents)
        return torch.stack(after) if all_blocks else latents


def _readers(blocks: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """Return the submodule of each block that reads the inputs; for a wrapper, return the wrapper.
    Shallow copies of a block share this submodule."""
    return tuple(getattr(block, "compress", block) for block in blocks)

"""A stack of Constant Memory Attention Blocks that reads its inputs once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...attention import NO_CHUNK, AttentionState, Removal, attention_state_of_chunks, projected_attention_state, subtract_state
from ...runtime.checks import check_count, kind_of, wrong
from ..parts import computed, plain_parameters, projects_inside
from ..stream import AttentionStream
from . import one_call
from .block import CMAB, calls_compress
from .chunks import callers_modes, check_source, progress_bar, read_chunks
from .streaming import StreamingBlocks, check_inputs, check_latents


class CMABStack(StreamingBlocks):
    """The papers' stack of `CMAB`s: equal to its `blocks` one after the other, each with the latents of the one before.

    Only the block latents of a `CMAB` read the inputs, and they do not depend on what the block before has made of the latents. So one pass
    over the inputs serves the first cross-attentions of all blocks; what follows has a constant cost. Source: Memory Efficient Neural
    Processes via Constant Memory Attention Block (Feng et al., ICML 2024), section 4.

    Args:
        dim, num_latents, num_heads, ff_dim, device, dtype, residual: as in `CMAB`, the same for all blocks.
        depth: K, the number of blocks, at least 1 (`ValueError` otherwise).

    Arguments, errors and streams are those of `CMAB`. A state is that of all blocks: out (K, B, H, L_B, dim / H), lse (K, B, H, L_B).
    Inputs are normed and projected inside the operator, so that memory does not grow with N, in training neither, except by the inputs'
    own gradient (on a GPU within the sizes that `CMAB` names).

    `blocks` is a `torch.nn.ModuleList` of the `CMAB`s, with their parameters: `load_state_dict` takes `blocks.0.latents` and so on. Blocks
    may be added to it, replaced and deleted; a stream begins anew then. Where they differ in the number of latents or in the heads that
    read the inputs, only `forward` runs: one state of all blocks has one shape (`ValueError`).

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
    """The `_readers` that the stream is of; unknown, and empty, in a stack that was pickled by 0.1.0."""

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
    ) -> None:
        super().__init__()
        depth = check_count("depth", depth)
        self.blocks = nn.ModuleList(CMAB(dim, num_latents, num_heads, ff_dim, device, dtype, residual=residual) for _ in range(depth))
        self.stream = AttentionStream(num_heads, num_latents, dim // num_heads, blocks=depth, device=device, dtype=dtype)
        self._streamed = _readers(self.blocks)

    def forward(self, inputs: Tensor, latents: Tensor, *, key_padding_mask: Tensor | None = None, all_blocks: bool = False) -> Tensor:
        """Return the latents (B, L_I, dim) after the last block, or (K, B, L_I, dim) after each with `all_blocks`.

        No state is read or written. Blocks that do more than their kind, with hooks or in a wrapper, are called one after the other.
        """
        self = self._computed()
        self._check(inputs, latents, key_padding_mask)
        blocks = self._blocks
        if all(plain_parameters(block, CMAB) is not None for block in blocks):
            result = one_call.forward(blocks, inputs, latents, key_padding_mask, all_blocks=all_blocks)
            if result is not None:
                return result
            state = None if any(map(calls_compress, blocks)) else self._read_at_once(inputs, None, key_padding_mask)
            if state is not None:
                return self._retrieve(latents, state, all_blocks)
        after = []
        for block in blocks:
            latents = block(inputs, latents, key_padding_mask=key_padding_mask)
            after.append(latents)
        return torch.stack(after) if all_blocks else latents

    def read(self, new_inputs: Tensor, state: AttentionState | None = None, *, key_padding_mask: Tensor | None = None) -> AttentionState:
        """Return the state of the inputs and those of `state`, in time O(new inputs); `retrieve` makes latents of it.

        With `state` None there are no earlier inputs: the module's own stream is neither read nor written.
        """
        self = self._computed()
        self._check_streamed()
        latents = self._blocks[0].latents
        check_inputs(new_inputs, latents, key_padding_mask, latents)
        return self._read(new_inputs, state, key_padding_mask)

    def unread(self, old_inputs: Tensor, state: AttentionState, *, key_padding_mask: Tensor | None = None) -> Removal:
        """Return the state without `old_inputs`, and which of its rows are accurate, as `remove` does, without retrieving."""
        self = self._computed()
        self.stream._check(state)
        return subtract_state(state, self.read(old_inputs, key_padding_mask=key_padding_mask))

    def init_state(self, batch: int) -> AttentionState:
        """Return the state of no inputs, to start a stream that the caller keeps: out (K, batch, H, L_B, dim / H), lse without dim / H."""
        self._follow_blocks()
        return super().init_state(batch)

    def retrieve(self, latents: Tensor, state: AttentionState, *, all_blocks: bool = False) -> Tensor:
        """Return the latents (B, L_I, dim) after the last block, from latents (B, L_I, dim) or (L_I, dim) and a state of the inputs.

        With `all_blocks` they are (K, B, L_I, dim), after each block: the papers' decoders attend to the latents of every block.
        `ValueError` or `TypeError` for a state or latents that do not fit the module.
        """
        self = self._computed()
        self._check_streamed()
        self.stream._check(state)
        check_latents(latents, state.lse.shape[1], "the state has", self._blocks[0].latents)
        return self._retrieve(latents, state, all_blocks)

    def encode(
        self,
        chunks: Any,
        state: AttentionState | None = None,
        *,
        progress: bool | Callable[[int, AttentionState], None] = False,
    ) -> AttentionState:
        """Return the state of inputs that come in chunks, all blocks in one pass; `retrieve` makes latents of it.

        Args:
            chunks: a tensor or a NumPy array (N, dim) or (B, N, dim), also a memory-mapped one; an Arrow table or an open Arrow file
                (`pyarrow.ipc.open_file`), whose columns are the features; or any iterable of tensors, arrays or batches of a table
                (n, dim) or (B, n, dim), such as a `DataLoader`, of whose tuples the first entry is taken. Arrays are cut, and are cast to
                the module's dtype. A thread fetches the next chunk while one is computed, in the caller's grad mode and autocast; an
                iterable may write each chunk to the same memory.
            state: the state of earlier inputs; None: there are none.
            progress: True shows a bar, with tqdm if it is installed. A function is called after each chunk with the number of chunks
                read and their state: save it there, and after a stop go on from it with the chunks that are left, to the same bits. A stop
                waits for the chunk that is being fetched, and whoever goes on with the same iterator has lost it: make a new one.

        With grad mode on, the state has gradients to the parameters and to `state`, and none to the inputs. For them the chunks are read
        a second time, in the backward pass, and nothing of the first is kept: they must come out the same, and an iterator, which can be
        read once only, is a `ValueError`. The module's own stream is neither read nor written; `stack.stream.state = stack.encode(...)`
        under `torch.no_grad()` starts it. Transforms of `torch.func` and forward mode differentiate each chunk's `read` instead, in the
        inputs too, and keep the chunks. So does autograd where the norms or projections are called one by one, because they have hooks,
        are of a kind of their own, or hold quantised weights. A chunk that does not fit is a `ValueError` or `TypeError` that names it.

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
            raise TypeError(wrong("progress", f"is {kind_of(progress)}", "True, False or a function is needed"))
        check_source(chunks, torch.is_grad_enabled() and (state is not None or any(p.requires_grad for p in self.parameters())))
        if state is not None:
            self.stream._check(state)
        stacked = self._stacked()
        modes = callers_modes(weight.device)  # here: within autograd's forward and backward there are others

        def read() -> Iterator[Tensor]:
            return read_chunks(chunks, weight, modes, None if state is None else state.lse.shape[1])

        told = progress if callable(progress) else lambda *_: None
        with progress_bar(chunks) if progress is True else nullcontext(told) as after:
            if stacked is None:
                return self._read_each(read(), state, after)
            query, weights, norm = stacked
            return attention_state_of_chunks(query, read, *weights, context_norm=norm, state=state, after=after)

    def _read_each(self, chunks: Iterator[Tensor], state: AttentionState | None, after: Callable[..., Any]) -> AttentionState:
        """Return what `encode` does, with the parts of the blocks called one by one."""
        for count, chunk in enumerate(chunks, 1):
            state = self._read(chunk, state, None)
            after(count, state)
        if state is None:
            raise ValueError(NO_CHUNK)
        return state

    def _computed(self) -> CMABStack:
        """Return the stack; where block latents have parametrizations, a stand-in with their values, as `computed` makes of a block.

        The stream is from now on that of as many blocks as there are in `blocks`, a list that may be changed.
        """
        if not len(self.blocks):
            raise ValueError(wrong("blocks", "is empty", "at least one is needed"))
        self._follow_blocks()
        if not any("parametrizations" in block._modules for block in self.blocks):
            return self
        stand_in = object.__new__(type(self))
        stand_in.__dict__ = {**self.__dict__, "blocks": list(map(computed, self.blocks))}
        return stand_in

    def _follow_blocks(self) -> None:
        """End the stream where `blocks` are others than those that it is of, and let the next be that of these."""
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
        """Return the queries (K, H, L_B, D) of the first cross-attentions, and their projections and context norms stacked.

        None if the modules of a block must be called one by one.
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

    def _read(self, inputs: Tensor, state: AttentionState | None, key_padding_mask: Tensor | None) -> AttentionState:
        """Return the states of CA(L_B, X) of all blocks as one."""
        found = self._read_at_once(inputs, state, key_padding_mask)
        if found is not None:
            return found
        before = [None] * len(self._blocks) if state is None else [AttentionState(*part) for part in zip(*state, strict=True)]
        states = [block._read(inputs, one, key_padding_mask) for block, one in zip(self._blocks, before, strict=True)]
        if len({each.out.shape for each in states}) > 1:
            given = f"have states of shapes {', '.join(str(tuple(each.out.shape)) for each in states)}"
            raise ValueError(wrong("blocks", given, "one state for all needs one shape; let each block keep its own, by its `update`"))
        return AttentionState(*(torch.stack(parts) for parts in zip(*states, strict=True)))

    def _read_at_once(self, inputs: Tensor, state: AttentionState | None, key_padding_mask: Tensor | None) -> AttentionState | None:
        """Return what `_read` does, by one pass over the inputs; None where the blocks must read them one by one."""
        found = one_call.read(self._blocks, inputs, state, key_padding_mask, self.stream.lead)
        if found is not None:
            return found
        if state is not None:
            self.stream._check(state)
        stacked = self._stacked()
        if stacked is None or not projects_inside(stacked[0], inputs, *stacked[1]):
            return None
        query, weights, norm = stacked
        return projected_attention_state(query, inputs, *weights, context_norm=norm, state=state, key_padding_mask=key_padding_mask)

    def _retrieve(self, latents: Tensor, state: AttentionState, all_blocks: bool = False) -> Tensor:
        """Take the latents through what follows the first cross-attention in each block."""
        result = one_call.attend(self._blocks, latents, state.out.flatten(0, 1), all_blocks=all_blocks)
        if result is not None:
            return result
        after = []
        for block, *own in zip(self._blocks, *state, strict=True):
            latents = block._retrieve(latents, AttentionState(*own))
            after.append(latents)
        return torch.stack(after) if all_blocks else latents


def _readers(blocks: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """The part of each block that reads the inputs, which a shallow copy shares with it; a wrapper without one as a whole."""
    return tuple(getattr(block, "compress", block) for block in blocks)

"""A stack of Transformer layers over the newest tokens of a stream; a step takes a token and returns an output."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...runtime.checks import check_count, kind_of, mismatch
from ..constructors import naming_options
from ..stream import Stream, with_own_streams
from .layer import ContinualEncoderLayer, LayerState, RetroactiveEncoderLayer
from .rows import Rows, absent_of
from .window import StaggeredWindow

Result = TypeVar("Result")


def _are_apart(layers: list[Any]) -> bool:
    """Whether the streams of the batch have different numbers of tokens in a layer."""
    return any(type(_stream(layer).held) is StaggeredWindow for layer in layers)


def _stream(layer: Any) -> Any:
    """Return the stream of a layer's attention, without torch's attribute lookup, which is slow."""
    return layer._modules["self_attn"]._modules["stream"]


class ContinualEncoder(nn.Module):
    """A stack of layers over a stream. Each layer takes the outputs of the previous layer as its tokens.

    Args:
        layer: a `ContinualEncoderLayer` or `RetroactiveEncoderLayer`. All layers are copies of it, as in
            `torch.nn.TransformerEncoder`.
        num_layers: L >= 1, or L >= 2 for retroactive layers.
        norm: a module for the outputs of the last layer, or None.

    `forward` takes a whole stream at once, with gradients, and returns the same outputs as the steps. The first output
    belongs to the first token that depends on `sequence_len` tokens. The methods are those of the layer. A state is a
    tuple of the states of the layers. In grad mode an error leaves the streams unchanged. A token that causes an error
    in the attention of the first layer also leaves them unchanged. Under `torch.no_grad()` a later error, for example
    for numbers that overflow in a later layer, ends the streams as `clean_state` does. Keeping them would need a copy
    of the windows at each step, which would cost more than the step.

    With a `ContinualEncoderLayer`, each layer reads the newest n outputs of the previous layer, as they were when
    computed. An output depends on L (n - 1) + 1 tokens, and all layers take O(n) per token, or O(m) with landmarks.
    With a `RetroactiveEncoderLayer`, an output depends on n tokens. It equals the output of
    `torch.nn.TransformerEncoder` for this window at its last token. The first layer takes a step, and the later layers
    recompute the window. The last layer computes only the newest token. If the landmarks of a retroactive encoder are
    continual, only layer 1 uses streaming landmarks; later layers recompute segment means of the window.

    Source: Continual Transformers: Redundancy-Free Attention for Online Inference (Hedegaard et al., 2023). The paper
    describes the retroactive kind.

    >>> layer = cmab_kernels.nn.ContinualEncoderLayer(16, 2, 32, batch_first=True, sequence_len=8, num_landmarks=4)
    >>> encoder = cmab_kernels.nn.ContinualEncoder(layer, num_layers=2).eval()
    >>> tokens = torch.randn(1, 20, 16)
    >>> trained = encoder(tokens)
    >>> with torch.no_grad():
    ...     streamed = encoder.forward_steps(tokens)
    >>> trained.shape, torch.allclose(trained, streamed, atol=1e-5)
    (torch.Size([1, 6, 16]), True)
    """

    @naming_options
    def __init__(self, layer: ContinualEncoderLayer, num_layers: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        if not isinstance(layer, ContinualEncoderLayer):
            raise TypeError(mismatch("layer", kind_of(layer), "a ContinualEncoderLayer or a RetroactiveEncoderLayer"))
        if not isinstance(norm, nn.Module | None):
            raise TypeError(mismatch("norm", kind_of(norm), "a torch.nn.Module or None"))
        num_layers = check_count("num_layers", num_layers)
        self.retroactive = isinstance(layer, RetroactiveEncoderLayer)
        if self.retroactive and num_layers < 2:
            raise ValueError(
                mismatch(
                    "num_layers",
                    num_layers,
                    "at least 2 for retroactive layers",
                )
            )
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(num_layers))
        self.norm = norm
        if self.retroactive:
            self._each()[-1].self_attn.output = "single"

    __copy__ = with_own_streams

    @property
    def sequence_len(self) -> int:
        """The number of tokens on which an output depends."""
        windows = [layer.sequence_len for layer in self._each()]
        return windows[0] if self.retroactive else 1 + sum(n - 1 for n in windows)

    def forward(self, src: Tensor) -> Tensor:
        """Return the outputs of a stream, in the layout of the layers."""
        if self.retroactive:
            return self._normed(self._read(self.layers[0](src), batched=src.dim() == 3))
        for layer in self.layers:
            src = layer(src)
        return self._normed(src)

    def forward_step(
        self, src: Tensor, update_state: bool = True, key_padding_mask: Tensor | None = None
    ) -> Tensor | None:
        """Take one more token (B, C), and return its output (B, C), or None before all windows are full."""
        layers = self._each()
        if key_padding_mask is not None or _are_apart(layers):
            first = layers[0].self_attn
            first._check_token(src=src)
            absent = absent_of(key_padding_mask, src, first.batch_first, one=True)
            out = self._through_apart(src.unsqueeze(-2 if first.batch_first else 0), update_state, absent)
            return None if out is None else out.squeeze(-2 if first.batch_first else 0)
        return self._through(layers, "forward_step", src, update_state, batched=2)

    def _forward_step(
        self, src: Tensor, prev_state: Sequence[Any] | None = None
    ) -> tuple[Tensor | None, tuple[Any, ...]]:
        """Take one more token after a state that the caller keeps, and return (output, state), as a layer does.

        All rows of the batch must have the same number of tokens.
        """
        layers, states = self._each(), self._parts_of(prev_state, "prev_state")
        windows = [part[1] if self.retroactive and part is not None else part for part in states]
        if any(type(window) is StaggeredWindow for window in windows):
            raise ValueError(mismatch("prev_state", "a StaggeredWindow", "rows with the same number of tokens"))
        tokens: Any = src
        for i, layer in enumerate(layers[:1] if self.retroactive else layers):
            tokens, states[i] = layer._forward_step(tokens, prev_state=states[i])
            if tokens is None:
                return None, tuple(states)
        return self._normed(self._read(tokens, src.dim() == 2) if self.retroactive else tokens), tuple(states)

    def forward_steps(
        self, src: Tensor, update_state: bool = True, key_padding_mask: Tensor | None = None
    ) -> Tensor | None:
        """Take T tokens in the layout of `forward`, and return the outputs of the tokens with full windows, or None.

        The windows of all layers must be full. Retroactive layers hold T windows during the call.
        """
        layers = self._each()
        if key_padding_mask is not None or _are_apart(layers):
            first = layers[0].self_attn
            first._check(None, src=src)
            return self._through_apart(src, update_state, absent_of(key_padding_mask, src, first.batch_first))
        return self._through(layers, "forward_steps", src, update_state, batched=3)

    def clean_state(self, rows: Rows | None = None) -> None:
        """Forget all tokens, or the tokens of some rows of the batch, as `ContinualAttention` does."""
        for layer in self._each():
            layer.clean_state(rows)

    @property
    def ready(self) -> Tensor | None:
        """A bool tensor (B,), True for rows of the batch with full windows in all layers; None
        before all layers have a token."""
        each = [layer.ready for layer in (self._each()[:1] if self.retroactive else self._each())]
        known = [ready for ready in each if ready is not None]
        return torch.stack(known).all(0) if len(known) == len(each) else None

    def get_state(self) -> tuple[LayerState | None, ...]:
        """Return the states of the layers, first to last."""
        return tuple(layer.get_state() for layer in self._each())

    def set_state(self, state: Sequence[LayerState | None] | None) -> None:
        """Continue from a state that `get_state` returned. None acts as `clean_state`."""
        parts = self._parts_of(state, "state")
        before = self._held()
        try:
            for layer, part in zip(self._each(), parts, strict=True):
                layer.set_state(part)
        except BaseException:
            self._put_back(before)
            raise

    def _parts_of(self, state: Any, name: str) -> list[Any]:
        """Return the states of the layers, None for no state."""
        parts = (None,) * len(self.layers) if state is None else state
        if not isinstance(parts, Sequence):
            raise TypeError(mismatch(name, kind_of(state), "a tuple of the states of the layers, from `get_state`"))
        if len(parts) != len(self.layers):
            raise ValueError(mismatch(name, f"{len(parts)} parts", f"one for each of {len(self.layers)} layers"))
        return list(parts)

    def _each(self) -> list[Any]:
        return list(self.layers)

    def _held(self) -> list[tuple[Stream, Any]]:
        return [(part, part.state) for part in self.modules() if isinstance(part, Stream)]

    def _put_back(self, held: list[tuple[Stream, Any]]) -> None:
        for stream, state in held:
            stream.hold(state)

    def _through_apart(self, src: Tensor, update_state: bool, absent: Tensor | None) -> Tensor | None:
        """Pass tokens through the layers if some rows of the batch have no token (`absent` (B, T)),
        or if the rows have different numbers of tokens.

        A layer has no token in a row where the layer before has no result.
        """
        layers = self._each()
        first = layers[0].self_attn
        along = -2 if first.batch_first else 0
        if absent is None:
            batch = src.shape[0 if first.batch_first else 1] if src.dim() == 3 else 1
            absent = torch.zeros(batch, src.shape[along], dtype=torch.bool, device=src.device)
        pairs = list(zip(src.unbind(along), absent.unbind(1), strict=True))
        # If there are several tokens, a later token may cause an error.
        before = None if update_state and len(pairs) == 1 else self._held()
        outs = self._guarded(_stream(layers[0]), lambda: [self._one_apart(layers, *pair) for pair in pairs], before)
        if before is not None and not update_state:
            self._put_back(before)
        return torch.stack(outs, along) if outs else None

    def _one_apart(self, layers: list[Any], token: Tensor, absent: Tensor) -> Tensor:
        """Return the result (B, C) of one token of the rows that are not `absent` (B,)."""
        batched = token.dim() == 2
        for layer in layers[:1] if self.retroactive else layers:
            token = layer.forward_step(token, key_padding_mask=absent)
            absent = absent | ~layer.ready
        if self.retroactive:
            over_batch = absent[:, None, None] if batched and layers[0].self_attn.batch_first else absent[:, None]
            read = self._read(token.masked_fill(over_batch, 0.0), batched)
            token = read.masked_fill(absent[:, None] if batched else absent, math.nan)
        return self._normed(token)

    def _guarded(
        self, first: Stream, run: Callable[[], Result], before: list[tuple[Stream, Any]] | None = None
    ) -> Result:
        """Run a step of all layers. After an error, all layers are at the same token. If `before` is given, the streams
        are reset to it."""
        # A step copies the windows while another reference to the states exists. In grad mode, where a step may raise
        # an error, we accept this copy.
        before = self._held() if before is None and torch.is_grad_enabled() else before
        first_before = first.held
        try:
            return run()
        except BaseException:
            if before is not None:
                self._put_back(before)
            elif first.held is not first_before:  # layers are at different tokens, and the old states are overwritten
                self.clean_state()
            raise

    def _through(self, layers: list[Any], method: str, src: Tensor, update_state: bool, batched: int) -> Tensor | None:
        """Pass `src` through this method of each layer. `src` has a batch dimension if it has `batched` dimensions."""

        def run() -> Tensor | None:
            tokens = src
            for layer in layers[:1] if self.retroactive else layers:
                tokens = getattr(layer, method)(tokens, update_state=update_state)
                if tokens is None:
                    return None
            return self._normed(self._read(tokens, src.dim() == batched) if self.retroactive else tokens)

        return self._guarded(_stream(layers[0]), run)

    def _read(self, windows: Tensor, batched: bool) -> Tensor:
        """Apply the layers after the first to its windows ([T',] n, [B,] C), or (B, [T',] n, C) with `batch_first`."""
        batch_first = self._each()[0].self_attn.batch_first
        windows = windows.movedim(-2, 0) if batched and not batch_first else windows
        # A reshape to -1 fails for a batch of 0.
        tokens = windows.flatten(0, -3) if windows.dim() > 2 else windows.unsqueeze(0)
        tokens = tokens if batch_first else tokens.transpose(0, 1)
        for layer in self._each()[1:]:
            tokens = layer._read(tokens)
        newest = tokens.reshape(*windows.shape[:-2], windows.shape[-1])
        return newest.movedim(0, -2) if batched and not batch_first else newest

    def _normed(self, tokens: Tensor) -> Tensor:
        return tokens if self.norm is None else self.norm(tokens)

"""Transformer encoders over the newest tokens of a stream; a step of a layer takes a token and returns an output."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ...runtime.checks import as_flag, check_count, kind_of, mismatch
from ..constructors import extending, naming_options
from ..parts import called, computed
from ..stream import Stream, extent, follow_weights, with_own_streams
from .attention import ContinualAttention, ContinualNystromAttention
from .rows import Rows, absent_of, rows_of, windows_without
from .window import RecentStream, RecentTokens, StaggeredWindow, WindowState

Result = TypeVar("Result")
LayerState = WindowState | tuple[RecentTokens, WindowState]


class ContinualEncoderLayer(torch.nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` over a stream.

    Each token attends to the n newest tokens, including itself. Later tokens do not change its output.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device,
        dtype: as torch's.
        sequence_len: n.
        num_landmarks: None for exact attention by `ContinualAttention`; else m for `ContinualNystromAttention`. Nyström
            attention has no attention weights to which dropout could apply, so its `dropout` applies only to features.
        landmarks, pinv, pinv_iterations: as in `ContinualNystromAttention`.

    `forward` takes a stream of T >= n tokens at once, with gradients. It returns the outputs of the T - n + 1 full
    windows, as `forward_steps` of a new stream does. For T = n the output equals that of torch's layer at the last
    token. `forward_step`, `forward_steps`, `clean_state`, `get_state` and `set_state` are those of
    `ContinualAttention`. Steps in training mode with dropout raise a `RuntimeError`. Parameters have torch's names, so
    a `state_dict` of torch's layer loads as it is. No masks are supported except the `key_padding_mask` of a step.

    Source: Continual Transformers: Redundancy-Free Attention for Online Inference (Hedegaard et al., 2023), the
    single-output layer. `RetroactiveEncoderLayer` is the paper's other layer.

    >>> options = {"batch_first": True, "sequence_len": 8, "num_landmarks": 4}
    >>> layer = cmab_kernels.nn.ContinualEncoderLayer(16, 2, 32, **options).eval()
    >>> tokens = torch.randn(1, 20, 16)
    >>> trained = layer(tokens)
    >>> with torch.no_grad():
    ...     streamed = [layer.forward_step(token) for token in tokens.unbind(1)]
    >>> trained.shape, torch.allclose(trained, torch.stack(streamed[7:], 1), atol=1e-5)
    (torch.Size([1, 13, 16]), True)
    """

    self_attn: ContinualAttention | ContinualNystromAttention
    output: ClassVar[str] = "single"

    @extending(torch.nn.TransformerEncoderLayer)
    def __init__(
        self,
        *args: Any,
        sequence_len: int,
        num_landmarks: int | None = None,
        landmarks: str = "continual",
        pinv: str = "iterative",
        pinv_iterations: int = 6,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        made: Any = self.self_attn
        options: dict[str, Any] = {"sequence_len": sequence_len, "output": self.output}
        if num_landmarks is None:
            self.self_attn = ContinualAttention.sharing(made, **options)
        else:
            options |= {
                "num_landmarks": num_landmarks,
                "landmarks": landmarks,
                "pinv": pinv,
                "pinv_iterations": pinv_iterations,
            }
            self.self_attn = ContinualNystromAttention.sharing(made, dropout=0.0, **options)

    __copy__ = with_own_streams

    @property
    def sequence_len(self) -> int:
        """The number n of tokens in the window."""
        return self.self_attn.sequence_len

    def forward(self, src: Tensor) -> Tensor:  # type: ignore[override]  # a window has no masks
        """Return the outputs of a stream: with `batch_first` (B, T - n + 1, C) for (B, T, C).

        Without `batch_first` the outputs are (T - n + 1, B, C) for a stream (T, B, C).
        """
        return self._added(src, self._attended(src))

    def forward_step(
        self, src: Tensor, update_state: bool = True, key_padding_mask: Tensor | None = None
    ) -> Tensor | None:
        """Take one more token (B, C), and return its output (B, C), or None before the window is full."""
        self._refuse_to_drop()
        parts: Any = self._modules
        attention, query = computed(parts["self_attn"]), src
        attention._check_token(src=src)
        if self.norm_first:
            query = called(parts["norm1"], src)
            attention._check_token(query=query)
        attended = attention._stepped(query, None, None, update_state, key_padding_mask)
        return None if attended is None else self._fed(src, attended)

    def _forward_step(self, src: Tensor, prev_state: Any = None) -> tuple[Tensor | None, Any]:
        """Take one more token after a state that the caller keeps, and return (output, state), as that of
        `ContinualAttention`."""
        self._refuse_to_drop()
        attention: Any = self.self_attn
        attention._check_token(src=src)
        attended, state = attention._forward_step(self._asking(src), prev_state=prev_state)
        return None if attended is None else self._fed(src, attended), state

    def forward_steps(
        self, src: Tensor, update_state: bool = True, key_padding_mask: Tensor | None = None
    ) -> Tensor | None:
        """Take T tokens in the layout of `forward`, and return the outputs of tokens with a full window, or None."""
        self._refuse_to_drop()
        self.self_attn._check(None, src=src)
        attended = self.self_attn.forward_steps(
            self._asking(src), update_state=update_state, key_padding_mask=key_padding_mask
        )
        return None if attended is None else self._added(src, attended)

    def clean_state(self, rows: Rows | None = None) -> None:
        """Forget all tokens, or the tokens of some rows of the batch, as `ContinualAttention` does."""
        self.self_attn.clean_state(rows)

    @property
    def ready(self) -> Tensor | None:
        """Which rows of the batch have a full window, (B,) bool, or None before the first token."""
        return self.self_attn.ready

    def get_state(self) -> LayerState | None:
        """Return the state of the stream of `self_attn`, or None before the first token."""
        return self.self_attn.get_state()

    def set_state(self, state: Any) -> None:
        """Continue from a state that `get_state` returned. None acts as `clean_state`."""
        self.self_attn.set_state(state)

    def _read(self, window: Tensor) -> Tensor:
        """Return the layer's outputs for whole windows in torch's layout, one for each attention output."""
        return self._added(window, self.self_attn(self._asking(window), need_weights=False)[0])

    def _attended(self, src: Tensor) -> Tensor:
        self.self_attn._check(None, src=src)  # the check must come before a norm reads `src`
        attended = self.self_attn.forward_stream(self._asking(src))
        if attended is None:
            raise ValueError(
                mismatch("src", f"shape {tuple(src.shape)}", f"at least a window of {self.sequence_len} tokens")
            )
        return attended

    def _asking(self, src: Tensor) -> Tensor:
        return called(self.norm1, src) if self.norm_first else src

    def _added(self, src: Tensor, attended: Tensor) -> Tensor:
        """Apply the rest of the layer to the attention's outputs, which belong to the newest tokens of `src`."""
        along = 1 if src.dim() == 3 and self.self_attn.batch_first else 0
        newest = src.narrow(along, src.shape[along] - attended.shape[along], attended.shape[along])
        return self._fed(newest, attended)

    def _fed(self, tokens: Tensor, attended: Tensor) -> Tensor:
        """Apply the rest of the layer to tokens and their attention outputs."""
        parts = self._modules
        tokens = tokens + called(parts["dropout1"], attended)
        if self.norm_first:
            return tokens + self._fed_forward(called(parts["norm2"], tokens))
        tokens = called(parts["norm1"], tokens)
        return called(parts["norm2"], tokens + self._fed_forward(tokens))

    def _fed_forward(self, tokens: Tensor) -> Tensor:
        """Return the result of torch's `_ff_block`. If a subclass replaced that method, the replacement runs."""
        if type(self)._ff_block is not torch.nn.TransformerEncoderLayer._ff_block or "_ff_block" in self.__dict__:
            return self._ff_block(tokens)
        parts = self._modules
        hidden = called(parts["dropout"], self.activation(called(parts["linear1"], tokens)))
        return called(parts["dropout2"], called(parts["linear2"], hidden))

    def _refuse_to_drop(self) -> None:
        if self.training and any(part.p > 0 for part in self.children() if isinstance(part, nn.Dropout)):
            raise RuntimeError("dropout: it is on in training, and a stream has none; use eval() or dropout=0")


class RetroactiveEncoderLayer(ContinualEncoderLayer):
    """A `ContinualEncoderLayer` whose steps return the outputs of all n tokens of the window, as torch's layer does.

    Older tokens therefore attend to newer tokens too. The layer serves as the first layer of a `ContinualEncoder`.
    `forward` returns (B, T - n + 1, n, C) for tokens (B, T, C), and (T - n + 1, n, B, C) for tokens (T, B, C), as
    `forward_steps` of a new stream does. For T = n the output equals that of torch's layer. `forward_step` returns
    (B, n, C) or (n, B, C). A state is a pair: the window's tokens, which the residual connection needs, and the state
    of the attention.

    Source: Continual Transformers: Redundancy-Free Attention for Online Inference (Hedegaard et al., 2023), the
    retroactive layer.

    >>> layer = cmab_kernels.nn.RetroactiveEncoderLayer(16, 2, 32, batch_first=True, sequence_len=8).eval()
    >>> theirs = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    >>> layer.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> tokens = torch.randn(1, 20, 16)
    >>> with torch.no_grad():
    ...     steps = [layer.forward_step(token) for token in tokens.unbind(1)]
    ...     torch.allclose(steps[-1], theirs(tokens[:, -8:]), atol=1e-5)
    True
    """

    output = "retroactive"

    @extending(ContinualEncoderLayer)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        weight = self.linear1.weight
        self.stream = RecentStream(self.sequence_len, weight.shape[1], device=weight.device, dtype=weight.dtype)
        self.register_load_state_dict_post_hook(follow_weights)

    def forward(self, src: Tensor) -> Tensor:  # type: ignore[override]  # a window has no masks
        """Return the outputs of a stream: with `batch_first` (B, T - n + 1, n, C) for (B, T, C).

        Without `batch_first` the outputs are (T - n + 1, n, B, C) for a stream (T, B, C).
        """
        attended = self._attended(src)
        return self._fed(self._windows(self.self_attn._batch_first(src), attended), attended)

    def forward_step(
        self, src: Tensor, update_state: bool = True, key_padding_mask: Tensor | None = None
    ) -> Tensor | None:
        """Take one more token (B, C), and return the outputs of the window, or None before the window is full.

        The outputs are (B, n, C) with `batch_first`, else (n, B, C).
        """
        self.self_attn._check_token(src=src)
        absent = absent_of(key_padding_mask, src, self.self_attn.batch_first, one=True)
        outs = self._stepped(src.unsqueeze(-2 if self.self_attn.batch_first else 0), update_state, absent)
        return None if outs is None else outs.squeeze(1 if self.self_attn.batch_first and src.dim() == 2 else 0)

    def _forward_step(self, src: Tensor, prev_state: Any = None) -> tuple[Tensor | None, Any]:
        self._refuse_to_drop()
        attention: Any = self.self_attn
        attention._check_token(src=src)
        recent, before = _pair(prev_state)
        token = src.to(self.stream.weight_like.dtype).reshape(-1, 1, src.shape[-1])
        shape = (token.shape[0], *self.stream.shape)
        if recent is not None and (not isinstance(recent, RecentTokens) or recent.tokens.shape != shape):
            raise ValueError(mismatch("prev_state[0]", kind_of(recent), f"a RecentTokens of tokens {shape}"))
        window = torch.cat([token.new_zeros(shape) if recent is None else recent.tokens, token], 1)[:, 1:]
        attended, state = attention._forward_step(self._asking(src), prev_state=before)
        after = RecentTokens(window), state
        if attended is None:
            return None, after
        if src.dim() == 1:
            window = window[0]
        return self._fed(window if attention.batch_first or src.dim() == 1 else window.transpose(0, 1), attended), after

    def forward_steps(
        self, src: Tensor, update_state: bool = True, key_padding_mask: Tensor | None = None
    ) -> Tensor | None:
        """Take T tokens in the layout of `forward`, and return the outputs of the windows that end with these tokens,
        or None."""
        self.self_attn._check(None, src=src)
        return self._stepped(src, update_state, absent_of(key_padding_mask, src, self.self_attn.batch_first))

    def _stepped(self, src: Tensor, update_state: bool, absent: Tensor | None) -> Tensor | None:
        """Return the result of `forward_steps`; `absent` (B, T) is its mask."""
        self._refuse_to_drop()
        update_state = as_flag("update_state", update_state)
        recent, before, attention = self._recent(src), self.stream.held, self.self_attn.stream
        attended_before = attention.held
        windows = None if absent is None or not absent.shape[1] else windows_without(recent, absent)
        newest = recent[:, -self.sequence_len :] if windows is None else windows[:, -1]
        try:  # store the tokens first, so that after an error the attention's state shows whether it took them
            # The attention has no state before its first token.
            if update_state and recent.shape[1] > self.sequence_len:
                self.stream.hold(RecentTokens(newest.clone()))
            attended = self.self_attn.forward_steps(
                self._asking(src), update_state=update_state, key_padding_mask=absent
            )
        except BaseException:
            if attention.held is attended_before:
                self.stream.hold(before)
            raise
        if attended is None:
            return None
        return self._fed(
            self._windows(recent, attended) if windows is None else self._laid_out(windows, attended), attended
        )

    def clean_state(self, rows: Rows | None = None) -> None:
        super().clean_state(rows)
        held = self.stream.held
        if rows is None or held is None:
            self.stream.state = None
        else:
            gone = rows_of(rows, held.tokens.shape[0], held.tokens.device)
            self.stream.hold(RecentTokens(held.tokens.masked_fill(gone[:, None, None], 0.0)))

    def get_state(self) -> tuple[RecentTokens, WindowState] | None:
        """Return the tokens of the window and the state of the attention, or None before the first token."""
        attention, recent = self.self_attn.get_state(), self.stream.state
        return None if attention is None or recent is None else (recent, attention)

    def set_state(self, state: tuple[RecentTokens, WindowState] | None) -> None:
        """Continue from a state that `get_state` returned. None acts as `clean_state`."""
        recent, attention = _pair(state)
        before, attention_before = self.stream.held, self.self_attn.stream.held
        try:
            self.stream.state = recent
            self.self_attn.set_state(attention)
            self._refuse_two_batches()
        except BaseException:
            self.stream.hold(before)
            self.self_attn.stream.hold(attention_before)
            raise

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Raise an error for window tokens without the attention's state over them, and for an attention's state
        without tokens."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        name = f"{prefix}stream.tokens"
        batch, attended = (extent(state_dict, entry, 0) for entry in (name, f"{prefix}self_attn.stream.queries"))
        if batch != attended:
            args[-1].append(mismatch(name, f"batch {batch}", f"batch {attended}, that of the stream of its attention"))

    def _refuse_two_batches(self) -> None:
        """Raise an error if the batch of the tokens of the window differs from the batch of the attention's state."""
        recent, attention = self.stream.held, self.self_attn.stream.held
        if recent is not None and attention is not None and recent.tokens.shape[0] != attention.queries.shape[0]:
            given = f"tokens of batch {recent.tokens.shape[0]} and an attention of batch {attention.queries.shape[0]}"
            raise ValueError(mismatch("state", given, "one batch for both"))

    def _recent(self, src: Tensor) -> Tensor:
        """Return the tokens of the window (B, n, C), with zeros before the first token, followed by the tokens of
        `src`."""
        self.self_attn._check(None, src=src)
        tokens = self.self_attn._batch_first(src).to(self.stream.weight_like.dtype)
        batch = tokens.shape[0]
        if self.self_attn.stream.held is None:
            return torch.cat([tokens.new_zeros(batch, *self.stream.shape), tokens], 1)
        held = self.stream.held
        if held is None:
            raise ValueError(
                mismatch("stream", "a state of attention without the window of tokens", "both; clean_state() ends it")
            )
        if held.tokens.shape[0] != batch:
            wanted = f"batch {held.tokens.shape[0]}, as the stream's window of tokens has; clean_state() ends it"
            raise ValueError(mismatch("src", f"batch {batch}", wanted))
        return torch.cat([held.tokens, tokens], 1)

    def _windows(self, tokens: Tensor, attended: Tensor) -> Tensor:
        """Return the newest windows of tokens (B, T, C), one for each attention output, in the layout of `attended`."""
        batched, batch_first = attended.dim() == 4, self.self_attn.batch_first
        return self._laid_out(
            tokens.unfold(1, self.sequence_len, 1).mT[:, -attended.shape[int(batched and batch_first)] :], attended
        )

    def _laid_out(self, windows: Tensor, attended: Tensor) -> Tensor:
        """Return windows (B, T, n, C) in the layout of `attended`."""
        if attended.dim() < 4:
            return windows.squeeze(0)
        return windows if self.self_attn.batch_first else windows.movedim(0, -2)


def _are_apart(layers: list[Any]) -> bool:
    """Whether the streams of the batch have different numbers of tokens in a layer."""
    return any(type(_stream(layer).held) is StaggeredWindow for layer in layers)


def _stream(layer: Any) -> Any:
    """Return the stream of a layer's attention, without torch's attribute lookup, which is slow."""
    return layer._modules["self_attn"]._modules["stream"]


def _pair(state: Any) -> tuple[Any, Any]:
    """Return (tokens, state of the attention), or (None, None). Raise for a state that has only one of the two."""
    if state is None:
        return None, None
    allowed = "(RecentTokens, state of the attention), from `get_state`, or None"
    if not isinstance(state, tuple | list):
        raise TypeError(mismatch("state", kind_of(state), allowed))
    if len(state) != 2:
        raise ValueError(mismatch("state", f"{len(state)} parts", allowed))
    recent, attention = state
    if (recent is None) != (attention is None):
        raise ValueError(mismatch("state", f"no {'tokens' if recent is None else 'state of the attention'}", allowed))
    return recent, attention


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
                    "at least 2, as the first layer is retroactive, and the last reads what it gives",
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
        if StaggeredWindow in map(type, windows):
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
        """Which rows of the batch have full windows in all layers, (B,) bool, or None before all layers have a
        token."""
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
        """Pass tokens through the layers if some rows of the batch have no token, as `absent` (B, T) says, or if the
        rows have different numbers of tokens.

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

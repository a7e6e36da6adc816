"""Transformer layers over the newest tokens of a stream; a step takes a token and returns an output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...runtime.checks import as_flag, kind_of, mismatch
from ..constructors import extending
from ..parts import called, computed
from ..stream import extent, follow_weights, with_own_streams
from .attention import ContinualAttention, ContinualNystromAttention
from .rows import Rows, absent_of, rows_of, windows_without
from .window import RecentStream, RecentTokens, WindowState

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
        """Take one more token after a state that the caller keeps, and return (output, state), as
        `ContinualAttention` does."""
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
        """A bool tensor (B,), True for rows of the batch with a full window; None before the first
        token."""
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
            raise RuntimeError(
                "dropout: it applies in training mode, but a stream has no dropout; use eval() or dropout=0"
            )


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
            wanted = f"batch {held.tokens.shape[0]}, the batch of the stream's window of tokens; clean_state() ends it"
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


def _pair(state: Any) -> tuple[Any, Any]:
    """Return (tokens, state of the attention), or (None, None). Raise for a state that has only one of the two."""
    if state is None:
        return None, None
    allowed = "(RecentTokens, state of the attention), from `get_state`, or None"
    if not isinstance(state, (tuple, list)):
        raise TypeError(mismatch("state", kind_of(state), allowed))
    if len(state) != 2:
        raise ValueError(mismatch("state", f"{len(state)} parts", allowed))
    recent, attention = state
    if (recent is None) != (attention is None):
        raise ValueError(mismatch("state", f"no {'tokens' if recent is None else 'state of the attention'}", allowed))
    return recent, attention

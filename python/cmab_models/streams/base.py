"""The common part of all classifiers of streams: layers over a window of tokens, and steps of one token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cmab_kernels.nn import CircularPositionalEncoding, ContinualEncoderLayer, RecentTokens
from cmab_kernels.nn.inputs import check_features
from cmab_kernels.nn.stream import extent, follow_weights, with_own_streams
from cmab_kernels.runtime.checks import kind_of, mismatch, refuse_not_finite
from cmab_kernels.runtime.tracing import has_values

from ..precision import weight_of
from ..pretrained import Pretrained
from .window import TokenWindow


class StreamState(NamedTuple):
    """The state of a stream."""

    place: int | Tensor
    """The place of the next token on the circle of the positional encoding."""
    window: Tensor | None
    """The newest tokens (B, at most n, dim), embedded, for layers that read the whole window at every step; None if
    there is no such layer."""
    last: Any
    """The state of the last layer; see `cmab_kernels.nn.ContinualEncoderLayer.get_state`."""
    batch: int
    """B, the number of streams."""


class StreamClassifier(Pretrained):
    """Base class of models that classify a window of tokens by its newest token, which has attended to the window.

    `forward` takes whole windows. `forward_step` takes the tokens of streams one by one. `forward_stream` takes all
    tokens of streams at once, with gradients, and returns the scores of the steps: use it to train a model that will
    run on streams.

    Layers before the last read the whole window at every step. The last layer is continual if it is a
    `ContinualEncoderLayer`: its stream gets as its next token the newest output of the layers before it. With `depth`
    1, a step therefore equals `forward` of the window, as long as the attention's landmarks follow the window. With
    more layers, the two are equal for the first full window. Later, the older tokens of the last layer keep the
    values that they had as the newest tokens of their windows; `forward` computes all of them from one window. The
    `state_dict` holds the streams while there are any. Loading weights without streams ends the streams.

    Tokens have the model's dtype. A wrong shape raises a `ValueError`. A wrong dtype, or an argument that is not a
    tensor, raises a `TypeError`. On a CPU, a NaN or an infinity raises a `ValueError`. On a GPU values are not checked,
    because the program would have to wait; scores are NaN there.

    Args:
        layers: layers of width `dim`, batch first, and without dropout. Each is a layer over a window (B, n, dim); the
            last may also be a `cmab_kernels.nn.ContinualEncoderLayer`.
        dim_in: C, columns of the tokens.
        num_classes: columns of the scores.
        sequence_len: n, tokens of the window.
        dim: width of all features.
    """

    __copy__ = with_own_streams

    def __init__(self, layers: Sequence[nn.Module], dim_in: int, num_classes: int, sequence_len: int, dim: int) -> None:
        super().__init__()
        self.dim_in, self.sequence_len = dim_in, sequence_len
        self.embedding = nn.Linear(dim_in, dim)
        self.positions = CircularPositionalEncoding(dim, sequence_len, batch_first=True)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        self.stream = TokenWindow(sequence_len, dim)
        self.register_load_state_dict_post_hook(follow_weights)
        self._over_window = len(layers) - isinstance(layers[-1], ContinualEncoderLayer)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores (B, num_classes) of windows (B, n, C), oldest token first. The stream does not change.

        In training, windows begin at a random place of the positional encoding; in eval mode, at the stream's place.
        """
        self._check_window(tokens)
        return self.forward_stream(tokens)[:, 0]

    def forward_stream(self, tokens: Tensor) -> Tensor:
        """Return the scores of all steps at once, with gradients.

        They are the scores (B, T - n + 1, num_classes) that `forward_step` of new streams returns for T >= n tokens (B,
        T, C), from the first full window on. In training, streams begin at a random place of the positional encoding;
        in eval mode, at the stream's place. The stream does not change. Layers before the last compute every window:
        they take T - n + 1 times as long as in `forward`.
        """
        self._check("tokens", tokens, f"(batch, T >= {self.sequence_len}, dim_in)", 3)
        if tokens.shape[1] < self.sequence_len:
            raise ValueError(mismatch("tokens", f"{tokens.shape[1]} tokens", f"at least {self.sequence_len}, a window"))
        features = self.positions.forward_stream(self.embedding(tokens))
        if self._over_window:
            windows = features.unfold(1, self.sequence_len, 1).mT
            read = windows.flatten(0, 1)
            for layer in self.layers[: self._over_window]:
                read = layer(read)
            windows = read.unflatten(0, windows.shape[:2])
            features = torch.cat([windows[:, 0], windows[:, 1:, -1]], 1)
        newest = self._last(features) if self._is_continual else features[:, self.sequence_len - 1 :]
        scores: Tensor = self.head(self.norm(newest))
        return scores

    @torch.no_grad()
    def forward_step(self, token: Tensor) -> Tensor | None:
        """Take the next token (B, C) of B streams, and return their scores (B, num_classes), or None before the window
        is full.

        An error leaves the streams unchanged. This also holds for a token of another batch size, and on a CPU for a
        token that is not finite when it is embedded.
        """
        self._check("token", token, "(batch, dim_in)", 2)
        if self._batch not in (None, token.shape[0]):
            raise ValueError(
                mismatch(
                    "token",
                    f"batch {token.shape[0]}",
                    f"batch {self._batch}, the number of streams; clean_state() ends them",
                )
            )
        embedded = self.positions.forward_step(self.embedding(token), update_state=False).unsqueeze(1)
        if embedded.device.type == "cpu" and has_values(embedded) and not embedded.isfinite().all():
            raise ValueError(mismatch("token", "features whose embedding has a NaN or an infinity", "finite features"))
        window = self._window_with(embedded) if self._over_window else None
        newest = embedded if window is None else self._read(window)
        if newest is not None and self._is_continual:
            newest = self._last.forward_steps(newest)
        self.stream.hold(window)  # at the end, so that the stream is unchanged if a layer raises
        self.positions.set_state((self.positions.get_state() + 1) % self.positions.period)
        return None if newest is None else self._scores(newest)

    def clean_state(self) -> None:
        """Forget all tokens."""
        self.set_state(None)

    def get_state(self) -> StreamState | None:
        """Return the state of the streams, or None before the first token. Later steps do not change the returned
        state."""
        if self._batch is None:
            return None
        window, last = self.stream.state, self._last.get_state() if self._is_continual else None
        return StreamState(self.positions.get_state(), None if window is None else window.tokens, last, self._batch)

    def set_state(self, state: StreamState | None) -> None:
        """Continue from a state that `get_state` returned. The state is checked and copied. None has the effect of
        `clean_state`."""
        if state is not None and not isinstance(state, StreamState):
            raise TypeError(mismatch("state", kind_of(state), "None, or what `get_state` returns, a StreamState"))
        place, window, last, _ = (None,) * 4 if state is None else state
        misfit = self._misfit(
            {"state.window": window, "state.last": getattr(last, "queries", None)}, "state.window", "state.last"
        )
        if misfit:
            raise ValueError(misfit)
        before = self.stream.held, self.positions.held
        try:
            self.stream.state = None if window is None else RecentTokens(window)
            self.positions.set_state(place)
            if self._is_continual:
                self._last.set_state(last)
        except Exception:
            self.stream.hold(before[0])
            self.positions.hold(before[1])
            raise

    def _save_pretrained(self, save_directory: Path) -> None:
        """Save the parameters; streams are not saved."""
        state, place = self.get_state(), self.positions.get_state()
        self.clean_state()
        try:
            super()._save_pretrained(save_directory)
        finally:
            self.set_state(state)
            self.positions.set_state(place)  # also if no token was read yet

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Raise an error for a window without the last layer's stream that belongs to it, and for a stream without its
        window."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        last = f"{prefix}layers.{len(self.layers) - 1}.self_attn.stream.queries"
        misfit = self._misfit(state_dict, f"{prefix}stream.tokens", last)
        if misfit:
            args[-1].append(misfit)

    def _misfit(self, entries: Mapping[str, Any], window: str, last: str) -> str:
        """Return why a window and the queries of the last layer cannot belong to one state; "" if they can."""
        batch, tokens, streams = extent(entries, window, 0), extent(entries, window, 1), extent(entries, last, 0)
        begun = batch if tokens == self.sequence_len else 0
        if not self._is_continual or (streams == begun if self._over_window else batch == 0):
            return ""
        return mismatch(
            window,
            f"{tokens} tokens of {batch} streams and a last layer of {streams}",
            "parts of one state of this model",
        )

    @property
    def _batch(self) -> int | None:
        """The number of streams, or None before the first token."""
        if self._over_window:
            window = self.stream.held
            return None if window is None else window.tokens.shape[0]
        last = self._last.self_attn.stream.held
        return None if last is None else last.queries.shape[0]

    @property
    def _last(self) -> Any:
        return self.layers[-1]

    @property
    def _is_continual(self) -> bool:
        return self._over_window < len(self.layers)

    def _window_with(self, newest: Tensor) -> RecentTokens:
        """Return the window (B, at most n, dim) with the newest token (B, 1, dim)."""
        held = self.stream.held
        return RecentTokens(
            newest if held is None else torch.cat([held.tokens, newest], 1)[:, -self.sequence_len :].contiguous()
        )

    def _read(self, window: RecentTokens) -> Tensor | None:
        """Return the output of the layers over the window: for all tokens (B, n, dim) when the window is first full,
        and later for the newest token."""
        features, held = window.tokens, self.stream.held
        if features.shape[1] < self.sequence_len:
            return None
        for layer in self.layers[: self._over_window]:
            features = layer(features)
        return features if held is None or held.tokens.shape[1] < self.sequence_len else features[:, -1:]

    def _scores(self, features: Tensor) -> Tensor:
        """Return the scores (B, num_classes) of the newest of the tokens (B, N, dim)."""
        scores: Tensor = self.head(self.norm(features[:, -1]))
        return scores

    def _check_window(self, tokens: Tensor) -> None:
        """Raise unless tokens are windows (B, n, C)."""
        allowed = f"(batch, {self.sequence_len}, dim_in)"
        self._check("tokens", tokens, allowed, 3)
        if tokens.shape[1] != self.sequence_len:
            raise ValueError(mismatch("tokens", f"shape {tuple(tokens.shape)}", allowed))

    def _check(self, name: str, tokens: Tensor, allowed: str, dims: int) -> None:
        check_features(name, tokens, allowed, (dims,), self.dim_in, weight_of(self))
        refuse_not_finite(**{name: tokens})

"""Transformer encoders over the newest tokens of a stream: layers that take a token and return one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import wrong
from .continual import ContinualAttention, ContinualNystromAttention
from .continual_stream import WindowState
from .projections import extending


class ContinualEncoderLayer(torch.nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` over a stream: each token attends to the n newest, itself among them, and stays as it was then.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype: as torch's.
        sequence_len: n.
        num_landmarks: None for exact attention, `ContinualAttention`; else m, for `ContinualNystromAttention`, where `dropout` acts
            on features only: there are no attention weights to drop.
        landmarks, pinv, pinv_iterations: as in `ContinualNystromAttention`.

    `forward` takes a stream of T >= n tokens at once, with gradients, and returns the outputs of the T - n + 1 full windows: what
    `forward_steps` of a new stream returns. For T = n that is torch's layer, at the last token. `forward_step`, `forward_steps`,
    `clean_state`, `get_state` and `set_state` are those of `ContinualAttention`; steps in training with dropout are a `RuntimeError`.
    Parameters have torch's names, so a `state_dict` of torch's layer loads as it is. There are no masks.

    Source: Continual Transformers: Redundancy-Free Attention for Online Inference (Hedegaard et al., 2023), the single-output layer.

    >>> layer = cmab_kernels.nn.ContinualEncoderLayer(16, 2, 32, batch_first=True, sequence_len=8, num_landmarks=4).eval()
    >>> tokens = torch.randn(1, 20, 16)
    >>> trained = layer(tokens)
    >>> with torch.no_grad():
    ...     streamed = [layer.forward_step(token) for token in tokens.unbind(1)]
    >>> trained.shape, torch.allclose(trained, torch.stack(streamed[7:], 1), atol=1e-5)
    (torch.Size([1, 13, 16]), True)
    """

    self_attn: ContinualAttention | ContinualNystromAttention

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
        if num_landmarks is None:
            self.self_attn = ContinualAttention.sharing(made, sequence_len=sequence_len)
        else:
            options = {"num_landmarks": num_landmarks, "landmarks": landmarks, "pinv": pinv, "pinv_iterations": pinv_iterations}
            self.self_attn = ContinualNystromAttention.sharing(made, dropout=0.0, sequence_len=sequence_len, **options)

    @property
    def sequence_len(self) -> int:
        """The number n of tokens in the window."""
        return self.self_attn.sequence_len

    def forward(self, src: Tensor) -> Tensor:  # type: ignore[override]  # a window has no masks
        """Return the outputs (B, T - n + 1, C) of a stream (B, T, C), or (T - n + 1, B, C) of (T, B, C) as `batch_first` says."""
        attended = self.self_attn.forward_stream(self._asking(src))
        if attended is None:
            raise ValueError(wrong("src", f"has shape {tuple(src.shape)}", f"at least {self.sequence_len} tokens, a window, are needed"))
        return self._added(src, attended)

    def forward_step(self, src: Tensor, update_state: bool = True) -> Tensor | None:
        """Take one more token (B, C), and return its output (B, C), or None before the window is full."""
        self._refuse_to_drop()
        attended = self.self_attn.forward_step(self._asking(src), update_state=update_state)
        return None if attended is None else self._fed(src + attended)

    def forward_steps(self, src: Tensor, update_state: bool = True) -> Tensor | None:
        """Take T tokens in the layout of `forward`, and return the outputs of those from which on the window is full, or None."""
        self._refuse_to_drop()
        attended = self.self_attn.forward_steps(self._asking(src), update_state=update_state)
        return None if attended is None else self._added(src, attended)

    def clean_state(self) -> None:
        """Forget all tokens."""
        self.self_attn.clean_state()

    def get_state(self) -> WindowState | None:
        """Return the state of the attention's stream, or None before the first token."""
        return self.self_attn.get_state()

    def set_state(self, state: WindowState | None) -> None:
        """Go on from a state that `get_state` returned. None is the same as `clean_state`."""
        self.self_attn.set_state(state)

    def _asking(self, src: Tensor) -> Tensor:
        return self.norm1(src) if self.norm_first else src

    def _added(self, src: Tensor, attended: Tensor) -> Tensor:
        """Return what the rest of the layer makes of attended tokens, which are the newest of `src`."""
        along = 1 if src.dim() == 3 and self.self_attn.batch_first else 0
        newest = src.narrow(along, src.shape[along] - attended.shape[along], attended.shape[along])
        return self._fed(newest + self.dropout1(attended))

    def _fed(self, tokens: Tensor) -> Tensor:
        if self.norm_first:
            return tokens + self._ff_block(self.norm2(tokens))
        tokens = self.norm1(tokens)
        result: Tensor = self.norm2(tokens + self._ff_block(tokens))
        return result

    def _refuse_to_drop(self) -> None:
        if self.training and any(part.p > 0 for part in self.children() if isinstance(part, nn.Dropout)):
            raise RuntimeError(wrong("dropout", "is on and the module in training", "a stream has none; use eval() or dropout=0"))


class ContinualEncoder(nn.Module):
    """A stack of layers over a stream, each of which takes the outputs of the one before as its tokens.

    Args:
        layer: a `ContinualEncoderLayer`, of which all layers are copies, as in `torch.nn.TransformerEncoder`.
        num_layers: how many, L >= 1.
        norm: a module for the outputs of the last layer, or None.

    `forward` takes a stream of at least L (n - 1) + 1 tokens at once, with gradients, and returns what steps return: the outputs of all
    tokens from that one on. The methods are those of the layer; a state is a tuple of the states of the layers. Each layer reads n tokens
    of the one before, so that an output has seen L (n - 1) + 1 tokens.

    Source: Continual Transformers: Redundancy-Free Attention for Online Inference (Hedegaard et al., 2023).

    >>> layer = cmab_kernels.nn.ContinualEncoderLayer(16, 2, 32, batch_first=True, sequence_len=8, num_landmarks=4)
    >>> encoder = cmab_kernels.nn.ContinualEncoder(layer, num_layers=2).eval()
    >>> tokens = torch.randn(1, 20, 16)
    >>> trained = encoder(tokens)
    >>> with torch.no_grad():
    ...     streamed = encoder.forward_steps(tokens)
    >>> trained.shape, torch.allclose(trained, streamed, atol=1e-5)
    (torch.Size([1, 6, 16]), True)
    """

    def __init__(self, layer: ContinualEncoderLayer, num_layers: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        if not isinstance(num_layers, int) or num_layers < 1:
            raise ValueError(wrong("num_layers", f"is {num_layers!r}", "an int >= 1 is needed"))
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(num_layers))
        self.norm = norm

    @property
    def sequence_len(self) -> int:
        """The number of tokens that an output has seen."""
        return 1 + sum(layer.sequence_len - 1 for layer in self._each())

    def forward(self, src: Tensor) -> Tensor:
        """Return the outputs of a stream, in the layout of the layers."""
        for layer in self.layers:
            src = layer(src)
        return src if self.norm is None else self.norm(src)

    def forward_step(self, src: Tensor, update_state: bool = True) -> Tensor | None:
        """Take one more token (B, C), and return its output (B, C), or None before all windows are full."""
        return self._through("forward_step", src, update_state)

    def forward_steps(self, src: Tensor, update_state: bool = True) -> Tensor | None:
        """Take T tokens in the layout of `forward`, and return the outputs of those from which on all windows are full, or None."""
        return self._through("forward_steps", src, update_state)

    def clean_state(self) -> None:
        """Forget all tokens."""
        for layer in self._each():
            layer.clean_state()

    def get_state(self) -> tuple[WindowState | None, ...]:
        """Return the states of the layers, first to last."""
        return tuple(layer.get_state() for layer in self._each())

    def set_state(self, state: Sequence[WindowState | None]) -> None:
        """Go on from a state that `get_state` returned."""
        if len(state) != len(self.layers):
            raise ValueError(wrong("state", f"has {len(state)} parts", f"one for each of {len(self.layers)} layers is needed"))
        for layer, part in zip(self._each(), state, strict=True):
            layer.set_state(part)

    def _each(self) -> list[Any]:
        return list(self.layers)

    def _through(self, method: str, src: Tensor, update_state: bool) -> Tensor | None:
        tokens: Tensor | None = src
        for layer in self.layers:
            tokens = getattr(layer, method)(tokens, update_state=update_state)
            if tokens is None:
                return None
        return tokens if self.norm is None else self.norm(tokens)

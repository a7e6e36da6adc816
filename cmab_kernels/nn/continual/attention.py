"""Attention over the newest tokens of a stream, one step at a time, with the weights of
`torch.nn.MultiheadAttention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...attention import latent_attention
from ...nystrom import (
    ContinualAttentionState,
    ContinualNystromState,
    StepResult,
    continual_attention_init,
    continual_attention_step,
    continual_nystrom_init,
    continual_nystrom_step,
)
from ...runtime.checks import mismatch
from ..constructors import extending
from ..multihead.attention import MultiheadAttention
from ..multihead.nystrom import ONLY_TOKENS, NystromAttention
from ..multihead.projections import no_extra_keys
from ..stream import follow_weights
from .base import Continual
from .training import attention_over_stream, nystrom_over_stream
from .window import ContinualStream


class ContinualAttention(Continual, MultiheadAttention):
    """Exact attention over the n newest tokens of a stream: O(n) per token, while recomputing the window would take
    O(n^2).

    Args:
        embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, device, dtype: as torch's. A stream has no
            dropout: in training mode with `dropout` > 0, a step raises a `RuntimeError`.
        add_bias_kv, add_zero_attn: False (`ValueError` otherwise).
        sequence_len: n.
        output: "single": a step returns the output of the newest token, and `forward` returns the output of the last
            query. "retroactive": a step returns the outputs of all n tokens, where older queries also attend to newer
            keys, and `forward` returns the outputs of all queries.

    `forward` is that of `cmab_kernels.nn.MultiheadAttention` and torch, over a whole window at once, for training. It
    does not change the stream. Parameters have torch's names, so a `state_dict` of torch's module loads as it is. After
    the first token the stream is part of the `state_dict` (see `ContinualStream`).

    The package continual-inference calls this `SingleOutputMultiheadAttention` and `RetroactiveMultiheadAttention`.
    Results are the same while logits are small. `RetroactiveMultiheadAttention` adds and subtracts raw exponentials,
    which in float32 loses digits at logits of 15 and overflows at 88. Other differences from that package:
    `batch_first` is False by default, as in torch. `forward_steps` with single outputs and without `batch_first`
    returns (T', B, C), where that package returns (T', 1, B, C). `update_state=False` works from the first token on.
    There is no `query_index` and no `embed_dim_second`. Steps record no graph. States have types of this package.

    Source: Continual Transformers: Redundancy-Free Attention for Online Inference (Hedegaard et al., 2023).

    >>> attention = cmab_kernels.nn.ContinualAttention(16, 2, batch_first=True, sequence_len=64).eval()
    >>> tokens = torch.randn(1, 100, 16)
    >>> with torch.no_grad():
    ...     attention.forward_steps(tokens[:, :63]) is None
    ...     steps = attention.forward_steps(tokens[:, 63:])
    ...     whole = attention(tokens[:, -64:], need_weights=False)[0]
    True
    >>> steps.shape, torch.allclose(steps[:, -1:], whole, atol=1e-5)
    (torch.Size([1, 37, 16]), True)
    """

    lacks = no_extra_keys(ONLY_TOKENS)
    _recordable = "cmab_kernels.continual_attention_step"

    @extending(MultiheadAttention)
    def __init__(self, *args: Any, sequence_len: int, output: str = "single", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stream_over(sequence_len, output)

    def _asking(self, query: Tensor) -> Tensor:
        if self.output == "retroactive":
            return query
        return query[..., -1:, :] if self.batch_first else query[-1:]

    def _whole(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return latent_attention(query[:, :, -1:] if self.output == "single" else query, key, value)

    def _over_stream(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dropout = self.dropout if self._drops else 0.0
        return attention_over_stream(query, key, value, self.sequence_len, self.output == "retroactive", dropout)

    def _init(self, query: Tensor, key: Tensor, value: Tensor) -> ContinualAttentionState:
        return continual_attention_init(query, key, value)

    def _step(
        self, state: ContinualAttentionState, query: Tensor, key: Tensor, value: Tensor, absent: Tensor | None = None
    ) -> StepResult:
        return continual_attention_step(state, query, key, value, output=self.output, key_padding_mask=absent)

    def _start(self, like: Tensor) -> None:
        n = self.sequence_len
        width, counts = self.head_dim, {"window": n}
        self.stream = ContinualStream(
            ContinualAttentionState, self.num_heads, width, (0, n), counts, device=like.device, dtype=like.dtype
        )
        self.register_load_state_dict_post_hook(follow_weights)


class ContinualNystromAttention(Continual, NystromAttention):
    """Attention over the n newest tokens of a stream through m landmarks: O(m) per token, for any window size.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype,
            num_landmarks, pinv, pinv_iterations: as in `NystromAttention`.
        sequence_len: n >= m.
        output: as in `ContinualAttention`.
        landmarks: "continual": landmarks are the means of segments of the stream. Every n / m tokens a segment is full,
            and its mean replaces the oldest landmark. In `forward` the landmarks are the means of segments of the
            window. "fixed": landmarks are parameters; see `fit_landmarks`.

    `forward` is that of `NystromAttention`, over a whole window at once. A key or value of None means the query.
    `forward` does not change the stream. With fixed landmarks, every step of a stream equals `forward` over its window.
    With continual landmarks the step equals `forward` after every n tokens, or after every n / m tokens if m divides n.
    In between, the landmarks lag behind the window by less than one segment. So if a module with continual landmarks
    will run on streams, train it with `forward_stream`, on pieces of more than n tokens. `forward_stream` uses the
    stream's landmarks at every token.

    A stream is valid only with the weights and landmarks that filled its window. `fit_landmarks` ends the stream.
    The methods have the names of continual-inference, with the differences that `ContinualAttention` lists.

    Source: Continual Low-Rank Scaled Dot-product Attention (Carreto Picon et al.).

    >>> options = {"batch_first": True, "sequence_len": 64, "num_landmarks": 8}
    >>> attention = cmab_kernels.nn.ContinualNystromAttention(16, 2, **options).eval()
    >>> tokens = torch.randn(1, 128, 16)
    >>> with torch.no_grad():
    ...     for token in tokens.unbind(1):
    ...         out = attention.forward_step(token)
    ...     whole = attention(tokens[:, -64:], need_weights=False)[0]
    >>> out.shape, torch.allclose(out, whole[:, 0], atol=1e-5)
    (torch.Size([1, 16]), True)
    """

    schemes = ("continual", "fixed")
    _recordable = "cmab_kernels.continual_nystrom_step"

    @extending(NystromAttention)
    def __init__(
        self, *args: Any, sequence_len: int, output: str = "single", landmarks: str = "continual", **kwargs: Any
    ) -> None:
        super().__init__(*args, landmarks=landmarks, **kwargs)
        if self.conv is not None:
            raise ValueError(
                mismatch(
                    "conv_kernel_size", self.conv.kernel_size[0], "None in a stream; NystromAttention has a convolution"
                )
            )
        if self.pinv == "shared":
            raise ValueError(
                mismatch("pinv", repr(self.pinv), "'iterative' or 'exact' in a stream; NystromAttention has 'shared'")
            )
        self._stream_over(sequence_len, output)
        if self.num_landmarks > sequence_len:
            raise ValueError(mismatch("num_landmarks", self.num_landmarks, f"at most sequence_len = {sequence_len}"))

    def fit_landmarks(self, tokens: Tensor, keys: Tensor | None = None, *, seed: int = 0) -> None:
        """Make the fixed landmarks as `NystromAttention` does, and end the stream.

        The state of the stream was computed with the old landmarks.
        """
        super().fit_landmarks(tokens, keys, seed=seed)
        self.clean_state()

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        attended = super()._attend(query, key, value, mask)
        return attended[:, :, -1:] if self.output == "single" else attended

    def _whole(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self._attend(query, key, value, None)

    def _over_stream(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        landmarks = self._options().get("landmarks", self.num_landmarks)
        iterations = self.pinv_iterations if self.pinv == "iterative" else 0
        return nystrom_over_stream(
            query, key, value, self.sequence_len, self.output == "retroactive", landmarks, iterations
        )

    def _init(self, query: Tensor, key: Tensor, value: Tensor) -> ContinualNystromState:
        return continual_nystrom_init(query, key, value, **self._options())

    def _step(
        self, state: ContinualNystromState, query: Tensor, key: Tensor, value: Tensor, absent: Tensor | None = None
    ) -> StepResult:
        return continual_nystrom_step(state, query, key, value, output=self.output, key_padding_mask=absent)

    def _start(self, like: Tensor) -> None:
        counts = {
            "window": self.sequence_len,
            "pinv_iterations": self.pinv_iterations if self.pinv == "iterative" else 0,
            "fixed": int(self.landmarks == "fixed"),
        }
        width, rows = self.head_dim, (self.num_landmarks,)
        self.stream = ContinualStream(
            ContinualNystromState, self.num_heads, width, rows, counts, device=like.device, dtype=like.dtype
        )
        self.register_load_state_dict_post_hook(follow_weights)

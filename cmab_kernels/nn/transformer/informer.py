"""A transformer's encoder layer with Intention in place of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...runtime.checks import check_choice, mismatch
from ..constructors import extending
from ..inputs import bool_mask
from ..multihead.intention import LearnedRidge, MultiheadIntention, MultiheadSigmaIntention

if TYPE_CHECKING:
    from typing import Self

KINDS: dict[str, type[LearnedRidge]] = {"intention": MultiheadIntention, "sigma": MultiheadSigmaIntention}


class InformerEncoderLayer(torch.nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` with Intention (regularised least squares) in place of attention.

    The paper below calls this layer Informer. The time-series model of the same name (Zhou et al., AAAI 2021) is
    another model, which computes attention for a sample of the queries.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device,
            dtype: as torch's. `dropout` applies after Intention and in the feed-forward layer; there are no attention
                weights to which it could apply.
        kind: "intention" for `MultiheadIntention`, "sigma" for `MultiheadSigmaIntention`.
        alpha, scale: as in `MultiheadIntention`.

    Arguments and result of `forward` are torch's, but `src_mask` and `is_causal` raise a `ValueError`. The layer never
    takes torch's fast path, which would run attention. Rows that `src_key_padding_mask` ignores are read as 0, even if
    they are NaN. Their results have no meaning. Parameters have torch's names, so a `state_dict` of torch's layer loads
    as it is. To put the layer into a `torch.nn.TransformerEncoder`, construct the encoder with
    `enable_nested_tensor=False`. This layer raises a `ValueError` for a nested tensor. Without the option the encoder
    warns that it uses no nested tensors.

    Source: Exploring the Space of Key-Value-Query Models with Intention (Garnelo and Czarnecki), section 3.

    >>> layer = cmab_kernels.nn.InformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True)
    >>> layer.load_state_dict(torch.nn.TransformerEncoderLayer(16, 2, dim_feedforward=32).state_dict())
    <All keys matched successfully>
    >>> encoder = torch.nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
    >>> encoder(torch.randn(2, 100, 16)).shape
    torch.Size([2, 100, 16])
    """

    self_attn: LearnedRidge

    @extending(torch.nn.TransformerEncoderLayer)
    def __init__(
        self, *args: Any, kind: str = "intention", alpha: float | None = None, scale: float = 1.0, **kwargs: Any
    ) -> None:
        check_choice("kind", kind, KINDS)
        super().__init__(*args, **kwargs)
        self.self_attn = KINDS[kind].sharing(self.self_attn, dropout=0.0, alpha=alpha, scale=scale)

    @classmethod
    def sharing(cls, layer: torch.nn.TransformerEncoderLayer) -> Self:
        """Make a layer with the configuration and modules of `layer`.

        Its Intention module has the parameters of the attention of `layer`.
        """
        attention = layer.self_attn
        if isinstance(attention, LearnedRidge):
            given = f"a {type(attention).__name__}, whose penalty and scale a new layer would not have"
            raise ValueError(
                mismatch(
                    "self_attn",
                    given,
                    "torch's attention; replace the layer before its attention, or make an InformerEncoderLayer",
                )
            )
        shared = cls(
            attention.embed_dim,
            attention.num_heads,
            activation=layer.activation,
            batch_first=attention.batch_first,
            norm_first=layer.norm_first,
            bias=attention.in_proj_bias is not None,
            device=torch.device("meta"),
        )
        shared.self_attn.adopt(attention)
        for name, child in layer._modules.items():  # `named_children` skips the second name of a shared module
            if child is not attention:
                setattr(shared, name, child)
        shared.training = layer.training
        return shared

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the encoded `src`, in its shape.

        The shape is (B, N, d_model) with `batch_first`, else (N, B, d_model), or (N, d_model) without a batch.
        """
        self.self_attn._refuse_masks("src_mask", src_mask, is_causal)
        mask, src = bool_mask(src_key_padding_mask, src, "src_key_padding_mask")
        self.self_attn._check(mask, src=src)
        # Otherwise a NaN in padding would reach the weight gradients of the norms and of the feed-forward layer.
        if mask is not None:
            ignore = mask if self.self_attn.batch_first or src.dim() == 2 else mask.T
            src = src.masked_fill(ignore.unsqueeze(-1), 0.0)
        if self.norm_first:
            src = src + self._sa_block(self.norm1(src), None, mask)
            return src + self._ff_block(self.norm2(src))
        src = self.norm1(src + self._sa_block(src, None, mask))
        return self.norm2(src + self._ff_block(src))

    def why_torch(self, *args: Any, **kwargs: Any) -> str | None:
        """Return why torch's own code runs for such a call: always None, because the operators always run."""
        return None

"""torch's Transformer layers on the fused operators."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ...layers import attention_layer, feed_forward_layer
from ...runtime.checks import as_flag, kind_of, mismatch
from ..constructors import extending
from ..inputs import ADDITIVE, DROPOUT, NO_ATTENTION_MASK, bool_mask, check_features, check_floating, is_additive
from ..multihead import torchs_attention
from ..parts import layer_impl, of_one_dtype, one_like, own_parameters, plain_parameters

if TYPE_CHECKING:
    from typing import Self

_ACTIVATIONS: dict[Callable[..., Tensor], str] = {F.relu: "relu", torch.relu: "relu", F.gelu: "gelu"}
_THEIR_ACTIVATIONS: dict[str | None, int] = {"relu": 1, "gelu": 2}
"""The values of `activation_relu_or_gelu`. torch's fused layer reads it for the activation, and does not run at 0."""
_BLOCKS = ("_sa_block", "_mha_block", "_ff_block")
"""The methods of torch's layers, or of ours, that the operators replace."""
_SEVERAL_DTYPES = "its weights have several dtypes"
_Masks = tuple[Tensor | None, bool, Tensor | None]


def _activation(layer: nn.Module) -> str | None:
    """Return the operator's name for the activation of torch's layer, or None if the operator does not have it."""
    made: Any = layer.activation
    if type(made) is nn.ReLU:
        return "relu"
    if type(made) is nn.GELU:
        return "gelu" if made.approximate == "none" else None
    return _ACTIVATIONS.get(made) if callable(made) else None


class _FusedLayer(nn.Module):
    """Base class of both layers. It decides when the operators run, and calls them."""

    theirs: ClassVar[type[nn.Module]]
    """torch's layer that computes the same result."""

    if TYPE_CHECKING:
        norm_first: bool
        self_attn: nn.MultiheadAttention
        activation: Any
        linear1: nn.Linear
        linear2: nn.Linear
        dropout1: nn.Dropout

    @classmethod
    def sharing(cls, layer: nn.Module) -> Self:
        """Make a layer with the configuration and the modules of torch's `layer`."""
        shared = cls.__new__(cls)
        shared.__dict__.update(
            {name: copy.copy(value) if isinstance(value, dict) else value for name, value in layer.__dict__.items()}
        )
        return shared

    def _why_no_operator(self, x: Tensor) -> str | None:
        """Return why torch's own code must run for `x` in every part of the layer, or None if the operators may run."""
        if x.is_nested:
            return "a nested tensor has no fused layer"
        if any(part.training and part.p > 0 for part in self.children() if isinstance(part, nn.Dropout)):
            return DROPOUT
        dropouts = (part for name, part in self.named_children() if name.startswith("dropout"))
        if any(
            plain_parameters(part, nn.Identity if type(part) is nn.Identity else nn.Dropout) is None
            for part in dropouts
        ):
            return "a dropout module was changed, or has hooks"
        if not self._has_their_blocks():
            return "a subclass overrides a block"
        if layer_impl(x) is None:
            return "no kernel runs here, or autocast is on, which keeps norms and sums in float32"
        return None

    def _has_their_blocks(self) -> bool:
        # A compiler evaluates comparisons of classes' functions, but not those of a bound method's `__func__`.
        ours = TransformerEncoderLayer if self.theirs is nn.TransformerEncoderLayer else TransformerDecoderLayer
        kind = type(self)
        return all(
            name not in self.__dict__ and getattr(kind, name, None) is getattr(ours, name, None) for name in _BLOCKS
        )

    def _sa_block(
        self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        """Return the result of torch's method. If parts of the attention were changed, they are called."""
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
        attended: Tensor = torchs_attention.call(self.self_attn, x, x, x, **masks, need_weights=False)[0]
        return self.dropout1(attended)

    def _as_torch(self, block: Callable[[Tensor], Tensor], norm: nn.Module, x: Tensor) -> Tensor:
        """Return x after a block of torch's layer, with its norm and residual connection."""
        result: Tensor = x + block(norm(x)) if self.norm_first else norm(x + block(x))
        return result

    def _why_no_attention(
        self,
        x: Tensor,
        attention: nn.MultiheadAttention,
        norm: nn.Module,
        attn_mask: Tensor | None,
        is_causal: bool,
        mask: Tensor | None,
    ) -> str | None:
        """Return why torch's own code must run an attention and its norm, or None if the operator may run."""
        if attn_mask is not None or is_causal:
            return NO_ATTENTION_MASK
        unread = torch.compiler.is_compiling() and isinstance(mask, Tensor) and mask.is_floating_point()
        if unread or is_additive(mask):
            return ADDITIVE
        if isinstance(attention, nn.MultiheadAttention) and attention.training and attention.dropout > 0:
            return DROPOUT
        more = "a part of the attention was changed, or has hooks"
        if plain_parameters(attention, nn.MultiheadAttention) is None:
            return more
        parts = (
            plain_parameters(attention.out_proj, NonDynamicallyQuantizableLinear),
            plain_parameters(norm, nn.LayerNorm),
        )
        if None in parts or attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn:
            return more
        # A norm after the operator runs in torch.
        inside = (
            *parts[: 1 + self.norm_first],
            {"weight": attention.in_proj_weight},
        )
        return self._why_no_operator(x) if of_one_dtype(*inside) else _SEVERAL_DTYPES

    def _why_no_feed_forward(self, x: Tensor, norm: nn.Module) -> str | None:
        """Return why torch's own code must run the feed-forward network and its norm, or None."""
        if _activation(self) is None:
            return "the activation is neither relu nor gelu by the error function"
        made = self.activation
        parts = (
            *(plain_parameters(part, nn.Linear) for part in (self.linear1, self.linear2)),
            plain_parameters(norm, nn.LayerNorm),
            plain_parameters(made, type(made)) if isinstance(made, nn.Module) else {},
        )
        if None in parts:
            return "a part of the feed-forward network was changed, or has hooks"
        return self._why_no_operator(x) if of_one_dtype(*parts[: 2 + self.norm_first]) else _SEVERAL_DTYPES

    def _around(
        self, operator: Callable[..., Tensor], norm: nn.LayerNorm, x: Tensor, *weights: Tensor, **options: Any
    ) -> Tensor:
        """Return the operator's result, with `norm` applied first inside the operator (`norm_first`), or after it."""
        if self.norm_first:
            return operator(x, *weights, norm=(norm.weight, norm.bias, norm.eps), **options)
        normed: Tensor = norm(operator(x, *weights, **options))
        return normed

    def _attend(
        self, x: Tensor, attention: nn.MultiheadAttention, norm: nn.LayerNorm, context: Tensor | None, mask: Any
    ) -> Tensor:
        """Return x after an attention over `context`, or over x if that is None, computed by the operator."""
        single = x.dim() == 2
        if context is None:
            mask, x = bool_mask(mask, x)
        else:
            mask, context = bool_mask(mask, context)

        def batch_first(features: Tensor) -> Tensor:
            """Change the module's layout into the operator's layout, or back."""
            return features if single or attention.batch_first else features.transpose(0, 1)

        rows, others = (None if t is None else t.unsqueeze(0) if single else batch_first(t) for t in (x, context))
        assert rows is not None
        biases = (None, None, None) if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
        y = self._around(
            attention_layer,
            norm,
            rows,
            *attention.in_proj_weight.chunk(3),
            attention.out_proj.weight,
            num_heads=attention.num_heads,
            context=others,
            **dict(zip(("query_bias", "key_bias", "value_bias"), biases, strict=True)),
            output_bias=attention.out_proj.bias,
            key_padding_mask=mask.unsqueeze(0) if single and mask is not None else mask,
        )
        return y.squeeze(0) if single else batch_first(y)

    def _feed(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        """Return x after the feed-forward network, computed by the operator."""
        first, second = self.linear1, self.linear2
        options = {"expand_bias": first.bias, "contract_bias": second.bias, "activation": _activation(self)}
        return self._around(feed_forward_layer, norm, x, first.weight, second.weight, **options)

    def _check(self, **features: Tensor) -> None:
        """Raise unless these features fit the module and each other. The operators run after this check."""
        layout, sets = ("(B, N, C)", 0) if self.self_attn.batch_first else ("(N, B, C)", 1)
        dims: tuple[int, ...] = (2, 3)
        batch, weight = None, one_like(self.linear1, "weight", "bias")
        for name, each in features.items():
            check_features(name, each, f"{layout}, or (N, C) for all", dims, self.self_attn.embed_dim, weight)
            dims = (each.dim(),)
            if each.dim() == 3:
                batch = each.shape[sets] if batch is None else batch
                if each.shape[sets] != batch:
                    raise ValueError(mismatch(name, f"shape {tuple(each.shape)}", f"{layout} with B = {batch}"))

    def _check_padding(
        self, name: str, mask: Tensor | None, features: Tensor, attention: nn.MultiheadAttention
    ) -> None:
        """Raise unless the mask fits `features`, the keys of the operator that replaces `attention`."""
        shape = features.shape[:-1] if features.dim() == 2 or attention.batch_first else features.shape[1::-1]
        if mask is None:
            return
        if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
            given = mask.dtype if isinstance(mask, Tensor) else kind_of(mask)
            raise TypeError(mismatch(name, given, "a torch.Tensor of bool with True = ignore"))
        if mask.shape != shape:
            meaning = "(N,)" if len(shape) == 1 else "(B, N)"
            raise ValueError(mismatch(name, f"shape {tuple(mask.shape)}", f"{meaning} = {tuple(shape)}"))


class TransformerEncoderLayer(_FusedLayer, nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` with one operator for its attention and one for its feed-forward network.

    Constructor, parameters, `state_dict`, arguments and result are torch's; see torch's documentation. Norms,
    projections and residual connections are inside the operators (`cmab_kernels.attention_layer`,
    `cmab_kernels.feed_forward_layer`), which also support training. torch's own code runs in these
    cases:

    - a `src_mask` or `is_causal` is given;
    - there is dropout in training mode;
    - a float `src_key_padding_mask` has values other than 0 and -inf (on a GPU such a mask makes
      every result NaN);
    - a compiled call gets a float `src_key_padding_mask`, because it does not read the values;
    - the activation is neither relu nor gelu by the error function;
    - autocast is on;
    - `src` is a nested tensor;
    - no kernel supports the call (on a GPU);
    - a part has hooks, or another type than in torch's layer.

    `why_torch` says whether torch's code runs, and why.

    There is one difference: a row with all keys masked attends to nothing here, while torch returns
    NaN.

    Source: Attention Is All You Need (Vaswani et al., 2017), section 3.1.

    >>> theirs = torch.nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
    >>> ours = cmab_kernels.nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> tokens = torch.randn(2, 10, 16)
    >>> torch.allclose(ours(tokens), theirs(tokens), atol=1e-5)
    True
    >>> ours.why_torch(tokens), ours.why_torch(tokens, src_mask=torch.zeros(10, 10))
    (None, 'the operator has key padding masks, but no attention mask')
    """

    theirs = nn.TransformerEncoderLayer

    @extending(nn.TransformerEncoderLayer)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

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
        check_floating(self, src=src)
        is_causal = as_flag("is_causal", is_causal)
        if self.why_torch(src, src_mask, src_key_padding_mask, is_causal) is None:
            self._check(src=src)
            self._check_padding("src_key_padding_mask", src_key_padding_mask, src, self.self_attn)
            return self._feed(self._attend(src, self.self_attn, self.norm1, None, src_key_padding_mask), self.norm2)
        masks = () if src.is_nested else (src_mask, src_key_padding_mask)
        added = any(mask is not None and mask.is_floating_point() for mask in masks)
        if self._is_as_made() and not added:  # torch's fused layer reads a float mask as a mask of keys to ignore
            theirs: Tensor = super().forward(src, src_mask, src_key_padding_mask, is_causal)
            return theirs
        if src.is_nested:
            return torch.nested.as_nested_tensor([self(each, src_mask, None, is_causal) for each in src.unbind()])
        x = self._as_torch(lambda x: self._sa_block(x, src_mask, src_key_padding_mask, is_causal), self.norm1, src)
        return self._as_torch(self._ff_block, self.norm2, x)

    def _is_as_made(self) -> bool:
        """Return whether no part was replaced or hooked.

        torch's fused layer, which runs in eval mode, reads the weights of the parts and calls none of them.
        """
        kinds = {
            nn.MultiheadAttention: ("self_attn",),
            nn.Linear: ("linear1", "linear2"),
            nn.LayerNorm: ("norm1", "norm2"),
        }
        kinds[nn.Dropout] = ("dropout", "dropout1", "dropout2")
        if any(plain_parameters(getattr(self, name), kind) is None for kind, names in kinds.items() for name in names):
            return False
        made: Any = self.activation
        if isinstance(made, nn.Module) and own_parameters(made, type(made)) is None:
            return False
        # The activation was replaced.
        if self.activation_relu_or_gelu not in (
            0,
            _THEIR_ACTIVATIONS.get(_activation(self)),
        ):
            return False
        return torchs_attention.is_as_made(self.self_attn) and self._has_their_blocks()

    def why_torch(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> str | None:
        """Return why torch's own code runs for such a call, or None if the operators run."""
        attention = self._why_no_attention(src, self.self_attn, self.norm1, src_mask, is_causal, src_key_padding_mask)
        return attention or self._why_no_feed_forward(src, self.norm2)


class TransformerDecoderLayer(_FusedLayer, nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer` with one operator for each of its three parts.

    Constructor, parameters, `state_dict`, arguments and result are torch's. Each part runs torch's own code where its
    operator cannot run, as `TransformerEncoderLayer` says. For example, with a causal `tgt_mask` only the
    self-attention runs torch's code. `why_torch` says which parts run torch's code, and why.

    Source: Attention Is All You Need (Vaswani et al., 2017), section 3.1.

    >>> layer = cmab_kernels.nn.TransformerDecoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
    >>> causal = torch.nn.Transformer.generate_square_subsequent_mask(10)
    >>> layer(torch.randn(2, 10, 16), torch.randn(2, 50, 16), tgt_mask=causal).shape
    torch.Size([2, 10, 16])
    """

    theirs = nn.TransformerDecoderLayer
    multihead_attn: nn.MultiheadAttention

    @extending(nn.TransformerDecoderLayer)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copy or a pickle. torch's method would shadow an activation module with relu."""
        nn.Module.__setstate__(self, state)

    def _mha_block(
        self, x: Tensor, mem: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        """Return the result of torch's method. If parts of the attention were changed, they are called."""
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
        attended: Tensor = torchs_attention.call(self.multihead_attn, x, mem, mem, **masks, need_weights=False)[0]
        return self.dropout2(attended)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Return the decoded `tgt`, in its shape.

        The shape is (B, L, d_model) with `batch_first`, else (L, B, d_model), or (L, d_model) without a batch.
        """
        check_floating(self, tgt=tgt, memory=memory)
        tgt_is_causal, memory_is_causal = (
            as_flag("tgt_is_causal", tgt_is_causal),
            as_flag("memory_is_causal", memory_is_causal),
        )
        own, cross = (
            (tgt_mask, tgt_is_causal, tgt_key_padding_mask),
            (memory_mask, memory_is_causal, memory_key_padding_mask),
        )
        why_own, why_cross, why_feed = self._why_parts(tgt, own, cross).values()
        if (
            isinstance(self.self_attn, nn.MultiheadAttention)
            and isinstance(self.linear1, nn.Linear)
            and self._why_no_operator(tgt) is None
        ):
            self._check(tgt=tgt, memory=memory)
        x = tgt
        if why_own is None:
            self._check_padding("tgt_key_padding_mask", tgt_key_padding_mask, tgt, self.self_attn)
        if why_cross is None:
            self._check_padding("memory_key_padding_mask", memory_key_padding_mask, memory, self.multihead_attn)
        if why_own is None:
            x = self._attend(x, self.self_attn, self.norm1, None, tgt_key_padding_mask)
        else:
            x = self._as_torch(
                lambda x: self._sa_block(x, tgt_mask, tgt_key_padding_mask, tgt_is_causal), self.norm1, x
            )
        if why_cross is None:
            x = self._attend(x, self.multihead_attn, self.norm2, memory, memory_key_padding_mask)
        else:
            x = self._as_torch(
                lambda x: self._mha_block(x, memory, memory_mask, memory_key_padding_mask, memory_is_causal),
                self.norm2,
                x,
            )
        if why_feed is None:
            return self._feed(x, self.norm3)
        return self._as_torch(self._ff_block, self.norm3, x)

    def why_torch(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> str | None:
        """Return which parts run torch's own code for such a call, and why, or None if all parts run the operators."""
        own, cross = (
            (tgt_mask, tgt_is_causal, tgt_key_padding_mask),
            (memory_mask, memory_is_causal, memory_key_padding_mask),
        )
        parts = self._why_parts(tgt, own, cross)
        reasons = {reason for reason in parts.values() if reason is not None}
        if len(reasons) == 1 and None not in parts.values():
            return reasons.pop()
        return "; ".join(f"{part}: {reason}" for part, reason in parts.items() if reason is not None) or None

    def _why_parts(self, x: Tensor, own: _Masks, cross: _Masks) -> dict[str, str | None]:
        """Return, for each part, why torch's own code must run it, or None.

        `own` and `cross` are tuples (attention mask, whether it is causal, key padding mask).
        """
        return {
            "self-attention": self._why_no_attention(x, self.self_attn, self.norm1, *own),
            "cross-attention": self._why_no_attention(x, self.multihead_attn, self.norm2, *cross),
            "feed-forward": self._why_no_feed_forward(x, self.norm3),
        }

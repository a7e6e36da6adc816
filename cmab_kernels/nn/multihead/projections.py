"""The base class of modules with the constructor and the weights of `torch.nn.MultiheadAttention`: everything except
the attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.checks import as_flag, check_count, check_heads, check_mask, mismatch
from ..constructors import naming_options
from ..inputs import check_features, hide_padding, split_heads
from ..parts import called, is_own, one_like

if TYPE_CHECKING:
    from typing import Self


def no_extra_keys(why: str) -> dict[str, str]:
    """Return the entries of `MultiheadProjections.lacks` for a module without torch's extra keys, and the reason."""
    return dict.fromkeys(("add_bias_kv", "add_zero_attn"), f"False, as {why}")


class MultiheadProjections(torch.nn.MultiheadAttention):
    """Base class: torch's constructor, checks of the inputs, the projections to heads and back, and the sharing of
    weights."""

    lacks: ClassVar[Mapping[str, str]] = {}
    """Argument of torch's constructor that must be 0 or False here -> this value and the reason."""
    need_weights: bool = True
    """The default of `need_weights` in calls: True as in torch, unless `replace_modules` was given
    another value."""

    @naming_options
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, given in {"dropout": dropout, "add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn}.items():
            if given and name in self.lacks:
                raise ValueError(mismatch(name, given, self.lacks[name]))
        embed_dim, num_heads = check_heads("embed_dim", embed_dim, num_heads)
        kdim, vdim = (
            None if given is None else check_count(name, given) for name, given in (("kdim", kdim), ("vdim", vdim))
        )
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )

    def _asks_for_weights(self, need_weights: bool | None) -> bool:
        return self.need_weights if need_weights is None else as_flag("need_weights", need_weights)

    @classmethod
    def sharing(cls, module: torch.nn.MultiheadAttention, **options: Any) -> Self:
        """Make a module that shares the parameters of `module`, with its configuration changed by `options`.

        An option that the parameters determine raises a `ValueError`.
        """
        for name in (
            "embed_dim",
            "num_heads",
            "bias",
            "add_bias_kv",
            "kdim",
            "vdim",
            "device",
            "dtype",
            "conv_kernel_size",
        ):
            if name in options:
                raise ValueError(
                    mismatch(name, repr(options[name]), "no such option, because the shared parameters determine it")
                )
        configuration: dict[str, Any] = {
            "dropout": module.dropout,
            "bias": module.in_proj_bias is not None,
            "add_bias_kv": module.bias_k is not None,
            "add_zero_attn": module.add_zero_attn,
            "kdim": module.kdim,
            "vdim": module.vdim,
            "batch_first": module.batch_first,
            "device": torch.device("meta"),
        }
        shared = cls(module.embed_dim, module.num_heads, **{**configuration, **options})
        shared.adopt(module)
        return shared

    def adopt(self, module: torch.nn.MultiheadAttention) -> None:
        """Take over the parameters of `module` and the attributes that were added to `module`.

        `module` must have the same configuration.
        """
        # These attributes hold tensors in place of parameters.
        assigned = {name: module.__dict__[name] for name in self._parameters if name in module.__dict__}
        # `named_parameters` would skip the second name of a tied parameter.
        for name, weight in (module._parameters | assigned).items():
            if weight is not None and not isinstance(weight, torch.nn.Parameter):
                del self._parameters[name]
            setattr(self, name, weight)
        self.__dict__.update(
            {name: each for name, each in module.__dict__.items() if name not in self.__dict__ | assigned}
        )
        self.out_proj = module.out_proj
        self.training = module.training  # set directly, because train() would also change the shared out_proj

    @property
    def _like(self) -> Tensor:
        """A weight that has the module's dtype and device. If an adapter replaces `out_proj`, the
        adapter may have no weight."""
        return one_like(self, "in_proj_weight", "q_proj_weight", "in_proj_bias")

    def why_torch(self, *args: Any, **kwargs: Any) -> str | None:
        """Return why torch's implementation runs for such a call of `forward`, or None if the operators run.

        In this base class the result is always None.
        """
        return None

    def _project(self, part: int, features: Tensor) -> Tensor:
        """Return the heads (B, H, N, D) of the query (part 0), key (1) or value (2).

        torch packs the three weights into one matrix if all widths are equal.
        """
        packed, bias = self.in_proj_weight, self.in_proj_bias
        if packed is not None and not is_own(packed):  # a subclass of Tensor may not support slices
            projected = F.linear(features, packed, bias).chunk(3, -1)[part]
        else:
            separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weight = separate[part] if packed is None else packed.chunk(3)[part]
            projected = F.linear(features, weight, None if bias is None else bias.chunk(3)[part])
        return split_heads(self._batch_first(projected), self.num_heads)

    def _project_pair(
        self, key: Tensor, value: Tensor, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the heads of keys and values (B, H, N, D), and the mask (B, N). Masked inputs affect no gradient."""
        if key_padding_mask is not None:
            batched = key.dim() == 3
            ignore = key_padding_mask if self.batch_first or not batched else key_padding_mask.T
            hidden = hide_padding(key, ignore)
            key, value = hidden, hidden if value is key else hide_padding(value, ignore)
            key_padding_mask = key_padding_mask if batched else key_padding_mask.unsqueeze(0)
        return self._project(1, key), self._project(2, value), key_padding_mask

    @property
    def _drops(self) -> bool:
        return self.training and self.dropout > 0

    def _refuse_to_drop(self) -> None:
        """Raise if dropout would apply, because a stream keeps no attention weights to drop."""
        if self._drops:
            raise RuntimeError(
                f"dropout: it is {self.dropout} in training mode, but a stream has no dropout; use eval() or dropout=0"
            )

    @staticmethod
    def _shown(weights: Tensor, query: Tensor, average: bool) -> Tensor:
        """Return weights (B, H, L, N) as torch does.

        With `average` they are averaged over the heads. They have no batch dimension if `query` has none.
        """
        weights = weights.mean(1) if average else weights
        return weights if query.dim() == 3 else weights.squeeze(0)

    def _output(self, attended: Tensor, query: Tensor) -> Tensor:
        """Return the output projection of attended heads (B, H, L, D), in the layout of `query`."""
        attended = attended.transpose(1, 2)
        attended = self._batch_first(attended) if query.dim() == 3 else attended.squeeze(0)
        return called(self.out_proj, attended.flatten(-2))

    def _batch_first(self, features: Tensor) -> Tensor:
        """Return a view (B, N, ...) of features (N, C) or in the module's layout.

        The same call converts (B, N, ...) back to the module's layout.
        """
        if features.dim() == 2:
            return features.unsqueeze(0)
        return features if self.batch_first else features.transpose(0, 1)

    def _check(self, key_padding_mask: Tensor | None, **arguments: Tensor) -> None:
        """Raise for a wrong type, width, dtype, device or mask. The operator checks batch and length.

        The mask belongs to the last argument.
        """
        layout = "(B, N, C)" if self.batch_first else "(N, B, C)"
        widths = {
            "query": self.embed_dim,
            "src": self.embed_dim,
            "key": self.kdim,
            "inputs": self.kdim,
            "value": self.vdim,
        }
        dims: tuple[int, ...] = (2, 3)
        for name, features in arguments.items():
            check_features(name, features, f"{layout}, or (N, C) for all", dims, widths[name], self._like)
            dims = (features.dim(),)
        shape = features.shape[:-1]
        mask_name = "src_key_padding_mask" if "src" in arguments else "key_padding_mask"
        check_mask(key_padding_mask, features, shape if self.batch_first else shape[::-1], mask_name)

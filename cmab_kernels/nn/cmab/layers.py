"""The sub-layers of `CMAB`: pre-norm attention and feed-forward layers, each with a residual connection.

By default each layer adds its result to its input x. With `residual="normed"` each layer adds its result to norm(x), as
the authors' code of CMAB does (Feng et al., ICML 2024).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention import AttentionState, attention_state, latent_attention, projected_attention_state
from ...layers import AttentionLayer, FeedForwardLayer, attention, check_residual, feed_forward
from ...runtime.checks import check_count, check_heads, check_mask, mismatch
from ...runtime.dtypes import default_scale
from ..constructors import naming_options
from ..inputs import check_features, check_floating, for_part, hide_padding, join_heads, split_heads
from ..parts import check_together, layer_impl, of_one_dtype, plain_parameters, projects_inside

Device = torch.device | str | None
Dtype = torch.dtype | None
CHUNK = 16_384
"""The number of rows in a chunk of the inputs."""


class _Residual(nn.Module):
    """Base class of the layers. A layer adds its result to its input or to the normalised input."""

    residual: str = "input"
    """The constructor's `residual`. Layers that were pickled before the option existed have this
    default."""

    def __init__(self, residual: str) -> None:
        super().__init__()
        self.residual = check_residual(residual)


class FeedForward(_Residual):
    """Feed-forward layer: x + contract(a * gelu(gate)) with (a, gate) = expand(norm(x)), and gelu by the error
    function.

    Args:
        dim: columns of x (..., L, dim).
        ff_dim: hidden width, the number of columns of a and of the gate.
        residual: "input": results are added to x, as in a pre-norm Transformer. "normed": results are added to norm(x),
            as in the authors' code of CMAB.
        device, dtype: of the parameters.

    >>> layer = cmab_kernels.nn.FeedForward(dim=16, ff_dim=32)
    >>> layer(torch.randn(2, 8, 16)).shape
    torch.Size([2, 8, 16])
    """

    @naming_options
    def __init__(
        self, dim: int, ff_dim: int, residual: str = "input", *, device: Device = None, dtype: Dtype = None
    ) -> None:
        super().__init__(residual)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        dim, ff_dim = check_count("dim", dim), check_count("ff_dim", ff_dim)
        self.norm = nn.LayerNorm(dim, **factory)
        self.expand = nn.Linear(dim, 2 * ff_dim, **factory)
        self.contract = nn.Linear(ff_dim, dim, **factory)

    def forward(self, latents: Tensor) -> Tensor:
        check_floating(self, latents=latents)
        parts: dict[str, Any] = self._modules
        norm, expand, contract = parts["norm"], parts["expand"], parts["contract"]
        n, e, c = (
            plain_parameters(norm, nn.LayerNorm),
            plain_parameters(expand, nn.Linear),
            plain_parameters(contract, nn.Linear),
        )
        impl = layer_impl(latents)
        if impl is None or n is None or e is None or c is None or not of_one_dtype(n, e, c):
            normed = norm(latents)
            features, gate = expand(normed).chunk(2, dim=-1)
            return (normed if self.residual == "normed" else latents) + contract(features * F.gelu(gate))
        weight = cast("Tensor", c["weight"])
        check_features("latents", latents, "(..., L, dim)", (latents.dim(),), weight.shape[0], weight)
        check_together("latents", latents, norm=n, expand=e, contract=c)
        rows = latents.flatten(0, -2) if latents.dim() > 1 else latents.unsqueeze(0)
        parameters = n["weight"], n["bias"], e["weight"], e["bias"], c["weight"], c["bias"]
        given: list[Any] = [rows, *parameters, norm.eps, "geglu", self.residual, impl]
        y: Tensor = feed_forward(FeedForwardLayer(*given))
        return y.view_as(latents)


class _Attention(_Residual):
    """Base class of both attention layers.

    It has a norm, projections to query, key and value without bias, and an output projection with bias.
    """

    @naming_options
    def __init__(
        self, dim: int, num_heads: int, residual: str = "input", *, device: Device = None, dtype: Dtype = None
    ) -> None:
        super().__init__(residual)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        dim, self.num_heads = check_heads("dim", dim, num_heads)
        self.norm = nn.LayerNorm(dim, **factory)
        self.query = nn.Linear(dim, dim, bias=False, **factory)
        self.key = nn.Linear(dim, dim, bias=False, **factory)
        self.value = nn.Linear(dim, dim, bias=False, **factory)
        self.output = nn.Linear(dim, dim, **factory)

    def heads(self, projection: nn.Module, features: Tensor) -> Tensor:
        return split_heads(projection(features), self.num_heads)

    def add(self, latents: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's result from its latents and the attention's output (B, H, L, D).

        Latents are (B, L, C), or (L, C) shared over the batch.
        """
        rows = self.norm(latents) if self.residual == "normed" else latents
        result: Tensor = rows + self.output(join_heads(attended).to(latents.dtype))
        return result

    def _by_operator(
        self, latents: Tensor, context: Tensor | None, context_norm: nn.LayerNorm | None, mask: Tensor | None = None
    ) -> Tensor | None:
        """Return the layer's result (B, L, C) from one operator; None if the modules must be called one by one."""
        parts: dict[str, Any] = self._modules
        impl, norm = layer_impl(latents), parts["norm"]
        n, other = (
            plain_parameters(norm, nn.LayerNorm),
            {} if context_norm is None else plain_parameters(context_norm, nn.LayerNorm),
        )
        q, k, v, o = (plain_parameters(parts[name], nn.Linear) for name in ("query", "key", "value", "output"))
        if impl is None or n is None or other is None or q is None or k is None or v is None or o is None:
            return None
        if not of_one_dtype(n, other or n, q, k, v, o):
            return None
        weight = cast("Tensor", o["weight"])
        check_features("latents", latents, "(B, L, dim)", (3,), weight.shape[0], weight)
        check_together("latents", latents, norm=n, context_norm=other, query=q, key=k, value=v, output=o)
        if context is not None:
            check_features("context", context, "(B, N, dim)", (3,), weight.shape[0], weight)
            check_mask(mask, context, context.shape[:2])
            if context.shape[0] != latents.shape[0]:
                raise ValueError(
                    mismatch("context", f"batch {context.shape[0]}", f"batch {latents.shape[0]}, that of latents")
                )
        norms = n["weight"], n["bias"], other.get("weight"), other.get("bias")
        projections = q["weight"], q["bias"], k["weight"], k["bias"], v["weight"], v["bias"], o["weight"], o["bias"]
        # The width of the heads that remain after pruning.
        scale = default_scale(cast("Tensor", q["weight"]).shape[0] // self.num_heads)
        context_eps = 0.0 if context_norm is None else context_norm.eps
        numbers = self.num_heads, scale, norm.eps, context_eps
        given: list[Any] = [latents, context, mask, *norms, *projections, *numbers, self.residual, False, impl]
        return attention(AttentionLayer(*given))


class SelfAttention(_Attention):
    """Self-attention: x + output(attention of norm(x) over itself), for x (B, L, dim).

    Args:
        dim: columns of x.
        num_heads: a divisor of dim.
        residual: "input": results are added to x, as in a pre-norm Transformer. "normed": results are added to norm(x),
            as in the authors' code of CMAB.
        device, dtype: of the parameters.

    >>> layer = cmab_kernels.nn.SelfAttention(dim=16, num_heads=4)
    >>> layer(torch.randn(2, 8, 16)).shape
    torch.Size([2, 8, 16])
    """

    def forward(self, latents: Tensor) -> Tensor:
        check_floating(self, latents=latents)
        found = self._by_operator(latents, None, None)
        if found is not None:
            return found
        normed = self.norm(latents)
        return self.add(
            latents, latent_attention(*(self.heads(part, normed) for part in (self.query, self.key, self.value)))
        )


class CrossAttention(_Attention):
    """Cross-attention: x + output(attention of norm(x) over context_norm(context)), for x (B, L, dim) and a context (B,
    N, dim).

    `read` returns the `AttentionState` of a context. A later `read` can add more context to a state. `add` turns the
    `out` of a state into the layer's result.

    Args:
        dim: columns of x, and of the context.
        num_heads: a divisor of dim.
        residual: "input": results are added to x, as in a pre-norm Transformer. "normed": results are added to norm(x),
            as in the authors' code of CMAB.
        device, dtype: of the parameters.

    >>> layer = cmab_kernels.nn.CrossAttention(dim=16, num_heads=4)
    >>> x, context = torch.randn(2, 8, 16), torch.randn(2, 1000, 16)
    >>> state = layer.read(x, context[:, 600:], layer.read(x, context[:, :600]))
    >>> torch.allclose(layer.add(x, state.out), layer(x, context), atol=1e-5)
    True
    """

    @naming_options
    def __init__(
        self, dim: int, num_heads: int, residual: str = "input", *, device: Device = None, dtype: Dtype = None
    ) -> None:
        super().__init__(dim, num_heads, residual, device=device, dtype=dtype)
        self.context_norm = nn.LayerNorm(self.norm.normalized_shape, device=device, dtype=dtype)

    def forward(self, latents: Tensor, context: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the layer's result (B, L, dim).

        With latents (L, dim), which the batch shares, `read` reads the context, and memory does not
        grow with N.
        """
        check_floating(self, latents=latents, context=context)
        found = None if latents.dim() == 2 else self._by_operator(latents, context, self.context_norm, key_padding_mask)
        return self.add(latents, self.read(latents, context, None, key_padding_mask).out) if found is None else found

    def read(
        self,
        latents: Tensor,
        context: Tensor,
        state: AttentionState | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> AttentionState:
        """Return `state` updated with the context (B, N, C). A `state` of None means that no rows
        were read before.

        The operator computes keys and values inside, so that nothing of size N is allocated.
        """
        check_floating(self, latents=latents, context=context)
        query, projections = self.heads(self.query, self.norm(latents)), self.projections()
        if projections is None or not projects_inside(query, context, *projections[:2]):
            return self._read_in_parts(query, context, state, key_padding_mask)
        *weights, norm = projections
        return projected_attention_state(
            query, context, *weights, context_norm=norm, state=state, key_padding_mask=key_padding_mask
        )

    def projections(self) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, float]] | None:
        """Return the weights of keys and values and the context norm, as `projected_attention_state` takes them.

        Return None if the modules must be called one by one.
        """
        parts: dict[str, Any] = self._modules
        norm: Any = plain_parameters(parts["context_norm"], nn.LayerNorm)
        key, value = (plain_parameters(parts[name], nn.Linear) for name in ("key", "value"))
        if (
            norm is None
            or norm["bias"] is None
            or key is None
            or value is None
            or key["bias"] is not None
            or value["bias"] is not None
        ):
            return None
        if not of_one_dtype(norm, key, value):
            return None
        return (
            cast("Tensor", key["weight"]),
            cast("Tensor", value["weight"]),
            (norm["weight"], norm["bias"], parts["context_norm"].eps),
        )

    def _read_in_parts(
        self, query: Tensor, context: Tensor, state: AttentionState | None, key_padding_mask: Tensor | None
    ) -> AttentionState:
        """Return what `read` returns, but write keys and values to memory.

        This path serves inputs for which no kernel projects keys and values, and modules that must be called. With grad
        mode off, keys and values are computed chunk by chunk. With grad mode on, they are computed at once, because the
        backward pass needs all of them. A compiled or exported call also computes them at once, because a fixed number
        of chunks would restrict the call to a fixed number of rows.
        """
        at_once = torch.is_grad_enabled() or torch.compiler.is_compiling()
        context = for_part(context)
        chunks, masks = (
            None if t is None else [t] if at_once else t.split(CHUNK, dim=1) for t in (context, key_padding_mask)
        )
        assert chunks is not None
        masks = masks or [None] * len(chunks)
        for chunk, mask in zip(chunks, masks, strict=True):
            normed = self.context_norm(hide_padding(chunk, mask))
            state = attention_state(
                query, self.heads(self.key, normed), self.heads(self.value, normed), state=state, key_padding_mask=mask
            )
        assert state is not None  # a split has at least one chunk
        return state


class LatentLayer(nn.Module):
    """Half of a `CMAB`, which is also a layer of a Perceiver.

    In order: cross-attention of latents over a context, feed-forward, self-attention, feed-forward.

    Args:
        dim: columns of the latents (B, L, dim) and of the context (B, N, dim).
        num_heads: a divisor of dim.
        ff_dim: hidden width of the feed-forward layers.
        residual: "input": results are added to x, as in a pre-norm Transformer. "normed": results are added to norm(x),
            as in the authors' code of CMAB.
        device, dtype: of the parameters.

    >>> layer = cmab_kernels.nn.LatentLayer(dim=16, num_heads=4, ff_dim=32)
    >>> layer(torch.randn(2, 8, 16), torch.randn(2, 1000, 16)).shape
    torch.Size([2, 8, 16])
    """

    @naming_options
    def __init__(
        self,
        dim: int,
        num_heads: int,
        ff_dim: int,
        residual: str = "input",
        *,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.cross_attention = CrossAttention(dim, num_heads, residual, **factory)
        self.cross_feed_forward = FeedForward(dim, ff_dim, residual, **factory)
        self.self_attention = SelfAttention(dim, num_heads, residual, **factory)
        self.self_feed_forward = FeedForward(dim, ff_dim, residual, **factory)

    def forward(self, latents: Tensor, context: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return self.after_context(self.cross_attention(latents, context, key_padding_mask))

    def after_context(self, latents: Tensor) -> Tensor:
        """Apply the layers that follow the cross-attention. Their cost does not depend on the context."""
        return self.self_feed_forward(self.self_attention(self.cross_feed_forward(latents)))

"""The sub-layers of `CMAB`: pre-norm attention and feed-forward layers, each with a residual connection.

Each adds its result to its input x, or with `residual="normed"` to norm(x), as the authors' code of CMAB does (Feng et al., ICML 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks, _global_forward_hooks, _global_forward_pre_hooks
from torch.nn.utils import parametrize

from ..attention import AttentionState, attention_state, latent_attention
from ..attention.projected import projected_attention_state
from ..backends import choose, explain
from ..checks import autocasts, check_count, check_heads, check_mask, is_dense, kind_of, wrong
from ..layers.api import check_residual
from ..layers.schema import attention, feed_forward
from ..tracing import has_values, is_differentiated, needs_definition

NO_ATTENTION_MASK = "the operator has key padding masks, but no attention mask"
ADDITIVE = "the key padding mask is added to logits, and has other numbers than 0 and -inf"
DROPOUT = "dropout is on"
"""Reasons why torch's own code runs, as `why_torch` of several modules gives them."""

M = TypeVar("M", bound=nn.Module)
Device = torch.device | str | None
Dtype = torch.dtype | None
CHUNK = 16_384
"""Rows that are read at a time where inputs come in chunks."""


def split_heads(features: Tensor, heads: int) -> Tensor:
    """Return features (..., N, H D) as heads (..., H, N, D), a view."""
    return features.unflatten(-1, (heads, -1)).transpose(-3, -2)


def join_heads(features: Tensor) -> Tensor:
    """Return heads (..., H, L, D) as features (..., L, H D)."""
    return features.transpose(-3, -2).flatten(-2)


def check_features(name: str, features: Tensor, allowed: str, dims: tuple[int, ...], width: int, weight: Tensor) -> None:
    """Raise unless `features` has a number of dimensions in `dims`, `width` columns, and the dtype and device of the module's `weight`."""
    if not isinstance(features, Tensor):
        raise TypeError(wrong(name, f"is {kind_of(features)}", _needed(features)))
    if features.is_nested:
        raise ValueError(wrong(name, "is a nested tensor", "pad it, and pass a mask"))
    if features.layout is not torch.strided:
        raise TypeError(wrong(name, f"is {features.layout}", "a dense tensor is needed"))
    if features.dim() not in dims or features.dim() == 0 or features.shape[-1] != width:
        allowed = f"{allowed} is needed, with {width} columns{_likely_layout(features.shape, width)}"
        raise ValueError(wrong(name, f"has shape {tuple(features.shape)}", allowed))
    if features.device != weight.device:
        remedy = "load its weights, or name its class in accelerate's preload_module_classes" if weight.is_meta else "move them together"
        raise ValueError(wrong(name, f"is on {features.device}", f"the module is on {weight.device}; {remedy}"))
    if features.dtype != weight.dtype:
        double = torch.float64 in (features.dtype, weight.dtype)  # autocast leaves it as it is
        if double or not (features.is_floating_point() and autocasts(features.device)):
            remedy = "cast them alike" + ("" if double else ", or use autocast")
            raise TypeError(wrong(name, f"is {features.dtype}", f"the module is {weight.dtype}; {remedy}"))


def _needed(given: Any) -> str:
    """Return what is needed in place of what is no tensor, and how to make it."""
    array, numbers = type(given).__module__ == "numpy", isinstance(given, list | tuple)
    return "a torch.Tensor is needed" + ("; torch.from_numpy makes one" if array else "; torch.tensor makes one" if numbers else "")


def _likely_layout(shape: tuple[int, ...], width: int) -> str:
    """Return the likely cause of a wrong shape, where it shows."""
    if len(shape) > 1 and shape[-2] == width:
        return "; it seems to be transposed"
    if len(shape) > 2 and shape[-2] * shape[-1] == width:
        return "; heads are split inside, flatten(-2) joins these"
    return ""


def check_floating(module: nn.Module, /, **features: Any) -> None:
    """Raise unless these are floating tensors that torch's own code may read with the weights of `module`; that tells what else is wrong.

    None may be sparse. Autocast leaves float64 as it is: under it features and weights must be float64 both, or neither.
    """
    for name, each in features.items():
        if not isinstance(each, Tensor):
            raise TypeError(wrong(name, f"is {kind_of(each)}", _needed(each)))
        if not each.is_floating_point():
            raise TypeError(wrong(name, f"is {each.dtype}", "a floating torch.Tensor is needed"))
        if not is_dense(each) and not each.is_nested:
            raise TypeError(wrong(name, f"is {each.layout}", "a dense tensor is needed"))
        if autocasts(each.device):
            dtype = next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), each.dtype)
            if each.dtype != dtype and torch.float64 in (each.dtype, dtype):
                raise TypeError(wrong(name, f"is {each.dtype}", f"the module is {dtype}; cast them alike"))


def bool_mask(key_padding_mask: Tensor | None, key: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return a bool mask as it is, and a float mask, which is added to logits, as the bool mask of its -inf; and the key.

    `torch.nn.TransformerEncoderLayer` makes such float masks of bool ones. A number other than 0 and -inf in it is a `ValueError`, or in a
    compiled call a `RuntimeError`. On a GPU and under a transform or trace, where its values are not read, it makes the whole key NaN, and
    with it every result. The meta device has no values to check.
    """
    if not isinstance(key_padding_mask, Tensor) or not key_padding_mask.is_floating_point():
        return key_padding_mask, key
    ignore = key_padding_mask == -torch.inf
    sound = (ignore | (key_padding_mask == 0)).all()
    if key_padding_mask.is_meta:
        return ignore, key
    message = wrong("key_padding_mask", "is to be added to logits, which are not there", "a bool mask, or only 0 and -inf, is needed")
    if torch.compiler.is_compiling() and not key_padding_mask.is_cuda:
        torch._assert_async(sound, message)
        return ignore, key
    if key_padding_mask.is_cuda or not has_values(key_padding_mask):  # an assertion on the device would end every other use of it
        return ignore, key.masked_fill(~sound, torch.nan)
    if not sound:
        raise ValueError(message)
    return ignore, key


def is_additive(mask: Tensor | None) -> bool:
    """Return whether a float mask must be added to logits: it has other numbers than 0 and -inf, or learns.

    Numbers are not read on a GPU, where a program would wait for them, nor under a compiler: there `bool_mask` looks after them. Under a
    transform or trace, which must not depend on them, any mask may be one.
    """
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        return False
    if mask.requires_grad:
        return True
    if mask.is_cuda or mask.is_meta or torch.compiler.is_compiling():
        return False
    return not has_values(mask) or not bool(((mask == 0) | (mask == -torch.inf)).all())


def for_part(features: Tensor) -> Tensor:
    """Return features for the call of a part, detached where no gradient is recorded.

    A parameter, and a view of a leaf, still say there that they require one, and torch's counter, which puts hooks on all parts, fails.
    """
    return features if is_differentiated(features) else features.detach()


def hide_padding(features: Tensor, ignore: Tensor | None) -> Tensor:
    """Return features (..., C) with 0 where `ignore` (...) is True, if a gradient may be taken; else as they are.

    The operators do not read ignored keys, whose gradient is 0. But the gradient of a projection's weight is a product of that gradient
    and the projection's input, and 0 times a NaN in the padding is NaN.
    """
    return features if ignore is None or not torch.is_grad_enabled() else features.masked_fill(ignore.unsqueeze(-1), 0.0)


# ---- layers as one operator


def fused_impl(features: Tensor) -> str | None:
    """Return the implementation that computes a layer of `features` in one call; None where torch's own operations are the better choice.

    These are so where there is no kernel, and under autocast, which keeps norms and sums in float32 while one call has one dtype. In
    forward mode, which torch's attention lacks, the definition is better.
    """
    if autocasts(features.device):
        return None
    impl = choose("layers", "auto", features)
    return None if impl == "reference" and not needs_definition() else impl


_Linear, _LayerNorm = nn.Linear, nn.LayerNorm
_OF_LINEAR, _OF_NORM = nn.Linear.forward, nn.LayerNorm.forward


def has_other_forwards() -> bool:
    """Return whether another package has put a `forward` of its own into torch's class of linear layers, or of norms, as some LoRAs do."""
    return nn.Linear.forward is not _OF_LINEAR or nn.LayerNorm.forward is not _OF_NORM


def computed(module: M) -> M:
    """Return the module or, where it has parametrizations, a stand-in with their values: to look at one is to compute it.

    A method that reads a parameter more than once begins with this, so that in training a call is one step of a power iteration. Parts are
    those of the module; what is set on a stand-in itself is lost.
    """
    parts = module._modules
    if "parametrizations" not in parts:
        return module
    stand_in: M = object.__new__(parametrize.type_before_parametrizations(module))
    values = {name: getattr(module, name) for name in cast("nn.ModuleDict", parts["parametrizations"])}
    others = {name: part for name, part in parts.items() if name != "parametrizations"}
    stand_in.__dict__ = {**module.__dict__, "_parameters": {**module._parameters, **values}, "_modules": others}
    return stand_in


def one_like(module: nn.Module, *names: str) -> Tensor:
    """Return one of these tensors of a module, for its dtype and device: if it can, a parameter, or what a parametrization is given."""
    own = [module._parameters.get(name) for name in names]
    parametrized = module._modules.get("parametrizations")
    if parametrized is not None:
        own += [each for each in parametrized.parameters() if each.is_floating_point()]
    found: Tensor | None = next((each for each in own if each is not None), None)
    return found if found is not None else next(each for name in names if (each := getattr(module, name)) is not None)


def own_parameters(module: nn.Module, kind: type[nn.Module]) -> dict[str, nn.Parameter | None] | None:
    """Return the parameters of `module`; None if it is not just a `kind`, so that its own forward must run.

    A module with hooks, its own or those of all modules, a parametrization, or an adapter in its place is not just that. Nor is one with a
    `forward` of its own, as accelerate gives it, one whose `weight` or `bias` is no parameter, as in the replicas of DataParallel and in
    FullyShardedDataParallel, or a norm without weights, which the operators would take for no norm.
    """
    state = module.__dict__  # read directly: seven layers of a streaming update look up thirty parameters
    if type(module) is not kind or state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"]:
        return None
    if state["_backward_pre_hooks"] or "forward" in state or "weight" in state or "bias" in state:
        return None
    if _global_forward_hooks or _global_forward_pre_hooks or _global_backward_hooks or _global_backward_pre_hooks:
        return None
    parameters: dict[str, nn.Parameter | None] = state["_parameters"]
    if kind is _Linear or kind is _LayerNorm or kind is NonDynamicallyQuantizableLinear:
        if "weight" not in parameters or "bias" not in parameters:  # one is a buffer, or a property
            return None
        if kind is _LayerNorm:
            return None if parameters["weight"] is None or kind.forward is not _OF_NORM else parameters
        return parameters if kind.forward is _OF_LINEAR else None
    return parameters


def plain_parameters(module: nn.Module, kind: type[nn.Module]) -> dict[str, nn.Parameter | None] | None:
    """Return what `own_parameters` does, for an operator to read; None also if one is a subclass of Tensor, as a quantised weight is.

    A subclass says what `torch.nn.functional.linear` makes of it, and need not know the operators, nor torch's stacks and slices.
    """
    parameters = own_parameters(module, kind)
    if parameters is not None:
        for each in parameters.values():
            if not is_own(each):
                return None
    return parameters


def is_own(weight: Tensor | None) -> bool:
    """Return whether a weight is none of a subclass with operations of its own, or is absent; compilers' fake tensors have none."""
    return weight is None or type(weight) in _PLAIN_TYPES or hasattr(weight, "fake_mode")


_PLAIN_TYPES = (nn.Parameter, Tensor)


def called(part: Any, x: Tensor) -> Tensor:
    """Return part(x). For one row torch's call of a module takes as long as the module: what is just its kind is computed without it."""
    kind: Any = type(part)
    if (kind is nn.Linear or kind is NonDynamicallyQuantizableLinear) and (own := own_parameters(part, kind)) is not None:
        return F.linear(x, cast("Tensor", own["weight"]), own["bias"])
    if kind is nn.LayerNorm and (own := own_parameters(part, kind)) is not None:
        return torch.layer_norm(x, part.normalized_shape, own["weight"], own["bias"], part.eps)
    if kind is nn.Dropout and not part.training and own_parameters(part, kind) is not None:
        return x
    result: Tensor = part(x)
    return result


def of_one_dtype(*parts: Mapping[str, Tensor | None] | None) -> bool:
    """Return whether all weights of these modules have one dtype, as the operators need: a model may keep its norms in float32."""
    weights = (part.get("weight") for part in parts if part is not None)
    return len({weight.dtype for weight in weights if weight is not None}) == 1


def check_together(name: str, features: Tensor, **parts: Mapping[str, Tensor | None]) -> None:
    """Raise unless the parameters of all parts are where the `features` called `name` are.

    With one of them on the meta device, where a load left it, torch would run the shapes of a kernel and none of its work.
    """
    for part, parameters in parts.items():
        for kind, each in parameters.items():
            if each is not None and each.device != features.device:
                allowed = f"{name} is on {features.device}; move them together"
                raise ValueError(wrong(f"{part}.{kind}", f"is on {each.device}", allowed))


TRAINED_COLUMNS = 128
"""Columns of inputs up to which a GPU's kernels project them in training: gradients of more columns come piece by piece, each with all
scores anew."""


def projects_inside(query: Tensor, inputs: Tensor, *weights: Tensor) -> bool:
    """Return whether `projected_attention_state` is to read the inputs: always on a CPU; on a GPU where it has a kernel for such heads,
    and in training for inputs of few columns."""
    if not inputs.is_cuda:
        return True
    trained = torch.is_grad_enabled() and any(part.requires_grad for part in (query, inputs, *weights))
    if trained and inputs.shape[-1] > TRAINED_COLUMNS:
        return False
    return any(found.usable for found in explain("projected_attention_state", query, inputs, *weights)[:-1])


class _Residual(nn.Module):
    """Base class of the layers, which add their result to their input or to what their norm makes of it."""

    residual: str = "input"
    """As in the constructors. A layer that was pickled before there were two has none of its own."""

    def __init__(self, residual: str) -> None:
        super().__init__()
        self.residual = check_residual(residual)


class FeedForward(_Residual):
    """Feed-forward layer: x + contract(a * gelu(gate)) with (a, gate) = expand(norm(x)), and gelu by the error function.

    Args:
        dim: columns of x (..., L, dim).
        ff_dim: hidden width, that of a and of the gate.
        residual: "input": results are added to x, as in a pre-norm Transformer; "normed": to norm(x), as in the authors' code of CMAB.
        device, dtype: of the parameters.

    >>> layer = cmab_kernels.nn.FeedForward(dim=16, ff_dim=32)
    >>> layer(torch.randn(2, 8, 16)).shape
    torch.Size([2, 8, 16])
    """

    def __init__(self, dim: int, ff_dim: int, residual: str = "input", *, device: Device = None, dtype: Dtype = None) -> None:
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
        n, e, c = plain_parameters(norm, nn.LayerNorm), plain_parameters(expand, nn.Linear), plain_parameters(contract, nn.Linear)
        impl = fused_impl(latents)
        if impl is None or n is None or e is None or c is None or not of_one_dtype(n, e, c):
            normed = norm(latents)
            features, gate = expand(normed).chunk(2, dim=-1)
            return (normed if self.residual == "normed" else latents) + contract(features * F.gelu(gate))
        weight = cast("Tensor", c["weight"])
        check_features("latents", latents, "(..., L, dim)", (latents.dim(),), weight.shape[0], weight)
        check_together("latents", latents, norm=n, expand=e, contract=c)
        rows = latents.flatten(0, -2) if latents.dim() > 1 else latents.unsqueeze(0)
        tensors = n["weight"], n["bias"], e["weight"], e["bias"], c["weight"], c["bias"]
        return feed_forward(rows, *tensors, eps=norm.eps, activation="geglu", residual=self.residual, impl=impl).view_as(latents)


class _Attention(_Residual):
    """Base class of both attentions: a norm, projections to query, key and value without bias, and an output projection with bias."""

    def __init__(self, dim: int, num_heads: int, residual: str = "input", *, device: Device = None, dtype: Dtype = None) -> None:
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
        """Return the layer's result from its latents (B, L, C), or (L, C) shared over the batch, and from attention's (B, H, L, D)."""
        rows = self.norm(latents) if self.residual == "normed" else latents
        result: Tensor = rows + self.output(join_heads(attended).to(latents.dtype))
        return result

    def _fused(
        self, latents: Tensor, context: Tensor | None, context_norm: nn.LayerNorm | None, mask: Tensor | None = None
    ) -> Tensor | None:
        """Return the layer's result (B, L, C) by one operator; None if the modules must be called one by one."""
        parts: dict[str, Any] = self._modules
        impl, norm = fused_impl(latents), parts["norm"]
        n, other = plain_parameters(norm, nn.LayerNorm), {} if context_norm is None else plain_parameters(context_norm, nn.LayerNorm)
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
                raise ValueError(wrong("context", f"has batch {context.shape[0]}", f"latents have batch {latents.shape[0]}"))
        return attention(
            *(latents, context, mask, n["weight"], n["bias"], other.get("weight"), other.get("bias"), q["weight"], q["bias"]),
            *(k["weight"], k["bias"], v["weight"], v["bias"], o["weight"], o["bias"]),
            num_heads=self.num_heads,
            scale=(cast("Tensor", q["weight"]).shape[0] // self.num_heads) ** -0.5,  # of the heads that are left, where some were cut off
            eps=norm.eps,
            context_eps=0.0 if context_norm is None else context_norm.eps,
            residual=self.residual,
            impl=impl,
        )


class SelfAttention(_Attention):
    """Self-attention: x + output(attention of norm(x) over itself), for x (B, L, dim).

    Args:
        dim: columns of x.
        num_heads: a divisor of dim.
        residual: "input": results are added to x, as in a pre-norm Transformer; "normed": to norm(x), as in the authors' code of CMAB.
        device, dtype: of the parameters.

    >>> layer = cmab_kernels.nn.SelfAttention(dim=16, num_heads=4)
    >>> layer(torch.randn(2, 8, 16)).shape
    torch.Size([2, 8, 16])
    """

    def forward(self, latents: Tensor) -> Tensor:
        check_floating(self, latents=latents)
        fused = self._fused(latents, None, None)
        if fused is not None:
            return fused
        normed = self.norm(latents)
        return self.add(latents, latent_attention(*(self.heads(part, normed) for part in (self.query, self.key, self.value))))


class CrossAttention(_Attention):
    """Cross-attention: x + output(attention of norm(x) over context_norm(context)), for x (B, L, dim) and a context (B, N, dim).

    `read` gives the `AttentionState` of a context, which can be kept and added to; `add` turns its `out` into the layer's result.

    Args:
        dim: columns of x, and of the context.
        num_heads: a divisor of dim.
        residual: "input": results are added to x, as in a pre-norm Transformer; "normed": to norm(x), as in the authors' code of CMAB.
        device, dtype: of the parameters.

    >>> layer = cmab_kernels.nn.CrossAttention(dim=16, num_heads=4)
    >>> x, context = torch.randn(2, 8, 16), torch.randn(2, 1000, 16)
    >>> state = layer.read(x, context[:, 600:], layer.read(x, context[:, :600]))
    >>> torch.allclose(layer.add(x, state.out), layer(x, context), atol=1e-5)
    True
    """

    def __init__(self, dim: int, num_heads: int, residual: str = "input", *, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__(dim, num_heads, residual, device=device, dtype=dtype)
        self.context_norm = nn.LayerNorm(self.norm.normalized_shape, device=device, dtype=dtype)

    def forward(self, latents: Tensor, context: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the layer's result (B, L, dim). Latents (L, dim), shared over the batch, `read` the context: N takes no memory then."""
        check_floating(self, latents=latents, context=context)
        fused = None if latents.dim() == 2 else self._fused(latents, context, self.context_norm, key_padding_mask)
        return self.add(latents, self.read(latents, context, None, key_padding_mask).out) if fused is None else fused

    def read(
        self, latents: Tensor, context: Tensor, state: AttentionState | None = None, key_padding_mask: Tensor | None = None
    ) -> AttentionState:
        """Return `state` updated with the context (B, N, C); a `state` of None is that of no rows.

        Keys and values are computed inside the operator, so that nothing of size N is allocated.
        """
        check_floating(self, latents=latents, context=context)
        query, projections = self.heads(self.query, self.norm(latents)), self.projections()
        if projections is None or not projects_inside(query, context, *projections[:2]):
            return self._read_in_parts(query, context, state, key_padding_mask)
        *weights, norm = projections
        return projected_attention_state(query, context, *weights, context_norm=norm, state=state, key_padding_mask=key_padding_mask)

    def projections(self) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, float]] | None:
        """Return the weights of keys and values and the context norm, as `projected_attention_state` takes them.

        None if the modules must be called one by one.
        """
        parts: dict[str, Any] = self._modules
        norm: Any = plain_parameters(parts["context_norm"], nn.LayerNorm)
        key, value = (plain_parameters(parts[name], nn.Linear) for name in ("key", "value"))
        if norm is None or norm["bias"] is None or key is None or value is None or key["bias"] is not None or value["bias"] is not None:
            return None
        if not of_one_dtype(norm, key, value):
            return None
        return cast("Tensor", key["weight"]), cast("Tensor", value["weight"]), (norm["weight"], norm["bias"], parts["context_norm"].eps)

    def _read_in_parts(
        self, query: Tensor, context: Tensor, state: AttentionState | None, key_padding_mask: Tensor | None
    ) -> AttentionState:
        """Return what `read` does, with keys and values written to memory: where no kernel projects them, and for other modules.

        With grad mode off they are computed chunk by chunk. With it on they are computed at once, because the backward pass needs them all;
        and so they are in a compiled or exported call, which a number of chunks would restrict to as many rows.
        """
        at_once = torch.is_grad_enabled() or torch.compiler.is_compiling()
        context = for_part(context)
        chunks, masks = (None if t is None else [t] if at_once else t.split(CHUNK, dim=1) for t in (context, key_padding_mask))
        assert chunks is not None
        masks = masks or [None] * len(chunks)
        for chunk, mask in zip(chunks, masks, strict=True):
            normed = self.context_norm(hide_padding(chunk, mask))
            state = attention_state(query, self.heads(self.key, normed), self.heads(self.value, normed), state=state, key_padding_mask=mask)
        assert state is not None  # a split has at least one chunk
        return state


class LatentLayer(nn.Module):
    """Cross-attention of latents over a context, feed-forward, self-attention, feed-forward: half a `CMAB`, and a layer of a Perceiver.

    Args:
        dim: columns of the latents (B, L, dim) and of the context (B, N, dim).
        num_heads: a divisor of dim.
        ff_dim: hidden width of the feed-forward layers.
        residual: "input": results are added to x, as in a pre-norm Transformer; "normed": to norm(x), as in the authors' code of CMAB.
        device, dtype: of the parameters.

    >>> layer = cmab_kernels.nn.LatentLayer(dim=16, num_heads=4, ff_dim=32)
    >>> layer(torch.randn(2, 8, 16), torch.randn(2, 1000, 16)).shape
    torch.Size([2, 8, 16])
    """

    def __init__(
        self, dim: int, num_heads: int, ff_dim: int, residual: str = "input", *, device: Device = None, dtype: Dtype = None
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
        """Apply what follows the cross-attention; its cost does not depend on the context."""
        return self.self_feed_forward(self.self_attention(self.cross_feed_forward(latents)))

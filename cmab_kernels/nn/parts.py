"""The submodules of a module: which of them an operator may replace by one call, and which must be called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from torch.nn.utils import parametrize

from ..runtime.backends import choose, explain
from ..runtime.checks import autocasts, mismatch
from ..runtime.tracing import needs_definition

M = TypeVar("M", bound=nn.Module)


def layer_impl(features: Tensor) -> str | None:
    """Return the implementation that computes a layer of `features` in one call, or None for torch's own operations.

    torch's operations are better if there is no kernel. They are also better under autocast, which keeps norms and sums
    in float32, because one call has one dtype. In forward mode the PyTorch definition is better, because torch's
    attention has no forward mode.
    """
    if autocasts(features.device):
        return None
    impl = choose("layers", "auto", features)
    return None if impl == "reference" and not needs_definition() else impl


_Linear, _LayerNorm = nn.Linear, nn.LayerNorm
_OF_LINEAR, _OF_NORM = nn.Linear.forward, nn.LayerNorm.forward


def has_other_forwards() -> bool:
    """Return whether another package has replaced `forward` in `nn.Linear` or `nn.LayerNorm`, as some LoRAs do."""
    return nn.Linear.forward is not _OF_LINEAR or nn.LayerNorm.forward is not _OF_NORM


def computed(module: M) -> M:
    """Return the module, or a substitute with computed values if the module has parametrizations.

    A parametrized parameter is computed at every read. So a method that reads a parameter more than once begins with
    this function. Then one call in training mode is one step of the power iteration of a spectral norm. The submodules
    of a substitute are the submodules of the module. Attributes that are set on a substitute are lost.
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
    """Return one of these tensors of a module, for its dtype and device.

    A parameter comes first, then the original of a parametrization, so that no parametrization is computed if possible.
    """
    own = [module._parameters.get(name) for name in names]
    parametrized = module._modules.get("parametrizations")
    if parametrized is not None:
        own += [each for each in parametrized.parameters() if each.is_floating_point()]
    # The compiler of torch 2.6 does not support next(a, None).
    found: list[Tensor] = [each for each in own if each is not None]
    return found[0] if found else next(each for name in names if (each := getattr(module, name)) is not None)


def own_parameters(module: nn.Module, kind: type[nn.Module]) -> dict[str, nn.Parameter | None] | None:
    """Return the parameters of `module`, or None unless `module` is an unmodified `kind`.

    If the result is None, the caller must call the module. A module counts as modified in these
    cases: it has hooks (its own, or global hooks); it has a parametrization; an adapter replaces
    it; a `forward` was assigned to it, as by accelerate; or its `weight` or `bias` is not a
    parameter, as in replicas of DataParallel and in FullyShardedDataParallel. A norm without
    weights, which the operators would treat as no norm, and a norm over several dimensions, which
    they do not support, count as modified too.
    """
    state = module.__dict__  # read directly, for speed: a streaming update looks up thirty parameters
    if type(module) is not kind or state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"]:
        return None
    if state["_backward_pre_hooks"] or "forward" in state or "weight" in state or "bias" in state:
        return None
    if _global_forward_hooks or _global_forward_pre_hooks or _global_backward_hooks or _global_backward_pre_hooks:
        return None
    parameters: dict[str, nn.Parameter | None] = state["_parameters"]
    if kind is _Linear or kind is _LayerNorm or kind is NonDynamicallyQuantizableLinear:
        if "weight" not in parameters or "bias" not in parameters:  # a buffer or a property may replace one of them
            return None
        if kind is _LayerNorm:
            weight = parameters["weight"]
            return None if weight is None or weight.dim() != 1 or kind.forward is not _OF_NORM else parameters
        return parameters if kind.forward is _OF_LINEAR else None
    return parameters


def plain_parameters(module: nn.Module, kind: type[nn.Module]) -> dict[str, nn.Parameter | None] | None:
    """Return the result of `own_parameters`, but None if a parameter is of a subclass of Tensor. The result is for use
    by an operator.

    Quantised weights are such subclasses. A subclass defines its own `torch.nn.functional.linear`. It may not support
    the operators, or torch's stacks and slices.
    """
    parameters = own_parameters(module, kind)
    if parameters is not None:
        for each in parameters.values():
            if not is_own(each):
                return None
    return parameters


def is_own(weight: Tensor | None) -> bool:
    """Return whether a weight is None or uses torch's own operations, unlike some subclasses of
    Tensor.

    The fake tensors of compilers have no such operations, so they count as plain.
    """
    return weight is None or type(weight) in _PLAIN_TYPES or hasattr(weight, "fake_mode")


_PLAIN_TYPES = (nn.Parameter, Tensor)


def called(part: Any, x: Tensor) -> Tensor:
    """Return part(x), without torch's call of a module if the part is unmodified.

    For one row, torch's overhead for this call takes as long as the computation.
    """
    kind: Any = type(part)
    if (kind is nn.Linear or kind is NonDynamicallyQuantizableLinear) and (
        own := own_parameters(part, kind)
    ) is not None:
        return F.linear(x, cast("Tensor", own["weight"]), own["bias"])
    if kind is nn.LayerNorm and (own := own_parameters(part, kind)) is not None:
        return torch.layer_norm(x, part.normalized_shape, own["weight"], own["bias"], part.eps)
    if kind is nn.Dropout and not part.training and own_parameters(part, kind) is not None:
        return x
    result: Tensor = part(x)
    return result


def of_one_dtype(*parts: Mapping[str, Tensor | None] | None) -> bool:
    """Return whether all weights of these modules have one dtype, as the operators need.

    A model in half precision may keep its norms in float32.
    """
    weights = (part.get("weight") for part in parts if part is not None)
    return len({weight.dtype for weight in weights if weight is not None}) == 1


def check_together(name: str, features: Tensor, **parts: Mapping[str, Tensor | None]) -> None:
    """Raise unless the parameters of all parts are on the device of the argument `features`, which is called `name`.

    If a load left a parameter on the meta device, torch would compute the shapes of a kernel's results, but no values.
    """
    for part, parameters in parts.items():
        for kind, each in parameters.items():
            if each is not None and each.device != features.device:
                allowed = f"{features.device}, the device of {name}; move them together"
                raise ValueError(mismatch(f"{part}.{kind}", f"device {each.device}", allowed))


def projects_inside(query: Tensor, inputs: Tensor, *weights: Tensor) -> bool:
    """Return whether `projected_attention_state` should read the inputs.

    On a CPU the result is always True. On a GPU it is True if there is a kernel for such heads.
    """
    if not inputs.is_cuda:
        return True
    return any(found.usable for found in explain("projected_attention_state", query, inputs, *weights)[:-1])

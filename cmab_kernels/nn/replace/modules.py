"""Replace modules of a model by modules of this package, which take over their weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from ...runtime.checks import as_flag, kind_of, mismatch
from ..constructors import check_options
from ..multihead.projections import MultiheadProjections
from ..transformer.informer import InformerEncoderLayer
from ..transformer.layers import TransformerDecoderLayer, TransformerEncoderLayer
from .report import Replacement, Replacements

_REPLACEABLE: dict[type[nn.Module], tuple[type[nn.Module], ...]] = {
    nn.MultiheadAttention: (MultiheadProjections,),
    nn.TransformerEncoderLayer: (InformerEncoderLayer, TransformerEncoderLayer),
    nn.TransformerDecoderLayer: (TransformerDecoderLayer,),
}

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def replace_modules(
    model: nn.Module,
    mapping: Mapping[type[nn.Module], Callable[..., nn.Module]] | None = None,
    *,
    need_weights: bool = True,
    verbose: bool = True,
) -> Replacements:
    """Replace modules inside `model`, by type and in place, and return how many were replaced.

    Unless `verbose` is False, the function prints a table. It says for each new module which calls are fused, which
    calls go to torch, and why. The result is an `int` whose `str` is this table. `cmab_kernels.explain(model, *inputs)`
    says the same for a given call.

    `mapping` maps each old class to its new class. `cmab_kernels.nn.MultiheadAttention` may replace
    `torch.nn.MultiheadAttention` and computes the same result. Another attention of `cmab_kernels.nn` with the same
    constructor may also replace it, but computes another result: `MultiheadIntention`, `MultiheadSigmaIntention`,
    `NystromAttention`, `ContinualAttention`, `ContinualNystromAttention`, or a `functools.partial` of one with its
    options. `torch.nn.TransformerEncoderLayer` and `torch.nn.TransformerDecoderLayer` may be replaced by the classes of
    the same names in `cmab_kernels.nn`, which compute the same result. `InformerEncoderLayer` may also replace the
    encoder layer. Types match exactly: a subclass is not replaced, because it may have its own `forward`.

    The new modules hold the parameters of the old ones, so optimizers continue to work. They also have the same dtype,
    device and training mode. The modules of Intention have a new parameter `log_alpha`; add it to the optimizer. If a
    module is used in two places, one new module replaces it in both. References outside of the module tree keep the old
    module.

    The new modules are called in all modes. In eval mode without gradients, torch's own
    `torch.nn.TransformerEncoderLayer` would run its fused layer on the weights. After a replacement of its attention,
    it calls the new attention. `replace_modules` also stops a `torch.nn.TransformerEncoder` from making nested tensors
    of padded inputs, because only torch's own layers can read them. Then rows of padding hold numbers other than
    torch's zeros.

    `ContinualAttention` and `ContinualNystromAttention` return one output for a window unless you give them
    `output="retroactive"`. torch's layers add a single output to every token without an error.

    `need_weights` is the default of that argument in calls of the new attentions. Many models call an attention without
    the argument and never read the matrix of attention weights. torch's default is True, and then every call runs
    torch's code. With `need_weights=False` these calls are fused, and they return None instead of the weights. A call
    that gives the argument keeps its own value.

    torch's transformer layers apply dropout to attention weights by default. In training mode such calls therefore run
    torch's code. `partial(MultiheadAttention, dropout=0.0)` turns off this dropout, and no other dropout.

    Raises:
        TypeError: `mapping` is missing, is not a mapping, or has a pair that is not listed above; or a `partial` has an
            option that its class does not have, or lacks a required option.
        ValueError: the model itself would be replaced, which is impossible in place; a module has hooks, added parts,
            or an assigned `forward`, which would be lost (add these after the replacement); or the new module does not
            support the configuration of the old one. Intention and Nyström attention have no dropout (set the dropout
            of the attention to 0 first) and no extra keys. After an error the model is unchanged.

    >>> model = torch.nn.TransformerDecoderLayer(16, 2)
    >>> ours = {torch.nn.MultiheadAttention: cmab_kernels.nn.MultiheadAttention}
    >>> replaced = cmab_kernels.nn.replace_modules(model, ours, verbose=False)
    >>> replaced, replaced.modules[0]
    (2, Replacement(module='self_attn', kind='MultiheadAttention', training='dropout is on', evaluation=None))
    >>> model = torch.nn.ModuleDict({"reader": torch.nn.MultiheadAttention(16, 2)})
    >>> cmab_kernels.nn.replace_modules(model, ours, need_weights=False, verbose=False)
    1
    >>> model["reader"](*[torch.randn(4, 16)] * 3)[1] is None
    True
    >>> from functools import partial
    >>> model = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(16, 2, dropout=0.0), 3)
    >>> nystrom = partial(cmab_kernels.nn.NystromAttention, num_landmarks=8)
    >>> cmab_kernels.nn.replace_modules(model, {torch.nn.MultiheadAttention: nystrom}, verbose=False)
    6
    """
    if not isinstance(model, nn.Module):
        raise TypeError(mismatch("model", repr(model), "a torch.nn.Module"))
    verbose, need_weights = as_flag("verbose", verbose), as_flag("need_weights", need_weights)
    if not isinstance(mapping, Mapping):
        allowed = (
            "a mapping from classes to classes, as {torch.nn.MultiheadAttention: cmab_kernels.nn.MultiheadAttention}"
        )
        raise TypeError(mismatch("mapping", repr(mapping), allowed))
    for old, made in mapping.items():
        new, options = _class_of(made)
        if not (isinstance(new, type) and issubclass(new, _REPLACEABLE.get(old, ()))):
            names = "MultiheadAttention, TransformerEncoderLayer and TransformerDecoderLayer"
            allowed = f"only {names} of torch.nn, by their counterparts in cmab_kernels.nn"
            raise TypeError(mismatch("mapping", f"{old!r} to be replaced by {made!r}", allowed))
        _check_options(new, options)
    if type(model) in mapping:
        allowed = "a model that contains it; put it into a container, or make the new module and load its state_dict"
        raise ValueError(mismatch("model", f"{kind_of(model)} itself", allowed))
    places = list(_places(model, "", mapping, set()))
    replacements: dict[nn.Module, nn.Module] = {}
    for path, _, _, old_module in places:
        if old_module not in replacements:
            _refuse_hooks(path, old_module, mapping[type(old_module)])
            replacements[old_module] = _sharing(path, old_module, mapping[type(old_module)])
    for _, parent, name, old_module in places:
        setattr(parent, name, replacements[old_module])
    _have_them_called(model, set(replacements.values()))
    first_paths = {old: path for path, _, _, old in reversed(places)}
    for new in replacements.values():
        if isinstance(new, MultiheadProjections) and not need_weights:
            new.need_weights = False
    replaced = Replacements((Replacement.of(first_paths[old], new) for old, new in replacements.items()), need_weights)
    if verbose:
        print(replaced)
    return replaced


def _have_them_called(model: nn.Module, new: set[nn.Module]) -> None:
    """Turn off the fast paths of torch's encoders if modules inside are new, because the fast paths bypass these
    modules."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and module.self_attn in new:
            module.activation_relu_or_gelu = 0  # with 0, torch's layer does not run its fused code
        if isinstance(module, nn.TransformerEncoder) and not new.isdisjoint(module.modules()):
            module.use_nested_tensor = False


def _places(
    parent: nn.Module, path: str, mapping: Mapping[type[nn.Module], Any], seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Yield (path, parent, name, module) for each module to be replaced. Modules inside a replaced one are skipped."""
    seen.add(parent)
    for name, child in parent._modules.items():
        if type(child) in mapping:
            assert child is not None
            yield path + name, parent, name, child
        elif child is not None and child not in seen:
            yield from _places(child, f"{path}{name}.", mapping, seen)


def _refuse_hooks(path: str, module: nn.Module, made: Any) -> None:
    """Raise if the module has hooks, added parts or an assigned `forward`.

    `InformerEncoderLayer` also replaces the `self_attn` of the module, so the same check covers that submodule.
    """
    lost = {path: module}
    if _class_of(made)[0] is InformerEncoderLayer:
        lost[f"{path}.self_attn"] = module.get_submodule("self_attn")
        if added := [*module._parameters, *module._buffers]:
            raise ValueError(_lost(path, f"{', '.join(added)} added", "remove them, replace, add them again"))
    for name, each in lost.items():
        added = (
            [*each._buffers, *each._modules.keys() - {"out_proj"}] if isinstance(each, nn.MultiheadAttention) else []
        )
        if added:
            raise ValueError(_lost(name, f"{', '.join(added)} added", "remove them, replace, add them again"))
        if "forward" in each.__dict__:
            raise ValueError(_lost(name, "a `forward` assigned", "delete it, replace, assign it again"))
        for hooks in _HOOKS:
            if getattr(each, hooks):
                kind = hooks.strip("_").replace("_", " ")
                raise ValueError(_lost(name, kind, "remove them, replace, register them again"))


def _lost(path: str, what: str, advice: str) -> str:
    """Return the error message for an addition to a module that a replacement would lose."""
    return mismatch("model", f"{path!r} with {what}, which would be lost", f"a module without {what}; {advice}")


def _class_of(made: Any) -> tuple[Any, dict[str, Any]]:
    """Return (class, keyword arguments) for a class or a `functools.partial` of one."""
    return (made.func, made.keywords) if isinstance(made, partial) and not made.args else (made, {})


def _check_options(new: Any, options: Mapping[str, Any]) -> None:
    """Raise `TypeError` for an unknown or a missing option of the class.

    The arguments of torch's constructor come from the old module.
    """
    if not issubclass(new, MultiheadProjections):
        for option in options:
            raise TypeError(
                mismatch(
                    option,
                    f"an option of {new.__name__}",
                    "no option, because the new layer takes its configuration from the layer that it replaces",
                )
            )
        return
    signature = inspect.signature(new.__init__)
    check_options(new.__name__, signature, {"embed_dim": 1, "num_heads": 1, **options}, None)


def _sharing(path: str, module: nn.Module, made: Any) -> nn.Module:
    """Make the new module with the configuration and the parameters of `module`."""
    new, options = _class_of(made)
    try:
        return new.sharing(module, **options)
    except ValueError as error:
        raise ValueError(f"model: {path!r} cannot be replaced by a {new.__name__}: {error}") from error

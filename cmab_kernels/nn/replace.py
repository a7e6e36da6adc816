"""Swap modules of a model for ours, weights and all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from ..checks import wrong
from .informer import InformerEncoderLayer
from .multihead_intention import LearnedRidge
from .nystrom_attention import NystromAttention
from .projections import MultiheadProjections

_REPLACEABLE: dict[type[nn.Module], type[MultiheadProjections] | type[InformerEncoderLayer]] = {
    nn.MultiheadAttention: MultiheadProjections,
    nn.TransformerEncoderLayer: InformerEncoderLayer,
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


def replace_modules(model: nn.Module, mapping: Mapping[type[nn.Module], Callable[..., nn.Module]]) -> int:
    """Replace the modules inside `model` by type, in place; returns how many there were.

    `mapping` takes `torch.nn.MultiheadAttention` to `cmab_kernels.nn.MultiheadAttention`, which computes the same, or to another attention
    with its constructor, which need not: `MultiheadIntention`, `MultiheadSigmaIntention`, `NystromAttention`, `ContinualAttention`,
    `ContinualNystromAttention`, or a `functools.partial` of one with its options. It takes `torch.nn.TransformerEncoderLayer` to
    `InformerEncoderLayer` (`TypeError` for another pair). Types match exactly: a subclass with a forward of its own is left alone. The new
    modules hold the very parameters of the old, so optimizers go on working, in their dtype, on their device and in their training mode;
    those of Intention have a `log_alpha` of their own, for an optimizer to be told of. A module in two places is replaced once, by one.
    References held outside the module tree keep the old module. `ValueError`, with the model untouched, if the model itself is to be
    replaced (nobody outside could see it); if a module has hooks, which would be lost: register them after the replacement; or if the new
    module cannot be configured as the old one is: Intention and Nyström attention have no dropout of their own (set that of the attention
    to 0 first) and no extra keys.

    A `torch.nn.TransformerEncoder` into which one of these two comes no longer makes nested tensors of padded inputs, which only torch's
    layers can read.

    >>> model = torch.nn.TransformerDecoderLayer(16, 2)
    >>> cmab_kernels.nn.replace_modules(model, {torch.nn.MultiheadAttention: cmab_kernels.nn.MultiheadAttention})
    2
    >>> from functools import partial
    >>> model = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(16, 2, dropout=0.0), 3)
    >>> nystrom = partial(cmab_kernels.nn.NystromAttention, num_landmarks=8)
    >>> cmab_kernels.nn.replace_modules(model, {torch.nn.MultiheadAttention: nystrom})
    6
    """
    for old, made in mapping.items():
        base, new = _REPLACEABLE.get(old), _class_of(made)[0]
        if base is None or not (isinstance(new, type) and issubclass(new, base)):
            allowed = "only torch.nn.MultiheadAttention and torch.nn.TransformerEncoderLayer, by their counterparts in cmab_kernels.nn"
            raise TypeError(wrong("mapping", f"asks to replace {old!r} by {made!r}", allowed))
    if type(model) in mapping:
        allowed = "put it into a container, or make the new module and load its state_dict"
        raise ValueError(wrong("model", f"is itself a {type(model).__name__}", allowed))
    places = list(_places(model, "", mapping, set()))
    replacements: dict[nn.Module, nn.Module] = {}
    for path, _, _, old_module in places:
        if old_module not in replacements:
            _refuse_hooks(path, old_module)
            replacements[old_module] = _sharing(path, old_module, mapping[type(old_module)])
    for _, parent, name, old_module in places:
        setattr(parent, name, replacements[old_module])
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(
            isinstance(inner, LearnedRidge | NystromAttention) for inner in module.modules()
        ):
            module.use_nested_tensor = False
    return len(replacements)


def _places(
    parent: nn.Module, path: str, mapping: Mapping[type[nn.Module], Any], seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """(path, parent, name, module) of what is to be replaced, not looking inside of that."""
    seen.add(parent)
    for name, child in parent._modules.items():
        if type(child) in mapping:
            assert child is not None
            yield path + name, parent, name, child
        elif child is not None and child not in seen:
            yield from _places(child, f"{path}{name}.", mapping, seen)


def _refuse_hooks(path: str, module: nn.Module) -> None:
    """Of the module, and of the attention inside an encoder layer, which goes with it."""
    lost = {path: module, f"{path}.self_attn": getattr(module, "self_attn", None)}
    for name, each in lost.items():
        for hooks in _HOOKS:
            if each is not None and getattr(each, hooks):
                raise ValueError(
                    wrong("model", f"has {hooks.strip('_').replace('_', ' ')} on {name!r}", "remove them, replace, register them again")
                )


def _class_of(made: Any) -> tuple[Any, dict[str, Any]]:
    """A class, or a `partial` of one, as the class and its options."""
    return (made.func, made.keywords) if isinstance(made, partial) and not made.args else (made, {})


def _sharing(path: str, module: nn.Module, made: Any) -> nn.Module:
    """A new one with the configuration of `module` and its very parameters."""
    new, options = _class_of(made)
    try:
        return new.sharing(module, **options)
    except ValueError as error:
        raise ValueError(wrong("model", f"has a {type(module).__name__} {path!r} with what {new.__name__} lacks", str(error))) from error

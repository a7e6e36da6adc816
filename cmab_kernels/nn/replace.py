"""Swap modules of a model for ours, weights and all."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..checks import wrong
from .multihead_attention import MultiheadAttention

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


def replace_modules(model: nn.Module, mapping: Mapping[type[nn.Module], type[nn.Module]]) -> int:
    """Replace the modules inside `model` by type, in place; returns how many there were.

    `mapping` is {torch.nn.MultiheadAttention: cmab_kernels.nn.MultiheadAttention} (`TypeError` for another pair). Types match exactly: a
    subclass with a forward of its own is left alone. The new modules hold the very parameters of the old, so optimizers go on working, in
    their dtype, on their device and in their training mode. A module in two places is replaced once, by one. `ValueError`, with the model
    untouched, if the model itself is to be replaced (nobody outside could see it) or if a module has hooks, which would be lost: register
    them after the replacement. References held outside the module tree keep the old module.

    >>> model = torch.nn.TransformerDecoderLayer(16, 2)
    >>> cmab_kernels.nn.replace_modules(model, {torch.nn.MultiheadAttention: cmab_kernels.nn.MultiheadAttention})
    2
    """
    for old, new in mapping.items():
        if old is not nn.MultiheadAttention or not (isinstance(new, type) and issubclass(new, MultiheadAttention)):
            allowed = "only {torch.nn.MultiheadAttention: cmab_kernels.nn.MultiheadAttention} is known"
            raise TypeError(wrong("mapping", f"asks to replace {old!r} by {new!r}", allowed))
    if type(model) in mapping:
        allowed = "put it into a container, or make the new module and load its state_dict"
        raise ValueError(wrong("model", f"is itself a {type(model).__name__}", allowed))
    replacements = {}
    for name, module in model.named_modules():
        if type(module) in mapping:
            assert isinstance(module, nn.MultiheadAttention)
            _refuse_hooks(name, module)
            replacements[module] = _sharing(module, mapping[type(module)])
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                setattr(parent, name, replacements[child])
    return len(replacements)


def _refuse_hooks(name: str, module: nn.Module) -> None:
    for hooks in _HOOKS:
        if getattr(module, hooks):
            raise ValueError(
                wrong("model", f"has {hooks.strip('_').replace('_', ' ')} on {name!r}", "remove them, replace, register them again")
            )


def _sharing(module: nn.MultiheadAttention, new: type[nn.Module]) -> nn.Module:
    """A `new` with the configuration of `module` and its very parameters."""
    shared = new(
        module.embed_dim,
        module.num_heads,
        dropout=module.dropout,
        bias=module.in_proj_bias is not None,
        add_bias_kv=module.bias_k is not None,
        add_zero_attn=module.add_zero_attn,
        kdim=module.kdim,
        vdim=module.vdim,
        batch_first=module.batch_first,
        device=torch.device("meta"),
    )
    for name, parameter in module.named_parameters(recurse=False):
        setattr(shared, name, parameter)
    shared.out_proj = module.out_proj
    shared.training = module.training  # of this module alone: out_proj has its own
    return shared

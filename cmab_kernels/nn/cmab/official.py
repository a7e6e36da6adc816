"""The names under which the authors' code of CMAB saves weights (https://github.com/BorealisAI/constant-memory-anp).

The licence of that code forbids its reuse. So the names were read from the files that it saves, and the outputs that
belong to them were recorded from its runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ...runtime.checks import kind_of, mismatch

LAYERS = {
    "compress.cross_attention": "layer_cross_attn",
    "compress.cross_feed_forward": "layer_cross_ff",
    "compress.self_attention": "layer_latent_self_attn",
    "compress.self_feed_forward": "layer_latent_ff",
    "retrieve.cross_attention": "cross_attn",
    "retrieve.cross_feed_forward": "cross_ff",
    "retrieve.self_attention": "latent_self_attn",
    "retrieve.self_feed_forward": "latent_ff",
}
"""Layer of a `CMAB` -> the authors' name of it."""
PARTS = {
    "norm": "norm",
    "context_norm": "norm_context",
    "query": "fn.to_q",
    "key": "fn.to_kv",
    "value": "fn.to_kv",
    "output": "fn.to_out",
    "expand": "fn.net.0",
    "contract": "fn.net.2",
}
"""Submodule of a layer -> the authors' name of it. Keys and values are the two halves of one matrix."""


def name_in_block(name: str) -> str:
    """Return the authors' name of a parameter of a `CMAB`."""
    if name == "latents":
        return name
    layer, part, kind = name.rsplit(".", 2)
    return f"{LAYERS[layer]}.{PARTS[part]}.{kind}"


def check_weights(state_dict: Any) -> None:
    """Raise unless `state_dict` maps names to tensors."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(mismatch("state_dict", kind_of(state_dict), "a dict of names and tensors"))
    others = [name for name, tensor in state_dict.items() if not isinstance(tensor, Tensor)]
    if others:
        raise ValueError(
            mismatch("state_dict", f"no tensor at {listed(others)}", "only tensors, as the authors' module saves them")
        )


def load(
    module: nn.Module, state_dict: Mapping[str, Tensor], name: Callable[[str], str], unused: Collection[str] = ()
) -> None:
    """Fill the parameters of the module.

    `name` maps a parameter's name to the authors' name. `unused` are the authors' names that the module does not use. A
    `ValueError` names the weights that are missing, that belong to another model, or that have another shape. It is
    raised before any parameter is written.
    """
    parameters = dict(module.named_parameters())
    names = {ours: name(ours) for ours in parameters}
    missing = names.values() - state_dict.keys()
    foreign = state_dict.keys() - names.values() - set(unused)
    if missing or foreign:
        faults = [f"{what} {listed(each)}" for what, each in (("no", missing), ("also", foreign)) if each]
        raise ValueError(mismatch("state_dict", " and ".join(faults), f"the weights of a {type(module).__name__}"))
    for ours, parameter in parameters.items():
        pair = names[ours].endswith(f"{PARTS['key']}.weight")
        shape = (2 * parameter.shape[0], *parameter.shape[1:]) if pair else tuple(parameter.shape)
        if state_dict[names[ours]].shape != shape:
            found = tuple(state_dict[names[ours]].shape)
            raise ValueError(mismatch(f"state_dict[{names[ours]!r}]", f"shape {found}", shape))
    module.load_state_dict({ours: _part(ours, state_dict[theirs]) for ours, theirs in names.items()}, strict=False)


def _part(ours: str, tensor: Tensor) -> Tensor:
    """Return a key or value projection's half of the tensor, or the whole tensor for other parameters."""
    part = ours.rsplit(".", 2)[-2:-1]
    return tensor.chunk(2)[part == ["value"]] if part in (["key"], ["value"]) else tensor


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return the sorted names as text. After the first `most` names the text gives the number that remains."""
    known = sorted(map(repr, names))
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more

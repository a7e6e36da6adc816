"""Load weights saved by the authors' code of CMANP and LBANP into the models of this package; see
`cmab_kernels.nn.cmab.official`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from cmab_kernels.nn.cmab.official import check_weights, name_in_block
from cmab_kernels.nn.cmab.official import load as load_weights
from cmab_kernels.runtime.checks import mismatch

Model = TypeVar("Model", bound=nn.Module)

PLACES = {
    "embedding": "embedder",
    "decoder.embedding": "query_embedder",
    "decoder.norm": "norm",
    "head.layers": "predictor",
    "head.mean": "mean_net",
    "head.encoder": "std_encoder",
    "head.projection": "projector",
    "head.diagonal": "diag_net",
}
"""Name of each part outside the layers -> the authors' name."""


def load(kind: type[Model], state_dict: Mapping[str, Tensor], *, num_heads: int, bound_std: bool) -> Model:
    """Return a model of this kind with the weights of `state_dict`, in their dtype, and with the authors' kind of
    residual.

    A `ValueError` names entries that are missing or belong to another model.
    """
    check_weights(state_dict)
    try:
        sizes = _sizes(state_dict)
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(mismatch("state_dict", str(error), "what the authors' code saves")) from error
    known = inspect.signature(kind).parameters  # an LBANP has no block latents
    made = kind(
        num_heads=num_heads,
        bound_std=bound_std,
        residual="normed",
        **{name: sizes[name] for name in sizes if name in known},
    )
    model = made.to(state_dict["latents"].dtype)
    # The authors' joint model saves a head that it does not use.
    unused = [name for name in state_dict if name.startswith("predictor.")] if "rank" in known else []
    load_weights(model, state_dict, _official_name, unused)
    return model


def _sizes(state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of the constructor that follow from the shapes of the weights."""

    def shape(name: str) -> tuple[int, ...]:
        if name not in state_dict:
            raise ValueError(f"no {name!r}")
        return tuple(state_dict[name].shape)

    def layers(pattern: str) -> int:
        return len({found[1] for name in state_dict if (found := re.fullmatch(pattern, name))})

    num_latents, dim = shape("latents")
    dim_x = shape("query_embedder.0.weight")[1]
    dim_y = shape("embedder.0.weight")[1] - dim_x
    sizes: dict[str, Any] = {
        "dim_x": dim_x,
        "dim_y": dim_y,
        "dim": dim,
        "num_latents": num_latents,
        "depth": layers(r"encoder\.layers\.(\d+)\..+"),
    }
    sizes["ff_dim"] = shape("encoder.layers.0.cross_ff.fn.net.2.weight")[1]
    sizes["embedding_depth"] = layers(r"embedder\.(\d+)\.weight")
    if "encoder.layers.0.latents" in state_dict:
        sizes["num_block_latents"] = shape("encoder.layers.0.latents")[0]
    if "projector.0.weight" in state_dict:
        sizes["projection_depth"] = layers(r"projector\.(\d+)\.weight")
        sizes["rank"] = shape(f"projector.{2 * sizes['projection_depth'] - 2}.weight")[0] // dim_y
    if any(name.startswith("diag_net.") for name in state_dict):
        sizes["covariance"] = "low-rank"
    return sizes


def _official_name(name: str) -> str:
    """Return the authors' name of a parameter of a model."""
    found = re.fullmatch(r"(blocks\.blocks|layers|decoder\.layers)\.(\d+)\.(.+)", name)
    if found:
        place, index, rest = found.groups()
        coder = "decoder" if place == "decoder.layers" else "encoder"
        # A layer of LBANP or of the decoder is the second half of a block, or part of that half.
        return f"{coder}.layers.{index}.{name_in_block(rest if place == 'blocks.blocks' else f'retrieve.{rest}')}"
    for ours, theirs in PLACES.items():
        if name.startswith(f"{ours}."):
            return theirs + name[len(ours) :]
    return name

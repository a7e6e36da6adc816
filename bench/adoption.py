"""`python -m bench.adoption [MODEL ...]`: models of other packages unchanged, and with this package's attention in
them.

Weights are random; sizes are those of small published models. All versions compute the same result. This is first
checked against the original model in float64. Models with torch's own layers run with torch's fast path on and off;
models of `transformers` run with each of their attentions. The ratio is to the fastest of these. The figure is the
least CPU time of one thread, over calls of the versions in turn; other programs disturb it less than wall-clock time.
It writes `bench/results/adoption.json`, where models that are not named keep their rows. `--page` writes the table of
docs/use_it_in.md from this file.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cmab_kernels import nn as ours
from cmab_kernels.integrations import register_transformers

from . import provenance
from .devices import threads
from .harness import ERROR_BOUND, relative_error
from .load import others_since, usage
from .report.marks import Marks
from .runs import write_json

RESULTS = provenance.ROOT / "bench" / "results" / "adoption.json"
PLACE = Marks(provenance.ROOT / "docs" / "use_it_in.md", "adoption")
BUDGET = 2.0
"""CPU seconds of timing for a model in one mode; there are at least four rounds."""
PASSES = ("evaluation", "training")

Inputs = Mapping[str, Any]
Way = Callable[[Inputs], Tensor]


class Subject(NamedTuple):
    """A model from another package."""

    told: str
    """The model's description in the table."""
    make: Callable[[], tuple[nn.Module, Inputs]]
    ways: Callable[[nn.Module], dict[str, Way]]
    """The model -> the versions of it that are run; names of this package's versions begin with "cmab"."""


# ---- ways ------------------------------------------------------------------------------------------------------------


def by_name(model: nn.Module) -> dict[str, Way]:
    """A model of `transformers`, by the name of its attention; some models have no "sdpa"."""
    register_transformers()

    def way(name: str) -> Way:
        made: Any = deepcopy(model)
        made.set_attn_implementation(name)
        return lambda inputs: made(**inputs)[0]

    return {name: way(name) for name in ("eager", "sdpa", "cmab") if name != "sdpa" or model._supports_sdpa}


def by_modules(model: nn.Module) -> dict[str, Way]:
    """A model with torch's attention inside: unchanged, and with the replacements of `replace_modules`."""

    def way(made: nn.Module, fast: bool = True) -> Way:
        def run(inputs: Inputs) -> Tensor:
            torch.backends.mha.set_fastpath_enabled(fast)
            try:
                out: Tensor = made(*inputs.values())
                return out
            finally:
                torch.backends.mha.set_fastpath_enabled(True)

        return run

    def replaced(mapping: Mapping[type[nn.Module], type[nn.Module]]) -> nn.Module:
        made = deepcopy(model)
        ours.replace_modules(made, mapping, verbose=False)
        return made

    attention: dict[type[nn.Module], type[nn.Module]] = {nn.MultiheadAttention: ours.MultiheadAttention}
    found = {
        "torch, fast path": way(model),
        "torch, no fast path": way(deepcopy(model), fast=False),
        "cmab, attention": way(replaced(attention)),
    }
    if any(type(part) is nn.TransformerEncoderLayer for part in model.modules()):
        found["cmab, layers"] = way(replaced({nn.TransformerEncoderLayer: ours.TransformerEncoderLayer}))
    return found


# ---- models ----------------------------------------------------------------------------------------------------------


def encoder(batch: int, tokens: int, heads: int, width: int) -> Subject:
    """Two of torch's encoder layers with self-attention."""

    def make() -> tuple[nn.Module, Inputs]:
        features = heads * width
        layer = nn.TransformerEncoderLayer(features, heads, 4 * features, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2), {"src": torch.randn(batch, tokens, features)}

    return Subject(f"`torch.nn.TransformerEncoder`: {batch} x {tokens} tokens, heads of {width}", make, by_modules)


def set_transformer() -> tuple[nn.Module, Inputs]:
    from torch_geometric.nn import SetTransformerAggregation

    sets, points = 8, 2000
    return SetTransformerAggregation(64, num_seed_points=4, heads=4), {
        "x": torch.randn(sets * points, 64),
        "index": torch.arange(sets).repeat_interleave(points),
    }


def gps() -> tuple[nn.Module, Inputs]:
    from torch_geometric.nn import GINConv, GPSConv

    graphs, nodes = 4, 1000
    local = GINConv(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    edges = torch.randint(nodes, (2, 4 * nodes)).repeat(1, graphs) + nodes * torch.arange(graphs).repeat_interleave(
        4 * nodes
    )
    return GPSConv(64, local, heads=4), {
        "x": torch.randn(graphs * nodes, 64),
        "edge_index": edges,
        "batch": torch.arange(graphs).repeat_interleave(nodes),
    }


NO_DROPOUT = (
    "dropout",
    "attention_dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "activation_dropout",
)


def of_transformers(
    told: str, kind: str, inputs: Callable[[], Inputs], sizes: Mapping[str, Any], part: str = ""
) -> Subject:
    """A model of `transformers` by the name of its class, without dropout;
    `part`: the module of the model to call, if it is not the whole model."""

    def make() -> tuple[nn.Module, Inputs]:
        import transformers

        model_class = getattr(transformers, kind)
        config = model_class.config_class(**sizes)
        for name in NO_DROPOUT:
            if isinstance(getattr(config, name, None), float):
                setattr(config, name, 0.0)
        return model_class(config).get_submodule(part), inputs()

    return Subject(told, make, by_name)


def series(past: int, features: int, batch: int) -> Inputs:
    """The inputs of a TimeSeriesTransformer in training."""
    future = 24
    return {
        "past_values": torch.randn(batch, past + 7).abs(),
        "past_time_features": torch.randn(batch, past + 7, features),
        "past_observed_mask": torch.ones(batch, past + 7),
        "future_values": torch.randn(batch, future).abs(),
        "future_time_features": torch.randn(batch, future, features),
    }


WIDE = {"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 4}
"""Four layers with heads of 64."""

SUBJECTS = {
    "set-transformer": Subject(
        "PyTorch Geometric's `SetTransformerAggregation`: 8 sets of 2,000 points, heads of 16",
        set_transformer,
        by_modules,
    ),
    "gps": Subject("PyTorch Geometric's `GPSConv`: 4 graphs of 1,000 nodes, heads of 16", gps, by_modules),
    "encoder-64": encoder(8, 64, 4, 16),
    "encoder-197": encoder(8, 197, 4, 16),
    "encoder-512": encoder(4, 512, 4, 16),
    "encoder-wide": encoder(4, 512, 4, 64),
    "time-series": of_transformers(
        "TimeSeriesTransformer: 8 series of 336 steps, heads of 13",
        "TimeSeriesTransformerModel",
        lambda: series(336, 2, 8),
        {
            "prediction_length": 24,
            "context_length": 336,
            "num_time_features": 2,
            "d_model": 26,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "lags_sequence": [1, 2, 3, 4, 5, 6, 7],
        },
    ),
    "patch-tst": of_transformers(
        "PatchTST: 8 series of 7 channels, 42 patches, heads of 8",
        "PatchTSTModel",
        lambda: {"past_values": torch.randn(8, 336, 7)},
        {
            "num_input_channels": 7,
            "context_length": 336,
            "patch_length": 16,
            "patch_stride": 8,
            "d_model": 128,
            "num_attention_heads": 16,
            "ffn_dim": 256,
            "num_hidden_layers": 3,
        },
    ),
    "vit": of_transformers(
        "ViT: 4 pictures, 197 tokens, heads of 64",
        "ViTModel",
        lambda: {"pixel_values": torch.randn(4, 3, 224, 224)},
        {"intermediate_size": 1536, **WIDE},
    ),
    "whisper": of_transformers(
        "Whisper's encoder: 1,500 frames, heads of 64",
        "WhisperModel",
        lambda: {"input_features": torch.randn(1, 80, 3000)},
        {
            "d_model": 384,
            "encoder_layers": 2,
            "decoder_layers": 1,
            "encoder_attention_heads": 6,
            "encoder_ffn_dim": 1536,
        },
        part="encoder",
    ),
    "q-former": of_transformers(
        "BLIP-2's Q-Former: 4 x 32 queries over 257 tokens, heads of 64",
        "Blip2QFormerModel",
        lambda: {"query_embeds": torch.randn(4, 32, 384), "encoder_hidden_states": torch.randn(4, 257, 384)},
        {"encoder_hidden_size": 384, **WIDE},
    ),
}


# ---- measuring -------------------------------------------------------------------------------------------------------


def rows_of(key: str) -> Iterator[dict[str, Any]]:
    """The results for a model: least CPU seconds and error of each version in each mode, and the load from other
    programs."""
    subject = SUBJECTS[key]
    torch.manual_seed(0)
    model, inputs = subject.make()
    for mode in PASSES:
        training = mode == "training"
        ways = subject.ways(model.train(training))
        exact = next(iter(subject.ways(deepcopy(model).double()).values()))
        expected = _results(
            exact,
            {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()},
            training,
        )
        errors = {name: relative_error(_results(way, inputs, training), expected) for name, way in ways.items()}
        allowed = max(ERROR_BOUND[torch.float32], 2 * next(iter(errors.values())))  # some gradients lose digits
        if wrong := [f"{name}: {error:.1e}" for name, error in errors.items() if not error <= allowed]:
            raise SystemExit(f"{key}, {mode}: relative errors of {', '.join(wrong)}, so its speed is not reported")
        before = usage()
        least = _least(ways, inputs, training)
        share = others_since(before)
        for name in ways:
            yield {
                "model": key,
                "pass": mode,
                "implementation": name,
                "seconds": least[name],
                "error": errors[name],
                "others": share,
            }


def _results(way: Way, inputs: Inputs, training: bool) -> tuple[Tensor, ...]:
    """The output, and in training also the gradients of the inputs; parameters accumulate their gradients."""
    if not training:
        with torch.no_grad():
            return (way(inputs),)
    given = {name: value.detach().requires_grad_(value.is_floating_point()) for name, value in inputs.items()}
    out = way(given)
    out.backward(_direction(out.shape).to(out.dtype))
    return out.detach(), *(value.grad for value in given.values() if value.grad is not None and value.grad.any())


@cache
def _direction(shape: torch.Size) -> Tensor:
    """A gradient of the output that does not vanish in a norm."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _least(ways: Mapping[str, Way], inputs: Inputs, training: bool) -> dict[str, float]:
    """Least CPU seconds of a call of each version, in turn."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    start = time.process_time()
    while len(samples[next(iter(ways))]) < 4 or (
        time.process_time() - start < BUDGET and len(samples[next(iter(ways))]) < 50
    ):
        for name, way in ways.items():
            before = time.process_time()
            _results(way, inputs, training)
            samples[name].append(time.process_time() - before)
    return {name: min(taken[1:]) for name, taken in samples.items()}


# ---- the table -------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> str:
    """One line for each model, sorted by the gain in evaluation, and the machine."""
    seconds = {(row["model"], row["pass"], row["implementation"]): row["seconds"] for row in found["rows"]}
    lines = [
        (ratio_of(seconds, key, PASSES[0])[0], _line(seconds, key))
        for key in SUBJECTS
        if (key, PASSES[0]) in {k[:2] for k in seconds}
    ]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    machine = f"{found['processor']} ({found['native_instruction_set']}), 1 thread, {versions}, {found['date'][:10]}"
    share = max(row["others"] or 0.0 for row in found["rows"])
    load = (
        "The table has the minimum CPU time of calls that are timed in turn; other programs took up to "
        f"{share:.0%} of the processors."
    )
    where = f"{load} {machine}, commit {found['commit'][:10]}, `{RESULTS.name}`."
    head = ["| model | as it was | with ours | evaluation | training |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(line for _, line in sorted(lines)), "", where])


def ratio_of(seconds: Mapping[tuple[str, str, str], float], key: str, mode: str) -> tuple[float, str, str]:
    """Our least time divided by that of the fastest other version, and the names of both."""
    names = [name for model, which, name in seconds if (model, which) == (key, mode)]
    mine, theirs = (
        min((name for name in names if name.startswith("cmab") == own), key=lambda name: seconds[key, mode, name])
        for own in (True, False)
    )
    return seconds[key, mode, mine] / seconds[key, mode, theirs], mine, theirs


def _line(seconds: Mapping[tuple[str, str, str], float], key: str) -> str:
    (evaluation, mine, theirs), (training, *_) = (ratio_of(seconds, key, mode) for mode in PASSES)
    times = (f"{1e3 * seconds[key, PASSES[0], name]:.3g} ms ({name.removeprefix('cmab, ')})" for name in (theirs, mine))
    return f"| {SUBJECTS[key].told} | {' | '.join(times)} | **{evaluation:.2f}** | {training:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.adoption", description="Measures models of other packages with ours in them."
    )
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"any of {', '.join(SUBJECTS)}; all if none is named"
    )
    parser.add_argument("--page", action="store_true", help="measure nothing, and write the table of docs/use_it_in.md")
    options = parser.parse_args()
    if unknown := set(options.models) - SUBJECTS.keys():
        parser.error(f"MODEL: got {', '.join(sorted(unknown))}, expected {', '.join(SUBJECTS)}")
    if options.page:
        PLACE.write(table(json.loads(RESULTS.read_text())))
        return
    if provenance.dirty():
        raise SystemExit("the checkout has uncommitted changes: commit them, then measure")
    write_json(RESULTS, measured(options.models or list(SUBJECTS), json.loads(RESULTS.read_text())))


def measured(keys: list[str], old: Mapping[str, Any]) -> dict[str, Any]:
    """Measures models, and keeps the rows of other models if they were measured in the same commit and on the same
    machine."""
    machine = provenance.machine()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "torch_geometric")}
    head = {
        "commit": provenance.commit(),
        "processor": provenance.processor("cpu"),
        "native_instruction_set": machine["native_instruction_set"],
        "torch_instruction_set": machine["torch_instruction_set"],
        "versions": versions,
    }
    same = all(old.get(name) == value for name, value in head.items())
    rows = [row for row in old["rows"] if row["model"] not in keys] if same else []
    with threads(1):
        for key in keys:
            rows += list(rows_of(key))
            told = (
                f"{row['pass']}, {row['implementation']}: {1e3 * row['seconds']:.3g} ms"
                for row in rows
                if row["model"] == key
            )
            print(key, *told, sep="\n  ", flush=True)
    return {"date": provenance.now(), **head, "rows": rows}


if __name__ == "__main__":
    main()

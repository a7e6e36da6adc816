"""The common part of tasks of neural processes: functions as sets of points, and the likelihood of targets given a
context."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from cmab_kernels.runtime.checks import mismatch

from ..neural_processes.base import Batch, NeuralProcess, PaddedBatch
from ..neural_processes.likelihood import joint_log_prob
from .base import Task

AnyBatch = TypeVar("AnyBatch", Batch, PaddedBatch)
WIDTH: dict[str, Any] = {"dim": 32, "num_heads": 2, "depth": 2, "embedding_depth": 2}
SIZES: dict[str, dict[str, Any]] = {
    "cmanp": WIDTH | {"num_latents": 16},
    "cmanp-and": WIDTH | {"num_latents": 16},
    "lbanp": WIDTH | {"num_latents": 16},
    "lbanp-nd": WIDTH | {"num_latents": 16},
    "eqtnp": WIDTH,
    "tnp-a": WIDTH,
    "tnp-d": WIDTH,
    "tnp-nd": WIDTH,
    "inctnp": WIDTH,
    "cnp": {"dim": 128},
    "canp": {"dim": 64, "num_heads": 4},
    "np": {"dim": 64, "dim_latent": 64},
    "anp": {"dim": 64, "dim_latent": 64, "num_heads": 4},
    "bnp": {"dim": 64},
    "banp": {"dim": 64, "num_heads": 4},
}
"""System -> sizes that can be trained in a few minutes on one core. The papers' sizes are the defaults of the
models."""
BOUNDED = ("cnp", "canp", "np", "anp", "bnp", "banp")
"""Systems whose standard deviations are at least 0.1 for all data, as in the published code."""


@dataclass(frozen=True)
class FunctionTask(Task):
    """Base class of tasks whose batches are sets of points (`Batch`) and whose score is the likelihood of targets.

    Scores are means over fixed batches of the log-likelihood of a target, summed over output dimensions.
    `log_likelihood` is the score of the model's own likelihood. With `autoregressive`, there are also scores with all
    targets at once, in blocks of 5, and one by one, where each block becomes context of the next.
    """

    systems: ClassVar[tuple[str, ...]] = tuple(SIZES)
    dim_x: ClassVar[int]
    dim_y: ClassVar[int]
    bound_std: ClassVar[bool] = False
    """Whether values repeat exactly, so that standard deviations need a bound."""

    functions: int = 16
    """Functions in a batch."""
    evaluation_batches: int = 500
    autoregressive: bool = False

    def sizes(self, system: str) -> dict[str, Any]:
        bound = {} if system in BOUNDED else {"bound_std": self.bound_std}
        return {"dim_x": self.dim_x, "dim_y": self.dim_y} | bound | SIZES[system]

    @abstractmethod
    def batch(self, generator: torch.Generator) -> Batch: ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cast("NeuralProcess", model).loss(batch)

    def log_likelihoods(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the mean log-likelihoods of these batches."""
        model = cast("NeuralProcess", model)
        ways: dict[str, int | None] = {"log_likelihood": None}
        if self.autoregressive:
            ways |= {"log_likelihood_at_once": 1 << 30, "log_likelihood_blocks_of_5": 5, "log_likelihood_one_by_one": 1}
        totals, count = dict.fromkeys(ways, 0.0), 0
        with torch.no_grad():
            for batch in batches:
                for name, size in ways.items():
                    totals[name] += model.log_prob(*on_device_of(model, batch), block_size=size).mean().item()
                count += 1
        return {name: total / count for name, total in totals.items()}


def sizes_of_sets(most: int, generator: torch.Generator) -> tuple[int, int]:
    """Return N ~ U[3, most - 3) and M ~ U[3, most - N), the numbers of points and targets of a batch."""
    if most < 7:
        raise ValueError(mismatch("most_points", most, "at least 7, as 3 of them are targets"))
    if generator.device.type != "cpu":  # to read a number from a GPU would wait until the GPU has nothing to do
        generator = torch.Generator("cpu").manual_seed(generator.initial_seed())
    context = int(torch.randint(3, most - 3, (), generator=generator, device="cpu"))
    return context, int(torch.randint(3, most - context, (), generator=generator, device="cpu"))


def on_device_of(model: nn.Module, batch: AnyBatch) -> AnyBatch:
    """Return the batch on the device of the model."""
    device = next(model.parameters()).device
    return type(batch)(*(part.to(device) for part in batch))


@torch.no_grad()
def streamed(model: nn.Module, batch: Batch, chunk: int = 1) -> Iterator[dict[str, float]]:
    """Condition on the context of one function, `chunk` points at a time, and yield after each chunk the likelihood of
    its targets.

    The yielded values are `points`, the number of known points; `log_likelihood`, the mean over the targets, each given
    only these points; and `update_ms`, the time that the last chunk took.
    """
    model = cast("NeuralProcess", model)
    x, y, target_x, target_y = on_device_of(model, batch)
    state = None
    for first in range(0, x.shape[1], chunk):
        start = perf_counter()
        state = model.condition(x[:, first : first + chunk], y[:, first : first + chunk], state)
        seconds = perf_counter() - start
        score = joint_log_prob(model.predict(state, target_x), target_y).mean().item() / max(target_x.shape[1], 1)
        yield {"points": float(min(first + chunk, x.shape[1])), "log_likelihood": score, "update_ms": 1e3 * seconds}

"""Values at scattered places: a neural process that is fitted to arrays or tables, and predicts in their units."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from cmab_kernels.runtime.checks import check_count, mismatch

from .arrays import Scale, digest, is_missing, load, numbers, save
from .neural_processes import NeuralProcess
from .neural_processes.base import Batch, PaddedBatch
from .precision import in_own_modes
from .tasks.base import seeded
from .tasks.functions import SIZES, FunctionTask

ASKED = 128
"""The most targets of a map in a batch."""
HELD_OUT = 10
"""Every tenth map, or point of a single map, is left out of the training, and tells when it stops."""
FEW = 5
"""With fewer maps, points are left out of the training instead of maps."""
AT_ONCE = 1024
"""The number of places that are predicted at a time."""


class Field:
    """A neural process for values at places, in the units of the caller, and the state of the points that it has read.

    `fit_field` makes one. With `system="cmanp"`, the default, the state has a constant size: `update` takes time in the
    number of new points only.

    >>> field = cmab_models.fit_field([0.0, 1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 5.0, 6.0, 5.0], steps=1)
    >>> field.update([5.0, 6.0], [6.0, 5.0])
    >>> field.predict([0.5, 1.5])[0].shape
    (2,)

    Attributes:
        model: the model, over standardised numbers.
        state: of the points read so far, as `model.condition` returns it; None before the first. It can be saved
            or set, and with `system="cmanp"` merged.
        x_scale, y_scale: the means and standard deviations of the columns.
    """

    def __init__(self, system: str, model: NeuralProcess, x_scale: Scale, y_scale: Scale, *, flat: bool) -> None:
        self.system, self.model, self.x_scale, self.y_scale, self.flat = system, model, x_scale, y_scale, flat
        self.state: Any = None

    @torch.no_grad()
    def update(self, x: Any, y: Any) -> None:
        """Read more points of the map: x (N, dim_x), y (N, dim_y) or (N,). Rows with a NaN in y are left out."""
        places, values = _pairs(x, y, len(self.x_scale.mean), len(self.y_scale.mean))
        known = ~np.isnan(values).any(1)
        given = self._given(self.x_scale, places[known]), self._given(self.y_scale, values[known])
        self.state = self.model.condition(*given, self.state)

    @torch.no_grad()
    def predict(self, x: Any, coverage: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean at places x (M, dim_x), and the band in which a new measurement there lies with this
        probability.

        The mean has shape (M, dim_y), or (M,) if y was (N,). The band has one more axis at the front: its lower and its
        upper end. Without a point, the prediction is that of a new map; the TNPs need a point. All are float64.
        """
        if not (isinstance(coverage, float) and coverage > 0 and (1 + coverage) / 2 < 1):
            raise ValueError(mismatch("coverage", repr(coverage), "a float between 0 and 1"))
        places = self._given(self.x_scale, numbers("x", x, len(self.x_scale.mean)))
        shape = -1, len(self.y_scale.mean)
        found = [self.model.predict(self._known(), part) for part in places.split(AT_ONCE, 1)] if len(places[0]) else []
        mean, std = (
            np.concatenate(
                [np.zeros((0, shape[1])), *(getattr(each, name).view(shape).cpu().double() for each in found)]
            )
            for name in ("mean", "stddev")
        )
        mean = self.y_scale.mean + self.y_scale.std * mean
        reach = NormalDist().inv_cdf((1 + coverage) / 2) * self.y_scale.std * std
        band = np.stack([mean - reach, mean + reach])
        return (mean[:, 0], band[..., 0]) if self.flat else (mean, band)

    def save(self, folder: str | Path) -> None:
        """Write the model, the scales and the state to a folder."""
        told = {"kind": "field", "system": self.system, "flat": self.flat}
        save(folder, told | {"x": self.x_scale.told(), "y": self.y_scale.told()}, self.model, self.state)

    @classmethod
    def load(cls, folder: str | Path) -> Field:
        """Return the field that `save` wrote, with its state. Nothing in the files is executed."""
        told, model, state = load(folder, "field")
        found = cls(told["system"], model, Scale.read(told["x"]), Scale.read(told["y"]), flat=told["flat"])
        found.state = state
        return found

    def _given(self, scale: Scale, values: np.ndarray) -> Tensor:
        weight = next(self.model.parameters())
        return scale.standardise(values)[None].to(weight.device)

    def _known(self) -> Any:
        """Return the state; before the first point, that of no points."""
        if self.state is not None:
            return self.state
        nothing = [self._given(scale, np.zeros((0, len(scale.mean)))) for scale in (self.x_scale, self.y_scale)]
        return self.model.condition(nothing[0], nothing[1])


@in_own_modes
def fit_field(
    x: Any,
    y: Any,
    maps: Any = None,
    *,
    system: str = "cmanp",
    steps: int = 1000,
    patience: int = 6,
    seed: int = 0,
    device: str = "cpu",
    folder: str | Path | None = None,
    model: dict[str, Any] | None = None,
) -> Field:
    """Fit a neural process to values at scattered places, such as measurements at stations, and return it.

    Without `maps` all points belong to one map, and the returned `Field` has read them all. With `maps`, each value of
    it is a map of its own, such as a day: the model learns what maps have in common, and the returned `Field` has read
    no point. It then predicts a new map from a few points of it (`Field.update`). To begin another map, set its `state`
    to None.

    Each column of x and y is standardised. A training splits maps at random into points that are given and points that
    are asked for. Every tenth map, or of fewer than five maps every tenth point, is left out. The likelihood there
    stops the training, and chooses the weights.

    Args:
        x: places (N, dim_x): an array, a table of pandas or polars, a list or a tensor, with float64's digits.
        y: values (N, dim_y) or (N,). A NaN is a missing value.
        maps: (N,) the map of each point, such as the day; None: one map.
        system: one of the neural processes of the command line whose prediction at a place does not depend on the
            other places that are asked for.
        steps: the most steps of the optimiser.
        patience: checks of 50 steps without a better likelihood after which the training stops.
        seed: all random numbers follow from it.
        device: "cpu" or "cuda".
        folder: where a checkpoint is kept while the training runs; if it has one, the training goes on from there.
        model: other arguments of the model than the defaults of the tasks, such as {"dim": 64}.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> x = rng.uniform(0, 10, (200, 2))
    >>> y = np.sin(x[:, 0]) + 0.1 * rng.standard_normal(200)
    >>> found = cmab_models.fit_field(x, y, steps=2)
    >>> mean, (lower, upper) = found.predict(x[:5])
    >>> mean.shape, bool((lower < upper).all())
    ((5,), True)
    >>> found.update([[1.0, 2.0]], [0.8])
    """
    from .training import fitted

    seed = check_count("seed", seed, 0)
    places, values = _pairs(x, y)
    some = ~np.isnan(values).all(1)
    if some.sum() < FEW:
        raise ValueError(mismatch("y", f"{int(some.sum())} rows with a number", f"at least {FEW}"))
    if (empty := np.isnan(values).all(0)).any():
        raise ValueError(mismatch("y", f"no number in column {np.flatnonzero(empty)[0]}", "a number in each column"))
    x_scale, y_scale = Scale.of("x", places[some]), Scale.of("y", values[some])
    labels = _labels(maps, len(places))[some]
    given = [
        (x_scale.standardise(places[some][labels == label]), y_scale.standardise(values[some][labels == label]))
        for label in np.unique(labels)
    ]
    known, checked = _parts(given, seed)
    task = Maps(
        known=known, checked=checked, steps=check_count("steps", steps), patience=check_count("patience", patience)
    )
    learned = fitted(system, task, folder, seed, device, model)
    found = Field(system, cast("NeuralProcess", learned), x_scale, y_scale, flat=np.ndim(y) == 1)
    if maps is None:
        found.update(places, values)
    return found


@dataclass(frozen=True)
class Maps(FunctionTask, listed=False):
    """The maps of `fit_field`, standardised, as a task."""

    name: ClassVar[str] = "maps"
    systems: ClassVar[tuple[str, ...]] = tuple(
        name for name in FunctionTask.systems if name not in ("tnp-a", "cmanp-and", "lbanp-nd", "tnp-nd")
    )
    """A band of one place needs a prediction of that place alone; these four predict places together."""

    steps: int = 1000
    learning_rate: float = 2e-3
    check_every: int = 50
    patience: int = 6
    jitter: float = 0.05
    """The standard deviation by which places move at random, if there are fewer than `FEW` maps. A model would
    otherwise learn the values at single places by heart."""
    known: tuple[tuple[Tensor, Tensor], ...] = field(default=(), repr=False)
    """x (N, dim_x) and y (N, dim_y) of the maps for training."""
    checked: tuple[Batch, ...] = field(default=(), repr=False)
    """Points and targets that stop the training."""

    def settings(self) -> dict[str, Any]:
        """Return the settings, and a digest of the data: a training goes on with the same data only."""
        return super().settings() | {"data": digest(*self.known, *self.checked)}

    def sizes(self, system: str) -> dict[str, Any]:
        x, y = self.known[0]
        deeper = {"embedding_depth": 4} if "embedding_depth" in SIZES[system] else {}
        return {"dim_x": x.shape[1], "dim_y": y.shape[1]} | SIZES[system] | deeper

    def batch(self, generator: torch.Generator) -> PaddedBatch:  # type: ignore[override]  # of maps of several sizes
        """Return maps, split at random. Sizes of contexts are spread over all orders of magnitude."""
        share = float(torch.rand((), generator=generator)) ** 0.5
        chosen = torch.randint(len(self.known), (self.functions,), generator=generator).tolist()
        return _padded([self._split(self.known[number], share, generator) for number in chosen])

    def _split(self, points_of_map: tuple[Tensor, Tensor], share: float, generator: torch.Generator) -> Batch:
        x, y = points_of_map
        if len(self.known) < FEW:
            x = x + self.jitter * torch.randn(x.shape, generator=generator)
        order = torch.randperm(len(x), generator=generator)
        points = min(max(round(len(x) ** share), 1), len(x) - 1)
        given, asked = _divided(y, order, points)
        return _batch(x, y, given, asked[:ASKED])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return cast("NeuralProcess", model).loss(batch)

    def validation(self) -> Iterator[PaddedBatch]:
        return (_padded(self.checked[first : first + 8]) for first in range(0, len(self.checked), 8))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self.log_likelihoods(model, self.checked)


def _pairs(x: Any, y: Any, dim_x: int | None = None, dim_y: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return places and values as float64, of one length."""
    places, values = numbers("x", x, dim_x), numbers("y", y, dim_y, missing=True)
    if len(places) != len(values):
        raise ValueError(mismatch("y", f"{len(values)} rows", f"{len(places)}, as x has"))
    return places, values


def _labels(maps: Any, rows: int) -> np.ndarray:
    """Return the number of the map of each row."""
    if maps is None:
        return np.zeros(rows, int)
    labels = np.asarray(maps)
    if labels.shape != (rows,):
        raise ValueError(mismatch("maps", f"shape {labels.shape}", f"({rows},), a label for each row of x"))
    each = labels.tolist()
    if missing := [i for i, label in enumerate(each) if is_missing(label)]:
        raise ValueError(mismatch("maps", f"no label in row {missing[0]}", "a label for each row of x"))
    number = {label: i for i, label in enumerate(dict.fromkeys(each))}
    return np.array([number[label] for label in each], int)


def _parts(maps: list[tuple[Tensor, Tensor]], seed: int) -> tuple[tuple[Any, ...], tuple[Batch, ...]]:
    """Return the maps for training, and points and targets of maps that stop the training."""
    generator = seeded(seed, 20)
    usable = [(x, y) for x, y in maps if len(x) > 1 and not y.isnan().any(1).all()]
    if not usable:
        allowed = "at least one map of two points, one of them with all its values"
        raise ValueError(mismatch("maps", "only maps of one point, or without a complete point", allowed))
    orders = [torch.randperm(len(x), generator=generator) for x, _ in usable]
    if len(usable) < FEW:
        learned, checked = [], []
        for (x, y), order in zip(usable, orders, strict=True):
            kept, out = _divided(y, order, len(order) - max(len(order) // HELD_OUT, 1), complete=False)
            learned.append((x[kept], y[kept]))
            checked.append(_batch(x, y, kept, out))
        if not (several := tuple(each for each in learned if len(each[0]) > 1)):
            raise ValueError(mismatch("maps", "only maps of two points", "at least one map of three"))
        return several, tuple(checked)
    held_out = set(torch.randperm(len(usable), generator=generator)[: math.ceil(len(usable) / HELD_OUT)].tolist())
    known = tuple(each for number, each in enumerate(usable) if number not in held_out)
    return known, tuple(
        _batch(x, y, *_divided(y, order, len(order) // 2))
        for number, ((x, y), order) in enumerate(zip(usable, orders, strict=True))
        if number in held_out
    )


def _divided(y: Tensor, order: Tensor, points: int, complete: bool = True) -> tuple[Tensor, Tensor]:
    """Return the rows of at most `points` points that are given, and the other rows, in a random order.

    The first given row has all its values, because a context needs a point. With `complete`, all have.
    """
    whole = ~y[order].isnan().any(1)
    rows = order[whole] if complete else torch.cat([order[whole][:1], order[order != order[whole][0]]])
    given = rows[:points]
    return given, order[~torch.isin(order, given)]


def _batch(x: Tensor, y: Tensor, points: Tensor, asked: Tensor) -> Batch:
    return Batch(x[points][None], y[points][None], x[asked][None], y[asked][None])


def _padded(batches: Any) -> PaddedBatch:
    """Return maps as one batch. A point that lacks a value is no point of a context; a target may lack some."""
    padded = PaddedBatch.pad(batches)
    return padded._replace(context_mask=padded.context_mask | padded.context_y.isnan().any(-1))

"""Streams of tokens with classes: a classifier that is fitted to arrays, and reads one token at a time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels.runtime.checks import check_count, kind_of, mismatch

from .arrays import Scale, digest, load, numbers, save
from .precision import in_own_modes
from .streams import StreamClassifier, StreamState
from .tasks.base import seeded, seeded_check
from .tasks.detection import DetectionTask, Labelled, accuracy

HELD_OUT = 10
"""Every tenth stream, or the last tenth of each of a few streams, is left out of the training, and tells when it
stops."""
CHECKED = 4
"""The batches of a check."""


class StreamReader:
    """A classifier of streams in the units of the caller, and the state of the streams that it reads.

    `fit_streams` makes one.

    >>> streams, labels = torch.randn(4, 20, 2), ["rain", "sun", "rain", "sun"]
    >>> reader = cmab_models.fit_streams(streams, labels, window=8, steps=1)
    >>> for token in streams[0]:
    ...     probabilities = reader.step(token)
    >>> probabilities.shape, bool(abs(probabilities - reader.predict(streams[0])[-1]).max() < 1e-5)
    ((2,), True)

    Attributes:
        model: the model, over standardised tokens.
        classes: the labels of the columns of probabilities.
        scale: the means and standard deviations of the columns of tokens.
    """

    def __init__(self, system: str, model: StreamClassifier, classes: Sequence[Hashable], scale: Scale) -> None:
        self.system, self.model, self.classes, self.scale = system, model, tuple(classes), scale

    @property
    def state(self) -> StreamState | None:
        """The state of the streams: it can be kept, saved, and set. None ends them, and new ones begin."""
        return self.model.get_state()

    @state.setter
    def state(self, state: StreamState | None) -> None:
        self.model.set_state(state)

    def step(self, token: Any) -> np.ndarray | None:
        """Read the next token (C,) of a stream, or (B, C) of B streams, and return the probabilities (classes,) or (B,
        classes); None before the window is full."""
        given = token if isinstance(token, Tensor) else np.asanyarray(token)
        flat = given.ndim == 1
        tokens = numbers("token", given[None] if flat else given, len(self.scale.mean))
        scores = self.model.forward_step(self._given(tokens))
        return None if scores is None else _probabilities(scores[0] if flat else scores)

    @torch.no_grad()
    def predict(self, stream: Any) -> np.ndarray:
        """Return the probabilities (T - window + 1, classes) that `step` returns for the tokens (T, C) of a new stream,
        from the first full window on. The streams that are being read stay as they are afterwards; another thread
        must not step them meanwhile."""
        tokens = self._given(numbers("stream", stream, len(self.scale.mean)))
        state, place = self.state, self.model.positions.get_state()
        self.state = None
        try:
            return _probabilities(self.model.forward_stream(tokens[None])[0])
        finally:
            self.state = state
            self.model.positions.set_state(place)

    def save(self, folder: str | Path) -> None:
        """Write the model, the classes, the scale and the state to a folder."""
        told = {"kind": "stream reader", "system": self.system, "classes": self.classes, "tokens": self.scale.told()}
        save(folder, told, self.model, self.state)

    @classmethod
    def load(cls, folder: str | Path) -> StreamReader:
        """Return the reader that `save` wrote, with its state. Nothing in the files is executed."""
        told, model, state = load(folder, "stream reader")
        found = cls(told["system"], model, told["classes"], Scale.read(told["tokens"]))
        found.state = state
        return found

    def _given(self, tokens: np.ndarray) -> Tensor:
        return self.scale.standardise(tokens).to(self.model.head.weight.device)


@in_own_modes
def fit_streams(
    streams: Sequence[Any],
    labels: Sequence[Any],
    window: int,
    *,
    system: str = "continual-nystromformer",
    num_landmarks: int = 4,
    steps: int = 1000,
    patience: int = 6,
    seed: int = 0,
    device: str = "cpu",
    folder: str | Path | None = None,
    model: dict[str, Any] | None = None,
) -> StreamReader:
    """Fit a classifier of the newest tokens of streams, such as the activity that sensors show, and return it.

    Each column of the tokens is standardised. A training reads pieces at random places. All classes have equal chances
    to be that of the newest token that counts. Every tenth stream, or, of fewer than ten streams, the last tenth of
    each, is left out. The loss there stops the training, and chooses the weights.

    Args:
        streams: arrays or tables (T, C) of numbers, each with at least `window` rows; lengths may differ.
        labels: for each stream a label, such as a name, or an array (T,) of a label for each token.
        window: the number of newest tokens that a prediction reads.
        system: "continual-nystromformer", "continual-transformer" or "nystromformer".
        num_landmarks: the number of landmarks of a Nyströmformer.
        steps: the most steps of the optimiser.
        patience: checks of 50 steps without a lower loss after which the training stops.
        seed: all random numbers follow from it.
        device: "cpu" or "cuda".
        folder: where a checkpoint is kept while the training runs; if it has one, the training goes on from there.
        model: other arguments of the model than the defaults of the tasks, such as {"num_heads": 8}.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> streams = [level + rng.standard_normal((50, 3)) for level in (0.0, 1.0)]
    >>> reader = cmab_models.fit_streams(streams, ["low", "high"], window=8, steps=2)
    >>> reader.classes, reader.predict(streams[0]).shape
    (('high', 'low'), (43, 2))
    >>> [reader.step(token) is None for token in streams[0][:9]].count(True)
    7
    """
    from .training import fitted

    seed = check_count("seed", seed, 0)
    check_count("window", window)
    arrays = [numbers(f"streams[{i}]", stream) for i, stream in enumerate(streams)]
    scale = _scale(arrays, window)
    classes, marks = _classes(labels, arrays)
    tokens = [scale.standardise(array) for array in arrays]
    shares = [F.one_hot(torch.from_numpy(mark), len(classes)).float() for mark in marks]
    known, checked = _parts(tokens, shares, window, seed)
    task = OwnStreams(
        known=known,
        checked=checked,
        window=window,
        num_landmarks=num_landmarks,
        steps=check_count("steps", steps),
        patience=check_count("patience", patience) if checked.tokens else 0,
    )
    learned = fitted(system, task, folder, seed, device, model)
    return StreamReader(system, cast("StreamClassifier", learned), classes, scale)


@dataclass(frozen=True)
class OwnStreams(DetectionTask, listed=False):
    """The streams of `fit_streams`, standardised, as a task."""

    name: ClassVar[str] = "own-streams"

    check_every: int = 50
    window: int = 64
    known: Labelled = field(default=Labelled((), ()), repr=False)
    checked: Labelled = field(default=Labelled((), ()), repr=False)

    @property
    def sequence_len(self) -> int:
        return self.window

    def settings(self) -> dict[str, Any]:
        """Return the settings, and a digest of the data: a training goes on with the same data only."""
        return super().settings() | {"data": digest(*self.known, *self.checked)}

    def sizes(self, system: str) -> dict[str, Any]:
        return self.sizes_for(system, self.known.tokens[0].shape[1], self.known.labels[0].shape[1])

    def streams(self, part: str) -> Labelled:
        return self.known if part == "train" else self.checked

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.pieces("checked", seeded_check(number)) for number in range(CHECKED))

    def evaluate(self, model: Any) -> dict[str, float]:
        return {"accuracy": accuracy(*self.predictions(model, "checked"))}


def _probabilities(scores: Tensor) -> np.ndarray:
    found: np.ndarray = scores.double().softmax(-1).cpu().numpy()
    return found


def _scale(arrays: Sequence[np.ndarray], window: int) -> Scale:
    if not arrays:
        raise ValueError(mismatch("streams", "none", "at least one"))
    for i, array in enumerate(arrays):
        if array.shape[1] != arrays[0].shape[1]:
            raise ValueError(
                mismatch(f"streams[{i}]", f"{array.shape[1]} columns", f"{arrays[0].shape[1]}, as the first has")
            )
        if len(array) < window:
            raise ValueError(mismatch(f"streams[{i}]", f"{len(array)} tokens", f"at least window = {window}"))
    return Scale.of("streams", np.concatenate(arrays))


def _classes(labels: Sequence[Any], arrays: Sequence[np.ndarray]) -> tuple[list[Hashable], list[np.ndarray]]:
    """Return the labels in order, and the number of the label of each token."""
    if isinstance(labels, (Mapping, Set)) or not isinstance(labels, Sized) or getattr(labels, "ndim", 1) == 0:
        raise TypeError(mismatch("labels", kind_of(labels), "a sequence of a label for each stream"))
    if len(labels) != len(arrays):
        raise ValueError(mismatch("labels", f"{len(labels)} of them", f"{len(arrays)}, one for each stream"))
    found = [_label_array(label) for label in labels]
    for i, (label, array) in enumerate(zip(found, arrays, strict=True)):
        if label.shape not in ((), (len(array),)):
            raise ValueError(
                mismatch(f"labels[{i}]", f"shape {label.shape}", f"a label, or ({len(array)},), one for each token")
            )
    flat = np.concatenate([np.broadcast_to(label, len(array)) for label, array in zip(found, arrays, strict=True)])
    if any(label.dtype.kind not in "biufU" for label in found) or (flat != flat).any():
        given = "a NaN" if flat.dtype.kind == "f" else f"labels of {flat.dtype}"
        raise ValueError(mismatch("labels", given, "texts or numbers, which a file can hold"))
    kinds = {label.dtype.kind for label in found}
    if ("U" in kinds and len(kinds) > 1) or (flat.dtype.kind == "f" and "f" not in kinds):
        told = ", ".join(sorted({str(label.dtype) for label in found}))
        raise ValueError(mismatch("labels", f"labels of {told}", "labels of one kind, which stay different together"))
    classes, marks = np.unique(flat, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(mismatch("labels", "one class", "at least two"))
    return classes.tolist(), np.split(marks, np.cumsum([len(array) for array in arrays])[:-1])


def _label_array(label: Any) -> np.ndarray:
    """Return a label, or those of the tokens, as an array. Texts in a column of pandas are Python's own objects."""
    found = np.asarray(label)
    texts = found.dtype == object and all(isinstance(each, str) for each in found.ravel())
    return found.astype(np.str_) if texts else found


def _parts(tokens: Sequence[Tensor], labels: Sequence[Tensor], window: int, seed: int) -> tuple[Labelled, Labelled]:
    """Return the streams for training, and those that stop it; none if streams are few and short, or if a class would
    be missing in the training."""
    known, checked = _divided(tokens, labels, window, seed)
    taught, every = (torch.cat([each[window - 1 :] for each in part]).any(0) for part in (known.labels, labels))
    return (known, checked) if taught.equal(every) else (Labelled(tuple(tokens), tuple(labels)), Labelled((), ()))


def _divided(tokens: Sequence[Tensor], labels: Sequence[Tensor], window: int, seed: int) -> tuple[Labelled, Labelled]:
    if len(tokens) >= HELD_OUT:
        order = torch.randperm(len(tokens), generator=seeded(seed, 20)).tolist()
        out = len(tokens) // HELD_OUT
        return _taken(tokens, labels, sorted(order[out:])), _taken(tokens, labels, sorted(order[:out]))
    cuts = [len(each) - max(len(each) // HELD_OUT, window) for each in tokens]
    if min(cuts) < window:
        return Labelled(tuple(tokens), tuple(labels)), Labelled((), ())
    early, late = ([slice(cut) for cut in cuts], [slice(cut, None) for cut in cuts])
    return _cut(tokens, labels, early), _cut(tokens, labels, late)


def _cut(tokens: Sequence[Tensor], labels: Sequence[Tensor], parts: Sequence[slice]) -> Labelled:
    return Labelled(*(tuple(each[part] for each, part in zip(every, parts, strict=True)) for every in (tokens, labels)))


def _taken(tokens: Sequence[Tensor], labels: Sequence[Tensor], numbers_of: Sequence[int]) -> Labelled:
    return Labelled(tuple(tokens[i] for i in numbers_of), tuple(labels[i] for i in numbers_of))

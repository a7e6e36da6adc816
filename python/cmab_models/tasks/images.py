"""Completion of images: predict the values of pixels at coordinates, given the values of other pixels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

from cmab_kernels.runtime.checks import mismatch

from ..data import images as data
from ..data.published_images import celeba, emnist
from ..neural_processes.base import Batch, NeuralProcess
from .base import VALIDATED, every_tenth, seeded, seeded_check
from .functions import FunctionTask, sizes_of_sets, streamed

Pictures: TypeAlias = "Tensor | list[Tensor]"
"""Images of one size (N, H, W, C), or of several sizes, each (H, W, C), uint8."""
Images: TypeAlias = "Mapping[str, Pictures]"
"""Images by set: "train", and held-out sets."""
PUBLISHED_POINTS = {32: 200, 64: 800, 128: 1600}
"""Size of an image -> the paper's `most_points`."""


@dataclass(frozen=True)
class _Completion(FunctionTask):
    """Squares of images of `size` pixels; N ~ U[3, most_points - 3) pixels are known and M ~ U[3, most_points - N)
    others are asked for.

    The name of a score ends in the set of images that it is for, such as `log_likelihood_seen`. References:
    `pixel_mean_...`, a normal distribution at each pixel with the mean and standard deviation of the training images
    there.
    """

    dim_x: ClassVar[int] = 2
    dim_y: ClassVar[int] = 1
    bound_std: ClassVar[bool] = True

    steps: int = 4500
    learning_rate: float = 1e-3
    """A third of the other tasks' rate. At 3e-3, models learn what all images have in common, and then little from the
    known pixels."""
    size: int = 28
    most_points: int = 200
    evaluation_batches: int = 50
    chunk: int = 16
    """The number of pixels that arrive at a time in `stream`."""

    def sizes(self, system: str) -> dict[str, Any]:
        """Return the sizes of all tasks of functions, with the paper's four layers in embeddings, because points in a
        plane need more than two layers."""
        sizes = super().sizes(system)
        return sizes | ({"embedding_depth": 4} if "embedding_depth" in sizes else {})

    @abstractmethod
    def images(self) -> Images:
        """Return the images for training, "train", and the held-out sets."""

    def batch(self, generator: torch.Generator) -> Batch:
        return self._drawn(_parts(self)[0] if self.patience else self.images()["train"], generator)

    def validation(self) -> Iterator[Batch]:
        """Yield squares of training images that no batch has; of all of them if there are few."""
        return (self._drawn(_parts(self)[1], seeded_check(number)) for number in range(VALIDATED))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        scores: dict[str, float] = {}
        for name in self._held_out():
            scores |= {
                f"{way}_{name}": score for way, score in self.log_likelihoods(model, self._batches(name)).items()
            }
        return scores

    def references(self) -> dict[str, float]:
        mean, std = _background(self.images()["train"], self.size)
        scores = {}
        for name in self._held_out():
            means = []
            for batch in self._batches(name):
                row, column = ((batch.target_x + 1) / 2 * (self.size - 1)).round().long().unbind(-1)
                predicted = Normal(mean[row, column], std[row, column])
                means.append(predicted.log_prob(batch.target_y).sum(-1).mean())
            scores[f"pixel_mean_{name}"] = torch.stack(means).mean().item()
        return scores

    def stream(self, model: nn.Module) -> Iterator[dict[str, float]]:
        """Yield the likelihood of up to 500 pixels of a whole held-out image, while the other pixels arrive in random
        order."""
        image = self.images()[self._held_out()[-1]][0]
        x, y = data.coordinates(*image.shape[:2]), data.values(image)
        order = torch.randperm(len(x), generator=seeded(2))
        asked, known = order[: min(500, len(x) // 4)], order[min(500, len(x) // 4) :]
        yield from streamed(model, Batch(x[known][None], y[known][None], x[asked][None], y[asked][None]), self.chunk)

    def _most(self) -> int:
        return self.most_points

    def _held_out(self) -> list[str]:
        return [name for name in self.images() if name != "train"]

    def _batches(self, name: str) -> Iterator[Batch]:
        generator = seeded(1)
        return (self._drawn(self.images()[name], generator) for _ in range(self.evaluation_batches))

    def _drawn(self, images: Pictures, generator: torch.Generator) -> Batch:
        most, pixels = self._most(), self.size**2
        if most > pixels + 1:  # at the first batch, although only the largest sets would not fit
            allowed = f"at most {pixels + 1}, as squares have {pixels} pixels"
            raise ValueError(mismatch("most_points", most, allowed))
        context, targets = sizes_of_sets(most, generator)
        squares = data.crops(images, self.size, self.functions, generator)
        places = data.some_pixels(squares, context + targets, generator)
        x = data.coordinates(self.size, self.size)[places]
        y = data.values(squares).take_along_dim(places.unsqueeze(-1), 1)
        return Batch(x[:, :context], y[:, :context], x[:, context:], y[:, context:])


@dataclass(frozen=True)
class Digits(_Completion):
    """MNIST's digits: training uses 0 to 6. The held-out sets are other images of 0 to 6, `seen`, and 7 to 9,
    `unseen`."""

    name: ClassVar[str] = "digits"

    shrink: int = 1
    """A pixel is the mean of `shrink` x `shrink` pixels of the 28 x 28: with 2, an image has 14 x 14."""

    def images(self) -> Images:
        return _digits(self.shrink)


@dataclass(frozen=True)
class Faces(_Completion):
    """Faces of Labeled Faces in the Wild: training uses 80. The held-out sets are 20 others, `seen`, and images without
    a face, `unseen`."""

    name: ClassVar[str] = "faces"
    size: int = 25

    def images(self) -> Images:
        faces, others = data.faces()
        return {"train": faces[20:], "seen": faces[:20], "unseen": others}


@dataclass(frozen=True)
class Photographs(_Completion):
    """Squares of colour photographs, of any size up to 300. A cat and a retina are held out. The retina is streamed
    whole: 1411 x 1411."""

    name: ClassVar[str] = "photographs"
    dim_y: ClassVar[int] = 3
    size: int = 32
    chunk: int = 16_384

    def images(self) -> Images:
        known = dict(data.photographs())
        held_out = [known.pop("chelsea"), known.pop("retina")]
        return {"train": list(known.values()), "cat": held_out[:1], "retina": held_out[1:]}


@dataclass(frozen=True)
class Emoji(_Completion):
    """Noto's colour emoji, for sizes up to 128. The held-out set, `unseen`, is a fifth of the base characters with all
    their variants."""

    name: ClassVar[str] = "emoji"
    dim_y: ClassVar[int] = 3
    size: int = 32

    def images(self) -> Images:
        return _emoji(self.size)


@dataclass(frozen=True)
class EMNIST(_Completion):
    """EMNIST: training uses digits. The held-out sets are digits, `seen`, and letters, `unseen`, of the test part, as
    in the paper."""

    name: ClassVar[str] = "emnist"
    folder: str = ""
    """The folder of the published files (`data.published_images`)."""

    def images(self) -> Images:
        return _emnist(self.folder)


@dataclass(frozen=True)
class CelebA(_Completion):
    """CelebA's faces. Its test part is held out, `unseen`. Deviations have no bound, as in the published code.

    With `most_points` 0, the default, sets have the paper's sizes at 32, 64 and 128 pixels.
    """

    name: ClassVar[str] = "celeba"
    dim_y: ClassVar[int] = 3
    bound_std: ClassVar[bool] = False
    size: int = 32
    most_points: int = 0
    folder: str = ""
    """The folder of the published files (`data.published_images`)."""

    def _most(self) -> int:
        if not self.most_points and self.size not in PUBLISHED_POINTS:
            allowed = f"a number, because the paper has none for {self.size} pixels"
            raise ValueError(mismatch("most_points", self.most_points, allowed))
        return self.most_points or PUBLISHED_POINTS[self.size]

    def images(self) -> Images:
        return {"train": celeba(self.folder, 0, self.size), "unseen": celeba(self.folder, 2, self.size)}


@lru_cache(maxsize=1)
def _parts(task: _Completion) -> tuple[Pictures, Pictures]:
    """Return the training images of batches, and those that are checked."""
    images = task.images()["train"]
    out = every_tenth(len(images))
    if not out.any():
        return images, images
    if isinstance(images, Tensor):
        return images[~out], images[out]
    return [image for image, one in zip(images, out, strict=True) if not one], images[9::10]


class Completed(NamedTuple):
    """An image with some known pixels, and the prediction of all pixels."""

    known: Tensor
    """(H, W) bool"""
    mean: Tensor
    """(H, W, C), 0 for black and 1 for full colour; values may lie outside this range"""
    std: Tensor
    """(H, W, C)"""


@torch.no_grad()
def complete(model: nn.Module, image: Tensor, share: float, seed: int = 0) -> Completed:
    """Return the model's prediction from a random share of the pixels of an image (H, W, C) uint8."""
    if not 0 <= share <= 1:
        raise ValueError(mismatch("share", share, "a number from 0 to 1"))
    model, device = cast("NeuralProcess", model), next(model.parameters()).device
    x, y = data.coordinates(*image.shape[:2]).to(device), data.values(image).to(device)
    places = torch.randperm(len(x), generator=seeded(seed))[: round(share * len(x))]
    state = model.condition(x[places][None], y[places][None])
    predicted = [model.predict(state, part[None]) for part in x.split(1024)]
    mean, std = (
        torch.cat([getattr(each, what).view(-1, y.shape[-1]) for each in predicted]) for what in ("mean", "stddev")
    )
    known = torch.zeros(len(x), dtype=torch.bool).index_fill(0, places, True).view(image.shape[:2])
    return Completed(known, (mean + 0.5).view(image.shape).cpu(), std.view(image.shape).cpu())


def _background(images: Pictures, size: int) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation (size, size, C) of each pixel. If squares are cut from images, each pixel
    gets the mean and deviation of all pixels."""
    if isinstance(images, Tensor) and images.shape[1:3] == (size, size):
        pixels = data.values(images)
    else:
        pixels = torch.cat([data.values(image) for image in images]).unsqueeze(1)
    std, mean = (
        part.expand(size * size, -1).unflatten(0, (size, size)) for part in torch.std_mean(pixels, 0, correction=0)
    )
    return mean, std.clamp(min=0.05)


@cache
def _digits(shrink: int) -> Images:
    images, labels = data.digits()
    if shrink > 1:
        images = F.avg_pool2d(images.float().movedim(-1, 1), shrink).round().to(torch.uint8).movedim(1, -1)
    held_out, known = torch.arange(len(images)) % 5 == 0, labels < 7
    return {"train": images[known & ~held_out], "seen": images[known & held_out], "unseen": images[~known]}


@cache
def _emoji(size: int) -> Images:
    images, names = data.emoji(size)
    bases = [name.split("_")[0] for name in names]
    different = sorted(set(bases))
    unseen = {different[i] for i in torch.randperm(len(different), generator=seeded(0)).tolist()[: len(different) // 5]}
    held_out = torch.tensor([base in unseen for base in bases])
    return {"train": images[~held_out], "unseen": images[held_out]}


@cache
def _emnist(folder: str) -> Images:
    (images, labels), (others, other_labels) = emnist(folder, "train"), emnist(folder, "test")
    return {"train": images[labels < 10], "seen": others[other_labels < 10], "unseen": others[other_labels >= 10]}

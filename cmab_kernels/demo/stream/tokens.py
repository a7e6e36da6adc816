"""A noisy photograph as a stream of patches, and what attention over a window of them is: non-local means.

A patch attends to those that look like it, noise and all: softmax(-|q - k|^2 / (2 bandwidth^2)) over their pixels. What it gets is their
mean, in which the noise is less.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

TRAINING = ("astronaut", "chelsea", "coffee", "rocket")
"""Photographs of scikit-image, from which fixed landmarks are learnt. The one that is streamed, of a temple, comes with scikit-learn."""

PATCH = 4
WIDTH = 3 * PATCH**2
"""Of queries, keys and values: the pixels of a patch."""

NOISE = 0.2
"""Standard deviation of what is added to each colour of each pixel, which are from 0 to 1."""

BANDWIDTH = 4.5 * NOISE
"""Distance between patches that look alike. Two noisy photographs of one patch are sqrt(2 * 48) = 10 NOISE apart, all of them."""


@functools.cache
def photograph() -> Tensor:
    """(height, width, 3), from 0 to 1, cut to whole patches."""
    from sklearn.datasets import load_sample_image

    return _whole_patches(load_sample_image("china.jpg"))


def _whole_patches(pixels: Any) -> Tensor:
    height, width = (size - size % PATCH for size in pixels.shape[:2])
    return torch.tensor(pixels[:height, :width]) / 255


@functools.cache
def noisy() -> Tensor:
    return _with_noise(photograph())


def _with_noise(clean: Tensor) -> Tensor:
    return clean + NOISE * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))


@functools.cache
def training() -> Tensor:
    """(N, 48): an eighth of the patches of noisy photographs, others than the one that is streamed."""
    from skimage import data

    return torch.cat([to_patches(_with_noise(_whole_patches(getattr(data, name)())))[::8] for name in TRAINING])


def columns() -> int:
    """Patches in a row of the photograph that is streamed."""
    return photograph().shape[1] // PATCH


def to_patches(pixels: Tensor) -> Tensor:
    """(N, 48) from (height, width, 3), row by row of patches."""
    return pixels.unflatten(1, (-1, PATCH)).unflatten(0, (-1, PATCH)).transpose(1, 2).flatten(2).flatten(0, 1)


def to_pixels(patches: Tensor) -> Tensor:
    """(height, width, 3) from the (N, 48) of whole rows."""
    return patches.reshape(-1, columns(), PATCH, PATCH, 3).transpose(1, 2).flatten(2, 3).flatten(0, 1)


class Tokens(NamedTuple):
    """(1, 1, N, 48) each."""

    query: Tensor
    key: Tensor
    value: Tensor


@functools.cache
def stream() -> Tokens:
    """The patches of the noisy photograph, as they arrive."""
    return tokens(to_patches(noisy()))


def before(end: int, window: int) -> Tokens:
    """The newest `window` tokens when `end` have arrived."""
    return Tokens(*(part[:, :, end - window : end] for part in stream()))


def tokens(patches: Tensor) -> Tokens:
    """q k' = (f_q f_k' - |f_k|^2 / 2) / bandwidth^2, which is -|f_q - f_k|^2 / (2 bandwidth^2) but for a constant of the query's.

    f are 47 of the 48 principal components of the patches that landmarks are learnt from; the length of f_k is the 48th number.
    """
    mean, components = _principal_components()
    features = (patches - mean) @ components / BANDWIDTH
    length = features.square().sum(-1, keepdim=True)
    query, key = torch.cat([features, torch.ones_like(length)], dim=-1), torch.cat([features, length / -2], dim=-1)
    return Tokens(*(part.contiguous()[None, None] for part in (query, key, patches)))


@functools.cache
def _principal_components() -> tuple[Tensor, Tensor]:
    """Mean (48,) and directions (48, 47), the least of which is left out."""
    patches = training()
    mean = patches.mean(0)
    return mean, torch.linalg.eigh((patches - mean).T @ (patches - mean)).eigenvectors[:, 1:]


def learnt_landmarks(number: int) -> tuple[Tensor, Tensor]:
    """Queries and keys (1, m, 48): the means of clusters of patches, by k-means."""
    from sklearn.cluster import MiniBatchKMeans
    from threadpoolctl import threadpool_limits

    query, key, _ = tokens(training())
    with threadpool_limits(1):
        clusters = MiniBatchKMeans(number, n_init=3, random_state=0).fit_predict(query[0, 0].numpy())
    members = torch.nn.functional.one_hot(torch.from_numpy(clusters).long(), number).double()
    means = (members / members.sum(0).clamp(min=1)).T
    return (means @ query[0].double()).float(), (means @ key[0].double()).float()


def exact(first: int, last: int, window: int) -> Tensor:
    """(last - first, 48) in float64: for each of these tokens, attention over the `window` newest that ends with it."""
    query, key, value = (part[0, 0].double() for part in stream())
    since = first - window + 1
    scores = query[first:last] @ key[since:last].T
    age = torch.arange(first, last)[:, None] - torch.arange(since, last)
    outside = (age < 0) | (age >= window)
    return scores.masked_fill(outside, -torch.inf).softmax(-1) @ value[since:last]


def decibels(estimate: Tensor, truth: Tensor) -> float:
    """Peak signal to noise ratio."""
    return float(-10 * (estimate.double() - truth.double()).square().mean().log10())

"""A noisy photograph as a stream of patches. Attention over a window of them is the filter known as non-local means.

A patch attends to the patches that look like it, with weights softmax(-|q - k|^2 / (2 bandwidth^2)) of the distance between noisy pixels.
Its output is their weighted mean, which has less noise.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

TRAINING = ("astronaut", "chelsea", "coffee", "rocket")
"""Photographs of scikit-image from which fixed landmarks are learnt. The photograph that is streamed is another, from scikit-learn."""

PATCH = 4
"""Height and width of a patch, in pixels."""

WIDTH = 3 * PATCH**2
"""Width of queries, keys and values: the colours of all pixels of a patch."""

NOISE = 0.2
"""Standard deviation of the noise on each colour of each pixel. Colours are from 0 to 1."""

BANDWIDTH = 4.5 * NOISE
"""Distance at which a patch weighs exp(-1/2). Two noisy pictures of the same patch are about sqrt(2 * 48) NOISE = 10 NOISE apart."""


@functools.cache
def photograph() -> Tensor:
    """The photograph without noise: (height, width, 3) from 0 to 1, cut to whole patches."""
    from sklearn.datasets import load_sample_image

    return _whole_patches(load_sample_image("china.jpg"))


def _whole_patches(pixels: Any) -> Tensor:
    height, width = (size - size % PATCH for size in pixels.shape[:2])
    return torch.tensor(pixels[:height, :width]) / 255


@functools.cache
def noisy() -> Tensor:
    """The photograph with noise, (height, width, 3). The noise is the same at every call."""
    return _with_noise(photograph())


def _with_noise(clean: Tensor) -> Tensor:
    return clean + NOISE * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))


@functools.cache
def training() -> Tensor:
    """Patches to learn landmarks from, (N, 48): every eighth patch of the noisy photographs `TRAINING`."""
    from skimage import data

    return torch.cat([to_patches(_with_noise(_whole_patches(getattr(data, name)())))[::8] for name in TRAINING])


def columns() -> int:
    """Number of patches in a row of the photograph that is streamed."""
    return photograph().shape[1] // PATCH


def to_patches(pixels: Tensor) -> Tensor:
    """Patches (N, 48) of an image (height, width, 3), row by row of patches."""
    return pixels.unflatten(1, (-1, PATCH)).unflatten(0, (-1, PATCH)).transpose(1, 2).flatten(2).flatten(0, 1)


def to_pixels(patches: Tensor) -> Tensor:
    """An image (height, width, 3) from the patches (N, 48) of whole rows."""
    return patches.reshape(-1, columns(), PATCH, PATCH, 3).transpose(1, 2).flatten(2, 3).flatten(0, 1)


class Tokens(NamedTuple):
    """Query, key and value of each patch, (1, 1, N, 48) each."""

    query: Tensor
    key: Tensor
    value: Tensor


@functools.cache
def stream() -> Tokens:
    """The tokens of all patches of the noisy photograph, in the order in which they arrive."""
    return tokens(to_patches(noisy()))


def before(end: int, window: int) -> Tokens:
    """The newest `window` tokens after `end` tokens have arrived."""
    return Tokens(*(part[:, :, end - window : end] for part in stream()))


def tokens(patches: Tensor) -> Tokens:
    """The tokens of patches (N, 48): the value is the patch, and q k' is minus half the squared distance of two patches' features.

    With features f, in units of the bandwidth, q k' = f_q f_k' - |f_k|^2 / 2. That is -|f_q - f_k|^2 / 2 plus a constant of the query,
    which a softmax ignores. The features are 47 principal components of the training patches; the 48th number holds -|f_k|^2 / 2.
    """
    mean, components = _principal_components()
    features = (patches - mean) @ components / BANDWIDTH
    length = features.square().sum(-1, keepdim=True)
    query, key = torch.cat([features, torch.ones_like(length)], dim=-1), torch.cat([features, length / -2], dim=-1)
    return Tokens(*(part.contiguous()[None, None] for part in (query, key, patches)))


@functools.cache
def _principal_components() -> tuple[Tensor, Tensor]:
    """Mean (48,) and principal directions (48, 47) of the training patches, without the direction of least variance."""
    patches = training()
    mean = patches.mean(0)
    return mean, torch.linalg.eigh((patches - mean).T @ (patches - mean)).eigenvectors[:, 1:]


def learnt_landmarks(number: int) -> tuple[Tensor, Tensor]:
    """Landmarks learnt by k-means: queries and keys, (1, m, 48) each, the means of clusters of training patches."""
    from sklearn.cluster import MiniBatchKMeans
    from threadpoolctl import threadpool_limits

    query, key, _ = tokens(training())
    with threadpool_limits(1):
        clusters = MiniBatchKMeans(number, n_init=3, random_state=0).fit_predict(query[0, 0].numpy())
    members = torch.nn.functional.one_hot(torch.from_numpy(clusters).long(), number).double()
    means = (members / members.sum(0).clamp(min=1)).T
    return (means @ query[0].double()).float(), (means @ key[0].double()).float()


def exact(first: int, last: int, window: int) -> Tensor:
    """Exact results in float64, (last - first, 48): for each token, attention over the window of tokens that ends with it."""
    query, key, value = (part[0, 0].double() for part in stream())
    since = first - window + 1
    scores = query[first:last] @ key[since:last].T
    age = torch.arange(first, last)[:, None] - torch.arange(since, last)
    outside = (age < 0) | (age >= window)
    return scores.masked_fill(outside, -torch.inf).softmax(-1) @ value[since:last]


def decibels(estimate: Tensor, truth: Tensor) -> float:
    """Peak signal-to-noise ratio in decibels, for colours from 0 to 1."""
    return float(-10 * (estimate.double() - truth.double()).square().mean().log10())

"""A noisy photograph as a stream of patches. Attention over a window of them is the filter known as non-local means.

A patch attends to similar patches. The weights are softmax(-|q - k|^2 / (2 bandwidth^2)), where |q - k| is the distance
between noisy pixels. The output is the weighted mean of the patches, which has less noise.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

TRAINING = ("astronaut", "chelsea", "coffee", "rocket")
"""Photographs of scikit-image for learning fixed landmarks. The streamed photograph comes from scikit-learn."""

PATCH = 4
"""Height and width of a patch, in pixels."""

WIDTH = 3 * PATCH**2
"""Width of queries, keys and values: the colours of all pixels of a patch."""

NOISE = 0.2
"""Standard deviation of the noise on each colour of each pixel. Colours are from 0 to 1."""

BANDWIDTH = 4.5 * NOISE
"""The distance at which a patch has weight exp(-1/2).

Two noisy pictures of the same patch are about sqrt(2 * 48) NOISE = 10 NOISE apart.
"""


@functools.cache
def photograph() -> Tensor:
    """Return the photograph without noise: (height, width, 3) from 0 to 1, cut to whole patches."""
    from sklearn.datasets import load_sample_image

    return _whole_patches(load_sample_image("china.jpg"))


def _whole_patches(pixels: Any) -> Tensor:
    height, width = (size - size % PATCH for size in pixels.shape[:2])
    return torch.tensor(pixels[:height, :width]) / 255


@functools.cache
def noisy() -> Tensor:
    """Return the photograph with noise, (height, width, 3). The noise is the same at every call."""
    return _with_noise(photograph())


def _with_noise(clean: Tensor) -> Tensor:
    return clean + NOISE * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))


@functools.cache
def training() -> Tensor:
    """Return the patches for learning landmarks, (N, 48): every eighth patch of the noisy photographs `TRAINING`."""
    from skimage import data

    return torch.cat([to_patches(_with_noise(_whole_patches(getattr(data, name)())))[::8] for name in TRAINING])


def columns() -> int:
    """Return the number of patches in a row of the streamed photograph."""
    return photograph().shape[1] // PATCH


def to_patches(pixels: Tensor) -> Tensor:
    """Return the patches (N, 48) of an image (height, width, 3), one row of patches after the other."""
    return pixels.unflatten(1, (-1, PATCH)).unflatten(0, (-1, PATCH)).transpose(1, 2).flatten(2).flatten(0, 1)


def to_pixels(patches: Tensor) -> Tensor:
    """Return an image (height, width, 3) from the patches (N, 48) of whole rows."""
    return patches.reshape(-1, columns(), PATCH, PATCH, 3).transpose(1, 2).flatten(2, 3).flatten(0, 1)


class Tokens(NamedTuple):
    """Query, key and value of each patch, (1, 1, N, 48) each."""

    query: Tensor
    key: Tensor
    value: Tensor


@functools.cache
def stream() -> Tokens:
    """Return the tokens of all patches of the noisy photograph, in the order of their arrival."""
    return tokens(to_patches(noisy()))


def before(end: int, window: int) -> Tokens:
    """Return the newest `window` tokens after the arrival of `end` tokens."""
    return Tokens(*(part[:, :, end - window : end] for part in stream()))


def tokens(patches: Tensor) -> Tokens:
    """Return the tokens of patches (N, 48).

    The value is the patch. q k' is minus half the squared distance between the features of two patches, up to a
    constant of the query. With features f, in units of the bandwidth, q k' = f_q f_k' - |f_k|^2 / 2. That is -|f_q -
    f_k|^2 / 2 plus a constant of the query, which a softmax ignores. The features are 47 principal components of the
    training patches. The 48th number of a key holds -|f_k|^2 / 2.
    """
    mean, components = _principal_components()
    features = (patches - mean) @ components / BANDWIDTH
    length = features.square().sum(-1, keepdim=True)
    query, key = torch.cat([features, torch.ones_like(length)], dim=-1), torch.cat([features, length / -2], dim=-1)
    return Tokens(*(part.contiguous()[None, None] for part in (query, key, patches)))


@functools.cache
def _principal_components() -> tuple[Tensor, Tensor]:
    """Return the mean (48,) and the principal directions (48, 47) of the training patches.

    The direction of least variance is left out.
    """
    patches = training()
    mean = patches.mean(0)
    return mean, torch.linalg.eigh((patches - mean).T @ (patches - mean)).eigenvectors[:, 1:]


def learnt_landmarks(number: int) -> tuple[Tensor, Tensor]:
    """Return landmarks learnt by k-means: queries and keys, (1, m, 48) each.

    They are the means of clusters of training patches.
    """
    from sklearn.cluster import MiniBatchKMeans
    from threadpoolctl import threadpool_limits

    query, key, _ = tokens(training())
    with threadpool_limits(1):
        clusters = MiniBatchKMeans(number, n_init=3, random_state=0).fit_predict(query[0, 0].numpy())
    members = torch.nn.functional.one_hot(torch.from_numpy(clusters).long(), number).double()
    means = (members / members.sum(0).clamp(min=1)).T
    return (means @ query[0].double()).float(), (means @ key[0].double()).float()


def exact(first: int, last: int, window: int) -> Tensor:
    """Return the exact results in float64, (last - first, 48).

    Each result is the attention of a token over the window that ends with this token.
    """
    query, key, value = (part[0, 0].double() for part in stream())
    since = first - window + 1
    scores = query[first:last] @ key[since:last].T
    age = torch.arange(first, last)[:, None] - torch.arange(since, last)
    outside = (age < 0) | (age >= window)
    return scores.masked_fill(outside, -torch.inf).softmax(-1) @ value[since:last]


def decibels(estimate: Tensor, truth: Tensor) -> float:
    """Return the peak signal-to-noise ratio in decibels, for colours from 0 to 1."""
    return float(-10 * (estimate.double() - truth.double()).square().mean().log10())

"""Small colour images with classes, in the formats in which miniImageNet and CIFAR-100 are published. Both must be
downloaded by hand.

- miniImageNet (Vinyals et al., NeurIPS 2016; images of ImageNet, whose terms of use are for research): the pickles
  mini-imagenet-cache-train.pkl, -val.pkl and -test.pkl, with the classes of Ravi and Larochelle (ICLR 2017), which
  many repositories of few-shot learning link.
- CIFAR-100 (Krizhevsky 2009), "python version": cifar-100-python.tar.gz of
  https://www.cs.toronto.edu/~kriz/cifar.html, as it is or unpacked.
"""

from __future__ import annotations

import io
import tarfile
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cmab_kernels.runtime.checks import mismatch

from . import pickled_arrays

MINI_IMAGENET = "mini-imagenet-cache-{part}.pkl"
CIFAR = "cifar-100-python"


class LabelledImages(NamedTuple):
    """Images with their classes."""

    images: Tensor
    """(N, side, side, 3) uint8"""
    labels: Tensor
    """(N,) int64"""


@cache
def mini_imagenet(folder: str, part: str) -> LabelledImages:
    """Return the images of the classes of `part`, "train", "val" or "test". The parts share no class.

    A file holds {"image_data": (N, 84, 84, 3) uint8, "class_dict": {name: [index, ...]}}. Only data is read; a file
    that names anything but arrays, and any other content, is a `ValueError`.
    """
    path = Path(folder) / MINI_IMAGENET.format(part=part)
    if not path.is_file():
        raise _missing(folder, path.name)
    with path.open("rb") as file:
        content = _read(file, path)
    expected = "a dict with image_data (N, side, side, 3) uint8, and class_dict of indices, each index once"
    images: Any = content.get("image_data")
    classes = content.get("class_dict")
    if not _are_images(images, 4) or not isinstance(classes, dict):
        raise ValueError(mismatch(str(path), _told(content), expected))
    labels = np.full(len(images), -1)
    places = [np.asarray(each) for each in classes.values()]
    if any(where.ndim != 1 for where in places):
        raise ValueError(mismatch(str(path), "a class without a list of indices", expected))
    if sum(map(len, places)) != len(labels):
        raise ValueError(mismatch(str(path), f"{len(labels)} images and {sum(map(len, places))} indices", expected))
    for label, where in enumerate(places):
        if where.dtype.kind not in "iu" or not (where < len(labels)).all() or not (where >= 0).all():
            raise ValueError(mismatch(str(path), "indices that are of no image", expected))
        labels[where] = label
    if (labels < 0).any():
        raise ValueError(mismatch(str(path), "images of no class", expected))
    return LabelledImages(_tensor(images), torch.from_numpy(labels))


@cache
def cifar100(folder: str, part: str) -> LabelledImages:
    """Return the images and the fine labels of `part`, "train" or "test". Both parts have all 100 classes.

    The folder has cifar-100-python.tar.gz or what it unpacks to. A file holds {"data": (N, 3072) uint8, the rows of
    each colour after another, "fine_labels": [label, ...]}. Only data is read; a file that names anything but arrays,
    and any other content, is a `ValueError`.
    """
    archive, unpacked = Path(folder) / f"{CIFAR}.tar.gz", Path(folder) / CIFAR / part
    path = unpacked if unpacked.is_file() else Path(folder) / part
    if path.is_file():
        with path.open("rb") as file:
            content = _read(file, path)
    elif archive.is_file():
        path, content = archive, _of_archive(archive, f"{CIFAR}/{part}")
    else:
        raise _missing(folder, f"{archive.name} or {CIFAR}/{part}")
    data: Any = content.get("data")
    labels = np.asarray(content.get("fine_labels", []))
    sound = _are_images(data, 2) and data.shape[1] == 3072 and labels.shape == data.shape[:1]
    if not sound or labels.dtype.kind != "i" or (labels < 0).any() or (labels > 99).any():
        expected = "a dict with data (N, 3072) uint8, and fine_labels, an int from 0 to 99 for each image"
        raise ValueError(mismatch(str(path), _told(content), expected))
    images = _tensor(data).view(-1, 3, 32, 32).permute(0, 2, 3, 1)
    return LabelledImages(images.contiguous(), torch.from_numpy(labels).long())


def _of_archive(archive: Path, member: str) -> dict[str, Any]:
    try:
        with tarfile.open(archive) as found:
            file = found.extractfile(member)
            content = b"" if file is None else file.read()
            rest: Any = found.fileobj
            while rest.read(1 << 20):  # gzip compares its checksum at the end
                pass
    except (tarfile.TarError, KeyError, OSError, EOFError) as error:
        expected = f"the published archive, with {member}"
        raise ValueError(mismatch(str(archive), f"a file that cannot be read ({_line(error)})", expected)) from error
    return _read(io.BytesIO(content), archive)


def _read(file: BinaryIO, path: Path) -> dict[str, Any]:
    """Return the dict of a pickle of arrays, with str in place of Python 2's strings as keys."""
    try:
        content = pickled_arrays.read(file)
    except Exception as error:  # what a damaged pickle raises depends on the damage
        told = f"a file that cannot be read ({_line(error)})"
        raise ValueError(mismatch(str(path), told, "a pickle of a dict of arrays")) from error
    if not isinstance(content, dict):
        raise ValueError(mismatch(str(path), f"a pickled {type(content).__name__}", "a pickle of a dict of arrays"))
    return {key.decode(errors="replace") if isinstance(key, bytes) else str(key): each for key, each in content.items()}


def _line(error: Exception) -> str:
    """Return the beginning of an error's text in one line."""
    return shorten(str(error), 100)


def _tensor(images: Any) -> Tensor:
    """Return an array as a tensor. Some pickles give arrays that cannot be written to, which torch warns of."""
    return torch.from_numpy(np.require(images, requirements=["C", "W"]))


def _are_images(found: Any, dims: int) -> bool:
    """Return whether this is an array of so many dimensions with square images of three colours, or with rows."""
    if not isinstance(found, np.ndarray) or found.dtype != np.uint8 or found.ndim != dims or not len(found):
        return False
    return dims == 2 or (found.shape[1] == found.shape[2] and found.shape[3] == 3)


def _told(content: dict[str, Any]) -> str:
    """Return what a dict holds, in words."""
    parts = [
        f"{name} {each.shape} {each.dtype}" if isinstance(each, np.ndarray) else f"{name} ({type(each).__name__})"
        for name, each in list(content.items())[:5]
    ]
    return f"a dict with {', '.join(parts)}" if parts else "an empty dict"


def _missing(folder: str, name: str) -> FileNotFoundError:
    expected = f"a folder with {name}; this data is downloaded by hand, see {__name__}"
    return FileNotFoundError(mismatch("folder", f"{folder!r}, which is {Path(folder).absolute()}", expected))

"""Small files in the formats in which miniImageNet and CIFAR-100 are published."""

from __future__ import annotations

import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

MEMBER = "cifar-100-python/{part}"


def mini_imagenet(part: str, side: int = 84, classes: int = 6, of_class: int = 8) -> dict[str, Any]:
    """Return the content of a file: its images are noise on the brightness of their class."""
    numbers = np.random.default_rng(["train", "val", "test"].index(part))
    order = numbers.permutation(classes * of_class)
    indices = {f"n{part}{i}": sorted(order[i * of_class : (i + 1) * of_class].tolist()) for i in range(classes)}
    images = numbers.integers(40, size=(classes * of_class, side, side, 3))
    for i, where in enumerate(indices.values()):
        images[where] += 200 * i // classes
    return {"image_data": images.astype(np.uint8), "class_dict": indices}


def write_mini_imagenet(folder: Path, side: int = 84) -> dict[str, dict[str, Any]]:
    """Write the three files and return what they hold."""
    contents = {part: mini_imagenet(part, side) for part in ("train", "val", "test")}
    for part, content in contents.items():
        (folder / f"mini-imagenet-cache-{part}.pkl").write_bytes(pickle.dumps(content))
    return contents


def cifar(part: str, classes: int = 4, of_class: int = 12) -> dict[bytes, Any]:
    """Return the content of a file, whose keys are bytes: Python 2 wrote it."""
    numbers = np.random.default_rng(["train", "test"].index(part))
    labels = numbers.permutation(np.arange(classes).repeat(of_class))
    data = numbers.integers(40, size=(len(labels), 3072)) + 50 * labels[:, None]
    names = [b"one.png"] * len(labels)
    return {
        b"data": data.astype(np.uint8),
        b"fine_labels": labels.tolist(),
        b"coarse_labels": [0] * len(labels),
        b"filenames": names,
        b"batch_label": b"a batch",
    }


def write_cifar(folder: Path) -> dict[str, dict[bytes, Any]]:
    """Write the archive and return what its files hold."""
    contents = {part: cifar(part) for part in ("train", "test")}
    (folder / "cifar-100-python").mkdir()
    for part, content in contents.items():
        (folder / MEMBER.format(part=part)).write_bytes(pickle.dumps(content, protocol=2))
    with tarfile.open(folder / "cifar-100-python.tar.gz", "w:gz") as archive:
        archive.add(folder / "cifar-100-python", "cifar-100-python")
    for part in contents:
        (folder / MEMBER.format(part=part)).unlink()
    (folder / "cifar-100-python").rmdir()
    return contents

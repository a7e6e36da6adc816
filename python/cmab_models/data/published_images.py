"""Images in the formats in which EMNIST and CelebA are published. Both must be downloaded by hand.

- EMNIST (Cohen et al. 2017, made of NIST's Special Database 19, public domain): `gzip.zip` of
  https://www.nist.gov/itl/products-and-services/emnist-dataset
- CelebA (Liu et al. 2015; for non-commercial research): `img_align_celeba` and `list_eval_partition.txt` of
  https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html
"""

from __future__ import annotations

import gzip
import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from cmab_kernels.runtime.checks import mismatch

from .images import resized
from .packages import imported


@cache
def emnist(folder: str, part: str, split: str = "balanced") -> tuple[Tensor, Tensor]:
    """Return images (N, 28, 28, 1) uint8 and labels (N,) of `part`, "train" or "test".

    The folder has emnist-{split}-{part}-images-idx3-ubyte and -labels-idx1-ubyte, unchanged or with the ending .gz. The
    files store the columns of an image as rows; the returned images are upright.
    """
    images, labels = (
        idx(_found(folder, f"emnist-{split}-{part}-{kind}-ubyte")) for kind in ("images-idx3", "labels-idx1")
    )
    if len(images) != len(labels):
        raise ValueError(
            mismatch(
                str(folder),
                f"{len(images)} images of emnist-{split}-{part} and {len(labels)} labels",
                "one label for each image",
            )
        )
    return images.mT.contiguous().unsqueeze(-1), labels.long()


def idx(path: Path) -> Tensor:
    """Return the array of unsigned bytes in an IDX file, which may be compressed by gzip."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(
            mismatch(
                str(path),
                f"a file that begins with {content[:4].hex(' ')}",
                "an IDX file of unsigned bytes, which begins with 00 00 08",
            )
        )
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if len(content) != start + math.prod(shape):
        raise ValueError(
            mismatch(
                str(path), f"{len(content) - start} bytes of data", f"{math.prod(shape)}, as its header says {shape}"
            )
        )
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).view(shape)


@cache
def celeba(folder: str, part: int, size: int) -> Tensor:
    """Return the faces (N, size, size, 3) uint8 of a part: 0 for training, 1 for validation, 2 for tests.

    The folder has list_eval_partition.txt, with lines such as "000001.jpg 0", and img_align_celeba with the images.
    Whole images are resized, as in the published code.
    """
    image = imported("PIL.Image", "pillow")
    lines = [
        line.split() for line in _found(folder, "list_eval_partition.txt").read_text().splitlines() if line.strip()
    ]
    for line in lines:
        if len(line) != 2 or line[1] not in "012":
            raise ValueError(mismatch("list_eval_partition.txt", f"a line {' '.join(line)!r}", "a file and 0, 1 or 2"))
    faces = [
        resized(image.open(_found(folder, f"img_align_celeba/{name}")), size)
        for name, which in lines
        if int(which) == part
    ]
    if not faces:
        raise ValueError(mismatch("list_eval_partition.txt", f"no file of part {part}", "at least one"))
    return torch.stack(faces)


def _found(folder: str, name: str) -> Path:
    for path in (Path(folder, name), Path(folder, f"{name}.gz")):
        if path.exists():
            return path
    expected = f"a folder with {name}; this data is downloaded by hand, see {__name__}"
    raise FileNotFoundError(mismatch("folder", f"{folder!r}, which is {Path(folder).absolute()}", expected))

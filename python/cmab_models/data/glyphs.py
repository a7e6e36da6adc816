"""Small images of digits and letters.

- scikit-learn's digits (BSD): 1,797 written digits of 8 x 8 pixels, of the UCI repository (E. Alpaydin, C. Kaynak; CC
BY 4.0).
- Letters: drawn from the Noto fonts (SIL Open Font License 1.1) of Debian's fonts-noto-core, if it is installed; or
  from the DejaVu fonts (Bitstream Vera's licence, which is free, and public domain) that come with matplotlib.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels.runtime.checks import mismatch

from .packages import imported

NOTO = "/usr/share/fonts/truetype/noto"
FACES = ("NotoSans", "NotoSerif", "NotoSansDisplay", "NotoSerifDisplay")
STYLES = ("Regular", "Bold", "Italic", "BoldItalic")
DEJAVU = tuple(
    f"DejaVu{face}.ttf"
    for face in (
        *(
            "Sans",
            "Sans-Bold",
            "Sans-Oblique",
            "Sans-BoldOblique",
            "Serif",
            "Serif-Bold",
            "Serif-Italic",
            "Serif-BoldItalic",
        ),
        *("SansMono", "SansMono-Bold", "SansMono-Oblique", "SansMono-BoldOblique"),
    )
)
ALPHABETS = (
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz",
    "ΓΔΘΛΞΠΣΦΨΩαβγδεζηθλμξπστφχψωБДЖЗИЛЦЧШЩЫЭЮЯбвгджзилмнптфцчшщыэюя",
)
"""Letters for training, and held-out letters of other alphabets, which look different."""
SIDE = 16
"""Rows and columns of a letter's image."""


class Glyphs(NamedTuple):
    """Images with their classes."""

    images: Tensor
    """(N, pixels) float32 from 0 to 1"""
    labels: Tensor
    """(N,) int64"""
    train_classes: int
    """In a split by class, classes below this number are for training, and the others are held out."""

    def part(self, held_out: bool) -> tuple[Tensor, Tensor]:
        """Return the first five sevenths of the images, for training, or the other images, and their classes. Both have
        all classes."""
        bound = len(self.labels) * 5 // 7
        which = slice(bound, None) if held_out else slice(bound)
        return self.images[which], self.labels[which]

    def of_classes(self, held_out: bool) -> tuple[Tensor, Tensor]:
        """Return the images of the held-out classes or of the training classes, with their classes.

        For training each class becomes eight classes, by quarter turns and mirroring.
        """
        which = (self.labels >= self.train_classes) == held_out
        images, labels = self.images[which], self.labels[which]
        if held_out:
            return images, labels
        side = math.isqrt(images.shape[1])
        square = images.view(-1, side, side)
        turned = [each.rot90(quarters, (1, 2)).flatten(1) for each in (square, square.mT) for quarters in range(4)]
        return torch.cat(turned), torch.cat([labels + number * self.train_classes for number in range(len(turned))])


@cache
def digits() -> Glyphs:
    """Return scikit-learn's digits. The classes 6 to 9 can be held out."""
    data = imported("sklearn.datasets", "scikit-learn").load_digits()
    return Glyphs(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target), 6)


@cache
def letters(
    folder: str = NOTO, faces: tuple[str, ...] = tuple(f"{face}-{style}.ttf" for face in FACES for style in STYLES)
) -> Glyphs:
    """Return 16 x 16 images of Latin letters, and of Greek and Cyrillic letters that can be held out, in each typeface
    that the folder has.

    Raises an `ImportError` if the folder has fewer than 6 typefaces, because a question needs at least five examples
    and a query.
    """
    truetype = imported("PIL.ImageFont", "pillow").truetype
    found = [str(Path(folder) / face) for face in faces if (Path(folder) / face).exists()]
    if len(found) < 6:
        raise ImportError(
            mismatch(
                str(folder),
                f"{len(found)} of the fonts that letters are drawn with",
                "at least 6; apt-get install fonts-noto-core",
            )
        )
    text = "".join(ALPHABETS)
    fonts = [truetype(face, 3 * SIDE) for face in found]
    drawn = torch.stack([_drawn(letter, font) for letter in text for font in fonts])
    return Glyphs(drawn, torch.arange(len(text)).repeat_interleave(len(found)), len(ALPHABETS[0]))


def dejavu() -> Glyphs:
    """Return the letters in the 12 typefaces that come with matplotlib."""
    return letters(str(Path(imported("matplotlib", "matplotlib").get_data_path()) / "fonts" / "ttf"), DEJAVU)


def turned(images: Tensor, degrees: float, generator: torch.Generator) -> Tensor:
    """Return square images (..., pixels), each rotated about its centre by an angle of U(-degrees, degrees)."""
    square = images.flatten(0, -2).unflatten(-1, (1, math.isqrt(images.shape[-1]), -1))
    angle = math.radians(degrees) * (2 * torch.rand(len(square), 1, 1, generator=generator) - 1)
    sine, cosine = angle.sin(), angle.cos()
    # The centres of pixels, in the coordinates of grid_sample.
    middles = (2 * torch.arange(square.shape[-1]) + 1) / square.shape[-1] - 1
    row, column = middles.unsqueeze(1), middles
    grid = torch.stack([cosine * column - sine * row, sine * column + cosine * row], -1)
    return F.grid_sample(square, grid, align_corners=False).view_as(images)


def _drawn(letter: str, font: Any) -> Tensor:
    """Return the letter in the centre of an image, as (pixels,). It is drawn at four times the size, and then
    reduced."""
    image = imported("PIL.Image", "pillow")
    large = image.new("L", (4 * SIDE, 4 * SIDE))
    imported("PIL.ImageDraw", "pillow").Draw(large).text((2 * SIDE, 2 * SIDE), letter, 255, font, anchor="mm")
    return torch.tensor(list(large.resize((SIDE, SIDE), image.Resampling.BOX).tobytes()), dtype=torch.float32) / 255

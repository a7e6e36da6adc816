"""NumPy's arrays in pickles of others, read without NumPy's own unpickling.

That would trust the file: a type "object" makes addresses of the numbers in a file, and one flipped byte can end the
process. Here objects of this module stand for NumPy's types. They take plain numbers only.
"""

from __future__ import annotations

import pickle
import re
from typing import Any, BinaryIO

import numpy as np


class Kind:
    """Stands for `numpy.dtype`: a plain number, of a byte order."""

    def __init__(self, text: str | bytes, *_: Any) -> None:
        self.text, self.order = text.decode() if isinstance(text, bytes) else text, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1]
        self.order = order.decode() if isinstance(order, bytes) else order

    def dtype(self) -> np.dtype[Any]:
        if not re.fullmatch(r"[biuf][1248]", self.text) or self.order not in ("<", ">", "=", "|"):
            raise pickle.UnpicklingError(f"it has the type {self.order}{self.text}, not plain numbers")
        return np.dtype(self.order + self.text)


class Stored:
    """Stands for `numpy.ndarray` while a file is read."""

    array: np.ndarray

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, by_columns, data = state
        self.array = _array(data, kind, shape, "F" if by_columns else "C")


def _array(data: bytes, kind: Kind, shape: tuple[int, ...], order: str) -> np.ndarray:
    found = np.frombuffer(data, kind.dtype()).reshape(shape, order="F" if order == "F" else "C")
    return found.copy()  # torch takes arrays that can be written to


def _scalar(kind: Kind, data: bytes) -> Any:
    return np.frombuffer(data, kind.dtype())[0]


def _reconstruct(*_: Any) -> Stored:
    return Stored()


def _bytes(text: str, encoding: str) -> bytes:
    """Stands for `_codecs.encode`, with which Python 3 writes bytes for Python 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """Stands for `bytes`, with which Python 3 writes empty bytes for Python 2: those of an array without elements."""
    return b""


STAND_INS: dict[str, Any] = {
    "numpy.ndarray": Stored,
    "numpy.dtype": Kind,
    "builtins.bytes": _no_bytes,
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _array for core in ("core", "_core")},
}
"""A name in a pickle -> what stands for it. NumPy 2 renamed `numpy.core`."""


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path == "_codecs.encode":
            return _bytes
        if path not in STAND_INS:
            raise pickle.UnpicklingError(f"it names {path}")
        return STAND_INS[path]


def read(file: BinaryIO) -> Any:
    """Return the lists, dicts, numbers, texts and arrays of a pickle, also of Python 2.

    Anything else that a pickle names raises an `UnpicklingError`, and nothing of it is executed. Damaged files raise
    other errors too.
    """
    return plain(_Arrays(file, encoding="bytes").load())


def plain(found: Any) -> Any:
    """Return what was read, with arrays in place of what stands for them."""
    if isinstance(found, Stored):
        return found.array
    if isinstance(found, dict):
        return {key: plain(each) for key, each in found.items()}
    return type(found)(map(plain, found)) if type(found) in (list, tuple) else found

"""Models that are checked when they are made, and saved and loaded with their configuration."""

from __future__ import annotations

import inspect
import json
import sys
from numbers import Integral
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, ClassVar

from huggingface_hub import PyTorchModelHubMixin
from torch import nn

if TYPE_CHECKING:
    from typing import Self


class Pretrained(nn.Module, PyTorchModelHubMixin, library_name="cmab_models"):
    """Base class of all models: `save_pretrained(folder)` and `from_pretrained(folder)`.

    A folder holds `model.safetensors`, the parameters, and `config.json`, the arguments of the constructor, which are numbers, strings and
    booleans. Nothing is executed when it is read, and one of another model, or with a part of the parameters, is a `RuntimeError`, unless
    `from_pretrained` is given `strict=False`; a `config.json` that holds no JSON object is a `ValueError`. What the constructor's
    annotations promise is checked before anything is made: a `ValueError` for a size that is not a positive int, a number that is not
    finite, or heads that do not divide the width.

    >>> cmab_models.CNP(dim_x=1, dim_y=1, depth=0)
    Traceback (most recent call last):
    ValueError: depth is 0; an int >= 1 is needed
    """

    before: ClassVar[dict[str, Any]] = {}
    """Arguments that an older `config.json` lacks, with what it meant: their defaults are others."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        _check_arguments(cls, args, kwargs)
        made: Self = super().__new__(cls, *args, **kwargs)
        return made

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Self:
        """Return the model of a folder, or of a repository on the Hugging Face Hub; the arguments are huggingface_hub's."""
        _check_config(Path(pretrained_model_name_or_path) / "config.json")
        loaded: Self = super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        return loaded

    @classmethod
    def _from_pretrained(cls, *, strict: bool = True, **kwargs: Any) -> Self:
        """Refuse what `load_state_dict` refuses: by default huggingface_hub lets parameters that are missing be random.

        Arguments that the configuration lacks are those of the version that saved it.
        """
        loaded: Self = super()._from_pretrained(strict=strict, **cls.before | kwargs)
        return loaded


def _check_config(path: Path) -> None:
    """Raise if the file is there and holds no JSON object: huggingface_hub reads it as one, whatever it is."""
    if not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {shorten(repr(config), 50)}; a JSON object, the arguments of the constructor, is needed")


def _check_arguments(kind: type[Pretrained], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise unless the arguments of a constructor are what its annotations say; those that are missing are the constructor's to name.

    A constructor of another package, in a class derived from one of ours, takes what it likes.
    """
    if not kind.__init__.__module__.startswith(f"{__package__}."):
        return
    _, *parameters = inspect.signature(kind.__init__).parameters.values()
    given = dict(zip((each.name for each in parameters), args, strict=False)) | kwargs
    values = {each.name: given.get(each.name, each.default) for each in parameters}
    for each in parameters:
        value, kinds = values[each.name], set(each.annotation.split(" | "))
        if value is each.default or (value is None and "None" in kinds):
            continue
        what = _needed(value, kinds)
        if what:
            raise ValueError(f"{each.name} is {value!r}; {what} is needed")
    heads = values.get("num_heads")
    if heads is not None and values["dim"] % heads:
        raise ValueError(f"num_heads is {heads}; a divisor of dim = {values['dim']} is needed")


def _needed(value: Any, kinds: set[str]) -> str:
    """What is needed in place of this value of an argument, if it is of the wrong kind."""
    number = isinstance(value, (Integral, float)) and not isinstance(value, bool)
    if "int" in kinds and not (number and isinstance(value, Integral) and int(value) >= 1):
        return "an int >= 1"
    if "float" in kinds and not (number and abs(value) <= sys.float_info.max):  # an int can be too large for a float
        return "a finite number"
    if "bool" in kinds and not isinstance(value, bool):
        return "True or False"
    if "str" in kinds and not isinstance(value, str):
        return "a str"
    return ""

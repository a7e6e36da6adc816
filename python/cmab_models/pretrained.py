"""The base class of models: it checks constructor arguments, and saves and loads a model with its configuration."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Container, Mapping
from difflib import get_close_matches
from numbers import Integral
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from huggingface_hub import HfApi, PyTorchModelHubMixin, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from safetensors import safe_open
from torch import nn

from cmab_kernels.runtime.checks import LARGEST, mismatch

if TYPE_CHECKING:
    from typing import Self

NAMED = "architectures"
"""The entry of `config.json` with the name of the class, as in the configurations of transformers."""
NAME = "pretrained_model_name_or_path"
"""huggingface_hub's name of the folder or repository of `from_pretrained`."""


class Pretrained(nn.Module, PyTorchModelHubMixin, library_name="cmab_models"):
    """Base class of all models: `save_pretrained(folder)` and `from_pretrained(folder)`.

    A folder holds `model.safetensors`, the parameters in their dtype, and `config.json`, the name of the class and the
    arguments of its constructor: numbers, strings and booleans. Loading a folder executes nothing. A folder of another
    class, or with only a part of the parameters, raises a `RuntimeError`, unless `from_pretrained` is given
    `strict=False`. A `config.json` that is not a JSON object raises a `ValueError`.

    Arguments are checked against the constructor's annotations before anything is made. A size that is not a positive
    int, a number that is not finite, or a number of heads that does not divide the width raises a `ValueError`. An
    option that is missing or unknown raises a `TypeError`.

    >>> cmab_models.CNP(dim_x=1, dim_y=1, dim=0)
    Traceback (most recent call last):
    ValueError: dim: got 0, expected an int >= 1
    >>> cmab_models.CNP(dim_x=1, dim_y=1, dims=16)
    Traceback (most recent call last):
    TypeError: dims: got an unknown argument of CNP, expected one of dim_x, dim_y, dim, encoder_depth, pooled_depth,
    decoder_depth; did you mean dim?
    """

    before: ClassVar[dict[str, Any]] = {}
    """Arguments that an older `config.json` lacks -> the values that it implied. These differ from the defaults."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        _check_arguments(cls, args, kwargs)
        # These values are written to config.json. huggingface_hub would leave out an int of NumPy, and would then load
        # the model with the default.
        made: Self = super().__new__(
            cls, *map(python_value, args), **{name: python_value(each) for name, each in kwargs.items()}
        )
        if isinstance(config := made._hub_mixin_config or {}, dict):  # a derived class may take a dataclass instead
            made._hub_mixin_config = {NAMED: [cls.__name__], **config}
        return made

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Self:
        """Return the model of a folder, or of a repository `owner/name` on the Hugging Face Hub. The arguments are
        those of huggingface_hub.

        Raises `FileNotFoundError` for a folder that does not exist or holds no model. Raises the same error for a
        repository that is not on the Hub, or, if the Hub does not answer, not in the Hub's cache on this machine.
        """
        folder = Path(pretrained_model_name_or_path)
        if folder.is_dir():
            _check_folder(cls, folder, kwargs)
        elif not _on_hub(name := _repository(pretrained_model_name_or_path), kwargs):
            _check_cached(name, kwargs)
            kwargs["local_files_only"] = True
        loaded: Self = super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        return loaded

    @classmethod
    def _from_pretrained(cls, *, strict: bool = True, config: Any = None, **kwargs: Any) -> Self:
        """Raise an error wherever `load_state_dict` raises one, and for the folder of another class: some classes have
        parameters of the same names. By default huggingface_hub leaves missing parameters at random values.

        Arguments that the configuration lacks get the values of the version that saved it. A class in another package
        may take the parameters of the class from which it is derived.
        """
        kwargs.pop(NAMED, None)
        if strict and cls.__module__.startswith(f"{__package__}."):
            named = (config or {}).get(NAMED, [cls.__name__])
            if named != [cls.__name__]:
                raise RuntimeError(mismatch(NAMED, named, f"[{cls.__name__!r}]; strict=False loads what fits"))
        taken = inspect.signature(cls.__init__).parameters  # a derived class may have other arguments
        if "config" in taken:
            kwargs["config"] = config
        before = {name: value for name, value in cls.before.items() if name in taken}
        loaded: Self = super()._from_pretrained(strict=strict, **before | kwargs)
        return loaded

    @classmethod
    def _load_as_safetensor(cls, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        """Load parameters with the dtypes that they have in the file. huggingface_hub would cast them to the dtype of a
        new model, float32.

        Parameters that were tied when they were saved are tied again. The file holds them under one name, and lists the
        other names.
        """
        with safe_open(model_file, "pt") as file:
            _tie(model, file.metadata() or {})
            saved, named = set(file.keys()), list(model.named_parameters(remove_duplicate=False))
            found = [(parameter, file.get_tensor(name).dtype) for name, parameter in named if name in saved]
        held = {id(parameter) for parameter, _ in found}
        lacks = [name for name, parameter in named if id(parameter) not in held]
        if strict and lacks:  # layers that also take torch's weights can do without some of theirs
            raise RuntimeError(mismatch(model_file, f"no {', '.join(lacks)}", "all parameters; strict=False loads it"))
        if found:
            model.to(found[0][1])  # casts buffers too
        for parameter, dtype in found:
            parameter.data = parameter.data.to(dtype)
        return super()._load_as_safetensor(model, model_file, map_location, strict)


def _tie(model: nn.Module, names: Mapping[str, str]) -> None:
    """Tie parameters again: replace each by the saved parameter to which it was tied, according to `names`, if the
    shapes agree."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, kept in names.items():
        if name in parameters and kept in parameters and parameters[name].shape == parameters[kept].shape:
            place, _, last = name.rpartition(".")
            setattr(model.get_submodule(place), last, parameters[kept])


def _check_folder(kind: type[Pretrained], folder: Path, given: dict[str, Any]) -> None:
    """Raise unless a folder holds parameters, and a configuration that is a JSON object. huggingface_hub does not check
    this."""
    path = folder / "config.json"
    needed = {"model.safetensors": True, path.name: bool(_missing(kind, given))}
    lacks = [name for name, is_needed in needed.items() if is_needed and not (folder / name).is_file()]
    if lacks:
        allowed = "a folder that save_pretrained wrote"
        raise FileNotFoundError(mismatch(NAME, f"{str(folder)!r}, a folder without {' and '.join(lacks)}", allowed))
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(config, dict):
        raise ValueError(
            mismatch(str(path), shorten(repr(config), 50), "a JSON object, the arguments of the constructor")
        )


def _repository(given: str | Path) -> str:
    """Return a name that can belong to a repository. If the name can only belong to a folder, raise
    `FileNotFoundError`, because there is no such folder."""
    if isinstance(given, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", given):
        return given
    what = "a file, not a folder" if Path(given).is_file() else "not a folder here"
    allowed = "a folder that save_pretrained wrote, or owner/name of a repository on the Hub"
    raise FileNotFoundError(mismatch(NAME, f"{str(given)!r}, {what}", allowed))


def _on_hub(name: str, options: dict[str, Any]) -> bool:
    """Whether the Hub answers a single request; a download would try for 23 seconds. Raises `FileNotFoundError` if the
    Hub has no such repository."""
    if options.get("local_files_only"):
        return False
    try:
        HfApi().model_info(name, revision=options.get("revision"), token=options.get("token"), timeout=10.0)
    except RepositoryNotFoundError as error:
        allowed = "a folder here, or a repository of the Hub that you may read; there is neither"
        raise FileNotFoundError(mismatch(NAME, repr(name), allowed)) from error
    except HfHubHTTPError:
        return True  # then the download raises the error
    except Exception:  # without a network, each version of the HTTP library raises other exceptions
        return False
    return True


def _check_cached(name: str, options: dict[str, Any]) -> None:
    """Raise `FileNotFoundError` unless the cache of this machine has the repository."""
    found = try_to_load_from_cache(name, "config.json", options.get("cache_dir"), options.get("revision"))
    if not isinstance(found, str):
        allowed = (
            "a folder here, or a repository in the cache, as the Hub does not answer or is not to be asked; "
            "there is neither"
        )
        raise FileNotFoundError(mismatch(NAME, repr(name), allowed))


def _missing(kind: type[Pretrained], given: Container[str]) -> list[str]:
    """Return the names of the arguments that have no default and are not given."""
    named = [each for each in _parameters(kind) if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    return [each.name for each in named if each.default is each.empty and each.name not in given]


def _parameters(kind: type[Pretrained]) -> list[inspect.Parameter]:
    return list(inspect.signature(kind.__init__).parameters.values())[1:]


def python_value(value: Any) -> Any:
    """Return the value of an argument, with numbers of NumPy and other kinds as Python's own, which files can hold."""
    if type(value) in (list, tuple):
        return type(value)(map(python_value, value))
    if isinstance(value, np.generic):
        return value.item()
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _check_arguments(kind: type[Pretrained], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise unless the arguments of a constructor agree with its annotations.

    The constructor of a derived class in another package is not checked. A copy is made without arguments.
    """
    if not kind.__init__.__module__.startswith(f"{__package__}."):
        return
    parameters = _parameters(kind)
    given = dict(zip((each.name for each in parameters), args, strict=False)) | kwargs
    if given:
        _check_names(kind, [each.name for each in parameters], given)
    values = {each.name: given.get(each.name, each.default) for each in parameters}
    for each in parameters:
        value, kinds = values[each.name], set(each.annotation.split(" | "))
        if value is each.default or (value is None and "None" in kinds):
            continue
        what = _expected(value, kinds)
        if what:
            raise ValueError(mismatch(each.name, repr(value), what))
    heads = values.get("num_heads")
    if heads is not None and values["dim"] % heads:
        raise ValueError(mismatch("num_heads", heads, f"a divisor of dim = {values['dim']}"))


def _check_names(kind: type[Pretrained], known: list[str], given: dict[str, Any]) -> None:
    """Raise `TypeError` for an unknown argument or a missing one."""
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, 1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(
                mismatch(name, f"an unknown argument of {kind.__name__}", f"one of {', '.join(known)}{meant}")
            )
    for name in _missing(kind, given):
        raise TypeError(mismatch(name, "nothing", f"a value, as {kind.__name__} takes {', '.join(known)}"))


def _expected(value: Any, kinds: set[str]) -> str:
    """Return the value that is expected for an argument, if its value is of the wrong kind; else ""."""
    number = isinstance(value, (Integral, float)) and not isinstance(value, bool)
    if "int" in kinds and not (number and isinstance(value, Integral) and int(value) >= 1):
        return "an int >= 1"
    if "int" in kinds and value > LARGEST:
        return "an int from 1 to 2**63 - 1"
    if "float" in kinds and not (number and abs(value) <= sys.float_info.max):  # an int can be too large for a float
        return "a finite number"
    if "bool" in kinds and not isinstance(value, bool):
        return "True or False"
    if "str" in kinds and not isinstance(value, str):
        return "a str"
    return ""

"""Constructors of modules: signatures that show the arguments of a parent, and checks that all constructors share."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from ..runtime.checks import as_flag, check_count, device_of, kind_of, mismatch

Init = TypeVar("Init", bound=Callable[..., None])


def extending(parent: type) -> Callable[[Init], Init]:
    """Return a decorator for a constructor that passes `*args` and `**kwargs` on to the constructor of `parent`.

    `inspect.signature` and `help` then show the parent's arguments, followed by the keyword arguments of the decorated
    constructor.
    """

    def shown(init: Init) -> Init:
        theirs, ours = inspect.signature(parent.__init__), inspect.signature(init)  # type: ignore[misc]  # of a class, not of an instance
        parameters = dict(theirs.parameters)
        parameters.update(
            {name: each for name, each in ours.parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY}
        )
        return naming_options(init, theirs.replace(parameters=list(parameters.values())))

    return shown


def naming_options(init: Init, signature: inspect.Signature | None = None) -> Init:
    """Return the constructor with errors that name the class and the unknown or missing option.

    The constructor shows `signature`, or its own signature if that is None.
    """
    shown = inspect.signature(init) if signature is None else signature

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        check_options(type(self).__name__, shown, options, self, *args)
        init(self, *args, **options)

    checked.__signature__ = shown  # type: ignore[attr-defined]  # a function may be given this attribute
    return cast("Init", checked)


def check_options(name: str, signature: inspect.Signature, options: Mapping[str, Any], *args: Any) -> None:
    """Raise `TypeError` for an unknown or a missing option of the class `name`, and for arguments that do not fit.

    Raise `TypeError` or `ValueError` for a value that its annotation does not allow.
    """
    for option in options:
        if option not in signature.parameters:
            close = difflib.get_close_matches(option, signature.parameters, 1)
            meant = (
                f"; did you mean {close[0]}?"
                if close
                else "; did you mean the argument of forward?"
                if option in _OF_FORWARD
                else ""
            )
            known = ", ".join(each for each in signature.parameters if each != "self")
            raise TypeError(mismatch(option, f"an unknown option of {name}", f"one of {known}{meant}"))
    try:
        given = signature.bind(*args, **options).arguments
    except TypeError as error:
        text = str(error)
        missing = re.search(r"missing a required (?:keyword-only )?argument: '(\w+)'", text)
        if missing:
            raise TypeError(mismatch(missing[1], "nothing", f"a value, because {name} has no default for it")) from None
        raise TypeError(f"{name}: {text}") from None
    for argument, value in given.items():
        _check_value(argument, value, signature.parameters[argument].annotation)


def _check_value(name: str, value: Any, annotation: Any) -> None:
    """Raise for an array, and for a value that is not an int, bool, device or dtype where one of these is needed."""
    if getattr(value, "ndim", 0) > 0:
        raise TypeError(mismatch(name, kind_of(value), "a single value"))
    kind = getattr(annotation, "__name__", annotation)  # torch's classes are not annotated with strings
    if kind == "bool":
        as_flag(name, value)
    elif kind == "int" or (kind == "int | None" and value is not None):
        check_count(name, value, least=0)
    elif name == "device" and value is not None:
        device_of(value)
    elif name == "dtype" and not isinstance(value, torch.dtype | None):
        raise TypeError(mismatch(name, kind_of(value), "a torch.dtype"))


_OF_FORWARD = inspect.signature(torch.nn.MultiheadAttention.forward).parameters

"""Checks of error messages: they have the form «argument: got X, expected Y»."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from .declaration import Declaration, Inputs, together

KINDS = (
    "that is a list",
    "of integers",
    "of complex numbers",
    "of another dtype",
    "on another device",
    "of a dimension too few",
)


def _changed(tensor: Tensor, kind: str) -> Any:
    """Return the bad value to pass in place of a tensor."""
    return {
        "that is a list": lambda: tensor.tolist(),
        "of integers": lambda: tensor.long(),
        "of complex numbers": lambda: tensor.to(torch.complex64),
        "of another dtype": lambda: tensor.to(torch.float64),
        "on another device": lambda: tensor.to("meta"),
        "of a dimension too few": lambda: tensor[0],
    }[kind]()


def _described(value: Any) -> tuple[str, ...]:
    """Return the words that describe a value: its dtype, device and shape, or its type. An error message must contain
    one of them."""
    if not isinstance(value, Tensor):
        return (type(value).__name__,)
    return str(value.dtype), str(value.device), str(tuple(value.shape))


class Errors(Declaration):
    """Checks that a wrong argument raises an error with a helpful message."""

    def bad_arguments(self) -> list[str]:
        """Return the names of the error checks: each of `KINDS` for each argument, and a wrong length if arguments
        share a letter."""
        named = [f"{name} {kind}" for name, axes in self.arguments.items() for kind in KINDS if axes]
        shared = {a for a in self.extents if sum(a in axes for axes in self.arguments.values()) > 1}
        named += [
            f"{name} longer in {a}" for name, axes in self.arguments.items() for a in dict.fromkeys(axes) if a in shared
        ]
        named += [
            f"{name} that is not square"
            for name, axes in self.arguments.items()
            if len(axes) > 1 and axes[-1] == axes[-2]
        ]
        return [name for name in named if name not in self.accepted]

    @together("bad")
    def test_bad_arguments(self, impl: str, bad: str) -> None:
        """The error is a TypeError or a ValueError that names an argument, what it got and what is expected. The call
        changes nothing."""
        inputs = self.inputs(torch.float32, extents=self.small)
        name, kind = bad.split(" ", 1)
        given = self._spoilt(inputs, name, kind)
        before = {n: t.clone() for n, t in given.items() if isinstance(t, Tensor) and t.device.type != "meta"}
        try:
            self.call(impl, **given)
        except (TypeError, ValueError) as error:
            self._check_message(str(error), given)
        else:
            raise AssertionError(f"{bad} was accepted")
        assert all(torch.equal(given[n], t) for n, t in before.items()), "an argument was changed"

    def _spoilt(self, inputs: Inputs, name: str, kind: str) -> dict[str, Any]:
        if kind == "that is not square":
            return {**inputs, name: torch.cat([inputs[name], inputs[name][..., :1]], -1)}
        if kind.startswith("longer in "):
            dim = self.arguments[name].rindex(kind[-1])
            return {**inputs, name: torch.cat([inputs[name], inputs[name].narrow(dim, 0, 1)], dim)}
        return {**inputs, name: _changed(inputs[name], kind)}

    def _check_message(self, message: str, given: dict[str, Any]) -> None:
        form = re.match(r"(?s)[\w.\[\]]+: got .+, expected .+", message)
        assert form, f"the message does not have the form «argument: got X, expected Y»: {message}"
        words = {word for value in given.values() for word in _described(value)}
        assert any(word in message for word in words) or re.search(r"\d|None", message), (
            f"the message does not say what was given: {message}"
        )

    def test_an_unknown_implementation(self) -> None:
        try:
            self.call("nonsense", **self.inputs(torch.float32, extents=self.small))
        except ValueError as error:
            assert re.match(r"impl: got 'nonsense', expected .*reference", str(error)), error
        else:
            raise AssertionError("impl='nonsense' ran something")

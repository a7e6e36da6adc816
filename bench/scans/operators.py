"""What the cases of operators have in common: which implementations there are, what varies, and what keeps one from running."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

import cmab_kernels
from cmab_kernels.backends import FAMILIES, OPERATORS

from ..floors import Work
from ..harness import COLD_BYTES, device, ours

EAGER = "eager torch"
PACKAGE = "nystrom-attention 0.0.14"
CONTINUAL_INFERENCE = "continual-inference 1.2.4"
MODULES = {PACKAGE: "nystrom_attention", CONTINUAL_INFERENCE: "continual"}
"""Package -> what it is imported as."""

DTYPES = (torch.float64, torch.bfloat16, torch.float16)
"""What is measured beside float32."""

Implementation = Callable[[Any], Sequence[Tensor]]
"""A function of a case's inputs that returns its results."""


def kernels(operator: str) -> tuple[str, ...]:
    """Implementations of a public operator for the device that is measured, and its definition."""
    return tuple(name for name in ours() if name in (*FAMILIES[OPERATORS[operator]], "reference"))


def missing(implementation: str) -> str | None:
    """Says so where an implementation is a package's that is not there."""
    if implementation in MODULES and importlib.util.find_spec(MODULES[implementation]) is None:
        return f"not installed: pip install {implementation.split(' ')[0]}"
    return None


def refused(operator: str, implementation: str, *tensors: Tensor) -> str | None:
    """Why one of ours cannot run such tensors, or a package is not there."""
    reasons = {row.impl: row.reason for row in cmab_kernels.explain(operator, *tensors) if not row.usable}
    return missing(implementation) or reasons.get(implementation.split(",")[0])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor to ask about."""
    return torch.empty(shape, dtype=dtype, device=device())


def identity(like: Tensor) -> Tensor:
    """As wide as what it is added to."""
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a peer computes in where the operands are half precision, so that its result is right."""
    return dtype if dtype.itemsize >= 4 else torch.float32


@dataclass(frozen=True, kw_only=True)
class OperatorCase:
    """Fields that every case has, and its parameters by them. A case adds its sizes."""

    scan: ClassVar[str]
    others: ClassVar[tuple[str, ...]] = ()

    dtype: torch.dtype = torch.float32
    threads: int | None = 1
    quick: bool = False

    @property
    def sizes(self) -> Mapping[str, int | str]:
        """The parameters of the operator itself."""
        raise NotImplementedError

    @property
    def parameters(self) -> Mapping[str, int | str]:
        return {**self.sizes, "dtype": dtype_name(self.dtype), "threads": self.threads or torch.get_num_threads()}

    @property
    def _dtype(self) -> str:
        return dtype_name(self.dtype)

    @property
    def _threads(self) -> str:
        """What a name ends with where threads are not those of other cases of the class."""
        usual = next(field.default for field in fields(self) if field.name == "threads")
        return "" if self.threads == usual else f"-{self.threads}-thread{'' if self.threads == 1 else 's'}"


def moved(size: int, dtype: str) -> Work | None:
    """Work that is bytes alone; none where so few are that a cache may hold them from one call to the next."""
    return Work(bytes=size, dtype=dtype) if size >= COLD_BYTES // 8 else None


def direction(backward: bool) -> str:
    """The parameter `pass`."""
    return "forward + backward" if backward else "forward"


def passes(function: Callable[..., Any], operands: int, backward: bool) -> Implementation:
    """`function` of the first so many inputs; with a backward its results and their gradients, for those that the other inputs hold."""

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        given, douts = inputs[:operands], inputs[operands:]
        outs = _tuple(function(*given))
        if not backward:
            return outs
        return *(out.detach() for out in outs), *torch.autograd.grad(outs, given, douts[: len(outs)])

    return run


def _tuple(outs: Tensor | Iterable[Tensor]) -> tuple[Tensor, ...]:
    return (outs,) if isinstance(outs, Tensor) else tuple(outs)

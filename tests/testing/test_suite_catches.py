"""The inherited suite finds the faults for which it is made.

A small operator passes, and each faulty copy of it fails the check for its fault.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cmab_kernels.runtime.autograd import differentiable, gradient_of_formula
from cmab_kernels.runtime.checks import check_operands, mismatch
from cmab_kernels.runtime.tracing import needs_definition
from cmab_kernels.testing import OperatorSuite, failures

LIB = torch.library.Library("cmab_testing", "DEF")
LIB.define("pool(Tensor rows, Tensor weight, Tensor? mask, str fault) -> Tensor")
LIB.define(
    "pool_backward(Tensor dout, Tensor rows, Tensor weight, Tensor? mask, str fault) -> (Tensor drows, Tensor dweight)"
)
ops = torch.ops.cmab_testing


# ---- the operator: out[b] = sum_n weight[b, n] tanh(rows[b, n]) over the rows that the mask leaves, in float64


def _seen(tensor: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return tensor.double()
    return tensor.double().masked_fill(mask if tensor.dim() == 2 else mask[..., None], 0.0)


def _formula(rows: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    return (_seen(weight, mask)[..., None] * _seen(rows, mask).tanh()).sum(1)


def _pool(rows: Tensor, weight: Tensor, mask: Tensor | None, fault: str) -> Tensor:
    return FAULTS.get(fault, _plain)(rows, weight, mask).to(rows.dtype)


def _plain(rows: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    return _formula(rows, weight, mask)


def _gradient(dout: Tensor, rows: Tensor, weight: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    height = _seen(rows, mask).tanh()
    drows = dout.double()[:, None] * _seen(weight, mask)[..., None] * (1 - height.square())
    dweight = _seen((dout.double()[:, None] * height).sum(-1), mask)
    return drows.to(rows.dtype), dweight.to(weight.dtype)


def _pool_backward(
    dout: Tensor, rows: Tensor, weight: Tensor, mask: Tensor | None, fault: str
) -> tuple[Tensor, Tensor]:
    drows, dweight = _gradient(dout, rows, weight, mask)
    return drows, torch.zeros_like(dweight) if fault == "a lost gradient" else dweight


LIB.impl("pool", _pool, "CompositeExplicitAutograd")
LIB.impl("pool_backward", _pool_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("cmab_testing::pool", lib=LIB)
def _(rows: Tensor, weight: Tensor, mask: Tensor | None, fault: str) -> Tensor:
    shape = (
        (rows.shape[0], rows.shape[2] + 1)
        if fault == "a fake kernel of another shape"
        else (rows.shape[0], rows.shape[2])
    )
    return rows.new_empty(shape)


@torch.library.register_fake("cmab_testing::pool_backward", lib=LIB)
def _(dout: Tensor, rows: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape)


def _vmap(operator: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """Return a vmap rule that takes one element after the other."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        results = []
        for i in range(info.batch_size):
            taken = 0 if args[-1] == "a rule for vmap that maps the first element only" else i
            one = [a if d is None else a.select(d, taken) for a, d in zip(args[:tensors], in_dims, strict=False)]
            results.append(operator(*one, *args[tensors:]))
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0, 0)

    return rule


torch.library.register_vmap("cmab_testing::pool", _vmap(ops.pool.default, 3), lib=LIB)
torch.library.register_vmap("cmab_testing::pool_backward", _vmap(ops.pool_backward.default, 4), lib=LIB)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.mask, ctx.fault = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    drows, dweight = _backward_op(dout, *ctx.saved_tensors, ctx.mask, ctx.fault)
    return drows, dweight, None, None


def _double_backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    if ctx.fault == "a lost second derivative":
        return None, None, None, None, None
    partials = gradient_of_formula(lambda *tensors: _gradient(*tensors, ctx.mask), ctx.saved_tensors, grads)
    return *partials, None, None


_op = differentiable(ops.pool.default, _save, _backward)
_backward_op = differentiable(ops.pool_backward.default, _save, _double_backward)


def pool(rows: Tensor, weight: Tensor, *, mask: Tensor | None = None, impl: str = "sound", fault: str = "") -> Tensor:
    """Run the public function; `impl` is "sound", or "reference" for the formula in torch."""
    if impl not in ("sound", "reference") and fault != "an unknown implementation that runs something":
        raise ValueError(mismatch("impl", repr(impl), "one of sound, reference"))
    try:
        check_operands(rows=rows, weight=weight)
        if rows.dim() != 3 or rows.shape[:2] != weight.shape:
            raise ValueError(
                mismatch("rows", f"shape {tuple(rows.shape)}", f"(B, N, D) with (B, N) = {tuple(weight.shape)}")
            )
    except (TypeError, ValueError) as error:
        if fault == "an error that names nothing":
            raise ValueError("bad input") from error
        raise
    if torch.is_autocast_enabled("cpu") and fault != "a call that autocast does not reach":
        rows, weight = rows.bfloat16(), weight.bfloat16()
    if impl == "reference" or (needs_definition() and fault != "a kernel that forward mode reaches"):
        return _formula(rows, weight, mask).to(rows.dtype)
    if fault == "a call that breaks the graph":
        torch._dynamo.graph_break()
    if fault == "a sign that is not looked at" and not torch.is_grad_enabled():
        return _pool(rows, weight, mask, fault)  # without the dispatcher, which would resolve lazy negations
    if fault == "an operator that torch does not know":
        return _formula(rows, weight, mask).to(rows.dtype)
    return _op(rows, weight, mask, fault)


# ---- the faults: wrong bodies


def _as_if_contiguous(rows: Tensor) -> Tensor:
    return rows.new_empty(0).set_(rows.untyped_storage(), rows.storage_offset(), rows.shape)


def _as_if_positive(rows: Tensor) -> Tensor:
    """Read the memory as it is, without its lazy negation."""
    return -rows.resolve_neg() if rows.is_neg() else rows


def _partly_written(rows: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    out = torch.empty(rows.shape[0], rows.shape[2], dtype=torch.float64)
    out[..., :-1] = _formula(rows, weight, mask)[..., :-1]
    return out


def _in_place(rows: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    out = _formula(rows, weight, mask)
    rows.mul_(0.5)
    return out


def _with_noise(rows: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    return _formula(rows, weight, mask) * (1 + 1e-6 * torch.rand(()))


def _by_threads(rows: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    return _formula(rows, weight, mask) * (1 + 1e-6 * (torch.get_num_threads() > 2))


def _by_batch(rows: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    return _formula(rows, weight, mask) * (1 + 1e-6 * (len(rows) > 1))


def _mean(rows: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    return _formula(rows, weight, mask) * (rows.shape[1] / torch.tensor(float(rows.shape[1])))


def _first_65535(rows: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    out = _formula(rows, weight, mask)
    out[65_535:] = 0.0
    return out


FAULTS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "strides that are not looked at": lambda rows, weight, mask: _formula(_as_if_contiguous(rows), weight, mask),
    "a mask that leaks a row": lambda rows, weight, mask: _formula(
        rows, weight, None if mask is None else mask.roll(1, 1)
    ),
    "a mask that multiplies by zero": lambda rows, weight, mask: (
        _formula(rows, weight, None) if mask is None else _formula(rows * ~mask[..., None], weight * ~mask, None)
    ),
    "a sum that lacks the last row": lambda rows, weight, mask: _formula(
        *(t if t is None else t[:, :-1] for t in (rows, weight, mask))
    ),
    "sums in float32": lambda rows, weight, mask: _formula(rows.float(), weight.float(), mask).float(),
    "an element that nobody writes": _partly_written,
    "an argument that is changed": _in_place,
    "bits that change from run to run": _with_noise,
    "bits that depend on threads": _by_threads,
    "bits that depend on the batch": _by_batch,
    "a batch that shares its sums": lambda rows, weight, mask: _formula(rows, weight, mask) + 0 * rows.double().sum(),
    "no rows, and a NaN": _mean,
    "a sign that is not looked at": lambda rows, weight, mask: _formula(_as_if_positive(rows), weight, mask),
    "a batch beyond 65,535 that is cut off": _first_65535,
}


class PoolSuite(OperatorSuite):
    """The declaration of the operator; a subclass adds a fault."""

    fault = ""
    operator = "pool"
    arguments = {"rows": "BND", "weight": "BN"}
    extents = {"B": 3, "N": 20, "D": 4}
    small = {"B": 2, "N": 3, "D": 2}
    impls = ("reference", "sound")
    repeatable = ("sound",)
    repeats = 5
    empty = "BN"
    mask = "mask"
    many = {"B": 66_000, "N": 2, "D": 1}
    autocast = ("rows", "weight")

    def call(self, impl: str, **inputs: Any) -> tuple[Tensor, ...]:
        return (pool(**inputs, impl=impl, fault=self.fault),)

    def oracle(self, rows: Tensor, weight: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        weight = weight if mask is None else weight.masked_fill(mask, 0.0)
        return (torch.einsum("bn,bnd->bd", weight, rows.tanh()),)


class TestPool(PoolSuite):
    """The sound operator passes."""


CATCHES = {
    "strides that are not looked at": ("test_layouts", "test_expanded_arguments"),
    "a mask that leaks a row": ("test_masks",),
    "a mask that multiplies by zero": ("test_masks",),
    "a sum that lacks the last row": ("test_accuracy",),
    "sums in float32": ("test_accuracy",),
    "an element that nobody writes": ("test_accuracy",),
    "an argument that is changed": ("test_arguments_are_not_changed",),
    "bits that change from run to run": ("test_same_bits_on_every_run",),
    "bits that depend on threads": ("test_same_bits",),
    "bits that depend on the batch": ("test_same_bits",),
    "a batch that shares its sums": ("test_a_bad_batch_element_stays_alone",),
    "no rows, and a NaN": ("test_empty_extents",),
    "a sign that is not looked at": ("test_a_lazy_negation_is_seen",),
    "a batch beyond 65,535 that is cut off": ("test_more_than_65535_matrices",),
    "a lost gradient": (
        "test_gradcheck",
        "test_accuracy",
        "test_only_the_gradients_that_are_asked_for",
        "test_any_order",
    ),
    "a lost second derivative": ("test_gradgradcheck", "test_any_order"),
    "a kernel that forward mode reaches": ("test_forward_mode", "test_derivatives_of_forward_mode"),
    "a fake kernel of another shape": ("test_opcheck", "test_compile"),
    "an operator that torch does not know": ("test_opcheck",),
    "a rule for vmap that maps the first element only": ("test_vmap",),
    "a call that breaks the graph": ("test_compile",),
    "a call that autocast does not reach": ("test_autocast",),
    "an error that names nothing": ("test_bad_arguments",),
    "an unknown implementation that runs something": ("test_an_unknown_implementation",),
}


@pytest.mark.parametrize("fault, check", [(fault, check) for fault, checks in CATCHES.items() for check in checks])
def test_the_fault_is_reported(fault: str, check: str) -> None:
    """Each fault fails its check. Checkpointing has no fault, because torch makes it right for any operator."""
    faulty = type("Faulty", (PoolSuite,), {"fault": fault, "impls": ("sound",)})
    assert failures(faulty, check), f"{check} does not see «{fault}»"


TOGETHER = {
    "test_layouts": ("strides that are not looked at", "columns first"),
    "test_expanded_arguments": ("strides that are not looked at", "B"),
    "test_masks": ("a mask that leaks a row", "0-64"),
    "test_a_bad_batch_element_stays_alone": ("a batch that shares its sums", "rows-nan"),
    "test_empty_extents": ("no rows, and a NaN", "N"),
    "test_a_lazy_negation_is_seen": ("a sign that is not looked at", "rows"),
    "test_only_the_gradients_that_are_asked_for": ("a lost gradient", "weight"),
    "test_any_order": ("a lost second derivative", "3"),
    "test_derivatives_of_forward_mode": ("a kernel that forward mode reaches", "forward"),
    "test_bad_arguments": ("an error that names nothing", "rows of integers"),
}
"""The checks whose cases share a test -> a fault, and a case that it fails."""


@pytest.mark.parametrize("check", TOGETHER)
def test_cases_that_share_a_test_are_named(check: str) -> None:
    """A test of the sound operator with the same parameters passes."""
    fault, case = TOGETHER[check]
    for suite in (PoolSuite, type("Faulty", (PoolSuite,), {"fault": fault})):
        tests = suite()
        tests.setup_method()
        values = tests.parameters() | {"impl": ["sound"]}
        chosen = {name: values[name][0] for name in inspect.signature(getattr(tests, check)).parameters}
        try:
            if suite is PoolSuite:
                getattr(tests, check)(**chosen)
            else:
                with pytest.raises(AssertionError, match=r"cases fail:\n") as raised:
                    getattr(tests, check)(**chosen)
                assert f"\n[{case}] " in str(raised.value)
        finally:
            tests.teardown_method()


def test_every_check_is_seen_to_fail() -> None:
    """Except for checkpointing, which torch itself makes right for any operator."""
    seen = {check for checks in CATCHES.values() for check in checks}
    checks = {name for name in dir(PoolSuite) if name.startswith("test_") and getattr(PoolSuite, name) is not None}
    assert checks - seen == {"test_checkpointing"}


def test_a_check_without_parameters_is_not_there() -> None:
    without = type("Without", (PoolSuite,), {"mask": None, "many": None})
    assert (
        without.test_masks is None
        and without.test_more_than_65535_matrices is None
        and without.test_layouts is not None
    )
    again = type("Again", (without,), {"mask": "mask"})
    assert again.test_masks is PoolSuite.test_masks


def test_a_check_of_its_own_is_there_again() -> None:
    """Subclasses with parameters inherit the overrides of a class without,
    for example one that declares no operator."""

    def test_masks(self: PoolSuite, impl: str, hidden: tuple[int, int]) -> None: ...

    without = type("Without", (PoolSuite,), {"mask": None, "test_masks": test_masks})
    assert without.test_masks is None
    assert type("Again", (without,), {"mask": "mask"}).test_masks is test_masks

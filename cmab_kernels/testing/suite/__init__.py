"""The test suite for operators: a class that declares an operator's arguments, oracle and tolerances inherits the
checks of P1 to P8."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import torch

from ...runtime.backends import IMPLEMENTATIONS, OPERATORS
from ..interpreter import INTERPRETING
from ..memory import poisoned_memory
from .declaration import DTYPES, Declaration, Measured, label
from .errors import Errors
from .gpu import OnGpu
from .gradients import Gradients

__all__ = ["DTYPES", "Declaration", "Measured", "OperatorSuite", "failures"]


class OperatorSuite(OnGpu, Gradients, Errors):
    """Tests of an operator: inherit, name the class Test..., and declare the operator. pytest then finds the checks.

    A declaration gives the tensors that the operator takes (`arguments`, a letter for each dimension), the call
    (`call`) and the right result (`oracle`). `Declaration` lists the options. The class then has these checks:

    - P1: empty dimensions, masked keys with NaN under the mask, a NaN that stays in its batch element;
    - P2: results and gradients against the oracle in float64, row by row, for every dtype and several distributions of
      the inputs, and with logits up to 2^60 in any order;
    - P3: the same bits on every run, for any number of threads, and for a batch element by itself;
    - P5: strides, offsets, expanded and lazily negated arguments;
    - P8: gradcheck and gradgradcheck, third order, torch.library.opcheck, torch.compile, vmap, autocast, checkpointing;
    - errors of the form `argument: got X, expected Y`;
    - on a GPU (`gpu`): streams, CUDA graphs, and calls that do not wait for the device.

    Every check runs on one thread, with uninitialised memory that holds NaN. A check that has no parameters in this
    declaration (such as `test_masks` without a mask) is removed from the class. `failures` runs the checks without
    pytest.

    >>> from cmab_kernels.testing import OperatorSuite, failures
    >>> class TestLatentAttention(OperatorSuite):
    ...     operator = "latent_attention"
    ...     arguments = {"query": "BHLD", "key": "BHND", "value": "BHNE"}
    ...     extents = {"B": 2, "H": 2, "L": 3, "N": 5, "D": 4, "E": 3}
    ...     impls = ("reference",)
    ...
    ...     def call(self, impl, **inputs):
    ...         return (cmab_kernels.latent_attention(**inputs, impl=impl),)
    ...
    ...     def oracle(self, query, key, value):
    ...         return ((query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value,)
    >>> failures(TestLatentAttention, "test_layouts", "test_gradcheck")
    {}
    """

    _without_parameters: ClassVar[dict[str, Callable[..., None]]] = {}
    """Check that was removed because it has no parameters -> its function. A subclass that has parameters gets the
    check back."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.gpu:
            cls._move_to_gpu()
        values, hidden = cls().parameters(), dict(cls._without_parameters)
        for name, check in inspect.getmembers(OperatorSuite, inspect.isfunction):
            if not name.startswith("test_"):
                continue
            own = getattr(cls, name) or hidden.pop(name, None)
            if own and any(not values[parameter] for parameter in _parameters(check)):
                hidden[name], own = own, None
            if own is not getattr(cls, name):
                setattr(cls, name, own)
        cls._without_parameters = hidden

    @classmethod
    def _move_to_gpu(cls) -> None:
        """Test the operator's GPU implementations in place of the declared ones, with the changes of `on_gpu`."""
        there = IMPLEMENTATIONS.get(OPERATORS.get(cls.operator, ""), {})
        cls.impls = tuple(impl for impl in there if impl == "triton" or (impl == "cuda" and not INTERPRETING))
        for name, value in vars(cls).get("on_gpu", {}).items():
            setattr(cls, name, value)
        cls.repeatable = cls.impls if cls.repeatable else ()

    def setup_method(self) -> None:
        """Seed torch, use one thread, and poison uninitialised memory."""
        self._context = ExitStack()
        threads = torch.get_num_threads()
        self._context.callback(torch.set_num_threads, threads)
        self._context.enter_context(poisoned_memory())
        torch.set_num_threads(1)
        torch.manual_seed(0)

    def teardown_method(self) -> None:
        """Undo the settings of `setup_method`."""
        self._context.close()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Give each check its parameters; pytest calls this."""
        values = self.parameters()
        for name in inspect.signature(metafunc.function).parameters:
            if name in values:
                metafunc.parametrize(name, values[name], ids=label)


def _parameters(check: Callable[..., None]) -> list[str]:
    """Return the names of a check's parameters, including those whose values one test runs
    together."""
    return [name for name in inspect.signature(inspect.unwrap(check)).parameters if name != "self"]


def _cases(suite: OperatorSuite, only: tuple[str, ...]) -> Iterator[tuple[str, Callable[..., None], dict[str, Any]]]:
    values = suite.parameters()
    for name, check in inspect.getmembers(suite, inspect.ismethod):
        if not name.startswith("test_") or (only and name not in only):
            continue
        names = _parameters(check)
        for chosen in itertools.product(*(values[parameter] for parameter in names)):
            yield "-".join([name, *map(label, chosen)]), check, dict(zip(names, chosen, strict=True))


def failures(suite: type[OperatorSuite], *checks: str) -> dict[str, Exception]:
    """Run the checks of a suite, or only those named, without pytest; return the exceptions by check name and
    parameters.

    Checks that the class itself defines run as well. Their parameters must be among those of `Declaration.parameters`.
    """
    tests, found = suite(), {}
    for case, check, chosen in _cases(tests, checks):
        tests.setup_method()
        try:
            check(**chosen)
        except Exception as error:
            found[case] = error
        finally:
            tests.teardown_method()
    return found

"""Fixtures for the whole suite: seeds and threads, and the instruction sets and implementations for which tests run."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cmab_kernels import testing
from cmab_kernels.runtime import backends
from cmab_kernels.runtime.extension import load
from cmab_kernels.testing import OperatorSuite

from .forked import Forks

TESTS = Path(__file__).parent
# Triton kernels run in the interpreter, in a separate process that tests/test_interpreter.py starts.
collect_ignore_glob = [] if testing.INTERPRETING else ["*/test_triton*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """With `-m gpu`, suites run for the implementations of a GPU. In Triton's interpreter, they run for the Triton
    kernels."""
    OperatorSuite.gpu = config.option.markexpr == "gpu" and (torch.cuda.is_available() or testing.INTERPRETING)
    if OperatorSuite.gpu:
        # Torch's own products have the same bits on every run.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the tests and their modules from garbage collections.

    They are more than a million objects that exist until the end. Half of the time for reading the tests was spent on
    examining them again and again, and so was a second of each later `gc.collect()`.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, read only the files that have tests for it, because others import packages that a machine with a
    GPU may not have."""
    others = (
        collection_path.suffix == ".py"
        and collection_path.name != "test_suite.py"
        and collection_path.parent.name != "gpu"
    )
    return True if others and config.option.markexpr == "gpu" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-in", type=int, default=1, help="run a sample of the tests: one in N of each file, always the same"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the sample that `--one-in` requests. Mark suites on a GPU, so that `-m gpu` selects them, and put slow tests
    first, so that no process ends with a single slow test."""
    items[:] = list(_sample(items, config.option.one_in))
    items.sort(key=lambda item: item.path.name != "test_interpreter.py")
    for item in items:
        if OperatorSuite.gpu and isinstance(item, pytest.Function) and issubclass(item.cls or object, OperatorSuite):
            item.add_marker("gpu")
        if _is_of_the_definition_alone(item) or _compiles_a_variant_one_more_time(item) or _is_beyond_pairs(item):
            item.add_marker("nightly")
        elif _compiles_one_more_time(item):
            item.add_marker("thorough")


def _sample(items: list[pytest.Item], one_in: int) -> Iterator[pytest.Item]:
    """Yield the first test of every file, then every `one_in`-th, and those with the mark `sampled`."""
    met: Counter[Path] = Counter()
    for item in items:
        if met[item.path] % one_in == 0 or item.get_closest_marker("sampled"):
            yield item
        met[item.path] += 1


def _is_of_the_definition_alone(item: pytest.Item) -> bool:
    """Return whether a suite that has kernels compiles a plain torch definition, or differentiates it twice: its graph
    and its second derivatives are torch's own."""
    suite = _suite(item, "test_compile", "test_gradgradcheck", "test_only_the_gradients_that_are_asked_for")
    if suite is None or len(suite.impls) == 1:
        return False
    chosen = item.callspec.params
    return suite.definition in (chosen.get("impl"), chosen.get("compiled", ("",))[0])


def _compiles_a_variant_one_more_time(item: pytest.Item) -> bool:
    """Return whether a suite compiles a call in one more way, which is also tested in the suite from which it
    inherits, or for one shape with another compiler than its first."""
    if not _compiles_one_more_time(item):
        return False
    suite, chosen = item.cls, item.callspec.params
    if chosen["dynamic"] is False and chosen["compiled"][1] != suite.compilers[0]:
        return True
    return any(getattr(base, "operator", "") == suite.operator and base.test_compile for base in suite.__mro__[1:])


def _compiles_one_more_time(item: pytest.Item) -> bool:
    """Return whether a suite compiles a call for one shape, or with another compiler than its first.

    The first compiler traces the same call for any shape.
    """
    suite = _suite(item, "test_compile")
    if suite is None:
        return False
    chosen = item.callspec.params
    return chosen["dynamic"] is False or bool(chosen["compiled"][1] != suite.compilers[0])


def _suite(item: pytest.Item, *checks: str) -> type[OperatorSuite] | None:
    """Return the suite of a test, if the test is one of these checks."""
    suite = getattr(item, "cls", None) or object
    return suite if issubclass(suite, OperatorSuite) and item.originalname in checks else None


def _is_beyond_pairs(item: pytest.Item) -> bool:
    """Return whether the accuracy test of a suite for this dtype, distribution and shape is redundant.

    A fault that shows for a combination of three of them also shows for two of them. All pairs are tested: each pair of
    the two longest lists is combined with one element of the third list, in turn.
    """
    if OperatorSuite.gpu or not isinstance(item, pytest.Function) or item.originalname != "test_accuracy":
        return False
    if not issubclass(suite := item.cls or object, OperatorSuite):
        return False
    chosen, lists = item.callspec.params, {name: list(getattr(suite, f"{name}s")) for name in ("dtype", "law")}
    lists["shape"] = list(range(len(suite.shapes)))
    (_, first), (_, second), (count, third) = sorted(
        ((len(each), each.index(chosen[name])) for name, each in lists.items()), key=lambda each: -each[0]
    )
    return (first + second + (chosen["impl"] == suite.definition)) % count != third


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not OperatorSuite.gpu:
        pytest.skip("there is no GPU that torch can use")
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # torch compiles a function for eight shapes, also if they are of several tests


@pytest.fixture(autouse=True, scope="session")
def _as_on_a_gpu() -> Iterator[None]:
    """With `-m gpu`, do not round products in the interpreter if a GPU's compiler fuses them with a sum.

    Scores of 2^20 depend on this.
    """
    if not (OperatorSuite.gpu and testing.INTERPRETING):
        yield
        return
    from cmab_kernels.testing.fused import fused_products

    with fused_products():
        yield


@pytest.fixture
def _sums_in_one_order() -> Iterator[None]:
    """Serve interpreter tests that compare the bits of a row with the bits of the same row at another place in a
    tile."""
    from cmab_kernels.testing.fused import sums_in_one_order

    with sums_in_one_order():
        yield


def _instruction_sets() -> list[str]:
    try:
        return [name for name in load().instruction_sets() if name in ("portable", "avx2", "avx512")]
    except ImportError:
        return []


@pytest.fixture(params=_instruction_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test for every instruction set for which all families have kernels. The value is the name of the set."""
    monkeypatch.setenv("CMAB_KERNELS_ISA", request.param)
    assert load().instruction_set() == request.param
    return request.param


@pytest.fixture(params=_instruction_sets()[:-1])
def narrow_isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test for every instruction set but the best of this processor."""
    monkeypatch.setenv("CMAB_KERNELS_ISA", request.param)
    assert load().instruction_set() == request.param
    return request.param


def _operator_set(path: Path) -> str:
    """Return the operator set whose tests are in this folder: nystrom.continual for tests/nystrom/continual."""
    name = ".".join(path.parent.relative_to(TESTS).parts)
    return max((known for known in backends.SETS if name.startswith(known)), key=len)


def _importable(request: pytest.FixtureRequest, impl: str) -> str:
    operator_set = _operator_set(request.path)
    if impl != "reference" and backends.imported(operator_set, impl) is None:
        pytest.skip(f"{impl} implementation of {operator_set} cannot be imported here")
    return impl


@pytest.fixture(params=["reference", "native"])
def impl(request: pytest.FixtureRequest) -> str:
    """Run a test for every implementation on the CPU of the operator set whose tests are in this folder; the value is
    its name."""
    return _importable(request, request.param)


@pytest.fixture
def impls(request: pytest.FixtureRequest) -> list[str]:
    """The implementations of `impl` that can be imported, for a test whose expected values take long to compute."""
    return [
        name
        for name in ("reference", "native")
        if name == "reference" or backends.imported(_operator_set(request.path), name)
    ]


@pytest.fixture
def native(request: pytest.FixtureRequest) -> str:
    """Run a test for the native implementation only; skip where there is none."""
    return _importable(request, "native")


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Yield a process that has imported torch and the package, for tests of programs."""
    with Forks() as forks:
        yield forks


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Use one thread. A test can set another number by calling the value.

    More threads make small inputs ten times slower on a busy machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def no_gradients() -> Iterator[None]:
    """Turn gradients off: a continual step that records them runs the definition."""
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Seed torch, and fill uninitialised memory with NaN, so that an element that was never written is noticed."""
    torch.manual_seed(0)
    with testing.poisoned_memory():
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3).isnan().all()
        yield

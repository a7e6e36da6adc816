"""If `load_state_dict` raises an error, every stream stays as it was, although torch reports errors only at the end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from cmab_kernels.nn import (
    CMAB,
    CircularPositionalEncoding,
    ContinualAttention,
    ContinualNystromAttention,
    MultiheadIntention,
    RetroactiveEncoderLayer,
)

LENGTH = 6


class Subclass(Tensor):
    """A tensor of another class."""


def tokens(count: int) -> Tensor:
    return torch.randn(count, 2, 12)


# name -> how to make a module, and how to advance its stream
STREAMING: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "CMAB": (lambda: CMAB(12, 5, 3), lambda m: m.update(torch.randn(2, 7, 12), torch.randn(4, 12))),
    "MultiheadIntention": (lambda: MultiheadIntention(12, 3), lambda m: m.update(tokens(7))),
    "ContinualAttention": (
        lambda: ContinualAttention(12, 3, sequence_len=LENGTH),
        lambda m: m.forward_steps(tokens(8)),
    ),
    "a filling window": (lambda: ContinualAttention(12, 3, sequence_len=LENGTH), lambda m: m.forward_steps(tokens(2))),
    "ContinualNystromAttention": (
        lambda: ContinualNystromAttention(12, 3, sequence_len=LENGTH, num_landmarks=3),
        lambda m: m.forward_steps(tokens(8)),
    ),
    "RetroactiveEncoderLayer": (
        lambda: RetroactiveEncoderLayer(12, 3, 24, sequence_len=LENGTH),
        lambda m: m.forward_steps(tokens(8)),
    ),
    "CircularPositionalEncoding": (
        lambda: CircularPositionalEncoding(12, LENGTH),
        lambda m: m.forward_steps(tokens(3)),
    ),
}


def streaming(name: str) -> tuple[Any, Any]:
    """Return a module in the middle of its stream, and another module with other weights and another stream."""
    make, advance = STREAMING[name]
    module, other = make().eval(), make().eval()
    with torch.no_grad():
        for each in (module, other, other):
            advance(each)
    return module, other


def _advanced(advance: Callable[[Any], Any], module: nn.Module, dtype: torch.dtype) -> None:
    """Advance the module's stream with inputs of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        advance(module)
    finally:
        torch.set_default_dtype(before)


def held(module: nn.Module) -> dict[str, Tensor]:
    """Return the saved form of the stream as it is now."""
    weights = dict(module.named_parameters())
    return {name: entry.clone() for name, entry in module.state_dict().items() if name not in weights}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def in_a_model(module: nn.Module, first: bool) -> nn.Module:
    """Return the module beside another layer, which torch loads before or after it."""
    parts = {"stream": module, "layer": nn.Linear(3, 3)}
    return nn.ModuleDict({name: nn.Sequential(parts[name]) for name in sorted(parts, reverse=first)})


# Its stream is a number.
@pytest.mark.parametrize("name", [name for name in STREAMING if name != "CircularPositionalEncoding"])
@pytest.mark.parametrize("with_stream", [True, False], ids=["a stream", "weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_made_on_the_meta_device(name: str, with_stream: bool, dtype: torch.dtype) -> None:
    """A module that is loaded with `assign=True` has the weights' device and dtype, and continues the saved stream or
    starts one."""
    make, advance = STREAMING[name]
    module, source = make().eval().to(dtype), make().eval().to(dtype)
    with torch.device("meta"):
        loaded = make().eval().to(dtype)
    for each in (module, source)[: 2 if with_stream else 0]:
        torch.manual_seed(1)
        with torch.no_grad():
            _advanced(advance, each, dtype)
    module.load_state_dict(source.state_dict())
    loaded.load_state_dict(source.state_dict(), assign=True)
    for each in (module, loaded):
        torch.manual_seed(2)
        with torch.no_grad():
            _advanced(advance, each, dtype)
    assert held(loaded) and same(held(loaded), held(module))


FAULTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "an unexpected key": lambda s: {**s, "more": torch.zeros(1)},
    "a missing key": lambda s: {name: entry for name, entry in s.items() if name != "layer.0.weight"},
    "another shape": lambda s: {**s, "layer.0.bias": torch.zeros(4)},
}


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("with_stream", [True, False], ids=["a stream", "weights"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("name", STREAMING)
def test_a_model_that_is_refused_for_another_reason(name: str, fault: Callable, with_stream: bool, first: bool) -> None:
    module, other = streaming(name)
    other = other if with_stream else STREAMING[name][0]()
    assert bool(held(other)) == with_stream
    before, model = held(module), in_a_model(module, first)
    with pytest.raises(RuntimeError, match="loading state_dict"):
        model.load_state_dict(fault(in_a_model(other, first).state_dict()))
    assert before
    assert same(held(module), before)
    with torch.no_grad():
        STREAMING[name][1](module)
    assert not same(held(module), before)
    model.load_state_dict(in_a_model(other, first).state_dict())
    assert same(held(module), held(other))


@pytest.mark.parametrize("name", STREAMING)
def test_the_module_itself_is_refused(name: str) -> None:
    module, other = streaming(name)
    before, entries = held(module), other.state_dict()
    weight = next(name for name, _ in module.named_parameters())
    faults: tuple[dict[str, Any], ...] = (
        {**entries, "more": torch.zeros(1)},
        {key: entry for key, entry in entries.items() if key != weight},
        {**entries, weight: torch.zeros(3, 1, 4)},
        {**entries, weight: [1.0]},
    )
    for fault in faults:
        with pytest.raises(RuntimeError, match="loading state_dict"):
            module.load_state_dict(fault)
        for refused in (copy.deepcopy(module), module):
            assert same(held(refused), before)


@pytest.mark.parametrize("name", STREAMING)
def test_entries_that_are_no_plain_tensors(name: str) -> None:
    """The error names entries that are not plain tensors, and all modules keep their streams."""
    module, other = streaming(name)
    before, entries = held(module), other.state_dict()
    weights = dict(module.named_parameters())
    for entry in entries.keys() - weights.keys():
        dense = entries[entry]
        others: list[Tensor] = [dense.as_subclass(Subclass), FakeTensorMode().from_tensor(dense.clone())]
        if dense.dim():
            others.append(dense.to_sparse())
        for wrong in others:
            with pytest.raises(RuntimeError, match=rf"loading state_dict[^\0]*{entry}: got a"):
                module.load_state_dict({**entries, entry: wrong})
            assert same(held(module), before)


@pytest.mark.parametrize("name", STREAMING)
def test_what_is_not_strict(name: str) -> None:
    """With `strict=False`, unexpected and missing keys are not errors: the stream becomes the saved one, or ends.

    A wrong shape is still an error.
    """
    module, other = streaming(name)
    before, entries = held(module), other.state_dict()
    weight = next(name for name, _ in module.named_parameters())
    with pytest.raises(RuntimeError, match=weight):
        module.load_state_dict({**entries, weight: torch.zeros(3, 1, 4)}, strict=False)
    assert same(held(module), before)
    some = {key: entry for key, entry in entries.items() if key != weight}
    module.load_state_dict({**some, "more": torch.zeros(1)}, strict=False)
    assert same(held(module), held(other))
    module.load_state_dict({}, strict=False)
    assert not held(module)


@pytest.mark.parametrize("name", STREAMING)
def test_a_module_in_two_places(name: str) -> None:
    """torch loads a module that occurs at two places twice; an error at the second place also prevents the load at the
    first."""
    module, other = streaming(name)
    before = held(module)
    model, source = (nn.ModuleDict({"a": each, "b": each}) for each in (module, other))
    with pytest.raises(RuntimeError, match="more"):
        model.load_state_dict({**source.state_dict(), "b.more": torch.zeros(1)})
    assert same(held(module), before)
    model.load_state_dict(source.state_dict())
    assert same(held(module), held(other))


@pytest.mark.parametrize("name", STREAMING)
def test_a_hook_that_looks_while_torch_still_loads(name: str) -> None:
    """A hook that reads the stream during the load does not affect the stream afterwards."""
    module, other = streaming(name)
    before, model = held(module), in_a_model(module, True)
    seen = []
    module.register_load_state_dict_post_hook(lambda loaded, _: seen.append(held(loaded)))
    entries = in_a_model(other, True).state_dict()
    with pytest.raises(RuntimeError, match="more"):
        model.load_state_dict({**entries, "more": torch.zeros(1)})
    assert same(held(module), before)
    model.load_state_dict(entries)
    assert same(held(module), held(other))
    assert len(seen) == 2
    assert same(seen[1], held(other))

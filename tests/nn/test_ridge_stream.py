"""The running sums of `MultiheadIntention`: casts do not change them, they are saved with the weights, and sums that no
keys have raise an error."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cmab_kernels import RidgeState
from cmab_kernels.nn import MultiheadIntention, RidgeStream

DIM, HEADS = 12, 3
FIELDS = ("gram", "moment", "count")


def streaming(batch: int = 2, dtype: torch.dtype = torch.float32) -> MultiheadIntention:
    """Return a module in the middle of its stream; one batch element has no key yet."""
    module = MultiheadIntention(DIM, HEADS, batch_first=True, dtype=dtype)
    if batch:
        mask = torch.zeros(batch, 20, dtype=torch.bool)
        mask[-1] = True
        with torch.no_grad():
            module.update(50 * torch.randn(batch, 20, DIM, dtype=dtype), key_padding_mask=mask)
    return module


def same_bits(a: Any, b: Any) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "cast", [torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.double, lambda m: m.to("cpu")]
)
def test_casts_leave_the_bits(cast: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    module = streaming()
    before = [part.clone() for part in module.stream.state]
    cast(module)
    assert same_bits(module.stream.state, before)
    with torch.no_grad():
        inputs = torch.randn(2, 3, DIM, dtype=module.out_proj.weight.dtype)
        assert [part.dtype for part in module.update(inputs)] == [torch.float64, torch.float64, torch.int64]
        assert module.predict(inputs).dtype == inputs.dtype


def test_the_state_moves_with_the_module() -> None:
    module = streaming().to("meta")
    assert {part.device.type for part in (*module.stream.state, *module.init_state(1))} == {"meta"}


def saved(module: torch.nn.Module) -> dict[str, Tensor]:
    """Save and load the `state_dict`, with `weights_only=True`, which executes no code."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("held", [0, 2, 5])
@pytest.mark.parametrize("assign", [False, True])
def test_saved_and_restored_in_midstream(held: int, assign: bool) -> None:
    module, other = streaming(), streaming(held)
    assert {f"stream.{name}" for name in FIELDS} <= set(saved(module))
    snapshot = module.state_dict()
    other.load_state_dict(saved(module), assign=assign)
    assert same_bits(other.stream.state, module.stream.state)
    with torch.no_grad():
        for _ in range(3):
            inputs = torch.randn(2, 7, DIM)
            assert same_bits(module.update(inputs), other.update(inputs))
            assert torch.equal(module.predict(inputs), other.predict(inputs))
    assert not torch.equal(snapshot["stream.gram"], module.stream.state.gram)


def test_weights_alone_are_a_complete_checkpoint() -> None:
    fresh, module = streaming(0), streaming()
    assert set(saved(fresh)) == {name for name, _ in fresh.named_parameters()}
    module.load_state_dict(saved(fresh))
    assert module.stream.state is None
    module = streaming()
    module.load_state_dict(torch.nn.MultiheadAttention(DIM, HEADS).state_dict())
    assert module.stream.state is None


def changed(name: str, value: float, *index: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def fault(state: dict[str, Any]) -> dict[str, Any]:
        entry = state[name].clone()
        entry[index] = value
        return {name: entry}

    return fault


BAD: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "heads": ("gram", lambda s: {name: entry[:, :2] for name, entry in s.items()}),
    "width": ("moment", lambda s: {"moment": s["moment"][..., :3]}),
    "batches": ("count", lambda s: {"count": s["count"][:1]}),
    "dimensions": ("gram", lambda s: {"gram": s["gram"][0]}),
    "dtype of gram": ("gram", lambda s: {"gram": s["gram"].float()}),
    "dtype of moment": ("moment", lambda s: {"moment": s["moment"].half()}),
    "dtype of count": ("count", lambda s: {"count": s["count"].double()}),
    "nan in gram": ("gram", changed("gram", torch.nan, 0, 0, 0, 0)),
    "inf in gram": ("gram", changed("gram", torch.inf, 0, 0, 1, 1)),
    "nan in moment": ("moment", changed("moment", torch.nan, 0, 0, 0, 0)),
    "negative count": ("count", changed("count", -1, 0, 0)),
    "gram of no keys": ("gram", changed("gram", 1e-30, 1, 0, 0, 0)),
    "moment of no keys": ("moment", changed("moment", 1e-30, 1, 0, 0, 0)),
    "asymmetric": ("gram", lambda s: {"gram": s["gram"].tril()}),
    "asymmetric in one head": ("gram", lambda s: changed("gram", float(s["gram"][0, 2, 3, 0]) + 1e-3, 0, 2, 0, 3)(s)),
    "no count": ("count", lambda s: {"count": None}),
    "no gram": ("gram", lambda s: {"gram": None}),
    "not a tensor": ("gram", lambda s: {"gram": [1.0]}),
}


@pytest.mark.parametrize("name, fault", BAD.values(), ids=BAD)
def test_what_is_no_state_is_refused_and_the_old_one_stays(
    name: str, fault: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    module = streaming()
    before = module.stream.state
    entries = saved(streaming())
    state = {part: entries.pop(f"stream.{part}") for part in FIELDS}
    assert not state["count"][1].any()
    entries.update({f"stream.{part}": entry for part, entry in {**state, **fault(state)}.items() if entry is not None})
    with pytest.raises(RuntimeError, match=rf"\tstream.{name}: "):
        module.load_state_dict(entries)
    assert same_bits(module.stream.state, before)


def test_what_a_removal_leaves_is_loaded() -> None:
    """After a removal, rounding may leave sums near 0 that are not positive definite: such a state must be accepted."""
    module, inputs = MultiheadIntention(DIM, HEADS, batch_first=True), 1e3 * torch.randn(1, 50, DIM)
    inputs[:, 49] = 1e-6
    with torch.no_grad():
        for rows in inputs.split(7, 1):
            module.update(rows)
        left = module.remove(inputs[:, :49])
    assert (torch.linalg.eigvalsh(left.gram)[..., 0] < 0).any()
    other = MultiheadIntention(DIM, HEADS)
    other.load_state_dict(saved(module))
    assert same_bits(other.stream.state, left)


def test_assignment_is_checked() -> None:
    stream = RidgeStream(HEADS, 4, 5)
    stream.state = good = stream.init_state(2)
    bad: list[tuple[type[Exception], Any]] = [
        (TypeError, tuple(good)),
        (TypeError, RidgeState(None, None, None)),
        (TypeError, good._replace(count=[1])),
        (ValueError, good._replace(moment=good.moment[..., :3])),
        (ValueError, good._replace(count=good.count[:1])),
        (TypeError, good._replace(gram=good.gram.float())),
        (RuntimeError, good._replace(gram=good.gram.clone().requires_grad_())),
        (RuntimeError, good._replace(moment=good.moment.clone().requires_grad_())),
    ]
    for error, state in bad:
        with pytest.raises(error, match="state"):
            stream.state = state
        assert same_bits(stream.state, good)
    stream.state = None
    assert stream.state is None

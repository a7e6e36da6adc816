"""The state of a streaming module: casts do not change it, it is saved with the weights, and values that cannot be a
state raise an error."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from cmab_kernels import AttentionState
from cmab_kernels.nn import CMAB, AttentionStream

DIM, LATENTS, HEADS = 12, 5, 3


def streaming(batch: int = 2, dtype: torch.dtype = torch.float32) -> CMAB:
    """Return a block in the middle of its stream; one batch element has no input yet."""
    module = CMAB(DIM, LATENTS, HEADS, dtype=dtype)
    if batch:
        mask = torch.zeros(batch, 20, dtype=torch.bool)
        mask[-1] = True
        with torch.no_grad():
            module.update(
                50 * torch.randn(batch, 20, DIM, dtype=dtype), torch.randn(4, DIM, dtype=dtype), key_padding_mask=mask
            )
    return module


def same_bits(a: Any, b: Any) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "cast", [torch.nn.Module.half, torch.nn.Module.bfloat16, lambda m: m.to(torch.float16), lambda m: m.to("cpu")]
)
def test_casts_leave_the_bits(cast: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    module = streaming()
    before = [part.clone() for part in module.stream.state]
    cast(module)
    assert same_bits(module.stream.state, before)
    assert module.init_state(1).out.dtype == torch.float32
    with torch.no_grad():
        inputs = torch.randn(2, 3, DIM, dtype=module.latents.dtype)
        assert module.update(inputs, inputs).state.out.dtype == torch.float32


def test_a_float64_module_has_a_float64_state() -> None:
    module = streaming()
    before = module.stream.state
    module.double()
    assert same_bits(module.stream.state, (before.out.double(), before.lse))
    assert same_bits(module.float().stream.state, before)
    assert streaming(dtype=torch.float64).stream.state.out.dtype == torch.float64


def test_the_state_moves_with_the_module() -> None:
    module = streaming().to("meta")
    assert {part.device.type for part in module.stream.state} == {"meta"}


def saved(module: torch.nn.Module) -> dict[str, Tensor]:
    """Save and load the `state_dict`, with `weights_only=True`, which executes no code."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("held", [0, 2, 5])
@pytest.mark.parametrize("assign", [False, True])
def test_saved_and_restored_in_midstream(held: int, assign: bool) -> None:
    """A module that is new, or had a stream of the same or another batch, continues a loaded stream with the same
    bits."""
    module, other = streaming(), streaming(held)
    assert {"stream.out", "stream.lse"} <= set(saved(module))
    other.load_state_dict(saved(module), assign=assign)
    assert same_bits(other.stream.state, module.stream.state)
    with torch.no_grad():
        for _ in range(3):
            inputs, latents = torch.randn(2, 7, DIM), torch.randn(4, DIM)
            ours, theirs = module.update(inputs, latents), other.update(inputs, latents)
            assert torch.equal(ours.latents, theirs.latents)
            assert same_bits(ours.state, theirs.state)


def test_a_snapshot_does_not_move_with_the_stream() -> None:
    module = streaming()
    snapshot, file = module.state_dict(), saved(module)
    loaded, copied = streaming(), streaming()
    loaded.load_state_dict(snapshot)
    copied.load_state_dict(file)
    file["stream.out"].zero_()
    assert copied.stream.state.out.any()
    file = saved(module)
    with torch.no_grad():
        for each in (module, loaded):
            each.update(torch.randn(2, 7, DIM), torch.randn(4, DIM))
    assert torch.equal(snapshot["stream.out"], file["stream.out"])
    assert torch.equal(snapshot["stream.lse"], file["stream.lse"])


def test_weights_alone_are_a_complete_checkpoint() -> None:
    fresh, module = streaming(0), streaming()
    weights = saved(fresh)
    assert set(weights) == {name for name, _ in fresh.named_parameters()}
    module.load_state_dict(weights)
    assert module.stream.state is None  # as in the saved module: the old stream belongs to the old weights


def test_strict_still_means_strict() -> None:
    with pytest.raises(RuntimeError, match=r"Unexpected.*stream\.other"):
        streaming().load_state_dict({**streaming().state_dict(), "stream.other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"Missing.*latents"):
        streaming().load_state_dict(
            {name: entry for name, entry in streaming().state_dict().items() if name != "latents"}
        )


def with_value(entry: Tensor, value: float, row: int = 0) -> Tensor:
    changed = entry.clone()
    changed[row, 0, 0] = value
    return changed


BAD: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "heads": ("stream.out", lambda s: {"out": s["out"][:, :2], "lse": s["lse"][:, :2]}),
    "width": ("stream.out", lambda s: {"out": s["out"][..., :3]}),
    "batches": ("stream.lse", lambda s: {"lse": s["lse"][:1]}),
    "dimensions": ("stream.out", lambda s: {"out": s["out"][0]}),
    "scalar": ("stream.out", lambda s: {"out": torch.tensor(0.0)}),
    "dtype of out": ("stream.out", lambda s: {"out": s["out"].half()}),
    "precision of out": ("stream.out", lambda s: {"out": s["out"].double()}),
    "dtype of lse": ("stream.lse", lambda s: {"lse": s["lse"].float()}),
    "nan in out": ("stream.out", lambda s: {"out": with_value(s["out"], torch.nan)}),
    "inf in out": ("stream.out", lambda s: {"out": with_value(s["out"], torch.inf)}),
    "nan in lse": ("stream.lse", lambda s: {"lse": with_value(s["lse"], torch.nan)}),
    "+inf in lse": ("stream.lse", lambda s: {"lse": with_value(s["lse"], torch.inf)}),
    "no lse": ("stream.lse", lambda s: {"lse": None}),
    "no out": ("stream.out", lambda s: {"out": None}),
    "not a tensor": ("stream.out", lambda s: {"out": [1.0]}),
}


@pytest.mark.parametrize("name, fault", BAD.values(), ids=BAD)
def test_what_is_no_state_is_refused_and_the_old_one_stays(
    name: str, fault: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    module = streaming()
    before = module.stream.state
    entries = saved(streaming())
    state = {part: entries.pop(f"stream.{part}") for part in ("out", "lse")}
    assert state["lse"][1].eq(-torch.inf).all()
    entries.update({f"stream.{part}": entry for part, entry in {**state, **fault(state)}.items() if entry is not None})
    with pytest.raises(RuntimeError, match=rf"\t{name}: "):
        module.load_state_dict(entries)
    assert same_bits(module.stream.state, before)


@pytest.mark.parametrize("value", [1e-30, torch.nan, torch.inf])
def test_what_a_row_without_keys_holds_counts_for_nothing(value: float) -> None:
    module, other = streaming(), streaming()
    good = module.stream.state
    module.stream.state = good._replace(out=with_value(good.out, value, row=1))
    other.load_state_dict(saved(module))
    assert same_bits(other.stream.state, good)


def test_entries_cannot_be_set_one_by_one() -> None:
    """`functional_call` would assign these entries, but no code would read them, and they would stay."""
    module = streaming()
    before = saved(module)
    with (
        pytest.raises(TypeError, match=r"^out: got a tensor for this single entry, expected a whole state"),
        torch.no_grad(),
    ):
        torch.func.functional_call(module, module.state_dict(), (torch.randn(2, 5, 8), torch.randn(2, 8)))
    assert all(torch.equal(entry, before[name]) for name, entry in module.state_dict().items())


def test_assignment_is_checked() -> None:
    stream = AttentionStream(HEADS, LATENTS, 4)
    stream.state = good = stream.init_state(2)
    bad: list[tuple[type[Exception], Any]] = [
        (TypeError, (good.out, good.lse)),
        (TypeError, AttentionState(None, None)),
        (TypeError, good._replace(lse=None)),
        (ValueError, good._replace(out=good.out[..., :3])),
        (ValueError, good._replace(lse=good.lse[:1])),
        (TypeError, good._replace(out=good.out.double())),
        (RuntimeError, good._replace(lse=good.lse.clone().requires_grad_())),
        (RuntimeError, good._replace(out=good.out.clone().requires_grad_())),
    ]
    for error, state in bad:
        with pytest.raises(error, match="state"):
            stream.state = state
        assert same_bits(stream.state, good)


def test_a_distributed_checkpoint_holds_the_stream() -> None:
    """The function looks up each name of the `state_dict` as an attribute."""
    model, other = torch.nn.Sequential(streaming()), torch.nn.Sequential(streaming(0))
    saved = get_model_state_dict(model)
    assert saved.keys() == model.state_dict().keys() and "0.stream.out" in saved
    set_model_state_dict(other, saved)
    assert same_bits(other[0].stream.state, model[0].stream.state)
    assert not hasattr(streaming(0).stream, "out")

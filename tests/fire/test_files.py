"""Promise P7: loading a state file with changed bytes raises an error or gives a valid state; nothing in it is
executed, and streams continue.

Files are mutated as bytes (bits flipped, pieces removed, doubled or swapped) and as entries (values, shapes, dtypes,
names, other objects).
"""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cmab_kernels import nn

DIM, LENGTH = 8, 5
RAN: list[str] = []
"""The names of everything that files have executed: always empty."""


def _rows(count: int = 7) -> Tensor:
    return torch.randn(2, count, DIM)


Module = tuple[Callable[[], Any], Callable[[Any], Any]]
MODULES: dict[str, Module] = {
    "CMAB": (lambda: nn.CMAB(DIM, 3, 2), lambda m: m.update(_rows(), torch.randn(2, DIM))),
    "CMABStack": (lambda: nn.CMABStack(DIM, 3, 2, depth=2), lambda m: m.update(_rows(), torch.randn(2, DIM))),
    "MultiheadIntention": (lambda: nn.MultiheadIntention(DIM, 2, batch_first=True), lambda m: m.update(_rows())),
    "ContinualAttention": (
        lambda: nn.ContinualAttention(DIM, 2, sequence_len=LENGTH, batch_first=True),
        lambda m: m.forward_steps(_rows()),
    ),
    "a filling window": (
        lambda: nn.ContinualAttention(DIM, 2, sequence_len=LENGTH, batch_first=True),
        lambda m: m.forward_steps(_rows(2)),
    ),
    "ContinualNystromAttention": (
        lambda: nn.ContinualNystromAttention(DIM, 2, sequence_len=LENGTH, num_landmarks=2, batch_first=True),
        lambda m: m.forward_steps(_rows()),
    ),
    "RetroactiveEncoderLayer": (
        lambda: nn.RetroactiveEncoderLayer(DIM, 2, 16, sequence_len=LENGTH, batch_first=True),
        # Its outputs may be NaN, because the norms square a token of 1e30, as torch's norms do.
        lambda m: m.forward_steps(_rows()) is None,
    ),
}


def _run(what: str) -> None:
    RAN.append(what)


class Runs:
    """An object whose pickle calls a function."""

    def __reduce__(self) -> Any:
        return _run, ("a call from the file",)


def _held(module: Any) -> dict[str, Tensor]:
    weights = dict(module.named_parameters())
    return {name: entry.clone() for name, entry in module.state_dict().items() if name not in weights}


def _mutated_bytes(file: bytes, chance: random.Random) -> bytes:
    changed, at = bytearray(file), chance.randrange(len(file))
    length = chance.choice((1, 2, 8, 100, 1000))
    kind = chance.randrange(5)
    if kind == 0:
        for _ in range(chance.choice((1, 1, 3, 30))):
            changed[chance.randrange(len(file))] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del changed[at : at + length]
    elif kind == 2:
        changed[at:at] = changed[at : at + length]
    elif kind == 3:
        changed[at : at + length] = chance.randbytes(length)
    else:
        del changed[at:]
    return bytes(changed)


VALUES = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e30, 1e300, -(2.0**63))


def _mutated_entry(entry: Any, chance: random.Random) -> Any:
    kind = chance.randrange(7)
    if kind < 3:
        changed = entry.clone()
        if entry.numel():
            value = torch.tensor(chance.choice(VALUES), dtype=torch.float64)
            changed.view(-1)[chance.randrange(entry.numel())] = (
                value.nan_to_num().to(entry.dtype) if not entry.is_floating_point() else value
            )
        return changed
    if kind == 3:
        return entry.to(
            chance.choice((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool))
        )
    if kind == 4:
        return entry[..., :-1] if entry.dim() else entry.view(1)
    if kind == 5:
        return torch.stack([entry, entry])
    return chance.choice(
        (
            None,
            1,
            "a name",
            [1.0],
            {},
            torch.empty(0),
            torch.zeros(2, 2).to_sparse(),
            torch.complex(entry.double(), entry.double()),
        )
    )


def _mutated_entries(entries: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return the entries with one of the stream's entries changed, removed, swapped with another or renamed."""
    changed = dict(entries)
    names = [name for name in entries if "stream" in name]
    name, other = chance.choice(names), chance.choice(names)
    kind = chance.randrange(8)
    if kind == 0:
        del changed[name]
    elif kind == 1:
        changed[name], changed[other] = changed[other], changed[name]
    elif kind == 2:
        changed[name + "s"] = changed.pop(name)
    else:
        changed[name] = _mutated_entry(entries[name], chance)
    return changed


def _saved(entries: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(entries, file)
    return file.getvalue()


def _try(module: Any, advance: Callable[[Any], Any], file: bytes) -> bool:
    """Load the file and return whether it was accepted.

    Assert that the stream is then valid, or else unchanged, and that it can continue.
    """
    weights, before = {name: p.clone() for name, p in module.named_parameters()}, _held(module)
    taken = False
    try:
        entries = torch.load(io.BytesIO(file), weights_only=True)
        module.load_state_dict({name: entry for name, entry in entries.items() if "stream" in name} | weights)
        taken = True
    except Exception as refusal:  # torch has many errors for a broken file; none of them ends the process
        assert not isinstance(refusal, (SystemError, MemoryError)), refusal
    after = _held(module)
    if taken:
        floating = [entry for name, entry in after.items() if entry.is_floating_point() and not name.endswith("lse")]
        assert all(bool(entry.isfinite().all()) for entry in floating)
    else:
        assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in after), (
            "a refused file changed it"
        )
    result = advance(module)
    tensors = [part for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, Tensor)]
    assert all(part.shape[0] >= 0 and not bool(part.isnan().any()) for part in tensors), (
        "a state that was taken leads to NaN"
    )
    return taken


@pytest.mark.parametrize("files", [50, pytest.param(1700, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", MODULES)
def test_mutated_files(name: str, files: int) -> None:
    """For each of 350 files of seven modules (nightly 11,900), loading raises an error or gives a valid state."""
    make, advance = MODULES[name]
    chance, RAN[:] = random.Random(name), []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about broken pickles
        module = make().eval()
        advance(module)
        entries, good = module.state_dict(), _saved(module.state_dict())
        assert _try(module, advance, good)
        refused = 0
        for i in range(files):
            mutated = _mutated_bytes(good, chance) if i % 2 else _saved(_mutated_entries(entries, chance))
            refused += not _try(module, advance, mutated)
            if i % 10 == 9:  # a loaded state with huge values cannot continue for ever
                assert _try(module, advance, good)
    assert refused > files // 4 and RAN == []


def test_nothing_is_executed() -> None:
    """A file with an object that calls a function when it is read raises an error, and the call is not made.

    If the file were read as a pickle, the call would be made.
    """
    module, advance = nn.CMAB(DIM, 3, 2).eval(), MODULES["CMAB"][1]
    RAN[:] = []
    with torch.no_grad():
        advance(module)
        file = _saved({**module.state_dict(), "stream.out": Runs()})
        assert not _try(module, advance, file) and RAN == []
    torch.load(io.BytesIO(file), weights_only=False)
    assert RAN == ["a call from the file"]


def test_a_check_that_is_missing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that accepts entries with any values fails this test, or ends in an error of the operator that reads
    them."""
    monkeypatch.setattr(nn.AttentionStream, "_unlikely", lambda *_: "")
    with pytest.raises((AssertionError, ValueError)):
        test_mutated_files("CMAB", 200)

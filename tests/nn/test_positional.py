"""Encodings on a circle: a stream and a window agree, the tokens of a window have different encodings, and a saved
stream continues."""

from __future__ import annotations

import copy
from typing import Any

import continual as peer
import pytest
import torch
from torch import Tensor, nn

from cmab_kernels.nn import CircularPositionalEncoding, ContinualAttention

DIM, WINDOW, BATCH = 6, 5, 2
PERIOD = 2 * WINDOW - 1


def made(**config: Any) -> CircularPositionalEncoding:
    return CircularPositionalEncoding(DIM, WINDOW, **{"batch_first": True, "dtype": torch.float64, **config}).eval()


def tokens(length: int) -> Tensor:
    return torch.randn(BATCH, length, DIM, dtype=torch.float64)


@pytest.mark.parametrize("learned", [False, True])
def test_steps_blocks_and_windows_agree(learned: bool) -> None:
    """Steps, blocks and windows have the same encodings, over more than two turns of the circle."""
    module, x = made(learned=learned), tokens(25)
    expected = x + module.encodings[torch.arange(25) % PERIOD]
    for at, token in enumerate(x.unbind(1)):
        window = x[:, at : at + WINDOW]
        assert torch.equal(module(window), expected[:, at : at + WINDOW])
        assert torch.equal(module.forward_step(token, update_state=False), expected[:, at])
        assert module.get_state() == at % PERIOD
        assert torch.equal(module.forward_step(token), expected[:, at])
    module.clean_state()
    for first, last in ((0, 3), (3, 3), (3, 20), (20, 25)):
        assert torch.equal(module.forward_steps(x[:, first:last], update_state=False), expected[:, first:last])
        assert torch.equal(module.forward_steps(x[:, first:last]), expected[:, first:last])


def test_layouts() -> None:
    module, x = made(), tokens(4)
    other = made(batch_first=False)
    other.load_state_dict(module.state_dict())
    module.set_state(7), other.set_state(7)
    expected = module(x)
    assert torch.equal(other(x.transpose(0, 1)), expected.transpose(0, 1))
    assert torch.equal(other(x[0]), expected[0])
    assert torch.equal(module(x[0]), expected[0])
    assert torch.equal(other.forward_step(x[0, 0]), expected[0, 0])
    other.set_state(7)
    assert torch.equal(other.forward_steps(x.transpose(0, 1)), expected.transpose(0, 1))
    assert other.get_state() == (7 + 4) % PERIOD


def test_what_continual_inference_gives() -> None:
    """Encodings equal those of continual-inference, whose `forward` is called without advancing, and whose channels are
    the second dimension."""
    theirs = peer.RecyclingPositionalEncoding(DIM, PERIOD, forward_update_index_steps=0).double()
    ours, x = made(), tokens(30)
    ours.encodings = nn.Parameter(theirs.pe.weight.detach().clone())
    flip = x.transpose(1, 2)
    for first, last in ((0, 4), (4, 12), (12, 13)):
        assert torch.equal(ours(x[:, first : first + 5]), theirs(flip[..., first : first + 5]).transpose(1, 2))
        assert torch.equal(
            ours.forward_steps(x[:, first:last]), theirs.forward_steps(flip[..., first:last]).transpose(1, 2)
        )
    assert torch.equal(ours.forward_step(x[:, 13]), theirs.forward_step(flip[..., 13]))


def test_waves_close_and_tell_all_places_of_a_window_apart() -> None:
    for window, dim in ((1, 3), (2, 1), (5, 6), (64, 16), (120, 7)):
        module = CircularPositionalEncoding(dim, window, learned=False, dtype=torch.float64)
        rows = module.encodings
        assert rows.shape == (2 * window - 1, dim)
        assert not list(module.parameters()) and not module.state_dict()
        assert rows.abs().max() <= 1
        if window > 2:
            distances = torch.cdist(rows, rows) + torch.eye(len(rows))
            assert distances.min() > 0.5 / window
            around = torch.cat([rows, rows[:1]]).diff(dim=0).norm(dim=-1)  # last to first is like any other step
            assert around.max() < 1.001 * around.min() or dim % 2
            products = rows @ rows.T  # depends only on the distance of two places
            shifted = products.roll((1, 1), (0, 1))
            assert torch.allclose(products, shifted) or dim % 2


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_waves_have_their_values_in_new_memory(device: str) -> None:
    expected = made(learned=False).encodings
    emptied = made(learned=False, device=device).to_empty(device="cpu")
    loaded = made(learned=False, device=device)
    loaded.load_state_dict(made(learned=False).state_dict(), assign=True)
    assert torch.equal(emptied.encodings, expected) and torch.equal(loaded.encodings, expected)
    assert made(learned=False, device=device).to_empty(device="meta").encodings.is_meta
    assert torch.equal(emptied.half().encodings, made(learned=False, dtype=torch.float16).encodings)


def test_loading_without_assign_leaves_the_meta_device_to_the_caller() -> None:
    module = made(learned=False, device="meta")
    module.load_state_dict({})
    assert module.encodings.is_meta


def test_training_starts_anywhere_and_moves_no_stream() -> None:
    module = made().train()
    module.set_state(3)
    x = torch.zeros(1, WINDOW, DIM, dtype=torch.float64)
    starts = set()
    for _ in range(200):
        out = module(x)
        start = int((module.encodings == out[0, 0]).all(-1).nonzero())
        assert torch.equal(out[0], module.encodings[(start + torch.arange(WINDOW)) % PERIOD])
        starts.add(start)
    assert starts == set(range(PERIOD))
    assert module.get_state() == 3
    module(x).sum().backward()
    assert module.encodings.grad.any()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert compiled(x).shape == x.shape


def test_saved_at_any_place() -> None:
    for places in (0, 1, 8, 9, 23):
        module, x = made(), tokens(4)
        module.forward_steps(tokens(places))
        other = made()
        other.forward_step(x[:, 0])
        other.load_state_dict(module.state_dict())
        assert other.get_state() == places % PERIOD == copy.deepcopy(module).get_state()
        assert ("position" in module.state_dict()) == (places % PERIOD > 0)
        assert torch.equal(module.forward_steps(x), other.forward_steps(x))
    before = other.get_state()
    for entry in (
        torch.tensor(PERIOD),
        torch.tensor(-1),
        torch.tensor(1.0),
        torch.tensor([[1]]),
        torch.tensor([0, PERIOD]),
        1,
    ):
        with pytest.raises(RuntimeError, match=r"\tposition: "):
            other.load_state_dict({**module.state_dict(), "position": entry})
        assert other.get_state() == before
    with pytest.raises(RuntimeError, match=r"Missing.*encodings"):
        other.load_state_dict({})


def test_a_window_of_encoded_tokens_through_attention() -> None:
    """With encoded tokens, a stream through attention equals `forward` of its windows, anywhere on the circle."""
    attention = ContinualAttention(DIM, 2, batch_first=True, sequence_len=WINDOW, dtype=torch.float64).eval()
    moving, x = made(learned=False), tokens(24)
    with torch.no_grad():
        for at, token in enumerate(x.unbind(1)):
            out = attention.forward_step(moving.forward_step(token))
            if out is not None:
                window = made(learned=False)
                window.set_state((at - WINDOW + 1) % PERIOD)
                torch.testing.assert_close(
                    out, attention(window(x[:, at - WINDOW + 1 : at + 1]))[0][:, 0], rtol=1e-10, atol=1e-12
                )


def test_refusals() -> None:
    module = made()
    wrongs: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "tokens", lambda: module(tokens(WINDOW + 1))),
        (ValueError, "tokens", lambda: module(tokens(3)[..., :4])),
        (TypeError, "tokens", lambda: module.forward_steps(tokens(3).float())),
        (ValueError, "token", lambda: module.forward_step(tokens(3))),
        (ValueError, "state", lambda: module.set_state(PERIOD)),
        (ValueError, "state", lambda: module.set_state(1.5)),  # type: ignore[arg-type]
        (ValueError, "state", lambda: module.set_state(True)),
        (ValueError, "sequence_len", lambda: CircularPositionalEncoding(DIM, 0)),
        (ValueError, "embed_dim", lambda: CircularPositionalEncoding(0, 3)),
    ]
    for error, name, call in wrongs:
        with pytest.raises(error, match=rf"^{name}: "):
            call()
    assert module.get_state() == 0
    module.set_state(4)
    module.set_state(None)
    assert module.get_state() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    for learned in (False, True):
        for module in (made(learned=learned, dtype=dtype), made(learned=learned).to(dtype)):
            x = tokens(3).to(dtype)
            assert module(x).dtype == module.forward_step(x[:, 0]).dtype == dtype


def test_the_place_is_saved_under_any_default_device() -> None:
    encoding = CircularPositionalEncoding(4, 3, batch_first=True).eval()
    encoding.forward_step(torch.zeros(1, 4))
    with torch.device("meta"):
        saved = encoding.state_dict()
    assert int(saved["position"]) == 1


def test_rows_have_places_of_their_own() -> None:
    """Each row of a batch has the encodings of a stream that is alone, whatever the other rows do."""
    for batch_first in (False, True):
        module, alone = made(batch_first=batch_first), [made() for _ in range(BATCH)]
        for row in alone:
            row.load_state_dict(module.state_dict())
        for at in range(40):
            if at in (9, 21):
                module.clean_state(at % 2 if at == 9 else torch.arange(BATCH) == 1)
                alone[1].clean_state()
            x = tokens(1 if at % 3 else 4)
            absent = torch.rand(x.shape[:2]) < 0.4 if at > 4 and at % 4 else None
            shown = x if batch_first else x.transpose(0, 1)
            if at == 12:
                saved, module = module.state_dict(), made(batch_first=batch_first)
                module.load_state_dict(saved)
                module = copy.deepcopy(module)
            before = module.get_state()
            assert at < 10 or isinstance(before, Tensor)
            if x.shape[1] == 1 and at % 2:
                module.forward_step(
                    x[:, 0], update_state=False, key_padding_mask=None if absent is None else absent[:, 0]
                )
                assert torch.equal(torch.as_tensor(module.get_state()), torch.as_tensor(before))
                out = module.forward_step(x[:, 0], key_padding_mask=absent).unsqueeze(1)
            else:
                module.forward_steps(shown, update_state=False, key_padding_mask=absent)
                assert torch.equal(torch.as_tensor(module.get_state()), torch.as_tensor(before))
                assert absent is not None or torch.equal(module(shown), module.forward_steps(shown, update_state=False))
                out = module.forward_steps(shown, key_padding_mask=absent)
                out = out if batch_first else out.transpose(0, 1)
            for row in range(BATCH):
                there = slice(None) if absent is None else ~absent[row]
                assert torch.equal(out[row, there], alone[row].forward_steps(x[row, there]))


def test_rows_that_are_refused() -> None:
    module, x = made(), tokens(3)
    module.clean_state(1)  # nothing to forget
    module.set_state(3)
    with pytest.raises(
        ValueError, match=r"rows: got 1, expected a bool tensor \(B,\), because no step has shown the batch"
    ):
        module.clean_state(1)
    module.clean_state(torch.tensor([False, True]))
    assert module.get_state().tolist() == [3, 0]  # type: ignore[union-attr]  # rows differ
    with pytest.raises(ValueError, match="rows: got 2, expected a row from 0 to 1"):
        module.clean_state(2)
    with pytest.raises(ValueError, match="tokens: got batch 1, expected batch 2"):
        module.forward_steps(x[:1])
    for state in (torch.tensor([0, PERIOD]), torch.tensor([0.0, 1.0]), torch.tensor(1)):
        with pytest.raises(ValueError, match="state: "):
            module.set_state(state)
    with pytest.raises(ValueError, match="key_padding_mask: got shape"):
        module.forward_steps(x, key_padding_mask=torch.zeros(BATCH, dtype=torch.bool))
    assert module.get_state().tolist() == [3, 0]  # type: ignore[union-attr]  # rows differ
    module.set_state(torch.tensor([1, 2]))
    assert module.forward_step(x[:, 0]).shape == (BATCH, DIM) and module.get_state().tolist() == [2, 3]  # type: ignore[union-attr]  # rows differ


def test_only_a_step_that_is_kept_tells_the_batch() -> None:
    encoding = made()
    encoding.forward_step(torch.randn(2, DIM, dtype=torch.float64))
    encoding.forward_step(torch.randn(5, DIM, dtype=torch.float64), update_state=False)
    encoding.clean_state([0])
    assert encoding.position.tolist() == [0, 1]  # type: ignore[union-attr]  # rows differ
    encoding.set_state(2)  # the place of a batch that the encoding has not seen
    with pytest.raises(
        ValueError, match=r"^rows: got 0, expected a bool tensor \(B,\), because no step has shown the batch"
    ):
        encoding.clean_state(0)
    encoding.set_state(torch.tensor([0, 1]))
    encoding.get_state().zero_()  # type: ignore[union-attr]  # rows differ
    assert encoding.position.tolist() == [0, 1]  # type: ignore[union-attr]  # rows differ
    for tokens in (torch.randn(5, 2, DIM, dtype=torch.float64), torch.randn(2, DIM, dtype=torch.float64)):
        with pytest.raises(ValueError, match=f"tokens: got batch {5 if tokens.dim() == 3 else 1}, expected batch 2"):
            encoding(tokens)

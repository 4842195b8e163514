from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from headtilt.errors import DataError, OptionError
from headtilt.paper.data import gtsrb, split

WriteImage = Callable[..., Path]
HEADER = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"


def write_training(root: Path, write_image: WriteImage, *, tables: bool = True) -> Path:
    """Three classes with two tracks of three images; the green value counts the images."""
    count = 0
    for label in (0, 7, 42):
        rows = [HEADER]
        for track in range(2):
            for number in range(3):
                name = f"{track:05d}_{number:05d}.ppm"
                write_image(root / f"{label:05d}" / name, (label, count, track), size=(30 + number, 33))
                rows.append(f"{name};{30 + number};33;5;5;25;28;{label}")
                count += 1
        if tables:
            (root / f"{label:05d}" / f"GT-{label:05d}.csv").write_text("\r\n".join(rows) + "\r\n")
    return root


def write_test(images: Path, table: Path, write_image: WriteImage) -> Path:
    rows = [HEADER]
    for number, label in enumerate([16, 1, 38]):
        write_image(images / f"{number:05d}.ppm", (label, number, 0), size=(53, 54))
        rows.append(f"{number:05d}.ppm;53;54;6;5;48;49;{label}")
    table.write_text("\n".join(rows) + "\n")
    return images


@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("place", ["GTSRB/Final_Training/Images", "gtsrb/GTSRB/Training"])
def test_training_images_come_with_their_class_and_track(
    tmp_path: Path, write_image: WriteImage, place: str, tables: bool
) -> None:
    data = gtsrb.read(write_training(tmp_path / place, write_image, tables=tables))
    assert data.images.shape == (18, 3, 32, 32)
    assert data.labels.tolist() == [0] * 6 + [7] * 6 + [42] * 6
    assert data.tracks is not None
    assert data.tracks.tolist() == [0, 0, 0, 1, 1, 1] * 3
    assert data.images[:, 1, 16, 16].tolist() == list(range(18))
    assert len(data.classes) == 43
    assert data.classes[14] == "stop"
    rest, held_out = split(data, 0.5)
    assert (len(rest), len(held_out)) == (9, 9)


@pytest.mark.parametrize("table", [".", "GTSRB", "GTSRB/Final_Test", "GTSRB/Final_Test/Images"])
def test_the_test_table_is_found_wherever_people_unpack_it(tmp_path: Path, write_image: WriteImage, table: str) -> None:
    images = tmp_path / "GTSRB/Final_Test/Images"
    images.mkdir(parents=True)
    data = gtsrb.read(write_test(images, tmp_path / table / "GT-final_test.csv", write_image), "test")
    assert data.labels.tolist() == [16, 1, 38]
    assert data.images[:, 0, 0, 0].tolist() == [16, 1, 38]
    assert data.tracks is None


def test_images_are_resized_whole_with_antialiasing(tmp_path: Path, write_image: WriteImage) -> None:
    stripes = np.zeros((128, 64, 3), np.uint8)
    stripes[::2] = 255
    write_image(tmp_path / "00000" / "00000_00000.ppm", stripes)
    image = gtsrb.read(tmp_path).images[0]
    # Without antialiasing the stripes would come out black and white.
    assert int(image.min()) >= 110
    assert int(image.max()) <= 145
    assert gtsrb.read(tmp_path, size=48).images.shape == (1, 3, 48, 48)


def mosaic(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """161 training tiles of one colour each and two test tiles, in the layout of the mosaics."""
    folder.mkdir(parents=True, exist_ok=True)
    tiles = np.zeros((2, 160, 32, 32, 3), np.uint8)
    tiles.reshape(320, -1, 3)[:161] = np.random.RandomState(0).randint(0, 255, (161, 1, 3))
    picture = tiles.transpose(0, 2, 1, 3, 4).reshape(64, 5120, 3)
    for name, rows in (("train", 64), ("test", 32)):
        # PNG under the name of a JPEG: Pillow goes by the bytes, and the test needs exact values.
        Image.fromarray(picture[:rows]).save(folder / f"{name}.jpg", format="png")
    labels = (np.arange(161) * 43 // 161).astype(np.uint8)
    np.savez(
        folder / "labels.npz", y_train=labels, y_test=labels[:2], track_train=(np.arange(161) // 2).astype(np.int16)
    )
    return tiles.reshape(320, 32, 32, 3), labels


def test_mosaics_are_cut_into_their_tiles_row_by_row(tmp_path: Path) -> None:
    tiles, labels = mosaic(tmp_path / "gtsrb32")
    for place in (tmp_path / "gtsrb32", tmp_path / "gtsrb32" / "labels.npz"):
        data = gtsrb.read(place)
        assert torch.equal(data.images, torch.from_numpy(tiles[:161].transpose(0, 3, 1, 2).copy()))
        assert data.labels.tolist() == labels.tolist()
        assert data.tracks is not None
        assert data.tracks.tolist() == (np.arange(161) // 2).tolist()
    test = gtsrb.read(tmp_path / "gtsrb32", "test")
    assert len(test) == 2
    assert test.tracks is None


def test_mosaics_have_one_size(tmp_path: Path) -> None:
    mosaic(tmp_path)
    with pytest.raises(OptionError, match="size must be 32 for the mosaics"):
        gtsrb.read(tmp_path, size=48)


def test_a_pickle_in_the_labels_is_never_loaded(tmp_path: Path) -> None:
    mosaic(tmp_path)
    np.savez(tmp_path / "labels.npz", y_train=np.array([object()]), y_test=np.zeros(1), track_train=np.zeros(1))
    with pytest.raises(DataError, match="whole numbers under 'y_train'"):
        gtsrb.read(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "labels.npz").write_bytes(b"PK\3\4 nothing"), "must be an npz archive"),
        (lambda root: np.savez(root / "labels.npz", other=np.zeros(3)), "under 'y_train'"),
        (lambda root: (root / "train.jpg").unlink(), r"train\.jpg is missing beside labels\.npz"),
        (lambda root: (root / "train.jpg").write_bytes(b"x"), "could not be decoded"),
        (lambda root: Image.new("RGB", (5120, 33)).save(root / "train.jpg"), "got 5120×33 pixels"),
        (lambda root: Image.new("RGB", (5120, 32)).save(root / "train.jpg"), "hold 161 of them"),
    ],
)
def test_damaged_mosaics_are_refused(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    mosaic(tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(DataError, match=message):
        gtsrb.read(tmp_path / "m")


def test_a_table_without_classes_is_refused_with_the_archive_that_has_them(
    tmp_path: Path, write_image: WriteImage
) -> None:
    images = tmp_path / "GTSRB/Final_Test/Images"
    images.mkdir(parents=True)
    write_test(images, images / "GT-final_test.csv", write_image)
    (images / "GT-final_test.csv").write_text("Filename;Width;Height\n00000.ppm;53;54\n")
    with pytest.raises(DataError, match=r"columns Filename and ClassId.*GTSRB_Final_Test_GT\.zip"):
        gtsrb.read(images, "test")
    (images / "GT-final_test.csv").unlink()
    with pytest.raises(DataError, match=r"GT-final_test\.csv is missing\. Unpack GTSRB_Final_Test_GT\.zip"):
        gtsrb.read(images, "test")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "00007/00001_00001.ppm").unlink(), "is listed but missing"),
        (lambda root: (root / "00007/00001_00001.ppm").write_bytes(b"P6 9"), "could not be decoded"),
        (
            lambda root: (root / "00007/GT-00007.csv").write_text(f"{HEADER}\na.ppm;1;1;1;1;1;1;8\n"),
            "class 7 only; got 8",
        ),
        (lambda root: (root / "00007/GT-00007.csv").write_text(HEADER), "lists no images"),
        (lambda root: (root / "00007/GT-00007.csv").write_bytes(b"\xff\xfe;\0"), "semicolon-separated table"),
        (lambda root: (root / "00007").rename(root / "00099"), "classes 0…42; got 99"),
    ],
)
def test_damaged_training_folders_are_refused(
    tmp_path: Path, write_image: WriteImage, damage: Callable[[Path], object], message: str
) -> None:
    write_training(tmp_path / "t", write_image, tables=message != "classes 0…42; got 99")
    damage(tmp_path / "t")
    with pytest.raises(DataError, match=message):
        gtsrb.read(tmp_path / "t")


def test_a_training_image_without_its_track_is_refused(tmp_path: Path, write_image: WriteImage) -> None:
    write_image(tmp_path / "00000" / "sign.ppm")
    with pytest.raises(DataError, match="must be named <track>_<number>"):
        gtsrb.read(tmp_path)


def test_a_folder_without_class_folders_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no class folders 00000"):
        gtsrb.read(tmp_path)


def test_a_table_cannot_point_outside_its_folder(tmp_path: Path, write_image: WriteImage) -> None:
    write_image(tmp_path / "00000_00000.ppm")
    inner = tmp_path / "t" / "00000"
    inner.mkdir(parents=True)
    (inner / "GT-00000.csv").write_text(f"{HEADER}\n../../00000_00000.ppm;1;1;1;1;1;1;0\n")
    with pytest.raises(DataError, match="is listed but missing"):
        gtsrb.read(tmp_path / "t")

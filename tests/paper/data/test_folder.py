from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from headtilt.errors import DataError, MissingExtraError, OptionError
from headtilt.paper.data import folder
from headtilt.paper.data.dataset import sample_indices

WriteImage = Callable[..., Path]


def test_classes_are_the_sorted_folder_names_and_every_format_is_read(tmp_path: Path, write_image: WriteImage) -> None:
    for place, suffix in enumerate(["jpg", "jpeg", "png", "ppm", "bmp", "webp", "tif", "PNG"]):
        write_image(tmp_path / ("zebra" if place % 2 else "ant") / f"{place}.{suffix}")
    data = folder.read(tmp_path, "test")
    assert data.classes == ("ant", "zebra")
    assert data.labels.tolist() == [0] * 4 + [1] * 4
    assert data.images.shape == (8, 3, 8, 8)
    assert (data.images.float().mean((0, 2, 3)) - torch.tensor([10.0, 20.0, 30.0])).abs().max() < 3


def test_images_deeper_down_belong_to_their_class_and_other_files_are_passed_over(
    tmp_path: Path, write_image: WriteImage
) -> None:
    write_image(tmp_path / "a" / "inner" / "deep" / "1.png")
    write_image(tmp_path / "a" / ".hidden" / "2.png")
    write_image(tmp_path / "a" / "._3.png")
    write_image(tmp_path / ".git" / "4.png")
    (tmp_path / "a" / "readme.txt").write_text("not an image")
    write_image(tmp_path / "stray.png")
    data = folder.read(tmp_path, "test")
    assert len(data) == 1
    assert data.classes == ("a",)


def test_the_middle_square_is_cut_out_and_nothing_is_stretched(tmp_path: Path, write_image: WriteImage) -> None:
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 255
    write_image(tmp_path / "a" / "wide.png", wide)
    write_image(tmp_path / "a" / "tall.png", wide.transpose(1, 0, 2).copy())
    data = folder.read(tmp_path, "test", size=10)
    assert data.images.shape == (2, 3, 10, 10)
    assert int(data.images[:, :, 1:-1, 1:-1].min()) == 255
    # Cutting first or resizing first is the same: the edge sees its neighbours beyond the cut.
    resized = np.asarray(Image.fromarray(wide).resize((30, 10), Image.Resampling.BILINEAR))[:, 10:20]
    assert np.array_equal(data.images[1].permute(1, 2, 0).numpy(), resized)


def test_exif_orientation_is_applied_before_the_image_is_cut(tmp_path: Path, write_image: WriteImage) -> None:
    upright = np.zeros((8, 8, 3), np.uint8)
    upright[:4] = (200, 0, 0)
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn a quarter clockwise to show": what is stored lies on its left side
    write_image(tmp_path / "a" / "1.png", np.rot90(upright).copy(), exif=exif)
    assert torch.equal(folder.read(tmp_path, "test").images[0].permute(1, 2, 0), torch.from_numpy(upright))


def test_greyscale_is_one_channel_and_grey_files_give_three_equal_ones(tmp_path: Path, write_image: WriteImage) -> None:
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    write_image(tmp_path / "a" / "1.png", grey)
    assert torch.equal(folder.read(tmp_path, "test", channels=1).images[0, 0], torch.from_numpy(grey))
    colour = folder.read(tmp_path, "test").images[0]
    assert all(torch.equal(channel, torch.from_numpy(grey)) for channel in colour)


def test_sixteen_bit_values_are_scaled_not_clipped(tmp_path: Path, write_image: WriteImage) -> None:
    write_image(tmp_path / "a" / "1.png", (np.arange(64, dtype=np.uint16).reshape(8, 8) * 257))
    assert folder.read(tmp_path, "test", channels=1).images.flatten().tolist() == list(range(64))


def test_what_is_transparent_becomes_black(tmp_path: Path, write_image: WriteImage) -> None:
    pixels = np.full((8, 8, 4), 255, np.uint8)
    pixels[:4, :, 3] = 0
    write_image(tmp_path / "a" / "1.png", pixels)
    palette = Image.fromarray(np.zeros((8, 8), np.uint8))
    palette.putpalette([9, 9, 9])
    palette.save(tmp_path / "a" / "2.png", transparency=bytes([0]))
    images = folder.read(tmp_path, "test").images
    assert images[0, :, :4].max() == 0
    assert images[0, :, 4:].min() == 255
    assert images[1].max() == 0


@pytest.mark.parametrize("kind", ["text", "cut off", "empty", "broken png"])
def test_a_file_that_does_not_decode_is_named(tmp_path: Path, write_image: WriteImage, kind: str) -> None:
    write_image(tmp_path / "a" / "1.png")
    noise = np.random.RandomState(0).randint(0, 255, (64, 64, 3)).astype(np.uint8)
    path = write_image(tmp_path / "a" / ("2.png" if kind == "broken png" else "2.jpg"), noise)
    content = path.read_bytes()
    path.write_bytes(
        {
            "text": b"hello",
            "cut off": content[: len(content) // 2],
            "empty": b"",
            "broken png": content[:40] + bytes(40) + content[80:],
        }[kind]
    )
    with pytest.raises(DataError, match=f"{path.name} could not be decoded as an image"):
        folder.read(tmp_path, "test", size=8)


def test_images_of_two_sizes_need_a_size(tmp_path: Path, write_image: WriteImage) -> None:
    write_image(tmp_path / "a" / "1.png", size=(8, 8))
    write_image(tmp_path / "a" / "2.png", size=(9, 8))
    with pytest.raises(DataError, match=r"2\.png is 9×8 and .*1\.png is 8×8. Give size="):
        folder.read(tmp_path, "test")
    assert folder.read(tmp_path, "test", size=8).images.shape == (2, 3, 8, 8)
    with pytest.raises(OptionError, match="size must be a whole number of at least 1"):
        folder.read(tmp_path, "test", size=0)


def tree(root: Path, write_image: WriteImage, parts: dict[str, dict[str, int]]) -> None:
    for part, classes in parts.items():
        for name, count in classes.items():
            for index in range(count):
                write_image(root / part / name / f"{index:03d}.png", (index, 0, 0), size=(2, 2))


def test_split_folders_are_chosen_and_a_missing_class_does_not_shift_labels(
    tmp_path: Path, write_image: WriteImage
) -> None:
    tree(tmp_path, write_image, {"fit": {"a": 2, "b": 1, "c": 1}, "test": {"b": 2, "c": 1}})
    test = folder.read(tmp_path, "test")
    assert test.classes == ("a", "b", "c")
    assert test.labels.tolist() == [1, 1, 2]
    assert len(folder.read(tmp_path, "fit")) == len(folder.read(tmp_path, "train")) == 4
    with pytest.raises(DataError, match="has no validation folder; it has fit, test"):
        folder.read(tmp_path, "validation")


def test_a_tenth_of_train_is_validation_and_fit_is_the_rest(tmp_path: Path, write_image: WriteImage) -> None:
    tree(tmp_path, write_image, {"train": {"a": 20, "b": 10}, "test": {"a": 1}})
    train, validation = folder.read(tmp_path, "train"), folder.read(tmp_path, "validation")
    assert (len(train), len(validation)) == (27, 3)
    assert torch.equal(folder.read(tmp_path, "fit").images, train.images)
    seen = {(int(d.labels[i]), int(d.images[i, 0, 0, 0])) for d in (train, validation) for i in range(len(d))}
    assert len(seen) == 30


def test_a_validation_folder_of_its_own_leaves_train_whole(tmp_path: Path, write_image: WriteImage) -> None:
    tree(tmp_path, write_image, {"train": {"a": 20}, "val": {"a": 3}})
    assert len(folder.read(tmp_path, "train")) == 20
    assert len(folder.read(tmp_path, "validation")) == 3


def test_a_tree_without_split_folders_is_one_set(tmp_path: Path, write_image: WriteImage) -> None:
    tree(tmp_path, write_image, {"": {"a": 3, "train": 2}})
    assert len(folder.read(tmp_path, "train")) == len(folder.read(tmp_path, "test")) == 5
    with pytest.raises(DataError, match="no train folder to split a validation set off"):
        folder.read(tmp_path, "validation")


def test_training_folders_with_one_image_a_class_cannot_give_a_validation_set(
    tmp_path: Path, write_image: WriteImage
) -> None:
    tree(tmp_path, write_image, {"train": {"a": 1, "b": 1}})
    with pytest.raises(DataError, match="too small to split off a validation set"):
        folder.read(tmp_path, "validation")


def test_a_limit_takes_the_seeded_sample_and_decodes_nothing_else(tmp_path: Path, write_image: WriteImage) -> None:
    tree(tmp_path, write_image, {"": {"a": 20}})
    whole = folder.read(tmp_path, "test")
    chosen = sample_indices(20, 5, seed=7)
    broken = next(i for i in range(20) if i not in chosen.tolist())
    (tmp_path / "a" / f"{broken:03d}.png").write_bytes(b"")
    assert torch.equal(folder.read(tmp_path, "test", limit=5, seed=7).images, whole.images[chosen])


def test_folders_without_classes_or_images_are_refused(tmp_path: Path, write_image: WriteImage) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        folder.read(tmp_path / "nowhere")
    write_image(tmp_path / "1.png")
    with pytest.raises(DataError, match="has no class folders"):
        folder.read(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match="has no images in its class folders"):
        folder.read(tmp_path)


def test_without_pillow_the_error_says_what_to_install(
    tmp_path: Path, write_image: WriteImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_image(tmp_path / "a" / "1.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match="pillow is needed"):
        folder.read(tmp_path)

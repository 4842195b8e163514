from __future__ import annotations

import gzip
import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headtilt.errors import DataError, OptionError
from headtilt.paper.data import NAMES, fetch, idx, load
from headtilt.paper.data.dataset import sample_indices

Write = Callable[..., tuple[Path, Path]]


@pytest.mark.parametrize("place", ["MNIST/raw", "mnist", "."])
@pytest.mark.parametrize("packed", [True, False])
def test_mnist_is_found_in_its_folder_or_directly(tmp_path: Path, write_idx: Write, place: str, packed: bool) -> None:
    write_idx(tmp_path / "data" / place, 200, packed=packed)
    write_idx(tmp_path / "data" / place, 30, "t10k", packed=packed)
    where = {"folders": tmp_path / "data", "download": False}
    train, validation, test = (load("mnist", split, **where) for split in ("train", "validation", "test"))  # type: ignore[arg-type]
    assert (len(train), len(validation), len(test)) == (162, 18, 27)
    assert torch.bincount(validation.labels).tolist() == [2] * 9
    assert (train.name, validation.name, test.name) == ("mnist-train", "mnist-validation", "mnist-test")
    assert not {*train.images[:, 0, 0, 0].tolist()} & {*validation.images[:, 0, 0, 0].tolist()}
    assert torch.equal(load("mnist", "fit", **where).images, train.images)  # type: ignore[arg-type]
    assert len(load("mnist", "test", drop_nines=False, **where)) == 30  # type: ignore[arg-type]


def test_data_folders_come_from_the_environment(
    tmp_path: Path, write_idx: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_idx(tmp_path / "FashionMNIST" / "raw", 20, "t10k")
    monkeypatch.setenv("HEADTILT_DATA", str(tmp_path))
    assert len(load("fashion-mnist", "test")) == 20


def test_the_validation_set_does_not_depend_on_the_seed_which_is_of_the_limit(tmp_path: Path, write_idx: Write) -> None:
    write_idx(tmp_path, 200)
    whole = load("mnist", "validation", folders=tmp_path)
    assert torch.equal(whole.images, load("mnist", "validation", folders=tmp_path, seed=5).images)
    some = load("mnist", "validation", folders=tmp_path, seed=5, limit=4)
    assert torch.equal(some.images, whole.images[sample_indices(len(whole), 4, 5)])


def test_images_and_labels_are_taken_from_one_folder(tmp_path: Path, write_idx: Write) -> None:
    write_idx(tmp_path / "MNIST" / "raw", 20)[1].unlink()
    write_idx(tmp_path, 30)
    assert len(load("mnist", folders=tmp_path)) + len(load("mnist", "validation", folders=tmp_path)) == 27


def test_missing_labels_are_said_to_be_missing(tmp_path: Path, write_idx: Write) -> None:
    images, labels = write_idx(tmp_path / "MNIST" / "raw", 20)
    labels.unlink()
    with pytest.raises(DataError, match=f"Only {images} is there. Downloading was switched off") as caught:
        load("mnist", folders=tmp_path, download=False)
    assert "train-labels-idx1-ubyte.gz" in str(caught.value)


@pytest.mark.parametrize(("name", "what"), [("mnist", "MNIST/raw"), ("gtsrb", "GTSRB/Final_Training/Images")])
def test_without_data_and_network_the_error_says_what_to_put_where(tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(DataError, match=f"{name} was not found.*{what}.*HEADTILT_DATA.*do not use the network"):
        load(name, folders=tmp_path)


def test_mnist_is_downloaded_unpacked_and_checked_by_its_content(
    site: Any, write_idx: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, _ = write_idx(tmp_path / "there", 20)
    content = gzip.decompress(images.read_bytes())
    site.content = images.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(fetch.MIRRORS, "mnist", (f"{site.url}/",))
    fetch.download_idx("mnist", "MNIST/raw", {"train-images-idx3-ubyte": digest}, ["train-images-idx3-ubyte"])
    assert (tmp_path / "cache" / "MNIST" / "raw" / "train-images-idx3-ubyte").read_bytes() == content
    with pytest.raises(DataError, match=r"mnist was not found.*its checksum is wrong"):
        load("mnist", "test")


def archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


def test_gtsrb_is_downloaded_unpacked_and_read(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (40, 40), (1, 2, 3)).save(picture, format="ppm")
    names = [f"GTSRB/Final_Training/Images/00003/{track:05d}_00000.ppm" for track in range(10)]
    site.content = archive(dict.fromkeys(names, picture.getvalue()) | {"GTSRB/Readme.txt": b""})
    md5 = hashlib.md5(site.content).hexdigest()
    monkeypatch.setitem(fetch.MIRRORS, "gtsrb", (f"{site.url}/",))
    monkeypatch.setitem(fetch.GTSRB_ARCHIVES, "train", (("a.zip", md5, "GTSRB/Final_Training"),))
    train = load("gtsrb")
    assert (len(train), len(load("gtsrb", "validation"))) == (9, 1)
    assert train.images[0, :, 0, 0].tolist() == [1, 2, 3]
    assert len(site.asked) == 1
    assert not list((tmp_path / "cache" / "downloads").iterdir())


def test_a_folder_of_images_is_loaded_by_its_path(tmp_path: Path, write_image: Callable[..., Path]) -> None:
    for number in range(6):
        write_image(tmp_path / "pictures" / "ab"[number % 2] / f"{number}.png", size=(9, 6))
    data = load(tmp_path / "pictures", "test", size=4, limit=5)
    assert data.images.shape == (5, 3, 4, 4)
    assert data.classes == ("a", "b")
    assert data.name == "pictures-test"


def test_imagenet_mini_is_found_in_the_data_folder(tmp_path: Path, write_image: Callable[..., Path]) -> None:
    for part in ("fit", "test"):
        write_image(tmp_path / "imagenet-mini" / part / "n01440764" / "1.jpg")
    assert load("imagenet-mini", "test", folders=tmp_path).classes == ("n01440764",)
    with pytest.raises(DataError, match=r"imagenet-mini was not found\. Put the folder imagenet-mini"):
        load("imagenet-mini", "fit", folders=tmp_path / "imagenet-mini")


def test_a_decoded_folder_is_read_from_the_cache_the_second_time(
    tmp_path: Path, write_image: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_image(tmp_path / "pictures" / "a" / "1.png")
    first = load(tmp_path / "pictures", "test")
    monkeypatch.setattr("headtilt.paper.data.folder.decode", None)
    assert torch.equal(load(tmp_path / "pictures", "test").images, first.images)


def test_digits_are_split_like_the_others() -> None:
    sizes = [len(load("digits", split)) for split in ("train", "validation", "test", "fit")]  # type: ignore[arg-type]
    assert sum(sizes[:2]) == 1100
    assert sizes[2:] == [517, sizes[0]]
    assert 100 <= sizes[1] <= 120
    assert len(load("digits", "test", drop_nines=False)) == 697


def test_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"name must be one of 'mnist', .*'imagenet-mini', or a folder of images"):
        load("cifar")
    with pytest.raises(OptionError, match="split must be one of 'train', 'validation', 'test', 'fit'"):
        load("digits", "val")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="size must be left out for digits"):
        load("digits", size=32)
    with pytest.raises(OptionError, match="limit must be a whole number of at least 1"):
        load("digits", limit=0)
    with pytest.raises(DataError, match="folders must name folders"):
        load("mnist", folders=tmp_path / "nowhere")


def test_every_downloadable_set_has_a_checksum_for_each_file() -> None:
    for known in idx.SETS.values():
        wanted = {*idx.file_names("train"), *idx.file_names("test")}
        assert wanted == known.sha256.keys()
        assert known.name in fetch.MIRRORS
    assert set(fetch.MIRRORS) < set(NAMES)


def test_importing_the_package_loads_neither_pillow_nor_scikit_learn_nor_pooch() -> None:
    heavy = ["PIL", "sklearn", "pooch", "platformdirs", "requests", "safetensors", "matplotlib"]
    script = f"import sys, headtilt.paper.data; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_images_of_a_loaded_set_may_be_written_to(tmp_path: Path, write_idx: Write) -> None:
    write_idx(tmp_path, 30, "t10k", packed=False)
    data = load("mnist", "test", folders=tmp_path, drop_nines=False)
    data.images.zero_()
    assert np.asarray(data.images).max() == 0

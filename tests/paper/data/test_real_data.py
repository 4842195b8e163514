"""The real data sets, where HEADTILT_DATA says that they are here."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from headtilt.paper.data import folder, gtsrb, idx, load, siscore


@pytest.mark.parametrize(("name", "means"), [("mnist", 33.32), ("fashion-mnist", 72.94)])
def test_the_idx_sets_are_whole_and_their_unpacked_bytes_are_the_official_ones(
    real_data: Path, name: str, means: float
) -> None:
    import hashlib

    known = idx.SETS[name]
    for split, count in (("train", 60_000), ("test", 10_000)):
        paths = [next(real_data.glob(f"{known.folders[0]}/{file}*")) for file in idx.file_names(split)]  # type: ignore[arg-type]
        data = idx.read(*paths, kind=name, split=split, drop_nines=False)  # type: ignore[arg-type]
        assert len(data) == count
        assert data.images.float().mean().item() == pytest.approx(means, abs=0.5)
        for file, ndim in zip(idx.file_names(split), (3, 1), strict=True):  # type: ignore[arg-type]
            array = idx.read_array(next(real_data.glob(f"{known.folders[0]}/{file}*")), ndim)
            header = bytes([0, 0, 8, ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            assert hashlib.sha256(header + array.tobytes()).hexdigest() == known.sha256[file]


def test_mnist_without_nines_splits_into_48647_5404_and_8991(real_data: Path) -> None:
    sizes = [len(load("mnist", split, folders=real_data, download=False)) for split in ("train", "validation", "test")]  # type: ignore[arg-type]
    assert sizes == [48_647, 5_404, 8_991]


def test_gtsrb_has_its_official_counts_and_no_track_in_both_training_and_validation(real_data: Path) -> None:
    train, validation, test = (
        load("gtsrb", split, folders=real_data, download=False)  # type: ignore[arg-type]
        for split in ("train", "validation", "test")
    )
    assert len(train) + len(validation) == 39_209
    assert len(test) == 12_630
    sides = [set(zip(d.labels.tolist(), d.tracks.tolist(), strict=True)) for d in (train, validation)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 1_307
    assert set(validation.labels.tolist()) == set(range(43))


def test_the_official_layout_that_the_unpacker_writes_equals_the_mosaics(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A few rows of tiles from all over the mosaics, handed to the real script: the whole would take far longer.
    rows = [0, 1, 40, 111, 170, 244]
    small = tmp_path / "gtsrb32"
    small.mkdir()
    labels = np.load(real_data / "gtsrb32" / "labels.npz", allow_pickle=False)
    for split, chosen in (("train", rows), ("test", rows[:2])):
        mosaic = np.asarray(Image.open(real_data / "gtsrb32" / f"{split}.jpg"))
        picture = mosaic.reshape(-1, 32, *mosaic.shape[1:])[chosen].reshape(-1, *mosaic.shape[1:])
        Image.fromarray(picture).save(small / f"{split}.jpg", format="png", compress_level=1)
    tiles = (np.array(rows)[:, None] * 160 + np.arange(160)).ravel()
    np.savez(
        small / "labels.npz",
        y_train=labels["y_train"][tiles],
        track_train=labels["track_train"][tiles],
        y_test=labels["y_test"][:320],
    )
    shutil.copy(real_data / "unpack_gtsrb.py", tmp_path)
    monkeypatch.setattr(sys, "argv", ["unpack_gtsrb.py", str(tmp_path / "official")])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    runpy.run_path(str(tmp_path / "unpack_gtsrb.py"), run_name="__main__")
    for split, count in (("train", 960), ("test", 320)):
        official = gtsrb.read(tmp_path / "official" / gtsrb.PLACES[split][0], split)  # type: ignore[arg-type]
        mosaics = gtsrb.read(small, split)  # type: ignore[arg-type]
        assert len(official) == count
        assert torch.equal(official.images, mosaics.images)
        assert torch.equal(official.labels, mosaics.labels)
        if split == "train":
            assert torch.equal(official.tracks, mosaics.tracks)


def test_imagenet_mini_has_one_320_square_of_each_of_1000_classes(real_data: Path) -> None:
    listing = folder.list_images(real_data / "imagenet-mini", "test")
    assert listing.labels.tolist() == list(range(1000))
    assert (listing.classes[0], listing.classes[999]) == ("n01440764", "n15075141")
    data = load("imagenet-mini", "fit", folders=real_data, limit=50)
    assert data.images.shape == (50, 3, 320, 320)
    fit = folder.list_images(real_data / "imagenet-mini", "fit")
    assert not {path.name for path in fit.paths} & {path.name for path in listing.paths}


def test_the_labels_of_si_score_are_those_the_checkpoint_knows(real_data: Path) -> None:
    names = json.loads((real_data / "mobilenet_v2_imagenet" / "config.json").read_text())["id2label"]
    other = {
        "flowerpot": "pot",
        "hedgehog": "porcupine",
        "ipod": "iPod",
        "jeans": "jean",
        "lighthouse": "beacon",
        "pig": "hog",
        "ruler": "rule",
        "saxophone": "sax",
        "taxi": "cab",
    }
    assert {name: names[str(index)] for name, index in siscore.LABELS.items()} == {
        name: other.get(name, name) for name in siscore.LABELS
    }

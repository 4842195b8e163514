from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headtilt.errors import DataError, OptionError
from headtilt.paper.data import idx

Write = Callable[..., tuple[Path, Path]]


@pytest.mark.parametrize("packed", [True, False])
def test_images_and_labels_come_back_as_written(tmp_path: Path, write_idx: Write, packed: bool) -> None:
    data = idx.read(*write_idx(tmp_path, 40, packed=packed), drop_nines=False)
    assert data.images.shape == (40, 1, 28, 28)
    assert data.images[:, 0, 5, 7].tolist() == list(range(40))
    assert data.labels.tolist() == [i % 10 for i in range(40)]
    assert data.name == "mnist-train"


def test_nines_are_left_out_of_mnist_and_bags_stay_in_fashion(tmp_path: Path, write_idx: Write) -> None:
    paths = write_idx(tmp_path, 40)
    data = idx.read(*paths)
    assert data.classes == tuple("012345678")
    assert data.images[:, 0, 0, 0].tolist() == [i for i in range(40) if i % 10 != 9]
    fashion = idx.read(*paths, kind="fashion-mnist")
    assert len(fashion) == 40
    assert fashion.classes[9] == "Ankle boot"


def test_a_gzipped_file_is_recognised_by_its_bytes_not_its_name(tmp_path: Path, write_idx: Write) -> None:
    images, labels = write_idx(tmp_path, 10)
    plain = images.with_suffix(".gz.gz")
    plain.write_bytes(gzip.decompress(images.read_bytes()))
    bare = labels.rename(tmp_path / "labels")
    assert len(idx.read(plain, bare, drop_nines=False)) == 10


def damage(content: bytes, kind: str) -> bytes:
    return {
        "empty": b"",
        "short magic": content[:3],
        "wrong magic": b"\1" + content[1:],
        "an html page": b"<!DOCTYPE html><html>",
        "floats": content[:2] + b"\x0d" + content[3:],
        "labels": content[:3] + b"\1" + content[4:],
        "four dimensions": content[:3] + b"\4" + content[4:],
        "short header": content[:10],
        "no images": content[:4] + bytes(4) + content[8:16],
        "short body": content[:-1],
        "long body": content + b"x",
        "a header that promises too much": content[:4] + b"\xff" * 12 + content[16:],
        "27 rows": content[:8] + (27).to_bytes(4, "big") + content[12 : 16 + 20 * 27 * 28],
    }[kind]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", "must begin with the idx magic 00 00; got nothing"),
        ("short magic", "must begin with the idx magic 00 00; got 00 00 08"),
        ("wrong magic", "must begin with the idx magic 00 00; got 01 00 08 03"),
        ("an html page", "must begin with the idx magic"),
        ("floats", "must hold unsigned bytes .* got type 0x0d"),
        ("labels", "must have 3 dimension.* got 1. Were images and labels swapped"),
        ("four dimensions", "must have 3 dimension.* got 4"),
        ("short header", "must give 3 sizes above 0"),
        ("no images", "must give 3 sizes above 0"),
        ("short body", "must hold 15680 bytes after its header .* got only 15679"),
        ("long body", "must hold 15680 bytes after its header .* got more"),
        ("a header that promises too much", "got only 15680"),
        ("27 rows", "must hold 28×28 images; got 27×28"),
    ],
)
def test_a_damaged_images_file_is_named_with_what_is_wrong(
    tmp_path: Path, write_idx: Write, kind: str, message: str, packed: bool
) -> None:
    images, labels = write_idx(tmp_path, 20, packed=False)
    content = damage(images.read_bytes(), kind)
    images.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match=message) as caught:
        idx.read(images, labels)
    assert str(images) in str(caught.value)


@pytest.mark.parametrize("damaged", ["cut off", "flipped", "trailing"])
def test_a_damaged_gzip_file_is_named_with_the_advice_to_fetch_it_again(
    tmp_path: Path, write_idx: Write, damaged: str
) -> None:
    images, labels = write_idx(tmp_path, 200)
    content = bytearray(images.read_bytes())
    if damaged == "cut off":
        content = content[: len(content) // 2]
    elif damaged == "flipped":
        content[len(content) // 2] ^= 0xFF
    else:
        content += b"trailing"
    images.write_bytes(content)
    with pytest.raises(DataError, match=f"Remove {images.name} and fetch it again"):
        idx.read(images, labels)


def test_labels_of_another_count_or_beyond_nine_are_refused(tmp_path: Path, write_idx: Write) -> None:
    images, labels = write_idx(tmp_path, 20, packed=False)
    content = labels.read_bytes()
    labels.write_bytes(content[:7] + bytes([19]) + content[8:-1])
    with pytest.raises(DataError, match="got 19 labels for the 20 images"):
        idx.read(images, labels)
    labels.write_bytes(content[:-1] + bytes([10]))
    with pytest.raises(DataError, match="must hold labels from 0 to 9; got 10"):
        idx.read(images, labels)


def test_a_missing_file_and_a_folder_in_its_place_are_data_errors(tmp_path: Path, write_idx: Write) -> None:
    images, labels = write_idx(tmp_path, 20)
    with pytest.raises(DataError, match="nowhere could not be read"):
        idx.read(images, tmp_path / "nowhere")
    with pytest.raises(DataError, match="could not be read"):
        idx.read(tmp_path, labels)


def test_an_unknown_kind_or_split_is_an_option_error(tmp_path: Path, write_idx: Write) -> None:
    paths = write_idx(tmp_path, 20)
    with pytest.raises(OptionError, match="kind must be one of"):
        idx.read(*paths, kind="kmnist")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="split must be one of"):
        idx.read(*paths, split="fit")  # type: ignore[arg-type]


def test_the_files_of_the_other_set_are_recognised_by_their_labels(
    tmp_path: Path, write_idx: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    images, labels = write_idx(tmp_path, 20, packed=False)
    digest = hashlib.sha256(labels.read_bytes()).hexdigest()
    monkeypatch.setitem(idx.FASHION_MNIST.sha256, "train-labels-idx1-ubyte", digest)
    with pytest.raises(DataError, match="holds the labels of fashion-mnist, not of mnist"):
        idx.read(images, labels)
    assert len(idx.read(images, labels, kind="fashion-mnist")) == 20


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "file"


@settings(max_examples=300)
@given(
    head=st.sampled_from([b"", b"\0\0\x08\1", b"\0\0\x08\3", b"\x1f\x8b\x08\0"]),
    body=st.binary(max_size=60),
    packed=st.booleans(),
    ndim=st.sampled_from([1, 3]),
)
def test_no_bytes_whatever_raise_anything_but_a_data_error(
    scratch: Path, head: bytes, body: bytes, packed: bool, ndim: int
) -> None:
    scratch.write_bytes(gzip.compress(head + body) if packed else head + body)
    try:
        array = idx.read_array(scratch, ndim)
    except DataError:
        return
    assert array.ndim == ndim


@settings(max_examples=200)
@given(data=st.data())
def test_a_file_with_one_byte_changed_is_read_or_refused_with_a_data_error(scratch: Path, data: st.DataObject) -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    header = bytes([0, 0, 8, 3, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 2])
    content = bytearray(gzip.compress(header + array.tobytes(), mtime=0))
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    scratch.write_bytes(content)
    try:
        read = idx.read_array(scratch, 3)
    except DataError:
        return
    # Only the few bytes that gzip does not check (its time stamp, its flags) may change unnoticed.
    assert np.array_equal(read, array)

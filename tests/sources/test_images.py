"""Images in: every kind gives the right pixels, and whatever is wrong with a file is said of that file alone."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hardening import hostile
from headtilt.errors import DataError
from headtilt.sources import Adapted, images

Image = pytest.importorskip("PIL.Image", reason="needs the extra headtilt[data]")


def adapted(size: int = 16, resize: int = 16, channels: int = 3, resample: str = "bilinear") -> Adapted:
    return Adapted(nn.Identity(), None, size, resize, "reflection", "net", channels, resample)  # type: ignore[arg-type]


@pytest.fixture
def photograph() -> Image.Image:
    """Return a photograph, wider than high, no two corners of which are alike."""
    down, right = np.mgrid[:30, :40]
    return Image.fromarray(np.stack([right * 6, down * 8, (right + down) * 3], axis=-1).astype(np.uint8))


def test_a_phone_photograph_reads_the_same_in_each_of_the_eight_exif_orientations(photograph, tmp_path):
    # How a camera that was held so would have stored the picture.
    by = Image.Transpose
    stored = {1: None, 2: by.FLIP_LEFT_RIGHT, 3: by.ROTATE_180, 4: by.FLIP_TOP_BOTTOM}
    stored |= {5: by.TRANSPOSE, 6: by.ROTATE_90, 7: by.TRANSVERSE, 8: by.ROTATE_270}
    for orientation, turn in stored.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        kept = photograph if turn is None else photograph.transpose(turn)
        kept.save(tmp_path / f"{orientation}.png", exif=exif)
        found = images.read(tmp_path / f"{orientation}.png")
        assert torch.equal(found, images.read(photograph)), f"orientation {orientation}"
        assert torch.equal(
            images.square_of(tmp_path / f"{orientation}.png", adapted()), images.square_of(photograph, adapted())
        )


@pytest.mark.parametrize("kind", ["path", "string", "bytes", "file", "array", "pil", "tensor", "floats"])
def test_an_image_is_the_same_wherever_it_comes_from(photograph, tmp_path, kind):
    path, held = tmp_path / "ein Bild é.png", io.BytesIO()
    photograph.save(path)
    photograph.save(held, "PNG")
    pixels = np.asarray(photograph)
    source = {
        "path": path,
        "string": str(path),
        "bytes": held.getvalue(),
        "file": io.BytesIO(held.getvalue()),
        "array": pixels,
        "pil": photograph,
        "tensor": torch.from_numpy(pixels.copy()).permute(2, 0, 1),
        "floats": pixels / 255,
    }[kind]
    expected = torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255
    assert torch.equal(images.read(source), expected)


def test_modes_of_pillow_give_the_colours_they_mean(tmp_path):
    grey = np.linspace(0, 65535, 64).reshape(8, 8).round().astype(np.uint16)
    Image.fromarray(grey).save(tmp_path / "deep.png")
    expected = torch.from_numpy((grey / 65535).astype(np.float32)).expand(3, 8, 8)
    assert torch.allclose(images.read(tmp_path / "deep.png"), expected, atol=0.5 / 255 + 1e-6)
    assert torch.allclose(images.read(grey), expected, atol=0.5 / 255 + 1e-6)

    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(tmp_path / "print.jpg", quality=100, subsampling=0)
    red = images.read(tmp_path / "print.jpg")[:, 0, 0]
    assert torch.allclose(red, torch.tensor([1.0, 0, 0]), atol=0.03)

    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 255, 0])
    palette.putdata([0, 1])
    palette.save(tmp_path / "few.gif", transparency=1)
    assert images.read(tmp_path / "few.gif")[:, 0].T.tolist() == [[1, 0, 0], [0, 0, 0]], "see-through is black"

    assert images.read(Image.new("LA", (1, 1), (255, 128)))[0].item() == pytest.approx(128 / 255)
    assert images.read(Image.new("1", (1, 1), 1)).flatten().tolist() == [1, 1, 1]
    for top in (1.0, 255.0, 65535.0):
        floats = Image.fromarray(np.array([[0, top / 2, top]], dtype=np.float32))
        assert images.read(floats)[0, 0].tolist() == pytest.approx([0, 0.5, 1], abs=1 / 255)


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_of_an_animation_the_first_frame_is_taken(tmp_path, kind):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    options = {"lossless": True} if kind == "webp" else {}
    frames[0].save(tmp_path / f"moving.{kind}", save_all=True, append_images=frames[1:], **options)
    assert images.read(tmp_path / f"moving.{kind}")[:, 0, 0].tolist() == [1, 0, 0]


@pytest.mark.parametrize("resample", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("shape", [(300, 200), (200, 300), (24, 31), (250, 250)], ids=str)
def test_nothing_is_stretched_and_both_ways_of_resizing_agree(shape, resample):
    down, right = np.mgrid[: shape[0], : shape[1]]
    rings = np.hypot(down - shape[0] / 2, right - shape[1] / 2) / min(shape)
    picture = np.stack([rings * 200] * 3, axis=-1).astype(np.uint8)
    model = adapted(48, 56, resample=resample)
    by_bytes, by_floats = images.square_of(picture, model), images.prepare(images.read(picture), model)
    assert by_bytes.shape == by_floats.shape == (3, 48, 48)
    assert (by_bytes - by_floats).abs().max() < 0.03
    # Circles stay circles: the square looks the same lying on its side.
    assert (by_floats - by_floats.transpose(1, 2)).abs().max() < (0.05 if resample != "nearest" else 0.12)


def test_a_ribbon_that_would_grow_beyond_all_bounds_is_read_from_its_middle():
    ribbon = np.zeros((2, 400_000, 3), dtype=np.uint8)
    ribbon[:, 199_990:200_010] = 255
    square = images.square_of(ribbon, adapted(64, 64))
    assert square.shape == (3, 64, 64)
    assert square.mean() == 1


def test_a_grey_model_gets_one_channel_of_luma(photograph):
    one = images.square_of(photograph, adapted(16, 16, 1))
    assert one.shape == (1, 16, 16)
    expected = images.prepare(images.read(photograph.convert("L").convert("RGB")), adapted(16, 16))[:1]
    assert torch.allclose(one, expected, atol=2 / 255)


def png(width: int, height: int) -> bytes:
    """Return a PNG that claims a size in its header and holds no such pixels."""
    import struct
    import zlib

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"Dear diary, ...", "is not an image"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "broken.jpg"),
        (png(9_500, 10_000), "could not be decoded"),
        (png(12_000, 12_000), "has 12000×12000 pixels, more than 100,000,000"),
        (png(30_000, 30_000), "may be a decompression bomb"),
        (b"\xff\xd8\xff\xe0" + b"\0" * 50, "broken.jpg"),
    ],
    ids=["empty", "text", "png header alone", "large and hollow", "large", "bomb", "jpeg header alone"],
)
def test_a_broken_file_is_one_clear_error_that_names_it(tmp_path, content, said):
    path = tmp_path / "broken.jpg"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.jpg") as caught:
        images.read(path)
    assert said in str(caught.value)


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "gif", "tif", "bmp"])
def test_a_truncated_file_of_any_kind_is_an_error(tmp_path, kind):
    path = tmp_path / f"cut.{kind}"
    noise = np.random.RandomState(0).randint(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=rf"cut\.{kind}"):
        images.read(path)


def test_broken_exif_does_not_cost_the_pixels(photograph, tmp_path):
    photograph.save(tmp_path / "odd.jpg", exif=b"Exif\0\0MM\0\x2a\0\0\0\x08\xff\xff" + b"\xff" * 30, quality=95)
    assert images.read(tmp_path / "odd.jpg").shape == (3, 30, 40)


def test_metadata_longer_than_any_camera_writes_is_passed_over(photograph):
    def shape(exif):
        buffer = io.BytesIO()
        photograph.save(buffer, "PNG", exif=exif)
        return images.read(buffer.getvalue()).shape

    exif = Image.Exif()
    exif[0x0112] = 6
    assert shape(exif.tobytes()) == (3, 40, 30)
    assert shape(exif.tobytes() + bytes(100_000)) == (3, 30, 40)
    assert images.read(hostile.many_tags()).shape == (3, 8, 8)


def test_what_is_no_file_is_said(tmp_path):
    (tmp_path / "folder.jpg").mkdir()
    for source, said in (("nosuch.jpg", "does not exist"), ("folder.jpg", "is a folder")):
        with pytest.raises(DataError, match=said):
            images.read(tmp_path / source)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.jpg")
        with pytest.raises(DataError, match="no regular file"):
            images.read(tmp_path / "pipe.jpg")


def test_a_file_that_may_not_be_read_is_said(photograph, tmp_path, monkeypatch):
    photograph.save(tmp_path / "secret.png")

    def refuse(*_args: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything, whatever its mode
    with pytest.raises(DataError, match=r"secret\.png may not be read"):
        images.read(tmp_path / "secret.png")


@pytest.mark.parametrize(
    "array",
    [np.zeros((2, 3, 4, 5)), np.zeros((4, 4), dtype=np.int64), np.full((4, 4), 2.0), np.zeros((0, 4)), np.zeros(5)],
    ids=["four axes", "whole numbers", "floats beyond 1", "nothing", "a line"],
)
def test_an_array_that_is_no_image_is_an_error(array):
    with pytest.raises(DataError, match="array"):
        images.read(array)


def test_folders_globs_and_files_are_found_once_and_in_order(tmp_path):
    for name in ("b.jpg", "a.PNG", "sub/c.webp", "notes.txt", ".hidden.jpg", ".git/x.jpg", "d.jpg/e.jpg", "ü ö.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = images.survey([tmp_path, str(tmp_path / "*.jpg"), tmp_path / "notes.txt", tmp_path / "nosuch*.jpg"])
    names = [str(path.relative_to(tmp_path)) for path in found.paths]
    assert names == ["a.PNG", "b.jpg", "ü ö.jpg", "d.jpg/e.jpg", "sub/c.webp", "notes.txt", "nosuch*.jpg"]
    assert images.find([tmp_path]) == list(images.survey([tmp_path]).paths)
    assert images.survey([tmp_path]).passed_over == (tmp_path / "notes.txt",)
    assert found.passed_over == (), "named by itself it counts"
    assert found.roots[tmp_path / "b.jpg"] == tmp_path


def test_a_folder_that_may_not_be_opened_is_not_passed_over_in_silence(tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    closed.mkdir()
    (tmp_path / "a.jpg").touch()
    scan = os.scandir

    def refuse(path: object) -> object:
        if Path(str(path)) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", refuse)
    assert images.find([tmp_path]) == [tmp_path / "a.jpg", closed]


def test_a_name_with_a_null_byte_is_said_to_be_none():
    with pytest.raises(DataError, match="null byte"):
        images.survey(["a\0.png"])

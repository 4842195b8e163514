"""Upright copies: the right turn at full resolution, metadata that stays true, and nothing overwritten."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headtilt.apps.canonicalise import quarter_turns, targets, undone, write_upright
from headtilt.errors import DataError
from headtilt.geometry.groups import compose, rotation, scale, shear_x, translate_x
from headtilt.sources import Adapted
from headtilt.sources.images import read, survey

Image = pytest.importorskip("PIL.Image", reason="needs the extra headtilt[data]")
SQUARE = Adapted(torch.nn.Identity(), None, 224, 256, "reflection", "net")

# Sure where the brightest quarter is on top: a picture with a white bar there is upright.
TOPSIDE = """
import torch
from headtilt.sources import Adapted


class Topside(torch.nn.Module):
    def forward(self, images):
        top = images[:, :, :8].mean((1, 2, 3)) - images.mean((1, 2, 3))
        return torch.stack([20 * top, torch.zeros_like(top)], 1)


def make():
    return Adapted(Topside(), ("bar", "nothing"), 32, 32, "reflection", "topside")
"""
MODEL = ("--model", "python:topside:make")


def turn(degrees: float) -> torch.Tensor:
    return rotation().matrix(torch.tensor(math.radians(degrees), dtype=torch.float64))


def smooth(width: int, height: int) -> Image.Image:
    down, right = np.mgrid[:height, :width]
    waves = [np.sin(right / 23 + phase) * 60 + np.cos(down / 31 + phase) * 60 + 128 for phase in (0, 1, 2)]
    return Image.fromarray(np.stack(waves, axis=-1).astype(np.uint8))


@pytest.mark.parametrize("turns", range(4))
def test_quarter_turns_are_exact_and_swap_the_sides(turns):
    picture = smooth(90, 60)
    assert quarter_turns(turn(90 * turns)) == turns
    done = undone(picture, turn(90 * turns), SQUARE)
    # A positive pose turns clockwise; numpy counts the other way round.
    assert np.array_equal(np.asarray(done), np.rot90(np.asarray(picture), -turns))
    assert quarter_turns(turn(90 * turns + 0.5)) is None


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (256, 256)], ids=str)
def test_other_tilts_are_undone_about_the_middle_at_full_size(size):
    picture = smooth(*size)
    one = torch.tensor(0.2, dtype=torch.float64)
    pose = compose(translate_x(0.25).matrix(one / 4), scale(0.25).matrix(one), shear_x(0.25).matrix(one / 2), turn(33))
    there = undone(picture, pose, SQUARE)
    assert there.size == picture.size
    back = np.asarray(undone(there, torch.linalg.inv(pose), SQUARE)).astype(int)
    middle = np.hypot(*np.mgrid[-size[1] / 2 : size[1] / 2, -size[0] / 2 : size[0] / 2]) < min(size) / 3
    assert np.abs(back - np.asarray(picture).astype(int))[middle].max() <= 4


def test_the_whole_image_moves_as_the_square_did():
    """What the model saw turned upright is the middle of the copy."""
    from headtilt.geometry.warp import warp
    from headtilt.sources.images import prepare

    picture = smooth(480, 360)
    pose = compose(translate_x(0.25).matrix(torch.tensor(0.1, dtype=torch.float64)), turn(-50))
    seen = warp(prepare(picture, SQUARE)[None].double(), pose[None], padding="reflection")[0]
    copy = prepare(undone(picture, pose, SQUARE), SQUARE)
    inside = slice(60, 164)
    assert (seen - copy)[:, inside, inside].abs().max() < 0.02


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "CMYK", "I;16", "P", "1", "F"])
def test_every_mode_keeps_its_kind_of_pixels(mode, tmp_path):
    grey = np.tile(np.linspace(0, 255, 80).astype(np.uint8), (80, 1))
    deep = mode == "I;16"
    picture = Image.fromarray(grey.astype(np.uint16) * 257) if deep else Image.fromarray(grey).convert(mode)
    done = undone(picture, turn(10), SQUARE)
    assert done.size == (80, 80)
    assert done.mode == {"P": "RGB", "1": "L"}.get(mode, mode)
    middle = np.asarray(done.convert("F" if deep else "L")).astype(float)[40, 40]
    assert middle == pytest.approx(32_900 if deep else 128, rel=0.1 if mode != "1" else 1)


def test_colour_profile_resolution_and_exif_stay_true(tmp_path):
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "A maker"
    exif.get_ifd(0x8769)[0xA002], exif.get_ifd(0x8769)[0xA003] = 90, 60
    picture = smooth(90, 60)
    picture.save(tmp_path / "a.jpg", exif=exif, icc_profile=profile, dpi=(200, 200), quality=95)
    path = write_upright(tmp_path / "a.jpg", tmp_path / "out" / "a.jpg", turn(90), SQUARE)
    with Image.open(path) as copy:
        assert copy.size == (90, 60), "lying by its EXIF, turned once more"
        assert copy.info["icc_profile"] == profile
        assert copy.info["dpi"] == (200, 200)
        kept = copy.getexif()
        assert (kept[0x0112], kept[0x010F]) == (1, "A maker")
        assert (kept.get_ifd(0x8769)[0xA002], kept.get_ifd(0x8769)[0xA003]) == (90, 60)
        assert not kept.get_ifd(0x0201)
        assert b"JFXX" not in path.read_bytes()
    expected = np.rot90(np.asarray(picture), 2)
    assert np.abs(read(path).permute(1, 2, 0).numpy() * 255 - expected).mean() < 3


def test_a_stale_thumbnail_goes(tmp_path):
    thumbnail = smooth(16, 16)
    exif = Image.Exif()
    exif[0x0112] = 3
    exif.get_ifd(0x0201)  # makes room where this Pillow keeps it
    exif._ifds[1] = {0x0201: 200, 0x0202: 10, 0x0100: thumbnail.width}
    smooth(90, 60).save(tmp_path / "a.jpg", exif=exif)
    path = write_upright(tmp_path / "a.jpg", tmp_path / "b.jpg", turn(15), SQUARE)
    with Image.open(path) as copy:
        assert 0x0201 not in copy.getexif().get_ifd(1)


def test_what_is_upright_is_copied_to_the_byte(tmp_path):
    smooth(90, 60).save(tmp_path / "a.jpg", quality=60)
    path = write_upright(tmp_path / "a.jpg", tmp_path / "b.jpg", turn(0), SQUARE)
    assert path.read_bytes() == (tmp_path / "a.jpg").read_bytes()


def test_the_suffix_follows_the_format(tmp_path):
    smooth(40, 40).save(tmp_path / "really.jpg", "PNG")
    smooth(40, 40).save(tmp_path / "moving.gif")
    assert write_upright(tmp_path / "really.jpg", tmp_path / "o" / "really.jpg", turn(9), SQUARE).name == "really.png"
    assert write_upright(tmp_path / "moving.gif", tmp_path / "o" / "moving.gif", turn(0), SQUARE).name == "moving.png"


def test_nothing_is_overwritten_without_force_and_no_original_ever(tmp_path):
    smooth(40, 40).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"precious")
    with pytest.raises(DataError, match="exists already; --force"):
        write_upright(tmp_path / "a.png", tmp_path / "b.png", turn(9), SQUARE)
    assert (tmp_path / "b.png").read_bytes() == b"precious"
    write_upright(tmp_path / "a.png", tmp_path / "b.png", turn(9), SQUARE, force=True)
    assert read(tmp_path / "b.png").shape == (3, 40, 40)
    with pytest.raises(DataError, match="is the original itself"):
        write_upright(tmp_path / "a.png", tmp_path / "a.png", turn(9), SQUARE, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"], "nothing unfinished is left"


def test_copies_of_files_with_one_name_go_to_different_places(tmp_path):
    for name in ("one/x.png", "two/x.png", "two/deep/x.png", "out/old.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    out = tmp_path / "out"
    named = targets(survey([tmp_path / "one" / "x.png", tmp_path / "two" / "x.png"]), out)
    assert [path.name for path in named.values()] == ["x.png", "x-2.png"]
    beneath = targets(survey([tmp_path / "two", tmp_path / "one"]), out)
    assert [str(path.relative_to(out)) for path in beneath.values()] == ["x.png", "deep/x.png", "x-2.png"]
    assert all(out not in path.parents for path in targets(survey([tmp_path]), out)), "copies are not copied again"


def test_the_command_turns_pictures_upright_and_says_where_they_are(call, tmp_path, monkeypatch):
    Path("topside.py").write_text(TOPSIDE, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "topside", raising=False)
    bar = Image.new("RGB", (90, 60), "black")
    bar.paste("white", (0, 0, 90, 15))
    Path("in").mkdir()
    bar.save("in/upright.png")
    bar.transpose(Image.Transpose.ROTATE_180).save("in/over.png")
    (tmp_path / "in" / "broken.png").write_bytes(b"no image")
    result = call("canonicalise", "in", *MODEL, "--out", "out", "--json")
    assert result.exit_code == 1
    rows = {row["path"]: row for row in json.loads(result.stdout)}
    assert rows["in/broken.png"]["out"] is None
    assert "is no image" in rows["in/broken.png"]["error"]
    for name in ("upright", "over"):
        assert rows[f"in/{name}.png"]["out"] == f"out/{name}.png"
        copy = read(f"out/{name}.png")
        assert copy.shape == (3, 60, 90)
        assert copy[:, :10, 30:60].mean() > 0.9
        assert copy[:, 40:, 30:60].mean() < 0.1
    again = call("canonicalise", "in/upright.png", *MODEL, "--out", "out")
    assert again.exit_code == 2
    assert "exists already" in " ".join(again.stdout.split())
    assert call("canonicalise", "in/upright.png", *MODEL, "--out", "out", "--force").exit_code == 0
    assert call("canonicalise", "in/upright.png", *MODEL, "--out", "in", "--force").exit_code == 2


def test_a_ribbon_is_turned_without_a_canvas_for_all_its_reflections(monkeypatch):
    from PIL import Image as Pillow

    made, new = [], Pillow.new
    monkeypatch.setattr(Pillow, "new", lambda mode, size, *rest: made.append(size) or new(mode, size, *rest))
    turn = math.radians(45)
    pose = torch.tensor([[math.cos(turn), -math.sin(turn), 0], [math.sin(turn), math.cos(turn), 0], [0, 0, 1.0]])
    adapted = Adapted(torch.nn.Identity(), None, 8, 8, "reflection", "net")
    assert undone(new("L", (20_000, 1), 77), pose, adapted).getextrema() == (77, 77)
    assert max(width * height for width, height in made) < 1_000_000, "it was 800 million"

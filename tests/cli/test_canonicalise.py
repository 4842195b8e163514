"""Upright copies: the right turn at full resolution, metadata that stays true, and nothing overwritten."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headtilt.apps.canonicalise import targets
from headtilt.apps.orientation_tag import turned_tag, with_orientation
from headtilt.apps.upright_copy import nearest_quarter, quarter_turns, undone, write_upright
from headtilt.errors import DataError
from headtilt.geometry.groups import compose, rotation, scale
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
MODEL = ("--model", "python:topside:make", "--unfitted")


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
    done = undone(picture, turn(90 * turns))
    # A positive pose turns clockwise; numpy counts the other way round.
    assert np.array_equal(np.asarray(done), np.rot90(np.asarray(picture), -turns))


def test_what_a_search_cannot_tell_from_a_quarter_turn_is_one():
    assert [quarter_turns(turn(degrees)) for degrees in (11.5, 79, -101, 169)] == [0, 1, 3, 2]
    assert [quarter_turns(turn(degrees)) for degrees in (13, 45, 103)] == [None, None, None]
    assert quarter_turns(compose(scale(0.5).matrix(torch.tensor(0.3)), turn(90).float())) is None
    assert [nearest_quarter(turn(degrees)) for degrees in (44, 46, -46)] == [0, 1, 3]


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (256, 256)], ids=str)
@pytest.mark.parametrize("degrees", [33, -60, 135])
def test_under_other_angles_the_frame_grows_around_the_whole_picture(size, degrees):
    picture = smooth(*size)
    there = undone(picture, turn(degrees))
    cos, sin = abs(math.cos(math.radians(degrees))), abs(math.sin(math.radians(degrees)))
    wanted = size[0] * cos + size[1] * sin, size[0] * sin + size[1] * cos
    assert np.abs(np.subtract(there.size, wanted)).max() <= 1
    back = undone(there, turn(-degrees))
    left, top = ((one - other) // 2 for one, other in zip(back.size, size, strict=True))
    again = np.asarray(back.crop((left, top, left + size[0], top + size[1]))).astype(int)
    inner = (slice(4, -4), slice(4, -4))
    assert np.abs(again - np.asarray(picture).astype(int))[inner].max() <= 6, "not a corner was lost"
    assert np.asarray(there)[0, 0].tolist() == [0, 0, 0], "nothing is mirrored into the frame"


def test_what_lies_outside_is_transparent_where_pixels_can_be():
    done = undone(smooth(60, 60).convert("RGBA"), turn(45))
    assert np.asarray(done)[0, 0].tolist() == [0, 0, 0, 0]
    assert np.asarray(done)[42, 42, 3] == 255


def test_the_whole_image_moves_as_the_square_did():
    """What the model saw turned upright is the middle of the copy."""
    from headtilt.geometry.warp import warp
    from headtilt.sources.images import prepare

    picture = smooth(480, 360)
    pose = turn(-50)
    seen = warp(prepare(picture, SQUARE)[None].double(), pose[None], padding="reflection")[0]
    done = undone(picture, pose)
    left, top = (done.width - 480) // 2, (done.height - 360) // 2
    copy = prepare(done.crop((left, top, left + 480, top + 360)), SQUARE)
    inside = slice(60, 164)
    assert (seen - copy)[:, inside, inside].abs().max() < 0.02


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "CMYK", "I;16", "P", "1", "F"])
def test_every_mode_keeps_its_kind_of_pixels(mode, tmp_path):
    grey = np.tile(np.linspace(0, 255, 80).astype(np.uint8), (80, 1))
    deep = mode == "I;16"
    picture = Image.fromarray(grey.astype(np.uint16) * 257) if deep else Image.fromarray(grey).convert(mode)
    done = undone(picture, turn(20))
    assert done.size == (103, 103)
    assert done.mode == {"P": "RGB", "1": "L"}.get(mode, mode)
    middle = np.asarray(done.convert("F" if deep else "L")).astype(float)[51, 51]
    assert middle == pytest.approx(32_900 if deep else 128, rel=0.1 if mode != "1" else 1)


def test_colour_profile_resolution_and_exif_stay_true(tmp_path):
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "A maker"
    exif.get_ifd(0x8769)[0xA002], exif.get_ifd(0x8769)[0xA003] = 90, 60
    picture = smooth(90, 60)
    picture.save(tmp_path / "a.jpg", exif=exif, icc_profile=profile, dpi=(200, 200), quality=95)
    path = write_upright(tmp_path / "a.jpg", tmp_path / "out" / "a.jpg", turn(90)).path
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
    path = write_upright(tmp_path / "a.jpg", tmp_path / "b.jpg", turn(15)).path
    with Image.open(path) as copy:
        assert 0x0201 not in copy.getexif().get_ifd(1)


def test_what_is_upright_is_copied_to_the_byte(tmp_path):
    smooth(90, 60).save(tmp_path / "a.jpg", quality=60)
    path = write_upright(tmp_path / "a.jpg", tmp_path / "b.jpg", turn(0)).path
    assert path.read_bytes() == (tmp_path / "a.jpg").read_bytes()


def test_the_suffix_follows_the_format(tmp_path):
    smooth(40, 40).save(tmp_path / "really.jpg", "PNG")
    smooth(40, 40).save(tmp_path / "moving.gif")
    assert write_upright(tmp_path / "really.jpg", tmp_path / "o" / "really.jpg", turn(45)).path.name == "really.png"
    assert write_upright(tmp_path / "moving.gif", tmp_path / "o" / "moving.gif", turn(45)).path.name == "moving.png"


def test_nothing_is_overwritten_without_force_and_no_original_ever(tmp_path):
    smooth(40, 40).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"precious")
    with pytest.raises(DataError, match=r"exists already\. Add --force"):
        write_upright(tmp_path / "a.png", tmp_path / "b.png", turn(45))
    assert (tmp_path / "b.png").read_bytes() == b"precious"
    write_upright(tmp_path / "a.png", tmp_path / "b.png", turn(45), force=True)
    assert read(tmp_path / "b.png").shape == (3, 57, 57)
    with pytest.raises(DataError, match="is the original itself"):
        write_upright(tmp_path / "a.png", tmp_path / "a.png", turn(45), force=True)
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


def test_a_turned_jpeg_keeps_its_own_steps_of_quantisation(tmp_path):
    """Four quarter turns change no pixel by more than rounding, whatever the quality; encoding anew at 95 would."""
    picture = smooth(96, 64)
    picture.save(tmp_path / "0.jpg", quality=60)
    for number in range(4):
        written = write_upright(tmp_path / f"{number}.jpg", tmp_path / f"{number + 1}.jpg", turn(90))
        assert (written.how, written.degrees) == ("turned", -90)
    before, after = (np.asarray(Image.open(tmp_path / name)).astype(int) for name in ("0.jpg", "4.jpg"))
    assert np.abs(before - after).max() <= 3
    sizes = [(tmp_path / name).stat().st_size for name in ("0.jpg", "4.jpg")]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.03)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("turns", range(4))
def test_an_orientation_turned_further_shows_what_turning_the_pixels_shows(orientation, turns):
    from PIL import ImageOps

    picture = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))

    def shown(tag):
        picture.getexif()[0x0112] = tag
        return np.asarray(ImageOps.exif_transpose(picture))

    assert np.array_equal(shown(turned_tag(orientation, turns)), np.rot90(shown(orientation), -turns))


@pytest.mark.parametrize("suffix", ["jpg", "png"])
@pytest.mark.parametrize("known", ["nothing", "a maker", "an orientation"])
def test_a_tag_is_written_and_no_other_byte_of_the_picture(suffix, known, tmp_path):
    exif = Image.Exif()
    if known != "nothing":
        exif[0x010F] = "A maker"
    if known == "an orientation":
        exif[0x0112] = 8
    source = tmp_path / f"a.{suffix}"
    smooth(50, 30).save(source, exif=exif, **({"quality": 70} if suffix == "jpg" else {}))
    written = write_upright(source, tmp_path / f"b.{suffix}", turn(85), tag_only=True)
    assert (written.how, written.degrees) == ("tagged", -90)
    with Image.open(source) as before, Image.open(written.path) as after:
        assert np.array_equal(np.asarray(before), np.asarray(after))
        assert after.getexif()[0x0112] == (1 if known == "an orientation" else 6)
        assert after.getexif().get(0x010F) == (None if known == "nothing" else "A maker")
    end = -200
    assert written.path.read_bytes()[end:] == source.read_bytes()[end:]
    assert read(written.path).shape == ((3, 30, 50) if known == "an orientation" else (3, 50, 30))


def test_a_format_without_a_tag_is_turned_by_the_nearest_quarter_instead(tmp_path):
    smooth(50, 30).save(tmp_path / "a.bmp")
    written = write_upright(tmp_path / "a.bmp", tmp_path / "b.bmp", turn(70), tag_only=True)
    assert (written.how, written.degrees) == ("turned", -90)
    assert np.array_equal(np.asarray(Image.open(written.path)), np.rot90(np.asarray(smooth(50, 30)), -1))
    with pytest.raises(DataError, match="only JPEG and PNG"):
        with_orientation((tmp_path / "a.bmp").read_bytes(), 6)


@pytest.fixture
def topside(monkeypatch, call):
    """A model for pictures with a white bar on top, in the current folder."""
    Path("topside.py").write_text(TOPSIDE, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "topside", raising=False)
    bar = Image.new("RGB", (90, 60), "black")
    bar.paste("white", (0, 0, 90, 15))
    Path("in").mkdir()
    return bar


def test_without_a_fitted_head_the_command_refuses_and_says_what_to_do(call, topside):
    topside.save("in/upright.png")
    result = call("canonicalise", "in", *MODEL[:2], "--out", "out")
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert "needs a bundle with a fitted head" in said
    assert "headtilt fit FOLDER --model SPEC --out BUNDLE" in said
    assert "--unfitted" in said
    assert not Path("out").exists()


def test_a_bundle_turns_only_what_its_gate_is_sure_of_and_the_sheet_shows_it(call):
    from headtilt.apps.playground.methods import PACKAGED
    from headtilt.paper.data import load

    Path("in").mkdir()
    for number, pixels in enumerate(load("digits", "test").images[:24, 0].numpy()):
        Image.fromarray(pixels).rotate(-90 if number < 12 else 0).save(f"in/{number:02d}.png")
    result = call("canonicalise", "in", "--model", "zoo:digits:0", "--bundle", PACKAGED, "--out", "out", "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert sum(row["how"] != "copied" for row in rows[:12]) >= 9
    assert sum(row["how"] == "copied" for row in rows[12:]) >= 11
    exact = [row for row in rows[:12] if row["how"] == "turned"]
    assert sum(row["turned_back_deg"] == -90 for row in exact) >= len(exact) - 2  # a 0 or an 8 has no top
    assert all(0 < row["pose_confidence"] <= 1 for row in exact)
    for row in exact:
        if row["turned_back_deg"] == -90:
            number = int(row["path"][3:5])
            assert np.array_equal(np.asarray(Image.open(row["out"])), load("digits", "test").images[number, 0].numpy())
    assert json.loads(Path("out/headtilt-report/report.json").read_text(encoding="utf-8")) == rows
    with Image.open("out/headtilt-report/sheet-1.png") as sheet:
        assert sheet.size == (5 * 270, 5 * 174)
    said = call("canonicalise", "in", "--model", "zoo:digits:0", "--bundle", PACKAGED, "--out", "again").stdout
    assert re.search(r"turned back by −90°, angle \d+ % probable", said)
    doubting = ("--out", "sure", "--json", "--min-confidence", "1")
    result = call("canonicalise", "in", "--model", "zoo:digits:0", "--bundle", PACKAGED, *doubting)
    assert {row["how"] for row in json.loads(result.stdout)} == {"copied"}


def test_the_command_turns_pictures_upright_and_says_where_they_are(call, topside):
    topside.save("in/upright.png")
    topside.transpose(Image.Transpose.ROTATE_180).save("in/over.png")
    Path("in/broken.png").write_bytes(b"no image")
    result = call("canonicalise", "in", *MODEL, "--out", "out", "--json")
    assert result.exit_code == 1
    rows = {row["path"]: row for row in json.loads(result.stdout)}
    assert rows["in/broken.png"]["out"] is None
    assert "is not an image" in rows["in/broken.png"]["error"]
    for name in ("upright", "over"):
        assert rows[f"in/{name}.png"]["out"] == f"out/{name}.png"
        copy = read(f"out/{name}.png")
        assert copy.shape == (3, 60, 90)
        assert copy[:, :10, 30:60].mean() > 0.9
        assert copy[:, 40:, 30:60].mean() < 0.1
    assert (rows["in/over.png"]["how"], rows["in/over.png"]["pose_confidence"]) == ("turned", None)
    again = call("canonicalise", "in/upright.png", *MODEL, "--out", "out", "--no-report")
    assert again.exit_code == 2
    assert "exists already" in " ".join(again.stdout.split())
    forced = call("canonicalise", "in/upright.png", *MODEL, "--out", "out", "--force")
    assert forced.exit_code == 0
    assert "left as it came" in forced.stdout
    assert call("canonicalise", "in/upright.png", *MODEL, "--out", "in", "--force").exit_code == 2


@pytest.mark.parametrize("kind", ["gif", "webp", "png", "tif"])
def test_an_upright_animation_keeps_all_of_its_frames(tmp_path, kind):
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "green", "blue")]
    source = tmp_path / f"moving.{kind}"
    frames[0].save(source, save_all=True, append_images=frames[1:])
    copy = write_upright(source, tmp_path / "o" / source.name, turn(0)).path
    assert copy.name == source.name
    assert copy.read_bytes() == source.read_bytes()
    with Image.open(copy) as opened:
        assert opened.n_frames == 3


def test_a_ribbon_on_its_diagonal_is_refused_before_it_takes_all_memory():
    with pytest.raises(DataError, match="a picture of 20000 × 1 pixels would take 14,143 × 14,143: too many"):
        undone(Image.new("L", (20_000, 1), 77), turn(45))

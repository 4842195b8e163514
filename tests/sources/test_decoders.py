"""Decoding in processes: what a file may cost is bounded, and one that costs more never spoils another."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from headtilt.errors import DataError, OptionError
from headtilt.sources import Adapted, Square, images

Image = pytest.importorskip("PIL.Image", reason="needs the extra headtilt[data]")
pytest.importorskip("pebble", reason="needs the extra headtilt[data]")

from hardening import hostile  # noqa: E402
from headtilt.sources.decode import MOST_SCANS, TooLargeError, scans  # noqa: E402
from headtilt.sources.decoders import Decoders, KilledError, NoDecoderError, OverdueError  # noqa: E402

SQUARE = Square(16, 16)


def png(grey: int = 90) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (20, 20), grey).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def decoders():
    with Decoders(2, seconds=20, most_pixels=25_000_000) as opened:
        yield opened


def test_a_process_gives_the_very_pixels_that_reading_here_gives(decoders, tmp_path):
    noise = np.random.RandomState(0).randint(0, 256, (40, 30, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    for adapted in (
        Adapted(nn.Identity(), None, 16, 20, "zeros", "net", 3, "bicubic"),
        Adapted(nn.Identity(), None, 8, 8, "zeros", "net", 1),
    ):
        expected = images.square_of(tmp_path / "noise.png", adapted)
        assert torch.equal(decoders.square_of(tmp_path / "noise.png", adapted), expected)
        assert torch.equal(decoders.square_of((tmp_path / "noise.png").read_bytes(), adapted), expected)
        assert torch.equal(decoders.square_of(noise, adapted), expected), "what is in memory is read at once"


def test_errors_come_back_with_the_name_that_was_given(decoders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"^broken\.png is not an image"):
        decoders.submit("broken.png", SQUARE).result()
    with pytest.raises(DataError, match=r"^nosuch\.png does not exist"):
        decoders.submit("nosuch.png", SQUARE).result()


@pytest.mark.parametrize(
    ("name", "said"),
    [("many scans", "more than 100 scans"), ("long BMP", "4000000×1"), ("hollow PNG", "decompression bomb")],
)
def test_files_that_ask_for_too_much_are_refused_before_they_are_decoded(decoders, name, said):
    with pytest.raises(TooLargeError, match=said):
        decoders.submit(hostile.FILES[name](), SQUARE).result()
    with pytest.raises(TooLargeError, match=said):
        images.read(hostile.FILES[name](), most_pixels=25_000_000)


def test_scans_are_counted_in_the_first_picture_alone_and_never_in_other_data():
    noise = Image.fromarray(np.random.RandomState(0).randint(0, 256, (64, 64, 3), dtype=np.uint8))
    for progressive, expected in ((False, 1), (True, 10)):
        buffer = io.BytesIO()
        noise.save(buffer, "JPEG", progressive=progressive, comment=b"\xff\xda" * 500)
        buffer.write(b"\xff\xda" * 500)  # as telephones put a film behind a picture
        assert scans(buffer) == expected
        images.read(buffer.getvalue())
    assert scans(io.BytesIO(hostile.many_scans(MOST_SCANS + 50))) == MOST_SCANS + 1


def test_an_image_that_takes_too_long_is_killed_and_the_next_one_comes():
    with Decoders(1, seconds=0.5) as quick:
        with pytest.raises(OverdueError, match=r"took more than 0\.5 s"):
            quick.submit(hostile.slow_bmp(), SQUARE).result()
        assert quick.submit(png(), SQUARE).result().shape == (3, 16, 16)
        assert quick.outcomes == {"timed_out": 1, "done": 1}
        assert not quick.waiting


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
def test_an_image_that_takes_too_much_memory_is_killed_and_the_next_one_comes(monkeypatch):
    monkeypatch.setattr("headtilt.sources.decoders.BESIDE_PIXELS", 20_000_000)
    with Decoders(1, most_pixels=1) as small:
        small.submit(b"P5 1 1 255 x", SQUARE).result()
        small.most_pixels = 25_000_000  # what is looked at, not what memory is bounded by
        with pytest.raises(KilledError, match="too much memory"):
            small.submit(hostile.deep_png(), SQUARE).result()
        assert small.submit(png(), SQUARE).result().shape == (3, 16, 16)
        assert small.outcomes == {"killed": 1, "done": 2}


@pytest.mark.parametrize("name", ["float TIFF", "deep PNG"])
def test_deep_pixels_are_made_bytes_in_strips(name):
    """In another process, since memory once taken counts for ever."""
    program = f"""
        import resource
        from hardening import hostile
        from headtilt.sources import Square
        from headtilt.sources.images import cut
        data = hostile.FILES[{name!r}]()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = cut(data, Square(28, 28))
        print(found.max(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    value, kilobytes = map(int, done.stdout.split())
    assert value == 128
    assert kilobytes < 250_000, "it was 700,000"


@pytest.mark.skipif(sys.platform != "linux", reason="tells memory by /proc")
def test_a_process_keeps_nothing_of_a_file():
    held = []
    with Decoders(1) as decoders:
        for side in (500, 2500):
            buffer = io.BytesIO()
            Image.new("RGB", (side, side)).save(buffer, "BMP")
            decoders.submit(buffer.getvalue(), SQUARE).result()
            (pid,) = decoders._pool._pool_manager.worker_manager.workers
            held.append(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert held[1] - held[0] < 9_000_000, "the file alone has 18,750,054 bytes"


def test_close_ends_what_is_being_decoded():
    decoders = Decoders(1, seconds=60)
    decoders.submit(png(), SQUARE).result()
    stuck = decoders.submit(hostile.slow_bmp(), SQUARE)
    start = time.monotonic()
    decoders.close()
    with pytest.raises(NoDecoderError):
        stuck.result(10)
    assert time.monotonic() - start < 4
    with pytest.raises(NoDecoderError):
        decoders.submit(png(), SQUARE).result(10)


def test_when_all_processes_were_killed_from_outside_others_take_their_place(decoders):
    decoders.submit(png(), SQUARE).result()
    for pid in list(decoders._pool._pool_manager.worker_manager.workers):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    assert decoders.submit(png(), SQUARE).result(60).shape == (3, 16, 16)


def test_what_waits_for_more_than_twice_the_time_is_overdue():
    decoders = Decoders(1, seconds=0.1)
    assert not decoders.overdue()
    waiting = decoders.submit(png(), SQUARE)
    decoders.waiting[waiting] = time.monotonic() - 1
    assert decoders.overdue() or waiting.done()
    waiting.cancel()
    decoders.close()


def test_a_script_that_does_not_guard_what_it_does_is_told_so(tmp_path):
    (tmp_path / "script.py").write_text(
        "from headtilt.sources import Square\nfrom headtilt.sources.decoders import Decoders\n"
        "with Decoders(1) as decoders:\n    decoders.submit(b'P5 1 1 255 x', Square(4, 4)).result()\n"
    )
    words = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "if __name__ == '__main__'" in done.stderr


def test_options_are_checked():
    with pytest.raises(OptionError, match="workers must be"):
        Decoders(0)
    with pytest.raises(OptionError, match="seconds must be"):
        Decoders(1, seconds=0)


def test_a_process_does_not_collect_what_it_shares_with_the_others(decoders):
    decoders.submit(png(), SQUARE).result()
    assert decoders._started().schedule(gc.get_freeze_count).result() > 1000

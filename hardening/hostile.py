"""Files that cost far more than they weigh: each of these once took a service, a batch or the memory of a machine."""

from __future__ import annotations

import io
import struct
import zlib

SCAN = b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x00"  # a scan of one component's AC coefficients, without any data


def many_scans(count: int = 1805, side: int = 5000) -> bytes:
    """Return a progressive JPEG of empty scans of ten bytes, each of which walks the whole picture."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("L", (8, 8), 90).save(buffer, "JPEG", progressive=True)
    small = bytearray(buffer.getvalue())
    frame = small.index(b"\xff\xc2")
    small[frame + 5 : frame + 9] = struct.pack(">HH", side, side)
    return bytes(small[:-2]) + SCAN * count + b"\xff\xd9"


def slow_bmp(side: int = 2000, runs: int = 4_000_000) -> bytes:
    """Return a run-length encoded BMP of runs of one pixel, over which Pillow walks in Python: two bytes each."""
    return _bmp(side, side, b"\x01\x07" * runs)


def long_bmp(width: int = 4_000_000) -> bytes:
    """Return a run-length encoded BMP of one line whose jumps down by 255 lines fill memory: about a kilobyte."""
    return _bmp(width, 1, b"\x00\x02\xff\xff" * 2)


def float_tiff(side: int = 4990) -> bytes:
    """Return a deflated TIFF of floats, all of them 0.5, well below a megabyte."""
    packed = zlib.compress(struct.pack("<f", 0.5) * (side * side), 9)
    tags = [
        (256, 4, 1, side),
        (257, 4, 1, side),
        (258, 3, 1, 32),
        (259, 3, 1, 8),
        (262, 3, 1, 1),
        (273, 4, 1, 8 + 2 + 12 * 10 + 4),
        (277, 3, 1, 1),
        (278, 4, 1, side),
        (279, 4, 1, len(packed)),
        (339, 3, 1, 3),
    ]
    return _tiff(tags) + packed


def deep_png(side: int = 4990) -> bytes:
    """Return a PNG of 16-bit grey."""
    line = b"\x00" + b"\x80\x00" * side
    return _png(side, side, 16, 0, zlib.compress(line * side, 9))


def ribbon_png(width: int = 20_000) -> bytes:
    """Return a PNG one pixel high, which takes a huge canvas to be turned by half a right angle."""
    return _png(width, 1, 8, 0, zlib.compress(b"\x00" + bytes(range(256)) * (width // 256) + bytes(width % 256)))


def hollow_png(side: int = 20_000) -> bytes:
    """Return a PNG that claims more pixels than anybody allows, in a hundred bytes."""
    return _png(side, side, 8, 0, zlib.compress(bytes(1000)))


def many_frames(count: int = 60_000) -> bytes:
    """Return a TIFF of so many pictures of one pixel."""
    size = 2 + 12 * 6 + 4
    found = bytearray(b"II*\x00" + struct.pack("<I", 8))
    for number in range(count):
        start = 8 + number * size
        tags = [(256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 1, 8), (262, 3, 1, 1), (273, 4, 1, 4), (279, 4, 1, 1)]
        found += _directory(tags, start + size if number + 1 < count else 0)
    return bytes(found)


def many_comments(count: int = 200_000) -> bytes:
    """Return a GIF of one pixel with so many comments, which Pillow joins one by one: twice as many take four times."""
    pixel = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x4c\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6) + b"\x21\xfe\x01c\x00" * count + pixel + b";"


def some_comments() -> bytes:
    """Return the same with as many comments as half a megabyte holds: slow, and not yet heavy."""
    return many_comments(99_000)


def many_tags(count: int = 65_535) -> bytes:
    """Return a PNG whose EXIF has so many tags, each of which Pillow reads in Python: twelve bytes each."""
    exif = _tiff([(number, 4, 1, 8) for number in range(count)])
    return _png(8, 8, 8, 0, zlib.compress(bytes(72)), exif)


def many_tiles(count: int = 1_000_000) -> bytes:
    """Return a TIFF that claims a tile for every pixel, over which Pillow walks in Python: four bytes each."""
    start = 8 + 2 + 12 * 10 + 4
    tags = [
        (256, 4, 1, 4990),
        (257, 4, 1, 4990),
        (258, 3, 1, 8),
        (259, 3, 1, 1),
        (262, 3, 1, 1),
        (277, 3, 1, 1),
        (322, 3, 1, 1),
        (323, 3, 1, 1),
        (324, 4, count, start),
        (325, 4, count, start),
    ]
    return _tiff(tags) + bytes(4 * count)


def shared_values(count: int = 4000, size: int = 9_000_000) -> bytes:
    """Return a TIFF whose tags all claim the same megabytes, of which Pillow makes a copy for each."""
    start = 8 + 2 + 12 * (count + 9) + 4
    tags = [
        (256, 3, 1, 8),
        (257, 3, 1, 8),
        (258, 3, 1, 8),
        (259, 3, 1, 1),
        (262, 3, 1, 1),
        (273, 4, 1, start),
        (277, 3, 1, 1),
        (278, 3, 1, 8),
        (279, 4, 1, 64),
    ]
    return _tiff(tags + [(1000 + number, 2, size, start) for number in range(count)]) + b"a" * size


def filled_jpeg(size: int = 9_000_000) -> bytes:
    """Return a JPEG with so many bytes of padding between its segments, over which Pillow walks in Python."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("L", (8, 8), 90).save(buffer, "JPEG")
    return buffer.getvalue()[:2] + b"\xff" * size + buffer.getvalue()[2:]


def _bmp(width: int, height: int, runs: bytes) -> bytes:
    palette = b"\x00\x00\x00\x00" * 256
    start = 14 + 40 + len(palette)
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(runs), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", start + len(runs), 0, 0, start) + header + palette + runs


def _tiff(tags: list[tuple[int, int, int, int]]) -> bytes:
    return b"II*\x00" + struct.pack("<I", 8) + _directory(tags, 0)


def _directory(tags: list[tuple[int, int, int, int]], following: int) -> bytes:
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return struct.pack("<H", len(tags)) + entries + struct.pack("<I", following)


def _png(width: int, height: int, depth: int, colour: int, packed: bytes, exif: bytes = b"") -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    told = chunk(b"eXIf", exif) if exif else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + told + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


FILES = {
    "many scans": many_scans,
    "slow BMP": slow_bmp,
    "long BMP": long_bmp,
    "float TIFF": float_tiff,
    "deep PNG": deep_png,
    "ribbon": ribbon_png,
    "hollow PNG": hollow_png,
    "many frames": many_frames,
    "many comments": many_comments,
    "some comments": some_comments,
    "many tags": many_tags,
    "many tiles": many_tiles,
    "shared values": shared_values,
    "filled JPEG": filled_jpeg,
}

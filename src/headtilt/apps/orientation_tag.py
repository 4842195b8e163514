"""EXIF orientations written into JPEG and PNG files without touching a pixel."""

from __future__ import annotations

import io
import struct
import zlib

from headtilt.errors import DataError
from headtilt.sources.images import ORIENTATION

TAGGED = ("JPEG", "PNG")  # the formats whose orientation readers honour, and that can be written without encoding anew
# What each becomes when it is turned clockwise by a quarter: plain ones go round in a circle, and so do mirrored ones.
NEXT = {1: 6, 6: 3, 3: 8, 8: 1, 2: 7, 7: 4, 4: 5, 5: 2}
EXIF, PNG = b"Exif\0\0", b"\x89PNG\r\n\x1a\n"


def turned_tag(orientation: int, turns: int) -> int:
    """Return the orientation of an image that is shown turned clockwise by so many quarters more."""
    for _ in range(turns % 4):
        orientation = NEXT.get(orientation, NEXT[1])
    return orientation


def with_orientation(data: bytes, orientation: int) -> bytes:
    """Return the bytes of a JPEG or PNG file with another EXIF orientation; all else stays, to the byte.

    Args:
        data: The file.
        orientation: 1 to 8, as EXIF counts them.
    """
    if data.startswith(b"\xff\xd8"):
        return _in_jpeg(data, orientation)
    if data.startswith(PNG):
        return _in_png(data, orientation)
    raise DataError("only JPEG and PNG files can be given another orientation without encoding them anew.")


def block(old: bytes | None, orientation: int) -> bytes:
    """Return an EXIF block (TIFF, without its header) with that orientation, changed in place where there is one."""
    if old:
        place = _place(old)
        if place is not None:
            order = "<" if old[:2] == b"II" else ">"
            return old[:place] + struct.pack(order + "HH", orientation, 0) + old[place + 4 :]
        from PIL import Image

        known = Image.Exif()
        known.load(EXIF + old)
        known[ORIENTATION] = orientation
        return known.tobytes().removeprefix(EXIF)
    entry = struct.pack("<HHIHH", ORIENTATION, 3, 1, orientation, 0)
    return b"II*\0" + struct.pack("<IH", 8, 1) + entry + struct.pack("<I", 0)


def _place(tiff: bytes) -> int | None:
    """Return where the value of the orientation stands, or None where there is none, or nothing that can be read."""
    try:
        order = {b"II": "<", b"MM": ">"}[tiff[:2]]
        start: int = struct.unpack_from(order + "I", tiff, 4)[0]
        for number in range(struct.unpack_from(order + "H", tiff, start)[0]):
            entry = start + 2 + 12 * number
            tag, kind, count = struct.unpack_from(order + "HHI", tiff, entry)
            if (tag, kind, count) == (ORIENTATION, 3, 1) and entry + 12 <= len(tiff):
                return entry + 8
    except (KeyError, struct.error):
        pass
    return None


def _in_jpeg(data: bytes, orientation: int) -> bytes:
    start, stop, old, place = 2, 2, None, 2
    while stop + 4 <= len(data) and data[stop] == 0xFF and data[stop + 1] in range(0xE0, 0xF0):
        start, length = stop, struct.unpack_from(">H", data, stop + 2)[0]
        stop = start + 2 + length
        if data[start + 1] == 0xE0:
            place = stop  # JFIF comes first where there is one
        if data[start + 4 : start + 10] == EXIF:
            old, place = data[start + 10 : stop], start
            break
    body = EXIF + block(old, orientation)
    segment = b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body
    return data[:place] + segment + data[stop if old is not None else place :]


def _in_png(data: bytes, orientation: int) -> bytes:
    chunks = list(_chunks(data))
    old = next((body for kind, body in chunks if kind == b"eXIf"), None)
    made = (b"eXIf", block(old, orientation))
    written, out = False, io.BytesIO()
    out.write(PNG)
    for kind, body in chunks:
        if kind == b"eXIf" or (kind == b"IDAT" and not written and old is None):
            _write(out, *made)
            written = True
        if kind != b"eXIf":
            _write(out, kind, body)
    return out.getvalue()


def _chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    found, place = [], len(PNG)
    while place + 12 <= len(data):
        length = struct.unpack_from(">I", data, place)[0]
        found.append((data[place + 4 : place + 8], data[place + 8 : place + 8 + length]))
        place += 12 + length
    return found


def _write(out: io.BytesIO, kind: bytes, body: bytes) -> None:
    out.write(struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)))

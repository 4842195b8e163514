"""What a request may cost: size, pixels, time, queue; and a server that does not wait for slow clients."""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headtilt.errors import DataError, at_least, positive
from headtilt.sources import Adapted
from headtilt.sources.images import square_of

# The formats that cameras, scanners and browsers write; Pillow knows many more, some of which run other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
TYPES = ("image/", "application/octet-stream", "multipart/form-data")


@dataclass(frozen=True)
class Limits:
    """What a request may cost.

    Attributes:
        bytes: Of a body.
        pixels: Of an image.
        upload_seconds: To receive the headers, and again to receive the body.
        answer_seconds: From then to the answer.
        queue: Requests that may wait or be computed at once.
        batch: Images per search.
        wait_ms: How long the first image of a batch waits for others.
    """

    bytes: int = 10_000_000
    pixels: int = 25_000_000
    upload_seconds: float = 10.0
    answer_seconds: float = 30.0
    queue: int = 256
    batch: int = 32
    wait_ms: int = 5

    def __post_init__(self) -> None:
        for name in ("bytes", "pixels", "queue", "batch", "wait_ms"):
            at_least(name, getattr(self, name), 1)
        for name in ("upload_seconds", "answer_seconds"):
            positive(name, getattr(self, name))


class RefusedError(Exception):
    """A request is refused.

    Args:
        status: The HTTP status.
        reason: Why, in a sentence that names nothing of this machine.
        headers: Of the reply.
    """

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers


async def upload(request: Any, limits: Limits) -> bytes:
    """Return the image file that a request carries, as its body or as the part of a form."""
    kind = request.headers.get("content-type", "application/octet-stream").strip().lower()
    if not kind.startswith(TYPES):
        raise RefusedError(415, "send an image as the body, or as a file in multipart/form-data.")
    stated = request.headers.get("content-length", "0")
    if stated.isdecimal() and int(stated) > limits.bytes:
        raise _too_large(limits)
    try:
        body = await asyncio.wait_for(_body(request, limits), limits.upload_seconds)
    except (TimeoutError, asyncio.TimeoutError) as error:  # two classes before Python 3.11
        raise RefusedError(408, "the body took too long to arrive.", {"Connection": "close"}) from error
    return await _part(request, body) if kind.startswith("multipart/form-data") else body


async def _body(request: Any, limits: Limits) -> bytes:
    """Return the body, read no further than allowed: chunked uploads do not state their length."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limits.bytes:
            raise _too_large(limits)
        chunks.append(chunk)
    return b"".join(chunks)


async def _part(request: Any, body: bytes) -> bytes:
    from starlette.datastructures import UploadFile
    from starlette.formparsers import MultiPartException, MultiPartParser

    async def again() -> Any:
        yield body
        yield b""

    parser = MultiPartParser(request.headers, again(), max_files=1, max_fields=8)
    try:
        form = await parser.parse()
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise RefusedError(422, "the form must hold an image in the field 'file'.")
        content: bytes = await file.read()
        return content
    except (MultiPartException, KeyError, ValueError, AssertionError) as error:
        raise RefusedError(422, "the form could not be read.") from error
    finally:
        # Of forms that break off or break rules the parser forgets files; all that it opened are here.
        for opened in getattr(parser, "_files_to_close_on_error", ()):
            opened.close()


def _too_large(limits: Limits) -> RefusedError:
    return RefusedError(413, f"the body may have at most {limits.bytes:,} bytes.", {"Connection": "close"})


def decoded(content: bytes, adapted: Adapted, limits: Limits) -> Tensor:
    """Return the square that the model sees of an uploaded file."""
    from PIL import Image

    if not content:
        raise RefusedError(422, "the body is empty.")
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RefusedError(413, f"an image may have at most {limits.pixels:,} pixels.") from error
    except Exception as error:  # Pillow's plugins raise many kinds for broken files
        raise RefusedError(422, "the file is not an image of a known format.") from error
    if image.width * image.height > limits.pixels:
        raise RefusedError(413, f"an image may have at most {limits.pixels:,} pixels.")
    try:
        return square_of(image, adapted, most_pixels=limits.pixels)
    except DataError as error:
        raise RefusedError(422, "the image is broken or cannot be resized.") from error


def impatient(seconds: float) -> Any:
    """Return uvicorn's HTTP protocol with a limit on the time between a connection's first byte and a whole header.

    uvicorn itself limits idle connections only: a client that sends a byte a minute would be waited for for ever.

    Args:
        seconds: To open a connection and send the headers of a request.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._calm()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if self.conn.their_state is not h11.IDLE:
                self._calm()
            elif self.timer is None:
                self.timer = self.loop.call_later(seconds, self.transport.close)

        def _calm(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.transport.is_closing() and self.conn.trailing_data[0]:
                self._watch()  # part of a next request came already

    return Impatient

"""What a request may cost: size, pixels, time, queue; and a server that does not wait for slow clients."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from headtilt.errors import at_least, positive
from headtilt.sources.decoders import trim_memory

# The formats that cameras, scanners and browsers write; Pillow knows many more, some of which run other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
LARGE, TIDY_SECONDS = 100_000, 3.0  # bytes of a body that leaves memory in shreds, and when that is tidied up
TINY, MOST_TINY = 64, 1000  # bytes of a chunk, and how many more below than above that a body may have on balance
TYPES = ("image/", "application/octet-stream", "multipart/form-data")


@dataclass(frozen=True)
class Limits:
    """What a request may cost.

    Attributes:
        bytes: Of a body.
        pixels: Of an image.
        upload_seconds: To receive the headers, and again to receive the body.
        decode_seconds: To decode an image.
        answer_seconds: From the whole body to the answer.
        queue: Requests that may wait or be computed at once; those whose body is still coming do not count.
        uploads: Bodies that may come at once.
        held_bytes: Of all bodies together that are coming or not yet decoded; of more, the largest that is still
            coming has to give way.
        batch: Images per search.
        wait_ms: How long the first image of a batch waits for others.
    """

    bytes: int = 10_000_000
    pixels: int = 25_000_000
    upload_seconds: float = 10.0
    decode_seconds: float = 5.0
    answer_seconds: float = 30.0
    queue: int = 256
    uploads: int = 512
    held_bytes: int = 100_000_000
    batch: int = 32
    wait_ms: int = 5

    def __post_init__(self) -> None:
        for name in ("bytes", "pixels", "queue", "uploads", "held_bytes", "batch", "wait_ms"):
            at_least(name, getattr(self, name), 1)
        for name in ("upload_seconds", "decode_seconds", "answer_seconds"):
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


class Body:
    """A body that has come, which counts until it is let go.

    Args:
        uploads: Where it counts.
        content: The image file.
        size: Bytes that it counts for.
    """

    def __init__(self, uploads: Uploads, content: bytes, size: int) -> None:
        self.uploads, self.content, self.size = uploads, content, size

    def let_go(self) -> None:
        """Forget the bytes; twice does no harm."""
        self.uploads.free(self.size)
        self.content, self.size = b"", 0


class Uploads:
    """The bodies that are coming, bounded in number, time and bytes: a slow client costs what it has sent, no more.

    Args:
        limits: What they may cost.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits, self.held = limits, 0
        self.coming: dict[asyncio.Task[Any], int] = {}
        self.gave_way: set[asyncio.Task[Any]] = set()
        self.tidying = False

    async def receive(self, request: Any) -> Body:
        """Return the image file that a request carries, as its body or as the part of a form."""
        from starlette.requests import ClientDisconnect

        limits = self.limits
        kind = request.headers.get("content-type", "application/octet-stream").strip().lower()
        if not kind.startswith(TYPES):
            raise RefusedError(415, "send an image as the body, or as a file in multipart/form-data.")
        stated = request.headers.get("content-length", "0")
        if stated.isdecimal() and int(stated) > limits.bytes:
            raise _too_large(limits)
        if len(self.coming) >= limits.uploads:
            raise _too_many()
        reading = asyncio.ensure_future(self._read(request))
        self.coming[reading] = 0
        try:
            body = await asyncio.wait_for(reading, limits.upload_seconds)
        except (TimeoutError, asyncio.TimeoutError) as error:  # two classes before Python 3.11
            raise RefusedError(408, "the body took too long to arrive.", {"Connection": "close"}) from error
        except ClientDisconnect as error:
            raise RefusedError(499, "the client hung up.") from error
        except asyncio.CancelledError as error:
            if reading not in self.gave_way:
                raise
            raise _too_many() from error
        finally:
            self.coming.pop(reading, None)
            self.gave_way.discard(reading)
        if kind.startswith("multipart/form-data"):
            try:
                body.content = await _part(request, body.content)
            except BaseException:
                body.let_go()
                raise
        return body

    def free(self, size: int) -> None:
        """Count bytes no longer; after large bodies what the allocator kept of them goes back to the system."""
        self.held -= size
        if size > LARGE and not self.tidying:
            self.tidying = True
            asyncio.get_running_loop().call_later(TIDY_SECONDS, self._trim)

    def _trim(self) -> None:
        self.tidying = False
        trim_memory()

    async def _read(self, request: Any) -> Body:
        """Return the body, read no further than allowed: chunked uploads do not state their length."""
        mine: Any = asyncio.current_task()
        content = bytearray()  # one piece: many small ones would leave memory in shreds
        try:
            async for chunk in request.stream():
                if self.coming[mine] + len(chunk) > self.limits.bytes:
                    raise _too_large(self.limits)
                content += chunk
                self._count_bytes(mine, len(chunk))
            return Body(self, bytes(content), self.coming[mine])
        except BaseException:
            self.free(self.coming[mine])
            self.coming[mine] = 0
            content.clear()  # the error's traceback holds on to it
            raise

    def _count_bytes(self, mine: asyncio.Task[Any], size: int) -> None:
        """Count some more bytes; where they are too many, the largest body that is still coming gives way."""
        self.coming[mine] += size
        self.held += size
        while self.held > self.limits.held_bytes:
            largest = max(self.coming, key=self.coming.__getitem__)
            if largest is mine:
                raise _too_many()
            self.free(self.coming[largest])
            self.coming[largest] = 0
            self.gave_way.add(largest)
            largest.cancel()


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


def _too_many() -> RefusedError:
    return RefusedError(503, "too much is being uploaded.", {"Retry-After": "1", "Connection": "close"})


def _too_large(limits: Limits) -> RefusedError:
    return RefusedError(413, f"the body may have at most {limits.bytes:,} bytes.", {"Connection": "close"})


def impatient(seconds: float) -> Any:
    """Return uvicorn's HTTP protocol with limits on the time for a header, and for a body that comes after its answer.

    uvicorn itself limits idle connections only: a client that sends a byte a minute would be waited for for ever. Nor
    does it limit chunks: a megabyte of one byte each would take all others' time for seconds.

    Args:
        seconds: To open a connection and send the headers of a request; to end a request that was answered.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Frugal(h11.Connection):
        """Refuses bodies of many tiny chunks, as Go's server does."""

        excess = 0

        def next_event(self) -> Any:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self.excess = 0
            elif isinstance(event, h11.Data) and event.chunk_start:
                self.excess = max(0, self.excess + TINY - len(event.data))
                if self.excess > TINY * MOST_TINY:
                    raise h11.RemoteProtocolError("too many tiny chunks")
            return event

    class Impatient(H11Protocol):
        timer: asyncio.TimerHandle | None = None

        def __init__(self, config: Any, *more: Any, **named: Any) -> None:
            super().__init__(config, *more, **named)
            self.conn = Frugal(h11.SERVER, config.h11_max_incomplete_event_size)

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:  # nonsense behind an answer, to which there can be no other
                self.transport.close()

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _watch(self) -> None:
            state = self.conn.their_state
            answered = state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete
            if state is not h11.IDLE and not answered:
                self._stop_timer()
            elif self.timer is None:
                self.timer = self.loop.call_later(seconds, self.transport.close)

        def _stop_timer(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

        def on_response_complete(self) -> None:
            super().on_response_complete()
            unread = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]
            if not self.transport.is_closing() and unread:
                self._watch()  # the rest of this request, or part of a next one that came already

    return Impatient

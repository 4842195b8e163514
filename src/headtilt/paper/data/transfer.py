"""One file over HTTP, taken up again where an earlier attempt stopped."""

from __future__ import annotations

import gzip
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from headtilt.errors import DataError

CHUNK_BYTES = 1 << 18  # read at a time
ATTEMPTS = 10  # at most, and only as long as each brings something


@dataclass(frozen=True)
class Downloader:
    """A downloader for pooch, which has none that resumes.

    Attributes:
        part: Where the bytes gather; it stays when the transfer breaks, and the next one goes on from its end.
        unpack: Whether the file is gzipped and leaves unpacked, so that pooch's checksum is that of the content.
        progress: Called with the bytes so far and in all (None where the server does not say).
        timeout: Seconds without an answer after which the transfer counts as broken.
    """

    part: Path
    unpack: bool = False
    progress: Callable[[int, int | None], None] | None = None
    timeout: float = 30.0

    def __call__(self, url: str, output_file: str, pooch: object = None) -> None:
        """Fetch the URL into `output_file`; pooch passes itself as the last argument, which is of no use here."""
        del pooch
        self._fetch(url)
        if self.unpack:
            self._gunzip(url, Path(output_file))
        else:
            shutil.move(self.part, output_file)

    def _fetch(self, url: str) -> None:
        self.part.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(ATTEMPTS):
            before = self._bytes_so_far()
            try:
                self._resume(url)
                return
            except HTTPError as error:
                raise DataError(f"{url} answered {error.code} {error.reason}.") from error
            except (OSError, HTTPException) as error:
                # A connection that broke is tried again as long as it brought something.
                if self._bytes_so_far() <= before or attempt == ATTEMPTS - 1:
                    reason = error.reason if isinstance(error, URLError) else error
                    kept = f" {self._bytes_so_far()} bytes are kept: the next attempt goes on from there." * (
                        self._bytes_so_far() > 0
                    )
                    raise DataError(f"{url} could not be fetched ({reason}).{kept}") from error

    def _resume(self, url: str) -> None:
        have = self._bytes_so_far()
        headers = {"User-Agent": "headtilt"} | ({"Range": f"bytes={have}-"} if have else {})
        try:
            response: HTTPResponse = urlopen(Request(url, headers=headers), timeout=self.timeout)
        except HTTPError as error:
            error.close()
            if not have or error.code != 416:
                raise
            # Nothing lies beyond our bytes: either they are all of the file, or they are not of this file.
            if error.headers.get("Content-Range") == f"bytes */{have}":
                return
            self.part.unlink()
            self._resume(url)
            return
        with response:
            covers = response.headers.get("Content-Range", "")
            if response.status == 206 and not covers.startswith(f"bytes {have}-"):
                self.part.unlink(missing_ok=True)
                raise OSError(f"the server answered with other bytes than asked for: {covers!r}")
            start = have if response.status == 206 else 0
            length = response.headers.get("Content-Length", "")
            total = start + int(length) if length.isdigit() else None
            self._receive(response, start, total)

    def _receive(self, response: HTTPResponse, start: int, total: int | None) -> None:
        done = start
        with self.part.open("ab" if start else "wb") as file:
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                if self.progress is not None:
                    self.progress(done, total)
        # read(n) ends early without a word when the connection breaks.
        if total is not None and done < total:
            raise ConnectionError(f"the connection broke after {done} of {total} bytes")

    def _gunzip(self, url: str, target: Path) -> None:
        try:
            with gzip.open(self.part) as packed, target.open("wb") as file:
                shutil.copyfileobj(packed, file)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{url} did not send a whole gzip file ({error}).") from error
        finally:
            # Good or bad, going on from its end is of no more use.
            self.part.unlink()

    def _bytes_so_far(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

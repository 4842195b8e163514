"""Writers of the real file formats, a local web server, and a wall around the network."""

from __future__ import annotations

import gzip
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import pytest
from PIL import Image

from headtilt.paper.data import transfer

REAL = os.environ.get("HEADTILT_DATA")


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees the caller's data, fills the caller's cache or leaves this machine."""
    monkeypatch.delenv("HEADTILT_DATA", raising=False)
    monkeypatch.setenv("HEADTILT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    real = transfer.urlopen

    def local_only(request: Any, **options: Any) -> Any:
        if urlparse(request.full_url).hostname != "127.0.0.1":
            raise OSError("tests do not use the network")
        return real(request, **options)

    monkeypatch.setattr(transfer, "urlopen", local_only)


@pytest.fixture
def real_data() -> Path:
    if REAL is None:
        pytest.skip("HEADTILT_DATA is not set: the real data sets are not here")
    return Path(REAL.split(os.pathsep)[0])


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def write_idx() -> Callable[..., tuple[Path, Path]]:
    """Write `count` images (image i is filled with i) and labels i % 10; return both paths."""

    def write(folder: Path, count: int = 40, part: str = "train", *, packed: bool = True) -> tuple[Path, Path]:
        folder.mkdir(parents=True, exist_ok=True)
        images = np.broadcast_to(np.arange(count)[:, None, None], (count, 28, 28))
        paths = []
        for name, array in (
            (f"{part}-images-idx3-ubyte", images),
            (f"{part}-labels-idx1-ubyte", np.arange(count) % 10),
        ):
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(idx_bytes(array)) if packed else idx_bytes(array))
            paths.append(path)
        return paths[0], paths[1]

    return write


@pytest.fixture
def write_image() -> Callable[..., Path]:
    """Write one image file, of one colour or from an array, and return its path."""

    def write(path: Path, content: Any = (10, 20, 30), size: tuple[int, int] = (8, 8), **options: Any) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(content) if isinstance(content, np.ndarray) else Image.new("RGB", size, content)
        image.save(path, **options)
        return path

    return write


@dataclass
class Site:
    """What the local server answers with, and what it was asked."""

    content: bytes = b""
    ranges: bool = True
    status: int = 200
    #: After how many bytes the first, second, … answer breaks off.
    cuts: list[int] = field(default_factory=list)
    #: Added to where an answer to a range says that it starts.
    shift: int = 0
    asked: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def site() -> Iterator[Site]:
    state = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers["Range"]
            state.asked.append(wanted)
            if state.status != 200:
                self.send_error(state.status)
                return
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and state.ranges else 0
            if start and start >= len(state.content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(state.content)}")
                self.end_headers()
                return
            body = state.content[start:]
            self.send_response(206 if start else 200)
            if start:
                last = len(state.content) - 1
                self.send_header("Content-Range", f"bytes {start + state.shift}-{last}/{len(state.content)}")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: state.cuts.pop(0)] if state.cuts else body)
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{server.server_address[1]}/file"
        yield state
        server.shutdown()
        thread.join()

"""Every door through which foreign bytes come in, as functions of bytes that raise only where a promise is broken.

The promise is the same everywhere: a `HeadtiltError` whose message says what was wrong, or a documented HTTP status, or
an exit code; never anything else. The fuzzer, the property tests and the replay of the corpus all call these.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from headtilt.errors import DataError, HeadtiltError

CUT = b"\n--cut--\n"  # where one input stands for several files
STATUSES = {200, 404, 405, 408, 413, 415, 422}
MOST_PIXELS = 400_000
ROUTES = ("/classify", "/explain", "/explain?format=png", "/healthz", "/readyz", "/metrics", "/openapi.json", "/?%ff")


@cache
def desk() -> Path:
    """Return a folder for the files of one process, in memory where the machine has such a place."""
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="headtilt-fuzz-", dir=memory if memory.is_dir() else None))
    import atexit

    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


def parts(data: bytes, count: int) -> list[bytes]:
    """Return as many pieces, empty ones where there are fewer."""
    found = data.split(CUT, count - 1)
    return found + [b""] * (count - len(found))


def put(name: str, content: bytes) -> Path:
    """Return a file with that content."""
    path = desk() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@contextlib.contextmanager
def only_ours() -> Any:
    """Let errors of headtilt pass, provided that they say something in one line or more."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except HeadtiltError as error:
        if len(str(error)) < 12:
            raise AssertionError(f"an error that says nothing: {error!r}") from error


def idx(data: bytes) -> None:
    """An images' file and a labels' file."""
    from headtilt.paper.data import idx as reader

    images, labels = parts(data, 2)
    with only_ours():
        reader.read(put("images", images), put("labels", labels), kind="fashion-mnist" if len(data) % 2 else "mnist")
    with only_ours():
        reader.read_array(put("any", data), 1 + len(data) % 4)


def gtsrb(data: bytes) -> None:
    """A table, an image and labels.npz, in all three layouts."""
    from headtilt.paper.data import gtsrb as reader

    table, image, arrays = parts(data, 3)
    put("train/00000/GT-00000.csv", table)
    put("train/00000/00000_00000.ppm", image)
    put("test/GT-final_test.csv", table)
    put("test/00000.ppm", image)
    put("mosaic/labels.npz", arrays)
    put("mosaic/train.jpg", image)
    for place, split in (("train", "train"), ("test", "test"), ("mosaic", "train")):
        with only_ours():
            reader.read(desk() / place, split, size=32)  # type: ignore[arg-type]


def images(data: bytes) -> None:
    """A file that calls itself an image."""
    from headtilt.sources.decode import decode
    from headtilt.sources.images import read, square_of

    with only_ours():
        found = read(data, most_pixels=MOST_PIXELS)
        assert found.ndim == 3
        assert found.shape[0] == 3
        assert 0 <= float(found.min()) <= float(found.max()) <= 1
    with only_ours():
        assert square_of(data, digits()[1], most_pixels=MOST_PIXELS).shape == (1, 28, 28)
    with only_ours():
        try:
            read(data, most_pixels=MOST_PIXELS)
        except DataError:
            return  # a bomb might take the data readers long: they decode what somebody unpacked, whatever its size
        decode([put("one.png", data)], size=8)


def bundle(data: bytes) -> None:
    """The two files of a bundle; the digest is set right where it can be, so that what lies behind it is reached."""
    from headtilt.its import ITS

    config, tensors = parts(data, 2)
    with contextlib.suppress(ValueError, RecursionError):
        said = json.loads(config)
        if isinstance(said, dict) and "sha256" in said:
            said["sha256"] = hashlib.sha256(tensors).hexdigest()
            config = json.dumps(said).encode()
    put("bundle/headtilt.json", config)
    put("bundle/headtilt.safetensors", tensors)
    with only_ours():
        robust = ITS.load(desk() / "bundle", tiny())
        # A bundle may ask for a search of any length, which is its owner's to wait for.
        quick = robust.plan.budget * len(robust.plan.levels) <= 4000 and robust.plan.hypotheses <= 100
        if quick and robust.predictor.passes <= 4:
            import torch

            robust.search(torch.linspace(0, 1, 64).reshape(1, 1, 8, 8))


def weights(data: bytes) -> None:
    """Safetensors: weights of the zoo, and a checkpoint of a training run."""
    import torch

    from headtilt.io.weights import load_tensors
    from headtilt.paper import zoo
    from headtilt.paper.train import _resume

    path = put("some.safetensors", data)
    with only_ours():
        load_tensors(path)
    network = zoo.empty("digits")
    with only_ours():
        assert _resume(path, network, torch.optim.AdamW(network.parameters())) >= 0
    os.environ["HEADTILT_CACHE"] = str(desk() / "cache")
    put("cache/zoo/some.safetensors", data)
    with only_ours():
        zoo.kept("some", network, lambda: network, "cpu")


def sidecar(data: bytes) -> None:
    """The JSON beside an ONNX file, and the words inside of it."""
    from headtilt.sources import sidecar as reader

    beside, metadata = parts(data, 2)
    path = put("net.json", beside).with_suffix(".onnx")
    words = metadata.decode("utf-8", "replace")
    with only_ours():
        about = reader.beside(path)
        reader.adapted(_bare(), about, size=reader.side(None, about, path), channels=about.channels, name="net")
    for key in ("headtilt", "labels"):
        put("net.json", b"{}")
        with only_ours():
            reader.beside(path, {key: words})


def http(data: bytes) -> None:
    """A request: a line of method and route, a content type, a content length, and a body."""
    first, kind, length, body = parts(data, 4)
    number = first[0] if first else 0
    path, _, query = ROUTES[number % len(ROUTES)].partition("?")
    headers = [(b"host", b"localhost")]
    headers += [(b"content-type", kind)] if kind else []
    headers += [(b"content-length", length)] if length else []
    method = "GET" if number >= 128 else "POST"
    status, answer = service()(method, path, query.encode(), headers, body)
    assert status in STATUSES, (status, answer[:200])
    if status >= 400 and path in ("/classify", "/explain"):
        assert "error" in json.loads(answer)
        assert str(desk()).encode() not in answer


def command_line(data: bytes) -> None:
    """Words of a command line; what would take long or leave this folder is stood in for."""
    words = [word.decode("utf-8", "surrogateescape") for word in data.split(b"\n")][:24]
    if any(_leaves(word) for word in words):
        return
    result = shell()(words)
    error = result.exception
    assert error is None or isinstance(error, SystemExit), f"{words}: {error!r}"
    assert result.exit_code in (0, 1, 2, 130), result.exit_code
    assert "Traceback" not in result.output


def _leaves(word: str) -> bool:
    value = word.rpartition("=")[2]
    own = value.startswith("python:") and value != "python:net:make"
    return own or value.startswith(("/", "~", "-/", "-~")) or ".." in value or "*" in value or "--debug" in word


@cache
def digits() -> Any:
    """Return a quick search around the packaged digits network, and that network."""
    from dataclasses import replace

    from headtilt.its import ITS
    from headtilt.search.tree import Tree
    from headtilt.sources import registry as door

    adapted = replace(door.load("zoo:digits:0"), size=28, resize=28)
    return ITS(adapted.model, search=Tree(samples=5)), adapted


@cache
def tiny() -> Any:
    """Return a network of three classes on 8×8 pixels."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden = torch.nn.Linear(64, 4)
        return torch.nn.Sequential(torch.nn.Flatten(), hidden, torch.nn.ReLU(), torch.nn.Linear(4, 3)).eval()


def _bare() -> Any:
    from torch import nn

    return nn.Identity()


@cache
def service() -> Callable[[str, str, bytes, list[tuple[bytes, bytes]], bytes], tuple[int, bytes]]:
    """Return what asks the service in this very process."""
    from headtilt.apps.serve.limits import Limits
    from headtilt.apps.serve.server import make_app

    app = make_app(*digits(), Limits(bytes=200_000, pixels=MOST_PIXELS, wait_ms=1))
    loop = asyncio.new_event_loop()
    opened = app.state.service.open()
    loop.run_until_complete(opened.__aenter__())
    import atexit

    atexit.register(lambda: (loop.run_until_complete(opened.__aexit__(None, None, None)), loop.close()))

    async def ask(method: str, path: str, query: bytes, headers: Any, body: bytes) -> tuple[int, bytes]:
        half = len(body) // 2
        incoming = [
            {"type": "http.request", "body": body[:half], "more_body": True},
            {"type": "http.request", "body": body[half:], "more_body": False},
        ]
        sent: list[dict[str, Any]] = []

        async def receive() -> Any:
            return incoming.pop(0) if incoming else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await app(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)

    return lambda *request: loop.run_until_complete(ask(*request))


NET = """
import torch

def make():
    model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 3))
    torch.nn.init.ones_(model[2].weight)
    return model
"""


@cache
def shell() -> Callable[[list[str]], Any]:
    """Return what runs the command line in a folder with one image and one model; the long work is stood in for."""
    from PIL import Image
    from typer.testing import CliRunner

    from headtilt.apps import fitting
    from headtilt.apps.playground import app as playground
    from headtilt.apps.serve import server as serve
    from headtilt.cli import app
    from headtilt.paper import zoo
    from headtilt.paper.experiments import demo, evaluate, training
    from headtilt.paper.experiments.reproduce import study

    def instead(*_: Any, **__: Any) -> Any:
        raise DataError("this would take long, and is stood in for here.")

    for place, name in (
        (demo, "run"),
        (evaluate.Evaluation, "run"),
        (training.Training, "run"),
        (serve, "serve"),
        (playground, "make_page"),
        (fitting.Fitting, "run"),
        (study, "reproduce"),
        (zoo, "fresh"),
    ):
        setattr(place, name, instead)
    os.environ.update(HF_HUB_OFFLINE="1", HEADTILT_CACHE=str(desk() / "cache"), COLUMNS="80")
    os.environ.pop("HEADTILT_DATA", None)

    def call(words: list[str]) -> Any:
        folder = desk() / "shell"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "net.py").write_text(NET)
        Image.new("RGB", (8, 8), (200, 30, 30)).save(folder / "a.png")
        before = os.getcwd()
        os.chdir(folder)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                return CliRunner().invoke(app, words)
        finally:
            os.chdir(before)

    return call


TARGETS: dict[str, Callable[[bytes], None]] = {
    "idx": idx,
    "gtsrb": gtsrb,
    "images": images,
    "bundle": bundle,
    "weights": weights,
    "sidecar": sidecar,
    "http": http,
    "command_line": command_line,
}

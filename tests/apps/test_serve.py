"""The service: what it answers, what it refuses, and that one request never spoils another."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headtilt.errors import ModelError, OptionError
from headtilt.geometry.groups import rotation
from headtilt.sources import Adapted
from tests.toys import its

fastapi = pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("batched", reason="the extra serve is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")
Image = pytest.importorskip("PIL.Image")

from fastapi.testclient import TestClient  # noqa: E402

from hardening import hostile  # noqa: E402
from headtilt.apps.serve.limits import Limits, RefusedError, Uploads  # noqa: E402
from headtilt.apps.serve.server import LOOPBACK, make_app  # noqa: E402

PNG = {"Content-Type": "image/png"}


class Brightness(torch.nn.Module):
    """Two classes, dark and light; an image of one certain grey makes it raise, with a path in the message."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.sizes = []
        self.pause = 0.0

    def forward(self, images):
        self.sizes.append(len(images))
        time.sleep(self.pause)
        light = images.mean((1, 2, 3))
        if bool((light - 100 / 255).abs().lt(1e-3).any()):
            raise RuntimeError("/home/somebody/weights.bin is cursed")
        return torch.stack([0.5 - light, light - 0.5], 1) * 20 * self.weight


def png(grey, size=(8, 8)):
    buffer = io.BytesIO()
    Image.new("L", size, grey).save(buffer, "PNG")
    return buffer.getvalue()


def made(limits=None, hosts=LOOPBACK, **options):
    model = Brightness().eval()
    adapted = Adapted(model, ("dark", "light"), 8, 8, "border", "brightness")
    robust = its(model, [rotation()], samples=4, padding="border", **options)
    return make_app(robust, adapted, limits, hosts=hosts), model


@pytest.fixture(scope="module")
def client():
    app, _ = made(Limits(bytes=20_000, pixels=10_000))
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as opened:
        yield opened


def test_an_image_as_the_body_and_in_a_form_gives_the_same_answer(client):
    raw = client.post("/classify", content=png(250), headers=PNG)
    form = client.post("/classify", files={"file": ("x.png", png(250), "image/png")})
    assert raw.status_code == form.status_code == 200
    assert raw.json() == form.json()
    assert raw.json()["label"] == "light"
    assert set(raw.json()) == {"label", "score", "rotation_deg", "scale", "shear", "gated", "views"}
    assert client.post("/classify", content=png(3), headers=PNG).json()["label"] == "dark"


def test_explain_tells_the_search_as_json_and_as_a_picture(client):
    told = client.post("/explain", content=png(250), headers=PNG).json()
    assert told["bare"]["label"] == told["answer"]["label"] == "light"
    (level,) = told["levels"]
    assert level["groups"] == ["rotation"]
    assert len(level["parameters"]) == len(level["confidence"]) == len(level["labels"]) == 4
    assert "light" in told["words"]
    drawn = client.post("/explain?format=png", content=png(250), headers=PNG)
    assert drawn.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(drawn.content)).width > 300


def test_a_lattice_search_is_explained_too():
    app, _ = made(search="joint", budget=8)
    with TestClient(app, "http://localhost") as opened:
        told = opened.post("/explain", content=png(250), headers=PNG).json()
        assert len(told["levels"][0]["parameters"]) >= 8
        assert opened.post("/explain?format=png", content=png(250), headers=PNG).content[:4] == b"\x89PNG"


def test_health_readiness_and_metrics_answer(client):
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready", "model": "brightness", "labels": ["dark", "light"]}
    client.post("/classify", content=png(250), headers=PNG)
    text = client.get("/metrics").text
    assert 'headtilt_requests_total{route="/classify",status="200"}' in text
    assert "headtilt_batch_images_bucket" in text
    assert "headtilt_views_total" in text


def bomb(side=20_000):
    """A PNG that says it has 400 megapixels, in a hundred bytes."""

    def chunk(kind, content):
        whole = kind + content
        return len(content).to_bytes(4, "big") + whole + zlib.crc32(whole).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))


REFUSED = {
    "no body": (b"", PNG, 422),
    "text": (b"hello", {"Content-Type": "text/plain"}, 415),
    "JSON": (b"{}", {"Content-Type": "application/json"}, 415),
    "garbage": (b"\x00" * 500, PNG, 422),
    "half a PNG": (png(9, (60, 60))[:60], PNG, 422),
    "too many bytes": (b"\x00" * 20_001, PNG, 413),
    "too many pixels": (png(9, (101, 100)), PNG, 413),
    "a decompression bomb": (bomb(), PNG, 413),
    "a PostScript program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", PNG, 422),
    "a form without a boundary": (b"x", {"Content-Type": "multipart/form-data"}, 422),
    "a torn form": (b"--b\r\nContent-Disp", {"Content-Type": "multipart/form-data; boundary=b"}, 422),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("route", ["/classify", "/explain"])
def test_what_is_no_image_within_the_limits_is_refused(client, route, name):
    content, headers, status = REFUSED[name]
    reply = client.post(route, content=content, headers=headers)
    assert reply.status_code == status, reply.text
    assert list(reply.json()) == ["error"]


def test_a_form_without_the_field_is_refused(client):
    reply = client.post("/classify", files={"picture": ("x.png", png(1), "image/png")})
    assert (reply.status_code, "'file'" in reply.json()["error"]) == (422, True)
    assert client.post("/classify", files=[("file", png(1)), ("file", png(1))]).status_code == 422
    assert client.post("/classify", data={"file": "text"}, files={"x": b"1"}).status_code == 422


def test_a_body_that_does_not_state_its_length_is_cut_off_at_the_limit(client):
    sent = []

    def endless():
        for _ in range(1000):
            sent.append(1)
            yield b"\x00" * 1000

    reply = client.post("/classify", content=endless(), headers=PNG)
    assert reply.status_code == 413


def test_a_model_that_raises_is_an_internal_error_that_tells_nothing(client):
    reply = client.post("/classify", content=png(100), headers=PNG)
    assert (reply.status_code, reply.json()) == (500, {"error": "internal error."})
    assert client.post("/classify", content=png(250), headers=PNG).status_code == 200


def test_topk_is_honoured_and_bounded(client):
    two = client.post("/classify?topk=2", content=png(250), headers=PNG).json()
    assert [guess["label"] for guess in two["top"]] == ["light", "dark"]
    assert two["top"][0]["score"] == pytest.approx(two["score"])
    assert len(client.post("/classify?topk=5", content=png(250), headers=PNG).json()["top"]) == 2, "there are but two"
    for wrong in ("0", "21", "many"):
        assert client.post(f"/classify?topk={wrong}", content=png(250), headers=PNG).status_code == 422


def test_the_first_page_says_where_to_look_and_its_documentation_loads_nothing_from_elsewhere(client):
    found = client.get("/").json()
    assert (found["model"], found["docs"]) == ("brightness", "/docs")
    page = client.get(found["docs"])
    assert page.headers["content-type"].startswith("text/html")
    for words in ("<code>/classify</code>", "topk", "How many of the best labels", "curl --data-binary", "/explain"):
        assert words in page.text
    assert "<script" not in page.text
    here = page.request.url
    assert "http" not in page.text.replace(f"{here.scheme}://{here.netloc.decode()}", "")
    assert client.get(found["openapi"]).json()["paths"].keys() >= {"/classify", "/explain"}


def test_unknown_routes_and_methods_say_so_in_the_same_form(client):
    assert client.get("/nowhere").json() == {"error": "Not Found"}
    assert (client.get("/classify").status_code, client.get("/redoc").status_code) == (405, 404)


async def gathered(app, bodies):
    import httpx

    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as sender:
            return await asyncio.gather(*(sender.post("/classify", content=body, headers=PNG) for body in bodies))


def test_requests_that_come_together_are_searched_together_and_a_bad_one_fails_alone():
    app, model = made(Limits(batch=16, wait_ms=3000))  # time enough to decode all of them on a busy machine
    greys = [0, 250, 100, 250, 0, 250, 0, 250]
    replies = asyncio.run(gathered(app, [png(grey) for grey in greys]))
    assert [reply.status_code for reply in replies] == [500 if grey == 100 else 200 for grey in greys]
    labels = [reply.json().get("label") for reply in replies]
    assert labels == [{0: "dark", 250: "light", 100: None}[grey] for grey in greys]
    assert max(model.sizes) >= 8


def test_more_requests_than_the_queue_holds_are_told_to_come_back():
    app, model = made(Limits(queue=3))
    model.pause = 0.05
    replies = asyncio.run(gathered(app, [png(250)] * 9))
    codes = sorted(reply.status_code for reply in replies)
    assert codes == [200] * 3 + [503] * 6
    assert {reply.headers.get("retry-after") for reply in replies if reply.status_code == 503} == {"1"}


def test_an_answer_that_takes_too_long_is_given_up_and_the_next_one_comes():
    app, model = made(Limits(answer_seconds=0.2))
    with TestClient(app, "http://localhost") as opened:
        model.pause = 0.3
        reply = opened.post("/classify", content=png(250), headers=PNG)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
        model.pause = 0.0
        deadline = time.monotonic() + 20
        while opened.post("/classify", content=png(250), headers=PNG).status_code != 200:
            assert time.monotonic() < deadline
        assert app.state.service.inside == 0


def test_before_it_is_warm_it_is_not_ready():
    app, _ = made()
    quiet = TestClient(app, "http://localhost")
    assert quiet.get("/readyz").status_code == 503
    assert quiet.get("/healthz").status_code == 200


def test_limits_are_checked():
    with pytest.raises(OptionError, match="queue must be a whole number of at least 1"):
        Limits(queue=0)
    with pytest.raises(OptionError, match="answer_seconds"):
        replace(Limits(), answer_seconds=0)


def test_the_openapi_names_every_refusal(client):
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {"/classify", "/explain", "/healthz", "/readyz", "/metrics"}
    assert {"200", "400", "408", "413", "415", "422", "503"} == set(paths["/classify"]["post"]["responses"])


def test_a_model_error_is_not_swallowed_by_the_wrapper():
    _, model = made()
    with pytest.raises(ModelError, match="cursed"):
        its(model, [rotation()], samples=4).search(torch.full((1, 1, 8, 8), 100 / 255))


def test_images_that_cost_too_much_are_refused_and_counted():
    app, _ = made(Limits(decode_seconds=0.5, pixels=25_000_000))
    with TestClient(app, "http://localhost") as opened:
        for name, status in (("many scans", 413), ("long BMP", 413), ("slow BMP", 422)):
            assert opened.post("/classify", content=hostile.FILES[name](), headers=PNG).status_code == status, name
        assert opened.post("/classify", content=png(250), headers=PNG).status_code == 200
        text = opened.get("/metrics").text
    assert 'headtilt_decodes_total{outcome="refused"} 2.0' in text
    assert 'headtilt_decodes_total{outcome="timed_out"} 1.0' in text
    assert 'headtilt_decodes_total{outcome="killed"} 0.0' in text


def test_heavy_files_keep_out_of_the_lane_of_the_light_ones():
    app, _ = made()
    with TestClient(app, "http://localhost") as opened:
        quick, patient = (lane.outcomes for lane in app.state.service.lanes)
        before = quick["done"], patient["done"]
        for content in (png(250), png(250) + bytes(600_000), hostile.many_comments()):
            assert opened.post("/classify", content=content, headers=PNG).status_code == 200
        assert (quick["done"], patient["done"]) == (before[0] + 1, before[1] + 2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
def test_images_that_take_too_much_memory_are_counted_as_killed(monkeypatch):
    monkeypatch.setattr("headtilt.sources.decoders.BYTES_PER_PIXEL", 0)
    monkeypatch.setattr("headtilt.sources.decoders.BESIDE_PIXELS", 20_000_000)
    app, _ = made()
    with TestClient(app, "http://localhost") as opened:
        reply = opened.post("/classify", content=hostile.FILES["deep PNG"](), headers=PNG)
        assert (reply.status_code, reply.json()["error"]) == (422, "the image takes too much memory to decode.")
        assert 'headtilt_decodes_total{outcome="killed"} 1.0' in opened.get("/metrics").text
        assert opened.post("/classify", content=png(250), headers=PNG).status_code == 200


def test_it_is_not_ready_while_images_wait_for_too_long(client):
    service = client.app.state.service
    service.lanes[0].waiting["stuck"] = time.monotonic() - 1000
    try:
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200
    finally:
        del service.lanes[0].waiting["stuck"]
    assert client.get("/readyz").status_code == 200


def test_it_is_not_ready_while_even_the_lightest_image_does_not_get_its_turn(client, monkeypatch):
    service = client.app.state.service
    for seconds, status in ((2 * service.lanes[0].seconds + 0.1, 503), (0.5, 200)):
        monkeypatch.setattr(service.places[0], "waited", lambda waited=seconds: waited)
        assert client.get("/readyz").status_code == status


def test_only_hosts_that_were_named_are_served():
    app, _ = made()
    with TestClient(app, "http://localhost") as opened:
        for host, status in (("localhost:9", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 400)):
            assert opened.get("/healthz", headers={"Host": host}).status_code == status, host
        refused = opened.get("/healthz", headers={"Host": "localhost.evil.example"})
        assert (refused.status_code, "not served here" in refused.json()["error"]) == (400, True)
    open_to_all = make_app(app.state.service.robust, app.state.service.adapted, hosts=("*",))
    assert TestClient(open_to_all, "http://anything").get("/healthz").status_code == 200


def test_health_answers_to_head(client):
    for route in ("/healthz", "/readyz"):
        reply = client.head(route)
        assert (reply.status_code, reply.content) == (200, b"")


class Coming:
    """A request whose body comes in pieces, and then perhaps never ends."""

    def __init__(self, *pieces, ends=True):
        self.headers, self.pieces, self.ends = {"content-type": "image/png"}, pieces, ends

    async def stream(self):
        for piece in self.pieces:
            await asyncio.sleep(0)
            yield piece
        if not self.ends:
            await asyncio.sleep(1000)


def test_of_too_many_bytes_the_largest_unfinished_upload_gives_way():
    async def story():
        uploads = Uploads(Limits(held_bytes=1000))
        hogs = [asyncio.ensure_future(uploads.receive(Coming(b"x" * size, ends=False))) for size in (300, 600)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert uploads.held == 900
        body = await uploads.receive(Coming(b"y" * 200))
        with pytest.raises(RefusedError, match="too much is being uploaded") as refused:
            await hogs[1]
        assert (refused.value.status, refused.value.headers["Retry-After"]) == (503, "1")
        assert uploads.held == 500
        with pytest.raises(RefusedError):
            await uploads.receive(Coming(b"z" * 400, b"z" * 500))
        assert uploads.held == 500
        body.let_go()
        body.let_go()
        hogs[0].cancel()
        await asyncio.gather(*hogs, return_exceptions=True)
        assert (uploads.held, uploads.coming) == (0, {})

    asyncio.run(story())


def test_uploads_are_bounded_in_number_and_do_not_count_as_inside():
    async def story():
        uploads = Uploads(Limits(uploads=2))
        slow = [asyncio.ensure_future(uploads.receive(Coming(b"x", ends=False))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RefusedError) as refused:
            await uploads.receive(Coming(b"x"))
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert refused.value.status == 503
        assert (await uploads.receive(Coming(b"x"))).content == b"x"

    asyncio.run(story())


LENGTHS = [300_000] * 4  # of what comes behind an image, which does no harm


async def told(app, pieces, *, ends=True):
    """Return the status that an application gives to a body in pieces, whose sender may hang up before its end."""
    coming, statuses = list(pieces), []

    async def receive():
        if not coming:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": coming.pop(0), "more_body": bool(coming) or not ends}

    async def send(message):
        statuses.append(message.get("status"))

    headers = [(b"host", b"localhost"), (b"content-type", b"image/png")]
    scope = {"type": "http", "method": "POST", "path": "/classify", "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    return statuses[0]


@pytest.mark.parametrize(
    ("status", "start", "ends"),
    [(200, png(250), True), (422, b"no image", True), (413, hostile.hollow_png(), True), (499, b"half", False)],
    ids=["answered", "broken", "too large", "hung up"],
)
def test_nothing_of_a_body_waits_for_garbage_to_be_collected(status, start, ends):
    async def story():
        app, _ = made()
        async with app.router.lifespan_context(app):
            assert await told(app, [start, *map(bytes, LENGTHS)], ends=ends) == status
            gc.collect()
            gc.disable()
            tracemalloc.start()
            try:
                for _ in range(3):
                    await told(app, [start, *map(bytes, LENGTHS)], ends=ends)
                return tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()
                gc.enable()

    assert asyncio.run(story()) < 250_000, "three bodies of 1,200,000 bytes"


class Served:
    """`headtilt serve` in a process of its own."""

    def __init__(self, *words):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "headtilt", "serve", "--model", "zoo:digits", "--port", str(self.port), *words]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
        )
        deadline = time.monotonic() + 90
        while not self._answers():
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def _answers(self):
        try:
            with self.connect() as sock:
                sock.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return b"200 OK" in sock.recv(100)
        except OSError:
            return False

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def talk(self, sent):
        with self.connect() as sock:
            sock.sendall(sent)
            return everything(sock)


def everything(sock):
    found = b""
    try:
        while chunk := sock.recv(65536):
            found += chunk
    except ConnectionResetError:
        pass
    return found


@pytest.fixture(scope="module")
def served():
    process = Served("--upload-seconds", "1", "--max-bytes", "50000", "--levels", "rotation,scale,shear")
    yield process
    process.process.kill()
    _, log = process.process.communicate()
    assert "Traceback" not in log, log  # whatever the tests below sent


POST = b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"


def test_a_body_that_does_not_arrive_is_given_up(served):
    assert b" 408 " in served.talk(POST + b"Content-Length: 1000\r\n\r\nabc")


def test_headers_that_do_not_arrive_are_given_up(served):
    assert served.talk(b"POST /classify HTTP/1.1\r\nHost: localhost\r\nX-Slow: ") == b""
    assert served.talk(b"") == b""


def test_bodies_that_nobody_reads_are_not_received_for_ever(served):
    ask = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    with served.connect() as sock:
        sock.sendall(ask)
        reply, deadline = b"", time.monotonic() + 20
        sock.settimeout(0.1)
        while time.monotonic() < deadline:
            try:
                sock.sendall(b"x")  # one byte in ten a second: never silent, never done
                if not (found := sock.recv(1000)):
                    break
                reply += found
            except TimeoutError:
                pass
            except ConnectionError:
                break
        else:
            pytest.fail("the connection is still open")
    assert reply.startswith(b"HTTP/1.1 200")


def test_a_body_that_comes_after_its_answer_leaves_the_connection_in_use(served):
    ask = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    with served.connect() as sock:
        sock.sendall(ask + b"Content-Length: 4\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        sock.sendall(b"body" + ask.replace(b"healthz", b"nowhere") + b"Connection: close\r\n\r\n")
        assert b"HTTP/1.1 404" in everything(sock)


def test_second_requests_of_a_connection_are_watched_too(served):
    reply = served.talk(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
    assert reply.count(b"HTTP/1.1") == 1


def test_chunks_beyond_the_limit_are_refused_over_the_wire(served):
    chunk = b"2710\r\n" + b"\x00" * 10_000 + b"\r\n"
    assert b" 413 " in served.talk(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 6)
    assert b" 413 " in served.talk(POST + b"Content-Length: 999999999\r\n\r\n")


def test_bytes_that_are_no_http_are_refused(served):
    assert b" 400 " in served.talk(b"\x16\x03\x01\x00\xa5\x01\x00\x00 hello\r\n\r\n")


def test_a_client_that_hangs_up_disturbs_nobody(served, pngs):
    for _ in range(5):
        with served.connect() as sock:
            sock.sendall(POST + f"Content-Length: {len(pngs[0])}\r\n\r\n".encode() + pngs[0])
    whole = POST + f"Content-Length: {len(pngs[0])}\r\nConnection: close\r\n\r\n".encode() + pngs[0]
    head, _, body = served.talk(whole).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert json.loads(body)["views"] > 17


def test_a_client_that_hangs_up_in_its_body_is_no_error_of_the_service(served):
    for _ in range(3):
        with served.connect() as sock:
            sock.sendall(POST + b"Content-Length: 1000\r\n\r\nabc")
    deadline = time.monotonic() + 30
    while b'status="499"} 3.0' not in (text := served.talk(METRICS)):
        assert time.monotonic() < deadline, text
        time.sleep(0.1)
    assert b'status="500"' not in text


METRICS = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def test_a_length_that_is_said_in_two_ways_is_refused_once(served):
    both = POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\n\r\n"
    reply = served.talk(both)
    assert reply.startswith(b"HTTP/1.1 400")
    assert reply.count(b"HTTP/1.1") == 1


def test_a_flood_of_tiny_chunks_is_refused_and_a_few_are_not(served, pngs):
    def sent(content):
        chunks = b"".join(b"1\r\n" + content[at : at + 1] + b"\r\n" for at in range(len(content)))
        return served.talk(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")

    assert b" 200 " in sent(pngs[0])
    assert b" 400 " in sent(bytes(20_000))


def test_nonsense_behind_an_answer_ends_the_connection_and_is_no_error_of_the_service(served):
    lost = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with served.connect() as sock:
        sock.sendall(lost)
        answer = b""
        while b'Not Found"}' not in answer:
            answer += sock.recv(1000)
        sock.sendall(b"no length\r\n")
        assert everything(sock) == b""


def test_slow_bodies_shut_nobody_out(served, pngs):
    slow = [served.connect() for _ in range(300)]
    for sock in slow:
        sock.sendall(POST + b"Content-Length: 1000\r\n\r\na")
    whole = POST + f"Content-Length: {len(pngs[0])}\r\nConnection: close\r\n\r\n".encode() + pngs[0]
    assert [served.talk(whole)[:15] for _ in range(5)] == [b"HTTP/1.1 200 OK"] * 5
    for sock in slow:
        sock.close()


def test_it_listens_on_the_loopback_alone(served):
    table = Path("/proc/net/tcp")
    if not table.exists():
        pytest.skip("this system has no /proc/net/tcp")
    listening = [line.split() for line in table.read_text().splitlines()[1:]]
    mine = [fields[1] for fields in listening if fields[1].endswith(f":{served.port:04X}") and fields[3] == "0A"]
    assert mine == [f"0100007F:{served.port:04X}"]


def test_on_sigterm_it_answers_who_is_inside_and_ends(served, pngs):
    """Last of all: it ends the service."""
    replies = []
    whole = POST + f"Content-Length: {len(pngs[0])}\r\nConnection: close\r\n\r\n".encode() + pngs[0]
    socks = [served.connect() for _ in range(12)]
    for sock in socks:
        sock.sendall(whole)
    readers = [threading.Thread(target=lambda sock=sock: replies.append(everything(sock))) for sock in socks]
    for reader in readers:
        reader.start()
    while not replies:  # one was answered, so that the others are inside
        time.sleep(0.01)
    served.process.send_signal(signal.SIGTERM)
    for reader, sock in zip(readers, socks, strict=True):
        reader.join()
        sock.close()
    _, errors = served.process.communicate(timeout=60)
    assert [reply[:15] for reply in replies] == [b"HTTP/1.1 200 OK"] * 12
    assert served.process.returncode in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    assert "Traceback" not in errors
    with pytest.raises(ConnectionRefusedError):
        served.connect()


def test_it_ends_although_an_image_never_does():
    process = Served("--decode-seconds", "300", "--answer-seconds", "1")
    sock = process.connect()
    body = hostile.slow_bmp(5000, 5_000_000)[:9_999_999]
    sock.sendall(POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    time.sleep(0.5)
    process.process.send_signal(signal.SIGTERM)
    process.process.communicate(timeout=30)
    sock.close()
    assert process.process.returncode is not None

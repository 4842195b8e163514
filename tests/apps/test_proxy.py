"""The proxy's configuration on the page on security: nginx takes it, and it does what the page says."""

from __future__ import annotations

import http.client
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

PAGE = Path(__file__).parent.parent.parent / "SECURITY.md"
pytestmark = pytest.mark.skipif(
    not shutil.which("nginx") or not shutil.which("openssl"), reason="needs nginx and openssl"
)


class Upstream(BaseHTTPRequestHandler):
    """Stands for the service, and notes what reaches it."""

    seen: ClassVar[list[tuple[str, str, int]]] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append((self.path, self.headers["Host"], len(body)))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def do_GET(self):
        self.do_POST()

    def log_message(self, *_):
        pass


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    """Yield the port of nginx with the page's own configuration, in which only addresses and paths are others."""
    folder = tmp_path_factory.mktemp("nginx")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subject = ["-subj", "/CN=classify.example.com", "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *subject]
    subprocess.run(make, check=True, capture_output=True)
    upstream = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    port = free_port()
    (block,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for found, other in (
        ("rate=20r/s", "rate=1r/m"),  # so that no test depends on how fast a machine is
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("127.0.0.1:8000", f"127.0.0.1:{upstream.server_port}"),
        ("/etc/ssl/classify.example.com.pem", str(certificate)),
        ("/etc/ssl/private/classify.example.com.key", str(key)),
    ):
        assert block.count(found) == 1, found
        block = block.replace(found, other)
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    around = f"user root;\npid {folder}/pid;\nerror_log {folder}/log;\ndaemon off;\nevents {{}}\n"
    (folder / "conf").write_text(f"{around}http {{\naccess_log off;\n{places}{block}}}\n", encoding="utf-8")
    words = ["nginx", "-p", str(folder), "-c", str(folder / "conf"), "-e", str(folder / "log")]
    tried = subprocess.run([*words, "-t"], capture_output=True, text=True, check=False)
    assert tried.returncode == 0, tried.stderr
    process = subprocess.Popen(words)
    deadline = time.monotonic() + 30
    while True:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield port
    process.terminate()
    process.wait(30)
    upstream.shutdown()
    upstream.server_close()


def connected(port):
    return http.client.HTTPSConnection("127.0.0.1", port, context=ssl._create_unverified_context(), timeout=30)


def ask(port, method, path, body=None):
    connection = connected(port)
    connection.request(method, path, body)
    status = connection.getresponse().status
    connection.close()
    return status


def test_requests_reach_the_service_under_a_name_that_it_answers_to(proxy):
    assert ask(proxy, "POST", "/classify", b"x" * 1000) == 200
    assert Upstream.seen[-1] == ("/classify", "localhost", 1000)


def test_figures_stay_inside_and_bodies_that_are_too_large_stay_outside(proxy):
    before = len(Upstream.seen)
    assert ask(proxy, "GET", "/metrics") == 403
    connection = connected(proxy)
    connection.putrequest("POST", "/classify")
    connection.putheader("Content-Length", "99000000")
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()
    assert len(Upstream.seen) == before


def test_the_service_sees_whole_bodies_alone(proxy):
    before = len(Upstream.seen)
    connection = connected(proxy)
    connection.putrequest("POST", "/classify")
    connection.putheader("Content-Length", "20000")
    connection.endheaders()
    connection.send(b"x" * 10_000)
    assert ask(proxy, "POST", "/classify", b"y") == 200
    assert [size for _, _, size in Upstream.seen[before:]] == [1]
    connection.send(b"x" * 10_000)
    assert connection.getresponse().status == 200
    assert [size for _, _, size in Upstream.seen[before:]] == [1, 20_000]
    connection.close()


def test_one_client_has_so_many_connections_and_requests_and_no_more(proxy):
    """Last of all: it uses up what this client may ask for."""
    held = [connected(proxy) for _ in range(20)]
    for connection in held:
        connection.putrequest("POST", "/classify")
        connection.putheader("Content-Length", "10")
        connection.endheaders()
        connection.send(b"x")
    assert ask(proxy, "GET", "/healthz") == 429, "of 20 connections"
    for connection in held:
        connection.close()
    statuses = [ask(proxy, "GET", "/healthz") for _ in range(45)]
    assert statuses[-1] == 429, "of 40 requests at once"

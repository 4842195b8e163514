"""Bundles pushed to a hub and fetched by name, against a server on this machine that keeps what it is given."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

import pytest
import torch

import headtilt as ht
from headtilt.apps.playground.methods import PACKAGED
from headtilt.errors import DataError, OptionError
from headtilt.paper.data import load
from headtilt.sources import hub

pytest.importorskip("huggingface_hub", reason="needs the extra headtilt[hf]")
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own
COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as creating a repository, one commit of small files, listing and fetching need."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes] = {}  # noqa: RUF012 - of the class, as a server's memory is

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlparse(self.path).path
        here = f"http://{self.headers['Host']}/me/fitted"
        if path == "/api/repos/create":
            self.say({"url": here, "name": "me/fitted"})
        elif "/preupload/" in path:
            asked = json.loads(body)["files"]
            self.say(
                {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]}
            )
        elif "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.say({"success": True, "commitOid": COMMIT, "commitUrl": f"{here}/commit/{COMMIT}", "hookOutput": ""})
        elif "/api/models/me/fitted/tree/" in path:
            sizes = {name: (len(data), hashlib.sha1(data).hexdigest()) for name, data in self.files.items()}
            self.say([{"type": "file", "path": name, "size": size, "oid": oid} for name, (size, oid) in sizes.items()])
        elif path.startswith("/api/models/me/fitted"):
            self.say({"id": "me/fitted", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]})
        elif "/resolve/" in path and path.rsplit("/", 1)[1] in self.files:
            self.say(self.files[path.rsplit("/", 1)[1]])
        else:
            self.say(
                {"error": "Repository not found"} if "/api/models" in path else {}, 404 if "models" in path else 200
            )

    do_GET = do_POST = do_HEAD = do_PUT = answer  # noqa: N815 - names of the standard library

    def say(self, what, status=200):
        data = what if isinstance(what, bytes) else json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    Hub.files.clear()
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listening.server_port}")
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield listening
    listening.shutdown()
    listening.server_close()


def test_a_bundle_goes_to_the_hub_and_comes_back_by_its_name(server):
    robust = ht.from_pretrained("zoo:digits:0", bundle=PACKAGED)
    address = robust.push_to_hub("me/fitted", token="hf_nobody")
    assert address == f"http://127.0.0.1:{server.server_port}/me/fitted"
    assert set(Hub.files) == {"README.md", "headtilt.json", "headtilt.safetensors"}
    assert b'bundle="me/fitted"' in Hub.files["README.md"]
    again = ht.from_pretrained("zoo:digits:0", bundle="me/fitted")
    images = torch.rot90(load("digits", "test").floats()[:8], 1, (-2, -1))
    assert torch.equal(again(images), robust(images))
    with pytest.raises(DataError, match="another model"):
        ht.from_pretrained("zoo:digits:1", bundle="me/fitted")


def test_a_name_that_the_hub_does_not_know_is_said_to_be_neither_folder_nor_name(server):
    with pytest.raises(DataError, match=r"bundle must be a folder .* 'me/nothing' is neither"):
        ht.from_pretrained("zoo:digits:0", bundle="me/nothing")
    with pytest.raises(OptionError, match=r"name must be ORGANISATION/NAME; got 'fitted'"):
        ht.from_pretrained("zoo:digits:0").push_to_hub("fitted")


def test_a_folder_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "fitted").mkdir(parents=True)
    assert not hub.on_hub("me/fitted")
    assert hub.on_hub("me/other")
    assert not hub.on_hub(tmp_path / "me")

"""The playground: what is behind the page, and the page itself in a headless browser that may talk to nobody else."""

from __future__ import annotations

import contextlib
import html
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from urllib.parse import urlparse

import pytest
import torch
from typer.testing import CliRunner

from headtilt.apps.playground.methods import PACKAGED, Example, digits_stage, own_stage
from headtilt.cli import app
from headtilt.errors import OptionError
from headtilt.its import ITS
from headtilt.paper.data import load as load_data
from headtilt.paper.data.perturb import draw, perturb_dataset
from headtilt.sources import Adapted
from headtilt.sources.registry import load as load_model

pytest.importorskip("matplotlib", reason="the extra playground is not installed")
Image = pytest.importorskip("PIL.Image")

from headtilt.apps.playground.app import FIRST, Play, at_random  # noqa: E402
from headtilt.apps.playground.page import alert, cards_html, cards_of  # noqa: E402
from headtilt.plot.style import new_figure  # noqa: E402

UPRIGHT = (0, 1, 0)


@pytest.fixture(scope="module")
def play():
    return Play(digits_stage())


def cards(play, example, *sliders, method="headtilt, fitted"):
    image = play.tilted(example, *sliders)
    results = {name: robust.search(image) for name, robust in play.stage.methods.items()}
    return {card.name: card for card in cards_of(results, play.names, example.truth, play.stage.notes, method)}


def test_upright_digits_are_right_by_the_bare_model_and_by_headtilt(play):
    assert [example.truth for example in play.stage.examples] == list(range(9))
    for example in play.stage.examples:
        found = cards(play, example, *UPRIGHT)
        assert found["bare model"].right
        assert found["headtilt, fitted"].right


def test_the_first_example_turned_is_wrong_by_the_bare_model_and_right_by_headtilt(play):
    found = cards(play, play.first(), FIRST, 1, 0)
    assert (found["bare model"].right, found["headtilt, fitted"].right) == (False, True)
    assert found["bare model"].views == 1
    assert found["headtilt, fitted"].views > 1
    assert list(found) == ["bare model", "arg-max energy", "the paper's ITS³", "balanced energy", "headtilt, fitted"]
    assert [card.chosen for card in found.values()] == [False] * 4 + [True]


def test_the_bundle_that_comes_with_it_reads_tilted_digits():
    data = load_data("digits", "test", limit=200)
    tilted = perturb_dataset(data, draw("affine", len(data)))
    robust = ITS.load(PACKAGED, load_model("zoo:digits:0").model)
    assert (robust.search(tilted.images).labels == tilted.labels).float().mean() > 0.93
    assert (robust.search(data.floats()).labels == data.labels).float().mean() > 0.97


@pytest.mark.parametrize("method", ["arg-max energy", "the paper's ITS³", "balanced energy", "headtilt, fitted"])
def test_every_method_can_be_looked_inside(play, method):
    _, inside = play.show(play.first(), 75, 1.1, 0.1, method)
    kind = "views seen" if method in ("balanced energy", "headtilt, fitted") else "search tree"
    assert f'alt="{html.escape(f"{kind}, {method}")}"' in inside
    assert "data:image/png;base64," in inside


def test_each_method_searches_once_and_the_picture_is_of_that_very_search(play, monkeypatch):
    seen, drawn, example = [], [], play.first()
    search = ITS.search

    def counted(robust, images):
        seen.append(search(robust, images))
        return seen[-1]

    monkeypatch.setattr(ITS, "search", counted)
    monkeypatch.setattr("headtilt.plot.views", lambda result, *_, **__: drawn.append(result) or new_figure(1, 1))
    play.show(example, 101, 1, 0, "headtilt, fitted")
    assert len(seen) == len(play.stage.methods)
    assert drawn[0] is seen[-1]
    play.show(example, 101, 1, 0, "arg-max energy")
    assert len(seen) == len(play.stage.methods), "another method to look inside costs nothing"


def test_cards_speak_of_turns_in_one_way_and_count_passes(play):
    found = cards(play, play.first(), 100, 1, 0)
    degrees = int(re.match(r"turned by \+(\d+)°, turned back by −(\d+)°", found["headtilt, fitted"].tilt)[1])
    assert f"turned back by −{degrees}°" in found["headtilt, fitted"].tilt
    assert abs(degrees - 100) < 25
    shown, _ = play.show(play.first(), 100, 1, 0, "headtilt, fitted")
    assert "views × 10 passes" in shown
    upright = cards(play, play.stage.examples[3], *UPRIGHT)["headtilt, fitted"].tilt
    assert "found upright, left as it came" in upright
    same = [card.colour for card in found.values() if card.label == found["headtilt, fitted"].label]
    assert len(set(same)) == 1
    assert found["bare model"].colour not in same


def test_tilting_turns_clockwise_by_the_slider(play):
    image = torch.zeros(1, 28, 28)
    image[:, 2:6, 12:16] = 1  # above the middle
    turned = play.tilted(Example(image, "dot"), 90, 1, 0)[0, 0]
    rows, columns = turned.nonzero(as_tuple=True)
    assert columns.float().mean() > 20
    assert rows.float().mean() == pytest.approx(13.5, abs=1)


def test_a_broken_upload_is_told_and_what_was_there_stays(play, tmp_path):
    before = play.stage.examples[3]
    (tmp_path / "broken.png").write_bytes(b"not an image")
    after, message, *_ = play.receive(str(tmp_path / "broken.png"), before, "headtilt, fitted")
    assert after is before
    assert 'role="alert"' in message
    assert "broken.png is not an image" in message
    assert str(tmp_path) not in message
    Image.new("RGB", (90, 60), "white").save(tmp_path / "fine.png")
    after, message, *sliders, _, inside = play.receive(str(tmp_path / "fine.png"), before, "headtilt, fitted")
    assert (after.name, after.truth, message, sliders) == ("fine.png", None, "", [0, 1, 0])
    assert after.image.shape == (1, 28, 28)
    assert "views seen, headtilt, fitted" in inside


def test_a_photograph_for_a_model_of_digits_comes_with_a_hint(play, tmp_path):
    Image.new("RGB", (400, 300), "orange").save(tmp_path / "photo.png")
    after, message, *_ = play.receive(str(tmp_path / "photo.png"), play.stage.examples[0], "headtilt, fitted")
    assert after.name == "photo.png"
    assert "this looks like a photograph (400×300, in colour)" in message


def test_what_comes_from_outside_is_escaped(play):
    assert "<script>" not in alert("<script>alert(1)</script>")
    card = cards(play, play.first(), *UPRIGHT)["headtilt, fitted"]
    assert "<b>x" not in cards_html([type(card)(**{**card.__dict__, "label": "<b>x"})])


def test_random_tilts_stay_within_the_sliders():
    for _ in range(200):
        degrees, factor, slant = at_random()
        assert -180 <= degrees <= 180
        assert 0.75 <= factor <= 1.33
        assert -0.25 <= slant <= 0.25


def test_a_model_of_ones_own_brings_its_examples_and_its_bundle(tmp_path, monkeypatch):
    (tmp_path / "greynet.py").write_text(
        "import torch\nfrom headtilt.sources import Adapted\n"
        "class Grey(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.weight = torch.nn.Parameter(torch.ones(1))\n"
        "    def forward(self, x):\n        light = x.mean((1, 2, 3))\n"
        "        return torch.stack([0.5 - light, light - 0.5], 1) * 9 * self.weight\n"
        "def make():\n    return Adapted(Grey(), ('dark', 'light'), 16, 16, 'reflection', 'grey')\n"
    )
    monkeypatch.chdir(tmp_path)
    for name, grey in (("dark", 10), ("light", 240)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (40, 30), (grey,) * 3).save(tmp_path / "photos" / name / "x.png")
    (tmp_path / "photos/dark/broken.png").write_bytes(b"")
    stage = own_stage("python:greynet:make", None, tmp_path / "photos")
    assert [example.truth for example in stage.examples] == [0, 1]
    assert list(stage.methods) == ["arg-max energy", "the paper's ITS³", "headtilt, unfitted"]
    own = Play(stage)
    assert own.names == ["dark", "light"]
    assert all(card.right for card in cards(own, stage.examples[1], 33, 1, 0).values())
    next(iter(stage.methods.values())).save(tmp_path / "bundle")
    with_bundle = own_stage("python:greynet:make", tmp_path / "bundle", None)
    assert list(with_bundle.methods)[-1] == "headtilt, fitted"
    assert isinstance(with_bundle.adapted, Adapted)
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match="examples must be a folder with images"):
        own_stage("python:greynet:make", None, tmp_path / "empty")
    monkeypatch.delitem(sys.modules, "greynet")


def test_the_command_refuses_examples_without_a_model(tmp_path):
    done = CliRunner().invoke(app, ["playground", "--examples", str(tmp_path)])
    assert done.exit_code == 2
    assert "Add --model SPEC" in done.output


def browser_path():
    """Where a Chromium is, or None for playwright's own."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return os.environ.get("HEADTILT_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="module")
def address():
    """Return where `headtilt playground` runs, in a process of its own."""
    pytest.importorskip("gradio", reason="the extra playground is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "headtilt", "playground", "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def chromium():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as running:
        try:
            browser = running.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no Chromium to drive: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def asked():
    """Every address that a page asked for."""
    return []


@pytest.fixture
def page(chromium, address, asked):
    opened = chromium.new_page(viewport={"width": 1400, "height": 1000})
    opened.set_default_timeout(40_000)
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(address)
    opened.wait_for_selector("#ht-tree img")
    yield opened
    opened.close()


def answer(page, method):
    return page.locator(f'.ht-card[data-method="{method}"] [data-answer]').inner_text()


def turn(page, degrees):
    number = page.locator("#ht-turn input[type=number]")
    number.fill(str(degrees))
    number.press("Enter")
    number.blur()


def until(page, condition):
    """Wait until a condition in Python holds."""
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline, page.locator("#ht-cards").inner_text()
        page.wait_for_timeout(100)


def test_an_example_turned_by_120_degrees_is_lost_on_the_bare_model_and_not_on_headtilt(page):
    page.locator("#ht-examples button.thumbnail-item").nth(7).click()
    turn(page, 0)
    until(page, lambda: (answer(page, "bare model"), answer(page, "headtilt, fitted")) == ("7", "7"))
    turn(page, 120)
    until(page, lambda: answer(page, "bare model") != "7")
    assert answer(page, "headtilt, fitted") == "7"
    assert page.locator('.ht-card[data-method="bare model"]').get_attribute("class").split()[1] == "wrong"
    assert page.locator('.ht-card[data-method="headtilt, fitted"]').get_attribute("class").split()[1] == "right"


def test_the_method_that_is_looked_inside_can_be_changed(page):
    assert page.locator("#ht-tree img").get_attribute("alt") == "views seen, headtilt, fitted"
    page.get_by_label("the paper's ITS³", exact=True).check()
    until(page, lambda: page.locator("#ht-tree img").get_attribute("alt") == "search tree, the paper's ITS³")
    assert page.locator(".ht-card.chosen h3").inner_text() == "the paper's ITS³"


def test_a_broken_file_is_told_in_words_and_a_good_one_is_shown(page, tmp_path, pngs):
    (tmp_path / "broken.png").write_bytes(b"no picture at all")
    (tmp_path / "good.png").write_bytes(pngs[0])
    page.locator("#ht-drop input[type=file]").set_input_files(tmp_path / "broken.png")
    alarm = page.locator("#ht-message [role=alert]")
    alarm.wait_for()
    assert "broken.png is not an image" in alarm.inner_text()
    assert "Try a PNG or JPEG file." in alarm.inner_text()
    assert page.locator(".ht-sign").first.inner_text() in ("✓", "✗")
    page.reload()
    page.wait_for_selector("#ht-tree img")
    page.locator("#ht-drop input[type=file]").set_input_files(tmp_path / "good.png")
    until(page, lambda: page.locator(".ht-sign").first.inner_text() == "")  # nobody knows the truth
    assert page.locator("#ht-turn input[type=number]").input_value() == "0"


def test_a_random_tilt_moves_the_sliders_and_upright_brings_them_back(page):
    names = ("#ht-turn", "#ht-scale", "#ht-shear")

    def sliders():
        return [page.locator(f"{name} input[type=number]").input_value() for name in names]

    before = sliders()
    page.locator("#ht-random").click()
    until(page, lambda: sliders() != before)  # one of the three may fall where it stood
    page.locator("#ht-upright").click()
    until(page, lambda: sliders() == ["0", "1", "0"])


def test_one_click_is_one_computation(page):
    page.wait_for_timeout(1500)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.locator("#ht-random").click()
    page.wait_for_timeout(2500)
    assert sum("/queue/join" in url for url in asked) == 1
    asked.clear()
    page.locator("#ht-examples button.thumbnail-item").nth(4).click()
    page.wait_for_timeout(2500)
    assert sum("/queue/join" in url for url in asked) == 1


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_hangs_over_the_edge(page, width):
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator(".ht-card").count() == 5
    for card in page.locator(".ht-card").all():
        box = card.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width


def test_no_request_leaves_this_machine(page, asked):
    hosts = {urlparse(url).hostname for url in asked if not url.startswith(("data:", "blob:"))}
    assert hosts == {"127.0.0.1"}

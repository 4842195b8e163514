"""The site builds strictly, all of its links lead somewhere, and nothing is fetched from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("material", reason="needs the extra headtilt[docs]")
pytest.importorskip("mkdocstrings", reason="needs the extra headtilt[docs]")
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """Collects what a page links to, what it loads, and the anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given and given.get("rel") != "canonical":
            self.loads.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def outside(target: str) -> bool:
    return re.match(r"(\w+:)?//", target) is not None


def test_every_page_of_the_documentation_is_built(site):
    sources = (ROOT / "docs").rglob("*.md")
    wanted = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in sources}
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert wanted | {"changelog.html", "security.html", "contributing.html"} <= built
    assert not list(site.rglob("*.py"))


def test_every_link_within_the_site_leads_to_a_page_and_an_anchor_that_exist(pages):
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are absolute, since it is shown anywhere
        for link in [*page.links, *page.loads]:
            target, anchor = urldefrag(link)
            if outside(link) or link.startswith(("mailto:", "data:")):
                continue
            there = (path.parent / unquote(target)).resolve() if target else path
            there = there / "index.html" if there.is_dir() else there
            if not there.exists() or (anchor and there in pages and unquote(anchor) not in pages[there].anchors):
                broken.append(f"{path.name}: {link}")
    assert broken == []
    assert sum(len(page.links) for page in pages.values()) > 1000


def test_nothing_is_loaded_from_elsewhere(site, pages):
    loaded = {(path.name, target) for path, page in pages.items() for target in page.loads if outside(target)}
    assert loaded == set()
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def test_no_place_is_left_unfilled_and_results_lie_beside_the_pages(site, pages):
    assert not [path.name for path in pages if "{{" in path.read_text(encoding="utf-8")]
    stored = {path.name for path in (ROOT / "results").glob("*.json")}
    assert stored == {path.name for path in (site / "results").glob("*.json")}

"""Take the playground's pictures in Chromium, and find out what overflows: ``python docs/screenshots.py``.

``python docs/screenshots.py --site site --out FOLDER`` takes one of every page of the site in both widths instead.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parent / "images"
WIDTHS = {"wide": (1280, 860), "narrow": (390, 844)}


@contextmanager
def browser() -> Iterator[Any]:
    """Yield Chromium: the one that is installed, or playwright's own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as played:
        found = played.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            yield found
        finally:
            found.close()


def overflow(page: Any) -> int:
    """Return by how many pixels a page is wider than the screen."""
    return int(page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


def playground(out: Path) -> list[str]:
    """Write both pictures of the playground, and return what overflows."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from headtilt.apps.playground.app import make_page, options
    from headtilt.apps.playground.methods import digits_stage

    app = make_page(digits_stage())
    _, address, _ = app.launch(prevent_thread_lock=True, server_name="127.0.0.1", server_port=7881, **options())
    wide = []
    with browser() as chromium:
        for name, (width, height) in WIDTHS.items():
            page = chromium.new_page(viewport={"width": width, "height": height})
            page.goto(address)
            page.wait_for_selector(".ht-figure img", timeout=120_000)
            page.wait_for_timeout(1500)
            page.screenshot(path=out / f"playground-{name}.png", full_page=True)
            wide += [f"playground, {width} pixels: {overflow(page)} too wide"] if overflow(page) > 0 else []
    app.close()
    return wide


def site(folder: Path, out: Path) -> list[str]:
    """Write a picture of every page of a built site in both widths, and return what overflows."""
    wide = []
    with browser() as chromium:
        for name, (width, height) in WIDTHS.items():
            page = chromium.new_page(viewport={"width": width, "height": height})
            for path in sorted(folder.rglob("*.html")):
                page.goto(path.resolve().as_uri())
                page.screenshot(path=out / f"{path.relative_to(folder).as_posix().replace('/', '-')}-{name}.png")
                wide += [f"{path.name}, {width} pixels: {overflow(page)} too wide"] if overflow(page) > 0 else []
    return wide


def main() -> None:
    """Take them, and fail where something overflows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path, help="a built site, in place of the playground")
    parser.add_argument("--out", type=Path, default=IMAGES)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = playground(options.out) if options.site is None else site(options.site, options.out)
    print("\n".join(found) or "nothing overflows")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()

"""Write the figures of README and of all pages from the stored results: ``python docs/tables.py --write``.

The picture on the page of the benchmark is drawn anew, too, where its figures have changed.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from benchmark_picture import PICTURE, draw, is_current
from blocks import BLOCKS
from figures import ROOT, fill

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def renewed(path: Path) -> str:
    """Return a page with its figures written anew, and its links to results/ as they lie from there.

    README is shown on package indexes, too: its links are absolute as soon as pyproject.toml names a Source.
    """
    up = "../" * (len(path.resolve().relative_to(ROOT).parts) - 1)
    text = re.sub(r"\]\((?:\.\./)*results/", f"]({up}results/", fill(path.read_text(encoding="utf-8"), BLOCKS))
    return absolute(text, source()) if path.name == "README.md" else text


def source() -> str | None:
    """Return where the repository lies, from pyproject.toml; None where that is not said."""
    found = re.search(r'^Source = "(.+?)/?"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    return None if found is None else found[1]


def absolute(text: str, address: str | None) -> str:
    """Return a page of the repository's top folder with links that hold anywhere, where there is an address."""
    if address is None:
        return text
    text = re.sub(r'(!\[[^\]]*\]\(|src=")(?!https?:)([^)"]+)', rf"\1{address}/raw/HEAD/\2", text)
    return re.sub(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)([^)]+)", rf"\1{address}/blob/HEAD/\2", text)


def main() -> None:
    """Write the files named, or say which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=PAGES)
    parser.add_argument("--write", action="store_true", help="write; otherwise only say what is out of date")
    arguments = parser.parse_args()
    stale = [path for path in arguments.files if renewed(path) != path.read_text(encoding="utf-8")]
    for path in stale:
        if arguments.write:
            path.write_text(renewed(path), encoding="utf-8")
        print(f"{path.name} {'written' if arguments.write else 'is out of date'}")
    if not is_current():
        stale.append(PICTURE)
        if arguments.write:
            draw()
        print(f"{PICTURE.name} {'written' if arguments.write else 'is out of date'}")
    raise SystemExit(bool(stale) and not arguments.write)


if __name__ == "__main__":
    main()

"""Write the figures of README and of all pages from the stored results: ``python docs/tables.py --write``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from blocks import BLOCKS
from figures import ROOT, fill

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def renewed(path: Path) -> str:
    """Return a page with its figures written anew, and its links to results/ as they lie from there."""
    up = "../" * (len(path.resolve().relative_to(ROOT).parts) - 1)
    return re.sub(r"\]\((?:\.\./)*results/", f"]({up}results/", fill(path.read_text(encoding="utf-8"), BLOCKS))


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
    raise SystemExit(bool(stale) and not arguments.write)


if __name__ == "__main__":
    main()

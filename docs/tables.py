"""Write the README's table from the stored results: ``python docs/tables.py --write README.md``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from figures import affine_table, headline

MAKERS = {"table": affine_table, "headline": headline}


def renewed(text: str) -> str:
    """Return text with what stands between ``<!-- NAME -->`` and ``<!-- /NAME -->`` made anew."""
    for name, make in MAKERS.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = marked.sub(lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", text)
    return text


def main() -> None:
    """Write the files named, or say which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="write; otherwise only say what is out of date")
    arguments = parser.parse_args()
    stale = [path for path in arguments.files if renewed(path.read_text(encoding="utf-8")) != path.read_text("utf-8")]
    for path in stale:
        if arguments.write:
            path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{path} {'written' if arguments.write else 'is out of date'}")
    raise SystemExit(bool(stale) and not arguments.write)


if __name__ == "__main__":
    main()

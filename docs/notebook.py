"""Write examples/tutorial.ipynb from docs/tutorial.md: ``python docs/notebook.py``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, NOTEBOOK = ROOT / "docs" / "tutorial.md", ROOT / "examples" / "tutorial.ipynb"
FENCE = re.compile(r"^```(?:\{\.)?(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def cell(kind: str, text: str, number: int) -> dict[str, Any]:
    """Return a cell of a notebook."""
    found: dict[str, Any] = {
        "cell_type": kind,
        "id": f"cell-{number:02}",
        "metadata": {},
        "source": text.strip("\n").splitlines(keepends=True),
    }
    return {**found, "execution_count": None, "outputs": []} if kind == "code" else found


def notebook(page: str) -> dict[str, Any]:
    """Return the notebook of a page: Python blocks and `headtilt` commands become code, everything else text."""
    # Links and pictures lead out of docs/ from where the notebook lies.
    page = re.sub(r"\]\((?!https?:)([\w./-]+)", r"](../docs/\1", page)
    cells: list[tuple[str, str]] = []
    at = 0
    for fence in FENCE.finditer(page):
        if page[at : fence.start()].strip():
            cells.append(("markdown", page[at : fence.start()]))
        body, commands = fence[3], fence[3].startswith("$ headtilt ")
        if fence[1] == "python":
            cells.append(("code", body))
        elif commands:
            cells.append(("code", re.sub(r"^\$ ", "!", body, flags=re.MULTILINE)))
        else:
            cells.append(("markdown", fence[0]))
        at = fence.end()
    if page[at:].strip():
        cells.append(("markdown", page[at:]))
    return {
        "cells": [cell(kind, text, number) for number, (kind, text) in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def written() -> str:
    """Return what the notebook's file should hold."""
    return json.dumps(notebook(PAGE.read_text(encoding="utf-8")), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.parent.mkdir(exist_ok=True)
    NOTEBOOK.write_text(written(), encoding="utf-8")

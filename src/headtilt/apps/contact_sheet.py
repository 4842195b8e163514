"""What ``canonicalise`` did, to look at: each image before and after, how far it was turned, and how sure that is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtilt.sources.images import upright

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = "headtilt-report"
THUMB, GAP, CAPTION = 120, 10, 34  # pixels
COLUMNS, ROWS, MOST_SHEETS = 5, 8, 10
INK, TURNED, LEFT, FAILED, PAPER = "#222222", "#D55E00", "#767676", "#B00020", "#FFFFFF"
LONGEST_NAME = 36


@dataclass(frozen=True)
class Cell:
    """An image of the sheet.

    Attributes:
        before: The file as it came.
        after: Its copy; None where there is none.
        words: What was done.
        colour: Of the words.
    """

    before: Path
    after: Path | None
    words: str
    colour: str = INK


def write_report(out: Path, rows: Sequence[dict[str, Any]], cells: Sequence[Cell]) -> list[Path]:
    """Write the rows as JSON and the cells as contact sheets, those of turned images first, and return the files."""
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "report.json"
    file.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace")
    ordered = sorted(cells, key=lambda cell: cell.colour == LEFT)
    each = COLUMNS * ROWS
    written = [file]
    for number in range(min(-(-len(ordered) // each), MOST_SHEETS)):
        path = folder / f"sheet-{number + 1}.png"
        sheet(ordered[number * each : (number + 1) * each]).save(path)
        written.append(path)
    return written


def sheet(cells: Sequence[Cell]) -> Image:
    """Return a contact sheet: for each image what came, what was made of it, and words."""
    from PIL import Image, ImageDraw, ImageFont

    columns = min(COLUMNS, len(cells))
    width, height = 2 * THUMB + 3 * GAP, THUMB + CAPTION + 2 * GAP
    page = Image.new("RGB", (columns * width, -(-len(cells) // columns) * height), PAPER)
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(12)
    for number, cell in enumerate(cells):
        left, top = number % columns * width + GAP, number // columns * height + GAP
        # What failed may have failed for what it costs to decode: it is not decoded again.
        shown = [None] if cell.after is None else [cell.before, cell.after]
        for place, path in enumerate(shown):
            small = _thumbnail(path)
            at = left + place * (THUMB + GAP) + (THUMB - small.width) // 2, top + (THUMB - small.height) // 2
            page.paste(small, at)
        name = cell.before.name.encode("latin-1", "replace").decode("latin-1")
        name = name if len(name) <= LONGEST_NAME else f"…{name[-LONGEST_NAME + 1 :]}".replace("…", "...")
        draw.text((left, top + THUMB + 4), name, INK, font)
        draw.text((left, top + THUMB + 19), cell.words.replace("−", "-"), cell.colour, font)
    return page


def _thumbnail(path: Path | None) -> Image:
    from PIL import Image

    blank = Image.new("RGB", (THUMB, THUMB), "#EEEEEE")
    try:
        small = blank if path is None else upright(path)
    except Exception:  # what cannot be read any more has no picture
        return blank
    if max(small.size) < THUMB:  # enlarged as it is, pixel by pixel
        factor = THUMB / max(small.size)
        return small.resize(
            (round(small.width * factor) or 1, round(small.height * factor) or 1), Image.Resampling.NEAREST
        )
    small.thumbnail((THUMB, THUMB))
    return small

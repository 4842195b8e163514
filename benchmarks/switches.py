"""How one batch goes through the code: ``python -m benchmarks.switches`` counts calls, files and switches of file.

A batch of eight images goes through a fitted search of 48 views with the packaged digits network, once it is warm. All
views are looked at in one go: a search that stops where the head is sure does the same again for each of its stages.
Who reads along has to change the file as often as the figure says.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import headtilt
from headtilt import HeadRecipe, Joint
from headtilt.paper.data import load
from headtilt.paper.experiments.report import metadata, write_json
from headtilt.presets import accurate, affine_levels
from headtilt.sources import zoo

SOURCE = str(Path(headtilt.__file__).parent)
OUT = Path("results/switches.json")


def counted(run: Any) -> dict[str, Any]:
    """Return how many calls of headtilt's own functions a run makes, in how many files, with how many switches."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<"):
            calls.append((code.co_filename.removeprefix(f"{SOURCE}/"), code.co_name))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    files = [file for file, _ in calls]
    return {
        "calls": len(calls),
        "functions": len(set(calls)),
        "files": sorted(set(files)),
        "switches": sum(one != other for one, other in pairwise(files)),
    }


def main() -> None:
    """Count, and store the figures."""
    images = load("digits", "fit", limit=208).floats()
    robust = headtilt.ITS(zoo.load("digits"), **{**accurate(affine_levels()), "search": Joint(budget=48)})
    robust.fit(images[8:], recipe=HeadRecipe(looks=1, views=8, epochs=1, hidden=16))
    robust.search(images[:8])
    found = counted(lambda: robust.search(images[:8]))
    write_json(OUT, {**found, **metadata("python -m benchmarks.switches")})
    sys.stdout.write(f"{found['calls']} calls, {found['functions']} functions, {len(found['files'])} files, ")
    sys.stdout.write(f"{found['switches']} switches\n")


if __name__ == "__main__":
    main()

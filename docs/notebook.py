"""Write the notebooks of examples/ from the tutorial and the tasks, with their outputs: ``python docs/notebook.py``.

``python docs/notebook.py signs onnx`` runs some of them. With ``--text`` nothing runs, and their words alone are
renewed. What a block prints is written below it, on the page and in the notebook alike. A task's numbers go to
results/task-NAME.json.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import RESULTS, ROOT

TASKS = ("photographs", "signs", "specimens", "own-network", "onnx")
PAGES = {"tutorial": ROOT / "docs" / "tutorial.md"} | {name: ROOT / "docs" / "tasks" / f"{name}.md" for name in TASKS}
# What a block printed is the text block right behind it.
FENCE = re.compile(r"^```(?:\{\.)?(\w+)([^\n]*)\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"plot\.save\(.*?, \"([\w-]+\.png)\"\)")
KEPT = {"search.png": ROOT / "docs" / "images" / "explain.png"}  # pictures that a page shows
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BAR = re.compile(r" % \d+:\d\d:\d\d ETA")
SIZES = re.compile(r"^FIT, TEST = \d+, \d+", re.MULTILINE)
CLOCK = "import json, time; print(json.dumps([time.process_time(), globals().get('numbers'), globals().get('FIT')]))"


def place(name: str) -> Path:
    """Return where a notebook lies."""
    return ROOT / "examples" / f"{name}.ipynb"


def cell(kind: str, text: str, number: int) -> dict[str, Any]:
    """Return a cell of a notebook."""
    found: dict[str, Any] = {
        "cell_type": kind,
        "id": f"cell-{number:02}",
        "metadata": {},
        "source": text.strip("\n").splitlines(keepends=True),
    }
    return {**found, "execution_count": None, "outputs": []} if kind == "code" else found


def cells(page: str, up: str) -> list[tuple[str, str]]:
    """Return kind and text of each cell: Python blocks and `headtilt` commands become code, everything else text."""
    # Links and pictures lead out of docs/ from where the notebook lies.
    page = re.sub(r"\]\((?!https?:)([\w./-]+)", lambda match: f"]({os.path.normpath(f'{up}/{match[1]}')}", page)
    found: list[tuple[str, str]] = []
    at = 0
    for fence in FENCE.finditer(page):
        found.append(("markdown", page[at : fence.start()]))
        if fence[1] == "python":
            found.append(("code", fence[3]))
            pictures = PICTURE.findall(fence[3])
            found += [("code", f'from IPython.display import Image\n\nImage("{name}")') for name in pictures]
        elif fence[3].startswith("$ headtilt "):
            found.append(("code", re.sub(r"^\$ ", "!", fence[3], flags=re.MULTILINE)))
        else:
            found.append(("markdown", fence[0]))
        at = fence.end()
    return [(kind, text) for kind, text in [*found, ("markdown", page[at:])] if text.strip()]


def notebook(name: str) -> dict[str, Any]:
    """Return the notebook of a page, not yet run."""
    path = PAGES[name]
    up = f"../docs/{path.parent.relative_to(ROOT / 'docs').as_posix()}"
    # A page's generated block shows what the notebook's own cells do.
    text = re.sub(r"<!--= task .*?<!--/-->\n*", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return {
        "cells": [cell(kind, text, number) for number, (kind, text) in enumerate(cells(text, up))],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def run(made: dict[str, Any], folder: str) -> tuple[dict[str, Any], float, Any, Any]:
    """Return a notebook with its outputs, the processor's seconds, and the page's `numbers` and `FIT`."""
    import nbformat
    from nbclient import NotebookClient

    whole = {**made, "cells": [*made["cells"], cell("code", CLOCK, len(made["cells"]))]}
    node = nbformat.reads(json.dumps(whole), as_version=4)
    # Commands find this environment, and write to it as to a file: no colours, no moving bars.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"PATH": path, "NO_COLOR": "1", "COLUMNS": "100", "TTY_COMPATIBLE": "0"}
    NotebookClient(node, timeout=None, resources={"metadata": {"path": folder}}).execute()
    seconds, numbers, fit = json.loads(node.cells.pop().outputs[-1].text)
    for one in node.cells:
        one.metadata.clear()  # when it ran
        if one.cell_type == "code":  # progress bars, and where this machine keeps things
            one.outputs = [part for part in one.outputs if part.get("name") != "stderr"]
            for part in one.outputs:
                if "text" in part:
                    part.text = plain(part.text)
    return json.loads(nbformat.writes(node)), seconds, numbers, fit


def plain(text: str) -> str:
    """Return what a command said, without colours, and without the bars that it drew while it ran."""
    lines = [line.rstrip() for line in ESCAPES.sub("", text).replace("\r\n", "\n").split("\n")]
    return "\n".join(line for line in lines if not BAR.search(line))


def printed(one: dict[str, Any]) -> str:
    """Return what a cell wrote to its standard output."""
    return "".join("".join(part["text"]) for part in one.get("outputs", ()) if part.get("name") == "stdout")


def with_outputs(page: str, made: dict[str, Any]) -> str:
    """Return a page with what its notebook printed below each block."""
    ran = [one for one in made["cells"] if one["cell_type"] == "code"]
    said = {"".join(one["source"]).strip(): printed(one).strip("\n") for one in ran}

    def block(fence: re.Match[str]) -> str:
        source = re.sub(r"^\$ ", "!", fence[3], flags=re.MULTILINE).strip()
        head = f"```{fence[0][3:].partition(chr(10))[0]}\n{fence[3]}```"
        if source not in said:
            return fence[0]
        return f"{head}\n\n```text\n{said[source]}\n```" if said[source] else head

    return FENCE.sub(block, page)


def report(name: str, numbers: dict[str, float], fit: int, processor: float, wall: float) -> dict[str, Any]:
    """Return what is stored of a task."""
    from headtilt.paper.experiments.report import metadata

    about = metadata(f"python docs/notebook.py {name}")
    return {"task": name, "fit_images": fit, **numbers, "processor_seconds": processor, "seconds": wall, **about}


def retold(name: str) -> dict[str, Any]:
    """Return the notebook as it is stored, outputs and all, with the words of its page as they are now."""
    before, now = json.loads(place(name).read_text(encoding="utf-8")), notebook(name)
    ran = {"".join(one["source"]): one for one in before["cells"] if one["cell_type"] == "code"}
    code = ["".join(one["source"]) for one in now["cells"] if one["cell_type"] == "code"]
    if code != list(ran):
        raise SystemExit(f"{name}: its code has changed, so that it must run: python docs/notebook.py {name}")
    cells = [{**ran.get("".join(one["source"]), one), "id": one["id"]} for one in now["cells"]]
    return {**before, "cells": cells}


def write(name: str, made: dict[str, Any]) -> None:
    """Write a notebook."""
    place(name).write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(names: list[str]) -> None:
    """Run the notebooks named, or all, and write them with what they gave."""
    from headtilt.paper.experiments.report import write_json

    if "--text" in names:
        for name in [name for name in names if name != "--text"] or PAGES:
            write(name, retold(name))
        return
    for name in names or PAGES:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            made, processor, numbers, fit = run(notebook(name), folder)
            for picture in Path(folder).glob("*.png"):
                if picture.name in KEPT or picture.name.startswith("task-"):
                    (KEPT.get(picture.name) or RESULTS / picture.name).write_bytes(picture.read_bytes())
        wall = time.perf_counter() - start
        write(name, made)
        page = PAGES[name]
        page.write_text(with_outputs(page.read_text(encoding="utf-8"), made), encoding="utf-8")
        if numbers is not None:
            write_json(RESULTS / f"task-{name}.json", report(name, numbers, fit, processor, wall))
        print(f"{name}: {wall:.0f} s, {processor:.0f} s of the processor")


if __name__ == "__main__":
    main(sys.argv[1:])

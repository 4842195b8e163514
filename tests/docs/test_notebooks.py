"""The notebooks are those of their pages, were run from top to bottom, and still run."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest
import torch
from figures import stored
from notebook import FENCE, PAGES, SIZES, TASKS, notebook, place, printed

# Where a task needs data that lies nowhere but in the folder of the variable HEADTILT_DATA, and where it needs more.
DATA = {
    "photographs": ("mobilenet_v2_imagenet", "imagenet-mini"),
    "signs": ("gtsrb32",),
    "specimens": ("mobilenet_v2_imagenet", "imagenet-mini", "si-score-mini"),
    "onnx": ("efficientnet_lite0_imagenet", "imagenet-mini"),
}
PACKAGES = {"photographs": ("skimage", "transformers"), "specimens": ("skimage", "transformers")}
PACKAGES |= {"onnx": ("skimage", "onnxruntime")}
# Images to fit on and to measure with: so few that no head is trained, which takes its time.
SMALL = {"own-network": (40, 20), "signs": (40, 10), "photographs": (8, 2), "specimens": (9, 2), "onnx": (8, 2)}


def shipped(name: str) -> list[dict[str, Any]]:
    found = json.loads(place(name).read_text(encoding="utf-8"))["cells"]
    return [{**one, "source": "".join(one["source"])} for one in found]


@pytest.mark.parametrize("name", PAGES)
def test_a_notebook_holds_the_cells_of_its_page(name):
    made = [(one["cell_type"], "".join(one["source"])) for one in notebook(name)["cells"]]
    assert [(one["cell_type"], one["source"]) for one in shipped(name)] == made, f"run python docs/notebook.py {name}"


@pytest.mark.parametrize("name", PAGES)
def test_a_notebook_ships_with_what_it_printed_and_drew(name):
    code = [one for one in shipped(name) if one["cell_type"] == "code"]
    assert [one["execution_count"] for one in code] == list(range(1, len(code) + 1))
    for one in code:
        assert not [part for part in one["outputs"] if part["output_type"] == "error"]
        assert bool(printed(one)) >= ("print(" in one["source"]), one["source"]
        if "Image(" in one["source"] and "IPython" in one["source"]:
            assert "image/png" in one["outputs"][0]["data"]
    outputs = json.dumps([one["outputs"] for one in code])
    assert not re.search(r'[" (](/(home|root|work|tmp|Users)/)', outputs), "a path of the machine it ran on"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_below_a_block_what_the_block_printed(name):
    said = {one["source"].strip(): printed(one).strip("\n") for one in shipped(name) if one["cell_type"] == "code"}
    text = PAGES[name].read_text(encoding="utf-8")
    shown = {re.sub(r"^\$ ", "!", fence[3], flags=re.MULTILINE).strip(): fence[4] for fence in FENCE.finditer(text)}
    blocks = [source for source in shown if source in said]
    assert len(blocks) >= 4
    for source in blocks:
        assert (shown[source] or "").strip("\n") == said[source], f"run python docs/notebook.py {name}"


@pytest.mark.parametrize("name", TASKS)
def test_a_task_says_what_its_notebook_measured(name):
    report = stored(f"task-{name}")
    numbers = next(printed(one) for one in shipped(name) if "numbers = {" in one["source"])
    for key in ("test_images", "tilted_bare", "tilted_wrapped", "upright_bare", "upright_wrapped"):
        assert f"'{key}': {report[key]}" in numbers
    assert report["tilted_wrapped"] > report["tilted_bare"] + 3  # of 149 images, three are two points
    assert f"FIT, TEST = {report['fit_images']}, " in PAGES[name].read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TASKS)
def test_the_cells_of_a_task_run_one_after_the_other(name, tmp_path, monkeypatch):
    data = os.environ.get("HEADTILT_DATA")
    missing = [part for part in DATA.get(name, ()) if data is None or not os.path.exists(f"{data}/{part}")]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} in the folder of HEADTILT_DATA")
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package, reason=f"the task shows what comes with {package}")
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "notebook"}
    with torch.random.fork_rng():
        for one in shipped(name):
            if one["cell_type"] == "code" and "IPython" not in one["source"]:
                source = SIZES.sub("FIT, TEST = {}, {}".format(*SMALL[name]), one["source"])
                exec(compile(source, f"{name}.ipynb", "exec"), space)
    assert 0 <= space["numbers"]["tilted_bare"] <= 100
    assert space["numbers"]["test_images"] <= SMALL[name][1]
    assert (tmp_path / f"task-{name}.png").stat().st_size > 10_000

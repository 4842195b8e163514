"""Every Python block of the documentation runs, page by page, and every command is run, or parsed at least."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import headtilt.its
from headtilt.calibration.head import HeadRecipe
from headtilt.cli import app
from tests.toys import whole_fits

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(<!-- no-run: (?P<why>.+) -->\n+)?^```(?P<info>[^\n`]+)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
SYSTEM = {"pip", "curl", "source", "python3"}  # what is no part of this package


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, whether it is to be run, why not, and where it stands."""

    language: str
    runs: bool
    why: str | None
    body: str
    line: int


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        info = fence["info"].strip("{} ").replace(".", " ").split()
        line = text[: fence.start("body")].count("\n")
        found.append(Block(info[0], "no-run" not in info, fence["why"], fence["body"], line))
    return found


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(words: list[str]) -> None:
    """Raise unless the command line understands the words; nothing is done."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("headtilt", list(words))
    command, _, rest = (group.commands[words[0]], words[0], words[1:])
    with command.make_context(words[0], rest, parent=context):
        pass


def run_command(line: str, run: bool) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "headtilt":
        parse(words[1:])
        if run:
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, (line, result.output)
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), line
    elif words[0] == "python":
        file = f"{words[2].replace('.', '/')}.py" if words[1] == "-m" else words[1]
        source = (ROOT / file).read_text(encoding="utf-8")
        assert all(f'"{word}"' in source for word in words if word.startswith("--")), line
    elif words[0].endswith("/pip") and "[" not in line:
        assert "--index-url" in words, f"{line}: neither an extra of ours nor a build of torch"
    elif words[0].endswith("/pip"):
        extras = re.findall(r"\[(.+)\]", line)[0].split(",")
        declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert all(f"\n{extra} = [" in declared for extra in extras), line
    else:
        assert words[0] in SYSTEM, f"{line}: neither run nor known"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what makes heads small, for pages that are not about how good they are."""
    recipe = partial(HeadRecipe, hidden=16, looks=1, epochs=1, batch=16)
    return lambda: monkeypatch.setattr(headtilt.its, "HeadRecipe", recipe)


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path)], ids=name)
def test_the_blocks_of_a_page_run_one_after_the_other(path, workshop, small, tmp_path, monkeypatch):
    page = name(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADTILT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("HEADTILT_DATA", raising=False)
    space: dict[str, Any] = {"__name__": "page"}
    tutorial = page == "docs/tutorial.md"  # which must do without anything, and be as good as it says
    if not tutorial:
        shutil.copytree(workshop, tmp_path, dirs_exist_ok=True)
        small()
    if page == "README.md":
        space |= own_model_and_images()
    with torch.random.fork_rng(), whole_fits() if tutorial else nullcontext():
        for block in blocks(path):
            if block.language == "python" and block.runs and path.parent.name != "tasks":  # which run as notebooks
                exec(compile("\n" * block.line + block.body, page, "exec"), space)
            elif block.language == "console":
                for line in block.body.splitlines():
                    assert line.startswith("$ "), f"{page}: a command starts with $, got {line!r}"
                    run_command(line[2:], block.runs and page != "README.md")
    if tutorial:
        reached_what_it_promises(space, tmp_path)


def own_model_and_images() -> dict[str, Any]:
    from headtilt.paper.data import load
    from headtilt.sources import zoo

    upright = load("digits", "fit", limit=60).floats()
    return {"model": zoo.load("digits"), "images": upright[:4], "upright_images": upright}


def reached_what_it_promises(space: dict[str, Any], folder: Path) -> None:
    """Assert that the reader ends with a fitted Hugging Face model that is right where the bare one is wrong."""
    import headtilt as ht
    from headtilt.paper.data import load
    from headtilt.paper.data.perturb import draw, perturb_dataset

    assert {"search.png", "second.png", "fitted", "turned-back"} <= {path.name for path in folder.iterdir()}
    digits = load("digits", "test", limit=200)
    tilted = perturb_dataset(digits, draw("rotation", 200))
    found = space["again"].search(tilted.images.expand(-1, 3, -1, -1))
    bare = (found.bare.argmax(1) == tilted.labels).float().mean()
    assert isinstance(space["again"], ht.ITS)
    assert (found.labels == tilted.labels).float().mean() > bare + 0.4


def test_a_python_block_that_is_not_run_says_why():
    silent = [
        f"{name(path)}, line {block.line}"
        for path in PAGES
        for block in blocks(path)
        if block.language == "python" and not block.runs and not block.why
    ]
    assert silent == [], "put <!-- no-run: reason --> before the block"


def test_a_wrong_option_in_a_command_is_found_out():
    with pytest.raises(Exception, match="No such option"):
        run_command("headtilt classify x.png --model hf:x --no-such-option", run=False)

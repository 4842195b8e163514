"""Which stored results today's code could not have written."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headtilt.paper.experiments.methods import BUNDLE, METHODS
from headtilt.paper.experiments.report import changed_since, to_json
from headtilt.paper.experiments.reproduce import ITEMS, item

Accepts = Callable[[list[str]], str | None]


def stale(folder: Path, accepts: Accepts) -> dict[str, list[str]]:
    """Return for each JSON file of a folder why it is stale; files that are not are left out.

    Args:
        folder: Of the results.
        accepts: Returns why the command line refuses these words, or None where it takes them.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if why := reasons(path, report, accepts):
            found[path.name] = why
    return found


def older(folder: Path) -> dict[str, list[str]]:
    """Return for each JSON file of a folder which rooms of the source changed since it was written, if any."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        known = json.loads(path.read_text(encoding="utf-8")).get("commit")
        if known and (rooms := changed_since(known)):
            found[path.name] = rooms
    return found


def reasons(path: Path, report: dict[str, Any], accepts: Accepts) -> list[str]:
    """Return why a stored report could not be written by today's code, in sentences; none where it could."""
    said = [*_command(path, report.get("command"), accepts)]
    if not report.get("commit"):
        said.append("It does not say by which commit it was written.")
    if "dataset" in report and isinstance(report.get("methods"), dict):
        said += _methods(report["methods"])
    if report.get("name") in ITEMS:
        said += _item(report)
    return said


def _command(path: Path, command: Any, accepts: Accepts) -> list[str]:
    if not isinstance(command, str) or not command:
        return ["It does not say which command wrote it."]
    program, *words = shlex.split(command)
    if program == "headtilt":
        refused = accepts(words)
        said = [] if refused is None else [f"Its command is refused: {refused}"]
        if words[:1] == ["evaluate"] and not _names(words, path.stem):
            said.append(f"Its command writes another file; --name {path.stem} would write this one.")
        return said
    if program == "python":
        place = words[1].replace(".", "/") + ".py" if words[:1] == ["-m"] else words[0]
        return [] if (path.parent.parent / place).exists() else [f"Its command runs {place}, which is not there."]
    return [f"Its command starts with {program}, not with headtilt or python."]


def _names(words: list[str], stem: str) -> bool:
    """Return whether the words of a command hold ``--name STEM``."""
    return any(words[place : place + 2] == ["--name", stem] for place in range(len(words))) or f"--name={stem}" in words


def _methods(methods: dict[str, Any]) -> list[str]:
    return [f"It has the method {name}, which is no more." for name in methods if name not in (*METHODS, BUNDLE)]


def _item(report: dict[str, Any]) -> list[str]:
    module = item(report["name"])
    said = []
    if report.get("quick"):
        said.append("It has quick sizes.")
    elif report.get("sizes") != json.loads(to_json(asdict(module.FULL))):
        said.append("Its sizes are others than today's.")
    if report.get("paper") != json.loads(to_json(module.PAPER)):
        said.append("What it quotes of the paper is not what is quoted today.")
    judge = getattr(module, "judge", None)
    if judge is not None:
        try:
            same = json.loads(to_json(judge(report))) == report.get("verdict")
        except (KeyError, TypeError, AttributeError):
            same = False
        if not same:
            said.append("Its verdict is not the one that today's code gives its numbers.")
    return said

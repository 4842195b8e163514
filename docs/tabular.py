"""Tables in Markdown, and where their figures come from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from figures import shown


def grid(head: list[str], rows: list[list[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *([part.replace("|", "\\|") for part in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(name: str, report: dict[str, Any]) -> str:
    """Return how a result was made: its command, on what, when, and the file itself."""
    machine = report.get("hardware") or report.get("machine") or {}
    on = machine.get("gpu") or f"{machine.get('cpu', 'a CPU')}, {machine.get('threads', '?')} thread(s)"
    when = f", {report['date'][:10]}" if "date" in report else ""
    return f"`{report['command']}` on {on}{when}. All numbers: [{name}.json](../results/{name}.json)."


def folded(title: str, body: str) -> str:
    """Return text behind a line that opens it, on a code host and on the site alike."""
    return f'<details markdown="1"><summary>{title}</summary>\n\n{body}\n\n</details>'


# Keys of result files that say in plain words what they hold.
PLAIN = {"client_in_peace": "client without attack", "client_in_siege": "client during attack"}


def words(key: str) -> str:
    """Return a key of a result file as words."""
    if key in PLAIN:
        return PLAIN[key]
    return re.sub(r"\bits(3?)\b", lambda match: f"ITS{'³' if match[1] else ''}", key.replace("_", " "))


def scalars(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield every number, word and truth value below, with the words that lead to it; long lists by their length."""
    if isinstance(value, dict) and {"median", "low", "high"} <= value.keys():
        yield " · ".join(path), f"{shown(value['median'])} ({shown(value['low'])} to {shown(value['high'])})"
    elif isinstance(value, dict) and {"mean", "std"} <= value.keys():
        yield " · ".join(path), f"{shown(value['mean'])} ± {shown(value['std'])}"
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from scalars(part, (*path, words(str(key))))
    elif isinstance(value, list):
        plain = [part for part in value if not isinstance(part, (dict, list))]
        short = len(plain) == len(value) <= 12
        yield " · ".join(path), ", ".join(map(shown, plain)) if short else f"{len(value)} of them, in the file"
    else:
        yield " · ".join(path), shown(value)


def without(value: Any, names: set[str]) -> Any:
    """Return a report without the parts of those names, however deep they lie."""
    if not isinstance(value, dict):
        return value
    return {key: without(part, names) for key, part in value.items() if key not in names}

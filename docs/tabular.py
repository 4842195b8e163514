"""Tables in Markdown, and where their figures come from."""

from __future__ import annotations

from typing import Any


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

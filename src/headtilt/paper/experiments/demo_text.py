"""What `headtilt demo` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtilt.paper.experiments.names import NAMES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BARE, OURS = NAMES["vanilla"], NAMES["accurate+gate"]
PROMISE = 0.5  # points of upright accuracy that the gate may cost


def say(console: Console, report: dict[str, Any], words: str, paths: Sequence[Path], seconds: float) -> None:
    """Print the table, who loses and why, one digit in words, and where the pictures are."""
    from rich.padding import Padding
    from rich.rule import Rule

    methods = report["methods"]
    bare, ours = methods[BARE], methods[OURS]
    networks = "one network" if report["networks"] == 1 else f"{report['networks']} networks"
    console.print(Rule("headtilt demo", style="dim"))
    console.print(
        f"{report['count']} test digits, each turned by any angle, scaled by 1 ± ¼ and sheared by ± ¼; {networks} "
        f"trained on upright digits only. Nothing is retrained, and no label is used."
    )
    console.print(Padding(table(report), (0, 0, 0, 1)))
    for sentence in verdict(report):
        console.print(sentence)
    console.print(
        f"\n[bold]Tilted {bare['accuracy']:.0f} → {ours['accuracy']:.0f} %, upright {bare['upright_accuracy']:.1f} → "
        f"{ours['upright_accuracy']:.1f} %[/bold], fitted in {ours['fit_seconds']:.0f} s per network."
    )
    console.print("\n[bold]One digit in words[/bold] (search.png)")
    console.print(Padding(words, (0, 0, 0, 2)))
    console.print(f"\n[bold]Pictures[/bold] in {paths[0].parent}/: {', '.join(path.name for path in paths)}")
    console.print(f"[dim]{seconds:.0f} s. Next: headtilt evaluate digits --networks 5, or --help.[/dim]")


def verdict(report: dict[str, Any]) -> list[str]:
    """Return which methods lose to the bare model, and why, in a few sentences."""
    methods = report["methods"]
    tilted = [name for name, entry in methods.items() if "tilted" in entry["loses"]]
    upright = [name for name, entry in methods.items() if "upright" in entry["loses"]]
    said = []
    if tilted:
        said.append(f"[red]▼[/red] Worse than the bare model on tilted digits: {'; '.join(tilted)}.")
    if upright:
        said.append(f"[yellow]▽[/yellow] Lose more than {PROMISE} points on upright digits: {'; '.join(upright)}.")
    said.append(
        "Why: energy prefers some classes in any pose, so the most confident view often shows the wrong digit. A mean "
        "counts one upright view and sixteen tilted ones alike. Balanced energy corrects the logits with a linear map. "
        "The head of headtilt reads the network at several depths, and learned from unlabelled upright "
        "digits which views to trust. The gate keeps the model's own answer unless the gain that it expects from the "
        "new one is large enough beside the risk for upright images."
    )
    return said


def table(report: dict[str, Any]) -> Table:
    """Return the table for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    total = report["count"] * report["networks"]
    drawn = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 0, 0, 1))
    drawn.add_column("method", no_wrap=True)
    for heading in ("tilted %", "", "right", "upright %", "", "views", "ms/image"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for name, entry in report["methods"].items():
        marks = {"tilted": "[red]▼[/red]", "upright": "[yellow]▽[/yellow]"}
        mark = {kind: marks[kind] if kind in entry["loses"] else "" for kind in marks}
        style = "bold green" if name == OURS else "dim" if name == BARE else ""
        drawn.add_row(
            name,
            f"{entry['accuracy']:.1f}",
            mark["tilted"],
            f"{entry['right']}/{total}",
            f"{entry['upright_accuracy']:.1f}",
            mark["upright"],
            f"{entry['views_per_image']:.0f}",
            f"{entry['ms_per_image']:.1f}",
            style=style,
        )
    return drawn

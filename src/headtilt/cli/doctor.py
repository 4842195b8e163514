"""The command that looks around: ``doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headtilt.cli.app import Data, app
from headtilt.errors import OptionError


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "[dim]$[/dim] headtilt doctor\n\n"
    "[dim]$[/dim] headtilt doctor --model onnx:net.onnx --images photos/"
)
def doctor(
    data: Data = None,
    model: Annotated[
        str | None, typer.Option(metavar="SPEC", help="A classifier to check, together with --images.")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of upright images of the kind that the classifier was trained on."),
    ] = None,
) -> None:
    """Show what is installed and found. With --model and --images: check the model's preprocessing."""
    from headtilt.paper.experiments import report

    if (model is None) != (images is None):
        raise OptionError("model and images must be given together: --model SPEC --images FOLDER.")
    if model is not None and images is not None:
        _examine(model, images)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    versions = report.metadata("")["versions"]
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    for extra, packages in report.extras().items():
        found = [f"{name} {version or '[red]missing[/red]'}" for name, version in packages]
        missing = any(version is None for _, version in packages)
        table.add_row(
            escape(f"[{extra}]"), ", ".join(found) + (f"  → pip install 'headtilt\\[{extra}]'" if missing else "")
        )
    for number, device in enumerate(report.devices()):
        table.add_row("" if number else "devices", escape(device))
    for number, (name, place) in enumerate(report.data_found(data).items()):
        table.add_row(
            "" if number else "data", f"{name}: " + ("[dim]not found[/dim]" if place is None else escape(place))
        )
    for kind, names in report.zoo_found().items():
        table.add_row(f"{kind} networks", ", ".join(names) or "[dim]none[/dim]")
    Console(highlight=False).print(table)


def _examine(model: str, folder: Path) -> None:
    """Print how a model answers on the images of a folder, and what looks wrong."""
    from headtilt.apps.fitting import read
    from headtilt.sources import registry as door
    from headtilt.sources.health import MOST_IMAGES, health
    from headtilt.sources.images import find
    from headtilt.sources.pretrained import wrapped

    paths = find([folder])
    if not paths:
        raise OptionError(f"images must be a folder with images; {folder} has none.")
    robust = wrapped(door.load(model))
    step = max(1, len(paths) // MOST_IMAGES)
    squares, _ = read(paths[::step][:MOST_IMAGES], robust.adapted, lambda what, done, total: None)  # noqa: ARG005
    found = health(robust.predictor, squares)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{escape(robust.adapted.name)} on {found.images} images of {escape(str(folder))}")
    console.print(f"mean confidence {found.confidence:.0%}, chance {found.chance:.1%}".replace("%", " %"))
    console.print(f"{found.agreement:.0%} of answers stay when images are turned by 2°".replace("%", " %"))
    for sentence in found.advice() or ["Nothing looks wrong."]:
        console.print(escape(sentence))

"""The command that looks around: ``doctor``."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headtilt.cli.app import Data, app


@app.command()
def doctor(data: Data = None) -> None:
    """Say what is installed and found: packages, devices, data sets, trained networks."""
    from headtilt.paper.experiments import report

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

"""``headtilt reproduce``: the paper's tables, figures and examples."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from headtilt.cli.app import Data, Device, app, command, progress
from headtilt.errors import HeadtiltError


@app.command(
    epilog="[dim]$[/dim] headtilt reproduce table1 --device cuda\n\n"
    "[dim]$[/dim] headtilt reproduce all --quick --out quick\n\n"
    "[dim]$[/dim] headtilt reproduce siscore --model hf:google/vit-base-patch16-224\n\n"
    "Items: table1, confidence, rotated-mnist, reconstructions, change-of-mind, siscore, runtime, hyperparameters, "
    "markov, order, examples. Interrupted, a run goes on where it stopped when the same command is given again."
)
def reproduce(
    name: Annotated[str, typer.Argument(help="An item, or all of them: all.")],
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: minutes on two cores.")] = False,
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="Folder for NAME.json and NAME.png.")] = Path("results"),
    data: Data = None,
    datasets: Annotated[
        str | None, typer.Option(help="Data sets in place of the item's own, separated by commas; keeps what is done.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Classifier for siscore and examples: hf:NAME, …")] = None,
    redraw: Annotated[bool, typer.Option("--redraw", help="Draw the figures again from stored numbers.")] = False,
) -> None:
    """Reproduce a table, figure or example of the paper: its numbers as JSON, its figure as PNG."""
    from headtilt.paper.experiments import reproduce as items
    from headtilt.paper.experiments.report import calm_threads, resolve_device
    from headtilt.paper.experiments.reproduce.study import Study
    from headtilt.paper.experiments.reproduce.study import redraw as draw_again
    from headtilt.paper.experiments.reproduce.study import reproduce as run

    calm_threads()
    chosen = [items.item(one) for one in (items.ITEMS if name == "all" else (name,))]
    where = resolve_device(device)
    names = None if datasets is None else tuple(part.strip() for part in datasets.split(",") if part.strip())
    aside, failed = Console(stderr=True, highlight=False, soft_wrap=True), 0
    for item in chosen:
        start = time.perf_counter()
        try:
            if redraw:
                paths = draw_again(item, out)
            else:
                with progress() as tell:
                    study = Study(out, quick, where, data, names, model, progress=tell, command=command())
                    paths = run(item, study)
        except HeadtiltError as error:
            if len(chosen) == 1:
                raise
            failed += 1
            aside.print(f"[red]error: {item.NAME}: {escape(' '.join(str(error).split()))}[/red]")
            continue
        files = ", ".join(escape(str(path)) for path in paths)
        aside.print(f"[bold]{item.NAME}[/bold] [dim]{time.perf_counter() - start:.0f} s, wrote[/dim] {files}")
    if failed:
        raise typer.Exit(2)

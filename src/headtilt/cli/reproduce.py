"""``headtilt reproduce``: the paper's tables, figures and examples."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from headtilt.cli.app import Data, Device, app, command, progress
from headtilt.errors import HeadtiltError, OptionError

MORE = 75  # exit code: there is more to do (EX_TEMPFAIL of sysexits.h)


@app.command(
    epilog="[dim]$[/dim] headtilt reproduce table1 --device cuda\n\n"
    "[dim]$[/dim] headtilt reproduce all --quick --out quick\n\n"
    "[dim]$[/dim] headtilt reproduce all --device cuda --jobs 14 --minutes 8\n\n"
    "[dim]$[/dim] headtilt reproduce order --set networks=2 --set images=200\n\n"
    "[dim]$[/dim] headtilt reproduce --check --out results\n\n"
    "[dim]$[/dim] headtilt reproduce siscore --model hf:google/vit-base-patch16-224\n\n"
    "Items: table1, confidence, rotated-mnist, reconstructions, change-of-mind, siscore, runtime, hyperparameters, "
    "markov, order, examples. If a run is stopped, give the same command again: it continues."
)
def reproduce(
    name: Annotated[str | None, typer.Argument(help="One item (see below), or all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: minutes on two cores.")] = False,
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="Folder for NAME.json and NAME.png.")] = Path("results"),
    data: Data = None,
    datasets: Annotated[
        str | None, typer.Option(help="Other data sets than the item's own, separated by commas. Keeps finished parts.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Classifier for siscore and examples: hf:NAME, …")] = None,
    redraw: Annotated[bool, typer.Option("--redraw", help="Draw the figures again from stored numbers.")] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0, help="Stop after this time with exit code 75. The same command continues. Skips finished items."
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="How many units of work to do at the same time, each in a process of its own.")
    ] = 1,
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Another size than the item's own, as in --set runs=5. May be repeated."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="List stored files in --out that are out of date: today's code would not write them."
        ),
    ] = False,
) -> None:
    """Reproduce a table, figure or example of the paper: numbers as JSON, figures as PNG."""
    if check:
        _check(out)
        return
    if name is None:
        raise OptionError("NAME is missing: give an item or all, as in headtilt reproduce table1. Or give --check.")
    from headtilt.model.device import limit_threads, resolve_device
    from headtilt.paper.experiments import reproduce as items
    from headtilt.paper.experiments.reproduce.study import Study, UnfinishedError, done
    from headtilt.paper.experiments.reproduce.study import redraw as draw_again
    from headtilt.paper.experiments.reproduce.study import reproduce as run
    from headtilt.paper.experiments.reproduce.workers import Workers

    limit_threads()
    chosen = [items.item(one) for one in (items.ITEMS if name == "all" else (name,))]
    where = resolve_device(device)
    names = None if datasets is None else tuple(part.strip() for part in datasets.split(",") if part.strip())
    aside, failed = Console(stderr=True, highlight=False, soft_wrap=True), 0
    until = None if minutes is None else time.monotonic() + 60 * minutes
    with nullcontext() if jobs == 1 else Workers(jobs) as workers:
        study = Study(
            out, quick, where, data, names, model, _sizes(sizes), command=command(), until=until, workers=workers
        )
        for item in chosen:
            start = time.perf_counter()
            if until is not None and done(item, study):
                continue
            try:
                if redraw:
                    paths = draw_again(item, out)
                else:
                    with progress() as tell:
                        paths = run(item, replace(study, progress=tell))
            except UnfinishedError as error:
                aside.print(f"[yellow]{item.NAME}[/yellow] {escape(str(error))} Give the same command again.")
                raise typer.Exit(MORE) from error
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


def _sizes(words: list[str] | None) -> dict[str, Any]:
    """Return sizes by name from words such as "runs=5"."""
    found = {}
    for word in words or []:
        name, _, value = word.partition("=")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError as error:
            raise OptionError(f"--set must be NAME=VALUE with a number, true, false or null; got {word!r}.") from error
    return found


def _check(folder: Path) -> None:
    """Print which stored files are stale and why, and exit with 1 where some are."""
    from headtilt.paper.experiments.stale import older, stale

    if not folder.is_dir():
        raise OptionError(f"out must be a folder of stored results for --check; {folder} is not there.")
    console = Console(highlight=False, soft_wrap=True)
    found = stale(folder, _refusal)
    for file, why in found.items():
        console.print(f"[red]{escape(file)}[/red]: {escape(' '.join(why))}")
    for file, rooms in older(folder).items():
        if file not in found:
            console.print(f"[yellow]{escape(file)}[/yellow]: changed since: {escape(', '.join(rooms))}.")
    files = len(list(folder.glob("*.json")))
    console.print(f"{len(found)} of {files} stored files are stale.")
    if found:
        raise typer.Exit(1)


def _refusal(words: list[str]) -> str | None:
    """Return why the command line refuses these words, without running anything; None where it takes them."""
    commands = getattr(typer.main.get_command(app), "commands", {})
    if not words or words[0] not in commands:
        return f"there is no command {' '.join(words[:1])!r}."
    usage_error: type[Exception] = typer.BadParameter.__mro__[
        1
    ]  # typer carries its own click, or uses the installed one
    try:
        commands[words[0]].make_context(words[0], words[1:])
    except usage_error as error:
        return str(getattr(error, "message", error))
    return None

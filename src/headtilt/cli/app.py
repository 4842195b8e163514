"""What all commands share: the app, its errors, common options, progress."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from typer.core import TyperGroup

import headtilt
from headtilt.errors import HeadtiltError
from headtilt.progress import Progress

# Commands as help lists them: what a newcomer needs stands first.
PANELS = {
    "Start": ("demo", "playground", "doctor"),
    "Your images": ("classify", "explain", "fit", "canonicalise", "audit", "cost"),
    "Many images": ("predict", "serve"),
    "Research": ("evaluate", "train", "reproduce"),
}


class Guarded(TyperGroup):
    """Commands whose errors are one line: ``error: …`` and exit code 2; 130 after Ctrl-C."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, in the order of `PANELS`."""
        listed = [name for names in PANELS.values() for name in names]
        return sorted(super().list_commands(ctx), key=listed.index)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name, with its help as people should read it."""
        found: Any = super().get_command(ctx, cmd_name)
        if found is not None:
            found.help = unwrapped(found.help)
            found.rich_help_panel = next(panel for panel, names in PANELS.items() if cmd_name in names)
            hide_types_of_flags([*found.params, found.get_help_option(ctx)])
        return found

    def get_params(self, ctx: Any) -> Any:
        """Return the options before a command."""
        return hide_types_of_flags(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run the command; with --debug errors come with their traceback."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise typer.Exit(130) from error
        except BrokenPipeError:
            raise
        except (HeadtiltError, OSError) as error:
            if ctx.params.get("debug") or os.environ.get("HEADTILT_DEBUG", "") not in ("", "0"):
                raise
            said = " ".join(str(error).split())
            Console(stderr=True, soft_wrap=True, highlight=False).print(f"[red]error: {escape(said)}[/red]")
            raise typer.Exit(2) from error


def unwrapped(text: str | None) -> str | None:
    """Return help whose paragraphs are one line each: a docstring's own line breaks mean nothing on a terminal."""
    return None if text is None else re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(text))


def hide_types_of_flags(params: list[Any]) -> list[Any]:
    """Return the options; those that take no value show none: ``--force`` and not ``--force <bool>``."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


app = typer.Typer(
    cls=Guarded,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="[bold]Examples[/bold]\n\n"
    "[dim]$[/dim] headtilt demo\n\n"
    "[dim]$[/dim] headtilt fit upright-photos/ --model hf:microsoft/resnet-18 --out fitted\n\n"
    "[dim]$[/dim] headtilt classify tilted.jpg --model hf:microsoft/resnet-18 --bundle fitted",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(headtilt.__version__)
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (also: HEADTILT_DEBUG=1).")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Make any trained image classifier robust to rotation, scale and shear at inference, without retraining."""


Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, … With auto, the GPU if there is one.")]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        "--data", metavar="FOLDER", help="Folder with data sets; may be given several times. Default: HEADTILT_DATA."
    ),
]
MOST_SEED = 2**32 - 1  # numpy takes no more
Seed = Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of all random choices.")]
Limit = Annotated[int, typer.Option(min=0, help="Maximum number of test images, always the same ones; 0 for all.")]


@contextmanager
def progress(*, silent: bool = False) -> Iterator[Progress]:
    """Yield what shows progress and the time left on stderr: a bar, or a line per stage where nobody watches.

    Args:
        silent: Whether to say nothing where nobody watches.
    """
    console = Console(stderr=True)
    if silent and not console.is_terminal:
        yield lambda what, done, total: None  # noqa: ARG005
        return
    if not console.is_terminal:
        last = ""

        def line(what: str, done: int, total: int) -> None:  # noqa: ARG001
            nonlocal last
            stage = what.partition(", loss")[0]
            if stage != last:
                last = stage
                console.print(stage, highlight=False, markup=False, soft_wrap=True)

        yield line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    times = (TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn())
    with Bar(*columns, *times, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def tell(what: str, done: int, total: int) -> None:
            if bar.tasks[0].total != total:
                bar.reset(task, total=total)
            bar.update(task, completed=done, description=escape(what))

        yield tell


def command() -> str:
    """Return the command line as it was typed."""
    return shlex.join(["headtilt", *sys.argv[1:]])

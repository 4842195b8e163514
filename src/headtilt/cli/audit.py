"""The command that asks how a source's images arrive: ``audit``."""

from __future__ import annotations

import json
import random
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headtilt.cli.app import Device, Seed, app, progress
from headtilt.cli.options import (
    Bundle,
    Files,
    Labels,
    Picture,
    Size,
    Spec,
    check_picture,
    no_images,
    note,
    opened_model,
    write_picture,
)

if TYPE_CHECKING:
    from headtilt.apps.audit import Audit

NOT_UPRIGHT = 3  # exit code of --strict


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "[dim]$[/dim] headtilt audit uploads/ --model hf:google/vit-base-patch16-224\n\n"
    "[dim]$[/dim] headtilt audit test-set/ --model onnx:net.onnx --strict --json > audit.json\n\n"
    "Exit codes: 0 success, 2 error, 3 with --strict if images do not arrive upright."
)
def audit(
    files: Files,
    model: Spec,
    bundle: Bundle = None,
    images: Annotated[int, typer.Option(min=1, help="Maximum number of images, chosen at random.")] = 200,
    any_angle: Annotated[
        bool, typer.Option("--any-angle", help="Also search angles between the quarter turns. Takes longer.")
    ] = False,
    picture: Picture = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 3 unless images arrive upright.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    seed: Seed = 0,
    device: Device = "auto",
    size: Size = None,
    labels: Labels = None,
) -> None:
    """Check whether images arrive upright, turned, mirrored or mixed. Needs no labels.

    The model sees each image in eight orientations: four quarter turns, each also mirrored. Dozens of images vote. With
    a bundle the votes are more reliable; without one the model's own confidence is used.
    """
    from headtilt import plot
    from headtilt.apps import audit as auditing
    from headtilt.sources.images import survey

    check_picture(picture)
    paths = survey(files).paths
    if not paths:
        raise no_images(files)
    robust = opened_model(model, bundle, None, None, size, device, labels=labels)
    # In random order: the first of them must speak for all.
    chosen = random.Random(seed).sample(paths, min(images, len(paths)))
    with progress(silent=True) as tell:
        votes, unread = auditing.read(robust, chosen, images=len(chosen), any_angle=any_angle, tell=tell)
    found = auditing.audit(votes, unread)
    if as_json:
        sys.stdout.write(json.dumps(found.as_dict(), indent=1, ensure_ascii=False) + "\n")
    else:
        _print(found)
    if picture is not None:
        write_picture(plot.audit(found.as_dict()), picture)
    if strict and found.verdict != "upright":
        raise typer.Exit(NOT_UPRIGHT)


def _print(found: Audit) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(found.sentence)}[/bold]")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for what, words in found.lines():
        table.add_row(f"{what}:", escape(words))
    console.print(table)
    note(found.unread)

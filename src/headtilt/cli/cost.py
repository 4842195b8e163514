"""The command that says what a search costs on this machine, and what other budgets would: ``cost``."""

from __future__ import annotations

import json
import random
import sys
from itertools import islice
from typing import Annotated

import typer

from headtilt.cli.app import Device, Seed, app, progress
from headtilt.cli.options import (
    Bundle,
    Files,
    Labels,
    Picture,
    Size,
    Spec,
    check_picture,
    note,
    opened_model,
    write_picture,
)
from headtilt.errors import OptionError


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "[dim]$[/dim] headtilt cost photos/ --model hf:google/vit-base-patch16-224 --bundle fitted --picture cost.png\n\n"
    "[dim]$[/dim] headtilt cost scans/ --model onnx:net.onnx --bundle fitted --budget 8 --budget 16 --json"
)
def cost(
    files: Files,
    model: Spec,
    bundle: Bundle = None,
    images: Annotated[int, typer.Option(min=2, help="Maximum number of images, chosen at random.")] = 32,
    budget: Annotated[
        list[int] | None, typer.Option(min=1, help="Maximum views per image to try; may be given several times.")
    ] = None,
    picture: Picture = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    seed: Seed = 0,
    device: Device = "auto",
    size: Size = None,
    labels: Labels = None,
) -> None:
    """Measure views and milliseconds per image on this machine, also for other numbers of views.

    Give upright images: the command tilts them at random. Needs no labels.
    """
    import torch

    from headtilt import plot
    from headtilt.apps.rows import readable
    from headtilt.cost import costs
    from headtilt.sources.decoders import Decoders
    from headtilt.sources.images import survey

    check_picture(picture)
    paths = survey(files).paths
    robust = opened_model(model, bundle, None, None, size, device, labels=labels)
    mixed = random.Random(seed).sample(paths, len(paths))
    unread: list[str] = []
    with Decoders() as decoders:
        found = list(islice(readable(mixed, robust.adapted, 16, decoders, unread), images))
    if len(found) < 2:
        raise OptionError(f"cost needs at least two images that can be read; got {len(found)} of {len(paths)} files.")
    with progress(silent=True) as tell:
        told = costs(robust, torch.stack(found), budgets=budget, seed=seed, progress=tell)
    if as_json:
        sys.stdout.write(json.dumps(told.as_dict(), indent=1) + "\n")
    else:
        sys.stdout.write(f"{told}\n")
    if picture is not None:
        write_picture(plot.cost(told.as_dict()), picture)
    note(unread)

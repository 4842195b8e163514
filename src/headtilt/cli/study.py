"""Commands that measure: ``demo``, ``evaluate``, ``train``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from headtilt.cli.app import MOST_SEED, Data, Device, Limit, Seed, app, command, progress
from headtilt.cli.options import Bundle

if TYPE_CHECKING:
    from headtilt.paper.experiments.evaluate import Evaluation

METHODS = "vanilla,oracle,orient,tta-max,energy,paper3,balanced,accurate+gate"


@app.command(epilog="[dim]$[/dim] headtilt demo --out pictures\n\n[dim]$[/dim] headtilt demo --quick")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures and the numbers.")] = Path("demo-output"),
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer images and a smaller head: half the time.")] = False,
) -> None:
    """Compare seven methods on tilted digits: a table and three pictures, in about a minute.

    Data and weights come with the package and scikit-learn. Nothing is downloaded.
    """
    from headtilt.model.device import limit_threads, resolve_device
    from headtilt.paper.experiments.demo import FULL, QUICK, run
    from headtilt.paper.experiments.report import metadata

    limit_threads()
    run(
        out,
        QUICK if quick else FULL,
        device=resolve_device(device),
        console=Console(highlight=False),
        progress=progress,
        about=metadata(command()),
    )


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "[dim]$[/dim] headtilt evaluate mnist --method vanilla,tta-max,energy,paper3,accurate+gate --json\n\n"
    "[dim]$[/dim] headtilt evaluate imagenet-mini --model hf:FOLDER --perturb rotation --method vanilla,balanced\n\n"
    "[dim]$[/dim] headtilt evaluate imagenet-mini --model hf:FOLDER --perturb rotation --method vanilla --bundle B\n\n"
    "[dim]$[/dim] headtilt evaluate ./images --model python:mymodule:make_model --size 64\n\n"
    "[bold]A model of your own[/bold]\n\n"
    "python:mymodule:make_model calls make_model() of mymodule.py, in the current folder or installed. It takes no "
    "arguments and returns an nn.Module from raw pixels (B, C, H, W) in 0 … 1 to logits. ./images holds a folder of "
    "images for each class (or fit/ and test/ with such folders): the model's outputs are the sorted folder names, "
    "unless the module has the attribute labels. The attributes input_size and padding set what the model sees; --size "
    "overrides input_size."
)
def evaluate(
    dataset: Annotated[
        str, typer.Argument(help="digits, mnist, fashion-mnist, gtsrb, cifar10, imagenet-mini, or a folder.")
    ],
    method: Annotated[
        str, typer.Option(help="Methods, separated by commas. A wrong name lists all of them.")
    ] = METHODS,
    perturb: Annotated[
        str, typer.Option(help="affine, rotation, scale, shear, translation, rotation+scale.")
    ] = "affine",
    networks: Annotated[int, typer.Option(min=1, help="How many networks of the zoo, each with another seed.")] = 5,
    seed: Seed = 0,
    limit: Limit = 2000,
    model: Annotated[
        str | None, typer.Option(metavar="SPEC", help="hf:NAME, timm:NAME, onnx:FILE, python:MODULE:FUNCTION, …")
    ] = None,
    bundle: Bundle = None,
    size: Annotated[int | None, typer.Option(min=1, help="Side in pixels of the square that --model sees.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the numbers (JSON) and the plots.")] = None,
    device: Device = "auto",
    data: Data = None,
    split: Annotated[str, typer.Option(help="test, or validation to choose settings.")] = "test",
    mode: Annotated[
        str,
        typer.Option(
            help="How tilts are drawn. each: one per image; run: one for all images; grid: one per image, from a grid; "
            "paper: from the paper's grid."
        ),
    ] = "each",
    fit_images: Annotated[
        int, typer.Option(min=8, help="Maximum number of unlabelled upright images to fit on.")
    ] = 6000,
    fit_split: Annotated[
        str, typer.Option(help="Where these come from: fit, or train for images that the network was trained on.")
    ] = "fit",
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough",
            help="Wider heads; every image is seen under 24 tilts (default: 3, or up to 12 if images are few).",
        ),
    ] = False,
    hidden: Annotated[int | None, typer.Option(min=1, help="Width of a head.")] = None,
    mc_passes: Annotated[int, typer.Option(min=1, help="Dropout passes of the paper's methods (the paper: 50).")] = 10,
    promise: Annotated[float, typer.Option(min=0, help="Points of upright accuracy that the gate may cost.")] = 0.5,
    batch: Annotated[int, typer.Option(min=1, help="Images per call of a method.")] = 500,
    jobs: Annotated[int, typer.Option(min=1, help="How many networks of the zoo to measure at the same time.")] = 1,
    curve: Annotated[bool, typer.Option("--curve", help="Also measure accuracy at 24 angles.")] = False,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the JSON file in --out, without its ending. Then no pictures are written."),
    ] = None,
) -> None:
    """Compare methods on the same images: accuracy, pose errors, views, speed.

    Four conditions. tilted: each image is tilted at random. quarter: turned by exactly 90°, 180° or 270°. nearly: off
    by up to 3°, 3 % in scale and half a pixel. upright: as it is.
    """
    from dataclasses import replace

    from headtilt.calibration.head import HeadRecipe
    from headtilt.calibration.head import thorough as patient
    from headtilt.errors import OptionError, one_of
    from headtilt.model.device import resolve_device
    from headtilt.paper.experiments.evaluate import Evaluation
    from headtilt.paper.experiments.own import own

    one_of("split", split, ("test", "validation"))
    if name is not None and (out is None or Path(name).name != name):
        raise OptionError(f"--name must be a plain file name, and needs --out FOLDER; got {name!r}.")
    where = resolve_device(device)
    recipe = patient() if thorough else HeadRecipe()
    names = [name.strip() for name in method.split(",") if name.strip()]
    evaluation = Evaluation(
        dataset,
        tuple(dict.fromkeys([*names, *(["bundle"] if bundle is not None else [])])),
        perturb,
        networks,
        seed=seed,
        limit=limit or None,
        split=split,
        mode=mode,  # type: ignore[arg-type]
        fit_images=fit_images,
        fit_split=fit_split,
        mc_passes=mc_passes,
        promise=promise,
        recipe=recipe if hidden is None else replace(recipe, hidden=hidden),
        device=where,
        folders=data,
        batch=batch,
        bundle=bundle,
        jobs=jobs,
        angles=tuple(-177.5 + 15 * step for step in range(24)) if curve else (),
        **own(dataset, model, split=split, size=size, device=where, folders=data),
    )
    _evaluate(evaluation, as_json, out, name)


def _evaluate(evaluation: Evaluation, as_json: bool, out: Path | None, name: str | None) -> None:
    """Run an evaluation, write what is asked for, and print JSON or the table."""
    from headtilt.paper.experiments import report as reports
    from headtilt.paper.experiments.own import notes
    from headtilt.plot.style import need_matplotlib

    if out is not None:
        need_matplotlib()
    with progress() as tell:
        found = evaluation.run(tell)
    found["notes"] = notes(evaluation)
    if evaluation.bundle is not None:
        found["bundle"] = reports.origin_of(evaluation.bundle)
    if as_json:
        sys.stdout.write(reports.to_json(found) + "\n")
    else:
        Console().print(reports.table(found))
    aside = Console(stderr=True, highlight=False, soft_wrap=True)
    for note in found["notes"]:
        aside.print(f"[yellow]note:[/yellow] {escape(note)}")
    if out is not None:
        for path in reports.write(out, {**found, **reports.metadata(command())}, name):
            aside.print(f"[dim]wrote[/dim] {escape(str(path))}")


@app.command(
    epilog="[dim]$[/dim] headtilt train gtsrb --seed 3\n\n[dim]$[/dim] headtilt train digits --out mine.safetensors"
)
def train(
    dataset: Annotated[str, typer.Argument(help="digits, mnist, fashion-mnist, gtsrb or cifar10.")],
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of weights, batches and dropout.")] = 0,
    device: Device = "auto",
    data: Data = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the weights (safetensors). Default: the cache folder.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the images. Default: as in the paper.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Train again even if there are weights already.")] = False,
) -> None:
    """Train the paper's network on upright images. Can be stopped and resumed."""
    from headtilt.model.device import resolve_device
    from headtilt.paper.experiments.training import Training

    training = Training(dataset, seed, resolve_device(device), data, out, epochs, force)
    with progress() as tell:
        trained = training.run(lambda done, total, loss: tell(f"{dataset}:{seed}, loss {loss:.3f}", done, total))
    console = Console(highlight=False, soft_wrap=True)
    accuracy = f"[bold]{trained.accuracy:.2f} %[/bold] of {trained.count:,} validation images right"
    console.print(f"{dataset}:{seed}  {accuracy}")
    there = "" if trained.fresh else "  [dim](already there)[/dim]"
    console.print(f"weights: {escape(str(trained.path))}{there}")
    if trained.shadowed:
        console.print("[yellow]note:[/yellow] headtilt still uses the packaged weights of this network.")

"""Commands for everyday use: ``classify``, ``explain``, ``canonicalise``, ``fit``."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headtilt.cli.app import Device, Seed, app, command, progress
from headtilt.cli.options import (
    EXIT_CODES,
    PRESETS,
    Batch,
    Bundle,
    Files,
    Labels,
    Levels,
    Preset,
    Size,
    Spec,
    Strict,
    no_images,
    opened_model,
)
from headtilt.errors import OptionError, one_of

if TYPE_CHECKING:
    from headtilt.apps.canonicalise import Copy
    from headtilt.apps.rows import Row
    from headtilt.sources.images import Survey

Json = Annotated[bool, typer.Option("--json", help="Print a JSON list with one object per image.")]
FIT_IMAGES = 1000


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "[dim]$[/dim] headtilt classify cup.jpg --model hf:google/vit-base-patch16-224\n\n"
    "[dim]$[/dim] headtilt classify photos/ 'more/*.png' --model onnx:net.onnx --bundle robust --json\n\n"
    f"{EXIT_CODES} After Ctrl-C, answers that are ready are still printed."
)
def classify(
    files: Files,
    model: Spec,
    bundle: Bundle = None,
    strict: Strict = True,
    levels: Levels = None,
    preset: Preset = None,
    topk: Annotated[int, typer.Option("--topk", min=1, help="How many labels per image.")] = 1,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of the table.")] = False,
    as_json: Json = False,
    device: Device = "auto",
    size: Size = None,
    labels: Labels = None,
    batch: Batch = 32,
) -> None:
    """Classify images that may be tilted, and estimate how each is tilted."""
    from headtilt.apps.rows import answers
    from headtilt.sources.decoders import Decoders

    if as_csv and as_json:
        raise OptionError("--csv and --json exclude each other. Leave one of them out.")
    found = _survey(files)
    rows: list[Row] = []
    decoders = Decoders().start()  # they get ready while the model is loaded
    try:
        robust = opened_model(model, bundle, levels, preset, size, device, labels=labels, strict=strict)
    except BaseException:
        decoders.close()
        raise
    try:
        with decoders, progress() as tell:
            tell("classifying", 0, len(found.paths))
            for answer in answers(robust, robust.adapted, found.paths, batch=batch, topk=topk, decoders=decoders):
                rows.append(answer.row)
                tell("classifying", len(rows), len(found.paths))
    finally:  # also after Ctrl-C: what is done stays done
        if as_json:
            sys.stdout.write(json.dumps([row.as_dict() for row in rows], indent=1) + "\n")
        elif as_csv:
            _write_csv(rows)
        else:
            _print_table(rows, topk)
    _conclude(rows, found)


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "[dim]$[/dim] headtilt explain cup.jpg --model hf:google/vit-base-patch16-224 --out tree.png\n\n"
    "[dim]$[/dim] headtilt explain cup.jpg --model hf:FOLDER --bundle robust --out answer.svg"
)
def explain(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An image.")],
    model: Spec,
    out: Annotated[Path, typer.Option("--out", help="Picture to write, .png or .svg.")] = Path("explained.png"),
    bundle: Bundle = None,
    strict: Strict = True,
    levels: Levels = None,
    preset: Preset = None,
    device: Device = "auto",
    size: Size = None,
    labels: Labels = None,
) -> None:
    """Draw why an image got its answer: before and after, confidence at every angle, all views."""
    from headtilt import plot
    from headtilt.sources.decoders import Decoders

    one_of("out", out.suffix.lower(), (".png", ".svg"))
    plot.style.new_figure(1, 1)  # says at once where matplotlib is missing
    robust = opened_model(model, bundle, levels, preset, size, device, labels=labels, strict=strict)
    with Decoders(1) as decoders:
        result = robust.search(decoders.square_of(file, robust.adapted)[None])
    path = plot.save(plot.explain(robust, result, names=robust.names, title=_printable(file.name)), out)
    console = Console(highlight=False, soft_wrap=True)
    console.print(escape(result.describe(0, names=robust.names)))
    console.print(f"[dim]wrote[/dim] {escape(str(path))}")


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "[dim]$[/dim] headtilt canonicalise photos/ --model hf:FOLDER --bundle robust --out upright\n\n"
    "[dim]$[/dim] headtilt canonicalise photos/ --model hf:FOLDER --bundle robust --out upright --tag-only\n\n"
    f"{EXIT_CODES} Existing files are replaced only with --force. Originals are never replaced."
)
def canonicalise(
    files: Files,
    model: Spec,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder for the copies.")],
    bundle: Bundle = None,
    strict: Strict = True,
    levels: Levels = None,
    preset: Preset = None,
    unfitted: Annotated[
        bool, typer.Option("--unfitted", help="Work without a fitted bundle. Many upright images will be turned, too.")
    ] = False,
    min_confidence: Annotated[
        float, typer.Option(min=0, max=1, help="Only turn images whose pose is at least this probable.")
    ] = 0.0,
    tag_only: Annotated[
        bool,
        typer.Option(
            "--tag-only",
            help="Do not change pixels: write the EXIF orientation (JPEG and PNG; other formats are turned).",
        ),
    ] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no contact sheets and no report.json.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    as_json: Json = False,
    device: Device = "auto",
    size: Size = None,
    labels: Labels = None,
    batch: Batch = 32,
) -> None:
    """Write upright copies of images at full resolution. Upright images are copied unchanged.

    An image is turned only if the gate of the bundle is sure that it is tilted. How probable the angle is,
    pose_confidence in the report says; --min-confidence sets a limit. Quarter turns are lossless. For other angles the
    frame grows, so that nothing is cut off. OUT/headtilt-report has contact sheets of all images before and after.
    """
    from headtilt.apps.canonicalise import check_fitted, copies, targets
    from headtilt.apps.contact_sheet import write_report

    if out.exists() and not out.is_dir():
        raise OptionError(f"out must be a folder; {out} is a file.")
    found = _survey(files)
    places = targets(found, out)
    robust = opened_model(model, bundle, levels, preset, size, device, labels=labels, strict=strict)
    check_fitted(robust, unfitted=unfitted)
    done = []
    try:
        with progress() as tell:
            tell("turning upright", 0, len(places))
            how: dict[str, Any] = {"min_confidence": min_confidence, "force": force, "tag_only": tag_only}
            for copy in copies(robust, places, batch=batch, **how):
                done.append(copy)
                tell("turning upright", len(done), len(places))
    finally:
        rows = [copy.as_dict() for copy in done]
        if as_json:
            sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        else:
            _print_written(done)
        if done and not no_report:
            for path in write_report(out, rows, [copy.cell() for copy in done]):
                Console(stderr=True, highlight=False, soft_wrap=True).print(f"[dim]wrote[/dim] {escape(str(path))}")
    _conclude([copy.row for copy in done], found)


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "[dim]$[/dim] headtilt fit upright-photos/ --model hf:FOLDER --levels rotation --out robust\n\n"
    "[dim]$[/dim] headtilt classify tilted/ --model hf:FOLDER --bundle robust"
)
def fit(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Upright images; no labels are needed.")],
    model: Spec,
    out: Annotated[Path, typer.Option("--out", metavar="BUNDLE", help="Folder for the bundle.")],
    levels: Levels = None,
    preset: Annotated[
        str, typer.Option(help="accurate; fast: at most 20 views; documents: quarter turns only, four views.")
    ] = "accurate",
    method: Annotated[str, typer.Option(help="head (best), balance (quickest), prototypes, neighbours.")] = "head",
    promise: Annotated[
        float, typer.Option(min=0, max=100, help="Points of upright accuracy that the search may cost.")
    ] = 0.5,
    no_gate: Annotated[
        bool, typer.Option("--no-gate", help="Fit no gate. For images that are nearly all tilted.")
    ] = False,
    refine: Annotated[int, typer.Option(min=0, help="Rounds that refine the best poses, without more views.")] = 0,
    images: Annotated[int, typer.Option(min=8, help="Maximum number of images, chosen at random.")] = FIT_IMAGES,
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough",
            help="Wider head; every image is seen under 24 tilts (default: 3, or up to 12 if images are few). For many "
            "images, on a GPU.",
        ),
    ] = False,
    looks: Annotated[int | None, typer.Option(min=1, help="Under how many tilts a head sees every image.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Width of a head.")] = None,
    pose: Annotated[
        float | None, typer.Option(min=0, help="Weight of the pose against the label in the loss of a head.")
    ] = None,
    seed: Seed = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing bundle.")] = False,
    device: Device = "auto",
    size: Size = None,
    labels: Labels = None,
) -> None:
    """Learn from unlabelled upright images what upright looks like to a model, and write a bundle.

    The command first estimates the time, and at the end prints what the fit is worth, measured on images that were held
    out. The model itself never changes. Photographs are read larger than the model sees them, so that tilted views have
    no empty corners.
    """
    from dataclasses import replace

    from headtilt.apps.fitting import Fitting, fallback
    from headtilt.calibration.head import HeadRecipe
    from headtilt.calibration.head import thorough as patient
    from headtilt.geometry.warp import centre_crop
    from headtilt.io.bundle import check_place
    from headtilt.paper.experiments.report import note_origin
    from headtilt.sources.health import health

    one_of("method", method, ("head", "balance", "prototypes", "neighbours"))
    one_of("preset", preset, PRESETS)
    check_place(out, overwrite=force)
    found = _survey([str(folder)])
    searched = levels if preset == "documents" else levels or "rotation"
    robust = opened_model(model, None, searched, preset, size, device, refine=refine, labels=labels)
    given: dict[str, Any] = {"looks": looks, "hidden": hidden, "pose": pose}
    recipe = replace(
        patient() if thorough else HeadRecipe(), **{name: value for name, value in given.items() if value is not None}
    )
    fitting = Fitting(method, None if no_gate else promise, images, recipe, seed)
    with progress(silent=True) as tell:
        read, broken = fitting.read(robust, found.paths, tell)
    for sentence in health(robust.predictor.with_model(robust.model), centre_crop(read, robust.adapted.size)).advice():
        _print_note(sentence)
    console = Console(highlight=False, soft_wrap=True)
    console.print(fitting.cost(robust, read).words())
    with progress(silent=True) as tell:
        fitting.run(robust, read, tell)
    robust.save(out, overwrite=force)
    note_origin(out, command())
    _print_verdict(console, robust.report)
    console.print(f"[dim]wrote[/dim] {escape(str(out))}")
    simpler = fallback(method, robust.report)
    for sentence in [*broken, *([] if simpler is None else [simpler])]:
        _print_note(sentence)


def _print_verdict(console: Console, report: dict[str, Any]) -> None:
    """Print what a fit is worth, what to do where it is worth little, and which padding it chose."""
    from headtilt.apps.fitting import verdict
    from headtilt.calibration.verdict import hint

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for what, words in verdict(report):
        table.add_row(f"{what}:", words)
    if "padding" in report:
        table.add_row("padding:", escape(str(report["padding"])))
    console.print(table)
    if advice := hint(report):
        console.print(escape(advice))


def _survey(files: list[str]) -> Survey:
    from headtilt.sources.images import survey

    found = survey(files)
    if not found.paths:
        raise no_images(files)
    return found


def _conclude(rows: list[Row], found: Survey) -> None:
    """Say on stderr what went wrong, and leave with exit code 1 where something did, 2 where nothing went well."""
    if found.passed_over:
        kinds = Counter(path.suffix.lower() or "no suffix" for path in found.passed_over)
        listed = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common(6))
        _print_note(
            f"{len(found.passed_over)} files were skipped, because their names are not those of images: {listed}."
        )
    failed = [row for row in rows if row.error is not None]
    if failed:
        _print_note(f"{len(failed)} of {len(rows)} files failed.")
        raise typer.Exit(2 if len(failed) == len(rows) else 1)


def _print_note(sentence: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"[yellow]note:[/yellow] {escape(_printable(sentence))}"
    )


def _printable(text: str) -> str:
    """Return text that can be printed, whatever bytes a file name was made of, and that steers no terminal."""
    plain = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in plain)


def _cell(value: Any) -> Any:
    """Return a cell of a table that no spreadsheet takes for a formula."""
    if not isinstance(value, str):
        return value
    shown = _printable(value)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown


def _write_csv(rows: list[Row]) -> None:
    from headtilt.apps.rows import COLUMNS

    best = max((len(row.top or ()) for row in rows), default=0)
    ranks = [f"{word}_{rank}" for rank in range(2, best + 1) for word in ("label", "score")]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*COLUMNS, *ranks])
    for row in rows:
        values = [row.as_dict()[name] for name in COLUMNS]
        more = [part for pair in (row.top or ())[1:] for part in pair]
        writer.writerow([_cell(value) for value in [*values, *more]])


def _tilt_in_words(row: Row) -> str:
    """Return a tilt in few characters."""
    if row.rotation_deg is None or row.scale is None or row.shear is None:
        return ""
    parts = [f"{row.rotation_deg:+.0f}°".replace("-", "−")]
    parts += [f"×{row.scale:.2f}"] if abs(row.scale - 1) >= 0.005 else []
    parts += [f"shear {row.shear:+.2f}".replace("-", "−")] if abs(row.shear) >= 0.005 else []
    return " ".join(parts)


def _print_table(rows: list[Row], topk: int) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("image", overflow="fold")
    table.add_column("label", overflow="fold")
    for name in ("score", "tilt", "views"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.error is not None:
            table.add_row(escape(_printable(row.path)), f"[red]{escape(_printable(row.error))}[/red]")
            continue
        top = (row.top or ((row.label or "", row.score or 0.0),))[:topk]
        kept = " [dim]kept[/dim]" if row.gated else ""
        table.add_row(
            escape(_printable(row.path)),
            "\n".join(escape(label) for label, _ in top),
            "\n".join(f"{score:.1%}" for _, score in top),
            _tilt_in_words(row) + kept,
            str(row.views),
        )
    Console(highlight=False).print(table)


def _print_written(done: list[Copy]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("image", overflow="fold")
    table.add_column("what was done")
    table.add_column("copy", overflow="fold")
    for copy in done:
        error = f"[red]{escape(_printable(copy.row.error or ''))}[/red]"
        place = error if copy.written is None else escape(_printable(str(copy.written.path)))
        table.add_row(escape(_printable(copy.row.path)), "" if copy.written is None else copy.words(), place)
    Console(highlight=False).print(table)

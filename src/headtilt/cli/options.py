"""Options that all commands about one's own model and images share, and what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from headtilt.errors import OptionError, one_of

if TYPE_CHECKING:
    from headtilt.geometry.groups import Group
    from headtilt.sources.pretrained import Pretrained

SCHEMES = ("hf:", "hf-zeroshot:", "timm:", "torchvision:", "onnx:", "pt2:", "zoo:", "python:")
PRESETS = ("fast", "accurate", "documents")
EXIT_CODES = "Exit codes: 0 success, 1 some files failed, 2 error, 130 interrupted."


def _schemes(incomplete: str) -> list[str]:
    """Complete the beginning of a model's name."""
    from headtilt.sources.zoo import SHAPES

    known = [*SCHEMES[:-2], *(f"zoo:{name}" for name in SHAPES), SCHEMES[-1]]
    return [word for word in known if word.startswith(incomplete)]


def _levels(incomplete: str) -> list[str]:
    """Complete the last of several levels."""
    done, comma, last = incomplete.rpartition(",")
    return [done + comma + name for name in LEVELS if name.startswith(last)]


def _presets(incomplete: str) -> list[str]:
    return [name for name in PRESETS if name.startswith(incomplete)]


LEVELS = (
    "rotation",
    "scale",
    "shear",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "reflection",
    "quarter_turns",
)
Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE...", help="Images, folders (with all folders inside), or quoted patterns such as 'a/*.png'."
    ),
]
Spec = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="SPEC",
        autocompletion=_schemes,
        help="hf:NAME, hf-zeroshot:NAME, timm:NAME, torchvision:NAME, onnx:FILE, pt2:FILE, zoo:NAME or "
        "python:MODULE:FUNCTION.",
    ),
]
Bundle = Annotated[
    Path | None,
    typer.Option(
        "--bundle", metavar="FOLDER", help="Folder that `headtilt fit` wrote for this model. It sets the levels."
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict/--no-strict", help="Refuse a bundle that was fitted for another model.")
]
Levels = Annotated[
    str | None,
    typer.Option(
        "--levels",
        autocompletion=_levels,
        help=f"What to search, separated by commas: {', '.join(LEVELS)}. Default: rotation.",
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        autocompletion=_presets,
        help="Ready-made search: fast, accurate or documents. Default: a search tree.",
    ),
]
Labels = Annotated[
    str | None,
    typer.Option(
        "--labels", help="Classes for hf-zeroshot:NAME: separated by commas, or a text file with one per line."
    ),
]
Size = Annotated[int | None, typer.Option("--size", min=1, help="Side in pixels of the square that the model sees.")]
Picture = Annotated[Path | None, typer.Option("--picture", metavar="FILE", help="Also write a picture, .png or .svg.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Images per search.")]


def groups(names: str | None) -> list[Group] | None:
    """Return the groups that names, separated by commas, stand for; None where none are named."""
    from headtilt.presets import levels_named

    return None if names is None else levels_named(names)


def preset_options(name: str | None, levels: list[Group] | None) -> dict[str, Any]:
    """Return the options of `ITS` that a preset and levels stand for."""
    from headtilt import presets

    if name is None:
        return {} if levels is None else {"levels": levels}
    make = getattr(presets, name, None) if name in PRESETS else None
    if make is None:
        known = [one for one in PRESETS if hasattr(presets, one)]
        raise OptionError(f"preset must be one of {', '.join(known)}; got {name!r}.")
    if name == "documents":
        if levels is not None:
            raise OptionError("levels must be left out with --preset documents, which searches quarter turns only.")
        return dict(make())
    return dict(make(levels))


def opened_model(
    spec: str,
    bundle: Path | None,
    levels: str | None,
    preset: str | None,
    size: int | None,
    device: str,
    refine: int = 0,
    strict: bool = True,
    labels: str | None = None,
) -> Pretrained:
    """Return the model of a command line with the search around it, with some rounds of refining the best poses."""
    from headtilt.model.device import limit_threads, resolve_device
    from headtilt.sources import registry as door
    from headtilt.sources.pretrained import wrapped

    limit_threads()
    if bundle is not None and (levels is not None or preset is not None):
        raise OptionError(
            "--levels and --preset cannot be combined with --bundle, which sets both. Leave them out, or fit again."
        )
    options = preset_options(preset, groups(levels))
    if refine:
        options["search"] = replace(options["search"], rounds=refine)
    names = None if labels is None else class_names(labels)
    opened = door.load(spec, device=resolve_device(device), size=size, labels=names)
    return wrapped(opened, bundle=bundle, strict=strict, **options)


def class_names(text: str) -> list[str]:
    """Return class names from a text file with one per line, or separated by commas."""
    path = Path(text)
    words = path.read_text(encoding="utf-8").splitlines() if path.is_file() else text.split(",")
    names = [word.strip() for word in words if word.strip()]
    if len(names) < 2:
        raise OptionError(
            f"labels must name at least two classes, separated by commas or one per line of a file; got {text!r}."
        )
    return names


def no_images(files: Sequence[str]) -> OptionError:
    """Return the error for files and folders that hold no image."""
    return OptionError(
        f"no images were found in {', '.join(files)}. Image files end in .jpg, .png, .webp, .tif, .bmp and others. "
        "Check the path, and quote patterns such as 'a/*.png'."
    )


def check_picture(picture: Path | None) -> None:
    """Raise, before anything long begins, where a picture could not be written: its kind, or matplotlib is missing."""
    if picture is not None:
        from headtilt.plot.style import new_figure

        one_of("picture", picture.suffix.lower(), (".png", ".svg"))
        new_figure(1, 1)


def write_picture(figure: Any, picture: Path) -> None:
    """Write a picture, and say so."""
    from headtilt.plot import save

    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"[dim]wrote[/dim] {escape(str(save(figure, picture)))}"
    )


def note(sentences: Sequence[str]) -> None:
    """Say what should be known beside the result."""
    for sentence in sentences:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[yellow]note:[/yellow] {escape(sentence)}")

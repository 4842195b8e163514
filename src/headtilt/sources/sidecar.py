"""What a file with a bare network does not say of itself: a JSON file beside it, ``net.json`` for ``net.onnx``.

All keys are optional::

    {
      "labels": ["cat", "dog"],
      "size": 224, "resize": 256, "resample": "bicubic",
      "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
      "factor": 1, "channels": 3, "padding": "reflection", "output": "logits"
    }

`size` is the side of the square that the network sees, `resize` the shorter side to which photographs are resized
before that square is cut from their middle. Pixels in [0, 1] are multiplied by `factor` (255 for networks that want
bytes), then `mean` is subtracted and the rest divided by `std`. `output` is "logits", or "probabilities" for a network
that ends in a softmax.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, get_args

from torch import Tensor, nn

from headtilt.errors import DataError, at_least, number, one_of, positive
from headtilt.geometry.warp import Padding, checked_padding
from headtilt.io.files import read_plain
from headtilt.sources import Adapted, Resample
from headtilt.sources.preprocessing import Normalised

MOST_BYTES = 16_000_000
PHOTOGRAPHS = 64  # networks that see at least so many pixels are taken to look at photographs


@dataclass(frozen=True)
class Sidecar:
    """What is known of a bare network; see the module for what each means, and None for what is not known."""

    labels: tuple[str, ...] | None = None
    size: int | None = None
    resize: int | None = None
    resample: Resample = "bilinear"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    factor: float = 1.0
    channels: int = 3
    padding: Padding | None = None
    output: str = "logits"


def beside(path: Path, metadata: Mapping[str, str] | None = None) -> Sidecar:
    """Return what the JSON file beside a network says, or else its own metadata, or nothing.

    Args:
        path: The network's file.
        metadata: Words that came in the file: "headtilt" holds the same JSON; "labels", "classes" or "names" hold
            class names as a JSON list, as a mapping from number to name, or divided by commas or lines.
    """
    known = dict(metadata or {})
    said: dict[str, Any] = {}
    if "headtilt" in known:
        said = _mapping(known["headtilt"], f"the metadata of {path}")
    for key in ("labels", "classes", "names"):
        if key in known and "labels" not in said:
            said["labels"] = _names(known[key])
    file = path.with_suffix(".json")
    if file.is_file():
        said |= _mapping(read_plain(file, MOST_BYTES), str(file))
    return parse(said, str(file))


def parse(said: Mapping[str, Any], where: str) -> Sidecar:
    """Return what a mapping says; raise `DataError` for a key or a value that means nothing."""
    unknown = said.keys() - {item.name for item in fields(Sidecar)}
    if unknown:
        known = ", ".join(item.name for item in fields(Sidecar))
        raise DataError(f"{where} has the keys {', '.join(sorted(unknown))}, which mean nothing; known are {known}.")
    there = {key: value for key, value in said.items() if value is not None}  # null is not known, as if left out
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in there.items()}
    checks: dict[str, Callable[[Any], object]] = {
        "labels": lambda value: [str(name) for name in value],
        "size": lambda value: at_least("size", value, 1),
        "resize": lambda value: at_least("resize", value, 1),
        "resample": lambda value: one_of("resample", value, get_args(Resample)),
        "mean": lambda value: [number("mean", part) for part in value],
        "std": lambda value: list(map(partial(positive, "std"), value)),
        "factor": lambda value: positive("factor", value),
        "channels": lambda value: one_of("channels", str(value), ("1", "3")),
        "padding": checked_padding,
        "output": lambda value: one_of("output", value, ("logits", "probabilities")),
    }
    key = ""
    try:
        for key, check in checks.items():
            if key in values:
                check(values[key])
    except (ValueError, TypeError) as error:
        raise DataError(f"{where}: {key} makes no sense: {error}") from error
    if "labels" in values:
        values["labels"] = tuple(map(str, values["labels"]))
    return Sidecar(**values)


def side(found: int | None, about: Sidecar, path: Path) -> int:
    """Return the side of the square that a network sees: its own, or the one that stands beside it."""
    size = found or about.size
    if size is None:
        file = path.with_suffix(".json").name
        raise DataError(f'{path} takes images of any size. Say which in {file} beside it: {{"size": 224}}.')
    return size


def adapted(
    network: nn.Module, about: Sidecar, *, size: int, channels: int, name: str, features: Sequence[str] = ()
) -> Adapted:
    """Return a bare network with what is known of it around it.

    Args:
        network: From pixels to logits or probabilities.
        about: What stands beside it.
        size: Side of the square that it sees.
        channels: How many of them.
        name: What reports call it.
        features: Layers of it whose inputs are features.
    """
    prefix = ""
    mean, deviation = about.mean or (0.0,), about.std or (1.0,)
    if about.output == "probabilities":
        network, prefix = Logarithm(network), "network."
    if (about.mean, about.std, about.factor) != (None, None, 1.0):
        factor = about.factor
        network = Normalised(network, [part / factor for part in mean], [part / factor for part in deviation])
        prefix = "model." + prefix
    padding = about.padding
    if padding is None:
        padding = "reflection" if size >= PHOTOGRAPHS else "zeros"
    resize = max(about.resize or size, size)
    layers = tuple(prefix + layer for layer in features) or None
    return Adapted(network, about.labels, size, resize, padding, name, channels, about.resample, features=layers)


def write(path: str | os.PathLike[str], source: Adapted) -> Path:
    """Write what an `Adapted` knows beside the file to which its model was exported, and return where.

    Its normalisation is inside the model, hence in the file; labels and geometry are not.
    """
    file = Path(path).with_suffix(".json")
    said = {
        "labels": None if source.labels is None else list(source.labels),
        "size": source.size,
        "resize": source.resize,
        "resample": source.resample,
        "channels": source.channels,
        "padding": list(source.padding) if isinstance(source.padding, tuple) else source.padding,
    }
    file.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


class Logarithm(nn.Module):
    """A network that gives probabilities, as one that gives logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return the logarithms (B, Y) of the probabilities."""
        probabilities: Tensor = self.network(images)
        return probabilities.clamp_min(1e-12).log()


def _mapping(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise DataError(f"{where} must hold a JSON object; it holds a {type(found).__name__}.")
    return found


def _names(text: str) -> list[str]:
    """Return class names from the forms in which exporters write them."""
    found: Any = None
    for parse_text in (json.loads, ast.literal_eval):
        try:
            found = parse_text(text)
            break
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    if isinstance(found, dict) and all(str(key).isdecimal() and len(str(key)) < 10 for key in found):
        return [str(found[key]) for key in sorted(found, key=lambda key: int(key))]
    if isinstance(found, (list, tuple)):
        return [str(name) for name in found]
    return [part.strip() for part in (text.splitlines() if "\n" in text else text.split(",")) if part.strip()]

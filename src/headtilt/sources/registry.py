"""One door to classifiers by name: ``hf:NAME``, ``onnx:FILE``, ``zoo:NAME:SEED``, ``python:MODULE:FUNCTION``."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import nn

from headtilt.errors import DataError, HeadtiltError, ModelError, OptionError, at_least
from headtilt.model.device import resolve_device
from headtilt.sources import Adapted, hf, onnx, pt2, timm, torchvision, zero_shot, zoo
from headtilt.sources.preprocessing import BlackBox

DEFAULT_SIZE = 32


def load(spec: str, *, device: str = "cpu", size: int | None = None, labels: Sequence[str] | None = None) -> Adapted:
    """Return the classifier of a spec, in eval mode.

    - ``hf:NAME`` is a `transformers` checkpoint: a folder, or a name on the hub. ``NAME`` alone will do where it is a
      folder or looks like ``ORGANISATION/NAME``.
    - ``hf-zeroshot:NAME`` is CLIP, SigLIP or another that scores pictures against texts; its classes are `labels`.
    - ``timm:NAME`` and ``torchvision:NAME`` are models of these libraries; see `sources.timm`,
      `sources.torchvision`.
    - ``onnx:FILE`` runs in onnxruntime and ``pt2:FILE`` is an exported program; what such files do not say of
      themselves stands in a JSON file beside them, see `sources.sidecar`. The file alone will do where it exists.
    - ``zoo:NAME`` or ``zoo:NAME:SEED`` is a network of the zoo: the paper's on digits, mnist, fashion-mnist or
      gtsrb, and a ResNet on cifar10.
    - ``python:MODULE:FUNCTION`` is one's own. The module may lie in the current folder; the function takes no
      arguments and returns an `Adapted`, which says everything, or an `nn.Module` or any callable from raw pixels
      (B, C, H, W) in [0, 1] to logits (B, Y). It may have the attributes ``input_size`` (the side of the square it
      sees, 32 otherwise), ``padding`` (of views, auto otherwise), ``labels`` (the names of its outputs, in order) and
      ``channels`` (3 otherwise).

    Args:
        spec: What to load.
        device: Where it should live; "auto" is the GPU where there is one.
        size: Side of the square that the model sees, in place of its own.
        labels: Names of the classes of a zero-shot model.
    """
    device = resolve_device(device)
    scheme, rest = parse(spec)
    if (scheme == "hf-zeroshot") != (labels is not None):
        if labels is None:
            raise OptionError(f"{spec} needs labels: labels=['cat', 'dog'], or --labels cat,dog on the command line.")
        raise OptionError(f"{spec} has its own labels. Leave labels out: they are only for hf-zeroshot:NAME.")
    adapted = SCHEMES[scheme][1](rest, device) if labels is None else zero_shot.load(rest, labels, device=device)
    if size is not None:
        at_least("size", size, 1)
        adapted = replace(adapted, size=size, resize=max(size, adapted.resize))
    return adapted


def parse(spec: str) -> tuple[str, str]:
    """Return the scheme of a spec and what it says behind the colon; a path or a hub name needs no scheme."""
    scheme, _, rest = spec.partition(":")
    if scheme in SCHEMES and rest:
        return scheme, rest
    path = Path(spec).expanduser()
    if path.is_file() and path.suffix in (".onnx", ".pt2"):
        return path.suffix[1:], spec
    if path.is_dir() or re.fullmatch(r"\w[\w.-]*/[\w.-]+", spec):
        return "hf", spec
    known = ", ".join(f"{name}:{form}" for name, (form, _) in SCHEMES.items())
    raise OptionError(f"model must be one of {known}; got {spec!r}.")


def files_of(spec: str) -> list[Path]:
    """Return the files of which a spec is made, where weights alone do not tell one model from another.

    The network of ``onnx`` and ``pt2``, its external data and the JSON beside it; the module of ``python``.
    """
    scheme, rest = parse(spec)
    if scheme == "python":
        file = getattr(sys.modules.get(rest.rpartition(":")[0]), "__file__", None)
        return [Path(file)] if file and Path(file).is_file() else []
    if scheme not in ("onnx", "pt2"):
        return []
    path = Path(rest).expanduser()
    beside = path.with_suffix(".json")
    data = onnx.external_data(path) if scheme == "onnx" else []
    return [path, *([beside] if beside.is_file() else []), *data]


def outputs_for(adapted: Adapted, classes: Sequence[str]) -> tuple[int, ...] | None:
    """Return which output of the model stands for each class of the data; None where both are in the same order.

    Classes are matched by name where all of them are names of outputs, and by position where there are as many.
    """
    if adapted.labels is None or tuple(classes) == adapted.labels:
        return None
    places: dict[str, int] = {}
    for index, label in enumerate(adapted.labels):
        for name in (label, *label.split(",")):
            places.setdefault(name.strip().lower(), index)
    found = [places.get(name.strip().lower()) for name in classes]
    matched = tuple(index for index in found if index is not None)
    if len(matched) == len(classes):
        return matched
    if len(classes) == len(adapted.labels):
        return None
    missing = next(name for name, index in zip(classes, found, strict=True) if index is None)
    raise DataError(
        f"the data has {len(classes)} classes and {adapted.name} has {len(adapted.labels)}, and class {missing!r} is "
        "none of them. Name the class folders as the model names its classes."
    )


def _from_zoo(spec: str, device: str) -> Adapted:
    name, _ = zoo.parse(spec)
    shape = zoo.SHAPES[name]
    return Adapted(zoo.load(spec, device=device), None, shape.size, shape.size, "auto", spec, shape.channels)


def _from_python(rest: str, device: str) -> Adapted:
    module_name, _, function_name = rest.rpartition(":")
    if not module_name or not function_name:
        raise OptionError(f"model must be python:MODULE:FUNCTION for a function of your own; got 'python:{rest}'.")
    with _current_folder_importable():
        made = _call(_function(module_name, function_name), rest)
    if isinstance(made, Adapted):
        return replace(made, model=made.model.to(device).eval())
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise ModelError(f"{rest} must return an nn.Module or an Adapted; got {type(made).__name__}.")
        network: nn.Module = BlackBox(made)
    else:
        network = made
    side = at_least("input_size", getattr(made, "input_size", DEFAULT_SIZE), 1)
    labels = getattr(made, "labels", None)
    return Adapted(
        model=network.to(device).eval(),
        labels=None if labels is None else tuple(map(str, labels)),
        size=side,
        resize=side,
        padding=getattr(made, "padding", "auto"),
        name=rest,
        channels=at_least("channels", getattr(made, "channels", 3), 1),
    )


def _function(module_name: str, function_name: str) -> Callable[[], object]:
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise OptionError(f"{module_name} could not be imported from here: {error}.") from error
    except Exception as error:
        raise ModelError(f"{module_name} raised {type(error).__name__} when it was imported: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise OptionError(f"{module_name} has no function {function_name!r}.")
    made: Callable[[], object] = function
    return made


def _call(function: Callable[[], object], name: str) -> object:
    try:
        return function()
    except HeadtiltError:
        raise
    except Exception as error:
        raise ModelError(f"{name} raised {type(error).__name__}: {error}") from error


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Let modules of the current folder be imported, also by the function while it runs."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


SCHEMES: dict[str, tuple[str, Callable[[str, str], Adapted]]] = {
    "hf": ("NAME", lambda rest, device: hf.load(rest, device=device)),
    "hf-zeroshot": ("NAME", lambda rest, device: zero_shot.load(rest, (), device=device)),
    "timm": ("NAME", lambda rest, device: timm.load(rest, device=device)),
    "torchvision": ("NAME", lambda rest, device: torchvision.load(rest, device=device)),
    "onnx": ("FILE", lambda rest, device: onnx.load(rest, device=device)),
    "pt2": ("FILE", lambda rest, device: pt2.load(rest, device=device)),
    "zoo": ("NAME[:SEED]", _from_zoo),
    "python": ("MODULE:FUNCTION", _from_python),
}

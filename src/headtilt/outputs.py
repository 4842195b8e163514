"""Reading a model: the logits in what it returns, and the features in what some of its layers are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from headtilt.borrow import Model, unhooked_afterwards
from headtilt.errors import ModelError, OptionError


def checked_model(model: Model) -> Model:
    """Return the model; raise `ModelError` unless it can be called."""
    if not callable(model):
        raise ModelError(f"model must be an nn.Module or a callable that returns logits; got {type(model).__name__}.")
    return model


def logits_in(output: Any, key: str) -> Tensor:
    """Return the tensor in whatever a model returned: itself, or what a dict or an object holds under `key`."""
    if isinstance(output, dict):
        if key not in output:
            raise ModelError(
                f"model returned a dict without {key!r}; it has {sorted(map(str, output))}. Set output_key."
            )
        output = output[key]
    elif not isinstance(output, Tensor) and hasattr(output, key):
        output = getattr(output, key)
    if not isinstance(output, Tensor):
        raise ModelError(f"model must return logits as a tensor, an object or dict with {key!r}; got {type(output)}.")
    return output


def as_logits(output: Any, key: str, views: int) -> Tensor:
    """Return the (V, Y) logits in whatever the model returned."""
    logits = logits_in(output, key)
    if logits.ndim != 2 or len(logits) != views or not logits.shape[1] or not logits.is_floating_point():
        raise ModelError(
            f"model must return floating-point logits ({views}, Y); got {logits.dtype} {tuple(logits.shape)}."
        )
    return two_classes(logits.float() if logits.dtype != torch.float64 else logits)


def two_classes(logits: Tensor) -> Tensor:
    """Return a single logit z (…, 1) as the two classes (−z/2, z/2), no and yes; all others as they are.

    The softmax of the two is the sigmoid of z, and their energy is low wherever the model is sure, yes or no.
    """
    return torch.cat([-logits / 2, logits / 2], dim=-1) if logits.shape[-1] == 1 else logits


def check_finite(logits: Tensor) -> None:
    """Raise `ModelError` for NaN, +∞, or −∞ for every class; a class ruled out by −∞ is fine. Synchronises once."""
    largest = logits.amax(-1)
    if bool(largest.isfinite().all()):
        return
    what = "NaN logits" if bool(largest.isnan().any()) else "infinite logits (+∞, or −∞ for every class of a view)"
    raise ModelError(f"model returned {what}. Check its weights and the range its input expects.")


def checked_features(features: Any) -> str | Sequence[str] | None:
    """Return the names of feature layers; raise `OptionError` unless they are one name, several, or None."""
    names = [features] if features is None or isinstance(features, str) else features
    if not isinstance(names, Sequence) or not all(name is None or isinstance(name, str) for name in names):
        raise OptionError(f'features must be "auto", the name of a module, several names, or None; got {features!r}.')
    return cast("str | Sequence[str] | None", features)


def feature_names(features: str | Sequence[str] | None) -> str | Sequence[str] | None:
    """Return the names of feature layers as several, also where there is one; "auto" stays as it is."""
    return (features,) if isinstance(features, str) and features != "auto" else features


def feature_layer(model: Model, name: str) -> nn.Module:
    """Return the module of that name, whose input serves as feature vector."""
    if not isinstance(model, nn.Module):
        raise OptionError("features need an nn.Module; a plain callable has none that can be read.")
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise OptionError(f"features must name a module of the model; {name!r} is none.") from error


@contextmanager
def feature_taps(model: Model, names: Sequence[str]) -> Iterator[list[list[Tensor]]]:
    """Collect the input of each feature layer in the lists that are yielded."""
    layers = [feature_layer(model, name) for name in names]
    taps: list[list[Tensor]] = [[] for _ in layers]
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, tap=tap: tap.append(inputs[0]))
        for layer, tap in zip(layers, taps, strict=True)
    ]
    with unhooked_afterwards(handles):
        yield taps


def found_feature_layers(model: Model, forward: Callable[[Tensor], Any], view: Tensor) -> tuple[str, ...]:
    """Return the names of the last two linear layers that see one vector per view, in the order they run.

    Args:
        model: Bare callables have none.
        forward: Runs the model.
        view: (1, C, H, W), what to run it on.
    """
    order: list[str] = []

    def note(name: str, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].ndim == 2 and len(inputs[0]) == len(view):
            order.append(name)

    handles = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs))
        for name, module in (model.named_modules() if isinstance(model, nn.Module) else ())
        if isinstance(module, nn.Linear)
    ]
    with unhooked_afterwards(handles):
        forward(view)
    return tuple(dict.fromkeys(order))[-2:]


def pooled(taps: list[list[Tensor]], passes: int, views: int) -> Tensor | None:
    """Return the tapped features (V, D): mean over passes, and over space where they still have any."""
    vectors = []
    for tap in taps:
        tapped = torch.cat(tap)
        tap.clear()
        copies = len(tapped) // views
        if copies not in (1, passes) or len(tapped) != copies * views:
            raise ModelError(f"a feature layer ran on {len(tapped)} rows for {views} views. Name another module.")
        vectors.append(as_vectors(tapped).reshape(copies, views, -1).mean(0))
    return torch.cat(vectors, dim=1) if vectors else None


def as_vectors(tapped: Tensor) -> Tensor:
    """Return one feature vector per view: the mean over space where a layer still sees any."""
    return (tapped.flatten(2).mean(-1) if tapped.ndim == 4 else tapped.flatten(1)).float()

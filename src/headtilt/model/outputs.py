"""Reading a model: the logits in what it returns, and the features at its taps on the way there."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headtilt.errors import ModelError, OptionError
from headtilt.model.evidence import Evidence
from headtilt.model.state import Model, unhooked_afterwards

OUTPUT = ":out"  # behind the name of a module: what it gives, rather than what it is given


def checked_model(model: Model) -> Model:
    """Return the model; raise `ModelError` unless it can be called."""
    if not callable(model):
        raise ModelError(f"model must be an nn.Module or a callable that returns logits; got {type(model).__name__}.")
    if isinstance(model, type):
        name = model.__name__
        raise ModelError(f"model must be a model and not its class; got the class {name}. Make one: {name}(…).")
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
        fix = " Convert it inside the model: torch.as_tensor(logits)." if hasattr(output, "__array__") else ""
        raise ModelError(
            f"model must return logits as a tensor, an object or dict with {key!r}; got {type(output)}.{fix}"
        )
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


def tappable(model: Model) -> Model:
    """Return the model whose parts can be read, by their own names, in the thread that asks.

    Compiled code passes hooks by; `DataParallel` calls copies of the model, each in a thread of its own.
    """
    parallel = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    inner: Model = getattr(model, "module" if parallel else "_orig_mod", model)
    return model if inner is model else tappable(inner)


def tapped_module(model: Model, name: str) -> nn.Module:
    """Return the module that a tap reads."""
    if not isinstance(model, nn.Module):
        raise OptionError("features need an nn.Module; a plain callable has none that can be read.")
    try:
        return cast(nn.Module, tappable(model)).get_submodule(name.removesuffix(OUTPUT))
    except AttributeError as error:
        raise OptionError(f"features must name modules of the model; {name!r} names none.") from error


@contextmanager
def taps(model: Model, names: Sequence[str]) -> Iterator[list[list[Tensor]]]:
    """Collect what each tap reads, as vectors (V, D), in the lists that are yielded."""
    read, hooks = tap_hooks(model, names)
    with unhooked_afterwards(hooks):
        yield read


def tap_hooks(model: Model, names: Sequence[str]) -> tuple[list[list[Tensor]], Iterator[RemovableHandle]]:
    """Return a list for what each tap will read, and the hooks that fill them, each put on when it is asked for."""
    read: list[list[Tensor]] = [[] for _ in names]
    here = threading.get_ident()

    def note(tap: list[Tensor], name: str, value: Any) -> None:
        if threading.get_ident() != here:  # somebody else's call of the same model
            return
        tensor = first_tensor(value)
        if tensor is None:
            raise ModelError(f"the feature tap {name!r} met no tensor. Name another module with features=.")
        tap.append(as_vectors(tensor))  # at once: maps of many blocks would take more memory than the model itself

    def hook(name: str, tap: list[Tensor]) -> Callable[[], RemovableHandle]:
        module = tapped_module(model, name)
        if name.endswith(OUTPUT):
            return partial(module.register_forward_hook, lambda _, inputs, output: note(tap, name, output))  # noqa: ARG005
        given = lambda _, inputs, named: note(tap, name, [*inputs, *named.values()])  # noqa: E731
        return partial(module.register_forward_pre_hook, given, with_kwargs=True)

    hooks = [hook(name, tap) for name, tap in zip(names, read, strict=True)]
    return read, (put_on() for put_on in hooks)


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor with a batch in whatever a module takes or gives, or None."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and value.ndim >= 2 else None
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((found for found in map(first_tensor, value) if found is not None), None)
    return None


def pooled(read: list[list[Tensor]], passes: int, views: int) -> Tensor | None:
    """Return the tapped features (V, D), of all taps and as their mean over passes; the lists are emptied."""
    vectors = []
    for tap in read:
        if not tap:
            raise ModelError("a feature tap was not reached by this forward pass. Name other modules with features=.")
        tapped = torch.cat(tap)
        tap.clear()
        copies = len(tapped) // views
        if copies not in (1, passes) or len(tapped) != copies * views:
            raise ModelError(f"a feature layer ran on {len(tapped)} rows for {views} views. Name another module.")
        vectors.append(tapped.reshape(copies, views, -1).mean(0))
    return torch.cat(vectors, dim=1) if vectors else None


def joined(parts: Sequence[Evidence]) -> Evidence:
    """Return the evidence of all chunks as one.

    Raise `ModelError` for logits or features that are NaN or infinite, and for features wider than those of others.
    """
    logits = torch.cat([part.logits for part in parts])
    check_finite(logits)
    features = [part.features for part in parts if part.features is not None]
    widths = sorted({one.shape[-1] for one in features})
    if len(widths) > 1:
        found = " and ".join(map(str, widths))
        raise ModelError(f"the feature taps gave {found} numbers per view. Name modules of a fixed width: features=.")
    if features and not bool(torch.stack([one.isfinite().all() for one in features]).all()):
        raise ModelError(
            "the model's features are NaN or infinite. Check its weights, or name other modules: features=."
        )
    return Evidence(logits, torch.cat(features) if features else None)


def as_vectors(tapped: Tensor) -> Tensor:
    """Return one feature vector per view: the mean over space; over tokens, with the class token where there is one.

    A map (V, C, H, W) may also come as (V, H, W, C), which its equal sides give away. Tokens (V, T, D) that are no
    square of places have the class token first.
    """
    tapped = tapped.float()
    if tapped.ndim == 4:
        last = tapped.shape[1] == tapped.shape[2] != tapped.shape[3]
        return tapped.mean((1, 2) if last else (2, 3))
    if tapped.ndim == 3:
        mean = tapped.mean(1)
        square = math.isqrt(tapped.shape[1]) ** 2 == tapped.shape[1]
        return mean if square else torch.cat([mean, tapped[:, 0]], dim=1)
    return tapped.flatten(1)

"""Taps: where a classifier's features are read. Found by structure, so that any network has them without being known.

A tap is named by a module and the side on which it is read: ``"fc"`` is what the module fc is given, ``"layer1:out"``
is what the module layer1 gives. Early layers tell how an image lies, late ones what it shows; a head reads both. How
they are read is the business of `outputs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from headtilt.errors import OptionError
from headtilt.model.outputs import OUTPUT, as_vectors, first_tensor, tappable
from headtilt.model.state import Model, by_this_thread, unhooked_afterwards

MOST_WIDTH = 8192  # of all taps together; with more, a head would only memorise its fit images
LINEAR_TAPS = 2
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Call:
    """One call of a module while a view went through the model.

    Attributes:
        name: Of the module.
        module: The module itself.
        given: What it was given, as one tensor, or None where nothing in it was one.
        gave: What it gave, likewise.
    """

    name: str
    module: nn.Module
    given: Tensor | None
    gave: Tensor | None


def checked_features(features: Any) -> str | Sequence[str] | None:
    """Return the names of taps; raise `OptionError` unless they are one name, several, or None."""
    names = [features] if features is None or isinstance(features, str) else features
    if not isinstance(names, Sequence) or not all(name is None or isinstance(name, str) for name in names):
        raise OptionError(f'features must be "auto", the name of a module, several names, or None; got {features!r}.')
    return cast("str | Sequence[str] | None", features)


def tap_names(features: str | Sequence[str] | None) -> str | Sequence[str] | None:
    """Return the names of taps as several, also where there is one; "auto" stays as it is."""
    return (features,) if isinstance(features, str) and features != "auto" else features


def found_taps(model: Model, forward: Callable[[Tensor], Any], views: Tensor) -> tuple[str, ...]:
    """Return the taps of a model in the order in which they are read; none where nothing can be read.

    These are the outputs of its blocks, thinned out evenly where they are too wide together, and the inputs of its last
    linear layers. Blocks are modules of a kind that occurs more than once and lies in no other such block: stages of a
    convolutional network, layers of a transformer. A plain chain of layers has none; there what its convolutions are
    given, and what the last of them comes to, stand for them.

    Args:
        model: Bare callables have no taps.
        forward: Runs the model.
        views: (V, C, H, W), what to run it on.
    """
    calls = _recorded(model, forward, views)
    once = Counter(call.name for call in calls)
    calls = [call for call in calls if once[call.name] == 1]
    linear = [
        call.name
        for call in calls
        if isinstance(call.module, nn.Linear) and call.given is not None and _is_batch(call.given, len(views), 2)
    ][-LINEAR_TAPS:]
    # What lies behind the first of them is told by the linear layers themselves.
    places = [call.name for call in calls]
    body = calls[: places.index(linear[0])] if linear else calls
    last = [as_vectors(call.given) for call in calls if call.name in linear and call.given is not None]
    blocks = [
        (name, vectors.shape[1])
        for name, vectors in _blocks(body, len(views)) or _chain(body, len(views))
        if not any(vectors.shape == one.shape and torch.allclose(vectors, one, atol=1e-5) for one in last)
    ]
    return (*_thinned(blocks, MOST_WIDTH - sum(vectors.shape[1] for vectors in last)), *linear)


def _recorded(model: Model, forward: Callable[[Tensor], Any], views: Tensor) -> list[Call]:
    """Return what every module of a model was given and gave, in the order in which they ended."""
    calls: list[Call] = []

    def note(name: str, module: nn.Module, inputs: Any, named: dict[str, Any], output: Any) -> None:
        calls.append(Call(name, module, first_tensor([*inputs, *named.values()]), first_tensor(output)))

    inner = tappable(model)
    hooks = (
        module.register_forward_hook(
            by_this_thread(lambda module, inputs, named, output, name=name: note(name, module, inputs, named, output)),
            with_kwargs=True,
        )
        for name, module in (inner.named_modules() if isinstance(inner, nn.Module) else ())
        if name and not isinstance(module, torch.jit.ScriptModule)
    )
    with unhooked_afterwards(hooks):
        forward(views)
    return calls


def _blocks(calls: Sequence[Call], views: int) -> list[tuple[str, Tensor]]:
    """Return the outputs of repeated modules that lie in no other repeated one, as vectors (V, D)."""
    kinds = Counter(type(call.module) for call in calls if _is_block(call.module))
    repeated = {call.name for call in calls if kinds[type(call.module)] > 1 and _is_block(call.module)}
    inside = {name for name in repeated if any(name.startswith(f"{other}.") for other in repeated)}
    return [
        (call.name + OUTPUT, as_vectors(call.gave))
        for call in calls
        if call.name in repeated - inside and call.gave is not None and _is_batch(call.gave, views, 2, 3, 4)
    ]


def _is_block(module: nn.Module) -> bool:
    return type(module) not in CONTAINERS and any(True for _ in module.children())


def _chain(calls: Sequence[Call], views: int) -> list[tuple[str, Tensor]]:
    """Return what the convolutions of a plain chain of layers are given, but the first, and what the last comes to."""
    convolutions = [call for call in calls if isinstance(call.module, nn.Conv2d)]
    leaves = [call for call in calls if not any(call.module.children()) and _is_batch(call.gave, views, 4)]
    given = [(call.name, call.given) for call in convolutions[1:]]
    gave = [(call.name + OUTPUT, call.gave) for call in leaves[-1:]]
    return [(name, as_vectors(cast(Tensor, found))) for name, found in given + gave if _is_batch(found, views, 4)]


def _is_batch(tensor: Tensor | None, views: int, *dimensions: int) -> bool:
    return tensor is not None and tensor.ndim in dimensions and len(tensor) == views and tensor.numel() > 0


def _thinned(blocks: Sequence[tuple[str, int]], room: int) -> list[str]:
    """Return as many blocks as fit into the room, evenly spread over the depth, the last among them."""
    for count in range(len(blocks), 0, -1):
        places = sorted({len(blocks) - 1 - round(number * len(blocks) / count) for number in range(count)})
        if sum(blocks[place][1] for place in places) <= max(room, blocks[-1][1]):
            return [blocks[place][0] for place in places]
    return []

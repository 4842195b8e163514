"""Borrowing a model: it works in eval mode or with sampled dropout for a while, and leaves exactly as it came."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headtilt.errors import OptionError

Model = nn.Module | Callable[[Tensor], Any]
Masks = dict[tuple[Any, ...], Tensor]
SAMPLED_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
MASK_BYTES = 2**28  # of all masks kept

_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_GUARD = threading.Lock()
_HELD: WeakKeyDictionary[nn.Module, Held] = WeakKeyDictionary()
_BORROWED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # by which thread
_LEAVING: dict[object, tuple[int, Callable[[], None]]] = {}  # which thread will undo what when it leaves a model


@dataclass(frozen=True)
class Held:
    """How a module was before the first of its borrowers came.

    Attributes:
        mode: Whether it was in training mode.
        buffers: Its buffers, and copies of them.
        borrowers: Who has it now; the last to leave restores it. A part of several models may have several.
    """

    mode: bool
    buffers: dict[str, tuple[Tensor | None, Tensor | None]]
    borrowers: set[object] = field(default_factory=set)


@contextmanager
def alone(model: Model) -> Iterator[None]:
    """Wait until no other thread has borrowed a model, and let none do so for a while."""
    if not isinstance(model, nn.Module):
        yield
        return
    with _GUARD:
        lock = _LOCKS.setdefault(model, threading.RLock())
    with lock:
        yield


@contextmanager
def undisturbed(model: Model) -> Iterator[None]:
    """Put the model in eval mode; restore every mode and buffer on leaving, whatever happened.

    Random streams are left alone: a model in eval mode draws nothing, and masks have generators of their own. To set a
    stream back would have other threads draw the same numbers twice.

    One thread at a time may borrow a model, since modes and hooks belong to the model and not to the caller. Borrowing
    what the thread has already borrowed is free: the outermost borrower restores everything. What two models share is
    restored by the last that leaves.
    """
    with alone(model):
        if not isinstance(model, nn.Module) or model in _BORROWED:  # by this very thread, since it holds the lock
            yield
            return
        _BORROWED[model] = threading.get_ident()
        try:
            with _restored(model):
                yield
        finally:
            del _BORROWED[model]


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode; restore every mode and buffer on leaving."""
    modules, borrower = list(model.modules()), object()
    # In a child the copies themselves take their places: torch's threads, by which it compares, are gone there.
    with _undone(lambda: _given_back(modules, borrower), lambda: _given_back(modules, borrower, in_child=True)):
        with _GUARD:
            for module in modules:
                if module not in _HELD:
                    _HELD[module] = Held(module.training, _kept(module))
                _HELD[module].borrowers.add(borrower)
                module.training = False
        yield


def _kept(module: nn.Module) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Return the buffers of a module, and copies. Not `Tensor._version`: batch norm and `.data` do not raise it."""
    return {name: (b, None if b is None else b.detach().clone()) for name, b in module._buffers.items()}


def _given_back(modules: Sequence[nn.Module], borrower: object, in_child: bool = False) -> None:
    """Restore the modules of a borrower that nobody else has borrowed."""
    with _GUARD:
        for module in modules:
            held = _HELD.get(module)
            if held is None:
                continue
            held.borrowers.discard(borrower)
            if not held.borrowers:
                module.training = held.mode
                _restore(module, {name: (b, b) for name, (_, b) in held.buffers.items()} if in_child else held.buffers)
                del _HELD[module]


@contextmanager
def _undone(undo: Callable[[], None], in_child: Callable[[], None] | None = None) -> Iterator[None]:
    """Undo something on leaving, whatever happened.

    Args:
        undo: Called on leaving.
        in_child: Called in a process that another thread forks meanwhile, where nobody will leave; None calls `undo`.
    """
    key = object()
    try:
        _LEAVING[key] = threading.get_ident(), in_child or undo
        yield
    finally:
        try:
            undo()
        finally:
            _LEAVING.pop(key, None)


def _forked() -> None:
    """Give back, in a forked process, what threads had borrowed that did not come along: they will never leave."""
    global _GUARD
    here = threading.get_ident()
    _GUARD = threading.Lock()
    for key, (owner, undo) in reversed(list(_LEAVING.items())):
        if owner != here:
            undo()
            del _LEAVING[key]
    for model in [model for model, owner in _BORROWED.items() if owner != here]:
        del _BORROWED[model]
    # A lock may be held before and after its model counts as borrowed.
    for model in [model for model in _LOCKS if model not in _BORROWED]:
        del _LOCKS[model]


if hasattr(os, "register_at_fork"):  # nothing forks on Windows
    os.register_at_fork(after_in_child=_forked)


def _restore(module: nn.Module, buffers: dict[str, tuple[Tensor | None, Tensor | None]]) -> None:
    """Give a module back the very buffers it had, with the values they had; those made in the meantime go."""
    for name in [name for name, _ in module._buffers.items() if name not in buffers]:
        del module._buffers[name]
    for name, (buffer, value) in buffers.items():
        module._buffers[name] = buffer
        # Only where it differs: a write, even of the same values, would invalidate a graph that somebody still holds.
        if buffer is not value and buffer is not None and value is not None and not torch.equal(buffer, value):
            with torch.inference_mode():
                buffer.copy_(value)


def by_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that acts in this thread alone: others may call the same model meanwhile, for their own ends."""
    owner = threading.get_ident()

    def only_ours(*arguments: Any, **named: Any) -> Any:
        return hook(*arguments, **named) if threading.get_ident() == owner else None

    return only_ours


@contextmanager
def unhooked_afterwards(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Put hooks on a model, each as it is asked for, and remove those that are there on leaving, whatever happened."""
    handles: list[RemovableHandle] = []

    def remove() -> None:
        for handle in handles:
            handle.remove()

    with _undone(remove):
        handles.extend(hooks)
        yield


def dropout_layers(model: Model) -> list[nn.Module]:
    """Return the dropout layers that can be sampled, in the model's order; raise `OptionError` where there are none."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    layers: list[nn.Module] = [module for module in modules if isinstance(module, SAMPLED_LAYERS) and module.p > 0]
    if not layers:
        raise OptionError(
            "mc_passes > 1 needs a dropout layer with p > 0 to sample, and this model has none. Use mc_passes=1."
        )
    return layers


@contextmanager
def dropout_masks(layers: list[nn.Module], passes: range, seed: int, kept: Masks | None = None) -> Iterator[list[int]]:
    """Make dropout layers multiply by the masks of these passes: the first one repeats its views once per pass.

    Each view leaves the first layer `len(passes)` times, pass by pass, so everything before it runs once and everything
    behind it as one batch. The layers stay in eval mode; only their output is replaced. Yields a list that collects how
    many elements one view has at each of them.

    Args:
        layers: The layers, in the order that numbers them.
        passes: Numbers of the passes.
        seed: Seed of the masks.
        kept: Masks drawn before, which are the same at every chunk; those drawn now are added.
    """
    repeated = False
    kept = {} if kept is None else kept
    sizes: list[int] = []
    calls = dict.fromkeys(layers, 0)

    def sample(number: int, module: nn.Module, output: Tensor) -> Tensor:
        nonlocal repeated
        views = output.unflatten(0, (len(passes), -1)) if repeated else output[None]
        repeated = True
        sizes.append(views[0, 0].numel())
        call, calls[module] = calls[module], calls[module] + 1
        shape = views.shape[2:] if isinstance(module, nn.Dropout) else (views.shape[2], *[1] * (views.ndim - 3))
        key = (seed, passes, number, call, shape, float(module.p), output.dtype, output.device)  # type: ignore[arg-type]
        if key not in kept:
            _forget(kept)
            keys = [(seed, one, number, call) for one in passes]
            masks = torch.stack([dropout_mask(shape, float(module.p), key) for key in keys])  # type: ignore[arg-type]
            kept[key] = masks.to(output)
        return (views * kept[key][:, None]).flatten(0, 1)

    hooks = (
        layer.register_forward_hook(
            by_this_thread(lambda module, _, output, number=number: sample(number, module, output))
        )
        for number, layer in enumerate(layers)
    )
    with unhooked_afterwards(hooks):
        yield sizes


def _forget(kept: Masks) -> None:
    """Drop the oldest masks while all together take more memory than they may."""
    while sum(masks.nbytes for masks in kept.values()) > MASK_BYTES:
        del kept[next(iter(kept))]


def dropout_mask(shape: tuple[int, ...], rate: float, key: tuple[int, int, int, int]) -> Tensor:
    """Return one draw of the paper's Λ: zeros with probability `rate`, else 1 / (1 − rate), the same for the same key.

    Args:
        shape: Shape of one view's activations at that layer.
        rate: Dropout rate of the layer.
        key: (seed, pass, layer, call).
    """
    seed, *place = key
    entropy = np.random.SeedSequence([seed % 2**64, *place])
    generator = torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0] >> 1))
    keep = torch.rand(shape, generator=generator, dtype=torch.float32) >= rate  # others are drawn in other precisions
    return keep / max(1 - rate, torch.finfo(torch.float32).tiny)

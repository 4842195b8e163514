"""Reading a model: the logits in what it returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headtilt.errors import ModelError
from headtilt.model.state import Model


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

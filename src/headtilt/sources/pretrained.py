"""Models by name, ready to use: ``headtilt.from_pretrained("hf:NAME")``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headtilt.errors import DataError, OptionError
from headtilt.geometry.groups import Group
from headtilt.its import ITS

if TYPE_CHECKING:
    from typing_extensions import Self

    from headtilt.sources import Adapted


class Pretrained(ITS):
    """A wrapper that knows where its model came from: its class names, and how it wants images prepared.

    Attributes:
        adapted: The model with its labels, the square that it sees and how photographs are cut to it.
    """

    adapted: Adapted

    @property
    def names(self) -> tuple[str, ...] | None:
        """Class names, by label, or None where the model has none."""
        return self.adapted.labels

    def but(self, **changes: Any) -> Self:
        """Return another wrapper around the same model; see `ITS.but`."""
        other = super().but(**changes)
        other.adapted = self.adapted
        return other

    def read(self, *sources: Any) -> Tensor:
        """Return images (B, C, size, size) as the model sees them.

        Args:
            *sources: Paths, bytes of files, PIL images, or arrays; see `headtilt.sources.images.upright`.
        """
        from headtilt.sources.images import square_of

        if not sources:
            raise OptionError("read needs at least one path, PIL image, array or bytes of a file.")
        return torch.stack([square_of(source, self.adapted) for source in sources])


def from_pretrained(
    spec: str,
    *,
    bundle: str | os.PathLike[str] | None = None,
    levels: Sequence[Group] | None = None,
    device: str = "cpu",
    size: int | None = None,
    strict: bool = True,
    **options: Any,
) -> Pretrained:
    """Return a named model with the search around it, ready to use.

    Args:
        spec: ``hf:NAME`` (or a folder or hub name alone), ``timm:NAME``, ``torchvision:NAME``, ``onnx:FILE``,
            ``pt2:FILE``, ``zoo:NAME`` or ``python:MODULE:FUNCTION``; see `headtilt.sources.registry.load`.
        bundle: A folder that `save` or ``headtilt fit`` wrote for this model; levels and options come with it.
        levels: Groups to search; the full turn by default.
        device: Where the model should live.
        size: Side of the square that the model sees, in place of its own.
        strict: Whether a bundle that was fitted for another model is refused; see `ITS.load`.
        **options: Any of `ITS`, such as those of a preset: ``**headtilt.fast()``.

    Examples:
        >>> robust = from_pretrained("zoo:digits")  # or "hf:google/vit-base-patch16-224", …
        >>> result = robust.search(robust.read("digit.png"))
        >>> result.labels.shape
        torch.Size([1])
    """
    from headtilt.sources import registry as door

    return wrapped(door.load(spec, device=device, size=size), bundle=bundle, levels=levels, strict=strict, **options)


def wrapped(
    adapted: Adapted,
    *,
    bundle: str | os.PathLike[str] | None = None,
    levels: Sequence[Group] | None = None,
    strict: bool = True,
    **options: Any,
) -> Pretrained:
    """Return what `from_pretrained` does, for a model that is loaded already."""
    if bundle is None:
        given = {"padding": adapted.padding, "features": adapted.features, **options}
        robust = Pretrained(adapted.model, **({} if levels is None else {"levels": levels}) | given)
    elif levels is not None or options:
        given = {**options, **({} if levels is None else {"levels": levels})}
        raise OptionError(f"{', '.join(given)}: these come with the bundle {os.fspath(bundle)}. Leave them out.")
    else:
        robust = Pretrained.load(bundle, adapted.model, strict=strict)  # type: ignore[assignment]
        _check(robust, adapted, bundle)
    robust.adapted = adapted
    robust.eval()
    return robust


def _check(robust: ITS, adapted: Adapted, folder: str | os.PathLike[str]) -> None:
    """Raise `DataError` where a bundle was fitted for a model with another number of classes."""
    bias = getattr(robust.calibrator, "bias", None)
    device, _ = robust.predictor.device_and_dtype(torch.zeros(1))
    shown = robust.predictor(torch.zeros(1, adapted.channels, adapted.size, adapted.size, device=device))
    outputs = shown.logits.shape[-1]
    if isinstance(bias, Tensor) and len(bias) != outputs:
        raise DataError(
            f"the bundle {os.fspath(folder)} was fitted for {len(bias)} classes and {adapted.name} has {outputs}. "
            "Fit one for this model: headtilt fit."
        )

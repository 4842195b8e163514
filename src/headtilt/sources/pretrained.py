"""Models by name, ready to use: ``headtilt.from_pretrained("hf:NAME")``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headtilt.errors import DataError, OptionError, ShapeError
from headtilt.geometry.groups import Group
from headtilt.its import ITS, Joined
from headtilt.result import SearchResult

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
        from headtilt.sources.health import unlike
        from headtilt.sources.images import as_seen, cut, prepare, upright

        if not sources:
            raise OptionError("read needs at least one path, PIL image, array or bytes of a file.")
        squares, coloured = [], replace(self.adapted.square, channels=3)
        for source in sources:
            image = upright(source)
            colours = as_seen(cut(image, coloured), coloured)
            if said := unlike(image.size, colours, self.adapted):
                warnings.warn(said, stacklevel=2)
            squares.append(prepare(image, self.adapted))
        return torch.stack(squares)

    def push_to_hub(self, name: str, *, token: str | None = None, private: bool = False) -> str:
        """Write what was fitted to a repository on the Hugging Face hub, and return its address.

        Args:
            name: ORGANISATION/NAME, which ``from_pretrained(…, bundle=NAME)`` then takes.
            token: Of an account that may write there; the one that is logged in by default.
            private: Whether a new repository is private.
        """
        from headtilt.sources.hub import push

        return push(self, name, token=token, private=private, model=self.adapted.name)

    def _blocks(
        self, images: Tensor, join: Callable[[list[Any]], Joined], *, keep: Callable[[SearchResult], Any] | None = None
    ) -> Joined:
        """Return what the search finds, once images are what the model sees."""
        wanted = self.adapted.channels, self.adapted.size, self.adapted.size
        if isinstance(images, Tensor) and images.ndim == 4 and images.shape[1] not in (wanted[0],):
            raise ShapeError(
                f"images must be {('B', *wanted)} for {self.adapted.name}; got {tuple(images.shape)}. "
                "Let it prepare them: robust.read(image)."
            )
        return super()._blocks(images, join, keep=keep)


def from_pretrained(
    spec: str,
    *,
    bundle: str | os.PathLike[str] | None = None,
    levels: Sequence[Group] | None = None,
    device: str = "cpu",
    size: int | None = None,
    strict: bool = True,
    labels: Sequence[str] | None = None,
    **options: Any,
) -> Pretrained:
    """Return a named model with the search around it, ready to use.

    Args:
        spec: ``hf:NAME`` (or a folder or hub name alone), ``timm:NAME``, ``torchvision:NAME``, ``onnx:FILE``,
            ``pt2:FILE``, ``zoo:NAME`` or ``python:MODULE:FUNCTION``; see `headtilt.sources.registry.load`.
        bundle: A folder that `save` or ``headtilt fit`` wrote for this model, or the name of one on the hub; levels and
            options come with it.
        levels: Groups to search; the full turn by default.
        device: Where the model should live.
        size: Side of the square that the model sees, in place of its own.
        strict: Whether a bundle that was fitted for another model is refused; see `ITS.load`.
        labels: Class names for a zero-shot model, ``hf-zeroshot:NAME``.
        **options: Any of `ITS`, such as those of a preset: ``**headtilt.fast()``.

    Examples:
        >>> robust = from_pretrained("zoo:digits")  # or "hf:google/vit-base-patch16-224", …
        >>> result = robust.search(robust.read("digit.png"))
        >>> result.labels.shape
        torch.Size([1])
    """
    from headtilt.sources import registry as door

    opened = door.load(spec, device=device, size=size, labels=labels)
    return wrapped(opened, bundle=bundle, levels=levels, strict=strict, **options)


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
        names = ", ".join(given)
        raise OptionError(
            f"{names} cannot be combined with bundle {os.fspath(bundle)}, which sets them. Leave them out."
        )
    else:
        from headtilt.sources.hub import fetched, on_hub

        folder = fetched(os.fspath(bundle)) if on_hub(bundle) else bundle
        robust = Pretrained.load(folder, adapted.model, strict=strict)  # type: ignore[assignment]
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

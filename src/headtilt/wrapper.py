"""The product: a module that stands where the classifier stood and answers for tilted images too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headtilt.confidence import Confidence
from headtilt.errors import ShapeError, one_of
from headtilt.evidence import Evidence, Model, Predictor
from headtilt.groups import Group, rotation
from headtilt.result import SearchResult, concatenate
from headtilt.search.tree import Tree, search
from headtilt.warp import Interpolation, Padding, check_images

# Logits kept at once while one block of images is searched: bounds memory whatever the size of the batch.
BLOCK_ELEMENTS = 2**24


class ITS(nn.Module):
    """A classifier with Inverse Transformation Search around it.

    ``robust(images)`` returns logits of the model's shape; ``robust.search(images)`` also says how each image was
    transformed and why. The model is never changed and leaves every call in the mode it came in.

    Args:
        model: An `nn.Module` or a callable from raw images (B, C, H, W) to logits (B, Y). Normalisation belongs to it.
        levels: Groups to search, from the root of the tree down; the full turn by default.
        samples: Samples along each orbit; odd, so that the identity is among them (even is fine for a full turn).
        hypotheses: Hypotheses kept at each level, at most one per label.
        confidence: "energy", "bayesian" or "group" (the paper's three), or a callable (Evidence, Orbit) → (B, K, N).
        mc_passes: Dropout passes to average over; 1 is the deterministic model.
        mc_sampled: Sample dropout even for a single pass.
        seed: Seed of the dropout masks and of the Boltzmann traversal.
        readout: "incumbent" answers with the best hypothesis, "marginal" sums the evidence over all views seen.
        padding: What lies outside the image: "zeros", "border", "reflection", a number, or a number per channel.
        interpolation: "bilinear", "nearest" or "bicubic".
        chunk: Views per forward pass; None chooses.
        autocast: Reduced-precision dtype for `torch.autocast`, or None.
        output_key: Where the logits are if the model returns a dict or an object.
        **tree: The finer options of `headtilt.search.tree.Tree`: width, accept, ranking, traversal, temperature.

    Example:
        >>> robust = ITS(model, levels=[rotation(), scale(0.25), shear_x(0.25)])  # doctest: +SKIP
        >>> logits = robust(images)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Model,
        levels: Sequence[Group] | None = None,
        *,
        samples: int = 17,
        hypotheses: int = 3,
        confidence: str | Confidence = "group",
        mc_passes: int = 1,
        mc_sampled: bool = False,
        seed: int = 0,
        readout: Literal["incumbent", "marginal"] = "incumbent",
        padding: Padding = "zeros",
        interpolation: Interpolation = "bilinear",
        chunk: int | None = None,
        autocast: torch.dtype | None = None,
        output_key: str = "logits",
        **tree: Any,
    ) -> None:
        super().__init__()
        one_of("readout", readout, ("incumbent", "marginal"))
        one_of("interpolation", interpolation, ("bilinear", "nearest", "bicubic"))
        if isinstance(padding, str):
            one_of("padding", padding, ("zeros", "border", "reflection"))
        for option in tree:
            one_of("option", option, ("width", "accept", "ranking", "traversal", "temperature"))
        self.model = model
        self.tree = Tree(
            (rotation(),) if levels is None else levels,  # type: ignore[arg-type]
            samples=samples,
            hypotheses=hypotheses,
            confidence=confidence,
            seed=seed,
            **tree,
        )
        self.predictor = Predictor(
            model,
            mc_passes=mc_passes,
            mc_sampled=mc_sampled,
            seed=seed,
            chunk=chunk,
            autocast=autocast,
            output_key=output_key,
        )
        self.readout = readout
        self.padding: Padding = padding
        self.interpolation: Interpolation = interpolation

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, Y) of the images (B, C, H, W) in their most familiar pose."""
        return self.search(images).logits

    def search(self, images: Tensor) -> SearchResult:
        """Return labels, poses and the trace of the search for images (B, C, H, W) of raw pixels."""
        check_images(images)
        if not bool(images.isfinite().all()):
            raise ShapeError(
                "images must be finite; some pixels are NaN or infinite. Clean them first: images.nan_to_num()."
            )
        device, _ = self.predictor.device_and_dtype(images)
        images = images.to(device)
        root = self.predictor(images).logits
        widest = max(len(group.grid(self.tree.samples)) for group in self.tree.levels) * self.tree.hypotheses
        block = max(1, BLOCK_ELEMENTS // (widest * root.shape[-1]))
        parts = zip(images.split(block), root.split(block), strict=True)
        return concatenate([self._search_block(part, Evidence(logits)) for part, logits in parts])

    def _search_block(self, images: Tensor, root: Evidence) -> SearchResult:
        def evaluate(index: Tensor, poses: Tensor) -> Evidence:
            return self.predictor.views(images, index, poses, padding=self.padding, interpolation=self.interpolation)

        found = search(evaluate, root, self.tree)
        return SearchResult(
            logits=found.marginal if self.readout == "marginal" else found.beam.evidence.logits[:, 0],
            pose=found.beam.pose[:, 0],
            views=found.views,
            hypotheses=found.beam,
            trace=found.trace,
            images=images,
            padding=self.padding,
            interpolation=self.interpolation,
        )

    def extra_repr(self) -> str:
        """Return the levels and the main options."""
        names = " → ".join(group.name for group in self.tree.levels)
        return f"levels={names}, samples={self.tree.samples}, hypotheses={self.tree.hypotheses}"

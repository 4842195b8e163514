"""Looks at the images of a fit: what the model says of them under some tilts, kept in half precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headtilt.calibration.sampler import COLUMNS, Orbits
from headtilt.model.evidence import Evidence, concatenate


@dataclass(frozen=True)
class Looks:
    """Fit images under some tilts.

    Attributes:
        orbits: (n · looks, V, …), what the model says of them.
        image: (n · looks,), which image each of them shows.
    """

    orbits: Orbits
    image: Tensor

    def of(self, images: Tensor) -> Looks:
        """Return the looks at those images."""
        return self._at(torch.isin(self.image, images.to(self.image.device)).nonzero()[:, 0])

    def once(self) -> Looks:
        """Return one look at each image: several count it several times, and a bias learns the images by heart."""
        place = torch.unique(self.image, return_inverse=True)[1]
        rows = torch.zeros(int(place.max()) + 1, dtype=torch.long, device=place.device)
        rows[place.flip(0)] = torch.arange(len(place), device=place.device).flip(0)
        return self._at(rows)

    def _at(self, rows: Tensor) -> Looks:
        return Looks(self.orbits.at(rows), self.image[rows])


def in_half(evidence: Evidence) -> Evidence:
    """Return evidence whose features take half of the memory."""
    features = evidence.features
    return Evidence(evidence.logits, None if features is None else features.clamp(-6e4, 6e4).half(), evidence.upright)


def floats(evidence: Evidence) -> Evidence:
    """Return evidence in single precision."""
    features = evidence.features
    return Evidence(evidence.logits.float(), None if features is None else features.float(), evidence.upright)


def gathered(parts: list[Orbits], shown: list[Tensor]) -> Looks:
    """Return looks that were taken a part at a time; `shown` says which images each part shows."""
    evidence = concatenate([part.evidence for part in parts])
    return Looks(
        Orbits(evidence, *(torch.cat([getattr(part, name) for part in parts]) for name in COLUMNS)), torch.cat(shown)
    )

"""Looks at the images of a fit: what the model says of them under some tilts, kept in half precision."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headtilt.calibration.sampler import COLUMNS, Orbits
from headtilt.model.evidence import Evidence, concatenate

MOST_KEPT = {"cpu": 2**28, "cuda": 2**32}  # numbers of evidence kept at once, in half precision
SHARE_KEPT = 1 / 4  # of a GPU's memory that these may take


@dataclass(frozen=True)
class Looks:
    """Fit images under some tilts.

    Attributes:
        orbits: (n · looks, V, …), what the model says of them.
        image: (n · looks,), which image each of them shows.
    """

    orbits: Orbits
    image: Tensor

    def rows(self, images: Tensor) -> Tensor:
        """Return which looks show those images."""
        return torch.isin(self.image, images.to(self.image.device)).nonzero()[:, 0]

    def of(self, images: Tensor) -> Looks:
        """Return the looks at those images."""
        return self.at(self.rows(images))

    def once(self, images: Tensor) -> Looks:
        """Return one look at each of those images: several count it several times, and a bias learns them by heart."""
        rows = self.rows(images)
        place = torch.unique(self.image[rows], return_inverse=True)[1]
        first = torch.zeros(int(place.max()) + 1, dtype=torch.long, device=place.device)
        first[place.flip(0)] = rows.flip(0)
        return self.at(first)

    def at(self, rows: Tensor) -> Looks:
        """Return the looks at `rows`."""
        return Looks(self.orbits.at(rows), self.image[rows])


def floats(evidence: Evidence) -> Evidence:
    """Return evidence in single precision."""
    features = evidence.features
    return Evidence(evidence.logits.float(), None if features is None else features.float(), evidence.upright)


@dataclass
class Pile:
    """Looks that are taken a part at a time.

    Attributes:
        most: Numbers of evidence that may be kept.
        planned: Looks that will be taken, if these may be kept.
    """

    most: int
    planned: int
    features: Tensor | None = None
    parts: list[Orbits] = field(default_factory=list)
    shown: list[Tensor] = field(default_factory=list)
    taken: int = 0

    def add(self, orbits: Orbits, images: Tensor) -> bool:
        """Keep looks at some images, features in half precision, and return whether there is room for more.

        Features lie in one place from the start: parts that are joined in the end take memory twice.
        """
        evidence, count = orbits.evidence, len(images)
        width = evidence.logits.shape[1:].numel()
        if evidence.features is not None:
            width += evidence.features.shape[1:].numel()
            if self.features is None:
                rows = min(self.planned, self.most // width + count)
                self.features = evidence.features.new_empty(rows, *evidence.features.shape[1:], dtype=torch.float16)
            self.features[self.taken : self.taken + count] = evidence.features.clamp(-6e4, 6e4)
        self.parts.append(replace(orbits, evidence=replace(evidence, features=None)))
        self.shown.append(images.to(orbits.aim.device))
        self.taken += count
        return self.taken * width <= self.most

    def looks(self) -> Looks:
        """Return all of them."""
        evidence = concatenate([part.evidence for part in self.parts])
        if self.features is not None:
            evidence = replace(evidence, features=self.features[: self.taken])
        columns = (torch.cat([getattr(part, name) for part in self.parts]) for name in COLUMNS)
        return Looks(Orbits(evidence, *columns), torch.cat(self.shown))


def most_kept(device: torch.device) -> int:
    """Return how many numbers of evidence a fit may keep on a device."""
    if device.type != "cuda":
        return MOST_KEPT["cpu"]
    room = torch.cuda.get_device_properties(device).total_memory
    return min(MOST_KEPT["cuda"], int(SHARE_KEPT * room / torch.float16.itemsize))

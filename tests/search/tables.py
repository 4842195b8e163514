"""Tables of energies and labels that say what every view looks like: a search without a network."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

import headtilt as ht
from headtilt.model.evidence import Evidence
from headtilt.search.tree import Tree, search
from tests.toys import evidence_of

RIGHT, DOWN = ht.translate_x(1.0), ht.translate_y(1.0)
EYE = torch.eye(3, dtype=torch.float64)


class Table:
    """Views on a grid of shifts: energy and label of image b, shifted to column i and row j, stand in a table.

    Args:
        energy: (B, N, N), by image, step to the right, step down.
        labels: The same shape.
    """

    def __init__(self, energy: torch.Tensor, labels: torch.Tensor | None = None, classes: int = 6) -> None:
        self.energy = energy.double()
        self.labels = torch.zeros_like(energy, dtype=torch.long) if labels is None else labels
        self.classes = classes
        self.samples = energy.shape[1]
        self.seen: list[tuple[int, int, int]] = []

    def look(self, index: torch.Tensor, poses: torch.Tensor) -> Evidence:
        half = self.samples // 2
        column, row = ((poses[:, axis, 2] * half).round().long() + half for axis in (0, 1))
        # A level may lead beyond the table: beyond its edge the table goes on with its last entry.
        column, row = column.clamp(0, self.samples - 1), row.clamp(0, self.samples - 1)
        return evidence_of(self.energy[index, column, row], self.labels[index, column, row], self.classes)

    def evaluate(self, index: torch.Tensor, poses: torch.Tensor) -> Evidence:
        steps = (poses[:, :2, 2] * (self.samples // 2)).round().long()
        self.seen += [(int(i), int(x), int(y)) for i, (x, y) in zip(index, steps, strict=True)]
        return self.look(index, poses)

    def root(self) -> Evidence:
        batch = len(self.energy)
        return self.look(torch.arange(batch), EYE.expand(batch, 3, 3))

    def walk(self, levels=(RIGHT, DOWN), **options):
        options = {"confidence": "energy", "samples": self.samples, **options}
        return search(self.evaluate, self.root(), Tree(levels, **options))


def random_table(seed: int, batch: int = 2, samples: int = 5, classes: int = 4) -> Table:
    generator = torch.Generator().manual_seed(seed)
    energy = 3 * torch.randn(batch, samples, samples, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (batch, samples, samples), generator=generator)
    return Table(energy, labels, classes)


def places(pose: torch.Tensor, samples: int) -> list[tuple[int, int]]:
    """(column, row) of poses (…, 3, 3), counted from the identity."""
    return [tuple(step) for step in (pose[..., :2, 2] * (samples // 2)).round().long().reshape(-1, 2).tolist()]


seeds = st.integers(0, 10_000)

"""What ITS is compared with: trained canonicalisers, equivariant networks, the paper's public code as it behaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from headtilt.errors import one_of

if TYPE_CHECKING:
    from torch import Tensor, nn

NAMES = ("stn", "icstn", "dtn", "etn", "etn-cut", "etn-official", "gcnn", "rotdcf")


@runtime_checkable
class Canonicaliser(Protocol):
    """What stn, icstn, dtn and the kinds of etn can do beyond classifying; ask with `isinstance`."""

    def pose(self, images: Tensor) -> Tensor:
        """Return the matrices (B, 3, 3) that bring the images into canonical form."""

    def canonical(self, images: Tensor) -> Tensor:
        """Return the images (B, C, H, W) in canonical form."""


def make(name: str, *, classes: int, channels: int, size: int) -> nn.Module:
    """Return a fresh baseline, to be trained like its backbone; logits (B, Y) for images (B, channels, size, size).

    stn, icstn, dtn and etn are a `Canonicaliser` before the paper's small network (grey images) or its large one
    (colour). etn-official has the architecture of its authors; etn is our own, without strides, and etn-cut the same on
    a map whose angle does not wrap. gcnn and rotdcf are equivariant small networks.

    Args:
        name: One of `NAMES`.
        classes: Count of classes.
        channels: Channels of the images.
        size: Height and width of the images.
    """
    one_of("name", name, NAMES)
    if name == "gcnn":
        from headtilt.paper.baselines.gcnn import GCNN

        return GCNN(classes, channels, size)
    if name == "rotdcf":
        from headtilt.paper.baselines.rotdcf import RotDCF

        return RotDCF(classes, channels, size)

    from headtilt.paper.baselines.dtn import DTN
    from headtilt.paper.baselines.etn import ETN
    from headtilt.paper.baselines.etn_official import OfficialETN
    from headtilt.paper.baselines.icstn import ICSTN
    from headtilt.paper.baselines.stn import STN
    from headtilt.sources.zoo.cnn import LargeCNN, SmallCNN

    network = SmallCNN if channels == 1 else LargeCNN
    canonicalisers: dict[str, Callable[..., nn.Module]] = {
        "stn": STN,
        "icstn": ICSTN,
        "dtn": DTN,
        "etn": ETN,
        "etn-cut": partial(ETN, wraps=False),
        "etn-official": OfficialETN,
    }
    return canonicalisers[name](network(classes, channels, size), channels=channels, size=size)

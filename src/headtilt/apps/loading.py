"""A model and what is wrapped around it, as commands name them: loaded anywhere, and recognised by fingerprints."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from headtilt.errors import DataError
from headtilt.io import bundle as bundles
from headtilt.its import ITS
from headtilt.presets import levels_named
from headtilt.sources import Adapted
from headtilt.sources import registry as door


@dataclass(frozen=True)
class Wrapped:
    """What to load.

    Attributes:
        model: The spec of a classifier, as `door.load` takes it.
        bundle: Folder of a fitted bundle, or None for a search with nothing fitted.
        levels: Names of what is searched where there is no bundle, separated by commas.
        device: Where the model should live.
        strict: Whether a bundle that was fitted for another model is refused.
    """

    model: str
    bundle: str | None = None
    levels: str = "rotation"
    device: str = "cpu"
    strict: bool = True

    def load(self) -> tuple[ITS, Adapted]:
        """Return the search and the classifier inside it."""
        bound_memory()
        adapted = door.load(self.model, device=self.device)
        if self.bundle is not None:
            return ITS.load(self.bundle, adapted.model, strict=self.strict).to(self.device), adapted
        return ITS(adapted.model, levels_named(self.levels), padding=adapted.padding).to(self.device), adapted


def bound_memory() -> None:
    """Keep what runs for hours from growing: views come in chunks of many sizes, and oneDNN keeps a kernel for each.

    It keeps 1,024 unless told otherwise, which took a hundred megabytes within a minute on a small network. Read once,
    at the first convolution; whoever set it otherwise is obeyed.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def model_fingerprint(adapted: Adapted, spec: str) -> str:
    """Return the SHA-256 of a classifier's weights and of how it prepares images and names classes.

    A classifier whose weights PyTorch does not hold, such as an ONNX session, counts by the file that its spec names.
    """
    digest = hashlib.sha256()
    geometry = (adapted.size, adapted.resize, str(adapted.padding), adapted.channels, adapted.labels)
    digest.update(repr(geometry).encode())
    weights = adapted.model.state_dict()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    named = Path(spec.partition(":")[2])
    if not weights and named.is_file():
        digest.update(named.read_bytes())
    return digest.hexdigest()


def bundle_fingerprint(folder: str | None) -> str | None:
    """Return the SHA-256 of a bundle's files; None where there is no bundle."""
    if folder is None:
        return None
    digest = hashlib.sha256()
    for name in (bundles.CONFIG, bundles.TENSORS):
        path = Path(folder) / name
        if not path.is_file():
            raise DataError(f"{folder} is no bundle: it has no {name}. Write one with robust.save(folder).")
        digest.update(path.read_bytes())
    return digest.hexdigest()

"""A model and what is wrapped around it, as commands name them: loaded anywhere, and recognised by fingerprints."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from headtilt.errors import DataError
from headtilt.io import bundle as bundles
from headtilt.io.files import digest_of
from headtilt.its import ITS
from headtilt.presets import levels_named
from headtilt.sources import Adapted
from headtilt.sources import registry as door
from headtilt.sources.pretrained import wrapped


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
            return wrapped(adapted, bundle=self.bundle, strict=self.strict), adapted
        return wrapped(adapted, levels=levels_named(self.levels)), adapted


def bound_memory() -> None:
    """Keep what runs for hours from growing: views come in chunks of many sizes, and oneDNN keeps a kernel for each.

    It keeps 1,024 unless told otherwise, which took a hundred megabytes within a minute on a small network. Read once,
    at the first convolution; whoever set it otherwise is obeyed.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def model_fingerprint(adapted: Adapted, spec: str) -> str:
    """Return the SHA-256 of a classifier: its weights, the files it was made of, and how it prepares and names images.

    What PyTorch does not hold, such as an ONNX session with its external data, counts by its files; so does what stands
    beside them, and the module of a model of one's own.
    """
    digest = hashlib.sha256()
    geometry = (adapted.square, str(adapted.padding), adapted.labels, adapted.features)
    digest.update(repr(geometry).encode())
    for name, tensor in sorted(adapted.model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    for path in door.files_of(spec):
        digest.update(f"{path.name} {digest_of(path)}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def bundle_fingerprint(folder: str | None) -> str | None:
    """Return the SHA-256 of a bundle's files; None where there is no bundle."""
    if folder is None:
        return None
    digest = hashlib.sha256()
    for name in (bundles.CONFIG, bundles.TENSORS):
        path = Path(folder) / name
        if not path.is_file():
            raise DataError(f"{folder} is no bundle: it has no {name}. {bundles.HOW_TO_WRITE}")
        digest.update(digest_of(path).encode())
    return digest.hexdigest()

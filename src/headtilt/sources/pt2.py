"""Programs that `torch.export.save` wrote (``.pt2``)."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headtilt.errors import DataError, ModelError
from headtilt.sources import Adapted, sidecar
from headtilt.sources.preprocessing import BlackBox, only_tensors


def load(file: str, *, device: str = "cpu") -> Adapted:
    """Return the classifier of an exported program.

    **Load only files that you trust.** A ``.pt2`` file is a program: torch rebuilds its graph from the operators that
    the file names and runs it. Its tensors are read without running anything (tensors alone are unpickled, whatever
    else the file holds is refused), but the graph itself cannot be vetted.

    It takes images (B, C, H, W), with any batch or one fixed size of it. Labels, geometry and normalisation come from a
    JSON file beside it; see `headtilt.sources.sidecar`.

    Args:
        file: What `torch.export.save` wrote.
        device: Where it should live.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise DataError(f"pt2:{file} is not a file. Check the path.")
    if not zipfile.is_zipfile(path):  # torch would print a traceback of its own
        raise DataError(f"{path} cannot be read as an exported program: it is no archive.")
    try:
        with only_tensors():
            program = torch.export.load(path)
    except Exception as error:  # a broken archive raises whatever its readers do
        raise DataError(f"{path} cannot be read as an exported program: {error}") from error
    if torch.device(device).type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    batch, channels, side = _takes(program, path)
    about = sidecar.beside(path)
    size = sidecar.side(side, about, path)
    network = BlackBox(Exported(program.module(), torch.device(device)), batch)
    return sidecar.adapted(network, about, size=size, channels=channels or about.channels, name=path.stem)


class Exported:
    """A program to be called with images; no module, since torch lets exported ones change neither mode nor place."""

    def __init__(self, program: nn.Module, device: torch.device) -> None:
        self.program, self.device = program, device

    def __call__(self, images: Tensor) -> Any:
        """Return logits (B, Y) on the device of the images."""
        output = self.program(images.to(self.device))
        return getattr(output, "logits", output).to(images.device)


def _takes(program: Any, path: Path) -> tuple[int | None, int | None, int | None]:
    """Return the batch, channels and side that the program takes, each None where it takes any."""
    names = program.graph_signature.user_inputs
    shapes = [node.meta["val"].shape for node in program.graph.nodes if node.name in names and "val" in node.meta]
    if len(names) != 1 or not shapes or len(shapes[0]) != 4:
        raise ModelError(f"{path} must take one batch of images (B, C, H, W), and takes {list(map(tuple, shapes))}.")
    batch, channels, height, width = (part if isinstance(part, int) else None for part in shapes[0])
    if height != width:
        raise ModelError(f"{path} sees {height}×{width} pixels; headtilt needs a model of squares.")
    return batch, channels, height

"""ONNX files through onnxruntime: a black box from pixels to logits, and to features where the file gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headtilt.errors import DataError, MissingExtraError, ModelError, OptionError
from headtilt.io import export
from headtilt.model.outputs import logits_in, taps
from headtilt.model.predictor import Predictor
from headtilt.model.state import undisturbed
from headtilt.sources import Adapted, sidecar
from headtilt.sources.preprocessing import BlackBox

FEATURES = "features/"  # outputs so named hold what the layer named behind it reads
TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(uint8)": np.uint8,
}


class Session:
    """A session of onnxruntime, called with tensors.

    Args:
        path: The ONNX file.
        device: "cuda" and "cuda:N" use onnxruntime's GPU provider where its package has one, the CPU otherwise.
    """

    def __init__(self, path: Path, device: str = "cpu") -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingExtraError("onnxruntime", "onnx") from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=providers(device, onnxruntime.get_available_providers())
            )
        except Exception as error:  # onnxruntime raises a class of its own for each way in which a file is broken
            raise DataError(f"{path} cannot be read as an ONNX file: {error}") from error
        inputs = [one for one in self.session.get_inputs() if len(one.shape) == 4]
        if len(self.session.get_inputs()) != 1 or not inputs or inputs[0].type not in TYPES:
            found = ", ".join(f"{one.name} {one.type}{one.shape}" for one in self.session.get_inputs())
            raise ModelError(f"{path} must take one batch of images, and takes {found}.")
        self.name, self.kind, self.shape = inputs[0].name, TYPES[inputs[0].type], inputs[0].shape
        outputs = self.session.get_outputs()
        self.features = [one.name for one in outputs if one.name.startswith(FEATURES) and len(one.shape) == 2]
        self.outputs = [_logits([one for one in outputs if one.name not in self.features], path), *self.features]
        self.last = self.shape[3] in (1, 3) and self.shape[1] not in (1, 3)  # channels last

    @property
    def batch(self) -> int | None:
        """The only size of batch that the file takes, or None for any."""
        return self.shape[0] if isinstance(self.shape[0], int) and self.shape[0] > 0 else None

    @property
    def side(self) -> int | None:
        """Side of the square that the file takes, or None for any."""
        height, width = self.shape[1:3] if self.last else self.shape[2:4]
        if isinstance(height, int) and isinstance(width, int) and height != width:
            raise ModelError(f"the ONNX file sees {height}×{width} pixels; headtilt needs a model of squares.")
        return height if isinstance(height, int) and height > 0 else None

    @property
    def channels(self) -> int | None:
        """How many channels the file takes, or None where it does not say."""
        found = self.shape[3 if self.last else 1]
        return found if isinstance(found, int) else None

    @property
    def metadata(self) -> dict[str, str]:
        """Words that the file brings along."""
        return dict(self.session.get_modelmeta().custom_metadata_map)

    def __call__(self, images: Tensor) -> Any:
        """Return logits (B, Y) on the device of the images; before the features of each layer where there are any."""
        pixels = images.detach().permute(0, 2, 3, 1) if self.last else images.detach()
        array = pixels.cpu().numpy()
        array = (array * 255).round() if self.kind is np.uint8 else array
        found = self.session.run(self.outputs, {self.name: np.ascontiguousarray(array, dtype=self.kind)})
        tensors = [torch.from_numpy(one).float().to(images.device) for one in found]
        return tensors if self.features else tensors[0]


def load(file: str, *, device: str = "cpu") -> Adapted:
    """Return the classifier of an ONNX file.

    The file takes images (B, C, H, W) or (B, H, W, C), with any batch or one fixed size of it, and gives logits.
    Labels, geometry and normalisation come from a JSON file beside it or from its metadata; see
    `headtilt.sources.sidecar`. A network that takes bytes is given 0 … 255. Outputs named ``features/LAYER`` hold what
    a layer of that name reads, as in the files that `write` makes.

    Args:
        file: The ONNX file.
        device: See `Session`.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise DataError(f"onnx:{file} is not a file. Check the path.")
    session = Session(path, device)
    about = sidecar.beside(path, session.metadata)
    size = sidecar.side(session.side, about, path)
    channels = session.channels or about.channels
    layers = [name.removeprefix(FEATURES) for name in session.features]
    network = BlackBox(session, session.batch, layers)
    return sidecar.adapted(network, about, size=size, channels=channels, name=path.stem, features=layers)


def external_data(path: Path) -> list[Path]:
    """Return the files in which an ONNX file keeps the weights that it does not hold itself, sorted."""
    try:
        import onnx
        from onnx.external_data_helper import ExternalDataInfo, uses_external_data
    except ImportError as error:
        raise MissingExtraError("onnx", "onnx") from error
    network = onnx.load(str(path), load_external_data=False)
    graphs, tensors = [network.graph], []
    while graphs:
        graph = graphs.pop()
        tensors += graph.initializer
        for node in graph.node:
            for attribute in node.attribute:
                tensors += [attribute.t, *attribute.tensors]
                graphs += [attribute.g] * attribute.HasField("g") + list(attribute.graphs)
    names = {ExternalDataInfo(one).location for one in tensors if uses_external_data(one)}
    return sorted(path.parent / name for name in names)


def write(path: str | Path, source: Adapted) -> None:
    """Write a classifier itself, without a search, as an ONNX file, and beside it in JSON what such a file cannot say.

    Its features are outputs of the file, so that a bundle fitted around the classifier serves the file as well.

    Args:
        path: Ends in .onnx.
        source: What `headtilt.sources.registry.load` or `from_pretrained(…).adapted` gives.
    """
    target = Path(path)
    if target.suffix != ".onnx":
        raise OptionError(f"path must end in .onnx; got {str(path)!r}.")
    reader = Predictor(source.model, features=source.features)
    device, dtype = reader.device_and_dtype(torch.zeros(1))
    # Noise: on a black square several layers may give the same, and pass for one.
    example = torch.rand(2, source.channels, source.size, source.size, generator=torch.Generator().manual_seed(0)).to(
        device=device, dtype=dtype
    )
    reader(example)  # finds the feature layers
    layers = tuple(reader.features or ())
    with undisturbed(source.model):
        network = Readable(source.model, layers).eval()
        export.write_module(network, example, target, ["logits", *(FEATURES + name for name in layers)], {})
    sidecar.write(target, source)


class Readable(nn.Module):
    """A classifier that gives what some of its layers read beside its logits."""

    def __init__(self, model: nn.Module, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.layers = model, layers

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return logits (B, Y), and features (B, D) for each layer."""
        with taps(self.model, self.layers) as read:
            logits = logits_in(self.model(images), "logits")
        return (logits, *(tap[0] for tap in read))


def providers(device: str, available: list[str]) -> list[Any]:
    """Return the providers to ask for, best first: GPU ones where a GPU is wanted and the package has them."""
    cpu = ["CPUExecutionProvider"]
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return cpu
    options = {"device_id": int(number or 0)}
    names = ("CUDAExecutionProvider", "ROCMExecutionProvider", "DmlExecutionProvider")
    return [(name, options) for name in names if name in available] + cpu


def _logits(outputs: list[Any], path: Path) -> str:
    """Return the output that holds logits: the one of that name, or the first matrix."""
    flat = [one.name for one in outputs if len(one.shape) == 2]
    if not flat:
        found = ", ".join(f"{one.name} {one.shape}" for one in outputs)
        raise ModelError(f"{path} must give logits (B, Y), and gives {found}.")
    return "logits" if "logits" in flat else flat[0]

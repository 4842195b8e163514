"""The whole search as one graph, for runtimes that know nothing of headtilt: ONNX, or torch.export's own format."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from headtilt.calibration.balance import Balance
from headtilt.calibration.gate import CautiousGate, Gate
from headtilt.calibration.head import OrbitHead
from headtilt.errors import MissingExtraError, ModelError, OptionError
from headtilt.geometry.warp import Interpolation, Padding, warp
from headtilt.io.files import written_whole
from headtilt.model.evidence import Calibrator, Evidence
from headtilt.model.outputs import logits_in, tappable, taps, two_classes
from headtilt.model.predictor import Predictor
from headtilt.model.state import undisturbed
from headtilt.result import own_shape
from headtilt.search.plan import Plan, name_of
from headtilt.search.run import Readout, run

OUTPUTS = ("logits", "pose", "gated")
OPSET = 20  # the first whose GridSample knows what grid_sample knows
LARGEST_BATCH = 4096


class Graph(nn.Module):
    """The search without branches on data: every view is looked at, and what the gate keeps is chosen at the end.

    Args:
        predictor: The model, and the layers whose features the calibrator and the gate read.
        plan: A `Tree` or a `Joint`.
        calibrator: None, a `Balance` or an `OrbitHead`.
        gate: None or a `Gate`.
        readout: See `ITS`.
        padding: See `warp`.
        interpolation: See `warp`.
    """

    def __init__(
        self,
        predictor: Predictor,
        plan: Plan,
        calibrator: Calibrator | Literal["batch"] | None,
        gate: Gate | CautiousGate | None,
        readout: Readout,
        padding: Padding,
        interpolation: Interpolation,
    ) -> None:
        super().__init__()
        refuse(predictor, plan, calibrator, gate)
        self.predictor, self.readout = predictor, readout
        self.plan = plan
        self.padding, self.interpolation = padding, interpolation
        self.model, self.calibrator, self.gate = predictor.model, calibrator, gate

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (B, Y), pose (B, 3, 3) and gated (B,) of raw images (B, C, H, W), as `ITS.search` does."""

        def evaluate(index: Tensor, poses: Tensor) -> Evidence:
            return self._look(warp(images[index], poses, padding=self.padding, interpolation=self.interpolation))

        answer = run(
            self._look(images),
            evaluate,
            self.plan,
            calibrator=cast("Calibrator | None", self.calibrator),
            gate=self.gate,
            readout=self.readout,
            branching=False,
        )
        return own_shape(answer.logits, self.predictor.single_logit), answer.pose, answer.kept

    def _look(self, views: Tensor) -> Evidence:
        """Return the evidence of all views (V, C, H, W) in one pass."""
        with taps(self.predictor.model, self.predictor.features or ()) as read:
            logits = logits_in(tappable(self.predictor.model)(views), self.predictor.output_key)
        features = torch.cat([tap[0] for tap in read], dim=1) if read else None
        return Evidence(two_classes(logits if logits.dtype == torch.float64 else logits.float()), features)


def refuse(predictor: Predictor, plan: Plan, calibrator: object, gate: object) -> None:
    """Raise `OptionError` for what no fixed graph can hold."""
    if predictor.sampled:
        raise OptionError("export holds no Monte-Carlo dropout; use mc_passes=1, which costs little accuracy.")
    if predictor.autocast is not None:
        raise OptionError("export holds no autocast; use autocast=None and let the runtime choose its precision.")
    if not isinstance(predictor.model, nn.Module):
        raise OptionError("export needs an nn.Module; a plain callable cannot be traced. Wrap it in a module.")
    if plan.draws:
        raise OptionError("export holds no random numbers: no annealing, and no Boltzmann traversal of a tree.")
    if callable(plan.confidence):
        raise OptionError('export holds confidence="energy", "bayesian" or "group"; got a callable.')
    if calibrator == "batch":
        raise OptionError('export holds a fixed calibrator; calibrator="batch" is another for each batch. Call fit.')
    if calibrator is not None and not isinstance(calibrator, (Balance, OrbitHead)):
        raise OptionError(
            f"export holds a balance or a head; got {type(calibrator).__name__}. Fit with method='head' or 'balance'."
        )
    if gate is not None and not isinstance(gate, (Gate, CautiousGate)):
        raise OptionError(f"export holds a Gate; got {type(gate).__name__}.")


def write(
    graph: Graph, path: str | os.PathLike[str], shape: Sequence[int] | None, labels: Sequence[str] | None = None
) -> None:
    """Write a graph for images of `shape` (C, H, W) to a file whose ending says which kind it is.

    Args:
        graph: The search.
        path: Ends in .onnx or .pt2.
        shape: (C, H, W); None is an error that says so.
        labels: Names of the classes.
    """
    target = Path(path)
    if target.suffix not in (".onnx", ".pt2"):
        raise OptionError(f"path must end in .onnx or .pt2; got {str(path)!r}.")
    if shape is None or len(shape) != 3:
        raise OptionError(f"example must be images (B, C, H, W) or their (C, H, W); got {shape}. Give one to export.")
    device, dtype = graph.predictor.device_and_dtype(torch.zeros(1))
    if target.suffix == ".onnx" and dtype == torch.bfloat16:
        raise OptionError(f"ONNX {OPSET} has no bfloat16 for most layers. Export robust.float(), or write a .pt2 file.")
    # Noise: on a black square several layers may give the same, and pass for one.
    example = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0)).to(device=device, dtype=dtype)
    graph.predictor(example)  # finds the feature layers, and raises in plain words where the model cannot take them
    with undisturbed(graph.predictor.model), torch.no_grad():
        graph.eval()(example)  # what depends on no image is worked out now, outside of the graph
        write_module(graph.eval(), example, target, OUTPUTS, metadata(graph, shape, labels))


def write_module(
    module: nn.Module, example: Tensor, target: Path, outputs: Sequence[str], information: Mapping[str, str]
) -> None:
    """Write a module from images to several outputs as a graph, whole or not at all.

    Args:
        module: In eval mode.
        example: Two images or more, since torch.export takes a batch of one for a constant.
        target: Ends in .onnx or .pt2.
        outputs: Their names.
        information: Words that go with the file.
    """
    with written_whole(target) as unfinished, torch.no_grad():
        batch = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
        program = torch.export.export(module, (example,), dynamic_shapes={"images": {0: batch}}, strict=False)
        if target.suffix == ".onnx":
            _write_onnx(program, example, unfinished, outputs, information)
        else:
            with unfinished.open("wb") as file:  # of a name that does not end in .pt2 it would warn
                torch.export.save(program, file, extra_files={"headtilt.json": json.dumps(dict(information))})


def metadata(graph: Graph, shape: Sequence[int], labels: Sequence[str] | None) -> dict[str, str]:
    """Return what a reader of the file should know, as strings: version, options, and the classes' names if given."""
    from headtilt.version import __version__

    options: dict[str, Any] = {item.name: getattr(graph.plan, item.name) for item in fields(graph.plan)}
    options |= {
        "search": name_of(graph.plan),
        "levels": [group.name for group in graph.plan.levels],
        "confidence": graph.plan.confidence,
        "readout": graph.readout,
        "padding": graph.padding,
        "interpolation": graph.interpolation,
        "calibrator": None if graph.calibrator is None else type(graph.calibrator).__name__.lower(),
        "gate": graph.gate is not None,
        "input": f"raw pixels (B, {shape[0]}, {shape[1]}, {shape[2]})",
    }
    found = {"headtilt.version": __version__, "headtilt.options": json.dumps(options)}
    return found if labels is None else {**found, "headtilt.labels": json.dumps(list(labels))}


def _write_onnx(
    program: torch.export.ExportedProgram,
    example: Tensor,
    path: Path,
    outputs: Sequence[str],
    information: Mapping[str, str],
) -> None:
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("onnx and onnxscript", "onnx") from error
    with warnings.catch_warnings(), _quiet("torch.onnx", "onnxscript"):
        warnings.simplefilter("ignore")  # of torch's own making; none concerns the caller
        try:
            torch.onnx.export(
                program,
                (example,),
                path,
                input_names=["images"],
                output_names=list(outputs),
                opset_version=OPSET,
                external_data=False,
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # older exporters lack options or operators, and say so in many ways
            raise ModelError(
                f"torch {torch.__version__} cannot write this as ONNX: {error}. "
                "It is known to work with torch 2.13; update torch, or write a .pt2 file."
            ) from error
    model = onnx.load(path)
    onnx.helper.set_model_props(model, dict(information))
    onnx.save(model, path)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Let only errors of those loggers through."""
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)

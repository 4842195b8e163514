"""Bundles: a fitted wrapper on disk as JSON and safetensors, without its model; nothing in them is ever executed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headtilt.calibration.balance import Balance
from headtilt.calibration.distances import Neighbours, Prototypes
from headtilt.calibration.gate import CautiousGate, Gate
from headtilt.calibration.head import OrbitHead
from headtilt.calibration.proposals import Proposals
from headtilt.errors import DataError, HeadtiltError, OptionError, at_least, number
from headtilt.geometry.groups import FiniteGroup, Group, OneParameterGroup, quarter_turns, reflection
from headtilt.io.files import check_plain, digest_of, read_plain
from headtilt.io.weights import load_tensors, save_tensors
from headtilt.model.evidence import Evidence
from headtilt.model.fingerprint import Fingerprint
from headtilt.search.plan import PLANS, Plan, name_of

FORMAT = 4
FARTHEST = 100  # of a group's parameter: a factor of e^100 is beyond any image, and exponentials stay finite
FINITE = {"reflection": reflection, "quarter_turns": quarter_turns}
THRESHOLDS = ("margin", "exit_at", "turn_at")
WEIGHTS = ("bare_weight", "guess_weight")
CONFIG, TENSORS = "headtilt.json", "headtilt.safetensors"
MOST_CONFIG, MOST_TENSORS = 16_000_000, 4_000_000_000  # bytes
HOW_TO_WRITE = "headtilt fit writes one, and so does robust.save(folder)."
MOST_LEVELS = 16
# Beyond these a search takes days or all memory, and nobody meant it.
MOST = {
    "samples": 10_000,
    "hypotheses": 1000,
    "budget": 100_000,
    "rounds": 1000,
    "lattice": 100_000,
    "mc_passes": 10_000,
    "chunk": 10**6,
}
KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
AXES = {
    "bias": 1,
    "weight": 2,
    "means": 2,
    "scale": 0,
    "bank": 3,
    "mean": 1,
    "deviation": 1,
    **dict.fromkeys(WEIGHTS, 0),
}


def check_place(folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Raise `OptionError` unless a bundle can be written to a folder: a new one, an empty one, or a bundle's own.

    Args:
        folder: Where it should go.
        overwrite: Whether a bundle that is there may be replaced.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise OptionError(f"folder must be a folder; {path} is a file. Name another.")
    there = {entry.name for entry in path.iterdir() if not entry.name.endswith(".tmp")} if path.exists() else set()
    if CONFIG in there and not overwrite:
        raise OptionError(f"{path} holds a bundle already. To replace it, add --force (overwrite=True in Python).")
    if there - {TENSORS} and CONFIG not in there:  # a first save that was killed may have left its tensors
        raise OptionError(f"folder must be new, empty or a bundle's own; {path} holds {min(there)}. Name another.")


def write(
    folder: str | os.PathLike[str],
    options: dict[str, Any],
    report: dict[str, Any],
    fingerprint: Fingerprint | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a bundle.

    Args:
        folder: Made if it is missing. Both files are written beside their places and then take them together: a save
            that fails or is interrupted leaves everything as it was, and one that is killed at the very moment of
            taking places leaves a bundle that `read` refuses.
        options: Keyword arguments of the wrapper, with calibrator and gate among them.
        report: What the fit reported.
        fingerprint: Of the model, which `read` gives back; None where nobody knows it.
        overwrite: Whether a bundle that is there may be replaced.
    """
    path = Path(folder)
    check_place(path, overwrite=overwrite)
    options = dict(options)
    calibrator, gate = options.pop("calibrator"), options.pop("gate")
    config = {
        "format": FORMAT,
        "options": {name: _as_json(name, value) for name, value in options.items()},
        "calibrator": _describe_calibrator(calibrator),
        "gate": None if gate is None else _describe_gate(gate),
        "report": _infinities_as_words(report),
        "fingerprint": None if fingerprint is None else {"shape": fingerprint.shape, "half": fingerprint.half},
    }
    tensors = _tensors("calibrator", calibrator)
    if fingerprint is not None:
        tensors["fingerprint.logits"] = fingerprint.answers.logits
        if fingerprint.answers.features is not None:
            tensors["fingerprint.features"] = fingerprint.answers.features
    with _replaced_together(path) as (config_place, tensors_place):
        save_tensors(tensors_place, tensors)
        config["sha256"] = digest_of(tensors_place)
        text = json.dumps(config, indent=1, allow_nan=False, default=_of_numpy)
        config_place.write_text(text + "\n", encoding="utf-8")


@contextmanager
def _replaced_together(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield places for the two files, which then take those of a bundle together; else everything is as it was."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    swapping = False
    config, tensors, before = (folder / f".{part}.{os.getpid()}.tmp" for part in ("config", "tensors", "before"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield config, tensors
        swapping = True
        if (folder / TENSORS).exists():
            os.replace(folder / TENSORS, before)
        os.replace(tensors, folder / TENSORS)
        os.replace(config, folder / CONFIG)
    except BaseException:
        if swapping and not config.exists():  # an interrupt after the last step: the new bundle is there
            before.unlink(missing_ok=True)
            raise
        if before.exists():
            os.replace(before, folder / TENSORS)
        elif not (folder / CONFIG).exists():
            (folder / TENSORS).unlink(missing_ok=True)
        for place in (config, tensors):
            place.unlink(missing_ok=True)
        for one in made:
            with suppress(OSError):  # somebody else has put something there
                one.rmdir()
        raise
    before.unlink(missing_ok=True)


def read(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any], Fingerprint | None]:
    """Return the wrapper's keyword arguments, the report and the model's fingerprint of a bundle."""
    path = Path(folder)
    try:
        config = json.loads(read_plain(path / CONFIG, MOST_CONFIG))
    except FileNotFoundError as error:
        raise DataError(f"{path} is no bundle: it has no {CONFIG}. {HOW_TO_WRITE}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path / CONFIG} cannot be read: {error}.") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        found = config.get("format") if isinstance(config, dict) else None
        raise DataError(
            f"{path} has bundle format {found!r}; this version reads {FORMAT}. "
            "Fit again with headtilt fit or robust.fit, and save."
        )
    check_plain(path / TENSORS, MOST_TENSORS)
    if not (path / TENSORS).is_file() or digest_of(path / TENSORS) != config.get("sha256"):
        raise DataError(f"{path / TENSORS} is missing or not the file that {CONFIG} describes. Save the bundle again.")
    tensors, _ = load_tensors(path / TENSORS)
    _check_tensors(tensors, path / TENSORS)
    try:
        options = {name: _rebuild(name, value) for name, value in config["options"].items()}
        options["calibrator"] = _calibrator(config["calibrator"], _tensors_below("calibrator", tensors))
        _check_proposals(options["search"], options["calibrator"])
        options["gate"] = None if config["gate"] is None else _gate(config["gate"])
        fingerprint = _fingerprint(config.get("fingerprint"), _tensors_below("fingerprint", tensors))
        return options, _words_as_infinities(dict(config["report"])), fingerprint
    except HeadtiltError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise DataError(f"{path} is not a bundle that this version understands: {error!r}. Save it again.") from error


def _check_proposals(plan: Plan, calibrator: Any) -> None:
    """Raise `DataError` where a head proposes poses of another lattice than the one that is searched."""
    proposals = getattr(calibrator, "proposals", None)
    if proposals is not None and plan.lattice is not None and proposals.poses != plan.choices:
        raise DataError(
            f"the head proposes {proposals.poses} poses, and the search has another lattice. Fit and save it again."
        )


def _check_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Raise `DataError` for tensors that no fit makes."""
    for name, value in tensors.items():
        if value.dtype not in KINDS and not (name.endswith(".absent") and value.dtype == torch.bool):
            raise DataError(f"{path} holds {value.dtype} in {name}, where floats belong. Fit and save it again.")
        if not bool(value.isfinite().all()):
            raise DataError(f"{path} holds numbers that are not finite, in {name}. Fit and save it again.")
        axes = AXES.get(name.removeprefix("calibrator."))
        if axes not in (None, value.ndim) or value.numel() == 0:
            raise DataError(f"{path} holds {tuple(value.shape)} in {name}, which is no such table. Save it again.")
        if name.removeprefix("calibrator.") in WEIGHTS and not 0 <= float(value) <= 1:
            raise DataError(f"{path} holds {float(value):g} in {name}, a weight from 0 to 1. Fit and save it again.")


def _as_json(name: str, value: Any) -> Any:
    """Return an option as JSON can hold it."""
    if name == "search":
        return {
            "kind": name_of(value),
            **{item.name: _as_json(item.name, getattr(value, item.name)) for item in fields(value)},
        }
    if name == "levels":
        return [group.name if isinstance(group, FiniteGroup) else asdict(group) for group in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if callable(value):
        raise OptionError(
            f"{name} is a function of your own, which a bundle cannot hold. Pass it to ITS again instead."
        )
    return list(value) if isinstance(value, tuple) else value


def _rebuild(name: str, value: Any) -> Any:
    if name in MOST and isinstance(value, (int, float)) and value > MOST[name]:
        raise DataError(f"{name} must be at most {MOST[name]:,} in a bundle; it says {value!r}.")
    if name == "search":
        plan = PLANS[value.pop("kind")]
        return plan(**{name: _rebuild(name, part) for name, part in value.items()})
    if name == "levels":
        if len(value) > MOST_LEVELS:
            raise DataError(f"levels must be at most {MOST_LEVELS} in a bundle; it has {len(value)}.")
        return tuple(_group(group) for group in value)
    if name == "autocast" and value is not None:
        dtype = getattr(torch, str(value), None)
        if not isinstance(dtype, torch.dtype):
            raise DataError(f"autocast must name a dtype; the bundle says {value!r}.")
        return dtype
    return tuple(value) if isinstance(value, list) else value


def _group(stored: dict[str, Any] | str | None) -> Group:
    if stored is None or isinstance(stored, str):
        return FINITE[stored or "reflection"]()
    names = {item.name for item in fields(OneParameterGroup)}
    algebra = tuple(tuple(float(entry) for entry in row) for row in stored["algebra"])
    if set(stored) != names or [len(row) for row in algebra] != [3, 3, 3]:
        raise DataError(f"a level must have {sorted(names)} and a 3×3 algebra; the bundle has {sorted(stored)}.")
    ends = number("low", stored["low"]), number("high", stored["high"])
    if not all(abs(value) <= FARTHEST for value in (*ends, *(entry for row in algebra for entry in row))):
        raise DataError(f"a level must have ends and entries within ±{FARTHEST:,}; the bundle has {stored!r}.")
    return OneParameterGroup(**{**stored, "algebra": algebra, "low": ends[0], "high": ends[1]})


def _describe_calibrator(calibrator: Any) -> dict[str, Any] | None:
    if calibrator is None:
        return None
    if calibrator == "batch":
        return {"kind": "batch"}
    if isinstance(calibrator, Balance):
        return {"kind": "balance"}
    if isinstance(calibrator, OrbitHead):
        outputs, hidden = calibrator.network.state_dict()["7.weight"].shape
        poses = None if calibrator.proposals is None else calibrator.proposals.poses
        return {"kind": "head", "source": calibrator.source, "hidden": hidden, "outputs": outputs - 1, "poses": poses}
    if isinstance(calibrator, Prototypes):
        return {"kind": "prototypes"}
    if isinstance(calibrator, Neighbours):
        return {"kind": "neighbours", "nearest": calibrator.nearest, "scale": calibrator.scale}
    raise OptionError("calibrator is of your own making, which a bundle cannot hold. Pass it to ITS again instead.")


def _calibrator(stored: dict[str, Any] | None, tensors: dict[str, Tensor]) -> Any:
    if stored is None:
        return None
    kind = stored["kind"]
    if kind == "batch":
        return "batch"
    if kind == "balance":
        return Balance(tensors["bias"], tensors.get("weight"))
    if kind == "prototypes":
        return Prototypes(tensors["means"], tensors["scale"])
    if kind == "neighbours":
        scale = number("scale", stored["scale"])
        if not math.isfinite(scale):
            raise DataError(f"scale must be finite; the bundle says {scale!r}.")
        return Neighbours(tensors["bank"], at_least("nearest", stored["nearest"], 1), scale, tensors.get("absent"))
    if kind != "head":
        raise DataError(f"the bundle has a calibrator of kind {kind!r}, which this version does not know.")
    bias, per_class = tensors["bias"], int(stored["outputs"]) > 1
    if per_class and int(stored["outputs"]) != len(bias):
        raise DataError(f"the head has {stored['outputs']} outputs for {len(bias)} classes.")
    head = OrbitHead(
        bias,
        tensors["mean"],
        tensors["deviation"],
        source=str(stored["source"]),
        hidden=_width(stored, tensors["network.1.weight"]),
        per_class=per_class,
    )
    if stored.get("poses") is not None:
        head.proposals = _proposals(int(stored["poses"]), _tensors_below("proposals", tensors))
    head.load_state_dict(tensors)
    return head.eval().requires_grad_(False)


def _proposals(poses: int, tensors: dict[str, Tensor]) -> Proposals:
    """Return untrained proposals of the shape that their tensors have."""
    hidden, last = len(tensors["network.1.weight"]), len(tensors["network.6.weight"])
    if last != poses:
        raise DataError(f"the bundle speaks of {poses} proposed poses, and its tensors have {last}.")
    return Proposals(tensors["mean"], tensors["deviation"], poses=poses, hidden=hidden)


def _of_numpy(value: Any) -> Any:
    """Return a number of numpy as one of Python's, for JSON, which takes no other."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a bundle cannot hold {value!r}")


def _infinities_as_words(value: Any) -> Any:
    """Return a report in which infinities are words, since JSON has none."""
    if isinstance(value, dict):
        return {name: _infinities_as_words(item) for name, item in value.items()}
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _words_as_infinities(value: Any) -> Any:
    """Return a report with its infinities."""
    if isinstance(value, dict):
        return {name: _words_as_infinities(item) for name, item in value.items()}
    return float(value) if value in ("inf", "-inf", "nan") else value


def _describe_gate(gate: Gate | CautiousGate) -> dict[str, Any]:
    if type(gate) not in (Gate, CautiousGate):  # a subclass would come back as what it was made from
        raise OptionError("gate is of your own making, which a bundle cannot hold. Pass it to ITS again instead.")
    names = ("margin", "doubt") if isinstance(gate, CautiousGate) else THRESHOLDS
    return {name: repr(getattr(gate, name)) for name in names}  # as words, since JSON has no infinity


def _gate(stored: dict[str, Any]) -> Gate | CautiousGate:
    if "doubt" in stored:
        margin, doubt = float(stored["margin"]), float(stored["doubt"])
        if math.isnan(margin) or not math.isfinite(doubt):
            raise DataError(f"margin and doubt must be numbers; the bundle says {stored!r}.")
        return CautiousGate(margin, doubt)
    return Gate(*(float(stored[name]) for name in THRESHOLDS))


def _fingerprint(stored: dict[str, Any] | None, tensors: dict[str, Tensor]) -> Fingerprint | None:
    if stored is None:
        return None
    answers = Evidence(tensors["logits"], tensors.get("features"))
    return Fingerprint(tuple(stored["shape"]), bool(stored["half"]), answers)


def _width(stored: dict[str, Any], first: Tensor) -> int:
    """Return the width of a network, which its tensors must bear out: a wide one takes memory before it is filled."""
    width = int(stored["hidden"])
    if first.shape[:1] != (width,):
        raise DataError(f"the bundle speaks of a network {width} wide, and its tensors are {tuple(first.shape)}.")
    return width


def _tensors(name: str, module: Any) -> dict[str, Tensor]:
    state = module.state_dict() if isinstance(module, nn.Module) else {}
    return {f"{name}.{key}": value for key, value in state.items()}


def _tensors_below(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key[len(name) + 1 :]: value for key, value in tensors.items() if key.startswith(f"{name}.")}

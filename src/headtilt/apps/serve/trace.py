"""One search told: as plain values, or as a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from headtilt import plot
from headtilt.apps.rows import rows_of
from headtilt.geometry.groups import decompose
from headtilt.geometry.warp import invert
from headtilt.result import SearchResult
from headtilt.search.found import LatticeTrace, LevelTrace


def trace_of(result: SearchResult, names: Sequence[str] | None) -> dict[str, Any]:
    """Return everything that the search of the first image saw, as JSON can hold it."""
    answer = rows_of(result, [""], names)[0].as_dict()
    bare = result.bare[0].softmax(dim=-1)
    return {
        "words": result.describe(0, names=names),
        "answer": {name: value for name, value in answer.items() if name not in ("path", "error")},
        "bare": {"label": _name(int(bare.argmax()), names), "score": min(float(bare.max()), 1.0)},
        "rivals": _rivals(result, names),
        "levels": [_level(level, names) for level in result.trace],
    }


def picture(result: SearchResult, names: Sequence[str] | None) -> bytes:
    """Return the search of the first image as a PNG: its tree, or before and after where it walked no tree."""
    walked = bool(result.trace) and isinstance(result.trace[0], LevelTrace)
    figure = plot.tree(result, 0, names=names) if walked else plot.before_after(result, count=1, names=names)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _rivals(result: SearchResult, names: Sequence[str] | None) -> list[dict[str, Any]]:
    beam, found = result.hypotheses, []
    scores = beam.evidence.logits[0].softmax(dim=-1)
    tilt = decompose(invert(beam.pose[0]).double().cpu())
    for slot in beam.active[0].nonzero()[:, 0].tolist():
        label = int(beam.labels[0, slot])
        found.append(
            {
                "label": _name(label, names),
                "score": min(float(scores[slot, label]), 1.0),
                "confidence": _finite(float(beam.confidence[0, slot])),
                "rotation_deg": math.degrees(float(tilt.rotation[slot])),
                "scale": float(tilt.scale[slot]),
                "shear": float(tilt.shear[slot]),
            }
        )
    return found


def _level(level: LevelTrace | LatticeTrace, names: Sequence[str] | None) -> dict[str, Any]:
    if isinstance(level, LatticeTrace):
        groups, parameters = [group.name for group in level.levels], level.coordinates[0]
    else:
        groups = [level.group.name]
        parameters = level.parameters[None, :, None].expand(level.confidence.shape[1], -1, 1).flatten(0, 1)
    confidence = [_finite(value) for value in _list(level.confidence[0])]
    labels = [_name(label, names) if label >= 0 else None for label in level.labels[0].flatten().tolist()]
    seen = [index for index, value in enumerate(parameters.tolist()) if all(map(math.isfinite, value))]
    return {
        "groups": groups,
        "parameters": [parameters[index].tolist() for index in seen],
        "confidence": [confidence[index] for index in seen],
        "labels": [labels[index] for index in seen],
    }


def _list(values: Tensor) -> list[float]:
    found: list[float] = values.flatten().tolist()
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _name(label: int, names: Sequence[str] | None) -> str:
    return str(label) if names is None else names[label]

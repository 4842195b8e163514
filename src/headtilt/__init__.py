"""headtilt: spatial robustness for any trained image classifier, at inference, without retraining."""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from headtilt.version import __version__ as __version__

if TYPE_CHECKING:
    from headtilt.calibration.gate import Gate, Promise
    from headtilt.calibration.head import HeadRecipe
    from headtilt.errors import DataError, HeadtiltError, MissingExtraError, ModelError, OptionError, ShapeError
    from headtilt.geometry.groups import (
        compose,
        decompose,
        quarter_turns,
        reflection,
        rotation,
        scale,
        shear,
        shear_x,
        shear_y,
        translate,
        translate_x,
        translate_y,
    )
    from headtilt.geometry.warp import warp
    from headtilt.its import ITS
    from headtilt.model.evidence import Evidence
    from headtilt.presets import accurate, affine_levels, documents, fast, paper3, paper5
    from headtilt.result import SearchResult
    from headtilt.search.anneal import Anneal
    from headtilt.search.joint import Joint
    from headtilt.search.tree import Tree
    from headtilt.sources.pretrained import from_pretrained

# Quiet unless asked: logging.getLogger("headtilt").setLevel("DEBUG") and a handler show what it does.
logging.getLogger("headtilt").addHandler(logging.NullHandler())

__all__ = [
    "ITS",
    "Anneal",
    "DataError",
    "Evidence",
    "Gate",
    "HeadRecipe",
    "HeadtiltError",
    "Joint",
    "MissingExtraError",
    "ModelError",
    "OptionError",
    "Promise",
    "SearchResult",
    "ShapeError",
    "Tree",
    "accurate",
    "affine_levels",
    "compose",
    "decompose",
    "documents",
    "fast",
    "from_pretrained",
    "paper3",
    "paper5",
    "quarter_turns",
    "reflection",
    "rotation",
    "scale",
    "shear",
    "shear_x",
    "shear_y",
    "translate",
    "translate_x",
    "translate_y",
    "warp",
]

# Where each name lives: torch takes a second to import, and `headtilt --help` can do without it.
_HOMES = {
    "Gate": "headtilt.calibration.gate",
    "Promise": "headtilt.calibration.gate",
    "HeadRecipe": "headtilt.calibration.head",
    "DataError": "headtilt.errors",
    "HeadtiltError": "headtilt.errors",
    "MissingExtraError": "headtilt.errors",
    "ModelError": "headtilt.errors",
    "OptionError": "headtilt.errors",
    "ShapeError": "headtilt.errors",
    "compose": "headtilt.geometry.groups",
    "decompose": "headtilt.geometry.groups",
    "quarter_turns": "headtilt.geometry.groups",
    "reflection": "headtilt.geometry.groups",
    "rotation": "headtilt.geometry.groups",
    "scale": "headtilt.geometry.groups",
    "shear": "headtilt.geometry.groups",
    "shear_x": "headtilt.geometry.groups",
    "shear_y": "headtilt.geometry.groups",
    "translate": "headtilt.geometry.groups",
    "translate_x": "headtilt.geometry.groups",
    "translate_y": "headtilt.geometry.groups",
    "warp": "headtilt.geometry.warp",
    "ITS": "headtilt.its",
    "Evidence": "headtilt.model.evidence",
    "accurate": "headtilt.presets",
    "affine_levels": "headtilt.presets",
    "documents": "headtilt.presets",
    "fast": "headtilt.presets",
    "paper3": "headtilt.presets",
    "paper5": "headtilt.presets",
    "SearchResult": "headtilt.result",
    "Anneal": "headtilt.search.anneal",
    "Joint": "headtilt.search.joint",
    "Tree": "headtilt.search.tree",
    "from_pretrained": "headtilt.sources.pretrained",
}


def __getattr__(name: str) -> Any:
    """Return a public name, imported where it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headtilt' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

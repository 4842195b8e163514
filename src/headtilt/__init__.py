"""headtilt: spatial robustness for any trained image classifier, at inference, without retraining."""

import logging

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
from headtilt.presets import accurate, documents, fast, paper3, paper5
from headtilt.result import SearchResult
from headtilt.search.anneal import Anneal
from headtilt.search.joint import Joint
from headtilt.search.tree import Tree
from headtilt.sources.pretrained import from_pretrained
from headtilt.version import __version__ as __version__

# Quiet unless asked: logging.getLogger("headtilt").setLevel("DEBUG") and a handler of one's own show what it does.
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

"""Ready-made options: ``ITS(model, **paper3())``. Plain functions that return keyword arguments."""

from __future__ import annotations

from typing import Any

from headtilt.groups import rotation, scale, shear_x


def paper3(mc_passes: int = 50) -> dict[str, Any]:
    """Return the paper's ITS³: rotation, scale ±1/4, shear ±1/4; n = 17, K = 3, M = 50."""
    return {
        "levels": [rotation(), scale(0.25), shear_x(0.25)],
        "samples": 17,
        "hypotheses": 3,
        "confidence": "group",
        "mc_passes": mc_passes,
    }


def paper5(mc_passes: int = 50) -> dict[str, Any]:
    """Return the paper's ITS⁵: those of ITS³, then rotation and scale once more."""
    options = paper3(mc_passes)
    return {**options, "levels": [*options["levels"], rotation(), scale(0.25)]}

"""What each method is called, the same everywhere: in README, on all pages, in the demo and in the playground.

The keys are the names on the command line and in JSON files.
"""

from __future__ import annotations

NAMES = {
    "vanilla": "bare model",
    "oracle": "bare model, told the true pose",
    "orient": "two passes: one for the pose, one for the label",
    "augmented": "retrained with tilted, labelled images",
    "last-layer": "last layer retrained with the same images",
    "tta-mean": "TTA, mean",
    "tta-max": "TTA, max",
    "energy": "arg-max energy",
    "paper3": "the paper's ITS³",
    "tree3-energy": "the paper's levels, by energy",
    "joint": "headtilt, unfitted, joint search, no gate",
    "default": "headtilt, unfitted",
    "balanced": "balanced energy",
    "accurate": "headtilt, fitted, no gate",
    "accurate+gate": "headtilt, fitted",
    "fast": "headtilt fast(), fitted, no gate",
    "fast+gate": "headtilt fast(), fitted",
}

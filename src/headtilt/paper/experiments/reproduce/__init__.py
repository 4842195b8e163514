"""Every table, figure and example of the paper, a file for each, by the name that `headtilt reproduce` takes."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from headtilt.errors import one_of
from headtilt.paper.experiments.reproduce.study import Item

ITEMS = (
    "table1",
    "confidence",
    "rotated-mnist",
    "reconstructions",
    "change-of-mind",
    "siscore",
    "runtime",
    "hyperparameters",
    "markov",
    "order",
    "examples",
)


def item(name: str) -> Item:
    """Return the item of that name."""
    one_of("NAME", name, (*ITEMS, "all"))
    return cast(Item, import_module(f"{__name__}.{name.replace('-', '_')}"))

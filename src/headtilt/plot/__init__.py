"""Pictures of searches and of measurements; needs the extra ``headtilt[plot]``, which is imported on first use only.

Every function returns a `matplotlib.figure.Figure` of its own: nothing here touches pyplot, a display or global state.
"""

from headtilt.plot.audit import audit
from headtilt.plot.cost import cost
from headtilt.plot.explain import explain, views
from headtilt.plot.search import before_after, orbit, surface
from headtilt.plot.style import save
from headtilt.plot.tables import angle_curve, bars
from headtilt.plot.tree import tree

__all__ = [
    "angle_curve",
    "audit",
    "bars",
    "before_after",
    "cost",
    "explain",
    "orbit",
    "save",
    "surface",
    "tree",
    "views",
]

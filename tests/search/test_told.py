"""What a confidence of one's own is told of the views that it judges."""

from __future__ import annotations

from functools import partial

import pytest

import headtilt as ht
from headtilt.search.confidence import group
from tests.toys import TinyNet, its, tiny_images


@pytest.mark.parametrize(("search", "views"), [("joint", 9), ("anneal", 9)])
@pytest.mark.parametrize(
    "levels", [(ht.rotation(),), (ht.scale(0.25), ht.rotation()), (ht.quarter_turns(), ht.shear_x(0.2))]
)
def test_a_joint_search_and_a_walk_tell_a_measure_their_own_levels(search, views, levels):
    told = []

    def measure(evidence, orbit):
        told.append(orbit)
        return -evidence.energy

    its(TinyNet().eval(), levels, search=search, budget=views, confidence=measure).search(tiny_images(2))
    assert {orbit.levels for orbit in told} == {levels}
    assert {orbit.group for orbit in told} == {levels[0]}
    assert max(orbit.samples for orbit in told) == views


@pytest.mark.parametrize("plan", [ht.Joint, ht.Anneal])
@pytest.mark.parametrize("confidence", ["group", group, partial(group, width=0.3)])
def test_curvature_is_refused_where_views_lie_in_no_order_however_it_is_named(plan, confidence):
    with pytest.raises(ht.OptionError, match='"group" needs orbits'):
        plan(confidence=confidence)

"""Groups, levels and options that mean nothing are refused at the door, by name and with the fix."""

from __future__ import annotations

import math

import pytest

import headtilt as ht
from headtilt.geometry.groups import OneParameterGroup, check_levels
from headtilt.model.outputs import tapped_module
from headtilt.model.predictor import Predictor
from headtilt.search.anneal import Anneal
from headtilt.search.confidence import curvature_operator
from headtilt.search.tree import Tree
from tests.toys import TinyNet, fingerprint, ready, stable_id, tiny_images

# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ht.rotation(0), r"limit must lie in \(0, π\] radians; got 0.*math.radians"),
        (lambda: ht.rotation(-1), r"limit must lie in \(0, π\]"),
        (lambda: ht.rotation(180), r"limit must lie in \(0, π\] radians; got 180\. For degrees use math\.radians"),
        (lambda: ht.rotation(math.nan), r"limit must lie in \(0, π\]"),
        (lambda: ht.scale(0), "s must lie between 0 and 1 for scale; got 0"),
        (lambda: ht.scale(1), "s must lie between 0 and 1 for scale; got 1"),
        (lambda: ht.scale(1.25), "s must lie between 0 and 1 for scale; got 1.25"),
        (lambda: ht.shear_x(0), "shear_x must cover a finite range around 0.*Give a range above 0"),
        (lambda: ht.shear_y(-0.1), "shear_y must cover a finite range around 0"),
        (lambda: ht.translate_x(math.inf), "translate_x must cover a finite range around 0"),
        (lambda: ht.translate_y(math.nan), "translate_y must cover a finite range around 0"),
        (lambda: ht.shear(0.2, math.nan), "direction must be a finite angle in radians; got nan"),
        (lambda: ht.translate(0.2, math.inf), "direction must be a finite angle in radians; got inf"),
        (lambda: OneParameterGroup("mine", ((0,) * 3,) * 3, 0.1, 0.2), "mine must cover a finite range around 0"),
    ],
)
def test_ranges_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ht.OptionError, match=message):
        make()


@pytest.mark.parametrize(
    "make", [ht.rotation, ht.scale, ht.shear, ht.shear_x, ht.shear_y, ht.translate, ht.translate_x]
)
@pytest.mark.parametrize("value", ["0.25", None], ids=stable_id)
def test_ranges_that_are_no_numbers_are_refused_by_name(make, value):
    with pytest.raises(ht.OptionError, match=r"must be a number; got (str|NoneType)"):
        make(value)


def test_directions_and_ends_that_are_no_numbers_are_refused_by_name():
    with pytest.raises(ht.OptionError, match="direction must be a number; got str: 'down'"):
        ht.shear(0.2, "down")
    with pytest.raises(ht.OptionError, match="low of mine must be a number; got NoneType"):
        OneParameterGroup("mine", ((0,) * 3,) * 3, None, 0.2)


@pytest.mark.parametrize("n", [0, -1, 2.0, "5", None, True])
@pytest.mark.parametrize("group", [ht.rotation(), ht.scale(), ht.reflection()], ids=lambda g: g.name)
def test_grids_of_no_whole_number_of_samples_are_refused(group, n):
    with pytest.raises(ht.OptionError, match="n must be a whole number of at least 1"):
        group.grid(n)


@pytest.mark.parametrize("group", [ht.scale(), ht.shear_x(), ht.translate_y(), ht.rotation(1.0), ht.rotation().paper()])
def test_an_even_grid_of_a_bounded_group_is_refused_with_the_next_odd_number(group):
    with pytest.raises(ht.OptionError, match=rf"n must be odd for {group.name}.*identity; got 8\. Use 9\."):
        group.grid(8)
    with pytest.raises(ht.OptionError, match=rf"samples must be odd for {group.name}.*got 8\. Use 9\."):
        ready(levels=[ht.rotation(), group], samples=8)


@pytest.mark.parametrize("n", [1, 2])
def test_a_generator_needs_a_step(n):
    with pytest.raises(ht.OptionError, match="n must be at least 3 for rotation to have a generating step"):
        ht.rotation().generator(n)


def test_a_fifth_reflection_is_refused():
    for index in (-1, 4, 7.0):
        with pytest.raises(ht.OptionError, match="t must be 0, 1, 2 or 3 for reflection"):
            ht.reflection().matrix(index)


# --- levels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ([], "levels must be a non-empty list of groups, for example"),
        ((), "levels must be a non-empty list of groups"),
        (ht.rotation(), "levels must be a non-empty list of groups"),
        (ht.reflection(), "levels must be a non-empty list of groups"),
        ("rotation", r"levels must be a list of groups and not their names; got 'rotation'"),
        ([ht.rotation], r"levels must hold groups; got the function rotation. Call it"),
        ([ht.rotation(), "scale"], r"levels must hold groups such as rotation\(\); got str: 'scale'"),
        ([None], r"levels must hold groups such as rotation\(\); got NoneType"),
    ],
    ids=stable_id,
)
def test_levels_that_are_no_groups_are_refused(levels, message):
    with pytest.raises(ht.OptionError, match=message):
        ready(levels=levels)
    with pytest.raises(ht.OptionError, match=message):
        check_levels(levels, 5)


@pytest.mark.parametrize("levels", [5, (group for group in [ht.rotation()])], ids=["a number", "a generator"])
@pytest.mark.parametrize("search", ["tree", "joint", "anneal"])
def test_levels_that_are_no_sequence_are_refused(levels, search):
    with pytest.raises(ht.OptionError, match="levels must be a non-empty list of groups"):
        ready(levels=levels, search=search)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples must be a whole number of at least 1; got 0"),
        ({"samples": 5.0}, "samples must be a whole number"),
        ({"samples": "many"}, "samples must be a whole number"),
        ({"hypotheses": 0}, "hypotheses must be a whole number of at least 1; got 0"),
        ({"hypotheses": None}, "hypotheses must be a whole number"),
        (
            {"confidence": "certainty"},
            "confidence must be one of 'energy', .*'group', 'group-nearest' or a callable; got 'certainty'",
        ),
        ({"confidence": 3}, "confidence must be one of"),
        ({"mc_passes": 0}, "mc_passes must be a whole number of at least 1; got 0"),
        ({"mc_passes": 2.5}, "mc_passes must be a whole number"),
        ({"readout": "best"}, "readout must be one of 'incumbent', 'marginal'; got 'best'"),
        ({"chunk": 0}, "chunk must be a whole number of at least 1; got 0"),
        ({"chunk": "big"}, "chunk must be a whole number"),
        ({"accept": "always"}, "accept must be one of 'identity', 'zero'; got 'always'"),
        ({"ranking": "first"}, "ranking must be one of 'energy', 'last', 'accumulated', 'support'; got 'first'"),
        ({"traversal": "random"}, "traversal must be one of 'greedy', 'boltzmann'; got 'random'"),
        ({"temperature": 0}, "temperature must be a finite number above 0; got 0"),
        ({"temperature": math.inf}, "temperature must be a finite number above 0"),
        ({"width": -1}, "width must be a finite number above 0; got -1"),
        ({"width": "wide"}, "width must be a finite number above 0"),
        ({"hypothesis": 3}, "ITS takes no option 'hypothesis'"),
    ],
    ids=stable_id,
)
def test_options_that_mean_nothing_are_refused_at_the_door(options, message):
    with pytest.raises(ht.OptionError, match=message):
        ready(**options)


@pytest.mark.parametrize("seed", ["lucky", 1.5, None, True, 2**64, -(2**63) - 1], ids=stable_id)
@pytest.mark.parametrize(
    "make",
    [
        lambda seed: ready(seed=seed),
        lambda seed: ready(seed=seed, search="joint"),
        lambda seed: Tree((ht.rotation(),), seed=seed),
        lambda seed: Anneal((ht.rotation(),), seed=seed),
        lambda seed: Predictor(TinyNet(), seed=seed),
        lambda seed: ready().fit(tiny_images(16), seed=seed),
    ],
    ids=["wrapper", "joint", "tree", "anneal", "predictor", "fit"],
)
def test_a_seed_that_is_no_whole_number_is_refused_at_the_door(make, seed):
    with pytest.raises(ht.OptionError, match="seed must be a whole number of at most 64 bits; got"):
        make(seed)


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, -(2**63)], ids=stable_id)
def test_every_seed_that_torch_takes_is_taken(seed):
    ready(seed=seed, traversal="boltzmann", mc_passes=2)(tiny_images(1))


def test_a_confidence_that_cannot_be_hashed_is_refused():
    with pytest.raises(ht.OptionError, match="confidence must be one of"):
        ready(confidence=["energy"])


@pytest.mark.parametrize("samples", [1, 2])
def test_a_curvature_of_fewer_than_three_samples_is_refused(samples):
    message = f"samples must be at least 3 for group confidence, which is a curvature; got {samples}"
    with pytest.raises(ht.OptionError, match=message):
        ready(samples=samples)
    ready(samples=samples, levels=[ht.reflection()])(tiny_images(1))
    with pytest.raises(ht.OptionError, match=message):
        curvature_operator(ht.rotation(), samples)


def test_a_smoothing_width_of_nothing_is_refused():
    with pytest.raises(ht.OptionError, match="width must be a finite number above 0"):
        curvature_operator(ht.rotation(), 9, 0.0)


def test_the_tree_checks_its_options_itself():
    with pytest.raises(ht.OptionError, match="hypotheses must be"):
        Tree((ht.rotation(),), hypotheses=0)
    with pytest.raises(ht.OptionError, match="levels must be"):
        Tree([])


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (
            lambda evidence, orbit: evidence.logits,
            r"confidence must return a tensor \(B, K, N\) = \(2, 1, 5\); got \(2, 1, 5, 5\)",
        ),
        (lambda evidence, orbit: evidence.energy.mean(-1), r"confidence must return a tensor .* got \(2, 1\)"),
        (lambda evidence, orbit: None, r"confidence must return a tensor .* got NoneType"),
        (lambda evidence, orbit: evidence.energy * math.nan, "confidence returned NaN"),
    ],
    ids=["too many axes", "too few axes", "nothing", "NaN"],
)
def test_a_confidence_of_the_user_that_returns_nonsense_is_told_so(measure, message):
    robust = ready(confidence=measure)
    before = fingerprint(robust)
    with pytest.raises(ht.OptionError, match=message):
        robust(tiny_images(2))
    assert fingerprint(robust) == before


def test_features_that_cannot_be_read_are_refused():
    with pytest.raises(ht.OptionError, match="features must name modules of the model; 'head' names none"):
        Predictor(TinyNet(), features="head")(tiny_images(1))
    with pytest.raises(ht.OptionError, match=r"features need an nn\.Module"):
        tapped_module(lambda views: views, "head")

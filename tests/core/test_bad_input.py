"""Bad input is refused by name, with the fix, and the model never suffers for it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import headtilt as ht
from headtilt.confidence import curvature_operator
from headtilt.errors import HeadtiltError, MissingExtraError, at_least, checked_seed, one_of, positive
from headtilt.groups import OneParameterGroup, check_levels
from headtilt.outputs import feature_layer
from headtilt.predictor import Predictor
from headtilt.search.anneal import Anneal
from headtilt.search.tree import Tree

from .toys import TinyNet, fingerprint, stable_id, tiny_images

EYE = torch.eye(3)[None]


def ready(**options) -> ht.ITS:
    return ht.ITS(TinyNet(), **{"samples": 5, **options})


# --- the errors themselves --------------------------------------------------------------------------------------------


def test_every_error_is_a_headtilt_error_and_the_builtin_one_expects():
    kinds = {
        ht.ShapeError: ValueError,
        ht.OptionError: ValueError,
        ht.ModelError: RuntimeError,
        ht.DataError: RuntimeError,
        ht.MissingExtraError: ImportError,
    }
    for kind, builtin in kinds.items():
        assert issubclass(kind, HeadtiltError)
        assert issubclass(kind, builtin)


def test_a_missing_extra_says_what_to_install():
    assert str(MissingExtraError("matplotlib", "plot")).endswith("pip install 'headtilt[plot]'")


def test_checks_name_the_argument_and_what_came():
    with pytest.raises(ht.OptionError, match=r"^colour must be one of 'red', 'green'; got 'blue'\.$"):
        one_of("colour", "blue", ("red", "green"))
    with pytest.raises(ht.OptionError, match=r"^count must be a whole number of at least 2; got 1\.$"):
        at_least("count", 1, 2)
    with pytest.raises(ht.OptionError, match=r"^width must be a finite number above 0; got -1\.$"):
        positive("width", -1)
    one_of("colour", "red", ("red", "green"))
    at_least("count", 2, 2)
    positive("width", 0.5)


def test_numbers_of_numpy_are_numbers():
    at_least("count", np.int64(2), 2)
    positive("width", np.float32(0.5))
    assert checked_seed(np.int32(3)) == 3
    assert ht.scale(np.float32(0.25)) == ht.scale(0.25)
    robust = ready(
        samples=np.int64(5), hypotheses=np.int32(2), seed=np.int64(1), mc_passes=np.int64(2), traversal="boltzmann"
    )
    plain = ready(samples=5, hypotheses=2, seed=1, mc_passes=2, traversal="boltzmann")
    assert torch.equal(robust(tiny_images(2)), plain(tiny_images(2)))
    with pytest.raises(ht.OptionError, match="count must be a whole number of at least 2; got"):
        at_least("count", np.int64(1), 2)
    with pytest.raises(ht.OptionError, match="width must be a finite number above 0"):
        positive("width", np.float64("nan"))


@pytest.mark.parametrize("value", [True, 2.0, "2", None, math.nan])
def test_only_whole_numbers_count(value):
    with pytest.raises(ht.OptionError, match="count must be a whole number"):
        at_least("count", value, 1)


@pytest.mark.parametrize("value", [True, 0, -1.0, math.inf, math.nan, "1", None])
def test_only_finite_positive_numbers_are_positive(value):
    with pytest.raises(ht.OptionError, match="width must be a finite number above 0"):
        positive("width", value)


# --- images -----------------------------------------------------------------------------------------------------------

BAD_IMAGES = {
    "two axes": (torch.zeros(12, 12), r"images must be \(B, C, H, W\); got \(12, 12\)\. Add .* images\[None, None\]"),
    "three axes": (torch.zeros(1, 12, 12), r"images must be \(B, C, H, W\); got \(1, 12, 12\)\. Add .* images\[None\]"),
    "five axes": (torch.zeros(1, 1, 1, 12, 12), r"images must be \(B, C, H, W\); got \(1, 1, 1, 12, 12\)"),
    "a scalar": (torch.tensor(1.0), r"images must be \(B, C, H, W\)"),
    "bytes": (
        torch.zeros(1, 1, 12, 12, dtype=torch.uint8),
        r"images must be floating point; got torch.uint8\. .*/ 255",
    ),
    "integers": (torch.zeros(1, 1, 12, 12, dtype=torch.long), r"images must be floating point; got torch.int64"),
    "booleans": (torch.zeros(1, 1, 12, 12, dtype=torch.bool), r"images must be floating point"),
    "complex numbers": (torch.zeros(1, 1, 12, 12, dtype=torch.complex64), r"images must be floating point"),
    "no image": (torch.zeros(0, 1, 12, 12), r"images must hold at least one image"),
    "no pixel": (torch.zeros(2, 1, 0, 12), r"images must hold at least one image and pixel; got \(2, 1, 0, 12\)"),
    "no channel": (torch.zeros(2, 0, 12, 12), r"images must hold at least one image"),
    "not a tensor": (tiny_images(1).numpy(), r"images must be a tensor .*; got ndarray\. Use torch.as_tensor"),
    "a list": ([[0.0]], r"images must be a tensor .*; got list"),
    "nothing": (None, r"images must be a tensor .*; got NoneType"),
}
bad_images = pytest.mark.parametrize(("images", "message"), BAD_IMAGES.values(), ids=BAD_IMAGES.keys())


@bad_images
def test_images_that_are_none_are_refused_by_the_search(images, message):
    robust = ready()
    before = fingerprint(robust)
    with pytest.raises(ht.ShapeError, match=message):
        robust(images)
    assert fingerprint(robust) == before


@bad_images
def test_images_that_are_none_are_refused_by_warp(images, message):
    with pytest.raises(ht.ShapeError, match=message):
        ht.warp(images, EYE)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_pixels_that_are_not_finite_are_refused(value):
    images = tiny_images(2)
    images[1, 0, 3, 3] = value
    with pytest.raises(ht.ShapeError, match=r"images must be finite; .* images\.nan_to_num\(\)"):
        ready()(images)


def test_images_the_model_cannot_take_are_a_model_error_with_their_shape():
    with pytest.raises(ht.ModelError, match=r"model raised on views of shape \(2, 3, 12, 12\)") as caught:
        ready()(tiny_images(2, channels=3))
    assert isinstance(caught.value.__cause__, RuntimeError)


# --- poses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("poses", "message"),
    [
        (torch.eye(3), r"poses must be \(B, 3, 3\); got \(3, 3\)"),
        (torch.zeros(2, 2, 3), r"poses must be \(B, 3, 3\); got \(2, 2, 3\)"),
        (EYE.expand(3, 3, 3), "poses must be as many as images; got 3 poses for 2 images"),
        (EYE, "poses must be as many as images; got 1 poses for 2 images"),
    ],
    ids=["one matrix", "affine 2×3", "too many", "too few"],
)
def test_poses_of_the_wrong_shape_are_refused(poses, message):
    with pytest.raises(ht.ShapeError, match=message):
        ht.warp(tiny_images(2), poses)


@pytest.mark.parametrize(
    "poses", [None, [[1.0, 0, 0], [0, 1, 0], [0, 0, 1]], EYE.numpy()], ids=["none", "list", "array"]
)
def test_poses_that_are_no_tensor_are_refused(poses):
    with pytest.raises(ht.ShapeError, match=r"poses must be a tensor \(B, 3, 3\); got .*Use torch\.as_tensor"):
        ht.warp(tiny_images(1), poses)


@pytest.mark.parametrize("padding", [math.nan, math.inf, (0.0, math.nan, 0.0), [-math.inf] * 3], ids=stable_id)
def test_paddings_that_are_not_finite_are_refused_at_the_door(padding):
    with pytest.raises(ht.OptionError, match="padding must be finite; got"):
        ht.warp(tiny_images(1, channels=3), EYE, padding=padding)
    with pytest.raises(ht.OptionError, match="padding must be finite; got"):
        ready(padding=padding)


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        ("wrap", "padding must be one of 'zeros', 'border', 'reflection'; got 'wrap'"),
        ((0.1, 0.2), r"padding must be one number or 3 numbers, one per channel; got \(0.1, 0.2\)"),
        ((), "padding must be one number or 3 numbers"),
        ([[0.1, 0.2, 0.3]], "padding must be one number or 3 numbers"),
        (None, "padding must be a word, a number or a number per channel; got None"),
        (("a", "b", "c"), "padding must be a word, a number or a number per channel"),
        (object(), "padding must be a word, a number or a number per channel"),
    ],
    ids=stable_id,
)
def test_paddings_that_mean_nothing_are_refused(padding, message):
    images = tiny_images(1, channels=3)
    with pytest.raises(ht.OptionError, match=message):
        ht.warp(images, EYE, padding=padding)
    with pytest.raises(ht.OptionError, match=message):
        ht.ITS(TinyNet(channels=3), samples=5, padding=padding)(images)


def test_interpolations_that_mean_nothing_are_refused():
    message = "interpolation must be one of 'bilinear', 'nearest', 'bicubic'; got 'cubic'"
    with pytest.raises(ht.OptionError, match=message):
        ht.warp(tiny_images(1), EYE, interpolation="cubic")
    with pytest.raises(ht.OptionError, match=message):
        ready(interpolation="cubic")


def test_matrices_that_cannot_be_decomposed_are_refused():
    with pytest.raises(ht.ShapeError, match=r"matrix must be \(…, 3, 3\); got \(2, 3\)"):
        ht.decompose(torch.zeros(2, 3))
    with pytest.raises(ht.ShapeError, match="matrix must be invertible"):
        ht.decompose(torch.diag(torch.tensor([1.0, 0.0, 1.0])))
    with pytest.raises(ht.OptionError, match="compose needs at least one matrix"):
        ht.compose()


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
        ("rotation", r"levels must hold groups such as rotation\(\); got str: 'r'"),
        ([ht.rotation], r"levels must hold groups such as rotation\(\); got function"),
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
            "confidence must be one of 'energy', 'bayesian', 'group', 'multilabel' or a callable; got 'certainty'",
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
        ({"hypothesis": 3}, "option must be one of .*'accept'.*; got 'hypothesis'"),
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
        Tree(())


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
    with pytest.raises(ht.OptionError, match="features must name a module of the model; 'head' is none"):
        Predictor(TinyNet(), features="head")(tiny_images(1))
    with pytest.raises(ht.OptionError, match=r"features need an nn\.Module"):
        feature_layer(lambda views: views, "head")


# --- models -----------------------------------------------------------------------------------------------------------

images = tiny_images(2)


@pytest.mark.parametrize("model", [None, 3, "resnet18", [nn.Flatten()]], ids=stable_id)
def test_models_that_cannot_be_called_are_refused(model):
    with pytest.raises(ht.ModelError, match=r"model must be an nn\.Module or a callable that returns logits; got"):
        ht.ITS(model)


class Answering(nn.Module):
    """A model that returns whatever it is told to, made from proper logits."""

    def __init__(self, form):
        super().__init__()
        self.net, self.form = TinyNet(), form

    def forward(self, views):
        return self.form(self.net(views))


BAD_ANSWERS = {
    "nothing": (lambda logits: None, r"model must return logits as a tensor.*'logits'; got <class 'NoneType'>"),
    "a tuple": (lambda logits: (logits, logits), r"model must return logits as a tensor.*got <class 'tuple'>"),
    "an array": (lambda logits: logits.numpy(), r"model must return logits as a tensor.*got <class 'numpy.ndarray'>"),
    "a dict without logits": (
        lambda logits: {"scores": logits, 1: 2},
        r"dict without 'logits'; it has \['1', 'scores'\]\. Set output_key",
    ),
    "a dict of None": (lambda logits: {"logits": None}, r"model must return logits as a tensor"),
    "an object without logits": (
        lambda logits: SimpleNamespace(scores=logits),
        r"model must return logits as a tensor",
    ),
    "one axis": (lambda logits: logits[:, 0], r"floating-point logits \(2, Y\); got torch.float32 \(2,\)"),
    "three axes": (lambda logits: logits[:, None], r"floating-point logits \(2, Y\); got torch.float32 \(2, 1, 5\)"),
    "maps": (lambda logits: logits[:, :, None, None], r"floating-point logits \(2, Y\)"),
    "too few rows": (lambda logits: logits[:1], r"floating-point logits \(2, Y\); got torch.float32 \(1, 5\)"),
    "a mean over the batch": (lambda logits: logits.mean(0), r"floating-point logits \(2, Y\)"),
    "labels": (lambda logits: logits.argmax(1), r"floating-point logits \(2, Y\); got torch.int64"),
    "whole numbers": (lambda logits: logits.long(), r"floating-point logits \(2, Y\); got torch.int64 \(2, 5\)"),
    "NaN": (lambda logits: logits * math.nan, r"model returned NaN logits\. Check its weights and the range"),
    "one NaN": (lambda logits: logits.index_fill(0, torch.tensor([1]), math.nan), r"model returned NaN logits"),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("form", "message"), BAD_ANSWERS.values(), ids=BAD_ANSWERS.keys())
def test_answers_that_are_no_logits_are_refused_and_the_model_is_unharmed(form, message, training):
    model = Answering(form).train(training)
    before = fingerprint(model)
    with pytest.raises(ht.ModelError, match=message):
        ht.ITS(model, samples=5)(images)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    "form",
    [lambda logits: logits[:, :0], lambda logits: logits - math.inf, lambda logits: logits + math.inf],
    ids=["no class", "minus infinity everywhere", "plus infinity"],
)
def test_answers_without_any_information_are_refused(form):
    with pytest.raises(ht.ModelError, match=r"\(2, Y\); got .*\(2, 0\)|model returned infinite logits"):
        ht.ITS(Answering(form), [ht.rotation(), ht.scale()], samples=5, confidence="energy")(images)


def test_a_confidence_that_returns_nonsense_is_told_so_on_a_lattice_too():
    robust = ready(search="joint", budget=6, confidence=lambda evidence, orbit: evidence.logits)
    with pytest.raises(ht.OptionError, match=r"confidence must return a tensor \(B, K, N\) = \(2, 1, 6\)"):
        robust(tiny_images(2))


def test_a_class_ruled_out_by_minus_infinity_is_fine():
    def form(logits):
        return logits.index_fill(1, torch.tensor([2]), -math.inf)

    result = ht.ITS(Answering(form), samples=5).search(images)
    assert bool((result.labels != 2).all())
    assert bool(result.probabilities.isfinite().all())


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), ValueError("bad"), KeyError("missing"), ZeroDivisionError()]
)
def test_a_model_that_raises_is_a_model_error_that_keeps_the_cause(error, passes):
    class Raising(TinyNet):
        def forward(self, views):
            super().forward(views)
            raise error

    model = Raising().train()
    before = fingerprint(model)
    # Where memory runs out, less is tried first.
    views = 1 if "memory" in str(error) else 2
    with pytest.raises(ht.ModelError, match=rf"model raised on views of shape \({views}, 1, 12, 12\)") as caught:
        ht.ITS(model, samples=5, mc_passes=passes)(images)
    assert caught.value.__cause__ is error
    assert fingerprint(model) == before


def test_a_feature_layer_that_runs_on_other_rows_is_refused():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.last = nn.Linear(36, 4), nn.Linear(4, 3)

        def forward(self, views):
            patches = views.reshape(-1, 36)
            return self.last(self.embed(patches).reshape(len(views), 4, 4).mean(1))

    with pytest.raises(ht.ModelError, match=r"feature layer ran on 8 rows for 2 views\. Name another module"):
        Predictor(Patches(), features="embed")(images)


# --- results ----------------------------------------------------------------------------------------------------------


def test_questions_a_result_cannot_answer_are_refused():
    result = ready().search(images)
    for index in (2, -3):
        with pytest.raises(ht.OptionError, match=f"index must name one of the 2 images; got {index}"):
            result.describe(index)
    for k in (0, 1.5):
        with pytest.raises(ht.OptionError, match="k must be a whole number of at least 1"):
            result.topk(k)

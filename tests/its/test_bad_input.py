"""Bad images and poses are refused by name, with the fix, and so are questions that a result cannot answer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import headtilt as ht
from headtilt.errors import HeadtiltError, MissingExtraError, at_least, checked_seed, one_of, positive
from tests.toys import TinyNet, fingerprint, its, ready, stable_id, tiny_images

EYE = torch.eye(3)[None]


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
        ("wrap", "padding must be one of 'auto', 'zeros', 'border', 'reflection'; got 'wrap'"),
        ((0.1, 0.2), r"padding must be one number or 3 numbers, one per channel; got \(0.1, 0.2\)"),
        ((), "padding must be one number or 3 numbers"),
        ([[0.1, 0.2, 0.3]], "padding must be a word, a number or a number per channel"),
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
        its(TinyNet(channels=3), samples=5, padding=padding)(images)


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


# --- results ----------------------------------------------------------------------------------------------------------


def test_questions_a_result_cannot_answer_are_refused():
    result = ready().search(tiny_images(2))
    for index in (2, -3):
        with pytest.raises(ht.OptionError, match=f"index must name one of the 2 images; got {index}"):
            result.describe(index)
    for k in (0, 1.5):
        with pytest.raises(ht.OptionError, match="k must be a whole number of at least 1"):
            result.topk(k)


def test_models_and_images_without_numbers_are_refused_in_a_sentence():
    """The meta device holds shapes alone, for models whose weights come later."""
    hollow, images = TinyNet().to("meta"), tiny_images(8)
    for ask in (ht.ITS(hollow).search, ht.ITS(hollow).fit):
        with pytest.raises(ht.ModelError, match=r"on the meta device.*Load its weights"):
            ask(images)
    with pytest.raises(ht.ShapeError, match="images must have numbers; these lie on the meta device"):
        ready().search(images.to("meta"))


def test_a_model_some_of_whose_weights_come_later_is_asked_where_the_others_are():
    net = TinyNet().double()
    net.conv.to("meta")  # the first of its parts
    assert ht.ITS(net).predictor.device_and_dtype(tiny_images(1)) == (torch.device("cpu"), torch.float64)

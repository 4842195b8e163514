"""Audits: votes of many images, honest intervals, and the right name for what a source does."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from headtilt.apps.audit import ORIENTATIONS, Votes, ask, audit, likeliest, orientations, share_of, turned
from headtilt.apps.playground.methods import PACKAGED
from headtilt.errors import DataError, ShapeError
from headtilt.paper.data import load as load_data
from headtilt.plot import audit as drawn
from headtilt.sources.pretrained import from_pretrained
from tests.plot.toys import check_nothing_is_cut_off

# What a source may do to rows and columns, in the words of numpy.
SOURCES = {
    "upright": lambda image: image,
    "turned by 90°": lambda image: np.rot90(image, -1),
    "turned by 180°": lambda image: np.rot90(image, 2),
    "turned by 270°": lambda image: np.rot90(image, 1),
    "mirrored": np.fliplr,
    "transposed and turned by 180°": lambda image: np.rot90(image.T, 2),
    "flipped top to bottom": np.flipud,
    "transposed": lambda image: image.T,
}
UNFITTED_DIGITS = from_pretrained("zoo:digits:0")
DIGITS = from_pretrained("zoo:digits:0", bundle=PACKAGED)


def arriving(source, count=40, first=0):
    """Digits (n, 1, 28, 28) of the test set as a source delivers them."""
    images = load_data("digits", "test").floats()[first : first + count, 0].numpy()
    return torch.from_numpy(np.stack([np.ascontiguousarray(SOURCES[source](image)) for image in images]))[:, None]


def made(evidence, fitted=True):
    """Votes with that evidence (n, 8) and answers that hang on the orientation."""
    votes = torch.as_tensor(evidence, dtype=torch.float32)
    labels = torch.arange(8).expand(len(votes), 8)
    return Votes(votes, labels, torch.full_like(votes, 0.5), fitted)


@pytest.mark.parametrize("place", range(8), ids=ORIENTATIONS)
def test_each_orientation_is_undone_to_the_pixel(place):
    image = torch.arange(9.0).reshape(3, 3)
    source = torch.from_numpy(np.ascontiguousarray(SOURCES[ORIENTATIONS[place]](image.numpy())))
    assert torch.equal(orientations(source[None, None])[0, place, 0], image)


@pytest.mark.parametrize("source", ORIENTATIONS)
def test_forty_digits_tell_what_a_source_does_to_them(source):
    found = audit(ask(DIGITS, arriving(source)))
    assert found.verdict == source
    assert found.mirrored == ("yes" if ORIENTATIONS.index(source) >= 4 else "no")
    assert found.turned.share == (0.0 if source in ("upright", "mirrored") else 1.0)
    assert found.enough in (10, 20)


def test_without_a_fit_more_images_are_needed_and_few_cannot_tell():
    assert audit(ask(UNFITTED_DIGITS, arriving("transposed", 10))).verdict == "cannot tell"
    found = audit(ask(UNFITTED_DIGITS, arriving("transposed", 100)))
    assert (found.verdict, found.fitted) == ("transposed", False)


def test_a_source_that_turns_half_of_its_images_is_mixed():
    images = torch.cat([arriving("upright", 40), arriving("turned by 180°", 40, first=40)])
    found = audit(ask(DIGITS, images))
    assert found.verdict == "mixed"
    assert found.shares["turned by 180°"].low < 0.5 < found.shares["turned by 180°"].high
    assert "canonicalise" in dict(found.lines())["how to correct it"]


def test_a_few_turned_images_among_many_are_spoken_of():
    images = torch.cat([arriving("upright", 85), arriving("turned by 90°", 15, first=85)])
    found = audit(ask(DIGITS, images))
    assert found.verdict == "upright"
    assert found.turned.low > 0.02
    assert found.sentence.startswith("Images arrive upright. Some do not: ")


def test_a_model_that_is_blind_to_turns_cannot_tell():
    found = audit(made(torch.zeros(400, 8)))
    assert (found.verdict, found.mirrored, found.enough) == ("cannot tell", "cannot tell", None)
    assert (found.turned.low, found.turned.high) == (0, 1)


def test_a_model_that_is_blind_to_mirrors_still_tells_turns_and_says_so():
    generator = torch.Generator().manual_seed(0)
    evidence = 2 * torch.randn(200, 8, generator=generator)
    evidence[:, [1, 5]] += 4
    found = audit(made(evidence))
    assert (found.verdict, found.mirrored) == ("turned by 90°", "cannot tell")
    assert (
        found.sentence == "Images arrive turned by 90°, mirrored or not: this model cannot tell mirrored images apart."
    )


def test_one_image_is_no_verdict():
    assert audit(made([[9.0, 0, 0, 0, 0, 0, 0, 0]])).verdict == "cannot tell"


def test_intervals_hold_the_true_share_as_often_as_they_say():
    """Votes drawn from the very likelihoods that the estimate assumes: 95 in a hundred intervals hold the truth."""
    generator = torch.Generator().manual_seed(0)
    shares, held = torch.tensor([0.7, 0.2, 0.05, 0.05]), 0
    table = torch.full((4, 4), 0.1, dtype=torch.float64).fill_diagonal_(0.7)
    for _ in range(200):
        kinds = torch.multinomial(shares, 80, replacement=True, generator=generator)
        seen = torch.multinomial(table[kinds], 1, generator=generator)[:, 0]
        likelihood = table[:, seen].T
        found = share_of(likelihood, likeliest(likelihood), 0)
        held += found.low <= 0.7 <= found.high
    assert 182 <= held <= 198


def test_the_likeliest_shares_undo_the_confusions_of_single_votes():
    likelihood = torch.full((100, 8), 0.04, dtype=torch.float64)
    likelihood[:70, 0], likelihood[70:80, 1], likelihood[80:90, 2], likelihood[90:, 3] = 0.72, 0.72, 0.72, 0.72
    # Votes of 70 : 10 : 10 : 10 are what a model gives that is wrong so often, on images that are all upright.
    assert likeliest(turned(likelihood))[0] > 0.7


def test_the_gain_is_what_the_model_says_of_images_turned_back():
    evidence = np.zeros((50, 8))
    evidence[:, 3] = 9
    votes = made(evidence)
    votes.confidence[:, 3] = 0.9
    gain = audit(votes).gain
    assert (gain.answers_changed, gain.confidence_before) == (1.0, 0.5)
    assert gain.confidence_after == pytest.approx(0.9)


def test_what_is_no_square_and_what_is_no_image_are_refused():
    with pytest.raises(ShapeError, match="squares"):
        orientations(torch.zeros(1, 1, 3, 4))
    with pytest.raises(DataError, match=r"at least one image that can be read\. a\.png is empty\."):
        audit(made(np.zeros((0, 8))), ["a.png is empty."])


@pytest.mark.parametrize("angles", [None, torch.tensor([0.0, 44.0, -31.0, 180.0])], ids=["quarters", "any angle"])
def test_the_picture_shows_shares_votes_and_angles_and_cuts_nothing_off(angles):
    pytest.importorskip("matplotlib")
    votes = Votes(torch.eye(8)[:4], torch.zeros(4, 8).long(), torch.ones(4, 8), True, angles)
    found = audit(votes).as_dict()
    figure = drawn(found)
    check_nothing_is_cut_off(figure)
    assert len(figure.axes) == (2 if angles is None else 3)
    if angles is not None:
        assert found["angles"] == (1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1)
    assert json.loads(json.dumps(found))["votes"]["turned by 270°"] == 1

"""What may be fitted on: anything else is a clear error, and leaves nothing half fitted."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import headtilt as ht
from headtilt.calibration import fit_images as fitting
from headtilt.calibration.balance import Balance
from headtilt.calibration.fit_images import gather
from tests.toys import TinyNet, fingerprint, tiny_images, ungated

from .conftest import QUICK
from .toys import bias_of, joint, parts


def test_a_loader_of_images_with_labels_gives_what_the_tensor_gives(digits_net, upright):
    upright = upright[:80]
    expected = bias_of(digits_net, upright)
    labels = torch.zeros(len(upright))
    loaders = {
        "tuples": DataLoader(TensorDataset(upright, labels), batch_size=64),
        "lists": [[part, 0] for part in upright.split(64)],
        "bare": upright.split(7),
        "used up": (part for part in upright.split(79)),
    }
    for name, loader in loaders.items():
        assert torch.equal(bias_of(digits_net, loader), expected), name


class Midway:
    """A loader that fails after its first batch."""

    def __init__(self, images, error):
        self.images, self.error = images, error

    def __iter__(self):
        yield self.images
        raise self.error


good = tiny_images(40)
spoiled = good.clone()
spoiled[13, 0, 2, 2] = math.nan

BAD = {
    "too few": (good[:7], {}, ht.DataError, "fit images must be at least 8, better some hundreds; got 7"),
    "one class": (good[:1].expand(20, -1, -1, -1), {}, ht.DataError, "at least two classes by the model's own"),
    "NaN": (spoiled, {}, ht.ShapeError, "fit images must be finite"),
    "infinite": (good / 0, {}, ht.ShapeError, "fit images must be finite"),
    "integers": ((good * 255).long(), {}, ht.ShapeError, "fit images must be floating point; got torch.int64"),
    "bytes": ((good * 255).byte(), {}, ht.ShapeError, r"fit images must be floating point; got torch.uint8.*/ 255"),
    "no channels": (good[:, 0], {}, ht.ShapeError, r"fit images must be \(B, C, H, W\); got \(40, 12, 12\)"),
    "no images": (good[:0], {}, ht.ShapeError, "fit images must hold at least one image"),
    "a number": (7, {}, ht.DataError, "the loader of fit images raised: 'int' object is not iterable"),
    "nothing": (None, {}, ht.DataError, "the loader of fit images raised"),
    "an empty loader": ([], {}, ht.DataError, "the loader of fit images gave no batch. Nothing was fitted"),
    "empty batches": ([()], {}, ht.DataError, "the loader of fit images raised"),
    "dicts": ([{"pixel_values": good}], {}, ht.ShapeError, r"fit images must be a tensor \(B, C, H, W\); got dict"),
    "arrays": ([good.numpy()], {}, ht.ShapeError, "fit images must be a tensor .*; got ndarray"),
    "two sizes": ([good, tiny_images(9, 14, 14)], {}, ht.ShapeError, r"fit images must all be .*\(1, 14, 14\)"),
    "a wrong size": (tiny_images(20, 24, 24), {}, ht.ModelError, r"model raised on views of shape \(\d+, 1, 24, 24\)"),
    "a loader that fails": (
        Midway(good, OSError("disk gone")),
        {},
        ht.DataError,
        "the loader of fit images raised: disk gone. Nothing was fitted",
    ),
    "a loader that refuses": (Midway(good, ht.DataError("mine")), {}, ht.DataError, "^mine$"),
    "a wrong method": (good, {"method": "magic"}, ht.OptionError, "method must be one of 'head', 'balance'.*'magic'"),
    "a wrong seed": (good, {"seed": "lucky"}, ht.OptionError, "seed must be a whole number"),
    "a wrong promise": (good, {"promise": "half"}, ht.OptionError, "upright must be points between 0 and 100"),
    "a large promise": (good, {"promise": 101}, ht.OptionError, "upright must be points between 0 and 100"),
    "a wrong crop": (good, {"crop": -3}, ht.OptionError, "crop must be a whole number of at least 1"),
    "a large crop": (good, {"crop": 13}, ht.OptionError, "crop must fit into the images; got 13 for 12×12"),
    "a wrong recipe": (good, {"recipe": "quick"}, ht.OptionError, "recipe must be a HeadRecipe or None; got 'quick'"),
}


@pytest.mark.parametrize("before", [True, False], ids=["fitted before", "never fitted"])
@pytest.mark.parametrize(("images", "options", "kind", "message"), BAD.values(), ids=BAD.keys())
def test_a_fit_that_fails_says_why_and_leaves_nothing_half_fitted(images, options, kind, message, before):
    robust = joint(TinyNet().train(), budget=6)
    if before:
        robust.fit(good, method="balance")
    state = fingerprint(robust.model)
    kept = parts(robust)
    with pytest.raises(kind, match=message):
        robust.fit(images, **options)
    assert all(one is other for one, other in zip(kept, parts(robust), strict=True))
    assert fingerprint(robust.model) == state


STAGES = (
    "looking at upright images",
    "choosing a padding",
    "looking at tilted images",
    "fitting the head",
    "searching upright images",
    "fitted",
)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("stage", STAGES)
def test_a_fit_that_is_interrupted_at_any_stage_leaves_nothing_half_fitted(stage, error):
    robust = joint(TinyNet().train(), budget=6, readout="incumbent")
    kept, state = parts(robust), fingerprint(robust.model)
    reached = []

    def interrupt(where, done, total):
        if where == stage:
            reached.append(done)
            raise error

    with pytest.raises(error):
        robust.fit(tiny_images(60), recipe=QUICK, progress=interrupt)
    assert len(reached) == 1
    assert all(one is other for one, other in zip(kept, parts(robust), strict=True))
    assert fingerprint(robust.model) == state
    assert robust.fit(tiny_images(60), recipe=QUICK).report["images"] == 60


@pytest.mark.parametrize("fail_on", [1, 4, 9])
def test_a_model_that_fails_midway_leaves_nothing_half_fitted(fail_on):
    class Tired(TinyNet):
        calls = 0

        def forward(self, views):
            self.calls += 1
            if self.calls == fail_on:
                raise RuntimeError("tired")
            return super().forward(views)

    robust = joint(Tired(), budget=6)
    kept = parts(robust)
    with pytest.raises(ht.ModelError, match="tired"):
        robust.fit(tiny_images(120), recipe=QUICK)
    assert all(one is other for one, other in zip(kept, parts(robust), strict=True))
    robust.fit(tiny_images(120), method="balance")
    assert isinstance(robust.calibrator, Balance)


def test_distance_scores_of_a_model_without_features_say_what_to_do():
    robust = ungated(lambda views: TinyNet()(views), samples=5)
    with pytest.raises(ht.OptionError, match="distance scores need features"):
        robust.fit(good, method="prototypes")
    assert robust.calibrator is None


def test_a_balance_of_each_batch_cannot_be_kept():
    robust = joint(TinyNet(), calibrator="batch")
    with pytest.raises(ht.OptionError, match='method="keep" fits a gate for a fixed calibrator'):
        robust.fit(good, method="keep")
    assert robust.calibrator == "batch"
    assert isinstance(robust.fit(good, method="balance").calibrator, Balance)


def stream() -> np.random.Generator:
    return np.random.default_rng(0)


def test_gathering_gives_all_images_in_order():
    assert torch.equal(gather(good.split(9), stream()), good)
    assert gather(good, stream()) is good


class Numbered:
    """A loader of batches of seven images whose first pixel is their number; it minds how many are held."""

    def __init__(self, count: int) -> None:
        self.count, self.given = count, []

    def __iter__(self):
        for start in range(0, self.count, 7):
            batch = tiny_images(7)
            batch[:, 0, 0, 0] = torch.arange(start, start + 7)
            self.given.append(weakref.ref(batch))
            yield batch, torch.zeros(7)
            del batch
            assert sum(one() is not None for one in self.given) <= 2


def test_of_a_loader_that_gives_more_than_memory_should_hold_a_random_part_is_kept_while_it_streams_by(monkeypatch):
    monkeypatch.setattr(fitting, "MOST_IMAGES", 40)
    some = gather(Numbered(700), stream())[:, 0, 0, 0].tolist()
    assert len(some) == len(set(some)) == 40
    assert min(some) < 150
    assert max(some) > 550
    assert some == gather(Numbered(700), stream())[:, 0, 0, 0].tolist()
    assert some != gather(Numbered(700), np.random.default_rng(1))[:, 0, 0, 0].tolist()
    assert gather(Numbered(35), stream())[:, 0, 0, 0].tolist() == list(range(35))


def test_every_image_of_a_stream_is_as_likely_to_be_kept_as_any_other(monkeypatch):
    monkeypatch.setattr(fitting, "MOST_IMAGES", 10)
    counts = torch.zeros(70)
    for seed in range(200):
        counts[gather(Numbered(70), np.random.default_rng(seed))[:, 0, 0, 0].long()] += 1
    assert float(counts.sum()) == 2000
    for part in counts.split(10):  # 286 expected of each
        assert float(part.sum()) == pytest.approx(2000 / 7, abs=60)


def test_pixels_count_towards_what_is_kept_of_a_stream(monkeypatch):
    monkeypatch.setattr(fitting, "MOST_PIXELS", 20 * 144)
    assert len(gather(Numbered(700), stream())) == 20


def test_a_loader_of_more_than_memory_should_hold_can_be_fitted_on(monkeypatch):
    monkeypatch.setattr(fitting, "MOST_IMAGES", 60)
    robust = joint(TinyNet(), budget=6).fit((part for part in tiny_images(150).split(9)), recipe=QUICK)
    assert robust.report["images"] == 60


class Spoiled(TinyNet):
    """Its answers are fine, and what one of its parts is given is not."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value, self.tap = value, torch.nn.Identity()

    def forward(self, images):
        self.tap(images.flatten(1)[:, :3] * self.value)
        return super().forward(images)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("method", ["head", "prototypes", "neighbours"])
def test_features_that_are_not_finite_are_a_model_error_of_a_fit_which_leaves_nothing_half_fitted(method, value):
    robust = joint(Spoiled(value), budget=4, features=("tap",))
    kept = parts(robust)
    with pytest.raises(ht.ModelError, match="features are NaN or infinite"):
        robust.fit(tiny_images(60), method=method, recipe=QUICK)
    assert all(one is other for one, other in zip(kept, parts(robust), strict=True))
    assert robust(tiny_images(2)).shape == (2, 5)


@pytest.mark.parametrize(
    ("images", "kind", "message"),
    [
        (good[:7], ht.DataError, "fit images must be at least 8"),
        (spoiled, ht.ShapeError, "fit images must be finite"),
        (tiny_images(20, 14, 14), ht.ShapeError, r"held-out images must be of the size of the others, \(1, 12, 12\)"),
        (Midway(good, OSError("gone")), ht.DataError, "the loader of fit images raised: gone"),
    ],
    ids=["too few", "NaN", "another size", "a loader that fails"],
)
def test_held_out_images_that_are_none_are_refused_and_nothing_is_fitted(images, kind, message):
    robust = joint(TinyNet(), budget=6)
    kept = parts(robust)
    with pytest.raises(kind, match=message):
        robust.fit(good, held_out=images, method="balance")
    assert all(one is other for one, other in zip(kept, parts(robust), strict=True))

"""What a search returns says what was found, and says it the same way as ever."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch.testing import assert_close

import headtilt as ht
from headtilt.model.predictor import Predictor
from headtilt.result import SearchResult, concatenate
from tests.toys import tiny_images, ungated

NAMES = ["ant", "bee", "cat", "dog", "elk"]


# --- SearchResult -----------------------------------------------------------------------------------------------------


SHOWN = {"padding": "border", "interpolation": "bicubic"}


@pytest.fixture
def result(net, images) -> SearchResult:
    return ungated(net, [ht.rotation(), ht.scale(0.25), ht.shear_x(0.25)], samples=5, padding="border").search(images)


def test_labels_and_probabilities_are_those_of_the_logits(result):
    assert torch.equal(result.labels, result.logits.argmax(1))
    assert_close(result.probabilities, result.logits.softmax(1))
    assert len(result) == 5


def test_the_perturbation_is_the_inverse_of_the_pose(result):
    assert_close(result.perturbation @ result.pose, torch.eye(3).expand(5, 3, 3), rtol=0, atol=1e-5)
    assert_close(result.pose @ result.perturbation, torch.eye(3).expand(5, 3, 3), rtol=0, atol=1e-5)


def test_the_incumbent_is_the_first_hypothesis(result):
    assert torch.equal(result.pose, result.hypotheses.pose[:, 0])
    assert torch.equal(result.labels, result.hypotheses.labels[:, 0])
    assert bool(result.hypotheses.active[:, 0].all())
    # Curvatures of different groups do not compare, so the final order is that of the energies.
    ordered = (-result.hypotheses.evidence.energy).masked_fill(~result.hypotheses.active, -math.inf)
    assert torch.equal(ordered, ordered.sort(1, descending=True).values)


def test_hypotheses_have_different_labels(result):
    for labels, active in zip(result.hypotheses.labels, result.hypotheses.active, strict=True):
        kept = labels[active].tolist()
        assert len(kept) == len(set(kept))


def test_pose_and_logits_of_every_hypothesis_belong_together(net, images, result):
    for slot in range(3):
        active = result.hypotheses.active[:, slot]
        views = ht.warp(images[active], result.hypotheses.pose[active, slot], **SHOWN)
        with torch.no_grad():
            assert_close(result.hypotheses.evidence.logits[active, slot], net(views), rtol=1e-3, atol=1e-3)


def test_the_canonical_image_is_the_original_resampled_once(images, result):
    assert torch.equal(result.images, images)
    assert torch.equal(result.canonical(), ht.warp(images, result.pose, **SHOWN))


def test_the_trace_has_one_entry_per_level_and_holds_the_pose(result):
    assert [level.group.name for level in result.trace] == ["rotation", "scale", "shear_x"]
    last = result.trace[-1]
    chosen = last.poses().flatten(1, 2)[torch.arange(5)[:, None], last.chosen.clamp_min(0)]
    for image in range(5):
        kept = chosen[image][last.chosen[image] >= 0]
        distance = (kept - result.pose[image]).flatten(1).norm(dim=1)
        assert float(distance.min()) < 1e-5


def test_views_count_the_image_itself_and_every_level(result):
    expected = 1 + sum(level.active.sum(1) * 4 for level in result.trace)
    assert torch.equal(result.views, expected)


def test_topk_gives_classes_and_probabilities_best_first(result):
    classes, probabilities = result.topk(2)
    assert classes.shape == probabilities.shape == (5, 2)
    assert torch.equal(classes[:, 0], result.labels)
    assert bool((probabilities[:, 0] >= probabilities[:, 1]).all())
    assert_close(probabilities, result.probabilities.gather(1, classes))
    assert result.topk(50)[0].shape == (5, 5)
    assert_close(result.topk(50)[1].sum(1), torch.ones(5))


def test_results_are_frozen(result):
    with pytest.raises(FrozenInstanceError):
        result.pose = torch.eye(3)


def test_one_result_concatenated_is_itself(result):
    assert concatenate([result]) is result


def test_description_of_the_last_image_may_count_from_the_end(result):
    assert result.describe(-1) == result.describe(4)


@pytest.mark.parametrize("names", [NAMES, dict(enumerate(NAMES))], ids=["list", "dict"])
def test_names_replace_labels_in_the_description(result, names):
    words = result.describe(0, names=names)
    assert "label" not in words
    assert f"→ {NAMES[int(result.labels[0])]} (" in words.splitlines()[0]


# --- goldens ----------------------------------------------------------------------------------------------------------


def test_the_papers_presets_are_the_papers():
    """Its grids with both ends, "nearest" padding, acceptance from 0 as in Algorithm 1, class support, M = 50."""
    three, five = ht.paper3(), ht.paper5(mc_passes=10)
    assert three["levels"] == [ht.rotation().paper(), ht.scale(0.25).paper(), ht.shear_x(0.25)]
    assert [len(set(level.grid(17).tolist())) for level in three["levels"]] == [17] * 3
    walk = ht.Tree(samples=17, hypotheses=3, confidence="group-nearest", accept="zero", ranking="support")
    assert three["search"] == walk
    assert three["mc_passes"] == 50
    assert three["gate"] is None
    assert five["levels"] == [*three["levels"], ht.rotation().paper(), ht.scale(0.25).paper()]
    assert five["mc_passes"] == 10


def test_presets_are_fresh_each_time(net):
    ht.paper3()["levels"].clear()
    assert len(ht.paper3()["levels"]) == 3
    assert len(ungated(net, **ht.paper5(2)).search(tiny_images(1)).trace) == 5


GOLDEN_LOGITS = [
    [0.3484, 0.087, 4.1367, 4.5015, -1.7244],
    [0.1206, -0.1338, 2.387, 3.0245, -0.3611],
    [0.3051, 1.09, 0.746, 0.6633, -0.0589],
    [1.6155, 1.4856, 1.7776, 0.7336, 3.8038],
    [0.6703, -0.0279, 0.3014, 0.0497, 2.5114],
]
GOLDEN_CHOSEN = [
    [[4, 11, 10], [14, 6, 2], [15, 8, 13], [14, 1, 8], [15, 10, 5]],
    [[18, 41, 9], [37, 18, 36], [41, 24, 7], [4, 32, 35], [21, 39, 0]],
    [[45, 1, 22], [19, 9, 8], [8, 25, 42], [7, 25, 47], [9, 45, 28]],
]
GOLDEN_WORDS = (
    "turned by −127.1°, scale 1.15, shear +0.03 → label 4 (72.0%), 113 views\n"
    "  rival: turned by +148.2°, scale 0.78 → label 3, confidence 31.7\n"
    "  rival: scale 1.29, shear −0.16 → label 2, confidence 26.9"
)


def golden():
    levels = [ht.rotation(), ht.scale(0.25), ht.shear_x(0.25)]
    return {"levels": levels, "search": ht.Tree(), "mc_passes": 10, "padding": "zeros", "interpolation": "bilinear"}


def test_its3_of_a_fixed_network_gives_what_it_always_gave(net, images):
    """Weights, images and masks are written down or seeded: only a change of the method changes these numbers."""
    result = ungated(net, **golden(), ranking="last").search(images)
    assert result.labels.tolist() == [3, 3, 1, 4, 4]
    assert result.views.tolist() == [113] * 5
    assert [level.chosen.tolist() for level in result.trace] == GOLDEN_CHOSEN
    assert_close(result.logits, torch.tensor(GOLDEN_LOGITS), rtol=0, atol=2e-3)
    assert result.describe(3) == GOLDEN_WORDS


def test_ranked_by_energy_the_fixed_network_chooses_the_same_views_and_answers_with_others(net, images):
    result = ungated(net, **golden()).search(images)
    assert [level.chosen.tolist() for level in result.trace] == GOLDEN_CHOSEN
    assert result.labels.tolist() == [3, 3, 0, 4, 3]


def test_by_the_printed_rules_the_fixed_network_answers_by_class_support(net, images):
    result = ungated(net, **ht.paper3(10), padding="zeros").search(images)
    assert result.labels.tolist() == [3, 3, 3, 3, 3]


@pytest.mark.parametrize("batched", [True, False])
def test_the_golden_result_does_not_depend_on_how_the_passes_are_run(net, images, batched):
    robust = ungated(net, **golden(), ranking="last")
    assert isinstance(robust.predictor, Predictor)
    robust.predictor.batched_passes = batched
    assert_close(robust(images), torch.tensor(GOLDEN_LOGITS), rtol=0, atol=2e-3)

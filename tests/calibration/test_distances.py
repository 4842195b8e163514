"""Distance scores, by prototypes and by nearest neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import headtilt as ht
from headtilt.calibration.distances import Neighbours, Prototypes, fit_neighbours, fit_prototypes
from headtilt.model.evidence import Evidence


def clusters(count: int = 60, classes: int = 3) -> tuple[Evidence, Tensor]:
    """Features in a cluster per class, on both sides of zero; the last class never occurs."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes - 1, (count,), generator=generator)
    centres = torch.tensor([[4.0, -4.0, 0.0], [-4.0, 1.0, 4.0]])
    features = centres[labels] + 0.5 * torch.randn(count, 3, generator=generator)
    return Evidence(torch.zeros(count, classes), features), labels


@pytest.mark.parametrize("fit", [fit_prototypes, fit_neighbours])
def test_distance_scores_name_the_nearest_class_and_sink_far_from_all(fit):
    upright, labels = clusters()
    scores = fit(upright, labels)
    seen = scores(upright)
    assert seen.logits.shape == (60, 3)
    assert torch.equal(seen.labels, labels)
    between = scores(Evidence(torch.zeros(1, 3), torch.tensor([[0.0, -1.5, 2.0]])))
    assert float(between.logits.max()) < float(seen.logits.max(1).values.min())


@pytest.mark.parametrize("fit", [fit_prototypes, fit_neighbours])
def test_a_class_that_never_occurs_never_wins(fit):
    upright, labels = clusters()
    scores = fit(upright, labels)
    generator = torch.Generator().manual_seed(1)
    anywhere = Evidence(torch.zeros(500, 3), 10 * torch.randn(500, 3, generator=generator))
    assert bool((scores(anywhere).labels != 2).all())


def test_prototypes_are_class_means_and_scores_are_scaled_squared_distances():
    upright, labels = clusters()
    scores = fit_prototypes(upright, labels)
    means = torch.stack([upright.features[labels == label].mean(0) for label in (0, 1)])
    assert_close(scores.means[:2], means, rtol=0, atol=1e-5)
    within = (upright.features - means[labels]).square().sum(1).mean()
    expected = -(upright.features[:, None] - means).square().sum(-1) * 10 / within
    assert_close(scores(upright).logits[:, :2], expected, rtol=1e-3, atol=1e-3)


def test_neighbours_average_the_three_nearest_of_each_class():
    bank = torch.nn.functional.normalize(torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    feature = torch.tensor([[[1.0, 2.0, -1.0, 0.5]]])
    found = Neighbours(bank, nearest=3, scale=10.0)(Evidence(torch.zeros(1, 1, 2), feature)).logits
    similarity = torch.nn.functional.normalize(feature, dim=-1)[0, 0] @ bank.flatten(0, 1).T
    expected = similarity.reshape(2, 5).sort(descending=True).values[:, :3].mean(1) * 10
    assert_close(found[0, 0], expected)


def test_a_bank_repeats_the_images_of_a_class_that_has_few():
    upright = Evidence(torch.zeros(3, 2), torch.eye(3))
    bank = fit_neighbours(upright, torch.tensor([0, 1, 1]), per_class=4).bank
    assert torch.equal(bank[0], torch.eye(3)[[0, 0, 0, 0]])
    assert torch.equal(bank[1], torch.eye(3)[[1, 2, 1, 2]])


@pytest.mark.parametrize("fit", [fit_prototypes, fit_neighbours])
def test_distance_scores_do_not_depend_on_how_many_views_come_at_once(fit):
    upright, labels = clusters()
    scores = fit(upright, labels)
    whole = scores(upright).logits
    one_by_one = torch.cat([scores(upright.at(slice(n, n + 1))).logits for n in range(60)])
    assert_close(one_by_one, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "scores", [Prototypes(torch.zeros(2, 3), torch.tensor(1.0)), Neighbours(torch.zeros(2, 1, 3))], ids=["mean", "near"]
)
def test_distance_scores_without_features_say_what_to_do(scores):
    with pytest.raises(ht.OptionError, match="distance scores need features"):
        scores(Evidence(torch.zeros(1, 2)))


def test_a_class_whose_first_vectors_are_zero_is_there_all_the_same():
    features = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    upright = Evidence(torch.zeros(3, 4), features)
    neighbours = fit_neighbours(upright, torch.tensor([0, 0, 1]), per_class=4)
    assert neighbours.absent.tolist() == [False, False, True, True]
    seen = neighbours(Evidence(torch.zeros(1, 4), torch.tensor([[2.0, 0.0]]))).logits / neighbours.scale
    assert_close(seen, torch.tensor([[2 / 3, 0.0, -2.0, -2.0]]))


def test_classes_without_any_vector_are_absent_where_nobody_says():
    assert Neighbours(torch.tensor([[[0.0, 0.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])).absent.tolist() == [
        False,
        True,
    ]

"""Honest probabilities: one temperature, found where the likelihood is highest."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import headtilt as ht
from core.toys import TinyNet, tiny_images
from headtilt.errors import ShapeError
from headtilt.temperature import fit_temperature


@pytest.mark.parametrize("true", [0.3, 1.0, 4.0])
def test_the_temperature_that_spoiled_the_logits_is_found(true):
    generator = torch.Generator().manual_seed(0)
    honest = 2 * torch.randn(20_000, 5, generator=generator)
    labels = torch.multinomial(honest.softmax(1), 1, generator=generator)[:, 0]
    assert fit_temperature(honest * true, labels) == pytest.approx(true, rel=0.03)


def test_no_other_temperature_is_likelier():
    generator = torch.Generator().manual_seed(1)
    logits = 5 * torch.randn(300, 4, generator=generator)
    labels = torch.where(torch.rand(300, generator=generator) < 0.7, logits.argmax(1), 0)
    best = fit_temperature(logits, labels)
    loss = F.cross_entropy(logits / best, labels)
    for other in (0.8, 0.9, 1.1, 1.25):
        assert loss <= F.cross_entropy(logits / (best * other), labels)


def test_probabilities_follow_the_fitted_temperature_and_labels_do_not():
    robust, images = ht.ITS(TinyNet(), samples=5), tiny_images(6)
    plain = robust.search(images)
    robust.report = {"temperature": 2.5}
    warm = robust.search(images)
    assert_close(warm.probabilities, (plain.logits / 2.5).softmax(1))
    assert torch.equal(warm.labels, plain.labels)
    assert torch.equal(warm.logits, plain.logits)


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ShapeError, match=r"labels \(n,\)"):
        fit_temperature(torch.zeros(3, 2), torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize("count", [8, 80, 800])
def test_few_answers_without_a_mistake_are_no_certainty(count):
    labels = torch.arange(count) % 3
    logits = 4 * torch.nn.functional.one_hot(labels, 3).double()
    temperature = fit_temperature(logits, labels)
    doubt = 1 - float((logits / temperature).softmax(1).amax(1).mean())
    assert 0.02 / count < doubt < 2 / count


def test_classes_that_the_model_rules_out_do_not_make_it_certain():
    labels = torch.arange(60) % 3
    logits = 2 * torch.nn.functional.one_hot(labels, 3).double() + torch.randn(
        60, 3, generator=torch.Generator().manual_seed(0)
    )
    ruled_out = torch.cat([logits, torch.full((60, 1), -torch.inf)], dim=1)
    assert fit_temperature(ruled_out, labels) == pytest.approx(fit_temperature(logits, labels), rel=1e-6)

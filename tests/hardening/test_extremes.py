"""Numbers and sizes at the edge, eight threads at once, and the same result however the work is cut up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headtilt as ht
from hardening.faults import network, pictures
from tests.toys import its

torch.set_num_threads(1)
PLANS = [{"search": "tree", "samples": 5}, {"search": "joint", "budget": 18}, {"search": "anneal", "budget": 10}]
LEVELS = [ht.rotation(), ht.scale(0.2)]


def plan_name(options: dict) -> str:
    return options["search"]


def linear(classes: int, side: int = 8, gain: float = 1.0) -> nn.Module:
    layer = nn.Linear(side * side, classes)
    with torch.no_grad():
        numbers = torch.arange(layer.weight.numel(), dtype=torch.float64)
        layer.weight.copy_((torch.sin(2.399963 * numbers) * gain).reshape(layer.weight.shape))
        layer.bias.zero_()
    return nn.Sequential(nn.Flatten(), layer)


def check(result: ht.SearchResult, count: int, classes: int) -> None:
    """Assert what holds of every result: finite numbers of the right shapes."""
    assert result.logits.shape == (count, classes)
    assert bool(result.logits.isfinite().all())
    assert bool(result.pose.isfinite().all())
    assert bool((result.views >= 1).all())


@pytest.mark.parametrize("options", PLANS, ids=plan_name)
@pytest.mark.parametrize("confidence", ["energy", "bayesian"])
@pytest.mark.parametrize("gain", [1e4, 1e-6])
def test_logits_of_ten_thousand_and_of_next_to_nothing_give_finite_answers(options, confidence, gain):
    model, images = linear(4, gain=gain), pictures(3)
    largest = float(model(images).detach().abs().max())
    assert largest > 1e4 if gain > 1 else largest < 1e-3
    check(its(model, LEVELS, confidence=confidence, **options).search(images), 3, 4)


@pytest.mark.parametrize("options", PLANS, ids=plan_name)
@pytest.mark.parametrize("value", [-1e4, 0.0, 1e4])
def test_logits_that_never_change_keep_the_bare_answer(options, value):
    def constant(images):
        return torch.full((len(images), 5), value)

    result = its(constant, LEVELS, **options).search(pictures(3))
    check(result, 3, 5)
    assert result.labels.tolist() == [0, 0, 0]
    assert_close(result.pose, torch.eye(3).expand(3, 3, 3).to(result.pose), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", PLANS, ids=plan_name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_models_of_other_precisions_are_searched_in_theirs_and_answer_finitely(options, dtype):
    model = linear(4).to(dtype)
    result = its(model, LEVELS, **options).search(pictures(3))
    check(result, 3, 4)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


@pytest.mark.parametrize("options", PLANS, ids=plan_name)
@pytest.mark.parametrize("classes", [1, 2, 10_000])
def test_one_class_and_ten_thousand_are_searched(options, classes):
    result = its(linear(classes), LEVELS, **options).search(pictures(2))
    check(result, 2, classes)
    assert result.labels.shape == (2,)


@pytest.mark.parametrize("side", [1, 2, 8])
def test_tiny_images_are_searched(side):
    images = torch.linspace(0, 1, 3 * side * side).reshape(3, 1, side, side)
    check(its(linear(4, side), LEVELS, samples=5).search(images), 3, 4)


def test_an_image_of_four_thousand_pixels_a_side_is_searched():
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(8), linear(3))
    image = torch.linspace(0, 1, 4000).expand(1, 1, 4000, 4000)
    result = its(pooled, samples=3, chunk=1).search(image)
    check(result, 1, 3)
    assert result.canonical().shape == (1, 1, 4000, 4000)


def test_one_wrapper_used_from_eight_threads_at_once_gives_the_results_of_one():
    model = network()
    robust = its(model, LEVELS, samples=5, mc_passes=3, chunk=16)
    batches = [pictures(24)[start : start + 3] for start in range(0, 24, 3)] * 3
    alone = [its(network(), LEVELS, samples=5, mc_passes=3, chunk=16).search(batch) for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(robust.search, batches))
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one.logits, other.logits)
        assert torch.equal(one.pose, other.pose)
    assert model.training
    assert not model.norm.training


@pytest.mark.parametrize("options", PLANS, ids=plan_name)
@pytest.mark.parametrize("chunk", [1, 3, 7, 64, None])
def test_the_same_seed_gives_the_same_result_for_any_chunk(options, chunk):
    whole = its(network(), LEVELS, seed=3, chunk=1000, **options).search(pictures(5))
    cut = its(network(), LEVELS, seed=3, chunk=chunk, **options).search(pictures(5))
    assert torch.equal(cut.labels, whole.labels)
    assert_close(cut.logits, whole.logits, rtol=1e-5, atol=1e-5)
    assert_close(cut.pose, whole.pose, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", PLANS, ids=plan_name)
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_the_same_seed_gives_the_same_result_however_a_batch_is_split(options, cut):
    robust = its(network(), LEVELS, seed=3, **options)
    whole = robust.search(pictures(5))
    parts = [robust.search(part) for part in pictures(5).split(cut)]
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
    assert_close(torch.cat([part.logits for part in parts]), whole.logits, rtol=1e-5, atol=1e-5)
    assert_close(torch.cat([part.pose for part in parts]), whole.pose, rtol=1e-5, atol=1e-5)


def test_an_exported_search_answers_as_the_wrapper_does(tmp_path):
    robust = its(linear(4), LEVELS, search="joint", budget=18, gate=None)
    robust.export(tmp_path / "search.pt2", (1, 8, 8))
    program = torch.export.load(tmp_path / "search.pt2").module()
    logits, pose, gated = program(pictures(5))
    result = robust.search(pictures(5))
    assert_close(logits, result.logits, rtol=1e-4, atol=1e-4)
    assert_close(pose, result.pose.to(pose), rtol=1e-4, atol=1e-4)
    assert not bool(gated.any())

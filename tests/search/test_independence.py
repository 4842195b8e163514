"""What a search must not depend on: chunks, blocks, the batch and its order, and what was searched before."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import headtilt as ht
from headtilt.result import concatenate
from headtilt.search import run as blocks
from tests.toys import TinyNet, same, tiny_images, ungated

LEVELS = [ht.rotation(), ht.scale(0.25)]


@pytest.mark.parametrize("passes", [1, 3])
@settings(max_examples=8)
@given(chunk=st.integers(1, 60))
def test_the_search_does_not_depend_on_the_chunk_size(passes, chunk):
    net, images = TinyNet(), tiny_images(3)
    options = {"levels": LEVELS, "samples": 5, "mc_passes": passes}
    same(ungated(net, chunk=chunk, **options).search(images), ungated(net, **options).search(images))


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("traversal", ["greedy", "boltzmann"])
@settings(max_examples=8)
@given(cuts=st.sets(st.integers(1, 5), max_size=3))
def test_the_search_does_not_depend_on_how_a_batch_is_split(passes, traversal, cuts):
    images = tiny_images(6)
    robust = ungated(TinyNet(), LEVELS, samples=5, mc_passes=passes, traversal=traversal)
    edges = [0, *sorted(cuts), 6]
    parts = [robust.search(images[a:b]) for a, b in pairwise(edges)]
    same(concatenate(parts), robust.search(images))


@settings(max_examples=8)
@given(order=st.permutations(range(5)))
def test_the_search_does_not_depend_on_the_order_of_the_images(order):
    images = tiny_images(5)
    robust = ungated(TinyNet(), LEVELS, samples=5, mc_passes=3)
    whole, shuffled = robust.search(images), robust.search(images[list(order)])
    assert torch.equal(shuffled.labels, whole.labels[list(order)])
    assert_close(shuffled.pose, whole.pose[list(order)], rtol=0, atol=1e-5)


@pytest.mark.parametrize("elements", [1, 200, 300])
@pytest.mark.parametrize(
    "options", [{}, {"mc_passes": 3}, {"traversal": "boltzmann", "seed": 3}, {"readout": "marginal"}], ids=str
)
def test_large_batches_are_searched_in_blocks_with_the_same_result(net, images, monkeypatch, elements, options):
    robust = ungated(net, LEVELS, samples=5, **options)
    whole = robust.search(images)
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", {"cpu": elements})
    sizes = [len(block) for block in robust._blocks(images, list)]
    assert sum(sizes) == 5
    assert len(sizes) > 1
    result = robust.search(images)
    same(result, whole)
    assert len(result) == 5
    assert torch.equal(result.images, images)
    assert [level.confidence.shape for level in result.trace] == [level.confidence.shape for level in whole.trace]


@pytest.mark.parametrize("device_bears", [2**19, 2**24])
def test_blocks_are_as_small_as_the_chunks_that_were_asked_for(net, monkeypatch, device_bears):
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", {"cpu": device_bears})
    images = tiny_images(1)[:1].repeat(300, 1, 1, 1)
    for chunk, expected in ((3, [12] * 25), (30, [128, 128, 44]), (None, [300])):
        robust = ungated(net, LEVELS, samples=5, chunk=chunk)  # 15 views at a level
        assert [len(block) for block in robust._blocks(images, list)] == expected


class LeavesEarly:
    """A gate that lets confident images go before the search, and keeps nothing else."""

    def __init__(self, threshold):
        self.threshold = threshold

    def leaves_early(self, root):
        return root.log_probs.amax(1) > self.threshold

    def keeps(self, bare, found, answer):
        return torch.zeros_like(bare.labels, dtype=torch.bool)


def test_blocks_of_which_all_images_leave_early_join_the_others(net, images, monkeypatch):
    with torch.no_grad():
        threshold = net(images).log_softmax(1).amax(1).median()
    robust = ungated(net, samples=5, gate=LeavesEarly(threshold))
    whole = robust.search(images)
    assert int((whole.views == 1).sum()) == 2
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", {"cpu": 1})
    result = robust.search(images)
    assert torch.equal(result.views, whole.views)
    assert_close(result.logits, whole.logits)
    assert_close(result.pose, whole.pose)
    assert torch.equal(result.hypotheses.active, whole.hypotheses.active)
    assert_close(result.trace[0].confidence, whole.trace[0].confidence, equal_nan=True)
    gone = (whole.views == 1).nonzero()[:, 0]
    assert bool(result.trace[0].confidence[gone].isnan().all())
    assert result.trace[0].chosen[gone].unique().tolist() == [-1]
    assert not bool(result.trace[0].active[gone].any())


@pytest.mark.parametrize("options", [{"samples": 5}, {"search": "joint", "budget": 9}], ids=["tree", "joint"])
def test_a_batch_that_leaves_early_as_a_whole_has_an_empty_trace_and_joins_any_other(net, images, options):
    everybody = ungated(net, hypotheses=2, gate=LeavesEarly(-math.inf), **options).search(images)
    assert everybody.views.tolist() == [1] * 5
    assert everybody.trace == ()
    assert everybody.hypotheses.active.tolist() == [[True, False]] * 5
    assert_close(everybody.logits, net(images).detach())
    nobody = ungated(net, hypotheses=2, features="auto", **options).search(images)
    for parts in ([everybody, nobody], [nobody, everybody], [everybody, everybody]):
        joined = concatenate(parts)
        assert_close(joined.logits, torch.cat([part.logits for part in parts]))
        assert joined.hypotheses.pose.shape == (10, 2, 3, 3)
        assert len(joined.trace) == max(len(part.trace) for part in parts)


def test_hypotheses_with_and_without_features_join_without_them(net, images):
    robust = ungated(net, samples=5)
    robust.predictor = robust.predictor.with_features("auto")
    with_features, without = robust.search(images), ungated(net, samples=5).search(images)
    assert with_features.hypotheses.evidence.features is not None
    for parts in ([with_features, without], [without, with_features]):
        assert concatenate(parts).hypotheses.evidence.features is None
    assert concatenate([with_features] * 2).hypotheses.evidence.features.shape[:2] == (10, 3)


def test_searching_twice_gives_the_same_and_changes_nothing(net, images):
    robust = ungated(net, LEVELS, samples=5, mc_passes=3, traversal="boltzmann")
    before = images.clone()
    same(robust.search(images), robust.search(images))
    assert torch.equal(images, before)


def test_the_model_sees_each_view_once(net, images):
    rows = []
    robust = ungated(net, LEVELS, samples=5, chunk=7)
    robust.search(images)  # tries two views in both layouts
    net.conv.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    result = robust.search(images)
    assert sum(rows) == int(result.views.sum())
    assert max(rows) <= 7

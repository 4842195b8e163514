"""The wrapper stands where the classifier stood."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import headtilt as ht
from headtilt import blocks
from headtilt.result import SearchResult, concatenate

from .toys import TinyNet, fingerprint, tiny_images, ungated

LEVELS = [ht.rotation(), ht.scale(0.25)]


def same(first: SearchResult, second: SearchResult) -> None:
    """Assert that two results tell the same story."""
    assert torch.equal(first.labels, second.labels)
    assert torch.equal(first.views, second.views)
    assert torch.equal(first.hypotheses.active, second.hypotheses.active)
    active = first.hypotheses.active
    assert_close(first.pose, second.pose, rtol=0, atol=1e-5)
    assert_close(first.logits, second.logits, rtol=1e-4, atol=1e-4)
    assert_close(first.hypotheses.pose[active], second.hypotheses.pose[active], rtol=0, atol=1e-5)
    assert_close(first.hypotheses.confidence[active], second.hypotheses.confidence[active], rtol=1e-3, atol=1e-2)
    assert len(first.trace) == len(second.trace)
    for one, other in zip(first.trace, second.trace, strict=True):
        assert torch.equal(one.chosen, other.chosen)
        assert torch.equal(one.labels[one.active], other.labels[one.active])


# --- a module like any other ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readout", ["incumbent", "marginal"])
@pytest.mark.parametrize("passes", [1, 3])
def test_calling_the_wrapper_gives_the_logits_of_the_search(net, images, readout, passes):
    robust = ungated(net, LEVELS, samples=5, readout=readout, mc_passes=passes)
    logits = robust(images)
    assert logits.shape == net(images).shape
    assert logits.dtype == torch.float32
    assert torch.equal(logits, robust.search(images).logits)


@pytest.mark.parametrize("options", [{"mc_passes": 3}, {"mc_sampled": True}], ids=str)
def test_dropout_is_sampled_only_where_asked_for_and_by_the_seed(net, images, options):
    plain, sampled, again, other = (
        ungated(net, samples=1, confidence="energy", **more)(images)
        for more in ({}, options, options, {**options, "seed": 1})
    )
    with torch.no_grad():
        assert_close(plain, net(images))
    assert float((sampled - plain).abs().max()) > 0.1
    assert torch.equal(again, sampled)
    assert float((other - sampled).abs().max()) > 0.1


def test_the_marginals_pose_is_one_that_shows_its_label(net, images):
    result = ungated(net, LEVELS, samples=5, readout="marginal").search(images)
    beam = result.hypotheses
    for image in range(5):
        shown = [beam.pose[image, slot] for slot in range(3) if beam.active[image, slot]]
        labels = [int(beam.labels[image, slot]) for slot in range(3) if beam.active[image, slot]]
        answer = int(result.labels[image])
        place = labels.index(answer) if answer in labels else 0
        assert torch.equal(result.pose[image], shown[place])
    assert any(int(result.labels[image]) != int(beam.labels[image, 0]) for image in range(5))


def test_the_incumbent_is_what_the_model_says_of_the_canonical_image(net, images):
    result = ungated(net, LEVELS, samples=5).search(images)
    with torch.no_grad():
        assert_close(result.logits, net(result.canonical()), rtol=1e-3, atol=1e-3)


def test_the_marginal_sums_the_evidence_over_every_view(net, images):
    result = ungated(net, [ht.rotation()], samples=6, readout="marginal").search(images)
    views = torch.stack([ht.warp(images, ht.rotation().orbit(6)[k].expand(5, 3, 3)) for k in range(6)])
    with torch.no_grad():
        every = torch.stack([net(view) for view in views])
    assert_close(result.logits, every.logsumexp(0), rtol=1e-4, atol=1e-3)


def test_the_default_search_is_a_full_turn_of_seventeen_under_group_confidence(net, images):
    default = ungated(net).search(images)
    spelt_out = ungated(net, [ht.rotation()], samples=17, hypotheses=3, confidence="group").search(images)
    same(default, spelt_out)
    assert [level.group for level in default.trace] == [ht.rotation()]
    assert default.views.tolist() == [17] * 5


@pytest.mark.parametrize("training", [True, False])
def test_train_and_eval_reach_the_model_but_change_no_answer(net, images, training):
    robust = ungated(net, LEVELS, samples=5)
    before = robust.eval()(images)
    robust.train(training)
    assert net.training is training
    assert net.dropout.training is training
    assert torch.equal(robust(images), before)
    assert net.training is training


def test_the_state_dict_is_the_models_under_its_name(net, images):
    robust = ungated(net, LEVELS, samples=5)
    assert robust.state_dict().keys() == {f"model.{name}" for name in net.state_dict()}
    other = ungated(TinyNet(), LEVELS, samples=5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1)
    assert not torch.equal(other(images), robust(images))
    other.load_state_dict(robust.state_dict())
    assert torch.equal(other(images), robust(images))


def test_parameters_are_the_models(net):
    assert {id(p) for p in ungated(net).parameters()} == {id(p) for p in net.parameters()}


def test_moving_the_wrapper_to_another_dtype_moves_the_model(net, images):
    robust = ungated(net, LEVELS, samples=5)
    single = robust(images)
    double = robust.to(torch.float64)(images)
    assert net.classifier.weight.dtype == torch.float64
    assert double.dtype == torch.float64
    assert_close(double.float(), single, rtol=1e-3, atol=1e-3)
    assert robust.search(images).pose.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_are_searched_with_poses_in_single_precision(net, images, dtype):
    reference = ungated(net, samples=6, confidence="energy").search(images)
    result = ungated(copy.deepcopy(net).to(dtype), samples=6, confidence="energy").search(images)
    assert result.logits.dtype == result.pose.dtype == torch.float32
    agree = (result.pose - reference.pose).flatten(1).norm(dim=1) < 1e-4
    assert int(agree.sum()) >= 3
    assert_close(result.logits[agree], reference.logits[agree], rtol=0.1, atol=0.5)


def test_half_precision_images_are_as_good_as_any(net, images):
    robust = ungated(net, samples=5, confidence="energy")
    low, full = robust.search(images.half()), robust.search(images)
    assert low.logits.dtype == torch.float32
    assert torch.equal(low.labels, full.labels)
    assert_close(low.logits, full.logits, rtol=0, atol=0.05)
    assert low.canonical().dtype == torch.float16


def test_autocast_is_an_option_of_the_wrapper(net, images):
    seen = set()
    net.classifier.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    logits = ungated(net, samples=5, autocast=torch.bfloat16)(images)
    assert seen == {torch.bfloat16}
    assert logits.dtype == torch.float32


def test_a_deep_copy_is_a_wrapper_of_its_own(net, images):
    robust = ungated(net, LEVELS, samples=5, mc_passes=3)
    before = robust(images)
    other = copy.deepcopy(robust)
    assert other.model is not net
    assert torch.equal(other(images), before)
    with torch.no_grad():
        other.model.classifier.weight.mul_(-1)
    assert not torch.equal(other(images), before)
    assert torch.equal(robust(images), before)


def test_a_model_that_is_replaced_is_the_one_that_is_asked(net, images):
    robust = ungated(net, samples=5, mc_passes=3)
    before = robust(images)
    other = TinyNet(rate=0.25)
    with torch.no_grad():
        other.classifier.weight.mul_(-1)
    robust.model = other
    assert torch.equal(robust(images), ungated(other, samples=5, mc_passes=3)(images))
    assert robust.predictor.model is other
    robust.model = net
    assert torch.equal(robust(images), before)
    robust.model = TinyNet(rate=0.0)
    with pytest.raises(ht.OptionError, match="dropout layer"):
        robust(images)
    robust.model = None
    with pytest.raises(ht.ModelError, match=r"model must be an nn\.Module or a callable"):
        robust(images)


def test_a_wrapper_may_be_wrapped_and_put_into_a_sequence(net, images):
    inner = ungated(net, [ht.rotation()], samples=4, confidence="energy")
    stacked = nn.Sequential(nn.Identity(), inner)
    assert torch.equal(stacked(images), inner(images))
    outer = ungated(stacked, [ht.reflection()])
    before = fingerprint(net)
    result = outer.search(images)
    assert result.views.tolist() == [4] * 5
    assert fingerprint(net) == before


def test_the_repr_names_the_levels(net):
    assert "rotation → scale" in repr(ungated(net, LEVELS))


def test_no_gradient_flows_and_none_is_recorded(net, images):
    logits = ungated(net, samples=5)(images.requires_grad_())
    assert not logits.requires_grad
    assert images.grad is None


# --- what a model may return ------------------------------------------------------------------------------------------


class Returning(nn.Module):
    def __init__(self, net, form):
        super().__init__()
        self.net, self.form = net, form

    def forward(self, images):
        return self.form(self.net(images))


@pytest.mark.parametrize(
    ("form", "options"),
    [
        (lambda logits: {"logits": logits, "loss": None}, {}),
        (lambda logits: {"scores": logits}, {"output_key": "scores"}),
        (lambda logits: SimpleNamespace(logits=logits), {}),
        (lambda logits: SimpleNamespace(scores=logits), {"output_key": "scores"}),
    ],
    ids=["dict", "dict with another key", "object", "object with another attribute"],
)
def test_models_may_return_a_dict_or_an_object(net, images, form, options):
    plain = ungated(net, samples=5).search(images)
    same(ungated(Returning(net, form), samples=5, **options).search(images), plain)


def test_a_plain_callable_will_do(net, images):
    plain = ungated(net, samples=5)
    called = ungated(lambda views: net(views), samples=5)
    same(called.search(images), plain.search(images))
    assert list(called.parameters()) == []
    assert called.state_dict() == {}


@pytest.mark.parametrize("classes", [1, 2])
def test_few_classes_are_no_problem(images, classes):
    result = ungated(TinyNet(classes=classes), LEVELS, samples=5, hypotheses=3).search(images)
    assert result.logits.shape == (5, classes)
    assert int(result.hypotheses.active.sum(1).max()) <= 2  # a single logit is no or yes


@pytest.mark.parametrize("size", [(12, 12), (9, 15), (15, 9), (1, 1)], ids=str)
@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_any_size_and_number_of_channels_are_searched(size, channels):
    images = tiny_images(2, *size, channels=channels)
    result = ungated(lambda views: views.flatten(2).mean(-1) @ torch.ones(channels, 4), samples=5).search(images)
    assert result.logits.shape == (2, 4)
    assert result.canonical().shape == images.shape


# --- independence -----------------------------------------------------------------------------------------------------


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
    sizes = [len(block) for block in robust._blocks(images)]
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
        assert [len(block) for block in robust._blocks(images)] == expected


class LeavesEarly:
    """A gate that lets confident images go before the search, and keeps nothing else."""

    def __init__(self, threshold):
        self.threshold = threshold

    def leaves_early(self, root):
        return root.log_probs.amax(1) > self.threshold

    def keeps(self, bare, root, found):
        return torch.zeros_like(root[:, 0], dtype=torch.bool)


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

"""The wrapper stands where the classifier stood."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headtilt as ht
from headtilt.calibration.gate import CautiousGate, Gate
from headtilt.errors import OptionError
from tests.toys import TinyNet, fingerprint, its, same, tiny_images, ungated

LEVELS = [ht.rotation(), ht.scale(0.25)]


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
    sharp = partial(ht.warp, interpolation="bicubic")
    result = ungated(net, [ht.rotation()], samples=6, readout="marginal", padding="zeros").search(images)
    views = torch.stack([sharp(images, ht.rotation().orbit(6)[k].expand(5, 3, 3)) for k in range(6)])
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


def test_the_state_of_another_kind_of_gate_is_refused_in_a_sentence(net):
    fitted, other = its(net, LEVELS, gate=Gate(margin=0.1)), its(net, LEVELS, gate=CautiousGate(margin=0.1))
    with pytest.raises((OptionError, RuntimeError), match="gate"):
        other.load_state_dict(fitted.state_dict())


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


@pytest.fixture
def in_double():
    """A session whose new tensors are in double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


PLANS = {
    "tree": {"search": ht.Tree(samples=5)},
    "Boltzmann": {"search": ht.Tree(samples=5, traversal="boltzmann")},
    "joint": {"search": ht.Joint(budget=9, rounds=1, hypotheses=1)},
    "finite": {"levels": [ht.quarter_turns()], "search": ht.Joint(budget=4)},
    "anneal": {"search": ht.Anneal(budget=9)},
    "dropout": {"mc_passes": 3},
    "batch": {"calibrator": "batch", "search": ht.Joint(budget=9)},
}


@pytest.mark.parametrize("name", PLANS)
def test_a_session_in_double_precision_finds_the_same(name, net, images, request):
    expected = ungated(net, **PLANS[name]).search(images)
    request.getfixturevalue("in_double")
    result = ungated(net, **PLANS[name]).search(images)
    assert result.pose.dtype == result.logits.dtype == torch.float32
    assert_close(result.logits, expected.logits)
    assert_close(result.pose, expected.pose)


@pytest.mark.parametrize("method", ["head", "balance"])
def test_a_fit_in_a_session_in_double_precision_gives_the_same_answers(method, net, images, request):
    def answers():
        recipe = ht.HeadRecipe(hidden=8, looks=1, views=6, epochs=0)  # training would magnify what is rounded
        robust = ht.ITS(net, search=ht.Joint(budget=8), readout="marginal")
        return robust.fit(tiny_images(60).float(), method=method, recipe=recipe, promise=None).search(images)

    expected = answers()
    request.getfixturevalue("in_double")
    result = answers()
    assert result.logits.dtype == torch.float32
    assert_close(result.logits, expected.logits, rtol=1e-3, atol=1e-3)
    assert_close(result.pose, expected.pose, rtol=1e-3, atol=1e-3)

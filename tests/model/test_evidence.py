"""What the classifier says of views: in any chunks and precision, with the features that were asked for."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import headtilt as ht
from headtilt.model.chunking import automatic_chunk
from headtilt.model.evidence import Evidence
from headtilt.model.outputs import tapped_module
from headtilt.model.predictor import Predictor
from headtilt.model.state import dropout_mask
from tests.toys import TinyNet, tiny_images

PASSES = 6


# --- Evidence ---------------------------------------------------------------------------------------------------------


def test_evidence_reads_energy_log_probabilities_and_labels_off_the_logits():
    evidence = Evidence(torch.tensor([[0.0, 1.0, 3.0], [2.0, -1.0, 0.5]], dtype=torch.float64))
    assert_close(evidence.energy, -evidence.logits.exp().sum(-1).log())
    assert_close(evidence.log_probs.exp().sum(-1), torch.ones(2, dtype=torch.float64))
    assert_close(evidence.log_probs, evidence.logits + evidence.energy[:, None])
    assert evidence.labels.tolist() == [2, 0]
    assert evidence.features is None


def test_views_that_are_picked_or_laid_out_anew_keep_what_was_worked_out_of_them():
    logits = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0))
    evidence = Evidence(logits)
    assert vars(evidence.at(0)).keys() == vars(Evidence(logits)).keys()
    assert evidence.energy.shape == evidence.labels.shape == (2, 3)
    rows, index = torch.tensor([[0], [1]]), torch.tensor([[2, 0], [1, 1]])
    for other in (evidence.at(rows, index), evidence.reshape(6), evidence.transpose(), evidence.as_orbit()):
        assert {"energy", "labels"} <= vars(other).keys()
        assert torch.equal(other.energy, Evidence(other.logits).energy)
        assert torch.equal(other.labels, Evidence(other.logits).labels)
    assert evidence.as_orbit().logits.shape == (2, 1, 3, 4)


# --- one deterministic pass -------------------------------------------------------------------------------------------


def test_without_dropout_passes_the_evidence_is_the_models_own_logits(net, images):
    with torch.no_grad():
        expected = net(images)
    assert_close(Predictor(net)(images).logits, expected)
    assert_close(Predictor(net.train())(images).logits, expected)


def test_views_show_each_image_under_its_pose(net, images):
    index, poses = torch.tensor([3, 0, 3]), ht.rotation().orbit(3)
    seen = Predictor(net).views(images, index, poses, padding="border", interpolation="nearest")
    with torch.no_grad():
        expected = net(ht.warp(images[index], poses, padding="border", interpolation="nearest"))
    assert_close(seen.logits, expected)


@settings(max_examples=25)
@given(chunk=st.integers(1, 14), passes=st.sampled_from([1, 2, 5]))
def test_results_do_not_depend_on_the_chunk_size(chunk, passes):
    net, images = TinyNet(), tiny_images(4)
    index, poses = torch.arange(12) % 4, ht.rotation().orbit(12)
    whole = Predictor(net, mc_passes=passes, chunk=100).views(images, index, poses)
    parts = Predictor(net, mc_passes=passes, chunk=chunk).views(images, index, poses)
    assert_close(parts.logits, whole.logits, rtol=1e-5, atol=1e-5)


@settings(max_examples=25)
@given(cut=st.integers(1, 6), passes=st.sampled_from([1, 3]))
def test_results_do_not_depend_on_how_a_batch_is_split(cut, passes):
    images = tiny_images(7)
    predictor = Predictor(TinyNet(), mc_passes=passes)
    whole = predictor(images).logits
    parts = torch.cat([predictor(images[:cut]).logits, predictor(images[cut:]).logits])
    assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("passes", [1, 4])
def test_the_model_never_sees_more_than_a_chunk(net, images, passes):
    rows = []
    net.conv.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    Predictor(net, chunk=2, mc_passes=passes)(images)
    assert max(rows) <= 2


def test_the_automatic_chunk_keeps_small_views_in_cache_and_never_starves():
    assert automatic_chunk(torch.zeros(1, 1, 28, 28)) == 2**18 // 784
    assert automatic_chunk(torch.zeros(1, 1, 4, 4)) == 512
    assert automatic_chunk(torch.zeros(1, 3, 1024, 1024)) == 8


# --- features ---------------------------------------------------------------------------------------------------------


def pooled(net, images):
    with torch.no_grad():
        return F.max_pool2d(F.gelu(net.conv(images)), 3).flatten(1)


def test_features_are_what_the_convolution_comes_to_and_the_inputs_of_the_last_two_linear_layers_joined(net, images):
    with torch.no_grad():
        expected = torch.cat([net.conv(images).mean((2, 3)), pooled(net, images), net.trunk(images)], dim=1)
    assert_close(Predictor(net, features="auto")(images).features, expected)
    assert_close(Predictor(net, features=("conv:out", "hidden", "classifier"), chunk=2)(images).features, expected)


def test_features_may_be_named(net, images):
    with torch.no_grad():
        assert_close(Predictor(net, features="classifier")(images).features, net.trunk(images))
    assert tapped_module(net, "classifier") is net.classifier
    assert tapped_module(net, "classifier:out") is net.classifier


@pytest.mark.parametrize("model", [nn.Flatten(), lambda views: views.flatten(1)], ids=["no linear layer", "callable"])
def test_automatic_features_of_a_model_that_has_none_are_none(model, images):
    assert Predictor(model, features="auto")(images).features is None


def test_features_of_a_named_layer_are_averaged_over_space(images):
    net = TinyNet(channels=2)
    pair = tiny_images(5, channels=2)
    assert_close(Predictor(net, features="conv")(pair).features, pair.flatten(2).mean(-1))


@pytest.mark.parametrize("batched", [True, False])
def test_features_behind_the_dropout_are_averaged_over_passes(net, images, batched):
    predictor = Predictor(net, features="classifier", mc_passes=PASSES)
    predictor.batched_passes = batched
    with torch.no_grad():
        masks = torch.stack([dropout_mask((16,), 0.5, (0, number, 0, 0)) for number in range(PASSES)])
        expected = net.trunk(images) * masks.mean(0)
    assert_close(predictor(images).features, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batched", [True, False, None])
def test_features_before_the_dropout_are_the_same_in_every_pass(net, images, batched):
    predictor = Predictor(net, features="hidden", mc_passes=PASSES)
    predictor.batched_passes = batched
    assert_close(predictor(images).features, pooled(net, images), rtol=1e-4, atol=1e-5)


def test_nobody_asked_for_features_nobody_gets_them(net, images):
    assert Predictor(net)(images).features is None


# --- devices and dtypes -----------------------------------------------------------------------------------------------


def test_views_come_to_the_model_in_its_own_dtype(net, images):
    single = Predictor(net)(images).logits
    double = Predictor(copy.deepcopy(net).double())(images).logits
    assert double.dtype == torch.float64
    assert_close(double.float(), single, rtol=1e-4, atol=1e-5)
    assert Predictor(net)(images.double()).logits.dtype == torch.float32


def test_a_model_without_parameters_computes_in_the_dtype_of_the_images(images):
    model = nn.Flatten()
    assert Predictor(model).device_and_dtype(images.double()) == (torch.device("cpu"), torch.float64)
    assert_close(Predictor(model)(images.double()).logits, images.double().flatten(1))


def test_reduced_precision_logits_come_back_in_single_precision(images):
    net = TinyNet()
    reference = Predictor(net)(images).logits
    for dtype in (torch.bfloat16, torch.float16):
        low = Predictor(copy.deepcopy(net).to(dtype))(images).logits
        assert low.dtype == torch.float32
        assert_close(low, reference, rtol=0, atol=0.15)
        assert float((low - reference).abs().max()) > 0


def test_autocast_reaches_the_model(net, images):
    seen = []
    net.classifier.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    low = Predictor(net, autocast=torch.bfloat16)(images).logits
    assert set(seen) == {torch.bfloat16}
    assert low.dtype == torch.float32
    assert_close(low, Predictor(net)(images).logits, rtol=0, atol=0.1)
    assert not torch.is_autocast_enabled("cpu")


def test_evidence_is_frozen():
    with pytest.raises(AttributeError):
        Evidence(torch.zeros(1, 2)).logits = torch.ones(1, 2)
    assert replace(Evidence(torch.zeros(1, 2)), features=torch.ones(1, 3)).features.shape == (1, 3)

"""One door: which specs open it, what comes back, and what is said where nothing does."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from headtilt.errors import DataError, HeadtiltError, ModelError, OptionError
from headtilt.paper import zoo
from headtilt.sources import Adapted
from headtilt.sources.registry import load, outputs_for


def adapted(labels):
    return Adapted(nn.Identity(), labels, 32, 32, "zeros", "net")


def test_a_network_of_the_zoo_comes_with_its_size():
    found = load("zoo:digits:1")
    assert (found.size, found.resize, found.padding, found.name, found.labels) == (28, 28, "auto", "digits:1", None)
    images = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found.model(images), zoo.load("digits:1")(images))


def test_a_module_says_by_attributes_what_it_sees(call, photographs):
    before = list(sys.path)
    found = load("python:colournet:make_model")
    assert sys.path == before
    assert (found.size, found.labels, found.padding) == (24, ("Red", "green", "blue"), "auto")
    assert not found.model.training
    assert load("python:colournet:make_model", size=40).size == 40


def test_a_module_without_attributes_sees_squares_of_32(call, photographs):
    assert load("python:colournet:make_two").size == 32
    assert load("python:colournet:make_two").labels is None


def test_an_adapted_comes_as_it_is(call, photographs):
    found = load("python:colournet:make_adapted")
    assert (found.size, found.resize, found.padding, found.name) == (20, 24, "reflection", "colours")


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        ("magic:net", OptionError, "hf:NAME"),
        ("resnet", OptionError, "python:MODULE:FUNCTION"),
        ("zoo:", OptionError, "zoo:NAME"),
        ("zoo:nosuch", OptionError, "a zoo network is one of"),
        ("python:colournet", OptionError, "python:MODULE:FUNCTION"),
        ("python:nosuchmodule:make", OptionError, "nosuchmodule could not be imported"),
        ("python:colournet:nosuch", OptionError, "no function 'nosuch'"),
        ("python:colournet:make_nothing", ModelError, "must return an nn.Module or an Adapted; got int"),
        ("python:colournet:make_trouble", ModelError, "RuntimeError: the weights are elsewhere"),
    ],
)
def test_what_cannot_be_loaded_says_why(call, photographs, spec, error, said):
    before = list(sys.path)
    with pytest.raises(error, match=said.replace("[", r"\[")):
        load(spec)
    assert sys.path == before


def test_a_module_that_breaks_on_import_is_no_traceback(call, tmp_path):
    (tmp_path / "brokennet.py").write_text("1 / 0")
    with pytest.raises(HeadtiltError, match="brokennet raised ZeroDivisionError"):
        load("python:brokennet:make")


def test_outputs_are_matched_by_name_whatever_the_order_case_and_synonyms():
    model = adapted(("tench, Tinca tinca", "Goldfish", "great white shark"))
    assert outputs_for(model, ("goldfish", "tench")) == (1, 0)
    assert outputs_for(model, ("great white shark", "tinca tinca", "goldfish")) == (2, 0, 1)


def test_outputs_are_matched_by_place_where_names_differ_and_numbers_agree():
    assert outputs_for(adapted(("tench", "goldfish")), ("n01440764", "n01443537")) is None
    assert outputs_for(adapted(("a", "b")), ("a", "b")) is None
    assert outputs_for(adapted(None), ("x", "y", "z")) is None


def test_outputs_that_cannot_be_matched_are_an_error():
    with pytest.raises(DataError, match="2 classes and net has 3, and class 'wolf'"):
        outputs_for(adapted(("cat", "dog", "fox")), ("cat", "wolf"))

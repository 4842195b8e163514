"""Models that return no logits, or raise, are told so, and never suffer for it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import headtilt as ht
from headtilt.model.predictor import Predictor
from tests.toys import TinyNet, fingerprint, its, ready, stable_id, tiny_images

images = tiny_images(2)


@pytest.mark.parametrize("model", [None, 3, "resnet18", [nn.Flatten()]], ids=stable_id)
def test_models_that_cannot_be_called_are_refused(model):
    with pytest.raises(ht.ModelError, match=r"model must be an nn\.Module or a callable that returns logits; got"):
        ht.ITS(model)


class Answering(nn.Module):
    """A model that returns whatever it is told to, made from proper logits."""

    def __init__(self, form):
        super().__init__()
        self.net, self.form = TinyNet(), form

    def forward(self, views):
        return self.form(self.net(views))


BAD_ANSWERS = {
    "nothing": (lambda logits: None, r"model must return logits as a tensor.*'logits'; got <class 'NoneType'>"),
    "a tuple": (lambda logits: (logits, logits), r"model must return logits as a tensor.*got <class 'tuple'>"),
    "an array": (lambda logits: logits.numpy(), r"model must return logits as a tensor.*got <class 'numpy.ndarray'>"),
    "a dict without logits": (
        lambda logits: {"scores": logits, 1: 2},
        r"dict without 'logits'; it has \['1', 'scores'\]\. Set output_key",
    ),
    "a dict of None": (lambda logits: {"logits": None}, r"model must return logits as a tensor"),
    "an object without logits": (
        lambda logits: SimpleNamespace(scores=logits),
        r"model must return logits as a tensor",
    ),
    "one axis": (lambda logits: logits[:, 0], r"floating-point logits \(2, Y\); got torch.float32 \(2,\)"),
    "three axes": (lambda logits: logits[:, None], r"floating-point logits \(2, Y\); got torch.float32 \(2, 1, 5\)"),
    "maps": (lambda logits: logits[:, :, None, None], r"floating-point logits \(2, Y\)"),
    "too few rows": (lambda logits: logits[:1], r"floating-point logits \(2, Y\); got torch.float32 \(1, 5\)"),
    "a mean over the batch": (lambda logits: logits.mean(0), r"floating-point logits \(2, Y\)"),
    "labels": (lambda logits: logits.argmax(1), r"floating-point logits \(2, Y\); got torch.int64"),
    "whole numbers": (lambda logits: logits.long(), r"floating-point logits \(2, Y\); got torch.int64 \(2, 5\)"),
    "NaN": (lambda logits: logits * math.nan, r"model returned NaN logits\. Check its weights and the range"),
    "one NaN": (lambda logits: logits.index_fill(0, torch.tensor([1]), math.nan), r"model returned NaN logits"),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("form", "message"), BAD_ANSWERS.values(), ids=BAD_ANSWERS.keys())
def test_answers_that_are_no_logits_are_refused_and_the_model_is_unharmed(form, message, training):
    model = Answering(form).train(training)
    before = fingerprint(model)
    with pytest.raises(ht.ModelError, match=message):
        its(model, samples=5)(images)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    "form",
    [lambda logits: logits[:, :0], lambda logits: logits - math.inf, lambda logits: logits + math.inf],
    ids=["no class", "minus infinity everywhere", "plus infinity"],
)
def test_answers_without_any_information_are_refused(form):
    with pytest.raises(ht.ModelError, match=r"\(2, Y\); got .*\(2, 0\)|model returned infinite logits"):
        its(Answering(form), [ht.rotation(), ht.scale()], samples=5, confidence="energy")(images)


def test_a_confidence_that_returns_nonsense_is_told_so_on_a_lattice_too():
    robust = ready(search="joint", budget=6, confidence=lambda evidence, orbit: evidence.logits)
    with pytest.raises(ht.OptionError, match=r"confidence must return a tensor \(B, K, N\) = \(2, 1, 6\)"):
        robust(tiny_images(2))


def test_a_class_ruled_out_by_minus_infinity_is_fine():
    def form(logits):
        return logits.index_fill(1, torch.tensor([2]), -math.inf)

    result = its(Answering(form), samples=5).search(images)
    assert bool((result.labels != 2).all())
    assert bool(result.probabilities.isfinite().all())


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), ValueError("bad"), KeyError("missing"), ZeroDivisionError()]
)
def test_a_model_that_raises_is_a_model_error_that_keeps_the_cause(error, passes):
    class Raising(TinyNet):
        def forward(self, views):
            super().forward(views)
            raise error

    model = Raising().train()
    before = fingerprint(model)
    # Where memory runs out, less is tried first.
    views = 1 if "memory" in str(error) else 2
    with pytest.raises(ht.ModelError, match=rf"model raised on views of shape \({views}, 1, 12, 12\)") as caught:
        its(model, samples=5, mc_passes=passes)(images)
    assert caught.value.__cause__ is error
    assert fingerprint(model) == before


def test_a_feature_layer_that_runs_on_other_rows_is_refused():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.last = nn.Linear(36, 4), nn.Linear(4, 3)

        def forward(self, views):
            patches = views.reshape(-1, 36)
            return self.last(self.embed(patches).reshape(len(views), 4, 4).mean(1))

    with pytest.raises(ht.ModelError, match=r"feature layer ran on 8 rows for 2 views\. Name another module"):
        Predictor(Patches(), features="embed")(images)

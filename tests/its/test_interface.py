"""What the wrapper takes and gives: plans, errors, results, scikit-learn, gradients, compilation."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import headtilt as ht
from headtilt.calibration.balance import Balance
from tests.toys import TinyNet, tiny_images

# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search": "joint", "samples": 99}, r"no option 'samples'.*search=Tree\(samples=…\)"),
        ({"search": "tree", "budget": 5}, r"no option 'budget'.*Joint\(budget=…\) or Anneal\(budget=…\)"),
        ({"colour": 3}, r"no option 'colour'\. See help"),
        ({"search": 7}, r"search must be Tree\(…\), Joint\(…\), Anneal\(…\)"),
        ({"search": "best"}, "search must be one of 'tree', 'joint', 'anneal'; got 'best'"),
        ({"search": ht.Joint((ht.rotation(),)), "levels": [ht.scale()]}, "levels must be given once"),
    ],
)
def test_an_option_that_the_search_does_not_use_is_an_error_that_names_it(options, message):
    with pytest.raises(ht.OptionError, match=message):
        ht.ITS(TinyNet(), **options)


def test_a_plan_takes_its_levels_from_the_wrapper_or_has_its_own():
    levels = (ht.rotation(), ht.scale())
    assert ht.ITS(TinyNet(), levels, search=ht.Joint(budget=9)).plan == ht.Joint(levels, budget=9)
    assert ht.ITS(TinyNet(), search=ht.Joint(levels, budget=9)).plan == ht.Joint(levels, budget=9)
    assert ht.ITS(TinyNet(), search="joint").plan == ht.Joint((ht.rotation(),))


def test_the_default_levels_are_the_same_everywhere():
    turn = [ht.rotation()]
    assert list(ht.ITS(TinyNet()).plan.levels) == ht.accurate()["levels"] == ht.fast()["levels"] == turn


# --- another wrapper --------------------------------------------------------------------------------------------------


def test_a_wrapper_with_another_gate_or_calibrator_is_one_call_away():
    robust = ht.ITS(TinyNet(), [ht.rotation(), ht.scale()], search=ht.Tree(samples=5), readout="marginal", gate=2.0)
    robust.model.eval()
    open_ = robust.but(gate=None)
    assert not robust.model.training
    assert (open_.gate, robust.gate.margin) == (None, 2.0)
    assert open_.model is robust.model
    assert (open_.plan, open_.readout) == (robust.plan, "marginal")
    images = tiny_images(3)
    balanced = robust.but(calibrator=Balance(torch.arange(5.0)), gate=None)
    assert not torch.equal(balanced(images), open_(images))
    assert torch.equal(balanced.but(calibrator=None)(images), open_(images))


def test_what_was_fitted_goes_with_it():
    images = tiny_images(60)
    robust = ht.ITS(TinyNet(), search=ht.Joint(budget=6)).fit(images, method="balance", promise=5.0)
    other = robust.but(readout="marginal")
    assert other.calibrator is robust.calibrator
    assert (other.gate, other.padding, other.report) == (robust.gate, robust.padding, robust.report)
    other.report["gate"]["margin"] = 99
    assert robust.report["gate"]["margin"] == robust.gate.margin, "what one is told is not told to the other"


def test_what_proposes_poses_of_some_levels_proposes_none_of_others():
    levels = [ht.rotation(), ht.scale(0.25)]
    robust = ht.ITS(TinyNet(), levels, search=ht.Joint(budget=4, lattice=8))
    robust.fit(tiny_images(60), recipe=ht.HeadRecipe(hidden=4, looks=1, views=4, epochs=0), promise=None)
    assert robust.report["proposes"]
    robust.but(search=ht.Joint(budget=3, lattice=8), gate=None).search(tiny_images(2))
    robust.but(search=ht.Joint(budget=6)).search(tiny_images(2))
    for change in ({"levels": [ht.rotation(), ht.shear_x(0.25)]}, {"search": ht.Joint(budget=4, lattice=9)}):
        with pytest.raises(ht.OptionError, match=r"proposes poses of another lattice.*Fit again"):
            robust.but(**change)


@pytest.mark.parametrize("search", [ht.Tree(samples=5), ht.Joint(budget=6), ht.Anneal(budget=6)])
def test_a_search_that_asks_for_no_proposals_is_saved_and_loaded_with_a_head_that_has_some(search, tmp_path):
    robust, images = ht.ITS(TinyNet(), search=ht.Joint(budget=4, lattice=8)), tiny_images(60)
    robust.fit(images, recipe=ht.HeadRecipe(hidden=4, looks=1, views=4, epochs=0), promise=None)
    other = robust.but(search=search)
    other.save(tmp_path / "robust")
    loaded = ht.ITS.load(tmp_path / "robust", robust.model)
    assert loaded.plan == other.plan
    assert torch.equal(loaded(images[:3]), other(images[:3]))
    again = other.but(search=ht.Joint(budget=4, lattice=8))
    assert torch.equal(again(images[:3]), robust(images[:3])), "proposals are there for whom they suit"


# --- logits and probabilities -----------------------------------------------------------------------------------------


def test_the_softmax_of_what_comes_back_is_what_the_result_calls_probabilities():
    robust, images = ht.ITS(TinyNet(), search=ht.Tree(samples=5)), tiny_images(4)
    assert torch.equal(robust(images).softmax(1), robust.search(images).probabilities)
    robust.fit(tiny_images(60), method="balance")
    assert torch.equal(robust(images).softmax(1), robust.search(images).probabilities)


def test_no_gradient_passes():
    images = tiny_images(2).requires_grad_()
    assert not ht.ITS(TinyNet(), search=ht.Tree(samples=3))(images).requires_grad


def test_it_may_be_compiled_around_and_inside():
    net, images = TinyNet().eval(), tiny_images(3)
    plain = ht.ITS(net, search=ht.Joint(budget=6))
    wanted = plain(images)
    around = torch.compile(ht.ITS(net, search=ht.Joint(budget=6)), backend="eager")
    inside = ht.ITS(torch.compile(net, backend="eager"), search=ht.Joint(budget=6))
    torch.testing.assert_close(around(images), wanted)
    torch.testing.assert_close(inside(images), wanted)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tree", "joint"])
def result(request) -> ht.SearchResult:
    search = {"tree": ht.Tree(samples=5), "joint": ht.Joint(budget=6)}[request.param]
    return ht.ITS(TinyNet(), [ht.rotation(), ht.scale()], search=search).search(tiny_images(12))


@pytest.mark.parametrize(
    ("index", "rows"),
    [(3, [3]), (-1, [11]), (slice(2, 5), [2, 3, 4]), ([4, 1], [4, 1]), (torch.arange(12) % 5 == 0, [0, 5, 10])],
    ids=str,
)
def test_a_result_is_indexed_and_sliced_as_the_batch_was(result, index, rows):
    part = result[index]
    assert len(part) == len(rows)
    assert torch.equal(part.logits, result.logits[rows])
    assert torch.equal(part.hypotheses.evidence.logits, result.hypotheses.evidence.logits[rows])
    for level, whole in zip(part.trace, result.trace, strict=True):
        assert torch.equal(level.confidence, whole.confidence[rows])
    assert torch.equal(part.canonical(), result.canonical()[rows])


def test_a_result_of_no_images_answers_with_nothing(result):
    none = result[torch.zeros(len(result), dtype=torch.bool)]
    assert len(none) == 0
    assert none.canonical().shape == (0, *result.images.shape[1:])
    assert none.topk(2)[0].shape == (0, 2)
    assert none.labels.shape == none.quarters.shape == (0,)
    assert none.invert(points=torch.zeros(0, 3, 2)).shape == (0, 3, 2)
    assert none.invert(boxes=torch.zeros(0, 3, 4)).shape == (0, 3, 4)
    assert none.invert(masks=torch.zeros(0, 3, 12, 12)).shape == (0, 3, 12, 12)
    assert repr(none) == repr(result[[]]) == "SearchResult of 0 images"


def test_a_result_can_be_walked_through(result):
    assert [int(one.labels[0]) for one in result] == result.labels.tolist()
    with pytest.raises(IndexError, match="one of the 12 images; got 12"):
        result[12]


def test_a_result_prints_on_one_screen_compares_by_itself_and_moves(result):
    lines = repr(result).splitlines()
    assert lines[0] == "SearchResult of 12 images"
    assert len(lines) == 12
    assert lines[-1].strip() == "… and 2 more"
    assert (result == result) is True
    assert (result == result[:12]) is False
    assert torch.equal(result.cpu().logits, result.to("cpu").logits)
    moved = result.to("meta")
    assert moved.pose.device.type == moved.trace[0].confidence.device.type == "meta"
    assert moved.hypotheses.evidence.logits.device.type == "meta"
    assert torch.equal(pickle.loads(pickle.dumps(result)).pose, result.pose)


# --- labels and scikit-learn ------------------------------------------------------------------------------------------


def test_labels_are_not_needed_and_it_says_so():
    images = tiny_images(60)
    with pytest.warns(UserWarning, match="fit needs no labels"):
        given = ht.ITS(TinyNet(), search=ht.Joint(budget=6)).fit(images, torch.zeros(60), method="bias")
    alone = ht.ITS(TinyNet(), search=ht.Joint(budget=6)).fit(images, method="bias")
    assert torch.equal(given.calibrator.bias, alone.calibrator.bias)
    with pytest.raises(ht.OptionError, match="held_out=others"):
        ht.ITS(TinyNet()).fit(images, images)


def test_the_score_is_the_share_of_right_labels():
    robust, images = ht.ITS(TinyNet(), search=ht.Tree(samples=5)), tiny_images(6)
    labels = robust.predict(images)
    assert robust.score(images, labels) == 1.0
    labels[:3] += 1
    assert robust.score(images.numpy(), torch.from_numpy(labels)) == 0.5
    with pytest.raises(ht.ShapeError, match=r"labels must be \(6,\)"):
        robust.score(images, labels[:5])


def test_scikit_learn_clones_it_and_takes_it_into_a_pipeline():
    base = pytest.importorskip("sklearn.base")
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    net, images = TinyNet().eval(), tiny_images(60)
    robust = ht.ITS(net, [ht.rotation()], search=ht.Joint(budget=6), gate=None)
    twin = base.clone(robust.fit(images, method="bias", promise=None))
    assert twin.calibrator is None
    assert twin.plan == robust.plan
    assert twin.model is not net
    assert all(map(torch.equal, twin.model.parameters(), net.parameters()))
    pipeline = make_pipeline(FunctionTransformer(torch.as_tensor), base.clone(robust))
    found = pipeline.fit(images.numpy()).predict(images.numpy())
    assert isinstance(found, np.ndarray)
    assert pipeline.score(images.numpy(), found) == 1.0


def test_parameters_can_be_read_and_set():
    robust = ht.ITS(TinyNet(), gate=2.0)
    assert robust.get_params()["gate"] == 2.0
    assert robust.set_params(gate=None, search="joint") is robust
    assert (robust.gate, robust.plan) == (None, ht.Joint((ht.rotation(),)))


def test_arrays_that_are_reversed_or_read_only_are_as_good_as_any():
    robust, images = ht.ITS(TinyNet(), search=ht.Joint(budget=4)), tiny_images(3).numpy()
    labels, probabilities = robust.predict(images), robust.predict_proba(images)
    assert robust.predict(images[::-1]).tolist() == labels[::-1].tolist()
    images.flags.writeable = False
    assert np.array_equal(robust.predict_proba(images), probabilities)
    assert robust.score(images[::-1], labels[::-1]) == 1.0

"""The whole search as one graph: what another runtime answers is what Python answers."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import headtilt as ht
from headtilt.calibration.distances import Prototypes
from headtilt.calibration.head import HeadRecipe
from headtilt.errors import OptionError
from headtilt.io.export import Graph
from headtilt.paper.data import load
from headtilt.paper.data.perturb import draw, perturb_dataset
from headtilt.search import tree
from tests.toys import TinyNet, fingerprint, its, tiny_images

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra headtilt[onnx]")
onnx = pytest.importorskip("onnx", reason="needs the extra headtilt[onnx]")


@pytest.fixture(scope="module")
def affine():
    """Test digits (60, 1, 28, 28), each turned, scaled and sheared by its own draw."""
    data = load("digits", "test", limit=60)
    return perturb_dataset(data, draw("affine", 60, seed=1)).images


def in_onnxruntime(path, images):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session, session.run(["logits", "pose", "gated"], {"images": images.numpy()})


@torch.no_grad()
def in_torch(path, images):
    return torch.export.load(path).module()(images)


def agreement(result, logits) -> float:
    return float((np.asarray(logits).argmax(1) == result.labels.numpy()).mean())


def test_a_joint_search_with_head_and_gate_answers_in_onnxruntime_as_in_python(digits_net, upright, affine, tmp_path):
    recipe = HeadRecipe(looks=1, views=8, epochs=8, hidden=32)
    robust = ht.ITS(digits_net, **ht.fast([ht.rotation()]), padding="zeros").fit(upright, recipe=recipe, promise=1.0)
    robust.gate = ht.Gate(0.0, exit_at=1.0)  # a fitted one may keep all answers or none, by how images happen to fall
    result = robust.search(affine)
    before = fingerprint(digits_net)
    robust.export(tmp_path / "robust.onnx", labels=list("012345678"))
    assert fingerprint(digits_net) == before
    session, (logits, pose, gated) = in_onnxruntime(tmp_path / "robust.onnx", affine)
    assert agreement(result, logits) == 1.0
    assert 0.05 < result.gated.float().mean() < 0.95
    assert (gated == result.gated.numpy()).all()
    assert_close(torch.from_numpy(pose), result.pose, atol=1e-5, rtol=0)
    for count in (1, 7):
        few = session.run(["logits"], {"images": affine[:count].numpy()})[0]
        assert_close(torch.from_numpy(few), result.logits[:count], atol=1e-3, rtol=1e-3)
    asked = {node.op_type for node in onnx.load(tmp_path / "robust.onnx").graph.node}
    assert "Sin" in asked, "the poses are computed in the graph"
    assert "Cos" not in asked, "onnxruntime 1.23 has none in double precision"
    known = session.get_modelmeta().custom_metadata_map
    assert json.loads(known["headtilt.labels"]) == list("012345678")
    assert known["headtilt.version"] == ht.__version__
    options = json.loads(known["headtilt.options"])
    assert options["search"] == "joint"
    assert options["calibrator"] == "orbithead"
    assert [path.name for path in tmp_path.iterdir()] == ["robust.onnx"]


def test_the_papers_tree_answers_in_onnxruntime_as_in_python(digits_net, affine, tmp_path):
    options = {"levels": [ht.rotation(), ht.shear_x(0.25)], "samples": 7, "hypotheses": 2, "padding": "zeros"}
    robust = its(digits_net, **{**ht.paper3(mc_passes=1), **options})
    result = robust.search(affine)
    robust.export(tmp_path / "paper.onnx", affine)
    _, (logits, pose, gated) = in_onnxruntime(tmp_path / "paper.onnx", affine)
    assert agreement(result, logits) == 1.0
    assert not gated.any()
    assert_close(torch.from_numpy(pose), result.pose, atol=1e-5, rtol=0)


def test_balance_refinement_and_flips_answer_in_torch_as_in_python(digits_net, upright, affine, tmp_path):
    options = {"search": "joint", "budget": 24, "hypotheses": 2, "rounds": 1, "readout": "marginal"}
    robust = its(digits_net, [ht.rotation(), ht.reflection()], **options)
    robust.fit(upright[:60], method="balance", promise=None)
    robust.export(tmp_path / "balance.pt2")
    logits, pose, _ = in_torch(tmp_path / "balance.pt2", affine)
    result = robust.search(affine)
    assert agreement(result, logits) == 1.0
    assert_close(pose, result.pose, atol=1e-5, rtol=0)


KINDS = {
    "marginal": {"confidence": "energy", "readout": "marginal", "padding": "reflection"},
    "support": {"confidence": "bayesian", "accept": "identity", "ranking": "support", "padding": 0.25},
    "gated": {"confidence": "energy", "gate": 0.5, "interpolation": "nearest"},
    "group": {"confidence": "group", "width": 0.4},
    "joint": {"search": "joint", "budget": 30, "rounds": 1},
}


@pytest.mark.parametrize("name", KINDS)
def test_the_search_without_branches_answers_as_the_one_with_them(name, monkeypatch):
    images = tiny_images(9)
    robust = its(TinyNet(), [ht.rotation(), ht.reflection()], samples=7, hypotheses=4, **{"gate": None, **KINDS[name]})
    result = robust.search(images)
    assert len(set(result.labels.tolist())) > 1
    monkeypatch.setattr(tree, "is_compiling", lambda: True)
    graph = Graph(
        robust.predictor, robust.plan, None, robust.gate, robust.readout, robust.padding, robust.interpolation
    )
    logits, pose, gated = graph.eval()(images)
    assert_close(logits, result.logits, atol=1e-4, rtol=1e-4)
    assert_close(pose, result.pose, atol=1e-5, rtol=0)
    assert torch.equal(gated, result.gated)


REFUSED = {
    "mc_passes": {"mc_passes": 2},
    "annealing": {"search": "anneal"},
    "Boltzmann": {"traversal": "boltzmann", "samples": 5},
    "callable": {"confidence": lambda evidence, orbit: -evidence.energy},
    "batch": {"calibrator": "batch"},
    "prototypes": {"calibrator": Prototypes(torch.zeros(5, 2), torch.tensor(1.0))},
    "autocast": {"autocast": torch.bfloat16},
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_no_graph_can_hold_is_refused_in_words(word, tmp_path):
    with pytest.raises(OptionError, match=rf"(?i){word}"):
        its(TinyNet(), **REFUSED[word]).export(tmp_path / "a.onnx", (1, 12, 12))
    assert list(tmp_path.iterdir()) == []


def test_a_plain_callable_an_unknown_ending_and_an_unknown_size_are_refused(tmp_path):
    with pytest.raises(OptionError, match=r"nn\.Module"):
        ht.ITS(lambda images: images.flatten(1)).export(tmp_path / "a.onnx", (1, 12, 12))
    robust = ht.ITS(TinyNet())
    with pytest.raises(OptionError, match=r"\.onnx or \.pt2"):
        robust.export(tmp_path / "a.bin", (1, 12, 12))
    with pytest.raises(OptionError, match="example"):
        robust.export(tmp_path / "a.pt2")
    with pytest.raises(OptionError, match="example"):
        robust.export(tmp_path / "a.pt2", (12, 12))


def test_an_export_says_nothing_of_the_name_that_it_writes_to_first(tmp_path, caplog):
    its(TinyNet(), samples=3).export(tmp_path / "a.pt2", (1, 12, 12))
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_export_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "a.pt2").write_text("old")

    def fails(*args, **options):
        raise RuntimeError("disk full")

    monkeypatch.setattr(torch.export, "save", fails)
    with pytest.raises(RuntimeError, match="disk full"):
        its(TinyNet(), samples=3).export(tmp_path / "a.pt2", (1, 12, 12))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.pt2", "old")]


@pytest.mark.parametrize("padding", [0.25, (0.1, 0.5, 0.9)])
def test_a_padding_of_numbers_is_exported(padding, tmp_path):
    robust = its(TinyNet(channels=3), search="joint", budget=6, padding=padding, gate=None)
    robust.export(tmp_path / "a.pt2", (3, 12, 12))
    images = tiny_images(4, channels=3)
    logits, pose, _ = torch.export.load(tmp_path / "a.pt2").module()(images)
    assert_close(logits, robust(images), atol=1e-4, rtol=1e-4)
    assert_close(pose, robust.search(images).pose)


def test_a_compiled_model_is_exported_with_the_features_that_its_head_reads(tmp_path):
    recipe = ht.HeadRecipe(hidden=4, looks=1, views=4, epochs=0)
    robust = ht.ITS(TinyNet(), search=ht.Joint(budget=4)).fit(tiny_images(60), recipe=recipe, promise=None)
    assert robust.calibrator.source == "features"
    robust.but(model=torch.compile(robust.model, backend="eager")).export(tmp_path / "a.pt2", (1, 12, 12))
    logits, _, _ = torch.export.load(tmp_path / "a.pt2").module()(tiny_images(4))
    assert_close(logits, robust(tiny_images(4)), atol=1e-4, rtol=1e-4)


def test_what_onnx_has_no_operators_for_is_refused_and_torch_takes_it(tmp_path):
    robust = its(TinyNet().bfloat16(), samples=3)
    with pytest.raises(OptionError, match=r"no bfloat16.*\.pt2"):
        robust.export(tmp_path / "a.onnx", (1, 12, 12))
    assert list(tmp_path.iterdir()) == []

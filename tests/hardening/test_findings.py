"""What the fuzzer, the old versions and the faults found, each as the smallest case that shows it."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import headtilt as ht
from headtilt.calibration.balance import Balance
from headtilt.calibration.head import HeadRecipe
from headtilt.errors import is_number
from headtilt.io import bundle
from headtilt.its import ITS
from headtilt.model.evidence import Evidence
from headtilt.paper import zoo
from headtilt.paper.data import gtsrb
from headtilt.paper.train import Recipe, train
from headtilt.sources import sidecar
from headtilt.sources.decode import decode
from tests.toys import its

HUGE = 10**400


def network(classes: int = 3, hidden: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, classes)).eval()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ht.rotation(HUGE),
        lambda: ht.ITS(network(), padding=HUGE),
        lambda: ht.ITS(network(), gate=HUGE),
        lambda: its(network(), confidence="group", width=HUGE),
        lambda: HeadRecipe(learning_rate=HUGE),
    ],
    ids=["range", "padding", "gate", "width", "rate"],
)
def test_whole_numbers_beyond_any_float_are_refused_as_options(make):
    assert not is_number(HUGE)
    with pytest.raises(ht.OptionError):
        make()


@pytest.mark.parametrize("features", [3, [1], {"a": 1}, [None, 2]], ids=str)
def test_features_that_are_no_names_are_refused_at_the_door(features):
    with pytest.raises(ht.OptionError, match="features must be"):
        ht.ITS(network(), features=features)


def test_a_calibrator_of_another_number_of_classes_is_refused():
    robust = ht.ITS(network(), calibrator=Balance(torch.zeros(4)))
    with pytest.raises(ht.OptionError, match="was fitted for another model"):
        robust(torch.rand(1, 1, 8, 8))
    widened = ht.ITS(network(), calibrator=lambda evidence: Evidence(evidence.logits.repeat(1, 2)))
    with pytest.raises(ht.OptionError, match=r"calibrator must return logits \(1, 3\)"):
        widened(torch.rand(1, 1, 8, 8))


def test_a_calibrator_of_ones_own_that_raises_is_not_renamed():
    def broken(evidence):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        ht.ITS(network(), calibrator=broken)(torch.rand(1, 1, 8, 8))


@pytest.mark.parametrize("method", ["prototypes", "neighbours"])
def test_a_bundle_around_a_model_of_other_features_says_that_it_was_fitted_for_another(tmp_path, method):
    images = 3 * torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    fitted = its(network(), samples=5).fit(images, method=method, promise=None, recipe=HeadRecipe(looks=1, views=3))
    fitted.save(tmp_path)
    with pytest.raises(ht.DataError, match="was fitted for another model"):
        ITS.load(tmp_path, network(hidden=7))
    trusted = ITS.load(tmp_path, network(hidden=7), strict=False)
    with pytest.raises(ht.OptionError, match="was fitted for another model"):
        trusted(images[:2])


def saved(folder: Path) -> dict:
    ITS(network(), calibrator=Balance(torch.ones(3))).save(folder)
    return json.loads((folder / bundle.CONFIG).read_text())


@pytest.mark.parametrize(
    "change",
    [
        {"options": {"model": 1}},
        {"options": {"search": {"levels": [{"algebra": [[HUGE] * 3] * 3}]}}},
        {"gate": {"margin": HUGE, "doubt": 1}},
        {"gate": {"margin": "nan", "doubt": "x"}},
        {"calibrator": {"kind": "head", "hidden": 10**9, "outputs": 1, "source": "logits"}},
    ],
    ids=["model", "levels", "margin", "doubt", "wide"],
)
def test_a_bundle_with_a_value_that_makes_no_sense_is_a_data_error(tmp_path, change):
    config = {**saved(tmp_path), **change}
    (tmp_path / bundle.CONFIG).write_text(json.dumps(config))
    with pytest.raises(ht.HeadtiltError):
        ITS.load(tmp_path, network())


@pytest.mark.parametrize("end", [1e308, float("nan"), "x"], ids=str)
def test_a_bundle_whose_levels_end_where_single_precision_does_not_reach_is_refused(tmp_path, end):
    config = saved(tmp_path)
    config["options"]["search"]["levels"][0]["high"] = end
    (tmp_path / bundle.CONFIG).write_text(json.dumps(config))
    with pytest.raises(ht.HeadtiltError):
        ITS.load(tmp_path, network())


def test_json_nested_beyond_reason_is_a_data_error(tmp_path):
    deep = "[" * 200_000
    (tmp_path / bundle.CONFIG).write_text(deep)
    with pytest.raises(ht.DataError, match="cannot be read"):
        bundle.read(tmp_path)
    (tmp_path / "net.json").write_text(deep)
    with pytest.raises(ht.DataError, match="is no JSON"):
        sidecar.beside(tmp_path / "net.onnx")


def test_a_bundle_whose_numbers_are_not_finite_is_refused(tmp_path):
    ITS(network(), calibrator=Balance(torch.tensor([0.0, float("nan"), 0.0]))).save(tmp_path)
    with pytest.raises(ht.DataError, match=r"not finite, in calibrator\.bias"):
        ITS.load(tmp_path, network())


def test_a_sidecar_that_is_no_text_or_says_null_or_pads_with_nonsense(tmp_path):
    (tmp_path / "net.json").write_bytes(b'{"size": 8, "labels": ["\xc9"]}')
    with pytest.raises(ht.DataError, match="is no JSON"):
        sidecar.beside(tmp_path / "net.onnx")
    assert sidecar.parse({"factor": None, "channels": None, "size": 8}, "here") == sidecar.Sidecar(size=8)
    for padding in ("magic", [1, "x"], HUGE):
        with pytest.raises(ht.DataError, match="padding makes no sense"):
            sidecar.parse({"padding": padding}, "here")


@pytest.mark.parametrize("text", ["{[1]}", "{'²': 'cat'}", "{%s: 'cat'}" % ("9" * 5000)], ids=["set", "power", "long"])
def test_class_names_in_metadata_that_are_no_literals_are_taken_as_words(tmp_path, text):
    found = sidecar.beside(tmp_path / "net.onnx", {"labels": text})
    assert found.labels == (text,)


def test_an_archive_of_labels_in_a_form_that_zipfile_does_not_know_is_a_data_error(tmp_path):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("y_train.npy", b"x")
    content = bytearray(packed.getvalue())
    place = content.index(b"PK\x01\x02")
    content[place + 6 : place + 8] = (255).to_bytes(2, "little")  # version needed to unpack
    (tmp_path / "labels.npz").write_bytes(content)
    (tmp_path / "train.jpg").write_bytes(b"x")
    with pytest.raises(ht.DataError, match="must be an npz archive"):
        gtsrb.read(tmp_path, "train")


@pytest.mark.parametrize("metadata", [{}, {"epoch": "-1"}, {"epoch": "x"}, {"epoch": "1.5"}], ids=str)
def test_a_checkpoint_that_is_none_is_a_data_error(tmp_path, metadata):
    torch_files = pytest.importorskip("safetensors.torch")
    model, path = network(), tmp_path / "checkpoint.safetensors"
    torch_files.save_file({f"model.{name}": value for name, value in model.state_dict().items()}, path, metadata)
    with pytest.raises(ht.DataError, match="is no checkpoint of a training run"):
        train(model, torch.rand(4, 1, 8, 8), torch.zeros(4).long(), Recipe(1), checkpoint=path)


def test_weights_of_another_network_in_the_cache_are_a_data_error(tmp_path, monkeypatch):
    torch_files = pytest.importorskip("safetensors.torch")
    monkeypatch.setenv("HEADTILT_CACHE", str(tmp_path))
    (tmp_path / "zoo").mkdir()
    torch_files.save_file({"a": torch.ones(2)}, tmp_path / "zoo" / "mine.safetensors")
    with pytest.raises(ht.DataError, match="holds the weights of another network"):
        zoo.kept("mine", network(), network, "cpu")


@pytest.mark.parametrize("seed", ["9" * 10, "9" * 5000], ids=["ten digits", "more than Python converts"])
def test_a_seed_that_no_generator_takes_is_refused_in_a_spec(seed):
    with pytest.raises(ht.OptionError, match="up to nine digits"):
        zoo.parse(f"digits:{seed}")


@pytest.mark.parametrize("words", [("evaluate", "digits"), ("train", "digits")], ids=" ".join)
def test_a_seed_that_numpy_does_not_take_is_refused_by_the_command_line(words):
    typer = pytest.importorskip("typer.testing")
    from headtilt.cli import app

    result = typer.CliRunner().invoke(app, [*words, "--seed", "99999999999999999999"])
    assert result.exit_code == 2
    assert "4294967295" in result.output


def test_postscript_is_refused_before_any_other_program_runs_it(tmp_path, monkeypatch):
    plugin = pytest.importorskip("PIL.EpsImagePlugin")
    from headtilt.sources.images import read

    monkeypatch.setattr(plugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript ran"))
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    (tmp_path / "harmless.png").write_bytes(content)
    for act in (lambda: read(tmp_path / "harmless.png"), lambda: decode([tmp_path / "harmless.png"])):
        with pytest.raises(ht.DataError, match=r"harmless\.png is PostScript"):
            act()
    with pytest.raises(ht.DataError, match="image is PostScript"):
        read(content)


def test_an_exported_program_that_is_no_archive_is_one_sentence(tmp_path, caplog, capfd):
    from headtilt.sources import pt2

    (tmp_path / "a.pt2").write_bytes(b"nonsense")
    with pytest.raises(ht.DataError, match="it is no archive"):
        pt2.load(str(tmp_path / "a.pt2"))
    assert "Traceback" not in caplog.text + capfd.readouterr().err


def test_the_digits_of_an_archive_are_read_by_a_reader_that_unpickles_nothing(tmp_path):
    np.savez(tmp_path / "labels.npz", y_train=np.array([{"a": 1}], dtype=object))
    (tmp_path / "train.jpg").write_bytes(b"x")
    with pytest.raises(ht.DataError, match="must be an npz archive"):
        gtsrb.read(tmp_path, "train")

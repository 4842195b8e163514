"""Models by name, ready to use."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headtilt as ht
from headtilt.sources import registry as door
from headtilt.sources.pretrained import Pretrained

Image = pytest.importorskip("PIL.Image", reason="needs the extra headtilt[data]")


@pytest.fixture(scope="module")
def digits() -> torch.Tensor:
    pytest.importorskip("sklearn", reason="needs the extra headtilt[data]")
    from headtilt.paper.data import load

    return load("digits", "fit", limit=120).floats()


def test_three_lines_classify_a_file(tmp_path, digits):
    Image.fromarray((digits[0, 0] * 255).byte().numpy()).save(tmp_path / "digit.png")
    robust = ht.from_pretrained("zoo:digits:0", **ht.fast([ht.rotation()]))
    result = robust.search(robust.read(tmp_path / "digit.png"))
    assert result.describe(0, names=robust.names).startswith(("rotation", "upright"))
    assert torch.allclose(result.images[0], digits[0], atol=1 / 255)
    assert isinstance(robust, ht.ITS)
    assert not robust.training
    assert robust.padding == "auto"
    assert (robust.adapted.size, robust.adapted.channels) == (28, 1)
    assert [level.name for level in robust.plan.levels] == ["rotation"]


def test_several_sources_are_one_batch_and_none_is_an_error(digits):
    robust = ht.from_pretrained("zoo:digits:0")
    assert robust.read(np.zeros((28, 28), dtype=np.uint8), Image.new("L", (30, 40))).shape == (2, 1, 28, 28)
    with pytest.raises(ht.OptionError, match="at least one"):
        robust.read()
    with pytest.raises(ht.DataError, match="does not exist"):
        robust.read("nosuch.jpg")


def test_a_bundle_brings_its_search_and_answers_as_it_did(tmp_path, digits):
    fitted = ht.from_pretrained("zoo:digits:0", **ht.fast([ht.rotation()])).fit(digits, method="balance")
    fitted.save(tmp_path / "bundle")
    robust = ht.from_pretrained("zoo:digits:0", bundle=tmp_path / "bundle")
    assert isinstance(robust, Pretrained)
    assert robust.adapted.name == "digits:0"
    assert torch.equal(robust(digits[:8]), fitted(digits[:8]))


def test_a_bundle_takes_no_other_options_and_no_other_model(tmp_path, digits):
    robust = ht.from_pretrained("zoo:digits:0", **ht.fast([ht.rotation()]))
    robust.fit(digits, method="balance", promise=None).save(tmp_path / "b")
    with pytest.raises(ht.OptionError, match="search, levels cannot be combined with bundle"):
        ht.from_pretrained("zoo:digits:0", bundle=tmp_path / "b", search=ht.Tree(samples=5), levels=[ht.rotation()])
    other = door.load("zoo:digits:0")
    other.model.add_module("cut", torch.nn.Identity())
    narrower = torch.nn.Sequential(other.model, torch.nn.Linear(9, 4))
    from dataclasses import replace

    from headtilt.sources.pretrained import wrapped

    with pytest.raises(ht.DataError, match="another model: this one has 4 logits, that one has 9"):
        wrapped(replace(other, model=narrower), bundle=tmp_path / "b")
    with pytest.raises(ht.DataError, match="fitted for 9 classes and digits:0 has 4"):
        wrapped(replace(other, model=narrower), bundle=tmp_path / "b", strict=False)
    with pytest.raises(ht.DataError, match="another model: their logits"):
        ht.from_pretrained("zoo:digits:1", bundle=tmp_path / "b")
    assert ht.from_pretrained("zoo:digits:1", bundle=tmp_path / "b", strict=False)(digits[:2]).shape == (2, 9)
    with pytest.raises(ht.DataError, match="is no bundle"):
        ht.from_pretrained("zoo:digits:0", bundle=tmp_path / "nosuch")


@pytest.mark.parametrize(
    ("spec", "scheme"),
    [
        ("org/name", "hf"),
        ("org-1/vit.base_16", "hf"),
        ("timm:hf_hub:org/name", "timm"),
        ("onnx:some/where.onnx", "onnx"),
        ("python:a:b", "python"),
    ],
)
def test_a_spec_says_its_scheme_or_looks_like_a_name_on_the_hub(spec, scheme):
    assert door.parse(spec)[0] == scheme


def test_a_folder_or_a_file_of_a_network_needs_no_scheme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    for name in ("net.onnx", "net.pt2", "net.txt"):
        (tmp_path / name).touch()
    assert [door.parse(name)[0] for name in ("checkpoint", "net.onnx", "net.pt2")] == ["hf", "onnx", "pt2"]
    for name in ("net.txt", "nosuch.onnx", "a/b/c"):
        with pytest.raises(ht.OptionError, match="model must be one of hf:NAME, hf-zeroshot:NAME, timm:NAME"):
            door.parse(name)

"""The Hugging Face door: raw pixels in, the checkpoint's own logits out."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import headtilt as ht
from headtilt.sources import hf
from tests.toys import its

transformers = pytest.importorskip("transformers", reason="needs the extra headtilt[hf]")
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
        num_labels=3,
        id2label={0: "cat", 1: "dog", 2: "owl"},
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]
    )
    processor.save_pretrained(tmp_path)
    return tmp_path


def test_logits_are_those_of_the_checkpoint_behind_its_own_processor(checkpoint: Path) -> None:
    adapted = hf.load(str(checkpoint))
    pixels = np.random.RandomState(0).randint(0, 256, (32, 32, 3), dtype=np.uint8)
    processor = transformers.AutoImageProcessor.from_pretrained(checkpoint, use_fast=False)
    model = transformers.AutoModelForImageClassification.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        expected = model(**processor(pixels, return_tensors="pt")).logits
        raw = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
        assert torch.allclose(adapted.model(raw), expected, atol=1e-4)
    assert adapted.labels == ("cat", "dog", "owl")
    assert (adapted.size, adapted.padding) == (32, "reflection")


def test_a_wrapper_around_it_searches_and_reads_features(checkpoint: Path) -> None:
    adapted = hf.load(str(checkpoint))
    robust = its(adapted.model, padding=adapted.padding, samples=5)
    assert robust(torch.rand(2, 3, 32, 32)).shape == (2, 3)
    tapped = robust.predictor.with_features("auto")
    features = tapped(torch.rand(2, 3, 32, 32)).features
    assert features is not None
    assert tapped.features[-1].endswith("classifier"), "whose input is one vector per view"
    assert features.shape == (2, 16 * len(tapped.features))


def test_a_name_that_is_nowhere_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ht.DataError, match="neither a checkpoint folder nor a name"):
        hf.load(str(tmp_path / "nothing"))


@pytest.mark.skipif("HEADTILT_DATA" not in os.environ, reason="needs the real checkpoint: set HEADTILT_DATA")
def test_the_real_mobilenet_knows_most_upright_photographs() -> None:
    from headtilt.paper.data import load

    folder = next(
        (
            path
            for root in os.environ["HEADTILT_DATA"].split(os.pathsep)
            if (path := Path(root, "mobilenet_v2_imagenet")).is_dir()
        ),
        None,
    )
    if folder is None:
        pytest.skip("no mobilenet_v2_imagenet under HEADTILT_DATA")
    adapted = hf.load(str(folder))
    assert (adapted.size, adapted.resize, len(adapted.labels or ())) == (224, 256, 1000)
    data = load("imagenet-mini", "test", limit=40)
    with torch.no_grad():
        answers = adapted.model(data.floats()[:, :, 48:272, 48:272]).argmax(1)
    assert float((answers == data.labels).float().mean()) > 0.4


EVIL = """
from pathlib import Path
Path(r"{marker}").write_text("ran")
from transformers import PretrainedConfig as Config, PreTrainedModel as Model, ViTImageProcessor as Processor
"""


@pytest.mark.parametrize("place", ["config.json", "preprocessor_config.json"])
@pytest.mark.parametrize("kind", ["vit", "evil"])
def test_code_that_lies_in_a_checkpoint_is_never_run_whatever_anybody_answers(checkpoint, monkeypatch, place, kind):
    import builtins
    import json

    marker = checkpoint / "ran"
    (checkpoint / "evil.py").write_text(EVIL.format(marker=marker))
    said = json.loads((checkpoint / place).read_text())
    names = {"AutoConfig": "Config", "AutoModelForImageClassification": "Model", "AutoImageProcessor": "Processor"}
    said["auto_map"] = {auto: f"evil.{name}" for auto, name in names.items()}
    if kind == "evil":
        said |= {"model_type": "evil", "image_processor_type": "Evil"}
    (checkpoint / place).write_text(json.dumps(said))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    if kind == "evil":
        with pytest.raises(ht.DataError):
            hf.load(str(checkpoint))
    else:
        assert hf.load(str(checkpoint)).labels == ("cat", "dog", "owl")
    assert not marker.exists()

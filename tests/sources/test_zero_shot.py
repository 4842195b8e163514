"""CLIP and SigLIP as classifiers of named classes, from tiny checkpoints made on the spot."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
import torch

import headtilt as ht
from headtilt.errors import DataError, ModelError, OptionError
from headtilt.sources import registry
from headtilt.sources.pretrained import from_pretrained

transformers = pytest.importorskip("transformers", reason="needs the extra headtilt[hf]")
tokenizers = pytest.importorskip("tokenizers")
Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own
WORDS = ["[PAD]", "[UNK]", "[EOS]", "a", "photo", "of", "cat", "dog", "owl", "."]
LABELS = ["cat", "dog", "owl"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def tokenizer():
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(single="$A [EOS]", special_tokens=[("[EOS]", 2)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]", model_max_length=16
    )


def model(kind):
    text = {**SMALL, "vocab_size": len(WORDS), "max_position_embeddings": 16, "eos_token_id": 2, "pad_token_id": 0}
    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    if kind == "clip":
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
        return transformers.CLIPModel(config)
    text["projection_size"] = 16
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision))


@pytest.fixture(params=["clip", "siglip"])
def checkpoint(request, tmp_path):
    model(request.param).eval().save_pretrained(tmp_path / request.param)
    tokenizer().save_pretrained(tmp_path / request.param)
    processor = {
        "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": 32},
        "do_center_crop": True, "crop_size": {"height": 32, "width": 32}, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4],
        "do_convert_rgb": True,
    }  # fmt: skip
    (tmp_path / request.param / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return tmp_path / request.param


def test_logits_are_those_of_the_model_shown_pictures_and_texts_together(checkpoint):
    adapted = registry.load(f"hf-zeroshot:{checkpoint}", labels=LABELS)
    pixels = np.random.RandomState(0).randint(0, 256, (32, 32, 3), dtype=np.uint8)
    mean, deviation = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.3, 0.4])
    raw = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
    shown = (raw - mean[:, None, None]) / deviation[:, None, None]
    whole = transformers.AutoModel.from_pretrained(checkpoint).eval()
    padding = "max_length" if checkpoint.name == "siglip" else True
    words = tokenizer()(
        [f"a photo of a {label}." for label in LABELS], padding=padding, return_tensors="pt", max_length=16
    )
    given = {"input_ids": words["input_ids"]}
    if checkpoint.name == "clip":
        given["attention_mask"] = words["attention_mask"]
    with torch.no_grad():
        expected = whole(pixel_values=shown, **given).logits_per_image
        assert torch.allclose(adapted.model(raw), expected, atol=1e-3)
    assert expected.std() > 1e-4
    assert (adapted.labels, adapted.size, adapted.padding) == (("cat", "dog", "owl"), 32, "reflection")


def test_a_search_around_it_names_the_classes(checkpoint):
    robust = from_pretrained(f"hf-zeroshot:{checkpoint}", labels=LABELS)
    result = robust.search(robust.read(Image.new("RGB", (50, 40), "orange")))
    assert result.describe(0, names=robust.names).split("→ ")[1].split(" (")[0] in LABELS


def test_classes_must_be_named_for_it_and_for_it_alone(checkpoint, tmp_path):
    with pytest.raises(OptionError, match="needs labels"):
        ht.from_pretrained(f"hf-zeroshot:{checkpoint}")
    with pytest.raises(OptionError, match="has its own labels"):
        ht.from_pretrained("zoo:digits", labels=LABELS)
    with pytest.raises(OptionError, match="at least two classes"):
        ht.from_pretrained(f"hf-zeroshot:{checkpoint}", labels=["cat"])
    with pytest.raises(DataError, match="neither a checkpoint folder nor a name on the hub"):
        ht.from_pretrained(f"hf-zeroshot:{tmp_path / 'nothing'}", labels=LABELS)


def test_a_model_that_knows_no_texts_is_refused(tmp_path):
    config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="scores no pictures against texts"):
        ht.from_pretrained(f"hf-zeroshot:{tmp_path}", labels=LABELS)


def test_the_command_line_takes_classes_by_commas_and_from_a_file(checkpoint, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from headtilt.cli import app

    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (50, 40), "orange").save("cup.png")
    (tmp_path / "classes.txt").write_text("cat\ndog\n\nowl\n", encoding="utf-8")
    words = ["classify", "cup.png", "--model", f"hf-zeroshot:{checkpoint}", "--json", "--labels"]
    rows = [json.loads(CliRunner().invoke(app, [*words, given]).stdout) for given in ("cat,dog, owl", "classes.txt")]
    assert rows[0] == rows[1]
    assert rows[0][0]["label"] in LABELS
    assert "at least two classes" in CliRunner().invoke(app, [*words, "cat"]).stderr


EVIL = """
from pathlib import Path
Path(r"{marker}").write_text("ran")
from transformers import PretrainedConfig as Config, PreTrainedModel as Model, PreTrainedTokenizerFast as Tokenizer
from transformers import CLIPImageProcessor as Processor
"""


@pytest.mark.parametrize("place", ["config.json", "preprocessor_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["known", "evil"])
def test_code_in_such_a_checkpoint_is_never_run_whatever_anybody_answers(checkpoint, monkeypatch, place, kind):
    import builtins

    marker = checkpoint / "ran"
    (checkpoint / "evil.py").write_text(EVIL.format(marker=marker))
    said = json.loads((checkpoint / place).read_text())
    names = {"AutoConfig": "Config", "AutoModel": "Model", "AutoImageProcessor": "Processor"}
    said["auto_map"] = {auto: f"evil.{name}" for auto, name in names.items()}
    said["auto_map"]["AutoTokenizer"] = ["evil.Tokenizer", "evil.Tokenizer"]
    if kind == "evil":
        said |= {"model_type": "evil", "image_processor_type": "Evil", "tokenizer_class": "Evil"}
    (checkpoint / place).write_text(json.dumps(said))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    with contextlib.suppress(DataError):  # of a class that nobody knows
        assert registry.load(f"hf-zeroshot:{checkpoint}", labels=LABELS).labels == tuple(LABELS)
    assert not marker.exists()

"""A real `transformers` pipeline answers for tilted pictures as the wrapper does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

import headtilt as ht
from headtilt.errors import OptionError
from headtilt.sources import hf
from headtilt.sources.pipeline import for_pipeline, tilting_pipeline
from tests.toys import fingerprint, its, tiny_images

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with a tiny untrained ViT for six classes and its image processor."""
    folder = tmp_path_factory.mktemp("vit")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32,
            patch_size=8, num_labels=6, initializer_range=0.6,
        )  # fmt: skip
        transformers.ViTForImageClassification(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        '{"image_processor_type": "ViTImageProcessor", "do_resize": true, "size": {"height": 32, "width": 32},'
        ' "do_rescale": true, "rescale_factor": 0.00392156862745098, "do_normalize": true,'
        ' "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]}'
    )
    return folder


def test_a_pipeline_answers_as_the_wrapper_does(checkpoint):
    adapted = hf.load(str(checkpoint))
    robust = its(adapted.model, samples=8, confidence="energy", padding="reflection", gate=None)
    model = transformers.AutoModelForImageClassification.from_pretrained(checkpoint)
    processor = transformers.AutoImageProcessor.from_pretrained(checkpoint, backend="pil")
    before = {**fingerprint(model), "random": None}  # the pipeline's own loader draws from the streams
    tilting = for_pipeline(model, robust, processor)
    classify = transformers.pipeline("image-classification", model=tilting, image_processor=processor, device="cpu")
    drawn = (tiny_images(4, 32, 32, channels=3) * 255).round().to(torch.uint8)
    pictures = [Image.fromarray(np.asarray(image.permute(1, 2, 0))) for image in drawn]
    answers = classify(pictures, top_k=6)
    result = robust.search(drawn.float() / 255)
    assert [answer[0]["label"] for answer in answers] == [f"LABEL_{label}" for label in result.labels.tolist()]
    assert_close(
        torch.tensor([answer[0]["score"] for answer in answers]), result.probabilities.amax(1), atol=1e-4, rtol=0
    )
    plain = transformers.pipeline("image-classification", model=model, image_processor=processor, device="cpu")
    scores = torch.tensor([answer[0]["score"] for answer in plain(pictures, top_k=1)])
    assert not torch.allclose(scores, result.probabilities.amax(1), atol=1e-2)
    assert {**fingerprint(model), "random": None} == before


def test_anything_but_a_transformers_model_is_refused():
    with pytest.raises(OptionError, match="transformers classifier"):
        for_pipeline(torch.nn.Linear(2, 2), ht.ITS(torch.nn.Flatten()), None)


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_one_call_makes_a_tilting_pipeline_from_a_name_or_from_a_pipeline(checkpoint):
    drawn = (tiny_images(4, 32, 32, channels=3) * 255).round().to(torch.uint8)
    pictures = [Image.fromarray(np.asarray(image.permute(1, 2, 0))) for image in drawn]
    by_name = tilting_pipeline(str(checkpoint), gate=None)
    plain = transformers.pipeline("image-classification", model=str(checkpoint), device="cpu")
    before = plain(pictures, top_k=6)
    around = tilting_pipeline(plain, gate=None)
    assert around(pictures, top_k=6) == by_name(pictures, top_k=6)
    robust = ht.from_pretrained(f"hf:{checkpoint}", gate=None)
    wanted = [f"LABEL_{label}" for label in robust.search(drawn.float() / 255).labels.tolist()]
    assert [answer[0]["label"] for answer in around(pictures, top_k=6)] == wanted
    assert plain(pictures, top_k=6) == before, "the pipeline that was given is not changed"
    with pytest.raises(OptionError, match="image-classification pipeline; got int"):
        tilting_pipeline(3)

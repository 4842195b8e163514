"""What an image processor does to a photograph is what `prepare` and the model's normalisation do, in two halves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headtilt.sources import Adapted, hf
from headtilt.sources.images import square_of

transformers = pytest.importorskip("transformers", reason="needs the extra headtilt[hf]")
Image = pytest.importorskip("PIL.Image", reason="needs the extra headtilt[data]")
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own

VIT: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
}


def vit(**options: Any) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        transformers.ViTForImageClassification(transformers.ViTConfig(**VIT)).save_pretrained(folder)
        transformers.ViTImageProcessor(**{"size": {"height": 32, "width": 32}, **options}).save_pretrained(folder)

    return save


def convnext(side: int) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        config = transformers.ConvNextConfig(hidden_sizes=[4, 4, 4, 4], depths=[1, 1, 1, 1], num_labels=3)
        transformers.ConvNextForImageClassification(config).save_pretrained(folder)
        transformers.ConvNextImageProcessor(size={"shortest_edge": side}, crop_pct=0.8).save_pretrained(folder)

    return save


def small_cnn(folder: Path) -> None:
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 4], depths=[1, 1], num_labels=3)
    transformers.ResNetForImageClassification(config).save_pretrained(folder)


def efficientnet(**options: Any) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        small_cnn(folder)
        given = {"size": {"height": 64, "width": 64}, **options}
        transformers.EfficientNetImageProcessor(**given).save_pretrained(folder)

    return save


def cropping(name: str, side: int, resize: int) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        small_cnn(folder)
        crop = {"height": side, "width": side}
        getattr(transformers, name)(size={"shortest_edge": resize}, crop_size=crop).save_pretrained(folder)

    return save


# What to save, whether it squeezes the whole photograph into its square, and the sides that must be found.
KINDS: dict[str, tuple[Callable[[Path], None], bool, tuple[int, int, str]]] = {
    "vit": (vit(), True, (32, 32, "bilinear")),
    "vit, own colours": (vit(image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]), True, (32, 32, "bilinear")),
    "vit, nearest": (vit(resample=0), True, (32, 32, "nearest")),
    "vit, bytes": (vit(do_rescale=False, do_normalize=False, resample=3), True, (32, 32, "bicubic")),
    "vit, other factor": (vit(rescale_factor=1 / 127.5), True, (32, 32, "bilinear")),
    "convnext, cropped": (convnext(64), False, (64, 80, "bicubic")),
    "convnext, large": (convnext(384), True, (384, 384, "bicubic")),
    "efficientnet": (efficientnet(), True, (64, 64, "bicubic")),
    "efficientnet, offset": (efficientnet(rescale_offset=True, rescale_factor=1 / 127.5), True, (64, 64, "bicubic")),
    "efficientnet, headless": (efficientnet(include_top=False), True, (64, 64, "bicubic")),
    "levit": (cropping("LevitImageProcessor", 112, 112), False, (112, 128, "bicubic")),
    "poolformer": (cropping("PoolFormerImageProcessor", 90, 90), False, (90, 100, "bicubic")),
    "mobilevit, blue first": (cropping("MobileViTImageProcessor", 64, 72), False, (64, 72, "bicubic")),
    "clip": (cropping("CLIPImageProcessor", 48, 48), False, (48, 48, "bicubic")),
}


def photograph(width: int, height: int) -> Image.Image:
    down, right = np.mgrid[:height, :width]
    waves = [np.sin(right / 17 + down / 29 + phase) * 100 + 128 for phase in (0, 1, 2)]
    return Image.fromarray(np.stack(waves, axis=-1).astype(np.uint8))


def shown(adapted: Adapted, picture: Image.Image) -> torch.Tensor:
    """Return what reaches the network: the square, behind the photometric half."""
    square, model = square_of(picture, adapted)[None], adapted.model
    if model.mix is not None:
        square = torch.einsum("ij,bjhw->bihw", model.mix, square)
    return (square - model.mean) / model.deviation


@pytest.mark.parametrize("kind", KINDS)
def test_both_halves_together_are_the_processor(tmp_path, kind):
    save, squeezes, (size, resize, resample) = KINDS[kind]
    torch.manual_seed(0)
    save(tmp_path)
    adapted = hf.load(str(tmp_path))
    assert (adapted.size, adapted.resize, adapted.resample, adapted.channels) == (size, resize, resample, 3)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, **hf.plain())
    for width, height in [(180, 180)] if squeezes else [(180, 180), (240, 160), (150, 201)]:
        picture = photograph(width, height)
        expected = processor(picture, return_tensors="pt")["pixel_values"]
        found = shown(adapted, picture)
        assert found.shape == expected.shape
        spread = float(expected.max() - expected.min())
        assert float((found - expected).abs().max()) < 0.02 * spread, "up to the rounding of bytes"


def test_where_a_processor_squeezes_the_middle_is_taken_instead(tmp_path):
    vit()(tmp_path)
    adapted = hf.load(str(tmp_path))
    wide = Image.new("RGB", (300, 100), "black")
    wide.paste("white", (100, 0, 200, 100))
    square = square_of(wide, adapted)
    assert square[:, :, 1:-1].min() == 1
    assert square.min() > 0.8, "a little of what lies beside it is smoothed into its edges"


def test_an_odd_processor_is_refused():
    def curved(pixels: Any) -> torch.Tensor:
        return (torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float() / 255) ** 2

    with pytest.raises(hf.DataError, match="no normalisation"):
        hf.photometry(curved, 3, "net")
    with pytest.raises(hf.DataError, match="10×20"):
        hf.geometry(lambda _: torch.zeros(3, 10, 20), torch.eye(3), torch.zeros(3), "net")


@pytest.mark.skipif("HEADTILT_DATA" not in os.environ, reason="needs the real checkpoint: set HEADTILT_DATA")
def test_the_real_mobilenet_is_shown_what_its_processor_shows_it():
    roots = [Path(root) for root in os.environ["HEADTILT_DATA"].split(os.pathsep)]
    folder = next((path for root in roots if (path := root / "mobilenet_v2_imagenet").is_dir()), None)
    if folder is None:
        pytest.skip("no mobilenet_v2_imagenet under HEADTILT_DATA")
    adapted = hf.load(str(folder))
    assert (adapted.size, adapted.resize, adapted.resample) == (224, 256, "bilinear")
    assert adapted.sampled == ("model.dropout",)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, **hf.plain())
    for size in ((500, 375), (320, 320), (225, 400)):
        picture = photograph(*size)
        expected = processor(picture, return_tensors="pt")["pixel_values"]
        assert torch.allclose(shown(adapted, picture), expected, atol=0.02)

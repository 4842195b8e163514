"""The modules of docs/ can be imported, and a folder holds what a reader of a recipe would have at hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
if not (ROOT / "docs" / "figures.py").exists():
    collect_ignore_glob = ["test_*.py"]
sys.path.insert(0, str(ROOT / "docs"))


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small Hugging Face checkpoint, upright pictures and a photograph."""
    image = pytest.importorskip("PIL.Image", reason="needs the extra headtilt[data]")
    transformers = pytest.importorskip("transformers", reason="needs the extra headtilt[hf]")
    from headtilt.paper.data import load

    folder = tmp_path_factory.mktemp("workshop")
    config = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        id2label={label: f"digit {label}" for label in range(9)},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.ResNetForImageClassification(config).eval().save_pretrained(folder / "my-model")
    processor = transformers.ViTImageProcessor(size={"height": 28, "width": 28})
    processor.save_pretrained(folder / "my-model")
    (folder / "upright").mkdir()
    for number, pixels in enumerate(load("digits", "fit", limit=24).images):
        image.fromarray(pixels[0].numpy()).convert("RGB").save(folder / "upright" / f"{number}.png")
    image.fromarray(load("digits", "test", limit=1).images[0, 0].numpy()).convert("RGB").save(folder / "photo.jpg")
    return folder

"""The torchvision door: against the library where it imports, and everywhere against a double of its interface."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.error import URLError

import pytest
import torch
from torch import nn

import headtilt as ht
from headtilt.io.weights import save_tensors
from headtilt.sources import registry as door
from headtilt.sources.images import square_of

Image = pytest.importorskip("PIL.Image", reason="needs the extra headtilt[data]")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(48, 3))


def preset(**changes: Any) -> SimpleNamespace:
    """Return what `weights.transforms()` gives: torchvision's preset of image classification."""
    given = {"crop_size": [24], "resize_size": [28], "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}
    return SimpleNamespace(**{**given, "interpolation": SimpleNamespace(value="bicubic"), **changes})


class Weights(Enum):
    """Weights of a network, in the interface of torchvision's `WeightsEnum`."""

    IMAGENET1K_V1 = "first"
    IMAGENET1K_V2 = "second"
    DEFAULT = "second"  # noqa: PIE796 - an alias, as there

    def transforms(self) -> SimpleNamespace:
        return preset(resize_size=[26 if self.value == "first" else 28])

    @property
    def meta(self) -> dict[str, Any]:
        return {"categories": ["ant", "bee", "cat"]}


class Detection(Enum):
    DEFAULT = "boxes"

    def transforms(self) -> SimpleNamespace:
        return SimpleNamespace()

    @property
    def meta(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put a double of torchvision in its place, and return what its functions are called with."""
    asked: dict[str, Any] = {}

    def get_model_weights(name: str) -> type[Enum]:
        if name not in ("small", "offline", "boxes"):
            raise ValueError(f"Unknown model {name}")
        return Detection if name == "boxes" else Weights

    def get_model(name: str, weights: Enum | None = None) -> nn.Module:
        asked.update(name=name, weights=weights)
        if name == "offline" and weights is not None:
            raise URLError("no network")
        return network()

    library, models = ModuleType("torchvision"), ModuleType("torchvision.models")
    models.__dict__.update(
        get_model_weights=get_model_weights, get_model=get_model, list_models=lambda: ["boxes", "offline", "small"]
    )
    library.__dict__["models"] = models
    monkeypatch.setitem(sys.modules, "torchvision", library)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    return asked


def test_a_model_comes_with_the_preprocessing_and_the_names_of_its_weights(double):
    found = door.load("torchvision:small")
    assert double == {"name": "small", "weights": Weights.DEFAULT}
    assert (found.size, found.resize, found.resample, found.padding) == (24, 28, "bicubic", "reflection")
    assert (found.labels, found.name, found.sampled) == (("ant", "bee", "cat"), "small", ("model.2",))
    images = torch.rand(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    mean, deviation = (torch.tensor(part)[:, None, None] for part in ([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]))
    with torch.no_grad():
        assert torch.allclose(found.model(images), network().eval()((images - mean) / deviation), atol=1e-6)


def test_other_weights_own_weights_and_none_can_be_named(double, tmp_path):
    assert door.load("torchvision:small?weights=IMAGENET1K_V1").resize == 26
    assert double["weights"] is Weights.IMAGENET1K_V1
    assert door.load("torchvision:offline?weights=none").labels == ("ant", "bee", "cat")
    assert double["weights"] is None
    own = {name: torch.full_like(value, 0.5) for name, value in network().state_dict().items()}
    save_tensors(tmp_path / "own.safetensors", own)
    found = door.load(f"torchvision:small?weights={tmp_path / 'own.safetensors'}")
    assert double["weights"] is None
    assert all(bool((value == 0.5).all()) for value in found.model.model.state_dict().values())


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        ("nosuch", ht.OptionError, "none of its models; they are boxes, offline, small"),
        ("small?weights=V9", ht.OptionError, "IMAGENET1K_V1"),
        ("small?colour=red", ht.OptionError, "weights=…"),
        ("offline", ht.DataError, "could not be fetched"),
        ("boxes?weights=none", ht.OptionError, "no classifier of square images"),
        ("small?weights=nosuch.safetensors", ht.DataError, "nosuch.safetensors"),
    ],
)
def test_what_cannot_be_had_says_why(double, spec, error, said):
    with pytest.raises(error, match=said):
        door.load(f"torchvision:{spec}")


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ht.MissingExtraError, match=r"headtilt\[torchvision\]"):
        door.load("torchvision:resnet18")


def library() -> Any:
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchvision does not import here: {error}")
    return torchvision


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "efficientnet_b0", "vit_b_16"])
def test_the_real_library_is_shown_what_its_own_transforms_show(name):
    torchvision = library()
    torch.manual_seed(0)
    found = door.load(f"torchvision:{name}?weights=none")
    transforms = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    assert len(found.labels or ()) == 1000
    assert (found.size, found.resize) == (transforms.crop_size[0], transforms.resize_size[0])
    assert found.resample == transforms.interpolation.value
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(1, 3, 12, 15, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (400, 500), mode="bicubic").clamp(0, 1)[0]
    picture = Image.fromarray((smooth.permute(1, 2, 0) * 255).byte().numpy())
    square = square_of(picture, found)[None]
    assert torch.allclose((square - found.model.mean) / found.model.deviation, transforms(picture)[None], atol=0.05)
    bare = found.model.model
    with torch.no_grad():
        assert torch.allclose(found.model(square), bare(transforms(picture)[None]), atol=0.1)


def test_a_real_network_is_searched_and_its_features_are_read():
    library()
    robust = ht.from_pretrained("torchvision:resnet18?weights=none", search=ht.Tree(samples=5))
    assert robust(torch.rand(1, 3, 224, 224)).shape == (1, 1000)
    features = robust.predictor.with_features("auto")(torch.rand(1, 3, 224, 224)).features
    assert features is not None
    assert features.shape == (1, 1920)  # the means of its eight blocks

"""The timm door: against the library where it imports, and everywhere against a double of its interface."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headtilt as ht
from headtilt.io.weights import save_tensors
from headtilt.sources import registry as door


class Network(nn.Module):
    """A classifier with what timm's models have: `num_classes`, `pretrained_cfg`, `get_classifier`."""

    def __init__(self, labels: list[str] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_classes = 3
        self.pretrained_cfg = {"label_names": labels, "classifier": "head.fc"}
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.head = nn.ModuleDict({"drop": nn.Dropout(0.1), "fc": nn.Linear(48, 3)})

    def get_classifier(self) -> nn.Module:
        return self.head["fc"]

    def forward(self, images: Tensor) -> Tensor:
        return self.head["fc"](self.head["drop"](self.pool(images).flatten(1)))


class ImageNetInfo:
    def __init__(self, subset: str) -> None:
        self.subset = subset

    def index_to_description(self, index: int, detailed: bool = False) -> str:
        return f"{self.subset} {index}"


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put a double of timm in its place, and return what `create_model` is called with and how to change it."""
    state: dict[str, Any] = {"labels": None, "subset": "imagenet-1k", "config": {}}

    def create_model(name: str, pretrained: bool = False) -> nn.Module:
        state.update(name=name, pretrained=pretrained)
        if name == "nosuch":
            raise RuntimeError("Unknown model (nosuch)")
        return Network(state["labels"])

    def resolve_model_data_config(model: nn.Module) -> dict[str, Any]:
        return {
            "input_size": (3, 24, 24),
            "interpolation": "bicubic",
            "mean": (0.4, 0.5, 0.6),
            "std": (0.2, 0.3, 0.4),
            "crop_pct": 0.875,
            "crop_mode": "center",
            **state["config"],
        }

    library, data = ModuleType("timm"), ModuleType("timm.data")
    data.__dict__.update(
        resolve_model_data_config=resolve_model_data_config,
        infer_imagenet_subset=lambda model: state["subset"],
        ImageNetInfo=ImageNetInfo,
    )
    library.__dict__.update(create_model=create_model, data=data)
    monkeypatch.setitem(sys.modules, "timm", library)
    monkeypatch.setitem(sys.modules, "timm.data", data)
    return state


def test_a_model_comes_with_its_preprocessing_names_features_and_dropout(double):
    found = door.load("timm:small.a1_in1k")
    assert (double["name"], double["pretrained"]) == ("small.a1_in1k", True)
    assert (found.size, found.resize, found.resample, found.padding) == (24, 27, "bicubic", "reflection")
    assert found.labels == ("imagenet-1k 0", "imagenet-1k 1", "imagenet-1k 2")
    assert (found.features, found.sampled) == (("model.head.fc",), ("model.head.drop",))
    images = torch.rand(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    mean, deviation = (torch.tensor(part)[:, None, None] for part in ([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]))
    with torch.no_grad():
        assert torch.allclose(found.model(images), Network(None).eval()((images - mean) / deviation), atol=1e-6)
    robust = ht.from_pretrained("timm:small", search=ht.Tree(samples=5))
    features = robust.predictor.with_features(robust.features)(images).features
    assert features is not None
    assert features.shape == (2, 48)


def test_names_that_came_with_the_weights_are_taken_first_and_none_where_nobody_knows(double):
    double["labels"] = ["ant", "bee", "cat"]
    assert door.load("timm:small").labels == ("ant", "bee", "cat")
    double.update(labels=None, subset=None)
    assert door.load("timm:small").labels is None


def test_own_weights_and_none_can_be_named(double, tmp_path):
    door.load("timm:small?weights=none")
    assert double["pretrained"] is False
    own = {name: torch.full_like(value, 0.5) for name, value in Network(None).state_dict().items()}
    save_tensors(tmp_path / "own.safetensors", own)
    found = door.load(f"timm:small?weights={tmp_path / 'own.safetensors'}")
    assert double["pretrained"] is False
    assert all(bool((value == 0.5).all()) for value in found.model.model.state_dict().values())


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        ("nosuch", ht.DataError, "cannot be made: Unknown model"),
        ("small?weights=best", ht.OptionError, "none or a .safetensors file"),
        ("small?weights=nosuch.safetensors", ht.DataError, "nosuch.safetensors"),
    ],
)
def test_what_cannot_be_had_says_why(double, spec, error, said):
    with pytest.raises(error, match=said):
        door.load(f"timm:{spec}")


def test_a_model_of_rectangles_is_refused(double):
    double["config"] = {"input_size": (3, 24, 48)}
    with pytest.raises(ht.OptionError, match="3×24×48"):
        door.load("timm:small")


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ht.MissingExtraError, match=r"headtilt\[timm\]"):
        door.load("timm:resnet18")


def test_the_real_library_gives_a_classifier_that_can_be_searched():
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"timm does not import here: {error}")
    torch.manual_seed(0)
    robust = ht.from_pretrained("timm:resnet18?weights=none", search=ht.Tree(samples=5))
    config = timm.data.resolve_model_data_config(robust.adapted.model.model)
    assert robust.adapted.size == config["input_size"][1]
    assert len(robust.names or ()) == 1000
    assert robust(torch.rand(1, 3, 224, 224)).shape == (1, 1000)
    assert robust.features == ("model.fc",)

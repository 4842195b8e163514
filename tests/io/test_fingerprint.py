"""A bundle knows its model again by its answers, in whatever clothes it comes, and refuses another."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headtilt as ht
from headtilt.calibration.head import HeadRecipe
from headtilt.io import bundle
from headtilt.model.fingerprint import Fingerprint, distance, fingerprint_of, of_noise
from headtilt.model.predictor import Predictor
from tests.toys import TinyNet, tiny_images

QUICK = {"recipe": HeadRecipe(hidden=16, looks=1, views=8, epochs=1), "promise": None}


def another(seed: int = 0) -> TinyNet:
    """The same architecture with other weights."""
    model = TinyNet()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model.eval()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[ht.ITS, Path]:
    robust = ht.ITS(TinyNet().eval(), **ht.fast([ht.rotation()])).fit(tiny_images(60), **QUICK)
    folder = tmp_path_factory.mktemp("fitted") / "bundle"
    robust.save(folder)
    return robust, folder


CLOTHES = {
    "itself": lambda model: model,
    "copy": copy.deepcopy,
    "training": lambda model: copy.deepcopy(model).train(),
    "DataParallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled DataParallel": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
    "double": lambda model: copy.deepcopy(model).double(),
    "half": lambda model: copy.deepcopy(model).half(),
    "bfloat16": lambda model: copy.deepcopy(model).bfloat16(),
}


@pytest.mark.parametrize("clothes", CLOTHES)
def test_the_same_model_is_known_again(fitted, clothes: str) -> None:
    robust, folder = fitted
    images = tiny_images(6)
    again = ht.ITS.load(folder, CLOTHES[clothes](robust.model))
    expected, found = robust.search(images), again.search(images)
    assert again.predictor.features == robust.predictor.features
    assert torch.equal(found.labels, expected.labels)
    exact = clothes not in ("half", "bfloat16")
    torch.testing.assert_close(found.logits.float(), expected.logits, rtol=1e-4, atol=1e-4 if exact else 0.3)


@pytest.mark.parametrize("clothes", ["DataParallel", "bfloat16", "compiled"])
def test_a_bundle_saved_around_wrapped_models_serves_the_plain_one(tmp_path: Path, clothes: str) -> None:
    model, images = TinyNet().eval(), tiny_images(5)
    robust = ht.ITS(CLOTHES[clothes](model), **ht.fast([ht.rotation()])).fit(tiny_images(60), **QUICK)
    robust.save(tmp_path)
    again = ht.ITS.load(tmp_path, model)
    assert again.predictor.features == robust.predictor.features == ("conv:out", "hidden", "classifier")
    torch.testing.assert_close(again(images), robust(images).float(), rtol=1e-4, atol=0.6)


@pytest.mark.parametrize("method", ["head", "balance"])
def test_another_network_of_the_same_kind_is_refused_with_what_to_do(tmp_path: Path, method) -> None:
    robust = ht.ITS(TinyNet().eval(), **ht.fast([ht.rotation()])).fit(tiny_images(60), **QUICK, method=method)
    robust.save(tmp_path)
    with pytest.raises(ht.DataError, match=r"another model: their logits .* differ by .*strict=False \(--no-strict\)"):
        ht.ITS.load(tmp_path, another())
    trusted = ht.ITS.load(tmp_path, another(), strict=False)
    assert trusted(tiny_images(2)).shape == (2, 5)


def test_other_classes_and_models_that_take_no_such_images_are_refused_too(fitted) -> None:
    _, folder = fitted
    with pytest.raises(ht.DataError, match="this one has 3 logits, that one has 5"):
        ht.ITS.load(folder, TinyNet(classes=3))
    with pytest.raises(ht.DataError, match=r"another model: model raised on views of shape \(2, 1, 12, 12\)"):
        ht.ITS.load(folder, TinyNet(channels=3))


def test_features_count_beside_logits(fitted) -> None:
    """The last layer makes up for what the layers before it do otherwise: only who reads features can tell."""
    robust, folder = fitted
    twisted = copy.deepcopy(robust.model)
    with torch.no_grad():
        twisted.classifier.weight.copy_(twisted.classifier.weight.flip(1))
        twisted.hidden.weight.copy_(twisted.hidden.weight.flip(0))
    torch.testing.assert_close(twisted(tiny_images(3)), robust.model(tiny_images(3)))
    with pytest.raises(ht.DataError, match="their features for the same noise"):
        ht.ITS.load(folder, twisted)


def test_black_boxes_are_known_by_their_answers(tmp_path: Path) -> None:
    def black_box(images: Tensor) -> Tensor:
        return inner(images).detach()

    inner = TinyNet().eval()
    ht.ITS(black_box, **ht.fast([ht.rotation()])).fit(tiny_images(60), method="balance").save(tmp_path)
    ht.ITS.load(tmp_path, black_box)
    inner = another()
    with pytest.raises(ht.DataError, match="another model"):
        ht.ITS.load(tmp_path, black_box)


def test_a_wrapper_that_never_saw_an_image_is_saved_without_a_fingerprint_and_loads_anywhere(tmp_path: Path) -> None:
    ht.ITS(TinyNet()).save(tmp_path)
    assert json.loads((tmp_path / bundle.CONFIG).read_text())["fingerprint"] is None
    assert ht.ITS.load(tmp_path, another()).predictor.seen is None


def test_a_fingerprint_goes_through_load_and_save_and_changed_wrappers(fitted, tmp_path: Path) -> None:
    robust, folder = fitted
    for number, wrapper in enumerate((ht.ITS.load(folder, robust.model), robust.but(gate=None))):
        wrapper.save(tmp_path / str(number))
        with pytest.raises(ht.DataError, match="another model"):
            ht.ITS.load(tmp_path / str(number), another())


@pytest.mark.parametrize("shape", [[1, 12], [1, 12, 12, 12], [1, 0, 12], [3, 10**6, 10**6], [1, 12.0, 12], "abc", None])
def test_a_fingerprint_of_impossible_images_is_refused_before_any_are_made(fitted, shape, tmp_path: Path) -> None:
    robust, folder = fitted[0], Path(shutil.copytree(fitted[1], tmp_path / "bundle"))
    config = json.loads((folder / bundle.CONFIG).read_text())
    config["fingerprint"]["shape"] = shape
    (folder / bundle.CONFIG).write_text(json.dumps(config))
    with pytest.raises(ht.DataError):
        ht.ITS.load(folder, robust.model)


def test_a_model_that_takes_no_noise_has_no_fingerprint() -> None:
    def fastidious(images: Tensor) -> Tensor:
        if len(images) == 2:
            raise ValueError("not these")
        return images.flatten(1)[:, :3]

    predictor = Predictor(fastidious)
    predictor(tiny_images(3))
    assert fingerprint_of(predictor) is None


def test_a_fingerprint_is_the_models_answers_and_distances_count_in_their_deviations(net) -> None:
    predictor = Predictor(net)
    found = of_noise(predictor, (1, 12, 12))
    assert isinstance(found, Fingerprint)
    assert (found.shape, found.half, found.answers.features) == ((1, 12, 12), False, None)
    assert found.answers.logits.shape == (2, 5)
    assert torch.equal(of_noise(predictor, (1, 12, 12)).answers.logits, found.answers.logits)
    first, second = torch.tensor([[3.0, 5.0]]), torch.tensor([[0.0, 8.0]])
    assert distance(first, second) == pytest.approx(3 / 4)
    assert distance(second, second) == 0

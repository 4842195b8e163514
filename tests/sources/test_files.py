"""Networks that come as a bare file: ONNX and exported programs, and what stands beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headtilt as ht
from headtilt.calibration.head import HeadRecipe
from headtilt.errors import DataError, HeadtiltError, ModelError
from headtilt.model.predictor import Predictor
from headtilt.paper import zoo
from headtilt.paper.data import load
from headtilt.sources import Adapted, onnx, pt2, sidecar
from headtilt.sources import registry as door
from headtilt.sources.preprocessing import BlackBox
from tests.toys import its

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the exporters


class Small(nn.Module):
    def __init__(self, channels: int = 3, classes: int = 5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(classes, channels, 6, 6, generator=generator))

    def forward(self, images: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(images, self.weight, stride=3).amax((2, 3))


@pytest.fixture
def images() -> Tensor:
    return torch.rand(5, 3, 24, 24, generator=torch.Generator().manual_seed(1))


def write_onnx(path: Path, model: nn.Module, shape: tuple[int, ...], *, dynamic: bool) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra headtilt[onnx]")
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},) if dynamic else None
    torch.onnx.export(
        model.eval(),
        (torch.rand(shape),),
        path,
        dynamo=True,
        dynamic_shapes=shapes,
        external_data=False,
        verbose=False,
    )


@pytest.mark.parametrize("dynamic", [True, False], ids=["any batch", "batches of one"])
def test_an_onnx_file_gives_the_logits_of_its_network(tmp_path, images, dynamic):
    pytest.importorskip("onnxruntime", reason="needs the extra headtilt[onnx]")
    model = Small()
    write_onnx(tmp_path / "net.onnx", model, (2 if dynamic else 1, 3, 24, 24), dynamic=dynamic)
    found = door.load(f"onnx:{tmp_path / 'net.onnx'}")
    assert (found.size, found.resize, found.channels, found.labels, found.features) == (24, 24, 3, None, None)
    with torch.no_grad():
        assert torch.allclose(found.model(images), model(images), atol=1e-5)
    robust = ht.from_pretrained(str(tmp_path / "net.onnx"), search=ht.Tree(samples=5))
    assert torch.equal(robust(images).argmax(1), its(model, samples=5, padding=found.padding)(images).argmax(1))
    assert found.sampled == ()
    with pytest.raises(ht.OptionError, match="dropout"):
        ht.from_pretrained(str(tmp_path / "net.onnx"), mc_passes=3)


class Bytes(nn.Module):
    """Takes bytes, channels last, as many networks from TensorFlow do, and ends in a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Small()

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images.permute(0, 3, 1, 2).float() / 255).softmax(-1)


def test_a_network_of_bytes_channels_last_and_probabilities_is_shown_what_it_wants(tmp_path, images):
    pytest.importorskip("onnxruntime", reason="needs the extra headtilt[onnx]")
    pytest.importorskip("onnxscript", reason="needs the extra headtilt[onnx]")
    example = (torch.zeros(1, 24, 24, 3, dtype=torch.uint8),)
    torch.onnx.export(Bytes().eval(), example, tmp_path / "net.onnx", dynamo=True, external_data=False, verbose=False)
    (tmp_path / "net.json").write_text(json.dumps({"output": "probabilities", "labels": list("abcde")}))
    found = onnx.load(str(tmp_path / "net.onnx"))
    assert (found.size, found.channels, found.labels) == (24, 3, tuple("abcde"))
    with torch.no_grad():
        expected = Bytes()((images * 255).round().to(torch.uint8).permute(0, 2, 3, 1))
        assert torch.allclose(found.model(images).softmax(-1), expected, atol=1e-5)


class Layered(nn.Module):
    """Two linear layers, whose inputs are the features that `fit` would read."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Conv2d(3, 4, 5, stride=3), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
            self.head = nn.ModuleDict({"first": nn.Linear(16, 6), "last": nn.Linear(6, 5)})

    def forward(self, images: Tensor) -> Tensor:
        return self.head["last"](self.head["first"](self.body(images)))


def layered() -> Adapted:
    return Adapted(Layered().eval(), tuple("abcde"), 24, 30, "zeros", "layered")


def test_a_classifier_written_as_onnx_keeps_its_features_and_serves_its_bundle(tmp_path, images):
    pytest.importorskip("onnxruntime", reason="needs the extra headtilt[onnx]")
    pytest.importorskip("onnxscript", reason="needs the extra headtilt[onnx]")
    source = layered()
    onnx.write(tmp_path / "net.onnx", source)
    found = door.load(f"onnx:{tmp_path / 'net.onnx'}")
    assert (found.labels, found.size, found.resize, found.padding) == (source.labels, 24, 30, "zeros")
    assert found.features == ("body.2:out", "head.first", "head.last")
    embedded = ht.from_pretrained(str(tmp_path / "net.onnx")).embed(images)
    assert embedded.shape == (5, 6), "what the last layer reads"

    digits, recipe = load("digits", "fit", limit=60).floats(), HeadRecipe(hidden=8, looks=1)
    source = Adapted(zoo.load("digits"), None, 28, 28, "zeros", "digits", channels=1)
    onnx.write(tmp_path / "digits.onnx", source)
    robust = ht.ITS(source.model, **ht.fast([ht.rotation()])).fit(digits, recipe=recipe)
    robust.save(tmp_path / "bundle")
    file = door.load(f"onnx:{tmp_path / 'digits.onnx'}").model
    here, there = robust.search(digits), ht.ITS.load(tmp_path / "bundle", file).search(digits)
    assert torch.allclose(there.logits, here.logits, atol=1e-3)
    assert torch.allclose(there.pose, here.pose, atol=1e-4)


def test_features_of_an_onnx_file_survive_its_fixed_batch_and_its_normalisation(images):
    said = Layered()
    box = BlackBox(lambda views: [said(views), said.body(views)], 2, ["deep.inside"])
    tapped = Predictor(box, features="deep.inside")(images)
    with torch.no_grad():
        assert torch.allclose(tapped.logits, said(images), atol=1e-5)
        assert torch.allclose(tapped.features, said.body(images), atol=1e-5)
    about = sidecar.Sidecar(mean=(0.5,), std=(0.2,), output="probabilities")
    behind = sidecar.adapted(box, about, size=24, channels=3, name="net", features=["deep.inside"])
    assert behind.features == ("model.network.deep.inside",)
    assert Predictor(behind.model, features=behind.features)(images).features.shape == (5, 16)


def test_a_layer_that_no_name_can_stand_for_is_an_error():
    with pytest.raises(ModelError, match="call"):
        BlackBox(lambda views: views, None, ["call"])


def test_a_classifier_is_written_to_an_onnx_file_and_to_no_other(tmp_path):
    with pytest.raises(ht.OptionError, match=r"\.onnx"):
        onnx.write(tmp_path / "net.pt2", layered())
    assert not list(tmp_path.iterdir())


def test_onnx_metadata_names_the_classes_and_the_file_beside_wins(tmp_path):
    pytest.importorskip("onnxruntime", reason="needs the extra headtilt[onnx]")
    library = pytest.importorskip("onnx", reason="needs the extra headtilt[onnx]")
    path = tmp_path / "net.onnx"
    write_onnx(path, Small(), (1, 3, 24, 24), dynamic=False)
    proto = library.load(path)
    for key, value in {
        "names": "{0: 'ant', 1: 'bee', 2: 'cat', 3: 'dog', 4: 'elk'}",
        "headtilt": '{"resize": 30}',
    }.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    library.save(proto, path)
    found = onnx.load(str(path))
    assert (found.labels, found.resize) == (("ant", "bee", "cat", "dog", "elk"), 30)
    (tmp_path / "net.json").write_text(json.dumps({"resize": 40, "mean": [0.5] * 3, "std": [0.25] * 3, "factor": 255}))
    found = onnx.load(str(path))
    assert (found.labels, found.resize) == (("ant", "bee", "cat", "dog", "elk"), 40)
    picture = torch.rand(1, 3, 24, 24, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.allclose(found.model(picture), Small()((picture * 255 - 0.5) / 0.25), rtol=1e-4)


def test_gpu_providers_are_asked_for_where_a_gpu_is_wanted_and_the_package_has_them():
    have = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert onnx.providers("cpu", have) == ["CPUExecutionProvider"]
    assert onnx.providers("cuda:1", have) == [("CUDAExecutionProvider", {"device_id": 1}), "CPUExecutionProvider"]
    assert onnx.providers("cuda", have[1:]) == ["CPUExecutionProvider"]


@pytest.mark.parametrize("dynamic", [True, False], ids=["any batch", "batches of two"])
def test_an_exported_program_gives_the_logits_of_its_network(tmp_path, images, dynamic):
    model = Small().eval()
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},) if dynamic else None
    torch.export.save(torch.export.export(model, (images[:2],), dynamic_shapes=shapes), tmp_path / "net.pt2")
    source = Adapted(model, tuple("abcde"), 24, 28, "zeros", "net")
    assert sidecar.write(tmp_path / "net.pt2", source) == tmp_path / "net.json"
    found = door.load(str(tmp_path / "net.pt2"))
    assert (found.size, found.resize, found.labels, found.padding) == (24, 28, tuple("abcde"), "zeros")
    with torch.no_grad():
        assert torch.allclose(found.model(images), model(images), atol=1e-5)
    robust = its(found.model, samples=5).train().eval()
    assert torch.equal(robust(images), its(model, samples=5)(images))


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('ran code')",)


def test_an_exported_program_cannot_bring_pickled_code_along(tmp_path, images):
    import io
    import pickle
    import zipfile

    good, bad = tmp_path / "good.pt2", tmp_path / "bad.pt2"
    torch.export.save(torch.export.export(Small().eval(), (images[:2],)), good)
    payload = io.BytesIO()
    torch.save(Evil(), payload, pickle_module=pickle)
    with zipfile.ZipFile(good) as before, zipfile.ZipFile(bad, "w") as after:
        swapped = 0
        for item in before.infolist():
            content = before.read(item)
            if "sample_inputs" in item.filename:
                content, swapped = payload.getvalue(), swapped + 1
            after.writestr(item, content)
    if not swapped:
        pytest.skip("this torch keeps no pickled inputs in its archives")
    with pytest.raises(HeadtiltError):
        pt2.load(str(bad))


@pytest.mark.parametrize("scheme", ["onnx", "pt2"])
def test_a_file_that_is_none_says_so(tmp_path, scheme):
    if scheme == "onnx":
        pytest.importorskip("onnxruntime", reason="needs the extra headtilt[onnx]")
    with pytest.raises(DataError, match="is not a file"):
        door.load(f"{scheme}:{tmp_path / 'nosuch'}")
    (tmp_path / "broken").write_bytes(b"not a network")
    with pytest.raises(DataError, match="cannot be read"):
        door.load(f"{scheme}:{tmp_path / 'broken'}")


def test_a_program_that_takes_no_images_is_refused(tmp_path):
    program = torch.export.export(nn.Linear(3, 2), (torch.rand(1, 3),))
    torch.export.save(program, tmp_path / "line.pt2")
    with pytest.raises(ModelError, match="one batch of images"):
        pt2.load(str(tmp_path / "line.pt2"))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ('{"lables": []}', "lables"),
        ('{"size": 0}', "size must be a whole number"),
        ('{"std": [0]}', "std must be a finite number above 0"),
        ('{"resample": "magic"}', "resample must be one of"),
        ('{"mean": 3}', "mean"),
        ("[1]", "must hold a JSON object"),
        ("{", "is no JSON"),
    ],
)
def test_a_file_beside_that_makes_no_sense_is_an_error(tmp_path, said, why):
    (tmp_path / "net.json").write_text(said)
    with pytest.raises(DataError, match=why) as caught:
        sidecar.beside(tmp_path / "net.onnx")
    assert "net.json" in str(caught.value)


@pytest.mark.parametrize("text", ['["a", "b"]', "{'1': 'b', '0': 'a'}", '{"0": "a", "1": "b"}', "a,b", "a\nb\n"])
def test_class_names_are_read_in_the_forms_in_which_exporters_write_them(tmp_path, text):
    assert sidecar.beside(tmp_path / "net.onnx", {"labels": text}).labels == ("a", "b")


def test_a_network_of_any_size_needs_a_word_on_which(tmp_path):
    with pytest.raises(DataError, match=r"net\.json beside it"):
        sidecar.side(None, sidecar.Sidecar(), tmp_path / "net.onnx")
    assert sidecar.side(None, sidecar.Sidecar(size=64), tmp_path / "net.onnx") == 64
    assert sidecar.side(32, sidecar.Sidecar(size=64), tmp_path / "net.onnx") == 32

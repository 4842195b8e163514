"""Taps are found by structure, read at their depth as one vector per view, and any network has them."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import headtilt as ht
from headtilt.model import taps
from headtilt.model.outputs import as_vectors, first_tensor, pooled
from headtilt.model.predictor import Predictor
from tests.toys import TinyNet, fingerprint, its, tiny_images


def drawn(make):
    """A network whose weights are always the same, whatever the global stream does."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval()


def read(model, count: int = 3, channels: int = 3, size: int = 32, **options):
    """The taps of a model and the features that they give of images."""
    predictor = Predictor(model, features="auto", **options)
    features = predictor(tiny_images(count, size, size, channels)).features
    return predictor.features, features


# --- networks of the usual kinds --------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, stride=2, padding=1)
        self.short = nn.Conv2d(inside, outside, 1, stride=2)

    def forward(self, maps):
        return F.relu(self.conv(maps) + self.short(maps))


class ResNet(nn.Module):
    """Stages of residual blocks, as in torchvision and timm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(Residual(4, 6), Residual(6, 6))
        self.layer2 = nn.Sequential(Residual(6, 8))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, images):
        return self.fc(self.pool(self.layer2(self.layer1(self.stem(images)))).flatten(1))


class Inverted(nn.Module):
    """An inverted residual, as in MobileNet; with squeeze and excitation, as in EfficientNet."""

    def __init__(self, inside: int, outside: int, squeeze: bool = False) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(inside, 12, 1), nn.BatchNorm2d(12), nn.ReLU6())
        self.deep = nn.Conv2d(12, 12, 3, stride=2, padding=1, groups=12)
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(12, 12, 1), nn.Sigmoid()) if squeeze else None
        self.narrow = nn.Conv2d(12, outside, 1)

    def forward(self, maps):
        deep = self.deep(self.wide(maps))
        return self.narrow(deep if self.squeeze is None else deep * self.squeeze(deep))


class MobileNet(nn.Module):
    def __init__(self, squeeze: bool = False) -> None:
        super().__init__()
        blocks = [Inverted(4, 6, squeeze), Inverted(6, 8, squeeze), Inverted(8, 10, squeeze)]
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), *blocks, nn.Conv2d(10, 14, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(14, 5))

    def forward(self, images):
        return self.classifier(self.features(images).mean((2, 3)))


class ConvNeXtBlock(nn.Module):
    """Linear layers on maps with their channels last, inside of the block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.deep = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.wide, self.narrow = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, maps):
        last = self.norm(self.deep(maps).permute(0, 2, 3, 1))
        return maps + self.narrow(F.gelu(self.wide(last))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 4, stride=4)
        self.stages = nn.ModuleList([nn.Sequential(ConvNeXtBlock(6), ConvNeXtBlock(6)), ConvNeXtBlock(6)])
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, images):
        maps = self.stem(images)
        for stage in self.stages:
            maps = stage(maps)
        return self.head(self.norm(maps.mean((2, 3))))


class Layer(nn.Module):
    """A layer of a transformer on tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.parts = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))

    def forward(self, tokens):
        query, key, value = self.parts(self.norm(tokens)).chunk(3, dim=-1)
        tokens = tokens + (query @ key.transpose(1, 2)).softmax(-1) @ value
        return tokens + self.mlp(tokens)


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 8, 8, stride=8), nn.Parameter(torch.randn(1, 1, 8))
        self.blocks, self.norm, self.head = nn.ModuleList([Layer(8), Layer(8)]), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(images.shape[0], -1, -1), tokens], dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens)[:, 0])


class Windows(nn.Module):
    """A block that takes and gives maps with their channels last, as Swin's do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 12), nn.Linear(12, width))

    def forward(self, maps):
        return maps + self.mlp(self.norm(maps))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 4, stride=4)
        self.layers, self.merge = nn.ModuleList([Windows(6), Windows(6)]), nn.Linear(24, 10)
        self.last, self.head = nn.ModuleList([Windows(10), Windows(10)]), nn.Linear(10, 5)

    def forward(self, images):
        maps = self.patches(images).permute(0, 2, 3, 1)
        for layer in self.layers:
            maps = layer(maps)
        parts = [maps[:, down::2, right::2] for down in (0, 1) for right in (0, 1)]
        maps = self.merge(torch.cat(parts, dim=-1))
        for layer in self.last:
            maps = layer(maps)
        return self.head(maps.mean((1, 2)))


class Dense(nn.Module):
    """A layer whose output joins its input, as in DenseNet."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(inside), nn.Conv2d(inside, 4, 3, padding=1)

    def forward(self, maps):
        return torch.cat([maps, self.conv(F.relu(self.norm(maps)))], dim=1)


class DenseBlock(nn.Module):
    def __init__(self, inside: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Dense(inside), Dense(inside + 4)])

    def forward(self, maps):
        for layer in self.layers:
            maps = layer(maps)
        return F.avg_pool2d(maps, 2)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), DenseBlock(4), DenseBlock(12)
        self.classifier = nn.Linear(20, 5)

    def forward(self, images):
        return self.classifier(F.relu(self.second(self.first(self.stem(images)))).mean((2, 3)))


def plain():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 169, 7), nn.ReLU(), nn.Linear(7, 5),
    )  # fmt: skip


KINDS = {
    # What the last linear layer reads is a mean of what the last block gives, and is read there alone.
    "ResNet": (ResNet, ("layer1.0:out", "layer1.1:out", "fc"), 6 + 6 + 8),
    "MobileNet": (MobileNet, ("features.1:out", "features.2:out", "features.3:out", "classifier.1"), 6 + 8 + 10 + 14),
    "EfficientNet": (
        lambda: MobileNet(squeeze=True),
        ("features.1:out", "features.2:out", "features.3:out", "classifier.1"),
        6 + 8 + 10 + 14,
    ),
    "ConvNeXt": (ConvNeXt, ("stages.0.0:out", "stages.0.1:out", "stages.1:out", "head"), 4 * 6),
    "ViT": (ViT, ("blocks.0:out", "blocks.1:out", "head"), 16 + 16 + 8),
    "Swin": (Swin, ("layers.0:out", "layers.1:out", "last.0:out", "head"), 6 + 6 + 10 + 10),
    "DenseNet": (DenseNet, ("first:out", "second:out", "classifier"), 12 + 20 + 20),
    "a plain chain": (plain, ("2", "4", "6:out", "8", "10"), 4 + 6 + 8 + 8 * 169 + 7),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_taps_of_a_network_are_the_outputs_of_its_blocks_and_the_inputs_of_its_last_linear_layers(kind):
    make, names, width = KINDS[kind]
    model = drawn(make)
    before = fingerprint(model)
    found, features = read(model)
    assert found == names
    assert features.shape == (3, width)
    assert features.dtype == torch.float32
    assert fingerprint(model) == before


@pytest.mark.parametrize("kind", KINDS)
def test_features_do_not_depend_on_the_chunk_or_the_batch(kind):
    model = drawn(KINDS[kind][0])
    names, features = read(model)
    assert read(model, count=1)[0] == names
    assert_close(read(model, count=1)[1], features[:1], rtol=1e-4, atol=1e-5)
    assert_close(read(model, chunk=1)[1], features, rtol=1e-4, atol=1e-5)
    assert float((features[0] - features[1]).abs().max()) > 1e-4


def test_features_are_what_the_blocks_give_averaged_over_space():
    model, images = drawn(ResNet), tiny_images(3, 32, 32, 3)
    with torch.no_grad():
        first = model.layer1[0](model.stem(images))
        second = model.layer1[1](first)
        last = model.pool(model.layer2(second)).flatten(1)
        expected = torch.cat([first.mean((2, 3)), second.mean((2, 3)), last], dim=1)
    assert_close(read(model)[1], expected, rtol=1e-4, atol=1e-5)


def test_tokens_give_their_mean_and_the_class_token():
    model, images = drawn(ViT), tiny_images(3, 32, 32, 3)
    with torch.no_grad():
        tokens = torch.cat([model.token.expand(3, -1, -1), model.patches(images).flatten(2).transpose(1, 2)], dim=1)
        tokens = model.blocks[0](tokens)
    assert tokens.shape == (3, 17, 8)
    assert_close(read(model)[1][:, :16], torch.cat([tokens.mean(1), tokens[:, 0]], dim=1), rtol=1e-4, atol=1e-5)


# --- models of Hugging Face -------------------------------------------------------------------------------------------


def hugging_face(name: str):
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    small = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    square = {"image_size": 32, "patch_size": 8, "num_labels": 5}
    kinds = {
        "ResNet": {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 2], "num_labels": 5},
        "ViT": {**small, **square},
        "DeiT": {**small, **square},
        "ConvNext": {"hidden_sizes": [4, 8], "depths": [1, 2], "num_stages": 2, "num_labels": 5},
        "Swin": {
            "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2],
            "window_size": 4, "num_labels": 5,
        },
        "MobileNetV2": {"depth_multiplier": 0.1, "min_depth": 4, "image_size": 32, "num_labels": 5},
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**kinds[name])
    return drawn(lambda: getattr(transformers, f"{name}ForImageClassification")(config))


@pytest.mark.parametrize("name", ["ResNet", "ViT", "DeiT", "ConvNext", "Swin", "MobileNetV2"])
def test_models_of_hugging_face_are_read_at_several_depths_and_before_their_classifier(name):
    model = hugging_face(name)
    before = fingerprint(model)
    names, features = read(model)
    blocks = [one for one in names if one.endswith(":out")]
    assert len(blocks) >= 2
    assert names[-1].startswith("classifier")
    assert features.shape[0] == 3
    assert bool(features.isfinite().all())
    assert fingerprint(model) == before
    assert isinstance(model.get_submodule(names[-1]), nn.Linear)
    for one in blocks:  # none lies in another
        assert not any(other.startswith(f"{one.removesuffix(':out')}.") for other in blocks)


def test_the_layers_of_a_transformer_of_hugging_face_are_its_blocks():
    names, features = read(hugging_face("ViT"))
    assert len(names) == 4
    assert [name.rpartition(".")[2] for name in names] == ["0:out", "1:out", "2:out", "classifier"]
    assert features.shape == (3, 3 * 16 + 8)  # means and class tokens, then what the classifier reads


# --- models of other kinds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compile_",
    [
        torch.jit.trace,
        lambda model, images: torch.jit.script(model),
    ],
    ids=["traced", "scripted"],
)
def test_a_traced_and_a_scripted_model_give_logits_alone_and_no_error(compile_):
    model, images = drawn(plain), tiny_images(3, 32, 32, 3)
    with torch.no_grad():
        expected = model(images)
    with quiet():
        frozen = compile_(model, images)
    found = Predictor(frozen, features="auto")
    evidence = found(images)
    assert found.features == ()
    assert evidence.features is None
    assert_close(evidence.logits, expected, rtol=1e-4, atol=1e-5)


@contextmanager
def quiet():
    """Let torch call its own compiler of old deprecated, which is no fault of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_a_traced_part_is_passed_over_and_the_rest_is_read():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            with quiet():
                self.body = torch.jit.trace(drawn(lambda: nn.Conv2d(3, 4, 3)), tiny_images(1, 32, 32, 3))
            self.last = nn.Linear(4, 5)

        def forward(self, images):
            return self.last(self.body(images).mean((2, 3)))

    names, features = read(drawn(Mixed))
    assert names == ("last",)
    assert features.shape == (3, 4)


def test_a_compiled_model_has_the_taps_and_the_features_of_the_plain_one():
    model = drawn(ResNet)
    names, features = read(model)
    compiled = torch.compile(model, backend="eager")
    found, seen = read(compiled)
    assert found == names
    assert_close(seen, features)
    before = fingerprint(model)
    Predictor(compiled, features=names)(tiny_images(2, 32, 32, 3))
    assert fingerprint(model) == before


def test_a_compiled_model_is_run_compiled_where_no_feature_is_read():
    runs = []

    def backend(graph, inputs):
        runs.append(len(inputs))
        return graph.forward

    Predictor(torch.compile(drawn(ResNet), backend=backend))(tiny_images(2, 32, 32, 3))
    assert runs


def test_a_data_parallel_model_is_read_inside_of_what_it_wraps_by_the_same_names():
    model = drawn(ResNet)
    names, features = read(nn.DataParallel(model))
    assert names == read(model)[0]
    assert_close(features, read(model)[1])


def test_a_plain_callable_and_a_model_without_parts_have_no_taps():
    net = drawn(ResNet)
    assert read(lambda views: net(views)) == ((), None)
    assert read(nn.Flatten(), size=4) == ((), None)


class Wrapping(nn.Module):
    """A block that gives its maps among other things."""

    def __init__(self, form) -> None:
        super().__init__()
        self.conv, self.form = nn.Conv2d(3, 3, 3, padding=1), form

    def forward(self, maps=None):
        return self.form(torch.tanh(self.conv(maps)))


FORMS = {
    "a tuple": (lambda maps: (None, 3, maps, maps + 1), lambda given: given[2]),
    "a dict": (lambda maps: {"step": torch.tensor(3), "maps": maps}, lambda given: given["maps"]),
    "a tuple of tuples": (lambda maps: ((maps, None), torch.zeros(2)), lambda given: given[0][0]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("named", [False, True], ids=["by place", "by keyword"])
def test_blocks_may_give_tuples_and_dicts_and_be_called_by_keyword(form, named):
    wrap, unwrap = FORMS[form]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = Wrapping(wrap), Wrapping(wrap), nn.Linear(3, 5)

        def forward(self, images):
            for block in (self.first, self.second):
                images = unwrap(block(maps=images) if named else block(images))
            vectors = (images**2).mean((2, 3))
            return self.last(input=vectors) if named else self.last(vectors)

    model, images = drawn(Model), tiny_images(3, 32, 32, 3)
    names, features = read(model)
    assert names == ("first:out", "second:out", "last")
    with torch.no_grad():
        first = torch.tanh(model.first.conv(images))
        second = torch.tanh(model.second.conv(first))
    expected = torch.cat([first.mean((2, 3)), second.mean((2, 3)), (second**2).mean((2, 3))], dim=1)
    assert_close(features, expected, rtol=1e-4, atol=1e-5)


def test_the_first_tensor_is_a_batch_of_numbers():
    good = torch.zeros(2, 3)
    assert first_tensor([None, "x", torch.zeros(2, dtype=torch.long), torch.zeros(5), {"a": (good,)}]) is good
    assert first_tensor(torch.zeros(2, 3, dtype=torch.long)) is None
    assert first_tensor({"a": 1}) is None


def test_blocks_that_are_called_twice_are_not_tapped():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.again, self.once, self.other = (Residual(3, 3) for _ in range(3))
            self.last = nn.Linear(3, 5)

        def forward(self, images):
            maps = self.again(self.again(self.once(self.other(images))))
            return self.last((maps**2).mean((2, 3)))

    assert read(drawn(Shared))[0] == ("other:out", "once:out", "last")


def test_a_linear_layer_that_is_called_twice_is_not_tapped():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.last = nn.Linear(3, 3), nn.Linear(3, 5)

        def forward(self, images):
            return self.last(self.shared(self.shared(images.mean((2, 3)))))

    assert read(drawn(Twice))[0] == ("last",)


# --- how wide, and how they are reduced -------------------------------------------------------------------------------


class Deep(nn.Module):
    """Ten blocks of the same width before a linear layer that reads something else."""

    def __init__(self, width: int = 6, count: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 1)
        self.blocks = nn.ModuleList(nn.Sequential(Residual(width, width)) for _ in range(count))
        self.last = nn.Linear(width, 5)

    def forward(self, images):
        maps = self.stem(images)
        for block in self.blocks:
            maps = F.interpolate(block(maps), scale_factor=2)
        return self.last((maps**2).mean((2, 3)))


@pytest.mark.parametrize(("room", "kept"), [(60, 10), (59, 9), (30, 5), (12, 2), (6, 1), (1, 1)])
def test_blocks_that_are_too_wide_together_are_thinned_out_evenly_and_the_last_one_stays(room, kept, monkeypatch):
    monkeypatch.setattr(taps, "MOST_WIDTH", room + 6)  # six for what the linear layer reads
    names, features = read(drawn(Deep))
    assert names[-1] == "last"
    places = [int(name.split(".")[1]) for name in names[:-1]]
    assert len(places) == kept
    assert places[-1] == 9
    assert places == sorted(places)
    assert len({second - first for first, second in pairwise(places)} or {0}) <= 2
    assert max((second - first for first, second in pairwise(places)), default=1) <= -(-10 // kept)
    assert features.shape == (3, 6 * (kept + 1))


def test_a_single_block_wider_than_all_room_is_read_all_the_same(monkeypatch):
    monkeypatch.setattr(taps, "MOST_WIDTH", 1)
    names, _ = read(drawn(ResNet))
    assert names == ("layer1.1:out", "fc")


def test_maps_are_averaged_over_space_wherever_their_channels_are():
    maps = torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4)
    assert_close(as_vectors(maps), maps.mean((2, 3)))
    last = maps.permute(0, 2, 3, 1)
    assert last.shape == (2, 4, 4, 3)
    assert_close(as_vectors(last), maps.mean((2, 3)))
    wide = torch.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
    assert_close(as_vectors(wide), wide.mean((2, 3)))


@pytest.mark.parametrize(("tokens", "own"), [(16, False), (17, True), (9, False), (18, True)])
def test_tokens_that_are_no_square_of_places_have_a_class_token_first(tokens, own):
    given = torch.arange(2 * tokens * 3.0).reshape(2, tokens, 3)
    expected = torch.cat([given.mean(1), given[:, 0]], dim=1) if own else given.mean(1)
    assert_close(as_vectors(given), expected)


def test_vectors_are_read_as_they_are_and_in_single_precision():
    assert torch.equal(as_vectors(torch.ones(2, 5, dtype=torch.bfloat16)), torch.ones(2, 5))
    assert as_vectors(torch.ones(2, 5, 4, 4, dtype=torch.float16)).dtype == torch.float32


def test_several_passes_are_averaged_and_the_lists_emptied():
    tap = [[torch.arange(12.0).reshape(6, 2)]]
    assert_close(pooled(tap, 3, 2), torch.arange(12.0).reshape(3, 2, 2).mean(0))
    assert tap == [[]]
    assert pooled([], 1, 2) is None


# --- taps that cannot be read -----------------------------------------------------------------------------------------


class Detour(nn.Module):
    """A part that gives a number, one that is never reached, and one whose width changes from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.idle, self.number = TinyNet(), nn.Linear(2, 2), Number()

    def forward(self, images):
        self.number(images)
        return self.net(images)


class Number(nn.Module):
    def forward(self, images):
        return len(images)


def test_a_tap_that_meets_no_tensor_is_a_model_error():
    with pytest.raises(ht.ModelError, match=r"the feature tap 'number:out' met no tensor\. Name another module"):
        Predictor(Detour(), features="number:out")(tiny_images(2))


def test_a_tap_that_is_never_reached_is_a_model_error():
    with pytest.raises(ht.ModelError, match=r"a feature tap was not reached by this forward pass\. Name other modules"):
        Predictor(Detour(), features="idle")(tiny_images(2))


def test_a_tap_that_names_no_module_is_an_option_error():
    with pytest.raises(ht.OptionError, match="features must name modules of the model; 'elsewhere:out' names none"):
        Predictor(Detour(), features=("net.conv", "elsewhere:out"))(tiny_images(2))


class Growing(nn.Module):
    """Every call of its body gives one channel more."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.body, self.calls = TinyNet(), nn.Identity(), 0

    def forward(self, images):
        self.calls += 1
        self.body(images.new_ones(len(images), self.calls))
        return self.net(images)


def test_a_width_that_changes_between_calls_is_a_model_error():
    with pytest.raises(ht.ModelError, match="feature"):
        Predictor(Growing(), features="body", chunk=2)(tiny_images(6))


# --- through a file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ResNet", "ViT", "Swin"])
def test_an_onnx_file_of_a_model_has_all_its_taps_and_serves_the_bundle_that_was_fitted_on_the_model(
    kind, tmp_path, monkeypatch
):
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    from headtilt.calibration import head
    from headtilt.calibration.head import HeadRecipe
    from headtilt.sources import Adapted, onnx

    monkeypatch.setattr(head, "FEWEST_STEPS", 4)
    model, images = drawn(KINDS[kind][0]), tiny_images(70, 32, 32, 3)
    last = model.get_submodule(KINDS[kind][1][-1])
    with torch.no_grad():  # so that answers differ from image to image
        last.weight.mul_(200)
        last.bias.sub_(model(images).mean(0))
    adapted = Adapted(model, None, 32, 32, "zeros", "net", 3)
    onnx.write(tmp_path / "net.onnx", adapted)
    loaded = onnx.load(str(tmp_path / "net.onnx"))
    assert tuple(loaded.features) == KINDS[kind][1]
    recipe = HeadRecipe(looks=1, views=6, epochs=1, hidden=16)
    robust = its(model, search="joint", budget=6, readout="marginal").fit(images, recipe=recipe, promise=5.0)
    assert robust.predictor.features == KINDS[kind][1]
    robust.save(tmp_path / "bundle")
    through = ht.ITS.load(tmp_path / "bundle", loaded.model)
    one, other = robust.search(images[:20]), through.search(images[:20])
    assert torch.equal(one.labels, other.labels)
    assert_close(other.logits, one.logits, rtol=1e-2, atol=1e-2)
    assert len(one.labels.unique()) > 1


def test_a_file_has_the_taps_that_images_show_and_not_those_that_a_black_square_shows(tmp_path):
    """Where nothing comes in, several layers may give the same: that does not make them one."""
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    from headtilt.sources import Adapted, onnx

    model = drawn(Silent)
    assert read(model)[0] == ("first:out", "last")
    onnx.write(tmp_path / "net.onnx", Adapted(model, None, 32, 32, "zeros", "net", 3))
    assert tuple(onnx.load(str(tmp_path / "net.onnx")).features) == ("first:out", "last")


class Silent(nn.Module):
    """Without any bias: black in, nothing out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Unbiased(), Unbiased(), nn.Linear(3, 5)

    def forward(self, images):
        return self.last(self.second(self.first(images)).mean((2, 3)))


class Unbiased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, bias=False)

    def forward(self, maps):
        return torch.tanh(self.conv(maps))

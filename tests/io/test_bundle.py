"""Bundles: what `save` writes, `load` gives back bit for bit, and nothing else gets in."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import headtilt as ht
from headtilt.calibration.balance import Balance
from headtilt.calibration.distances import Neighbours
from headtilt.calibration.gate import CautiousGate, Gate
from headtilt.calibration.head import HeadRecipe, OrbitHead
from headtilt.io import bundle
from headtilt.paper.data import load
from headtilt.presets import fast
from tests.toys import TinyNet, its, tiny_images

TINY = HeadRecipe(looks=1, views=6, epochs=1, hidden=16)


class Net(nn.Module):
    """A small classifier with two linear layers and dropout, always the same."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten())
            self.hidden = nn.Linear(36, 12)
            self.drop = nn.Dropout(0.3)
            self.last = nn.Linear(12, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.hidden(self.body(images)))))


def images(count: int, seed: int = 0) -> Tensor:
    noise = torch.rand(count, 1, 12, 12, generator=torch.Generator().manual_seed(seed))
    return (nn.functional.avg_pool2d(noise, 3, 1, 1) * 4 - 1.5).clamp(0, 1)


@pytest.mark.parametrize("method", ["head", "balance", "bias", "prototypes", "neighbours"])
def test_a_fitted_wrapper_answers_the_same_after_a_round_trip(tmp_path: Path, method: str) -> None:
    model = Net()
    robust = ht.ITS(model, **fast()).fit(images(80), method=method, recipe=TINY)  # type: ignore[arg-type]
    robust.save(tmp_path / "bundle")
    again = ht.ITS.load(tmp_path / "bundle", model)
    first, second = robust.search(images(9, 1)), again.search(images(9, 1))
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.pose, second.pose)
    assert torch.equal(first.views, second.views)
    assert torch.equal(first.pose_confidence.nan_to_num(-1), second.pose_confidence.nan_to_num(-1))
    assert again.report == robust.report
    assert again.predictor.features == robust.predictor.features
    assert again.padding == robust.padding


def test_a_report_with_infinities_is_json_and_comes_back(tmp_path: Path) -> None:
    model = Net()
    robust = ht.ITS(model, **fast()).fit(images(40), method="balance", promise=0.0)
    assert robust.report["gate"]["margin"] == math.inf
    robust.save(tmp_path / "bundle")
    json.loads((tmp_path / "bundle" / "headtilt.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert ht.ITS.load(tmp_path / "bundle", model).report == robust.report


@pytest.mark.parametrize(
    "options",
    [
        {"levels": [ht.rotation(1.0), ht.reflection(), ht.translate(0.1, 0.3)], "accept": "identity"},
        {"levels": [ht.scale(0.3).paper()], "samples": 9, "mc_passes": 3, "confidence": "bayesian"},
        {"search": "joint", "budget": 20, "rounds": 1, "hypotheses": 2, "padding": (0.25,), "gate": 1.5},
        {"search": "anneal", "budget": 12, "hot": 2.0, "calibrator": "batch", "interpolation": "nearest", "seed": 4},
        {"mc_sampled": True, "chunk": 7, "autocast": torch.bfloat16, "readout": "marginal"},
    ],
)
def test_every_option_survives_a_round_trip(tmp_path: Path, options: dict[str, object]) -> None:
    model = Net()
    robust = its(model, **options)  # type: ignore[arg-type]
    robust.save(tmp_path)
    again = ht.ITS.load(tmp_path, model)
    assert again.plan == robust.plan
    assert torch.equal(robust(images(5)), again(images(5)))


def test_a_margin_of_minus_infinity_survives_although_json_has_none(tmp_path: Path) -> None:
    robust = ht.ITS(Net(), gate=Gate(float("-inf")))
    robust.save(tmp_path)
    assert "Infinity" not in (tmp_path / bundle.CONFIG).read_text()
    gate = ht.ITS.load(tmp_path, Net()).gate
    assert gate is not None
    assert gate.margin == float("-inf")


def test_functions_of_ones_own_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for options in (
        {"confidence": lambda evidence, orbit: -evidence.energy},
        {"calibrator": lambda evidence: evidence},
    ):
        with pytest.raises(ht.OptionError, match="of your own"):
            its(Net(), **options).save(tmp_path / "bundle")  # type: ignore[arg-type]
    assert not (tmp_path / "bundle").exists()


def test_a_folder_that_is_no_bundle_says_so(tmp_path: Path) -> None:
    with pytest.raises(ht.DataError, match=r"no headtilt\.json"):
        ht.ITS.load(tmp_path, Net())


def test_tensors_that_are_not_the_ones_described_are_refused(tmp_path: Path) -> None:
    ht.ITS(Net(), calibrator=Balance(torch.arange(4.0))).save(tmp_path)
    (tmp_path / bundle.TENSORS).write_bytes((tmp_path / bundle.TENSORS).read_bytes()[:-1])
    with pytest.raises(ht.DataError, match="not the file"):
        ht.ITS.load(tmp_path, Net())


@pytest.mark.parametrize("found", [1, 99, None, "2"])
def test_another_format_is_refused_by_its_number_with_what_to_do(tmp_path: Path, found: object) -> None:
    ht.ITS(Net()).save(tmp_path)
    config = json.loads((tmp_path / bundle.CONFIG).read_text())
    assert config["format"] == bundle.FORMAT == 4
    (tmp_path / bundle.CONFIG).write_text(json.dumps({**config, "format": found}))
    with pytest.raises(ht.DataError, match=rf"format {found!r}; this version reads 4.*Fit again with .*, and save"):
        ht.ITS.load(tmp_path, Net())


@pytest.mark.parametrize("per_class", [True, False])
def test_a_head_comes_back_with_every_number_and_what_it_scores(tmp_path: Path, per_class: bool) -> None:
    head = OrbitHead(
        torch.arange(4.0), torch.zeros(48), torch.ones(48), source="features", hidden=8, per_class=per_class
    )
    with torch.no_grad():
        for number, parameter in enumerate(head.parameters()):
            parameter.fill_(0.1 * number + 0.3)
    ht.ITS(Net(), calibrator=head.eval(), features=("hidden", "last")).save(tmp_path)
    again = ht.ITS.load(tmp_path, Net()).calibrator
    assert isinstance(again, OrbitHead)
    assert again.state_dict().keys() == head.state_dict().keys()
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert (again.source, again.network[-1].out_features) == ("features", 5 if per_class else 2)
    assert not again.training
    assert not any(parameter.requires_grad for parameter in again.parameters())


def test_a_gate_with_infinite_thresholds_comes_back_whole(tmp_path: Path) -> None:
    ht.ITS(Net(), gate=Gate(math.inf, -math.inf, 0.1)).save(tmp_path)
    gate = ht.ITS.load(tmp_path, Net()).gate
    assert (gate.margin, gate.exit_at, gate.turn_at) == (math.inf, -math.inf, 0.1)


@pytest.mark.parametrize("value", [-0.5, 1.5])
@pytest.mark.parametrize("name", ["bare_weight", "guess_weight"])
def test_a_weight_that_no_fit_chooses_is_refused(tmp_path: Path, name: str, value: float) -> None:
    head = OrbitHead(torch.zeros(4), torch.zeros(48), torch.ones(48), source="features", hidden=8, per_class=True)
    getattr(head, name).fill_(value)
    ht.ITS(Net(), calibrator=head.eval(), features=("hidden", "last")).save(tmp_path)
    with pytest.raises(ht.DataError, match=rf"{value} in calibrator.{name}, a weight from 0 to 1"):
        ht.ITS.load(tmp_path, Net())


def test_a_weight_that_is_a_table_is_refused(tmp_path: Path) -> None:
    head = OrbitHead(torch.zeros(4), torch.zeros(48), torch.ones(48), source="features", hidden=8, per_class=True)
    head.bare_weight = torch.ones(3)
    ht.ITS(Net(), calibrator=head.eval(), features=("hidden", "last")).save(tmp_path)
    with pytest.raises(ht.DataError, match=r"\(3,\) in calibrator.bare_weight, which is no such table"):
        ht.ITS.load(tmp_path, Net())


def test_a_save_over_an_old_bundle_that_fails_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    old = ht.ITS(model, calibrator=Balance(torch.arange(4.0)))
    old.save(tmp_path)
    monkeypatch.setattr(bundle, "save_tensors", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        ht.ITS(model, calibrator=Balance(-torch.arange(4.0))).save(tmp_path, overwrite=True)
    assert torch.equal(ht.ITS.load(tmp_path, model)(images(3)), old(images(3)))


@given(st.binary(max_size=60))
def test_arbitrary_bytes_as_description_give_a_data_error(content: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, bundle.CONFIG).write_bytes(content)
        with pytest.raises(ht.DataError):
            bundle.read(folder)


@given(st.data())
def test_a_description_with_one_value_replaced_never_raises_anything_but_the_packages_errors(
    data: st.DataObject,
) -> None:
    import tempfile

    head = OrbitHead(torch.zeros(4), torch.zeros(4), torch.ones(4), source="logits", hidden=8, per_class=True)
    with tempfile.TemporaryDirectory() as folder:
        ht.ITS(Net(), levels=[ht.rotation(), ht.scale()], calibrator=head, gate=2.0).save(folder)
        path = Path(folder, bundle.CONFIG)
        config = json.loads(path.read_text())
        plan = config["options"]["search"]
        places = [config, config["calibrator"], config["options"], plan, plan["levels"][1]]
        place, key = data.draw(st.sampled_from([(place, name) for place in places for name in place]))
        place[key] = data.draw(st.none() | st.integers() | st.text(max_size=4) | st.lists(st.integers(), max_size=3))
        path.write_text(json.dumps(config))
        with contextlib.suppress(ht.HeadtiltError):
            ht.ITS.load(folder, Net())


def test_a_linear_balance_and_a_cautious_gate_come_back_as_they_were(digits_net, tilted, tmp_path):
    robust = its(digits_net, search="joint", budget=12, readout="marginal")
    robust.fit(load("digits", "fit", limit=200).floats(), method="balance", promise=None)
    robust.gate = CautiousGate(1.5, 0.25)
    assert robust.calibrator.weight is not None
    robust.save(tmp_path / "bundle")
    loaded = ht.ITS.load(tmp_path / "bundle", digits_net)
    assert (loaded.gate.margin, loaded.gate.doubt) == (1.5, 0.25)
    assert torch.equal(loaded(tilted), robust(tilted))


def test_numbers_of_numpy_survive_a_round_trip(tmp_path: Path) -> None:
    gates = (np.float64(1.5), CautiousGate(np.float64(1.5), np.float32(0.25)), Gate(np.float32(1.5), np.float64(2.5)))
    for gate in gates:
        robust = its(
            Net(),
            search="joint",
            budget=np.int64(6),
            gate=gate,
            chunk=np.int64(3),
            seed=np.int64(5),
            padding=np.float64(0.5),
        )
        robust.save(tmp_path, overwrite=True)
        again = ht.ITS.load(tmp_path, Net())
        assert torch.equal(again.gate.get_extra_state(), robust.gate.get_extra_state())
        assert (again.plan, again.predictor.chunk, again.predictor.seed, again.padding) == (robust.plan, 3, 5, 0.5)


class Mine:
    def leaves_early(self, root):
        return torch.zeros_like(root.labels, dtype=torch.bool)

    def keeps(self, bare, found, answer):
        return torch.zeros_like(bare.labels, dtype=torch.bool)


class Stricter(Gate):
    def keeps(self, bare, found, answer):
        return torch.ones_like(bare.labels, dtype=torch.bool)


@pytest.mark.parametrize("gate", [Mine(), Stricter(1.0)])
def test_a_gate_of_ones_own_searches_and_is_refused_by_save_with_what_to_do(tmp_path: Path, gate: object) -> None:
    robust = ht.ITS(Net(), gate=gate)
    robust(images(2))
    with pytest.raises(ht.OptionError, match=r"gate is of your own making.*Pass it to ITS again"):
        robust.save(tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_neighbours_come_back_with_the_classes_that_were_absent(tmp_path: Path) -> None:
    absent = torch.tensor([False, True, False, True])
    ht.ITS(Net(), calibrator=Neighbours(torch.zeros(4, 2, 12), 2, 7.0, absent)).save(tmp_path)
    again = ht.ITS.load(tmp_path, Net()).calibrator
    assert torch.equal(again.absent, absent)
    assert (again.nearest, again.scale) == (2, 7.0)


@pytest.mark.parametrize("gate", [CautiousGate(1.5, 0.25), Gate(1.5, 2.5, math.inf)])
def test_the_state_of_a_wrapper_holds_the_numbers_of_its_gate(gate: Gate | CautiousGate) -> None:
    robust, other = ht.ITS(Net(), gate=gate), ht.ITS(Net(), gate=type(gate)(0.0))
    other.load_state_dict(robust.state_dict())
    assert torch.equal(other.gate.get_extra_state(), gate.get_extra_state())


@pytest.mark.parametrize("wrong", [float("nan"), "2", None])
def test_a_cautious_gate_takes_numbers_alone(wrong: object) -> None:
    for numbers in ({"margin": wrong}, {"doubt": wrong}):
        with pytest.raises(ht.OptionError, match="must be a number"):
            CautiousGate(**numbers)  # type: ignore[arg-type]


def test_a_save_needs_a_place_of_its_own_and_replaces_a_bundle_only_where_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(ht.OptionError, match="is a file"):
        ht.ITS(Net()).save(tmp_path / "file")
    for overwrite in (False, True):
        with pytest.raises(ht.OptionError, match=r"holds thesis\.txt"):
            ht.ITS(Net()).save(tmp_path / "full", overwrite=overwrite)
    ht.ITS(Net(), gate=1.0).save(tmp_path / "bundle")
    with pytest.raises(ht.OptionError, match=r"To replace it, add --force \(overwrite=True in Python\)"):
        ht.ITS(Net(), gate=2.0).save(tmp_path / "bundle")
    assert ht.ITS.load(tmp_path / "bundle", Net()).gate.margin == 1.0
    ht.ITS(Net(), gate=2.0).save(tmp_path / "bundle", overwrite=True)
    assert ht.ITS.load(tmp_path / "bundle", Net()).gate.margin == 2.0


@pytest.mark.parametrize(
    ("place", "name", "value", "said"),
    [
        ("search", "hypotheses", 10**9, "hypotheses must be at most"),
        ("search", "samples", 10**9, "samples must be at most"),
        ("options", "mc_passes", 10**9, "mc_passes must be at most"),
        ("options", "chunk", 10**12, "chunk must be at most"),
        ("search", "levels", ["reflection"] * 40, "levels must be at most"),
        ("gate", "margin", "nan", "margin must be"),
        ("gate", "turn_at", "nan", "turn_at must be"),
    ],
)
def test_a_bundle_that_asks_for_what_nobody_means_is_refused(
    tmp_path: Path, place: str, name: str, value: object, said: str
) -> None:
    ht.ITS(Net(), gate=1.0).save(tmp_path)
    config = json.loads((tmp_path / bundle.CONFIG).read_text())
    holder = {"options": config["options"], "search": config["options"]["search"], "gate": config["gate"]}[place]
    assert name in holder
    holder[name] = value
    (tmp_path / bundle.CONFIG).write_text(json.dumps(config))
    with pytest.raises(ht.HeadtiltError, match=said):
        ht.ITS.load(tmp_path, Net())


def rewritten(folder: Path, kind: str, tensors: dict[str, Tensor], **more: object) -> None:
    """Put other tensors into a bundle, with the right digest."""
    from safetensors.torch import save_file

    ht.ITS(Net()).save(folder)
    save_file(tensors, folder / bundle.TENSORS)
    config = json.loads((folder / bundle.CONFIG).read_text())
    config |= {"sha256": bundle.digest_of(folder / bundle.TENSORS), "calibrator": {"kind": kind, **more}}
    (folder / bundle.CONFIG).write_text(json.dumps(config))


def test_tensors_that_no_fit_makes_are_refused(tmp_path: Path) -> None:
    rewritten(tmp_path / "a", "balance", {"calibrator.bias": torch.zeros(4).to(torch.float8_e4m3fn)})
    with pytest.raises(ht.DataError, match="float8"):
        ht.ITS.load(tmp_path / "a", Net())
    rewritten(tmp_path / "b", "neighbours", {"calibrator.bank": torch.zeros(4, 5)}, nearest=3, scale=20.0)
    with pytest.raises(ht.DataError, match=r"holds \(4, 5\) in calibrator\.bank"):
        ht.ITS.load(tmp_path / "b", Net())
    rewritten(tmp_path / "c", "neighbours", {"calibrator.bank": torch.zeros(4, 5, 2)}, nearest=0, scale=20.0)
    with pytest.raises(ht.OptionError, match="nearest"):
        ht.ITS.load(tmp_path / "c", Net())
    rewritten(tmp_path / "d", "balance", {"calibrator.bias": torch.zeros(0)})
    with pytest.raises(ht.DataError, match="no such table"):
        ht.ITS.load(tmp_path / "d", Net())


@pytest.mark.parametrize("name", [bundle.CONFIG, bundle.TENSORS])
@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
def test_files_of_a_bundle_are_plain_files_of_bounded_size(tmp_path: Path, name: str, kind: str) -> None:
    import os

    ht.ITS(Net(), calibrator=Balance(torch.arange(4.0))).save(tmp_path)
    (tmp_path / name).unlink()
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "device":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        with (tmp_path / name).open("wb") as file:
            file.truncate(5_000_000_000)  # a hole, which takes no room
    with pytest.raises(ht.DataError, match="bytes, more than" if kind == "huge" else "no regular file"):
        ht.ITS.load(tmp_path, Net())


@pytest.mark.parametrize(
    "padding", [0.5, [0.1, 0.2, 0.3], np.array([0.1, 0.2, 0.3]), torch.tensor([0.1, 0.2, 0.3]), torch.tensor(0.5)]
)
def test_paddings_of_numbers_survive_a_round_trip_whatever_holds_them(padding: object, tmp_path: Path) -> None:
    net, images = TinyNet(channels=3), tiny_images(3, channels=3)
    robust = ht.ITS(net, search=ht.Joint(budget=4), padding=padding, gate=None)
    robust.save(tmp_path)
    other = ht.ITS.load(tmp_path, net)
    assert other.padding == robust.padding
    assert torch.equal(other(images), robust(images))


def test_numbers_of_numpy_in_any_precision_survive_a_round_trip(tmp_path: Path) -> None:
    levels = [ht.rotation(np.float32(1.0)), ht.scale(np.float32(0.25))]
    plan = ht.Joint(budget=np.int64(6), mass=np.float32(0.5))
    robust = ht.ITS(TinyNet(), levels, search=plan, readout="marginal", padding=np.float32(0.5))
    robust.fit(tiny_images(60), method="balance", recipe=HeadRecipe(looks=np.int64(1), views=np.int64(6)))
    robust.save(tmp_path)
    other = ht.ITS.load(tmp_path, robust.model)
    assert (other.plan, other.padding, other.report) == (robust.plan, 0.5, robust.report)
    assert torch.equal(other(tiny_images(3)), robust(tiny_images(3)))


def test_the_state_of_neighbours_holds_how_many_are_asked_and_what_they_are_worth() -> None:
    fitted, other = Neighbours(torch.rand(3, 4, 5), nearest=2, scale=5.5), Neighbours(torch.rand(3, 4, 5))
    other.load_state_dict(fitted.state_dict())
    assert (other.nearest, other.scale) == (2, 5.5)

"""Training is a function of its seed, goes on where it stopped, and the packaged networks are what they claim."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import headtilt as ht
from headtilt.paper import zoo
from headtilt.paper.data import Dataset, load
from headtilt.paper.train import RECIPES, Recipe, accuracy, as_floats, train
from headtilt.sources.zoo import PACKAGED, SHAPES, make_network, parse
from headtilt.sources.zoo.cnn import LargeCNN, SmallCNN
from headtilt.sources.zoo.resnet import ResNet

QUICK = Recipe(3, 5e-3, 64)


@pytest.fixture(scope="module")
def few() -> Dataset:
    return load("digits", "train", limit=200)


def fresh(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SmallCNN(9)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.flatten().double() for value in model.state_dict().values()])


@pytest.fixture(scope="module")
def trained(few) -> nn.Module:
    return train(fresh(), few.images, few.labels, QUICK)


# --- training ---------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_weights_and_another_others(few, trained):
    state = torch.get_rng_state()
    again = train(fresh(), few.images, few.labels, QUICK)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weights(again), weights(trained))
    other = train(fresh(), few.images, few.labels, QUICK, seed=1)
    assert not torch.equal(weights(other), weights(trained))
    assert not trained.training


def test_seeds_below_zero_are_seeds_like_any_other(few):
    # Python's hash takes -1 for -2, and so did the seeds made of it.
    short = Recipe(1, 5e-3, 64)
    first, second, third = (train(fresh(), few.images, few.labels, short, seed=seed) for seed in (-1, -2, -1))
    assert not torch.equal(weights(first), weights(second))
    assert torch.equal(weights(first), weights(third))


def test_training_learns(few, trained):
    before = accuracy(fresh().eval(), few.images, few.labels)
    assert accuracy(trained, few.images, few.labels) > before + 20


def test_bytes_and_floats_are_the_same_images(few, trained):
    floats = train(fresh(), few.floats(), few.labels, QUICK)
    assert torch.equal(weights(floats), weights(trained))
    assert float(as_floats(few.images).max()) == 1
    assert as_floats(few.floats()) is not None


@pytest.mark.parametrize("stop_after", [1, 2])
def test_an_interrupted_run_goes_on_from_its_checkpoint_and_ends_with_the_same_weights(
    few, trained, tmp_path, stop_after
):
    checkpoint = tmp_path / "deep" / "run.safetensors"
    steps = len(few) // 64

    def interrupt(done, total, loss):
        assert total == 3 * steps
        if done > stop_after * steps:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(fresh(), few.images, few.labels, QUICK, checkpoint=checkpoint, progress=interrupt)
    assert checkpoint.exists()
    told = []
    resumed = train(
        fresh(seed=9), few.images, few.labels, QUICK, checkpoint=checkpoint, progress=lambda *a: told.append(a[0])
    )
    assert torch.equal(weights(resumed), weights(trained))
    assert told[0] == (stop_after + 1) * steps
    assert not checkpoint.exists()


def test_a_checkpoint_that_cannot_be_read_is_named(few, tmp_path):
    broken = tmp_path / "run.safetensors"
    broken.write_bytes(b"not a checkpoint")
    with pytest.raises(ht.DataError, match=r"run.safetensors is not a readable safetensors file"):
        train(fresh(), few.images, few.labels, QUICK, checkpoint=broken)


def test_augmentation_is_used_and_follows_the_seed(few, trained):
    seen = []

    def brighter(images, generator):
        seen.append(float(torch.rand((), generator=generator)))
        return images + 0.5

    first = train(fresh(), few.images, few.labels, QUICK, augment=brighter)
    assert len(seen) == 3 * (len(few) // 64)
    assert len(set(seen)) == len(seen)
    assert not torch.equal(weights(first), weights(trained))
    numbers = list(seen)
    seen.clear()
    again = train(fresh(), few.images, few.labels, QUICK, augment=brighter)
    assert seen == numbers
    assert torch.equal(weights(again), weights(first))


def test_no_epochs_leave_the_network_as_it_was(few):
    assert torch.equal(weights(train(fresh(), few.images, few.labels, Recipe(0))), weights(fresh()))
    with pytest.raises(ht.OptionError, match="epochs must be a whole number of at least 0"):
        train(fresh(), few.images, few.labels, Recipe(-1))


def test_accuracy_is_the_share_of_right_answers_in_percent():
    def model(images):
        return torch.nn.functional.one_hot((images.mean((1, 2, 3)) > 0.5).long(), 2).float()

    images = torch.tensor([0, 255, 255, 0], dtype=torch.uint8).reshape(4, 1, 1, 1).expand(4, 1, 3, 3)
    assert accuracy(model, images, torch.tensor([0, 1, 0, 1])) == 50


def test_networks_are_the_papers_two_and_a_resnet():
    assert isinstance(make_network("small", 9, 1, 28), SmallCNN)
    large = make_network("large", 43, 3, 32)
    assert isinstance(large, LargeCNN)
    assert large(torch.zeros(2, 3, 32, 32)).shape == (2, 43)
    assert isinstance(make_network("resnet", 10, 3, 32), ResNet)
    with pytest.raises(ht.OptionError, match="network must be one of 'small', 'large', 'resnet'; got 'huge'"):
        make_network("huge", 9, 1, 28)


# --- the zoo ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["", "cifar", "digits:x", "digits:-1", "digits:1.5", "Digits", ":0", "digits:0:1"])
def test_specs_that_name_no_network_are_refused(spec):
    with pytest.raises(
        ht.OptionError,
        match="a zoo network is one of digits, mnist, fashion-mnist, gtsrb, cifar10, alone or with a seed",
    ):
        parse(spec)


def test_a_spec_is_a_name_and_a_seed():
    assert parse("mnist") == ("mnist", 0)
    assert parse("gtsrb:12") == ("gtsrb", 12)
    assert parse("digits:") == ("digits", 0)
    assert set(SHAPES) == set(RECIPES)


@pytest.mark.parametrize("seed", range(5))
def test_the_packaged_digits_networks_know_upright_digits(digits, seed, cache):
    network = zoo.load(f"digits:{seed}")
    assert not network.training
    assert accuracy(network, digits.images, digits.labels) >= 97
    assert not (cache / "zoo" / f"digits-{seed}.safetensors").exists()


def test_the_packaged_networks_of_other_seeds_are_others():
    assert not torch.equal(weights(zoo.load("digits:0")), weights(zoo.load("digits:1")))


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.safetensors")), ids=lambda path: path.stem)
def test_every_packaged_file_is_a_network_of_the_zoo(path):
    name, _, seed = path.stem.rpartition("-")
    network, shape = zoo.load(f"{name}:{seed}"), SHAPES[name]
    with torch.no_grad():
        logits = network(torch.zeros(1, shape.channels, shape.size, shape.size))
    assert logits.shape == (1, shape.classes)
    assert bool(weights(network).isfinite().all())


def test_a_network_that_is_not_packaged_is_trained_once_and_kept(cache, monkeypatch):
    monkeypatch.setitem(RECIPES, "digits", Recipe(1))
    trained = []
    network = zoo.load("digits:77", progress=lambda *args: trained.append(args))
    assert trained
    assert (cache / "zoo" / "digits-77.safetensors").exists()
    assert not list((cache / "zoo").glob(".*partial*"))
    count = len(trained)
    again = zoo.load("digits:77", progress=lambda *args: trained.append(args))
    assert len(trained) == count
    assert torch.equal(weights(again), weights(network))
    (cache / "zoo" / "digits-77.safetensors").unlink()
    assert torch.equal(weights(zoo.load("digits:77")), weights(network))


def test_a_kept_file_that_is_broken_is_named(cache):
    path = cache / "zoo" / "digits-78.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"nothing")
    with pytest.raises(ht.DataError, match=r"digits-78.safetensors is not a readable safetensors file.*Delete it"):
        zoo.load("digits:78")
    path.unlink()


def test_packaged_weights_lie_in_the_package():
    assert Path(ht.__file__).parent in PACKAGED.parents

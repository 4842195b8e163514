"""The network of CIFAR-10, and what its recipe adds to the paper's: a schedule, and flips and shifts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headtilt as ht
from headtilt.paper import zoo
from headtilt.paper.data import Dataset
from headtilt.paper.experiments import retrain
from headtilt.paper.train import RECIPES, SHIFT, Recipe, flip_and_shift, rate, train
from headtilt.sources.zoo import empty, make_network, resnet
from headtilt.sources.zoo.resnet import ResNet

QUICK = replace(RECIPES["cifar10"], epochs=2, batch=8)


@pytest.fixture(scope="module")
def few() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (16, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return Dataset("noise", images, torch.arange(16) % 10, tuple("abcdefghij"))


def fresh(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ResNet(10, 3, 8)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([value.flatten().double() for value in model.state_dict().values()])


@pytest.fixture(scope="module")
def trained(few) -> nn.Module:
    return train(fresh(), few.images, few.labels, QUICK)


# --- the network ------------------------------------------------------------------------------------------------------


def test_it_has_two_million_eight_hundred_thousand_weights():
    network = empty("cifar10")
    assert isinstance(network, ResNet)
    assert sum(value.numel() for value in network.parameters()) == 2_797_610


@pytest.mark.parametrize("size", [8, 32, 33])
def test_images_become_logits_and_the_stages_halve_them_three_times(size):
    network = make_network("resnet", 7, 3, size).eval()
    shapes = []
    blocks = [part for part in network.modules() if isinstance(part, resnet.BasicBlock)]
    for block in blocks:
        block.register_forward_hook(lambda _module, _inputs, output: shapes.append(tuple(output.shape[1:])))
    with torch.no_grad():
        assert network(torch.rand(2, 3, size, size)).shape == (2, 7)
    sides = [size, -(-size // 2), -(-size // 4), -(-size // 8)]
    assert shapes == [(w, side, side) for w, side in zip(resnet.WIDTHS, sides, strict=True) for _ in range(2)]


def test_pixels_are_normalised_inside_by_numbers_that_training_leaves_alone(trained):
    seen = []
    network = ResNet().eval()
    network.backbone.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        network(torch.tensor(resnet.MEAN)[None, :, None, None].expand(1, 3, 32, 32))
        network(torch.ones(1, 3, 32, 32))
    assert float(seen[0].abs().max()) == 0
    assert_close(seen[1][0, :, 0, 0], torch.tensor([2.059, 2.127, 2.116]), rtol=0, atol=1e-3)
    assert_close(trained.mean.flatten(), torch.tensor(resnet.MEAN))
    assert "mean" not in dict(network.named_parameters())


def test_grey_and_tiny_images_are_refused():
    with pytest.raises(ht.OptionError, match=r"channels must be 3 for a resnet; got 1\. Use 'small' or 'large'"):
        make_network("resnet", 10, 1, 32)
    with pytest.raises(ht.OptionError, match="size must be a whole number of at least 8; got 7"):
        make_network("resnet", 10, 3, 7)


def test_monte_carlo_passes_have_a_layer_to_sample():
    images = torch.rand(1, 3, 8, 8)
    its = ht.ITS(fresh().eval(), [ht.rotation()], mc_passes=2, gate=None)
    assert its(images).shape == (1, 10)


# --- its training -----------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_weights_and_another_others(few, trained):
    state = torch.get_rng_state()
    assert torch.equal(weights(train(fresh(), few.images, few.labels, QUICK)), weights(trained))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(weights(train(fresh(), few.images, few.labels, QUICK, seed=1)), weights(trained))
    assert not trained.training


def test_an_interrupted_run_ends_with_the_same_weights_and_the_same_schedule(few, trained, tmp_path):
    checkpoint = tmp_path / "run.safetensors"

    def interrupt(done: int, total: int, loss: float) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(fresh(), few.images, few.labels, QUICK, checkpoint=checkpoint, progress=interrupt)
    resumed = train(fresh(9), few.images, few.labels, QUICK, checkpoint=checkpoint)
    assert torch.equal(weights(resumed), weights(trained))


@pytest.mark.parametrize("change", [{"schedule": "constant"}, {"weight_decay": 5.0}, {"upright": None}], ids=str)
def test_every_part_of_the_recipe_is_used(few, trained, change):
    other = train(fresh(), few.images, few.labels, replace(QUICK, **change))
    assert not torch.equal(weights(other), weights(trained))


def test_bfloat16_is_for_gpus_alone(few, trained):
    plain = train(fresh(), few.images, few.labels, replace(QUICK, mixed=False))
    assert torch.equal(weights(plain), weights(trained))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_trains_in_bfloat16_and_gives_float32_back(few):
    model = train(fresh(), few.images, few.labels, QUICK, device="cuda")
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert all(value.is_contiguous() for value in model.parameters())
    assert bool(weights(model).isfinite().all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "linear"}, "schedule must be one of 'constant', 'one-cycle'; got 'linear'"),
        ({"upright": "mixup"}, "upright must be one of 'flip-shift'; got 'mixup'"),
    ],
)
def test_recipes_that_mean_nothing_are_refused(few, change, message):
    with pytest.raises(ht.OptionError, match=message):
        train(fresh(), few.images, few.labels, replace(QUICK, **change))


def test_one_cycle_rises_for_a_fifth_of_the_steps_and_falls_to_nothing():
    recipe = Recipe(1, 0.5, schedule="one-cycle")
    rates = [rate(recipe, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.5 / 20)
    assert rates[19] == rates[20] == max(rates) == 0.5
    assert rates[60] == pytest.approx(0.25)
    assert 0 < rates[99] < 0.001
    assert rates[:20] == sorted(rates[:20])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rate(recipe, 0, 1) == 0.5
    assert {rate(Recipe(1, 0.5), step, 100) for step in range(100)} == {0.5}


def test_the_recipes_of_the_other_sets_are_the_papers():
    plain = {"batch": 128, "weight_decay": 0.01, "schedule": "constant", "upright": None, "mixed": False}
    expected = {
        "digits": Recipe(40, 5e-3, **plain),
        "mnist": Recipe(3, 5e-3, **plain),
        "fashion-mnist": Recipe(5, 5e-3, **plain),
        "gtsrb": Recipe(10, 1e-3, **plain),
    }
    assert {name: recipe for name, recipe in RECIPES.items() if name != "cifar10"} == expected


# --- flips and shifts -------------------------------------------------------------------------------------------------


def test_images_are_mirrored_and_shifted_by_whole_pixels_and_nothing_else():
    side, count = 12, 400
    one = torch.arange(1.0, 3 * side * side + 1).reshape(1, 3, side, side)
    changed = flip_and_shift(one.expand(count, -1, -1, -1), torch.Generator().manual_seed(0))
    assert changed.shape == (count, 3, side, side)
    found = set()
    for image in changed:
        # The middle is always there: what it shows says how the image was moved.
        channel, row, column = torch.unravel_index(image[0, 6, 6].long() - 1, (3, side, side))
        mirrored = bool(image[0, 6, 7] < image[0, 6, 6])
        source = one[0].flip(-1) if mirrored else one[0]
        across = side - 1 - int(column) if mirrored else int(column)
        down, right = 6 - int(row), 6 - across
        expected = torch.zeros_like(source)
        rows, columns = slice(max(down, 0), side + min(down, 0)), slice(max(right, 0), side + min(right, 0))
        moved = source.roll((down, right), (1, 2))
        expected[:, rows, columns] = moved[:, rows, columns]
        assert torch.equal(image, expected)
        assert int(channel) == 0
        found.add((mirrored, down, right))
    assert {mirrored for mirrored, _, _ in found} == {True, False}
    everywhere = set(range(-SHIFT, SHIFT + 1))
    assert {down for _, down, _ in found} == {right for _, _, right in found} == everywhere


def test_half_of_the_images_are_mirrored_and_the_generator_decides():
    images = torch.arange(32.0).expand(4000, 1, 32, 32)
    first, again, other = (flip_and_shift(images, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert float((first[:, 0, 16, 16] > first[:, 0, 16, 17]).float().mean()) == pytest.approx(0.5, abs=0.03)


# --- retraining it ----------------------------------------------------------------------------------------------------


@pytest.fixture
def retraining(few, monkeypatch, tmp_path):
    """CIFAR-10 made of noise, one quick epoch, and a list of what was augmented."""
    monkeypatch.setenv("HEADTILT_CACHE", str(tmp_path))
    monkeypatch.setitem(RECIPES, "cifar10", replace(QUICK, epochs=1))
    for place in (zoo, retrain):
        monkeypatch.setattr(place, "load_data", lambda *_args, **_options: few)
    seen = []
    affine = retrain.augment

    def watched(images: Tensor, generator: torch.Generator) -> Tensor:
        seen.append(images)
        return affine(images, generator)

    monkeypatch.setattr(retrain, "augment", watched)
    return seen


def test_retraining_takes_twice_the_epochs_and_flips_and_shifts_before_it_turns(retraining, few):
    network = retrain.retrained("augmented", "cifar10", 0, "cpu", None)
    assert isinstance(network, ResNet)
    assert len(retraining) == 2 * (len(few) // QUICK.batch)
    assert any(bool((batch[:, :, 0] == 0).all(-1).any()) for batch in retraining)  # a row of zeros moved in


def test_the_last_layer_alone_is_refitted(retraining):
    before = zoo.load("cifar10:0")
    after = retrain.retrained("last-layer", "cifar10", 0, "cpu", None)
    changed = {
        name for name, value in before.state_dict().items() if not torch.equal(value, after.network.state_dict()[name])
    }
    assert changed == {"classifier.weight", "classifier.bias"}
    assert len(retraining) == 4

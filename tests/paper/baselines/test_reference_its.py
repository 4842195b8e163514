"""The behaviour of the paper's public code, mistakes and all."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from headtilt.errors import OptionError
from headtilt.geometry.groups import decompose, rotation
from headtilt.geometry.warp import invert, warp
from headtilt.paper.baselines.reference import ReferenceITS, grid, scores, unique_best
from tests.toys import TinyNet, tiny_images

# What two small networks with written-down weights say of sixteen images, by classes and levels.
RECORDED = {
    (5, 3): [3, 0, 0, 3, 0, 3, 0, 3, 3, 3, 3, 0, 2, 0, 0, 0],
    (5, 5): [4, 0, 0, 3, 0, 2, 0, 3, 2, 3, 3, 3, 0, 3, 2, 0],
    (9, 3): [3, 0, 0, 0, 0, 3, 0, 3, 3, 3, 3, 2, 2, 0, 0, 2],
    (9, 5): [4, 0, 0, 0, 0, 3, 0, 3, 4, 3, 3, 0, 0, 0, 0, 0],
}


class Noisy(nn.Module):
    """A small network with dropout and batch normalisation that counts the views it is shown."""

    def __init__(self, classes: int = 6) -> None:
        super().__init__()
        self.normalise = nn.BatchNorm2d(1)
        self.dropout = nn.Dropout(0.3)
        self.classifier = nn.Linear(64, classes)
        self.seen: list[int] = []
        self.fail = False

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(len(images))
        if self.fail:
            raise RuntimeError("out of luck")
        logits: Tensor = self.classifier(self.dropout(self.normalise(images).flatten(1)))
        return 3 * logits


class Template(nn.Module):
    """Tells three upright shapes apart by their overlap with the image."""

    def __init__(self) -> None:
        super().__init__()
        line = (2 * torch.arange(28) + 1) / 28 - 1
        y, x = torch.meshgrid(line, line, indexing="ij")
        bar = torch.exp(-(x**2) / 0.02 - (y + 0.3) ** 2 / 0.1)
        hook = bar + torch.exp(-((x - 0.4) ** 2) / 0.03 - (y - 0.2) ** 2 / 0.03)
        pair = torch.exp(-((x + 0.4) ** 2) / 0.03 - (y + 0.4) ** 2 / 0.03)
        pair = pair + torch.exp(-((x - 0.1) ** 2) / 0.03 - (y - 0.5) ** 2 / 0.03)
        shapes = torch.stack([bar, hook, pair])
        self.register_buffer("shapes", shapes / shapes.flatten(1).norm(dim=1)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        return 30 * torch.einsum("bhw,khw->bk", images[:, 0], self.get_buffer("shapes"))


@pytest.fixture
def model() -> Noisy:
    torch.manual_seed(0)
    return Noisy()


@pytest.fixture
def images() -> Tensor:
    return torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_the_grids_hold_both_end_points_and_one_sample_beyond_each() -> None:
    step = 2 * 0.25 / 17
    expected = [-0.25 - step, *((i - 8) / 32 for i in range(17)), 0.25 + step]
    assert grid(0.25, 17).tolist() == pytest.approx(expected)
    turns, sizes, slants, again, last = ReferenceITS(nn.Identity(), levels=5).orbits()
    torch.testing.assert_close(turns[1], turns[-2])
    torch.testing.assert_close(turns[1, 0, 0], torch.tensor(-1.0, dtype=torch.float64))
    assert sizes[:, 0, 0].tolist() == pytest.approx([1 + t for t in expected])
    assert slants[:, 0, 1].tolist() == pytest.approx(expected)
    torch.testing.assert_close(again, turns)
    torch.testing.assert_close(last, sizes)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), hypotheses=st.integers(1, 4))
def test_all_hypotheses_get_the_scores_of_their_summed_energies(seed: int, hypotheses: int) -> None:
    confidence = torch.randn(2, hypotheses, 19, generator=torch.Generator().manual_seed(seed))
    score = scores(confidence)
    assert score.shape == (2, hypotheses, 17)
    torch.testing.assert_close(score, score[:, :1].expand_as(score))
    torch.testing.assert_close(score[:, :1], scores(confidence.sum(1, keepdim=True)))


def by_hand(confidence: list[float]) -> list[float]:
    """Smoothing with σ = 2 and radius 3, then the difference over two samples twice; all in loops."""
    count = len(confidence)
    weight = [math.exp(-(i**2) / 8) for i in range(-3, 4)]
    smooth = [
        sum(w * confidence[min(max(n + i - 3, 0), count - 1)] for i, w in enumerate(weight)) / sum(weight)
        for n in range(count)
    ]

    def slope(values: list[float]) -> list[float]:
        inner = [(values[i + 1] - values[i - 1]) / 2 for i in range(1, count - 1)]
        return [values[1] - values[0], *inner, values[-1] - values[-2]]

    return [-value for value in slope(slope(smooth))[1:-1]]


def test_scores_are_two_slopes_of_the_gaussian_smoothed_curve() -> None:
    values = torch.randn(11, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert scores(values[None, None])[0, 0].tolist() == pytest.approx(by_hand(values.tolist()), abs=1e-12)
    peak = torch.zeros(1, 1, 11)
    peak[..., 5] = 1
    assert int(scores(peak)[0, 0].argmax()) == 4  # the peak wins: the first and the last sample are gone


def public_code(network: nn.Module, images: Tensor, levels: int, hypotheses: int = 3, samples: int = 17) -> list[int]:
    """The labels by the rules, image by image and in loops, with torch's own resampling."""

    def matrix(kind: str, t: float) -> Tensor:
        rows = {
            "turn": [[math.cos(t), -math.sin(t)], [math.sin(t), math.cos(t)]],
            "size": [[1 + t, 0.0], [0.0, 1 + t]],
            "slant": [[1.0, t], [0.0, 1.0]],
        }[kind]
        return torch.tensor(rows)

    found = []
    for image in images:
        read = [torch.eye(2)] * hypotheses
        for level, kind in enumerate(["turn", "size", "slant", "turn", "size"][:levels]):
            domain = math.pi if kind == "turn" else 0.25
            inner = [-domain + 2 * domain * i / (samples - 1) for i in range(samples)]
            t = [inner[0] - 2 * domain / samples, *inner, inner[-1] + 2 * domain / samples]
            reads = [[prior @ matrix(kind, value) for value in t] for prior in read]
            theta = torch.cat([torch.stack([torch.stack(row) for row in reads]), torch.zeros(hypotheses, 19, 2, 1)], -1)
            places = functional.affine_grid(theta.flatten(0, 1), [hypotheses * 19, *image.shape], align_corners=False)
            views = functional.grid_sample(image.expand(hypotheses * 19, -1, -1, -1), places, align_corners=False)
            logits = network(views).reshape(hypotheses, 19, -1)
            curve = logits.logsumexp(-1).sum(0).double().tolist()
            score = by_hand(curve)
            labels = logits.argmax(-1)[:, 1:-1].tolist()
            taken: list[int] = []
            chosen = []
            for number in range(hypotheses):
                own = labels[0 if level == 0 else number]
                free = [place for place in range(samples) if own[place] not in taken]
                best = max(free, key=lambda place: score[place]) if free else 0
                taken.append(own[best])
                chosen.append(best)
            read = [reads[number][best + 1] for number, best in enumerate(chosen)]
        found.append(taken[0])
    return found


@pytest.mark.parametrize("levels", [3, 5])
@pytest.mark.parametrize("classes", [5, 9])
@torch.no_grad()
def test_the_labels_are_those_that_the_rules_give_step_by_step(levels: int, classes: int) -> None:
    network, images = TinyNet(classes).eval(), tiny_images(16)
    found = ReferenceITS(network, levels=levels, passes=1).search(images).labels.tolist()
    assert found == RECORDED[classes, levels]
    assert found == public_code(network, images, levels)


def test_a_single_pass_is_without_dropout(model: Noisy, images: Tensor) -> None:
    first, second = (ReferenceITS(model, passes=1, seed=seed).search(images) for seed in (0, 1))
    assert torch.equal(first.logits, second.logits)


def test_each_hypothesis_takes_its_best_sample_of_a_label_that_is_still_free() -> None:
    score = torch.tensor([[1.0, 5.0, 4.0, 3.0, 2.0]]).expand(1, 3, 5)
    labels = torch.tensor([[[0, 7, 7, 1, 0], [0, 7, 7, 1, 0], [0, 7, 7, 1, 0]]])
    assert unique_best(score, labels).tolist() == [[1, 3, 4]]


def test_a_hypothesis_without_a_free_label_takes_the_first_sample() -> None:
    score = torch.tensor([[1.0, 5.0, 4.0]]).expand(1, 3, 3)
    labels = torch.full((1, 3, 3), 2)
    labels[0, :, 0] = 4
    assert unique_best(score, labels).tolist() == [[1, 0, 0]]


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_labels_are_unique_as_long_as_there_are_enough(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    score = torch.randn(4, 3, 17, generator=generator)
    labels = torch.rand(4, 3, 17, generator=generator).argsort(-1) % 6
    chosen = labels.gather(2, unique_best(score, labels)[..., None])[..., 0]
    assert all(len(set(row)) == 3 for row in chosen.tolist())


def test_the_first_hypothesis_always_leads(model: Noisy, images: Tensor) -> None:
    for levels in (3, 5):
        result = ReferenceITS(model, levels=levels, passes=2).search(images)
        assert torch.equal(result.labels, result.hypothesis_labels[:, 0])
        assert torch.equal(result.labels, result.logits.argmax(-1))
        torch.testing.assert_close(
            result.hypothesis_scores, result.hypothesis_scores[:, :1].expand_as(result.hypothesis_scores)
        )


def test_every_hypothesis_is_expanded_in_every_pass_but_at_the_first_level(model: Noisy, images: Tensor) -> None:
    ReferenceITS(model, samples=5, hypotheses=2, passes=4).search(images)
    assert model.seen == [3 * 7] * 4 + [3 * 2 * 7] * 8


def test_the_result_depends_on_its_seed_and_not_on_the_callers(model: Noisy, images: Tensor) -> None:
    torch.manual_seed(1)
    first = ReferenceITS(model, passes=2).search(images)
    torch.manual_seed(2)
    second = ReferenceITS(model, passes=2).search(images)
    other = ReferenceITS(model, passes=2, seed=3).search(images)
    torch.testing.assert_close(first.logits, second.logits, rtol=0, atol=0)
    assert (first.logits - other.logits).abs().max() > 1e-3


def test_the_logits_are_the_mean_over_passes(images: Tensor) -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, views: Tensor) -> Tensor:
            self.calls += 1
            return views.flatten(1)[:, :4] + self.calls * torch.tensor([1.0, 0.0, 0.0, 0.0])

    upright = ReferenceITS(Counting(), passes=1, samples=3, hypotheses=1).search(images)
    averaged = ReferenceITS(Counting(), passes=3, samples=3, hypotheses=1).search(images)
    # In the last level the passes count 3 against 7, 8 and 9.
    torch.testing.assert_close(upright.pose, averaged.pose)
    expected = torch.tensor([[5.0, 0.0, 0.0, 0.0]]).expand(3, 4)
    torch.testing.assert_close(averaged.logits - upright.logits, expected)


def state(model: nn.Module) -> tuple[object, ...]:
    modes = [module.training for module in model.modules()]
    values = [value.tolist() for value in model.state_dict().values()]
    return modes, values, torch.get_rng_state().tolist()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fail", [False, True])
def test_the_model_leaves_as_it_came(model: Noisy, images: Tensor, training: bool, fail: bool) -> None:
    model.train(training)
    model.dropout.eval()
    model.fail = fail
    before = state(model)
    if fail:
        with pytest.raises(RuntimeError, match="out of luck"):
            ReferenceITS(model, passes=2).search(images)
    else:
        ReferenceITS(model, passes=2).search(images)
    assert state(model) == before


@pytest.mark.parametrize("step", [-6, -2, 0, 3, 7])
def test_a_rotation_on_the_grid_is_undone(step: int) -> None:
    model = Template()
    upright = model.get_buffer("shapes")[1:, None] * 5
    turn = rotation().matrix(torch.tensor(step * math.pi / 8))
    result = ReferenceITS(model, passes=1, hypotheses=1).search(warp(upright, turn.expand(2, 3, 3)))
    assert result.labels.tolist() == [1, 2]
    angle = decompose(result.pose).rotation + step * math.pi / 8
    assert torch.atan2(angle.sin(), angle.cos()).abs().max() < math.pi / 8
    recovered = warp(warp(upright, turn.expand(2, 3, 3)), result.pose)
    torch.testing.assert_close(model(recovered), result.logits, atol=0.5, rtol=0.05)


def test_a_step_reads_the_image_to_the_right_of_those_before_it(model: Noisy) -> None:
    images = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    read = invert(ReferenceITS(model, passes=1).search(images).pose.double())
    # Rotation · scale · shear: the first column is that of a rotation, times a factor of the grid.
    factor = read[:, :2, 0].norm(dim=1)
    angle = torch.atan2(read[:, 1, 0], read[:, 0, 0])
    torch.testing.assert_close((32 * factor).round() / 32, factor, atol=1e-5, rtol=0)
    torch.testing.assert_close((8 * angle / math.pi).round() * math.pi / 8, angle, atol=1e-4, rtol=0)
    slant = (rotation().matrix(-angle) @ read)[:, 0, 1] / factor
    torch.testing.assert_close((32 * slant).round() / 32, slant, atol=1e-4, rtol=0)
    assert slant.abs().max() > 0.1


def test_options_without_meaning_are_refused() -> None:
    with pytest.raises(OptionError, match="levels must be 3 or 5; got 4"):
        ReferenceITS(nn.Identity(), levels=4)
    with pytest.raises(OptionError, match="samples must be odd"):
        ReferenceITS(nn.Identity(), samples=16)
    with pytest.raises(OptionError, match="passes"):
        ReferenceITS(nn.Identity(), passes=0)

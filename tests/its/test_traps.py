"""One test for each place where the reference code or the printed formulas go wrong.

Every test states a check, shows that the library passes it, and shows that the known wrong behaviour does not. They
stand in one file, long as it is, so that the list can be read as a list.
"""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import headtilt as ht
from headtilt.geometry.warp import invert
from headtilt.model import predictor as predictor_module
from headtilt.model.evidence import Evidence
from headtilt.model.predictor import Predictor
from headtilt.model.state import dropout_mask
from headtilt.search import confidence as measures
from headtilt.search import seen as seen_module
from headtilt.search import tree as tree_module
from headtilt.search.confidence import Orbit, curvature_operator
from headtilt.search.tree import Tree
from tests.toys import TinyNet, evidence_of, fingerprint, render, tiny_images, ungated

EYE = torch.eye(3, dtype=torch.float64)


def refuses(check, *wrong) -> None:
    """Assert that the check fails for the wrong behaviour."""
    with pytest.raises(AssertionError):
        check(*wrong)


# --- the confidence ---------------------------------------------------------------------------------------------------


def test_sign_of_the_group_confidence():
    """With E = −logsumexp, maximising −∂²E as printed prefers hills of the energy."""

    def prefers_the_valley(measure):
        angles = ht.rotation().grid(24)
        energy = torch.exp(4 * torch.cos(angles - 1.5) - 4) - torch.exp(4 * torch.cos(angles + 1.5) - 4)
        best = measure(evidence_of(energy), Orbit(ht.rotation(), 24)).argmax()
        assert int(best) == int(energy.argmin())

    prefers_the_valley(measures.group)
    refuses(prefers_the_valley, lambda evidence, orbit: -measures.group(evidence, orbit))


def test_smoothing_does_not_sum_over_hypotheses():
    """A convolution without `groups` gives all hypotheses the same scores, and nobody ever changes his mind."""

    def hypotheses_are_independent(measure):
        energy = torch.randn(1, 3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        changed = energy.clone()
        changed[:, 2] *= -5
        before, after = (measure(evidence_of(e), Orbit(ht.rotation(), 9)) for e in (energy, changed))
        assert torch.equal(before[:, :2], after[:, :2])
        assert float((before[:, 0] - before[:, 1]).abs().max()) > 0.1

    def without_groups(evidence, orbit):
        summed = evidence.energy.sum(dim=-2, keepdim=True).expand_as(evidence.energy)
        return summed @ curvature_operator(orbit.group, orbit.samples).T

    hypotheses_are_independent(measures.group)
    refuses(hypotheses_are_independent, without_groups)


def walk(worth: dict[str, list[float]], **options):
    """Walk two levels of three shifts each; what a view is worth at a level depends on its place alone.

    Places are numbered 0 to 8, column by column; each place has a label of its own, and 4 is where the walk begins.
    """

    def evaluate(index, poses):
        column, row = ((poses[:, axis, 2].round().long() + 1).clamp(0, 2) for axis in (0, 1))
        return evidence_of(torch.zeros(len(poses), dtype=torch.float64), 3 * column + row, classes=9)

    def worth_at_this_level(evidence, orbit):
        return torch.tensor(worth[orbit.group.name], dtype=torch.float64)[evidence.labels]

    levels = (ht.translate_x(1.0), ht.translate_y(1.0))
    tree = Tree(levels, samples=3, confidence=worth_at_this_level, **options)
    return tree_module.search(evaluate, evaluate(None, EYE[None]), tree)


def test_the_final_ranking_has_its_own_rule():
    """Repairing the convolution alone makes the re-ranking by accumulated scores active, which prefers wrong ones."""
    worth = {"translate_x": [0, 9, 0, 0, 2, 0, 0, 1, 0], "translate_y": [3, 0, 0, 0, 0, 0, 0, 0, 6]}

    def the_best_at_the_end_wins(options):
        assert int(walk(worth, **options).beam.labels[0, 0]) == 8

    the_best_at_the_end_wins({})
    refuses(the_best_at_the_end_wins, {"ranking": "accumulated"})  # 9 + 3 against 1 + 6


def test_exponentials_do_not_overflow_and_zero_probabilities_are_no_nan():
    extreme = Evidence(torch.tensor([[1e4, -1e4], [-1e4, -1e4], [300.0, 0.0]]))

    def is_finite(measure):
        assert bool(measure(extreme, Orbit(ht.rotation(), 3)).isfinite().all())

    def naive_entropy(evidence, orbit):
        probabilities = evidence.logits.softmax(-1)
        return (probabilities * probabilities.log2()).sum(-1)

    is_finite(measures.energy)
    is_finite(measures.bayesian)
    refuses(is_finite, lambda evidence, orbit: evidence.logits.exp().sum(-1).log())
    refuses(is_finite, naive_entropy)


def test_a_periodic_orbit_wraps_and_is_not_padded():
    energy = torch.randn(17, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def rolling_the_orbit_rolls_the_confidence(group):
        plain, rolled = (measures.group(evidence_of(e), Orbit(group, 17)) for e in (energy, energy.roll(5)))
        assert_close(rolled, plain.roll(5))

    rolling_the_orbit_rolls_the_confidence(ht.rotation())
    refuses(rolling_the_orbit_rolls_the_confidence, ht.rotation().paper())


# --- Monte-Carlo dropout ----------------------------------------------------------------------------------------------


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout, self.last = nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Linear(144, 5)

    def forward(self, images):
        return self.last(self.dropout(self.norm(images).flatten(1)))


def test_sampling_dropout_is_not_training_mode(monkeypatch, images):
    """`model.train()` rewrites the statistics of batch norm, normalises by the batch, and stays on."""
    model = Normalised().eval()
    before = fingerprint(model)
    hidden = model.norm(images).flatten(1)
    masks = [dropout_mask((144,), 0.5, (0, number, 0, 0)) for number in range(3)]
    by_hand = -torch.stack([model.last(hidden * mask) for mask in masks]).logsumexp(-1).mean(0)

    def leaves_the_model_alone_and_uses_its_statistics():
        energy = Predictor(model, mc_passes=3)(images).energy
        assert fingerprint(model) == before
        assert_close(energy, by_hand)

    @contextmanager
    def as_in_the_reference_code(borrowed):
        borrowed.train()
        yield

    leaves_the_model_alone_and_uses_its_statistics()
    with monkeypatch.context() as patch:
        patch.setattr(predictor_module, "undisturbed", as_in_the_reference_code)
        refuses(leaves_the_model_alone_and_uses_its_statistics)


def test_a_forward_that_raises_leaves_no_trace(monkeypatch, images):
    class Failing(Normalised):
        def forward(self, images):
            super().forward(images)
            raise RuntimeError("no")

    model = Failing().train()
    before = fingerprint(model)

    def leaves_as_it_came():
        with pytest.raises(ht.ModelError):
            Predictor(model, mc_passes=3)(images)
        assert fingerprint(model) == before

    @contextmanager
    def restored_only_on_success(borrowed):
        borrowed.eval()
        yield
        borrowed.train()

    leaves_as_it_came()
    with monkeypatch.context() as patch:
        patch.setattr(predictor_module, "undisturbed", restored_only_on_success)
        refuses(leaves_as_it_came)


def test_sampling_says_so_where_there_is_nothing_to_sample(images):
    """Rate 0 and traced models run without a word in the reference code, and every pass is the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(TinyNet().eval(), images)
    for model in (TinyNet(rate=0.0), traced, nn.Sequential(nn.Flatten(), nn.Linear(144, 3))):
        with pytest.raises(ht.OptionError, match="dropout layer"):
            ungated(model, mc_passes=10)
        ungated(model, samples=3)(images)


def test_probabilities_and_energies_are_averaged_not_logits(net, images):
    with torch.no_grad():
        masks = [dropout_mask((16,), 0.5, (0, number, 0, 0)) for number in range(8)]
        passes = torch.stack([net.classifier(net.trunk(images) * mask) for mask in masks])

    def is_the_papers_average(evidence):
        assert_close(evidence.log_probs.exp(), passes.softmax(-1).mean(0))
        assert_close(evidence.energy, -passes.logsumexp(-1).mean(0))

    is_the_papers_average(Predictor(net, mc_passes=8)(images))
    refuses(is_the_papers_average, Evidence(passes.mean(0)))


# --- grids and groups -------------------------------------------------------------------------------------------------


def test_a_full_turn_does_not_hold_the_same_rotation_twice():
    def holds_each_rotation_once(group):
        orbit = group.orbit(17)
        apart = (orbit[:, None] - orbit[None]).flatten(2).norm(dim=-1) + 9 * torch.eye(17)
        assert float(apart.min()) > 0.1

    holds_each_rotation_once(ht.rotation())
    refuses(holds_each_rotation_once, ht.rotation().paper())


def test_scale_holds_its_own_inverses():
    def can_be_undone(group):
        factors = group.orbit(17)[:, 0, 0]
        lowest, highest = float(factors.min()), float(factors.max())
        for factor in factors.tolist():
            assert lowest - 1e-9 <= 1 / factor <= highest + 1e-9

    can_be_undone(ht.scale(0.25))
    refuses(can_be_undone, ht.scale(0.25).paper())  # 1 ± s


@pytest.mark.parametrize(
    "group",
    [ht.rotation(), ht.scale(), ht.shear_x(), ht.shear_y(), ht.translate_x(), ht.reflection()],
    ids=lambda g: g.name,
)
def test_test_sets_and_search_come_from_the_same_group_objects(group):
    """The reference tests shears (s, s) and searches (s, 0): no pose of the search undoes them."""
    samples = 9

    def some_pose_of_the_search_undoes(perturbation):
        left_over = (group.orbit(samples) @ perturbation - EYE).flatten(1).norm(dim=1)
        assert float(left_over.min()) < 1e-9

    for perturbation in group.orbit(samples):
        some_pose_of_the_search_undoes(perturbation)
    both = EYE.clone()
    both[0, 1] = both[1, 0] = 0.25
    refuses(some_pose_of_the_search_undoes, both)


def test_translations_reach_more_than_the_diagonal():
    orbits = [group.orbit(9) for group in (ht.translate_x(0.2), ht.translate_y(0.2))]

    def reaches_the_other_diagonal(poses):
        distance = (poses[:, :2, 2] - torch.tensor([0.1, -0.1], dtype=torch.float64)).norm(dim=1)
        assert float(distance.min()) < 1e-9

    reaches_the_other_diagonal((orbits[0][:, None] @ orbits[1][None]).flatten(0, 1))
    refuses(reaches_the_other_diagonal, ht.translate(0.2 * math.sqrt(2), math.pi / 4).orbit(9))


def test_reflections_are_searched():
    def can_undo_a_mirrored_image(levels):
        mirrored = render([(-0.4, 0.1, 0.2, 1.0)], ht.reflection().orbit()[1], 16, 16)[None, None]

        def bright_on_the_left(views):
            left, right = views[..., :8].mean((1, 2, 3)), views[..., 8:].mean((1, 2, 3))
            return torch.stack([80 * (left - right), torch.zeros_like(left)], dim=1)

        result = ungated(bright_on_the_left, levels, samples=3, confidence="energy").search(mirrored)
        assert float(torch.linalg.det(result.pose[0])) < 0

    can_undo_a_mirrored_image([ht.reflection()])
    refuses(can_undo_a_mirrored_image, [ht.scale(0.25)])


# --- the tree ---------------------------------------------------------------------------------------------------------


def beam_table():
    """Three hypotheses after level 1; at level 2 the first has the two best children, the second has none."""
    scores = torch.tensor([[[9.0, 8.0, 0.0], [1.0, 0.5, 0.2], [7.0, 0.3, 0.1]]])
    labels = torch.tensor([[[0, 1, 2], [0, 1, 2], [2, 0, 1]]])
    return scores, labels


def test_the_beam_is_joint():
    def keeps_the_best_of_all(select):
        scores, labels = beam_table()
        chosen = select(scores, labels, 3)
        assert sorted(scores.flatten(1).gather(1, chosen)[0].tolist()) == [7, 8, 9]

    def one_child_each(scores, labels, keep):
        return scores.argmax(-1) + torch.arange(3) * 3

    keeps_the_best_of_all(seen_module.select)
    refuses(keeps_the_best_of_all, one_child_each)


def test_missing_labels_leave_slots_empty():
    """When fewer labels than hypotheses remain, the reference code takes index 0 without a word."""
    scores, labels = torch.tensor([[[3.0, 2.0, 5.0]]]), torch.tensor([[[0, 0, 1]]])

    def says_what_is_missing(select):
        assert select(scores, labels, 4).tolist() == [[2, 0, -1, -1]]

    says_what_is_missing(seen_module.select)
    refuses(says_what_is_missing, lambda *args: seen_module.select(*args).clamp_min(0))
    found = ungated(
        lambda views: torch.cat([views.flatten(1)[:, :1], -views.flatten(1)[:, :1]], 1), samples=5, hypotheses=4
    )
    assert int(found.search(tiny_images(3)).hypotheses.active.sum(1).max()) <= 2


def test_labels_are_not_repeated_among_hypotheses(net, images):
    def one_hypothesis_per_label(select):
        scores, labels = beam_table()
        kept = labels.flatten(1).gather(1, select(scores, labels, 3))[0].tolist()
        assert len(set(kept)) == 3

    one_hypothesis_per_label(seen_module.select)
    refuses(one_hypothesis_per_label, lambda scores, labels, keep: torch.tensor([[0, 3, 7]]))


def test_a_hypothesis_that_gets_worse_need_not_move():
    """Algorithm 1 accepts a level only if it improves; the reference code has no such test."""
    worth = {"translate_x": [0, 5, 0, 0, 1, 0, 0, 0, 0], "translate_y": [2, 0.5, 1, 0, 0, 0, 0, 0, 0]}

    def stays_where_it_was_best(options):
        assert walk(worth, hypotheses=1, **options).beam.labels.tolist() == [[1]]

    stays_where_it_was_best({"accept": "identity"})
    stays_where_it_was_best({"accept": "zero"})
    refuses(stays_where_it_was_best, {})


def test_class_support_counts_the_views_of_the_whole_tree():
    """The change of mind by class, which the reference code lacks."""
    labels_along = torch.tensor([0, 2, 2, 2, 1])

    def evaluate(index, poses):
        column = (poses[:, 0, 2] * 2).round().long() + 2
        return evidence_of(torch.tensor([-3.0, 0.0, 0.0, -1.0, -2.0]).double()[column], labels_along[column])

    def most_frequent_label_wins(ranking):
        tree = Tree((ht.translate_x(1.0),), samples=5, confidence="energy", ranking=ranking)
        found = tree_module.search(evaluate, evaluate(torch.zeros(1).long(), EYE[None]), tree)
        assert int(found.beam.labels[0, 0]) == 2

    most_frequent_label_wins("support")
    refuses(most_frequent_label_wins, "last")


def test_pose_and_logits_are_permuted_together(monkeypatch, net, images):
    """The reference code re-orders the logits and leaves the transforms behind."""

    def every_pose_gives_its_logits():
        result = ungated(net, [ht.rotation(), ht.shear_x()], samples=5, ranking="support", padding="zeros").search(
            images
        )
        for slot in range(3):
            active = result.hypotheses.active[:, slot]
            views = ht.warp(images[active], result.hypotheses.pose[active, slot], interpolation="bicubic")
            with torch.no_grad():
                assert_close(result.hypotheses.evidence.logits[active, slot], net(views), rtol=1e-3, atol=1e-3)

    right = tree_module.rank

    def logits_only(beam, *rest):
        return replace(right(beam, *rest), pose=beam.pose)

    every_pose_gives_its_logits()
    with monkeypatch.context() as patch:
        patch.setattr(tree_module, "rank", logits_only)
        refuses(every_pose_gives_its_logits)


# --- geometry and pixels ----------------------------------------------------------------------------------------------


def test_rotation_does_not_shear_an_image_that_is_not_square():
    height, width = 48, 96
    image = render([(0.2, -0.1, 0.06, 1.0), (-0.25, 0.15, 0.06, 1.0)], EYE, height, width)[None, None]
    pose = ht.rotation().matrix(torch.tensor(math.radians(70), dtype=torch.float64))

    def is_a_rotation(warp):
        expected = render([(0.2, -0.1, 0.06, 1.0), (-0.25, 0.15, 0.06, 1.0)], pose, height, width)
        assert_close(warp(image, pose[None])[0, 0], expected, rtol=0, atol=0.05)

    def in_normalised_coordinates(image, pose):
        grid = F.affine_grid(invert(pose)[:, :2].float(), list(image.shape), align_corners=False)
        return F.grid_sample(image, grid, align_corners=False)

    is_a_rotation(ht.warp)
    refuses(is_a_rotation, in_normalised_coordinates)


def test_padding_is_black_and_not_grey(images):
    """Zeros after normalisation are the mean colour; the model must see what a black border really looks like."""
    mean, spread = 0.5, 0.25
    seen = []

    def normalising_model(raw):
        seen.append((raw - mean) / spread)
        return raw.flatten(1)[:, :3]

    def model_on_normalised_images(normalised):
        seen.append(normalised)
        return normalised.flatten(1)[:, :3]

    def corners_are_black(model, pixels):
        seen.clear()
        ungated(model, [ht.rotation(0.8)], samples=3, padding="zeros")(pixels)
        tilted = seen[-1]
        assert_close(tilted[:, 0, 0, 0], torch.full((len(tilted),), (0 - mean) / spread), rtol=0, atol=1e-5)

    corners_are_black(normalising_model, images)
    refuses(corners_are_black, model_on_normalised_images, (images - mean) / spread)


# --- economy ----------------------------------------------------------------------------------------------------------


def test_views_go_through_the_model_in_chunks_each_once(images):
    def counted(**options):
        rows = []

        def model(views):
            rows.append(len(views))
            return views.flatten(1)[:, 40:44] * 9

        return rows, ungated(model, [ht.rotation(), ht.scale()], samples=9, hypotheses=4, **options).search(images)

    def is_thrifty(rows, result):
        assert max(rows) <= 8
        # Level 1 is shared by all hypotheses; each level inherits its identity.
        assert sum(rows) == int(result.views.sum())
        assert sum(rows) <= 5 * (1 + 8 + 4 * 8)

    rows, result = counted(chunk=8)
    is_thrifty(rows, result)
    refuses(is_thrifty, *counted(chunk=10_000))
    refuses(is_thrifty, [8] * (5 * 4 * 9 * 2 // 8), result)  # level 1 evaluated once per hypothesis


def test_everything_stays_on_the_device_of_the_model(net, images):
    result = ungated(net, samples=5).search(images)
    tensors = [result.logits, result.pose, result.views, result.hypotheses.pose, result.trace[0].confidence]
    assert {tensor.device for tensor in tensors} == {net.classifier.weight.device}

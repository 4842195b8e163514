"""Monte-Carlo dropout: the right averages over the right masks, however the passes are run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headtilt as ht
from headtilt.model.evidence import Evidence
from headtilt.model.predictor import Predictor
from headtilt.model.state import dropout_mask, dropout_masks
from tests.toys import TinyNet, tiny_images, written_down

PASSES = 6


def passes_by_hand(net: TinyNet, images: torch.Tensor, passes: int = PASSES, seed: int = 0) -> torch.Tensor:
    """Logits (M, B, Y): one mask per pass, multiplied in by hand."""
    with torch.no_grad():
        hidden = net.trunk(images)
        masks = [dropout_mask((16,), 0.5, (seed, number, 0, 0)) for number in range(passes)]
        return torch.stack([net.classifier(hidden * mask) for mask in masks])


def test_a_mask_is_the_papers_lambda():
    mask = dropout_mask((20_000,), 0.25, (0, 0, 0, 0))
    assert set(mask.tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
    assert float((mask == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert float(mask.mean()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    "other", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)], ids=["seed", "pass", "layer", "call"]
)
def test_a_mask_is_the_same_for_the_same_key_and_another_for_any_other(other):
    mask = dropout_mask((64,), 0.5, (0, 0, 0, 0))
    assert torch.equal(mask, dropout_mask((64,), 0.5, (0, 0, 0, 0)))
    assert not torch.equal(mask, dropout_mask((64,), 0.5, other))


def test_masks_at_the_extremes():
    assert torch.equal(dropout_mask((9,), 0.0, (0, 0, 0, 0)), torch.ones(9))
    assert torch.equal(dropout_mask((9,), 1.0, (0, 0, 0, 0)), torch.zeros(9))


def test_one_mask_per_pass_is_shared_by_all_views():
    """The paper's W ← ΛW: the same thinned network looks at every view."""

    class DropOnly(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, images):
            return self.dropout(images.flatten(1))

    model, images = DropOnly().eval(), torch.ones(7, 1, 3, 4)
    with dropout_masks([model.dropout], range(3), seed=5):
        rows = model(images).reshape(3, 7, 12)
    for number in range(3):
        mask = dropout_mask((12,), 0.5, (5, number, 0, 0))
        assert torch.equal(rows[number], mask.expand(7, 12))
    assert not torch.equal(rows[0], rows[1])


def test_probabilities_and_energies_are_averaged_over_passes(net, images):
    stacked = passes_by_hand(net, images)
    evidence = Predictor(net, mc_passes=PASSES)(images)
    assert_close(evidence.log_probs.exp(), stacked.softmax(-1).mean(0))
    assert_close(evidence.energy, -stacked.logsumexp(-1).mean(0))


def test_averaging_logits_instead_would_be_seen(net, images):
    """The reference code does so; the paper does not. The difference is far above any tolerance here."""
    stacked = passes_by_hand(net, images)
    evidence = Predictor(net, mc_passes=PASSES)(images)
    wrong = Evidence(stacked.mean(0))
    assert float((wrong.log_probs.exp() - evidence.log_probs.exp()).abs().max()) > 0.05
    assert float((wrong.energy - evidence.energy).abs().max()) > 0.1


def test_averages_stay_finite_where_exponentials_overflow(net, images):
    with torch.no_grad():
        net.classifier.weight.mul_(1e4)
    evidence = Predictor(net, mc_passes=PASSES)(images)
    assert float(evidence.logits.abs().max()) > 100
    assert bool(evidence.logits.isfinite().any(-1).all())
    assert bool(evidence.energy.isfinite().all())


def test_passes_run_as_one_batch_behind_the_dropout_give_the_plain_result(net, images):
    batched, plain = Predictor(net, mc_passes=PASSES), Predictor(net, mc_passes=PASSES)
    plain.batched_passes = False
    assert_close(batched(images).logits, plain(images).logits, rtol=1e-5, atol=1e-5)
    assert batched.batched_passes is True


def test_what_lies_before_the_dropout_runs_once_however_many_passes(net, images):
    predictor = Predictor(net, mc_passes=50)
    predictor(images)  # tries both ways on the first batch
    rows = {"conv": 0, "classifier": 0}
    for name in rows:
        net.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: rows.update({name: rows[name] + len(inputs[0])})
        )
    predictor(images)
    assert rows == {"conv": 5, "classifier": 250}


class Residual(nn.Module):
    """A shortcut around the dropout layer: batching the passes behind it is impossible."""

    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(144, 16), nn.Dropout(0.5), nn.Linear(16, 5)
        written_down(self)

    def forward(self, images):
        hidden = self.first(images.flatten(1)).relu()
        return self.last(hidden + self.dropout(hidden))


class TwoBranches(nn.Module):
    """Two dropout layers side by side, added: the second one does not see the repeated batch."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(144, 16), nn.Linear(144, 16)
        self.drop_left, self.drop_right, self.last = nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(16, 5)
        written_down(self)

    def forward(self, images):
        flat = images.flatten(1)
        return self.last(self.drop_left(self.left(flat).relu()) + self.drop_right(self.right(flat).relu()))


class Centred(nn.Module):
    """Subtracts the mean over whatever batch it sees: batching the passes runs, and silently gives other numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(144, 16), nn.Dropout(0.5), nn.Linear(16, 5)
        written_down(self)

    def forward(self, images):
        hidden = self.dropout(self.first(images.flatten(1)).relu())
        return self.last(hidden - hidden.mean(0))


def centred_by_hand(model, images, number):
    hidden = model.first(images.flatten(1)).relu() * dropout_mask((16,), 0.5, (0, number, 0, 0))
    return model.last(hidden - hidden.mean(0))


def residual_by_hand(model, images, number):
    hidden = model.first(images.flatten(1)).relu()
    return model.last(hidden + hidden * dropout_mask((16,), 0.5, (0, number, 0, 0)))


def branches_by_hand(model, images, number):
    left, right = model.left(images.flatten(1)).relu(), model.right(images.flatten(1)).relu()
    masks = [dropout_mask((16,), 0.5, (0, number, layer, 0)) for layer in (0, 1)]
    return model.last(left * masks[0] + right * masks[1])


@pytest.mark.parametrize(
    ("model", "by_hand"),
    [(Residual(), residual_by_hand), (TwoBranches(), branches_by_hand), (Centred(), centred_by_hand)],
    ids=["residual", "branches", "centred"],
)
@pytest.mark.parametrize("batch", [2, 5, 6])
def test_models_that_cannot_batch_their_passes_run_them_one_by_one(model, by_hand, batch):
    images = tiny_images(batch)
    predictor = Predictor(model, mc_passes=PASSES)
    evidence = predictor(images)
    assert predictor.batched_passes is False
    with torch.no_grad():
        stacked = torch.stack([by_hand(model, images, number) for number in range(PASSES)])
    assert_close(evidence.log_probs.exp(), stacked.softmax(-1).mean(0))
    assert_close(evidence.energy, -stacked.logsumexp(-1).mean(0))


def test_a_first_batch_of_one_image_does_not_fool_the_choice_of_how_to_run_the_passes():
    predictor = Predictor(Residual(), mc_passes=PASSES)
    predictor(tiny_images(1))
    assert_close(predictor(tiny_images(5)).logits, Predictor(Residual(), mc_passes=PASSES)(tiny_images(5)).logits)


class Early(nn.Module):
    """Dropout right behind a wide convolution, as in the paper's large network: 18 × 100 numbers for 100 pixels."""

    def __init__(self):
        super().__init__()
        self.conv, self.dropout, self.last = nn.Conv2d(1, 18, 3, padding=1), nn.Dropout(0.25), nn.Linear(1800, 5)
        written_down(self)

    def forward(self, images):
        return self.last(self.dropout(self.conv(images).relu()).flatten(1))


def test_what_dropout_repeats_takes_no_more_memory_than_the_chunk():
    model, images = Early(), tiny_images(12, 10, 10)
    rows = []
    predictor = Predictor(model, mc_passes=4, chunk=12, features=("conv", "last"))
    predictor(images)  # measures
    assert predictor.batched_passes is True
    assert predictor.repeated == 1800
    model.last.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].numel()))
    bounded = predictor(images)
    assert rows == [4 * 1800] * 12  # one view at a time, not 4 × 12 × 1800
    unbounded = Predictor(model, mc_passes=4, chunk=12, features=("conv", "last"))
    unbounded.batched_passes = True
    plain = unbounded(images)
    assert rows[-1] == 4 * 12 * 1800
    assert_close(bounded.logits, plain.logits, rtol=1e-5, atol=1e-5)
    assert_close(bounded.features, plain.features, rtol=1e-5, atol=1e-5)


def test_a_narrow_dropout_leaves_the_chunk_as_it_is(net, images):
    rows = []
    predictor = Predictor(net, mc_passes=9)
    predictor(images)
    net.conv.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    predictor(images)
    assert rows == [5]  # 9 passes of 16 numbers are no more than a view of 144


def test_a_dropout_layer_used_twice_gets_a_new_mask_each_time(images):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(144, 16), nn.Linear(16, 16), nn.Linear(16, 5)
            self.dropout = nn.Dropout(0.5)
            written_down(self)

        def forward(self, images):
            hidden = self.dropout(self.first(images.flatten(1)).relu())
            return self.last(self.dropout(self.second(hidden).relu()))

    model = Twice()
    with torch.no_grad():
        stacked = []
        for number in range(PASSES):
            masks = [dropout_mask((16,), 0.5, (0, number, 0, call)) for call in (0, 1)]
            hidden = model.second(model.first(images.flatten(1)).relu() * masks[0]).relu()
            stacked.append(model.last(hidden * masks[1]))
    evidence = Predictor(model, mc_passes=PASSES)(images)
    assert_close(evidence.energy, -torch.stack(stacked).logsumexp(-1).mean(0))


@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_channel_dropout_drops_whole_channels(kind, images):
    axes = {nn.Dropout1d: (144,), nn.Dropout2d: (12, 12), nn.Dropout3d: (3, 4, 12)}[kind]

    class Channels(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.dropout, self.last = nn.Conv2d(1, 6, 3, padding=1), kind(0.5), nn.Linear(6, 5)
            written_down(self)

        def maps(self, images):
            return self.conv(images).reshape(len(images), 6, *axes)

        def forward(self, images):
            return self.last(self.dropout(self.maps(images)).flatten(2).mean(-1))

    model = Channels()
    with torch.no_grad():
        pooled = model.maps(images).flatten(2).mean(-1)
        masks = [dropout_mask((6, *[1] * len(axes)), 0.5, (0, number, 0, 0)).flatten() for number in range(PASSES)]
        stacked = torch.stack([model.last(pooled * mask) for mask in masks])
    predictor = Predictor(model, mc_passes=PASSES)
    assert_close(predictor(images).energy, -stacked.logsumexp(-1).mean(0), rtol=1e-4, atol=1e-5)
    assert predictor.batched_passes is True


def test_a_single_pass_may_be_sampled(net, images):
    sampled = Predictor(net, mc_sampled=True)(images).logits
    assert_close(sampled, passes_by_hand(net, images, passes=1)[0], rtol=1e-5, atol=1e-5)
    assert float((sampled - Predictor(net)(images).logits).abs().max()) > 0.1


def test_masks_follow_the_seed_and_nothing_else(net, images):
    first = Predictor(net, mc_passes=3, seed=7)(images).logits
    torch.manual_seed(12345)
    torch.rand(5)
    assert torch.equal(Predictor(net, mc_passes=3, seed=7)(images).logits, first)
    assert float((Predictor(net, mc_passes=3, seed=8)(images).logits - first).abs().max()) > 0.05


def test_more_passes_come_closer_to_the_mean_over_all_masks(net, images):
    truth = passes_by_hand(net, images, passes=4000, seed=99).softmax(-1).mean(0)
    errors = [
        float((Predictor(net, mc_passes=passes)(images).log_probs.exp() - truth).abs().mean()) for passes in (2, 400)
    ]
    assert errors[1] < 0.02 < errors[0]


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Flatten(), nn.Linear(144, 5)), TinyNet(rate=0.0), lambda images: images.flatten(1)],
    ids=["no dropout", "rate 0", "plain callable"],
)
@pytest.mark.parametrize("options", [{"mc_passes": 2}, {"mc_sampled": True}], ids=str)
def test_sampling_without_anything_to_sample_is_refused_at_once(model, options):
    with pytest.raises(ht.OptionError, match=r"mc_passes.*dropout layer.*mc_passes=1"):
        Predictor(model, **options)

"""What the classifier says: the right averages over dropout, in any chunks, from a model that leaves as it came."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import headtilt as ht
from headtilt import borrow
from headtilt.borrow import dropout_mask, dropout_masks, undisturbed
from headtilt.evidence import Evidence
from headtilt.outputs import feature_layer
from headtilt.pace import automatic_chunk
from headtilt.predictor import Predictor

from .toys import TinyNet, fingerprint, tiny_images, written_down

PASSES = 6


def passes_by_hand(net: TinyNet, images: torch.Tensor, passes: int = PASSES, seed: int = 0) -> torch.Tensor:
    """Logits (M, B, Y): one mask per pass, multiplied in by hand."""
    with torch.no_grad():
        hidden = net.trunk(images)
        masks = [dropout_mask((16,), 0.5, (seed, number, 0, 0)) for number in range(passes)]
        return torch.stack([net.classifier(hidden * mask) for mask in masks])


# --- Evidence ---------------------------------------------------------------------------------------------------------


def test_evidence_reads_energy_log_probabilities_and_labels_off_the_logits():
    evidence = Evidence(torch.tensor([[0.0, 1.0, 3.0], [2.0, -1.0, 0.5]], dtype=torch.float64))
    assert_close(evidence.energy, -evidence.logits.exp().sum(-1).log())
    assert_close(evidence.log_probs.exp().sum(-1), torch.ones(2, dtype=torch.float64))
    assert_close(evidence.log_probs, evidence.logits + evidence.energy[:, None])
    assert evidence.labels.tolist() == [2, 0]
    assert evidence.features is None


# --- one deterministic pass -------------------------------------------------------------------------------------------


def test_without_dropout_passes_the_evidence_is_the_models_own_logits(net, images):
    with torch.no_grad():
        expected = net(images)
    assert_close(Predictor(net)(images).logits, expected)
    assert_close(Predictor(net.train())(images).logits, expected)


def test_views_show_each_image_under_its_pose(net, images):
    index, poses = torch.tensor([3, 0, 3]), ht.rotation().orbit(3)
    seen = Predictor(net).views(images, index, poses, padding="border", interpolation="nearest")
    with torch.no_grad():
        expected = net(ht.warp(images[index], poses, padding="border", interpolation="nearest"))
    assert_close(seen.logits, expected)


@settings(max_examples=25)
@given(chunk=st.integers(1, 14), passes=st.sampled_from([1, 2, 5]))
def test_results_do_not_depend_on_the_chunk_size(chunk, passes):
    net, images = TinyNet(), tiny_images(4)
    index, poses = torch.arange(12) % 4, ht.rotation().orbit(12)
    whole = Predictor(net, mc_passes=passes, chunk=100).views(images, index, poses)
    parts = Predictor(net, mc_passes=passes, chunk=chunk).views(images, index, poses)
    assert_close(parts.logits, whole.logits, rtol=1e-5, atol=1e-5)


@settings(max_examples=25)
@given(cut=st.integers(1, 6), passes=st.sampled_from([1, 3]))
def test_results_do_not_depend_on_how_a_batch_is_split(cut, passes):
    images = tiny_images(7)
    predictor = Predictor(TinyNet(), mc_passes=passes)
    whole = predictor(images).logits
    parts = torch.cat([predictor(images[:cut]).logits, predictor(images[cut:]).logits])
    assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("passes", [1, 4])
def test_the_model_never_sees_more_than_a_chunk(net, images, passes):
    rows = []
    net.conv.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    Predictor(net, chunk=2, mc_passes=passes)(images)
    assert max(rows) <= 2


def test_the_automatic_chunk_keeps_small_views_in_cache_and_never_starves():
    assert automatic_chunk(torch.zeros(1, 1, 28, 28)) == 2**18 // 784
    assert automatic_chunk(torch.zeros(1, 1, 4, 4)) == 512
    assert automatic_chunk(torch.zeros(1, 3, 1024, 1024)) == 8


# --- Monte-Carlo dropout ----------------------------------------------------------------------------------------------


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


# --- the model leaves as it came --------------------------------------------------------------------------------------


class Restless(nn.Module):
    """Batch norm, dropout, a buffer that it replaces, one that it overwrites, and a taste for random numbers."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm2d(1), nn.Dropout(0.5)
        self.last = nn.Linear(144, 5)
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("overwritten", torch.zeros(3))
        self.calls, self.fail_on, self.error = 0, None, RuntimeError("the model is tired")

    def forward(self, images):
        self.calls += 1
        torch.rand(3)
        self.replaced = self.replaced + 1
        self.overwritten.add_(1)
        if self.calls == self.fail_on:
            raise self.error
        return self.last(self.dropout(self.norm(images)).flatten(1))


def restless(mode: str) -> Restless:
    torch.manual_seed(0)
    model = Restless()
    if mode == "mixed":
        model.train()
        model.norm.eval()
    else:
        model.train(mode == "train")
    return model


@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
@pytest.mark.parametrize("passes", [1, 4])
def test_a_search_leaves_modes_buffers_hooks_and_random_streams_alone(images, mode, passes):
    model = restless(mode)
    fired = []
    handles = [
        model.dropout.register_forward_hook(lambda module, inputs, output: fired.append("forward")),
        model.last.register_forward_pre_hook(lambda module, inputs: fired.append("before")),
    ]
    before = fingerprint(model)
    ht.ITS(model, [ht.rotation(), ht.scale()], samples=3, mc_passes=passes)(images)
    assert fingerprint(model) == before
    assert {"forward", "before"} == set(fired)
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("fail_on", [1, 2, 6])
@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (RuntimeError("the model is tired"), ht.ModelError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (SystemExit(3), SystemExit),
    ],
    ids=["raises", "interrupted", "exits"],
)
def test_a_model_that_fails_midway_is_left_as_it_came_too(images, mode, passes, fail_on, error, seen):
    model = restless(mode)
    model.fail_on, model.error = fail_on, error
    before = fingerprint(model)
    robust = ht.ITS(model, [ht.rotation(), ht.scale()], samples=3, mc_passes=passes, chunk=2)
    with pytest.raises(seen):
        robust(images)
    assert model.calls == fail_on
    assert fingerprint(model) == before


def test_the_fingerprint_would_notice(images):
    """The checks above can fail: plain train mode, as in the reference code, changes what they look at."""
    model = restless("eval")
    before = fingerprint(model)
    model.train()
    assert fingerprint(model) != before
    model(images)
    model.eval()
    after = fingerprint(model)
    assert after["modes"] == before["modes"]
    assert after["buffers"] != before["buffers"]
    assert after["random"] != before["random"]


def test_leaving_the_features_tap_behind_would_be_noticed_and_is_not_done(net, images):
    before = fingerprint(net)
    Predictor(net, features="auto")(images)
    assert fingerprint(net) == before
    net.classifier.register_forward_pre_hook(lambda module, inputs: None)
    assert fingerprint(net) != before


class AlwaysTraining(nn.Module):
    """Normalises by the batch whatever its mode, as networks for test-time adaptation do."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm2d(1), nn.Linear(144, 5)

    def forward(self, images):
        normal = F.batch_norm(images, self.norm.running_mean, self.norm.running_var, training=True)
        return self.last(normal.flatten(1))


class WritesData(nn.Module):
    """Updates a buffer through `.data`, as many hand-written layers do."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(144, 5)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, images):
        self.seen.data += len(images)
        return self.last(images.flatten(1))


class Lazy(nn.Module):
    """Fills a buffer that was None when it is first needed."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(144, 5)
        self.register_buffer("cache", None)

    def forward(self, images):
        self.cache = torch.ones(2)
        return self.last(images.flatten(1))


class Registers(nn.Module):
    """Makes a buffer when it is first called."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(144, 5)

    def forward(self, images):
        self.register_buffer("late", torch.ones(2))
        return self.last(images.flatten(1))


class NotANumber(nn.Module):
    """Overwrites a buffer that holds NaN, which is equal to nothing."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(144, 5)
        self.register_buffer("missing", torch.full((2,), torch.nan))

    def forward(self, images):
        self.missing.data.zero_()
        return self.last(images.flatten(1))


@pytest.mark.parametrize("model", [AlwaysTraining, WritesData, Lazy, Registers, NotANumber])
def test_buffers_are_restored_however_the_model_writes_them(model, images):
    model = model().eval()
    before = fingerprint(model)
    ht.ITS(model, samples=3)(images)
    assert fingerprint(model) == before


def test_a_model_made_in_inference_mode_can_be_searched(images):
    with torch.inference_mode():
        model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(144, 5)).eval()
        expected = model(images)
        assert_close(Predictor(model)(images).logits, expected)
    assert_close(Predictor(model)(images).logits, expected)


def test_a_buffer_of_inference_mode_is_restored_outside_of_it(images):
    with torch.inference_mode():
        model = AlwaysTraining().eval()
    before = model.norm.running_mean.tolist()
    Predictor(model)(images)
    assert model.norm.running_mean.tolist() == before


def test_a_graph_that_somebody_holds_survives_a_search(images):
    """Writing a buffer, even with the values it has, would make the backward pass refuse."""
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(144, 5)).eval()
    loss = model(images).sum()
    Predictor(model)(images)
    loss.backward()
    assert float(model[0].weight.grad.abs().sum()) > 0


def test_a_buffer_that_shares_its_memory_with_itself_is_no_problem(images):
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 5))
    model.register_buffer("expanded", torch.ones(1).expand(4))
    Predictor(model)(images)
    assert model.expanded.tolist() == [1, 1, 1, 1]


def test_search_works_inside_inference_mode_and_tracks_no_gradient_outside(net, images):
    outside = Predictor(net)(images.clone().requires_grad_()).logits
    assert not outside.requires_grad
    with torch.inference_mode():
        assert_close(Predictor(net)(images).logits, outside)


def test_borrowing_a_model_twice_in_the_same_thread_is_fine():
    model = nn.BatchNorm2d(1)
    with undisturbed(model), undisturbed(model):
        assert not model.training
    assert model.training


def test_threads_that_share_a_model_get_the_same_answers_and_leave_it_alone(images):
    model = restless("train")
    robust = ht.ITS(model, samples=5, mc_passes=3)
    expected, before = robust(images), fingerprint(model)
    found = [None] * 4

    def work(number):
        found[number] = ht.ITS(model, samples=5, mc_passes=3)(images)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for logits in found:
        assert_close(logits, expected)
    after = fingerprint(model)
    for part in ("modes", "parameters", "buffers", "hooks"):
        assert after[part] == before[part]


# --- features ---------------------------------------------------------------------------------------------------------


def pooled(net, images):
    with torch.no_grad():
        return F.max_pool2d(F.gelu(net.conv(images)), 3).flatten(1)


def test_features_are_the_inputs_of_the_last_two_linear_layers_joined(net, images):
    with torch.no_grad():
        expected = torch.cat([pooled(net, images), net.trunk(images)], dim=1)
    assert_close(Predictor(net, features="auto")(images).features, expected)
    assert_close(Predictor(net, features=("hidden", "classifier"), chunk=2)(images).features, expected)


def test_features_may_be_named(net, images):
    with torch.no_grad():
        assert_close(Predictor(net, features="classifier")(images).features, net.trunk(images))
    assert feature_layer(net, "classifier") is net.classifier


@pytest.mark.parametrize("model", [nn.Flatten(), lambda views: views.flatten(1)], ids=["no linear layer", "callable"])
def test_automatic_features_of_a_model_that_has_none_are_none(model, images):
    assert Predictor(model, features="auto")(images).features is None


def test_features_of_a_named_layer_are_averaged_over_space(images):
    net = TinyNet(channels=2)
    pair = tiny_images(5, channels=2)
    assert_close(Predictor(net, features="conv")(pair).features, pair.flatten(2).mean(-1))


@pytest.mark.parametrize("batched", [True, False])
def test_features_behind_the_dropout_are_averaged_over_passes(net, images, batched):
    predictor = Predictor(net, features="classifier", mc_passes=PASSES)
    predictor.batched_passes = batched
    with torch.no_grad():
        masks = torch.stack([dropout_mask((16,), 0.5, (0, number, 0, 0)) for number in range(PASSES)])
        expected = net.trunk(images) * masks.mean(0)
    assert_close(predictor(images).features, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batched", [True, False, None])
def test_features_before_the_dropout_are_the_same_in_every_pass(net, images, batched):
    predictor = Predictor(net, features="hidden", mc_passes=PASSES)
    predictor.batched_passes = batched
    assert_close(predictor(images).features, pooled(net, images), rtol=1e-4, atol=1e-5)


def test_nobody_asked_for_features_nobody_gets_them(net, images):
    assert Predictor(net)(images).features is None


# --- devices and dtypes -----------------------------------------------------------------------------------------------


def test_views_come_to_the_model_in_its_own_dtype(net, images):
    single = Predictor(net)(images).logits
    double = Predictor(copy.deepcopy(net).double())(images).logits
    assert double.dtype == torch.float64
    assert_close(double.float(), single, rtol=1e-4, atol=1e-5)
    assert Predictor(net)(images.double()).logits.dtype == torch.float32


def test_a_model_without_parameters_computes_in_the_dtype_of_the_images(images):
    model = nn.Flatten()
    assert Predictor(model).device_and_dtype(images.double()) == (torch.device("cpu"), torch.float64)
    assert_close(Predictor(model)(images.double()).logits, images.double().flatten(1))


def test_reduced_precision_logits_come_back_in_single_precision(images):
    net = TinyNet()
    reference = Predictor(net)(images).logits
    for dtype in (torch.bfloat16, torch.float16):
        low = Predictor(copy.deepcopy(net).to(dtype))(images).logits
        assert low.dtype == torch.float32
        assert_close(low, reference, rtol=0, atol=0.15)
        assert float((low - reference).abs().max()) > 0


def test_autocast_reaches_the_model(net, images):
    seen = []
    net.classifier.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    low = Predictor(net, autocast=torch.bfloat16)(images).logits
    assert set(seen) == {torch.bfloat16}
    assert low.dtype == torch.float32
    assert_close(low, Predictor(net)(images).logits, rtol=0, atol=0.1)
    assert not torch.is_autocast_enabled("cpu")


def test_evidence_is_frozen():
    with pytest.raises(AttributeError):
        Evidence(torch.zeros(1, 2)).logits = torch.ones(1, 2)
    assert replace(Evidence(torch.zeros(1, 2)), features=torch.ones(1, 3)).features.shape == (1, 3)


def test_the_locks_do_not_keep_models_alive():
    import gc
    import weakref

    model = TinyNet()
    Predictor(model)(tiny_images(1))
    assert model in borrow._LOCKS
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None

"""A borrowed model leaves as it came: modes, buffers, hooks and random streams, whatever happened."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import headtilt as ht
from headtilt.model import state as borrow
from headtilt.model.predictor import Predictor
from headtilt.model.state import undisturbed
from tests.toys import TinyNet, fingerprint, its, tiny_images


class Restless(nn.Module):
    """Batch norm, dropout, a buffer that it replaces, and one that it overwrites."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm2d(1), nn.Dropout(0.5)
        self.last = nn.Linear(144, 5)
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("overwritten", torch.zeros(3))
        self.calls, self.fail_on, self.error = 0, None, RuntimeError("the model is tired")

    def forward(self, images):
        self.calls += 1
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
    its(model, [ht.rotation(), ht.scale()], samples=3, mc_passes=passes)(images)
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
    robust = its(model, [ht.rotation(), ht.scale()], samples=3, mc_passes=passes, chunk=2)
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
    its(model, samples=3)(images)
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


def test_a_hook_that_cannot_be_put_on_leaves_none_of_the_others_behind(images):
    class Deaf(nn.Linear):
        def register_forward_pre_hook(self, *arguments, **named):
            raise RuntimeError("this module takes no hooks")

    model = restless("eval")
    model.last = Deaf(144, 5)
    before = fingerprint(model)
    with pytest.raises(RuntimeError, match="takes no hooks"):
        Predictor(model, features=["norm:out", "last"])(images)
    assert fingerprint(model) == before


def test_taps_are_put_on_once_for_all_that_is_asked_of_a_borrowed_model(images, monkeypatch):
    model, put_on = restless("train"), []
    hook = nn.Module.register_forward_pre_hook
    monkeypatch.setattr(
        nn.Module,
        "register_forward_pre_hook",
        lambda self, *rest, **how: put_on.append(self) or hook(self, *rest, **how),
    )
    before = fingerprint(model)
    predictor = Predictor(model, features=["last"])
    alone = [predictor(images), predictor(images[:2])]
    assert put_on == [model.last] * 2
    with predictor.borrowed():
        together = [predictor(images), predictor(images[:2])]
    assert put_on == [model.last] * 3
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one.features, other.features)
    assert fingerprint(model) == before


def test_others_may_run_a_borrowed_model_in_between(images):
    model = restless("eval")
    predictor = Predictor(model, features=["last"])
    expected = predictor(images).features
    with predictor.borrowed():
        model(images[:2])
        assert predictor.with_features(None)(images).features is None
        assert torch.equal(predictor.with_features("last")(images[1:]).features, expected[1:])
        assert torch.equal(predictor(images).features, expected)


def test_threads_that_share_a_predictor_read_each_their_own_features(images):
    model = restless("eval")
    predictor = Predictor(model, features=["last"])
    expected = predictor(images).features
    found = {}

    def work(number):
        with predictor.borrowed():
            found[number] = [predictor(images).features for _ in range(5)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2, 3]
    assert all(torch.equal(features, expected) for several in found.values() for features in several)


def test_threads_that_share_a_model_get_the_same_answers_and_leave_it_alone(images):
    model = restless("train")
    robust = its(model, samples=5, mc_passes=3)
    expected, before = robust(images), fingerprint(model)
    found = [None] * 4

    def work(number):
        found[number] = its(model, samples=5, mc_passes=3)(images)

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


def test_what_two_models_share_is_given_back_by_the_last_that_leaves(images):
    """One thread searches a network, another the same network behind something else: neither sees the other's modes."""
    shared = restless("train")
    whole = nn.Sequential(nn.Identity(), shared)
    before = fingerprint(shared)
    entered, leave = threading.Event(), threading.Event()

    def borrow_the_whole():
        with undisturbed(whole):
            whole(images)
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=borrow_the_whole)
    with undisturbed(shared):
        thread.start()
        assert entered.wait(60)
        shared(images)
    assert not any(module.training for module in shared.modules())
    leave.set()
    thread.join(60)
    after = fingerprint(shared)
    for part in ("modes", "buffers"):
        assert after[part] == before[part]

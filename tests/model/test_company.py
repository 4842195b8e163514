"""A model in company: other threads call it and draw numbers, it writes into what it is given, and nobody minds."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headtilt as ht
from headtilt.calibration.head import HeadRecipe
from headtilt.model.state import dropout_mask
from tests.toys import TinyNet, its, tiny_images

QUICK = HeadRecipe(hidden=16, looks=1, views=8, epochs=1)


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = TinyNet(), nn.Dropout(0.5)
        self.last = nn.Linear(5, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.dropout(self.inner(images)))


class Writing(nn.Module):
    """It doubles its input in place before it looks at it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images.mul_(2))


class Reading(Writing):
    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images * 2)


def searches() -> dict[str, Callable[[nn.Module], ht.ITS]]:
    return {
        "tree": lambda model: ht.ITS(model),
        "dropout": lambda model: ht.ITS(model, mc_passes=4, seed=3),
        "fitted": lambda model: ht.ITS(model, **ht.fast([ht.rotation()])).fit(tiny_images(60), recipe=QUICK),
    }


@pytest.mark.parametrize("kind", searches())
def test_a_model_that_writes_into_its_input_answers_as_one_that_does_not(kind: str) -> None:
    model, images = WithDropout().eval(), tiny_images(6)
    before = images.clone()
    reading, writing = (searches()[kind](wrapper(model)).search(images) for wrapper in (Reading, Writing))
    assert torch.equal(images, before)
    assert_close(writing.logits, reading.logits)
    assert torch.equal(writing.labels, reading.labels)
    assert_close(writing.pose, reading.pose)


@pytest.mark.parametrize("kind", searches())
def test_threads_that_search_call_the_model_and_draw_numbers_do_not_see_one_another(kind: str) -> None:
    model, images = WithDropout().eval(), tiny_images(8)
    robust = searches()[kind](model)
    expected = robust.search(images)
    with torch.no_grad():
        bare = model(images[:3])
    failures: list[BaseException] = []
    drawn: list[Tensor] = []
    done = threading.Event()

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        return run

    def search() -> None:
        for _ in range(4):
            result = robust.search(images)
            assert_close(result.logits, expected.logits)
            assert torch.equal(result.pose, expected.pose)

    def call() -> None:
        while not done.is_set():
            with torch.no_grad():
                assert_close(model(images[:3]), bare)

    def draw() -> None:
        while not done.is_set():
            drawn.append(torch.rand(4))

    searching = [threading.Thread(target=guarded(search)) for _ in range(4)]
    others = [threading.Thread(target=guarded(work)) for work in (call, call, draw, draw)]
    for thread in [*others, *searching]:
        thread.start()
    for thread in searching:
        thread.join(120)
    done.set()
    for thread in others:
        thread.join(120)
    assert not failures, failures[0]
    assert len(torch.stack(drawn).unique(dim=0)) == len(drawn)


def test_every_seed_has_masks_of_its_own() -> None:
    seeds = (-2, -1, 0, 1, 2**61 - 1, 2**63 - 1)
    masks = torch.stack([dropout_mask((64,), 0.5, (seed, 0, 0, 0)) for seed in seeds])
    assert len(masks.unique(dim=0)) == len(seeds)
    assert torch.equal(masks[1], dropout_mask((64,), 0.5, (-1, 0, 0, 0)))


@pytest.mark.parametrize("preset", [ht.accurate, ht.fast])
@pytest.mark.parametrize(
    ("levels", "count"),
    [([ht.quarter_turns()], 4), ([ht.reflection()], 4), ([ht.quarter_turns(), ht.reflection()], 8)],
)
def test_finite_groups_are_shown_once_each(preset, levels, count) -> None:
    robust = its(TinyNet().eval(), **{**preset(levels), "budget": 40})
    result = robust.search(tiny_images(5))
    assert result.views.tolist() == [count] * 5
    assert len(result.trace[0].poses[0].unique(dim=0)) == count  # both flips together are a half turn
    fitted = robust.fit(tiny_images(60), recipe=QUICK, promise=None)
    views = fitted.search(tiny_images(5)).views
    assert int(views.max()) <= count  # `fast` looks at likely ones alone
    assert preset is ht.fast or views.tolist() == [count] * 5


@pytest.mark.parametrize("method", ["head", "balance", "prototypes", "neighbours"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_what_was_fitted_and_the_poses_stay_in_single_precision_whatever_the_wrapper_is_cast_to(method, dtype) -> None:
    readout = "marginal" if method in ("head", "balance") else "incumbent"
    robust = ht.ITS(TinyNet().eval(), **{**ht.accurate([ht.rotation()]), "readout": readout})
    robust.fit(tiny_images(60), recipe=QUICK, method=method, promise=5.0)
    cast = copy.deepcopy(robust).to(dtype)
    fitted = dict(robust.calibrator.state_dict())
    assert all(torch.equal(value, fitted[name]) for name, value in cast.calibrator.state_dict().items())
    assert {value.dtype for value in cast.calibrator.state_dict().values() if value.is_floating_point()} <= {
        torch.float32
    }
    beside = copy.deepcopy(robust)
    beside.model.to(dtype)
    images = tiny_images(6)
    result, expected = cast.search(images.to(dtype)), beside.search(images.to(dtype))
    assert result.pose.dtype == expected.pose.dtype
    assert torch.finfo(result.pose.dtype).bits >= 32
    assert torch.equal(result.logits, expected.logits)
    assert torch.equal(result.pose, expected.pose)
    assert (cast.gate.margin, cast.gate.exit_at, cast.gate.turn_at) == (
        robust.gate.margin, robust.gate.exit_at, robust.gate.turn_at,
    )  # fmt: skip
    angles = result.trace[0].coordinates[0, :, 0].double().sort().values.diff()
    assert_close(angles, angles.mean().expand_as(angles), rtol=1e-4, atol=1e-5)


INSIDE, GO_ON = threading.Event(), threading.Event()


class Waiting(TinyNet):
    """It waits, while another thread looks at it, until it may go on."""

    waits = False

    def forward(self, images: Tensor) -> Tensor:
        if self.waits:
            INSIDE.set()
            assert GO_ON.wait(60)
        return super().forward(images)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("again", [copy.deepcopy, lambda robust: pickle.loads(pickle.dumps(robust))])
def test_a_wrapper_copied_or_pickled_amid_a_search_of_another_thread_is_as_it_came(again, passes) -> None:
    model, images = Waiting().train(), tiny_images(4)
    robust = ht.ITS(model, search=ht.Joint(budget=4), mc_passes=passes)
    robust.predictor = robust.predictor.with_features("classifier")
    expected = robust.search(images)
    INSIDE.clear()
    GO_ON.clear()
    model.waits = True
    thread = threading.Thread(target=robust.search, args=(images,))
    thread.start()
    assert INSIDE.wait(60)
    threading.Timer(0.1, GO_ON.set).start()
    other = again(robust)
    thread.join(60)
    assert [module.training for module in other.model.modules()] == [True] * len(list(model.modules()))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in other.modules())
    assert other.predictor.model is other.model is not model
    assert torch.equal(other.search(images).logits, expected.logits)


def test_a_shallow_copy_has_the_same_parts_until_it_is_given_others() -> None:
    robust = ht.ITS(TinyNet(), gate=2.0)
    other = copy.copy(robust)
    assert (other.model, other.gate) == (robust.model, robust.gate)
    other.gate = None
    assert robust.gate.margin == 2.0


def test_a_wrapper_copied_with_its_model_is_around_the_copy() -> None:
    net = TinyNet()
    robust, model = copy.deepcopy((ht.ITS(net), net))
    assert robust.model is model is not net

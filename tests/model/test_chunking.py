"""How views go through the model: how many at once, in which layout, and what happens where memory runs out."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import headtilt as ht
from headtilt.geometry.warp import warp, warp_all
from headtilt.model import chunking as pace
from headtilt.model import predictor as predictor_module
from headtilt.model import state as borrow
from headtilt.model.evidence import Evidence
from headtilt.model.predictor import Predictor
from headtilt.model.views import Views, everywhere
from tests.toys import TinyNet, its, tiny_images

LEVELS = [ht.rotation(), ht.scale()]
CPU = torch.device("cpu")


def poses(count: int) -> torch.Tensor:
    return ht.rotation().matrix(torch.linspace(-3, 2, count)) @ ht.shear_x(0.25).matrix(
        torch.linspace(-0.2, 0.2, count)
    )


# --- every image under every pose -------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection", 0.5, (0.1, 0.2, 0.3)])
@pytest.mark.parametrize("interpolation", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_all_images_under_all_poses_are_each_image_under_each_pose(padding, interpolation, dtype):
    images = tiny_images(6, 9, 14).reshape(2, 3, 9, 14).to(dtype)
    options = {"padding": padding, "interpolation": interpolation}
    seen = warp_all(images, poses(5), **options)
    assert seen.shape == (5, 2, 3, 9, 14)
    assert seen.dtype == dtype
    for number, pose in enumerate(poses(5)):
        assert torch.equal(seen[number], warp(images, pose.expand(2, 3, 3), **options))


@pytest.mark.parametrize("chunk", [1, 3, 5, 7, 12, 100])
@pytest.mark.parametrize("passes", [1, 3])
def test_evidence_everywhere_is_that_of_the_views_one_by_one(chunk, passes):
    images, turns = tiny_images(5), poses(4)
    predictor = Predictor(TinyNet(), chunk=chunk, mc_passes=passes, features="classifier")
    index = torch.arange(5).repeat_interleave(4)
    one_by_one = predictor.views(images, index, turns.repeat(5, 1, 1))
    together = predictor.all_views(images, turns)
    assert_close(together.logits, one_by_one.logits, rtol=1e-5, atol=1e-5)
    assert_close(together.features, one_by_one.features, rtol=1e-5, atol=1e-5)


def test_a_plain_callable_is_asked_view_by_view_where_poses_are_shared():
    asked = []

    def evaluate(index, shown):
        asked.append((index.tolist(), shown))
        return Evidence(shown.flatten(1))

    seen = everywhere(evaluate, 2, poses(3))
    assert asked[0][0] == [0, 0, 0, 1, 1, 1]
    assert torch.equal(seen.logits.reshape(2, 3, 9)[1], poses(3).flatten(1))


@pytest.mark.parametrize(
    "options", [{"samples": 5}, {"search": "joint", "budget": 9}, {"search": "anneal", "budget": 9}]
)
def test_a_search_finds_the_same_whether_poses_are_shared_or_not(options):
    images, robust = tiny_images(4), its(TinyNet(), LEVELS, **options)
    root = robust.predictor(images)
    shared = Views(robust.predictor, images)
    found = robust.plan.search(shared, root)
    apart = robust.plan.search(lambda index, shown: shared(index, shown), root)
    assert_close(found.marginal, apart.marginal, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.beam.labels, apart.beam.labels)
    assert torch.equal(found.views, apart.views)


# --- chunks -----------------------------------------------------------------------------------------------------------


def test_the_chunk_is_what_the_largest_activation_leaves_room_for():
    budget = pace.ACTIVATION_BYTES["cpu"]
    assert pace.fitting_chunk(CPU, budget // 20) == 20
    assert pace.fitting_chunk(CPU, 10 * budget) == 1
    assert pace.fitting_chunk(CPU, 1) == pace.MOST_VIEWS["cpu"]


def test_activations_are_measured_per_view_in_bytes():
    model = nn.Sequential(nn.Conv2d(1, 7, 3, padding=1), nn.Flatten(), nn.Linear(7 * 144, 5))
    with pace.activations(model, 2) as sizes:
        model(torch.zeros(2, 1, 12, 12))
    assert sizes == [7 * 144 * 4, 7 * 144 * 4, 5 * 4]
    assert not any(module._forward_hooks for module in model.modules())


def test_a_wide_model_gets_smaller_chunks_from_its_first_call_on_and_they_are_remembered(monkeypatch):
    monkeypatch.setitem(pace.ACTIVATION_BYTES, "cpu", 3 * 4 * 144 * 4)  # three views of TinyNet's four channels
    net, rows = TinyNet(), []
    predictor = Predictor(net)
    net.conv.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    predictor(tiny_images(8))
    assert rows == [2, 2, 3, 3, 2]  # two views in both layouts, then the chunks
    predictor(tiny_images(8))
    assert rows[5:] == [3, 3, 2]
    assert list(predictor.chunks.values()) == [3]


# --- memory that runs out ---------------------------------------------------------------------------------------------

SHORT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried ..."),
    MemoryError(),
]


class Greedy(TinyNet):
    """Runs out of memory on more rows than it bears, at the convolution or behind the dropout layer."""

    def __init__(self, error: BaseException, most: int, behind: int = 10**6):
        super().__init__()

        def refuse(bears):
            def hook(module, inputs):
                if len(inputs[0]) > bears:
                    raise error

            return hook

        self.conv.register_forward_pre_hook(refuse(most))
        self.classifier.register_forward_pre_hook(refuse(behind))


@pytest.mark.parametrize("error", SHORT, ids=["gpu", "cpu", "python"])
@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"search": "joint", "budget": 7}, {"chunk": 64}], ids=["tree", "joint", "chunk"]
)
def test_where_memory_runs_out_the_search_goes_on_in_smaller_chunks_with_the_same_result(error, passes, most, options):
    images = tiny_images(5)
    options = {"levels": LEVELS, "samples": 5, "mc_passes": passes, **options}
    wanted = its(TinyNet(), **options).search(images)
    robust = its(Greedy(error, most), **options)
    got = robust.search(images)
    assert_close(got.logits, wanted.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.labels, wanted.labels)
    assert_close(got.pose, wanted.pose)
    assert max(robust.predictor.chunks.values()) <= most


def test_where_the_passes_of_a_single_view_are_too_much_they_run_one_by_one():
    images = tiny_images(3)
    robust = its(Greedy(SHORT[0], 9, behind=4), samples=5, mc_passes=6)
    wanted = its(TinyNet(), samples=5, mc_passes=6).search(images)
    assert_close(robust.search(images).logits, wanted.logits, rtol=1e-5, atol=1e-5)
    assert robust.predictor.batched_passes is False


@pytest.mark.parametrize("error", SHORT, ids=["gpu", "cpu", "python"])
def test_a_single_view_that_is_too_much_is_an_error_that_says_so(error):
    with pytest.raises(ht.ModelError, match=r"model raised on views of shape \(1, 1, 12, 12\)") as caught:
        its(Greedy(error, 0), samples=5).search(tiny_images(3))
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("out of memory, says a liar")])
def test_other_errors_are_not_taken_for_it(error):
    assert not pace.out_of_memory(error)


def test_features_of_a_chunk_that_failed_midway_are_not_counted_twice():
    images = tiny_images(5)
    wanted = Predictor(TinyNet(), features="hidden")(images)
    got = Predictor(Greedy(SHORT[0], 9, behind=2), features="hidden", chunk=5)(images)
    assert_close(got.features, wanted.features, rtol=1e-5, atol=1e-5)


# --- layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_is_the_same_views_marked_as_such(channels):
    views = torch.rand(2, channels, 5, 4)
    moved = pace.channels_last(views)
    assert torch.equal(moved, views)
    assert moved.stride() == (20 * channels, 1, 4 * channels, channels)
    convolved = nn.Conv2d(channels, 2, 3)(moved)
    assert convolved.is_contiguous(memory_format=torch.channels_last)


class Viewing(TinyNet):
    """Flattens by `view`, which views with channels last refuse."""

    def forward(self, images):
        pooled = nn.functional.adaptive_avg_pool2d(self.conv(images).relu(), 4)
        return self.classifier(self.dropout(self.hidden(pooled.view(len(images), -1)).relu()))


class Striding(TinyNet):
    """Reads its memory instead of its values, so that another layout is another answer."""

    def forward(self, images):
        return super().forward(images) + self.conv(images).stride(1)


@pytest.mark.parametrize("model", [Viewing(), Striding()], ids=["refuses", "differs"])
def test_models_that_do_not_take_the_layout_are_shown_views_as_they_are(model):
    plain = Predictor(model)
    tried = Predictor(model)
    images, index = tiny_images(4), torch.arange(4)
    plain.layouts[plain.device_and_dtype(images)] = False
    assert torch.equal(tried.views(images, index, poses(4)).logits, plain.views(images, index, poses(4)).logits)
    assert tried.layouts == {(torch.device("cpu"), torch.float32): False}


def test_views_run_with_channels_last_and_images_as_they_came_do_not():
    net, images, layouts = TinyNet().eval(), tiny_images(6), []
    predictor = Predictor(net)
    predictor(images)
    assert predictor.layouts == {(torch.device("cpu"), torch.float32): True}
    net.conv.register_forward_pre_hook(lambda module, inputs: layouts.append(inputs[0].stride(1) == 1))
    predictor(images)
    predictor.views(images, torch.arange(6), poses(6))
    assert layouts == [False, True]
    with torch.no_grad():
        assert torch.equal(predictor(images).logits, net(images))


def test_a_model_without_convolutions_is_not_tried():
    calls = []
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 5))
    model.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    Predictor(model, chunk=4)(tiny_images(4))
    assert calls == [4]


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_masks_are_drawn_once_however_many_chunks(monkeypatch):
    drawn = []
    inner = borrow.dropout_mask
    monkeypatch.setattr(borrow, "dropout_mask", lambda *args: drawn.append(args) or inner(*args))
    predictor = Predictor(TinyNet(), mc_passes=4, chunk=1)
    first = predictor(tiny_images(6))
    count = len(drawn)
    assert count == 4 + 2 + 1 + 1  # the passes; and two of them both ways at the trial
    assert torch.equal(predictor(tiny_images(6)).logits, first.logits)
    assert len(drawn) == count


def test_masks_that_take_too_much_memory_are_forgotten(monkeypatch):
    monkeypatch.setattr(borrow, "MASK_BYTES", 0)
    kept, predictor = {}, Predictor(TinyNet(), mc_passes=4)
    predictor.masks = kept
    wanted = Predictor(TinyNet(), mc_passes=4)(tiny_images(3))
    assert torch.equal(predictor(tiny_images(3)).logits, wanted.logits)
    assert len(kept) == 1


def test_a_model_borrowed_already_is_not_copied_again(monkeypatch):
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(144, 5)).train()
    before = copy.deepcopy(model.state_dict())
    copied = []
    inner = borrow._restored
    monkeypatch.setattr(borrow, "_restored", lambda model: copied.append(model) or inner(model))
    its(model, LEVELS, samples=5).search(tiny_images(3))
    assert copied == [model]
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- few sizes on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [*range(1, 70), 999, 1025, 5000])
def test_a_gpu_sees_four_sizes_to_the_octave_and_little_in_vain(count):
    gpu = torch.device("cuda")
    size = pace.filled_size(gpu, count, 10_000)
    assert count <= size <= 1.25 * count
    assert size >> max(size.bit_length() - 3, 0) << max(size.bit_length() - 3, 0) == size
    assert pace.filled_size(gpu, count, count) == count
    assert pace.filled_size(gpu, count, count - 1) == count
    assert pace.filled_size(gpu, count, count + 1) in (count, count + 1)
    assert pace.filled_size(CPU, count, 10_000) == count


@pytest.mark.parametrize("passes", [1, 3])
def test_filling_up_a_chunk_changes_no_answer(passes, monkeypatch):
    images, turns, shown = tiny_images(5), poses(7), []

    def seen(predictor):
        views = predictor.views(images, torch.arange(5).repeat(2), poses(10))
        return [predictor(images), views, predictor.all_views(images, turns)]

    model = TinyNet()
    plain = seen(Predictor(model, chunk=16, mc_passes=passes, features="classifier"))
    monkeypatch.setattr(
        "headtilt.model.predictor.filled_size", lambda device, count, most: min(-(-count // 8) * 8, most)
    )
    model.register_forward_pre_hook(lambda module, inputs: shown.append(len(inputs[0])))
    filled = seen(Predictor(model, chunk=16, mc_passes=passes, features="classifier"))
    assert {5, 16} <= set(shown)  # the images as they came, and ten views filled up
    assert 10 not in shown
    for before, after in zip(plain, filled, strict=True):
        assert_close(after.logits, before.logits, rtol=1e-5, atol=1e-5)
        assert_close(after.features, before.features, rtol=1e-5, atol=1e-5)


def test_what_was_learned_of_chunks_and_layouts_counts_for_one_precision(monkeypatch):
    monkeypatch.setitem(pace.ACTIVATION_BYTES, "cpu", 4 * 4 * 144 * 4)  # four views of TinyNet's channels, in single
    net = Refusing().eval()
    predictor = Predictor(net)
    predictor(tiny_images(3))
    shape, cpu = torch.Size([1, 12, 12]), torch.device("cpu")
    assert predictor.chunks == {(shape, cpu, torch.float32): 4}
    net.double()
    predictor(tiny_images(3))
    assert predictor.chunks == {(shape, cpu, torch.float32): 4, (shape, cpu, torch.float64): 2}
    assert predictor.layouts == {(cpu, torch.float32): True, (cpu, torch.float64): False}


class Refusing(TinyNet):
    """Refuses channels that lie last in double precision alone, as kernels of some libraries do."""

    def forward(self, images):
        if images.dtype == torch.float64 and images.stride(1) == 1:
            raise RuntimeError("no kernel")
        return super().forward(images)


@pytest.mark.parametrize("most", [1, 3, 5, 8])
def test_memory_that_runs_out_in_warping_shrinks_what_is_warped(monkeypatch, most):
    """Eight images under six poses: all of them under one pose may already be too many."""
    images, under, sizes = tiny_images(8), poses(6), []
    expected = Predictor(TinyNet().eval()).all_views(images, under).logits

    def scarce(warping):
        def warp(images, poses, **how):
            views = len(poses) * (len(images) if warping is warp_all else 1)
            if views > most:
                raise MemoryError("out of memory")
            sizes.append(views)
            return warping(images, poses, **how)

        return warp

    monkeypatch.setattr(predictor_module, "warp", scarce(warp))
    monkeypatch.setattr(predictor_module, "warp_all", scarce(warp_all))
    found = Predictor(TinyNet().eval(), chunk=8).all_views(images, under).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert max(sizes) <= most

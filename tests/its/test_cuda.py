"""What holds on a GPU, where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import headtilt as ht
from headtilt.calibration.head import HeadRecipe
from headtilt.geometry.warp import warp, warp_all
from headtilt.paper import zoo
from headtilt.paper.data import load
from headtilt.paper.data.perturb import draw
from tests.toys import its

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LEVELS = [ht.rotation(), ht.scale(0.25), ht.shear_x(0.25)]


@pytest.fixture
def tilted() -> Tensor:
    images = load("digits", "test", limit=200).floats()
    return warp(images, draw("affine", len(images), seed=0))


def on(device: str, **options: object) -> ht.ITS:
    return its(zoo.load("digits:0").to(device), LEVELS, gate=None, **options)  # type: ignore[arg-type]


def test_a_search_on_the_gpu_finds_what_it_finds_on_the_cpu(tilted: Tensor) -> None:
    here, there = on("cpu").search(tilted), on("cuda").search(tilted.cuda())
    same = here.labels == there.labels.cpu()
    assert same.float().mean() >= 0.99
    # Where two views are as good as each other, rounding decides which one answers.
    alike = (there.logits.cpu() - here.logits).abs().amax(1) < 1e-2
    assert alike.float().mean() >= 0.95


def test_images_may_lie_elsewhere_than_the_model(tilted: Tensor) -> None:
    robust = on("cuda")
    assert torch.equal(robust.search(tilted).labels.cpu(), robust.search(tilted.cuda()).labels.cpu())


def test_dropout_passes_leave_both_random_streams_as_they_were(tilted: Tensor) -> None:
    robust = on("cuda", mc_passes=10)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    first = robust.search(tilted.cuda()).logits
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(), before[1])
    assert torch.equal(robust.search(tilted.cuda()).logits, first)


def test_where_memory_runs_out_the_chunk_shrinks_and_the_answers_stay(tilted: Tensor) -> None:
    plenty = on("cuda", chunk=64).search(tilted.cuda()).labels
    robust = on("cuda", chunk=1 << 20)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 2**26) / total))
        found = robust.search(tilted.cuda()).labels
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(found, plenty)
    assert min(robust.predictor.chunks.values()) < 1 << 20


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_warping_never_waits_for_the_gpu(tilted: Tensor) -> None:
    images, poses = tilted.cuda(), draw("affine", len(tilted), seed=1).cuda()
    wide = images[..., :20]
    warp(images, poses)
    try:
        torch.cuda.set_sync_debug_mode("error")
        warp(images, poses)
        warp(wide, poses, padding="reflection")
        warp_all(images, poses[:5])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_fit_on_the_gpu_serves_the_cpu(tilted: Tensor) -> None:
    robust = on("cuda")
    robust.fit(load("digits", "fit", limit=300).floats(), method="balance")
    moved = robust.to("cpu")
    assert moved.search(tilted).logits.device.type == "cpu"


def test_what_was_fitted_loads_to_where_the_model_is(tilted: Tensor, tmp_path: Path) -> None:
    robust = on("cuda")
    robust.fit(load("digits", "fit", limit=300).floats(), recipe=HeadRecipe(looks=1, views=8, epochs=1))
    robust.save(tmp_path / "bundle")
    loaded = ht.ITS.load(tmp_path / "bundle", robust.model)
    assert torch.equal(loaded.search(tilted).labels, robust.search(tilted).labels)

"""Processes that are forked while another thread searches, and the workers of a loader: all of them can search."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import headtilt as ht
from headtilt.calibration.head import HeadRecipe
from tests.toys import TinyNet, fingerprint, tiny_images

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
QUICK = HeadRecipe(hidden=16, looks=1, views=8, epochs=1)
PATIENCE = 60


class Held(TinyNet):
    """Stops one thread amid a forward pass, where its search has changed modes, buffers and hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.held: threading.Thread | None = None
        self.inside, self.free = threading.Event(), threading.Event()

    def forward(self, images: Tensor) -> Tensor:
        self.calls.add_(1)
        hidden = self.dropout(self.trunk(images))
        if threading.current_thread() is self.held:
            self.inside.set()
            self.free.wait(PATIENCE)
        return self.classifier(hidden)


def forked(work) -> int:
    """Return the exit code of a forked process that does the work: 0 where all was well, 14 where time ran out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that threads make forks risky is what is tested here
        child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE)
        try:
            torch.set_num_threads(1)
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) or os.WEXITSTATUS(status)


@pytest.mark.parametrize("kind", ["plain", "dropout", "fitted"])
def test_a_process_forked_amid_a_search_of_another_thread_searches_and_finds_the_model_as_it_came(kind):
    model, images = Held().train(), tiny_images(4)
    robust = ht.ITS(model, mc_passes=3 if kind == "dropout" else 1, **ht.fast([ht.rotation()]))
    if kind == "fitted":
        robust.fit(tiny_images(60), recipe=QUICK)
    before, expected = fingerprint(model), robust.search(images)
    model.held = threading.Thread(target=robust.search, args=(images,))
    model.held.start()
    assert model.inside.wait(PATIENCE)
    assert not model.training

    def work() -> None:
        for part in ("modes", "parameters", "requires_grad", "hooks"):
            assert fingerprint(model)[part] == before[part], part
        assert model.calls.item() == 0
        found = robust.search(images)
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.pose, expected.pose)

    try:
        assert forked(work) == 0
    finally:
        model.free.set()
        model.held.join(PATIENCE)
    assert fingerprint(model) == before


def test_a_process_that_the_model_itself_forks_goes_on_with_the_search_it_is_in():
    class Forking(nn.Module):
        code: int | None = None

        def forward(self, images: Tensor) -> Tensor:
            if self.code is None:
                self.code = -1
                self.code = forked(lambda: inner.search(images))
            return images.flatten(1)[:, :3]

    model = Forking()
    inner = ht.ITS(model)
    inner.search(tiny_images(2))
    assert model.code == 0


class Searched(Dataset):
    """Labels and poses of images, found wherever they are asked for."""

    def __init__(self, robust: ht.ITS, images: Tensor) -> None:
        self.robust, self.images = robust, images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        found = self.robust.search(self.images[index : index + 1])
        return int(found.labels[0]), found.pose[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_workers_of_a_loader_find_what_the_process_itself_finds():
    images = tiny_images(6)
    robust = ht.ITS(TinyNet().eval(), **ht.fast([ht.rotation()])).fit(tiny_images(60), recipe=QUICK)
    expected = robust.search(images)
    loader = DataLoader(Searched(robust, images), batch_size=3, num_workers=2, multiprocessing_context="fork")
    labels, poses = (torch.cat(part) for part in zip(*loader, strict=True))
    assert torch.equal(labels, expected.labels)
    torch.testing.assert_close(poses, expected.pose, rtol=0, atol=1e-5)

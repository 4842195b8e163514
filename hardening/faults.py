"""Errors and interrupts at every call of every stage: ``python -m hardening.faults``.

A stage names the calls it makes into the model, the warp, the calibrator, the gate or the disk. They are counted in an
undisturbed run; then the stage runs again for each of them, with an error or an interrupt before or right after that
very call. Whatever happens, the model, the random streams and what lay on disk must be as they were (or, for what is
written piece by piece, whole pieces only), and the stage must then do its work as if nothing had been.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

Point = tuple[Any, str]
ERRORS: tuple[type[BaseException], ...] = (RuntimeError, KeyboardInterrupt)


class InjectedError(RuntimeError):
    """What is injected where an error is."""


@dataclass(frozen=True)
class Stage:
    """Something that can be disturbed.

    Attributes:
        name: Of the stage.
        points: Calls to disturb, as (owner, attribute).
        act: Does the work; returns something to compare.
        state: Returns all that a disturbance must leave as it was.
        reset: Makes ready for another run.
        whole: Whether finished pieces may stay: what was there must still be, and nothing half done.
    """

    name: str
    points: tuple[Point, ...]
    act: Callable[[], Any]
    state: Callable[[], Any]
    reset: Callable[[], None] = lambda: None
    whole: Callable[[Any], bool] | None = None


@contextlib.contextmanager
def disturbed(points: tuple[Point, ...], at: int, error: type[BaseException] | None, late: bool) -> Iterator[list[int]]:
    """Raise an error before (or right after) the `at`-th call of the points; yields a list that counts the calls."""
    calls = [0]
    with contextlib.ExitStack() as stack:
        for owner, name in points:
            plain = getattr(owner, name)

            def call(*args: Any, plain: Any = plain, **options: Any) -> Any:
                calls[0] += 1
                mine = calls[0] == at
                if mine and error is not None and not late:
                    raise (InjectedError if error is RuntimeError else error)("injected")
                found = plain(*args, **options)
                if mine and error is not None:
                    raise (InjectedError if error is RuntimeError else error)("injected")
                return found

            stack.enter_context(mock.patch.object(owner, name, call))
        yield calls


def attack(stage: Stage, most: int = 60) -> dict[str, Any]:
    """Return how many disturbances a stage went through; raise `AssertionError` at the first that left a trace.

    Args:
        stage: What to disturb.
        most: Calls to disturb, evenly over all of them; the first and the last are always among them.
    """
    stage.reset()
    with disturbed(stage.points, 0, None, late=False) as calls:
        expected = stage.act()
    assert calls[0] > 0, f"{stage.name}: no call to disturb"
    places = sorted({round(1 + (calls[0] - 1) * step / max(most - 1, 1)) for step in range(most)})
    count = 0
    for at in places:
        for error in ERRORS:
            for late in (False, True):
                stage.reset()
                before = stage.state()
                with disturbed(stage.points, at, error, late):
                    try:
                        stage.act()
                    except (Exception, KeyboardInterrupt) as caught:
                        if "injected" not in f"{caught} {caught.__cause__}":
                            raise
                where = f"{stage.name}: {error.__name__} {'after' if late else 'before'} call {at} of {calls[0]}"
                after = stage.state()
                fine = after == before if stage.whole is None else stage.whole(before)
                assert fine, f"{where} left a trace"
                assert same(stage.act(), expected), f"{where}: the next run differs"
                count += 1
    return {"calls": calls[0], "disturbed_calls": len(places), "disturbances": count}


def same(one: Any, other: Any) -> bool:
    """Return whether two results are equal, tensors bit by bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def streams() -> tuple[str, ...]:
    """Return the random streams of torch, Python and numpy, and whether gradients are on."""
    state = digest(torch.get_rng_state()), str(random.getstate()), str(np.random.get_state())
    return (*state, str(torch.is_grad_enabled()))


def model_state(model: nn.Module) -> Any:
    """Return modes, tensors, hooks and the random streams: all that a search borrows."""
    hooks = [(len(one._forward_hooks), len(one._forward_pre_hooks)) for one in model.modules()]
    tensors = [(name, id(value), digest(value)) for name, value in model.state_dict(keep_vars=True).items()]
    return [one.training for one in model.modules()], tensors, hooks, streams()


def files(folder: Path) -> dict[str, str]:
    """Return the digest of every file beneath a folder, and every folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    return found


class Net(nn.Module):
    """Batch norm, dropout and two linear layers: everything that a search must leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm2d(1), nn.Dropout(0.3)
        self.hidden, self.last = nn.Linear(64, 6), nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, 3)."""
        return self.last(self.dropout(self.hidden(self.norm(images).flatten(1)).relu()))


def network() -> Net:
    """Return a net with one part in train mode, as users leave them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net()
    with torch.no_grad():
        model.last.weight.mul_(4)
    model.train()
    model.norm.eval()
    return model


def pictures(count: int = 4) -> Tensor:
    """Return images (B, 1, 8, 8), always the same."""
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 3


def searching() -> Iterator[Stage]:
    """Yield the stages in which nothing is written: three searches, and fitting."""
    import headtilt as ht
    from headtilt.calibration.balance import Balance
    from headtilt.calibration.gate import Gate
    from headtilt.calibration.head import HeadRecipe
    from headtilt.model import predictor

    for search in ("tree", "joint", "anneal"):
        model, gate, balance = network(), Gate(0.1), Balance(torch.tensor([0.1, 0.0, -0.1]))
        plans = {"tree": ht.Tree(samples=3), "joint": ht.Joint(budget=12), "anneal": ht.Anneal(budget=12)}
        passes = 2 if search == "tree" else 1
        levels = [ht.rotation(), ht.scale()]
        robust = ht.ITS(model, levels, search=plans[search], mc_passes=passes, chunk=8, gate=gate, calibrator=balance)
        points = ((model, "forward"), (predictor, "warp"), (predictor, "warp_all"), (balance, "forward"))
        points = (*points, (gate, "leaves_early"), (gate, "keeps"))
        yield Stage(
            f"search, {search}",
            points,
            lambda robust=robust: (lambda found: (found.logits, found.pose, found.views))(robust.search(pictures())),
            lambda model=model: model_state(model),
        )

    model = network()
    recipe = HeadRecipe(looks=1, views=3, epochs=1, hidden=4)
    fresh: list[Any] = []

    def renew() -> None:
        fresh[:] = [ht.ITS(model, search=ht.Joint(budget=6), chunk=64)]

    def fit() -> Any:
        with mock.patch.object(head, "FEWEST_STEPS", 2):
            fresh[0].fit(pictures(60), recipe=recipe)
        return [digest(value) for value in fresh[0].calibrator.state_dict().values()]

    from headtilt.calibration import fitter, gate_fitting, head, sampler

    inside = (
        *((fitter, name) for name in ("fit_balance", "fit_head", "fit_proposals", "choose_padding")),
        *((gate_fitting, name) for name in ("margin_for", "exit_for")),
    )
    yield Stage(
        "fit",
        ((model, "forward"), (predictor, "warp"), (predictor, "warp_all"), (sampler, "warp"), *inside),
        fit,
        lambda: (model_state(model), id(fresh[0].calibrator), id(fresh[0].gate), dict(fresh[0].report)),
        renew,
    )


def writing(folder: Path) -> Iterator[Stage]:
    """Yield the stages that write: bundles new and old, upright copies, checkpoints, units of a study."""
    import safetensors.torch
    from PIL import Image

    import headtilt as ht
    from headtilt.apps import upright_copy as canonical
    from headtilt.calibration.balance import Balance
    from headtilt.paper.experiments.reproduce.study import Store
    from headtilt.paper.train import Recipe, train

    disk = ((os, "replace"), (safetensors.torch, "save_file"), (Path, "write_text"), (Path, "mkdir"))
    model = network()

    def emptied(place: Path, fill: Callable[[Path], Any] | None = None) -> Callable[[], None]:
        def reset() -> None:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            if fill is not None:
                fill(place)

        return reset

    def bundle(bias: float) -> Callable[[Path], Any]:
        fitted = ht.ITS(model, calibrator=Balance(torch.full((3,), bias)))
        return lambda place: fitted.save(place / "deep" / "bundle", overwrite=True)

    def reads(place: Path) -> Any:
        return ht.ITS.load(place / "deep" / "bundle", model).calibrator.bias

    for name, fill in (("new", None), ("old", bundle(1.0))):
        place = folder / f"save-{name}"

        def save(place: Path = place) -> Any:
            bundle(2.0)(place)
            return reads(place)

        def old_or_new(before: Any, place: Path = place) -> bool:
            # An interrupt right after the last step finds the new bundle there, whole.
            if files(place) == before:
                return True
            return not any(one.endswith(".tmp") for one in files(place)) and float(reads(place)[0]) == 2.0

        yield Stage(
            f"save, {name}", disk, save, lambda place=place: files(place), emptied(place, fill), whole=old_or_new
        )

    place = folder / "upright"
    pixels = (pictures(1)[0, 0] * 80).byte().numpy()

    def copy() -> Any:
        for target in ("a.png", "deep/b.png"):
            canonical.write_upright(place / "in.png", place / "out" / target, turned, force=True)
        return files(place)

    turned = ht.rotation().matrix(torch.tensor(0.4))
    yield Stage(
        "canonicalise",
        ((os, "replace"), (Image.Image, "save"), (canonical, "undone"), (Path, "mkdir")),
        copy,
        lambda: files(place),
        emptied(place, lambda at: Image.fromarray(pixels).save(at / "in.png")),
        whole=lambda before: whole_pieces(place, before),
    )

    checkpoint = folder / "train" / "checkpoint.safetensors"
    trained = network()
    start = {name: value.clone() for name, value in trained.state_dict().items()}

    def training() -> Any:
        trained.load_state_dict(start)
        labels = torch.arange(40) % 3
        recipe = Recipe(3, batch=20)
        train(trained, pictures(40), labels, recipe, checkpoint=checkpoint)
        return [digest(value) for value in trained.state_dict().values()]

    random_before = streams()
    yield Stage(
        "train",
        ((trained, "forward"), (os, "replace"), (safetensors.torch, "save_file")),
        training,
        streams,
        emptied(checkpoint.parent),
        whole=lambda _: streams() == random_before and set(files(checkpoint.parent)) <= {checkpoint.name},
    )

    units = folder / "units"

    def study() -> Any:
        return Store(units).gather({("unit", number): (lambda number=number: {"value": number}) for number in range(4)})

    yield Stage(
        "reproduce",
        ((os, "replace"), (Path, "write_text")),
        study,
        lambda: files(units),
        emptied(units),
        whole=lambda before: whole_pieces(units, before),
    )


def batches(folder: Path) -> Iterator[Stage]:
    """Yield the batch run: files of rows that appear whole or not at all."""
    import pyarrow.parquet
    from PIL import Image

    from headtilt.apps.batch.job import predict
    from headtilt.apps.batch.plan import Job
    from headtilt.apps.loading import Wrapped
    from headtilt.its import ITS

    source, out = folder / "source", folder / "rows"
    source.mkdir(parents=True)
    for number, picture in enumerate(pictures(6)):
        Image.fromarray((picture[0] * 80).byte().numpy()).save(source / f"{number}.png")
    job = Job(str(source), out, Wrapped("zoo:digits:0"), batch=2, shard_rows=2, decoders=1)

    def run() -> Any:
        predict(job)
        return pyarrow.parquet.read_table(out).to_pylist()

    yield Stage(
        "batch",
        ((os, "replace"), (pyarrow.parquet, "write_table"), (ITS, "search"), (os, "fsync")),
        run,
        lambda: files(out) if out.exists() else {},
        lambda: shutil.rmtree(out, ignore_errors=True),
        whole=lambda before: whole_pieces(out, before),
    )


def whole_pieces(folder: Path, before: dict[str, str]) -> bool:
    """Return whether all that was there still is, and nothing half done lies beside it."""
    now = files(folder)
    return before.items() <= now.items() and not any(Path(name).name.startswith(".") for name in now)


def main() -> None:
    """Attack every stage and store the figures."""
    from hardening.record import record

    torch.set_num_threads(1)
    found, start = {}, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="headtilt-faults-") as name:
        for stages in (searching(), writing(Path(name)), batches(Path(name))):
            for stage in stages:
                found[stage.name] = attack(stage)
                print(stage.name, found[stage.name], flush=True)
    total = sum(one["disturbances"] for one in found.values())
    figures = {"disturbances": total, "traces_left": 0, "seconds": time.perf_counter() - start, "stages": found}
    print(record("faults", figures))
    sys.exit(0)


if __name__ == "__main__":
    main()

"""Where features meet: ``python -m hardening.crossings`` checks every pair of settings on tiny networks.

A case is one setting of everything: fitted or not, precision, search, read-out, gate, batch, chunk, dropout passes and
device. The cases hold every pair of settings, not every combination. For each of them must hold: labels, logits and
poses are those of the same search in double precision, within the tolerance of its precision; the model's state, its
hooks, the random streams and the caller's images are as before; a batch of no images is refused; and a wrapper that was
saved and loaded, copied, pickled, given another's `state_dict` or sent to another process answers to the bit as before.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headtilt as ht
from hardening.record import ROOT, record
from headtilt.calibration.gate import Gate
from headtilt.calibration.head import HeadRecipe
from headtilt.model.views import Views
from headtilt.result import SearchResult
from tests.toys import TinyNet, fingerprint, tiny_images

Case = dict[str, Any]
FACTORS: dict[str, tuple[Any, ...]] = {
    "precision": ("single", "double", "half", "bfloat16", "autocast"),
    "search": ("tree", "joint", "anneal"),
    "fitted": (True, False),
    "readout": ("incumbent", "marginal"),
    "gate": (True, False),
    "batch": (1, 7),  # and none at all, in every case
    "chunk": (1, 5, None),
    "passes": (1, 3),
    "device": ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",),
}
DTYPES = {"single": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
# Of logits and of what poses are judged by, whose spread is about one. Entries of poses may differ by a quarter of it.
TOLERANCES = {"single": 1e-4, "double": 1e-4, "half": 0.02, "bfloat16": 0.2, "autocast": 0.2}
PLANS = {"tree": ht.Tree(samples=7), "joint": ht.Joint(budget=12), "anneal": ht.Anneal(budget=12)}
LEVELS = (ht.rotation(), ht.scale(0.25))
RECIPE = HeadRecipe(hidden=16, looks=1, views=8, epochs=1)
FIT_IMAGES = 60
GATE = Gate(margin=-2.0, exit_at=0.0, turn_at=0.1)


def tilted_images(count: int) -> Tensor:
    """Return images (B, 1, 12, 12), each turned by another angle, of which searches make something else."""
    angles = torch.linspace(-2.5, 2.9, count)
    return ht.warp(tiny_images(count), ht.rotation().matrix(angles))


def pairwise(factors: dict[str, tuple[Any, ...]]) -> list[Case]:
    """Return cases that hold every pair of values of any two factors, each next one as many new pairs as it can."""
    names = list(factors)
    everything = [dict(zip(names, values, strict=True)) for values in product(*factors.values())]
    left = set().union(*map(pairs, everything))
    found: list[Case] = []
    while left:
        best = max(everything, key=lambda case: len(pairs(case) & left))
        left -= pairs(best)
        found.append(best)
    return found


def pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Return the pairs of settings in a case."""
    return set(combinations(case.items(), 2))


def name(case: Case) -> str:
    """Return a case in words."""
    words = {True: "", False: "no "}
    plain = [f"{words[value]}{key}" if isinstance(value, bool) else f"{key} {value}" for key, value in case.items()]
    return ", ".join(plain)


@cache
def prepared(search: str, readout: str, fitted: bool, passes: int) -> ht.ITS:
    """Return a wrapper in single precision on the CPU, with a gate that lets some images leave and some answers go."""
    robust = ht.ITS(TinyNet().eval(), LEVELS, search=PLANS[search], readout=readout, mc_passes=passes, seed=3)  # type: ignore[arg-type]
    return robust.fit(tiny_images(FIT_IMAGES), recipe=RECIPE, promise=None).but(gate=GATE) if fitted else robust


def wrapper(case: Case, precision: str) -> ht.ITS:
    """Return the wrapper of a case, all of it cast to a precision, with a model of its own that is in training mode."""
    robust = prepared(case["search"], case["readout"], case["fitted"], case["passes"])
    other = robust.but(chunk=case["chunk"], autocast=torch.bfloat16 if precision == "autocast" else None)
    if not case["gate"]:
        other = other.but(gate=None)
    return copy.deepcopy(other).to(case["device"], DTYPES.get(precision)).train()


def check(case: Case, folder: Path) -> dict[str, float]:
    """Return by how much a case differs from the reference; raise `AssertionError` where anything does not hold.

    Args:
        case: One setting of everything.
        folder: A new one, for what is saved; a pickle of the wrapper with its images and answers stays there.
    """
    robust = wrapper(case, case["precision"])
    images = tilted_images(max(FACTORS["batch"]))[: case["batch"]].to(case["device"])
    before, pixels = fingerprint(robust.model), images.clone()  # type: ignore[arg-type]
    result = robust.search(images)
    refused(robust, images[:0])
    assert fingerprint(robust.model) == before, "the model or a random stream is not as it came"  # type: ignore[arg-type]
    assert torch.equal(images, pixels), "the caller's images were changed"
    for what, other in again(robust, folder).items():
        same(other.search(images), result, what)
    (folder / "case.pickle").write_bytes(pickle.dumps((robust, images, result.logits, result.pose)))
    return against_reference(case, images, result)


def refused(robust: ht.ITS, images: Tensor) -> None:
    """Assert that a batch of no images is refused."""
    try:
        robust.search(images)
    except ht.ShapeError:
        return
    raise AssertionError("a batch of no images is searched")


def again(robust: ht.ITS, folder: Path) -> dict[str, ht.ITS]:
    """Return the same wrapper after every way in which it may be kept or handed on."""
    robust.save(folder)
    blank = copy.deepcopy(robust)
    for tensor in blank.state_dict().values():
        tensor.zero_()
    for threshold in [key for key, value in vars(blank.gate or object).items() if isinstance(value, float)]:
        setattr(blank.gate, threshold, -9.0)
    blank.load_state_dict(robust.state_dict())
    return {
        "saved and loaded": ht.ITS.load(folder, robust.model),
        "given the state": blank,
        "copied": copy.deepcopy(robust),
        "pickled": pickle.loads(pickle.dumps(robust)),
    }


def same(found: SearchResult, expected: SearchResult, what: str) -> None:
    """Assert that two results are the same to the bit."""
    for part in ("logits", "pose", "gated", "views"):
        assert torch.equal(getattr(found, part), getattr(expected, part)), f"{what}, another {part}"
    assert torch.equal(found.pose_confidence.nan_to_num(-1), expected.pose_confidence.nan_to_num(-1)), what


def against_reference(case: Case, images: Tensor, result: SearchResult) -> dict[str, float]:
    """Return by how much logits and poses differ from those in double precision; raise where it is too much.

    A pose may be another one where both look alike to the model in double precision: which of two equals is taken is
    rounding. The answer may then be that of the other view. So may a label that the gate, or the model, as good as
    tosses a coin for.
    """
    reference = wrapper({**case, "chunk": None}, "double")
    expected = reference.search(images.double())
    tolerance = TOLERANCES[case["precision"]]
    assert result.pose.dtype in (torch.float32, torch.float64), "poses in less than single precision"
    other = result.labels != expected.labels
    assert not bool((other & ~undecided(reference, images, tolerance)).any()), "other labels"
    moved = other | ((result.pose.double() - expected.pose.double()).abs().amax((1, 2)) > tolerance / 4)
    apart = (result.logits.double() - expected.logits.double()).abs().amax(1)
    lost = familiarity(reference, images, expected.pose) - familiarity(reference, images, result.pose)
    assert bool((lost[moved] <= tolerance).all()), f"poses that look worse by {float(lost[moved].max()):.3g}"
    assert bool((apart[~moved] <= tolerance).all()), f"logits differ by {float(apart[~moved].max()):.3g}"
    largest = float(apart[~moved].max()) if bool((~moved).any()) else 0.0
    return {"largest_difference_of_logits": largest, "poses_of_equals": int(moved.sum())}


def undecided(reference: ht.ITS, images: Tensor, tolerance: float) -> Tensor:
    """Return which images (B,) get another label in double precision where numbers move by as much as they may."""
    gates = [reference.gate]
    if isinstance(reference.gate, Gate):
        numbers = (reference.gate.margin, reference.gate.exit_at, reference.gate.turn_at)
        gates += [Gate(*(number + shift for number in numbers)) for shift in (-2 * tolerance, 2 * tolerance)]
    found = [reference.but(gate=gate).to(torch.float64).search(images.double()) for gate in gates]
    close = [result.logits.topk(2, dim=1).values.diff(dim=1)[:, 0].abs() <= 2 * tolerance for result in found]
    return torch.stack([result.labels != found[0].labels for result in found] + close).any(0)


def familiarity(robust: ht.ITS, images: Tensor, poses: Tensor) -> Tensor:
    """Return how upright (B,) images look under poses (B, 3, 3)."""
    views = Views(robust.predictor, images.double(), robust.padding, robust.interpolation)
    evidence = views(torch.arange(len(images), device=images.device), poses)
    if robust.calibrator is not None:
        evidence = robust.calibrator(evidence)  # type: ignore[operator]
    return -evidence.energy if evidence.upright is None else evidence.upright[:, 0]


def in_another_process(folder: Path) -> list[str]:
    """Return which of the cases that lie pickled beneath a folder answer otherwise in a process of their own."""
    command = [sys.executable, "-m", "hardening.crossings", "--unpickle", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout))


def unpickled(folder: Path) -> list[str]:
    """Return which of the cases that lie pickled beneath a folder answer otherwise here."""
    torch.set_num_threads(1)
    wrong = []
    for path in sorted(folder.glob("*/case.pickle")):
        robust, images, logits, pose = pickle.loads(path.read_bytes())
        result = robust.search(images)
        if not torch.equal(result.logits, logits) or not torch.equal(result.pose, pose):
            wrong.append(path.parent.name)
    return wrong


def main() -> None:
    """Check all cases and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unpickle", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.unpickle:
        print(json.dumps(unpickled(asked.unpickle)))
        return
    torch.set_num_threads(1)
    start, cases = time.monotonic(), pairwise(FACTORS)
    differences: dict[str, float] = dict.fromkeys(TOLERANCES, 0.0)
    failures: dict[str, str] = {}
    equals = 0
    with tempfile.TemporaryDirectory(prefix="headtilt-crossings-") as temporary:
        for number, case in enumerate(cases):
            try:
                found = check(case, Path(temporary, f"{number:03d}"))
            except AssertionError as error:
                failures[name(case)] = str(error)
                continue
            equals += int(found["poses_of_equals"])
            precision = case["precision"]
            differences[precision] = max(differences[precision], found["largest_difference_of_logits"])
        failures |= {name(cases[int(number)]): "another process" for number in in_another_process(Path(temporary))}
    figures = {
        "cases": len(cases),
        "pairs": len(set().union(*map(pairs, cases))),
        "combinations": len(list(product(*FACTORS.values()))),
        "settings": {key: list(values) for key, values in FACTORS.items()},
        "failures": len(failures),
        "failed": failures,
        "tolerance_of_logits": TOLERANCES,
        "largest_difference_in_percent_of_the_tolerance": {
            precision: 100 * difference / TOLERANCES[precision] for precision, difference in differences.items()
        },
        "other_poses_that_look_alike": equals,
        "seconds": time.monotonic() - start,
    }
    print(json.dumps(figures, indent=1))
    print(record("crossings", figures))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

"""Verdicts of ``headtilt audit`` on sources that turn or flip all of their images, some of them, or none.

    python benchmarks/audit.py --json results/audit.json --picture results/audit.png

Each image is shown to each model in its eight orientations once. A source that turns its images only changes which of
these eight arrives, so that all sources are drawn from the same votes, with replacement; on some images it is checked
that turned pixels give the very votes. Nothing was chosen on the test split: the thresholds come from
``--split fit``.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headtilt.apps.audit import (
    MIXED,
    NOTABLE,
    ORIENTATIONS,
    TURNS,
    UNKNOWN,
    Votes,
    ask,
    judged,
    likeliest,
    share_of,
    turned,
)
from headtilt.apps.playground.methods import PACKAGED
from headtilt.paper.data import load as load_data
from headtilt.paper.data.folder import list_images
from headtilt.paper.experiments.report import metadata, write_json
from headtilt.plot.style import PALETTE, new_figure, save, style_axes
from headtilt.sources.images import square_of
from headtilt.sources.pretrained import Pretrained, from_pretrained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (10, 20, 50, 100, 200, 400)
MIXTURES = {
    "a fifth turned by 90°": (0.8, 0.2, 0, 0),
    "half turned by 90°": (0.5, 0.5, 0, 0),
    "every turn": (0.25,) * 4,
}
BATCH = 10
Verdict = tuple[str, str, bool]


@dataclass(frozen=True)
class Subject:
    """A model, what was fitted for it, and the images of a split with their labels."""

    name: str
    model: str
    bundle: Path | None = None

    def opened(self) -> Pretrained:
        """Return the model, ready to use."""
        return from_pretrained(self.model, bundle=self.bundle)

    def images(self, robust: Pretrained, split: str, count: int) -> Iterator[tuple[Tensor, int]]:
        """Yield images of a split as the model sees them, with their labels."""
        if self.model.startswith("zoo:digits"):
            data = load_data("digits", split)
            chosen = chosen_from(len(data.labels), count)
            yield from ((data.floats()[index], int(data.labels[index])) for index in chosen)
            return
        listing = list_images(data_folder() / "imagenet-mini", split)
        for index in chosen_from(len(listing.paths), count):
            yield square_of(listing.paths[index], robust.adapted), int(listing.labels[index])


def data_folder() -> Path:
    return Path(os.environ["HEADTILT_DATA"].split(os.pathsep)[0])


def chosen_from(available: int, count: int) -> list[int]:
    return sorted(random.Random(0).sample(range(available), min(count, available)))


def subjects(folder: Path) -> list[Subject]:
    """Return the models; the ONNX file gets what it does not say of itself beside a link to it."""
    data = data_folder()
    file = folder / "efficientnet_lite0.onnx"
    file.symlink_to(data / "efficientnet_lite0_imagenet" / "model.onnx")
    file.with_suffix(".json").write_text('{"size": 224, "resize": 256, "padding": "reflection"}', encoding="utf-8")
    return [
        Subject("digits, fitted", "zoo:digits:0", PACKAGED),
        Subject("digits", "zoo:digits:0"),
        Subject("MobileNetV2", f"hf:{data / 'mobilenet_v2_imagenet'}"),
        Subject("EfficientNet-Lite0", f"onnx:{file}"),
        Subject("ViT-Ti/16", f"hf:{data / 'vit_tiny_imagenet'}"),
    ]


def voted(subject: Subject, split: str, count: int, kept: Path | None) -> tuple[Votes, Tensor]:
    """Return how upright images vote, and their labels; from a file where they voted before."""
    file = None if kept is None else kept / f"{subject.name.replace('/', '-')}-{split}-{count}.safetensors"
    if file is not None and file.exists():
        found = load_file(file)
    else:
        robust = subject.opened()
        parts: list[Votes] = []
        images, truth = [], []
        for image, label in subject.images(robust, split, count):
            images.append(image)
            truth.append(label)
            if len(images) == BATCH:
                parts.append(ask(robust, torch.stack(images)))
                images = []
                print(f"{subject.name}: {len(truth)} images", file=sys.stderr)
        if images:
            parts.append(ask(robust, torch.stack(images)))
        found = {
            "evidence": torch.cat([part.evidence for part in parts]),
            "labels": torch.cat([part.labels for part in parts]),
            "confidence": torch.cat([part.confidence for part in parts]),
            "truth": torch.tensor(truth),
        }
        check_that_sources_are_permutations(subject, robust, split)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file(found, file)
    return Votes(found["evidence"], found["labels"], found["confidence"], subject.bundle is not None), found["truth"]


def element(place: int) -> Tensor:
    """Return what a source does that turns images clockwise, after mirroring them, as a 2 × 2 matrix."""
    turns = torch.linalg.matrix_power(torch.tensor([[0, -1], [1, 0]]), place % TURNS)
    return turns @ torch.tensor([[-1 if place >= TURNS else 1, 0], [0, 1]])


def arriving(source: int) -> list[int]:
    """Return, for a source that does `source`, which orientation of the upright image stands for each of the eight."""
    known = [element(place) for place in range(len(ORIENTATIONS))]
    back = torch.linalg.inv(known[source].double()).round().long()
    return [next(place for place, one in enumerate(known) if torch.equal(one, back @ other)) for other in known]


def check_that_sources_are_permutations(subject: Subject, robust: Pretrained, split: str) -> None:
    images = torch.stack([image for image, _ in subject.images(robust, split, 2)])
    upright = ask(robust, images).evidence
    for source in range(len(ORIENTATIONS)):
        changed = torch.rot90(images.flip(-1) if source >= TURNS else images, -(source % TURNS), (-2, -1))
        torch.testing.assert_close(ask(robust, changed).evidence, upright[:, arriving(source)], rtol=1e-3, atol=1e-3)


def drawn(likelihood: Tensor, sources: Tensor) -> Verdict:
    """Return the verdict on images (n, 8) of which each comes from a source (n,) of its own, and if some stand out."""
    place = torch.tensor([arriving(source) for source in range(len(ORIENTATIONS))])[sources]
    votes = likelihood.gather(1, place)
    turns = turned(votes)
    shares = likeliest(turns)
    verdict, mirrored = judged(votes, shares)
    most = max((share_of(turns, shares, turn) for turn in range(TURNS)), key=lambda share: share.share)
    return verdict, mirrored, most.rest.low > NOTABLE


def is_right(verdict: Verdict, source: int) -> bool:
    """Return whether a verdict names the turn, and whether images are mirrored, unless it leaves that open."""
    found, mirrored, _ = verdict
    if found in (MIXED, UNKNOWN):
        return False
    same_turn = ORIENTATIONS.index(found) % TURNS == source % TURNS
    return same_turn and mirrored in (UNKNOWN, "yes" if source >= TURNS else "no")


def trials(votes: Votes, source: int | tuple[float, ...], size: int, repeats: int, seed: int) -> list[Verdict]:
    """Return the verdicts on a source that does one thing, or several with these probabilities."""
    generator = torch.Generator().manual_seed(seed)
    likelihood = votes.likelihood
    found = []
    for _ in range(repeats):
        rows = torch.randint(len(votes), (size,), generator=generator)
        if isinstance(source, int):
            sources = torch.full((size,), source)
        else:
            sources = torch.multinomial(torch.tensor(source), size, replacement=True, generator=generator)
        found.append(drawn(likelihood[rows], sources))
    return found


def summary(verdicts: list[Verdict], right: list[bool]) -> dict[str, float]:
    unknown = sum(found == UNKNOWN for found, _, _ in verdicts)
    told = sum(mirrored != UNKNOWN for _, mirrored, _ in verdicts)
    count = len(verdicts)
    return {
        "right": 100 * sum(right) / count,
        "cannot_tell": 100 * unknown / count,
        "wrong": 100 * (count - unknown - sum(right)) / count,
        "mirroring_told": 100 * told / count,
        "some_stand_out": 100 * sum(apart for _, _, apart in verdicts) / count,
        "trials": count,
    }


def measured(votes: Votes, truth: Tensor, repeats: int) -> dict[str, Any]:
    """Return right verdicts by source and number of images, false alarms, and what turning does to accuracy."""
    found: dict[str, Any] = {"sources": {}, "mixtures": {}, "false_alarms": {}, "images": len(votes)}
    for source, name in enumerate(ORIENTATIONS):
        found["sources"][name] = {}
        for size in SIZES:
            many = 8 * repeats if source == 0 else repeats
            verdicts = trials(votes, source, size, many, seed=1000 * source + size)
            found["sources"][name][str(size)] = summary(verdicts, [is_right(one, source) for one in verdicts])
            if source == 0:
                counts = Counter(ORIENTATIONS[0] if is_right(one, 0) else one[0] for one in verdicts)
                alarms = sum(count for verdict, count in counts.items() if verdict not in (ORIENTATIONS[0], UNKNOWN))
                found["false_alarms"][str(size)] = 100 * alarms / many
    for number, (name, shares) in enumerate(MIXTURES.items()):
        found["mixtures"][name] = {}
        for size in SIZES:
            verdicts = trials(votes, shares, size, repeats, seed=10_000 * (number + 1) + size)
            found["mixtures"][name][str(size)] = summary(verdicts, [one[0] == MIXED for one in verdicts])
    as_arrives = torch.tensor([arriving(source)[0] for source in range(len(ORIENTATIONS))])
    right, confidence = (votes.labels == truth[:, None]).double().mean(0), votes.confidence.double().mean(0)
    found["accuracy_as_it_arrives"] = dict(zip(ORIENTATIONS, (100 * right[as_arrives]).tolist(), strict=True))
    found["confidence_as_it_arrives"] = dict(zip(ORIENTATIONS, (100 * confidence[as_arrives]).tolist(), strict=True))
    return found


def picture(models: dict[str, Any]) -> Figure:
    """Return right and wrong verdicts, pooled over the eight sources, by number of images."""
    figure = new_figure(8, 3.6)
    panels = figure.subplots(1, 2, sharex=True)
    for number, (name, found) in enumerate(models.items()):
        style = {"color": PALETTE[number], "marker": "o", "ms": 4, "lw": 1.6, "label": name}
        for panel, key in zip(panels, ("right", "wrong"), strict=True):
            pooled = [
                sum(source[str(size)][key] for source in found["sources"].values()) / len(ORIENTATIONS)
                for size in SIZES
            ]
            panel.plot(SIZES, pooled, **style)
    for panel, title, high in zip(panels, ("right verdicts (%)", "wrong verdicts (%)"), (102, 10), strict=True):
        style_axes(panel, title=title, xlabel="images that vote", grid="y")
        panel.set(xscale="log", ylim=(-0.02 * high, high))
        panel.set_xticks(SIZES, [str(size) for size in SIZES])
        panel.minorticks_off()
    panels[1].legend(frameon=False, fontsize=8, loc="upper right")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--picture", type=Path, help="picture of them")
    parser.add_argument("--split", choices=("test", "fit"), default="test")
    parser.add_argument("--count", type=int, default=400, help="images of each split")
    parser.add_argument(
        "--repeats", type=int, default=50, help="draws of each source and size; eight times for upright"
    )
    parser.add_argument("--votes", type=Path, help="folder in which votes are kept between runs")
    parser.add_argument("--only", help="a model's name")
    options = parser.parse_args()
    models = {}
    with tempfile.TemporaryDirectory() as folder:
        for subject in subjects(Path(folder)):
            if options.only in (None, subject.name):
                models[subject.name] = measured(
                    *voted(subject, options.split, options.count, options.votes), options.repeats
                )
    for name, found in models.items():
        print(name, "false alarms", found["false_alarms"])
        for source, sizes in {**found["sources"], **found["mixtures"]}.items():
            shown = [f"{size}: {one['right']:.0f}/{one['wrong']:.0f}" for size, one in sizes.items()]
            print(f"  {source:30} right/wrong", ", ".join(shown))
    if options.json:
        words = " ".join(["python", "benchmarks/audit.py", *sys.argv[1:]])
        write_json(options.json, {"split": options.split, "sizes": SIZES, "models": models, **metadata(words)})
    if options.picture:
        save(picture(models), options.picture)


if __name__ == "__main__":
    main()

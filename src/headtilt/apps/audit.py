"""Is a source of images feeding the model sideways? Dozens of images vote, and no labels are needed.

Each image is shown to the model in the eight orientations of quarter turns and mirrors, which move pixels and resample
none. What the model says of them is one vote, weak for one image and strong for many: the shares of the orientations in
which images arrive are those that make all votes together most likely. An interval around each share says how far the
votes can be trusted, and where it is too wide the answer is "cannot tell".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from headtilt.apps.rows import readable
from headtilt.calibration.head import OrbitHead
from headtilt.errors import DataError, ShapeError
from headtilt.geometry.groups import decompose
from headtilt.model.evidence import Evidence, floored
from headtilt.progress import Progress
from headtilt.sources.decoders import Decoders

if TYPE_CHECKING:
    from headtilt.sources.pretrained import Pretrained

TURNS = 4
# How a source changed its images: the first four turned clockwise, the others mirrored left to right and then turned.
ORIENTATIONS = (
    "upright",
    "turned by 90°",
    "turned by 180°",
    "turned by 270°",
    "mirrored",
    "transposed and turned by 180°",
    "flipped top to bottom",
    "transposed",
)
UNDO = (
    "nothing",
    "turn by 270° clockwise",
    "turn by 180°",
    "turn by 90° clockwise",
    "mirror left to right",
    "transpose, then turn by 180°",
    "flip top to bottom",
    "transpose: swap rows and columns",
)
Mirror = Literal["no", "yes", "cannot tell"]
Verdict = str
MIXED: Final = "mixed"
UNKNOWN: Final = "cannot tell"

# Chosen on photographs and digits that no figure is measured on, by the likelihood of the right orientation: by what
# evidence is divided, and the share of images on which a model is simply wrong.
FITTED = (1.0, 0.1)
UNFITTED = (0.5, 0.1)
# Half the 0.95 and 0.99 quantiles of chi-squared with one degree of freedom.
SHOWN_DROP, VERDICT_DROP = 1.92, 3.32
MIRROR_DEVIATIONS = 3.0  # of the mean vote
LEAST_LEAN = 0.3  # deviations of a single vote: models of photographs lean by 0.15 at most, those of digits by 1
MOST, ALL = 0.5, 0.9  # shares: a verdict needs more than the first; a source below the second is mixed
NOTABLE = 0.02  # share of images that are unlike the others, at least, to be spoken of
ROUNDS, GRID = 200, 401  # of maximising a likelihood; points at which a share is tried
# Numbers of images after which it is asked whether the verdict was there to stay.
PREFIXES = (10, 20, 30, 50, 75, 100, 150, 200, 300, 400, 600, 800, 1000)


@dataclass(frozen=True)
class Votes:
    """What a model says of images in the eight orientations, in the order of `ORIENTATIONS`.

    Attributes:
        evidence: (n, 8), log-likelihoods that an image arrived like that, up to a number for each image.
        labels: (n, 8), what the model answers once the image is turned back from there.
        confidence: (n, 8), the probability of that answer.
        fitted: Whether a fitted head gave the evidence.
        angles: (n,), by how many degrees the search found each image turned clockwise; None where nobody asked.
    """

    evidence: Tensor
    labels: Tensor
    confidence: Tensor
    fitted: bool
    angles: Tensor | None = None

    def __len__(self) -> int:
        return len(self.evidence)

    def at(self, rows: slice | Tensor) -> Votes:
        """Return the votes of some of the images."""
        angles = None if self.angles is None else self.angles[rows]
        return Votes(self.evidence[rows], self.labels[rows], self.confidence[rows], self.fitted, angles)

    @property
    def likelihood(self) -> Tensor:
        """How likely (n, 8) each image is under each orientation, next to the others."""
        temperature, wrong = FITTED if self.fitted else UNFITTED
        return (1 - wrong) * (self.evidence.double() / temperature).softmax(1) + wrong / len(ORIENTATIONS)


@dataclass(frozen=True)
class Share:
    """A share of images: the most likely one, and between what it lies with a confidence of 95 %."""

    share: float
    low: float
    high: float

    @property
    def rest(self) -> Share:
        """The share of all other images."""
        return Share(1 - self.share, 1 - self.high, 1 - self.low)

    def words(self) -> str:
        """Return it as "83 % (71 to 91 %)"."""
        return f"{self.share:.0%} ({100 * self.low:.0f} to {self.high:.0%})".replace("%", " %")


@dataclass(frozen=True)
class Gain:
    """What turning images back would do to the model's answers, by its own word: no labels are needed.

    Attributes:
        answers_changed: Share of images that would get another answer.
        confidence_before: Mean probability of the model's answers, as images arrive.
        confidence_after: The same with images turned back.
    """

    answers_changed: float
    confidence_before: float
    confidence_after: float


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        verdict: One of `ORIENTATIONS` for a source that changes all of its images alike, "mixed" or "cannot tell".
        mirrored: Whether images arrive mirrored; most models of photographs cannot tell.
        undo: What to do to every image of such a source.
        images: How many images voted.
        enough: With how many of them, in the order they came, the verdict was already there to stay.
        turned: Share of images that arrive turned by a quarter or more, mirrored or not.
        shares: Of each turn, mirrored or not.
        votes: How many images look most upright from each orientation: the plain count.
        gain: What turning back would do.
        fitted: Whether a fitted head told.
        angles: For any angle: how many images were found turned, in bins of 30° around 0°, 30°, …, clockwise.
        unread: Files that could not be read, and why.
    """

    verdict: Verdict
    mirrored: Mirror
    undo: str
    images: int
    enough: int | None
    turned: Share
    shares: dict[str, Share]
    votes: dict[str, int]
    gain: Gain
    fitted: bool
    angles: tuple[int, ...] | None = None
    unread: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The verdict as a sentence."""
        told = {
            MIXED: "Images arrive in several orientations.",
            UNKNOWN: "This model cannot tell from these images how they arrive.",
            "upright": "Images arrive upright.",
        }.get(self.verdict, f"Images arrive {self.verdict}.")
        if self.verdict in (MIXED, UNKNOWN):
            return told
        if self.mirrored == UNKNOWN:
            told = told[:-1] + ", mirrored or not: this model cannot tell mirrored images apart."
        others = list(self.shares.values())[ORIENTATIONS.index(self.verdict) % TURNS].rest
        return told + (f" Some do not: {others.words()}." if others.low > NOTABLE else "")

    def lines(self) -> list[tuple[str, str]]:
        """Return the rest in words: what is spoken of, and what is said of it."""
        said = [("images", f"{self.images}")]
        if self.enough is not None and self.enough < self.images:
            said[0] = ("images", f"{self.images}; the first {self.enough} gave the same verdict")
        said += [("turned", self.turned.words())]
        said += [(f"  {name}", share.words()) for name, share in self.shares.items()]
        said += [("mirrored", self.mirrored)]
        votes = [f"{name} {count}" for name, count in self.votes.items() if count]
        said += [("votes", ", ".join(votes))]
        if self.angles is not None:
            angles = [f"{30 * place}° {count}" for place, count in enumerate(self.angles) if count]
            said += [("any angle", ", ".join(angles))]
        if self.verdict not in ("upright", UNKNOWN):
            gain = self.gain
            said += [
                (
                    "how to correct it",
                    f"{self.undo}." if self.undo else "turn each by itself: headtilt canonicalise, or ITS.",
                ),
                (
                    "expected",
                    f"{gain.answers_changed:.0%} of answers change; mean confidence "
                    f"{gain.confidence_before:.0%} → {gain.confidence_after:.0%}".replace("%", " %"),
                ),
            ]
        if self.verdict == UNKNOWN:
            more = "Give more images." if self.fitted else "Give more images, or a bundle: headtilt fit."
            said += [("how to correct it", more)]
        return said

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON knows it."""
        return {"sentence": self.sentence, **asdict(self)}


def orientations(images: Tensor) -> Tensor:
    """Return squares (B, C, H, H) turned back from each of the eight orientations (B, 8, C, H, H), to the pixel."""
    if images.ndim != 4 or images.shape[-1] != images.shape[-2]:
        raise ShapeError(f"images must be squares (B, C, H, H); got {tuple(images.shape)}.")
    turned = [torch.rot90(images, turns, (-2, -1)) for turns in range(TURNS)]  # rot90 counts against the clock
    return torch.stack(turned + [one.flip(-1) for one in turned], dim=1)


@torch.no_grad()
def ask(robust: Pretrained, images: Tensor, *, any_angle: bool = False) -> Votes:
    """Return how images (B, C, H, H) vote.

    Args:
        robust: The model, with what was fitted for it.
        images: As the model sees them.
        any_angle: Whether to search for other angles, too.
    """
    device, _ = robust.predictor.device_and_dtype(images)
    views = orientations(images.to(device))
    seen = robust.predictor(views.flatten(0, 1))
    fitted = isinstance(robust.calibrator, OrbitHead)
    said = robust.calibrator(seen).upright if isinstance(robust.calibrator, OrbitHead) else None
    evidence = familiarity(seen) if said is None else said[..., 0]
    best = seen.log_probs.max(-1)
    parts = [part.reshape(len(images), -1).cpu() for part in (evidence, best.indices, best.values.exp())]
    angles = None
    if any_angle:
        angles = decompose(robust.search(images).perturbation.double()).rotation.rad2deg().cpu()
    return Votes(parts[0], parts[1], parts[2], fitted, angles)


def familiarity(seen: Evidence) -> Tensor:
    """Return how far the best logit stands out from the others (…,), in their standard deviations.

    Without a fit this tells upright views best: energies are biased towards some classes, and probabilities of small
    networks are all but 1 under any orientation.
    """
    logits = floored(seen.logits)
    return (logits.amax(-1) - logits.mean(-1)) / logits.std(-1, correction=0).clamp_min(1e-6)


def audit(votes: Votes, unread: Sequence[str] = ()) -> Audit:
    """Return what the votes of some images say of their source."""
    if not len(votes):
        raise DataError(" ".join(["an audit needs at least one image that can be read.", *unread[:1]]))
    likelihood = votes.likelihood
    turns = turned(likelihood)
    shares = likeliest(turns)
    verdict, mirrored = judged(likelihood, shares)
    counts = torch.bincount(votes.evidence.argmax(1), minlength=len(ORIENTATIONS)).tolist()
    upright, *others = (share_of(turns, shares, turn) for turn in range(TURNS))
    return Audit(
        verdict=verdict,
        mirrored=mirrored,
        undo="" if verdict in (MIXED, UNKNOWN) else UNDO[ORIENTATIONS.index(verdict)],
        images=len(votes),
        enough=_enough(likelihood, verdict),
        turned=upright.rest,
        shares=dict(zip(ORIENTATIONS[:TURNS], (upright, *others), strict=True)),
        votes=dict(zip(ORIENTATIONS, counts, strict=True)),
        gain=_gain(votes, verdict, likelihood * shares.repeat(2)),
        fitted=votes.fitted,
        angles=None if votes.angles is None else _binned(votes.angles),
        unread=tuple(unread),
    )


def judged(likelihood: Tensor, shares: Tensor) -> tuple[Verdict, Mirror]:
    """Return the verdict on votes (n, 8) of which the likeliest shares (4,) of turns are known, and on mirroring.

    Turns and mirrors are judged apart, since a model that cannot tell mirrored images still tells turned ones.
    """
    turns = [share_of(turned(likelihood), shares, turn, VERDICT_DROP) for turn in range(TURNS)]
    most = max(range(TURNS), key=lambda turn: turns[turn].share)
    mirrored = mirroring(likelihood, shares)
    if turns[most].high < ALL:
        return MIXED, mirrored
    if turns[most].low <= MOST:
        return UNKNOWN, mirrored
    return ORIENTATIONS[most + TURNS * (mirrored == "yes")], mirrored


def turned(likelihood: Tensor) -> Tensor:
    """Return how likely (n, 4) each image is under each turn, mirrored or not."""
    return likelihood[:, :TURNS] + likelihood[:, TURNS:]


def mirroring(likelihood: Tensor, shares: Tensor) -> Mirror:
    """Return whether images arrive mirrored, by votes (n, 8) under the likeliest shares (4,) of turns.

    A model that is blind to mirrors votes at random, as a source would that mirrors half of its images: only votes that
    lean to one side count, and only where each leans enough that it is no chance of the images at hand. Votes of few
    images have long tails, hence the more that they must lean.
    """
    plain, mirror = ((part * shares).sum(1).log() for part in (likelihood[:, :TURNS], likelihood[:, TURNS:]))
    lead, count = mirror - plain, len(likelihood)
    if count < 2:
        return UNKNOWN
    leaning = float(lead.mean() / lead.std().clamp_min(1e-12))
    if abs(leaning) < LEAST_LEAN or abs(leaning) * count**0.5 < MIRROR_DEVIATIONS + 20 / count:
        return UNKNOWN
    return "yes" if leaning > 0 else "no"


def likeliest(likelihood: Tensor) -> Tensor:
    """Return the shares (K,) of K kinds that make votes (n, K) most likely, by expectation and maximisation.

    One image more, spread over all, keeps every share above zero.
    """
    count, kinds = likelihood.shape
    shares = likelihood.new_full((kinds,), 1 / kinds)
    for _ in range(ROUNDS):
        blame = likelihood * shares
        shares = ((blame / blame.sum(1, keepdim=True)).sum(0) + 1 / kinds) / (count + 1)
    return shares


def share_of(likelihood: Tensor, shares: Tensor, kind: int, drop: float = SHOWN_DROP) -> Share:
    """Return the share of images of one kind, and between what it lies: where the log-likelihood falls by `drop`.

    Args:
        likelihood: (n, K).
        shares: (K,), the likeliest; how the other kinds divide among themselves is taken from them.
        kind: Which.
        drop: Half a quantile of chi-squared.
    """
    inside = likelihood[:, kind]
    others = (likelihood * shares).sum(1) - inside * shares[kind]
    outside = others / (1 - shares[kind])
    grid = torch.linspace(0, 1, GRID, dtype=likelihood.dtype)
    fits = (grid[:, None] * inside + (1 - grid[:, None]) * outside).clamp_min(1e-300).log().sum(1)
    kept = grid[fits >= fits.max() - drop]
    return Share(float(grid[fits.argmax()]), float(kept.min()), float(kept.max()))


def read(
    robust: Pretrained,
    sources: Iterable[Any],
    *,
    images: int = 200,
    batch: int = 8,
    any_angle: bool = False,
    tell: Progress | None = None,
) -> tuple[Votes, list[str]]:
    """Return the votes of image files, and what was wrong with those that could not be read.

    Args:
        robust: The model.
        sources: Paths, or anything else that `images.upright` takes.
        images: Most images.
        batch: Images at once; each is eight views.
        any_angle: Whether to search for other angles, too.
        tell: Called with (stage, done, total).
    """
    unread: list[str] = []
    parts: list[Votes] = []
    done = 0
    with Decoders() as decoders:
        good = readable(sources, robust.adapted, 2 * batch, decoders, unread)
        while len(some := list(islice(good, min(batch, images - done)))):
            parts.append(ask(robust, torch.stack(some), any_angle=any_angle))
            done += len(some)
            if tell is not None:
                tell("looking at images", done, images)
    return _joined(parts), unread


def _joined(parts: Sequence[Votes]) -> Votes:
    if not parts:
        none = torch.zeros(0, len(ORIENTATIONS))
        return Votes(none, none.long(), none, False)
    angles = [part.angles for part in parts if part.angles is not None]
    return Votes(
        torch.cat([part.evidence for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat([part.confidence for part in parts]),
        parts[0].fitted,
        torch.cat(angles) if angles else None,
    )


def _enough(likelihood: Tensor, verdict: Verdict) -> int | None:
    """Return with how many images, in the order they came, the verdict was there to stay; None where there is none."""
    if verdict == UNKNOWN:
        return None
    count = len(likelihood)
    enough = count
    for first in sorted((size for size in PREFIXES if size < count), reverse=True):
        some = likelihood[:first]
        if judged(some, likeliest(turned(some)))[0] != verdict:
            break
        enough = first
    return enough


def _gain(votes: Votes, verdict: Verdict, weights: Tensor) -> Gain:
    """Return what turning images back would do: all alike, or each by its own vote where the source is mixed."""
    rows = torch.arange(len(votes))
    if verdict == MIXED:
        place = weights.argmax(1)
    else:
        place = torch.full_like(rows, 0 if verdict == UNKNOWN else ORIENTATIONS.index(verdict))
    return Gain(
        answers_changed=float((votes.labels[rows, place] != votes.labels[:, 0]).double().mean()),
        confidence_before=float(votes.confidence[:, 0].double().mean()),
        confidence_after=float(votes.confidence[rows, place].double().mean()),
    )


def _binned(degrees: Tensor) -> tuple[int, ...]:
    return tuple(torch.bincount((degrees / 30).round().long() % 12, minlength=12).tolist())

"""The paper's search: a tree whose levels each expand every hypothesis along the orbit of one subgroup."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

from headtilt.errors import at_least, checked_seed, one_of, positive
from headtilt.geometry.groups import Group, OneParameterGroup, check_levels, identity_index
from headtilt.model.evidence import Evaluate, Evidence
from headtilt.model.views import everywhere
from headtilt.search.confidence import Confidence, Orbit, check_curvature, confidence_of_views, is_curvature, resolve
from headtilt.search.found import Beam, Found, LevelTrace, Posture, root_beam, take
from headtilt.search.seen import near_identity, select

RANKINGS = ("energy", "last", "accumulated", "support")


@dataclass(frozen=True)
class Tree:
    """How to walk the tree.

    Attributes:
        levels: The groups, from the root down; `ITS` fills in its own where there are none.
        samples: Samples N along each orbit (reflection always has its four).
        hypotheses: Hypotheses K that survive each level, at most one per label. Where fewer labels turn up, the
            remaining slots stay empty (`Beam.active` is false there) rather than repeating a label.
        confidence: "energy", "bayesian", "group", or a callable (Evidence, Orbit) → (B, K, N).
        width: Smoothing width of the group confidence in the group's own units; None for a seventh of its reach.
        accept: Algorithm 1's rule: a hypothesis moves only to views more confident than it was, starting from the
            identity's own confidence ("identity") or from the paper's 0 ("zero"). None always moves.
        ranking: Final order: by the energy of the final views ("energy"), by the last level's confidence ("last"), by
            confidence accumulated along the trajectory ("accumulated"), or by how many views of the whole tree got the
            hypothesis's label ("support"). None takes "energy" for group confidence and "last" for all others:
            curvatures of different groups differ in scale by orders of magnitude, so that ranking by them costs up to
            30 points on MNIST; energies compare.
        traversal: "greedy" keeps the best candidates, "boltzmann" samples them with probability ∝ exp(confidence / T).
        temperature: T of the Boltzmann traversal.
        seed: Seed of the Boltzmann traversal. One draw per level is shared by all images, so that results do not depend
            on how a batch is split.
    """

    levels: tuple[Group, ...] = ()
    samples: int = 17
    hypotheses: int = 3
    confidence: str | Confidence = "group"
    width: float | None = None
    accept: Literal["identity", "zero"] | None = None
    ranking: Literal["energy", "last", "accumulated", "support"] | None = None
    traversal: Literal["greedy", "boltzmann"] = "greedy"
    temperature: float = 1.0
    seed: int = 0

    lattice: ClassVar[None] = None  # a tree asks no head for likely poses; see `Joint`
    choices: ClassVar[None] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", at_least("samples", self.samples, 1))
        object.__setattr__(self, "hypotheses", at_least("hypotheses", self.hypotheses, 1))
        if self.levels != ():
            check_levels(self.levels, self.samples)
        object.__setattr__(self, "levels", tuple(self.levels))
        if self.accept is not None:
            one_of("accept", self.accept, ("identity", "zero"))
        if self.ranking is None:
            object.__setattr__(self, "ranking", "energy" if is_curvature(self.confidence) else "last")
        one_of("ranking", self.ranking, RANKINGS)
        one_of("traversal", self.traversal, ("greedy", "boltzmann"))
        positive("temperature", self.temperature)
        if self.width is not None:
            positive("width", self.width)
        object.__setattr__(self, "seed", checked_seed(self.seed))
        resolve(self.confidence)
        if is_curvature(self.confidence) and any(isinstance(group, OneParameterGroup) for group in self.levels):
            check_curvature(self.samples)

    @property
    def draws(self) -> bool:
        """Whether the walk draws random numbers."""
        return self.traversal == "boltzmann"

    @property
    def budget(self) -> int:
        """Most views that one level holds at once for one image."""
        return self.hypotheses * max(len(group.grid(self.samples)) for group in self.levels)

    @property
    def most_views(self) -> int:
        """Most views of one image."""
        fresh = [len(group.grid(self.samples)) - 1 for group in self.levels]
        return 1 + fresh[0] + self.hypotheses * sum(fresh[1:])

    def search(self, evaluate: Evaluate, root: Evidence) -> Found:
        """Return what the walk finds; see `search`."""
        return search(evaluate, root, self)


def search(evaluate: Evaluate, root: Evidence, tree: Tree) -> Found:
    """Return the best hypotheses for a batch.

    Args:
        evaluate: What the classifier says of views.
        root: Evidence (B, …) of the images as they came; every level inherits its identity sample from its parent, so
            each view is evaluated once.
        tree: How to walk.
    """
    measure = resolve(tree.confidence, tree.width)
    generator = torch.Generator().manual_seed(tree.seed)
    beam = root_beam(root)
    marginal, near, views = root.logits, root.logits, torch.ones_like(root.labels)
    support = count_labels(root.labels[:, None], root.logits.shape[-1])
    trace = []
    poses_seen, upright_seen = [beam.pose], [root.upright]
    for depth, group in enumerate(tree.levels):
        orbit = Orbit(group, len(group.grid(tree.samples)))
        poses, evidence = expand(evaluate, beam, orbit, alike=depth == 0)
        confidence = confidence_of_views(measure, evidence, orbit, beam.active)
        here = identity_index(group, orbit.samples)
        scores = _accepted(tree, beam, confidence, here, depth)
        noise = _gumbel(scores, generator) * tree.temperature if tree.traversal == "boltzmann" else None
        chosen = select(scores if noise is None else scores + noise, evidence.labels, tree.hypotheses)
        new = [sample for sample in range(orbit.samples) if sample != here]
        fresh, close = evidence.logits[:, :, new], near_identity(poses[:, :, new], tree.levels)
        marginal = torch.logaddexp(marginal, fresh.flatten(1, 2).logsumexp(1))
        near = torch.logaddexp(near, fresh.masked_fill(~close[..., None], float("-inf")).flatten(1, 2).logsumexp(1))
        support = support + count_labels(evidence.labels[:, :, new], support.shape[-1], beam.active)
        views = views + beam.active.sum(1) * (orbit.samples - 1)
        if evidence.upright is not None:
            poses_seen.append(poses[:, :, new].flatten(1, 2))
            upright_seen.append(evidence.upright[:, :, new].flatten(1, 2)[..., 0])
        trace.append(
            LevelTrace(
                group=group,
                parameters=group.grid(tree.samples).to(confidence),
                parents=beam.pose,
                active=beam.active,
                confidence=confidence,
                energy=evidence.energy,
                labels=evidence.labels,
                chosen=chosen,
                temperature=float(tree.temperature),
            )
        )
        beam = _descend(beam, poses, evidence, confidence, scores, chosen)
    ranked = rank(beam, str(tree.ranking), support)
    posture = _posture(tree.levels, poses_seen, upright_seen) if root.upright is not None else None
    return Found(ranked, tuple(trace), root.logits, marginal, near, views, posture)


def _posture(levels: tuple[Group, ...], poses: list[Tensor], upright: list[Tensor | None]) -> Posture:
    """Return how images lie by the views of all levels: the likeliest one. Views crowd where the tree went."""
    seen = torch.cat(poses, 1)
    score = torch.cat([part.flatten(1) for part in upright if part is not None], 1)
    share, best = score.softmax(1).max(1)
    close = near_identity(seen, levels)
    here = score.masked_fill(~close, float("-inf")).amax(1)
    away = score.masked_fill(close, float("-inf")).amax(1)
    return Posture(seen[torch.arange(len(best), device=best.device), best], away - here, share)


def expand(evaluate: Evaluate, beam: Beam, orbit: Orbit, *, alike: bool = False) -> tuple[Tensor, Evidence]:
    """Return the poses (B, K, N, 3, 3) along each hypothesis's orbit, and their evidence (B, K, N, …).

    The identity sample is the hypothesis itself and inherits its evidence. Inactive slots get logits of −inf.

    Args:
        evaluate: What the classifier says of views.
        beam: The hypotheses.
        orbit: The group and its number of samples.
        alike: Whether all images have the one hypothesis that holds nothing but the identity, so that they all go
            through the same poses.
    """
    steps = orbit.group.orbit(orbit.samples).to(beam.pose)
    poses = steps @ beam.pose[:, :, None]
    here = identity_index(orbit.group, orbit.samples)
    new = [sample for sample in range(orbit.samples) if sample != here]
    batch, slots = beam.active.shape
    if alike:
        rows = torch.arange(batch, device=poses.device)
        seen = everywhere(evaluate, batch, steps[new]) if new else None
    else:
        rows = _occupied(beam.active.flatten())
        index = (rows // slots).repeat_interleave(len(new))
        seen = evaluate(index, poses.flatten(0, 1)[rows][:, new].reshape(-1, 3, 3)) if new else None

    def assemble(inherited: Tensor, found: Tensor | None, empty: float) -> Tensor:
        size = inherited.shape[-1]
        whole = inherited.new_full((batch * slots, orbit.samples, size), empty)
        whole[rows, here] = inherited.flatten(0, 1)[rows]
        if found is not None:
            whole[rows[:, None], torch.tensor(new, device=rows.device)] = found.reshape(-1, len(new), size)
        whole = whole.reshape(batch, slots, orbit.samples, size)
        return whole.masked_fill(~beam.active[..., None, None], empty)

    logits = assemble(beam.evidence.logits, seen.logits if seen else None, float("-inf"))
    features, upright = beam.evidence.features, beam.evidence.upright
    if features is not None:
        features = assemble(features, seen.features if seen else None, 0.0)
    if upright is not None:
        upright = assemble(upright, seen.upright if seen else None, float("-inf"))
    return poses, Evidence(logits, features, upright)


def _occupied(active: Tensor) -> Tensor:
    """Return which slots to expand: those that hold a hypothesis; in a graph, whose shapes are fixed, all of them."""
    return torch.arange(active.shape[0], device=active.device) if is_compiling() else active.nonzero()[:, 0]


def rank(beam: Beam, ranking: str, support: Tensor) -> Beam:
    """Return the beam in its final order; empty slots last.

    Args:
        beam: The hypotheses of the last level.
        ranking: One of `RANKINGS`; see `Tree`.
        support: (B, Y), how many views of the whole tree got each label.
    """
    key = beam.confidence
    if ranking == "energy":
        key = -beam.evidence.energy
    elif ranking == "accumulated":
        key = beam.accumulated
    elif ranking == "support":
        # Ties in the count are decided by confidence, squashed so that it can never outweigh one view.
        key = support.gather(1, beam.labels) + beam.confidence.sigmoid() / 2
    key = key.masked_fill(~beam.active, float("-inf"))
    # ONNX has no stable sort, but its top-k is one.
    order = key.topk(key.shape[1]).indices if is_compiling() else key.argsort(dim=1, descending=True, stable=True)
    return take(beam, order)


def count_labels(labels: Tensor, classes: int, active: Tensor | None = None) -> Tensor:
    """Return how often each class occurs among each image's views, (B, Y).

    Args:
        labels: (B, …).
        classes: Number of classes Y.
        active: (B, K), which hypotheses count, for labels (B, K, N).
    """
    weights = torch.ones_like(labels) if active is None else active[..., None].expand(labels.shape).to(labels)
    counts = torch.zeros(labels.shape[0], classes, dtype=torch.long, device=labels.device)
    return counts.scatter_add_(1, labels.flatten(1), weights.flatten(1))


def _accepted(tree: Tree, beam: Beam, confidence: Tensor, here: int, depth: int) -> Tensor:
    """Return the scores by which candidates compete: −inf for those that do not beat the hypothesis they come from."""
    if tree.accept is None:
        return confidence
    primal = beam.confidence
    if depth == 0:
        primal = confidence[:, :, here] if tree.accept == "identity" else torch.zeros_like(primal)
    scores = confidence.masked_fill(confidence <= primal[..., None], float("-inf"))
    # Algorithm 1 also raises the bar where the best view is the hypothesis itself.
    stays = torch.maximum(primal, confidence[:, :, here])
    scores[:, :, here] = stays.masked_fill(~beam.active, float("-inf"))
    return scores


def _gumbel(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return Gumbel noise (1, K, N): the best k of score + noise are k draws from the Boltzmann distribution."""
    uniform = torch.rand(like.shape[1:], generator=generator, dtype=torch.float32)
    return -(-uniform.clamp_min(torch.finfo(torch.float32).tiny).log()).log().to(like)[None]


def _descend(beam: Beam, poses: Tensor, evidence: Evidence, confidence: Tensor, scores: Tensor, chosen: Tensor) -> Beam:
    """Return the beam of the chosen candidates; their parents' accumulated confidence goes with them."""
    samples = confidence.shape[-1]
    candidates = Beam(
        pose=poses.flatten(1, 2),
        evidence=evidence.reshape(chosen.shape[0], -1),
        confidence=scores.flatten(1),
        accumulated=(beam.accumulated[..., None] + confidence).flatten(1),
        active=beam.active.repeat_interleave(samples, dim=1),
    )
    taken = take(candidates, chosen.clamp_min(0))
    return replace(taken, active=chosen >= 0)

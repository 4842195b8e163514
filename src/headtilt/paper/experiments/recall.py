"""Searches that differ in how they answer, and not in where they look: what the model said is asked for once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headtilt.geometry.warp import Interpolation, Padding
from headtilt.model.evidence import Evidence
from headtilt.model.predictor import Predictor


@dataclass(frozen=True)
class Memory:
    """What one network was asked, and what it said.

    Attributes:
        answers: By what is quick to compare (seeds, passes, shapes): the tensors of each question, and the evidence.
    """

    answers: dict[Any, list[tuple[tuple[Tensor, ...], Evidence]]] = field(default_factory=dict)

    def recall(self, how: Any, tensors: tuple[Tensor, ...], ask: Callable[[], Evidence]) -> Evidence:
        """Return what was said to this very question before, or what is said now.

        Args:
            how: Everything but the tensors that the answer depends on; hashable.
            tensors: Images and poses.
            ask: Asks the network.
        """
        known = self.answers.setdefault((how, *(one.shape for one in tensors)), [])
        for asked, evidence in known:
            if all(torch.equal(one, other) for one, other in zip(asked, tensors, strict=True)):
                return Evidence(evidence.logits, evidence.features)
        found = ask()
        known.append((tensors, found))
        return Evidence(found.logits, found.features)

    def forget(self) -> None:
        """Forget everything."""
        self.answers.clear()


class Recalling(Predictor):
    """A predictor with a memory: whoever asks for the same views in the same way gets the same evidence at once."""

    memory: Memory

    @classmethod
    def of(cls, predictor: Predictor, memory: Memory) -> Recalling:
        """Return a copy of a predictor, of a network whose memory it is."""
        other = cls.__new__(cls)
        other.__dict__.update({**predictor.__dict__, "memory": memory})
        return other

    def views(
        self,
        images: Tensor,
        index: Tensor,
        poses: Tensor,
        *,
        padding: Padding = "zeros",
        interpolation: Interpolation = "bilinear",
    ) -> Evidence:
        """Return the evidence of views; see `Predictor`."""
        how = {"padding": padding, "interpolation": interpolation}
        ask = super().views
        return self._recalled("views", how, (images, index, poses), lambda: ask(images, index, poses, **how))  # type: ignore[arg-type]

    def all_views(
        self,
        images: Tensor,
        poses: Tensor,
        *,
        padding: Padding = "zeros",
        interpolation: Interpolation = "bilinear",
    ) -> Evidence:
        """Return the evidence of every image under every pose; see `Predictor`."""
        how = {"padding": padding, "interpolation": interpolation}
        ask = super().all_views
        return self._recalled("all", how, (images, poses), lambda: ask(images, poses, **how))  # type: ignore[arg-type]

    def _recalled(
        self, what: str, how: dict[str, str], tensors: tuple[Tensor, ...], ask: Callable[[], Evidence]
    ) -> Evidence:
        taps = self.features if self.features is None or isinstance(self.features, str) else tuple(self.features)
        asked = (what, *how.values(), self.passes, self.sampled, self.seed, self.autocast, taps)
        return self.memory.recall(asked, tensors, ask)

"""The wrapper as scikit-learn knows estimators: predict, score, clone, pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headtilt.cost import Costs, costs
from headtilt.errors import OptionError, ShapeError, is_number
from headtilt.result import SearchResult

if TYPE_CHECKING:
    from typing_extensions import Self

Array = np.ndarray[Any, Any]


class Estimator:
    """What a search can be asked for in scikit-learn's words.

    Attributes:
        _given: The arguments that the wrapper was made with.
    """

    _given: dict[str, Any]

    def search(self, images: Tensor) -> SearchResult:
        """Return what the search finds; see `ITS.search`."""
        raise NotImplementedError

    def predict(self, images: Tensor | Array, *, abstain: float = 0.0) -> Array:
        """Return the labels (B,) as an array, as scikit-learn does; for several labels truth values (B, Y).

        Args:
            images: (B, C, H, W) raw pixels.
            abstain: Probability below which no label is given: −1 stands there, or False for several labels.
        """
        if not is_number(abstain) or not 0 <= float(abstain) <= 1:
            raise OptionError(f"abstain must be a probability between 0 and 1; got {abstain!r}.")
        result = self.search(_as_tensor(images))
        if result.multilabel:
            return (result.labels & (result.probabilities >= float(abstain))).cpu().numpy()
        return result.labels.masked_fill(result.probabilities.amax(1) < float(abstain), -1).cpu().numpy()

    def predict_proba(self, images: Tensor | Array) -> Array:
        """Return the probabilities (B, Y) as an array; (B, 2), no and yes, for a single logit."""
        return self.search(_as_tensor(images)).probabilities.cpu().numpy()

    def score(self, images: Tensor | Array, labels: Tensor | Array) -> float:
        """Return the share of right labels (B,) of images (B, C, H, W), as scikit-learn does; 1 is all of them."""
        wanted = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
        found = self.predict(images)
        if wanted.shape != found.shape:
            raise ShapeError(f"labels must be {found.shape}, one for each image; got {wanted.shape}.")
        return float((found == wanted).mean())

    def cost(self, images: Tensor, *, budgets: Sequence[int] | None = None, seed: int = 0) -> Costs:
        """Return views and milliseconds per upright and per tilted image on this machine, also with other budgets.

        Args:
            images: (B, C, H, W), upright; some dozens tell enough.
            budgets: Most views per image to try; some by default.
            seed: Seeds the tilts.

        Examples:
            >>> from headtilt import ITS, Joint
            >>> robust = ITS(lambda images: images.flatten(1)[:, :10], search=Joint(budget=8))
            >>> [row.budget for row in robust.cost(torch.rand(4, 1, 8, 8), budgets=[4]).rows]
            [1, 4, 8]
        """
        return costs(self, images, budgets=budgets, seed=seed)  # type: ignore[arg-type]

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: ARG002
        """Return the arguments that this wrapper was made with, for scikit-learn and its `clone`."""
        return dict(self._given)

    def set_params(self, **changes: Any) -> Self:
        """Make this wrapper anew with some arguments changed, as scikit-learn does; what was fitted is lost."""
        self.__init__(**{**self._given, **changes})  # type: ignore[misc]
        return self

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn wants to know of an estimator."""
        from sklearn.utils import ClassifierTags, Tags, TargetTags

        return Tags("classifier", TargetTags(required=False), classifier_tags=ClassifierTags())

    def __sklearn_is_fitted__(self) -> bool:
        """Return that it can answer: a search needs no fit."""
        return True


def _as_tensor(images: Tensor | Array) -> Tensor:
    """Return images as a tensor; arrays that are reversed or read-only, which torch does not take, are copied."""
    return torch.as_tensor(np.require(images, requirements=["C", "W"]) if isinstance(images, np.ndarray) else images)

"""The photometric half of a preprocessing, and the little that models from outside need around them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headtilt.errors import ModelError, OptionError
from headtilt.model.outputs import OUTPUT


class Normalised(nn.Module):
    """A model behind its own normalisation: raw pixels in [0, 1] in, logits out.

    Args:
        model: Returns logits, or an object with `.logits`.
        mean: One number per channel, in [0, 1].
        deviation: One number per channel.
        mix: (C, C) that mixes the channels of raw pixels first, for models that want them in another order.
        argument: Name under which the model takes images; None passes them by position.
    """

    mean: Tensor
    deviation: Tensor
    mix: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        mean: Sequence[float],
        deviation: Sequence[float],
        *,
        mix: Tensor | None = None,
        argument: str | None = None,
    ) -> None:
        super().__init__()
        self.model, self.argument = model, argument
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).reshape(1, -1, 1, 1))
        self.register_buffer("deviation", torch.tensor(deviation, dtype=torch.float32).reshape(1, -1, 1, 1))
        self.register_buffer("mix", mix)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, Y)."""
        if self.mix is not None:
            images = torch.einsum("ij,bjhw->bihw", self.mix, images)
        shown = (images - self.mean) / self.deviation
        output = self.model(shown) if self.argument is None else self.model(**{self.argument: shown})
        logits: Tensor = getattr(output, "logits", output)
        return logits


class BlackBox(nn.Module):
    """Anything that turns images into logits, as a module without parts: no dropout to sample.

    Args:
        call: From raw pixels (B, C, H, W) to logits (B, Y), or to these and the features (B, D) of each layer named.
        batch: The only size of batch that it takes; None for any. Smaller batches are filled up and cut again.
        features: Names of the taps that come with the logits. Modules of these names stand in for those that were
            tapped, so that whoever reads the features of the model from which the black box was made reads them here.
    """

    def __init__(self, call: Callable[[Tensor], Any], batch: int | None = None, features: Sequence[str] = ()) -> None:
        super().__init__()
        self.call, self.batch, self.features = call, batch, tuple(features)
        for name in self.features:
            _add_stand_in(self, name.removesuffix(OUTPUT))

    def forward(self, images: Tensor) -> Any:
        """Return what the callable says, batch by batch where it takes only one size of them."""
        if not self.features:
            return self._called(images)
        logits, *features = self._called(images)
        read = dict(zip(self.features, features, strict=True))
        for name in dict.fromkeys(tap.removesuffix(OUTPUT) for tap in read):
            given, gave = read.get(name), read.get(name + OUTPUT)
            self.get_submodule(name)(gave if given is None else given, given if gave is None else gave)
        return logits

    def _called(self, images: Tensor) -> Any:
        if self.batch is None:
            return self.call(images)
        found = []
        for part in images.split(self.batch):
            missing = self.batch - len(part)
            whole = torch.cat([part, part[-1:].expand(missing, *part.shape[1:])]) if missing else part
            said = self.call(whole)
            found.append([one[: len(part)] for one in (said if self.features else (said,))])
        columns = [torch.cat(parts) for parts in zip(*found, strict=True)]
        return columns if self.features else columns[0]


class StandIn(nn.Module):
    """A module that stands for another, whose input and output are known: a tap on either side reads them."""

    def forward(self, given: Tensor, gave: Tensor) -> Tensor:  # noqa: ARG002
        """Return what the other gave."""
        return gave


def _add_stand_in(root: nn.Module, name: str) -> None:
    """Give a module a part of that dotted name that stands for another."""
    try:
        for part in name.split("."):
            if part not in root._modules:
                root.add_module(part, StandIn())
            root = root.get_submodule(part)
    except (KeyError, AttributeError) as error:
        raise ModelError(f"no layer can stand for the features {name!r}: {error}.") from error


def to_mean_and_deviation(gain: Tensor, offset: Tensor, name: str) -> tuple[list[float], list[float]]:
    """Return the mean and deviation, per channel, under which (x − mean) / deviation is gain · x + offset."""
    if not bool((gain.isfinite() & (gain != 0)).all()):
        raise ModelError(f"the preprocessing of {name} wipes out a channel; headtilt cannot split such a one.")
    return (-offset / gain).tolist(), (1 / gain).tolist()


@contextmanager
def only_tensors() -> Iterator[None]:
    """Let whatever torch unpickles meanwhile be tensors alone, so that a file of weights cannot bring code along."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def name_and_options(spec: str, *known: str) -> tuple[str, dict[str, str]]:
    """Return a spec's name and the options behind its question mark: ``resnet18?weights=none``."""
    name, _, rest = spec.partition("?")
    options = dict(part.partition("=")[::2] for part in rest.split("&") if part)
    unknown = [key for key in options if key not in known]
    if unknown or not name:
        raise OptionError(f"model options after ? must be {', '.join(f'{key}=…' for key in known)}; got {spec!r}.")
    return name, options

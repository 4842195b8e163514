"""Small exact things to test against: rendered images, networks with known weights, and slow reference code.

Nothing here calls the code under test, apart from the group objects that a reference needs to know its grid,
and of `ungated`.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from headtilt.calibration import head, proposals
from headtilt.geometry.groups import OneParameterGroup
from headtilt.its import ITS
from headtilt.model.evidence import Evidence
from headtilt.result import SearchResult
from headtilt.search.plan import PLANS

Blob = tuple[float, float, float, float]

# Three constellations of soft dots (x, y, radius, brightness): smooth, without any symmetry, unlike one another.
TEMPLATES: tuple[tuple[Blob, ...], ...] = (
    ((-0.30, -0.28, 0.16, 1.0), (0.25, -0.10, 0.13, 0.8), (0.05, 0.32, 0.12, 0.9), (-0.20, 0.10, 0.10, 0.6)),
    ((0.28, -0.30, 0.13, 0.9), (0.30, 0.15, 0.15, 1.0), (-0.25, 0.25, 0.12, 0.7), (0.00, -0.05, 0.10, 0.5)),
    ((-0.05, -0.38, 0.12, 1.0), (-0.34, 0.05, 0.15, 0.8), (0.22, 0.30, 0.16, 0.7), (0.30, -0.10, 0.09, 1.0)),
)


def shrunk(factor: float) -> tuple[tuple[Blob, ...], ...]:
    """The templates about the centre at another size, to fit a frame that is not square."""
    return tuple(tuple((x * factor, y * factor, r * factor, b) for x, y, r, b in blobs) for blobs in TEMPLATES)


def render(blobs: Sequence[Blob], pose: Tensor, height: int = 32, width: int = 32) -> Tensor:
    """The image (H, W) of the blobs moved by a pose, from the formula: nothing is resampled."""
    longer = max(height, width)
    x = (2 * torch.arange(width, dtype=torch.float64) + 1 - width) / longer
    y = (2 * torch.arange(height, dtype=torch.float64) + 1 - height) / longer
    back = torch.linalg.inv(pose.double())
    from_x = back[0, 0] * x[None, :] + back[0, 1] * y[:, None] + back[0, 2]
    from_y = back[1, 0] * x[None, :] + back[1, 1] * y[:, None] + back[1, 2]
    parts = [b * torch.exp(-((from_x - cx) ** 2 + (from_y - cy) ** 2) / (2 * r * r)) for cx, cy, r, b in blobs]
    return torch.stack(parts).sum(0).float()


class TemplateMatcher(nn.Module):
    """Logits are the sharpened correlation with upright templates: upright is where the energy is lowest."""

    def __init__(self, templates: Sequence[Sequence[Blob]], height: int, width: int, sharpness: float = 40.0) -> None:
        super().__init__()
        drawn = torch.stack([render(blobs, torch.eye(3), height, width) for blobs in templates])
        self.register_buffer("templates", standardised(drawn))
        self.sharpness = sharpness

    def forward(self, images: Tensor) -> Tensor:
        return self.sharpness * standardised(images) @ self.templates.T


def standardised(images: Tensor) -> Tensor:
    flat = images.flatten(1)
    return F.normalize(flat - flat.mean(1, keepdim=True), dim=1)


def written_down(module: nn.Module) -> None:
    """Fill all parameters from a formula, so that goldens depend on no random number generator."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters(), start=1):
            count = torch.arange(parameter.numel(), dtype=torch.float64)
            fan = max(parameter[0].numel(), 1)
            values = torch.sin(1.7 * number + 2.399963 * count + 0.01 * count**2) * math.sqrt(2 / fan)
            parameter.copy_(values.reshape(parameter.shape))


class TinyNet(nn.Module):
    """Convolution, pooling, two linear layers with dropout between them: the paper's network in small."""

    def __init__(self, classes: int = 5, channels: int = 1, size: int = 12, rate: float = 0.5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, padding=1)
        self.hidden = nn.Linear(4 * (size // 3) ** 2, 16)
        self.dropout = nn.Dropout(rate)
        self.classifier = nn.Linear(16, classes)
        written_down(self)
        with torch.no_grad():
            # Strong enough that views differ in label, and without a bias that would decide alone.
            for layer, gain in ((self.conv, 3), (self.hidden, 4), (self.classifier, 3)):
                layer.weight.mul_(gain)
                layer.bias.zero_()

    def trunk(self, images: Tensor) -> Tensor:
        return F.gelu(self.hidden(F.max_pool2d(F.gelu(self.conv(images)), 3).flatten(1)))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.trunk(images)))


def tiny_images(count: int, height: int = 12, width: int = 12, channels: int = 1) -> Tensor:
    """Smooth images (B, C, H, W), all different, in [0, 1], from a formula."""
    longer = max(height, width)
    x = (2 * torch.arange(width) + 1 - width) / longer
    y = ((2 * torch.arange(height) + 1 - height) / longer)[:, None]
    drawn = []
    for number in range(count * channels):
        cx, cy, slant = 0.5 * math.sin(1.3 * number), 0.5 * math.cos(2.1 * number), math.sin(0.7 * number + 1)
        drawn.append(torch.exp(-4 * ((x - cx + slant * (y - cy)) ** 2 + 0.5 * (y - cy) ** 2)))
    return torch.stack(drawn).reshape(count, channels, height, width)


def evidence_of(energy: Tensor, labels: Tensor | None = None, classes: int = 4) -> Evidence:
    """Evidence whose energy is exactly this (…), and whose labels are these."""
    labels = torch.zeros_like(energy, dtype=torch.long) if labels is None else labels
    log_probs = (4.0 * F.one_hot(labels, classes)).to(energy.dtype).log_softmax(-1)
    return Evidence(log_probs - energy[..., None])


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """All that a search may not change: modes, values and identity of tensors, hooks, and the random streams."""

    def digest(tensor: Tensor | None) -> str:
        if tensor is None:
            return "none"
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(raw.numpy().tobytes()).hexdigest()

    modules = list(model.modules())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "modes": [module.training for module in modules],
        "parameters": {name: (digest(value), id(value)) for name, value in model.named_parameters()},
        "requires_grad": [value.requires_grad for value in model.parameters()],
        "gradients": [digest(value.grad) for value in model.parameters()],
        "buffers": [
            (name, digest(value), id(value)) for module in modules for name, value in sorted(module._buffers.items())
        ],
        "hooks": [[tuple(getattr(module, kind)) for kind in hooks] for module in modules],
        "random": (
            digest(torch.get_rng_state()),
            random.getstate(),
            repr(np.random.get_state()),
            torch.is_grad_enabled(),
        ),
    }


def curvature_by_hand(
    energy: Sequence[float], group: OneParameterGroup, width: float | None = None, border: str = "straight"
) -> np.ndarray:
    """The group confidence of one orbit, in loops and float64: pad, smooth, second difference, over ‖T_ĝ − T_ĝ²‖²_F."""
    values = [float(value) for value in energy]
    count = len(values)
    grid = group.grid(count).tolist()
    step = grid[count // 2 + 1] - grid[count // 2]
    width = max(-group.low, group.high) / 7 if width is None else width

    def at(index: int) -> float:
        if group.periodic:
            return values[index % count]
        if 0 <= index < count:
            return values[index]
        end, inner = (0, 1) if index < 0 else (count - 1, count - 2)
        beyond = 0 if border == "nearest" else abs(index - end)
        return values[end] + beyond * (values[end] - values[inner])

    weights = {offset: math.exp(-0.5 * (offset * step / width) ** 2) for offset in range(-count, count + 1)}
    total = sum(weights.values())
    smooth = {n: sum(w / total * at(n + offset) for offset, w in weights.items()) for n in range(-1, count + 1)}
    generator = group.matrix(torch.tensor(step, dtype=torch.float64)).numpy()
    length = np.linalg.norm(generator - generator @ generator)
    second = [smooth[n + 1] + smooth[n - 1] - 2 * smooth[n] for n in range(count)]
    return np.array(second) / length**2


def stable_id(value: object) -> str:
    """Return a test's name for a value: the same in every process, so without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def its(model, levels=None, *, search="tree", **options) -> ITS:
    """The wrapper, for tables of tests: options of any plan may be given, and the one that is searched by takes its."""
    plan = PLANS[search]() if isinstance(search, str) and search in PLANS else search
    loose = {item.name for kind in PLANS.values() for item in fields(kind)} - {"levels"}
    taken = (
        {item.name: options[item.name] for item in fields(plan) if item.name in options} if is_dataclass(plan) else {}
    )
    others = {name: value for name, value in options.items() if name not in loose or name == "seed"}
    return ITS(model, levels, search=replace(plan, **taken) if taken else plan, **others)


def ungated(model, *args, **options) -> ITS:
    """The wrapper without its cautious gate: what the search itself finds."""
    return its(model, *args, **{"gate": None, **options})


def exact(t: float) -> Tensor:
    """A parameter in double precision."""
    return torch.tensor(t, dtype=torch.float64)


def ready(**options) -> ITS:
    """A wrapped network that searches quickly."""
    return its(TinyNet(), **{"samples": 5, **options})


def same(first: SearchResult, second: SearchResult) -> None:
    """Assert that two results tell the same story."""
    assert torch.equal(first.labels, second.labels)
    assert torch.equal(first.views, second.views)
    assert torch.equal(first.hypotheses.active, second.hypotheses.active)
    active = first.hypotheses.active
    assert_close(first.pose, second.pose, rtol=0, atol=1e-5)
    assert_close(first.logits, second.logits, rtol=1e-4, atol=1e-4)
    assert_close(first.hypotheses.pose[active], second.hypotheses.pose[active], rtol=0, atol=1e-5)
    assert_close(first.hypotheses.confidence[active], second.hypotheses.confidence[active], rtol=1e-3, atol=1e-2)
    assert len(first.trace) == len(second.trace)
    for one, other in zip(first.trace, second.trace, strict=True):
        assert torch.equal(one.chosen, other.chosen)
        assert torch.equal(one.labels[one.active], other.labels[one.active])


WHOLE = {head: ("FEWEST_STEPS", head.FEWEST_STEPS), proposals: ("FEWEST_STEPS", proposals.FEWEST_STEPS)}
SHORT = 60  # steps


def shorten_fits() -> None:
    """Have heads and proposals trained for a few steps only."""
    for module, (name, _) in WHOLE.items():
        setattr(module, name, SHORT)


@contextmanager
def whole_fits() -> Iterator[None]:
    """Have fits be as long as a user's, for tests of how good they are."""
    with ExitStack() as stack:
        for module, (name, steps) in WHOLE.items():
            stack.enter_context(mock.patch.object(module, name, steps))
        yield

"""RotDCF (Cheng et al. 2018) over p8: filters are few coefficients in a basis that turns by any angle.

In the plane the basis is Fourier–Bessel, J_m(z r)·cos(mφ) and J_m(z r)·sin(mφ), cut off at a low frequency z; on the
eight rotations it is a short Fourier series. To turn a filter by α is to shift its phase by m·α: no interpolation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from headtilt.errors import OptionError
from headtilt.paper.baselines.gcnn import EquivariantCNN, final_size, group_convolve, lift, uniform

ROTATIONS = 8


class DCFLift(nn.Module):
    """Convolution of images (B, C, H, W) with eight turns of each filter: (B, O, 8, H', W')."""

    plane: Tensor

    def __init__(self, inputs: int, outputs: int, kernel: int, *, terms: int = 8) -> None:
        super().__init__()
        self.coefficients = nn.Parameter(uniform(outputs, inputs, terms))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.register_buffer("plane", plane_basis(kernel, terms).float(), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the lifted feature maps."""
        return lift(images, torch.einsum("oct,rtij->rocij", self.coefficients, self.plane), self.bias)


class DCFGroupConv(nn.Module):
    """Convolution of feature maps (B, I, 8, H, W) over space and rotation: (B, O, 8, H', W')."""

    plane: Tensor
    circle: Tensor

    def __init__(self, inputs: int, outputs: int, kernel: int, *, terms: int = 8, harmonics: int = 5) -> None:
        super().__init__()
        self.coefficients = nn.Parameter(uniform(outputs, inputs, terms, harmonics))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.register_buffer("plane", plane_basis(kernel, terms).float(), persistent=False)
        self.register_buffer("circle", circle_basis(harmonics).float(), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return the next feature maps."""
        filters = torch.einsum("octh,rtij,rhs->rocsij", self.coefficients, self.plane, self.circle)
        return group_convolve(features, filters, self.bias)


class RotDCF(EquivariantCNN):
    """The paper's small network with p8 convolutions of decomposed filters.

    Its logits are the same for an image and its quarter turns, and nearly so for its eighth turns. Pooling takes means,
    which commute with turns off the pixel grid better than maxima do.

    Args:
        classes: Count of classes.
        channels: Channels of the images.
        size: Height and width of the images.
        hidden: Width of the last hidden layer.
    """

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 28, hidden: int = 32) -> None:
        layers = (
            DCFLift(channels, 4, 5),
            DCFGroupConv(4, 8, 5),
            DCFGroupConv(8, 8, 5),
            DCFGroupConv(8, hidden, final_size(size), terms=5),
        )
        super().__init__(layers, "mean", classes=classes, channels=channels, size=size, hidden=hidden)


def plane_basis(kernel: int, terms: int) -> Tensor:
    """Return the Fourier–Bessel functions of the lowest frequencies in all eight turns, (8, terms, k, k); float64.

    The unit disc reaches one pixel beyond the kernel's edge, so that the functions, which end in zero there, do not
    waste the outer ring of pixels. The norm of each pair of cosine and sine is 1 on average, and the same for both,
    which a turn mixes.
    """
    steps = (torch.arange(kernel, dtype=torch.float64) - (kernel - 1) / 2) / ((kernel + 1) / 2)
    y, x = torch.meshgrid(-steps, steps, indexing="ij")
    radius, angle = torch.hypot(x, y), torch.atan2(y, x)
    turns = torch.arange(ROTATIONS, dtype=torch.float64)[:, None, None] * (2 * math.pi / ROTATIONS)
    functions = []
    for order, zero in frequencies(terms):
        radial = torch.where(radius < 1, bessel(order, zero * radius), 0.0)
        phase = order * (angle - turns)
        pair = [radial * phase.cos(), radial * phase.sin()] if order else [radial.expand_as(phase)]
        norm = torch.stack([one[0].square().sum() for one in pair]).mean().sqrt()
        functions += [one / norm for one in pair]
    return torch.stack(functions, dim=1)


def circle_basis(harmonics: int) -> Tensor:
    """Return 1, cos β, sin β, cos 2β, … on the rotations, as seen from each of them, (8, harmonics, 8); float64."""
    if harmonics not in (1, 3, 5, 7):
        raise OptionError(f"harmonics must be 1, 3, 5 or 7 (1 and pairs of cosine and sine); got {harmonics!r}.")
    index = torch.arange(ROTATIONS, dtype=torch.float64)
    beta = (index[None, :] - index[:, None]) * (2 * math.pi / ROTATIONS)
    series = [torch.full_like(beta, 1 / math.sqrt(ROTATIONS))]
    for order in range(1, harmonics // 2 + 1):
        series += [(order * beta).cos() / math.sqrt(ROTATIONS / 2), (order * beta).sin() / math.sqrt(ROTATIONS / 2)]
    return torch.stack(series, dim=1)


def frequencies(terms: int) -> list[tuple[int, float]]:
    """Return the orders m and zeros z of J_m, lowest z first, that give `terms` functions (one for m = 0, else two)."""
    zeros = sorted((zero, order) for order in range(9) for zero in bessel_zeros(order))
    chosen: list[tuple[int, float]] = []
    counts = [0]
    for zero, order in zeros:
        if counts[-1] >= terms:
            break
        chosen.append((order, zero))
        counts.append(counts[-1] + (2 if order else 1))
    if counts[-1] != terms:
        raise OptionError(f"terms must keep pairs of cosine and sine whole: {counts[1:]} do; got {terms!r}.")
    return chosen


def bessel(order: int, x: Tensor) -> Tensor:
    """Return the Bessel function J_m of x (…), float64, from its integral; the midpoint rule converges at once here."""
    nodes = (torch.arange(64, dtype=torch.float64) + 0.5) * (math.pi / 64)
    return (order * nodes - x[..., None] * nodes.sin()).cos().mean(-1)


def bessel_zeros(order: int, limit: float = 12.0) -> list[float]:
    """Return the zeros of J_m above 0 and up to `limit`, ascending."""
    # J_m has no zero below m (m > 0), and starts there with tiny values whose signs are noise.
    grid = torch.arange(max(order, 1), limit, 0.1, dtype=torch.float64)
    change = bessel(order, grid).sign().diff().nonzero().flatten()
    low, high = grid[change], grid[change + 1]
    for _ in range(50):
        middle = (low + high) / 2
        left = bessel(order, low).sign() != bessel(order, middle).sign()
        low, high = torch.where(left, low, middle), torch.where(left, middle, high)
    return [float(zero) for zero in low]

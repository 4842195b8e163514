"""One-parameter subgroups of the affine group, finite groups, coordinates in their product, affine matrices in parts.

Convention:
    A matrix moves image *content*. Coordinates are isotropic and centred: x points right, y points down, and the longer
    side of the image spans [−1, 1]. A positive rotation turns the content clockwise on the screen. Angles are radians.
    "a, then b" is the matrix product ``b @ a``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from headtilt.errors import OptionError, ShapeError, at_least, number, one_of

Algebra = tuple[tuple[float, float, float], tuple[float, float, float], tuple[float, float, float]]
ZERO: Algebra = ((0, 0, 0), (0, 0, 0), (0, 0, 0))
NEGATIVE: Algebra = ((-1, 0, 0), (0, -1, 0), (0, 0, -1))


@dataclass(frozen=True)
class OneParameterGroup:
    """The matrices exp(t·A) for t between `low` and `high`.

    Attributes:
        name: What `describe` and the plots call it.
        algebra: The 3×3 matrix A that generates the group.
        low: Smallest parameter of the grid.
        high: Largest parameter of the grid.
        periodic: Whether the group closes on itself after `high − low`; the grid then drops its end point and wraps.
        spacing: Whether grid points are even in t, or in the factor e^t (the paper's scale grid).
    """

    name: str
    algebra: Algebra
    low: float
    high: float
    periodic: bool = False
    spacing: Literal["even", "factor"] = "even"

    def __post_init__(self) -> None:
        for field, kind in (("name", str), ("periodic", bool)):
            if not isinstance(getattr(self, field), kind):
                raise OptionError(f"{field} of a group must be a {kind.__name__}; got {getattr(self, field)!r}.")
        one_of("spacing", self.spacing, ("even", "factor"))
        for end in ("low", "high"):
            object.__setattr__(self, end, number(f"{end} of {self.name}", getattr(self, end)))
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < 0 < self.high):
            raise OptionError(
                f"{self.name} must cover a finite range around 0; got [{self.low}, {self.high}]. "
                "Give a range above 0 (for scale also below 1)."
            )

    @property
    def reach(self) -> float:
        """Largest distance of a parameter from the identity."""
        return max(-self.low, self.high)

    def matrix(self, t: Tensor | float) -> Tensor:
        """Return exp(t·A) as (…, 3, 3) for t of any shape, in t's dtype and on its device."""
        t = torch.as_tensor(t)
        exact = torch.float32 if t.device.type == "mps" else torch.float64
        matrices = _exponential(t.to(exact)[..., None, None], self.algebra)
        return matrices.to(t.dtype if t.is_floating_point() else torch.get_default_dtype())

    def inverse(self, t: Tensor | float) -> Tensor:
        """Return the inverse of `matrix(t)`, which is `matrix(−t)`."""
        return self.matrix(-torch.as_tensor(t))

    def check_samples(self, n: int, name: str = "samples") -> None:
        """Raise `OptionError` unless a grid of n samples exists that holds the identity."""
        at_least(name, n, 1)
        if n % 2 == 0 and not self.periodic:
            raise OptionError(
                f"{name} must be odd for {self.name}, so that the grid holds the identity; got {n}. Use {n + 1}."
            )

    def grid(self, n: int) -> Tensor:
        """Return n parameters (n,), ascending, with the identity at index n // 2; float64.

        A periodic group gives n points of the whole turn without its end point; n may then be even.
        """
        self.check_samples(n, "n")
        steps = torch.arange(n, dtype=torch.float64) - n // 2
        if self.periodic:
            return steps * ((self.high - self.low) / n)
        fraction = steps / max(n // 2, 1)
        if self.spacing == "factor":
            return torch.log1p(fraction * math.expm1(self.high))
        return torch.where(fraction < 0, -fraction * self.low, fraction * self.high)

    def generator(self, n: int) -> Tensor:
        """Return ĝ (3, 3), the step of the grid of n samples; for uneven grids the first step from the identity."""
        return self.matrix(torch.tensor(self.step(n), dtype=torch.float64))

    def step(self, n: int) -> float:
        """Return the parameter of `generator(n)`: that of the first sample after the identity."""
        if n < 3:
            raise OptionError(f"n must be at least 3 for {self.name} to have a generating step; got {n}.")
        if self.periodic:
            return (self.high - self.low) / n
        return math.log1p(math.expm1(self.high) / (n // 2)) if self.spacing == "factor" else self.high / (n // 2)

    def orbit(self, n: int) -> Tensor:
        """Return the n matrices of the grid as (n, 3, 3), float64."""
        return self.matrix(self.grid(n))

    def paper(self) -> OneParameterGroup:
        """Return this group with the paper's grid: end points kept, never wrapped, scale factors 1 + s evenly spaced.

        The paper's scale grid 1 ± s does not hold its own inverses; it is here to reproduce, not to use.
        """
        if self.name == "scale":
            return replace(self, high=math.log(2 - math.exp(self.low)), spacing="factor")
        return replace(self, periodic=False)


@dataclass(frozen=True)
class FiniteGroup:
    """Four elements, each named by its index, the identity first; see `reflection` and `quarter_turns`.

    Attributes:
        name: What `describe` and the plots call it.
        elements: The linear part ((a, b), (c, d)) of each; all are orthogonal and keep square images on their pixels.
        periodic: Never; there is nothing between the elements.
    """

    name: str
    elements: tuple[tuple[int, int, int, int], ...]
    periodic: bool = False

    def matrix(self, t: Tensor | float) -> Tensor:
        """Return the matrix (…, 3, 3) of each index in t."""
        t = torch.as_tensor(t)
        index = t.round().long() if t.is_floating_point() else t.long()
        if not torch.compiler.is_compiling() and bool(((index < 0) | (index > 3)).any()):
            raise OptionError(f"t must be 0, 1, 2 or 3 for {self.name}, which has four elements.")
        rows = [[[a, b, 0], [c, d, 0], [0, 0, 1]] for a, b, c, d in self.elements]
        dtype = t.dtype if t.is_floating_point() else torch.get_default_dtype()
        return torch.tensor(rows, dtype=dtype, device=t.device)[index]

    def inverse(self, t: Tensor | float) -> Tensor:
        """Return the inverse of each element: its transpose."""
        return self.matrix(t).mT

    def check_samples(self, n: int, name: str = "samples") -> None:
        """Accept any count of at least one: the group always has its four elements."""
        at_least(name, n, 1)

    def grid(self, n: int = 4) -> Tensor:
        """Return the four indices (4,), whatever n is, identity first; float64."""
        self.check_samples(n, "n")
        return torch.arange(4, dtype=torch.float64)

    def orbit(self, n: int = 4) -> Tensor:
        """Return the four matrices (4, 3, 3), float64."""
        return self.matrix(self.grid(n))

    def paper(self) -> FiniteGroup:
        """Return the group itself: it has one grid only."""
        return self


Group = OneParameterGroup | FiniteGroup


def identity_index(group: Group, n: int) -> int:
    """Return where `group.grid(n)` holds the identity."""
    return 0 if isinstance(group, FiniteGroup) else n // 2


def rotation(limit: float = math.pi) -> OneParameterGroup:
    """Return the rotations about the centre within ±limit radians; the full turn (the default) is periodic."""
    reach = number("limit", limit)
    if not 0 < reach <= math.pi:
        raise OptionError(f"limit must lie in (0, π] radians; got {limit!r}. For degrees use math.radians(...).")
    algebra: Algebra = ((0, -1, 0), (1, 0, 0), (0, 0, 0))
    return OneParameterGroup("rotation", algebra, -reach, reach, periodic=reach == math.pi)


def scale(s: float = 0.25) -> OneParameterGroup:
    """Return the isotropic scalings by factors from 1 − s to 1/(1 − s), which hold the inverses of 1 ± s."""
    if not 0 < number("s", s) < 1:
        raise OptionError(f"s must lie between 0 and 1 for scale; got {s!r}.")
    return _symmetric("scale", ((1, 0, 0), (0, 1, 0), (0, 0, 0)), -math.log1p(-s))


def shear(s: float = 0.25, direction: float = 0.0) -> OneParameterGroup:
    """Return the shears by up to ±s along a direction.

    Convention:
        The direction is an angle in radians, clockwise from x. A positive shear along x moves the lower half of
        the image to the right.
    """
    x, y = _direction(direction)
    return _symmetric("shear", ((-x * y, x * x, 0), (-y * y, x * y, 0), (0, 0, 0)), s)


def shear_x(s: float = 0.25) -> OneParameterGroup:
    """Return the horizontal shears x → x + t·y with t up to ±s."""
    return _symmetric("shear_x", ((0, 1, 0), (0, 0, 0), (0, 0, 0)), s)


def shear_y(s: float = 0.25) -> OneParameterGroup:
    """Return the vertical shears y → y + t·x with t up to ±s."""
    return _symmetric("shear_y", ((0, 0, 0), (1, 0, 0), (0, 0, 0)), s)


def translate(t: float = 0.25, direction: float = 0.0) -> OneParameterGroup:
    """Return the shifts by up to ±t along a direction (radians, clockwise from x); 1 is half of the longer side."""
    x, y = _direction(direction)
    return _symmetric("translate", ((0, 0, x), (0, 0, y), (0, 0, 0)), t)


def translate_x(t: float = 0.25) -> OneParameterGroup:
    """Return the horizontal shifts by up to ±t, to the right where positive; 1 is half of the longer side."""
    return _symmetric("translate_x", ((0, 0, 1), (0, 0, 0), (0, 0, 0)), t)


def translate_y(t: float = 0.25) -> OneParameterGroup:
    """Return the vertical shifts by up to ±t, downwards where positive; 1 is half of the longer side."""
    return _symmetric("translate_y", ((0, 0, 0), (0, 0, 1), (0, 0, 0)), t)


def reflection() -> FiniteGroup:
    """Return the finite group of flips: identity, horizontal (left and right swapped), vertical, both."""
    return FiniteGroup("reflection", ((1, 0, 0, 1), (-1, 0, 0, 1), (1, 0, 0, -1), (-1, 0, 0, -1)))


def quarter_turns() -> FiniteGroup:
    """Return the finite group of rotations by 0°, 90°, 180° and 270° clockwise: how pages lie in a scanner."""
    return FiniteGroup("quarter_turns", ((1, 0, 0, 1), (0, -1, 1, 0), (-1, 0, 0, -1), (0, 1, -1, 0)))


def matrices(levels: Sequence[Group], coordinates: Tensor) -> Tensor:
    """Return the poses (…, 3, 3) of coordinates (…, L): the first level done first."""
    pose = levels[0].matrix(coordinates[..., 0])
    for place, group in enumerate(levels[1:], start=1):
        pose = group.matrix(coordinates[..., place]) @ pose
    return pose


def wrap(levels: Sequence[Group], coordinates: Tensor) -> Tensor:
    """Return the coordinates (…, L) brought back into the groups' ranges: wrapped where periodic, clamped elsewhere."""
    columns = []
    for place, group in enumerate(levels):
        t = coordinates[..., place]
        if isinstance(group, FiniteGroup):
            t = t.round() % 4
        elif group.periodic:
            t = (t - group.low) % (group.high - group.low) + group.low
        else:
            t = t.clamp(group.low, group.high)
        columns.append(t)
    return torch.stack(columns, dim=-1)


def shortest_difference(levels: Sequence[Group], apart: Tensor) -> Tensor:
    """Return differences of coordinates (…, L) by the shorter way round; elements of finite groups have no mean."""
    columns = []
    for place, group in enumerate(levels):
        difference = apart[..., place]
        if isinstance(group, FiniteGroup):
            difference = torch.zeros_like(difference)
        elif group.periodic:
            turn = group.high - group.low
            difference = (difference + turn / 2) % turn - turn / 2
        columns.append(difference)
    return torch.stack(columns, dim=-1)


def compose(*matrices: Tensor) -> Tensor:
    """Return the matrix that does the first argument, then the second, and so on: ``… @ second @ first``."""
    if not matrices:
        raise OptionError("compose needs at least one matrix.")
    result = matrices[0]
    for matrix in matrices[1:]:
        result = matrix @ result
    return result


def _exponential(t: Tensor, algebra: Algebra) -> Tensor:
    """Return exp(t·A) for t (…, 1, 1), in closed form where A allows it, which any runtime can do."""
    once = torch.tensor(algebra, dtype=t.dtype).to(t.device, non_blocking=True)
    identity = torch.eye(3, dtype=t.dtype, device=t.device)
    square = _product(algebra, algebra)
    if _alike(square, ZERO):  # shears and shifts
        return identity + t * once
    if _alike(square, algebra):  # scales
        return identity + torch.expm1(t) * once
    if _alike(_product(square, algebra), _product(algebra, NEGATIVE)):  # rotations
        twice = torch.tensor(square, dtype=t.dtype).to(t.device, non_blocking=True)
        # 1 − cos t from the half angle: exact near 0, and many an onnxruntime has no cosine in double precision.
        return identity + torch.sin(t) * once + 2 * torch.sin(t / 2).square() * twice
    return torch.matrix_exp(t * once)


def _product(a: Algebra, b: Algebra) -> Algebra:
    rows = [tuple(sum(a[row][k] * b[k][column] for k in range(3)) for column in range(3)) for row in range(3)]
    return cast(Algebra, tuple(rows))


def _alike(a: Algebra, b: Algebra) -> bool:
    return all(
        abs(x - y) < 1e-12 for first, second in zip(a, b, strict=True) for x, y in zip(first, second, strict=True)
    )


def _symmetric(name: str, algebra: Algebra, reach: float) -> OneParameterGroup:
    reach = number(f"the range of {name}", reach)
    return OneParameterGroup(name, algebra, -reach, reach)


def _direction(angle: float) -> tuple[float, float]:
    if not math.isfinite(number("direction", angle)):
        raise OptionError(f"direction must be a finite angle in radians; got {angle!r}.")
    return math.cos(angle), math.sin(angle)


@dataclass(frozen=True)
class Decomposition:
    """An affine matrix as translation · rotation · reflection · scale · stretch · shear, applied from the right.

    Attributes:
        translation: (…, 2), in units of half the longer side.
        rotation: (…), radians, clockwise positive, in (−π, π].
        reflection: (…), bool; whether left and right are swapped (a vertical flip is this and half a turn).
        scale: (…), the isotropic factor √|det|.
        stretch: (…), the factor k of diag(k, 1/k); 1 keeps proportions.
        shear: (…), the horizontal shear.
    """

    translation: Tensor
    rotation: Tensor
    reflection: Tensor
    scale: Tensor
    stretch: Tensor
    shear: Tensor

    def matrix(self) -> Tensor:
        """Return the (…, 3, 3) matrix put together again."""
        cos, sin = self.rotation.cos(), self.rotation.sin()
        flip = torch.where(self.reflection, -1.0, 1.0).to(cos.dtype)
        width, height = self.scale * self.stretch, self.scale / self.stretch
        zero, one = torch.zeros_like(cos), torch.ones_like(cos)
        rows = [
            [flip * cos * width, flip * cos * width * self.shear - sin * height, self.translation[..., 0]],
            [flip * sin * width, flip * sin * width * self.shear + cos * height, self.translation[..., 1]],
            [zero, zero, one],
        ]
        return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)

    def describe(self, index: int | tuple[int, ...] = ()) -> str:
        """Return the parts of one matrix that differ from the identity, in words."""
        dx, dy = self.translation[index].tolist()
        degrees = math.degrees(float(self.rotation[index]))
        size, stretch, slant = (float(part[index]) for part in (self.scale, self.stretch, self.shear))
        parts = [
            (abs(degrees) >= 0.05, f"turned by {degrees:+.1f}°"),
            (bool(self.reflection[index]), "mirrored"),
            (abs(size - 1) >= 0.005, f"scale {size:.2f}"),
            (abs(stretch - 1) >= 0.005, f"stretch {stretch:.2f}"),
            (abs(slant) >= 0.005, f"shear {slant:+.2f}"),
            (max(abs(dx), abs(dy)) >= 0.005, f"shift ({dx:+.2f}, {dy:+.2f})"),
        ]
        return ", ".join(text for shown, text in parts if shown).replace("-", "−") or "upright"


def decompose(matrix: Tensor) -> Decomposition:
    """Return the six parameters (and the reflection) of invertible affine matrices (…, 3, 3).

    The linear part is factored as an orthogonal matrix times an upper triangle with a positive diagonal.
    """
    if matrix.shape[-2:] != (3, 3):
        raise ShapeError(f"matrix must be (…, 3, 3); got {tuple(matrix.shape)}.")
    a, b, c, d = matrix[..., 0, 0], matrix[..., 0, 1], matrix[..., 1, 0], matrix[..., 1, 1]
    determinant = a * d - b * c
    if bool((determinant == 0).any()):
        raise ShapeError("matrix must be invertible; one has determinant 0 and folds the image onto a line.")
    mirrored = determinant < 0
    width = torch.hypot(a, c)
    flip = torch.where(mirrored, -1.0, 1.0).to(matrix.dtype)
    rotation = torch.atan2(flip * c, flip * a)
    return Decomposition(
        translation=matrix[..., :2, 2],
        # Half a turn is π, also where the sine is −0.0.
        rotation=torch.where(rotation <= -math.pi, -rotation, rotation),
        reflection=mirrored,
        scale=determinant.abs().sqrt(),
        stretch=width / determinant.abs().sqrt(),
        shear=(a * b + c * d) / width**2,
    )


def check_levels(levels: Sequence[Group], samples: int) -> None:
    """Raise unless `levels` is a non-empty sequence of groups that can all be sampled `samples` times."""
    if isinstance(levels, str):
        raise OptionError(f"levels must be a list of groups and not their names; got {levels!r}. Say [rotation()].")
    if isinstance(levels, dict):
        raise OptionError("levels must be a list of groups; got a dict. Unpack a preset: ITS(model, **accurate()).")
    if not isinstance(levels, Sequence) or not levels:
        raise OptionError("levels must be a non-empty list of groups, for example [rotation(), scale(0.25)].")
    for level in levels:
        if callable(level) and hasattr(level, "__name__"):
            name = level.__name__
            raise OptionError(f"levels must hold groups; got the function {name}. Call it: {name}().")
        if not isinstance(level, (OneParameterGroup, FiniteGroup)):
            raise OptionError(f"levels must hold groups such as rotation(); got {type(level).__name__}: {level!r}.")
        level.check_samples(samples)

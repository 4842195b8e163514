"""Upright copies of image files, at their own resolution and in their own format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headtilt.apps.contact_sheet import FAILED, LEFT, TURNED, Cell
from headtilt.apps.rows import Row, answers
from headtilt.apps.upright_copy import Written, write_upright
from headtilt.calibration.fitter import FEWEST_FOR_HEAD
from headtilt.calibration.head import OrbitHead
from headtilt.errors import DataError, OptionError
from headtilt.its import ITS
from headtilt.sources.images import Survey

if TYPE_CHECKING:
    from headtilt.sources.pretrained import Pretrained


def targets(found: Survey, out: Path) -> dict[Path, Path]:
    """Return where the copy of each file goes: beneath `out` as beneath its folder, or by name; never two to one place.

    Files that already lie beneath `out` are left out, so that copies are not copied again.
    """
    places: dict[Path, Path] = {}
    taken: set[Path] = set()
    for path in found.paths:
        if out.resolve() in path.resolve().parents and path in found.roots:
            continue
        root = found.roots.get(path)
        wanted = out / (path.name if root is None else path.relative_to(root))
        place, number = wanted, 2
        while place in taken:
            place, number = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}"), number + 1
        taken.add(place)
        places[path] = place
    return places


def check_fitted(robust: ITS, *, unfitted: bool) -> None:
    """Raise `OptionError` where nothing tells how sure a pose is, unless that is wanted."""
    if unfitted or isinstance(robust.calibrator, OrbitHead):
        return
    held, images = robust.report.get("method"), robust.report.get("images")
    this = "" if held is None else f" (this one holds a {held}, fitted on {images} images)"
    raise OptionError(
        f"canonicalise needs a bundle with a fitted head{this}. Without a head, the search also turns upright images, "
        f"and nothing says how sure a pose is. Fit one on {FEWEST_FOR_HEAD} upright images or more: "
        "headtilt fit FOLDER --model SPEC --out BUNDLE. Then add --bundle BUNDLE. Or add --unfitted, and check the "
        "contact sheet."
    )


@dataclass(frozen=True)
class Copy:
    """What became of a file.

    Attributes:
        row: What is said of the image; its error where there is no copy.
        source: The file.
        written: The copy; None where there is none.
        confidence: How probable the pose is by a fitted head; None where no head tells.
    """

    row: Row
    source: Path
    written: Written | None = None
    confidence: float | None = None

    @property
    def turned(self) -> bool:
        """Whether the image was found tilted, and turned back."""
        return self.written is not None and self.written.how != "copied"

    def words(self) -> str:
        """Return what was done: "turned back by −90°, angle 97 % probable".

        The gate was sure that the image is tilted; the probability is that of the angle.
        """
        if self.written is None:
            return "failed"
        if not self.turned:
            return "left as it came"
        back = f"{-self.written.degrees:+.0f}°".replace("-", "−").replace("+0°", "0°")
        sure = "unfitted" if self.confidence is None else f"angle {self.confidence:.0%} probable"
        return f"turned back by {back}, {sure}".replace("%", " %")

    def as_dict(self) -> dict[str, Any]:
        """Return it as a row of JSON: that of the image, and what was done."""
        written = self.written
        return {
            **self.row.as_dict(),
            "out": None if written is None else str(written.path),
            "how": None if written is None else written.how,
            "turned_back_deg": None if written is None else -written.degrees,
            "pose_confidence": self.confidence,
        }

    def cell(self) -> Cell:
        """Return it as a cell of a contact sheet."""
        colour = FAILED if self.written is None else TURNED if self.turned else LEFT
        return Cell(self.source, None if self.written is None else self.written.path, self.words(), colour)


def copies(
    robust: Pretrained,
    places: dict[Path, Path],
    *,
    batch: int = 32,
    min_confidence: float = 0.0,
    force: bool = False,
    tag_only: bool = False,
) -> Iterator[Copy]:
    """Yield what became of each file, in order; one that fails gets its error and the others go on.

    Args:
        robust: Who says how images lie.
        places: Where the copy of each file goes.
        batch: Images per search.
        min_confidence: Images whose pose is less probable than that stay as they came.
        force: Whether files that are there already may be replaced.
        tag_only: See `write_upright`.
    """
    for answer, (source, target) in zip(
        answers(robust, robust.adapted, places, batch=batch), places.items(), strict=True
    ):
        row, written = answer.row, None
        if answer.pose is not None:
            try:
                doubted = answer.confidence is not None and answer.confidence < min_confidence
                pose = torch.eye(3) if doubted else answer.pose
                written = write_upright(source, target, pose, force=force, tag_only=tag_only)
            except (DataError, OSError) as error:
                row = replace(row, error=str(error))
        yield Copy(row, source, written, answer.confidence)

"""Which padding suits a model: each is tried on tilted images whose upright answers are known."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headtilt.errors import ShapeError
from headtilt.geometry.warp import (
    PADDING_WORDS,
    Interpolation,
    Padding,
    around,
    centre_crop,
    check_images,
    invert,
    warp,
)
from headtilt.model.outputs import check_finite, two_classes

AT_ONCE = 64  # images in one pass
TIE = 0.002  # a difference of answers that no one would notice


def choose_padding(
    ask: Callable[[Tensor], Tensor],
    images: Tensor,
    tilts: Tensor,
    *,
    crop: int | None = None,
    interpolation: Interpolation = "bilinear",
) -> tuple[Padding, dict[str, float]]:
    """Return the padding that disturbs a model least, and each candidate's score; less is better. No label is needed.

    The images are tilted, and the tilt is undone with each padding. The score is how far the model's answer is then
    from its answer to the upright image: the total variation, in [0, 1], between the two distributions over classes,
    on average. (Their divergence is without bound, and a single image could decide.) Another padding than "auto" has
    to be better by more than `TIE`, and by more than two standard errors of the difference over the images.

    Args:
        ask: From images (n, C, H, W) to logits (n, Y); never more than `AT_ONCE` images.
        images: (B, C, H, W), upright.
        tilts: (B, 3, 3), or a multiple of B: tilt n is for image n modulo B. In coordinates of what the model sees.
        crop: Side of the centre square that the model sees, where images are larger: then a tilt brings in more of the
            image, and nothing made up.
        interpolation: See `warp`.
    """
    check_images(images)
    if tilts.ndim != 3 or tilts.shape[1:] != (3, 3) or not len(tilts) or len(tilts) % len(images):
        raise ShapeError(f"tilts must be ({len(images)}, 3, 3), or a multiple of as many; got {tuple(tilts.shape)}.")
    shifts = torch.cat(
        [
            _shifts(ask, images[rows], tilts[rows + turn * len(images)], crop, interpolation)
            for turn in range(len(tilts) // len(images))
            for rows in torch.arange(len(images)).split(AT_ONCE)
        ]
    )
    each = shifts.reshape(-1, len(images), len(PADDING_WORDS)).mean(0)  # tilts of one image are not independent
    scores = dict(zip(PADDING_WORDS, each.mean(0).tolist(), strict=True))
    return _least(each), scores


def _shifts(
    ask: Callable[[Tensor], Tensor], images: Tensor, tilts: Tensor, crop: int | None, interpolation: Interpolation
) -> Tensor:
    """Return how far the answers to images (n, C, H, W) move under tilts (n, 3, 3) undone with each padding: (n, 4)."""
    upright = _answers(ask, centre_crop(images, crop))
    # What lies around an image that a user brings is not known. "auto" is the best guess at it: a plain background
    # continues, a scene is mirrored. It is the same for all candidates: if each used its own, they would be compared on
    # different images. With "zeros", photographs would come with corners that say where up is.
    whole = around(tilts, 1.0 if crop is None else crop / max(images.shape[-2:]))
    tilted = centre_crop(warp(images, whole, padding="auto", interpolation=interpolation), crop)
    back = invert(tilts)
    answers = [_answers(ask, warp(tilted, back, padding=word, interpolation=interpolation)) for word in PADDING_WORDS]
    return torch.stack([(answer - upright).abs().sum(1) / 2 for answer in answers], dim=1)


def _answers(ask: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Return the distribution over classes (n, Y) for images, in double precision on the CPU."""
    with torch.no_grad():
        logits = two_classes(ask(images)).double().cpu()
    check_finite(logits)
    return logits.softmax(dim=1)


def _least(each: Tensor) -> Padding:
    """Return the word with the least mean of (B, 4), or "auto" where it is as good but for chance or a trifle."""
    best = int(each.mean(0).argmin())
    gain = each[:, PADDING_WORDS.index("auto")] - each[:, best]
    chance = 2 * gain.std(correction=1) / len(gain) ** 0.5 if len(gain) > 1 else gain.new_tensor(torch.inf)
    return PADDING_WORDS[best] if float(gain.mean()) > max(TIE, float(chance)) else "auto"

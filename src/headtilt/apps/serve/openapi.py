"""What the service takes and returns, as its OpenAPI says it; needs the extra ``headtilt[serve]``."""

from __future__ import annotations

from typing import Any

from headtilt.errors import MissingExtraError

try:
    from pydantic import BaseModel, Field
except ImportError as error:
    raise MissingExtraError("fastapi", "serve") from error


class Guess(BaseModel):
    """A class and its probability."""

    label: str
    score: float = Field(ge=0, le=1)


class Answer(BaseModel):
    """What is said of an image."""

    label: str = Field(description="Name of the class, or its number where the model has no names.")
    score: float = Field(ge=0, le=1, description="Probability of that class.")
    rotation_deg: float = Field(description="By how much the image was found turned, clockwise.")
    scale: float = Field(description="By what factor it was found scaled.")
    shear: float = Field(description="By how much it was found sheared.")
    gated: bool = Field(description="Whether the gate kept the bare model's own answer.")
    views: int = Field(ge=1, description="How many views the model was shown.")
    top: list[Guess] | None = Field(None, description="The best labels, where more than one was asked for.")


class Rival(Guess):
    """A hypothesis of the final beam."""

    confidence: float | None
    rotation_deg: float
    scale: float
    shear: float


class Level(BaseModel):
    """What one step of the search saw."""

    groups: list[str] = Field(description="What was searched.")
    parameters: list[list[float]] = Field(description="For each view, a number for each group; angles in radians.")
    confidence: list[float | None] = Field(description="For each view; null where it was not looked at.")
    labels: list[str | None] = Field(description="For each view, the class that the model saw.")


class Explanation(BaseModel):
    """How the answer came about."""

    words: str
    answer: Answer
    bare: Guess = Field(description="What the model says of the image as it came.")
    rivals: list[Rival]
    levels: list[Level]


class Health(BaseModel):
    """That the process lives."""

    status: str


class Ready(BaseModel):
    """Which model answers."""

    status: str
    model: str
    labels: list[str] | None


class Failure(BaseModel):
    """Why there is no answer."""

    error: str


REASONS = {
    400: "The request is addressed to another host, or says its length in two ways.",
    408: "The upload took too long.",
    413: "The body or the image is too large.",
    415: "The body is neither an image nor a form.",
    422: "The body holds no image that can be decoded.",
    503: "Too much is waiting, or the answer took too long; try again after Retry-After seconds.",
}


def failures(*statuses: int) -> dict[int | str, Any]:
    """Return how OpenAPI describes the replies of some statuses."""
    return {status: {"model": Failure, "description": REASONS[status]} for status in statuses}


def body_of() -> dict[str, Any]:
    """Return how OpenAPI describes the request: an image as the body, or as a file in a form."""
    binary = {"type": "string", "format": "binary"}
    form = {"type": "object", "properties": {"file": binary}, "required": ["file"]}
    kinds = ("image/png", "image/jpeg", "image/webp", "application/octet-stream")
    content = {kind: {"schema": binary} for kind in kinds}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}, **content}}}

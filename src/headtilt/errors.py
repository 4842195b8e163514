"""The few errors of the package: each message names the argument, what was expected, what came, and the fix."""

from __future__ import annotations

from collections.abc import Iterable


class HeadtiltError(Exception):
    """Base of every error that headtilt raises on purpose."""


class ShapeError(HeadtiltError, ValueError):
    """A tensor has the wrong rank, size or kind of values."""


class OptionError(HeadtiltError, ValueError):
    """An option has a value that means nothing."""


class ModelError(HeadtiltError, RuntimeError):
    """The wrapped model raised, or returned something that is not logits."""


class DataError(HeadtiltError, RuntimeError):
    """A file or data set is missing, broken or not what it says it is."""


class MissingExtraError(HeadtiltError, ImportError):
    """An optional dependency is needed; the message says what to install."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is needed here and is not installed. Install it with: pip install 'headtilt[{extra}]'"
        )


def one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raise `OptionError` unless `value` is one of the allowed words."""
    words = list(allowed)
    if value not in words:
        raise OptionError(f"{name} must be one of {', '.join(map(repr, words))}; got {value!r}.")


def at_least(name: str, value: object, least: int) -> None:
    """Raise `OptionError` unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name} must be a whole number of at least {least}; got {value!r}.")


def positive(name: str, value: object) -> None:
    """Raise `OptionError` unless `value` is a finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise OptionError(f"{name} must be a finite number above 0; got {value!r}.")

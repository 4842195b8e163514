"""The few errors of the package: each message names the argument, what was expected, what came, and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import TypeGuard


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
        self.package, self.extra = package, extra
        super().__init__(
            f"{package} is needed here and is not installed. Install it with: pip install 'headtilt[{extra}]'"
        )

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str]]:
        """Return what it is made of, so that it can be sent from one process to another."""
        return type(self), (self.package, self.extra)


def one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raise `OptionError` unless `value` is one of the allowed words."""
    words = list(allowed)
    if value not in words:
        raise OptionError(f"{name} must be one of {', '.join(map(repr, words))}; got {value!r}.")


def at_least(name: str, value: object, least: int) -> int:
    """Return `value` as an int; raise `OptionError` unless it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise OptionError(f"{name} must be a whole number of at least {least}; got {value!r}.")
    return int(value)


def positive(name: str, value: object) -> None:
    """Raise `OptionError` unless `value` is a finite number above zero."""
    if not is_number(value) or not 0 < float(value) < float("inf"):
        raise OptionError(f"{name} must be a finite number above 0; got {value!r}.")


def number(name: str, value: object) -> float:
    """Return `value` as a float; raise `OptionError` unless it is a real number (numpy's will do)."""
    if not is_number(value):
        raise OptionError(f"{name} must be a number; got {type(value).__name__}: {value!r}.")
    return float(value)


def checked_seed(value: object) -> int:
    """Return `value` as an int; raise `OptionError` unless it fits the 64 bits of torch's generators."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not -(2**63) <= int(value) < 2**64:
        raise OptionError(f"seed must be a whole number of at most 64 bits; got {value!r}.")
    return int(value)


def is_number(value: object) -> TypeGuard[Real]:
    """Return whether `value` is a real number that a float can hold; truth values are none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:  # whole numbers of hundreds of digits, which JSON can hold
        return False
    return True

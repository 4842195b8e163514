"""Where the corpus lies, and nothing left behind in the environment or in modules that a target stands in for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """Put the environment back, which some targets set."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)

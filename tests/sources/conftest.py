"""Models are opened as the command line does."""

from tests.cli.conftest import call, photographs

__all__ = ["call", "photographs"]

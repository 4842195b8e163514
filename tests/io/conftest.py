"""Files are written of what the tests of fitting fit."""

from tests.calibration.conftest import cache, digits_net, fitted, tilted, upright

__all__ = ["cache", "digits_net", "fitted", "tilted", "upright"]

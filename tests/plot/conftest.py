import pytest

from tests.toys import ungated

from .toys import LEVELS, network, pictures


@pytest.fixture(scope="module")
def robust():
    return ungated(network(), LEVELS, samples=9, confidence="energy")


@pytest.fixture(scope="module")
def result(robust):
    return robust.search(pictures())

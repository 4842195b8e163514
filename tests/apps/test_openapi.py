"""The service against its own OpenAPI, by schemathesis: whatever is sent, the reply is one that it promises."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("fastapi", reason="the extra serve is not installed")
schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
schemathesis.checks.load_all_checks()

from schemathesis.checks import CHECKS  # noqa: E402

from .test_serve import made  # noqa: E402

# Its OpenAPI cannot say which bytes are an image: bytes that it calls valid may well be refused, and it says with what.
NOT_SAYABLE = [CHECKS.get_one("positive_data_acceptance")]
OPERATIONS = [("/classify", "POST"), ("/explain", "POST"), ("/healthz", "GET"), ("/readyz", "GET"), ("/metrics", "GET")]


@pytest.fixture(scope="module")
def api():
    app, _ = made(hosts=("*",))
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def test_every_operation_is_asked(api):
    found = [result.ok() for result in api.get_all_operations()]
    assert sorted((operation.path, operation.method.upper()) for operation in found) == sorted(OPERATIONS)


ASKED = [(*operation, "positive") for operation in OPERATIONS]
ASKED += [(*operation, "negative") for operation in OPERATIONS if operation[1] == "POST"]  # others take nothing


@pytest.mark.parametrize(("path", "method", "mode"), ASKED)
def test_every_reply_is_one_that_the_openapi_promises(api, path, method, mode):
    replies = []

    @settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(case=api[path][method].as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def promised(case):
        response = case.call()
        replies.append(response.status_code)
        case.validate_response(response, excluded_checks=NOT_SAYABLE)

    promised()
    assert replies
    assert not any(status >= 500 for status in replies)

"""Our own OpenAPI document, made into requests by Schemathesis: never a 5xx.

Seeded and bounded; what is generated violates the schemas as often as it keeps them.
"""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.config import SchemathesisConfig

from .conftest import Demo

EXAMPLES = 200 if os.environ.get("PROFILE") == "long" else 12
SHORT = {"max_tokens": 2, "n": 1, "stream": False}  # what would only take time


@pytest.fixture(scope="module")
def described(demo: Demo) -> Any:
    """The document that the running server publishes."""
    with demo.http() as client:
        document = client.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions"} <= document["paths"].keys()
    return schemathesis.openapi.from_dict(document, config=SchemathesisConfig(seed=7))


@pytest.mark.timeout(900)
def test_no_request_makes_a_server_error(described: Any, demo: Demo) -> None:
    """Each operation of the document, so many times."""
    operations = [found.ok() for found in described.get_all_operations()]
    assert len(operations) > 8
    for operation in operations:
        _try(operation.as_strategy(), demo)


def _try(cases: Any, demo: Demo) -> None:
    @given(case=cases)
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):
            short = {k: v for k, v in SHORT.items() if k in case.body}
            case.body = {**case.body, **short}
        key = {"Authorization": f"Bearer {demo.key}"}
        reply = case.call(base_url=demo.url, headers=key, timeout=120)
        assert reply.status_code < 500, (case.body, reply.content[:400])
        assert httpx.get(demo.url + "/health").status_code == 200

    ask()

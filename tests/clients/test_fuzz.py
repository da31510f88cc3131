"""Our own OpenAPI document, made into requests by Schemathesis: never a 5xx.

Seeded and bounded; what is generated violates the schemas as often as it keeps them.
"""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.config import SchemathesisConfig
from schemathesis.core.transport import Response as Answer

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


schema = schemathesis.pytest.from_fixture("described")


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_makes_a_server_error(case: Any, demo: Demo) -> None:
    if isinstance(case.body, dict):
        case.body = {**case.body, **{k: v for k, v in SHORT.items() if k in case.body}}
    reply: Answer = case.call(
        base_url=demo.url, headers={"Authorization": f"Bearer {demo.key}"}, timeout=120
    )
    assert reply.status_code < 500, (case.body, reply.content[:400])
    assert httpx.get(demo.url + "/health").status_code == 200

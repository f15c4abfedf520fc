"""The description of the API is true: Schemathesis calls every operation with what the schema allows, and what not.

Each request goes to a service on SQLite and to one on PostgreSQL: most of the time is making requests up.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.core.failures import AcceptedNegativeData, Failure, FailureGroup
from schemathesis.python import asgi
from schemathesis.specs.openapi.checks import positive_data_acceptance

from rhyme_openrlhf.api.store.webhooks import MOST_WEBHOOKS
from tests.api.routes.wire_values import reads_right, valid

# Processor time: about a minute for all operations together, on both stores.
SECONDS = 60.0
EXAMPLES = 12
# Operations that refuse more than a wrong form: an event's fields, a missing directory, a viewer's token for one run.
# Every operation may refuse a cursor or a filter that was made up.
BY_MEANING = {
    "PUT /api/v1/ingest/attempts/{uid}",
    "POST /api/v1/ingest/attempts/{uid}/batches",
    "POST /api/v1/imports",
    # Arguments in the right form may still name no option, or lack one.
    "POST /api/v1/specs/command",
    # JSON of any form may hold what no database stores: NUL in a text, a number of more than 64 bits.
    "POST /api/v1/specs/validate",
    "POST /api/v1/tokens",
    # An address that has the right form may still name no host.
    "POST /api/v1/webhooks",
    "PATCH /api/v1/webhooks/{webhook_id}",
    "POST /api/v1/views",
}
# The numbers that webhooks with made-up addresses may have; 1 is the fixture's.
MADE_UP = range(2, MOST_WEBHOOKS + 1)
# Streams do not end by themselves; their tests read them over a socket.
STREAMS = r"stream|/live/"


@pytest.fixture
def services(record: Any, request: pytest.FixtureRequest, starts_postgresql: None) -> Iterator[list[Any]]:
    """Services with something in them, one a store, under the name that Schemathesis' in-process client uses."""
    stores = [""]
    try:
        stores.append(request.getfixturevalue("postgresql_url"))
    except pytest.skip.Exception as skipped:
        warnings.warn(f"on SQLite alone: {skipped}", stacklevel=1)
    # After the database, and so ended before it: their loops would log that it has gone.
    make_api = request.getfixturevalue("make_api")
    found = []
    for store in stores:
        api = make_api(allowed_hosts="testserver", database=store)
        api.announce()
        api.send(record())
        api.operator.post("/api/v1/experiments", json={"name": "ablation"})
        # Nobody listens there.
        hook = {"name": "team", "url": "http://127.0.0.1:9/", "events": ["failed"]}
        api.operator.post("/api/v1/webhooks", json=hook)
        found.append(api)
    yield found
    # Schemathesis starts each service once more, and would end it with this process.
    asgi.shutdown_lifespans()


@pytest.fixture
def described(services: list[Any]) -> Any:
    """The schema as the service serves it."""
    return schemathesis.openapi.from_asgi("/api/v1/openapi.json", services[0].app, headers=signed_in(services[0]))


def signed_in(api: Any) -> dict[str, str]:
    return {"Authorization": f"Bearer {api.tokens['operator']}"}


def accepted_rightly(failed: Failure | FailureGroup, case: Any, api: Any) -> bool:
    """Whether all that failed is that a query was accepted which is wrong no more when it has arrived."""
    found = failed.exceptions if isinstance(failed, FailureGroup) else [failed]
    if not all(isinstance(one, AcceptedNegativeData) for one in found) or case.path_parameters or case.operation.body:
        return False
    document = api.app.openapi()
    operation = document["paths"][case.operation.path][case.operation.method.lower()]
    sent = case.call(app=api.app, headers=signed_in(api))
    return reads_right(str(sent.request.url), operation.get("parameters", []), document)


def test_what_arrives_is_judged_as_the_service_judges_it(api: Any) -> None:
    document = api.app.openapi()
    parameters = document["paths"]["/api/v1/runs"]["get"]["parameters"]
    right = [
        "",
        "limit=5&text=5&created_from=1.5&sort=name",
        "limit=%205&status=running&tag=1&tag=x",
        "experiment=",
    ]
    wrong = [
        "limit=0",
        "limit=many",
        "limit=5&limit=0",
        "status=running&status=walking",
        "tag=",
        "archived=7",
        "experiment=&x=y",
    ]
    for query in [*right, *wrong, "created_from=-1"]:
        assert reads_right(f"http://x/?{query}", parameters, document) == (query in right), query
        assert (api.operator.get(f"/api/v1/runs?{query}").status_code == 200) == (query in right), query


# Names of curves that the service may take or refuse.
CURVE_NAMES = ("reward", ",reward,,loss,", "a\n", "", ",", ",,", "a\x00", ",".join(map(str, range(32))), "a,b," * 40)


def test_names_of_curves_are_taken_as_described(api: Any, record: Any) -> None:
    """The test below once made up ",", which the service refused and the description allowed.

    Hypothesis takes some texts from constants of loaded modules. What the test makes up depends on the tests before it,
    in spite of its fixed seed.
    """
    api.announce()
    api.send(record())
    uid = "a" * 16
    parameters = api.app.openapi()["paths"]["/api/v1/runs/{uid}/series"]["get"]["parameters"]
    (schema,) = (one["schema"] for one in parameters if one["name"] == "names")
    for names in CURVE_NAMES:
        answer = api.viewer.get(f"/api/v1/runs/{uid}/series", params={"names": names})
        assert (answer.status_code == 200) == valid(names, schema), (names, answer.text)
        assert answer.status_code in (200, 422), names


@pytest.mark.timeout(1800)
def test_every_operation_answers_as_described(described: Any, services: list[Any]) -> None:
    operations = [result.ok() for result in described.exclude(path_regex=STREAMS).get_all_operations()]
    # What ends the others' world comes last.
    operations.sort(key=lambda operation: operation.method.upper() == "DELETE")
    assert len(operations) > 35
    assert {"POST /api/v1/specs/validate", "POST /api/v1/specs/command"} <= {one.label for one in operations}
    began = time.process_time()
    called = 0
    store = ""
    failures: list[str] = []
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query or operation.path_parameters):
                continue

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                nonlocal called, store
                called += 1
                # The operator's own token must outlive the test.
                if case.path_parameters and case.path_parameters.get("token_id") in range(4):
                    return
                # A test of a webhook whose address was made up would leave this machine.
                if case.operation.path.endswith("/test") and case.path_parameters.get("webhook_id") in MADE_UP:
                    return
                meant = not {"cursor", "filter"}.isdisjoint(case.query) or case.operation.label in BY_MEANING
                excluded = [positive_data_acceptance] if meant else []
                for api in services:
                    store = api.service.database.engine.dialect.name
                    try:
                        case.call_and_validate(app=api.app, headers=signed_in(api), excluded_checks=excluded)
                    except (Failure, FailureGroup) as failed:
                        if not accepted_rightly(failed, case, api):
                            raise

            # All that is wrong is told at once.
            try:
                check()
            except FailureGroup as group:
                failures += [f"{operation.label}, {mode.value}, {store}: {failure}" for failure in group.exceptions]
            except Failure as failure:
                failures.append(f"{operation.label}, {mode.value}, {store}: {failure}")
    assert not failures, "\n\n".join(failures)
    assert called > 5 * len(operations)
    assert time.process_time() - began < 5 * SECONDS


def test_every_operation_says_what_it_needs_and_gives_an_example(described: Any) -> None:
    schema = described.raw_schema
    assert set(schema["components"]["securitySchemes"]) == {"HTTPBearer", "APIKeyCookie"}
    # Signing in, and its counterpart for scripts.
    exchange = ("POST", "/api/v1/tokens/exchange")
    open_to_all = set()
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"] and operation["description"], (method, path)
            if "security" not in operation:
                open_to_all.add((method.upper(), path))
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    assert list(response["content"]) == ["application/problem+json"], (method, path, status)
    openid = {("POST", "/api/v1/session/openid/begin"), ("POST", "/api/v1/session/openid")}
    sign_in = {("POST", "/api/v1/session"), exchange, *openid}
    assert open_to_all == {("GET", "/healthz"), ("GET", "/readyz"), *sign_in}

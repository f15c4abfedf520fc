"""Sign-in with an OpenID Connect provider: a real one over HTTP, and each way in which it can be wrong."""

from __future__ import annotations

import base64
import re
import socket
import ssl
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("authlib")

from fastapi.testclient import TestClient
from sqlalchemy import select

from rhyme_openrlhf.api.access.openid import MOST_BYTES, Begun, NoRoleError, Provider, RefusedError, person_of
from rhyme_openrlhf.api.routes.openid import _open as open_for
from rhyme_openrlhf.api.settings import OpenIdSettings
from rhyme_openrlhf.api.store.models import Token
from rhyme_openrlhf.settings.options import SettingsError
from tests.api.access.openid_provider import (
    CLIENT_ID,
    CLIENT_SECRET,
    ENDLESS,
    OpenIdProvider,
    octets,
    rsa_key,
    running_provider,
)
from tests.api.http_service import BASE, Api

ANN = {"sub": "1", "email": "ann@example.org", "email_verified": True, "groups": ["research", "rl"]}
stores = pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def provider(starts_listener: None) -> Iterator[OpenIdProvider]:
    with running_provider() as running:
        running.claims = dict(ANN)
        yield running


@pytest.fixture
def settings(provider: OpenIdProvider, tmp_path: Path) -> OpenIdSettings:
    secret = tmp_path / "secret"
    secret.write_text(CLIENT_SECRET + "\n")
    return OpenIdSettings(
        issuer=provider.issuer,
        client_id=CLIENT_ID,
        client_secret_file=str(secret),
        operators="rl, admins",
        viewers="research",
    )


@pytest.fixture
def signing_in(api: Api, settings: OpenIdSettings) -> Api:
    """A service with the provider."""
    api.service.openid = Provider(settings)
    return api


def new_browser(api: Api) -> TestClient:
    browser = TestClient(api.app, base_url=BASE, raise_server_exceptions=False)
    browser.portal = api.nobody.portal
    return browser


def begin(browser: TestClient, provider: OpenIdProvider) -> dict[str, str]:
    """Begin to sign in, go to the provider, and return what it adds to the address of the service's page."""
    begun = browser.post("/api/v1/session/openid/begin")
    assert begun.status_code == 200, begun.text
    back = urlsplit(provider.authorized(begun.json()["address"]))
    assert f"{back.scheme}://{back.netloc}{back.path}" == f"{BASE}/sign-in/openid"
    return {name: values[0] for name, values in parse_qs(back.query).items()}


def sign_in(browser: TestClient, provider: OpenIdProvider) -> Any:
    return browser.post("/api/v1/session/openid", json=begin(browser, provider))


@stores
def test_a_person_signs_in_acts_and_signs_out(signing_in: Api, provider: OpenIdProvider) -> None:
    api, browser = signing_in, new_browser(signing_in)
    signed_in = sign_in(browser, provider)
    who = signed_in.json()
    assert (signed_in.status_code, who["name"], who["role"]) == (200, "ann@example.org", "operator")
    browser.headers["X-CSRF-Token"] = who["csrf"]
    assert browser.get("/api/v1/session").json()["name"] == "ann@example.org"
    assert browser.post("/api/v1/experiments", json={"name": "ablation"}).status_code == 201
    assert browser.delete("/api/v1/session").status_code == 204
    assert browser.get("/api/v1/session").status_code == 401
    logged = api.operator.get("/api/v1/audit").json()["items"]
    assert [(one["action"], one["name"], one["browser"]) for one in reversed(logged)] == [
        ("Sign in with the provider's answer", "ann@example.org", True),
        ("Create an experiment", "ann@example.org", True),
        ("Sign out", "ann@example.org", True),
    ]


def test_cookies_are_kept_from_scripts_and_other_sites(signing_in: Api, provider: OpenIdProvider) -> None:
    browser = new_browser(signing_in)
    answer = begin(browser, provider)
    assert list(browser.cookies) == ["rhyme_sign_in_8420"]
    signed_in = browser.post("/api/v1/session/openid", json=answer)
    set_cookies = signed_in.headers.get_list("set-cookie")
    assert len(set_cookies) == 2 and all("HttpOnly" in one and "SameSite=strict" in one for one in set_cookies)
    # What the sign-in was kept in is used up.
    assert list(browser.cookies) == ["rhyme_session_8420"]
    assert browser.post("/api/v1/session/openid", json=answer).status_code == 401


def test_the_role_is_that_of_the_last_sign_in_for_all_sessions(signing_in: Api, provider: OpenIdProvider) -> None:
    first, second = new_browser(signing_in), new_browser(signing_in)
    assert sign_in(first, provider).json()["role"] == "operator"
    provider.claims |= {"groups": "research", "email": "ann@example.net"}
    assert sign_in(second, provider).json()["role"] == "viewer"
    assert first.get("/api/v1/session").json()["role"] == "viewer"
    (token,) = [one for one in signing_in.operator.get("/api/v1/tokens").json()["items"] if one["prefix"] == "openid"]
    assert (token["name"], token["role"]) == ("ann@example.net", "viewer")
    # Another person is another token, also with the same name.
    provider.claims |= {"sub": "2"}
    sign_in(new_browser(signing_in), provider)
    people = [one for one in signing_in.operator.get("/api/v1/tokens").json()["items"] if one["prefix"] == "openid"]
    assert len(people) == 2
    # Revoking a person's token signs them out everywhere, and nobody else.
    assert signing_in.operator.delete(f"/api/v1/tokens/{token['id']}").status_code == 204
    assert [one.get("/api/v1/session").status_code for one in (first, second)] == [401, 401]


def test_a_person_without_a_role_is_refused_by_name(signing_in: Api, provider: OpenIdProvider) -> None:
    provider.claims["groups"] = ["sales"]
    refused = sign_in(new_browser(signing_in), provider)
    assert refused.status_code == 403
    assert refused.json()["detail"] == (
        "no role of this service is for ann@example.org: the claim groups has no value of --openid.operators or "
        "--openid.viewers"
    )


def test_groups_may_be_told_at_the_userinfo_address_alone(signing_in: Api, provider: OpenIdProvider) -> None:
    del provider.claims["groups"]
    provider.userinfo = {"sub": "1", "groups": ["admins"]}
    assert sign_in(new_browser(signing_in), provider).json()["role"] == "operator"
    # Claims of another person count for nothing.
    provider.userinfo = {"sub": "2", "groups": ["admins"]}
    assert sign_in(new_browser(signing_in), provider).status_code == 403


def another_nonce(claims: dict[str, Any]) -> None:
    claims["nonce"] = "another"


def no_nonce(claims: dict[str, Any]) -> None:
    del claims["nonce"]


def expired(claims: dict[str, Any]) -> None:
    claims["exp"] = int(time.time()) - 3600


def another_audience(claims: dict[str, Any]) -> None:
    claims["aud"] = "another"


def audience_of_an_accomplice(claims: dict[str, Any]) -> None:
    claims |= {"aud": ["another", CLIENT_ID], "azp": "another"}


def another_issuer(claims: dict[str, Any]) -> None:
    claims["iss"] = "https://elsewhere.example"


def anothers_key(claims: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    return {"alg": "RS256", "kid": "first"}, rsa_key("first", "another")


def unknown_key(claims: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    return {"alg": "RS256", "kid": "second"}, rsa_key("second")


def shared_secret(claims: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    return {"alg": "HS256", "kid": "first"}, octets(CLIENT_SECRET + 32 * "x")


FORGED = [
    (another_nonce, "the id token belongs to another sign-in"),
    (no_nonce, "the id token belongs to another sign-in"),
    (expired, "the id token has expired"),
    (another_audience, "the id token is for another client"),
    (audience_of_an_accomplice, "the id token is for another client"),
    (another_issuer, "the id token is of another issuer"),
    (anothers_key, "the id token is not signed with a key of the provider"),
    (unknown_key, "the id token is not signed with a key of the provider"),
    (shared_secret, "the id token is not valid"),
]


def test_a_wrong_id_token_signs_nobody_in(signing_in: Api, provider: OpenIdProvider) -> None:
    for forge, sentence in FORGED:
        provider.forge = forge
        browser = new_browser(signing_in)
        refused = sign_in(browser, provider)
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized"), refused.text
        assert refused.json()["detail"].startswith(sentence), sentence
        assert browser.get("/api/v1/session").status_code == 401, sentence
    assert signing_in.operator.get("/api/v1/audit").json()["items"] == []


def test_a_replaced_key_is_found(signing_in: Api, provider: OpenIdProvider) -> None:
    assert sign_in(new_browser(signing_in), provider).status_code == 200
    provider.key = rsa_key("second")
    assert sign_in(new_browser(signing_in), provider).status_code == 200
    assert provider.asked.count("/keys") == 2


def test_the_answer_to_another_sign_in_is_refused(signing_in: Api, provider: OpenIdProvider) -> None:
    victim, attacker = new_browser(signing_in), new_browser(signing_in)
    begin(victim, provider)
    answer = begin(attacker, provider)
    refused = victim.post("/api/v1/session/openid", json=answer)
    assert refused.status_code == 401 and "belongs to another sign-in" in refused.json()["detail"]
    nowhere = new_browser(signing_in).post("/api/v1/session/openid", json=answer)
    assert nowhere.status_code == 401 and "this browser has not begun" in nowhere.json()["detail"]
    # The provider takes the code with the verifier of its own browser alone.
    begin(victim, provider)
    state = Begun.read(victim.cookies["rhyme_sign_in_8420"]).state
    refused = victim.post("/api/v1/session/openid", json={**answer, "state": state})
    assert refused.status_code == 401
    assert refused.json()["detail"] == "the provider refused this sign-in (invalid_grant): begin again"


def test_a_person_who_does_not_want_to_is_told(signing_in: Api, provider: OpenIdProvider) -> None:
    provider.refuse = "access_denied"
    refused = sign_in(new_browser(signing_in), provider)
    assert (refused.status_code, refused.json()["detail"]) == (401, "the provider has not signed you in: begin again")


def test_wrong_answers_count_against_their_address(
    make_api: Callable[..., Api], settings: OpenIdSettings, provider: OpenIdProvider
) -> None:
    api = make_api(sign_ins_per_minute=2.0)
    api.service.openid = Provider(settings)
    browser = new_browser(api)
    begin(browser, provider)
    wrong = {"state": "x", "code": "x"}
    assert [browser.post("/api/v1/session/openid", json=wrong).status_code for _ in range(3)] == [401, 401, 429]


def test_wrong_answers_of_an_address_keep_nobody_from_signing_in(
    make_api: Callable[..., Api], settings: OpenIdSettings, provider: OpenIdProvider
) -> None:
    """A stranger behind the same address, who has begun nothing, or has another one's answer."""
    api = make_api(sign_ins_per_minute=3.0)
    api.service.openid = Provider(settings)
    person, stranger = new_browser(api), new_browser(api)
    answer = begin(person, provider)
    begin(stranger, provider)
    for wrong in ({"state": "x"}, {"state": "x", "code": "x"}, answer) * 3:
        assert stranger.post("/api/v1/session/openid", json=wrong).status_code in (401, 429)
    assert person.post("/api/v1/session/openid", json=answer).status_code == 200


def test_a_provider_that_is_down_costs_a_sentence(signing_in: Api, settings: OpenIdSettings) -> None:
    with socket.socket() as taken:
        # Bound and not listening: connecting is refused.
        taken.bind(("127.0.0.1", 0))
        signing_in.service.openid = Provider(replace(settings, issuer=f"http://127.0.0.1:{taken.getsockname()[1]}"))
        down = new_browser(signing_in).post("/api/v1/session/openid/begin")
    assert (down.status_code, down.json()["code"]) == (502, "provider_unavailable")
    assert down.json()["detail"] == "the provider does not answer: try again, or sign in with a token"


@pytest.mark.parametrize("silent", ["/.well-known/openid-configuration", "/token", "/keys"])
def test_a_provider_that_is_slow_costs_the_wait_and_a_sentence(
    signing_in: Api, settings: OpenIdSettings, provider: OpenIdProvider, silent: str
) -> None:
    signing_in.service.openid = Provider(replace(settings, wait_s=0.3))
    provider.silent = silent
    browser = new_browser(signing_in)
    slow = browser.post("/api/v1/session/openid/begin")
    if slow.status_code == 200:
        back = urlsplit(provider.authorized(slow.json()["address"]))
        answer = {name: values[0] for name, values in parse_qs(back.query).items()}
        slow = browser.post("/api/v1/session/openid", json=answer)
    assert (slow.status_code, slow.json()["code"]) == (504, "provider_unavailable"), slow.text
    assert slow.json()["detail"] == "the provider did not answer within 0.3 s (--openid.wait_s): try again"
    # The next sign-in begins anew. A busy machine's good answers take longer than 0.3 s, so these are waited for.
    signing_in.service.openid._app.client_kwargs["wait_s"] = 60.0
    provider.silent = ""
    assert sign_in(new_browser(signing_in), provider).status_code == 200


@pytest.mark.parametrize("broken", ["/.well-known/openid-configuration", "/token", "/keys"])
def test_what_is_no_provider_costs_a_sentence(signing_in: Api, provider: OpenIdProvider, broken: str) -> None:
    provider.broken = broken
    browser = new_browser(signing_in)
    answer = browser.post("/api/v1/session/openid/begin")
    if answer.status_code == 200:
        back = {name: values[0] for name, values in parse_qs(urlsplit(provider.authorized(
            answer.json()["address"])).query).items()}  # fmt: skip
        answer = browser.post("/api/v1/session/openid", json=back)
    assert answer.status_code == 502 and "not what OpenID Connect prescribes" in answer.json()["detail"], answer.text


def test_another_provider_than_that_of_the_settings_is_refused(signing_in: Api, provider: OpenIdProvider) -> None:
    provider.discovery = {"issuer": "https://elsewhere.example"}
    refused = new_browser(signing_in).post("/api/v1/session/openid/begin")
    assert refused.status_code == 502 and "names another issuer" in refused.json()["detail"]
    provider.discovery = {}
    assert sign_in(new_browser(signing_in), provider).status_code == 200


def test_a_wrong_client_secret_is_the_services_fault(signing_in: Api, settings: OpenIdSettings,
                                                     provider: OpenIdProvider) -> None:  # fmt: skip
    Path(settings.client_secret_file).write_text("another")
    signing_in.service.openid = Provider(settings)
    refused = sign_in(new_browser(signing_in), provider)
    assert (refused.status_code, "(invalid_client)" in refused.json()["detail"]) == (401, True)


def test_a_provider_that_wants_the_secret_in_the_form_gets_it(signing_in: Api, provider: OpenIdProvider) -> None:
    provider.discovery = {"token_endpoint_auth_methods_supported": ["client_secret_post"]}
    assert sign_in(new_browser(signing_in), provider).status_code == 200


def test_without_a_provider_there_is_nothing(api: Api) -> None:
    assert api.nobody.post("/api/v1/session/openid/begin").status_code == 404
    assert api.nobody.post("/api/v1/session/openid", json={"state": "x"}).status_code == 404


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"issuer": "http://idp.example"}, "--openid.issuer must begin with https://"),
        ({"redirect_url": "https://rhyme.example/back"}, "--openid.redirect_url must end in /sign-in/openid"),
        ({"client_id": ""}, "--openid.issuer needs --openid.client_id"),
        ({"operators": ""}, "who may sign in?"),
        ({"scope": "email"}, "--openid.scope must contain openid"),
        ({"client_secret_file": "/nowhere/secret"}, "/nowhere/secret cannot be read: No such file"),
    ],
)
def test_bad_settings_cost_a_sentence(given: dict[str, Any], sentence: str) -> None:
    good = {"issuer": "https://idp.example", "client_id": "rhyme", "operators": "rl"}
    with pytest.raises(SettingsError, match=sentence.replace("?", r"\?")):
        OpenIdSettings(**{**good, **given}).client_secret()


def test_a_secret_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = OpenIdSettings(issuer="https://idp.example", client_id="rhyme", operators="rl")
    assert settings.client_secret() == ""
    monkeypatch.setenv("RHYME_OPENID_CLIENT_SECRET", "kept")
    assert settings.client_secret() == "kept"


def test_roles_come_from_words_lists_and_parts() -> None:
    def role(claims: dict[str, Any], **more: str) -> str | None:
        values = {"operators": "rl", "viewers": "*", "issuer": "https://idp.example", "client_id": "rhyme", **more}
        return person_of(OpenIdSettings(**values), "https://idp.example", {"sub": "1", **claims}).role

    assert role({"groups": ["x", "rl"]}) == role({"groups": "rl"}) == "operator"
    assert role({"groups": [["rl"], 7]}) == role({}) == "viewer"
    assert role({"realm_access": {"roles": ["rl"]}}, role_claim="realm_access.roles") == "operator"
    assert role({"https://x.example/r": ["rl"]}, role_claim="https://x.example/r") == "operator"
    mail = {"role_claim": "email", "operators": "ann@example.org"}
    assert role({"email": "ann@example.org", "email_verified": True}, **mail) == "operator"
    for unsure in (False, "true", None):
        with pytest.raises(NoRoleError, match="has not verified the email of ann@example.org"):
            role({"email": "ann@example.org", "email_verified": unsure}, **mail)


def test_a_cookie_that_nobody_wrote_is_refused() -> None:
    begun = Begun("a", "b", "c")
    assert Begun.read(begun.written()) == begun
    for cookie in (None, "", "x", "é", begun.written()[3:], Begun("a", "", "c").written(), "bnVsbA", "W10"):
        with pytest.raises(RefusedError, match="has not begun to sign in here"):
            Begun.read(cookie)


def test_beginning_a_sign_in_makes_no_tls_context_and_has_a_limit(
    make_api: Callable[..., Api], provider: OpenIdProvider, settings: OpenIdSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = make_api(sign_ins_per_minute=3.0)
    api.service.openid = Provider(settings)
    begin(new_browser(api), provider)
    made: list[Any] = []
    create = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda *args, **more: made.append(1) or create(*args, **more))
    answers = [new_browser(api).post("/api/v1/session/openid/begin") for _ in range(3)]
    assert [one.status_code for one in answers] == [200, 200, 429] and made == []
    assert int(answers[-1].headers["retry-after"]) >= 1
    # What was begun does not count for the ends, whose wrong answers count as wrong tokens do.
    ends = [new_browser(api).post("/api/v1/session/openid", json={"state": "x"}).status_code for _ in range(4)]
    assert ends == [401, 401, 401, 429]
    assert api.nobody.get("/api/v1/runs", headers={"Authorization": "Bearer wrong"}).status_code == 429
    assert api.operator.get("/api/v1/runs").status_code == 200


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("endless", ["/.well-known/openid-configuration", "/token", "/keys"])
def test_an_endless_answer_is_not_read(signing_in: Api, provider: OpenIdProvider, endless: str, packed: bool) -> None:
    provider.endless, provider.packed = endless, packed
    browser = new_browser(signing_in)
    tracemalloc.start()
    try:
        answer = browser.post("/api/v1/session/openid/begin")
        if answer.status_code == 200:
            back = urlsplit(provider.authorized(answer.json()["address"]))
            words = {name: values[0] for name, values in parse_qs(back.query).items()}
            answer = browser.post("/api/v1/session/openid", json=words)
        # The provider of this test is in this process, too.
        assert tracemalloc.get_traced_memory()[1] < ENDLESS + 10 * MOST_BYTES
    finally:
        tracemalloc.stop()
    assert answer.status_code == 502, answer.text
    assert ("is compressed" if packed else f"more than {MOST_BYTES} bytes") in answer.json()["detail"]


@pytest.mark.parametrize(
    ("claims", "name"),
    [
        ({"email_verified": False}, "1"),
        ({"email_verified": None}, "1"),
        ({"email_verified": "true", "preferred_username": "ann@example.org", "name": "Ann"}, "Ann"),
        ({"email_verified": False, "preferred_username": "ann"}, "ann"),
        ({"email": 5, "name": "\u202e\0"}, "1"),
        ({"email": "", "name": ["Ann"]}, "1"),
    ],
)
def test_an_address_that_is_not_verified_names_nobody(
    signing_in: Api, provider: OpenIdProvider, claims: dict[str, Any], name: str
) -> None:
    provider.claims |= claims
    assert sign_in(new_browser(signing_in), provider).json()["name"] == name


@stores
def test_two_people_of_one_name_are_told_apart(signing_in: Api, provider: OpenIdProvider) -> None:
    first = sign_in(new_browser(signing_in), provider).json()["name"]
    provider.claims["sub"] = "2"
    second = [sign_in(new_browser(signing_in), provider).json()["name"] for _ in range(2)]
    assert first == "ann@example.org"
    assert second[0] == second[1] and re.fullmatch(r"ann@example\.org \([0-9a-f]{6}\)", second[0])
    # Nor has a person the name of a token of the service.
    provider.claims |= {"sub": "3", "email": "the operator"}
    assert re.fullmatch(r"the operator \([0-9a-f]{6}\)", sign_in(new_browser(signing_in), provider).json()["name"])


@stores
@pytest.mark.parametrize("groups", [["sales"], ["research"]])
def test_a_person_who_is_no_operator_any_more_loses_what_an_operator_has(
    signing_in: Api, provider: OpenIdProvider, groups: list[str]
) -> None:
    api, browser = signing_in, new_browser(signing_in)
    browser.headers["X-CSRF-Token"] = sign_in(browser, provider).json()["csrf"]

    def made_by(client: TestClient, role: str) -> TestClient:
        token = client.post("/api/v1/tokens", json={"name": role, "role": role}).json()["token"]
        made = new_browser(api)
        made.headers["Authorization"] = f"Bearer {token}"
        return made

    operator, viewer, reporter = (made_by(browser, role) for role in ("operator", "viewer", "reporter"))
    further = made_by(operator, "viewer")
    # Of a link that is revoked already, too.
    gone = made_by(browser, "operator")
    behind = made_by(gone, "viewer")
    newest = max(
        api.operator.get("/api/v1/tokens").json()["items"], key=lambda one: (one["role"] == "operator", one["id"])
    )
    assert api.operator.delete(f"/api/v1/tokens/{newest['id']}").status_code == 204
    another = made_by(api.operator, "viewer")
    provider.claims["groups"] = groups
    again = sign_in(new_browser(api), provider)
    assert again.status_code == (403 if groups == ["sales"] else 200)
    # Sessions end with the last role; what the person made as an operator ends with that role.
    assert browser.get("/api/v1/session").status_code == (401 if groups == ["sales"] else 200)
    assert [one.get("/api/v1/runs").status_code for one in (operator, viewer, further, gone, behind)] == [401] * 5
    assert another.get("/api/v1/runs").status_code == 200
    announced = {"run": "a" * 16, "name": "a", "run_directory": "/", "config": {}}
    assert reporter.put(f"/api/v1/ingest/attempts/{16 * 'b'}", json=announced).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        "[" * 2900,
        '["a"]',
        '{"state": 5}',
        "\ud800",
        '{"state": "\\ud800", "nonce": "a", "code_verifier": "a"}',
        "9" * 5000,
    ],
)
def test_a_made_up_cookie_is_refused(signing_in: Api, content: str) -> None:
    browser = new_browser(signing_in)
    value = base64.urlsafe_b64encode(content.encode("utf-8", "surrogatepass")).decode().rstrip("=")
    for cookie in (value, value[:-1], "=", "%", "a" * 5000):
        answer = browser.post("/api/v1/session/openid", json={"state": "x", "code": "y"},
                              headers={"Cookie": f"rhyme_sign_in_8420={cookie}"})  # fmt: skip
        assert answer.status_code == 401, answer.text


@stores
def test_one_person_signs_in_from_many_browsers_at_once(signing_in: Api, settings: OpenIdSettings) -> None:
    person = person_of(settings, "https://idp.example", {**ANN, "sub": "many"})
    database = signing_in.service.database
    with ThreadPoolExecutor(8) as pool:
        opened = [pool.submit(open_for, signing_in.service, person) for _ in range(16)]
        tokens = {one.result()[2].id for one in opened}
    with database.reading() as session:
        people = session.scalars(select(Token).where(Token.prefix == "openid")).all()
    assert [one.id for one in people] == [*tokens]

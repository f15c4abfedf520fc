"""An OpenID Connect provider, by Authlib: the address that begins a sign-in, and the person that it ends with.

Authlib reads the provider's discovery document and keys, makes state, nonce and PKCE's verifier, and checks the id
token. This module is imported only if a provider is configured, because Authlib takes time to load.

Invariants:

- The authorization code flow with PKCE (S256). A sign-in ends only in the browser that began it: its state, nonce and
  verifier are in an HttpOnly cookie.
- The id token is signed with one of the provider's keys. Signatures with the client's secret, or none, are refused.
- The id token has the issuer and audience of the settings and the nonce of this sign-in, and has not expired.
- No request to the provider takes longer than `--openid.wait_s`, however slowly it answers, and at most `MOST_BYTES` of
  an answer are read.
- A person's name is an e-mail address only if the provider has verified it, or the settings name the claim.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import dataclasses
import functools
import hmac
import json
import logging
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
from authlib.integrations.base_client import BaseApp, OAuthError
from authlib.integrations.base_client.async_app import AsyncOAuth2Mixin
from authlib.integrations.base_client.async_openid import AsyncOpenIDMixin
from authlib.integrations.httpx_client import AsyncOAuth2Client
from joserfc.errors import BadSignatureError, ExpiredTokenError, InvalidKeyIdError, JoseError

from rhyme_openrlhf.api.settings import OpenIdSettings
from rhyme_openrlhf.api.store.credentials import Role
from rhyme_openrlhf.api.store.models import NAME_LENGTH

# Seconds after which the provider's addresses and keys are read again, because a provider replaces its keys.
METADATA_SECONDS = 3600.0
# Most seconds by which the clocks of both machines may differ.
LEEWAY_SECONDS = 60
# Seconds for which a sign-in may take: the person may have to find a second factor.
SIGN_IN_SECONDS = 900
# Algorithms that need a private key, which the provider alone has.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
# What is used of the provider's discovery document. Authlib makes arguments of its HTTP client of all that is kept.
METADATA = frozenset(
    {"_loaded_at", "issuer", "authorization_endpoint", "token_endpoint", "jwks_uri", "userinfo_endpoint",
     "id_token_signing_alg_values_supported", "token_endpoint_auth_methods_supported"}
)  # fmt: skip
# Bytes of an answer of the provider; a discovery document, its keys, or a person's claims have some thousands.
MOST_BYTES = 1024 * 1024
# A claim that another one has to vouch for.
VERIFIED = {"email": "email_verified"}

logger = logging.getLogger(__name__)


class RefusedError(Exception):
    """The person is not signed in: this sign-in is not valid, or the provider refused it. One sentence."""


class NoRoleError(Exception):
    """The provider knows the person `subject` of `issuer`, and no role of this service is for them. One sentence."""

    def __init__(self, sentence: str, issuer: str, subject: str) -> None:
        super().__init__(sentence)
        self.issuer = issuer
        self.subject = subject


class ProviderError(Exception):
    """The provider does not answer, or not as OpenID Connect prescribes. One sentence. `late`: it took too long."""

    def __init__(self, sentence: str, late: bool = False) -> None:
        super().__init__(sentence)
        self.late = late


@dataclass(frozen=True)
class Begun:
    """A sign-in that has begun: what its browser keeps until it ends."""

    state: str
    nonce: str
    code_verifier: str

    def written(self) -> str:
        """Return this as the value of a cookie."""
        return base64.urlsafe_b64encode(json.dumps(dataclasses.asdict(self)).encode()).decode().rstrip("=")

    @classmethod
    def read(cls, cookie: str | None) -> Begun:
        """Return what `written` wrote. Raises RefusedError."""
        try:
            content = cookie or ""
            values = json.loads(base64.urlsafe_b64decode(content + "=" * (-len(content) % 4)))
            begun = cls(**values)
        except (binascii.Error, ValueError, TypeError, RecursionError):
            raise RefusedError("this browser has not begun to sign in here, or took too long: begin again") from None
        if not all(isinstance(value, str) and value and value.isascii() for value in values.values()):
            raise RefusedError("this browser has not begun to sign in here: begin again")
        return begun


@dataclass(frozen=True)
class Person:
    """A person whom the provider has signed in. `subject` never changes; `name` is for people."""

    issuer: str
    subject: str
    name: str
    role: Role


class _Client(AsyncOAuth2Client):
    """Authlib's HTTP client, with limits on a whole request. httpx limits only the time between two parts of one."""

    def __init__(self, *, wait_s: float, **more: Any) -> None:
        super().__init__(timeout=wait_s, verify=_certificates(), **more)
        self._wait_s = wait_s

    async def send(self, request: httpx2.Request, **more: Any) -> httpx2.Response:
        """Send a request, and read its response whole. Raises TimeoutError and ProviderError."""
        # A compressed answer could be far longer than what is read of it.
        request.headers["accept-encoding"] = "identity"
        async with asyncio.timeout(self._wait_s):
            response: httpx2.Response = await super().send(request, **{**more, "stream": True})
            try:
                content = b""
                async for piece in response.aiter_raw():
                    content += piece
                    if len(content) > MOST_BYTES:
                        raise ProviderError(f"the provider's answer has more than {MOST_BYTES} bytes")
            finally:
                await response.aclose()
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ProviderError("the provider's answer is compressed, which was not asked for")
        return httpx2.Response(response.status_code, headers=response.headers, content=content, request=request)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the trusted certificates. Cached, because reading them takes longer than the rest of a sign-in."""
    return httpx2.create_ssl_context()


class _App(AsyncOAuth2Mixin, AsyncOpenIDMixin, BaseApp):
    """Authlib's OpenID Connect client without a web framework."""

    client_cls = _Client


class Provider:
    """The provider of the settings. It is asked when the first person signs in, so the service starts without it."""

    def __init__(self, settings: OpenIdSettings, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises SettingsError if the client's secret cannot be read."""
        self.settings = settings
        self._clock = clock
        self._secret = settings.client_secret()
        self._app, self._read_at = self._new_app(), clock()

    def _new_app(self, auth_method: str | None = None) -> _App:
        issuer = self.settings.issuer.rstrip("/")
        kind = {"token_endpoint_auth_method": auth_method} if auth_method else {}
        return _App(
            framework=None,
            client_id=self.settings.client_id,
            client_secret=self._secret or None,
            server_metadata_url=f"{issuer}/.well-known/openid-configuration",
            client_kwargs={
                "scope": self.settings.scope,
                "code_challenge_method": "S256",
                "wait_s": self.settings.wait_s,
                **kind,
            },
        )

    async def begin(self, redirect_url: str) -> tuple[str, Begun]:
        """Return the provider's address to send the browser to, and what the browser keeps. Raises ProviderError."""
        with _faults(self.settings):
            app = await self._ready()
            made = await app.create_authorization_url(redirect_url)
        return made["url"], Begun(made["state"], made["nonce"], made["code_verifier"])

    async def person(self, begun: Begun, state: str, code: str, redirect_url: str) -> Person:
        """Return the person whom the provider has signed in. Raises RefusedError, NoRoleError and ProviderError."""
        check_state(begun, state)
        with _faults(self.settings):
            app = await self._ready()
            token = await app.fetch_access_token(redirect_url, code=code, code_verifier=begun.code_verifier)
            claims_options = {
                "iss": {"essential": True, "value": app.server_metadata["issuer"]},
                "aud": {"essential": True, "value": self.settings.client_id},
            }
            claims = await app.parse_id_token(token, begun.nonce, claims_options, leeway=LEEWAY_SECONDS)
            if claims is None:
                raise ProviderError("the provider sent no id token: does --openid.scope contain openid?")
            claims = dict(claims)
            if _claim(claims, self.settings.role_claim) is None and "userinfo_endpoint" in app.server_metadata:
                # Some providers tell groups only there.
                further = await app.userinfo(token=token)
                if further.get("sub") == claims["sub"]:
                    claims = {**further, **claims}
        return person_of(self.settings, app.server_metadata["issuer"], claims)

    async def _ready(self) -> _App:
        """Return the client, which knows the provider's addresses."""
        if self._clock() - self._read_at > METADATA_SECONDS:
            self._app = self._new_app()
        app = self._app
        if "_loaded_at" in app.server_metadata:
            return app
        try:
            metadata = {one: value for one, value in (await app.load_server_metadata()).items() if one in METADATA}
            if metadata["issuer"].rstrip("/") != self.settings.issuer.rstrip("/"):
                raise ProviderError("the provider's discovery document names another issuer than --openid.issuer")
            for name in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
                if not isinstance(metadata[name], str):
                    raise TypeError(name)
            names = metadata.get("id_token_signing_alg_values_supported") or ()
            metadata["id_token_signing_alg_values_supported"] = [one for one in ALGORITHMS if one in names] or ["RS256"]
            ways = metadata.pop("token_endpoint_auth_methods_supported", None) or ()
        except BaseException:
            self._app = self._new_app()
            raise
        if self._secret and "client_secret_post" in ways and "client_secret_basic" not in ways:
            app = self._new_app("client_secret_post")
        app.server_metadata = metadata
        self._app, self._read_at = app, self._clock()
        return app


def check_state(begun: Begun, state: str) -> None:
    """Raise RefusedError if the provider's answer belongs to another sign-in than the browser has begun."""
    if not hmac.compare_digest(begun.state.encode(), state.encode("utf-8", "replace")):
        raise RefusedError("this answer of the provider belongs to another sign-in: begin again")


def person_of(settings: OpenIdSettings, issuer: str, claims: Mapping[str, Any]) -> Person:
    """Return the person with these checked claims. Raises NoRoleError."""
    subject = str(claims["sub"])
    name = _name(settings.name_claim, claims) or _printable(subject) or "a person"
    if not _is_vouched_for(settings.role_claim, claims):
        given = _printable(str(_claim(claims, settings.role_claim)))
        raise NoRoleError(
            f"the provider has not verified the {settings.role_claim} of {given}, which gives the role", issuer, subject
        )
    role = settings.role_of(_words(_claim(claims, settings.role_claim)))
    if role is None:
        raise NoRoleError(
            f"no role of this service is for {name}: the claim {settings.role_claim} has no value of "
            "--openid.operators or --openid.viewers",
            issuer,
            subject,
        )
    return Person(issuer, subject, name, role)


def _name(name_claim: str, claims: Mapping[str, Any]) -> str:
    """Return the person's name by the first claim that has one; "" if none has.

    People may choose their name and, at some providers, any address as their user name. So an address counts only by
    the claim of the settings, and if that has to be verified, only verified.
    """
    text = _claim(claims, name_claim)
    if isinstance(text, str) and _is_vouched_for(name_claim, claims) and (name := _printable(text)):
        return name
    others = (claims.get(name) for name in ("preferred_username", "name"))
    return next((name for one in others if isinstance(one, str) and "@" not in one and (name := _printable(one))), "")


def _is_vouched_for(claim: str, claims: Mapping[str, Any]) -> bool:
    vouching = VERIFIED.get(claim)
    return vouching is None or claims.get(vouching) is True


def _printable(text: str) -> str:
    return "".join(letter for letter in text if letter.isprintable())[:NAME_LENGTH].strip()


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return the claim of this name, or else the part that its dots lead to; None if there is none."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _words(value: Any) -> Sequence[str]:
    if isinstance(value, str):
        return [value]
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


@contextlib.contextmanager
def _faults(settings: OpenIdSettings) -> Iterator[None]:
    """Turn each way in which a provider or its answer can fail into one sentence. The log has the cause."""
    try:
        yield
    except (TimeoutError, httpx2.TimeoutException) as error:
        logger.warning("the OpenID Connect provider %s is too slow: %r", settings.issuer, error)
        sentence = f"the provider did not answer within {settings.wait_s:g} s (--openid.wait_s): try again"
        raise ProviderError(sentence, late=True) from error
    except httpx2.HTTPStatusError as error:
        logger.warning("the OpenID Connect provider %s failed: %s", settings.issuer, error)
        raise ProviderError(f"the provider answered with status {error.response.status_code}: try again") from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        logger.warning("the OpenID Connect provider %s is away: %r", settings.issuer, error)
        raise ProviderError("the provider does not answer: try again, or sign in with a token") from error
    except OAuthError as error:
        logger.warning("the OpenID Connect provider %s refused: %s", settings.issuer, error)
        raise RefusedError(f"the provider refused this sign-in ({_plain(error.error)}): begin again") from error
    except JoseError as error:
        logger.warning("an id token of %s was refused: %s", settings.issuer, error)
        raise RefusedError(_fault_of_token(error)) from error
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        logger.warning("the OpenID Connect provider %s answered wrongly: %r", settings.issuer, error)
        raise ProviderError("the provider's answer is not what OpenID Connect prescribes: see the log") from error


def _fault_of_token(error: JoseError) -> str:
    claim = getattr(error, "claim", "")
    if isinstance(error, ExpiredTokenError):
        return "the id token has expired: compare this machine's clock with the provider's, and begin again"
    if isinstance(error, (BadSignatureError, InvalidKeyIdError)):
        return "the id token is not signed with a key of the provider"
    if claim == "nonce":
        return "the id token belongs to another sign-in: begin again"
    if claim in ("aud", "azp"):
        return "the id token is for another client than --openid.client_id"
    if claim == "iss":
        return "the id token is of another issuer than --openid.issuer"
    return f"the id token is not valid ({_plain(error.error)})"


def _plain(code: Any) -> str:
    """Return an error code of the protocol in at most 40 letters, as it comes from elsewhere."""
    return "".join(letter for letter in str(code) if letter.isascii() and (letter.isalnum() or letter in "_- "))[:40]

"""A small OpenID Connect provider: discovery, authorization, token, userinfo and keys, over HTTP, with its own RSA key.

It signs everyone in without a question, demands PKCE and the client's secret as a real provider does, and can be told
to do single things wrong.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

# Bytes of an answer that is far too long.
ENDLESS = 50_000_000
CLIENT_ID, CLIENT_SECRET = "rhyme", "a client's secret"


@functools.cache
def rsa_key(kid: str, owner: str = "provider") -> RSAKey:
    """Return a key of this process; making one takes as long as a whole sign-in."""
    return RSAKey.generate_key(2048, {"kid": kid})


@dataclass
class OpenIdProvider:
    """A running provider. `claims`: of the person who signs in; `issued`: what it gave codes for."""

    issuer: str = ""
    claims: dict[str, Any] = field(default_factory=dict)
    # Told at the userinfo address alone.
    userinfo: dict[str, Any] = field(default_factory=dict)
    discovery: dict[str, Any] = field(default_factory=dict)
    # Changes an id token's claims and returns how to sign them: the header, and the key.
    forge: Callable[[dict[str, Any]], tuple[dict[str, Any], Any] | None] = lambda claims: None
    refuse: str = ""
    # An address that is not answered before `answer` is set.
    silent: str = ""
    broken: str = ""
    # An address that is answered with `ENDLESS` bytes, or with a gzip bomb if `packed`.
    endless: str = ""
    packed: bool = False
    answer: threading.Event = field(default_factory=threading.Event)
    key: RSAKey = field(default_factory=lambda: rsa_key("first"))
    issued: dict[str, dict[str, str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
            "userinfo_endpoint": f"{self.issuer}/userinfo",
            "id_token_signing_alg_values_supported": ["RS256", "HS256"],
            "token_endpoint_auth_methods_supported": ["client_secret_basic"],
            **self.discovery,
        }

    def authorized(self, address: str) -> str:
        """Return where the browser is sent that came to the authorization address."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
        assert asked["response_type"] == "code" and asked["client_id"] == CLIENT_ID
        assert asked["code_challenge_method"] == "S256" and asked["nonce"] and "openid" in asked["scope"].split()
        answer = {"state": asked["state"]}
        if self.refuse:
            return f"{asked['redirect_uri']}?{urlencode({**answer, 'error': self.refuse})}"
        code = secrets.token_urlsafe(16)
        self.issued[code] = asked
        return f"{asked['redirect_uri']}?{urlencode({**answer, 'code': code})}"

    def token(self, form: dict[str, str], credentials: tuple[str, str]) -> tuple[int, dict[str, Any]]:
        asked = self.issued.pop(form.get("code", ""), None)
        if credentials != (CLIENT_ID, CLIENT_SECRET):
            return 401, {"error": "invalid_client"}
        challenge = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        if (
            asked is None
            or form.get("redirect_uri") != asked["redirect_uri"]
            or base64.urlsafe_b64encode(challenge).decode().rstrip("=") != asked["code_challenge"]
        ):
            return 400, {"error": "invalid_grant"}
        now = int(time.time())
        claims = {
            "iss": self.issuer,
            "aud": CLIENT_ID,
            "iat": now,
            "exp": now + 300,
            "nonce": asked["nonce"],
            **self.claims,
        }
        header, key = self.forge(claims) or ({"alg": "RS256", "kid": self.key.kid}, self.key)
        signed = jwt.encode(header, claims, key, algorithms=[header["alg"]])
        return 200, {"access_token": "an access token", "token_type": "Bearer", "id_token": signed}


def octets(secret: str) -> OctKey:
    """Return a key that both sides of a shared secret have."""
    return OctKey.import_key(secret)


@contextlib.contextmanager
def running_provider() -> Iterator[OpenIdProvider]:
    """Run a provider on a free port."""
    provider = OpenIdProvider()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if self._stopped(path):
                return
            if path == "/authorize":
                self.send_response(303)
                self.send_header("Location", provider.authorized(self.path))
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif path == "/.well-known/openid-configuration":
                self._send(200, provider.document())
            elif path == "/keys":
                self._send(200, {"keys": [provider.key.as_dict(private=False)]})
            elif path == "/userinfo":
                known = self.headers["Authorization"] == "Bearer an access token"
                self._send(200 if known else 401, provider.userinfo)
            else:
                self._send(404, {})

        def do_POST(self) -> None:
            if self._stopped(self.path):
                return
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            given = self.headers.get("Authorization", "")
            pair = base64.b64decode(given.removeprefix("Basic ")).decode().partition(":")[::2] if given else None
            self._send(*provider.token(form, pair or (form.get("client_id", ""), form.get("client_secret", ""))))

        def _stopped(self, path: str) -> bool:
            provider.asked.append(path)
            if path == provider.silent:
                # A byte now and then, as a server that is overloaded may send: no wait between two parts is long.
                self.send_response(200)
                self.end_headers()
                with contextlib.suppress(OSError):
                    while not provider.answer.wait(0.05):
                        self.wfile.write(b" ")
                        self.wfile.flush()
                self.close_connection = True
            elif path == provider.broken:
                self._send(200, "<html>")
            elif path == provider.endless:
                self._send_endless()
            return path in (provider.silent, provider.broken, provider.endless)

        def _send_endless(self) -> None:
            self.send_response(200)
            if provider.packed:
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            content = gzip.compress(bytes(10_000_000)) if provider.packed else bytes(ENDLESS)
            with contextlib.suppress(OSError):  # the client has read enough
                self.wfile.write(content)
            self.close_connection = True

        def _send(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    provider.issuer = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        provider.answer.set()
        server.shutdown()
        server.server_close()
        thread.join()

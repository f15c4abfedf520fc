"""Settings of the service: its address, its files, its limits, and sign-in with an OpenID Connect provider.

Invariants: a service that other machines can reach has TLS, or its owner has explicitly switched TLS off. Every path in
a request is below one of `root_paths()`.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from rhyme_openrlhf.settings.options import Settings, SettingsError, option

MEGABYTE = 1024 * 1024
# Host names that a browser on the same machine may use.
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# Page to which an OpenID Connect provider sends the browser back.
RETURN_PATH = "/sign-in/openid"
CLIENT_SECRET_VARIABLE = "RHYME_OPENID_CLIENT_SECRET"
# In the list of values that give a role: everyone whom the provider signs in.
EVERYONE = "*"


@dataclass(frozen=True)
class ServeSettings(Settings):
    """Settings of the control plane's service."""

    group: ClassVar[str] = "serve"
    title: ClassVar[str] = "Control plane: address, files and limits of the service."

    host: str = option(
        "127.0.0.1", "Address to listen on; an address that other machines can reach requires TLS.", kind="plain"
    )
    port: int = option(8420, "Port to listen on; 0 selects a free port.", low=0, high=65535)
    database: str = option(
        "", "SQLAlchemy URL of the database. If not given: SQLite in the data directory.", kind="url"
    )
    data_dir: str = option(
        "", "Directory for the service's files. If not given: rhyme-openrlhf in XDG_DATA_HOME.", kind="output"
    )
    roots: str = option(
        "",
        f"Directories, separated by '{os.pathsep}', that may contain run directories, agents, rewards, data and "
        "checkpoints. If not given: the working directory and the data directory.",
        kind="output",
    )
    allowed_hosts: str = option(
        "",
        "Further host names of the service, separated by commas, without ports.",
        kind="plain",
    )
    tls_cert: str = option("", "Certificate file (PEM): with --serve.tls_key the service speaks HTTPS.", kind="file")
    tls_key: str = option("", "Private key file (PEM) of the certificate.", kind="file")
    trusted_proxies: str = option(
        "",
        "Addresses or networks of proxies in front of the service, separated by commas. The service takes the client's "
        "address and HTTPS from the X-Forwarded-For and X-Forwarded-Proto headers of these proxies.",
        kind="plain",
    )
    insecure_public: bool = option(
        False, "Listen on a public address without TLS; tokens then cross the network unencrypted."
    )
    session_hours: float = option(12.0, "Hours after which a browser must sign in again.", low=0.1, high=720)
    requests_per_second: float = option(
        200.0, "Most requests per second from one client address, and with one token.", low=0.1, high=100000
    )
    request_burst: int = option(400, "Requests that may arrive at once, above that rate.", low=1, high=100000)
    sign_ins_per_minute: float = option(
        20.0,
        "Wrong tokens and sign-in links per minute from one client address, and as many sign-ins with a provider.",
        low=0.1,
        high=100000,
    )
    body_mb: float = option(1.0, "Largest request body in MB, except batches of events.", low=0.01, high=1024)
    batch_mb: float = option(
        16.0, "Largest batch of events in MB as sent; it may be four times as large unpacked.", low=0.1, high=1024
    )
    body_seconds: float = option(
        30.0,
        "Seconds within which the whole body of a request must arrive; a slower request gets a 408.",
        low=0.1,
        high=3600,
    )
    batches_in_flight: int = option(
        16, "Batches ingested at once; further ones get a 503 with the time to retry.", low=1, high=1024
    )
    ingest_workers: int = option(
        0,
        "Processes that ingest batches, so that pages do not wait for them. 0: one on SQLite, which has one writer, "
        "two on PostgreSQL.",
        low=0,
        high=64,
    )
    live_poll_s: float = option(
        0.5, "Seconds between two polls for new events, for pages that show a live run.", low=0.05, high=60
    )
    webhooks_public_only: bool = option(
        False,
        "Send webhooks to public addresses alone, and through no proxy. Without it, operators may name receivers in "
        "the service's own network.",
        expert=True,
    )
    streams: int = option(
        100, "Most live streams (events, logs) open at once; further ones get a 503.", low=1, high=10000
    )

    def check(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise SettingsError(
                "--serve.tls_cert and --serve.tls_key belong together: set both (HTTPS) or neither (HTTP)"
            )
        if not self.host:
            raise SettingsError("--serve.host must not be empty: use 127.0.0.1 to listen for this machine only")
        if not (is_loopback(self.host) or self.tls or self.insecure_public):
            raise SettingsError(
                f"--serve.host {self.host} can be reached by other machines: set --serve.tls_cert and "
                "--serve.tls_key, or --serve.insecure_public if the network is private"
            )
        self.proxies()

    @property
    def tls(self) -> bool:
        """True if the service itself uses HTTPS."""
        return bool(self.tls_cert)

    def proxies(self) -> tuple[Network, ...]:
        """Return the networks of the trusted proxies. Raises SettingsError."""
        try:
            return tuple(ipaddress.ip_network(part.strip()) for part in self.trusted_proxies.split(",") if part.strip())
        except ValueError as error:
            raise SettingsError(
                f"--serve.trusted_proxies must be addresses or networks, as 10.0.0.5,192.168.0.0/16: {error}"
            ) from None

    def data_path(self) -> Path:
        """Return the directory of the service's files, which need not exist."""
        if self.data_dir:
            return Path(self.data_dir).expanduser().absolute()
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return Path(base).expanduser().absolute() / "rhyme-openrlhf"

    def database_url(self) -> str:
        """Return the SQLAlchemy URL of the store."""
        return self.database or f"sqlite:///{self.data_path() / 'rhyme.sqlite'}"

    def root_paths(self) -> tuple[Path, ...]:
        """Return the roots with symbolic links resolved."""
        named = [Path(part).expanduser() for part in self.roots.split(os.pathsep) if part]
        return tuple(path.resolve() for path in named or [Path.cwd(), self.data_path()])

    def host_names(self) -> frozenset[str]:
        """Return the valid host names of this service, without port and in lower case."""
        own = f"[{self.host}]" if ":" in self.host else self.host
        further = [name.strip() for name in self.allowed_hosts.split(",")]
        return frozenset(name.lower() for name in (*LOOPBACK_NAMES, own, *further) if name)

    def base_url(self, port: int | None = None) -> str:
        """Return the address for people; `port` is the selected one if the setting is 0."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port if port is None else port}"


@dataclass(frozen=True)
class OpenIdSettings(Settings):
    """Settings of sign-in with an OpenID Connect provider; without an issuer, nobody can sign in that way."""

    group: ClassVar[str] = "openid"
    title: ClassVar[str] = "Sign-in with an OpenID Connect provider: the provider, and the roles of its users."

    issuer: str = option(
        "",
        "Address of the provider, as its discovery document names it. If given, the sign-in page has a button for it.",
        kind="url",
    )
    client_id: str = option("", "Name of this service at the provider.", kind="plain")
    client_secret_file: str = option(
        "",
        f"File with the client secret. If not given: the environment variable {CLIENT_SECRET_VARIABLE}; a public "
        "client has no secret.",
        kind="file",
    )
    operators: str = option(
        "",
        f"Values of the role claim, separated by commas, that make an operator; {EVERYONE} stands for everyone.",
        kind="plain",
    )
    viewers: str = option(
        "",
        f"Values of the role claim, separated by commas, that make a viewer; {EVERYONE} stands for everyone.",
        kind="plain",
    )
    role_claim: str = option(
        "groups",
        "Claim that decides the role, a word or a list of words. A dot leads into a claim with parts, as "
        "realm_access.roles; email needs an address that the provider has verified.",
        kind="plain",
    )
    name_claim: str = option(
        "email", "Claim that names the person on pages and in the audit log.", kind="plain", expert=True
    )
    scope: str = option("openid email profile", "Scopes to request, separated by spaces.", kind="plain", expert=True)
    redirect_url: str = option(
        "",
        f"Address of this service's page {RETURN_PATH}, as registered at the provider. If not given: that page at the "
        "address by which the browser has reached the service.",
        kind="url",
        expert=True,
    )
    title_of_provider: str = option(
        "OpenID", "Name of the provider on the sign-in page's button.", kind="plain", expert=True
    )
    wait_s: float = option(
        10.0, "Most seconds to wait for each of the provider's responses.", low=0.1, high=25, expert=True
    )

    def check(self) -> None:
        if not self.issuer:
            return
        for name in ("issuer", "redirect_url"):
            parts = urlsplit(getattr(self, name) or "https://localhost")
            if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
                raise SettingsError(f"--openid.{name} must begin with https://, or be on this machine")
        if self.redirect_url and urlsplit(self.redirect_url).path != RETURN_PATH:
            raise SettingsError(f"--openid.redirect_url must end in {RETURN_PATH}")
        if not self.client_id:
            raise SettingsError("--openid.issuer needs --openid.client_id, the name of this service at the provider")
        if not (self.operators or self.viewers):
            raise SettingsError("--openid.issuer needs --openid.operators or --openid.viewers: who may sign in?")
        if "openid" not in self.scope.split():
            raise SettingsError("--openid.scope must contain openid")

    def role_of(self, values: Collection[str]) -> Literal["operator", "viewer"] | None:
        """Return the role that these values of the role claim give, None for no access."""
        roles: tuple[Literal["operator", "viewer"], ...] = ("operator", "viewer")
        for role in roles:
            named = {one.strip() for one in getattr(self, f"{role}s").split(",") if one.strip()}
            if EVERYONE in named or named & set(values):
                return role
        return None

    def client_secret(self) -> str:
        """Return the client secret, "" for a public client. Raises SettingsError."""
        if not self.client_secret_file:
            return os.environ.get(CLIENT_SECRET_VARIABLE, "")
        try:
            return Path(self.client_secret_file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"--openid.client_secret_file {self.client_secret_file} cannot be read: "
                f"{getattr(error, 'strerror', None) or 'it is no text'}"
            ) from None


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches `host`; a host name other than localhost counts as public."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

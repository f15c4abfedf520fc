"""Settings of the service itself: where it listens, what it keeps where, and what it lets in.

Invariants: a service that other machines can reach has TLS, or somebody said in so many words that it has none; every
path that a request names lies below one of `root_paths()`.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rhyme_openrlhf.settings.options import Settings, SettingsError, option

MEGABYTE = 1024 * 1024
# What a browser on the same machine may call the service.
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class ServeSettings(Settings):
    """The control plane's service."""

    group: ClassVar[str] = "serve"
    title: ClassVar[str] = "Control plane: where the service listens, what it keeps where, and what it lets in."

    host: str = option("127.0.0.1", "Address to listen on; one that other machines reach needs TLS.", kind="plain")
    port: int = option(8420, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    database: str = option(
        "", "SQLAlchemy URL of the database. If not given: SQLite in the data directory.", kind="url"
    )
    data_dir: str = option(
        "", "Where the service keeps its files. If not given: rhyme-openrlhf in XDG_DATA_HOME.", kind="output"
    )
    roots: str = option(
        "",
        f"Directories, separated by '{os.pathsep}', below which run directories, agents, rewards, data and checkpoints "
        "may lie. If not given: the working directory and the data directory.",
        kind="output",
    )
    allowed_hosts: str = option(
        "",
        "Further names, separated by commas, under which browsers reach the service (without ports).",
        kind="plain",
    )
    tls_cert: str = option("", "Certificate file (PEM): with --serve.tls_key the service speaks HTTPS.", kind="file")
    tls_key: str = option("", "Private key file (PEM) of the certificate.", kind="file")
    trusted_proxies: str = option(
        "",
        "Addresses or networks, separated by commas, of the proxies before the service: the client's address and HTTPS "
        "are then read from the X-Forwarded-For and X-Forwarded-Proto headers that these proxies send.",
        kind="plain",
    )
    insecure_public: bool = option(
        False, "Listen on a public address without TLS: tokens then cross the network readable by all."
    )
    session_hours: float = option(12.0, "Hours after which a browser must sign in again.", low=0.1, high=720)
    requests_per_second: float = option(
        200.0, "Requests a second that one client address, and one token, may go on making.", low=0.1, high=100000
    )
    request_burst: int = option(400, "Requests that may come at once, above that rate.", low=1, high=100000)
    sign_ins_per_minute: float = option(
        20.0, "Wrong tokens and sign-in links a minute that one client address may try.", low=0.1, high=100000
    )
    body_mb: float = option(1.0, "Largest request body in MB, except batches of events.", low=0.01, high=1024)
    batch_mb: float = option(
        16.0, "Largest batch of events in MB as sent; unpacked it may be four times that.", low=0.1, high=1024
    )
    body_seconds: float = option(
        30.0,
        "Seconds in which the whole body of a request must come; a slower one is answered with 408.",
        low=0.1,
        high=3600,
    )
    batches_in_flight: int = option(
        16, "Batches taken in at once; more are answered with 503 and when to come again.", low=1, high=1024
    )
    ingest_workers: int = option(
        0,
        "Processes that take batches in, so that pages do not wait for them. 0: one on SQLite, which has one writer, "
        "two on PostgreSQL.",
        low=0,
        high=64,
    )
    live_poll_s: float = option(
        0.5, "Seconds between two looks for new events, for pages that watch a run live.", low=0.05, high=60
    )
    streams: int = option(
        100, "Live streams (events, logs) open at once; more are answered with 503.", low=1, high=10000
    )

    def check(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise SettingsError(
                "--serve.tls_cert and --serve.tls_key belong together: give both (HTTPS) or neither (HTTP)"
            )
        if not self.host:
            raise SettingsError("--serve.host must not be empty; 127.0.0.1 listens for this machine only")
        if not (is_loopback(self.host) or self.tls or self.insecure_public):
            raise SettingsError(
                f"--serve.host {self.host} can be reached by other machines: give --serve.tls_cert and "
                "--serve.tls_key, or say --serve.insecure_public if the network is yours alone"
            )
        self.proxies()

    @property
    def tls(self) -> bool:
        """Whether the service itself speaks HTTPS."""
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
        """Where the service keeps its files; need not exist."""
        if self.data_dir:
            return Path(self.data_dir).expanduser().absolute()
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return Path(base).expanduser().absolute() / "rhyme-openrlhf"

    def database_url(self) -> str:
        """SQLAlchemy URL of the store."""
        return self.database or f"sqlite:///{self.data_path() / 'rhyme.sqlite'}"

    def root_paths(self) -> tuple[Path, ...]:
        """The roots, resolved through symbolic links."""
        named = [Path(part).expanduser() for part in self.roots.split(os.pathsep) if part]
        return tuple(path.resolve() for path in named or [Path.cwd(), self.data_path()])

    def host_names(self) -> frozenset[str]:
        """Values of the Host header, without port and in lower case, that mean this service."""
        own = f"[{self.host}]" if ":" in self.host else self.host
        further = [name.strip() for name in self.allowed_hosts.split(",")]
        return frozenset(name.lower() for name in (*LOOPBACK_NAMES, own, *further) if name)

    def base_url(self, port: int | None = None) -> str:
        """The address for people; `port` is the one taken, where the setting says 0."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port if port is None else port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host` (a name that is no address counts as public, but for localhost)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

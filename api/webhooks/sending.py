"""One message as one signed HTTP request.

The signature is that of the Standard Webhooks specification: HMAC-SHA256 of `id.timestamp.body`, in base64, in the
header `webhook-signature` as `v1,...`. `webhook-id` is the same in every try, so a receiver knows repetitions.

Invariants:

- A request ends within `SECONDS` for any receiver; of its response, at most `READ_BYTES` are read.
- Only a status of 2xx is success. Redirects are not followed, because they could lead into the service's own network.
- With `public_only`, the address that was checked is the one that is connected to.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import hmac
import ipaddress
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from rhyme_openrlhf import __version__
from rhyme_openrlhf.api.store.webhooks import SECRET_START

# Slack and CI services answer within one; a receiver that works longer should answer first.
SECONDS = 10.0
# Enough for the sentence with which a receiver refuses.
READ_BYTES = 1000
SHOWN = 200
# The only part of IPv6 with public addresses, and within it those that hold IPv4 addresses (Teredo, 6to4).
GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
TRANSLATED = (ipaddress.IPv6Network("2001::/32"), ipaddress.IPv6Network("2002::/16"))


class NotPublicError(Exception):
    """The receiver's address is not public; the message is one sentence."""


@dataclass(frozen=True)
class Outcome:
    """The result of a try. `error` is "" after a success; `retry_after`: seconds that the receiver asks to wait."""

    status: int | None
    error: str = ""
    retry_after: float = 0.0


def message_id(webhook_id: int, key: str) -> str:
    """Return the id of a message."""
    return f"msg_{webhook_id}_{key}"


def body_of(form: str, content: Mapping[str, Any]) -> bytes:
    """Return a message's body in the webhook's form."""
    if form == "slack":
        run = content["run"] or {}
        lines = [_for_slack(content["text"]), _for_slack(run.get("verdict", "")), run.get("url", "")]
        return json.dumps({"text": "\n".join(filter(None, lines))}).encode()
    return json.dumps(content).encode()


def _for_slack(text: str) -> str:
    """Return text that Slack shows as it is, because `<!channel>` in a run's name would call everyone."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def headers_of(secret: str, identity: str, body: bytes, now: float) -> dict[str, str]:
    """Return the headers of a message that is sent at `now` (unix seconds)."""
    stamp = str(int(now))
    key = base64.b64decode(secret.removeprefix(SECRET_START))
    digest = hmac.new(key, f"{identity}.{stamp}.".encode() + body, hashlib.sha256).digest()
    return {
        "content-type": "application/json",
        "user-agent": f"rhyme-openrlhf/{__version__}",
        # A compressed response could be far longer than what is read of it.
        "accept-encoding": "identity",
        "webhook-id": identity,
        "webhook-timestamp": stamp,
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


async def post(
    url: str, form: str, secret: str, identity: str, content: Mapping[str, Any], public_only: bool
) -> Outcome:
    """Send a message once. Raises nothing that a receiver could cause."""
    body = body_of(form, content)
    headers = headers_of(secret, identity, body, time.time())
    try:
        async with asyncio.timeout(SECONDS):
            target, extensions = httpx.URL(url), {}
            if public_only:
                headers["host"] = target.netloc.decode()
                extensions = {"sni_hostname": target.host}
                target = target.copy_with(host=await _public_address(target))
            async with (
                # With a proxy, the address that is connected to would be the proxy's choice.
                httpx.AsyncClient(verify=_certificates(), trust_env=not public_only, timeout=SECONDS) as client,
                client.stream("POST", target, content=body, headers=headers, extensions=extensions) as response,
            ):
                if response.is_success:
                    return Outcome(response.status_code)
                said = f"it answered {response.status_code} {await _beginning(response)}".rstrip()
                return Outcome(response.status_code, said, _seconds(response.headers.get("retry-after", "")))
    except (TimeoutError, httpx.TimeoutException):
        return Outcome(None, f"it did not answer within {SECONDS:g} s")
    except NotPublicError as error:
        return Outcome(None, str(error))
    # UnicodeError: a host name that no name server can be asked for.
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
        return Outcome(None, _one_line(f"{type(error).__name__}: {error}"))


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the trusted certificates; reading them takes longer than a request."""
    return httpx.create_ssl_context()


async def _public_address(target: httpx.URL) -> str:
    """Return an address of the receiver. Raises NotPublicError if any of its addresses is not public, and OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(target.host, target.port or 443, type=1)
    addresses = [ipaddress.ip_address(str(one[4][0]).partition("%")[0]) for one in found]
    for address in addresses:
        if not is_public(address):
            raise NotPublicError(f"{address} is not a public address (--serve.webhooks_public_only)")
    return str(addresses[0])


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether an address belongs to one machine on the internet.

    An IPv6 address that holds an IPv4 address may lead to that one. So mapped addresses count as what they hold, and
    other kinds (NAT64, 6to4, Teredo, IPv4-compatible) as not public.
    """
    mapped = getattr(address, "ipv4_mapped", None)
    if mapped is not None:
        return is_public(mapped)
    if isinstance(address, ipaddress.IPv6Address) and (
        address not in GLOBAL_UNICAST or any(address in network for network in TRANSLATED)
    ):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


async def _beginning(response: httpx.Response) -> str:
    read = b""
    # The status is known, also if the rest breaks off or breaks the protocol.
    with contextlib.suppress(httpx.HTTPError):
        async for piece in response.aiter_raw():
            read += piece
            if len(read) >= READ_BYTES:
                break
    return _one_line(read[:READ_BYTES].decode("utf-8", "replace"))


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:SHOWN]


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0

"""The control plane's Python client: start, watch, stop, compare and export runs from a program.

    from rhyme_openrlhf.client import Client

    with Client() as client:  # the address and token that `rhyme runs login` kept
        run = client.start("rhyme demo", name="trial")
        print(client.wait(run["uid"])["reward"])

Read in this order: `models.py` (the JSON that comes back), `calls.py` (every request, once), `client.py` (which sends
them, blocking or for asyncio), `transport.py` (limits and live streams), `errors.py`, `access.py` (address and token).
"""

from rhyme_openrlhf.client.access import Access, find_access
from rhyme_openrlhf.client.client import AsyncClient, Client, exchange
from rhyme_openrlhf.client.errors import AccessError, ClientError, UnreachableError

__all__ = [
    "Access",
    "AccessError",
    "AsyncClient",
    "Client",
    "ClientError",
    "UnreachableError",
    "exchange",
    "find_access",
]

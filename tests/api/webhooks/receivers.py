"""Receivers of webhooks over real sockets: what they got, and the ways in which they misbehave."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class Receiver:
    """A receiver that answers each request with the bytes `answer` says, after `seconds`.

    `endless`: more bytes follow for ever, one a twentieth of a second.
    """

    answer: bytes = OK
    seconds: float = 0.0
    endless: bool = False
    url: str = ""
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    def contents(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]

    def verified(self, secret: str) -> bool:
        """Whether every message is signed, as a receiver checks it by the specification."""
        key = base64.b64decode(secret.removeprefix("whsec_"))
        for headers, body in self.got:
            assert abs(time.time() - int(headers["webhook-timestamp"])) < 300
            signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
            right = "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
            if not hmac.compare_digest(right, headers["webhook-signature"]):
                return False
        return bool(self.got)


@contextlib.contextmanager
def receiving(**given: Any) -> Iterator[Receiver]:
    """A receiver on a free port."""
    receiver = Receiver(**given)
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            ended.wait(receiver.seconds)
            with contextlib.suppress(OSError):
                self.wfile.write(receiver.answer)
                while receiver.endless and not ended.wait(0.05):
                    self.wfile.write(b"x" * 10_000)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_port}/hook"
    try:
        yield receiver
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)

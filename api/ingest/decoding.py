"""Decoding of a batch: decompresses the request's body within a limit and parses it strictly.

Pure, and slow for a large batch (tens of milliseconds), so it runs in a thread.
"""

from __future__ import annotations

import zlib
from typing import Annotated, Any

import msgspec

from rhyme_openrlhf.api.store.bounds import INT32
from rhyme_openrlhf.api.store.json_values import COUNT_MAX, storable
from rhyme_openrlhf.api.store.record import SOURCE_LENGTH

# Largest ratio of a batch to its packed size: events shrink about tenfold, a zip bomb a thousandfold.
UNPACKED_RATIO = 4
# Most sources of one run: the driver, the trainer, and one engine per device of the largest cluster, several times.
MOST_SOURCES = 10_000
_GZIP = 16 + zlib.MAX_WBITS


SourceName = Annotated[str, msgspec.Meta(min_length=1, max_length=SOURCE_LENGTH)]


class BatchError(ValueError):
    """A batch that is refused as a whole; the message is one sentence for the reporter."""


class EncodingError(BatchError):
    """A body in a content encoding that the service does not support."""


class TooLargeError(BatchError):
    """A body that is larger than the limit after unpacking."""


class FormError(BatchError):
    """A body that is not a valid batch. `field` and `fault` name place and error, empty for the whole body."""

    def __init__(self, message: str, field: str = "", fault: str = "") -> None:
        super().__init__(message, field, fault)
        self.field = field
        self.fault = fault

    def __str__(self) -> str:
        return str(self.args[0])


class Heartbeat(msgspec.Struct, forbid_unknown_fields=True):
    """The reporter's view of the driver's process; None if unknown."""

    alive: bool | None = None


class BatchBody(msgspec.Struct):
    """One request. Unknown fields of a newer reporter are skipped, as in events."""

    events: list[Any]
    sent_at: float | None = None
    # Number of events of each source that will never be sent, since the attempt began.
    dropped: dict[SourceName, Annotated[int, msgspec.Meta(ge=0, le=INT32)]] = {}
    heartbeat: Heartbeat | None = None
    # For each source, the sequence after the last event that the service has confirmed; sources of the batch suffice.
    known: dict[SourceName, Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX + 1)]] = {}


_decoder = msgspec.json.Decoder(BatchBody)


def unpack(body: bytes, encoding: str | None, limit: int) -> bytes:
    """Return the decompressed body, at most `limit` bytes. Raises EncodingError, TooLargeError, FormError."""
    if encoding in (None, "", "identity"):
        return body
    if encoding != "gzip":
        raise EncodingError("the content encoding must be gzip or none")
    unpacker = zlib.decompressobj(wbits=_GZIP)
    try:
        data = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise FormError("the body is not gzip, although its Content-Encoding is gzip") from error
    if len(data) > limit:
        raise TooLargeError(f"the unpacked body is larger than {limit} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise FormError("the gzip body is truncated or has extra bytes at its end")
    return data


def parse_batch(data: bytes) -> BatchBody:
    """Parse a batch. Raises FormError with the place."""
    try:
        batch = _decoder.decode(data)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at ")
        field = f"body{place.strip('`').removeprefix('$')}"
        raise FormError("the batch is not valid", field, message) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormError("the body is not JSON") from error
    except UnicodeDecodeError as error:
        raise FormError("the body is not UTF-8") from error
    for name, sources in (("dropped", batch.dropped), ("known", batch.known)):
        if len(sources) > MOST_SOURCES or not all(map(storable, sources)):
            fault = f"must name at most {MOST_SOURCES} writers in plain text"
            raise FormError("the batch is not valid", f"body.{name}", fault)
    return batch

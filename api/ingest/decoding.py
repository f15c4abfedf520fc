"""From the bytes of a batch's request to its parts: unpacked within a limit, parsed strictly.

Pure, and slow for a large batch (tens of milliseconds): it runs in a thread.
"""

from __future__ import annotations

import zlib
from typing import Annotated, Any

import msgspec

from rhyme_openrlhf.api.store.bounds import INT32
from rhyme_openrlhf.api.store.json_values import COUNT_MAX, storable
from rhyme_openrlhf.api.store.record import SOURCE_LENGTH

# How much larger than its packed form a batch may be: events pack about ten times, but a bomb packs a thousand times.
UNPACKED_RATIO = 4
# Writers of one run: the driver, the trainer, and an engine a device of the largest cluster, several times over.
MOST_SOURCES = 10_000
_GZIP = 16 + zlib.MAX_WBITS


SourceName = Annotated[str, msgspec.Meta(min_length=1, max_length=SOURCE_LENGTH)]


class BatchError(ValueError):
    """A batch that is refused as a whole; the message is one sentence for the reporter."""


class EncodingError(BatchError):
    """A body in a content encoding that the service does not unpack."""


class TooLargeError(BatchError):
    """A body that is larger unpacked than a batch may be."""


class FormError(BatchError):
    """A body that has not the form of a batch. `field` and `fault` say where and what, empty for the whole body."""

    def __init__(self, message: str, field: str = "", fault: str = "") -> None:
        super().__init__(message, field, fault)
        self.field = field
        self.fault = fault

    def __str__(self) -> str:
        return str(self.args[0])


class Heartbeat(msgspec.Struct, forbid_unknown_fields=True):
    """What the reporter sees of the driver's process; None: nothing."""

    alive: bool | None = None


class BatchBody(msgspec.Struct):
    """One request. Fields of a newer reporter are skipped, as in events."""

    events: list[Any]
    sent_at: float | None = None
    # Events of each source that will never be sent, since the attempt began.
    dropped: dict[SourceName, Annotated[int, msgspec.Meta(ge=0, le=INT32)]] = {}
    heartbeat: Heartbeat | None = None
    # Of each source, the sequence behind the last event that the service has confirmed; sources of the batch suffice.
    known: dict[SourceName, Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX + 1)]] = {}


_decoder = msgspec.json.Decoder(BatchBody)


def unpack(body: bytes, encoding: str | None, limit: int) -> bytes:
    """The body without its content encoding, at most `limit` bytes. Raises EncodingError, TooLargeError, FormError."""
    if encoding in (None, "", "identity"):
        return body
    if encoding != "gzip":
        raise EncodingError("the content encoding must be gzip or none")
    unpacker = zlib.decompressobj(wbits=_GZIP)
    try:
        data = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise FormError("the body is not gzip, though it says so") from error
    if len(data) > limit:
        raise TooLargeError(f"the unpacked body is larger than {limit} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise FormError("the gzip body is cut short or has something behind it")
    return data


def parse_batch(data: bytes) -> BatchBody:
    """Read the parts of a batch. Raises FormError with the place."""
    try:
        batch = _decoder.decode(data)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at ")
        field = f"body{place.strip('`').removeprefix('$')}"
        raise FormError("the batch does not have its form", field, message) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormError("the body is not JSON") from error
    except UnicodeDecodeError as error:
        raise FormError("the body is not UTF-8") from error
    for name, sources in (("dropped", batch.dropped), ("known", batch.known)):
        if len(sources) > MOST_SOURCES or not all(map(storable, sources)):
            fault = f"must name at most {MOST_SOURCES} writers in plain text"
            raise FormError("the batch does not have its form", f"body.{name}", fault)
    return batch

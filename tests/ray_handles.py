"""Stand-ins for handles of Ray actors, which offer the methods of a class and refuse others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def handle_of(actor: type, answer: Callable[..., Any]) -> Any:
    """Return a handle of an `actor` that answers each call with `answer(name, *arguments)`.

    The handle has no other methods than `actor`, a class or a protocol. A method raises TypeError for other arguments
    than its own.
    """

    def method(name: str, signature: inspect.Signature) -> SimpleNamespace:
        def remote(*arguments: Any, **named: Any) -> Any:
            signature.bind(None, *arguments, **named)
            return answer(name, *arguments, **named)

        return SimpleNamespace(remote=remote)

    found = inspect.getmembers(actor, inspect.isfunction)
    return SimpleNamespace(
        **{name: method(name, inspect.signature(one)) for name, one in found if not name.startswith("_")}
    )

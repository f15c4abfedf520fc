"""Errors of failing engines.

A run may outlive an engine. With samples at home (moves/) the samples go on elsewhere, and the streaming pipeline has
prompt groups generated again. Which engines are lost, `engine_losses` alone says.
"""

from __future__ import annotations


class EngineCoreError(RuntimeError):
    """The vLLM process behind an engine is gone."""


class WeightLoadError(RuntimeError):
    """An engine was told to load weights at a moment when it must not, or could not load them."""


class RefusedParameterError(ValueError):
    """A request asks for sampling parameters that an engine with drafts cannot apply."""


class EngineLost(RuntimeError):
    """The engine is gone, and with it everything that was only there. `engine`: its number, None: not one engine's."""

    def __init__(self, text: str, engine: int | None = None) -> None:
        super().__init__(text)
        self.engine = engine


class OrderFailed(RuntimeError):
    """The engine is well, but a call to it raised; the message says what."""


class EngineCallError(RuntimeError):
    """The engine failed, or did not answer in time; the message says what was waited for."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message: what is wrong, of one that goes on with details."""
    return _lines(error)[0].strip()


def last_line(error: Exception) -> str:
    """Return the last line of an error's message: of a remote one, what was raised."""
    return _lines(error)[-1].strip()


def _lines(error: Exception) -> list[str]:
    return str(error).strip().splitlines() or ["no message"]

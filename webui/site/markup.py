"""Line breaks in long names and commands. Pure: text becomes the same text with elements around its parts.

Invariant: the result is escaped, and copying it from the page gives the original text.
"""

from __future__ import annotations

import re

from markupsafe import Markup, escape

_JOINTS = re.compile(r"(?<=[_/.])")
# An option of a command, without its value after "=".
_OPTION = re.compile(r"(?<!\S)--?[A-Za-z][\w.-]*")


def breakable(name: str) -> Markup:
    """Return a metric's name that may break only after an underscore, a dot or a slash."""
    return Markup("<wbr>").join(_JOINTS.split(name))


def whole_options(command: str) -> Markup:
    """Return a command whose option names never break; browsers would break them after hyphens."""
    found, at = Markup(), 0
    for option in _OPTION.finditer(command):
        found += escape(command[at : option.start()]) + Markup('<span class="whole">{}</span>').format(option[0])
        at = option.end()
    return found + escape(command[at:])

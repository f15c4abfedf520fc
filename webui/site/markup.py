"""Where long names and commands may break into lines. Pure: text in, the same text with elements around its parts.

Invariant: what is given is text; it comes out escaped, and copied it is what it was.
"""

from __future__ import annotations

import re

from markupsafe import Markup, escape

_JOINTS = re.compile(r"(?<=[_/.])")
# Of a command: an option with its value, if that is given with "=".
_OPTION = re.compile(r"(?<!\S)--?[A-Za-z][\w.-]*")


def breakable(name: str) -> Markup:
    """A metric's name, which may break after an underscore, a dot or a slash, and nowhere else."""
    return Markup("<wbr>").join(_JOINTS.split(name))


def whole_options(command: str) -> Markup:
    """A command whose options' names stay in one piece: browsers break lines after hyphens."""
    found, at = Markup(), 0
    for option in _OPTION.finditer(command):
        found += escape(command[at : option.start()]) + Markup('<span class="whole">{}</span>').format(option[0])
        at = option.end()
    return found + escape(command[at:])

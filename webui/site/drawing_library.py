"""plotly.js for our pages: the file of the `plotly` package without the parts that our figures do not use.

Bars and curves need a quarter of its 4.8 MB. The rest (maps, 3D, forty other kinds of traces) would be downloaded,
parsed and partly run before the first drawing.

The file is a list of modules, `var name=W((exports,module)=>{...});`. A module runs when another one calls it
(`name()`), and the last module registers every kind of trace. This code keeps only the kinds in `TRACES` there, and
then removes the modules that nothing calls any more.

Invariants: the inside and the order of modules do not change, and licences stay. Only tested versions (`TRIED`) are
reduced. Any other version is sent as it is: pages work, but load more slowly.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

# Kinds of traces in the figures; curves ("scatter") belong to the core.
TRACES = frozenset({"scatter", "bar"})
# SHA-256 of the files known to have this form: plotly.js 4.1.1.
TRIED = frozenset({"3b6e15d45dbb7fca5bd2094291e961ddc5472cd887009e6009a56dab668d721f"})

# The beginning of a module: one called as a whole (`W`), or one of several parts (`Ea`).
_BEGIN = re.compile(
    r"(?:(?<=[;}])var (?P<whole>[\w$]+)=W|[,;} ](?P<parts>[\w$]+)=Ea)"
    r"\((?:\(\)|\([\w$]+(?:,[\w$]+)*\)|[\w$]+)=>\{"
)
# The end of the modules: the kinds of traces are registered, and the registering module is called.
_END = re.compile(
    r"\.register\(\[(?P<kinds>[\w$(),]+)\]\);[\w$]+\.exports=[\w$]+\}\);(?=return (?P<first>[\w$]+)\(\);)"
)
_KIND = re.compile(r'moduleType:"trace",name:"(\w+)"')
# A module that only re-exports another one.
_HANDS_ON = re.compile(r"\.exports=([\w$]+)\(\)\}\);$")
# Declared names with which the next module begins.
_DECLARES = re.compile(r"var[\w$, ]*$")
_NAME_AT_END = re.compile(r"[\w$]+$")
# Longer than any name that a minifier makes.
_NAME_LENGTH = 12
_CLOSED = "});"
# The function that returns `Plotly`, passed as an argument to the function around all modules.
_FUNCTION = "() => {"
_FACTORY = f"self : this, {_FUNCTION}"
_FACTORY_END = "}));"


@dataclass(frozen=True)
class _Module:
    """A module at `begin` to `end` of the file; its statements begin at `body`. `whole`: see `_BEGIN`."""

    name: str
    whole: bool
    begin: int
    body: int
    end: int


@functools.cache
def drawing_library() -> str:
    """Return the script."""
    content = resources.files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
    text = content.decode()
    return read_at_once(reduced(text, TRACES)) if hashlib.sha256(content).hexdigest() in TRIED else text


def reduced(text: str, traces: Iterable[str]) -> str:
    """Return plotly.js with these kinds of traces only; raise ValueError if the file has another form."""
    end = _END.search(text)
    if end is None:
        raise ValueError("cannot find the modules in this plotly.js")
    modules = _modules(text, end.end())
    kinds = end["kinds"].replace("()", "").split(",")
    kept = [name for name in kinds if _kind(text, modules, name) in traces]
    live = _asked_for(text, modules, end["first"], frozenset(kinds) - frozenset(kept))
    pieces, at = [], 0
    order = list(modules.values())
    for module, following in zip(order, [*order[1:], None], strict=True):
        if module.name in live:
            continue
        # Functions and names of a module of several parts precede it, so the text behind this module belongs to the
        # next.
        next_too = following is not None and not following.whole and following.name not in live
        if until := _end_of(text, module, next_too):
            pieces.append(text[at : module.begin] if module.whole else text[at : module.body] + _CLOSED)
            at = until
    pieces.append(text[at:])
    registered = ",".join(f"{name}()" for name in kept)
    return "".join(pieces).replace(f".register([{end['kinds']}])", f".register([{registered}])")


def read_at_once(text: str) -> str:
    """Return the script with parentheses around the function that holds everything.

    Browsers then compile the function while the script arrives. Otherwise they skip it and parse it again when it is
    called, which blocks the page. Raise ValueError if the function is not found.
    """
    begin, end = text.find(_FACTORY), text.rfind(_FACTORY_END)
    if begin < 0 or end < begin:
        raise ValueError("cannot find the factory function in this plotly.js")
    begin += len(_FACTORY) - len(_FUNCTION)
    return f"{text[:begin]}({text[begin:end]}}}){text[end + 1 :]}"


def _modules(text: str, end: int) -> dict[str, _Module]:
    found = list(_BEGIN.finditer(text, 0, end))
    ends = [one.start() for one in found[1:]] + [end]
    return {
        name: _Module(name, one["whole"] is not None, one.start(), one.end(), until)
        for one, until in zip(found, ends, strict=True)
        if (name := one["whole"] or one["parts"])
    }


def _kind(text: str, modules: dict[str, _Module], name: str) -> str:
    """Return the kind of trace that this module registers, or ""."""
    while module := modules.get(name):
        inside = text[module.begin : module.end]
        if kind := _KIND.search(inside):
            return kind[1]
        handed = _HANDS_ON.search(inside)
        name = handed[1] if handed else ""
    return ""


def _asked_for(text: str, modules: dict[str, _Module], first: str, left_out: frozenset[str]) -> set[str]:
    """Return the module `first` and all modules that it may call, directly or not.

    `first` does not call those `left_out`.
    """
    outside = text[: next(iter(modules.values())).begin]
    found: set[str] = set()
    waiting = [first, *_calls(outside)]
    while waiting:
        name = waiting.pop()
        module = modules.get(name)
        if module is None or name in found:
            continue
        found.add(name)
        calls = _calls(text[module.begin : module.end])
        waiting += calls - left_out if name == first else calls
    return found


def _calls(text: str) -> set[str]:
    """Return the names that are called without arguments."""
    ends = (_NAME_AT_END.search(part[-_NAME_LENGTH:]) for part in text.split("()"))
    return {one[0] for one in ends if one}


def _end_of(text: str, module: _Module, next_too: bool) -> int:
    """Return the end of a module that can be removed, or 0 if its end is unclear.

    `next_too`: the next module is removed as well, with the functions and names before it.
    """
    declares = _DECLARES.search(text, module.begin, module.end)
    end = declares.start() if declares else module.end
    return end if next_too or text.endswith(_CLOSED, module.begin, end) else 0

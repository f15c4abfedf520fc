"""plotly.js for our pages: what the `plotly` package ships, less what no figure of ours uses.

Bars and curves need a quarter of its 4.8 MB; the rest (maps, 3D, forty other kinds of traces) a browser would fetch,
parse and partly run before the first drawing. The file is a list of modules, `var name=W((exports,module)=>{...});`,
each run when another one asks for it (`name()`), and at its end one asks for every kind of trace. There only those of
`TRACES` are left, and then the modules that nothing asks for any more are left out.

Invariants: nothing inside a module is changed, nor the order of modules; licences stay. Only files that were tried
(`TRIED`) are touched: that of any other version is given as it is shipped, and pages work, but load more slowly.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

# Kinds of traces in the figures; curves ("scatter") are part of the core.
TRACES = frozenset({"scatter", "bar"})
# The SHA-256 of the files that are known to have this form: that of plotly.js 4.1.1.
TRIED = frozenset({"3b6e15d45dbb7fca5bd2094291e961ddc5472cd887009e6009a56dab668d721f"})

# Where a module begins: one that is asked for as a whole (`W`), or one of several parts (`Ea`).
_BEGIN = re.compile(
    r"(?:(?<=[;}])var (?P<whole>[\w$]+)=W|[,;} ](?P<parts>[\w$]+)=Ea)"
    r"\((?:\(\)|\([\w$]+(?:,[\w$]+)*\)|[\w$]+)=>\{"
)
# The end of all modules: the kinds of traces are registered, and the module that does it is asked for.
_END = re.compile(
    r"\.register\(\[(?P<kinds>[\w$(),]+)\]\);[\w$]+\.exports=[\w$]+\}\);(?=return (?P<first>[\w$]+)\(\);)"
)
_KIND = re.compile(r'moduleType:"trace",name:"(\w+)"')
# A module that only hands on another one.
_HANDS_ON = re.compile(r"\.exports=([\w$]+)\(\)\}\);$")
# Names of what the next module declares, and begins with.
_DECLARES = re.compile(r"var[\w$, ]*$")
_NAME_AT_END = re.compile(r"[\w$]+$")
# Longer than any name that a minifier gives.
_NAME_LENGTH = 12
_CLOSED = "});"
# The function that gives `Plotly`, as an argument of the one that is called with it.
_FUNCTION = "() => {"
_FACTORY = f"self : this, {_FUNCTION}"
_FACTORY_END = "}));"


@dataclass(frozen=True)
class _Module:
    """`begin` to `end` of the file; its statements begin at `body`. `whole`: see `_BEGIN`."""

    name: str
    whole: bool
    begin: int
    body: int
    end: int


@functools.cache
def drawing_library() -> str:
    """The script."""
    content = resources.files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
    text = content.decode()
    return read_at_once(reduced(text, TRACES)) if hashlib.sha256(content).hexdigest() in TRIED else text


def reduced(text: str, traces: Iterable[str]) -> str:
    """plotly.js with these kinds of traces only. Raises ValueError: it has another form."""
    end = _END.search(text)
    if end is None:
        raise ValueError("not a plotly.js whose modules can be told apart")
    modules = _modules(text, end.end())
    kinds = end["kinds"].replace("()", "").split(",")
    kept = [name for name in kinds if _kind(text, modules, name) in traces]
    live = _asked_for(text, modules, end["first"], frozenset(kinds) - frozenset(kept))
    pieces, at = [], 0
    order = list(modules.values())
    for module, following in zip(order, [*order[1:], None], strict=True):
        if module.name in live:
            continue
        # Functions and names of a module of several parts stand before it: what is behind this one is the next one's.
        next_too = following is not None and not following.whole and following.name not in live
        if until := _end_of(text, module, next_too):
            pieces.append(text[at : module.begin] if module.whole else text[at : module.body] + _CLOSED)
            at = until
    pieces.append(text[at:])
    registered = ",".join(f"{name}()" for name in kept)
    return "".join(pieces).replace(f".register([{end['kinds']}])", f".register([{registered}])")


def read_at_once(text: str) -> str:
    """With the function that holds everything in parentheses.

    Browsers then compile it while the script arrives, beside the page; else they skip it, and read all of it again when
    it is called, in the page's way. Raises ValueError: the function is not where it was.
    """
    begin, end = text.find(_FACTORY), text.rfind(_FACTORY_END)
    if begin < 0 or end < begin:
        raise ValueError("not a plotly.js whose factory can be told apart")
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
    """The kind of trace that this module is; empty if it is none."""
    while module := modules.get(name):
        inside = text[module.begin : module.end]
        if kind := _KIND.search(inside):
            return kind[1]
        handed = _HANDS_ON.search(inside)
        name = handed[1] if handed else ""
    return ""


def _asked_for(text: str, modules: dict[str, _Module], first: str, left_out: frozenset[str]) -> set[str]:
    """The module `first` and all that it, and what it asks for, may ask for; it does not ask for those `left_out`."""
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
    """Names that are called without arguments."""
    ends = (_NAME_AT_END.search(part[-_NAME_LENGTH:]) for part in text.split("()"))
    return {one[0] for one in ends if one}


def _end_of(text: str, module: _Module, next_too: bool) -> int:
    """Up to where a module that nothing asks for can be left out; 0 if its end is not plain to see.

    `next_too`: so is the next one, with the functions and names of it that stand before it.
    """
    declares = _DECLARES.search(text, module.begin, module.end)
    end = declares.start() if declares else module.end
    return end if next_too or text.endswith(_CLOSED, module.begin, end) else 0

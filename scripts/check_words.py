"""Find text that is hard to read: docstring openings, words, and long sentences that CONTRIBUTING.md rules out.

`python scripts/check_words.py` prints what it finds, one line each, and exits with 1 if there is any; `--count` prints
numbers by folder instead. It reads:

- docstrings, comments and messages of Python files (what `raise`, `print`, a parser's help and `option` say),
- paragraphs, list entries and headings of Markdown files, without code blocks, tables and quoted code,
- text of the dashboard's templates,
- and it looks for this project's own terms that the table of words in docs/glossary.md does not explain.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from html import unescape
from pathlib import Path
from typing import NamedTuple

# First words of a docstring: a pronoun or preposition there stands for a noun that the reader does not know.
OPENINGS = re.compile(
    r"(As|At|Because|Beside|Beyond|But|By|Everybody|Everyone|Everything|For|From|He|How|If|In|It|Its|Nobody|Nothing|Of|On"
    r"|Only|Since|So|Such|That|Their|Them|These|They|This|Those|Till|To|Under|Unless|Until|What|Whatever|When|Where"
    r"|Whether|Which|While|Who|Whoever|Whose|Why|With|Without)\b"
)
# A function's docstring begins with a verb; these words begin a noun phrase.
NOUN_OPENINGS = re.compile(
    r"(A|All|An|And|Any|Both|Each|Either|Every|Half|Less|Likewise|More|Most|Neither|No|One|Some|The|Two)\b"
)
# Words that stand for a noun, or that this project once used in a meaning of its own.
WORDS = (
    "whatever", "whoever", "whichever", "whomever", "how-manieth", "so many", "so much", "what there is of",
    "nobody knows", "somebody", "is told of", "are told of", "fares", "fare", "comes about", "come about",
)  # fmt: skip
MOST_WORDS = 30
# Terms of this project that a page of the docs may use only if the table of words explains them.
TERMS = (
    "acceptance rate", "attempt", "bubble", "carrier", "deferral", "draft budget", "draft index", "gain now",
    "history worker", "home", "keeper", "layout", "move", "off-policyness", "outlier", "paced", "prompt group",
    "rank group", "reporter", "seat", "siblings", "speculation rate", "tail layout", "weight version", "window",
)  # fmt: skip
RULES = ("opening", "word", "long", "term")
WORDS_PAGE = "docs/glossary.md"
# Calls whose strings users read, and keywords of calls that do so everywhere.
MESSAGE_CALLS = frozenset({"print", "option", "ArgumentParser", "add_argument", "add_parser", "add_argument_group"})
MESSAGE_KEYWORDS = frozenset({"help", "description", "epilog"})
_WORDS = re.compile(r"(?<![\w-])(" + "|".join(WORDS) + r")(?![\w-])", re.IGNORECASE)
# A sentence ends with a full stop, or with a colon or semicolon before a capital, a digit or a quoted word.
_END = re.compile(r"(?<=[.!?])\s+|(?<=[:;])\s+(?=[A-Z0-9`*\"(\[])")
_WORD = re.compile(r"[\w%'-]*[A-Za-z][\w%'-]*")


class Finding(NamedTuple):
    """One place that breaks a rule."""

    file: str
    line: int
    rule: str
    text: str


def of_python(file: str, source: str) -> Iterator[Finding]:
    """Yield what a Python file's docstrings and comments break."""
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        # Indented lines show code.
        text = re.sub(r"(?m)^ {4,}.*$", "", ast.get_docstring(node) or "")
        if not text:
            continue
        line = node.body[0].lineno
        yield from _opening(file, line, node, text)
        yield from _words(file, line, text)
        yield from _sentences(file, line, text)
    for line, text in _messages(nodes):
        yield from _words(file, line, text)
        yield from _sentences(file, line, text)
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(fmt|type|noqa|ruff|isort|pragma)\b", token.string):
            line, text = token.start[0], token.string.lstrip("# ")
            if comments and comments[-1][0] + comments[-1][1].count("\n") + 1 == line:
                comments[-1] = (comments[-1][0], f"{comments[-1][1]}\n{text}")
            else:
                comments.append((line, text))
    for line, text in comments:
        yield from _words(file, line, text)
        yield from _sentences(file, line, text)


def _messages(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the strings that users read: arguments of exceptions, `print`, parsers' calls and `option`."""
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            read = [*node.exc.args, *(one.value for one in node.exc.keywords)]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            read = [one.value for one in node.keywords if one.arg in MESSAGE_KEYWORDS]
            if name in MESSAGE_CALLS:
                read += node.args
        else:
            continue
        for one in read:
            text = _string(one)
            if text:
                yield one.lineno, text


def _string(node: ast.AST) -> str:
    """Return a string's text, values of an f-string as one word each; "" for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_string(part) or "Code" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _string(node.left) + _string(node.right)
    return ""


def _opening(file: str, line: int, node: ast.AST, text: str) -> Iterator[Finding]:
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_property(node)
    # A test's docstring says what holds: any sentence.
    if Path(file).parts[0] == "tests" and is_function:
        return
    if OPENINGS.match(text) or (is_function and NOUN_OPENINGS.match(text)):
        yield Finding(file, line, "opening", text.splitlines()[0])


def _is_property(node: ast.AST) -> bool:
    names = {ast.unparse(one).rpartition(".")[2] for one in getattr(node, "decorator_list", [])}
    return bool(names & {"property", "cached_property", "fixture"}) or any("fixture" in name for name in names)


def of_markdown(file: str, source: str) -> Iterator[Finding]:
    """Yield what a Markdown file's prose breaks."""
    block: list[str] = []
    start, in_code = 1, False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
            line = ""
        if in_code or line.lstrip().startswith(("|", "<")) or line.startswith("    ") and not block:
            line = ""
        begins = re.match(r"\s*(#+|[-*]|\d+\.)\s", line)
        if block and (not line.strip() or begins):
            text = "\n".join(block)
            yield from _words(file, start, text)
            yield from _sentences(file, start, text)
            block = []
        if line.strip():
            if not block:
                start = number
            block.append(re.sub(r"^\s*(#+|[-*]|\d+\.)\s+", "", line))


def of_template(file: str, source: str) -> Iterator[Finding]:
    """Yield what a page template's text breaks: what stands between its tags."""
    # Comments, scripts and statements become empty lines, so that line numbers stay right.
    cut = re.compile(r"\{#.*?#\}|\{%.*?%\}|<script.*?</script>|<style.*?</style>|<!--.*?-->", re.DOTALL)
    text = cut.sub(lambda found: "\n" * found.group().count("\n"), source)
    text = re.sub(r"\{\{.*?\}\}", lambda found: "Code" + "\n" * found.group().count("\n"), text, flags=re.DOTALL)
    # A tag of a line's own words (<b>, <a>, <code>) stands within a sentence; any other tag ends it.
    text = re.sub(r"</?(?:a|abbr|b|bdi|code|em|i|kbd|mark|small|strong|wbr)\b[^<>]*>", _newlines, text)
    line = 1
    for piece in re.split(r"(<[^<>]*>)", text):
        if not piece.startswith("<") and piece.strip():
            yield from _words(file, line, unescape(piece))
            yield from _sentences(file, line, unescape(piece))
        line += piece.count("\n")


def _newlines(found: re.Match[str]) -> str:
    return "\n" * found.group().count("\n")


def unexplained(file: str, source: str, explained: set[str]) -> Iterator[Finding]:
    """Yield the terms of this project that a page uses and the table of words does not explain."""
    plain = re.sub(r"\s+", " ", _without_code(source)).lower()
    for term in TERMS:
        if term not in explained and re.search(rf"\b{term}s?\b", plain):
            yield Finding(file, 1, "term", f"{term!r} is not in the table of words in {WORDS_PAGE}")


def explained_terms() -> set[str]:
    """Return the terms that the table of words explains."""
    table = Path(WORDS_PAGE).read_text(encoding="utf-8").partition("\n## Words\n")[2].partition("\n## ")[0]
    return {term.strip() for row in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) for term in row.split(" / ")}


def _words(file: str, line: int, text: str) -> Iterator[Finding]:
    plain = _without_code(text)
    for found in _WORDS.finditer(re.sub(r"\s", " ", plain)):
        yield Finding(file, line, "word", f"{found.group()!r} in: {_around(plain, found.start())}")


def _sentences(file: str, line: int, text: str) -> Iterator[Finding]:
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", _without_code(text)):
        for sentence in _END.split(re.sub(r"\s+", " ", paragraph).strip()):
            count = len(_WORD.findall(sentence))
            if count > MOST_WORDS:
                yield Finding(file, line, "long", f"{count} words: {sentence[:80]}...")


def _without_code(text: str) -> str:
    """Replace code, links' addresses and parentheses' file names by one word each, keeping line breaks."""
    text = re.sub(r"``?[^`]*``?", "Code", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def _around(text: str, at: int) -> str:
    return re.sub(r"\s+", " ", text[max(at - 30, 0) : at + 40])


def findings() -> list[Finding]:
    """Return everything found in the repository's own text files."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md", "*.html"], capture_output=True, text=True, check=True)
    found: list[Finding] = []
    terms = explained_terms()
    for file in listed.stdout.splitlines():
        path = Path(file)
        if path.is_symlink() or not path.exists():
            continue
        source = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            found += of_python(file, source)
        elif path.suffix == ".html":
            found += of_template(file, source)
        else:
            found += of_markdown(file, source)
            found += unexplained(file, source, terms)
    return found


def folder(file: str) -> str:
    """Return the folder that a file is counted in: a room of the package, or a top-level folder."""
    parts = Path(file).parts
    return "/".join(parts[: 2 if parts[0] == "rhyme_openrlhf" and len(parts) > 2 else 1]) if len(parts) > 1 else "."


def main() -> int:
    """Print findings, or their numbers by folder; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", action="store_true", help="print numbers by folder and rule only")
    parser.add_argument("paths", nargs="*", help="only files whose path begins with one of these")
    arguments = parser.parse_args()
    found = [one for one in findings() if not arguments.paths or one.file.startswith(tuple(arguments.paths))]
    table = Counter((folder(one.file), one.rule) for one in found)
    if arguments.count:
        for room in sorted({name for name, _ in table}):
            print(f"{room:32s}" + "".join(f"{rule:>10s} {table[room, rule]:4d}" for rule in RULES))
        print(f"{len(found)} findings")
    else:
        for one in found:
            print(f"{one.file}:{one.line}: {one.rule}: {one.text}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

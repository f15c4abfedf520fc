"""Copy the parts of pages that stand on several pages: figures and statements of status stand once, in their source.

    python scripts/snippets.py            # name the pages whose copies are old; exit code 1 if there are any
    python scripts/snippets.py --write    # bring the copies up to date

A source marks a part by `<!-- NAME: begin -->` and `<!-- NAME: end -->`. Another page has it between
`<!-- include FILE#NAME: begin -->` and `<!-- include FILE#NAME: end -->`, where FILE is a link to the source. GitHub
and the site show the copies without any plug-in. `tests/docs/test_snippets.py` compares them with their sources.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
INCLUDED = re.compile(r"<!-- include (\S+)#([\w-]+): begin -->\n(.*?)<!-- include \1#\2: end -->", re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(#[^)\s]*)?\)")


def marked(page: Path, name: str) -> str:
    """Return the part of a page that is marked with a name. Raises ValueError without one."""
    found = re.search(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", page.read_text(), re.DOTALL)
    if not found:
        raise ValueError(f"{page.relative_to(ROOT)} has no part between <!-- {name}: begin --> and its end")
    return found[1]


def moved(text: str, source: Path, page: Path) -> str:
    """Return the text of a source with its relative links as the page must write them."""

    def link(found: re.Match[str]) -> str:
        target = (source.parent / found[1]).resolve() if found[1] else source
        return f"]({os.path.relpath(target, page.parent)}{found[2] or ''})"

    return LINK.sub(link, text)


def filled(page: Path) -> str:
    """Return the page's text with each included part as its source has it today."""

    def part(found: re.Match[str]) -> str:
        source = (page.parent / found[1]).resolve()
        mark = f"include {found[1]}#{found[2]}"
        return f"<!-- {mark}: begin -->\n{moved(marked(source, found[2]), source, page)}<!-- {mark}: end -->"

    return INCLUDED.sub(part, page.read_text())


def without_copies(text: str) -> str:
    """Return a page's own text."""
    return INCLUDED.sub("", text)


def main() -> int:
    """Write the copies, or name the pages with old ones; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="bring the copies up to date")
    write = parser.parse_args().write
    old = [page for page in PAGES if filled(page) != page.read_text()]
    for page in old:
        if write:
            page.write_text(filled(page))
        else:
            print(f"{page.relative_to(ROOT)} has an old copy: python scripts/snippets.py --write")
    return 1 if old and not write else 0


if __name__ == "__main__":
    sys.exit(main())

"""Read programs, code, tables and links from pages of Markdown, for the tests of documentation."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_TABLE = re.compile(r"^\|.*\n\|[-:| ]+\|\n((?:\|.*\n?)*)", flags=re.MULTILINE)


def docs() -> list[Path]:
    return sorted(DOCS.glob("*.md"))


def programs(page: Path) -> list[str]:
    """Return the python blocks of a page in order, each padded to its line of the page,
    so that a traceback points there."""
    text = page.read_text()
    blocks = [found for found in _FENCED.finditer(text) if found[1] == "python"]
    return ["\n" * text.count("\n", 0, found.start(2)) + found[2] for found in blocks]


def run(page: Path) -> None:
    """Run the programs of a page one after the other in one module, which torch.compile looks up by its name."""
    torch.use_deterministic_algorithms(False)
    module = ModuleType(f"page_{page.stem}")
    sys.modules[module.__name__] = module  # imports are kept: parts of torch cannot be imported twice
    try:
        for program in programs(page):
            exec(compile(program, str(page), "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]


def prose(page: Path) -> str:
    """Return the text of a page without its fenced blocks."""
    return _FENCED.sub("", page.read_text())


def code(page: Path) -> list[str]:
    """Return all code of a page: fenced blocks, and code spans in the prose."""
    return [found[2] for found in _FENCED.finditer(page.read_text())] + _SPAN.findall(prose(page))


def tables(page: Path) -> list[list[str]]:
    """Return the rows of each table, without its heading."""
    return [found[1].splitlines() for found in _TABLE.finditer(prose(page))]


def repeated_rows(page: Path) -> list[str]:
    """Return rows that occur twice in a table, and pages to which two rows of a table link."""
    counts: list[Counter[str]] = []
    for table in tables(page):
        counts += [
            Counter(table),
            Counter(link for row in table for link in set(_LINK.findall(row)) if link.endswith(".md")),
        ]
    return [repeated for count in counts for repeated, times in count.items() if times > 1]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, by GitHub's rules."""
    names: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page), flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        names.append(re.sub(r"[^\w\- ]", "", shown).replace(" ", "-"))
    return {name if names.index(name) == i else f"{name}-{names[:i].count(name)}" for i, name in enumerate(names)}


def broken_links(page: Path) -> Iterator[str]:
    """Return relative links to a file, or to a heading of a file, that does not exist."""
    for link in _LINK.findall(_SPAN.sub("", prose(page))):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link

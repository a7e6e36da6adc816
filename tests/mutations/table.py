"""The table of the tests that caught the planted faults, in CAUGHT.md; a row stays until its fault changes."""

from __future__ import annotations

import ast
import hashlib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .fault import Fault
from .tree import ROOT

FILE = Path(__file__).with_name("CAUGHT.md")
HEAD = """# What caught the planted faults

`make mutants` writes this table: {caught} of {number} faults were planted, one at a time, and
caught. The last column is a sum of the fault, of the code it is planted in and of its tests: while
it stays the same, the fault is not planted again. Seconds are those of a busy machine.

| fault | file | caught by | seconds | sum |
|---|---|---|---|---|
"""


class Row(NamedTuple):
    """The outcome of a fault."""

    caught_by: str
    """The first test that failed; "" if none did."""
    seconds: int
    sum: str


def sum_of(fault: Fault) -> str:
    """A hash of the fault, and of the code in the file of the fault and in the files of its tests."""
    found = hashlib.sha256(repr(tuple(fault)).encode() + code(ROOT / fault.path).encode())
    for test in sorted({word.partition("::")[0] for word in shlex.split(fault.caught_by) if word.startswith("tests/")}):
        files = [ROOT / test] if test.endswith(".py") else sorted((ROOT / test).rglob("*.py"))
        for file in files:
            found.update(code(file).encode())
    return found.hexdigest()[:8]


def code(file: Path) -> str:
    """The text of a file without comments, docstrings and line breaks: new words do not change what a fault does."""
    text = file.read_text()
    if file.suffix != ".py":
        return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S).split())
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, name, None), list):
                setattr(node, name, [each for each in body if not _is_text(each)])
    return ast.unparse(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def read() -> dict[str, Row]:
    """The rows of the table, by fault."""
    text = FILE.read_text() if FILE.exists() else ""
    rows = re.findall(r"^\| (.+?) \| \S+ \| (?:`(.+?)`|nothing) \| (\d+) \| (\w+) \|$", text, re.M)
    return {name: Row(caught_by, int(seconds), found) for name, caught_by, seconds, found in rows}


def write(rows: Mapping[str, Row], faults: Mapping[str, Fault]) -> None:
    """Write the rows of these faults, in their order, and the names of faults without a row."""
    caught = sum(bool(rows[name].caught_by) for name in faults if name in rows)
    text = HEAD.format(caught=caught, number=len(faults))
    text += "".join(f"{line(name, fault, rows[name])}\n" for name, fault in faults.items() if name in rows)
    left = [name for name in faults if name not in rows]
    FILE.write_text(text + (f"\nNot planted yet: {', '.join(left)}.\n" if left else ""))


def line(name: str, fault: Fault, row: Row) -> str:
    """The text of a row in the table."""
    return (
        f"| {name} | {fault.path} | {f'`{row.caught_by}`' if row.caught_by else 'nothing'} | {row.seconds} | "
        f"{row.sum} |"
    )

"""The pages of docs/: their programs run, their links resolve, and nothing public is left out."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cmab_models
import pytest

import cmab_kernels
from cmab_kernels import distributed, integrations, nn
from cmab_kernels.intention import variants
from cmab_kernels.runtime import backends

from . import pages

MODULES = (cmab_kernels, distributed, integrations, nn, variants, cmab_models)
"""The modules that export public names."""
PAGES = {page.name: page for page in pages.docs()}
# The first imports five packages, the second runs a whole suite, the third translates two programs to ONNX.
SECONDS = {
    "use_it_in.md": 15.0,
    "add_an_operator.md": 10.0,
    "deployment.md": 15.0,
}


@pytest.fixture
def restored_tables() -> Iterator[None]:
    """Remove the entries that a page's program has added to the tables of `backends`."""
    before = [
        (table, dict(table))
        for table in (backends.IMPLEMENTATIONS, backends.OPERATORS, backends._MODULES, backends._PROBLEMS)
    ]
    yield
    for table, entries in before:
        table.clear()
        table.update(entries)  # type: ignore[arg-type]


@pytest.mark.usefixtures("restored_tables")
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if pages.programs(page)])
def test_programs(name: str, threads: Callable[[int], None]) -> None:
    started = time.process_time()
    pages.run(PAGES[name])
    assert time.process_time() - started < SECONDS.get(name, 5.0)


@pytest.mark.parametrize("name", PAGES)
def test_links(name: str) -> None:
    assert not list(pages.broken_links(PAGES[name]))


@pytest.mark.parametrize("page", [pages.README, *PAGES.values()], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_no_table_says_a_thing_twice(page: Path) -> None:
    assert pages.repeated_rows(page) == []


def test_every_page_is_in_the_index() -> None:
    index = pages.prose(pages.DOCS / "README.md")
    assert [name for name in PAGES if name != "README.md" and f"]({name})" not in index] == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = set(re.findall(r"[\w/]+\.md$", (pages.ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert listed == {page.relative_to(pages.DOCS).as_posix() for page in pages.DOCS.rglob("*.md")}


def test_every_public_name_is_documented() -> None:
    words = {word for page in PAGES.values() for part in pages.code(page) for word in re.findall(r"\w+", part)}
    assert {name for module in MODULES for name in module.__all__} - words == set()


def test_every_name_of_the_package_can_be_found() -> None:
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`(.+?)`", _section(pages.DOCS / "README.md", "Find a name")))))
    assert set(cmab_kernels.__all__) - named == set()


def test_every_public_name_is_in_the_api() -> None:
    """The site's API pages list exactly the public names."""
    listed = {
        name
        for page in (pages.DOCS / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    }
    assert listed == {f"{module.__name__}.{name}" for module in MODULES for name in module.__all__}


def test_the_tests_that_pages_name_exist() -> None:
    named = {
        part for page in PAGES.values() for part in pages.code(page) if re.fullmatch(r"tests/[\w/]+\.py(::\w+)?", part)
    }
    assert len(named) > 20
    for name in sorted(named):
        path, _, function = name.partition("::")
        assert (pages.ROOT / path).exists(), name
        assert re.search(rf"^def {function}\b", (pages.ROOT / path).read_text(), flags=re.MULTILINE) or not function, (
            name
        )


def test_docstrings_are_statements() -> None:
    """No docstring is a fragment such as "Of the keys." or "That was measured."."""
    fragments = []
    for folder in ("cmab_kernels", "python", "docs", "bench", "gpu_machine", "tests"):
        for path in sorted((pages.ROOT / folder).rglob("*.py")):
            strings = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Expr))
            said = [
                (at.lineno, at.value) for at in strings if isinstance(at, ast.Constant) and isinstance(at.value, str)
            ]
            fragments += [f"{path.name}:{line}: {text}" for line, text in said if text.startswith(("Of ", "That "))]
    assert fragments == []


# ---- environment variables

READS = re.compile(r"""(?:environ\.get\(|environ\[|getenv\()["'](\w+)["'](?!\] =)""")
"""Reads of a named variable in Python and in C++; assignments do not count."""
READS_SOME = re.compile(r"^.*environ(?:\.get\(|\[)[a-z_].*$", flags=re.MULTILINE)
"""Reads in Python whose name is a variable; the possible names must be in the same line."""
NAMES = re.compile(r"""["']([A-Z]\w+)["']""")
DEFAULTS = re.compile(r"^(\w+) \?=", flags=re.MULTILINE)
"""Assignments in a Makefile that the environment may override."""


def _variables_in(source: str) -> set[str]:
    found = set(READS.findall(source))
    for line in READS_SOME.findall(source):
        assert NAMES.findall(line), f"this test cannot see which environment variables are read: {line}"
        found.update(NAMES.findall(line))
    return found


def _variables_read() -> set[str]:
    found = set(DEFAULTS.findall((pages.ROOT / "Makefile").read_text())) | _variables_in(
        (pages.ROOT / "setup.py").read_text()
    )
    for folder in ("cmab_kernels", "csrc", "tests", "gpu_machine", "bench", "python"):
        for path in (pages.ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".cpp", ".h", ".cu", ".cuh"} and path != Path(__file__):
                found |= _variables_in(path.read_text())
    return found


def _section(page: Path, heading: str) -> str:
    """Return the text under a heading, down to the next heading."""
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert found, f"{page.name} has no section {heading!r}"
    return found[1]


def _first_column(table: str) -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE))


def test_environment_variables_are_those_that_are_read() -> None:
    """The page documents exactly the environment variables that the sources read."""
    documented = _first_column(_section(pages.DOCS / "environment.md", "Read by this project"))
    assert documented == _variables_read()


# ---- the checks find planted errors

FAULTY = {
    "a file": ("[there](nothing.md)", ["nothing.md"]),
    "a heading": ("# A page\n[up](#a-page), [gone](#gone)", ["#gone"]),
    "a heading elsewhere": ("[it](other.md#one-1), [gone](other.md#two)", ["other.md#two"]),
    "code": ("`[a](b.md)` and\n```text\n[c](d.md)\n```\n", []),
}


@pytest.mark.parametrize("page, broken", FAULTY.values(), ids=FAULTY)
def test_a_broken_link_is_seen(tmp_path: Path, page: str, broken: list[str]) -> None:
    (tmp_path / "other.md").write_text("# One\n\n## One\n")
    (tmp_path / "page.md").write_text(page)
    assert list(pages.broken_links(tmp_path / "page.md")) == broken


REPEATED = {
    "a row": ("| a | b |\n|---|---|\n| 1 | 2 |\n| 1 | 3 |\n| 1 | 2 |\n", ["| 1 | 2 |"]),
    "a page": ("| a | b |\n|---|---|\n| 1 | [x](y.md) |\n| 2 | [z](y.md) by hand, [part](y.md#part) |\n", ["y.md"]),
    "two tables": ("| a |\n|---|\n| 1 |\n\n| a |\n|---|\n| 1 |\n", []),
}


@pytest.mark.parametrize("page, repeated", REPEATED.values(), ids=REPEATED)
def test_a_repeated_row_is_seen(tmp_path: Path, page: str, repeated: list[str]) -> None:
    (tmp_path / "page.md").write_text(page)
    assert pages.repeated_rows(tmp_path / "page.md") == repeated


def test_a_failing_program_is_shown_where_it_stands(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\n```\n\n```python\nx += 1\nassert x == 1\n```\n")
    with pytest.raises(AssertionError) as raised:
        pages.run(page)
    assert raised.traceback[-1].lineno + 1 == 9


READ = {
    "python": ('os.environ.get("A", "0") + os.environ["B"] + os.getenv("C")', {"A", "B", "C"}),
    "c++": ('std::getenv("A")', {"A"}),
    "some": ('[os.environ[name] for name in ("A1", "B1")]', {"A1", "B1"}),
    "written": ('os.environ["A"] = "1"; {**os.environ, "B": "1"}', set()),
}


@pytest.mark.parametrize("source, names", READ.values(), ids=READ)
def test_a_read_of_the_environment_is_seen(source: str, names: set[str]) -> None:
    assert _variables_in(source) == names


def test_a_read_by_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(AssertionError, match="cannot see"):
        _variables_in("os.environ[name]")

"""The README's programs run as they stand, and the names in it exist."""

from __future__ import annotations

import re

from cmab_kernels.runtime.backends import SETS

from . import pages


def test_it_is_short() -> None:
    """The README is one page with one program and three short tables; everything longer belongs to docs/."""
    assert len(pages.README.read_text().splitlines()) <= 136
    (program,) = pages.programs(pages.README)
    assert len(program.strip().splitlines()) <= 24
    rows = [len(table) for table in pages.tables(pages.README)]
    assert len(rows) == 3 and max(rows) <= 7


def test_every_family_of_operators_has_a_row() -> None:
    rows = [
        re.findall(r"^\| \[.+?\]\(docs/(\w+)\.md\)", "\n".join(table), re.MULTILINE)
        for table in pages.tables(pages.README)
    ]
    assert sorted(rows[-1]) == sorted({name.split(".")[0] for name in SETS})


def test_programs() -> None:
    pages.run(pages.README)


def test_links() -> None:
    assert not list(pages.broken_links(pages.README))


def test_commands_and_files_exist() -> None:
    text = pages.README.read_text()
    makefile = (pages.ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make (\w+)", text):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target}"
    for name in re.findall(r"`((?:python|bench|cmab_kernels|docs)/[\w/.]+)`", text):
        assert (pages.ROOT / name).exists(), name

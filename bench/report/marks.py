"""Generated text between two marks of a page."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Marks(NamedTuple):
    """The text between `<!-- NAME: begin -->` and `<!-- NAME: end -->` on a page."""

    page: Path
    name: str

    def within(self, text: str, new: str) -> str:
        """Return the text of a page with the text between the marks replaced."""
        begin, end = (f"<!-- {self.name}: {which} -->" for which in ("begin", "end"))
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
            raise SystemExit(f"{self.page.name} must hold one {begin} and one {end} after it")
        return f"{text.partition(begin)[0]}{begin}\n{new}\n{end}{text.partition(end)[2]}"

    def write(self, new: str) -> None:
        self.page.write_text(self.within(self.page.read_text(encoding="utf-8"), new), encoding="utf-8")

    def have(self, new: str) -> bool:
        """Return whether the page has this text between the marks."""
        text = self.page.read_text(encoding="utf-8")
        return self.within(text, new) == text

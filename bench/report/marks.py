"""Generated text between two marks of a page."""

from __future__ import annotations


def put(text: str, new: str, begin: str, end: str, name: str) -> str:
    """Return the text of the page `name` with what stands between the two marks replaced."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise SystemExit(f"{name} must hold one {begin} and one {end} after it")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{new}\n{end}{rest.split(end)[1]}"

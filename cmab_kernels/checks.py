"""How every error of the package reads."""

from __future__ import annotations


def wrong(argument: str, given: str, allowed: str) -> str:
    """Which argument, what was given, what is allowed: «`key` has shape (2, 3): (B, H, N, D) is needed»."""
    return f"`{argument}` {given}: {allowed}"

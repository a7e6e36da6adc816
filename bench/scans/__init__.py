"""The measured cases: a scan is all cases of one public operator or module."""

from __future__ import annotations

from . import (
    attention,
    continual,
    continual_layers,
    continual_modules,
    intention,
    intention_state,
    layers,
    modules,
    nystrom,
    prefix,
    projected,
)
from .case import Case


def all_cases() -> list[Case]:
    """Every case, for the measured device."""
    streams = (continual, continual_modules, continual_layers)
    families = (attention, prefix, projected, modules, layers, intention, intention_state, nystrom, *streams)
    return [case for family in families for case in family.cases()]


def scans() -> dict[str, list[Case]]:
    """Name of a scan -> its cases."""
    found: dict[str, list[Case]] = {}
    for case in all_cases():
        found.setdefault(case.scan, []).append(case)
    return found

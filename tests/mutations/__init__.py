"""The mutation gate: planted faults, each of which the tests must catch on a CPU.

`make mutants`, or `python -m tests.mutations WORD...` for the faults whose name or file holds one of the words, plants
those that are new or have changed since, one at a time, and writes in CAUGHT.md what caught each.
"""

from __future__ import annotations

from . import of_attention, of_intention, of_layers, of_modules, of_nystrom
from .fault import Fault

FAULTS: dict[str, Fault] = (
    of_attention.FAULTS | of_intention.FAULTS | of_nystrom.FAULTS | of_layers.FAULTS | of_modules.FAULTS
)
"""The name of each fault -> the fault."""

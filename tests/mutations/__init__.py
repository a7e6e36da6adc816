"""The mutation gate: planted faults, each of which the tests must catch on a CPU.

`make mutants` plants the faults that are new or have changed, one at a time, and writes in CAUGHT.md which test caught
each. `python -m tests.mutations WORD...` does this only for faults whose name or file holds one of the words.
"""

from __future__ import annotations

from . import of_attention, of_intention, of_layers, of_modules, of_nystrom
from .fault import Fault

FAULTS: dict[str, Fault] = (
    of_attention.FAULTS | of_intention.FAULTS | of_nystrom.FAULTS | of_layers.FAULTS | of_modules.FAULTS
)
"""The name of each fault -> the fault."""

"""Replace the modules of a model by those of this package, and say what became of each."""

from .modules import replace_modules
from .report import Replacement, Replacements

__all__ = [
    "Replacement",
    "Replacements",
    "replace_modules",
]

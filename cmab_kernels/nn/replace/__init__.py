"""Replace the modules of a model by those of this package, and report the result for each module."""

from .modules import replace_modules
from .report import Replacement, Replacements

__all__ = [
    "Replacement",
    "Replacements",
    "replace_modules",
]

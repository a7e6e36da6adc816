"""The numbers that Python, C++ and CUDA share. This file imports nothing: setup.py runs it, and defines CMAB_<name> for csrc."""

SCHEDULE = 1024
"""Tokens after which a row of the sums of continual attention is recomputed from the window, whatever its guard says."""

ILL_CONDITIONED = 1e-2
"""A solution is flagged where the condition number times the dtype's eps exceeds this: two digits are left at most."""

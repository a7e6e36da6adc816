"""The numbers that Python, C++ and CUDA share. This file imports nothing: setup.py runs it, and defines CMAB_<name> for
csrc."""

SCHEDULE = 1024
"""After every SCHEDULE tokens, a row of the sums of continual attention is recomputed from the window, even if its
guard does not require it."""

INFO_SOUND, INFO_NOT_POSITIVE_DEFINITE, INFO_ILL_CONDITIONED = 0, 1, 2
"""The values of `info` for a solved system. A negative penalty counts as not positive definite."""

ILL_CONDITIONED = 1e-2
"""A solution is `INFO_ILL_CONDITIONED` if the condition number times the dtype's eps exceeds this number: two digits
are left at most."""

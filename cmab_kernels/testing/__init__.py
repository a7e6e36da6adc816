"""Tools for tests of an operator: accuracy bounds, oracles, poisoned and guarded memory, layouts, properties of
compiled kernels.

Nothing here is imported by `import cmab_kernels`. `cubin` needs Triton, and running a suite needs pytest.
"""

from .bounds import LAWS, STREAMS, bound, lapack_ratio, row_error
from .interpreter import INTERPRETING, run_in_interpreter
from .layouts import LAYOUTS, lazily_negated
from .memory import between_margins, guarded_results, poisoned_memory
from .suite import Measured, OperatorSuite, failures

__all__ = [
    "INTERPRETING",
    "LAWS",
    "LAYOUTS",
    "STREAMS",
    "Measured",
    "OperatorSuite",
    "between_margins",
    "bound",
    "failures",
    "guarded_results",
    "lapack_ratio",
    "lazily_negated",
    "poisoned_memory",
    "row_error",
    "run_in_interpreter",
]

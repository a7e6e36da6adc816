"""What the kernels of layers can run."""

import math

from torch import Tensor

from ...attention.projected.triton.launch import WIDEST_ROW
from ...runtime.triton_launch import MOST_ROWS, WIDEST, device_problem


def unsupported(x: Tensor, *others: Tensor) -> str | None:
    """The reason why Triton's kernels cannot run these inputs, as a phrase; None if they can.

    The `others`, of an attention layer alone, are its context, and the matrices of queries and of values by heads (H,
    D, C).
    """
    for rows in (x, *others[:1]):
        if rows.shape[-1] > WIDEST_ROW:
            return f"its rows are at most {WIDEST_ROW} wide, and are {rows.shape[-1]} wide"
        if math.prod(rows.shape[:-1]) > MOST_ROWS:
            return "it counts rows in 32 bits"
    for heads in others[1:]:
        if heads.shape[-2] > WIDEST:
            return f"its heads are at most {WIDEST} wide, and are {heads.shape[-2]} wide"
    return device_problem(x)

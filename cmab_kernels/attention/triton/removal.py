# mypy: disable-error-code="no-untyped-def"
"""A state without some of its keys: one launch subtracts their state. `subtract_state` documents the formulas."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.triton_launch import kernel, on_device
from ...runtime.triton_rows import load_tile, rows_at
from ..contract import Attention
from ..state import FAR_BELOW, SURE_ROUNDING
from .forward import attention_forward


@kernel("state_out", "state_lse")
def _subtract(
    state_out,
    state_lse,
    part_out,
    part_lse,
    out,
    lse,
    reliable,
    rows: tl.int32,
    limits: tl.float64,
    E: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The state (rows, E) without a part of it, and whether each row is reliable.

    `limits` are the least share that must be left, and two bounds within which rounding cannot matter: the size of the
    logarithm per share left, and the distance below the logarithm, as a share of its size.
    """
    E_PAD: tl.constexpr = triton.next_power_of_2(E)
    least, largest, far = limits
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    whole = tl.load(state_lse + row, mask=inside, other=float("-inf"))
    removed = tl.load(part_lse + row, mask=inside, other=float("-inf"))
    nothing_there, nothing_removed = whole == float("-inf"), removed == float("-inf")
    whole = tl.where(whole == float("inf"), float("nan"), whole)
    gap = removed - tl.where(nothing_there, 0.0, whole)
    share = tl.exp(tl.where(gap > 0, 0.0, gap))
    left = 1.0 - share
    gone = nothing_there | (left <= 0)
    share = tl.where(gone, 0.0, share)
    rounded = 1.0 - share  # the rounding error cancels: log(1 - share) keeps the digits of a small share
    rounded_share = tl.where(rounded == 1.0, 1.0, 1.0 - rounded)
    log_left = tl.where(rounded == 1.0, -share, tl.log(rounded) * (share / rounded_share))
    tl.store(lse + row, tl.where(gone, float("-inf"), whole + log_left), mask=inside)
    size = tl.abs(whole)
    sure = (size <= largest * left) | (gap < -far * size)
    kept = nothing_removed & (left == left)
    tl.store(reliable + row, (kept | (sure & (left >= least) & ~nothing_there)).to(tl.uint8), mask=inside)

    growth = tl.exp(-log_left)
    whole_out = load_tile(rows_at(state_out, row, E, E_PAD), inside, E).to(tl.float64)
    taken = load_tile(rows_at(part_out, row, E, E_PAD), inside, E).to(tl.float64)
    result = growth[:, None] * whole_out - (growth * share)[:, None] * taken
    result = tl.where(gone[:, None], 0.0, result).to(out.dtype.element_ty)
    tl.store(rows_at(out, row, E, E_PAD), result, mask=inside[:, None] & (tl.arange(0, E_PAD) < E)[None, :])


def attention_removal(inputs: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, lse, reliable): the incoming state without these keys."""
    query, state_out, state_lse = inputs.query, inputs.state_out, inputs.state_lse
    assert state_out is not None and state_lse is not None
    part_out, part_lse = attention_forward(inputs._replace(state_out=None, state_lse=None))
    out, lse, reliable = (
        torch.empty_like(part_out),
        torch.empty_like(part_lse),
        torch.empty_like(part_lse, dtype=torch.bool),
    )
    eps, E = torch.finfo(out.dtype).eps, out.shape[-1]
    rows = max(512 // triton.next_power_of_2(E), 1)
    with on_device(query):
        _subtract(
            -(-lse.numel() // rows),
            state_out.contiguous(),
            state_lse.contiguous(),
            part_out,
            part_lse,
            out,
            lse,
            reliable.view(torch.uint8),
            lse.numel(),
            (eps**0.5, SURE_ROUNDING / eps, FAR_BELOW),
            E=E,
            ROWS=rows,
        )
    return out, lse, reliable
